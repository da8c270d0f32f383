//! Directories that are being laid out.
//!
//! A directory is made with the mode 0700 and gets its own mode, times, owner and attributes when nothing more happens
//! in it or below it. Until then it can be opened again through those above it, so only a bounded number is held open.

use super::metadata::{Metadata, chmod};
use crate::error::{Error, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Names in the path of a directory.
const MAX_DEPTH: usize = 1_000;
/// Directories held open at a time.
const MAX_OPEN: usize = 128;
pub const OPEN: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// One directory. Whoever does something in it holds it by [`Dir::hold`].
pub struct Dir {
    above: Option<Arc<Dir>>,
    name: Box<[u8]>,
    depth: usize,
    pub metadata: Metadata,
    /// Hides what a lower layer has there.
    pub opaque: bool,
    fd: Mutex<Option<Arc<OwnedFd>>>,
    made: AtomicBool,
    /// What has still to happen in it or below it.
    holds: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Dir {
    /// The directory that was given; held once.
    pub fn root(fd: OwnedFd, metadata: Metadata) -> Arc<Dir> {
        Arc::new(Dir {
            above: None,
            name: Box::default(),
            depth: 0,
            metadata,
            opaque: false,
            fd: Mutex::new(Some(Arc::new(fd))),
            made: AtomicBool::new(true),
            holds: AtomicUsize::new(1),
        })
    }

    /// A directory below; held once, and holding the one above. It is made when it is opened first.
    pub fn below(above: &Arc<Dir>, name: &[u8], metadata: Metadata, opaque: bool) -> Result<Arc<Dir>> {
        let depth = above.depth + 1;
        if depth > MAX_DEPTH {
            return Err(Error::Damaged("a damaged directory: too deep".to_owned()));
        }
        Ok(Arc::new(Dir {
            above: Some(above.hold()),
            name: name.into(),
            depth,
            metadata,
            opaque,
            fd: Mutex::default(),
            made: AtomicBool::new(false),
            holds: AtomicUsize::new(1),
        }))
    }

    /// Keep it from being finished.
    pub fn hold(self: &Arc<Dir>) -> Arc<Dir> {
        self.holds.fetch_add(1, Ordering::Relaxed);
        Arc::clone(self)
    }

    /// Let go; whether that was the last hold.
    pub fn let_go(&self) -> bool {
        self.holds.fetch_sub(1, Ordering::AcqRel) == 1
    }

    pub fn above(&self) -> Option<&Arc<Dir>> {
        self.above.as_ref()
    }

    pub fn is_made(&self) -> bool {
        self.made.load(Ordering::Acquire)
    }

    /// The path of a name in it, relative to the root; of itself where the name is empty.
    pub fn path(&self, name: &[u8]) -> Vec<u8> {
        let mut names = vec![name];
        let mut dir = self;
        while let Some(above) = &dir.above {
            names.push(&dir.name);
            dir = above;
        }
        if name.is_empty() {
            names.remove(0);
        }
        names.reverse();
        names.join(&b'/')
    }

    /// Close it. The root stays open.
    pub fn close(&self) {
        if self.above.is_some() {
            *lock(&self.fd) = None;
        }
    }
}

/// Opens directories, and makes them.
pub struct Dirs {
    open: Mutex<VecDeque<Arc<Dir>>>,
    /// Whether what is made may lack rights of its owner.
    careful: bool,
    /// Whether a directory may be there already, made by a walk before.
    again: bool,
}

impl Dirs {
    pub fn new(careful: bool) -> Dirs {
        Dirs { open: Mutex::default(), careful, again: false }
    }

    /// From now on a directory may be there already.
    pub fn walk_again(&mut self) {
        self.again = true;
    }

    /// The open directory.
    pub fn open(&self, dir: &Arc<Dir>) -> Result<Arc<OwnedFd>> {
        if let Some(fd) = &*lock(&dir.fd) {
            return Ok(Arc::clone(fd));
        }
        // Up to one that is open, and down again: not by recursion, for the deepest has a thousand above it.
        let mut closed = vec![dir];
        let mut fd = loop {
            let above = closed.last().and_then(|dir| dir.above.as_ref());
            let above = above.ok_or_else(|| Error::Internal("the root is closed".to_owned()))?;
            if let Some(fd) = &*lock(&above.fd) {
                break Arc::clone(fd);
            }
            closed.push(above);
        };
        for dir in closed.into_iter().rev() {
            fd = self.open_in(&fd, dir)?;
        }
        Ok(fd)
    }

    fn open_in(&self, above: &OwnedFd, dir: &Arc<Dir>) -> Result<Arc<OwnedFd>> {
        let mut held = lock(&dir.fd);
        if let Some(fd) = &*held {
            return Ok(Arc::clone(fd));
        }
        let refused = |doing, error| Error::refused(doing, error, &dir.path(b""));
        if !dir.is_made() {
            match rustix::fs::mkdirat(above, &*dir.name, Mode::RWXU) {
                Err(Errno::EXIST) if self.again => {}
                made => made.map_err(|error| refused("make", error))?,
            }
            if self.careful {
                chmod(above.as_fd(), &dir.name, 0o700).map_err(|error| refused("make", error))?;
            }
            dir.made.store(true, Ordering::Release);
        }
        let fd = rustix::fs::openat(above, &*dir.name, OPEN, Mode::empty())
            .map_err(|error| refused("open", error))?;
        let fd = Arc::new(fd);
        *held = Some(Arc::clone(&fd));
        drop(held);
        let mut open = lock(&self.open);
        open.push_back(Arc::clone(dir));
        let oldest = if open.len() > MAX_OPEN { open.pop_front() } else { None };
        drop(open);
        if let Some(oldest) = oldest {
            oldest.close();
        }
        Ok(fd)
    }
}
