//! Files of many chunks. One worker reads and cuts; whoever has time hashes and stores what was cut.
//!
//! A [`Segment`] is about 1 MiB of whole chunks. The reader keeps the order: extents flow into pages as soon as all
//! before them are there, so that neither the file nor its list of chunks is ever in memory as a whole.

use super::past::{OldChunks, OldFile};
use super::worker::{Trouble, Worker, data, fill, hole};
use crate::chunk::{self, cut};
use crate::error::Error;
use crate::format::{Extent, Id, Kind, identity};
use crate::pages::FilePages;
use crate::sink::{BATCH_BYTES, Collector, Item, Storer};
use crossbeam_channel::{Receiver, Sender, TrySendError, select, unbounded};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// How long a reader waits before it looks whether the work has ended.
const PATIENCE: Duration = Duration::from_millis(50);

/// Whole chunks of one file.
pub struct Segment<'a> {
    arena: Vec<u8>,
    /// Where each chunk ends in the arena.
    ends: Vec<u32>,
    /// Where the arena begins in the file.
    offset: u64,
    number: u64,
    old: Option<Arc<OldChunks<'a>>>,
    reply: Sender<(u64, Vec<Extent>)>,
}

/// A file on its way into pages.
pub struct Assembly<'a> {
    pages: FilePages,
    pub old: Option<Arc<OldChunks<'a>>>,
    ready: BTreeMap<u64, Vec<Extent>>,
    next: u64,
    sent: u64,
    reply: Sender<(u64, Vec<Extent>)>,
    replies: Receiver<(u64, Vec<Extent>)>,
    /// Bytes that the pages cover so far.
    covered: u64,
    /// Bytes of data.
    data: u64,
}

impl<'a> Assembly<'a> {
    pub fn new(old: Option<Arc<OldChunks<'a>>>) -> Assembly<'a> {
        let (reply, replies) = unbounded();
        Assembly {
            pages: FilePages::default(),
            old,
            ready: BTreeMap::new(),
            next: 0,
            sent: 0,
            reply,
            replies,
            covered: 0,
            data: 0,
        }
    }

    /// Take extents that follow everything before.
    pub fn push(&mut self, extents: Vec<Extent>) {
        self.ready.insert(self.sent, extents);
        self.sent += 1;
    }

    /// Move into pages what is complete.
    pub fn settle(&mut self, collector: &mut Collector<'_, Storer<'_>>) -> Result<(), Error> {
        self.ready.extend(self.replies.try_iter());
        while let Some(extents) = self.ready.remove(&self.next) {
            self.next += 1;
            for extent in &extents {
                self.covered += extent.length;
                if extent.id.is_some() {
                    self.data += extent.length;
                }
                let old = self.old.as_deref();
                self.pages.add(extent, &mut |made| {
                    let base = old.and_then(|old| old.page(made.level, made.start + made.weight / 2));
                    collector.put(Kind::Page, made.canonical, base)
                })?;
            }
        }
        Ok(())
    }

    fn finish(self, collector: &mut Collector<'_, Storer<'_>>) -> Result<(Option<Id>, u64, u64), Error> {
        let old = self.old.as_deref();
        let root = self.pages.finish(&mut |made| {
            let base = old.and_then(|old| old.page(made.level, made.start + made.weight / 2));
            collector.put(Kind::Page, made.canonical, base)
        })?;
        Ok((root, self.covered, self.data))
    }
}

impl<'a> Worker<'a> {
    /// Read a file of chunks and holes: its root page and its bytes of data; `None` when it changes meanwhile.
    pub fn large(
        &mut self,
        file: BorrowedFd<'_>,
        size: u64,
        old: Option<&OldFile>,
        name: (&[u8], u32),
    ) -> Result<Option<(Id, u64)>, Trouble> {
        let chunks = match old {
            Some(old) => OldChunks::load(self.shared.reader, old, self.shared.held)?.map(Arc::new),
            None => None,
        };
        let mut assembly = Assembly::new(chunks);
        let done = match old {
            Some(old) => self.recut(file, size, old, name, &mut assembly)?,
            None => false,
        };
        let complete = done || self.runs(file, size, &mut assembly)?;
        if !complete || !self.settle_all(&mut assembly)? {
            return Ok(None);
        }
        let (root, covered, data) = assembly.finish(&mut self.collector)?;
        Ok(root.filter(|_| covered == size).map(|root| (root, data)))
    }

    /// Read all runs of data and all holes. Whether the file was as long as it said.
    fn runs(
        &mut self,
        file: BorrowedFd<'_>,
        size: u64,
        assembly: &mut Assembly<'a>,
    ) -> Result<bool, Trouble> {
        let mut at = 0;
        while at < size {
            let start = data(file, at, size)?;
            let end = hole(file, start, size)?;
            if start > at {
                assembly.push(vec![Extent { length: start - at, id: None }]);
            }
            if start < size {
                if end == start || !self.cut_run(file, start, end, assembly)? {
                    return Ok(false);
                }
                at = end;
            } else {
                at = size;
            }
        }
        Ok(true)
    }

    /// Read and cut one run of data. Whether all of it was there.
    pub fn cut_run(
        &mut self,
        file: BorrowedFd<'_>,
        start: u64,
        end: u64,
        assembly: &mut Assembly<'a>,
    ) -> Result<bool, Trouble> {
        let mut offset = start;
        let mut carried: Vec<u8> = Vec::new();
        while offset < end {
            self.shared.client.check()?;
            let length = (end - offset).min(BATCH_BYTES as u64) as usize;
            let mut arena = self.collector.outlet.arena();
            arena.extend_from_slice(&carried);
            arena.resize(length, 0);
            let missing = length - carried.len();
            let read = fill(file, &mut arena[carried.len()..], offset + carried.len() as u64)?;
            self.read += read as u64;
            if read != missing {
                return Ok(false);
            }
            let last = offset + length as u64 == end;
            let mut ends = Vec::with_capacity(length / chunk::MAX * 3);
            let mut at = 0;
            // A cut may need as many bytes as a chunk can have: what is left begins the next segment.
            while if last { at < length } else { at + chunk::MAX <= length } {
                at += cut(&arena[at..]);
                ends.push(at as u32);
            }
            carried.clear();
            carried.extend_from_slice(&arena[at..]);
            arena.truncate(at);
            self.dispatch(arena, ends, offset, assembly)?;
            offset += at as u64;
            self.tell(at as u64);
        }
        Ok(true)
    }

    fn dispatch(
        &mut self,
        arena: Vec<u8>,
        ends: Vec<u32>,
        offset: u64,
        assembly: &mut Assembly<'a>,
    ) -> Result<(), Error> {
        let number = assembly.sent;
        assembly.sent += 1;
        let (old, reply) = (assembly.old.clone(), assembly.reply.clone());
        let segment = Segment { arena, ends, offset, number, old, reply };
        match self.segments.0.try_send(segment) {
            Ok(()) => {}
            Err(TrySendError::Full(segment) | TrySendError::Disconnected(segment)) => {
                self.segment(segment)?
            }
        }
        assembly.settle(&mut self.collector)
    }

    /// Wait until everything that was cut is stored, and help.
    fn settle_all(&mut self, assembly: &mut Assembly<'a>) -> Result<bool, Error> {
        let segments = self.segments.1.clone();
        loop {
            assembly.settle(&mut self.collector)?;
            if assembly.next == assembly.sent {
                return Ok(true);
            }
            self.shared.client.check()?;
            select! {
                recv(segments) -> segment => if let Ok(segment) = segment { self.segment(segment)? },
                recv(assembly.replies) -> extents => assembly.ready.extend(extents),
                default(PATIENCE) => {}
            }
        }
    }

    /// Hash the chunks of a segment and store those that are new.
    pub fn segment(&mut self, segment: Segment<'a>) -> Result<(), Error> {
        let mut items = Vec::with_capacity(segment.ends.len());
        let mut start = 0;
        for end in &segment.ends {
            let id = identity(Kind::Blob, &segment.arena[start as usize..*end as usize]);
            items.push(Item { id, kind: Kind::Blob, start, length: end - start, base: None });
            start = *end;
        }
        let extents = items.iter().map(|item| Extent { length: u64::from(item.length), id: Some(item.id) });
        // The reader has given the file up when nobody receives.
        let _ = segment.reply.send((segment.number, extents.collect()));
        if let Some(old) = &segment.old {
            find_bases(&mut items, segment.offset, old);
        }
        let arena = self.collector.keep_all(segment.arena, items.into_iter())?;
        self.collector.outlet.used(arena);
        Ok(())
    }
}

/// Choose for each chunk that the old file lacks the one that it replaces: what lay there when the nearest chunk that
/// both have is laid over itself.
fn find_bases(items: &mut [Item], offset: u64, old: &OldChunks<'_>) {
    let mut shifts: Vec<Option<i64>> = Vec::with_capacity(items.len());
    let mut before = None;
    for item in items.iter() {
        let start = offset + u64::from(item.start);
        // Content that the old file has many times is most likely where it is expected.
        let expected = old.beginning(start.saturating_add_signed(before.unwrap_or(0)));
        let found = match expected.filter(|at| old.id(*at) == Some(item.id)) {
            Some(_) => Some(before.unwrap_or(0)),
            None => old.find(&item.id).map(|at| old.start(at) as i64 - start as i64),
        };
        before = found.or(before);
        shifts.push(found);
    }
    let mut nearest = None;
    for at in (0..items.len()).rev() {
        if shifts[at].is_some() {
            nearest = shifts[at];
            continue;
        }
        let shift = shifts[..at].iter().rev().find_map(|shift| *shift).or(nearest).unwrap_or(0);
        let middle = offset + u64::from(items[at].start) + u64::from(items[at].length) / 2;
        items[at].base = old.covering(middle.saturating_add_signed(shift));
    }
}
