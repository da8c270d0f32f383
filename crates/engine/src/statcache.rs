//! What an earlier capture of the same directory found, so that files which are as they were are not read again.
//!
//! The file's form is described in `store/statcache.py`, which is the same in Python. It is a cache: whatever is wrong
//! with it, it is as if it were not there.

use crate::format::{Content, ID_BYTES, Id};
use crate::scan::State;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

const MAGIC: &[u8; 8] = b"ASBSTAT1";
const HEADER: usize = 64;
const RECORD: usize = 88;
/// Bytes that are hashed and written at a time: so many that the hash goes at its full speed.
const BLOCK: usize = 1 << 16;
/// Not read when it is larger: about 12 million files.
const MOST: u64 = 1 << 30;

/// What is remembered of a file, or with [`Form::Directory`] of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub state: State,
    /// Bytes of data, holes not counted.
    pub data: u64,
    pub form: Form,
    pub attrs: Option<Id>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    File(Content),
    /// The root of its tree.
    Directory(Id),
}

#[derive(Debug)]
pub struct StatCache {
    bytes: Vec<u8>,
    count: usize,
    /// The root tree of the capture that wrote it.
    pub root: Id,
}

impl StatCache {
    /// The cache at `path` for a directory on `device`, if it is one.
    pub fn load(path: &Path, device: u64) -> Option<StatCache> {
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .ok()?;
        let found = file.metadata().ok().filter(|found| found.is_file() && found.len() <= MOST)?;
        let mut bytes = Vec::with_capacity(found.len() as usize + 1);
        file.take(MOST).read_to_end(&mut bytes).ok()?;
        let summed = bytes.len().checked_sub(ID_BYTES)?;
        let number =
            |at: usize| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
        let count = usize::try_from(number(48)?).ok()?;
        let attrs = usize::try_from(number(56)?).ok().filter(|attrs| *attrs <= u32::MAX as usize)?;
        let size = count.checked_mul(RECORD)?.checked_add(attrs * ID_BYTES)?.checked_add(HEADER)?;
        let root = *bytes.get(16..)?.first_chunk()?;
        let right = bytes.starts_with(MAGIC) && number(8)? == device && size == summed;
        if !right || blake3::hash(&bytes[..summed]).as_bytes() != &bytes[summed..] {
            return None;
        }
        bytes.truncate(summed);
        Some(StatCache { bytes, count, root })
    }

    /// What is remembered of an inode.
    pub fn find(&self, inode: u64) -> Option<Record> {
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = low.midpoint(high);
            let record = &self.bytes[HEADER + middle * RECORD..][..RECORD];
            match u64_at(record, 0).cmp(&inode) {
                std::cmp::Ordering::Equal => return self.parse(record),
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }

    fn parse(&self, record: &[u8]) -> Option<Record> {
        let id: Id = *record[56..].first_chunk()?;
        let form = match record[48] {
            0 => Form::File(Content::Empty),
            1 => Form::File(Content::Blob(id)),
            2 => Form::File(Content::Paged(id)),
            3 => Form::Directory(id),
            _ => return None,
        };
        let attrs = match u32_at(record, 52) {
            0 => None,
            number => {
                let start = HEADER + self.count * RECORD + (number as usize - 1) * ID_BYTES;
                Some(*self.bytes.get(start..)?.first_chunk()?)
            }
        };
        Some(Record {
            state: State {
                inode: u64_at(record, 0),
                size: u64_at(record, 8),
                mtime: (u64_at(record, 24) as i64, u32_at(record, 40)),
                ctime: (u64_at(record, 32) as i64, u32_at(record, 44)),
            },
            data: u64_at(record, 16),
            form,
            attrs,
        })
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().copied().map_or(0, u64::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().copied().map_or(0, u32::from_le_bytes)
}

/// Replace the cache at `path`. `records` must be `count`, sorted by inode, each inode once; `attrs` holds every id of
/// attributes in them.
pub fn save(
    path: &Path,
    (device, root): (u64, &Id),
    attrs: &[Id],
    count: usize,
    records: impl Iterator<Item = Record>,
) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.new", std::process::id()));
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(&temporary)?;
    let mut out = Summed { file: BufWriter::with_capacity(1 << 20, file), sum: blake3::Hasher::new() };
    let written = write(&mut out, (device, root), attrs, count, records)
        .and_then(|()| out.file.write_all(out.sum.finalize().as_bytes()))
        .and_then(|()| out.file.flush())
        .and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

struct Summed {
    file: BufWriter<File>,
    sum: blake3::Hasher,
}

impl Summed {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sum.update(bytes);
        self.file.write_all(bytes)
    }
}

fn write(
    out: &mut Summed,
    (device, root): (u64, &Id),
    attrs: &[Id],
    count: usize,
    records: impl Iterator<Item = Record>,
) -> io::Result<()> {
    let numbers: HashMap<&Id, u32> = attrs.iter().zip(1..).collect();
    let mut bytes = Vec::with_capacity(BLOCK + RECORD);
    bytes.extend_from_slice(MAGIC);
    bytes.extend(device.to_le_bytes());
    bytes.extend(root);
    bytes.extend((count as u64).to_le_bytes());
    bytes.extend((attrs.len() as u32).to_le_bytes());
    bytes.extend([0; 4]);
    for record in records {
        put(&mut bytes, &record, record.attrs.and_then(|id| numbers.get(&id).copied()).unwrap_or(0));
        if bytes.len() >= BLOCK {
            out.put(&bytes)?;
            bytes.clear();
        }
    }
    bytes.extend(attrs.iter().flatten());
    out.put(&bytes)
}

fn put(bytes: &mut Vec<u8>, record: &Record, attrs: u32) {
    let State { inode, size, mtime, ctime } = record.state;
    let (form, id) = match record.form {
        Form::File(Content::Empty) => (0, [0; ID_BYTES]),
        Form::File(Content::Blob(id)) => (1, id),
        Form::File(Content::Paged(id)) => (2, id),
        Form::Directory(id) => (3, id),
    };
    for number in [inode, size, record.data, mtime.0 as u64, ctime.0 as u64] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(mtime.1.to_le_bytes());
    bytes.extend(ctime.1.to_le_bytes());
    bytes.extend([form, 0, 0, 0]);
    bytes.extend(attrs.to_le_bytes());
    bytes.extend(id);
}

#[cfg(test)]
mod tests;
