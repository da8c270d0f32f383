//! Verified reading of objects from packs.
//!
//! A [`Reader`] asks a [`Locate`] where objects are, reads their records and follows chains of patches, whose depths
//! must fall. What lists other objects (trees, pages, attributes) is kept in a bounded cache; blobs are not. A length
//! is checked against what the kind allows before anything is allocated, and every object against its id.

use crate::error::{Error, Result};
use crate::format::{Id, Kind, decode_attrs, decode_commit, decode_page, decode_tree, hex};
use crate::record::{Decoder, Form, Header, MAX_HEADER, MAX_PATCH_DEPTH, PACK_HEADER, PACK_MAGIC, SLACK};
use rustix::fs::{FileType, Mode, OFlags};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Open packs at a time.
const MAX_OPEN: usize = 64;
/// Bytes of objects in the cache.
const CACHE_BYTES: usize = 32 << 20;
/// What one cached object costs beside its bytes.
const CACHE_ENTRY: usize = 128;
/// The kind whose objects are the longest.
const LONGEST: Kind = Kind::Attrs;
/// Decoders kept for the next read.
const MAX_IDLE: usize = 16;

/// Where a record lies: pack number, offset of its header, length of header and payload, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    pub pack: u64,
    pub offset: u64,
    pub length: u64,
}

/// Says where objects are. Called from several threads, with any number of ids.
pub trait Locate: Send + Sync {
    /// One answer for each id; `None` when the store does not hold it.
    fn locate(&self, ids: &[Id]) -> Result<Vec<Option<Location>>>;
}

/// An object, with the depth of its patch (0: none).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub canonical: Vec<u8>,
    pub depth: u8,
}

/// Reads objects; shared by all workers.
pub struct Reader<'a> {
    locate: &'a dyn Locate,
    packs: Packs,
    cache: Mutex<Cache>,
    idle: Mutex<Vec<Scratch>>,
}

/// Where bases of patches are, for the records of one batch.
#[derive(Default)]
pub struct Bases {
    known: HashMap<Id, Location>,
    missed: Vec<Id>,
}

/// What one read needs; reused.
#[derive(Default)]
struct Scratch {
    decoder: Decoder,
    record: Vec<u8>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn missing(id: &Id) -> Error {
    Error::Damaged(format!("object {} is missing", hex(id)))
}

impl<'a> Reader<'a> {
    /// `packs` is the open directory of the packs.
    pub fn new(packs: OwnedFd, locate: &'a dyn Locate) -> Reader<'a> {
        Reader {
            locate,
            packs: Packs { directory: packs, open: Mutex::default() },
            cache: Mutex::default(),
            idle: Mutex::default(),
        }
    }

    /// Where objects are. An object that the store does not hold is `None` here and an error when it is read.
    pub fn locate(&self, ids: &[Id]) -> Result<Vec<Option<Location>>> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let found = self.locate.locate(ids)?;
        if found.len() == ids.len() {
            Ok(found)
        } else {
            Err(Error::Invalid("an answer for each id is wanted".to_owned()))
        }
    }

    /// An object, wherever it is.
    pub fn read(&self, id: &Id, kind: Kind) -> Result<Found> {
        self.try_read(id, kind)?.ok_or_else(|| missing(id))
    }

    /// An object, or `None` when the store does not hold it.
    pub fn try_read(&self, id: &Id, kind: Kind) -> Result<Option<Found>> {
        let Some(location) = self.locate(std::slice::from_ref(id))?.pop().flatten() else { return Ok(None) };
        let depth =
            self.with(id, kind, location, |header, canonical| Ok((header.depth, canonical.to_vec())))?;
        Ok(Some(Found { depth: depth.0, canonical: depth.1 }))
    }

    /// Give the bytes of the object at `location` to `use_it`; they are verified.
    pub fn with<T>(
        &self,
        id: &Id,
        kind: Kind,
        location: Location,
        use_it: impl FnOnce(&Header, &[u8]) -> Result<T>,
    ) -> Result<T> {
        self.give(id, Some(kind), location, use_it)
    }

    /// As [`Reader::with`], but `None` where what the object is a patch of is not among `bases`. Try it again when they
    /// were learned: then the index was asked for many at a time.
    pub fn with_bases<T>(
        &self,
        id: &Id,
        kind: Kind,
        location: Location,
        bases: &mut Bases,
        use_it: impl FnOnce(&Header, &[u8]) -> Result<T>,
    ) -> Result<Option<T>> {
        self.decode_with(id, Some(kind), location, bases, use_it)
    }

    /// Ask where the bases are that were missed.
    pub fn learn(&self, bases: &mut Bases) -> Result<()> {
        let missed = std::mem::take(&mut bases.missed);
        for (id, location) in missed.iter().zip(self.locate(&missed)?) {
            bases.known.insert(*id, location.ok_or_else(|| missing(id))?);
        }
        Ok(())
    }

    fn give<T>(
        &self,
        id: &Id,
        kind: Option<Kind>,
        location: Location,
        use_it: impl FnOnce(&Header, &[u8]) -> Result<T>,
    ) -> Result<T> {
        let mut bases = Bases::default();
        let mut use_it = Some(use_it);
        loop {
            let done = self.decode_with(id, kind, location, &mut bases, |header, canonical| {
                use_it.take().map(|use_it| use_it(header, canonical)).transpose()
            })?;
            if let Some(done) = done.flatten() {
                return Ok(done);
            }
            self.learn(&mut bases)?;
        }
    }

    fn decode_with<T>(
        &self,
        id: &Id,
        kind: Option<Kind>,
        location: Location,
        bases: &mut Bases,
        use_it: impl FnOnce(&Header, &[u8]) -> Result<T>,
    ) -> Result<Option<T>> {
        let mut scratch = lock(&self.idle).pop().unwrap_or_default();
        let done = match self.decode(&mut scratch, id, kind, location, MAX_PATCH_DEPTH + 1, bases) {
            Ok(Some((header, canonical))) => use_it(&header, canonical).map(Some),
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        let mut idle = lock(&self.idle);
        if idle.len() < MAX_IDLE {
            idle.push(scratch);
        }
        done
    }

    /// Read the object at `location`, of whatever kind, and see that its kind's decoder takes it.
    pub fn check(&self, id: &Id, location: Location) -> Result<Header> {
        self.give(id, None, location, |header, canonical| {
            match header.kind {
                Kind::Blob => {}
                Kind::Page => drop(decode_page(canonical)?),
                Kind::Tree => drop(decode_tree(canonical)?),
                Kind::Attrs => drop(decode_attrs(canonical)?),
                Kind::Commit => drop(decode_commit(canonical)?),
            }
            Ok(*header)
        })
    }

    /// Read, with what it is a patch of: `below` bounds how many patches may follow.
    fn decode<'s>(
        &self,
        scratch: &'s mut Scratch,
        id: &Id,
        kind: Option<Kind>,
        location: Location,
        below: u8,
        bases: &mut Bases,
    ) -> Result<Option<(Header, &'s [u8])>> {
        let header = self.packs.read(id, kind, location, &mut scratch.record)?;
        if header.depth >= below {
            return Err(Error::Damaged(format!("a damaged pack: patches of {} go in a circle", hex(id))));
        }
        let mut lower;
        let base = match header.base {
            None => None,
            Some(base) => {
                let Some(location) = bases.known.get(&base).copied() else {
                    bases.missed.push(base);
                    return Ok(None);
                };
                lower = Scratch::default();
                let found =
                    self.decode(&mut lower, &base, Some(header.kind), location, header.depth, bases)?;
                let Some((_, canonical)) = found else { return Ok(None) };
                Some(canonical)
            }
        };
        let payload = scratch.record.get(header.size()..).unwrap_or_default();
        Ok(Some((header, scratch.decoder.decode(&header, payload, base)?)))
    }

    /// A tree, page or set of attributes, from the cache where it is there. Give its location where it is known.
    pub fn list(&self, id: &Id, kind: Kind, location: Option<Location>) -> Result<Arc<[u8]>> {
        if let Some(bytes) = lock(&self.cache).get(id, kind) {
            return Ok(bytes);
        }
        let location = match location {
            Some(location) => location,
            None => self.locate(std::slice::from_ref(id))?.pop().flatten().ok_or_else(|| missing(id))?,
        };
        let bytes: Arc<[u8]> = self.with(id, kind, location, |_, canonical| Ok(canonical.into()))?;
        lock(&self.cache).put(*id, kind, bytes.clone());
        Ok(bytes)
    }
}

/// The pack files, of which a bounded number is open.
struct Packs {
    directory: OwnedFd,
    open: Mutex<VecDeque<(u64, Arc<OwnedFd>)>>,
}

impl Packs {
    /// Read the record at `location` whole into `record`, and check that it is the right one, of the right kind.
    fn read(&self, id: &Id, kind: Option<Kind>, location: Location, record: &mut Vec<u8>) -> Result<Header> {
        let wrong =
            || Error::Damaged(format!("a damaged index: object {} is not where it should be", hex(id)));
        let most = MAX_HEADER + kind.unwrap_or(LONGEST).max_canonical() + SLACK;
        let length =
            usize::try_from(location.length).ok().filter(|length| *length <= most).ok_or_else(wrong)?;
        if location.offset < PACK_HEADER as u64 {
            return Err(wrong());
        }
        let pack = self.pack(location.pack)?;
        record.resize(length, 0);
        read_exact(&pack, location.pack, location.offset, record)?;
        let header = Header::parse(record)?;
        if header.id != *id
            || kind.is_some_and(|kind| kind != header.kind)
            || header.size() + header.length != length
        {
            return Err(wrong());
        }
        debug_assert_eq!(header.base.is_some(), header.form == Form::Patch);
        Ok(header)
    }

    fn pack(&self, number: u64) -> Result<Arc<OwnedFd>> {
        if let Some((_, pack)) = lock(&self.open).iter().find(|(open, _)| *open == number) {
            return Ok(pack.clone());
        }
        let name = format!("{number:010}.pack");
        // Without waiting, whatever the file turns out to be.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let pack =
            rustix::fs::openat(&self.directory, &name, flags, Mode::empty()).map_err(
                |error| match error {
                    rustix::io::Errno::NOENT | rustix::io::Errno::LOOP => damaged(number, "it is missing"),
                    _ => Error::io(error, name.as_bytes()),
                },
            )?;
        let stat = rustix::fs::fstat(&pack).map_err(|error| Error::io(error, name.as_bytes()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(damaged(number, "it is no file"));
        }
        let mut head = [0; PACK_HEADER];
        read_exact(&pack, number, 0, &mut head)?;
        if !head.starts_with(PACK_MAGIC) || head[24..] != number.to_le_bytes() {
            return Err(damaged(number, "it does not begin like one"));
        }
        let pack = Arc::new(pack);
        let mut open = lock(&self.open);
        if open.len() >= MAX_OPEN {
            open.pop_front();
        }
        open.push_back((number, pack.clone()));
        Ok(pack)
    }
}

fn damaged(pack: u64, why: &str) -> Error {
    Error::Damaged(format!("a damaged pack, number {pack}: {why}"))
}

fn read_exact(pack: impl AsFd, number: u64, mut offset: u64, mut bytes: &mut [u8]) -> Result<()> {
    while !bytes.is_empty() {
        match rustix::io::pread(&pack, &mut *bytes, offset) {
            Ok(0) => return Err(damaged(number, "it ends inside a record")),
            Ok(count) => {
                offset += count as u64;
                bytes = &mut bytes[count..];
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::IO) => return Err(damaged(number, "the disk cannot read it")),
            // An offset that no file can have.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OVERFLOW) => {
                return Err(damaged(number, "it ends before a record"));
            }
            Err(error) => {
                return Err(Error::refused("read", error, format!("{number:010}.pack").as_bytes()));
            }
        }
    }
    Ok(())
}

/// Two generations: what was used since the last turn stays for one more.
#[derive(Default)]
struct Cache {
    young: HashMap<(Id, Kind), Arc<[u8]>>,
    old: HashMap<(Id, Kind), Arc<[u8]>>,
    /// Of the young.
    bytes: usize,
}

impl Cache {
    fn get(&mut self, id: &Id, kind: Kind) -> Option<Arc<[u8]>> {
        let key = (*id, kind);
        if let Some(bytes) = self.young.get(&key) {
            return Some(bytes.clone());
        }
        let bytes = self.old.remove(&key)?;
        self.put(*id, kind, bytes.clone());
        Some(bytes)
    }

    fn put(&mut self, id: Id, kind: Kind, bytes: Arc<[u8]>) {
        let size = bytes.len() + CACHE_ENTRY;
        if self.bytes + size > CACHE_BYTES / 2 {
            self.old = std::mem::take(&mut self.young);
            self.bytes = 0;
        }
        if self.young.insert((id, kind), bytes).is_none() {
            self.bytes += size;
        }
    }
}

#[cfg(test)]
mod tests;
