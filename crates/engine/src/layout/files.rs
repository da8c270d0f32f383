//! Files whose content is in pages: made by one worker, written by all that are free, finished by the last.

use super::dirs::Dir;
use super::metadata;
use super::pool::Pool;
use super::{Layout, Task, damaged_content};
use crate::error::{Error, Result};
use crate::format::{Body, Content, Entry, Extent, Id, Kind, Page, decode_entry, decode_page};
use crate::read::{Location, Reader};
use rustix::fs::{Mode, OFlags};
use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

const CREATE: OFlags = OFlags::WRONLY
    .union(OFlags::CREATE)
    .union(OFlags::EXCL)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOCTTY);

/// A file that is being written.
pub struct Writing {
    /// Held.
    dir: Arc<Dir>,
    /// As in a tree.
    entry: Box<[u8]>,
    attrs: Option<Location>,
    fd: OwnedFd,
    /// Parts that are not written yet.
    parts: AtomicUsize,
    edges: Mutex<Edges>,
}

/// Where pages begin and end with a hole: two that meet are one that no writer would have cut in two.
#[derive(Default)]
struct Edges {
    begins: HashSet<u64>,
    ends: HashSet<u64>,
}

/// A page of a file, and where its bytes belong.
#[derive(Clone, Copy)]
pub struct Part {
    id: Id,
    location: Option<Location>,
    level: Option<u8>,
    offset: u64,
    length: u64,
}

/// Make an empty file.
pub fn create(
    layout: &Layout<'_>,
    dir: BorrowedFd<'_>,
    name: &[u8],
    path: &dyn Fn() -> Vec<u8>,
) -> Result<OwnedFd> {
    let refused = |error| Error::refused("make", error, &path());
    let fd = rustix::fs::openat(dir, name, CREATE, Mode::RUSR | Mode::WUSR).map_err(refused)?;
    if layout.careful {
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(refused)?;
    }
    Ok(fd)
}

/// Write all of `bytes` at `offset`.
pub fn write_at(
    fd: BorrowedFd<'_>,
    mut bytes: &[u8],
    mut offset: u64,
    path: &dyn Fn() -> Vec<u8>,
) -> Result<()> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(fd, bytes, offset) {
            Ok(count) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::refused("write", error, &path())),
        }
    }
    Ok(())
}

/// Make a file of pages in a held directory, and write it or leave its parts to others.
pub fn begin(
    layout: &Layout<'_>,
    pool: &Pool<Task>,
    dir: Arc<Dir>,
    bytes: Box<[u8]>,
    content: Option<Location>,
    attrs: Option<Location>,
) -> Result<()> {
    let entry = decode_entry(&bytes)?;
    let Body::File { size, content: Content::Paged(id) } = entry.body else {
        return Err(Error::Internal("a file without pages".to_owned()));
    };
    let path = || dir.path(entry.name);
    if !layout.claim(&dir, &entry)? {
        return layout.let_go(dir);
    }
    let within = layout.dirs.open(&dir)?;
    let fd = create(layout, within.as_fd(), entry.name, &path)?;
    rustix::fs::ftruncate(&fd, size).map_err(|error| Error::refused("write", error, &path()))?;
    let part = Part { id, location: content, level: None, offset: 0, length: size };
    let parts = AtomicUsize::new(1);
    let file = Writing { dir, entry: bytes, attrs, fd, parts, edges: Mutex::default() };
    write(layout, pool, Arc::new(file), part)
}

/// Read a page of a file and check it against what is known of it: `length` bytes of the file are below. A root's level
/// is not known before.
pub fn open_page(
    reader: &Reader<'_>,
    id: &Id,
    location: Option<Location>,
    level: Option<u8>,
    length: u64,
) -> Result<Page> {
    let page = decode_page(&reader.list(id, Kind::Page, location)?)?;
    if level.is_some_and(|level| level != page.level()) {
        return Err(damaged_content("a page of a wrong level"));
    }
    let total: u128 = match &page {
        Page::Extents(extents) => extents.iter().map(|extent| u128::from(extent.length)).sum(),
        Page::Children(_, children) => children.iter().map(|child| u128::from(child.weight)).sum(),
    };
    if total != u128::from(length) {
        return Err(damaged_content("its lengths do not add up to the size"));
    }
    Ok(page)
}

/// Write one part.
pub fn write(layout: &Layout<'_>, pool: &Pool<Task>, file: Arc<Writing>, part: Part) -> Result<()> {
    match open_page(layout.reader, &part.id, part.location, part.level, part.length)? {
        Page::Extents(extents) => write_extents(layout, &file, &extents, part)?,
        Page::Children(level, children) => {
            let ids: Vec<Id> = children.iter().map(|child| child.id).collect();
            let locations = layout.reader.locate(&ids)?;
            let mut offset = part.offset;
            let mut parts = Vec::with_capacity(children.len());
            for (child, location) in children.iter().zip(locations) {
                let part =
                    Part { id: child.id, location, level: Some(level - 1), offset, length: child.weight };
                parts.push(Task::Part { file: Arc::clone(&file), part });
                offset += child.weight;
            }
            file.parts.fetch_add(parts.len(), Ordering::Relaxed);
            pool.push(parts.into_iter().rev());
        }
    }
    if file.parts.fetch_sub(1, Ordering::AcqRel) == 1 { finish(layout, &file) } else { Ok(()) }
}

fn write_extents(layout: &Layout<'_>, file: &Writing, extents: &[Extent], part: Part) -> Result<()> {
    let path = || file.dir.path(decode_entry(&file.entry).map(|entry| entry.name).unwrap_or_default());
    let ids: Vec<Id> = extents.iter().filter_map(|extent| extent.id).collect();
    let mut locations = layout.reader.locate(&ids)?.into_iter();
    let mut offset = part.offset;
    let mut waiting = Vec::with_capacity(ids.len());
    for extent in extents {
        match &extent.id {
            Some(id) => waiting.push((id, locations.next().flatten(), offset, extent.length)),
            None => drop(layout.client.done.bytes.fetch_add(extent.length, Ordering::Relaxed)),
        }
        offset += extent.length;
    }
    layout.batch(waiting, |(id, location, offset, length), bases| {
        layout.blob(id, *location, *length, bases, |bytes| write_at(file.fd.as_fd(), bytes, *offset, &path))
    })?;
    let hole = |extent: Option<&Extent>| extent.is_some_and(|extent| extent.id.is_none());
    let mut edges = file.edges.lock().unwrap_or_else(PoisonError::into_inner);
    if hole(extents.first()) {
        edges.begins.insert(part.offset);
    }
    if hole(extents.last()) {
        edges.ends.insert(offset);
    }
    let before = hole(extents.first()) && edges.ends.contains(&part.offset);
    let behind = hole(extents.last()) && edges.begins.contains(&offset);
    if before || behind {
        return Err(damaged_content("two holes in a row"));
    }
    Ok(())
}

fn finish(layout: &Layout<'_>, file: &Writing) -> Result<()> {
    let entry: Entry<'_> = decode_entry(&file.entry)?;
    let metadata = layout.metadata(&entry);
    metadata::apply(layout.reader, file.fd.as_fd(), &metadata, file.attrs, &|| file.dir.path(entry.name))?;
    layout.was_made(&file.dir, &entry)?;
    layout.let_go(Arc::clone(&file.dir))
}
