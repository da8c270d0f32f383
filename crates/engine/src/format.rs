//! The objects of the store: what their canonical bytes are, and their ids.
//!
//! `spec/store.md` ("Objects") is the source, `spec/vectors/store` the golden bytes, `store/objects.py` the same in
//! Python. Nothing here does I/O, and decoding borrows: an [`Entry`] points into the bytes that it was read from.
//!
//! When changing this: it is the stored format. Read "How do I change the stored format" in CONTRIBUTING.md first.

mod decode;
mod encode;
mod numbers;
#[cfg(test)]
mod tests;

pub use decode::*;
pub use encode::*;
pub use numbers::{Cursor, put_svarint, put_uvarint};
use std::cell::RefCell;

pub type Id = [u8; 32];
pub type Link = [u8; 16];

pub const ID_BYTES: usize = 32;
/// A file of fewer bytes, without holes, is one blob.
pub const SMALL_FILE: u64 = 131_072;
pub const MAX_CHUNK: u64 = 32_768;
pub const MAX_LEVEL: u8 = 12;
pub const MAX_NAME: usize = 255;
pub const MAX_TARGET: usize = 4_095;
pub const MAX_SIZE: u64 = i64::MAX as u64;
pub const MAX_PARENTS: usize = 8;
pub const MAX_AUTHOR: usize = 1_024;
pub const MAX_MESSAGE: usize = 65_536;
pub const MAX_VALUE: usize = 65_536;
pub const MAX_MODE: u32 = 0o7777;
/// Linux has no other.
pub const SYMLINK_MODE: u32 = 0o777;
pub const MAX_OWNER: u32 = u32::MAX - 1;
pub const MIN_ENTRIES: usize = 32;
pub const MAX_ENTRIES: usize = 256;
/// An entry whose mark has these bits zero may end a page.
pub const CUT_MASK: u8 = 0x3f;
/// A page of a directory ends after the entry that reaches this many bytes.
pub const MAX_TREE_PAGE: usize = 32_768;
const NANOSECONDS: u32 = 1_000_000_000;

/// The kinds of objects; the number is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    Blob = 1,
    Page = 2,
    Tree = 3,
    Attrs = 4,
    Commit = 5,
}

impl Kind {
    pub const ALL: [Kind; 5] = [Kind::Blob, Kind::Page, Kind::Tree, Kind::Attrs, Kind::Commit];

    pub fn from_u8(number: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == number)
    }

    /// The most canonical bytes; a reader allocates no more.
    pub const fn max_canonical(self) -> usize {
        match self {
            Kind::Blob => SMALL_FILE as usize - 1,
            Kind::Page | Kind::Tree => 65_536,
            Kind::Attrs => 1_048_576,
            Kind::Commit => 131_072,
        }
    }

    const fn domain(self) -> &'static [u8] {
        match self {
            Kind::Blob => b"agent-sandbox/store/1/blob\n",
            Kind::Page => b"agent-sandbox/store/1/page\n",
            Kind::Tree => b"agent-sandbox/store/1/tree\n",
            Kind::Attrs => b"agent-sandbox/store/1/attrs\n",
            Kind::Commit => b"agent-sandbox/store/1/commit\n",
        }
    }
}

thread_local! {
    static JOINED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The id of an object.
pub fn identity(kind: Kind, canonical: &[u8]) -> Id {
    // In one piece BLAKE3 hashes several of its 1 KiB chunks at once, the first one too: with the copy a chunk of 16 KiB
    // takes 6.4 µs, in two pieces 10.7 µs (AVX-512).
    JOINED.with_borrow_mut(|joined| {
        joined.clear();
        joined.extend_from_slice(kind.domain());
        joined.extend_from_slice(canonical);
        *blake3::hash(joined).as_bytes()
    })
}

/// The link id of the inode whose first name, relative to the workspace, is `path`.
pub fn link_id(path: &[u8]) -> Link {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"agent-sandbox/store/1/link\n");
    hasher.update(path);
    let mut id = [0; 16];
    hasher.finalize_xof().fill(&mut id);
    id
}

/// What decides whether the page of a directory may end after this name.
pub fn name_mark(name: &[u8]) -> u8 {
    blake3::hash(name).as_bytes()[ID_BYTES - 1]
}

/// An id as people read it.
pub fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A time as it is stored: nanoseconds are counted forward from the second, also before 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Time {
    pub seconds: i64,
    /// Below 1,000,000,000.
    pub nanoseconds: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

/// Where the bytes of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Content {
    Empty,
    Blob(Id),
    Paged(Id),
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Body<'a> {
    File { size: u64, content: Content },
    Directory { tree: Id },
    Symlink { target: &'a [u8] },
    Fifo,
}

/// One name in a directory, or the root of a commit (empty name).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entry<'a> {
    pub name: &'a [u8],
    /// The twelve bits.
    pub mode: u32,
    pub mtime: Time,
    pub owner: Option<Owner>,
    pub attrs: Option<Id>,
    /// Shared by the names of one inode; never with a directory.
    pub link: Option<Link>,
    pub body: Body<'a>,
}

/// One entry of a page of level 0: `length` bytes of data under `id`, or a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    pub length: u64,
    pub id: Option<Id>,
}

/// One entry of a page above level 0: `weight` bytes of the file are below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageChild {
    pub weight: u64,
    pub id: Id,
}

/// One entry of a tree above level 0: `weight` names are below, of which `last` is the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TreeChild<'a> {
    pub weight: u64,
    pub last: &'a [u8],
    pub id: Id,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Page {
    Extents(Vec<Extent>),
    /// The level is 1 to 12.
    Children(u8, Vec<PageChild>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tree<'a> {
    Entries(Vec<Entry<'a>>),
    /// The level is 1 to 12.
    Children(u8, Vec<TreeChild<'a>>),
}

impl Page {
    pub fn level(&self) -> u8 {
        match self {
            Page::Extents(_) => 0,
            Page::Children(level, _) => *level,
        }
    }
}

impl Tree<'_> {
    pub fn level(&self) -> u8 {
        match self {
            Tree::Entries(_) => 0,
            Tree::Children(level, _) => *level,
        }
    }
}

/// One state with where it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit<'a> {
    pub root: Entry<'a>,
    pub parents: Vec<Id>,
    /// The commit of the layer that its branch stands on.
    pub base: Option<Id>,
    pub time: Time,
    pub author: &'a str,
    pub message: &'a str,
}
