use super::*;
use crate::format::{Page, TreeChild, encode_tree};
use crate::testing::{MemoryStore, noise, plain};

fn root(tree: Id) -> Entry<'static> {
    Entry { mode: 0o755, body: Body::Directory { tree }, ..plain(b"") }
}

fn names(count: usize) -> Vec<Vec<u8>> {
    (0..count).map(|number| format!("f{number:05}").into_bytes()).collect()
}

#[test]
fn whole_and_from_another_state_the_sum_is_the_same() {
    let mut store = MemoryStore::new();
    let names = names(3_000);
    let mut files: Vec<Entry<'_>> = names.iter().map(|name| store.file(name, name)).collect();
    let old = root(store.cut_tree(&files));
    files[700] = store.file(&names[700], &noise(1, 100));
    let below = store.file(b"below", b"12345");
    files[2_999] = store.directory(&names[2_999], &[below]);
    files.remove(20);
    let new = root(store.cut_tree(&files));
    let (reader, sum) = (store.reader(), 3_000 * 6);
    assert_eq!(data_bytes(&reader, &old).unwrap(), sum);
    let after = sum - 6 + 100 - 6 + 5 - 6;
    assert_eq!(data_bytes(&reader, &new).unwrap(), after);
    assert_eq!(data_bytes_after(&reader, &old, sum, &new).unwrap(), after);
    assert_eq!(data_bytes_after(&reader, &new, after, &old).unwrap(), sum);
    assert_eq!(data_bytes_after(&reader, &new, after, &new).unwrap(), after);
}

#[test]
fn what_is_equal_is_not_asked_for_and_the_rest_in_few_questions() {
    let mut store = MemoryStore::new();
    let names = names(40);
    let mut inner: Vec<Entry<'_>> = Vec::new();
    for name in &names {
        let file = store.file(b"f", name);
        inner.push(store.directory(name, &[file]));
    }
    let old = root(store.tree(&inner));
    for index in 0..20 {
        let file = store.file(b"f", b"other");
        inner[index] = store.directory(&names[index], &[file]);
    }
    let new = root(store.tree(&inner));
    let Body::Directory { tree: equal } = inner[30].body else { unreachable!() };
    let before = store.questions();
    assert_eq!(data_bytes_after(&store.reader(), &old, 240, &new).unwrap(), 220);
    assert_eq!(store.asked(&equal), 0);
    assert!(store.questions() - before <= 3, "{}", store.questions() - before);
}

#[test]
fn of_pages_holes_do_not_count_and_equal_ones_are_not_opened() {
    let mut store = MemoryStore::new();
    let hole = Extent { length: 1 << 40, id: None };
    let mut extents: Vec<Extent> = (0..64).map(|seed| store.data(&noise(seed, 10))).collect();
    extents[5] = hole;
    let file = |(size, id): (u64, Id)| {
        let body = Body::File { size, content: Content::Paged(id) };
        Entry { body, ..plain(b"f") }
    };
    let before = store.pages(&extents, 8);
    let old = root(store.tree(&[file(before)]));
    extents[63] = store.data(&noise(99, 25));
    let after = store.pages(&extents, 8);
    let new = root(store.tree(&[file(after)]));
    let first = store.page(Page::Extents(extents[..8].to_vec()));
    assert_eq!(data_bytes(&store.reader(), &old).unwrap(), 630);
    let asked = store.asked(&first);
    assert_eq!(data_bytes_after(&store.reader(), &old, 630, &new).unwrap(), 645);
    assert_eq!(store.asked(&first), asked);
    // A page of data beside a page of pages, and an empty file.
    let flat = (extents[..8].iter().map(|extent| extent.length).sum(), first);
    let small = root(store.tree(&[file(flat)]));
    assert_eq!(data_bytes_after(&store.reader(), &new, 645, &small).unwrap(), 70);
    let empty = root(store.tree(&[plain(b"f")]));
    assert_eq!(data_bytes_after(&store.reader(), &small, 70, &empty).unwrap(), 0);
}

#[test]
fn what_no_writer_makes_is_refused() {
    let mut store = MemoryStore::new();
    let file = store.file(b"a", b"1");
    let leaf = store.tree(&[file]);
    let child = |weight| TreeChild { weight, last: b"a", id: leaf };
    for (level, weight) in [(1, 2), (2, 1)] {
        let tree = store.put(Kind::Tree, &encode_tree(&Tree::Children(level, vec![child(weight)])));
        let found = data_bytes(&store.reader(), &root(tree));
        assert!(matches!(found, Err(Error::Damaged(_))), "{found:?}");
    }
    let page = store.pages(&[Extent { length: 9, id: None }], 1).1;
    let body = Body::File { size: 10, content: Content::Paged(page) };
    let lying = root(store.tree(&[Entry { body, ..plain(b"f") }]));
    assert!(matches!(data_bytes(&store.reader(), &lying), Err(Error::Damaged(_))));
    assert!(matches!(data_bytes(&store.reader(), &plain(b"")), Err(Error::Invalid(_))));
    let mut deep = store.tree(&[file]);
    for _ in 0..=MAX_DEPTH {
        deep = store.tree(&[Entry { name: b"d", ..root(deep) }]);
    }
    assert!(matches!(data_bytes(&store.reader(), &root(deep)), Err(Error::Damaged(_))));
}
