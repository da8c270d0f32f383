//! Lists of chunks and directories cut into pages, entry by entry, with no more in memory than one page of each level.

use crate::error::Result;
use crate::format::{
    CUT_MASK, Extent, ID_BYTES, Id, Kind, MAX_ENTRIES, MAX_TREE_PAGE, MIN_ENTRIES, PageChild, TreeChild,
    name_mark, put_extent, put_page_child, put_tree_child,
};

/// A finished page. It begins at byte `start` of the file (pages), or with the name `first` (trees).
#[derive(Debug)]
pub struct Made<'a> {
    pub kind: Kind,
    pub level: u8,
    pub canonical: &'a [u8],
    pub start: u64,
    pub weight: u64,
    pub first: &'a [u8],
}

/// Keeps a page and returns its id.
pub type Put<'p> = dyn FnMut(Made<'_>) -> Result<Id> + 'p;

/// One page that is being filled, and what is known of those before it.
#[derive(Debug, Default)]
struct Level {
    page: Vec<u8>,
    count: usize,
    start: u64,
    weight: u64,
    first: Vec<u8>,
    last: Vec<u8>,
    /// How many pages of this level are finished; the newest of them.
    made: u64,
    newest: Option<Id>,
}

#[derive(Debug)]
struct Pages {
    kind: Kind,
    levels: Vec<Level>,
}

impl Pages {
    fn new(kind: Kind) -> Pages {
        Pages { kind, levels: vec![Level::default()] }
    }

    /// Add an entry of `weight`, which `encode` appends to the page; `mark` says whether the page may end after it.
    fn add(
        &mut self,
        level: usize,
        (weight, first, last): (u64, &[u8], &[u8]),
        encode: &mut dyn FnMut(&mut Vec<u8>),
        mark: &mut dyn FnMut() -> Option<u8>,
        put: &mut Put<'_>,
    ) -> Result<()> {
        if self.levels.len() == level {
            self.levels.push(Level::default());
        }
        let here = &mut self.levels[level];
        if here.count == 0 {
            here.page.clear();
            here.page.push(level as u8);
            here.first.clear();
            here.first.extend_from_slice(first);
        }
        encode(&mut here.page);
        here.count += 1;
        here.weight += weight;
        here.last.clear();
        here.last.extend_from_slice(last);
        let full = here.count >= MAX_ENTRIES || (self.kind == Kind::Tree && here.page.len() >= MAX_TREE_PAGE);
        if full || (here.count >= MIN_ENTRIES && mark().is_some_and(|mark| mark & CUT_MASK == 0)) {
            self.close(level, put)?;
        }
        Ok(())
    }

    fn close(&mut self, level: usize, put: &mut Put<'_>) -> Result<()> {
        let here = &mut self.levels[level];
        let id = put(Made {
            kind: self.kind,
            level: level as u8,
            canonical: &here.page,
            start: here.start,
            weight: here.weight,
            first: &here.first,
        })?;
        let weight = here.weight;
        (here.count, here.weight, here.start) = (0, 0, here.start + weight);
        (here.made, here.newest) = (here.made + 1, Some(id));
        let (first, last) = (std::mem::take(&mut here.first), std::mem::take(&mut here.last));
        let kind = self.kind;
        let mut encode = |page: &mut Vec<u8>| match kind {
            Kind::Tree => put_tree_child(page, &TreeChild { weight, last: &last, id }),
            _ => put_page_child(page, &PageChild { weight, id }),
        };
        self.add(level + 1, (weight, &first, &last), &mut encode, &mut || Some(id[ID_BYTES - 1]), put)
    }

    fn finish(mut self, put: &mut Put<'_>) -> Result<Option<Id>> {
        let mut level = 0;
        while level < self.levels.len() {
            if self.levels[level].count > 0 {
                self.close(level, put)?;
            }
            if self.levels[level].made == 1 {
                return Ok(self.levels[level].newest);
            }
            level += 1;
        }
        Ok(None)
    }
}

/// The list of chunks and holes of one file.
#[derive(Debug)]
pub struct FilePages {
    pages: Pages,
}

impl Default for FilePages {
    fn default() -> FilePages {
        FilePages { pages: Pages::new(Kind::Page) }
    }
}

impl FilePages {
    pub fn add(&mut self, extent: &Extent, put: &mut Put<'_>) -> Result<()> {
        self.pages.add(
            0,
            (extent.length, b"", b""),
            &mut |page| put_extent(page, extent),
            &mut || extent.id.map(|id| id[ID_BYTES - 1]),
            put,
        )
    }

    /// The root; `None` when nothing was added.
    pub fn finish(self, put: &mut Put<'_>) -> Result<Option<Id>> {
        self.pages.finish(put)
    }
}

/// The entries of one directory.
#[derive(Debug)]
pub struct TreePages {
    pages: Pages,
}

impl Default for TreePages {
    fn default() -> TreePages {
        TreePages { pages: Pages::new(Kind::Tree) }
    }
}

impl TreePages {
    /// Add the entry called `name`, which `encode` appends.
    pub fn add(
        &mut self,
        name: &[u8],
        encode: &mut dyn FnMut(&mut Vec<u8>),
        put: &mut Put<'_>,
    ) -> Result<()> {
        self.pages.add(0, (1, name, name), encode, &mut || Some(name_mark(name)), put)
    }

    /// The root, which an empty directory has too.
    pub fn finish(self, put: &mut Put<'_>) -> Result<Id> {
        match self.pages.finish(put)? {
            Some(root) => Ok(root),
            None => {
                put(Made { kind: Kind::Tree, level: 0, canonical: &[0], start: 0, weight: 0, first: b"" })
            }
        }
    }
}

#[cfg(test)]
mod tests;
