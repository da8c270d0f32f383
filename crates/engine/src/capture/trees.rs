//! The directories of a capture, from the deepest up: entries into pages, pages into objects.

use super::past::Past;
use super::upper::Upper;
use super::{Found, Request};
use crate::error::{Error, Result};
use crate::format::{Body, Entry, Id, Kind, Owner, Time, identity, put_entry};
use crate::pages::TreePages;
use crate::scan::{Scan, Type};
use crate::sink::{Collector, Outlet};

/// Bytes of pages of one directory that are held until its root shows whether it is new.
const MOST_HELD: usize = 1 << 20;

/// A page that waits until it is known whether its directory is new.
struct Page {
    id: Id,
    level: u8,
    first: Vec<u8>,
    start: usize,
    length: usize,
}

/// Makes the trees of all directories; the first answer is that of the root.
pub struct Trees<'t, 'a, O> {
    pub scan: &'t Scan,
    pub found: &'t Found,
    pub past: &'t mut Past<'a>,
    pub upper: Option<&'t Upper<'a>>,
    pub request: &'t Request<'t>,
    pub collector: &'t mut Collector<'a, O>,
    /// Roots of trees by the number of their directory.
    pub roots: Vec<Id>,
    bytes: Vec<u8>,
    pages: Vec<Page>,
}

impl<'t, 'a, O: Outlet> Trees<'t, 'a, O> {
    pub fn new(
        scan: &'t Scan,
        found: &'t Found,
        past: &'t mut Past<'a>,
        upper: Option<&'t Upper<'a>>,
        request: &'t Request<'t>,
        collector: &'t mut Collector<'a, O>,
    ) -> Trees<'t, 'a, O> {
        let roots = vec![[0; 32]; scan.dirs.len()];
        Trees { scan, found, past, upper, request, collector, roots, bytes: Vec::new(), pages: Vec::new() }
    }

    /// Make all trees. `known` says which tree of a directory the store has for certain.
    pub fn make(&mut self, known: &dyn Fn(u32) -> Option<Id>, check: &dyn Fn() -> Result<()>) -> Result<()> {
        // What is in a directory has a higher number.
        for dir in (0..self.scan.dirs.len() as u32).rev() {
            check()?;
            if !self.scan.dirs[dir as usize].left_out {
                self.directory(dir, known)?;
            }
        }
        Ok(())
    }

    fn directory(&mut self, dir: u32, known: &dyn Fn(u32) -> Option<Id>) -> Result<()> {
        let here = self.scan.dirs[dir as usize];
        let mut pages = TreePages::default();
        self.bytes.clear();
        self.pages.clear();
        let mut complete = true;
        let scan = self.scan;
        let mut nodes = (here.first..here.first + here.count).peekable();
        if let Some(upper) = self.upper {
            upper.showing(scan, dir, &mut |entry| {
                while let Some(node) = nodes.next_if(|node| scan.name(*node) < entry.name) {
                    complete &= self.node(dir, node, &mut pages)?;
                }
                complete &= self.add(dir, entry, &mut pages)?;
                Ok(())
            })?;
        }
        for node in nodes {
            complete &= self.node(dir, node, &mut pages)?;
        }
        let (held, waiting) = (&mut self.bytes, &mut self.pages);
        let root = pages.finish(&mut |made| hold(held, waiting, &made))?;
        self.roots[dir as usize] = root;
        if !complete || (known(dir) != Some(root) && self.past.known(dir) != Some(root)) {
            self.keep(dir)?;
        }
        Ok(())
    }

    /// Add a node to its directory, unless it is left out. Whether all pages still wait.
    fn node(&mut self, dir: u32, node: u32, pages: &mut TreePages) -> Result<bool> {
        if !self.scan.kept(node) || self.found.unreadable.contains(&node) {
            return Ok(true);
        }
        let entry = self.entry(node)?;
        self.add(dir, &entry, pages)
    }

    fn add(&mut self, dir: u32, entry: &Entry<'_>, pages: &mut TreePages) -> Result<bool> {
        let (held, waiting) = (&mut self.bytes, &mut self.pages);
        pages.add(entry.name, &mut |page| put_entry(page, entry), &mut |made| hold(held, waiting, &made))?;
        if self.bytes.len() < MOST_HELD {
            return Ok(true);
        }
        self.keep(dir)?;
        Ok(false)
    }

    /// Keep the pages that wait.
    fn keep(&mut self, dir: u32) -> Result<()> {
        let mut old = self.past.pages(self.scan, dir)?;
        for page in self.pages.drain(..) {
            let canonical = &self.bytes[page.start..][..page.length];
            let base = old.covering(page.level, &page.first);
            self.collector.put_as(page.id, Kind::Tree, canonical, base)?;
        }
        self.bytes.clear();
        Ok(())
    }

    /// The entry of a node, whose tree must be made already if it is a directory.
    fn entry(&self, node: u32) -> Result<Entry<'t>> {
        let about = self.found.about(self.scan, node);
        let mtime = Time { seconds: about.state.mtime.0, nanoseconds: about.state.mtime.1 };
        let owner = self.request.owners.then_some(Owner { uid: about.uid, gid: about.gid });
        let kind = self.scan.nodes[node as usize].kind;
        let body = match kind {
            Type::File => Body::File {
                size: about.state.size,
                content: self.found.contents[node as usize]
                    .ok_or_else(|| Error::Internal("a file was not read".to_owned()))?,
            },
            Type::Directory => Body::Directory { tree: self.roots[self.scan.number(node) as usize] },
            Type::Symlink => Body::Symlink { target: self.scan.target(node) },
            Type::Fifo => Body::Fifo,
        };
        let mode = if kind == Type::Symlink { 0o777 } else { u32::from(about.mode) };
        let attrs = self.found.attrs.get(&node).copied();
        let link = self.found.links.get(&node).copied();
        Ok(Entry { name: self.scan.name(node), mode, mtime, owner, attrs, link, body })
    }

    /// The root of the state, encoded as in a commit.
    pub fn root(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        put_entry(&mut bytes, &self.entry(0)?);
        Ok(bytes)
    }
}

fn hold(bytes: &mut Vec<u8>, pages: &mut Vec<Page>, made: &crate::pages::Made<'_>) -> Result<Id> {
    let id = identity(Kind::Tree, made.canonical);
    let (start, length) = (bytes.len(), made.canonical.len());
    bytes.extend_from_slice(made.canonical);
    pages.push(Page { id, level: made.level, first: made.first.to_vec(), start, length });
    Ok(id)
}
