//! Which directories a watch has, and what their events mean.
//!
//! The kernel watches directories, not trees, and names a directory by a number. So every watched directory is a
//! node that knows its parent and its name, and a path is put together when it is needed. A directory is opened name
//! by name from the root without following a link, and the watch is put on what was opened.
//!
//! What appears in a new directory before its watch is there raises no event. Therefore a new directory is read
//! right after its watch was added, and what is found is reported as created. An event for the same name that was
//! already on its way would report it twice: names found by reading are remembered until the kernel's queue has
//! been empty once, and such an event is dropped.
//!
//! A file that is being uploaded has no events but its last: it appears under its own name, or takes that of another.
//!
//! A move is two events with one cookie. The first waits for the second a moment; alone it is a removal, and the
//! second alone a creation.
//!
//! The file is long because the nodes, what was found, and the halves of moves are one state that every event changes.

use crate::errors::{Code, Failure};
use crate::fsops;
use crate::lookup;
use crate::pack::MapWriter;
use crate::uploads::{Replacing, is_unfinished};
use rustix::fs::inotify::{ReadFlags, WatchFlags};
use rustix::fs::{FileType, OFlags, RawDir, fstat, statat};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet, VecDeque};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

const MAX_DIRECTORIES: usize = 8_192;
/// The page's longest path. What lies deeper cannot be named, so it counts as lost.
const MAX_PATH: usize = 4_095;
/// Moves whose second half has not come.
const MAX_HALVES: usize = 64;
/// Names found by reading that may still have an event.
const MAX_FOUND: usize = 65_536;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn interest() -> WatchFlags {
    WatchFlags::CREATE
        | WatchFlags::DELETE
        | WatchFlags::MODIFY
        | WatchFlags::ATTRIB
        | WatchFlags::MOVED_FROM
        | WatchFlags::MOVED_TO
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::ONLYDIR
        | WatchFlags::EXCL_UNLINK
}

/// One event of the kernel.
pub struct Event {
    pub watch: i32,
    pub flags: ReadFlags,
    pub cookie: u32,
    pub name: Vec<u8>,
}

struct Node {
    /// `None` for the root.
    place: Option<(i32, Vec<u8>)>,
}

/// The first half of a move.
struct Half {
    cookie: u32,
    from: (i32, Vec<u8>),
    directory: bool,
    /// The name that it had is nobody's business.
    unfinished: bool,
    /// It has waited for a turn already.
    old: bool,
}

pub struct Tree {
    inotify: Arc<OwnedFd>,
    replacing: Arc<Replacing>,
    /// Device and number of the root. It is not held open: the kernel tells of a directory's end only when nobody
    /// holds it.
    root: (u64, u64),
    root_watch: i32,
    path: Vec<u8>,
    recursive: bool,
    nodes: HashMap<i32, Node>,
    by_place: HashMap<(i32, Vec<u8>), i32>,
    found: HashSet<(i32, Vec<u8>)>,
    halves: VecDeque<Half>,
    /// Directories that are to be watched and read.
    fresh: VecDeque<(i32, Vec<u8>)>,
    changes: Vec<Vec<u8>>,
}

impl Tree {
    /// Watch a directory. What is below it is added by [`Tree::grow`].
    pub fn new(
        inotify: Arc<OwnedFd>,
        mut path: Vec<u8>,
        recursive: bool,
        replacing: Arc<Replacing>,
    ) -> Result<Tree, Failure> {
        while path.len() > 1 && path.ends_with(b"/") {
            path.pop();
        }
        let root = lookup::open(&path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let stat = fstat(&root)?;
        let root_watch = add(&inotify, &root)?;
        let mut tree = Tree {
            inotify,
            replacing,
            root: (stat.st_dev, stat.st_ino),
            root_watch,
            path,
            recursive,
            nodes: HashMap::from([(root_watch, Node { place: None })]),
            by_place: HashMap::new(),
            found: HashSet::new(),
            halves: VecDeque::new(),
            fresh: VecDeque::new(),
            changes: Vec::new(),
        };
        if recursive {
            tree.read(root_watch, &root, false)?;
        }
        Ok(tree)
    }

    /// Watch some of the directories that are known and not watched yet; `true` when there are more.
    pub fn grow(&mut self, most: usize, report: bool) -> Result<bool, Failure> {
        for _ in 0..most {
            let Some((parent, name)) = self.fresh.pop_front() else {
                return Ok(false);
            };
            self.adopt(parent, name, report)?;
        }
        Ok(!self.fresh.is_empty())
    }

    pub fn take_changes(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.changes)
    }

    pub fn waits_for_halves(&self) -> bool {
        !self.halves.is_empty()
    }

    /// The names from the root down to a node, or `None` when it hangs nowhere any more.
    fn names(&self, watch: i32) -> Option<Vec<&[u8]>> {
        let mut names = Vec::new();
        let mut at = watch;
        while let Some((parent, name)) = &self.nodes.get(&at)?.place {
            names.push(&name[..]);
            at = *parent;
            // A move into itself, as events that were out of step could say it, ends here.
            if names.len() > MAX_PATH / 2 {
                return None;
            }
        }
        names.reverse();
        Some(names)
    }

    fn path_of(&self, watch: i32, name: &[u8]) -> Option<Vec<u8>> {
        let mut path = if self.path == b"/" { Vec::new() } else { self.path.clone() };
        for part in self.names(watch)?.into_iter().chain([name]) {
            path.push(b'/');
            path.extend_from_slice(part);
        }
        (path.len() <= MAX_PATH).then_some(path)
    }

    fn report(&mut self, kind: &str, place: (i32, &[u8]), to: Option<(i32, &[u8])>, directory: bool) {
        let path = self.path_of(place.0, place.1);
        let to = to.map(|(watch, name)| self.path_of(watch, name));
        let change = match (path, to) {
            (Some(path), None) => {
                MapWriter::new(3).str("kind", kind).bin("path", &path).bool("directory", directory)
            }
            (Some(path), Some(Some(to))) => MapWriter::new(4)
                .str("kind", kind)
                .bin("path", &path)
                .bin("to", &to)
                .bool("directory", directory),
            _ => MapWriter::new(1).bool("overflow", true),
        };
        let change = change.done();
        // A file that is written piece by piece is one change until somebody has looked.
        if self.changes.last() != Some(&change) {
            self.changes.push(change);
        }
    }

    /// Open a directory by the names that lead to it, none of which may be a link.
    fn open(&self, parent: i32, name: &[u8]) -> Option<OwnedFd> {
        let mut at = lookup::open(&self.path, OFlags::PATH | OFlags::DIRECTORY).ok()?;
        let stat = fstat(&at).ok()?;
        if (stat.st_dev, stat.st_ino) != self.root {
            return None;
        }
        for part in self.names(parent)?.into_iter().chain([name]) {
            at = lookup::directory(&at, part, DIRECTORY).ok()?;
        }
        Some(at)
    }

    /// Watch a directory that has appeared under a name, and read it. One that went again is none.
    fn adopt(&mut self, parent: i32, name: Vec<u8>, report: bool) -> Result<(), Failure> {
        if self.path_of(parent, &name).is_none() {
            return Ok(());
        }
        let Some(directory) = self.open(parent, &name) else {
            return Ok(());
        };
        if self.nodes.len() >= MAX_DIRECTORIES {
            let text = format!("more than {MAX_DIRECTORIES} directories");
            return Err(Failure::new(Code::Exhausted, text));
        }
        let watch = add(&self.inotify, &directory)?;
        let known = self.nodes.contains_key(&watch);
        if watch == self.root_watch {
            return Ok(());
        }
        self.put(watch, parent, name);
        // One that is known was moved: what is in it was reported already.
        if known { Ok(()) } else { self.read(watch, &directory, report) }
    }

    fn put(&mut self, watch: i32, parent: i32, name: Vec<u8>) {
        let place = Some((parent, name.clone()));
        if let Some(Node { place: Some(old) }) = self.nodes.insert(watch, Node { place })
            && self.by_place.get(&old) == Some(&watch)
        {
            self.by_place.remove(&old);
        }
        self.by_place.insert((parent, name), watch);
    }

    /// Note what is in a directory: what may have come before its watch, and the directories in it.
    fn read(&mut self, watch: i32, directory: &OwnedFd, report: bool) -> Result<(), Failure> {
        let mut buffer = [MaybeUninit::uninit(); 8 << 10];
        let mut reader = RawDir::new(directory, &mut buffer);
        while let Some(item) = reader.next() {
            let item = match item {
                Ok(item) => item,
                Err(Errno::INTR) => continue,
                // It was removed, or is not to be read.
                Err(_) => break,
            };
            let name = item.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let kind = match item.file_type() {
                FileType::Unknown => {
                    statat(directory, item.file_name(), rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
                        .map_or(FileType::Unknown, |stat| fsops::kind_of(&stat))
                }
                kind => kind,
            };
            if is_unfinished(name, kind) {
                continue;
            }
            if report && !self.found.contains(&(watch, name.to_vec())) {
                if self.found.len() < MAX_FOUND {
                    self.found.insert((watch, name.to_vec()));
                }
                self.report("created", (watch, name), None, kind.is_dir());
            }
            if kind.is_dir() && self.recursive {
                self.fresh.push_back((watch, name.to_vec()));
            }
        }
        if self.fresh.len() > MAX_DIRECTORIES {
            let text = format!("more than {MAX_DIRECTORIES} directories");
            return Err(Failure::new(Code::Exhausted, text));
        }
        Ok(())
    }

    /// The kernel's queue is empty: what was found by reading has had its event, and what waits has waited.
    pub fn settle(&mut self) {
        self.found.clear();
        while self.halves.front().is_some_and(|half| half.old) {
            self.drop_half();
        }
        for half in &mut self.halves {
            half.old = true;
        }
    }

    /// A move out of what is watched.
    fn drop_half(&mut self) {
        if let Some(half) = self.halves.pop_front().filter(|half| !half.unfinished) {
            self.report("removed", (half.from.0, &half.from.1), None, half.directory);
            if let Some(&watch) = self.by_place.get(&half.from) {
                self.release(watch);
            }
        }
    }

    /// Stop watching a directory and everything below it.
    fn release(&mut self, watch: i32) {
        let mut gone = vec![watch];
        while let Some(watch) = gone.pop() {
            let below: Vec<i32> = self
                .by_place
                .iter()
                .filter(|((parent, _), _)| *parent == watch)
                .map(|(_, &child)| child)
                .collect();
            gone.extend(below);
            // The kernel has removed it already when the directory is gone.
            let _ = rustix::fs::inotify::remove_watch(&*self.inotify, watch);
            self.forget(watch);
        }
    }

    fn forget(&mut self, watch: i32) {
        if let Some(Node { place: Some(place) }) = self.nodes.remove(&watch)
            && self.by_place.get(&place) == Some(&watch)
        {
            self.by_place.remove(&place);
        }
    }

    /// Take one event. `Err` ends the watch.
    pub fn take(&mut self, event: Event) -> Result<(), Failure> {
        let Event { watch, flags, cookie, name } = event;
        if flags.contains(ReadFlags::IGNORED) {
            self.forget(watch);
        }
        if watch == self.root_watch
            && flags.intersects(
                ReadFlags::IGNORED | ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT,
            )
        {
            return Err(Failure::new(Code::NotFound, "the watched directory was moved or removed"));
        }
        if name.is_empty() || !self.nodes.contains_key(&watch) {
            return Ok(());
        }
        let directory = flags.contains(ReadFlags::ISDIR);
        // What else may have such a name (a pipe, a link) the event does not tell apart.
        let kind = if directory { FileType::Directory } else { FileType::RegularFile };
        let unfinished = is_unfinished(&name, kind);
        if unfinished && !flags.intersects(ReadFlags::MOVED_FROM | ReadFlags::MOVED_TO) {
            return Ok(());
        }
        if flags.contains(ReadFlags::CREATE) {
            if !self.found.remove(&(watch, name.clone())) {
                self.report("created", (watch, &name), None, directory);
            }
            self.appeared(watch, name, directory);
        } else if flags.contains(ReadFlags::DELETE) {
            self.found.remove(&(watch, name.clone()));
            self.report("removed", (watch, &name), None, directory);
        } else if flags.contains(ReadFlags::MOVED_FROM) {
            self.found.remove(&(watch, name.clone()));
            if self.halves.len() >= MAX_HALVES {
                self.drop_half();
            }
            self.halves.push_back(Half { cookie, from: (watch, name), directory, unfinished, old: false });
        } else if flags.contains(ReadFlags::MOVED_TO) {
            self.moved(cookie, watch, name, directory, unfinished);
        } else if flags.intersects(ReadFlags::MODIFY | ReadFlags::ATTRIB) {
            self.report("modified", (watch, &name), None, directory);
        }
        Ok(())
    }

    fn appeared(&mut self, watch: i32, name: Vec<u8>, directory: bool) {
        if directory && self.recursive {
            self.fresh.push_back((watch, name));
        }
    }

    fn moved(&mut self, cookie: u32, watch: i32, name: Vec<u8>, directory: bool, unfinished: bool) {
        let half = self.halves.iter().position(|half| half.cookie == cookie);
        let known = self.found.remove(&(watch, name.clone()));
        let half = half.and_then(|at| self.halves.remove(at));
        if unfinished {
            // Somebody gave a file of theirs such a name: it is as good as gone.
            if let Some(half) = half.filter(|half| !half.unfinished) {
                self.report("removed", (half.from.0, &half.from.1), None, directory);
            }
            return;
        }
        let Some(half) = half else {
            if !known {
                self.report("created", (watch, &name), None, directory);
            }
            return self.appeared(watch, name, directory);
        };
        if half.unfinished {
            if !known {
                let change = self.replacing.change(&half.from.1);
                self.report(change, (watch, &name), None, directory);
            }
            return;
        }
        self.report("moved", (half.from.0, &half.from.1), Some((watch, &name)), directory);
        match self.by_place.get(&half.from).copied() {
            Some(moved) if directory => self.put(moved, watch, name),
            _ => self.appeared(watch, name, directory),
        }
    }
}

/// Put a watch on an open directory. The path leads to exactly that.
fn add(inotify: &OwnedFd, directory: &OwnedFd) -> Result<i32, Failure> {
    let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
    match rustix::fs::inotify::add_watch(inotify, path, interest()) {
        Ok(watch) => Ok(watch),
        Err(Errno::NOSPC) => Err(Failure::new(Code::Exhausted, "the kernel's limit of watches")),
        Err(errno) => Err(errno.into()),
    }
}
