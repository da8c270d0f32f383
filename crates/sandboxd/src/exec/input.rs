//! Standard input: a pipe or a terminal that several streams may feed.
//!
//! Every stream keeps what it has not delivered in its own window, so nothing is buffered here, and a command that
//! never reads holds back those who write to it and nobody else. Pieces of different streams do not mix: a turn is
//! taken for each. The end of input is put behind what every stream has received so far.

use super::tty;
use crate::conn::{Gone, Input as Piece, Stream};
use crate::errors::{Code, Failure};
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, Notify};
use tokio::time::sleep;

/// Streams that feed one command at the same time. Each may wait with a window of bytes.
const MAX_WRITERS: usize = 16;
/// How often one is asked that has been hung up.
const HUNG_UP: Duration = Duration::from_millis(20);

enum Target {
    None,
    Pipe(Rc<AsyncFd<OwnedFd>>),
    Terminal(Rc<AsyncFd<OwnedFd>>),
}

pub struct Input {
    target: RefCell<Target>,
    writers: RefCell<Vec<Rc<Stream>>>,
    /// No stream may begin to write any more.
    closing: Cell<bool>,
    turn: Mutex<()>,
    over: Notify,
}

impl Input {
    fn new(target: Target) -> Rc<Input> {
        Rc::new(Input {
            target: RefCell::new(target),
            writers: RefCell::default(),
            closing: Cell::new(false),
            turn: Mutex::new(()),
            over: Notify::new(),
        })
    }

    pub fn none() -> Rc<Input> {
        Input::new(Target::None)
    }

    pub fn pipe(fd: AsyncFd<OwnedFd>) -> Rc<Input> {
        Input::new(Target::Pipe(Rc::new(fd)))
    }

    pub fn to_terminal(master: Rc<AsyncFd<OwnedFd>>) -> Rc<Input> {
        Input::new(Target::Terminal(master))
    }

    /// The terminal while the command has one.
    pub fn terminal(&self) -> Option<Rc<AsyncFd<OwnedFd>>> {
        match &*self.target.borrow() {
            Target::Terminal(master) => Some(master.clone()),
            Target::None | Target::Pipe(_) => None,
        }
    }

    fn descriptor(&self) -> Option<Rc<AsyncFd<OwnedFd>>> {
        match &*self.target.borrow() {
            Target::Pipe(fd) | Target::Terminal(fd) => Some(fd.clone()),
            Target::None => None,
        }
    }

    /// The command has ended, or nobody reads: whoever writes is answered at once.
    pub fn shut(&self) {
        self.closing.set(true);
        *self.target.borrow_mut() = Target::None;
        self.over.notify_waiters();
    }

    /// End standard input behind what has been received so far.
    pub fn close(self: &Rc<Input>) -> Result<(), Failure> {
        if self.closing.get() || self.descriptor().is_none() {
            return Err(closed());
        }
        self.closing.set(true);
        for writer in self.writers.borrow().iter() {
            writer.finish_input();
        }
        if self.writers.borrow().is_empty() {
            self.finish();
        }
        Ok(())
    }

    /// Everything was delivered: say so to the command.
    fn finish(self: &Rc<Input>) {
        if let Some(master) = self.terminal() {
            // The character has to wait for its place like any other, but nobody waits for it.
            let input = self.clone();
            tokio::task::spawn_local(async move {
                let end = tty::end_of_file(master.get_ref().as_fd());
                let _ = input.deliver(&[end]).await;
            });
        } else {
            self.shut();
        }
    }

    /// Deliver everything that comes on a stream, and answer how much was taken. `ends` says that the end of the
    /// stream's input is the end of the command's.
    pub async fn feed(self: &Rc<Input>, stream: &Rc<Stream>, ends: bool) -> Result<u64, Fault> {
        if self.closing.get() || self.descriptor().is_none() {
            return Err(Fault::Failed(closed()));
        }
        if self.writers.borrow().len() >= MAX_WRITERS {
            let text = format!("{MAX_WRITERS} streams are writing already");
            return Err(Fault::Failed(Failure::new(Code::Exhausted, text)));
        }
        self.writers.borrow_mut().push(stream.clone());
        let writing = Writing { input: self, stream };
        let result = self.pass_on(stream, ends).await;
        drop(writing);
        if ends && result.is_ok() {
            let _ = self.close();
        }
        result
    }

    /// A command that ends while all that came is with it has taken that much. To the stream that started it this is a
    /// failure like any other: more of it is to be let go by.
    async fn pass_on(&self, stream: &Rc<Stream>, ends: bool) -> Result<u64, Fault> {
        let mut taken = 0;
        loop {
            let piece = tokio::select! {
                biased;
                piece = stream.untaken_input() => piece,
                () = self.over.notified() => return match taken {
                    1.. if !ends => Ok(taken),
                    _ => Err(Fault::Failed(closed())),
                },
            };
            match piece {
                Ok(Piece::Data(bytes)) => {
                    self.deliver(&bytes).await.map_err(Fault::Failed)?;
                    stream.taken(bytes.len());
                    taken += bytes.len() as u64;
                }
                Ok(Piece::Eof) => return Ok(taken),
                Err(Gone) => return Err(Fault::Gone),
            }
        }
    }

    async fn deliver(&self, mut bytes: &[u8]) -> Result<(), Failure> {
        let over = self.over.notified();
        tokio::pin!(over);
        over.as_mut().enable();
        let _turn = tokio::select! {
            turn = self.turn.lock() => turn,
            () = &mut over => return Err(closed()),
        };
        while !bytes.is_empty() {
            let Some(fd) = self.descriptor() else {
                return Err(closed());
            };
            match rustix::io::write(fd.get_ref(), bytes) {
                Ok(count @ 1..) => bytes = &bytes[count.min(bytes.len())..],
                Err(Errno::INTR) => {}
                Ok(_) | Err(Errno::AGAIN) => tokio::select! {
                    () = writable(&fd) => {}
                    () = &mut over => return Err(closed()),
                },
                Err(_) => {
                    // The command does not read any more. A terminal may be opened again.
                    if self.terminal().is_none() {
                        self.shut();
                    }
                    return Err(closed());
                }
            }
        }
        Ok(())
    }
}

/// Wait until it is worth trying to write again.
async fn writable(fd: &AsyncFd<OwnedFd>) {
    let hung_up = match fd.writable().await {
        Ok(mut ready) => {
            ready.clear_ready();
            ready.ready().is_write_closed()
        }
        Err(_) => true,
    };
    // A terminal that was hung up says for ever that it is ready, and takes nothing.
    if hung_up {
        sleep(HUNG_UP).await;
    }
}

/// A stream among the writers, until it is done or given up.
struct Writing<'a> {
    input: &'a Rc<Input>,
    stream: &'a Rc<Stream>,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut writers = self.input.writers.borrow_mut();
        writers.retain(|other| !Rc::ptr_eq(other, self.stream));
        let last = writers.is_empty();
        drop(writers);
        if last && self.input.closing.get() && self.input.descriptor().is_some() {
            self.input.finish();
        }
    }
}

/// Why a stream does not feed a command any more.
pub enum Fault {
    Failed(Failure),
    /// The stream is over for its peer.
    Gone,
}

fn closed() -> Failure {
    Failure::new(Code::NotFound, "the command takes no input")
}
