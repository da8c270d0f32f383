use super::worker::{Outcome, Shared, Worker};
use super::{Captured, Request, capture};
use crate::error::{Error, Result};
use crate::format::{
    Body, Content, Entry, Id, Kind, Page, Tree, decode_page, decode_root, decode_tree, identity,
};
use crate::host::{Done, Host, Records, serve};
use crate::open::Place;
use crate::read::{Locate, Location, Reader};
use crate::record::Header;
use crate::scan::{Left, Scan, Visit};
use crate::sink::Seen;
use crate::testing::{MemoryStore, Scratch, noise};
use proptest::prelude::*;
use rustix::fs::{FileType, Mode};
use std::collections::HashSet;
use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::atomic::AtomicUsize;

/// A store that takes what a capture gives.
pub struct Caller {
    pub store: MemoryStore,
    /// Bytes and rows of all records.
    pub stored: usize,
    pub patches: usize,
    /// What fails, by name.
    fails: &'static str,
}

impl Caller {
    pub fn new() -> Caller {
        Caller { store: MemoryStore::new(), stored: 0, patches: 0, fails: "" }
    }

    fn may(&self, what: &'static str) -> Result<()> {
        if self.fails == what { Err(Error::Full(what.to_owned())) } else { Ok(()) }
    }
}

impl Host for Caller {
    fn locate(&mut self, ids: &[Id]) -> Result<Vec<Option<Location>>> {
        self.may("locate")?;
        self.store.locate(ids)
    }

    fn has(&mut self, ids: &[Id]) -> Result<Vec<bool>> {
        self.may("has")?;
        Ok(ids.iter().map(|id| self.store.at.contains_key(id)).collect())
    }

    fn append(&mut self, records: &Records) -> Result<()> {
        self.may("append")?;
        for row in &records.rows {
            let record = &records.bytes[row.offset..][..row.length];
            let header = Header::parse(record)?;
            assert_eq!((header.id, header.base, header.depth), (row.id, row.base, row.depth));
            assert!(
                row.base.is_none_or(|base| self.store.at.contains_key(&base)),
                "the index knows every base"
            );
            assert!(!self.store.at.contains_key(&row.id), "nothing is stored twice");
            self.store.append(row.id, record);
            self.patches += usize::from(row.depth > 0);
        }
        self.stored += records.bytes.len();
        Ok(())
    }

    fn pulse(&mut self, _done: &Done) -> Result<()> {
        self.may("pulse")
    }
}

pub struct Given<'a> {
    pub base: Option<&'a [u8]>,
    pub lower: Option<&'a Path>,
    pub cache: Option<&'a Path>,
    pub threads: usize,
}

pub const NOTHING: Given<'_> = Given { base: None, lower: None, cache: None, threads: 2 };

pub fn try_take(caller: &mut Caller, tree: &Path, given: &Given<'_>) -> Result<Captured> {
    let directory = File::open(tree).unwrap();
    let lower = given.lower.map(|path| File::open(path).unwrap());
    let request = Request {
        directory: directory.as_fd(),
        lower: lower.as_ref().map(AsFd::as_fd),
        packs: caller.store.directory_fd(),
        base: given.base,
        cache: given.cache,
        overlay: false,
        owners: false,
        threads: given.threads,
    };
    capture(caller, &request)
}

pub fn take(caller: &mut Caller, tree: &Path, given: &Given<'_>) -> Captured {
    try_take(caller, tree, given).unwrap()
}

/// The bytes of a file, holes as zeros.
fn content(reader: &Reader<'_>, content: Content) -> Vec<u8> {
    let id = match content {
        Content::Empty => return Vec::new(),
        Content::Blob(id) => return reader.read(&id, Kind::Blob).unwrap().canonical,
        Content::Paged(id) => id,
    };
    match decode_page(&reader.read(&id, Kind::Page).unwrap().canonical).unwrap() {
        Page::Extents(extents) => extents
            .iter()
            .flat_map(|extent| match extent.id {
                Some(id) => reader.read(&id, Kind::Blob).unwrap().canonical,
                None => vec![0; extent.length as usize],
            })
            .collect(),
        Page::Children(_, children) => {
            children.iter().flat_map(|child| self::content(reader, Content::Paged(child.id))).collect()
        }
    }
}

/// Compare a directory of files and directories with its tree.
fn compare(reader: &Reader<'_>, tree: &Id, path: &Path) -> usize {
    let canonical = reader.read(tree, Kind::Tree).unwrap().canonical;
    match decode_tree(&canonical).unwrap() {
        Tree::Children(_, children) => children.iter().map(|child| compare(reader, &child.id, path)).sum(),
        Tree::Entries(entries) => {
            for Entry { name, body, .. } in &entries {
                let path = path.join(std::str::from_utf8(name).unwrap());
                match *body {
                    Body::File { content: found, .. } => {
                        assert!(content(reader, found) == fs::read(&path).unwrap(), "{path:?}");
                    }
                    Body::Directory { tree } => {
                        assert_eq!(compare(reader, &tree, &path), fs::read_dir(&path).unwrap().count());
                    }
                    _ => {}
                }
            }
            entries.len()
        }
    }
}

fn check(caller: &Caller, captured: &Captured, path: &Path) {
    let reader = caller.store.reader();
    let Body::Directory { tree } = decode_root(&captured.root).unwrap().body else { panic!("no directory") };
    assert_eq!(compare(&reader, &tree, path), fs::read_dir(path).unwrap().count());
}

#[test]
fn every_byte_is_stored() {
    let scratch = Scratch::new();
    let root = scratch.path();
    for (number, size) in [0, 1, 5_000, 131_071, 131_072, 131_073, 3_000_000].into_iter().enumerate() {
        let path = root.join(format!("d{number}/inner"));
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("noise"), noise(number as u64, size)).unwrap();
        fs::write(path.join("zeros"), vec![0; size]).unwrap();
    }
    for number in 0..3_000 {
        fs::write(root.join(format!("small-{number}")), noise(number, 40)).unwrap();
    }
    let sparse = File::create(root.join("sparse")).unwrap();
    sparse.write_all_at(b"front", 0).unwrap();
    sparse.write_all_at(&noise(3, 200_000), 5 << 20).unwrap();
    sparse.set_len(9 << 20).unwrap();
    let mut roots = HashSet::new();
    for threads in [1, 2, 8] {
        let mut caller = Caller::new();
        let captured = take(&mut caller, root, &Given { threads, ..NOTHING });
        check(&caller, &captured, root);
        assert_eq!(captured.report.files, 3_015);
        assert_eq!(captured.report.directories, 14);
        roots.insert(captured.root);
        // Again, all is there.
        let stored = caller.stored;
        assert!(roots.contains(&take(&mut caller, root, &NOTHING).root));
        assert_eq!(caller.stored, stored);
    }
    assert_eq!(roots.len(), 1);
}

#[test]
fn an_error_of_the_caller_ends_a_capture() {
    let scratch = Scratch::new();
    let fill = |seed: u64| {
        fs::write(scratch.path().join("large"), noise(seed, 20 << 20)).unwrap();
        for number in 0..300 {
            fs::write(scratch.path().join(format!("small-{number}")), noise(seed + number, 20_000)).unwrap();
        }
    };
    for fails in ["has", "append", "locate"] {
        fill(1);
        let mut caller = Caller::new();
        let base = take(&mut caller, scratch.path(), &NOTHING);
        fill(1_000);
        caller.fails = fails;
        let found = try_take(&mut caller, scratch.path(), &Given { base: Some(&base.root), ..NOTHING });
        assert!(matches!(found, Err(Error::Full(what)) if what == fails), "{fails}");
    }
}

#[test]
fn a_base_that_is_gone_only_costs_patches() {
    let scratch = Scratch::new();
    fs::write(scratch.path().join("file"), noise(1, 1_000_000)).unwrap();
    let mut other = Caller::new();
    let base = take(&mut other, scratch.path(), &NOTHING);
    let mut caller = Caller::new();
    let captured = take(&mut caller, scratch.path(), &Given { base: Some(&base.root), ..NOTHING });
    assert_eq!(captured.root, base.root);
    check(&caller, &captured, scratch.path());
}

#[test]
fn what_is_damaged_in_the_base_only_costs_patches() {
    let scratch = Scratch::new();
    fs::write(scratch.path().join("file"), noise(1, 1_000_000)).unwrap();
    let mut caller = Caller::new();
    let base = take(&mut caller, scratch.path(), &NOTHING);
    let pack = caller.store.pack_path();
    let mut bytes = fs::read(&pack).unwrap();
    for at in (80..bytes.len()).step_by(50) {
        bytes[at] ^= 1;
    }
    fs::write(&pack, bytes).unwrap();
    caller.store.next_pack();
    let mut data = noise(1, 1_000_000);
    data[500_000] ^= 1;
    fs::write(scratch.path().join("file"), data).unwrap();
    let before = caller.stored;
    take(&mut caller, scratch.path(), &Given { base: Some(&base.root), ..NOTHING });
    assert!(caller.stored - before > 10_000, "nothing stands on what cannot be read");
    assert_eq!(caller.patches, 0);
}

// ---- files that change ---------------------------------------------------------------------------------------------

struct Nothing;

impl Visit for Nothing {
    fn directory(&mut self, _node: u32, _directory: BorrowedFd<'_>) -> Result<bool> {
        Ok(true)
    }
}

/// Scan a directory with a file `file` of 3 bytes, change it, and have a worker read it.
fn changed_by(prepare: impl Fn(&Path), change: impl Fn(&Path)) -> Result<Vec<Outcome>> {
    let scratch = Scratch::new();
    let root = scratch.path();
    fs::create_dir(root.join("d")).unwrap();
    fs::write(root.join("d/file"), "old").unwrap();
    prepare(root);
    let directory = File::open(root).unwrap();
    let place = Place::new(directory.as_fd());
    let mut scan = Scan::new(&place, &mut Nothing, &|| Ok(()))?;
    let linked = scan.links().into_iter().flatten().collect();
    change(root);
    let mut caller = Caller::new();
    let packs = caller.store.directory_fd();
    let (seen, held) = (Seen::default(), AtomicUsize::new(0));
    serve(&mut caller, |client| {
        let reader = Reader::new(packs, &client);
        let shared = Shared {
            scan: &scan,
            place: &place,
            lower: None,
            reader: &reader,
            client: &client,
            seen: &seen,
            linked: &linked,
            held: &held,
        };
        let node = (0..scan.nodes.len() as u32).find(|node| scan.path(*node) == b"d/file").unwrap();
        let mut worker = Worker::new(&shared, crossbeam_channel::bounded(1));
        worker.files(scan.nodes[node as usize].parent, &[(node, None)])
    })
}

#[test]
fn a_file_that_was_rewritten_since_the_scan_is_taken_as_it_is() {
    for replace in [false, true] {
        let outcomes = changed_by(
            |_| {},
            |root| {
                if replace {
                    fs::write(root.join("new"), "other").unwrap();
                    fs::rename(root.join("new"), root.join("d/file")).unwrap();
                } else {
                    fs::write(root.join("d/file"), "other").unwrap();
                }
            },
        );
        let read = outcomes.unwrap()[0].file.unwrap();
        assert_eq!(read.content, Content::Blob(identity(Kind::Blob, b"other")));
        assert_eq!((read.data, read.about.state.size), (5, 5));
    }
}

#[test]
fn what_is_no_file_any_more_is_a_conflict() {
    let changes: [fn(&Path); 6] = [
        |root| fs::remove_file(root.join("d/file")).unwrap(),
        |root| {
            fs::remove_file(root.join("d/file")).unwrap();
            symlink("/etc/passwd", root.join("d/file")).unwrap();
        },
        |root| {
            fs::remove_file(root.join("d/file")).unwrap();
            fs::create_dir(root.join("d/file")).unwrap();
        },
        |root| {
            fs::remove_file(root.join("d/file")).unwrap();
            let path = root.join("d/file");
            rustix::fs::mknodat(rustix::fs::CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        },
        |root| {
            fs::rename(root.join("d"), root.join("e")).unwrap();
            fs::create_dir(root.join("d")).unwrap();
            fs::write(root.join("d/file"), "old").unwrap();
        },
        |root| {
            fs::rename(root.join("d"), root.join("e")).unwrap();
            symlink("e", root.join("d")).unwrap();
        },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let found = changed_by(|_| {}, change);
        assert!(matches!(found, Err(Error::Conflict(text)) if text.contains('d')), "{number}");
    }
}

#[test]
fn an_inode_with_several_names_must_be_as_the_scan_saw_it() {
    let link = |root: &Path| fs::hard_link(root.join("d/file"), root.join("other")).unwrap();
    assert!(changed_by(link, |_| {}).unwrap()[0].file.is_some());
    let found = changed_by(link, |root| fs::write(root.join("d/file"), "new").unwrap());
    assert!(matches!(found, Err(Error::Conflict(_))));
    let found = changed_by(link, |root| fs::remove_file(root.join("other")).unwrap());
    assert!(matches!(found, Err(Error::Conflict(_))));
    // One that got its second name meanwhile.
    let found = changed_by(|_| {}, link);
    assert!(matches!(found, Err(Error::Conflict(_))));
}

// ---- the report ----------------------------------------------------------------------------------------------------

#[test]
fn attributes_larger_than_one_object_are_left_out_alone() {
    let scratch = Scratch::new();
    fs::write(scratch.path().join("file"), "content").unwrap();
    let file = File::open(scratch.path().join("file")).unwrap();
    let value = vec![b'x'; 60_000];
    let set = |number: usize| {
        let name = format!("user.{number}");
        rustix::fs::fsetxattr(&file, name, &value, rustix::fs::XattrFlags::empty())
    };
    // How much a file system takes differs; many take less than an object may have.
    let all = (0..20).all(|number| set(number).is_ok());
    let captured = take(&mut Caller::new(), scratch.path(), &NOTHING);
    assert_eq!(captured.report.files, 1);
    let want = if all { vec![(b"file".to_vec(), Left::Attributes)] } else { Vec::new() };
    assert_eq!(captured.report.left_out.paths, want);
}

// ---- patches -------------------------------------------------------------------------------------------------------

#[test]
fn a_local_edit_of_a_large_file_is_a_few_hundred_bytes() {
    let scratch = Scratch::new();
    let file = scratch.path().join("file");
    let bytes = noise(1, 8 << 20);
    fs::write(&file, &bytes).unwrap();
    let mut caller = Caller::new();
    let base = take(&mut caller, scratch.path(), &NOTHING);
    let edits: [fn(&mut Vec<u8>); 4] = [
        |bytes| bytes[4_000_000..4_000_010].fill(7),
        |bytes| drop(bytes.splice(0..0, *b"ten bytes!")),
        |bytes| drop(bytes.splice(5_000_000..5_000_010, [])),
        |bytes| bytes.extend(*b"ten bytes!"),
    ];
    for edit in edits {
        let mut edited = bytes.clone();
        edit(&mut edited);
        fs::write(&file, &edited).unwrap();
        let before = caller.stored;
        let captured = take(&mut caller, scratch.path(), &Given { base: Some(&base.root), ..NOTHING });
        check(&caller, &captured, scratch.path());
        // A chunk, its page and the root of the pages, each as a patch, and a small tree.
        assert!(caller.stored - before < 1_500, "{}", caller.stored - before);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Whatever is edited, comparison with the lower finds the same chunks as reading all.
    #[test]
    fn comparison_with_a_lower_finds_the_same(
        seed in any::<u64>(),
        size in prop::sample::select(vec![131_072, 140_000, 400_001, 1_000_000]),
        edits in prop::collection::vec((0u8..7, any::<prop::sample::Index>(), prop::sample::select(
            vec![1usize, 2, 10, 4_096, 30_000, 200_000])), 1..4),
        sparse in any::<bool>(),
    ) {
        let (tree, lower) = (Scratch::new(), Scratch::new());
        let (file, low) = (tree.path().join("file"), lower.path().join("file"));
        let mut bytes = noise(seed, size);
        if sparse {
            let open = File::create(&file).unwrap();
            open.set_len(size as u64).unwrap();
            open.write_all_at(&bytes[..65_536], 0).unwrap();
            open.write_all_at(&bytes[98_304..], 98_304).unwrap();
            bytes[65_536..98_304].fill(0);
        } else {
            fs::write(&file, &bytes).unwrap();
        }
        let mut caller = Caller::new();
        let base = take(&mut caller, tree.path(), &NOTHING);
        // The same content, and as the state says the same mtime.
        fs::write(&low, &bytes).unwrap();
        let mtime = fs::metadata(&file).unwrap().modified().unwrap();
        File::options().write(true).open(&low).unwrap().set_modified(mtime).unwrap();
        for (what, at, length) in edits {
            let at = at.index(bytes.len() + 1);
            let end = bytes.len().min(at + length);
            match what {
                0 | 1 => bytes[at..end].iter_mut().for_each(|byte| *byte ^= 0x5a),
                2 => drop(bytes.splice(at..at, noise(seed + 1, length))),
                3 => drop(bytes.drain(at..end)),
                4 => bytes.extend(noise(seed + 2, length)),
                5 => bytes.truncate(at.max(1)),
                _ => bytes[at..end].fill(0),
            }
        }
        if sparse && bytes.len() == size {
            let open = File::options().write(true).open(&file).unwrap();
            open.write_all_at(&bytes[..65_536], 0).unwrap();
            open.write_all_at(&bytes[98_304..], 98_304).unwrap();
        } else {
            fs::write(&file, &bytes).unwrap();
        }
        let given = Given { base: Some(&base.root), lower: Some(lower.path()), ..NOTHING };
        let captured = take(&mut caller, tree.path(), &given);
        check(&caller, &captured, tree.path());
        prop_assert_eq!(captured.root, take(&mut Caller::new(), tree.path(), &NOTHING).root);
    }
}

#[test]
fn a_lower_saves_the_cutting_but_not_the_reading() {
    let (tree, lower) = (Scratch::new(), Scratch::new());
    let bytes = noise(9, 8 << 20);
    let (file, low) = (tree.path().join("file"), lower.path().join("file"));
    fs::write(&file, &bytes).unwrap();
    let mut caller = Caller::new();
    let base = take(&mut caller, tree.path(), &NOTHING);
    fs::write(&low, &bytes).unwrap();
    let given = Given { base: Some(&base.root), lower: Some(lower.path()), ..NOTHING };
    // A lower with another mtime is none; then every page that covers chunks is looked for.
    assert_eq!(take(&mut caller, tree.path(), &given).root, base.root);
    let mtime = fs::metadata(&file).unwrap().modified().unwrap();
    // One whose bytes are not those of the state would be believed: its chunks show that it is used.
    fs::write(&low, noise(10, 8 << 20)).unwrap();
    File::options().write(true).open(&low).unwrap().set_modified(mtime).unwrap();
    fs::write(&file, noise(10, 8 << 20)).unwrap();
    let fooled = take(&mut caller, tree.path(), &given);
    let Body::Directory { tree: old } = decode_root(&base.root).unwrap().body else { panic!() };
    let Body::Directory { tree: new } = decode_root(&fooled.root).unwrap().body else { panic!() };
    let reader = caller.store.reader();
    let body = |tree: &Id| {
        let canonical = reader.read(tree, Kind::Tree).unwrap().canonical;
        match decode_tree(&canonical).unwrap() {
            Tree::Entries(entries) => match entries[0].body {
                Body::File { content, .. } => content,
                _ => panic!(),
            },
            Tree::Children(..) => panic!(),
        }
    };
    assert_eq!(body(&old), body(&new));
}
