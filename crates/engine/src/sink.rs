//! The way of new objects into records.
//!
//! A [`Collector`] takes objects that were hashed, forgets those that this capture has seen before, and gathers the
//! rest in a [`Batch`]. A [`Storer`] asks the caller which objects of a batch the store lacks, goes on while the answer
//! is on its way, and makes records of those. What is held is bounded by bytes at every step.

use crate::error::{Error, Result};
use crate::format::{Id, Kind, identity};
use crate::host::{Client, Records, Row};
use crate::read::Reader;
use crate::record::{Base, Encoder};
use crossbeam_channel::Receiver;
use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Mutex, PoisonError};

/// Bytes and objects of a batch: it is handed on when it has as many.
pub const BATCH_BYTES: usize = 1 << 20;
const BATCH_ITEMS: usize = 1_024;
/// Batches of one worker whose answers are on their way.
const WAITING: usize = 2;
/// Empty batches that are kept for the next.
const SPARE: usize = 3;
/// Bytes of records that are handed over at a time.
const RECORDS_BYTES: usize = 4 << 20;
/// Ids in each generation of what was seen.
const SEEN: usize = 1 << 19;
const SHARDS: usize = 64;

/// One object of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Item {
    pub id: Id,
    pub kind: Kind,
    pub start: u32,
    pub length: u32,
    /// An object of the store that this one probably resembles.
    pub base: Option<Id>,
}

/// Objects side by side. Not every byte of the arena need belong to one.
#[derive(Debug, Default)]
pub struct Batch {
    pub arena: Vec<u8>,
    pub items: Vec<Item>,
}

impl Batch {
    fn clear(&mut self) {
        self.arena.clear();
        self.items.clear();
    }

    fn full(&self) -> bool {
        self.arena.len() >= BATCH_BYTES || self.items.len() >= BATCH_ITEMS
    }
}

/// The ids that this capture met last, shared by all workers. An id is forgotten only long after its object was given
/// to the caller, who then knows of it.
pub struct Seen {
    shards: Vec<Mutex<Generations>>,
}

#[derive(Default)]
struct Generations {
    young: HashSet<Id, BuildHasherDefault<IdHasher>>,
    old: HashSet<Id, BuildHasherDefault<IdHasher>>,
}

/// An id is a hash already.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(last) = bytes.last_chunk() {
            self.0 = u64::from_ne_bytes(*last);
        }
    }

    fn write_usize(&mut self, _length: usize) {}
}

impl Default for Seen {
    fn default() -> Seen {
        Seen { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }
}

impl Seen {
    /// Whether this is the first time.
    fn first(&self, id: &Id) -> bool {
        let shard = &self.shards[usize::from(id[0]) % SHARDS];
        let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        if shard.old.contains(id) || !shard.young.insert(*id) {
            return false;
        }
        if shard.young.len() >= SEEN / SHARDS {
            shard.old = std::mem::take(&mut shard.young);
        }
        true
    }
}

/// Where batches go.
pub trait Outlet {
    /// Take a batch; give an empty one back.
    fn take(&mut self, batch: Batch) -> Result<Batch>;
}

/// Gathers objects.
pub struct Collector<'a, O> {
    seen: &'a Seen,
    batch: Batch,
    pub outlet: O,
}

impl<'a, O: Outlet> Collector<'a, O> {
    pub fn new(seen: &'a Seen, outlet: O) -> Collector<'a, O> {
        Collector { seen, batch: Batch::default(), outlet }
    }

    /// Keep an object and return its id.
    pub fn put(&mut self, kind: Kind, canonical: &[u8], base: Option<Id>) -> Result<Id> {
        let id = identity(kind, canonical);
        self.put_as(id, kind, canonical, base)?;
        Ok(id)
    }

    /// Keep an object whose id is known.
    pub fn put_as(&mut self, id: Id, kind: Kind, canonical: &[u8], base: Option<Id>) -> Result<()> {
        if self.seen.first(&id) {
            let start = self.batch.arena.len() as u32;
            self.batch.arena.extend_from_slice(canonical);
            self.batch.items.push(Item { id, kind, start, length: canonical.len() as u32, base });
            self.hand_on(false)?;
        }
        Ok(())
    }

    /// Room for a small object behind the others, to be filled and then given to [`Collector::keep`].
    pub fn room(&mut self) -> &mut Vec<u8> {
        &mut self.batch.arena
    }

    /// Keep the blob that fills the arena from `start` on.
    pub fn keep(&mut self, start: usize, base: Option<Id>) -> Result<Id> {
        let id = identity(Kind::Blob, &self.batch.arena[start..]);
        if self.seen.first(&id) {
            let length = (self.batch.arena.len() - start) as u32;
            self.batch.items.push(Item { id, kind: Kind::Blob, start: start as u32, length, base });
            self.hand_on(false)?;
        } else {
            self.batch.arena.truncate(start);
        }
        Ok(id)
    }

    /// Keep those blobs of an arena that were not seen before.
    pub fn keep_all(&mut self, arena: Vec<u8>, items: impl Iterator<Item = Item>) -> Result<Vec<u8>> {
        let items = items.filter(|item| self.seen.first(&item.id)).collect::<Vec<_>>();
        if items.is_empty() {
            return Ok(arena);
        }
        Ok(self.outlet.take(Batch { arena, items })?.arena)
    }

    /// Hand on what is gathered, or with `all` unset only when it is enough.
    pub fn hand_on(&mut self, all: bool) -> Result<()> {
        if self.batch.full() || (all && !self.batch.items.is_empty()) {
            self.batch = self.outlet.take(std::mem::take(&mut self.batch))?;
            self.batch.clear();
        }
        Ok(())
    }
}

/// Makes records of what the store lacks.
pub struct Storer<'a> {
    client: Client,
    /// Reads the bases of patches.
    reader: &'a Reader<'a>,
    encoder: Encoder,
    waiting: VecDeque<(Batch, Receiver<Vec<bool>>)>,
    spare: Vec<Batch>,
    records: Records,
}

impl<'a> Storer<'a> {
    pub fn new(client: Client, reader: &'a Reader<'a>) -> Storer<'a> {
        Storer {
            client,
            reader,
            encoder: Encoder::new(),
            waiting: VecDeque::new(),
            spare: Vec::new(),
            records: Records::default(),
        }
    }

    /// An empty arena, perhaps one that was used before.
    pub fn arena(&mut self) -> Vec<u8> {
        self.spare.pop().unwrap_or_default().arena
    }

    /// Give an arena back.
    pub fn used(&mut self, arena: Vec<u8>) {
        self.recycle(Batch { arena, items: Vec::new() });
    }

    fn recycle(&mut self, mut batch: Batch) {
        if self.spare.len() < SPARE {
            batch.clear();
            self.spare.push(batch);
        }
    }

    /// Store whatever was taken, and hand over all records.
    pub fn finish(mut self) -> Result<()> {
        self.settle(0)?;
        if self.records.rows.is_empty() { Ok(()) } else { self.client.append(self.records) }
    }

    /// Store the oldest batches until `most` wait.
    fn settle(&mut self, most: usize) -> Result<()> {
        while self.waiting.len() > most {
            let Some((batch, answer)) = self.waiting.pop_front() else { break };
            let held = answer.recv().map_err(|_| Error::Stopped)?;
            for (item, _) in batch.items.iter().zip(held).filter(|(_, held)| !held) {
                self.store(item, &batch.arena[item.start as usize..][..item.length as usize])?;
            }
            self.recycle(batch);
        }
        Ok(())
    }

    fn store(&mut self, item: &Item, canonical: &[u8]) -> Result<()> {
        // What a patch would stand on may be gone or damaged: then the object is stored whole.
        let found =
            item.base.and_then(|id| self.reader.try_read(&id, item.kind).ok().flatten().map(|it| (id, it)));
        let base = found.as_ref().map(|(id, it)| Base { id, canonical: &it.canonical, depth: it.depth });
        if self.records.bytes.capacity() == 0 {
            self.records.bytes = self.client.buffer();
        }
        let offset = self.records.bytes.len();
        let depth = self.encoder.encode(item.kind, &item.id, canonical, base, &mut self.records.bytes)?;
        self.records.rows.push(Row {
            id: item.id,
            offset,
            length: self.records.bytes.len() - offset,
            base: item.base.filter(|_| depth > 0),
            depth,
        });
        if self.records.bytes.len() >= RECORDS_BYTES {
            self.client.append(std::mem::take(&mut self.records))?;
        }
        Ok(())
    }
}

impl Outlet for Storer<'_> {
    fn take(&mut self, batch: Batch) -> Result<Batch> {
        if batch.items.is_empty() {
            return Ok(batch);
        }
        let answer = self.client.ask(batch.items.iter().map(|item| item.id).collect())?;
        self.waiting.push_back((batch, answer));
        self.settle(WAITING)?;
        Ok(self.spare.pop().unwrap_or_default())
    }
}
