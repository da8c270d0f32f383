//! The operations on commands that others have started.

use super::input::Fault;
use super::object::{End, Object, has_ended};
use super::tty::Size;
use crate::conn::{Fate, Stream};
use crate::daemon::Daemon;
use crate::errors::{Code, Failure};
use crate::fsops::Answer;
use crate::listing::Listing;
use crate::pack::MapWriter;
use crate::tree::Outcome;
use std::rc::Rc;

/// The longest frame that is made of a ring at once.
const PIECE: usize = 32 << 10;

fn nothing() -> Vec<u8> {
    MapWriter::new(0).done()
}

/// Wait for news of the command; `false` when the stream is over for its peer.
async fn news(object: &Object, stream: &Stream) -> bool {
    tokio::select! {
        () = object.changed.notified() => {}
        () = stream.changed() => {}
    }
    stream.fate() == Fate::Open
}

/// Send what the ring holds from a cursor on, and what comes while `follow` holds.
pub async fn attach(daemon: &Daemon, stream: &Stream, id: &str, mut cursor: u64, follow: bool) -> Answer {
    let object = daemon.objects.get(id)?;
    if cursor > object.range().1 {
        return Err(Failure::invalid("cursor is beyond the output"));
    }
    loop {
        let (first, end) = object.range();
        if cursor < end {
            // The ring goes on while room is waited for, so it is asked again behind the wait.
            let Ok(room) = stream.wait_room(32).await else {
                return Ok(None);
            };
            let first = object.range().0;
            if cursor < first {
                stream.send(4, &MapWriter::new(1).uint("gap", first - cursor).done());
                cursor = first;
            } else if let Some((channel, bytes)) = object.read(cursor, PIECE.min(room - 1)) {
                cursor += bytes.len() as u64;
                stream.send(channel, &bytes);
            }
            continue;
        }
        debug_assert!(cursor >= first);
        match object.end() {
            Some(End::Exit(exit)) => {
                return Ok(Some(MapWriter::new(2).raw("exit", &exit).uint("cursor", cursor).done()));
            }
            Some(End::Error(failure)) => return Err(failure),
            None if !follow => return Ok(Some(MapWriter::new(1).uint("cursor", cursor).done())),
            None => {
                if !news(&object, stream).await {
                    return Ok(None);
                }
            }
        }
    }
}

pub async fn list(daemon: &Daemon, stream: &Stream) -> Answer {
    let all = daemon.objects.all();
    for some in all.chunks(64) {
        let mut frames = Vec::new();
        for object in some {
            Listing::add(&mut frames, &object.describe());
        }
        for frame in frames {
            if frame.send(stream).await.is_err() {
                return Ok(None);
            }
        }
    }
    Ok(Some(MapWriter::new(1).uint("count", all.len() as u64).done()))
}

pub fn status(daemon: &Daemon, id: &str) -> Result<Vec<u8>, Failure> {
    Ok(MapWriter::new(1).raw("exec", &daemon.objects.get(id)?.describe()).done())
}

pub async fn stdin(daemon: &Daemon, stream: &Rc<Stream>, id: &str) -> Answer {
    let object = daemon.objects.get(id)?;
    let over = async {
        while stream.fate() == Fate::Open {
            stream.changed().await;
        }
    };
    tokio::select! {
        result = object.input.feed(stream, false) => match result {
            Ok(taken) => Ok(Some(MapWriter::new(1).uint("taken", taken).done())),
            Err(Fault::Failed(failure)) => Err(failure),
            Err(Fault::Gone) => Ok(None),
        },
        () = over => Ok(None),
    }
}

pub fn close(daemon: &Daemon, id: &str) -> Result<Vec<u8>, Failure> {
    daemon.objects.get(id)?.input.close()?;
    Ok(nothing())
}

pub async fn signal(daemon: &Daemon, id: &str, signal: u8) -> Result<Vec<u8>, Failure> {
    let answer = daemon.objects.get(id)?.signal(signal)?;
    // The command may end before its supervisor answers.
    let (processes, outcome) = answer.await.map_err(|_| has_ended())?;
    match outcome {
        Outcome::Done if processes == 0 => Err(has_ended()),
        Outcome::Done => Ok(MapWriter::new(1).uint("processes", processes).done()),
        Outcome::Hidden => {
            Err(Failure::new(Code::Unsupported, "the processes of the command are hidden from the daemon"))
        }
        Outcome::Exhausted => Err(Failure::new(Code::Exhausted, "no memory to look for the processes")),
        Outcome::Unsettled => {
            Err(Failure::new(Code::Stuck, "new processes of the command appeared all the time"))
        }
    }
}

pub fn resize(daemon: &Daemon, id: &str, size: Size) -> Result<Vec<u8>, Failure> {
    daemon.objects.get(id)?.resize(size)?;
    Ok(nothing())
}

/// End a command with its whole tree where it runs, and forget it.
pub async fn forget(daemon: &Daemon, stream: &Stream, id: &str) -> Answer {
    let object = daemon.objects.get(id)?;
    if object.is_running() {
        object.doom();
        while object.is_running() {
            if !news(&object, stream).await {
                return Ok(None);
            }
        }
        if let Some(End::Error(failure)) = object.end().filter(is_stuck) {
            return Err(failure);
        }
    }
    daemon.objects.forget(&object);
    Ok(Some(nothing()))
}

fn is_stuck(end: &End) -> bool {
    matches!(end, End::Error(failure) if failure.code == Code::Stuck)
}
