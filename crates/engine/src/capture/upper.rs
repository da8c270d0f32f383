//! The upper directory of an overlay, captured as the merged view without looking at what lies below untouched.
//!
//! What an upper directory says of the lower state (Linux, `Documentation/filesystems/overlayfs.rst`): a character
//! device 0/0 hides a name; a directory without marks shows what the lower one of its name has beside its own;
//! `trusted.overlay.opaque=y` shows its own alone; `trusted.overlay.redirect` shows that of another lower directory: a
//! name is beside it, a path with a slash in front begins at the root. Metadata are always those of the upper.
//!
//! [`Upper`] maps each directory of the scan to the tree of the lower state that shows through. A capture then takes
//! over that tree's entries which the scan neither has nor hides, without opening them.
//!
//! What cannot be told from the upper alone is refused with [`Error::Refused`], so that the merged view is read instead:
//! * A name of a linked inode that is changed, removed or moved: the names that it has left are anywhere, and their link
//!   id may be another. So what is removed or moved is looked through for links, all of it.
//! * An inode with names outside of the upper: the overlay's index has it, and other names show it.
//! * A base that is missing, damaged, or not what the redirects say.

use crate::error::{Error, Result};
use crate::format::{Body, Entry, Id, Kind, Tree, decode_tree};
use crate::layout::Cursor;
use crate::read::{Location, Reader};
use crate::scan::{MAX_DEPTH, Scan};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::BorrowedFd;

/// The longest redirect: a path of 1,000 names would not fit into an attribute anyway.
const MAX_REDIRECT: usize = 65_536;

/// What a directory of the upper says of the lower one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    Opaque,
    /// A name, or a path with a slash in front.
    Redirect(Vec<u8>),
}

fn refused(why: &str, path: &[u8]) -> Error {
    Error::Refused(format!("{}: {why}", crate::error::shown(path)))
}

/// What cannot be read of the state below is no reason to give up what is in the workspace.
fn lenient<T>(result: Result<T>) -> Result<T> {
    result.map_err(|error| match error {
        Error::Damaged(_) | Error::Io { .. } => {
            Error::Refused(format!("the state below cannot be read: {error}"))
        }
        error => error,
    })
}

/// Whether this process sees the marks: to others the kernel says that there are none.
pub fn sees_marks(directory: BorrowedFd<'_>) -> Result<()> {
    // There is no such attribute. Only who may not have any of its sort is told something else.
    match rustix::fs::fremovexattr(directory, "trusted.overlay.no-such-mark") {
        Err(Errno::NODATA) => Ok(()),
        _ => Err(refused("the overlay's marks cannot be read by this user", b"")),
    }
}

/// Read the mark of an open directory.
pub fn mark(directory: BorrowedFd<'_>) -> Result<Option<Mark>> {
    let mut value = [0; 1];
    match rustix::fs::fgetxattr(directory, "trusted.overlay.opaque", &mut value) {
        Ok(1) if value == *b"y" => return Ok(Some(Mark::Opaque)),
        Err(Errno::NODATA) => {}
        _ => return Err(refused("an unknown mark of an opaque directory", b"")),
    }
    let mut value = vec![0; 512];
    loop {
        match rustix::fs::fgetxattr(directory, "trusted.overlay.redirect", &mut value) {
            Ok(length) => {
                value.truncate(length);
                return Ok(Some(Mark::Redirect(value)));
            }
            Err(Errno::NODATA) => return Ok(None),
            Err(Errno::RANGE) if value.len() < MAX_REDIRECT => value.resize(MAX_REDIRECT, 0),
            Err(_) => return Err(refused("a redirect that cannot be read", b"")),
        }
    }
}

/// Which tree of the lower state shows through each directory of a scan.
pub struct Upper<'a> {
    reader: &'a Reader<'a>,
    /// By the number of the directory.
    pub lower: Vec<Option<Id>>,
    /// Trees that were looked through, and how deep they were at most.
    walked: HashMap<Id, usize>,
}

impl<'a> Upper<'a> {
    /// Map the directories of `scan`, of which `marks` are by node, to those below `base`.
    pub fn new(
        reader: &'a Reader<'a>,
        scan: &Scan,
        marks: &HashMap<u32, Mark>,
        base: Id,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Upper<'a>> {
        let mut upper = Upper { reader, lower: vec![None; scan.dirs.len()], walked: HashMap::new() };
        if let Some(node) = scan.linked_outside() {
            return Err(refused("it has names that are not in the upper directory", &scan.path(node)));
        }
        if marks.contains_key(&0) {
            return Err(refused("the upper directory itself is marked", b""));
        }
        upper.lower[0] = Some(base);
        // What is in a directory has a higher number.
        for dir in 0..scan.dirs.len() as u32 {
            check()?;
            lenient(upper.directory(scan, marks, dir, check))?;
        }
        Ok(upper)
    }

    /// The tree that shows through a directory.
    pub fn below(&self, dir: u32) -> Option<Id> {
        self.lower[dir as usize]
    }

    /// Call `each` with the entries that show through a directory, in order.
    pub fn showing(
        &self,
        scan: &Scan,
        dir: u32,
        each: &mut dyn FnMut(&Entry<'_>) -> Result<()>,
    ) -> Result<()> {
        let Some(tree) = self.below(dir) else { return Ok(()) };
        lenient(self.entries(&tree, None, &mut |entry| {
            if scan.child(dir, entry.name).is_some() || scan.hides(dir, entry.name) {
                Ok(())
            } else {
                each(entry)
            }
        }))
    }

    fn entries(
        &self,
        tree: &Id,
        location: Option<Location>,
        each: &mut dyn FnMut(&Entry<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut cursor = Cursor::new(*tree, location);
        while !cursor.is_done() {
            let page = cursor.next(self.reader)?;
            if let Tree::Entries(entries) = decode_tree(&page)? {
                entries.iter().try_for_each(&mut *each)?;
            }
        }
        Ok(())
    }

    /// Map the directories in one that is mapped, and see whether what they hide has links.
    fn directory(
        &mut self,
        scan: &Scan,
        marks: &HashMap<u32, Mark>,
        dir: u32,
        check: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let here = scan.dirs[dir as usize];
        if here.left_out {
            return Err(refused("it cannot be read", &scan.path(here.node)));
        }
        for node in here.first..here.first + here.count {
            if let (true, Some(Mark::Redirect(redirect))) = (scan.is_directory(node), marks.get(&node)) {
                let found = match redirect.strip_prefix(b"/") {
                    Some(path) => self.resolve(self.lower[0], path.split(|byte| *byte == b'/'))?,
                    None => self.resolve(self.below(dir), std::iter::once(&redirect[..]))?,
                };
                let Some(tree) = found else {
                    return Err(refused("a redirect that leads nowhere", &scan.path(node)));
                };
                let number = scan.number(node);
                self.lower[number as usize] = Some(tree);
                self.has_no_links(
                    tree,
                    usize::from(scan.dirs[number as usize].depth),
                    check,
                    &scan.path(node),
                )?;
            }
        }
        let Some(tree) = self.below(dir) else { return Ok(()) };
        let mut gone = Vec::new();
        let mut mapped = Vec::new();
        self.entries(&tree, None, &mut |entry| {
            let node = scan.child(dir, entry.name);
            if node.is_none() && !scan.hides(dir, entry.name) {
                return Ok(());
            }
            if entry.link.is_some() {
                let path = crate::scan::join(&scan.path(here.node), entry.name);
                return Err(refused("it was a name of a linked file", &path));
            }
            if let Body::Directory { tree } = entry.body {
                match node.filter(|node| scan.is_directory(*node) && !marks.contains_key(node)) {
                    Some(node) => mapped.push((scan.number(node), tree)),
                    None => gone.push(tree),
                }
            }
            Ok(())
        })?;
        for (number, tree) in mapped {
            self.lower[number as usize] = Some(tree);
        }
        for tree in gone {
            self.has_no_links(tree, 0, check, &scan.path(here.node))?;
        }
        Ok(())
    }

    /// The directory at `path` below `tree`.
    fn resolve<'p>(&self, tree: Option<Id>, path: impl Iterator<Item = &'p [u8]>) -> Result<Option<Id>> {
        let mut found = tree;
        for name in path {
            let Some(mut id) = found.take() else { break };
            // A page that covers the name has it or nothing has.
            loop {
                let page = self.reader.list(&id, Kind::Tree, None)?;
                match decode_tree(&page)? {
                    Tree::Entries(entries) => {
                        let at = entries.binary_search_by(|entry| entry.name.cmp(name));
                        if let Some(Body::Directory { tree }) = at.ok().map(|at| entries[at].body) {
                            found = Some(tree);
                        }
                        break;
                    }
                    Tree::Children(_, children) => {
                        let at = children.partition_point(|child| child.last < name);
                        match children.get(at) {
                            Some(child) => id = child.id,
                            None => break,
                        }
                    }
                }
            }
        }
        Ok(found)
    }

    /// Refuse when an entry anywhere below `tree`, which is or was `depth` directories deep, is linked.
    fn has_no_links(
        &mut self,
        tree: Id,
        depth: usize,
        check: &dyn Fn() -> Result<()>,
        path: &[u8],
    ) -> Result<()> {
        let mut waiting = vec![(tree, None, depth)];
        while let Some((tree, location, depth)) = waiting.pop() {
            check()?;
            if self.walked.get(&tree).is_some_and(|before| *before >= depth) {
                continue;
            }
            self.walked.insert(tree, depth);
            if depth > MAX_DEPTH {
                return Err(refused("what shows through it is too deep", path));
            }
            let mut below = Vec::new();
            self.entries(&tree, location, &mut |entry| {
                if entry.link.is_some() {
                    return Err(refused("a directory with a linked file was removed or moved", path));
                }
                if let Body::Directory { tree } = entry.body {
                    below.push(tree);
                }
                Ok(())
            })?;
            let places = self.reader.locate(&below)?;
            waiting.extend(below.into_iter().zip(places).map(|(tree, location)| (tree, location, depth + 1)));
        }
        Ok(())
    }
}
