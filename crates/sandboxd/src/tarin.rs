//! An archive into the workspace.
//!
//! This runs as the sandbox user, so everything belongs to it and nothing can be written that the user could not
//! write. Every name is taken apart first: an absolute one or one with `..` is refused. The way to a file is walked
//! by descriptor with O_NOFOLLOW from the workspace, so no link on it is followed, whether the archive brought it
//! or a command put it there meanwhile. Files are made with O_EXCL; what was there before is removed by name.
//!
//! Directories get their modes and times at the very end, children before parents, since a directory without
//! write permission could not be filled and filling one changes its time. Until then they are kept as a tree of
//! names ([`MAX_TREE`] bytes at most). At most [`MAX_OPEN`] directories are open at once.

use crate::errors::{Code, Failure};
use crate::fsops::write_all;
use crate::lookup;
use crate::tarfmt::Time;
use crate::tarread::{Entry, EntryKind, Reader};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, XattrFlags, chmodat, fchmod,
    fsetxattr, ftruncate, futimens, linkat, mkdirat, mknodat, openat, statat, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const MAX_OPEN: usize = 64;
const MAX_TREE: usize = 64 << 20;
/// How often something may appear where something was just removed.
const TRIES: usize = 10;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

pub struct Summary {
    pub entries: u64,
    pub file_bytes: u64,
}

/// Read the whole archive into a directory.
pub fn import(root: OwnedFd, max_bytes: u64, mut reader: Reader) -> Result<Summary, Failure> {
    let mut import =
        Import { tree: Tree::new(root), max_bytes, summary: Summary { entries: 0, file_bytes: 0 } };
    while let Some(entry) = reader.next()? {
        if entry.kind != EntryKind::Device {
            import.entry(&entry, &mut reader).map_err(|failure| {
                let name = String::from_utf8_lossy(&entry.path);
                let name: String = name.chars().take(200).collect();
                Failure::new(failure.code, format!("{name}: {}", failure.message))
            })?;
            import.summary.entries += 1;
        }
    }
    import.tree.finish()?;
    Ok(import.summary)
}

/// The parts of a name in an archive.
fn parts(name: &[u8]) -> Result<Vec<&[u8]>, Failure> {
    if name.is_empty() || name.contains(&0) {
        return Err(Failure::invalid("an empty name or one with a NUL"));
    }
    if name.starts_with(b"/") {
        return Err(Failure::invalid("an absolute name"));
    }
    let parts: Vec<&[u8]> =
        name.split(|&byte| byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.contains(&&b".."[..]) {
        return Err(Failure::invalid("a name with .. in it"));
    }
    Ok(parts)
}

fn times(mtime: Time) -> Timestamps {
    let omit = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    let modified = Timespec { tv_sec: mtime.seconds, tv_nsec: mtime.nanoseconds.into() };
    Timestamps { last_access: omit, last_modification: modified }
}

struct Import {
    tree: Tree,
    max_bytes: u64,
    summary: Summary,
}

impl Import {
    fn entry(&mut self, entry: &Entry, reader: &mut Reader) -> Result<(), Failure> {
        let parts = parts(&entry.path)?;
        let Some((&name, parents)) = parts.split_last() else {
            if entry.kind != EntryKind::Directory {
                return Err(Failure::invalid("the workspace itself is a directory"));
            }
            self.tree.go(&[])?;
            return self.directory(entry);
        };
        if entry.kind == EntryKind::HardLink {
            return self.hard_link(entry, &parts, name, parents);
        }
        self.tree.go(parents)?;
        match entry.kind {
            EntryKind::Directory => {
                self.tree.enter(name, Mode::RWXU)?;
                self.directory(entry)
            }
            EntryKind::File => self.file(entry, name, reader),
            EntryKind::Symlink => {
                if entry.link.is_empty() || entry.link.contains(&0) {
                    return Err(Failure::invalid("a symbolic link without a target or with a NUL in it"));
                }
                let here = self.tree.here()?;
                replace(here, name, || symlinkat(&entry.link[..], here, name))?;
                set_time(here, name, entry.mtime)
            }
            EntryKind::Fifo => {
                let here = self.tree.here()?;
                replace(here, name, || mknodat(here, name, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0))?;
                // Should a command have put a link here by now, the user's own file gets the mode.
                chmodat(here, name, Mode::from_raw_mode(entry.mode), AtFlags::empty())?;
                set_time(here, name, entry.mtime)
            }
            EntryKind::HardLink | EntryKind::Device => Ok(()),
        }
    }

    /// What is known of the directory that the tree stands in.
    fn directory(&mut self, entry: &Entry) -> Result<(), Failure> {
        set_xattrs(self.tree.here()?, &entry.xattrs)?;
        self.tree.note(entry.mode, entry.mtime);
        Ok(())
    }

    fn file(&mut self, entry: &Entry, name: &[u8], reader: &mut Reader) -> Result<(), Failure> {
        if entry.data > self.max_bytes.saturating_sub(self.summary.file_bytes) {
            let text = format!("the files hold more than {} bytes", self.max_bytes);
            return Err(Failure::new(Code::TooLarge, text));
        }
        self.summary.file_bytes += entry.data;
        let here = self.tree.here()?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = replace(here, name, || openat(here, name, flags, Mode::RUSR | Mode::WUSR))?;
        match &entry.sparse {
            None => copy(reader, &file, entry.data)?,
            Some((pieces, size)) => {
                ftruncate(&file, *size)?;
                for &(offset, length) in pieces {
                    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(offset))?;
                    copy(reader, &file, length)?;
                }
            }
        }
        // A write takes setuid away and a mode may forbid attributes, so the order is data, attributes, mode, time.
        set_xattrs(file.as_fd(), &entry.xattrs)?;
        fchmod(&file, Mode::from_raw_mode(entry.mode))?;
        futimens(&file, &times(entry.mtime))?;
        Ok(())
    }

    fn hard_link(
        &mut self,
        entry: &Entry,
        own: &[&[u8]],
        name: &[u8],
        parents: &[&[u8]],
    ) -> Result<(), Failure> {
        let target = parts(&entry.link)?;
        let Some((&target_name, target_parents)) = target.split_last() else {
            return Err(Failure::invalid("a hard link to the workspace itself"));
        };
        if target == own {
            return Err(Failure::invalid("a hard link to itself"));
        }
        self.tree.go(target_parents)?;
        let from = self.tree.here()?.try_clone_to_owned().map_err(|_| Failure::from(Errno::MFILE))?;
        self.tree.go(parents)?;
        let here = self.tree.here()?;
        // Without a flag the last name of the target is not followed either.
        match replace(here, name, || linkat(&from, target_name, here, name, AtFlags::empty())) {
            Err(failure) if failure.code == Code::NotFound => {
                Err(Failure::invalid("a hard link to a file that is not there"))
            }
            result => result,
        }
    }
}

/// Make something, removing what has the name already.
fn replace<T>(
    here: BorrowedFd<'_>,
    name: &[u8],
    make: impl Fn() -> rustix::io::Result<T>,
) -> Result<T, Failure> {
    for _ in 0..TRIES {
        match make() {
            Err(Errno::EXIST) => remove(here, name)?,
            result => return Ok(result?),
        }
    }
    Err(Failure::invalid("something else appears there all the time"))
}

fn remove(here: BorrowedFd<'_>, name: &[u8]) -> Result<(), Failure> {
    match unlinkat(here, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => match unlinkat(here, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::NOTEMPTY | Errno::EXIST) => {
                Err(Failure::invalid("a directory with files is in the way"))
            }
            Err(errno) => Err(errno.into()),
        },
        Err(errno) => Err(errno.into()),
    }
}

fn copy(reader: &mut Reader, file: &OwnedFd, mut left: u64) -> Result<(), Failure> {
    while left > 0 {
        let piece = reader.piece(left)?;
        if piece.is_empty() {
            return Err(Failure::invalid("an entry with less data than announced"));
        }
        left -= piece.len() as u64;
        write_all(file, piece)?;
    }
    Ok(())
}

fn set_time(here: BorrowedFd<'_>, name: &[u8], mtime: Time) -> Result<(), Failure> {
    Ok(utimensat(here, name, &times(mtime), AtFlags::SYMLINK_NOFOLLOW)?)
}

/// A file system without attributes takes the file without them.
fn set_xattrs(file: BorrowedFd<'_>, xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<(), Failure> {
    for (name, value) in xattrs {
        match fsetxattr(file, &name[..], value, XattrFlags::empty()) {
            Ok(()) | Err(Errno::NOTSUP) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// A directory of the archive.
struct Node {
    parent: usize,
    depth: usize,
    name: Box<[u8]>,
    note: Option<(u32, Time)>,
}

/// Where the import stands, and every directory that it has seen.
struct Tree {
    nodes: Vec<Node>,
    known: HashMap<(usize, Box<[u8]>), usize>,
    bytes: usize,
    /// From the workspace down to where we stand; the first is always open.
    chain: Vec<(usize, Option<OwnedFd>)>,
}

impl Tree {
    fn new(root: OwnedFd) -> Tree {
        let node = Node { parent: 0, depth: 0, name: Box::default(), note: None };
        Tree { nodes: vec![node], known: HashMap::new(), bytes: 0, chain: vec![(0, Some(root))] }
    }

    /// Go to a directory by its names from the workspace, making what is missing.
    fn go(&mut self, names: &[&[u8]]) -> Result<(), Failure> {
        let common = self.chain[1..]
            .iter()
            .zip(names)
            .take_while(|((node, _), name)| *self.nodes[*node].name == ***name)
            .count();
        self.chain.truncate(1 + common);
        for name in &names[common..] {
            self.enter(name, Mode::from_raw_mode(0o755))?;
        }
        Ok(())
    }

    /// Go into a directory right below, making it with this mode where it is missing.
    fn enter(&mut self, name: &[u8], mode: Mode) -> Result<(), Failure> {
        let here = self.here()?;
        let mut opened = open_or_make(here, name, mode);
        if matches!(opened, Err(Errno::NOTDIR | Errno::LOOP)) {
            if mode != Mode::RWXU {
                return Err(Failure::invalid("a file or a link stands where a directory has to be"));
            }
            // An entry of its own replaces what is no directory.
            remove(here, name)?;
            opened = open_or_make(here, name, mode);
        }
        let opened = opened?;
        let parent = self.chain.last().map_or(0, |(node, _)| *node);
        let node = self.node(parent, name)?;
        self.push(node, opened);
        Ok(())
    }

    fn push(&mut self, node: usize, fd: OwnedFd) {
        self.chain.push((node, Some(fd)));
        if let Some(old) = self.chain.len().checked_sub(MAX_OPEN).filter(|&index| index > 0) {
            self.chain[old].1 = None;
        }
    }

    fn node(&mut self, parent: usize, name: &[u8]) -> Result<usize, Failure> {
        let key = (parent, Box::from(name));
        if let Some(&node) = self.known.get(&key) {
            return Ok(node);
        }
        self.bytes += 2 * name.len() + size_of::<Node>() + 48;
        if self.bytes > MAX_TREE {
            return Err(Failure::new(Code::Exhausted, "too many directories in the archive"));
        }
        let depth = self.nodes[parent].depth + 1;
        self.nodes.push(Node { parent, depth, name: name.into(), note: None });
        self.known.insert(key, self.nodes.len() - 1);
        Ok(self.nodes.len() - 1)
    }

    /// The directory where we stand. Its descriptor may have been closed on the way down to others.
    fn here(&mut self) -> Result<BorrowedFd<'_>, Failure> {
        let open = self.chain.iter().rposition(|(_, fd)| fd.is_some()).unwrap_or(0);
        for at in open + 1..self.chain.len() {
            let name = &self.nodes[self.chain[at].0].name[..];
            let above = self.chain[at - 1].1.as_ref().ok_or(Errno::NOENT)?;
            let fd = lookup::directory(above, name, DIRECTORY)?;
            self.chain[at].1 = Some(fd);
            if let Some(old) = (at + 1).checked_sub(MAX_OPEN).filter(|&index| index > 0) {
                self.chain[old].1 = None;
            }
        }
        let fd = self.chain.last().and_then(|(_, fd)| fd.as_ref()).ok_or(Errno::NOENT)?;
        Ok(fd.as_fd())
    }

    /// Keep mode and time of the directory where we stand for the end.
    fn note(&mut self, mode: u32, mtime: Time) {
        if let Some((node, _)) = self.chain.last() {
            self.nodes[*node].note = Some((mode, mtime));
        }
    }

    /// Go to a directory that was seen before.
    fn go_back_to(&mut self, node: usize) -> Result<(), Failure> {
        let mut down = Vec::new();
        let mut at = node;
        while self.chain.get(self.nodes[at].depth).is_none_or(|(other, _)| *other != at) {
            down.push(at);
            at = self.nodes[at].parent;
        }
        self.chain.truncate(self.nodes[at].depth + 1);
        for node in down.into_iter().rev() {
            self.chain.push((node, None));
        }
        self.here().map(|_| ())
    }

    /// Give every directory its mode and time. A child was always seen after its parent.
    fn finish(&mut self) -> Result<(), Failure> {
        for node in (0..self.nodes.len()).rev() {
            let Some((mode, mtime)) = self.nodes[node].note else {
                continue;
            };
            self.go_back_to(node)?;
            let here = self.here()?;
            fchmod(here, Mode::from_raw_mode(mode))?;
            futimens(here, &times(mtime))?;
        }
        Ok(())
    }
}

fn open_or_make(here: BorrowedFd<'_>, name: &[u8], mode: Mode) -> Result<OwnedFd, Errno> {
    for _ in 0..TRIES {
        match lookup::directory(here, name, DIRECTORY) {
            Err(Errno::NOENT) => match mkdirat(here, name, mode) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            },
            // Somebody's directory that its owner may not read at the moment.
            Err(Errno::ACCESS) if is_directory(here, name) => {
                chmodat(here, name, Mode::RWXU, AtFlags::empty())?;
            }
            result => return result,
        }
    }
    Err(Errno::LOOP)
}

fn is_directory(here: BorrowedFd<'_>, name: &[u8]) -> bool {
    statat(here, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir())
}
