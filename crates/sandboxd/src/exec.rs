//! Commands, seen from the daemon.
//!
//! ```text
//! Running ──command's own exit──► Draining ──pipes once empty, or 1 MiB──► END, then Lingering
//!    │                                ▲
//!    └─RESET or deadline─► Killing ───┘ tree gone, or 6 s
//! ```
//!
//! Output is read only as the client gives credit, so a slow reader holds the command back through its pipe and
//! nothing piles up here. The end of a command is the end of its own process: what it left running keeps its
//! supervisor, and its output is thrown away (Lingering). A command with an id keeps its newest output in a ring
//! (`exec/object.rs`). When the connection is lost, or the command was detached, it goes on in the same states and
//! nobody holds it back; the deadline stays.
//!
//! A deadline that passes after the command's own end changes nothing: the outcome is known and only its
//! delivery waits for credit.

mod input;
mod object;
pub mod ops;
mod outcome;
mod pool;
mod request;
mod ring;
mod start;
mod tty;

use crate::conn::{Fate, Input as Piece, Stream};
use crate::daemon::{Daemon, SCRATCH};
use crate::pack::MapWriter;
use crate::supervisor::{self, KILL, REPORT_BYTES, Report, Stage};
use input::{Fault, Input};
use object::{End, Object};
use outcome::{Exit, Facts};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::future::pending;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::task::{spawn_local, yield_now};
use tokio::time::{Instant, sleep_until};

pub use object::Objects;
pub use pool::Pool;
pub use request::{Request, id};
pub use tty::Size;

/// What may still come out of the pipes after the command's end.
const MAX_DRAIN: usize = 1 << 20;
/// A supervisor that does not answer has been given more than its own time.
const BEYOND_KILL_TIME: Duration = Duration::from_secs(1);

/// Where the command's output comes from.
struct Pipe {
    fd: Rc<AsyncFd<OwnedFd>>,
    channel: u8,
    /// It was found empty after the command's end.
    empty: bool,
}

struct Running {
    daemon: Rc<Daemon>,
    /// The stream that started it and holds it back; `None` when there is none any more.
    stream: Option<Rc<Stream>>,
    object: Option<Rc<Object>>,
    input: Rc<Input>,
    detach: bool,
    program: String,
    started: Instant,
    /// How long the daemon had been absent by then.
    absent: Duration,
    /// What was killed for want of memory before its start, where it is an object or in a machine, and somebody counts.
    kills: Option<u64>,
    control: Option<Rc<AsyncFd<OwnedFd>>>,
    pipes: Vec<Pipe>,
    /// The command's end of its terminal, held so that one that closes it may open it again.
    slave: Option<OwnedFd>,
    /// The note that the command runs, until it has been sent.
    news: Option<Vec<u8>>,
    failed: Option<(Stage, i32)>,
    exit: Option<Exit>,
    killing: Option<Instant>,
    killed: bool,
    /// Some of the tree could not be ended in time.
    stuck: bool,
    timed_out: bool,
    drained: usize,
}

/// Run a command from its start to the end of the last process that it left.
pub async fn run(daemon: Rc<Daemon>, stream: Rc<Stream>, request: Request) {
    let timeout = request.timeout;
    let feeds = request.takes_input();
    match start::start(&daemon, stream.clone(), request) {
        Ok(mut running) => {
            if feeds {
                spawn_local(feed(running.input.clone(), stream, running.object.is_some()));
            } else {
                drop(stream);
            }
            running.command(timeout).await;
            running.linger().await;
        }
        Err(failure) => stream.end(&failure.map()),
    }
}

/// Carry what comes on the stream that started a command to its standard input.
async fn feed(input: Rc<Input>, stream: Rc<Stream>, named: bool) {
    match input.feed(&stream, true).await {
        Ok(_) => {}
        // Nobody else can write to a command without an id.
        Err(Fault::Gone) if !named => drop(input.close()),
        Err(Fault::Gone) => {}
        // A command that reads no more does not stop a client that sends blindly.
        Err(Fault::Failed(_)) => while let Ok(Piece::Data(_)) = stream.input().await {},
    }
}

async fn readable(fd: Option<&AsyncFd<OwnedFd>>) {
    match fd {
        // The flag is cleared before the next read, so what comes after that read raises it again.
        Some(fd) => match fd.readable().await {
            Ok(mut ready) => ready.clear_ready(),
            Err(_) => pending().await,
        },
        None => pending().await,
    }
}

async fn stream_changed(stream: Option<&Rc<Stream>>) {
    match stream {
        Some(stream) => stream.changed().await,
        None => pending().await,
    }
}

async fn woken(object: Option<&Rc<Object>>) {
    match object {
        Some(object) => object.wake.notified().await,
        None => pending().await,
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

impl Running {
    /// Carry the command to its END.
    async fn command(&mut self, timeout: Duration) {
        loop {
            self.hear();
            self.heed_fate();
            self.tell_news();
            let over = self.is_over();
            if self.has_begun() && self.pump(over) {
                yield_now().await;
                continue;
            }
            if over
                && !self.owes_answers()
                && (self.drained >= MAX_DRAIN || self.pipes.iter().all(|pipe| pipe.empty))
            {
                break;
            }
            let may_read = self.has_begun() && self.room() >= 2;
            let pipe = |index: usize| self.pipes.get(index).map(|pipe| &*pipe.fd).filter(|_| may_read);
            let absent = self.daemon.absence.is_on();
            let deadline = self.started + timeout + self.absence();
            let kill_time = supervisor::kill_time(self.daemon.machine.is_some()) + BEYOND_KILL_TIME;
            tokio::select! {
                () = readable(self.control.as_deref()) => {}
                () = readable(pipe(0)) => {}
                () = readable(pipe(1)) => {}
                () = woken(self.object.as_ref()) => {}
                () = stream_changed(self.stream.as_ref()) => {}
                () = self.daemon.absence.over(), if absent => {}
                () = at(Some(deadline)), if !absent && self.killing.is_none() && self.exit.is_none() => {
                    // Not where an absence began since, on whose clock it seems to have passed.
                    if self.lasted() >= timeout {
                        self.timed_out = true;
                        self.kill();
                    }
                }
                () = at(self.killing.map(|since| since + kill_time)), if !over => {
                    self.killed = true;
                    self.stuck = true;
                }
            }
        }
        self.finish();
    }

    /// How long the daemon was absent since the start.
    fn absence(&self) -> Duration {
        self.daemon.absence.total(Instant::now()).saturating_sub(self.absent)
    }

    /// How long it runs, or did, without that.
    fn lasted(&self) -> Duration {
        self.started.elapsed().saturating_sub(self.absence())
    }

    /// Somebody has asked for a signal, and the supervisor is still about it.
    fn owes_answers(&self) -> bool {
        self.control.is_some() && self.object.as_ref().is_some_and(|object| object.awaits_answers())
    }

    /// How much may be read of the command's output now. One that somebody wants to be gone is not held back.
    fn room(&self) -> usize {
        match (&self.stream, &self.object) {
            (_, Some(object)) if object.is_doomed() => usize::MAX,
            (Some(stream), _) => stream.room(),
            (None, _) => usize::MAX,
        }
    }

    /// Nothing is to come but what the pipes hold.
    fn is_over(&self) -> bool {
        let ended = self.exit.is_some() || matches!(self.failed, Some((Stage::Fork, _)));
        self.control.is_none() || self.killed || (ended && self.killing.is_none())
    }

    /// Take the supervisor's reports.
    fn hear(&mut self) {
        let mut reset = false;
        while let Some(control) = &self.control {
            let mut bytes = [0u8; REPORT_BYTES];
            match rustix::net::recv(control.get_ref(), &mut bytes, RecvFlags::empty()) {
                Ok((REPORT_BYTES, _)) => match Report::decode(&bytes) {
                    Some(Report::Failed { stage, errno }) => self.failed = Some((stage, errno)),
                    Some(Report::Exit { status, user_us, system_us, max_rss_kb }) => {
                        let wall = self.lasted();
                        self.slave = None;
                        self.input.shut();
                        let mut exit =
                            Exit { status, user_us, system_us, max_rss_kb, wall, oom_killed: None };
                        if exit.was_killed() {
                            let count = self.daemon.kills.count();
                            exit.oom_killed = count.zip(self.kills).map(|(now, before)| now > before);
                        }
                        self.exit = Some(exit);
                    }
                    Some(Report::Killed { empty }) => {
                        self.killed = true;
                        self.stuck |= !empty;
                    }
                    Some(Report::Started { pid }) => self.begun(pid),
                    Some(Report::Signalled { processes, outcome }) => {
                        if let Some(object) = &self.object {
                            object.signalled(processes, outcome);
                        }
                    }
                    Some(Report::Idle { pid }) => {
                        if let Some(object) = &self.object {
                            object.is_left();
                        }
                        if let Some(control) = self.control.take() {
                            self.daemon.supervisor_idle(pid, control);
                        }
                    }
                    None => {}
                },
                Err(Errno::INTR) => {}
                // It ended with a message unread: the kernel says so once, before what it had sent.
                Err(Errno::CONNRESET) if !reset => reset = true,
                Err(Errno::AGAIN) => return,
                // The supervisor has ended.
                Ok(_) | Err(_) => self.control = None,
            }
        }
    }

    /// Nothing is read of a command with an id before it was announced.
    fn has_begun(&self) -> bool {
        let announced = self.object.as_ref().is_none_or(|object| object.pid() != 0);
        announced || self.failed.is_some() || self.control.is_none() || self.killed
    }

    /// The program runs, unless there was a report that it could not.
    fn begun(&mut self, pid: i32) {
        let Some(object) = self.object.as_ref().filter(|_| self.failed.is_none()) else {
            return;
        };
        object.runs_as(pid);
        if self.detach {
            if let Some(stream) = self.stream.take() {
                stream.end(&MapWriter::new(2).str("id", object.id()).uint("pid", object.pid()).done());
            }
        } else {
            self.news = Some(MapWriter::new(2).bool("started", true).uint("pid", object.pid()).done());
        }
    }

    /// Say that the command runs, once there is room for it.
    fn tell_news(&mut self) {
        if let (Some(stream), Some(note)) = (&self.stream, &self.news)
            && stream.room() > note.len()
        {
            stream.send(4, note);
            self.news = None;
        }
    }

    fn heed_fate(&mut self) {
        if self.object.as_ref().is_some_and(|object| object.is_doomed()) {
            self.kill();
        }
        match self.stream.as_ref().map_or(Fate::Open, |stream| stream.fate()) {
            Fate::Open => {}
            Fate::Reset => {
                self.stream = None;
                self.kill();
            }
            Fate::Lost => self.stream = None,
        }
    }

    /// Ask the supervisor to end the tree. It needs no new process or thread for it.
    fn kill(&mut self) {
        if self.killing.is_none()
            && let Some(control) = &self.control
        {
            self.killing = Some(Instant::now());
            // The socket is empty in this direction, so the byte has room; a supervisor that is gone is heard of.
            let _ = rustix::net::send(control.get_ref(), &[KILL, 0], SendFlags::NOSIGNAL);
        }
    }

    /// Move one piece of each pipe; `true` when there may be more.
    fn pump(&mut self, over: bool) -> bool {
        let mut moved = false;
        let mut scratch = self.daemon.scratch.borrow_mut();
        let mut index = 0;
        while index < self.pipes.len() {
            let room = self.room();
            let limit = if over { MAX_DRAIN.saturating_sub(self.drained) } else { SCRATCH };
            let wanted = room.saturating_sub(1).min(SCRATCH).min(limit);
            let pipe = &mut self.pipes[index];
            if wanted == 0 {
                // The end of an empty pipe needs no credit.
                pipe.empty |= over && rustix::io::ioctl_fionread(pipe.fd.get_ref()) == Ok(0);
                index += 1;
                continue;
            }
            match rustix::io::read(pipe.fd.get_ref(), &mut scratch[..wanted]) {
                Ok(count @ 1..) => {
                    let channel = pipe.channel;
                    if let Some(stream) = self.stream.as_ref().filter(|stream| stream.room() > count) {
                        stream.send(channel, &scratch[..count]);
                    }
                    if let Some(object) = &self.object {
                        self.daemon.objects.keep(object, channel, &scratch[..count]);
                    }
                    if over {
                        self.drained += count;
                    }
                    moved = true;
                }
                Err(Errno::INTR) => moved = true,
                Err(Errno::AGAIN) => pipe.empty = over,
                Ok(_) | Err(_) => {
                    self.pipes.remove(index);
                    continue;
                }
            }
            index += 1;
        }
        moved
    }

    /// The command is over: tell everybody who waits for it.
    fn finish(&mut self) {
        let facts = Facts {
            program: &self.program,
            failed: self.failed,
            exit: self.exit.as_ref(),
            killed: self.killing.is_some(),
            stuck: self.stuck,
            timed_out: self.timed_out,
            elapsed: self.lasted(),
        };
        let end = facts.end();
        self.input.shut();
        if let Some(stream) = self.stream.take() {
            stream.end(&end.map());
        }
        if let Some(object) = self.object.take() {
            let never_began = self.failed.is_some() && matches!(end, End::Error(_));
            self.daemon.objects.ended(&object, end);
            if never_began {
                self.daemon.objects.forget(&object);
            }
        }
    }

    /// Keep the supervisor, and drain what the command left running, until all of it is gone.
    async fn linger(&mut self) {
        self.stream = None;
        loop {
            self.hear();
            if self.pump(false) {
                yield_now().await;
                continue;
            }
            if self.control.is_none() && self.pipes.is_empty() {
                return;
            }
            let pipe = |index: usize| self.pipes.get(index).map(|pipe| &*pipe.fd);
            tokio::select! {
                () = readable(self.control.as_deref()) => {}
                () = readable(pipe(0)) => {}
                () = readable(pipe(1)) => {}
            }
        }
    }
}
