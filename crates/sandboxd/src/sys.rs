//! What the daemon says of itself and its sandbox.

use crate::children;
use crate::conn::Stream;
use crate::daemon::Daemon;
use crate::errors::{Code, Failure};
use crate::fsops::Answer;
use crate::machine::{self, Machine};
use crate::pack::MapWriter;
use rustix::fs::{CWD, Mode, OFlags, RawDir, openat};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use tokio::time::Instant;

pub fn info(daemon: &Daemon) -> Vec<u8> {
    MapWriter::new(6)
        .str("version", env!("CARGO_PKG_VERSION"))
        .uint("pid", u64::from(std::process::id()))
        .uint("uid", u64::from(daemon.config.uid))
        .uint("gid", u64::from(daemon.config.gid))
        .uint("execs", daemon.execs() as u64)
        .uint("uptime_ms", daemon.started.elapsed().as_millis() as u64)
        .done()
}

pub fn stats(daemon: &Daemon) -> Result<Vec<u8>, Failure> {
    let processes = match &daemon.machine {
        // Its kernel's threads are in `/proc` too.
        Some(_) => daemon.command_processes()?,
        None => {
            let all = processes()?;
            // Its children are supervisors: busy, waiting, just forked, or about to end.
            let mut own = 1;
            children::for_each(|_| own += 1);
            all.saturating_sub(own)
        }
    };
    Ok(MapWriter::new(4)
        .uint("processes", processes)
        .uint("execs", daemon.objects.len() as u64)
        .uint("memory_bytes", resident()?)
        .uint("ring_bytes", daemon.objects.ring_bytes() as u64)
        .done())
}

/// Write everything of the workspace's file system to its disk.
pub async fn sync(daemon: &Daemon) -> Answer {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // Opened by root: a workspace that its user may not read is synced too.
    let workspace = openat(CWD, &daemon.config.workspace[..], flags, Mode::empty())?;
    daemon.files.run(move || rustix::fs::syncfs(&workspace)).await?;
    Ok(Some(MapWriter::new(0).done()))
}

/// Answer, and have the daemon end. The supervisors end their trees when it is gone.
pub fn shutdown(daemon: &Daemon, stream: &Stream) -> Answer {
    stream.end(&MapWriter::new(0).done());
    daemon.shutdown.notify_one();
    Ok(None)
}

/// Answer, and have the daemon close its sockets, which lead to the host and so belong to no checkpoint.
pub fn prepare_checkpoint(daemon: &Daemon, stream: &Stream) -> Answer {
    if !daemon.can_part {
        return Err(Failure::new(
            Code::Unsupported,
            "the daemon was given its socket and cannot make another",
        ));
    }
    daemon.absence.begin(Instant::now());
    stream.end(&MapWriter::new(0).done());
    daemon.parting.notify_one();
    Ok(None)
}

/// Stop every command where it is. The time until the thaw counts for no deadline.
pub async fn freeze(daemon: &Daemon) -> Answer {
    let machine = freezer(daemon)?;
    daemon.absence.begin(Instant::now());
    match machine.group.freeze().await {
        Ok(true) => Ok(Some(MapWriter::new(0).done())),
        Ok(false) => {
            daemon.absence.end(Instant::now());
            Err(Failure::new(Code::Stuck, "a command could not be stopped in time; all go on"))
        }
        Err(errno) => {
            daemon.absence.end(Instant::now());
            Err(errno.into())
        }
    }
}

/// Set the clock where it is given, and let every command go on.
pub fn thaw(daemon: &Daemon, clock_ns: Option<u64>) -> Answer {
    let machine = freezer(daemon)?;
    if let Some(now_ns) = clock_ns {
        machine::set_clock(now_ns)?;
    }
    machine.group.thaw()?;
    daemon.absence.end(Instant::now());
    Ok(Some(MapWriter::new(0).done()))
}

fn freezer(daemon: &Daemon) -> Result<&Machine, Failure> {
    daemon.machine.as_deref().ok_or_else(|| {
        Failure::new(Code::Unsupported, "the daemon is no machine's first process and has no freezer")
    })
}

/// All that `/proc` has a directory for.
fn processes() -> Result<u64, Failure> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let proc = openat(CWD, "/proc", flags, Mode::empty())?;
    let mut buffer = [MaybeUninit::uninit(); 8 << 10];
    let mut reader = RawDir::new(&proc, &mut buffer);
    let mut count = 0;
    while let Some(item) = reader.next() {
        match item {
            Ok(item) => count += u64::from(item.file_name().to_bytes().iter().all(u8::is_ascii_digit)),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(count)
}

/// The daemon's own memory: the second field of statm, in pages.
fn resident() -> Result<u64, Failure> {
    let file = openat(CWD, "/proc/self/statm", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = [0u8; 128];
    let count = rustix::io::read(&file, &mut bytes)?;
    let pages =
        std::str::from_utf8(&bytes[..count]).ok().and_then(|text| text.split(' ').nth(1)?.parse().ok());
    Ok(pages.unwrap_or(0u64) * rustix::param::page_size() as u64)
}
