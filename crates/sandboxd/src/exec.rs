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
//! supervisor, and its output is thrown away (Lingering). When the connection is lost the command goes on in
//! the same states with its output thrown away; the deadline stays.
//!
//! A deadline that passes after the command's own end changes nothing: the outcome is known and only its
//! delivery waits for credit.

use crate::config::Config;
use crate::conn::{Fate, Stream};
use crate::daemon::{Daemon, SCRATCH};
use crate::errors::{Code, Failure, words};
use crate::launch::Plan;
use crate::ops::Args;
use crate::pack::{MapWriter, Value};
use crate::supervisor::{self, Descriptors, KILL, REPORT_BYTES, Report, Stage};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;
use rustix::process::{Gid, Uid};
use std::future::pending;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};

/// What may still come out of the pipes after the command's end.
const MAX_DRAIN: usize = 1 << 20;
/// The supervisor's own bound is 5 s.
const KILL_TIME: Duration = Duration::from_secs(6);
/// More strings than these the kernel never takes: their pointers alone fill its share of an 8 MiB stack.
const MAX_STRINGS: usize = 262_144;
/// Longer deadlines are this long: a year.
const MAX_TIMEOUT_MS: u64 = 366 * 24 * 3600 * 1000;

pub struct Request {
    plan: Plan,
    program: String,
    timeout: Duration,
}

impl Request {
    pub fn parse(args: &Args<'_>, daemon: &Daemon) -> Result<Request, Failure> {
        let wrong = |text: &str| Failure::invalid(text);
        let Value::Array(list) = args.get("argv")? else {
            return Err(wrong("argv is not an array"));
        };
        if list.len() > MAX_STRINGS {
            return Err(wrong("argv has too many elements"));
        }
        let mut argv = Vec::with_capacity(list.len());
        for value in list.iter() {
            match value {
                Value::Bin(bytes) => argv.push(bytes.to_vec()),
                _ => return Err(wrong("argv has an element that is not bytes")),
            }
        }
        let program = match argv.first() {
            Some(first) if !first.is_empty() => String::from_utf8_lossy(first).chars().take(200).collect(),
            _ => return Err(wrong("argv has no command")),
        };
        let Value::Array(list) = args.get("env")? else {
            return Err(wrong("env is not an array"));
        };
        if argv.len() + list.len() > MAX_STRINGS {
            return Err(wrong("argv and env have too many elements"));
        }
        let mut env = Vec::with_capacity(list.len());
        for pair in list.iter() {
            let Value::Array(pair) = pair else {
                return Err(wrong("env has an element that is not a pair"));
            };
            let mut pair = pair.iter();
            let (Some(Value::Bin(key)), Some(Value::Bin(value)), None) =
                (pair.next(), pair.next(), pair.next())
            else {
                return Err(wrong("env has an element that is not a pair of bytes"));
            };
            if key.is_empty() || key.contains(&b'=') {
                return Err(wrong("env has a name that is empty or has a = in it"));
            }
            env.push([key, b"=", value].concat());
        }
        let timeout = args.uint("timeout_ms")?;
        if timeout == 0 {
            return Err(wrong("timeout_ms is 0"));
        }
        let cwd = args.path("cwd")?;
        let user = (daemon.config.uid, daemon.config.gid);
        let plan = Plan::new(argv, env, &cwd, user, daemon.open_files)
            .ok_or_else(|| wrong("a NUL in argv or env"))?;
        Ok(Request { plan, program, timeout: Duration::from_millis(timeout.min(MAX_TIMEOUT_MS)) })
    }
}

/// One of the command's output pipes.
struct Pipe {
    fd: AsyncFd<OwnedFd>,
    channel: u8,
    /// It was found empty after the command's end.
    empty: bool,
}

struct Exit {
    status: i32,
    user_us: u64,
    system_us: u64,
    max_rss_kb: u64,
    wall: Duration,
}

struct Running {
    daemon: Rc<Daemon>,
    /// Where output goes; `None` when it is thrown away.
    stream: Option<Rc<Stream>>,
    program: String,
    started: Instant,
    control: Option<AsyncFd<OwnedFd>>,
    pipes: Vec<Pipe>,
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
    match start(&daemon, stream.clone(), request) {
        Ok(mut running) => {
            drop(stream);
            let deadline = running.started + timeout;
            running.command(deadline).await;
            running.linger().await;
        }
        Err(failure) => stream.end(&failure.map()),
    }
}

fn start(daemon: &Rc<Daemon>, stream: Rc<Stream>, request: Request) -> Result<Running, Failure> {
    let started = Instant::now();
    let (stdout, stdout_child) = output_pipe(&daemon.config)?;
    let (stderr, stderr_child) = output_pipe(&daemon.config)?;
    let flags = SocketFlags::CLOEXEC;
    let (control, control_child) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::io::ioctl_fionbio(&control, true)?;
    let watch = |fd: OwnedFd| {
        // SAFETY: an OwnedFd is open, stays the same, and is owned by the AsyncFd until that is dropped.
        unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }
            .map_err(|error| Failure::new(Code::Exhausted, error.to_string()))
    };
    let control = watch(control)?;
    let pipes = [(1, stdout), (2, stderr)]
        .into_iter()
        .map(|(channel, fd)| Ok(Pipe { fd: watch(fd)?, channel, empty: false }))
        .collect::<Result<Vec<_>, Failure>>()?;
    let descriptors = Descriptors {
        control: control_child.as_raw_fd(),
        stdin: daemon.null.as_raw_fd(),
        stdout: stdout_child.as_raw_fd(),
        stderr: stderr_child.as_raw_fd(),
    };
    let pid = supervisor::spawn(&request.plan, &descriptors).map_err(|error| {
        let errno = error.raw_os_error().unwrap_or(0);
        Failure::new(
            Code::of(Errno::from_raw_os_error(errno)),
            format!("no process for a command: {}", words(errno)),
        )
    })?;
    daemon.supervisor_started(pid);
    Ok(Running {
        daemon: daemon.clone(),
        stream: Some(stream),
        program: request.program,
        started,
        control: Some(control),
        pipes,
        failed: None,
        exit: None,
        killing: None,
        killed: false,
        stuck: false,
        timed_out: false,
        drained: 0,
    })
}

/// A pipe whose reading end, ours, does not block. It belongs to the command, which could not open `/dev/stderr`
/// otherwise; where the system gives pipes no owner it stays as it is.
fn output_pipe(config: &Config) -> Result<(OwnedFd, OwnedFd), Failure> {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let _ = rustix::fs::fchown(&write, Some(Uid::from_raw(config.uid)), Some(Gid::from_raw(config.gid)));
    rustix::io::ioctl_fionbio(&read, true)?;
    Ok((read, write))
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

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

impl Running {
    /// Carry the command to its END.
    async fn command(&mut self, deadline: Instant) {
        loop {
            self.hear();
            self.heed_fate();
            let over = self.is_over();
            if self.pump(over) {
                yield_now().await;
                continue;
            }
            if over && (self.drained >= MAX_DRAIN || self.pipes.iter().all(|pipe| pipe.empty)) {
                break;
            }
            let may_read = self.stream.as_ref().is_none_or(|stream| stream.room() >= 2);
            let pipe = |index: usize| self.pipes.get(index).map(|pipe| &pipe.fd).filter(|_| may_read);
            tokio::select! {
                () = readable(self.control.as_ref()) => {}
                () = readable(pipe(0)) => {}
                () = readable(pipe(1)) => {}
                () = stream_changed(self.stream.as_ref()) => {}
                () = at(Some(deadline)), if self.killing.is_none() && self.exit.is_none() => {
                    self.timed_out = true;
                    self.kill();
                }
                () = at(self.killing.map(|since| since + KILL_TIME)), if !over => {
                    self.killed = true;
                    self.stuck = true;
                }
            }
        }
        if let Some(stream) = self.stream.take() {
            stream.end(&self.outcome());
        }
    }

    /// Nothing is to come but what the pipes hold.
    fn is_over(&self) -> bool {
        let ended = self.exit.is_some() || matches!(self.failed, Some((Stage::Fork, _)));
        self.control.is_none() || self.killed || (ended && self.killing.is_none())
    }

    /// Take the supervisor's reports.
    fn hear(&mut self) {
        while let Some(control) = &self.control {
            let mut bytes = [0u8; REPORT_BYTES];
            match rustix::net::recv(control.get_ref(), &mut bytes, RecvFlags::empty()) {
                Ok((REPORT_BYTES, _)) => match Report::decode(&bytes) {
                    Some(Report::Failed { stage, errno }) => self.failed = Some((stage, errno)),
                    Some(Report::Exit { status, user_us, system_us, max_rss_kb }) => {
                        let wall = self.started.elapsed();
                        self.exit = Some(Exit { status, user_us, system_us, max_rss_kb, wall });
                    }
                    Some(Report::Killed { empty }) => {
                        self.killed = true;
                        self.stuck |= !empty;
                    }
                    None => {}
                },
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // The supervisor has ended.
                Ok(_) | Err(_) => self.control = None,
            }
        }
    }

    fn heed_fate(&mut self) {
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
            let _ = rustix::net::send(control.get_ref(), &[KILL], SendFlags::NOSIGNAL);
        }
    }

    /// Move one piece of each pipe; `true` when there may be more.
    fn pump(&mut self, over: bool) -> bool {
        let mut moved = false;
        let mut scratch = self.daemon.scratch.borrow_mut();
        for index in (0..self.pipes.len()).rev() {
            let room = self.stream.as_ref().map_or(usize::MAX, |stream| stream.room());
            let limit = if over { MAX_DRAIN.saturating_sub(self.drained) } else { SCRATCH };
            let wanted = room.saturating_sub(1).min(SCRATCH).min(limit);
            let pipe = &mut self.pipes[index];
            if wanted == 0 {
                // The end of an empty pipe needs no credit.
                pipe.empty |= over && rustix::io::ioctl_fionread(pipe.fd.get_ref()) == Ok(0);
                continue;
            }
            match rustix::io::read(pipe.fd.get_ref(), &mut scratch[..wanted]) {
                Ok(count @ 1..) => {
                    if let Some(stream) = &self.stream {
                        stream.send(pipe.channel, &scratch[..count]);
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
                }
            }
        }
        moved
    }

    fn outcome(&self) -> Vec<u8> {
        if self.stuck {
            return Failure::new(Code::Stuck, "the processes of the command could not be ended in time")
                .map();
        }
        match self.failed {
            Some((Stage::Fork, errno)) => return self.not_started("no process for the command", errno),
            Some((Stage::Setup, errno)) => return self.not_started("the command could not be set up", errno),
            Some((Stage::Workdir, errno)) => {
                return Failure::new(Code::Workdir, format!("working directory: {}", words(errno))).map();
            }
            Some((Stage::Exec, libc::E2BIG)) => {
                return Failure::invalid(format!("{}: {}", self.program, words(libc::E2BIG))).map();
            }
            Some((Stage::Exec, errno @ (libc::EAGAIN | libc::ENOMEM | libc::EMFILE | libc::ENFILE))) => {
                return self.not_started(&self.program, errno);
            }
            Some((Stage::Exec, _)) | None => {}
        }
        let lost = Exit {
            status: libc::SIGKILL,
            user_us: 0,
            system_us: 0,
            max_rss_kb: 0,
            wall: self.started.elapsed(),
        };
        let exit = match &self.exit {
            Some(exit) => exit,
            None if self.killing.is_some() => &lost,
            None => return Failure::new(Code::Internal, "the command's supervisor was killed").map(),
        };
        let signalled = libc::WIFSIGNALED(exit.status);
        let message = self.failed.map(|(_, errno)| match errno {
            libc::ENOENT if !self.program.contains('/') => {
                (127, format!("{}: command not found", self.program))
            }
            libc::ENOENT => (127, format!("{}: {}", self.program, words(errno))),
            _ => (126, format!("{}: {}", self.program, words(errno))),
        });
        let map = MapWriter::new(6 + u32::from(message.is_some()));
        let map = match &message {
            Some((code, text)) => map.uint("code", *code).str("message", text),
            None if signalled => map.uint("signal", libc::WTERMSIG(exit.status) as u64),
            None => map.uint("code", libc::WEXITSTATUS(exit.status) as u64),
        };
        // A command that ended by itself while the deadline passed was in time.
        map.bool("timed_out", self.timed_out && signalled)
            .uint("user_us", exit.user_us)
            .uint("system_us", exit.system_us)
            .uint("max_rss_kb", exit.max_rss_kb)
            .uint("wall_us", exit.wall.as_micros() as u64)
            .done()
    }

    fn not_started(&self, what: &str, errno: i32) -> Vec<u8> {
        let code = Code::of(Errno::from_raw_os_error(errno));
        Failure::new(code, format!("{what}: {}", words(errno))).map()
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
            let pipe = |index: usize| self.pipes.get(index).map(|pipe| &pipe.fd);
            tokio::select! {
                () = readable(self.control.as_ref()) => {}
                () = readable(pipe(0)) => {}
                () = readable(pipe(1)) => {}
            }
        }
    }
}
