//! The overlay layer that makes one state look like another.
//!
//! Both trees are walked side by side and what is equal is never opened: neither a directory nor a page of one. What
//! differs is laid out by the same workers as a checkout (`layout.rs`). In the layer, a character device 0/0 hides a
//! name and `trusted.overlay.opaque` a directory's or file's place (Linux, `Documentation/filesystems/overlayfs.rst`,
//! "whiteouts and opaque directories"); a directory in both layers is merged, with the metadata of the upper.
//!
//! Hard links need all names of an inode in one layer. When a group that was there gets another name, its other names
//! may be anywhere, also in what is equal; then, and only then, everything is walked once more to find them.

mod streams;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::format::{Body, Entry, Id, Link};
use crate::host::Client;
use crate::layout::{Dir, Layout, Metadata, Options, Pool, Task, open_empty};
use crate::read::Reader;
use rustix::fs::{FileType, Mode};
use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use streams::{Pair, stretch};

/// Lay out, under the open, empty `directory`, the overlay layer that makes `old` look like `new`; needs root.
///
/// Errors as of [`crate::layout::checkout`].
pub fn difference(
    reader: &Reader<'_>,
    old: &Entry<'_>,
    new: &Entry<'_>,
    directory: BorrowedFd<'_>,
    options: Options,
    client: &Client,
) -> Result<()> {
    let (Body::Directory { tree: before }, Body::Directory { tree: now }) = (old.body, new.body) else {
        return Err(Error::Invalid("a root that is no directory".to_owned()));
    };
    let mut layout = Layout::new(reader, client, options, true);
    let dir = Dir::root(open_empty(directory)?, Metadata::of(new, options));
    // Held for the second walk.
    let root = dir.hold();
    let run = |layout: &Layout<'_>, first| {
        Pool::new(vec![first]).run(options.threads(), client, |pool, task| layout.perform(pool, task))
    };
    run(&layout, Task::Compare(Compare::new(dir, before, now, None)))?;
    let partly = layout.links.take_partly_joined();
    if !partly.is_empty() {
        layout.dirs.walk_again();
        run(&layout, Task::Compare(Compare::new(root.hold(), before, now, Some(Arc::new(partly)))))?;
    }
    layout.let_go(root)?;
    layout.finish()
}

/// Two directories to compare, or what is left of them.
pub(crate) struct Compare {
    /// Held. Where the difference is laid out.
    dir: Arc<Dir>,
    old: Id,
    new: Id,
    /// The last name that was compared.
    after: Vec<u8>,
    /// In the second walk: the groups whose names are laid out although they did not change.
    partly: Option<Arc<HashSet<Link>>>,
}

/// What came out of one stretch of names.
#[derive(Default)]
struct Found<'a> {
    removed: Vec<&'a [u8]>,
    laid_out: Vec<Entry<'a>>,
    /// Of these, directories that replace something else.
    opaque: Vec<&'a [u8]>,
    below: Vec<Compare>,
}

impl Compare {
    pub(crate) fn new(dir: Arc<Dir>, old: Id, new: Id, partly: Option<Arc<HashSet<Link>>>) -> Compare {
        Compare { dir, old, new, after: Vec::new(), partly }
    }

    /// Do the next stretch of names, leaving those behind it to whoever comes.
    pub(crate) fn perform(self, layout: &Layout<'_>, pool: &Pool<Task>) -> Result<()> {
        let thorough = self.partly.is_some();
        if !thorough {
            layout.dirs.open(&self.dir)?;
        }
        let alike = self.old == self.new && !thorough;
        let stretch = match alike {
            true => None,
            false => stretch(layout.reader, (&self.old, &self.new), &self.after, thorough)?,
        };
        let Some(stretch) = stretch else { return layout.let_go(self.dir) };
        let pairs = stretch.pairs()?;
        let Some(Pair::Removed(last) | Pair::Added(last) | Pair::Both(last, _)) = pairs.last() else {
            return Err(Error::Internal("a stretch without names".to_owned()));
        };
        let (after, partly) = (last.name.to_vec(), self.partly.clone());
        pool.push([Task::Compare(Compare { dir: self.dir.hold(), after, partly, ..self })]);
        let mut found = Found::default();
        for pair in &pairs {
            match &self.partly {
                None => self.changed(layout, pair, &mut found)?,
                Some(partly) => self.unchanged(layout, partly, pair, &mut found)?,
            }
        }
        self.hide(layout, &found.removed)?;
        pool.push(found.below.into_iter().rev().map(Task::Compare));
        layout.entries(pool, &[(&self.dir, found.laid_out, found.opaque)])?;
        layout.let_go(self.dir)
    }

    /// The first walk: what differs.
    fn changed<'a>(&self, layout: &Layout<'_>, pair: &Pair<'a>, found: &mut Found<'a>) -> Result<()> {
        match *pair {
            Pair::Removed(old) => found.removed.push(old.name),
            Pair::Added(new) => {
                layout.joins(&self.dir, &new);
                found.laid_out.push(new);
            }
            Pair::Both(old, new) if old == new => {}
            Pair::Both(old, new) => match (old.body, new.body) {
                (Body::Directory { tree: before }, Body::Directory { tree: now }) => {
                    let dir = Dir::below(&self.dir, new.name, layout.metadata(&new), false)?;
                    found.below.push(Compare::new(dir, before, now, None));
                }
                _ => {
                    if matches!(new.body, Body::Directory { .. }) {
                        found.opaque.push(new.name);
                    }
                    if old.link != new.link {
                        layout.joins(&self.dir, &new);
                    }
                    found.laid_out.push(new);
                }
            },
        }
        Ok(())
    }

    /// The second walk: what does not differ, but shares its inode with what does.
    fn unchanged<'a>(
        &self,
        layout: &Layout<'_>,
        partly: &Arc<HashSet<Link>>,
        pair: &Pair<'a>,
        found: &mut Found<'a>,
    ) -> Result<()> {
        let Pair::Both(old, new) = *pair else { return Ok(()) };
        match (old.body, new.body) {
            (Body::Directory { tree: before }, Body::Directory { tree: now }) => {
                let dir = Dir::below(&self.dir, new.name, layout.metadata(&new), false)?;
                found.below.push(Compare::new(dir, before, now, Some(partly.clone())));
            }
            _ if old == new && new.link.is_some_and(|link| partly.contains(&link)) => {
                found.laid_out.push(new)
            }
            _ => {}
        }
        Ok(())
    }

    fn hide(&self, layout: &Layout<'_>, names: &[&[u8]]) -> Result<()> {
        if names.is_empty() {
            return Ok(());
        }
        let within = layout.dirs.open(&self.dir)?;
        for name in names {
            rustix::fs::mknodat(&*within, *name, FileType::CharacterDevice, Mode::empty(), 0)
                .map_err(|error| Error::refused("hide", error, &self.dir.path(name)))?;
        }
        Ok(())
    }
}
