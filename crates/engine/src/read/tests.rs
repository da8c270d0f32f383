//! Reading by a store in memory and packs on disk: chains of patches, and everything that can be wrong with them.

use super::*;
use crate::format::identity;
use crate::record::{Base, Encoder};
use crate::testing::{MemoryStore, noise};

fn is_damaged<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Damaged(_)))
}

/// `count` blobs, each a patch of the one before.
fn chain(store: &mut MemoryStore, count: u8) -> Vec<(Id, Vec<u8>)> {
    let mut made: Vec<(Id, Vec<u8>)> = Vec::new();
    for depth in 0..count {
        let mut bytes = noise(7, 3_000);
        bytes[usize::from(depth) * 100] ^= 1;
        let id = identity(Kind::Blob, &bytes);
        let base = made.last().map(|(id, canonical)| Base { id, canonical, depth: depth - 1 });
        let mut record = Vec::new();
        assert_eq!(Encoder::new().encode(Kind::Blob, &id, &bytes, base, &mut record).unwrap(), depth);
        store.append(id, &record);
        made.push((id, bytes));
    }
    made
}

#[test]
fn objects_and_chains_of_patches_come_back() {
    let mut store = MemoryStore::new();
    let made = chain(&mut store, 5);
    let reader = store.reader();
    for (depth, (id, bytes)) in made.iter().enumerate() {
        let found = reader.read(id, Kind::Blob).unwrap();
        assert_eq!((found.canonical, found.depth), (bytes.clone(), depth as u8));
    }
    assert!(reader.try_read(&[0; 32], Kind::Blob).unwrap().is_none());
    assert!(is_damaged(reader.read(&[0; 32], Kind::Blob)));
    assert!(is_damaged(reader.read(&made[0].0, Kind::Tree)), "of another kind");
}

#[test]
fn a_base_that_gc_made_whole_serves_its_patches() {
    let mut store = MemoryStore::new();
    let made = chain(&mut store, 4);
    let mut record = Vec::new();
    Encoder::new().encode(Kind::Blob, &made[2].0, &made[2].1, None, &mut record).unwrap();
    store.append(made[2].0, &record);
    assert_eq!(store.reader().read(&made[3].0, Kind::Blob).unwrap().canonical, made[3].1);
}

#[test]
fn a_chain_that_does_not_fall_ends() {
    let mut store = MemoryStore::new();
    let made = chain(&mut store, 2);
    let (base, id) = (made[0].clone(), made[1].0);
    // Two objects, each a patch of the other with the same depth.
    let mut record = Vec::new();
    let mutual = Base { id: &id, canonical: &made[1].1, depth: 0 };
    assert_eq!(Encoder::new().encode(Kind::Blob, &base.0, &base.1, Some(mutual), &mut record).unwrap(), 1);
    store.append(base.0, &record);
    assert!(is_damaged(store.reader().read(&id, Kind::Blob)));
}

#[test]
fn what_the_index_says_is_not_trusted() {
    let mut store = MemoryStore::new();
    let made = chain(&mut store, 3);
    let (a, b) = (made[0].0, made[1].0);
    let right = store.at[&a];
    for wrong in [
        Location { length: right.length - 1, ..right },
        Location { length: right.length + 1, ..right },
        Location { length: u64::MAX, ..right },
        Location { length: 0, ..right },
        Location { offset: right.offset + 1, ..right },
        Location { offset: 0, ..right },
        Location { offset: u64::MAX, ..right },
        Location { offset: u64::MAX / 2, ..right },
        Location { pack: 2, ..right },
        Location { pack: u64::MAX, ..right },
        store.at[&b],
    ] {
        store.at.insert(a, wrong);
        assert!(is_damaged(store.reader().read(&a, Kind::Blob)), "{wrong:?}");
        assert!(is_damaged(store.reader().read(&b, Kind::Blob)), "as a base: {wrong:?}");
    }
    store.at.remove(&a);
    assert!(is_damaged(store.reader().read(&b, Kind::Blob)), "a base that is gone");
}

#[test]
fn a_pack_is_a_file_that_begins_like_one() {
    let mut store = MemoryStore::new();
    let id = chain(&mut store, 1)[0].0;
    let path = store.pack_path();
    let good = std::fs::read(&path).unwrap();
    let mut other = good.clone();
    other[24] ^= 1;
    std::fs::write(&path, &other).unwrap();
    assert!(is_damaged(store.reader().read(&id, Kind::Blob)), "another number");
    std::fs::write(&path, &good[..good.len() - 1]).unwrap();
    assert!(is_damaged(store.reader().read(&id, Kind::Blob)), "cut short");
    std::fs::remove_file(&path).unwrap();
    assert!(is_damaged(store.reader().read(&id, Kind::Blob)), "missing");
    std::os::unix::fs::symlink("elsewhere", &path).unwrap();
    assert!(is_damaged(store.reader().read(&id, Kind::Blob)), "a symlink");
    std::fs::remove_file(&path).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
    assert!(is_damaged(store.reader().read(&id, Kind::Blob)), "a FIFO");
}

#[test]
fn lists_are_read_once_and_the_cache_is_bounded() {
    let mut store = MemoryStore::new();
    let trees: Vec<Id> = (0..1_200).map(|seed| store.put(Kind::Tree, &noise(seed, 40_000))).collect();
    let reader = store.reader();
    for id in &trees {
        reader.list(id, Kind::Tree, None).unwrap();
        reader.list(&trees[0], Kind::Tree, None).unwrap();
    }
    assert_eq!(store.asked(&trees[0]), 1, "what is in use stays");
    let cache = lock(&reader.cache);
    let held: usize = cache.young.values().chain(cache.old.values()).map(|bytes| bytes.len()).sum();
    assert!(held <= CACHE_BYTES, "{held}");
    assert!(cache.young.len() + cache.old.len() > 400);
}

#[test]
fn a_bounded_number_of_packs_is_open() {
    let mut store = MemoryStore::new();
    let mut ids = Vec::new();
    for seed in 0..MAX_OPEN as u64 + 20 {
        ids.push(store.put(Kind::Blob, &noise(seed, 100)));
        store.next_pack();
    }
    let reader = store.reader();
    for id in ids.iter().chain(&ids) {
        reader.read(id, Kind::Blob).unwrap();
    }
    assert_eq!(lock(&reader.packs.open).len(), MAX_OPEN);
}

#[test]
fn the_longest_kind_is_the_longest() {
    assert!(Kind::ALL.iter().all(|kind| kind.max_canonical() <= LONGEST.max_canonical()));
}

#[test]
fn an_object_is_checked_whatever_it_is() {
    let mut store = MemoryStore::new();
    let made = chain(&mut store, 3);
    let tree = store.put(Kind::Tree, &[0]);
    let reader = store.reader();
    for (id, kind, depth) in [(made[2].0, Kind::Blob, 2), (tree, Kind::Tree, 0)] {
        let header = reader.check(&id, store.at[&id]).unwrap();
        assert_eq!((header.id, header.kind, header.depth), (id, kind, depth));
    }
    assert!(is_damaged(reader.check(&tree, store.at[&made[0].0])));
    drop(reader);
    for kind in [Kind::Page, Kind::Tree, Kind::Attrs, Kind::Commit] {
        let id = store.put(kind, b"\xff is no object");
        assert!(is_damaged(store.reader().check(&id, store.at[&id])), "{kind:?}");
    }
}
