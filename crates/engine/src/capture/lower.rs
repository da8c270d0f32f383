//! A large file beside its lower: compared first, and cut again only around the differences.
//!
//! The lower is the file as the state before has it, so its chunks are known. A chunk of it stays one where its bytes
//! are the same and the two behind it as well: a cut depends on the byte that follows it, and on whether the run of
//! data ends there. From the first chunk for which that is not so the file is cut anew until a cut falls on an old one
//! behind the difference; from there on it is compared again.

use super::large::Assembly;
use super::past::{OldChunks, OldFile};
use super::worker::{Trouble, Worker, data, fill, hole};
use crate::chunk::{self, cut};
use crate::format::{Extent, Kind, Time};
use crate::host::Client;
use crate::open::Place;
use rustix::fs::FileType;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Bytes that are compared at a time: few behind a difference, since another may be near.
const FIRST_BLOCK: usize = 32 << 10;
const BLOCK: usize = 256 << 10;
/// Bytes that are cut anew without meeting an old cut before the rest of the run goes the usual way.
const MOST_ANEW: u64 = 8 << 20;
/// Runs of data above which a file goes the usual way.
const MOST_RUNS: usize = 1 << 16;
/// How many bytes behind a chunk must be the same too.
const AHEAD: u64 = 2;

/// Two files side by side.
struct Pair<'f> {
    client: &'f Client,
    new: BorrowedFd<'f>,
    old: BorrowedFd<'f>,
    blocks: [Vec<u8>; 2],
    /// Bytes of the new file that were read.
    read: u64,
}

/// As many bytes of the new file and of the old one.
type Blocks<'p> = (&'p [u8], &'p [u8]);

impl Pair<'_> {
    /// Read `length` bytes of both; `None` when one of them ends before.
    fn load(&mut self, new: u64, old: u64, length: usize) -> Result<Option<Blocks<'_>>, Trouble> {
        self.client.check()?;
        let [left, right] = &mut self.blocks;
        left.resize(length.max(left.len()), 0);
        right.resize(length.max(right.len()), 0);
        let (left, right) = (&mut left[..length], &mut right[..length]);
        self.read += length as u64;
        let complete = fill(self.new, left, new)? == length && fill(self.old, right, old)? == length;
        Ok(complete.then_some((left, right)))
    }

    /// The first offset in `from..to` at which the files differ, or `to`; `None` when one of them ends before.
    fn difference(&mut self, from: u64, to: u64) -> Result<Option<u64>, Trouble> {
        let (mut at, mut block) = (from, FIRST_BLOCK);
        while at < to {
            let length = block.min((to - at) as usize);
            let Some((new, old)) = self.load(at, at, length)? else { return Ok(None) };
            if new != old {
                let same = new.iter().zip(old).take_while(|(new, old)| new == old).count();
                return Ok(Some(at + same as u64));
            }
            at += length as u64;
            block = (block * 2).min(BLOCK);
        }
        Ok(Some(to))
    }

    /// How many bytes at the ends of the files are the same, at most `most`; `None` when one of them ends before.
    fn tail(&mut self, new_size: u64, old_size: u64, most: u64) -> Result<Option<u64>, Trouble> {
        let (mut same, mut block) = (0, FIRST_BLOCK);
        while same < most {
            let length = block.min((most - same) as usize);
            let before = same + length as u64;
            let Some((new, old)) = self.load(new_size - before, old_size - before, length)? else {
                return Ok(None);
            };
            if new != old {
                return Ok(Some(
                    same + new.iter().rev().zip(old.iter().rev()).take_while(|(n, o)| n == o).count() as u64,
                ));
            }
            same = before;
            block = (block * 2).min(BLOCK);
        }
        Ok(Some(same))
    }
}

/// A run of data of the new file that is cut anew.
struct Window {
    bytes: Vec<u8>,
    start: u64,
}

impl Window {
    /// The bytes from `at` on: to the end of the run, or enough for a chunk.
    fn at(
        &mut self,
        file: BorrowedFd<'_>,
        at: u64,
        end: u64,
        read: &mut u64,
    ) -> Result<Option<&[u8]>, Errno> {
        let held = self.start + self.bytes.len() as u64;
        if at < self.start || (held < end && held < at + chunk::MAX as u64) {
            let length = ((end - at) as usize).min(2 * chunk::MAX);
            self.bytes.resize(length, 0);
            self.start = at;
            *read += length as u64;
            if fill(file, &mut self.bytes, at)? != length {
                self.bytes.clear();
                return Ok(None);
            }
        }
        let stop = ((end - self.start) as usize).min(self.bytes.len());
        Ok(Some(&self.bytes[(at - self.start) as usize..stop]))
    }
}

/// Where old chunks may be met again: behind `from`, shifted by as many bytes as the file grew.
struct Meeting {
    from: u64,
    new_size: u64,
    old_size: u64,
}

impl Meeting {
    fn extent(&self, old: &OldChunks<'_>, at: u64) -> Option<usize> {
        if at < self.from {
            return None;
        }
        old.beginning((at + self.old_size).checked_sub(self.new_size)?)
    }
}

impl<'a> Worker<'a> {
    /// Take a file in by comparison, if it has a lower. Whether it was; otherwise nothing of it was.
    pub fn recut(
        &mut self,
        file: BorrowedFd<'_>,
        size: u64,
        old: &OldFile,
        (above, node): (&[u8], u32),
        assembly: &mut Assembly<'a>,
    ) -> Result<bool, Trouble> {
        let (Some(place), Some(chunks)) = (self.shared.lower, assembly.old.clone()) else { return Ok(false) };
        let Some(lower) = open(place, above, self.shared.scan.name(node), old) else { return Ok(false) };
        let Some(runs) = runs(file, size)? else { return Ok(false) };
        let mut pair = Pair {
            client: self.shared.client,
            new: file,
            old: lower.as_fd(),
            blocks: [Vec::new(), Vec::new()],
            read: 0,
        };
        let same = size == old.size && runs.iter().copied().eq(old_runs(&chunks));
        let done = if same {
            self.in_place(&mut pair, &runs, size, &chunks, assembly)
        } else if runs == [(0, size)] && old_runs(&chunks).eq([(0, old.size)]) {
            self.shifted(&mut pair, size, &chunks, assembly)
        } else {
            return Ok(false);
        };
        self.read += pair.read;
        match done? {
            true => Ok(true),
            false => {
                // One of the files is shorter than it said: begin again, and let the recheck decide.
                *assembly = Assembly::new(Some(chunks));
                Ok(false)
            }
        }
    }

    /// Compare runs of data that lie where they lay.
    fn in_place(
        &mut self,
        pair: &mut Pair<'_>,
        runs: &[(u64, u64)],
        size: u64,
        old: &Arc<OldChunks<'a>>,
        assembly: &mut Assembly<'a>,
    ) -> Result<bool, Trouble> {
        let mut at = 0;
        for (start, end) in runs.iter().copied().chain([(size, size)]) {
            if start > at {
                assembly.push(vec![Extent { length: start - at, id: None }]);
            }
            at = start;
            while at < end {
                self.shared.client.check()?;
                let Some(difference) = pair.difference(at, end)? else { return Ok(false) };
                at = keep(old, at, end, difference, assembly);
                if at < end {
                    let meeting = Meeting { from: difference + 1, new_size: size, old_size: size };
                    let Some(met) = self.anew(pair, (at, end), &meeting, old, assembly)? else {
                        return Ok(false);
                    };
                    at = met;
                }
                assembly.settle(&mut self.collector)?;
            }
        }
        Ok(true)
    }

    /// Compare the front and the tail of a file that grew or shrank.
    fn shifted(
        &mut self,
        pair: &mut Pair<'_>,
        size: u64,
        old: &Arc<OldChunks<'a>>,
        assembly: &mut Assembly<'a>,
    ) -> Result<bool, Trouble> {
        let common = size.min(old.size());
        let Some(difference) = pair.difference(0, common)? else { return Ok(false) };
        let Some(tail) = pair.tail(size, old.size(), common - difference)? else { return Ok(false) };
        // The end of the data may be another one: no chunk that reaches it stays.
        let at = keep(old, 0, u64::MAX, difference, assembly);
        let meeting = Meeting { from: size - tail, new_size: size, old_size: old.size() };
        let Some(met) = self.anew(pair, (at, size), &meeting, old, assembly)? else { return Ok(false) };
        if let Some(first) = meeting.extent(old, met) {
            assembly.push((first..old.len()).map(|at| extent(old, at)).collect());
        }
        assembly.settle(&mut self.collector)?;
        Ok(true)
    }

    /// Cut a run of data anew until an old cut is met, which is returned, or the end of the run.
    fn anew(
        &mut self,
        pair: &mut Pair<'_>,
        (start, end): (u64, u64),
        meeting: &Meeting,
        old: &Arc<OldChunks<'a>>,
        assembly: &mut Assembly<'a>,
    ) -> Result<Option<u64>, Trouble> {
        let mut window = Window { bytes: Vec::new(), start };
        let mut at = start;
        let mut extents = Vec::new();
        while at < end && (at == start || meeting.extent(old, at).is_none()) {
            if at - start >= MOST_ANEW {
                assembly.push(extents);
                return Ok(self.cut_run(pair.new, at, end, assembly)?.then_some(end));
            }
            let Some(bytes) = window.at(pair.new, at, end, &mut pair.read)? else { return Ok(None) };
            let chunk = &bytes[..cut(bytes)];
            let length = chunk.len() as u64;
            let middle = at + length / 2;
            let base = old.covering(middle).or_else(|| old.covering(old.size().saturating_sub(1)));
            extents.push(Extent { length, id: Some(self.collector.put(Kind::Blob, chunk, base)?) });
            at += length;
        }
        assembly.push(extents);
        Ok(Some(at))
    }
}

/// Keep the old chunks from `at` on that end well before `difference`, or that end at `end` when nothing differs
/// before; returns where they end.
fn keep(old: &OldChunks<'_>, mut at: u64, end: u64, difference: u64, assembly: &mut Assembly<'_>) -> u64 {
    let Some(first) = old.beginning(at) else { return at };
    let mut extents = Vec::new();
    for number in first..old.len() {
        let next = old.start(number + 1);
        if at >= end || (next + AHEAD > difference && !(next == end && difference == end)) {
            break;
        }
        extents.push(extent(old, number));
        at = next;
    }
    assembly.push(extents);
    at
}

fn extent(old: &OldChunks<'_>, at: usize) -> Extent {
    Extent { length: old.start(at + 1) - old.start(at), id: old.id(at) }
}

/// Open the lower of a file, if it is what the state before says as far as its metadata can tell.
fn open(place: &Place<'_>, above: &[u8], name: &[u8], old: &OldFile) -> Option<OwnedFd> {
    let directory = place.directory(above).ok()?;
    let file = place.file(directory, name).ok()?;
    let about = rustix::fs::fstat(&file).ok()?;
    let mtime = Time { seconds: about.st_mtime, nanoseconds: about.st_mtime_nsec as u32 };
    let same = FileType::from_raw_mode(about.st_mode) == FileType::RegularFile
        && about.st_size as u64 == old.size
        && mtime == old.mtime;
    same.then_some(file)
}

/// The runs of data of a file, `None` when they are too many.
fn runs(file: BorrowedFd<'_>, size: u64) -> Result<Option<Vec<(u64, u64)>>, Errno> {
    let mut runs = Vec::new();
    let mut at = data(file, 0, size)?;
    while at < size {
        let end = hole(file, at, size)?;
        if end == at || runs.len() == MOST_RUNS {
            return Ok(None);
        }
        runs.push((at, end));
        at = data(file, end, size)?;
    }
    Ok(Some(runs))
}

/// The runs of data of the file as it was.
fn old_runs<'o>(old: &'o OldChunks<'_>) -> impl Iterator<Item = (u64, u64)> + 'o {
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < old.len() && old.id(at).is_none() {
            at += 1;
        }
        let first = at;
        while at < old.len() && old.id(at).is_some() {
            at += 1;
        }
        (at > first).then(|| (old.start(first), old.start(at)))
    })
}
