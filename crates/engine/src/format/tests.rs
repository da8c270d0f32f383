//! The codec by itself: what was encoded is decoded, and what no encoder writes is refused.

use super::numbers::{put_svarint, put_uvarint};
use super::*;
use crate::error::{Error, Result};
use proptest::collection::{btree_map, btree_set, vec};
use proptest::prelude::*;

fn is_damaged<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Damaged(_)))
}

// ---- numbers: LEB128 and zigzag by hand (DWARF 5, 7.6; protocol buffers' encoding page) ----

#[test]
fn numbers_are_leb128_and_zigzag() {
    for (value, bytes) in [
        (0, &[0][..]),
        (127, &[0x7f]),
        (128, &[0x80, 0x01]),
        (12_857, &[0xb9, 0x64]),
        (u64::MAX, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]),
    ] {
        let mut out = Vec::new();
        put_uvarint(&mut out, value);
        assert_eq!(out, bytes);
        assert_eq!(Cursor::new(bytes, "number").uvarint(u64::MAX).unwrap(), value);
    }
    for (value, raw) in [(0, 0), (-1, 1), (1, 2), (-2, 3), (i64::MAX, u64::MAX - 1), (i64::MIN, u64::MAX)] {
        let (mut out, mut expected) = (Vec::new(), Vec::new());
        put_svarint(&mut out, value);
        put_uvarint(&mut expected, raw);
        assert_eq!(out, expected);
        assert_eq!(Cursor::new(&out, "number").svarint().unwrap(), value);
    }
}

#[test]
fn numbers_in_no_shortest_form_or_too_long_are_refused() {
    for bytes in [
        &[0x80, 0x00][..],
        &[0xff, 0x80, 0x00],
        &[0x80],
        &[],
        // 65 bits, and eleven bytes.
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x81, 0x00],
    ] {
        assert!(is_damaged(Cursor::new(bytes, "number").uvarint(u64::MAX)), "{bytes:x?}");
    }
    assert!(is_damaged(Cursor::new(&[5], "number").uvarint(4)));
    assert!(is_damaged(Cursor::new(&[4, 1, 2, 3], "block").block(0, 100)));
}

// ---- what is refused ----

const FILE: Entry<'static> = Entry {
    name: b"a",
    mode: 0o644,
    mtime: Time { seconds: 1, nanoseconds: 2 },
    owner: None,
    attrs: None,
    link: None,
    body: Body::File { size: 0, content: Content::Empty },
};

fn tree(entries: &[Entry<'_>]) -> Vec<u8> {
    encode_tree(&Tree::Entries(entries.to_vec()))
}

#[test]
fn an_entry_byte_by_byte() {
    // type 1 | name "a" | 0o644 = 420 | zigzag 1 | 2 ns | size 0
    assert_eq!(tree(&[FILE]), [0, 1, 1, b'a', 0xa4, 0x03, 2, 2, 0]);
    let link = Entry { mode: 0o777, body: Body::Symlink { target: b"x/y" }, link: Some([9; 16]), ..FILE };
    let expected = [&[0, 3 | 16, 1, b'a', 0xff, 0x03, 2, 2][..], &[9; 16], &[3], b"x/y"].concat();
    assert_eq!(tree(&[link]), expected);
    assert_eq!(tree(&[]), [0]);
}

#[test]
fn trees_that_no_writer_makes_are_refused() {
    let mut two = tree(&[FILE, FILE]);
    assert!(is_damaged(decode_tree(&two)), "a doubled name");
    two[10] = b'B';
    assert!(is_damaged(decode_tree(&two)), "names out of order");
    two[10] = b'b';
    assert!(is_damaged(decode_tree(&two[..two.len() - 1])), "cut short");
    let b = Entry { name: b"b", ..FILE };
    assert_eq!(decode_tree(&tree(&[FILE, b])).unwrap(), Tree::Entries(vec![FILE, b]));
    for name in [&b""[..], b".", b"..", b"a/b", b"/", b"a\0", &[b'n'; 256]] {
        assert!(is_damaged(decode_tree(&tree(&[Entry { name, ..FILE }]))), "{name:?}");
    }
    for target in [&b""[..], b"a\0", &[b't'; 4_096]] {
        let link = Entry { mode: 0o777, body: Body::Symlink { target }, ..FILE };
        assert!(is_damaged(decode_tree(&tree(&[link]))), "{target:?}");
    }
    let link = Entry { mode: 0o777, body: Body::Symlink { target: b"t" }, ..FILE };
    assert!(decode_tree(&tree(&[link])).is_ok());
    for entry in [
        Entry { mode: 0o755, ..link },
        Entry { attrs: Some([1; 32]), ..link },
        Entry { attrs: Some([1; 32]), body: Body::Fifo, ..FILE },
        Entry { mode: 0o10000, ..FILE },
        Entry { mtime: Time { seconds: 0, nanoseconds: NANOSECONDS }, ..FILE },
        Entry { owner: Some(Owner { uid: u32::MAX, gid: 0 }), ..FILE },
        Entry { owner: Some(Owner { uid: 0, gid: u32::MAX }), ..FILE },
        Entry { link: Some([0; 16]), body: Body::Directory { tree: [0; 32] }, ..FILE },
        Entry { body: Body::File { size: SMALL_FILE, content: Content::Blob([0; 32]) }, ..FILE },
        Entry { body: Body::File { size: 1 << 63, content: Content::Paged([0; 32]) }, ..FILE },
    ] {
        assert!(is_damaged(decode_tree(&tree(&[entry]))), "{entry:?}");
    }
    let good = tree(&[FILE]);
    for flags in [0, 5, 6, 7, 0x41, 0x81] {
        let mut bad = good.clone();
        bad[1] = flags;
        assert!(is_damaged(decode_tree(&bad)), "flags {flags:x}");
    }
    assert!(is_damaged(decode_tree(&[])));
    assert!(is_damaged(decode_tree(&[13])), "a level above 12");
    assert!(is_damaged(decode_tree(&[1])), "no children");
    let names: Vec<String> = (0..257).map(|n| format!("{n:03}")).collect();
    let many: Vec<Entry<'_>> = names.iter().map(|name| Entry { name: name.as_bytes(), ..FILE }).collect();
    assert!(decode_tree(&tree(&many[1..])).is_ok());
    let children = |count: usize| {
        let child = |name| TreeChild { weight: 1, last: name, id: [1; 32] };
        let children = names[1..=count].iter().map(|name| child(name.as_bytes())).collect();
        encode_tree(&Tree::Children(1, children))
    };
    assert!(decode_tree(&children(256)).is_ok());
    for child in [
        TreeChild { weight: 0, last: b"a", id: [1; 32] },
        TreeChild { weight: 1 << 63, last: b"a", id: [1; 32] },
        TreeChild { weight: 1, last: b"..", id: [1; 32] },
        TreeChild { weight: 1, last: b"a/b", id: [1; 32] },
    ] {
        assert!(is_damaged(decode_tree(&encode_tree(&Tree::Children(1, vec![child])))), "{child:?}");
    }
    let long: Vec<String> = (0..256).map(|n| format!("{n:03}{}", "x".repeat(252))).collect();
    let long: Vec<Entry<'_>> = long.iter().map(|name| Entry { name: name.as_bytes(), ..FILE }).collect();
    assert!(is_damaged(decode_tree(&tree(&long))), "more than 65,536 bytes");
    assert!(decode_tree(&tree(&long[..240])).is_ok());
    let mut more = children(256);
    put_tree_child(&mut more, &TreeChild { weight: 1, last: b"z", id: [1; 32] });
    assert!(is_damaged(decode_tree(&more)), "257 children");
    let mut more = tree(&many[1..]);
    put_entry(&mut more, &Entry { name: b"z", ..FILE });
    assert!(is_damaged(decode_tree(&more)), "257 entries");
}

#[test]
fn pages_that_no_writer_makes_are_refused() {
    let data = |length| Extent { length, id: Some([7; 32]) };
    let hole = |length| Extent { length, id: None };
    let page = |extents: &[Extent]| encode_page(&Page::Extents(extents.to_vec()));
    assert_eq!(page(&[hole(3), data(2)]), [&[0, 7, 4][..], &[7; 32]].concat());
    assert!(decode_page(&page(&[hole(i64::MAX as u64), data(32_768), hole(1)])).is_ok());
    for bad in [&[][..], &[data(0)], &[hole(0)], &[data(32_769)], &[hole(1), hole(1)], &[data(1); 257]] {
        assert!(is_damaged(decode_page(&page(bad))), "{bad:?}");
    }
    let child = |weight| PageChild { weight, id: [7; 32] };
    let above = |level, children: &[PageChild]| encode_page(&Page::Children(level, children.to_vec()));
    assert!(decode_page(&above(12, &[child(1); 256])).is_ok());
    for bad in [above(13, &[child(1)]), above(1, &[]), above(1, &[child(0)]), above(2, &[child(1); 257])] {
        assert!(is_damaged(decode_page(&bad)));
    }
    assert!(is_damaged(decode_page(&above(1, &[child(1 << 63)]))));
}

#[test]
fn attributes_that_no_writer_makes_are_refused() {
    let good = [(&b"user.a"[..], &b""[..]), (b"user.b", &[1; 65_536])];
    assert_eq!(decode_attrs(&encode_attrs(&good)).unwrap(), good);
    let long = [b"user.".to_vec(), vec![b'x'; 251]].concat();
    for bad in [
        &[][..],
        &[(&b"user.b"[..], &b""[..]), (b"user.a", b"")],
        &[(b"user.a", b""), (b"user.a", b"")],
        &[(b"security.a", b"")],
        &[(b"user.", b"")],
        &[(b"user.a\0", b"")],
        &[(b"user.a", &[1; 65_537])],
        &[(&long, b"")],
    ] {
        assert!(is_damaged(decode_attrs(&encode_attrs(bad))));
    }
}

const ROOT: Entry<'static> = Entry { name: b"", body: Body::Directory { tree: [3; 32] }, ..FILE };

#[test]
fn commits_that_no_writer_makes_are_refused() {
    let commit = Commit {
        root: ROOT,
        parents: (0..8).map(|n| [n; 32]).collect(),
        base: Some([2; 32]),
        time: Time { seconds: -1, nanoseconds: 999_999_999 },
        author: "größer",
        message: "",
    };
    let good = encode_commit(&commit);
    assert_eq!(decode_commit(&good).unwrap(), commit);
    assert!(is_damaged(decode_commit(&[&good[..], &[0]].concat())), "a byte left over");
    for end in 0..good.len() {
        assert!(is_damaged(decode_commit(&good[..end])), "cut to {end}");
    }
    for version in [0, 2] {
        assert!(is_damaged(decode_commit(&[&[version], &good[1..]].concat())));
    }
    for bad in [
        Commit { root: Entry { name: b"a", ..ROOT }, ..commit.clone() },
        Commit { root: Entry { name: b"", ..FILE }, ..commit.clone() },
        Commit { parents: (0..9).map(|n| [n; 32]).collect(), ..commit.clone() },
        Commit { parents: vec![[1; 32], [2; 32], [1; 32]], ..commit.clone() },
        Commit { author: &"x".repeat(1_025), ..commit.clone() },
        Commit { message: &"x".repeat(65_537), ..commit.clone() },
    ] {
        assert!(is_damaged(decode_commit(&encode_commit(&bad))));
    }
    let mut latin = encode_commit(&Commit { author: "é", ..commit.clone() });
    let at = latin.len() - 3;
    latin[at] = 0xe9;
    assert!(is_damaged(decode_commit(&latin)), "text that is not UTF-8");
}

#[test]
fn a_root_alone_is_as_in_a_commit() {
    let mut bytes = Vec::new();
    put_entry(&mut bytes, &ROOT);
    assert_eq!(decode_root(&bytes).unwrap(), ROOT);
    bytes.push(0);
    assert!(is_damaged(decode_root(&bytes)));
}

// ---- properties ----

#[derive(Clone, Debug)]
enum Sort {
    File(u64, u8, Id),
    Directory(Id),
    Symlink(Vec<u8>),
    Fifo,
}

#[derive(Clone, Debug)]
struct Made {
    mode: u32,
    time: (i64, u32),
    owner: Option<(u32, u32)>,
    attrs: Option<Id>,
    link: Option<Link>,
    sort: Sort,
}

fn made() -> impl Strategy<Value = Made> {
    let sort = prop_oneof![
        (0..=MAX_SIZE, 0..=1u8, any::<Id>()).prop_map(|(size, form, id)| Sort::File(size, form, id)),
        (0..SMALL_FILE, 0..=1u8, any::<Id>()).prop_map(|(size, form, id)| Sort::File(size, form, id)),
        any::<Id>().prop_map(Sort::Directory),
        vec(1..=255u8, 1..=MAX_TARGET).prop_map(Sort::Symlink),
        Just(Sort::Fifo),
    ];
    let time = (any::<i64>(), 0..NANOSECONDS);
    let owner = prop::option::of((0..=MAX_OWNER, 0..=MAX_OWNER));
    let ids = (prop::option::of(any::<Id>()), prop::option::of(any::<Link>()));
    (0..=MAX_MODE, time, owner, ids, sort).prop_map(|(mode, time, owner, (attrs, link), sort)| Made {
        mode,
        time,
        owner,
        attrs,
        link,
        sort,
    })
}

impl Made {
    fn entry<'a>(&'a self, name: &'a [u8]) -> Entry<'a> {
        let body = match &self.sort {
            Sort::File(0, _, _) => Body::File { size: 0, content: Content::Empty },
            Sort::File(size, 0, id) if *size < SMALL_FILE => {
                Body::File { size: *size, content: Content::Blob(*id) }
            }
            Sort::File(size, _, id) => Body::File { size: *size, content: Content::Paged(*id) },
            Sort::Directory(tree) => Body::Directory { tree: *tree },
            Sort::Symlink(target) => Body::Symlink { target },
            Sort::Fifo => Body::Fifo,
        };
        let link = self.link.filter(|_| !matches!(body, Body::Directory { .. }));
        let mode = if matches!(body, Body::Symlink { .. }) { SYMLINK_MODE } else { self.mode };
        let attrs = self.attrs.filter(|_| !matches!(body, Body::Symlink { .. } | Body::Fifo));
        let owner = self.owner.map(|(uid, gid)| Owner { uid, gid });
        let mtime = Time { seconds: self.time.0, nanoseconds: self.time.1 };
        Entry { name, mode, mtime, owner, attrs, link, body }
    }
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = any::<u8>().prop_filter("no slash, no NUL", |byte| !matches!(byte, b'/' | 0));
    vec(byte, 1..=MAX_NAME).prop_filter("no dots", |name| name != b"." && name != b"..")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn trees_come_back(made in btree_map(name(), made(), 0..12)) {
        let tree = Tree::Entries(made.iter().map(|(name, made)| made.entry(name)).collect());
        let bytes = encode_tree(&tree);
        prop_assert_eq!(decode_tree(&bytes).unwrap(), tree);
    }

    #[test]
    fn trees_above_come_back(names in btree_set(name(), 1..60), level in 1..=MAX_LEVEL, id: Id, weight in 1..=MAX_SIZE) {
        let children = names.iter().map(|last| TreeChild { weight, last, id }).collect();
        let tree = Tree::Children(level, children);
        let bytes = encode_tree(&tree);
        prop_assert_eq!(decode_tree(&bytes).unwrap(), tree);
    }

    /// What a decoder takes, the encoder writes in the same bytes: there is one form only.
    #[test]
    fn what_is_taken_is_written_alike(made in btree_map(name(), made(), 1..4), flips in vec((any::<usize>(), any::<u8>()), 1..3)) {
        let mut bytes = encode_tree(&Tree::Entries(made.iter().map(|(name, made)| made.entry(name)).collect()));
        for (at, byte) in flips {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        if let Ok(tree) = decode_tree(&bytes) {
            prop_assert_eq!(encode_tree(&tree), bytes);
        }
    }

    #[test]
    fn any_bytes_are_taken_or_refused(bytes in vec(any::<u8>(), 0..300)) {
        if let Ok(tree) = decode_tree(&bytes) {
            prop_assert_eq!(&encode_tree(&tree), &bytes);
        }
        if let Ok(page) = decode_page(&bytes) {
            prop_assert_eq!(&encode_page(&page), &bytes);
        }
        if let Ok(attributes) = decode_attrs(&bytes) {
            prop_assert_eq!(&encode_attrs(&attributes), &bytes);
        }
        if let Ok(commit) = decode_commit(&bytes) {
            prop_assert_eq!(&encode_commit(&commit), &bytes);
        }
    }
}
