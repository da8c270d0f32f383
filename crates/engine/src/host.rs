//! The calling thread and the threads that work for it.
//!
//! Whatever needs the caller (the index, the one writer, signals, progress) happens on the thread that called. The
//! work happens on others, which ask it through a [`Client`]. So callbacks need no lock, and the caller's interpreter
//! is held for the length of a callback alone. Nothing that a worker waits for waits for a worker: every wait of
//! theirs ends when [`serve`] has stopped.

use crate::error::{Error, Result};
use crate::format::Id;
use crate::read::{Locate, Location};
use crossbeam_channel::{Receiver, Sender, bounded, never, select, unbounded};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often signals are looked for and progress is told.
const PULSE: Duration = Duration::from_millis(100);
/// Buffers of records that wait for the caller.
const RECORDS_WAITING: usize = 2;
/// Ids in one question to the caller.
const MOST_IDS: usize = 4_096;

/// One record inside a buffer of records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub id: Id,
    /// Relative to the buffer.
    pub offset: usize,
    pub length: usize,
    /// Of a patch, and of nothing else.
    pub base: Option<Id>,
    pub depth: u8,
}

/// Whole records, one behind the other.
#[derive(Debug, Default)]
pub struct Records {
    pub bytes: Vec<u8>,
    pub rows: Vec<Row>,
}

/// How far the work is.
#[derive(Debug, Default)]
pub struct Done {
    pub files: AtomicU64,
    pub files_in_all: AtomicU64,
    pub bytes: AtomicU64,
    pub bytes_in_all: AtomicU64,
}

/// What the caller does for the workers; called from its own thread alone.
pub trait Host {
    fn locate(&mut self, ids: &[Id]) -> Result<Vec<Option<Location>>>;
    /// Whether the store, or its writer, holds each id.
    fn has(&mut self, ids: &[Id]) -> Result<Vec<bool>>;
    fn append(&mut self, records: &Records) -> Result<()>;
    /// Called about ten times in a second: an error ends the work.
    fn pulse(&mut self, done: &Done) -> Result<()>;
}

enum Query {
    Has(Vec<Id>, Sender<Vec<bool>>),
    Locate(Vec<Id>, Sender<Vec<Option<Location>>>),
}

/// A worker's way to the caller. Every method ends with [`Error::Stopped`] when the work is to end.
#[derive(Clone)]
pub struct Client {
    queries: Sender<Query>,
    records: Sender<Records>,
    used: Receiver<Vec<u8>>,
    stop: Arc<AtomicBool>,
    pub done: Arc<Done>,
}

impl Client {
    /// Whether to go on.
    pub fn check(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) { Err(Error::Stopped) } else { Ok(()) }
    }

    /// End the work of all.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Ask whether the store, or its writer, holds `ids`. A receiver without an answer says that the work has ended.
    pub fn ask(&self, ids: Vec<Id>) -> Result<Receiver<Vec<bool>>> {
        self.check()?;
        let (reply, answer) = bounded(1);
        self.queries.send(Query::Has(ids, reply)).map_err(|_| Error::Stopped)?;
        Ok(answer)
    }

    /// Give records to the caller; waits while it has enough.
    pub fn append(&self, records: Records) -> Result<()> {
        self.check()?;
        self.records.send(records).map_err(|_| Error::Stopped)
    }

    /// An empty buffer, perhaps one that was used before.
    pub fn buffer(&self) -> Vec<u8> {
        self.used.try_recv().unwrap_or_default()
    }
}

impl Locate for Client {
    fn locate(&self, ids: &[Id]) -> Result<Vec<Option<Location>>> {
        self.check()?;
        let (reply, answer) = bounded(1);
        self.queries.send(Query::Locate(ids.to_vec(), reply)).map_err(|_| Error::Stopped)?;
        answer.recv().map_err(|_| Error::Stopped)
    }
}

/// Run `work` on another thread and serve it from this one until it, and all to whom it gave its client, have ended.
pub fn serve<R: Send>(host: &mut dyn Host, work: impl FnOnce(Client) -> Result<R> + Send) -> Result<R> {
    let (queries, asked) = unbounded();
    let (records, given) = bounded(RECORDS_WAITING);
    let (back, used) = bounded(2 * RECORDS_WAITING);
    let client = Client { queries, records, used, stop: Arc::default(), done: Arc::default() };
    let (stop, done) = (Arc::clone(&client.stop), Arc::clone(&client.done));
    std::thread::scope(|scope| {
        let worker = scope.spawn(move || work(client));
        let served = serve_all(host, asked, given, &back, &done);
        if served.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        let worked = worker.join().unwrap_or_else(|panic| Err(Error::panicked(panic.as_ref())));
        served.and(worked)
    })
}

fn serve_all(
    host: &mut dyn Host,
    mut asked: Receiver<Query>,
    mut given: Receiver<Records>,
    back: &Sender<Vec<u8>>,
    done: &Done,
) -> Result<()> {
    let mut told = Instant::now();
    let (mut asking, mut giving) = (true, true);
    while asking || giving {
        select! {
            recv(asked) -> query => match query {
                Ok(query) => answer(host, query, &asked)?,
                Err(_) => (asking, asked) = (false, never()),
            },
            recv(given) -> records => match records {
                Ok(mut records) => {
                    host.append(&records)?;
                    records.bytes.clear();
                    let _ = back.try_send(records.bytes);
                }
                Err(_) => (giving, given) = (false, never()),
            },
            default(PULSE.saturating_sub(told.elapsed())) => {}
        }
        if told.elapsed() >= PULSE {
            host.pulse(done)?;
            told = Instant::now();
        }
    }
    // Once more, so that the end is told too.
    host.pulse(done)
}

/// Answer one query, and with it those of the same sort that wait behind it.
fn answer(host: &mut dyn Host, query: Query, asked: &Receiver<Query>) -> Result<()> {
    let mut waiting = Vec::new();
    let mut all = Vec::new();
    let mut next = Some(query);
    while let Some(query) = next.take() {
        match query {
            Query::Has(ids, reply) => {
                all.extend_from_slice(&ids);
                waiting.push((ids.len(), reply));
                if all.len() < MOST_IDS {
                    next = asked.try_recv().ok();
                }
            }
            Query::Locate(ids, reply) => {
                // One who no longer waits has ended.
                let _ = reply.send(host.locate(&ids)?);
                if all.is_empty() {
                    return Ok(());
                }
            }
        }
    }
    let mut known = host.has(&all)?.into_iter();
    for (count, reply) in waiting {
        let _ = reply.send(known.by_ref().take(count).collect());
    }
    Ok(())
}

#[cfg(test)]
mod tests;
