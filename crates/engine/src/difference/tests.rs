//! Layers between states made by hand. That the kernel sees in them what is meant is tested by mounting them, for
//! both engines (`tests/unit/store/test_overlay.py`); here it is what they hold, and what was not opened for them.

use super::*;
use crate::format::{Kind, Link, Tree, TreeChild, encode_tree, link_id};
use crate::testing::{MemoryStore, Scratch, plain};
use proptest::collection::btree_map;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

fn layer(store: &MemoryStore, old: &Entry<'_>, new: &Entry<'_>) -> Result<Scratch> {
    let scratch = Scratch::new();
    let directory = File::open(scratch.path()).unwrap();
    let options = Options { threads: 2, ..Options::default() };
    store.serve(|reader, client| difference(reader, old, new, directory.as_fd(), options, client))?;
    Ok(scratch)
}

/// What is in a layer: each path with `-` for what is hidden, `/` for a directory, else the content.
fn held(layer: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![layer.to_path_buf()];
    while let Some(directory) = waiting.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let about = path.symlink_metadata().unwrap();
            let kind = about.file_type();
            let what = if kind.is_char_device() {
                assert_eq!(about.rdev(), 0);
                "-".to_owned()
            } else if kind.is_dir() {
                waiting.push(path.clone());
                "/".to_owned()
            } else {
                std::fs::read_to_string(&path).unwrap()
            };
            found.insert(path.strip_prefix(layer).unwrap().to_str().unwrap().to_owned(), what);
        }
    }
    found
}

fn expect(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(path, what)| ((*path).to_owned(), (*what).to_owned())).collect()
}

#[test]
fn each_kind_of_change_has_its_place() {
    let mut store = MemoryStore::new();
    let same = store.directory(b"same", &[plain(b"x")]);
    let inside = store.file(b"inside", b"in");
    let old = [
        store.directory(b"dir-to-file", &[inside]),
        store.directory(b"edited", &[inside, plain(b"other")]),
        store.file(b"file", b"1"),
        store.file(b"file-to-dir", b"2"),
        store.file(b"gone", b"3"),
        same,
        store.file(b"touched", b"4"),
    ];
    let changed = store.file(b"inside", b"changed");
    let new = [
        store.directory(b"added", &[inside]),
        store.file(b"dir-to-file", b"file"),
        store.directory(b"edited", &[changed, plain(b"other")]),
        old[2],
        store.directory(b"file-to-dir", &[inside]),
        Entry { mode: 0o700, ..same },
        Entry { mode: 0o600, ..old[6] },
    ];
    let (old, new) = (store.directory(b"", &old), store.directory(b"", &new));
    let layer = match layer(&store, &old, &new) {
        // Only root may mark a directory.
        Err(Error::Forbidden(_)) if !is_root() => return,
        layer => layer.unwrap(),
    };
    let expected = [
        ("added", "/"),
        ("added/inside", "in"),
        ("dir-to-file", "file"),
        ("edited", "/"),
        ("edited/inside", "changed"),
        ("file-to-dir", "/"),
        ("file-to-dir/inside", "in"),
        ("gone", "-"),
        ("same", "/"),
        ("touched", "4"),
    ];
    assert_eq!(held(layer.path()), expect(&expected));
    for (name, marked) in [("file-to-dir", true), ("added", false), ("edited", false), ("same", false)] {
        let mut value = [0; 4];
        let found = rustix::fs::lgetxattr(layer.path().join(name), "trusted.overlay.opaque", &mut value);
        assert_eq!(found.is_ok_and(|length| &value[..length] == b"y"), marked, "{name}");
    }
    let Body::Directory { tree } = same.body else { unreachable!() };
    assert_eq!(store.asked(&tree), 0, "what is equal is not opened, though its metadata changed");
}

fn is_root() -> bool {
    // SAFETY: it takes nothing and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

fn linked<'a>(entry: Entry<'a>, first: &[u8]) -> Entry<'a> {
    Entry { link: Some(link_id(first)), ..entry }
}

#[test]
fn a_group_that_got_a_name_appears_whole() {
    let mut store = MemoryStore::new();
    let member =
        |store: &mut MemoryStore, name: &'static [u8]| linked(store.file(name, b"content"), b"a/one");
    let (one, two) = (member(&mut store, b"one"), member(&mut store, b"two"));
    let equal = store.directory(b"e", &[two]);
    let equal = store.directory(b"d", &[equal]);
    let quiet = store.directory(b"q", &[plain(b"x")]);
    let a = Entry { mode: 0o500, ..store.directory(b"a", &[one]) };
    let old = store.directory(b"", &[a, equal, plain(b"other"), quiet]);
    let three = member(&mut store, b"three");
    let added = store.directory(b"n", &[three]);
    let new = store.directory(b"", &[a, equal, added, plain(b"other"), quiet]);
    let layer = layer(&store, &old, &new).unwrap();
    let expected = [
        ("a", "/"),
        ("a/one", "content"),
        ("d", "/"),
        ("d/e", "/"),
        ("d/e/two", "content"),
        ("n", "/"),
        ("n/three", "content"),
    ];
    assert_eq!(held(layer.path()), expect(&expected));
    let about = |path: &str| layer.path().join(path).symlink_metadata().unwrap();
    let inode = about("a/one").ino();
    for path in ["d/e/two", "n/three"] {
        assert_eq!(about(path).ino(), inode);
    }
    for path in ["a", "d", "d/e", "n", ""] {
        assert_eq!(about(path).mtime(), 1_600_000_000, "{path}");
    }
    assert_eq!(about("a").mode(), 0o040500);
}

#[test]
fn a_new_group_and_one_that_changed_open_nothing_that_is_equal() {
    let mut store = MemoryStore::new();
    let equal = store.directory(b"equal", &[plain(b"x")]);
    let was = [b"p", b"q"].map(|name| linked(store.file(name, b"was"), b"p"));
    let old = store.directory(b"", &[&[equal][..], &was].concat());
    let is = [b"p", b"q"].map(|name| linked(store.file(name, b"is"), b"p"));
    let group = [b"r", b"s"].map(|name| linked(store.file(name, b"new"), b"r"));
    let new = store.directory(b"", &[&[equal][..], &is, &group].concat());
    let layer = layer(&store, &old, &new).unwrap();
    assert_eq!(held(layer.path()), expect(&[("p", "is"), ("q", "is"), ("r", "new"), ("s", "new")]));
    let Body::Directory { tree } = equal.body else { unreachable!() };
    assert_eq!(store.asked(&tree), 0);
}

#[test]
fn one_name_in_a_large_directory_opens_a_few_pages() {
    let mut store = MemoryStore::new();
    let names: Vec<String> = (0..20_000).map(|n| format!("{n:05}")).collect();
    let mut entries: Vec<Entry<'_>> = names.iter().map(|name| plain(name.as_bytes())).collect();
    let before = store.cut_tree(&entries);
    entries[9_999].mode = 0o600;
    entries.remove(15_000);
    let now = store.cut_tree(&entries);
    let root = |tree| Entry { body: Body::Directory { tree }, ..plain(b"") };
    let layer = layer(&store, &root(before), &root(now)).unwrap();
    assert_eq!(held(layer.path()), expect(&[("09999", ""), ("15000", "-")]));
    let opened: usize = store.at.keys().map(|id| store.asked(id)).sum();
    assert!(store.at.len() > 5_000 && opened < 150, "{opened} of {} pages", store.at.len());
}

#[test]
fn states_that_no_writer_makes_are_refused() {
    let mut store = MemoryStore::new();
    let root = |tree| Entry { body: Body::Directory { tree }, ..plain(b"") };
    let empty = store.tree(&[]);
    let (ab, c) = (store.tree(&[plain(b"a"), plain(b"b")]), store.tree(&[plain(b"c")]));
    let good = store.wide_tree(&[plain(b"a"), plain(b"b"), plain(b"c")], 2);
    let child = |weight, last: &'static [u8], id| TreeChild { weight, last, id };
    for children in [
        vec![child(3, b"b", ab), child(1, b"c", c)],
        vec![child(2, b"bb", ab), child(1, b"c", c)],
        vec![child(1, b"c", c), child(2, b"d", ab)],
        vec![child(1, b"x", empty)],
        vec![child(1, b"x", [1; 32])],
    ] {
        let bad = store.put(Kind::Tree, &encode_tree(&Tree::Children(1, children.clone())));
        for (old, new) in [(bad, good), (good, bad), (bad, empty), (empty, bad)] {
            let done = layer(&store, &root(old), &root(new));
            assert!(matches!(done, Err(Error::Damaged(_))), "{children:?}: {done:?}");
        }
    }
    let mut deep = store.directory(b"d", &[plain(b"x")]);
    let mut other = store.directory(b"d", &[plain(b"y")]);
    for _ in 0..1_000 {
        deep = store.directory(b"d", &[deep]);
        other = store.directory(b"d", &[other]);
    }
    let (deep, other) = (store.directory(b"", &[deep]), store.directory(b"", &[other]));
    assert!(matches!(layer(&store, &deep, &other), Err(Error::Damaged(_))));
}

fn names() -> impl Strategy<Value = BTreeMap<u16, u8>> {
    btree_map(0..400u16, 0..3u8, 0..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Directories of many pages and levels: what is in the layer is what differs.
    #[test]
    fn a_layer_holds_what_differs(old in names(), changes in btree_map(0..400u16, prop::option::of(0..3u8), 0..60)) {
        let mut store = MemoryStore::new();
        let mut new = old.clone();
        for (name, change) in changes {
            match change {
                Some(content) => new.insert(name, content),
                None => new.remove(&name),
            };
        }
        let labels: Vec<String> = (0..400).map(|n| format!("{n:03}")).collect();
        let root = |store: &mut MemoryStore, names: &BTreeMap<u16, u8>| {
            let entry = |(name, content): (&u16, &u8)| {
                let link: Option<Link> = (*content == 2).then(|| link_id(b"nowhere"));
                Entry { link, ..store.file(labels[usize::from(*name)].as_bytes(), &[b'0' + content]) }
            };
            let entries: Vec<Entry<'_>> = names.iter().map(entry).collect();
            Entry { body: Body::Directory { tree: store.cut_tree(&entries) }, ..plain(b"") }
        };
        let (before, now) = (root(&mut store, &old), root(&mut store, &new));
        let layer = layer(&store, &before, &now).unwrap();
        // All names with content 2 are one inode, whose first name is none of them: they come all or none.
        let joined = new.iter().any(|(name, content)| *content == 2 && old.get(name) != Some(&2));
        let mut expected = BTreeMap::new();
        for name in old.keys().chain(new.keys()).collect::<BTreeSet<_>>() {
            let label = labels[usize::from(*name)].clone();
            match new.get(name) {
                None => expected.insert(label, "-".to_owned()),
                Some(content) if old.get(name) != Some(content) || (joined && *content == 2) => {
                    expected.insert(label, content.to_string())
                }
                Some(_) => None,
            };
        }
        prop_assert_eq!(held(layer.path()), expected);
    }
}
