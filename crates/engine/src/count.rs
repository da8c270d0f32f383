//! How many bytes of data the files of a state have: holes not counted, a file with several names once.
//!
//! Counted whole, or from another state whose count is known; `store/stats.py` is the reference, and says when the
//! difference of two states tells the sum. Directories and lists of chunks are compared level by level: what both have
//! on a level is dropped, the rest is opened. Whoever knows where objects are is asked for many of them at a time, since
//! he may have to wait for the interpreter. Of a directory the list of its differing pages is held, as in the reference.

#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::format::{
    Body, Content, Entry, Extent, Id, Kind, Link, Page, PageChild, Tree, decode_tree, link_id,
};
use crate::layout::{Above, open_page, open_tree};
use crate::read::Reader;
use crate::scan::MAX_DEPTH;
use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Objects that are asked for, and read into the cache, at a time: at most 4 MiB of it.
const AHEAD: usize = 64;

/// The sum for the state `root`.
pub fn data_bytes(reader: &Reader<'_>, root: &Entry<'_>) -> Result<i128> {
    let mut count = Count { total: 0, whole: true, begun: HashSet::new(), linked: HashSet::new() };
    walk(reader, None, tree(root)?, &mut count)?;
    Ok(count.total)
}

/// The sum for `new`, reading what differs from `old`, whose sum is `total`.
pub fn data_bytes_after(reader: &Reader<'_>, old: &Entry<'_>, total: i128, new: &Entry<'_>) -> Result<i128> {
    let mut count = Count { total, whole: false, begun: HashSet::new(), linked: HashSet::new() };
    let told = walk(reader, Some(tree(old)?), tree(new)?, &mut count)?;
    if told && count.begun == count.linked { Ok(count.total) } else { data_bytes(reader, new) }
}

fn tree(root: &Entry<'_>) -> Result<Id> {
    match root.body {
        Body::Directory { tree } => Ok(tree),
        _ => Err(Error::Invalid("a root that is no directory".to_owned())),
    }
}

fn directory(entry: Option<&Entry<'_>>) -> Option<Id> {
    match entry?.body {
        Body::Directory { tree } => Some(tree),
        _ => None,
    }
}

struct Count {
    total: i128,
    /// There is no old state: a linked file counts where it is met first.
    whole: bool,
    /// Link ids met at the path that they are made from.
    begun: HashSet<Link>,
    /// Link ids met.
    linked: HashSet<Link>,
}

impl Count {
    /// Count one name that differs; `false` where only the whole state tells the sum.
    fn change(
        &mut self,
        reader: &Reader<'_>,
        old: Option<&Entry<'_>>,
        new: Option<&Entry<'_>>,
        path: &dyn Fn(&[u8]) -> Vec<u8>,
    ) -> Result<bool> {
        if file(old).is_some_and(|(_, _, link)| link.is_some()) {
            return Ok(false);
        }
        let mut after = file(new);
        if let (Some(new), Some((_, _, Some(link)))) = (new, after) {
            if !self.whole && link_id(&path(new.name)) == link {
                self.begun.insert(link);
            }
            if !self.linked.insert(link) {
                after = None;
            }
        }
        let contents = |found: Option<(u64, Content, _)>| found.map(|(size, content, _)| (size, content));
        self.total += growth(reader, contents(file(old)), contents(after))?;
        Ok(true)
    }
}

fn file(entry: Option<&Entry<'_>>) -> Option<(u64, Content, Option<Link>)> {
    let entry = entry?;
    match entry.body {
        Body::File { size, content } => Some((size, content, entry.link)),
        _ => None,
    }
}

/// Two directories of one path, of which one may be missing.
struct Pair {
    /// With a slash at the end; empty for the root.
    path: Vec<u8>,
    depth: usize,
    old: Option<Id>,
    new: Option<Id>,
    /// Whether the roots were read ahead.
    read: bool,
}

/// Tell `count` of every name that differs; `false` when it wanted no more.
fn walk(reader: &Reader<'_>, old: Option<Id>, new: Id, count: &mut Count) -> Result<bool> {
    let mut stack = vec![Pair { path: Vec::new(), depth: 0, old, new: Some(new), read: false }];
    while let Some(pair) = stack.last() {
        if !pair.read {
            let next = stack.len().saturating_sub(AHEAD / 2)..stack.len();
            let roots: Vec<Id> =
                stack[next.clone()].iter().flat_map(|pair| [pair.old, pair.new]).flatten().collect();
            read_ahead(reader, &roots, Kind::Tree)?;
            stack[next].iter_mut().for_each(|pair| pair.read = true);
        }
        let Some(Pair { path, depth, old, new, .. }) = stack.pop() else { break };
        if old == new {
            continue;
        }
        if depth > MAX_DEPTH {
            return Err(Error::damaged("a damaged directory: too deep"));
        }
        let full = |name: &[u8]| [path.as_slice(), name].concat();
        let told = differing(reader, old, new, &mut |old, new| {
            let (before, now) = (directory(old), directory(new));
            if let (true, Some(entry)) = (before.is_some() || now.is_some(), new.or(old)) {
                let path = [path.as_slice(), entry.name, b"/"].concat();
                stack.push(Pair { path, depth: depth + 1, old: before, new: now, read: false });
            }
            count.change(reader, old, new, &full)
        })?;
        if !told {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Read objects into the cache, with one question for where they are.
fn read_ahead(reader: &Reader<'_>, ids: &[Id], kind: Kind) -> Result<()> {
    for (id, location) in ids.iter().zip(reader.locate(ids)?) {
        if location.is_some() {
            reader.list(id, kind, location)?;
        }
    }
    Ok(())
}

/// A page of a directory that was not opened, as the page above describes it; a root has nothing above.
struct Node {
    id: Id,
    above: Option<Described>,
}

struct Described {
    level: u8,
    weight: u64,
    last: Box<[u8]>,
    after: Box<[u8]>,
}

impl Node {
    fn open(&self, reader: &Reader<'_>) -> Result<Arc<[u8]>> {
        let above = self.above.as_ref().map(|described| {
            let Described { level, weight, last, after } = described;
            Above { level: *level, weight: *weight, last, after }
        });
        open_tree(reader, &self.id, None, above.as_ref())
    }
}

/// Some pages of one directory, in order, all of one level; at first its root alone.
#[derive(Default)]
struct Side {
    level: u8,
    nodes: Vec<Node>,
    /// Of level 0: how many nodes were opened, the page that was opened last, and its first name that is not done.
    opened: usize,
    page: Option<Arc<[u8]>>,
    from: usize,
}

impl Side {
    fn new(reader: &Reader<'_>, root: Option<Id>) -> Result<Side> {
        let Some(id) = root else { return Ok(Side::default()) };
        let node = Node { id, above: None };
        let level = decode_tree(&node.open(reader)?)?.level();
        Ok(Side { level, nodes: vec![node], ..Side::default() })
    }

    /// Go on with the pages of the level below.
    fn descend(&mut self, reader: &Reader<'_>) -> Result<()> {
        let mut below = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            self.read_ahead(reader, index)?;
            let page = node.open(reader)?;
            let Tree::Children(level, children) = decode_tree(&page)? else {
                return Err(Error::damaged("a damaged directory: a page of a wrong level"));
            };
            let mut after: Box<[u8]> =
                node.above.as_ref().map(|above| above.after.clone()).unwrap_or_default();
            for child in children {
                let last: Box<[u8]> = child.last.into();
                let above = Described { level: level - 1, weight: child.weight, last: last.clone(), after };
                below.push(Node { id: child.id, above: Some(above) });
                after = last;
            }
        }
        self.nodes = below;
        self.level -= 1;
        Ok(())
    }

    fn read_ahead(&self, reader: &Reader<'_>, index: usize) -> Result<()> {
        if self.nodes.len() > 1 && index.is_multiple_of(AHEAD) {
            let next = self.nodes[index..].iter().take(AHEAD);
            read_ahead(reader, &next.map(|node| node.id).collect::<Vec<Id>>(), Kind::Tree)?;
        }
        Ok(())
    }

    /// See that there is a page with names that are not done, and return whether there is one.
    fn fill(&mut self, reader: &Reader<'_>) -> Result<bool> {
        while self.page.is_none() {
            let Some(node) = self.nodes.get(self.opened) else { return Ok(false) };
            self.read_ahead(reader, self.opened)?;
            self.page = Some(node.open(reader)?);
            self.opened += 1;
            self.from = 0;
        }
        Ok(true)
    }

    /// Note that the names before `index` of the page are done, of which it has `length`.
    fn done(&mut self, index: usize, length: usize) {
        self.from = index;
        if index == length {
            self.page = None;
        }
    }
}

/// Told of a name in the old directory and in the new one; returns whether to go on.
type Tell<'t> = dyn FnMut(Option<&Entry<'_>>, Option<&Entry<'_>>) -> Result<bool> + 't;

fn entries(page: Option<&[u8]>) -> Result<Vec<Entry<'_>>> {
    match page.map(decode_tree).transpose()? {
        None => Ok(Vec::new()),
        Some(Tree::Entries(entries)) => Ok(entries),
        Some(Tree::Children(..)) => Err(Error::damaged("a damaged directory: a page of a wrong level")),
    }
}

/// Call `tell` with the entries of two directories that are not equal, paired by name, until it returns `false`.
fn differing(reader: &Reader<'_>, old: Option<Id>, new: Option<Id>, tell: &mut Tell<'_>) -> Result<bool> {
    let (mut old, mut new) = (Side::new(reader, old)?, Side::new(reader, new)?);
    loop {
        if old.level == new.level {
            let had: HashSet<Id> = old.nodes.iter().map(|node| node.id).collect();
            let both: HashSet<Id> =
                new.nodes.iter().map(|node| node.id).filter(|id| had.contains(id)).collect();
            old.nodes.retain(|node| !both.contains(&node.id));
            new.nodes.retain(|node| !both.contains(&node.id));
            if old.level == 0 {
                break;
            }
        }
        let level = old.level.max(new.level);
        for side in [&mut old, &mut new] {
            if side.level == level {
                side.descend(reader)?;
            }
        }
    }
    loop {
        let (more_old, more_new) = (old.fill(reader)?, new.fill(reader)?);
        if !more_old && !more_new {
            return Ok(true);
        }
        let pages = (old.page.clone(), new.page.clone());
        let (before, now) = (entries(pages.0.as_deref())?, entries(pages.1.as_deref())?);
        let (mut at, mut to) = (old.from, new.from);
        loop {
            let pair = match (before.get(at), now.get(to)) {
                (None, None) => break,
                // The next page of the other side may have its name.
                (None, Some(_)) if more_old => break,
                (Some(_), None) if more_new => break,
                (Some(one), Some(other)) => match one.name.cmp(other.name) {
                    Ordering::Less => (Some(one), None),
                    Ordering::Greater => (None, Some(other)),
                    Ordering::Equal => (Some(one), Some(other)),
                },
                alone => alone,
            };
            at += usize::from(pair.0.is_some());
            to += usize::from(pair.1.is_some());
            if pair.0 != pair.1 && !tell(pair.0, pair.1)? {
                return Ok(false);
            }
        }
        old.done(at, before.len());
        new.done(to, now.len());
    }
}

/// How many more bytes of data a file has than another one.
fn growth(reader: &Reader<'_>, old: Option<(u64, Content)>, new: Option<(u64, Content)>) -> Result<i128> {
    if old == new {
        return Ok(0);
    }
    let paged = |file: Option<(u64, Content)>| match file {
        Some((size, Content::Paged(id))) => Some((size, id)),
        _ => None,
    };
    let plain = |file: Option<(u64, Content)>| match file {
        Some((size, Content::Empty | Content::Blob(_))) => i128::from(size),
        _ => 0,
    };
    let (mut before, mut now) = (Parts::new(reader, paged(old))?, Parts::new(reader, paged(new))?);
    loop {
        if before.level == now.level {
            before.drop_common(&mut now);
            if before.level == 0 {
                return Ok(plain(new) - plain(old) + now.data() - before.data());
            }
        }
        let level = before.level.max(now.level);
        for side in [&mut before, &mut now] {
            if side.level == level {
                side.descend(reader)?;
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Part {
    Extent(Extent),
    Child(PageChild),
}

/// What pages of a file name, all of one level, and how often; at first its root's.
#[derive(Default)]
struct Parts {
    level: u8,
    items: HashMap<Part, i128>,
}

impl Parts {
    fn new(reader: &Reader<'_>, file: Option<(u64, Id)>) -> Result<Parts> {
        let mut parts = Parts::default();
        if let Some((size, id)) = file {
            let page = open_page(reader, &id, None, None, size)?;
            parts.level = page.level();
            parts.add(page, 1);
        }
        Ok(parts)
    }

    fn add(&mut self, page: Page, times: i128) {
        let mut add = |part| *self.items.entry(part).or_insert(0) += times;
        match page {
            Page::Extents(extents) => extents.into_iter().map(Part::Extent).for_each(&mut add),
            Page::Children(_, children) => children.into_iter().map(Part::Child).for_each(&mut add),
        }
    }

    fn drop_common(&mut self, other: &mut Parts) {
        self.items.retain(|part, times| {
            if let Some(others) = other.items.get_mut(part) {
                let common = (*times).min(*others);
                *times -= common;
                *others -= common;
            }
            *times > 0
        });
        other.items.retain(|_, times| *times > 0);
    }

    /// Go on with what the pages of the level below name.
    fn descend(&mut self, reader: &Reader<'_>) -> Result<()> {
        let children: Vec<(PageChild, i128)> = std::mem::take(&mut self.items)
            .into_iter()
            .filter_map(|(part, times)| match part {
                Part::Child(child) => Some((child, times)),
                Part::Extent(_) => None,
            })
            .collect();
        self.level -= 1;
        for some in children.chunks(AHEAD) {
            let ids: Vec<Id> = some.iter().map(|(child, _)| child.id).collect();
            for ((child, times), location) in some.iter().zip(reader.locate(&ids)?) {
                let page = open_page(reader, &child.id, location, Some(self.level), child.weight)?;
                self.add(page, *times);
            }
        }
        Ok(())
    }

    fn data(&self) -> i128 {
        let bytes = |part: &Part| match part {
            Part::Extent(Extent { length, id: Some(_) }) => i128::from(*length),
            _ => 0,
        };
        self.items.iter().map(|(part, times)| bytes(part) * times).sum()
    }
}
