//! Laying a state out as a tree of files.
//!
//! Everything goes by descriptors of directories that this walk made itself; nothing is opened that was there before,
//! and no symlink is followed. Pages come verified, and are checked again against what the pages above say. Several
//! workers take tasks from one stack: a page of a directory with the small files in it, a large file, a part of one.
//!
//! | held | at most |
//! | --- | --- |
//! | tasks | what is beside the way down: 256 names for each directory above, for each worker |
//! | open directories | 128 |
//! | open files | a few for each worker |
//! | linked names | one for each inode with several names, to the end |
//!
//! A directory is 0700 while anything happens below it; mode, times, owner and attributes come when it is done, from
//! the bottom up, the directory that was given last. When an error ends the work, what was made stays for the caller
//! to remove.

mod count;
mod cursor;
mod dirs;
mod files;
mod links;
mod metadata;
mod pool;
mod small;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::format::{Body, Content, Entry, Id, MAX_ENTRIES, Owner, Tree, decode_tree, link_id, put_entry};
use crate::host::Client;
use crate::read::{Location, Reader};
pub(crate) use cursor::{Above, Cursor, open_tree};
pub(crate) use dirs::Dir;
use dirs::{Dirs, OPEN};
pub(crate) use files::open_page;
use files::{Part, Writing};
use links::{Claim, Links};
pub(crate) use metadata::Metadata;
pub(crate) use pool::Pool;
use rustix::fs::{AtFlags, Mode};
use small::Small;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const MAX_THREADS: usize = 8;
/// Small directories that are laid out in one go; fewer than may be open.
const MAX_TOGETHER: usize = 64;

/// How a tree is laid out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Apply the owners that the state records; needs the right to.
    pub owners: bool,
    /// For every entry that records none, or whose own is not applied; needs the right to.
    pub owner: Option<Owner>,
    /// Workers; 0 is one for each processor, at most 8.
    pub threads: usize,
    /// Walk over the state first, so that progress knows how much there is in all.
    pub counted: bool,
}

impl Options {
    pub(crate) fn threads(self) -> usize {
        let processors = || std::thread::available_parallelism().map_or(1, usize::from);
        if self.threads > 0 { self.threads } else { processors() }.min(MAX_THREADS)
    }
}

/// What a worker does next. A directory in a task is held.
pub(crate) enum Task {
    /// Lay out all entries of a directory from the cursor on.
    List { dir: Arc<Dir>, cursor: Cursor },
    /// Lay out a file that has pages; `entry` as in a tree.
    File { dir: Arc<Dir>, entry: Box<[u8]>, content: Option<Location>, attrs: Option<Location> },
    /// Write a part of such a file.
    Part { file: Arc<Writing>, part: Part },
    /// Lay out the difference of two directories.
    Compare(crate::difference::Compare),
}

/// A held directory, entries of it, and the names of those that hide something in a lower layer.
pub(crate) type Group<'a> = (&'a Arc<Dir>, Vec<Entry<'a>>, Vec<&'a [u8]>);

/// What all workers share.
pub(crate) struct Layout<'a> {
    pub reader: &'a Reader<'a>,
    pub client: &'a Client,
    pub dirs: Dirs,
    pub links: Links,
    options: Options,
    /// The umask may take rights of the owner away from what is made.
    careful: bool,
    /// Of a difference: linked names that were not there before are noted.
    noting: bool,
}

fn damaged_content(why: &str) -> Error {
    Error::Damaged(format!("a damaged list of chunks: {why}"))
}

/// Lay `root` out under the open, empty `directory`, whose own mode, times and attributes are set last.
///
/// [`Error::Conflict`] when it is not empty or somebody else writes there, [`Error::Damaged`] for a state that no
/// writer makes, [`Error::Unfit`] for what the file system cannot hold.
pub fn checkout(
    reader: &Reader<'_>,
    root: &Entry<'_>,
    directory: BorrowedFd<'_>,
    options: Options,
    client: &Client,
) -> Result<()> {
    let Body::Directory { tree } = root.body else {
        return Err(Error::Invalid("a root that is no directory".to_owned()));
    };
    let layout = Layout::new(reader, client, options, false);
    let dir = Dir::root(open_empty(directory)?, Metadata::of(root, options));
    if options.counted {
        count::count(reader, client, tree)?;
    }
    let first = Task::List { dir, cursor: Cursor::new(tree, None) };
    Pool::new(vec![first]).run(options.threads(), client, |pool, task| layout.perform(pool, task))?;
    layout.finish()
}

/// Open a directory again, for reading, and see that nothing is in it.
pub(crate) fn open_empty(directory: BorrowedFd<'_>) -> Result<OwnedFd> {
    let refused = |error| Error::refused("open", error, b"");
    let fd = rustix::fs::openat(directory, ".", OPEN, Mode::empty()).map_err(refused)?;
    for entry in rustix::fs::Dir::read_from(&fd).map_err(refused)? {
        if !matches!(entry.map_err(refused)?.file_name().to_bytes(), b"." | b"..") {
            return Err(Error::Conflict("the directory is not empty".to_owned()));
        }
    }
    Ok(fd)
}

impl<'a> Layout<'a> {
    pub(crate) fn new(
        reader: &'a Reader<'a>,
        client: &'a Client,
        options: Options,
        noting: bool,
    ) -> Layout<'a> {
        let careful = metadata::umask_hides_owner();
        let dirs = Dirs::new(careful);
        Layout { reader, client, dirs, links: Links::default(), options, careful, noting }
    }

    /// What an entry is to get.
    pub(crate) fn metadata(&self, entry: &Entry<'_>) -> Metadata {
        Metadata::of(entry, self.options)
    }

    pub(crate) fn perform(&self, pool: &Pool<Task>, task: Task) -> Result<()> {
        match task {
            Task::List { dir, cursor } => self.list(pool, dir, cursor),
            Task::File { dir, entry, content, attrs } => files::begin(self, pool, dir, entry, content, attrs),
            Task::Part { file, part } => files::write(self, pool, file, part),
            Task::Compare(compare) => compare.perform(self, pool),
        }
    }

    /// Let go what was held for links, when no task is left.
    pub(crate) fn finish(&self) -> Result<()> {
        self.links.take_held().into_iter().try_for_each(|dir| self.let_go(dir))
    }

    /// Lay out one page, leaving the pages behind it to whoever comes. Small directories are taken together, so that the
    /// index is asked for hundreds of objects at a time.
    fn list(&self, pool: &Pool<Task>, dir: Arc<Dir>, cursor: Cursor) -> Result<()> {
        let mut pages = Vec::new();
        let mut names = 0;
        let mut next = Some(Task::List { dir, cursor });
        while let Some(Task::List { dir, mut cursor }) = next.take() {
            self.dirs.open(&dir)?;
            let page = cursor.next(self.reader)?;
            if !cursor.is_done() {
                pool.push([Task::List { dir: dir.hold(), cursor }]);
            }
            if let Tree::Entries(entries) = decode_tree(&page)? {
                names += entries.len();
            }
            pages.push((dir, page));
            if names < MAX_ENTRIES && pages.len() < MAX_TOGETHER {
                next = pool.take(|task| matches!(task, Task::List { .. }));
            }
        }
        let mut groups = Vec::with_capacity(pages.len());
        for (dir, page) in &pages {
            let Tree::Entries(entries) = decode_tree(page)? else {
                return Err(Error::Internal("a page of a wrong level".to_owned()));
            };
            if self.noting {
                entries.iter().for_each(|entry| self.joins(dir, entry));
            }
            groups.push((dir, entries, Vec::new()));
        }
        self.entries(pool, &groups)?;
        pages.into_iter().try_for_each(|(dir, _)| self.let_go(dir))
    }

    /// Of a difference: note that a name which is laid out had not its link before.
    pub(crate) fn joins(&self, dir: &Dir, entry: &Entry<'_>) {
        if let Some(link) = entry.link {
            self.links.join(link, link_id(&dir.path(entry.name)) == link);
        }
    }

    /// Lay out entries of held directories.
    pub(crate) fn entries(&self, pool: &Pool<Task>, groups: &[Group<'_>]) -> Result<()> {
        let mut ids: Vec<Id> = Vec::new();
        for entry in groups.iter().flat_map(|(_, entries, _)| entries) {
            ids.extend(content_of(entry));
            ids.extend(entry.attrs.filter(|_| !is_directory(entry)));
        }
        let mut locations = self.reader.locate(&ids)?.into_iter();
        let mut large = Vec::new();
        let mut small = Vec::new();
        for (dir, entries, opaque) in groups {
            for entry in entries {
                let content = content_of(entry).and_then(|_| locations.next().flatten());
                if let Body::Directory { tree } = entry.body {
                    let hides = opaque.contains(&entry.name);
                    let below = Dir::below(dir, entry.name, self.metadata(entry), hides)?;
                    large.push(Task::List { dir: below, cursor: Cursor::new(tree, content) });
                    continue;
                }
                let attrs = entry.attrs.and_then(|_| locations.next().flatten());
                if matches!(entry.body, Body::File { content: Content::Paged(_), .. }) {
                    let mut bytes = Vec::new();
                    put_entry(&mut bytes, entry);
                    large.push(Task::File { dir: dir.hold(), entry: bytes.into(), content, attrs });
                } else if self.claim(dir, entry)? {
                    small.push(Small { dir, entry, content, attrs });
                }
            }
        }
        pool.push(large.into_iter().rev());
        // In the order of the packs, so that a cold disk reads forward.
        small.sort_by_key(|small| small.content);
        self.batch(small, |small, bases| self.small(small, bases))
    }

    /// Whether an entry is to be made. One that shares its inode with another is linked, now or later.
    fn claim(&self, dir: &Arc<Dir>, entry: &Entry<'_>) -> Result<bool> {
        let Some(link) = entry.link else { return Ok(true) };
        match self.links.claim(link, entry, dir)? {
            Claim::Make => Ok(true),
            Claim::Wait => Ok(false),
            Claim::Link((first, name)) => {
                let (from, within) = (self.dirs.open(&first)?, self.dirs.open(dir)?);
                self.link(from.as_fd(), &name, dir, within.as_fd(), entry.name)?;
                self.count(entry);
                Ok(false)
            }
        }
    }

    fn link(
        &self,
        from: BorrowedFd<'_>,
        first: &[u8],
        dir: &Arc<Dir>,
        within: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<()> {
        rustix::fs::linkat(from, first, within, name, AtFlags::empty())
            .map_err(|error| Error::refused("link", error, &dir.path(name)))
    }

    fn count(&self, entry: &Entry<'_>) {
        if matches!(entry.body, Body::File { .. }) {
            self.client.done.files.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// An entry is there, whole: link to it what waits for it.
    fn was_made(&self, dir: &Arc<Dir>, entry: &Entry<'_>) -> Result<()> {
        self.count(entry);
        let Some(link) = &entry.link else { return Ok(()) };
        let within = self.dirs.open(dir)?;
        for (other, name) in self.links.made(link) {
            let to = self.dirs.open(&other)?;
            self.link(within.as_fd(), entry.name, &other, to.as_fd(), &name)?;
            self.count(entry);
            self.let_go(other)?;
        }
        Ok(())
    }

    /// Let a held directory go. When nothing holds it any more it gets its metadata, and lets go the one above.
    pub(crate) fn let_go(&self, dir: Arc<Dir>) -> Result<()> {
        let mut dir = dir;
        while dir.let_go() {
            if dir.is_made() {
                let path = || dir.path(b"");
                let fd = self.dirs.open(&dir)?;
                if dir.opaque {
                    let flags = rustix::fs::XattrFlags::empty();
                    rustix::fs::fsetxattr(&*fd, "trusted.overlay.opaque", b"y", flags)
                        .map_err(|error| Error::refused("mark", error, &path()))?;
                }
                metadata::apply(self.reader, fd.as_fd(), &dir.metadata, None, &path)?;
                dir.close();
            }
            match dir.above() {
                Some(above) => dir = Arc::clone(above),
                None => break,
            }
        }
        Ok(())
    }
}

fn is_directory(entry: &Entry<'_>) -> bool {
    matches!(entry.body, Body::Directory { .. })
}

/// The object that holds what is in an entry.
fn content_of(entry: &Entry<'_>) -> Option<Id> {
    match entry.body {
        Body::File { content: Content::Blob(id) | Content::Paged(id), .. } => Some(id),
        Body::Directory { tree } => Some(tree),
        _ => None,
    }
}
