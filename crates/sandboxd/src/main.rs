//! `sandboxd`, the daemon inside every sandbox.
//!
//! It listens on one socket, which the server connects to, and does what `spec/wire.md` says: commands, files,
//! archives. As the first process of a microVM it is [`machine`]'s, and has a port instead. It is usually PID 1 of the sandbox and root with few capabilities; commands are another user with
//! none. Everything that must not fail later (threads, descriptors) is made before it says that it is ready.

mod absence;
mod archive;
mod bridge;
mod change;
mod children;
mod config;
mod conn;
mod daemon;
mod dial;
mod errors;
mod exec;
mod fsops;
mod launch;
mod listing;
mod lookup;
mod machine;
mod memory;
mod ops;
mod pack;
mod probe;
mod resolve;
mod seccomp;
mod standing;
mod supervisor;
mod sys;
mod tarfmt;
mod tarin;
mod tarout;
mod tarread;
mod tarsink;
#[cfg(test)]
mod tartests;
mod transport;
mod tree;
mod uploads;
mod watch;
mod watchtree;
mod wire;
mod workers;

use config::{Command, Config, Place};
use daemon::Daemon;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::FdFlags;
use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, setrlimit};
use std::io::Write;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{LocalSet, spawn_local};

const PIDS_MAX: &str = "/sys/fs/cgroup/pids/pids.max";

fn main() -> ExitCode {
    if machine::is_init() {
        machine::run();
    }
    match config::arguments(std::env::args_os().skip(1)) {
        Ok(Command::Version) => {
            println!("sandboxd {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        Ok(Command::Probe { json }) => probe::run(json),
        Ok(Command::Bridge { path }) => bridge::run(&path),
        Ok(Command::Serve { listen, config }) => match serve(listen, config) {
            Ok(()) => ExitCode::SUCCESS,
            Err(message) => {
                complain(&message);
                ExitCode::FAILURE
            }
        },
        Err(message) => {
            complain(&format!("{message}\n{}", config::USAGE));
            ExitCode::from(2)
        }
    }
}

fn serve(listen: Place, config: Place) -> Result<(), String> {
    for place in [&listen, &config] {
        if let Place::Descriptor(fd) = place {
            close_on_exec(*fd)?;
        }
    }
    harden()?;
    let open_files = raise_open_files();
    let standing = standing::first();
    let private = config.clone();
    let config = Config::load(config)?;
    if let Some(limit) = config.pids_limit {
        limit_processes(limit)?;
    }
    // With a workspace elsewhere this is a test on somebody's machine, whose devices stay as they are.
    if config.workspace == b"/workspace" {
        keep_fuse_private()?;
    }
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| format!("cannot open /dev/null: {errno}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start: {error}"))?;
    let (listener, socket) = listener(listen)?;
    let address = rustix::net::getsockname(&listener).map_err(|errno| format!("cannot listen: {errno}"))?;
    let result = LocalSet::new().block_on(&runtime, async {
        let daemon = Daemon::new(config, open_files, null, Some(address), socket.is_some(), None)
            .map_err(|error| format!("cannot start: {error}"))?;
        standing.into_iter().for_each(|one| daemon.pool.expect(Some(one)));
        let broken = |error| format!("cannot watch signals: {error}");
        let mut children = signal(SignalKind::child()).map_err(broken)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(broken)?;
        // From now on the signal does nothing by itself.
        let _ = signal(SignalKind::user_defined1()).map_err(broken)?;
        let reaper = daemon.clone();
        spawn_local(async move {
            loop {
                reaper.reap();
                children.recv().await;
            }
        });
        say_ready();
        let mut listener = listener;
        loop {
            let accepting = tokio::net::UnixListener::from_std(listener)
                .map_err(|error| format!("cannot listen: {error}"))?;
            tokio::select! {
                () = daemon.accept(accepting) => break,
                _ = terminate.recv() => break,
                () = daemon.shutdown.notified() => break,
                () = daemon.parting.notified() => {}
            }
            let Some(path) = &socket else { break };
            // Only signals that come after this are meant.
            let return_ = signal(SignalKind::user_defined1()).map_err(broken)?;
            let _ = std::fs::remove_file(path);
            daemon.say_goodbye("checkpoint", "the daemon closes its sockets for a checkpoint");
            tokio::select! {
                again = listen_again(return_, path, &private, &daemon) => listener = again,
                _ = terminate.recv() => break,
            }
        }
        daemon.say_goodbye("shutdown", "the daemon was told to end");
        // One turn for the last words; whoever does not read them is not waited for.
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        Ok(())
    });
    if let Some(path) = socket {
        let _ = std::fs::remove_file(path);
    }
    // Threads may be in the middle of a job: leave without waiting for them.
    match result {
        Ok(()) => std::process::exit(0),
        Err(message) => Err(message),
    }
}

fn close_on_exec(fd: RawFd) -> Result<(), String> {
    // SAFETY: the descriptor is only looked at here; the call fails when it is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC).map_err(|errno| format!("descriptor {fd}: {errno}"))
}

/// Nobody else looks into this process, and no program that it starts gains anything.
fn harden() -> Result<(), String> {
    let failed = |errno| format!("cannot harden the process: {errno}");
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed)?;
    rustix::thread::set_no_new_privs(true).map_err(failed)?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(failed)?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    // SAFETY: sets a number of the allocator before there are threads: one heap for all, since a heap for each
    // of the few threads would only cost memory.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    Ok(())
}

/// Take as many descriptors as are allowed, and answer what commands are to have.
fn raise_open_files() -> libc::rlimit {
    let before = getrlimit(Resource::Nofile);
    // Without the right to it the old limit has to do.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: before.maximum, maximum: before.maximum });
    let raw = |limit: Option<u64>| limit.unwrap_or(libc::RLIM_INFINITY);
    libc::rlimit { rlim_cur: raw(before.current), rlim_max: raw(before.maximum) }
}

/// A command that can open `/dev/fuse` could mount, so the device is the daemon's alone.
fn keep_fuse_private() -> Result<(), String> {
    match rustix::fs::chmod("/dev/fuse", Mode::from_raw_mode(0o600)) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(errno) => Err(format!("cannot narrow /dev/fuse: {errno}")),
    }
}

/// The listening socket, and its path where it was made here.
fn listener(place: Place) -> Result<(StdListener, Option<PathBuf>), String> {
    let (listener, path) = match place {
        // SAFETY: the descriptor was handed in for us to own and was found open by `close_on_exec`.
        Place::Descriptor(fd) => (StdListener::from(unsafe { OwnedFd::from_raw_fd(fd) }), None),
        Place::Path(path) => (bind(&path)?, Some(path)),
    };
    listener.local_addr().map_err(|error| format!("not a listening unix socket: {error}"))?;
    listener.set_nonblocking(true).map_err(|error| format!("cannot listen: {error}"))?;
    Ok((listener, path))
}

/// Wait for the signal that says where we are now: still here, or in a sandbox restored from a checkpoint, whose own
/// key is in its configuration. What fails is tried again at the next signal: to end would end the sandbox.
async fn listen_again(mut told: Signal, path: &Path, private: &Place, daemon: &Daemon) -> StdListener {
    loop {
        told.recv().await;
        let again = Config::load(private.clone()).and_then(|config| {
            let listener = bind(path)?;
            listener.set_nonblocking(true).map_err(|error| format!("cannot listen: {error}"))?;
            Ok((config.key, listener))
        });
        match again {
            Ok((key, listener)) => {
                daemon.key.set(key);
                daemon.absence.end(tokio::time::Instant::now());
                return listener;
            }
            Err(message) => complain(&message),
        }
    }
}

fn bind(path: &Path) -> Result<StdListener, String> {
    // A socket that an earlier daemon left; anything else stays and makes the call below fail.
    if let Ok(stat) = rustix::fs::lstat(path)
        && FileType::from_raw_mode(stat.st_mode) == FileType::Socket
    {
        let _ = rustix::fs::unlink(path);
    }
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let listener =
        StdListener::bind(path).map_err(|error| format!("cannot bind {}: {error}", path.display()));
    rustix::process::umask(before);
    listener
}

/// Have the sandbox's own kernel limit its processes, the daemon's threads among them. gVisor's controller is that of
/// control groups version 1, mounted for the daemon alone.
fn limit_processes(limit: u64) -> Result<(), String> {
    std::fs::write(PIDS_MAX, limit.to_string()).map_err(|error| format!("cannot limit processes: {error}"))
}

/// What is said may go to a log on the sandbox's own disk. Where that is full, nobody reads it; to end would end the
/// sandbox.
fn say_ready() {
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "sandboxd ready generation={}", wire::GENERATION).and_then(|()| stdout.flush());
}

fn complain(message: &str) {
    let _ = writeln!(std::io::stderr(), "sandboxd: {message}");
}
