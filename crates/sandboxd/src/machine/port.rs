//! The virtio-serial port that is a machine's only way to the host, as a socket for one connection after the other.
//!
//! The kernel gives 4 KiB at a time at most and takes 32, so reads and writes are repeated until it has or takes no
//! more. Whether a host is there is known late and out of order (its coming and going are other messages than its bytes),
//! so a read that finds nobody only counts when nobody has come a second later, and a beginning alone ends a connection
//! at once. The port is watched through an epoll instance of its own: a port that was hung up once is ready for ever to
//! the asynchronous runtime, which takes a hang-up as final.

use super::beginning::{Beginnings, MAGIC, NONCE};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::OwnedFd;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

/// What is read before it is looked at.
const INBOX: usize = 128 << 10;
/// What one call may write.
const BURST: usize = 256 << 10;
/// A host that is gone for so long is gone.
const HANG_UP: Duration = Duration::from_secs(1);
/// A client that does not take 32 bytes in this time may begin again.
const ECHO_TIME: Duration = Duration::from_secs(10);

struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    beginnings: Beginnings,
    began: Option<[u8; NONCE]>,
}

pub struct Port {
    epoll: AsyncFd<OwnedFd>,
    file: OwnedFd,
    inbox: RefCell<Inbox>,
    readable: Cell<bool>,
    writable: Cell<bool>,
    nobody: Cell<bool>,
    hung_up: Notify,
}

impl Port {
    /// Take a port that was opened not to block.
    pub fn new(file: OwnedFd) -> io::Result<Port> {
        let watch = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&watch, &file, epoll::EventData::new_u64(0), flags)?;
        Ok(Port {
            // SAFETY: an OwnedFd is open, stays the same, and is owned by the AsyncFd until that is dropped.
            epoll: unsafe { AsyncFd::register_with_interest(watch, Interest::READABLE)? },
            file,
            inbox: RefCell::new(Inbox {
                bytes: vec![0; INBOX],
                start: 0,
                end: 0,
                beginnings: Beginnings::new(),
                began: None,
            }),
            readable: Cell::new(true),
            writable: Cell::new(true),
            nobody: Cell::new(false),
            hung_up: Notify::new(),
        })
    }

    /// Wait for the next beginning, whatever was before it.
    pub async fn begin(&self) -> io::Result<[u8; NONCE]> {
        if self.is_current() {
            self.inbox.borrow_mut().beginnings.close();
        }
        loop {
            if let Some(nonce) = self.inbox.borrow_mut().began.take() {
                return Ok(nonce);
            }
            self.readable().await?;
            self.advance(&mut []);
        }
    }

    /// Answer a beginning, unless the client is gone.
    pub async fn echo(&self, nonce: [u8; NONCE]) -> io::Result<()> {
        let answer = [&MAGIC[..], &nonce].concat();
        let write = async {
            let mut rest = &answer[..];
            while !rest.is_empty() {
                match self.try_write_vectored(&[IoSlice::new(rest)]) {
                    Ok(count) => rest = &rest[count..],
                    Err(error) if error.kind() == ErrorKind::WouldBlock => self.writable().await?,
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        };
        timeout(ECHO_TIME, write).await.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
    }

    pub async fn readable(&self) -> io::Result<()> {
        while self.inbox.borrow().start == self.inbox.borrow().end && !self.readable.get() {
            self.look().await?;
        }
        Ok(())
    }

    pub async fn writable(&self) -> io::Result<()> {
        while !self.writable.get() {
            self.look().await?;
        }
        Ok(())
    }

    async fn look(&self) -> io::Result<()> {
        let mut guard = self.epoll.readable().await?;
        let mut events = [const { std::mem::MaybeUninit::uninit() }; 4];
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let (events, _) = epoll::wait(guard.get_inner(), &mut events, Some(&none))?;
        if !events.is_empty() {
            self.readable.set(true);
            self.writable.set(true);
        }
        guard.clear_ready();
        Ok(())
    }

    /// The connection's next bytes, or 0 when another has begun.
    pub fn try_read(&self, out: &mut [u8]) -> io::Result<usize> {
        if !self.is_current() {
            return Ok(0);
        }
        let count = self.advance(out);
        if count == 0 && self.is_current() {
            return Err(ErrorKind::WouldBlock.into());
        }
        Ok(count)
    }

    /// The connection that was served last has neither ended nor been followed by another.
    fn is_current(&self) -> bool {
        let inbox = self.inbox.borrow();
        inbox.beginnings.is_open() && inbox.began.is_none()
    }

    /// Read what there is and look through it until something has begun or `out` is full; answer how much is in it.
    fn advance(&self, out: &mut [u8]) -> usize {
        let mut inbox = self.inbox.borrow_mut();
        let inbox = &mut *inbox;
        if inbox.start == inbox.end {
            (inbox.start, inbox.end) = (0, self.fill(&mut inbox.bytes));
        }
        let mut produced = 0;
        while inbox.start < inbox.end {
            let taken = inbox.beginnings.take(&inbox.bytes[inbox.start..inbox.end], &mut out[produced..]);
            inbox.start += taken.consumed;
            produced += taken.produced;
            if taken.began.is_some() {
                inbox.began = taken.began;
                // The bytes before it belong to nobody.
                return 0;
            }
            if taken.consumed == 0 {
                break;
            }
        }
        produced
    }

    fn fill(&self, bytes: &mut [u8]) -> usize {
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::io::read(&self.file, &mut bytes[filled..]) {
                Ok(0) => {
                    self.readable.set(false);
                    if !self.nobody.replace(true) {
                        self.hung_up.notify_one();
                    }
                    break;
                }
                Ok(count) => {
                    self.nobody.set(false);
                    filled += count;
                }
                Err(Errno::INTR) => {}
                Err(_) => {
                    self.nobody.set(false);
                    self.readable.set(false);
                    break;
                }
            }
        }
        filled
    }

    pub fn try_write_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if !self.is_current() {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let mut written = 0;
        'slices: for slice in slices {
            let mut rest = &slice[..];
            while !rest.is_empty() && written < BURST {
                match rustix::io::write(&self.file, rest) {
                    Ok(0) => break 'slices,
                    Ok(count) => {
                        rest = &rest[count..];
                        written += count;
                    }
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break 'slices,
                    Err(errno) if written == 0 => return Err(errno.into()),
                    Err(_) => break 'slices,
                }
            }
        }
        if written > 0 {
            return Ok(written);
        }
        self.writable.set(false);
        Err(ErrorKind::WouldBlock.into())
    }

    /// Wait until no host has been there for a while.
    pub async fn abandoned(&self) {
        loop {
            while !self.nobody.get() {
                self.hung_up.notified().await;
            }
            sleep(HANG_UP).await;
            let mut look = [PollFd::new(&self.file, PollFlags::IN)];
            let none = Timespec { tv_sec: 0, tv_nsec: 0 };
            if poll(&mut look, Some(&none)).is_ok() && look[0].revents().contains(PollFlags::HUP) {
                return;
            }
            self.nobody.set(false);
            self.readable.set(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    /// A port and the host's end of it.
    fn port() -> (Port, UnixStream) {
        let (inside, outside) = UnixStream::pair().unwrap();
        inside.set_nonblocking(true).unwrap();
        (Port::new(inside.into()).unwrap(), outside)
    }

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
    }

    async fn read(port: &Port) -> Vec<u8> {
        let mut bytes = [0; 64];
        loop {
            port.readable().await.unwrap();
            match port.try_read(&mut bytes) {
                Ok(count) => return bytes[..count].to_vec(),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
    }

    #[test]
    fn a_beginning_is_answered_and_the_next_one_ends_what_it_began() {
        run(async {
            let (port, mut host) = port();
            host.write_all(b"left over").unwrap();
            host.write_all(&[&MAGIC[..], &[1; NONCE], b"hello"].concat()).unwrap();
            assert_eq!(port.begin().await.unwrap(), [1; NONCE]);
            port.echo([1; NONCE]).await.unwrap();
            let mut echo = [0; 32];
            host.read_exact(&mut echo).unwrap();
            assert_eq!(echo[..], [&MAGIC[..], &[1; NONCE]].concat());
            assert_eq!(read(&port).await, b"hello");
            assert_eq!(port.try_write_vectored(&[IoSlice::new(b"a"), IoSlice::new(b"bc")]).unwrap(), 3);
            host.write_all(&[b"half", &MAGIC[..], &[2; NONCE], b"again"].concat()).unwrap();
            assert_eq!(read(&port).await, b"");
            // What the earlier connection still had to say is not said into the next.
            let refused = port.try_write_vectored(&[IoSlice::new(b"late")]).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::BrokenPipe);
            assert_eq!(port.begin().await.unwrap(), [2; NONCE]);
            assert_eq!(read(&port).await, b"again");
            host.set_nonblocking(true).unwrap();
            let mut said = [0; 64];
            assert_eq!(host.read(&mut said).unwrap(), 3);
        });
    }

    #[test]
    fn a_connection_that_ended_by_itself_is_over() {
        run(async {
            let (port, mut host) = port();
            host.write_all(&[&MAGIC[..], &[1; NONCE], b"something"].concat()).unwrap();
            port.begin().await.unwrap();
            host.write_all(&[&b" wrong"[..], &MAGIC[..], &[2; NONCE]].concat()).unwrap();
            assert_eq!(port.begin().await.unwrap(), [2; NONCE]);
        });
    }

    #[test]
    fn a_host_that_takes_nothing_is_waited_for() {
        run(async {
            let (port, mut host) = port();
            host.write_all(&[&MAGIC[..], &[1; NONCE]].concat()).unwrap();
            port.begin().await.unwrap();
            let piece = vec![7; BURST];
            let mut written = 0;
            let blocked = loop {
                match port.try_write_vectored(&[IoSlice::new(&piece)]) {
                    Ok(count) => written += count,
                    Err(error) => break error.kind(),
                }
            };
            assert_eq!(blocked, ErrorKind::WouldBlock);
            let mut seen = vec![0; written];
            host.read_exact(&mut seen).unwrap();
            port.writable().await.unwrap();
            assert!(port.try_write_vectored(&[IoSlice::new(&piece)]).unwrap() > 0);
        });
    }

    #[test]
    fn a_host_that_has_gone_for_good_is_noticed() {
        run(async {
            let (port, mut host) = port();
            host.write_all(&[&MAGIC[..], &[1; NONCE]].concat()).unwrap();
            port.begin().await.unwrap();
            drop(host);
            tokio::select! {
                () = port.abandoned() => {}
                () = async { loop { let _ = port.try_read(&mut [0; 8]); port.readable().await.unwrap(); } } => {}
            }
        });
    }
}
