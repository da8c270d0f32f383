//! A store for tests: objects in real packs, an index in memory.

use crate::error::{Error, Result};
use crate::format::{
    Body, Content, Entry, Extent, Id, Kind, Page, PageChild, Time, Tree, TreeChild, encode_page, encode_tree,
    identity, name_mark,
};
use crate::host::{Client, Done, Host, Records, serve};
use crate::read::{Locate, Location, Reader};
use crate::record::{Base, Encoder, PACK_HEADER, PACK_MAGIC};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that zstd cannot make smaller.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// A directory of its own, removed at the end.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("engine-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Scratch(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Directories without a right to enter them are among what tests make.
        let _ = std::process::Command::new("chmod").args(["-R", "u+rwX"]).arg(&self.0).status();
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub struct MemoryStore {
    pub at: HashMap<Id, Location>,
    asked: Mutex<HashMap<Id, usize>>,
    questions: AtomicU64,
    scratch: Scratch,
    pack: u64,
    file: File,
    end: u64,
}

impl MemoryStore {
    pub fn new() -> MemoryStore {
        let scratch = Scratch::new();
        let file = create(scratch.path(), 1);
        let end = PACK_HEADER as u64;
        let (asked, questions) = (Mutex::default(), AtomicU64::new(0));
        MemoryStore { at: HashMap::new(), asked, questions, scratch, pack: 1, file, end }
    }

    pub fn pack_path(&self) -> PathBuf {
        self.scratch.path().join(format!("{:010}.pack", self.pack))
    }

    pub fn next_pack(&mut self) {
        self.pack += 1;
        self.file = create(self.scratch.path(), self.pack);
        self.end = PACK_HEADER as u64;
    }

    /// Append a whole record.
    pub fn append(&mut self, id: Id, record: &[u8]) {
        self.file.write_all(record).unwrap();
        let length = record.len() as u64;
        self.at.insert(id, Location { pack: self.pack, offset: self.end, length });
        self.end += length;
    }

    /// Keep an object.
    pub fn put(&mut self, kind: Kind, canonical: &[u8]) -> Id {
        let id = identity(kind, canonical);
        if !self.at.contains_key(&id) {
            let mut record = Vec::new();
            Encoder::new().encode(kind, &id, canonical, None, &mut record).unwrap();
            self.append(id, &record);
        }
        id
    }

    pub fn directory_fd(&self) -> OwnedFd {
        File::open(self.scratch.path()).unwrap().into()
    }

    /// Keep an object as a patch of another, `depth` patches above one that is whole.
    pub fn put_patch(&mut self, kind: Kind, canonical: &[u8], base: (&Id, &[u8]), depth: u8) -> Id {
        let id = identity(kind, canonical);
        let mut record = Vec::new();
        let base = Base { id: base.0, canonical: base.1, depth: depth - 1 };
        assert_eq!(Encoder::new().encode(kind, &id, canonical, Some(base), &mut record).unwrap(), depth);
        self.append(id, &record);
        id
    }

    /// How many questions were asked.
    pub fn questions(&self) -> usize {
        self.questions.load(Ordering::Relaxed) as usize
    }

    pub fn reader(&self) -> Reader<'_> {
        Reader::new(self.directory_fd(), self)
    }

    /// How often an object was asked for.
    pub fn asked(&self, id: &Id) -> usize {
        self.asked.lock().unwrap().get(id).copied().unwrap_or(0)
    }
}

/// States by hand: pages are cut where the test says.
impl MemoryStore {
    pub fn tree(&mut self, entries: &[Entry<'_>]) -> Id {
        self.put(Kind::Tree, &encode_tree(&Tree::Entries(entries.to_vec())))
    }

    /// A tree of level 1 over pages of `each` entries.
    pub fn wide_tree(&mut self, entries: &[Entry<'_>], each: usize) -> Id {
        let children = entries.chunks(each).map(|page| {
            let last = page.last().unwrap().name;
            TreeChild { weight: page.len() as u64, last, id: self.tree(page) }
        });
        let children = children.collect();
        self.put(Kind::Tree, &encode_tree(&Tree::Children(1, children)))
    }

    /// A tree whose pages end by their content, as in the format but earlier, so that few names make many levels.
    pub fn cut_tree(&mut self, entries: &[Entry<'_>]) -> Id {
        let ends = |mark: u8| mark & 3 == 0;
        if entries.is_empty() {
            return self.tree(entries);
        }
        let mut row: Vec<TreeChild<'_>> = Vec::new();
        for page in entries.split_inclusive(|entry| ends(name_mark(entry.name))) {
            row.push(TreeChild {
                weight: page.len() as u64,
                last: page[page.len() - 1].name,
                id: self.tree(page),
            });
        }
        let mut level = 0;
        while row.len() > 1 {
            level += 1;
            let mut above = Vec::new();
            for page in row.split_inclusive(|child| ends(child.id[31])) {
                let weight = page.iter().map(|child| child.weight).sum();
                let id = self.put(Kind::Tree, &encode_tree(&Tree::Children(level, page.to_vec())));
                above.push(TreeChild { weight, last: page[page.len() - 1].last, id });
            }
            row = above;
        }
        row[0].id
    }

    pub fn directory<'a>(&mut self, name: &'a [u8], entries: &[Entry<'_>]) -> Entry<'a> {
        let tree = self.tree(entries);
        Entry { mode: 0o755, body: Body::Directory { tree }, ..plain(name) }
    }

    pub fn file<'a>(&mut self, name: &'a [u8], bytes: &[u8]) -> Entry<'a> {
        let size = bytes.len() as u64;
        let content = match bytes {
            [] => Content::Empty,
            bytes => Content::Blob(self.put(Kind::Blob, bytes)),
        };
        Entry { body: Body::File { size, content }, ..plain(name) }
    }

    pub fn page(&mut self, page: Page) -> Id {
        self.put(Kind::Page, &encode_page(&page))
    }

    pub fn data(&mut self, bytes: &[u8]) -> Extent {
        Extent { length: bytes.len() as u64, id: Some(self.put(Kind::Blob, bytes)) }
    }

    /// A list of chunks of level 1 over pages of `each` extents.
    pub fn pages(&mut self, extents: &[Extent], each: usize) -> (u64, Id) {
        let children: Vec<PageChild> = extents
            .chunks(each)
            .map(|page| PageChild {
                weight: page.iter().map(|extent| extent.length).sum(),
                id: self.page(Page::Extents(page.to_vec())),
            })
            .collect();
        (children.iter().map(|child| child.weight).sum(), self.page(Page::Children(1, children)))
    }

    /// Do something with a reader, as a caller's worker does.
    pub fn serve<R: Send>(&self, work: impl FnOnce(&Reader<'_>, &Client) -> Result<R> + Send) -> Result<R> {
        serve(&mut Caller(self), |client| work(&Reader::new(self.directory_fd(), &client), &client))
    }
}

/// An empty file.
pub fn plain(name: &[u8]) -> Entry<'_> {
    let mtime = Time { seconds: 1_600_000_000, nanoseconds: 123_456_789 };
    let body = Body::File { size: 0, content: Content::Empty };
    Entry { name, mode: 0o644, mtime, owner: None, attrs: None, link: None, body }
}

struct Caller<'a>(&'a MemoryStore);

impl Host for Caller<'_> {
    fn locate(&mut self, ids: &[Id]) -> Result<Vec<Option<Location>>> {
        self.0.locate(ids)
    }

    fn has(&mut self, _: &[Id]) -> Result<Vec<bool>> {
        Err(Error::Internal("nothing is written".to_owned()))
    }

    fn append(&mut self, _: &Records) -> Result<()> {
        Err(Error::Internal("nothing is written".to_owned()))
    }

    fn pulse(&mut self, _: &Done) -> Result<()> {
        Ok(())
    }
}

fn create(directory: &Path, number: u64) -> File {
    let path = directory.join(format!("{number:010}.pack"));
    let mut file = OpenOptions::new().create_new(true).append(true).open(path).unwrap();
    file.write_all(&[&PACK_MAGIC[..], &[0; 16], &number.to_le_bytes()].concat()).unwrap();
    file
}

impl Locate for MemoryStore {
    fn locate(&self, ids: &[Id]) -> Result<Vec<Option<Location>>> {
        self.questions.fetch_add(1, Ordering::Relaxed);
        let mut asked = self.asked.lock().unwrap();
        for id in ids {
            *asked.entry(*id).or_default() += 1;
        }
        Ok(ids.iter().map(|id| self.at.get(id).copied()).collect())
    }
}
