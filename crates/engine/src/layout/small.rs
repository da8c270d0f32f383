//! What one worker makes in one go: small files, symlinks, FIFOs.

use super::dirs::Dir;
use super::{Layout, damaged_content, files, metadata};
use crate::error::{Error, Result};
use crate::format::{Body, Content, Entry, Id, Kind};
use crate::read::{Bases, Location, missing};
use rustix::fs::{FileType, Mode, OFlags};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An entry that one worker makes in one go. The directory is held by whoever gave it.
#[derive(Clone, Copy)]
pub struct Small<'a> {
    pub dir: &'a Arc<Dir>,
    pub entry: &'a Entry<'a>,
    pub content: Option<Location>,
    pub attrs: Option<Location>,
}

impl Layout<'_> {
    /// Lay out what one worker does in one go; whether the base of a patch was not missing.
    pub fn small(&self, small: &Small<'_>, bases: &mut Bases) -> Result<bool> {
        let Small { dir, entry, content, attrs } = *small;
        let within = self.dirs.open(dir)?;
        let within = within.as_fd();
        let path = || dir.path(entry.name);
        let metadata = self.metadata(entry);
        let refused = |error| Error::refused("make", error, &path());
        match entry.body {
            Body::File { size, content: from } => {
                let write = |bytes: &[u8]| {
                    let fd = files::create(self, within, entry.name, &path)?;
                    files::write_at(fd.as_fd(), bytes, 0, &path)?;
                    metadata::apply(self.reader, fd.as_fd(), &metadata, attrs, &path)
                };
                match from {
                    Content::Blob(id) if !self.blob(&id, content, size, bases, write)? => return Ok(false),
                    Content::Blob(_) => {}
                    _ => write(b"")?,
                }
            }
            Body::Symlink { target } => {
                rustix::fs::symlinkat(target, within, entry.name).map_err(refused)?;
                metadata::apply_to_symlink(within, entry.name, &metadata, &path)?;
            }
            Body::Fifo => {
                let owner = Mode::RUSR | Mode::WUSR;
                rustix::fs::mknodat(within, entry.name, FileType::Fifo, owner, 0).map_err(refused)?;
                if self.careful {
                    metadata::chmod(within, entry.name, 0o600).map_err(refused)?;
                }
                // Opening a FIFO for reading without waiting never waits.
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let fd = rustix::fs::openat(within, entry.name, flags, Mode::empty()).map_err(refused)?;
                metadata::apply(self.reader, fd.as_fd(), &metadata, attrs, &path)?;
            }
            Body::Directory { .. } => return Err(Error::Internal("a directory is not small".to_owned())),
        }
        self.was_made(dir, entry)?;
        Ok(true)
    }

    /// Give the bytes of a blob of `size` bytes to `use_it`; whether the base of a patch was not missing.
    pub fn blob(
        &self,
        id: &Id,
        location: Option<Location>,
        size: u64,
        bases: &mut Bases,
        use_it: impl FnOnce(&[u8]) -> Result<()>,
    ) -> Result<bool> {
        let location = location.ok_or_else(|| missing(id))?;
        let done = self.reader.with_bases(id, Kind::Blob, location, bases, |_, bytes| {
            if bytes.len() as u64 != size {
                return Err(damaged_content("a chunk or file of another length"));
            }
            use_it(bytes)
        })?;
        if done.is_some() {
            self.client.done.bytes.fetch_add(size, Ordering::Relaxed);
        }
        Ok(done.is_some())
    }

    /// Do something with each item; what answers that it misses the base of a patch is done again when all bases that
    /// were missed are known.
    pub fn batch<T>(
        &self,
        items: Vec<T>,
        mut work: impl FnMut(&T, &mut Bases) -> Result<bool>,
    ) -> Result<()> {
        let mut bases = Bases::default();
        let mut waiting = items;
        while !waiting.is_empty() {
            let mut again = Vec::new();
            for item in waiting {
                self.client.check()?;
                if !work(&item, &mut bases)? {
                    again.push(item);
                }
            }
            self.reader.learn(&mut bases)?;
            waiting = again;
        }
        Ok(())
    }
}
