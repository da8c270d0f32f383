//! A store for tests: objects in real packs, an index in memory.

use crate::error::Result;
use crate::format::{Id, Kind, identity};
use crate::read::{Locate, Location, Reader};
use crate::record::{Encoder, PACK_HEADER, PACK_MAGIC};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
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
        MemoryStore { at: HashMap::new(), asked: Mutex::default(), scratch, pack: 1, file, end }
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

    pub fn reader(&self) -> Reader<'_> {
        Reader::new(File::open(self.scratch.path()).unwrap().into(), self)
    }

    /// How often an object was asked for.
    pub fn asked(&self, id: &Id) -> usize {
        self.asked.lock().unwrap().get(id).copied().unwrap_or(0)
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
        let mut asked = self.asked.lock().unwrap();
        for id in ids {
            *asked.entry(*id).or_default() += 1;
        }
        Ok(ids.iter().map(|id| self.at.get(id).copied()).collect())
    }
}
