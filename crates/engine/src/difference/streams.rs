//! Two directories side by side, page by page, without opening what they share.

use crate::error::{Error, Result};
use crate::format::{Entry, Id, Tree, decode_tree};
use crate::layout::{Above, open_tree};
use crate::read::Reader;
use std::cmp::Ordering;
use std::collections::VecDeque;
use std::sync::Arc;

/// A page that was not opened yet, as the page above describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Node {
    id: Id,
    level: u8,
    weight: u64,
    last: Box<[u8]>,
}

/// One of the two: what is left of an open page, and the pages behind it.
#[derive(Default)]
struct Side {
    /// A page of level 0, and the first of its entries that was not given out.
    page: Option<(Arc<[u8]>, usize)>,
    nodes: VecDeque<Node>,
    /// The last name of the pages that were opened or left out.
    after: Vec<u8>,
}

/// Names that the two have, at most those of a page each.
pub struct Stretch {
    old: Option<(Arc<[u8]>, usize)>,
    new: Option<(Arc<[u8]>, usize)>,
}

impl Side {
    /// The names behind `after` of the directory whose root is `id`.
    fn new(reader: &Reader<'_>, id: &Id, after: &[u8]) -> Result<Side> {
        let mut side = Side::default();
        let page = open_tree(reader, id, None, None)?;
        side.take(page, after)?;
        Ok(side)
    }

    /// Go on with a page that was opened, behind the name `behind`.
    fn take(&mut self, page: Arc<[u8]>, behind: &[u8]) -> Result<()> {
        match decode_tree(&page)? {
            Tree::Entries(entries) => {
                let start = entries.partition_point(|entry| entry.name <= behind);
                if let Some(last) = entries.last() {
                    self.after = last.name.to_vec();
                }
                let some = start < entries.len();
                drop(entries);
                self.page = some.then_some((page, start));
            }
            Tree::Children(level, children) => {
                let start = children.partition_point(|child| child.last <= behind);
                if let Some(before) = start.checked_sub(1).and_then(|at| children.get(at)) {
                    self.after = before.last.to_vec();
                }
                for child in children[start..].iter().rev() {
                    let (id, weight, last) = (child.id, child.weight, child.last.into());
                    self.nodes.push_front(Node { id, level: level - 1, weight, last });
                }
            }
        }
        Ok(())
    }

    /// Open the next page.
    fn open(&mut self, reader: &Reader<'_>, behind: &[u8]) -> Result<()> {
        let Some(node) = self.nodes.pop_front() else { return Ok(()) };
        let Node { level, weight, .. } = node;
        let above = Above { level, weight, last: &node.last, after: &self.after };
        let page = open_tree(reader, &node.id, None, Some(&above))?;
        self.take(page, behind)
    }

    fn leave_out(&mut self) {
        if let Some(node) = self.nodes.pop_front() {
            self.after = node.last.into();
        }
    }

    fn is_ahead(&self, node: &Node) -> bool {
        self.nodes.contains(node)
    }
}

/// The next names behind `after` of the directories whose roots are `old` and `new`, or `None` at the end.
///
/// What both share is left out, unless `thorough`.
pub fn stretch(
    reader: &Reader<'_>,
    roots: (&Id, &Id),
    after: &[u8],
    thorough: bool,
) -> Result<Option<Stretch>> {
    let (mut old, mut new) = (Side::new(reader, roots.0, after)?, Side::new(reader, roots.1, after)?);
    loop {
        match (&old.page, &new.page) {
            (Some(_), Some(_)) => break,
            // What is ahead on this side too is behind everything in this page: nothing there has its names.
            (Some(_), None) => match new.nodes.front() {
                Some(node) if thorough || !old.is_ahead(node) => new.open(reader, after)?,
                _ => break,
            },
            (None, Some(_)) => match old.nodes.front() {
                Some(node) if thorough || !new.is_ahead(node) => old.open(reader, after)?,
                _ => break,
            },
            (None, None) => match (old.nodes.front(), new.nodes.front()) {
                (None, None) => return Ok(None),
                (Some(_), None) => old.open(reader, after)?,
                (None, Some(_)) => new.open(reader, after)?,
                (Some(before), Some(now)) if before == now && !thorough => {
                    old.leave_out();
                    new.leave_out();
                }
                (Some(_), Some(now)) if !thorough && old.is_ahead(now) => old.open(reader, after)?,
                (Some(before), Some(_)) if !thorough && new.is_ahead(before) => new.open(reader, after)?,
                (Some(before), Some(now)) => {
                    match before.level.cmp(&now.level).then_with(|| now.last.cmp(&before.last)) {
                        Ordering::Less => new.open(reader, after)?,
                        _ => old.open(reader, after)?,
                    }
                }
            },
        }
    }
    Ok(Some(Stretch { old: old.page, new: new.page }))
}

/// One name in both, or in one of them.
pub enum Pair<'a> {
    Removed(Entry<'a>),
    Added(Entry<'a>),
    Both(Entry<'a>, Entry<'a>),
}

impl Stretch {
    /// The names in order, up to where one of the two pages ends.
    pub fn pairs(&self) -> Result<Vec<Pair<'_>>> {
        let (before, mut at) = entries(&self.old)?;
        let (now, mut to) = entries(&self.new)?;
        let mut pairs = Vec::new();
        loop {
            let pair = match (before.get(at), now.get(to)) {
                (None, None) => break,
                (Some(old), None) if self.new.is_none() => Pair::Removed(*old),
                (None, Some(new)) if self.old.is_none() => Pair::Added(*new),
                (Some(_), None) | (None, Some(_)) => break,
                (Some(old), Some(new)) => match old.name.cmp(new.name) {
                    Ordering::Less => Pair::Removed(*old),
                    Ordering::Greater => Pair::Added(*new),
                    Ordering::Equal => Pair::Both(*old, *new),
                },
            };
            at += usize::from(!matches!(pair, Pair::Added(_)));
            to += usize::from(!matches!(pair, Pair::Removed(_)));
            pairs.push(pair);
        }
        Ok(pairs)
    }
}

fn entries(page: &Option<(Arc<[u8]>, usize)>) -> Result<(Vec<Entry<'_>>, usize)> {
    let Some((page, start)) = page else { return Ok((Vec::new(), 0)) };
    match decode_tree(page)? {
        Tree::Entries(entries) => Ok((entries, *start)),
        Tree::Children(..) => Err(Error::Internal("a page of a wrong level".to_owned())),
    }
}
