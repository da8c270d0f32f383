//! A port or a socket inside, carried over a stream.
//!
//! A unix socket is opened by a thread that is the sandbox user, so its own permissions count; no link of `/proc`
//! leads anywhere. The daemon's own socket is refused on top of that. Each direction ends by itself: bytes wait for
//! the other side's credit or its socket, and nothing is buffered here.

use crate::conn::{Fate, Gone, Input, Stream};
use crate::daemon::{Daemon, SCRATCH};
use crate::errors::{Code, Failure};
use crate::fsops::{self, Answer};
use crate::lookup;
use crate::pack::MapWriter;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, getpeername, socket_with,
};
use std::cell::Cell;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::pin::pin;
use std::time::Duration;
use tokio::net::{TcpStream, UnixStream};

/// A listener that does not accept answers nothing at all when its queue is full.
const CONNECT_TIME: Duration = Duration::from_secs(10);

pub enum Place {
    Port(u16),
    Path(Vec<u8>),
}

enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    async fn readable(&self) -> io::Result<()> {
        match self {
            Socket::Tcp(socket) => socket.readable().await,
            Socket::Unix(socket) => socket.readable().await,
        }
    }

    async fn writable(&self) -> io::Result<()> {
        match self {
            Socket::Tcp(socket) => socket.writable().await,
            Socket::Unix(socket) => socket.writable().await,
        }
    }

    fn try_read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(socket) => socket.try_read(bytes),
            Socket::Unix(socket) => socket.try_read(bytes),
        }
    }

    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(socket) => socket.try_write(bytes),
            Socket::Unix(socket) => socket.try_write(bytes),
        }
    }

    fn end_writing(&self) {
        let fd = match self {
            Socket::Tcp(socket) => socket.as_fd(),
            Socket::Unix(socket) => socket.as_fd(),
        };
        // A connection that is gone has no end to be told.
        let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
    }
}

pub async fn dial(daemon: &Daemon, stream: &Stream, place: Place) -> Answer {
    let connecting = async {
        match place {
            Place::Port(port) => by_port(port).await,
            Place::Path(path) => by_path(daemon, path).await,
        }
    };
    let socket = tokio::select! {
        socket = connecting => socket?,
        () = gone(stream) => return Ok(None),
        () = tokio::time::sleep(CONNECT_TIME) => {
            return Err(Failure::new(Code::Exhausted, "the listener takes no connection"));
        }
    };
    if stream.note(&MapWriter::new(1).bool("connected", true).done()).await.is_err() {
        return Ok(None);
    }
    carry(daemon, stream, &socket).await
}

async fn gone(stream: &Stream) {
    while stream.fate() == Fate::Open {
        stream.changed().await;
    }
}

fn refused(error: &io::Error) -> Failure {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => Failure::new(Code::NotFound, "nobody listens there"),
        Some(errno) => Errno::from_raw_os_error(errno).into(),
        None => Failure::new(Code::Internal, error.to_string()),
    }
}

async fn by_port(port: u16) -> Result<Socket, Failure> {
    let mut last = match TcpStream::connect(("127.0.0.1", port)).await {
        Ok(socket) => return Ok(Socket::Tcp(socket)),
        Err(error) => error,
    };
    match TcpStream::connect(("::1", port)).await {
        Ok(socket) => return Ok(Socket::Tcp(socket)),
        // A sandbox without IPv6 has its answer already.
        Err(error) if error.kind() != ErrorKind::ConnectionRefused => {}
        Err(error) => last = error,
    }
    Err(refused(&last))
}

async fn by_path(daemon: &Daemon, path: Vec<u8>) -> Result<Socket, Failure> {
    let socket = daemon.files.run(move || connect_path(&path)).await?;
    if daemon.address.is_some() && getpeername(&socket)? == daemon.address {
        return Err(Failure::new(Code::Permission, "the daemon's own socket"));
    }
    let socket = std::os::unix::net::UnixStream::from(socket);
    let socket = UnixStream::from_std(socket).map_err(|error| refused(&error))?;
    Ok(Socket::Unix(socket))
}

/// Connect by an open descriptor, since a socket's address takes 107 bytes of a path and no flags.
fn connect_path(path: &[u8]) -> Result<OwnedFd, Failure> {
    let place = lookup::open(path, OFlags::PATH)?;
    if !fsops::kind_of(&rustix::fs::fstat(&place)?).is_socket() {
        return Err(Failure::invalid("not a socket"));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", place.as_raw_fd()))?;
    match connect(&socket, &address) {
        Ok(()) => Ok(socket),
        Err(Errno::CONNREFUSED) => Err(Failure::new(Code::NotFound, "nobody listens there")),
        Err(Errno::PROTOTYPE) => Err(Failure::invalid("not a socket for streams")),
        Err(Errno::AGAIN) => Err(Failure::new(Code::Exhausted, "the listener takes no connection")),
        Err(errno) => Err(errno.into()),
    }
}

/// What became of a direction.
enum Over {
    Ended,
    /// The other side has broken the connection.
    Reset,
}

#[derive(Default)]
struct Counts {
    sent: Cell<u64>,
    received: Cell<u64>,
}

async fn carry(daemon: &Daemon, stream: &Stream, socket: &Socket) -> Answer {
    let counts = Counts::default();
    let mut up = pin!(send(stream, socket, &counts));
    let mut down = pin!(receive(daemon, stream, socket, &counts));
    let (mut up_over, mut down_over, mut reset) = (false, false, false);
    while !(up_over && down_over) {
        let result = tokio::select! {
            result = &mut up, if !up_over => {
                up_over = true;
                result
            }
            result = &mut down, if !down_over => {
                down_over = true;
                // Whoever breaks the connection takes nothing more either.
                up_over |= matches!(result, Ok(Over::Reset));
                result
            }
            () = stream.changed(), if down_over => match stream.fate() {
                Fate::Open => continue,
                Fate::Reset | Fate::Lost => Err(Gone),
            }
        };
        match result {
            Ok(Over::Ended) => {}
            Ok(Over::Reset) => reset = true,
            Err(Gone) => return Ok(None),
        }
    }
    let map = MapWriter::new(2 + u32::from(reset));
    let map = map.uint("sent", counts.sent.get()).uint("received", counts.received.get());
    Ok(Some(if reset { map.bool("reset", true) } else { map }.done()))
}

/// From the client into the socket.
async fn send(stream: &Stream, socket: &Socket, counts: &Counts) -> Result<Over, Gone> {
    loop {
        let bytes = match stream.untaken_input().await? {
            Input::Data(bytes) => bytes,
            Input::Eof => {
                socket.end_writing();
                return Ok(Over::Ended);
            }
        };
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match socket.try_write(rest) {
                Ok(count) => {
                    counts.sent.set(counts.sent.get() + count as u64);
                    rest = &rest[count..];
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if socket.writable().await.is_err() {
                        return Ok(Over::Reset);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Ok(Over::Reset),
            }
        }
        stream.taken(bytes.len());
    }
}

/// From the socket to the client.
async fn receive(daemon: &Daemon, stream: &Stream, socket: &Socket, counts: &Counts) -> Result<Over, Gone> {
    loop {
        let room = stream.wait_room(2).await?;
        let read = {
            let mut scratch = daemon.scratch.borrow_mut();
            let read = socket.try_read(&mut scratch[..(room - 1).min(SCRATCH)]);
            if let Ok(count @ 1..) = read {
                stream.send(1, &scratch[..count]);
            }
            read
        };
        match read {
            Ok(0) => {
                stream.eof(1);
                return Ok(Over::Ended);
            }
            Ok(count) => {
                counts.received.set(counts.received.get() + count as u64);
                tokio::task::yield_now().await;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => tokio::select! {
                ready = socket.readable() => if ready.is_err() {
                    return Ok(Over::Reset);
                },
                () = stream.changed() => {}
            },
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Ok(Over::Reset),
        }
    }
}
