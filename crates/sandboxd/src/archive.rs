//! The asynchronous sides of export and import: bytes between the stream and a thread.
//!
//! An archive may take long and its peer may be slow, so it has a thread of its own for all its time; a third
//! request waits for one of the two to be free. The channels in between hold a few pieces.

use crate::conn::{Gone, Input, Stream};
use crate::daemon::Daemon;
use crate::errors::{Code, Failure};
use crate::fsops::Answer;
use crate::pack::MapWriter;
use crate::tarout::View;
use crate::tarread::{Next, Reader};
use crate::tarsink::Stop;
use crate::wire::HEADER;
use crate::{resolve, tarin, tarout, workers};
use rustix::fs::{Mode, OFlags, openat};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use tokio::sync::mpsc;

const PIECES: usize = 4;

pub async fn export(daemon: &Daemon, stream: &Rc<Stream>, max_bytes: u64, path: Option<Vec<u8>>) -> Answer {
    let workspace = daemon.config.workspace.clone();
    send(daemon, stream, View::Tree, max_bytes, move || place(&workspace, path.as_deref(), false)).await
}

/// What the workspace differs in from the layers that it is mounted over.
pub async fn changes(daemon: &Daemon, stream: &Rc<Stream>, max_bytes: u64) -> Answer {
    let Some(upper) = daemon.machine.as_ref().and_then(|machine| machine.changes()) else {
        return Err(Failure::new(Code::Unsupported, "the workspace is mounted over no layers"));
    };
    let upper = upper.try_clone().map_err(|error| Failure::new(Code::Internal, error.to_string()))?;
    send(daemon, stream, View::Changes, max_bytes, move || {
        Ok(openat(&upper, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    })
    .await
}

async fn send(
    daemon: &Daemon,
    stream: &Rc<Stream>,
    view: View,
    max_bytes: u64,
    root: impl FnOnce() -> Result<OwnedFd, Failure> + Send + 'static,
) -> Answer {
    let (send, mut receive) = mpsc::channel::<Vec<u8>>(PIECES);
    let id = stream.id;
    // Two exports may run at once.
    let table_bytes = daemon.config.table_bytes / 2;
    let result = daemon.archives.run(move || tarout::export(root()?, view, max_bytes, table_bytes, id, send));
    while let Some(frame) = receive.recv().await {
        let cost = frame.len() - HEADER;
        if let Err(Gone) = stream.wait_room(cost).await {
            // The thread notices that nobody receives.
            return Ok(None);
        }
        stream.charge(cost);
        stream.send_frames(frame);
    }
    match result.await {
        Ok(summary) => Ok(Some(
            MapWriter::new(4)
                .uint("entries", summary.entries)
                .uint("file_bytes", summary.file_bytes)
                .pairs("skipped", &summary.skipped)
                .uint("skipped_total", summary.skipped_total)
                .done(),
        )),
        Err(Stop::Cancelled) => Ok(None),
        Err(Stop::Failed(failure)) => Err(failure),
    }
}

pub async fn import(daemon: &Daemon, stream: &Rc<Stream>, max_bytes: u64, path: Option<Vec<u8>>) -> Answer {
    let (send, mut receive) = mpsc::channel::<Input>(PIECES);
    let workspace = daemon.config.workspace.clone();
    let (uid, gid) = (daemon.config.uid, daemon.config.gid);
    let mut ended = false;
    let source = move || {
        if ended {
            return Next::Eof;
        }
        match receive.blocking_recv() {
            Some(Input::Data(bytes)) => Next::Data(bytes),
            Some(Input::Eof) => {
                ended = true;
                Next::Eof
            }
            None => Next::Aborted,
        }
    };
    let result = daemon.archives.run(move || {
        workers::become_user(uid, gid).map_err(not_the_user)?;
        let result = place(&workspace, path.as_deref(), true)
            .and_then(|root| tarin::import(root, max_bytes, Reader::new(source)));
        workers::become_root().map_err(not_the_user)?;
        result
    });
    tokio::pin!(result);
    loop {
        let input = tokio::select! {
            biased;
            // It is over before the archive is: that is an error.
            result = &mut result => return answer(result),
            input = stream.input() => input,
        };
        let Ok(input) = input else {
            return Ok(None);
        };
        let last = matches!(input, Input::Eof);
        if send.send(input).await.is_err() || last {
            break;
        }
    }
    answer(result.await)
}

/// The directory that an archive is of: the workspace, or one beneath it. It is opened again for reading, since the
/// walk gives descriptors that only look up names.
fn place(workspace: &[u8], path: Option<&[u8]>, make: bool) -> Result<OwnedFd, Failure> {
    let directory = resolve::directory(workspace, path.unwrap_or(workspace), make)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(&directory, ".", flags, Mode::empty())?)
}

fn not_the_user(error: std::io::Error) -> Failure {
    Failure::new(Code::Internal, format!("cannot change the user of a thread: {error}"))
}

fn answer(result: Result<tarin::Summary, Failure>) -> Answer {
    let summary = result?;
    Ok(Some(MapWriter::new(2).uint("entries", summary.entries).uint("file_bytes", summary.file_bytes).done()))
}
