//! The pages of a directory one after the other, each checked against what the page above says of it.
//!
//! A cursor is a name, not a stack of pages: it descends anew for each page, and the cache holds what that reads. So
//! however many directories wait to be gone on with, they hold no memory.

use crate::error::{Error, Result};
use crate::format::{Id, Kind, Tree, decode_tree};
use crate::read::{Location, Reader};
use std::sync::Arc;

fn damaged(why: &str) -> Error {
    Error::Damaged(format!("a damaged directory: {why}"))
}

/// What is known of a page before it is read.
pub struct Above<'a> {
    pub level: u8,
    /// Names below.
    pub weight: u64,
    /// The last name below.
    pub last: &'a [u8],
    /// The last name of all pages before.
    pub after: &'a [u8],
}

/// Read a page of a directory and check it against what is known of it; a root has nothing above.
pub fn open_tree(
    reader: &Reader<'_>,
    id: &Id,
    location: Option<Location>,
    above: Option<&Above<'_>>,
) -> Result<Arc<[u8]>> {
    let page = reader.list(id, Kind::Tree, location)?;
    if let Some(above) = above {
        check(&decode_tree(&page)?, above)?;
    }
    Ok(page)
}

fn check(tree: &Tree<'_>, above: &Above<'_>) -> Result<()> {
    if tree.level() != above.level {
        return Err(damaged("a page of a wrong level"));
    }
    let (weight, first, last) = match tree {
        Tree::Entries(entries) => {
            let name = |entry: Option<&crate::format::Entry<'_>>| entry.map(|entry| entry.name.to_vec());
            (entries.len() as u128, name(entries.first()), name(entries.last()))
        }
        Tree::Children(_, children) => {
            let weight = children.iter().map(|child| u128::from(child.weight)).sum();
            (weight, None, children.last().map(|child| child.last.to_vec()))
        }
    };
    if last.as_deref() != Some(above.last) || weight != u128::from(above.weight) {
        return Err(damaged("a page that is not what the one above it says"));
    }
    if first.is_some_and(|first| first.as_slice() <= above.after) {
        return Err(damaged("names out of order across its pages"));
    }
    Ok(())
}

/// Where in a directory one is.
pub struct Cursor {
    root: Id,
    location: Option<Location>,
    /// The last name that was given out.
    after: Vec<u8>,
    done: bool,
}

impl Cursor {
    pub fn new(root: Id, location: Option<Location>) -> Cursor {
        Cursor { root, location, after: Vec::new(), done: false }
    }

    /// Whether the last page was given out.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// The next page of level 0; not to be asked when done.
    pub fn next(&mut self, reader: &Reader<'_>) -> Result<Arc<[u8]>> {
        let mut page = open_tree(reader, &self.root, self.location, None)?;
        self.done = true;
        loop {
            let below = match decode_tree(&page)? {
                Tree::Entries(entries) => {
                    self.after = entries.last().map(|entry| entry.name.to_vec()).unwrap_or_default();
                    break;
                }
                Tree::Children(level, children) => {
                    let at = children.partition_point(|child| child.last <= self.after.as_slice());
                    let child =
                        children.get(at).ok_or_else(|| damaged("a page of names that were before"))?;
                    self.done &= at + 1 == children.len();
                    let (level, weight, last) = (level - 1, child.weight, child.last);
                    open_tree(
                        reader,
                        &child.id,
                        None,
                        Some(&Above { level, weight, last, after: &self.after }),
                    )?
                }
            };
            page = below;
        }
        Ok(page)
    }
}
