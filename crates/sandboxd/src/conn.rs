//! One connection: the asynchronous driver around the wire's core.
//!
//! The reader feeds the core and hands events to the tasks of the streams; the writer empties one queue. What
//! bounds memory: bytes towards the peer wait for its credit and for room in the queue (tasks stop producing at
//! [`QUEUE_HIGH`]), and a peer that never reads is itself no longer read at [`QUEUE_FULL`].

use crate::daemon::Daemon;
use crate::transport::Transport;
use crate::wire::{Connection, Event};
use crate::{machine, ops};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::future::pending;
use std::io::{self, IoSlice};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

const QUEUE_HIGH: usize = 1 << 20;
const QUEUE_FULL: usize = 4 << 20;
/// Small frames are put together up to this size.
const COALESCE: usize = 16 << 10;
const HELLO_TIME: Duration = Duration::from_secs(10);
/// How long a last word may take.
const FAREWELL_TIME: Duration = Duration::from_secs(1);

/// What became of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Open,
    /// The peer closed it: stop.
    Reset,
    /// The connection is gone.
    Lost,
}

/// A stream that is over for its peer, so that its operation may as well stop.
#[derive(Debug)]
pub struct Gone;

pub enum Input {
    Data(Vec<u8>),
    Eof,
}

/// A stream as its operation sees it.
pub struct Stream {
    pub id: u32,
    conn: Rc<Conn>,
    fate: Cell<Fate>,
    /// Nothing of the peer's data is wanted.
    deaf: Cell<bool>,
    input: RefCell<VecDeque<Input>>,
    arrived: Notify,
    wake: Notify,
}

impl Stream {
    pub fn fate(&self) -> Fate {
        self.fate.get()
    }

    /// Wait until something about the stream is different: credit, room, its fate. One task alone may wait.
    pub async fn changed(&self) {
        self.wake.notified().await;
    }

    /// How much DATA payload may be sent at this moment.
    pub fn room(&self) -> usize {
        if self.conn.queued.get() >= QUEUE_HIGH {
            self.conn.starved.set(true);
            return 0;
        }
        self.conn.core.borrow().credit(self.id)
    }

    /// Wait for room for a payload of at least `least` bytes.
    pub async fn wait_room(&self, least: usize) -> Result<usize, Gone> {
        loop {
            if self.fate.get() != Fate::Open {
                return Err(Gone);
            }
            let room = self.room();
            if room >= least {
                return Ok(room);
            }
            self.changed().await;
        }
    }

    /// Wait for the peer's next bytes. Taking them lets it send more. One task alone may wait.
    pub async fn input(&self) -> Result<Input, Gone> {
        loop {
            if self.fate.get() != Fate::Open {
                return Err(Gone);
            }
            if let Some(input) = self.take_input() {
                return Ok(input);
            }
            self.arrived.notified().await;
        }
    }

    /// The same, also for what came before the connection was lost, and without letting the peer send more: that is
    /// up to [`Stream::taken`].
    pub async fn untaken_input(&self) -> Result<Input, Gone> {
        loop {
            if self.fate.get() == Fate::Reset {
                return Err(Gone);
            }
            let input = self.input.borrow_mut().pop_front();
            match (input, self.fate.get()) {
                (Some(input), _) => return Ok(input),
                (None, Fate::Open) => self.arrived.notified().await,
                (None, _) => return Err(Gone),
            }
        }
    }

    /// Let the peer send as much again as the consumer has taken.
    pub fn taken(&self, bytes: usize) {
        self.conn.core.borrow_mut().consumed(self.id, bytes as u32 + 1);
        self.conn.flush();
    }

    /// Take what has come as all that comes.
    pub fn finish_input(&self) {
        if !self.deaf.replace(true) {
            self.input.borrow_mut().push_back(Input::Eof);
            self.arrived.notify_one();
        }
    }

    /// The peer's next bytes if they are here.
    pub fn take_input(&self) -> Option<Input> {
        let input = self.input.borrow_mut().pop_front();
        if let Some(Input::Data(bytes)) = &input {
            self.taken(bytes.len());
        }
        input
    }

    /// Send one DATA frame; the caller has seen that there is room for `bytes` and the channel byte.
    pub fn send(&self, channel: u8, bytes: &[u8]) {
        if self.fate.get() == Fate::Open {
            self.conn.core.borrow_mut().data(self.id, channel, bytes);
            self.conn.flush();
        }
    }

    /// Wait for room and send a map on the channel for notes.
    pub async fn note(&self, map: &[u8]) -> Result<(), Gone> {
        self.wait_room(map.len() + 1).await?;
        self.send(4, map);
        Ok(())
    }

    /// Say that no more comes on a channel.
    pub fn eof(&self, channel: u8) {
        if self.fate.get() == Fate::Open {
            self.conn.core.borrow_mut().eof(self.id, channel);
            self.conn.flush();
        }
    }

    /// Take credit for frames that are still to be filled.
    pub fn charge(&self, cost: usize) {
        self.conn.core.borrow_mut().charge(self.id, cost);
    }

    /// Send whole DATA frames that were charged for.
    pub fn send_frames(&self, frames: Vec<u8>) {
        if self.fate.get() == Fate::Open {
            self.conn.push(frames);
        }
    }

    /// Send the terminal END.
    pub fn end(&self, map: &[u8]) {
        if self.fate.replace(Fate::Reset) == Fate::Open {
            self.conn.core.borrow_mut().end_stream(self.id, map);
            self.conn.streams.borrow_mut().remove(&self.id);
            self.conn.flush();
            // Somebody may still be feeding from it.
            self.arrived.notify_one();
        }
    }

    fn settle(&self, fate: Fate) {
        if self.fate.get() == Fate::Open {
            self.fate.set(fate);
        }
        self.arrived.notify_one();
        self.wake.notify_one();
    }
}

pub struct Conn {
    core: RefCell<Connection>,
    queue: RefCell<VecDeque<Vec<u8>>>,
    queued: Cell<usize>,
    /// How much of the queue's first part is written already.
    head: Cell<usize>,
    /// Some stream waits for room in the queue.
    starved: Cell<bool>,
    write: Notify,
    written: Notify,
    close: Notify,
    farewell: RefCell<Option<(&'static str, &'static str)>>,
    streams: RefCell<HashMap<u32, Rc<Stream>>>,
}

impl Conn {
    pub fn new(key: [u8; 32], nonce: [u8; 32]) -> Rc<Conn> {
        Rc::new(Conn {
            core: RefCell::new(Connection::daemon(key, nonce)),
            queue: RefCell::default(),
            queued: Cell::new(0),
            head: Cell::new(0),
            starved: Cell::new(false),
            write: Notify::new(),
            written: Notify::new(),
            close: Notify::new(),
            farewell: RefCell::new(None),
            streams: RefCell::default(),
        })
    }

    /// Say GOAWAY and close.
    pub fn leave(&self, code: &'static str, message: &'static str) {
        *self.farewell.borrow_mut() = Some((code, message));
        self.close.notify_one();
    }

    /// Carry the connection until it ends.
    pub async fn serve(self: &Rc<Conn>, daemon: &Rc<Daemon>, socket: Transport) {
        let hello = async {
            sleep(HELLO_TIME).await;
            if self.core.borrow().is_ready() {
                pending::<()>().await;
            }
            self.leave("unauthorized", "no hello within 10 seconds");
            pending().await
        };
        tokio::select! {
            _ = self.read(daemon, &socket) => {}
            _ = self.write(&socket) => {}
            () = self.close.notified() => {}
            () = hello => {}
            () = socket.abandoned() => {}
        }
        if let Some((code, message)) = self.farewell.take() {
            self.core.borrow_mut().goaway(code, message);
        }
        self.flush();
        let lost: Vec<_> = self.streams.borrow_mut().drain().map(|(_, stream)| stream).collect();
        for stream in lost {
            stream.settle(Fate::Lost);
        }
        let last_words = async {
            while self.queued.get() > 0 {
                self.write_some(&socket).await?;
            }
            Ok::<_, io::Error>(())
        };
        let _ = timeout(FAREWELL_TIME, last_words).await;
        // What is never sent is not kept for tasks that still hold the connection.
        self.queue.borrow_mut().clear();
        self.queued.set(0);
        self.head.set(0);
    }

    async fn read(self: &Rc<Conn>, daemon: &Rc<Daemon>, socket: &Transport) -> io::Result<()> {
        loop {
            while self.queued.get() >= QUEUE_FULL {
                self.written.notified().await;
            }
            socket.readable().await?;
            let read = socket.try_read(self.core.borrow_mut().space());
            match read {
                Ok(0) => return Ok(()),
                Ok(count) => self.core.borrow_mut().filled(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            }
            let alive = self.dispatch(daemon);
            self.flush();
            if !alive {
                return Ok(());
            }
        }
    }

    /// Hand out every event of what was read; `false` when the connection is to be closed.
    fn dispatch(self: &Rc<Conn>, daemon: &Rc<Daemon>) -> bool {
        loop {
            let mut core = self.core.borrow_mut();
            let event = match core.next() {
                Ok(Some(event)) => event,
                Ok(None) => return true,
                Err(_) => return false,
            };
            let stream = |id| self.streams.borrow().get(&id).cloned();
            match event {
                Event::Ready => {
                    let clock_ns = core.clock_ns();
                    drop(core);
                    machine::arrived(daemon, clock_ns);
                    if !daemon.admit(self) {
                        self.leave("too_many", "too many connections");
                    }
                }
                Event::Open { stream: id, op, args } => match ops::parse(op, args, daemon) {
                    Ok(operation) => {
                        drop(core);
                        let stream = Rc::new(Stream {
                            id,
                            conn: self.clone(),
                            fate: Cell::new(Fate::Open),
                            deaf: Cell::new(!operation.takes_input()),
                            input: RefCell::default(),
                            arrived: Notify::new(),
                            wake: Notify::new(),
                        });
                        self.streams.borrow_mut().insert(id, stream.clone());
                        spawn_local(operation.run(daemon.clone(), stream));
                    }
                    Err(failure) => core.end_stream(id, &failure.map()),
                },
                Event::Data { stream: id, bytes, .. } => {
                    if let Some(stream) = stream(id).filter(|stream| !stream.deaf.get()) {
                        stream.input.borrow_mut().push_back(Input::Data(bytes.to_vec()));
                        stream.arrived.notify_one();
                    }
                }
                Event::Eof { stream: id, .. } => {
                    if let Some(stream) = stream(id).filter(|stream| !stream.deaf.get()) {
                        stream.input.borrow_mut().push_back(Input::Eof);
                        stream.arrived.notify_one();
                    }
                }
                Event::Credit { stream: id } => {
                    if let Some(stream) = stream(id) {
                        stream.wake.notify_one();
                    }
                }
                Event::Reset { stream: id, .. } => {
                    if let Some(stream) = self.streams.borrow_mut().remove(&id) {
                        stream.settle(Fate::Reset);
                    }
                }
                Event::Goaway { .. } => return false,
                Event::End { .. } | Event::Pong(_) => {}
            }
        }
    }

    /// Move what the core wants to send into the queue.
    fn flush(&self) {
        let mut core = self.core.borrow_mut();
        let out = core.output();
        if out.is_empty() {
            return;
        }
        let mut queue = self.queue.borrow_mut();
        self.queued.set(self.queued.get() + out.len());
        match queue.back_mut() {
            Some(last) if last.len() + out.len() <= COALESCE => {
                last.extend_from_slice(out);
                out.clear();
            }
            _ => queue.push_back(std::mem::take(out)),
        }
        self.write.notify_one();
    }

    fn push(&self, frames: Vec<u8>) {
        self.queued.set(self.queued.get() + frames.len());
        self.queue.borrow_mut().push_back(frames);
        self.write.notify_one();
    }

    async fn write(&self, socket: &Transport) -> io::Result<()> {
        loop {
            while self.queued.get() > 0 {
                self.write_some(socket).await?;
            }
            self.write.notified().await;
        }
    }

    async fn write_some(&self, socket: &Transport) -> io::Result<()> {
        let written = {
            let queue = self.queue.borrow();
            let mut head = self.head.get();
            let rest = |part| IoSlice::new(&Vec::as_slice(part)[std::mem::take(&mut head)..]);
            let slices: Vec<IoSlice<'_>> = queue.iter().take(16).map(rest).collect();
            socket.try_write_vectored(&slices)
        };
        match written {
            Ok(count) => {
                self.sent(count);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => socket.writable().await,
            Err(error) => Err(error),
        }
    }

    fn sent(&self, mut count: usize) {
        let mut queue = self.queue.borrow_mut();
        self.queued.set(self.queued.get().saturating_sub(count));
        count += self.head.take();
        while let Some(first) = queue.front() {
            if first.len() > count {
                self.head.set(count);
                break;
            }
            count -= first.len();
            queue.pop_front();
        }
        drop(queue);
        self.written.notify_one();
        if self.queued.get() < QUEUE_HIGH / 2 && self.starved.replace(false) {
            for stream in self.streams.borrow().values() {
                stream.wake.notify_one();
            }
        }
    }
}
