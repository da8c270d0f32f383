//! The asynchronous side of `fs.watch`: the kernel's events to the stream.
//!
//! Events are read and turned into changes by jobs on threads that are the sandbox user (`watchtree.rs`). While the
//! client takes nothing the kernel's queue fills; what does not fit is lost, the client is told, and the watch starts
//! again from the tree as it is.

use crate::conn::{Fate, Gone, Stream};
use crate::daemon::Daemon;
use crate::errors::{Code, Failure};
use crate::fsops::Answer;
use crate::listing::Listing;
use crate::pack::MapWriter;
use crate::watchtree::{Event, Tree};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

const MAX_WATCHES: usize = 16;
/// Directories that one job adds.
const TURN: usize = 200;
/// How long half of a move waits for the other.
const HALF_TIME: Duration = Duration::from_millis(10);

/// A watch's place among those of the sandbox.
struct Place<'a>(&'a Daemon);

impl<'a> Place<'a> {
    fn take(daemon: &'a Daemon) -> Result<Place<'a>, Failure> {
        if daemon.watches.get() >= MAX_WATCHES {
            return Err(Failure::new(Code::Exhausted, format!("there are {MAX_WATCHES} watches")));
        }
        daemon.watches.set(daemon.watches.get() + 1);
        Ok(Place(daemon))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.watches.set(self.0.watches.get() - 1);
    }
}

/// Why a watch is over or has to begin again.
enum Stop {
    Gone,
    Failed(Failure),
    Overflow,
}

impl From<Gone> for Stop {
    fn from(_: Gone) -> Stop {
        Stop::Gone
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Failed(failure)
    }
}

pub async fn watch(daemon: &Daemon, stream: &Stream, path: Vec<u8>, recursive: bool) -> Answer {
    let _place = Place::take(daemon)?;
    let mut first = true;
    loop {
        let stop = match follow(daemon, stream, path.clone(), recursive, first).await {
            Err(stop) => stop,
            Ok(never) => match never {},
        };
        match stop {
            Stop::Gone => return Ok(None),
            Stop::Failed(failure) => return Err(failure),
            Stop::Overflow => first = false,
        }
    }
}

enum Never {}

async fn follow(
    daemon: &Daemon,
    stream: &Stream,
    path: Vec<u8>,
    recursive: bool,
    first: bool,
) -> Result<Never, Stop> {
    let descriptor = match inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK) {
        // Beyond the number of instances that the kernel allows.
        Err(Errno::MFILE) => return Err(Failure::new(Code::Exhausted, "no more watches").into()),
        result => Arc::new(result.map_err(Failure::from)?),
    };
    // SAFETY: the descriptor stays open and the same as long as its Arc, which the AsyncFd owns a share of.
    let events = unsafe { AsyncFd::register_with_interest(descriptor.clone(), Interest::READABLE) }
        .map_err(|error| Failure::new(Code::Exhausted, error.to_string()))?;
    let (inotify, replacing) = (descriptor.clone(), daemon.replacing.clone());
    let mut tree = daemon.files.run(move || Tree::new(inotify, path, recursive, replacing)).await?;
    loop {
        let (back, more) = daemon
            .files
            .run(move || {
                let more = tree.grow(TURN, false)?;
                Ok::<_, Failure>((tree, more))
            })
            .await?;
        tree = back;
        if stream.fate() != Fate::Open {
            return Err(Stop::Gone);
        }
        if !more {
            break;
        }
    }
    if first {
        stream.note(&MapWriter::new(1).bool("ready", true).done()).await?;
    } else {
        // What was lost is told once the watch sees everything again.
        send(stream, vec![MapWriter::new(1).bool("overflow", true).done()]).await?;
    }
    loop {
        let descriptor = descriptor.clone();
        let turn = daemon.files.run(move || turn(&descriptor, tree)).await;
        tree = turn.tree;
        send(stream, tree.take_changes()).await?;
        match turn.result {
            Ok(Read::More) => continue,
            Ok(Read::Empty) => {}
            Ok(Read::Overflow) => return Err(Stop::Overflow),
            Err(failure) => return Err(failure.into()),
        }
        tokio::select! {
            ready = events.readable() => match ready {
                Ok(mut ready) => ready.clear_ready(),
                Err(error) => return Err(Failure::new(Code::Internal, error.to_string()).into()),
            },
            () = tokio::time::sleep(HALF_TIME), if tree.waits_for_halves() => {}
            () = stream.changed() => {}
        }
        if stream.fate() != Fate::Open {
            return Err(Stop::Gone);
        }
    }
}

async fn send(stream: &Stream, changes: Vec<Vec<u8>>) -> Result<(), Gone> {
    let mut frames = Vec::new();
    for change in &changes {
        Listing::add(&mut frames, change);
    }
    for frame in frames {
        frame.send(stream).await?;
    }
    Ok(())
}

enum Read {
    More,
    Empty,
    Overflow,
}

struct Turn {
    tree: Tree,
    result: Result<Read, Failure>,
}

/// Take one buffer of events, and watch the directories that they brought.
fn turn(inotify: &OwnedFd, mut tree: Tree) -> Turn {
    let result = take(inotify, &mut tree);
    Turn { tree, result }
}

fn take(inotify: &OwnedFd, tree: &mut Tree) -> Result<Read, Failure> {
    let mut buffer = [MaybeUninit::uninit(); 32 << 10];
    let mut reader = inotify::Reader::new(inotify, &mut buffer);
    let mut any = false;
    while !any || !reader.is_buffer_empty() {
        let event = match reader.next() {
            Ok(event) => event,
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => break,
            Err(errno) => return Err(errno.into()),
        };
        any = true;
        if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
            return Ok(Read::Overflow);
        }
        let name = event.file_name().map_or(Vec::new(), |name| name.to_bytes().to_vec());
        let (watch, flags, cookie) = (event.wd(), event.events(), event.cookie());
        tree.take(Event { watch, flags, cookie, name })?;
        // A directory is watched before the events behind it are taken, which may come from it.
        while tree.grow(TURN, true)? {}
    }
    if any {
        return Ok(Read::More);
    }
    tree.settle();
    Ok(Read::Empty)
}
