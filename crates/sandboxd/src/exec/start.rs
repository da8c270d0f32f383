//! From a request to a supervisor with everything that it and its command need.

use super::input::Input;
use super::object::Object;
use super::request::Request;
use super::{Pipe, Running, tty};
use crate::conn::Stream;
use crate::daemon::Daemon;
use crate::errors::{Code, Failure, words};
use crate::launch::Plan;
use crate::machine::group::Slot;
use crate::standing::{self, Job};
use crate::supervisor::{self, Descriptors};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{Gid, Uid};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

pub(super) fn watch(fd: OwnedFd, interest: Interest) -> Result<AsyncFd<OwnedFd>, Failure> {
    // SAFETY: an OwnedFd is open, stays the same, and is owned by the AsyncFd until that is dropped.
    unsafe { AsyncFd::register_with_interest(fd, interest) }
        .map_err(|error| Failure::new(Code::Exhausted, error.to_string()))
}

/// A pipe that belongs to the sandbox user, who may want to open it again as `/dev/stdin` or `/dev/stderr`.
fn pipe(daemon: &Daemon) -> Result<(OwnedFd, OwnedFd), Failure> {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let (uid, gid) = (daemon.config.uid, daemon.config.gid);
    rustix::fs::fchown(&read, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?;
    Ok((read, write))
}

/// The daemon's ends of what the command has as 0, 1 and 2, and the command's.
struct Streams {
    input: Rc<Input>,
    pipes: Vec<Pipe>,
    child: Vec<OwnedFd>,
}

fn streams(daemon: &Daemon, request: &Request) -> Result<Streams, Failure> {
    if let Some(size) = request.tty {
        let (master, slave) = tty::open(size, daemon.config.uid, daemon.config.gid)?;
        let master = Rc::new(watch(master, Interest::READABLE | Interest::WRITABLE)?);
        let pipes = vec![Pipe { fd: master.clone(), channel: 1, empty: false }];
        return Ok(Streams { input: Input::to_terminal(master), pipes, child: vec![slave] });
    }
    let (mut pipes, mut child) = (Vec::new(), Vec::new());
    for channel in [1, 2] {
        let (read, write) = pipe(daemon)?;
        rustix::io::ioctl_fionbio(&read, true)?;
        pipes.push(Pipe { fd: Rc::new(watch(read, Interest::READABLE)?), channel, empty: false });
        child.push(write);
    }
    let input = if request.stdin {
        let (read, write) = pipe(daemon)?;
        rustix::io::ioctl_fionbio(&write, true)?;
        child.push(read);
        Input::pipe(watch(write, Interest::WRITABLE)?)
    } else {
        Input::none()
    };
    Ok(Streams { input, pipes, child })
}

/// Find a supervisor for a command: a standing one, or a new one.
fn supervise(
    daemon: &Daemon,
    plan: &Plan,
    streams: [BorrowedFd<'_>; 3],
    slot: Option<&Slot>,
    announce: bool,
) -> Result<(Rc<AsyncFd<OwnedFd>>, i32), Failure> {
    let mut message = standing::message(plan);
    while let Some(message) = &mut message
        && let Some((control, pid)) = daemon.pool.take()
    {
        let newborn = if daemon.pool.is_empty() { standing::pair().ok() } else { None };
        let breed = newborn.as_ref().map(|(_, other)| other.as_fd());
        let job = Job { streams, group: slot.map(Slot::directory), breed, announce };
        if standing::give(control.get_ref(), message, &job).is_ok() {
            daemon.pool.expect(newborn.map(|(own, _)| own));
            return Ok((control, pid.as_raw_nonzero().get()));
        }
    }
    let (control, other) = standing::pair()?;
    let control = Rc::new(watch(control, Interest::READABLE)?);
    let [stdin, stdout, stderr] = streams.map(|stream| stream.as_raw_fd());
    let group = slot.map_or(-1, |slot| slot.directory().as_raw_fd());
    let descriptors = Descriptors { control: other.as_raw_fd(), stdin, stdout, stderr, group, announce };
    let pid = supervisor::spawn(plan, &descriptors).map_err(|error| {
        let errno = error.raw_os_error().unwrap_or(0);
        Failure::new(
            Code::of(Errno::from_raw_os_error(errno)),
            format!("no process for a command: {}", words(errno)),
        )
    })?;
    Ok((control, pid))
}

pub fn start(daemon: &Rc<Daemon>, stream: Rc<Stream>, request: Request) -> Result<Running, Failure> {
    let started = Instant::now();
    let absent = daemon.absence.total(started);
    if let Some(name) = &request.name {
        daemon.objects.admit(&name.id)?;
    }
    let Streams { input, pipes, child } = streams(daemon, &request)?;
    let streams = match &child[..] {
        [slave] => [slave, slave, slave],
        [stdout, stderr] => [&daemon.null, stdout, stderr],
        [stdout, stderr, stdin, ..] => [stdin, stdout, stderr],
        [] => return Err(Failure::new(Code::Internal, "a command without output")),
    };
    let slot = daemon.machine.as_ref().map(|machine| machine.group.take()).transpose()?;
    // Where the host sees the sandbox's control group, it counts for commands that are not kept.
    let counted = request.name.is_some() || daemon.machine.is_some();
    let kills = counted.then(|| daemon.kills.count()).flatten();
    let streams = streams.map(AsFd::as_fd);
    let announce = request.name.is_some();
    let (control, pid) = match supervise(daemon, &request.plan, streams, slot.as_ref(), announce) {
        Ok(supervisor) => supervisor,
        Err(failure) => {
            if let (Some(machine), Some(slot)) = (&daemon.machine, slot) {
                machine.group.give(slot);
            }
            return Err(failure);
        }
    };
    daemon.supervisor_started(pid, slot);
    let has_tty = request.tty.is_some();
    let object = request.name.map(|name| {
        let object = Object::new(name, has_tty, input.clone(), control.clone());
        daemon.objects.add(object.clone());
        object
    });
    Ok(Running {
        daemon: daemon.clone(),
        stream: Some(stream),
        object,
        input,
        detach: request.detach,
        program: request.program,
        started,
        absent,
        kills,
        control: Some(control),
        pipes,
        slave: child.into_iter().next().filter(|_| has_tty),
        news: None,
        failed: None,
        exit: None,
        killing: None,
        killed: false,
        stuck: false,
        timed_out: false,
        drained: 0,
    })
}
