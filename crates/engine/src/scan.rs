//! The names and metadata of a whole tree, in memory that is small for each entry.
//!
//! A [`Scan`] is an arena: nodes refer to names by offset and to each other by number, the children of a directory lie
//! side by side, sorted by name, and behind their directory. Nothing is opened but directories, and of a directory only
//! what lies on the file system of the root. A directory that changes while it is listed is listed again.

mod listing;

use crate::error::{Error, Result};
use crate::format::MAX_TARGET;
use crate::open::Place;
use listing::Listing;
use rustix::fs::{AtFlags, FileType, Stat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

/// Directories inside each other.
pub const MAX_DEPTH: usize = 1_000;
/// How often something that changes is looked at.
pub const TRIES: usize = 3;
/// Paths of what was left out that are told, and their bytes in all.
const MAX_LEFT_OUT: usize = 10_000;
const MAX_LEFT_OUT_BYTES: usize = 16 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    File,
    Directory,
    Symlink,
    Fifo,
}

/// What tells whether a file is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    pub inode: u64,
    pub size: u64,
    pub mtime: (i64, u32),
    pub ctime: (i64, u32),
}

impl State {
    pub fn of(stat: &Stat) -> State {
        State {
            inode: stat.st_ino,
            size: stat.st_size as u64,
            mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
            ctime: (stat.st_ctime, stat.st_ctime_nsec as u32),
        }
    }
}

/// One entry.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    pub state: State,
    pub uid: u32,
    pub gid: u32,
    /// Number of the directory that it is in; the root is in itself.
    pub parent: u32,
    name: u32,
    /// Of a directory its number, of a symlink where its target begins.
    more: u32,
    pub mode: u16,
    /// Of a symlink.
    target: u16,
    length: u8,
    pub kind: Type,
}

/// One directory; its children are `nodes[first..first + count]`.
#[derive(Clone, Copy, Debug)]
pub struct Dir {
    pub node: u32,
    pub first: u32,
    pub count: u32,
    pub depth: u16,
    /// Not to be in the commit, nor anything below.
    pub left_out: bool,
}

/// Why something is not in a commit; the words are those of `outcomes.Left`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    Socket,
    Device,
    OtherFilesystem,
    Attributes,
    Unreadable,
    Name,
}

impl Left {
    pub fn word(self) -> &'static str {
        match self {
            Left::Socket => "socket",
            Left::Device => "device",
            Left::OtherFilesystem => "other_filesystem",
            Left::Attributes => "attributes_too_large",
            Left::Unreadable => "unreadable",
            Left::Name => "name",
        }
    }
}

/// What was left out: all are counted, the first are named.
#[derive(Debug, Default)]
pub struct LeftOut {
    pub paths: Vec<(Vec<u8>, Left)>,
    bytes: usize,
    pub count: u64,
}

impl LeftOut {
    pub fn add(&mut self, path: Vec<u8>, why: Left) {
        self.count += 1;
        if self.paths.len() < MAX_LEFT_OUT && self.bytes + path.len() <= MAX_LEFT_OUT_BYTES {
            self.bytes += path.len();
            self.paths.push((path, why));
        }
    }
}

/// What a directory tells to whoever reads its attributes while it is open.
pub trait Visit {
    fn directory(&mut self, node: u32, directory: BorrowedFd<'_>) -> Result<bool>;

    /// Whether this is the upper directory of an overlay: character devices 0/0 and all else that is left out hide names.
    fn hides(&self) -> bool {
        false
    }
}

#[derive(Debug, Default)]
pub struct Scan {
    pub nodes: Vec<Node>,
    pub dirs: Vec<Dir>,
    names: Vec<u8>,
    pub device: u64,
    /// Nodes with several names that are no directories, by inode, with how many names: candidates for links.
    linked: Vec<(u64, u32, usize)>,
    /// Names that a directory of an upper has without a node, sorted.
    hidden: HashMap<u32, Vec<Vec<u8>>>,
    pub left_out: LeftOut,
}

impl Scan {
    /// List the tree below `place`. `visit` is called once for each directory while it is open; its answer says
    /// whether the attributes fit.
    pub fn new(place: &Place<'_>, visit: &mut dyn Visit, check: &dyn Fn() -> Result<()>) -> Result<Scan> {
        let mut scan = Scan::default();
        let stat = rustix::fs::fstat(place.root()).map_err(|errno| failed(errno, b""))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            return Err(Error::Invalid("the workspace is no directory".to_owned()));
        }
        scan.device = stat.st_dev;
        scan.add(0, b"", &stat, Type::Directory)?;
        let mut waiting = vec![scan.add_directory(0, 0)];
        let mut listing = Listing::default();
        while let Some(dir) = waiting.pop() {
            check()?;
            scan.list(place, dir, visit, &mut listing)?;
            let Dir { first, count, depth, .. } = scan.dirs[dir as usize];
            for node in (first..first + count).rev() {
                if scan.nodes[node as usize].kind == Type::Directory {
                    if usize::from(depth) == MAX_DEPTH {
                        return Err(Error::Invalid(format!(
                            "more than {MAX_DEPTH} directories inside each other: {}",
                            scan.path(node).escape_ascii()
                        )));
                    }
                    waiting.push(scan.add_directory(node, depth + 1));
                }
            }
        }
        Ok(scan)
    }

    pub fn name(&self, node: u32) -> &[u8] {
        let node = &self.nodes[node as usize];
        &self.names[node.name as usize..][..usize::from(node.length)]
    }

    /// Where a symlink points.
    pub fn target(&self, node: u32) -> &[u8] {
        let node = &self.nodes[node as usize];
        &self.names[node.more as usize..][..usize::from(node.target)]
    }

    pub fn is_directory(&self, node: u32) -> bool {
        self.nodes[node as usize].kind == Type::Directory
    }

    /// The number of the directory that a node is.
    pub fn number(&self, node: u32) -> u32 {
        self.nodes[node as usize].more
    }

    /// Whether a directory's listing is there: of one that could not be read it is not.
    pub fn kept(&self, node: u32) -> bool {
        let found = &self.nodes[node as usize];
        found.kind != Type::Directory || !self.dirs[found.more as usize].left_out
    }

    /// The node of a name in a directory.
    pub fn child(&self, dir: u32, name: &[u8]) -> Option<u32> {
        let Dir { first, count, .. } = self.dirs[dir as usize];
        let (mut low, mut high) = (first, first + count);
        while low < high {
            let middle = low.midpoint(high);
            match self.name(middle).cmp(name) {
                std::cmp::Ordering::Equal => return Some(middle),
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }

    /// Whether a directory of an upper hides a name for which it has no node.
    pub fn hides(&self, dir: u32, name: &[u8]) -> bool {
        let hidden = self.hidden.get(&dir);
        hidden.is_some_and(|names| names.binary_search_by(|hidden| hidden.as_slice().cmp(name)).is_ok())
    }

    /// A node whose inode has names that the scan did not see. To be asked before [`Scan::links`].
    pub fn linked_outside(&self) -> Option<u32> {
        let mut seen: HashMap<u64, usize> = HashMap::new();
        self.linked.iter().for_each(|(inode, ..)| *seen.entry(*inode).or_default() += 1);
        let outside = |(inode, _, names): &&(u64, u32, usize)| seen.get(inode) != Some(names);
        self.linked.iter().find(outside).map(|(_, node, _)| *node)
    }

    /// The path of a node below the root.
    pub fn path(&self, mut node: u32) -> Vec<u8> {
        let mut names = Vec::new();
        while node != 0 {
            names.push(self.name(node));
            node = self.dirs[self.nodes[node as usize].parent as usize].node;
        }
        names.reverse();
        names.join(&b'/')
    }

    /// Nodes of one inode, where several of its names are inside: each group sorted by path.
    pub fn links(&mut self) -> Vec<Vec<u32>> {
        let mut linked = std::mem::take(&mut self.linked);
        linked.sort_unstable();
        let groups = linked.chunk_by(|a, b| a.0 == b.0).filter(|group| group.len() > 1);
        groups
            .map(|group| {
                let mut paths: Vec<_> = group.iter().map(|(_, node, _)| (self.path(*node), *node)).collect();
                paths.sort_unstable();
                paths.into_iter().map(|(_, node)| node).collect()
            })
            .collect()
    }

    fn add(&mut self, parent: u32, name: &[u8], stat: &Stat, kind: Type) -> Result<u32> {
        let full = || Error::Limit("too many names for one commit".to_owned());
        let number = u32::try_from(self.nodes.len()).map_err(|_| full())?;
        let start = u32::try_from(self.names.len()).map_err(|_| full())?;
        self.names.extend_from_slice(name);
        self.nodes.push(Node {
            state: State::of(stat),
            uid: stat.st_uid,
            gid: stat.st_gid,
            parent,
            name: start,
            more: 0,
            mode: (stat.st_mode & 0o7777) as u16,
            target: 0,
            length: name.len() as u8,
            kind,
        });
        Ok(number)
    }

    fn add_directory(&mut self, node: u32, depth: u16) -> u32 {
        let number = self.dirs.len() as u32;
        self.nodes[node as usize].more = number;
        self.dirs.push(Dir { node, first: 0, count: 0, depth, left_out: false });
        number
    }

    fn list(
        &mut self,
        place: &Place<'_>,
        dir: u32,
        visit: &mut dyn Visit,
        listing: &mut Listing,
    ) -> Result<()> {
        let node = self.dirs[dir as usize].node;
        let path = self.path(node);
        let (nodes, names, linked) = (self.nodes.len(), self.names.len(), self.linked.len());
        for _ in 0..TRIES {
            let opened = match place.directory(&path) {
                Ok(opened) => opened,
                Err(Errno::ACCESS | Errno::PERM) if node == 0 => {
                    return Err(Error::Forbidden("the workspace may not be read".to_owned()));
                }
                Err(Errno::ACCESS | Errno::PERM) => {
                    self.left_out.add(path, Left::Unreadable);
                    self.dirs[dir as usize].left_out = true;
                    return Ok(());
                }
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => break,
                Err(errno) => return Err(failed(errno, &path)),
            };
            let before = rustix::fs::fstat(&opened).map_err(|errno| failed(errno, &path))?;
            if before.st_dev != self.device || before.st_ino != self.nodes[node as usize].state.inode {
                break;
            }
            let read = listing.read(opened.as_fd()).map_err(|errno| failed(errno, &path))?;
            let overlay = visit.hides();
            let complete = read && self.take(dir, opened.as_fd(), listing, &path, overlay)?;
            let fits = !complete || visit.directory(node, opened.as_fd())?;
            let after = rustix::fs::fstat(&opened).map_err(|errno| failed(errno, &path))?;
            if complete && State::of(&before) == State::of(&after) {
                for (name, why) in listing.left.drain(..) {
                    if let Some(why) = why {
                        self.left_out.add(join(&path, &name), why);
                    }
                    if overlay {
                        self.hidden.entry(dir).or_default().push(name);
                    }
                }
                if let Some(names) = self.hidden.get_mut(&dir) {
                    names.sort_unstable();
                }
                if !fits {
                    self.left_out.add(path, Left::Attributes);
                }
                let found = &mut self.nodes[node as usize];
                found.state = State::of(&after);
                (found.uid, found.gid) = (after.st_uid, after.st_gid);
                found.mode = (after.st_mode & 0o7777) as u16;
                return Ok(());
            }
            self.nodes.truncate(nodes);
            self.names.truncate(names);
            self.linked.truncate(linked);
        }
        Err(changed(&path))
    }

    /// Make nodes of what was listed. Whether all of it was still there.
    fn take(
        &mut self,
        dir: u32,
        directory: BorrowedFd<'_>,
        listing: &mut Listing,
        path: &[u8],
        overlay: bool,
    ) -> Result<bool> {
        let first = self.nodes.len() as u32;
        let mut target = [MaybeUninit::<u8>::uninit(); MAX_TARGET + 1];
        for index in 0..listing.names.len() {
            let name = listing.name(index);
            let stat = match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => return Ok(false),
                Err(Errno::ACCESS | Errno::PERM) => {
                    let name = name.to_vec();
                    listing.left.push((name, Some(Left::Unreadable)));
                    continue;
                }
                Err(errno) => return Err(failed(errno, &join(path, name))),
            };
            let kind = match FileType::from_raw_mode(stat.st_mode) {
                _ if stat.st_dev != self.device => Err(Some(Left::OtherFilesystem)),
                FileType::RegularFile => Ok(Type::File),
                FileType::Directory => Ok(Type::Directory),
                FileType::Symlink => Ok(Type::Symlink),
                FileType::Fifo => Ok(Type::Fifo),
                FileType::CharacterDevice if overlay && stat.st_rdev == 0 => Err(None),
                FileType::Socket => Err(Some(Left::Socket)),
                _ => Err(Some(Left::Device)),
            };
            let kind = match kind {
                Ok(kind) => kind,
                Err(why) => {
                    let name = name.to_vec();
                    listing.left.push((name, why));
                    continue;
                }
            };
            let node = self.add(dir, name, &stat, kind)?;
            if kind == Type::Symlink {
                let text = match rustix::fs::readlinkat_raw(directory, name, &mut target) {
                    Ok((text, _)) if !text.is_empty() && text.len() <= MAX_TARGET => &*text,
                    Ok(_) | Err(Errno::NOENT | Errno::INVAL) => return Ok(false),
                    Err(errno) => return Err(failed(errno, &join(path, name))),
                };
                let start = self.names.len() as u32;
                let found = &mut self.nodes[node as usize];
                (found.more, found.target) = (start, text.len() as u16);
                self.names.extend_from_slice(text);
            }
            if kind != Type::Directory && stat.st_nlink > 1 {
                self.linked.push((stat.st_ino, node, stat.st_nlink as usize));
            }
        }
        let count = self.nodes.len() as u32 - first;
        let found = &mut self.dirs[dir as usize];
        (found.first, found.count) = (first, count);
        Ok(true)
    }
}

pub fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() }
}

/// The error of something that changes under our hands.
pub fn changed(path: &[u8]) -> Error {
    let name = if path.is_empty() { "the workspace".into() } else { path.escape_ascii().to_string() };
    Error::Conflict(format!("{name} changes while it is read; stop what writes to it and try again"))
}

/// The error of a system call on something inside the workspace.
pub fn failed(errno: Errno, path: &[u8]) -> Error {
    match errno {
        Errno::MFILE | Errno::NFILE => Error::Limit(format!("cannot open {}: {errno}", path.escape_ascii())),
        _ => Error::io(errno, path),
    }
}

#[cfg(test)]
mod tests;
