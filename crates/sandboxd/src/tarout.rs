//! The workspace as a pax archive, or what differs in it from its layers as an OCI image layer.
//!
//! The walk runs as root, so that a file of mode 000 is not lost, on a tree that hostile commands change
//! meanwhile. It therefore goes from directory to directory by descriptor, follows no link, opens nothing that is
//! not a regular file or a directory, and compares what it opened with what it had seen. It holds no recursion:
//! a stack of levels has at most [`MAX_OPEN`] descriptors, and a level whose descriptor was closed is opened
//! again through `..` of its child, or from the root, and only if it is still the same directory.
//!
//! Names are sorted, so that equal trees give equal archives. Directories of other file systems are left out.
//! Bounds: the path of an entry ([`MAX_PATH`]), and the names of all levels together with the table of hard links, for
//! which the caller gives a share of the sandbox's memory; beyond it the export fails as `exhausted`.

mod contents;
mod links;
mod names;

use crate::errors::{Code, Failure};
use crate::lookup;
use crate::tarfmt::{BLOCK, Header, Records, Time, kind};
use crate::tarsink::{Out, Stop};
use crate::uploads::is_unfinished;
use links::Link;
use names::Names;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, fgetxattr, fstat, openat, readlinkat, statat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::sync::mpsc::Sender;

/// Directories that are open at once.
const MAX_OPEN: usize = 64;
/// The longest name of an entry. What lies deeper is reported.
const MAX_PATH: usize = 128 << 10;
/// What the report of skipped files may take of its frame.
const MAX_SKIPPED: usize = 100;
const MAX_SKIPPED_BYTES: usize = 48 << 10;

const READ: OFlags = OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

/// What is read, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// A tree as it is.
    Tree,
    /// The upper directory of an overlay, whose difference from its layers becomes an OCI image layer: what is hidden
    /// becomes a whiteout. Nothing writes there meanwhile.
    Changes,
    /// The same, read before it to see whether a layer can say it. Nothing is written.
    Survey,
}

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// What a whiteout can hide: its own name is longer by the prefix.
const MAX_HIDDEN: usize = 255 - WHITEOUT.len();

pub struct Summary {
    pub entries: u64,
    pub file_bytes: u64,
    pub skipped: Vec<(Vec<u8>, String)>,
    pub skipped_total: u64,
}

/// Write the archive of a directory as finished DATA frames of `stream`.
///
/// Of an upper directory, what a layer cannot say is a `conflict` before the first frame: a directory that was renamed,
/// a file with names in the layers, a name that would be a whiteout.
pub fn export(
    root: OwnedFd,
    view: View,
    max_bytes: u64,
    table_bytes: usize,
    stream: u32,
    frames: Sender<Vec<u8>>,
) -> Result<Summary, Stop> {
    if view == View::Changes {
        // Not a second descriptor of the same open directory: the two would have one place in it.
        let again = openat(&root, ".", READ | OFlags::DIRECTORY, Mode::empty())?;
        walk(again, View::Survey, max_bytes, table_bytes, stream, frames.clone())?;
    }
    let mut walk = walk(root, view, max_bytes, table_bytes, stream, frames)?;
    walk.out.write(&[0; 2 * BLOCK])?;
    walk.out.flush()?;
    Ok(walk.summary)
}

fn walk(
    root: OwnedFd,
    view: View,
    max_bytes: u64,
    table_bytes: usize,
    stream: u32,
    frames: Sender<Vec<u8>>,
) -> Result<Walk, Stop> {
    let stat = fstat(&root)?;
    let mut walk = Walk {
        view,
        device: stat.st_dev,
        levels: Vec::new(),
        path: Vec::new(),
        names: 0,
        links: HashMap::new(),
        link_bytes: 0,
        table_bytes,
        max_bytes,
        out: Out::new(stream, frames),
        summary: Summary { entries: 0, file_bytes: 0, skipped: Vec::new(), skipped_total: 0 },
    };
    walk.enter(root, &stat)?;
    while !walk.levels.is_empty() {
        walk.step()?;
    }
    if view == View::Survey
        && let Some(link) = walk.links.values().next()
    {
        return Err(inexpressible(&link.name, "has names among the layers"));
    }
    Ok(walk)
}

fn inexpressible(path: &[u8], why: &str) -> Stop {
    Failure::new(Code::Conflict, format!("{} {why}", path.escape_ascii())).into()
}

/// Whether the kernel has noted something about a directory of an overlay.
fn overlay_says(directory: &OwnedFd, what: &str) -> bool {
    !matches!(fgetxattr(directory, what, &mut [0u8; 1][..]), Err(Errno::NODATA | Errno::OPNOTSUPP) | Ok(0))
}

type Identity = (u64, u64);

fn identity(stat: &Stat) -> Identity {
    (stat.st_dev, stat.st_ino)
}

fn time(stat: &Stat) -> Time {
    Time { seconds: stat.st_mtime, nanoseconds: stat.st_mtime_nsec as u32 }
}

struct Level {
    fd: Option<OwnedFd>,
    identity: Identity,
    names: Names,
    /// The length of the path up to and with this directory's slash.
    path: usize,
}

struct Walk {
    view: View,
    device: u64,
    levels: Vec<Level>,
    path: Vec<u8>,
    names: usize,
    links: HashMap<Identity, Link>,
    link_bytes: usize,
    table_bytes: usize,
    max_bytes: u64,
    out: Out,
    summary: Summary,
}

impl Walk {
    fn skip(&mut self, reason: impl Into<String>) {
        self.summary.skipped_total += 1;
        let used: usize =
            self.summary.skipped.iter().map(|(path, reason)| path.len() + reason.len() + 12).sum();
        let reason = reason.into();
        if self.summary.skipped.len() < MAX_SKIPPED
            && used + self.path.len() + reason.len() + 12 <= MAX_SKIPPED_BYTES
        {
            self.summary.skipped.push((self.path.clone(), reason));
        }
    }

    /// One name of the deepest level, or its end.
    fn step(&mut self) -> Result<(), Stop> {
        let Some(level) = self.levels.last_mut() else {
            return Ok(());
        };
        self.path.truncate(level.path);
        let Some(name) = level.names.next() else {
            return self.leave();
        };
        let start = self.path.len();
        self.path.extend_from_slice(name);
        if self.path.len() > MAX_PATH {
            self.path.truncate(start);
            self.skip(format!("names below it are longer than {MAX_PATH} bytes"));
            return Ok(());
        }
        let name = self.path[start..].to_vec();
        let Some(directory) = &level.fd else {
            self.skip("its directory was moved while it was read");
            return Ok(());
        };
        if self.view == View::Survey && name.starts_with(WHITEOUT) {
            return Err(inexpressible(&self.path, "would be a whiteout"));
        }
        match statat(directory, &name[..], AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if is_unfinished(&name, FileType::from_raw_mode(stat.st_mode)) => Ok(()),
            Ok(stat) => self.entry(&name, &stat),
            Err(errno) => self.unreadable(errno),
        }
    }

    /// A file that went or cannot be read is no reason to fail.
    fn unreadable(&mut self, errno: Errno) -> Result<(), Stop> {
        match errno {
            Errno::MFILE | Errno::NFILE | Errno::NOMEM => return Err(errno.into()),
            Errno::NOENT => self.skip("it vanished while the workspace was read"),
            _ => self.skip(crate::errors::words(errno.raw_os_error())),
        }
        Ok(())
    }

    fn here(&self) -> Option<BorrowedFd<'_>> {
        self.levels.last().and_then(|level| level.fd.as_ref()).map(AsFd::as_fd)
    }

    fn entry(&mut self, name: &[u8], stat: &Stat) -> Result<(), Stop> {
        let kind = FileType::from_raw_mode(stat.st_mode);
        let left_out =
            !matches!(kind, FileType::Directory | FileType::RegularFile | FileType::Symlink | FileType::Fifo);
        match (self.view, kind) {
            (View::Survey, _) if left_out && name.len() > MAX_HIDDEN => {
                return Err(inexpressible(&self.path, "has a name that is too long for a whiteout"));
            }
            (View::Survey, FileType::Directory) => {}
            (View::Survey, _) if left_out => return Ok(()),
            (View::Survey, _) => return self.count(stat),
            (View::Changes, _) if left_out => {
                self.whiteout(WHITEOUT, name, stat)?;
                if kind == FileType::CharacterDevice && stat.st_rdev == 0 {
                    return Ok(());
                }
            }
            _ => {}
        }
        match kind {
            FileType::Directory => self.directory(name, stat),
            FileType::RegularFile => self.file(name, stat),
            FileType::Symlink => {
                let Some(Ok(target)) = self.here().map(|here| readlinkat(here, name, Vec::new())) else {
                    self.skip("it changed while it was read");
                    return Ok(());
                };
                self.small(kind::SYMLINK, target.as_bytes(), stat)
            }
            FileType::Fifo => self.small(kind::FIFO, b"", stat),
            FileType::Socket => {
                self.skip("a socket");
                Ok(())
            }
            _ => {
                self.skip("a device");
                Ok(())
            }
        }
    }

    /// Open what was seen a moment ago, if it is still that.
    fn open(&self, name: &[u8], seen: &Stat, flags: OFlags) -> Result<(OwnedFd, Stat), Errno> {
        let here = self.here().ok_or(Errno::NOENT)?;
        let open = |flags: OFlags| {
            if flags.contains(OFlags::DIRECTORY) {
                lookup::directory(here, name, flags)
            } else {
                openat(here, name, flags, Mode::empty())
            }
        };
        let file = match open(READ | OFlags::NOATIME | flags) {
            Err(Errno::PERM) => open(READ | flags)?,
            result => result?,
        };
        let stat = fstat(&file)?;
        if identity(&stat) != identity(seen) || stat.st_mode & 0o170_000 != seen.st_mode & 0o170_000 {
            return Err(Errno::NOENT);
        }
        Ok((file, stat))
    }

    fn directory(&mut self, name: &[u8], seen: &Stat) -> Result<(), Stop> {
        if seen.st_dev != self.device {
            self.skip("on another file system");
            return Ok(());
        }
        let (fd, stat) = match self.open(name, seen, OFlags::DIRECTORY) {
            Ok(opened) => opened,
            Err(errno) => return self.unreadable(errno),
        };
        self.path.push(b'/');
        self.enter(fd, &stat)
    }

    /// Write a directory's own entry and go into it.
    fn enter(&mut self, fd: OwnedFd, stat: &Stat) -> Result<(), Stop> {
        if self.view == View::Survey {
            if overlay_says(&fd, "trusted.overlay.redirect") {
                return Err(inexpressible(&self.path, "was renamed"));
            }
        } else {
            let records = self.attributes(&fd);
            let name = if self.levels.is_empty() { b"./".to_vec() } else { self.path.clone() };
            self.write(kind::DIRECTORY, &name, b"", 0, stat, records)?;
        }
        if self.view == View::Changes && overlay_says(&fd, "trusted.overlay.opaque") {
            self.whiteout(OPAQUE, b"", stat)?;
        }
        let names = Names::read(&fd, self.table_bytes.saturating_sub(self.names + self.link_bytes))?;
        self.names += names.size();
        self.levels.push(Level { fd: Some(fd), identity: identity(stat), names, path: self.path.len() });
        // The root stays open: everything can be found again from there.
        if let Some(old) = self.levels.len().checked_sub(MAX_OPEN).filter(|&index| index > 0) {
            self.levels[old].fd = None;
        }
        Ok(())
    }

    /// Go back to the directory above.
    fn leave(&mut self) -> Result<(), Stop> {
        let Some(child) = self.levels.pop() else {
            return Ok(());
        };
        self.names -= child.names.size();
        let top = self.levels.len();
        if top > 0 && self.levels[top - 1].fd.is_none() {
            self.levels[top - 1].fd = match self.parent_of(&child, self.levels[top - 1].identity) {
                Some(fd) => Some(fd),
                None => self.find_again(top - 1)?,
            };
        }
        Ok(())
    }

    fn parent_of(&self, child: &Level, expected: Identity) -> Option<OwnedFd> {
        let fd = openat(child.fd.as_ref()?, "..", READ | OFlags::DIRECTORY, Mode::empty()).ok()?;
        let stat = fstat(&fd).ok()?;
        (identity(&stat) == expected).then_some(fd)
    }

    /// Walk down to a level again; `None` when the way there has changed.
    fn find_again(&self, index: usize) -> Result<Option<OwnedFd>, Stop> {
        let mut fd: Option<OwnedFd> = None;
        for at in 1..=index {
            let name = &self.path_of(at);
            let flags = READ | OFlags::DIRECTORY;
            let opened = match (&fd, &self.levels[0].fd) {
                (Some(above), _) | (None, Some(above)) => lookup::directory(above, name, flags),
                (None, None) => return Ok(None),
            };
            let Ok(opened) = opened else { return Ok(None) };
            if identity(&fstat(&opened)?) != self.levels[at].identity {
                return Ok(None);
            }
            fd = Some(opened);
        }
        Ok(fd)
    }

    fn path_of(&self, index: usize) -> Vec<u8> {
        self.path[self.levels[index - 1].path..self.levels[index].path - 1].to_vec()
    }

    fn write(
        &mut self,
        kind: u8,
        name: &[u8],
        link: &[u8],
        size: u64,
        stat: &Stat,
        records: Records,
    ) -> Result<(), Stop> {
        let mut blocks = Vec::with_capacity(BLOCK);
        let mode = stat.st_mode & 0o7777;
        Header { kind, name, link, mode, size, mtime: time(stat) }.write(&mut blocks, records);
        self.out.write(&blocks)?;
        self.summary.entries += 1;
        Ok(())
    }

    /// Say in a layer that `name` beside the last entry is hidden, or all that is in it.
    fn whiteout(&mut self, prefix: &[u8], name: &[u8], stat: &Stat) -> Result<(), Stop> {
        let start = self.path.len() - name.len();
        let path = [&self.path[..start], prefix, name].concat();
        self.write(kind::FILE, &path, b"", 0, stat, Records::default())
    }

    /// An entry without data.
    fn small(&mut self, kind: u8, link: &[u8], stat: &Stat) -> Result<(), Stop> {
        if self.linked(stat)? {
            return Ok(());
        }
        let path = self.path.clone();
        self.write(kind, &path, link, 0, stat, Records::default())?;
        self.remember(stat)
    }
}
