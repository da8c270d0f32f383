//! Opening what is inside a directory without following a link.

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a path that are given to the kernel at once; it takes 4,095.
const MOST_PATH: usize = 4_000;

/// A directory from which others are opened by their paths below it.
pub struct Place<'a> {
    root: BorrowedFd<'a>,
    /// Whether the kernel refused `openat2` (before Linux 5.6, or by a filter): then it goes name by name.
    stepwise: AtomicBool,
    /// Whether it refused `O_NOATIME`, which only the owner of a file may ask for.
    touching: AtomicBool,
}

impl<'a> Place<'a> {
    pub fn new(root: BorrowedFd<'a>) -> Place<'a> {
        Place { root, stepwise: AtomicBool::new(false), touching: AtomicBool::new(false) }
    }

    pub fn root(&self) -> BorrowedFd<'a> {
        self.root
    }

    /// Open the directory at `path`, names with `/` between them; empty is the root itself. `ELOOP` or `ENOTDIR`
    /// when a name on the way is no directory.
    pub fn directory(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let mut held: Option<OwnedFd> = None;
        let mut rest = path;
        loop {
            let length = if rest.len() <= MOST_PATH {
                rest.len()
            } else {
                rest[..MOST_PATH].iter().rposition(|byte| *byte == b'/').unwrap_or(MOST_PATH)
            };
            let (piece, after) = rest.split_at(length);
            let from = held.as_ref().map_or(self.root, OwnedFd::as_fd);
            let opened = self.piece(from, piece)?;
            if after.is_empty() {
                return Ok(opened);
            }
            held = Some(opened);
            rest = &after[1..];
        }
    }

    fn piece(&self, from: BorrowedFd<'_>, piece: &[u8]) -> Result<OwnedFd, Errno> {
        const FLAGS: OFlags =
            OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
        if piece.is_empty() {
            return rustix::fs::openat(from, c".", FLAGS, Mode::empty());
        }
        if !self.stepwise.load(Ordering::Relaxed) {
            match rustix::fs::openat2(from, piece, FLAGS, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
                Err(Errno::NOSYS | Errno::PERM) => self.stepwise.store(true, Ordering::Relaxed),
                // A path is resolved anew when a rename elsewhere made the kernel unsure.
                Err(Errno::AGAIN) => {}
                opened => return opened,
            }
        }
        let mut held: Option<OwnedFd> = None;
        for name in piece.split(|byte| *byte == b'/') {
            let from = held.as_ref().map_or(from, OwnedFd::as_fd);
            held = Some(rustix::fs::openat(from, name, FLAGS, Mode::empty())?);
        }
        held.ok_or(Errno::NOENT)
    }

    /// Open a file for reading. Whatever the name turns out to be, nothing waits and no terminal is taken.
    pub fn file(&self, directory: impl AsFd, name: &[u8]) -> Result<OwnedFd, Errno> {
        const FLAGS: OFlags = OFlags::RDONLY
            .union(OFlags::NOFOLLOW)
            .union(OFlags::NONBLOCK)
            .union(OFlags::NOCTTY)
            .union(OFlags::CLOEXEC);
        if !self.touching.load(Ordering::Relaxed) {
            match rustix::fs::openat(&directory, name, FLAGS | OFlags::NOATIME, Mode::empty()) {
                Err(Errno::PERM) => self.touching.store(true, Ordering::Relaxed),
                opened => return opened,
            }
        }
        rustix::fs::openat(&directory, name, FLAGS, Mode::empty())
    }
}

#[cfg(test)]
mod tests;
