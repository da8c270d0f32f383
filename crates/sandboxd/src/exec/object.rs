//! Commands as objects: those with an id, kept by the daemon.
//!
//! ```text
//! Running ──its end──► Ended ──forgotten, or the 1,001st that ended after it──► gone
//! ```
//!
//! An object is what the operations of other streams see of a command. The task that carries the command
//! (`exec.rs`) owns its pipes and its supervisor's reports; it and the operations meet here: wishes go into the
//! object, the task is woken. Nothing here needs a new process, thread or descriptor.

use super::input::Input;
use super::request::Name;
use super::ring::Ring;
use super::tty::{self, Size};
use crate::errors::{Code, Failure};
use crate::pack::MapWriter;
use crate::supervisor::SIGNAL;
use crate::tree::Outcome;
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, oneshot};

/// Commands that run at the same time and can be named.
const MAX_RUNNING: usize = 1_024;
/// Statuses that are kept after the end.
const MAX_ENDED: usize = 1_000;
/// All rings of the sandbox together.
const MAX_RINGS: usize = 8 << 20;
/// Signals that a supervisor has not answered yet. Their messages leave room for the one that ends it all.
const MAX_SIGNALS: usize = 16;

/// The end of a command, encoded.
#[derive(Clone)]
pub enum End {
    Exit(Vec<u8>),
    Error(Failure),
}

impl End {
    /// The END of the stream that started it.
    pub fn map(&self) -> Vec<u8> {
        match self {
            End::Exit(exit) => exit.clone(),
            End::Error(failure) => failure.map(),
        }
    }
}

/// A command as others see it.
pub struct Object {
    name: Name,
    tty: bool,
    started_ms: u64,
    pid: Cell<i32>,
    ring: RefCell<Ring>,
    end: RefCell<Option<End>>,
    /// The supervisor's socket while the command runs.
    control: RefCell<Option<Rc<AsyncFd<OwnedFd>>>>,
    signals: RefCell<VecDeque<oneshot::Sender<(u64, Outcome)>>>,
    pub input: Rc<Input>,
    doomed: Cell<bool>,
    /// Wakes the task of the command.
    pub wake: Notify,
    /// Wakes everybody who waits for output or the end.
    pub changed: Notify,
}

impl Object {
    pub fn new(name: Name, tty: bool, input: Rc<Input>, control: Rc<AsyncFd<OwnedFd>>) -> Rc<Object> {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Rc::new(Object {
            name,
            tty,
            started_ms: started.as_millis() as u64,
            pid: Cell::new(0),
            ring: RefCell::default(),
            end: RefCell::new(None),
            control: RefCell::new(Some(control)),
            signals: RefCell::default(),
            input,
            doomed: Cell::new(false),
            wake: Notify::new(),
            changed: Notify::new(),
        })
    }

    pub fn id(&self) -> &str {
        &self.name.id
    }

    pub fn pid(&self) -> u64 {
        self.pid.get() as u64
    }

    pub fn runs_as(&self, pid: i32) {
        self.pid.set(pid);
    }

    pub fn end(&self) -> Option<End> {
        self.end.borrow().clone()
    }

    pub fn is_running(&self) -> bool {
        self.end.borrow().is_none()
    }

    /// Whether somebody has asked for its end.
    pub fn is_doomed(&self) -> bool {
        self.doomed.get()
    }

    pub fn doom(&self) {
        self.doomed.set(true);
        self.wake.notify_one();
    }

    /// The oldest byte in the ring and the next one.
    pub fn range(&self) -> (u64, u64) {
        let ring = self.ring.borrow();
        (ring.first(), ring.end())
    }

    pub fn read(&self, cursor: u64, most: usize) -> Option<(u8, Vec<u8>)> {
        self.ring.borrow().read(cursor, most)
    }

    /// Have the supervisor send a signal, and wait for how many processes got it.
    pub fn signal(&self, signal: u8) -> Result<oneshot::Receiver<(u64, Outcome)>, Failure> {
        let control = self.control.borrow();
        let Some(control) = control.as_ref() else {
            return Err(has_ended());
        };
        let mut signals = self.signals.borrow_mut();
        if signals.len() >= MAX_SIGNALS {
            return Err(Failure::new(Code::Exhausted, "too many signals are on their way"));
        }
        match rustix::net::send(control.get_ref(), &[SIGNAL, signal], SendFlags::NOSIGNAL) {
            Ok(_) => {
                let (send, receive) = oneshot::channel();
                signals.push_back(send);
                Ok(receive)
            }
            Err(Errno::AGAIN) => Err(Failure::new(Code::Exhausted, "the supervisor takes no message")),
            Err(_) => Err(has_ended()),
        }
    }

    pub fn awaits_answers(&self) -> bool {
        !self.signals.borrow().is_empty()
    }

    /// Nothing of it is left, and its supervisor is another command's from now on.
    pub fn is_left(&self) {
        self.control.borrow_mut().take();
        self.signals.borrow_mut().clear();
    }

    /// The supervisor's answer to the oldest signal.
    pub fn signalled(&self, processes: u64, outcome: Outcome) {
        if let Some(waiting) = self.signals.borrow_mut().pop_front() {
            let _ = waiting.send((processes, outcome));
        }
    }

    pub fn resize(&self, size: Size) -> Result<(), Failure> {
        if !self.tty {
            return Err(Failure::invalid("the command has no terminal"));
        }
        match self.input.terminal() {
            Some(master) => Ok(tty::resize(master.get_ref().as_fd(), size)?),
            None => Err(has_ended()),
        }
    }

    /// The `exec` of a listing.
    pub fn describe(&self) -> Vec<u8> {
        let (first, cursor) = self.range();
        let end = self.end.borrow();
        let keys = 8 + u32::from(self.name.tag.is_some()) + u32::from(end.is_some());
        let mut map = MapWriter::new(keys).str("id", self.id());
        if let Some(tag) = &self.name.tag {
            map = map.str("tag", tag);
        }
        map = map
            .bins("argv", &self.name.argv)
            .uint("pid", self.pid())
            .uint("started_ms", self.started_ms)
            .bool("running", end.is_none())
            .bool("tty", self.tty)
            .uint("cursor", cursor)
            .uint("first", first);
        match &*end {
            None => map,
            Some(End::Exit(exit)) => map.raw("exit", exit),
            Some(End::Error(failure)) => map.raw("error", &failure.inner()),
        }
        .done()
    }
}

pub fn has_ended() -> Failure {
    Failure::new(Code::NotFound, "the command has ended")
}

/// All objects of the sandbox.
#[derive(Default)]
pub struct Objects {
    by_id: RefCell<HashMap<String, Rc<Object>>>,
    /// In the order of their start.
    running: RefCell<VecDeque<Rc<Object>>>,
    /// In the order of their end.
    ended: RefCell<VecDeque<Rc<Object>>>,
    ring_bytes: Cell<usize>,
}

impl Objects {
    pub fn get(&self, id: &str) -> Result<Rc<Object>, Failure> {
        let found = self.by_id.borrow().get(id).cloned();
        found.ok_or_else(|| Failure::new(Code::NotFound, format!("no command with the id {id:?}")))
    }

    /// Every object, the ended ones first.
    pub fn all(&self) -> Vec<Rc<Object>> {
        self.ended.borrow().iter().chain(self.running.borrow().iter()).cloned().collect()
    }

    pub fn len(&self) -> usize {
        self.by_id.borrow().len()
    }

    pub fn ring_bytes(&self) -> usize {
        self.ring_bytes.get()
    }

    /// Whether a command with this id may start.
    pub fn admit(&self, id: &str) -> Result<(), Failure> {
        if self.by_id.borrow().contains_key(id) {
            return Err(Failure::new(Code::Conflict, format!("there is a command with the id {id:?}")));
        }
        if self.running.borrow().len() >= MAX_RUNNING {
            return Err(Failure::new(Code::Exhausted, format!("{MAX_RUNNING} commands are running")));
        }
        Ok(())
    }

    pub fn add(&self, object: Rc<Object>) {
        self.by_id.borrow_mut().insert(object.id().to_string(), object.clone());
        self.running.borrow_mut().push_back(object);
    }

    /// Keep output of a command, and make room for it.
    pub fn keep(&self, object: &Object, channel: u8, bytes: &[u8]) {
        let before = object.ring.borrow().len();
        object.ring.borrow_mut().push(channel, bytes);
        self.ring_bytes.set(self.ring_bytes.get() + object.ring.borrow().len() - before);
        let (ended, running) = (self.ended.borrow(), self.running.borrow());
        for other in ended.iter().chain(running.iter()) {
            let above = self.ring_bytes.get().saturating_sub(MAX_RINGS);
            if above == 0 {
                break;
            }
            self.shorten(other, above);
        }
        drop((ended, running));
        object.changed.notify_waiters();
    }

    fn shorten(&self, object: &Object, count: usize) {
        let mut ring = object.ring.borrow_mut();
        let before = ring.len();
        ring.drop_oldest(count);
        self.ring_bytes.set(self.ring_bytes.get() - (before - ring.len()));
    }

    /// A command is over: its status is kept, as one of the last.
    pub fn ended(&self, object: &Rc<Object>, end: End) {
        *object.end.borrow_mut() = Some(end);
        object.is_left();
        object.input.shut();
        let started = self.running.borrow().iter().position(|other| Rc::ptr_eq(other, object));
        if let Some(index) = started {
            self.running.borrow_mut().remove(index);
            self.ended.borrow_mut().push_back(object.clone());
        }
        while self.ended.borrow().len() > MAX_ENDED {
            let oldest = self.ended.borrow().front().cloned();
            if let Some(oldest) = oldest {
                self.forget(&oldest);
            }
        }
        object.changed.notify_waiters();
    }

    /// Drop an object that has ended, or never began.
    pub fn forget(&self, object: &Rc<Object>) {
        let same = |other: &Rc<Object>| Rc::ptr_eq(other, object);
        self.running.borrow_mut().retain(|other| !same(other));
        self.ended.borrow_mut().retain(|other| !same(other));
        let mut by_id = self.by_id.borrow_mut();
        if by_id.get(object.id()).is_some_and(same) {
            by_id.remove(object.id());
            drop(by_id);
            self.shorten(object, usize::MAX);
        }
    }
}
