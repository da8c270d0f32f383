//! What paths held in the state before: only to store what replaces it as a patch, and to cut again only what changed.
//!
//! What is damaged or gone there means no patch, never a failed capture: the workspace may be the only copy of what is
//! in it.

use crate::error::{Error, Result};
use crate::format::{
    Body, Content, Entry, Id, Kind, MAX_LEVEL, Page, SMALL_FILE, Time, Tree, decode_page, decode_tree,
};
use crate::read::Reader;
use crate::scan::Scan;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Extents of old files that are held at a time: about 30 MiB, lists of files of 8 GiB.
const MOST_EXTENTS: usize = 1 << 19;
/// Old pages of one directory that are looked at.
const MOST_PAGES: usize = 1 << 16;

/// A failure to read the state before is none of the capture's; only the end of all work is.
fn forgiven<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(Error::Damaged(_) | Error::Io { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A file as it was.
#[derive(Clone, Copy, Debug)]
pub struct OldFile {
    pub size: u64,
    pub mtime: Time,
    pub content: Content,
}

impl OldFile {
    /// The content at the front.
    pub fn front(&self, reader: &Reader<'_>) -> Result<Option<Id>> {
        let mut id = match self.content {
            Content::Empty => return Ok(None),
            Content::Blob(id) => return Ok(Some(id)),
            Content::Paged(root) => root,
        };
        for _ in 0..=MAX_LEVEL {
            let Some(page) = forgiven(reader.list(&id, Kind::Page, None))? else { break };
            match decode_page(&page) {
                Ok(Page::Extents(extents)) => return Ok(extents.first().and_then(|extent| extent.id)),
                Ok(Page::Children(_, children)) => id = children[0].id,
                Err(_) => break,
            }
        }
        Ok(None)
    }
}

/// The directories as they were.
pub struct Past<'a> {
    reader: &'a Reader<'a>,
    /// Roots of trees by the number of the directory, as far as they were looked for.
    trees: HashMap<u32, Option<Id>>,
}

impl<'a> Past<'a> {
    pub fn new(reader: &'a Reader<'a>, root: Option<Id>) -> Past<'a> {
        Past { reader, trees: HashMap::from([(0, root)]) }
    }

    /// Directories whose old trees are known already, by number.
    pub fn over(reader: &'a Reader<'a>, lower: &[Option<Id>]) -> Past<'a> {
        Past { reader, trees: (0..).zip(lower.iter().copied()).collect() }
    }

    /// The root of a directory's old tree, if it was looked for already.
    pub fn known(&self, dir: u32) -> Option<Id> {
        self.trees.get(&dir).copied().flatten()
    }

    /// The root of a directory's old tree.
    fn tree(&mut self, scan: &Scan, dir: u32) -> Result<Option<Id>> {
        let mut sought = Vec::new();
        let mut above = dir;
        let mut found = loop {
            match self.trees.get(&above) {
                Some(found) => break *found,
                None => sought.push(above),
            }
            above = scan.nodes[scan.dirs[above as usize].node as usize].parent;
        };
        while let Some(dir) = sought.pop() {
            found = match found {
                None => None,
                Some(tree) => {
                    let name = scan.name(scan.dirs[dir as usize].node);
                    let mut below = None;
                    self.search(&tree, &[name], &mut |_, entry| below = directory(entry))?;
                    below
                }
            };
            self.trees.insert(dir, found);
        }
        Ok(found)
    }

    /// What the files `nodes` of a directory were; the directories in it are remembered on the way.
    pub fn files(&mut self, scan: &Scan, dir: u32, nodes: &[u32]) -> Result<Vec<Option<OldFile>>> {
        let mut files = vec![None; nodes.len()];
        let Some(tree) = self.tree(scan, dir)? else { return Ok(files) };
        let here = scan.dirs[dir as usize];
        let directories = (here.first..here.first + here.count).filter(|node| scan.is_directory(*node));
        let mut sought: Vec<(&[u8], u32, usize)> =
            directories.map(|node| (scan.name(node), node, usize::MAX)).collect();
        sought.extend(nodes.iter().enumerate().map(|(index, node)| (scan.name(*node), *node, index)));
        sought.sort_unstable();
        let names: Vec<&[u8]> = sought.iter().map(|(name, ..)| *name).collect();
        let mut found = vec![None; names.len()];
        self.search(&tree, &names, &mut |index, entry| found[index] = Some((file(entry), directory(entry))))?;
        for ((_, node, index), found) in sought.into_iter().zip(found) {
            let (file, directory) = found.unwrap_or_default();
            match files.get_mut(index) {
                Some(place) => *place = file,
                None => drop(self.trees.entry(scan.number(node)).or_insert(directory)),
            }
        }
        Ok(files)
    }

    /// Call `found` with the index and entry of each of `names`, which are sorted, that is in the tree.
    fn search(&self, root: &Id, names: &[&[u8]], found: &mut dyn FnMut(usize, &Entry<'_>)) -> Result<()> {
        let mut waiting = vec![(*root, 0..names.len(), None)];
        while let Some((id, range, level)) = waiting.pop() {
            let Some(page) = forgiven(self.reader.list(&id, Kind::Tree, None))? else { continue };
            match decode_tree(&page) {
                Ok(Tree::Entries(entries)) if level.is_none_or(|level| level == 0) => {
                    let mut entries = entries.iter().peekable();
                    for index in range {
                        while entries.next_if(|entry| entry.name < names[index]).is_some() {}
                        if let Some(entry) = entries.next_if(|entry| entry.name == names[index]) {
                            found(index, entry);
                        }
                    }
                }
                Ok(Tree::Children(here, children)) if level.is_none_or(|level| level == here) => {
                    let mut from = range.start;
                    for child in children {
                        let below = names[from..range.end].partition_point(|name| *name <= child.last);
                        if below > 0 {
                            waiting.push((child.id, from..from + below, Some(here - 1)));
                        }
                        from += below;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The pages of a directory's old tree.
    pub fn pages(&mut self, scan: &Scan, dir: u32) -> Result<OldPages> {
        let mut pages = OldPages::default();
        let Some(root) = self.tree(scan, dir)? else { return Ok(pages) };
        let mut waiting = vec![(root, Vec::new(), None)];
        while let Some((id, last, level)) = waiting.pop() {
            if level == Some(0) {
                pages.add(0, last, id);
                continue;
            }
            let Some(page) = forgiven(self.reader.list(&id, Kind::Tree, None))? else { continue };
            let Ok(tree) = decode_tree(&page) else { continue };
            if level.is_some_and(|level| level != tree.level()) || waiting.len() > MOST_PAGES {
                continue;
            }
            pages.add(tree.level(), last, id);
            if let Tree::Children(level, children) = tree {
                waiting.extend(children.iter().map(|child| (child.id, child.last.to_vec(), Some(level - 1))));
            }
        }
        Ok(pages)
    }
}

fn file(entry: &Entry<'_>) -> Option<OldFile> {
    match entry.body {
        Body::File { size, content } => Some(OldFile { size, mtime: entry.mtime, content }),
        _ => None,
    }
}

fn directory(entry: &Entry<'_>) -> Option<Id> {
    match entry.body {
        Body::Directory { tree } => Some(tree),
        _ => None,
    }
}

/// Pages of a directory by level and last name; the root has an empty one.
#[derive(Debug, Default)]
pub struct OldPages {
    levels: Vec<Vec<(Vec<u8>, Id)>>,
    sorted: bool,
}

impl OldPages {
    fn add(&mut self, level: u8, last: Vec<u8>, id: Id) {
        let level = usize::from(level);
        self.levels.resize_with(self.levels.len().max(level + 1), Vec::new);
        self.levels[level].push((last, id));
    }

    /// The page of `level` that covered `name`, or would have.
    pub fn covering(&mut self, level: u8, name: &[u8]) -> Option<Id> {
        if !self.sorted {
            self.levels.iter_mut().for_each(|pages| pages.sort_unstable());
            self.sorted = true;
        }
        let pages = self.levels.get(usize::from(level))?;
        let at = pages.partition_point(|(last, _)| last.as_slice() < name);
        pages.get(at).or(pages.last()).map(|(_, id)| *id)
    }
}

/// The chunks and pages of a file as it was.
#[derive(Debug)]
pub struct OldChunks<'a> {
    /// Where each extent begins, and at the end the size.
    starts: Vec<u64>,
    ids: Vec<Option<Id>>,
    /// Extents by the first bytes of their ids.
    by_id: Vec<(u64, u32)>,
    /// Level, start and id.
    pages: Vec<(u8, u64, Id)>,
    held: &'a AtomicUsize,
    counted: usize,
}

impl Drop for OldChunks<'_> {
    fn drop(&mut self) {
        self.held.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

impl<'a> OldChunks<'a> {
    /// The chunks of `file`; `None` when they cannot be read or are too many. `held` counts those that are in memory.
    pub fn load(reader: &Reader<'_>, file: &OldFile, held: &'a AtomicUsize) -> Result<Option<OldChunks<'a>>> {
        let mut old = OldChunks {
            starts: vec![0],
            ids: Vec::new(),
            by_id: Vec::new(),
            pages: Vec::new(),
            held,
            counted: 0,
        };
        let complete = match file.content {
            Content::Empty => true,
            Content::Blob(id) => file.size < SMALL_FILE && old.add(file.size, Some(id)),
            Content::Paged(root) => old.read(reader, root)?,
        };
        if !complete || old.size() != file.size {
            return Ok(None);
        }
        old.by_id = (0..).zip(&old.ids).filter_map(|(at, id)| id.map(|id| (front(&id), at))).collect();
        old.by_id.sort_unstable();
        Ok(Some(old))
    }

    fn read(&mut self, reader: &Reader<'_>, root: Id) -> Result<bool> {
        let mut waiting = vec![(root, None, None)];
        while let Some((id, level, weight)) = waiting.pop() {
            let Some(page) = forgiven(reader.list(&id, Kind::Page, None))? else { return Ok(false) };
            let Ok(page) = decode_page(&page) else { return Ok(false) };
            if level.is_some_and(|level| level != page.level()) {
                return Ok(false);
            }
            let start = self.size();
            self.pages.push((page.level(), start, id));
            match page {
                Page::Extents(extents) => {
                    if !extents.iter().all(|extent| self.add(extent.length, extent.id))
                        || weight.is_some_and(|weight| self.size() - start != weight)
                    {
                        return Ok(false);
                    }
                }
                Page::Children(level, children) => {
                    let below = children.iter().rev();
                    waiting.extend(below.map(|child| (child.id, Some(level - 1), Some(child.weight))));
                }
            }
        }
        self.pages.sort_unstable();
        Ok(true)
    }

    fn add(&mut self, length: u64, id: Option<Id>) -> bool {
        let Some(end) = self.size().checked_add(length) else { return false };
        self.counted += 1;
        if self.held.fetch_add(1, Ordering::Relaxed) >= MOST_EXTENTS {
            return false;
        }
        self.starts.push(end);
        self.ids.push(id);
        true
    }

    pub fn size(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn start(&self, at: usize) -> u64 {
        self.starts[at]
    }

    pub fn id(&self, at: usize) -> Option<Id> {
        self.ids[at]
    }

    /// The number of the extent that begins at `offset`.
    pub fn beginning(&self, offset: u64) -> Option<usize> {
        self.starts[..self.len()].binary_search(&offset).ok()
    }

    /// The number of an extent with this content.
    pub fn find(&self, id: &Id) -> Option<usize> {
        let at = self.by_id.partition_point(|(key, _)| *key < front(id));
        let same = self.by_id[at..].iter().take_while(|(key, _)| *key == front(id));
        same.map(|(_, at)| *at as usize).find(|at| self.ids[*at].as_ref() == Some(id))
    }

    /// The content that covered `offset`.
    pub fn covering(&self, offset: u64) -> Option<Id> {
        let at = self.starts.partition_point(|start| *start <= offset);
        self.ids.get(at.checked_sub(1)?).copied().flatten()
    }

    /// The page of `level` that covered `offset`, or the last one.
    pub fn page(&self, level: u8, offset: u64) -> Option<Id> {
        let at = self.pages.partition_point(|(here, start, _)| (*here, *start) <= (level, offset));
        let (here, _, id) = self.pages.get(at.checked_sub(1)?)?;
        (*here == level).then_some(*id)
    }
}

fn front(id: &Id) -> u64 {
    id.first_chunk().copied().map_or(0, u64::from_ne_bytes)
}
