//! States made by hand, good and bad, laid out under real directories and looked at by system calls alone.

use super::*;
use crate::format::{Extent, Kind, Link, Owner, Page, PageChild, Time, TreeChild, encode_attrs, encode_tree};
use crate::testing::{MemoryStore, Scratch, noise, plain};
use rustix::fs::{SeekFrom, Stat};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

fn lay_out(store: &MemoryStore, root: &Entry<'_>, at: &Path, options: Options) -> Result<()> {
    let directory = File::open(at).unwrap();
    store.serve(|reader, client| checkout(reader, root, directory.as_fd(), options, client))
}

/// Lay out under a new directory, whose name is given.
fn laid_out(store: &MemoryStore, root: &Entry<'_>) -> Result<(Scratch, PathBuf)> {
    let scratch = Scratch::new();
    let at = scratch.path().join("tree");
    std::fs::create_dir(&at).unwrap();
    lay_out(store, root, &at, Options { threads: 3, ..Options::default() })?;
    Ok((scratch, at))
}

fn is_damaged<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Damaged(_)))
}

fn stat(path: &Path) -> Stat {
    rustix::fs::lstat(path).unwrap()
}

fn mtime(path: &Path) -> (i64, u64) {
    let stat = stat(path);
    (stat.st_mtime, stat.st_mtime_nsec)
}

fn is_root() -> bool {
    // SAFETY: it takes nothing and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

const TIME: (i64, u64) = (1_600_000_000, 123_456_789);
const LINK: Link = [7; 16];

#[test]
fn every_type_comes_with_its_metadata() {
    let mut store = MemoryStore::new();
    let attrs = store.put(Kind::Attrs, &encode_attrs(&[("user.a", &b"\0\xff"[..]), ("user.b", b"")]));
    let files = [
        Entry { mode: 0o4711, ..store.file(b"a-setuid", b"content") },
        Entry { mode: 0, attrs: Some(attrs), ..store.file(b"b-locked", &noise(1, 131_071)) },
        Entry { mode: 0o640, body: Body::Fifo, ..plain(b"c-fifo") },
        Entry { mode: 0o777, body: Body::Symlink { target: b"/etc/passwd" }, ..plain(b"d-symlink") },
        Entry { mtime: Time { seconds: -1, nanoseconds: 999_999_999 }, ..plain(b"e-old") },
        plain(b"f-\xff\n"),
    ];
    let inside =
        Entry { mode: 0o1500, attrs: Some(attrs), ..store.directory(b"locked", &[plain(b"x"), plain(b"y")]) };
    let empty = Entry { mode: 0o2770, ..store.directory(b"none", &[]) };
    let entries = [&files[..], &[inside, empty]].concat();
    let root = Entry { mode: 0o750, ..store.directory(b"", &entries) };
    let (_scratch, at) = laid_out(&store, &root).unwrap();
    let read = |name: &str| std::fs::read(at.join(name)).unwrap();
    let mode = |name: &str| stat(&at.join(name)).st_mode;
    assert_eq!(read("a-setuid"), b"content");
    assert_eq!(read("b-locked"), noise(1, 131_071));
    for (name, expected) in [
        ("a-setuid", 0o104711),
        ("b-locked", 0o100000),
        ("c-fifo", 0o010640),
        ("d-symlink", 0o120777),
        ("locked", 0o041500),
        ("locked/x", 0o100644),
        ("none", 0o042770),
        ("", 0o040750),
    ] {
        assert_eq!(mode(name), expected, "{name}");
        assert_eq!(mtime(&at.join(name)), TIME, "{name}");
    }
    assert_eq!(mtime(&at.join("e-old")), (-1, 999_999_999));
    assert_eq!(std::fs::read_link(at.join("d-symlink")).unwrap(), Path::new("/etc/passwd"));
    assert!(at.join(std::ffi::OsStr::from_bytes(b"f-\xff\n")).exists());
    for name in ["b-locked", "locked"] {
        let mut value = [0; 10];
        assert_eq!(rustix::fs::lgetxattr(at.join(name), "user.a", &mut value).unwrap(), 2);
        assert_eq!(&value[..2], b"\0\xff");
        assert_eq!(rustix::fs::lgetxattr(at.join(name), "user.b", &mut value).unwrap(), 0);
    }
    let names: Vec<_> = std::fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), entries.len(), "{names:?}");
}

#[test]
fn owners_come_when_they_are_asked_for() {
    let mut store = MemoryStore::new();
    let owner = Some(Owner { uid: 1_234, gid: 4_321 });
    let file = Entry { owner, mode: 0o6755, ..store.file(b"file", b"x") };
    let symlink = Entry { owner, mode: 0o777, body: Body::Symlink { target: b"t" }, ..plain(b"symlink") };
    let fifo = Entry { owner, body: Body::Fifo, ..plain(b"fifo") };
    let root = Entry { owner, ..store.directory(b"", &[fifo, file, symlink]) };
    let scratch = Scratch::new();
    let own = stat(scratch.path());
    let own = (false, (own.st_uid, own.st_gid));
    for (owners, expected) in [own].into_iter().chain(is_root().then_some((true, (1_234, 4_321)))) {
        let at = scratch.path().join(owners.to_string());
        std::fs::create_dir(&at).unwrap();
        lay_out(&store, &root, &at, Options { owners, threads: 1, ..Options::default() }).unwrap();
        for name in ["file", "symlink", "fifo", ""] {
            let stat = stat(&at.join(name));
            assert_eq!((stat.st_uid, stat.st_gid), expected, "{name}");
        }
        assert_eq!(stat(&at.join("file")).st_mode, 0o106755);
    }
}

#[test]
fn one_owner_is_for_all_who_have_none() {
    if !is_root() {
        return;
    }
    let mut store = MemoryStore::new();
    let own = Some(Owner { uid: 1_234, gid: 4_321 });
    let inner = store.directory(b"c", &[Entry { mode: 0o4755, ..plain(b"d") }]);
    let root = store.directory(b"", &[Entry { owner: own, ..plain(b"a") }, plain(b"b"), inner]);
    let scratch = Scratch::new();
    let owner = Some(Owner { uid: 65_534, gid: 65_533 });
    for owners in [false, true] {
        let at = scratch.path().join(owners.to_string());
        std::fs::create_dir(&at).unwrap();
        lay_out(&store, &root, &at, Options { owners, owner, ..Options::default() }).unwrap();
        for (name, applied) in [("a", owners), ("b", false), ("c", false), ("c/d", false), ("", false)] {
            let stat = stat(&at.join(name));
            let expected = if applied { (1_234, 4_321) } else { (65_534, 65_533) };
            assert_eq!((stat.st_uid, stat.st_gid), expected, "{name}");
        }
        assert_eq!(stat(&at.join("c/d")).st_mode, 0o104755);
    }
}

#[test]
fn large_files_come_with_their_holes() {
    let mut store = MemoryStore::new();
    let hole = |length| Extent { length, id: None };
    let mut extents = vec![hole(1 << 20)];
    let mut expected = Vec::new();
    for seed in 0..700 {
        let bytes = noise(seed, 20_000 + seed as usize);
        expected.extend(&bytes);
        extents.push(store.data(&bytes));
    }
    extents.push(hole(3 << 20));
    let (size, id) = store.pages(&extents, 100);
    let above = PageChild { weight: size, id };
    let id = store.page(Page::Children(2, vec![above, above]));
    let file = Entry { body: Body::File { size: 2 * size, content: Content::Paged(id) }, ..plain(b"large") };
    // Holes that meet across the two halves: no writer cuts them there.
    let root = store.directory(b"", &[file]);
    assert!(is_damaged(laid_out(&store, &root)));
    extents.pop();
    let (size, id) = store.pages(&extents, 100);
    let above = PageChild { weight: size, id };
    let id = store.page(Page::Children(2, vec![above, above]));
    let file = Entry { body: Body::File { size: 2 * size, content: Content::Paged(id) }, ..plain(b"large") };
    let root = store.directory(b"", &[file]);
    let (_scratch, at) = laid_out(&store, &root).unwrap();
    let half = [vec![0; 1 << 20], expected].concat();
    assert_eq!(std::fs::read(at.join("large")).unwrap(), [&half[..], &half].concat());
    let large = File::open(at.join("large")).unwrap();
    assert_eq!(rustix::fs::seek(&large, SeekFrom::Data(0)).unwrap(), 1 << 20, "the hole in front");
    let allocated = large.metadata().unwrap().blocks() * 512;
    assert!(allocated < 2 * size - (1 << 20), "{allocated} bytes on disk");
    assert_eq!(mtime(&at.join("large")), TIME);
}

#[test]
fn a_hole_alone_takes_no_space() {
    let mut store = MemoryStore::new();
    let size = 1 << 40;
    let id = store.page(Page::Extents(vec![Extent { length: size, id: None }]));
    let file = Entry { body: Body::File { size, content: Content::Paged(id) }, ..plain(b"sparse") };
    let root = store.directory(b"", &[file]);
    let (_scratch, at) = laid_out(&store, &root).unwrap();
    let found = std::fs::metadata(at.join("sparse")).unwrap();
    assert_eq!((found.len(), found.blocks()), (size, 0));
}

#[test]
fn names_of_one_inode_are_one_file_wherever_they_are() {
    let mut store = MemoryStore::new();
    let extents: Vec<Extent> = (0..50).map(|seed| store.data(&noise(seed, 30_000))).collect();
    let (size, id) = store.pages(&extents, 32);
    let large =
        Entry { link: Some(LINK), body: Body::File { size, content: Content::Paged(id) }, ..plain(b"") };
    let small = Entry { link: Some([8; 16]), mode: 0o4755, ..store.file(b"", b"small") };
    let symlink =
        Entry { link: Some([9; 16]), mode: 0o777, body: Body::Symlink { target: b"t" }, ..plain(b"") };
    let fifo = Entry { link: Some([10; 16]), body: Body::Fifo, ..plain(b"") };
    let all = |prefix: &'static [&'static [u8]; 4]| {
        [(fifo, prefix[0]), (large, prefix[1]), (small, prefix[2]), (symlink, prefix[3])]
            .map(|(entry, name)| Entry { name, ..entry })
    };
    let names = all(&[b"f", b"l", b"s", b"y"]);
    let mut directories = Vec::new();
    let labels: Vec<String> = (0..300).map(|n| format!("{n:03}")).collect();
    for label in &labels {
        directories.push(Entry { mode: 0o500, ..store.directory(label.as_bytes(), &names) });
    }
    let tree = store.wide_tree(&directories, 32);
    let root = Entry { body: Body::Directory { tree }, ..plain(b"") };
    let (_scratch, at) = laid_out(&store, &root).unwrap();
    for name in ["f", "l", "s", "y"] {
        let first = stat(&at.join("000").join(name));
        assert_eq!(first.st_nlink, 300);
        for label in &labels {
            let path = at.join(label).join(name);
            assert_eq!(stat(&path).st_ino, first.st_ino);
            assert_eq!(mtime(&path), TIME);
            assert_eq!((mtime(&at.join(label)), stat(&at.join(label)).st_mode), (TIME, 0o040500));
        }
    }
    assert_eq!(std::fs::metadata(at.join("123/l")).unwrap().len(), size);
    assert_eq!(stat(&at.join("299/s")).st_mode, 0o104755);
}

#[test]
fn bases_of_patches_are_asked_for_together() {
    let mut store = MemoryStore::new();
    let names: Vec<String> = (0..200).map(|n| format!("{n:03}")).collect();
    let mut entries = Vec::new();
    let mut extents = Vec::new();
    for (seed, name) in names.iter().enumerate() {
        // The last of a chain of up to four patches.
        let mut bytes = noise(seed as u64, 5_000);
        let mut id = store.put(Kind::Blob, &bytes);
        for depth in 1..=(seed % 5) as u8 {
            let before = bytes.clone();
            bytes[usize::from(depth)] ^= 1;
            id = store.put_patch(Kind::Blob, &bytes, (&id, &before), depth);
        }
        entries.push(Entry {
            body: Body::File { size: 5_000, content: Content::Blob(id) },
            ..plain(name.as_bytes())
        });
        extents.push(Extent { length: 5_000, id: Some(id) });
    }
    let id = store.page(Page::Extents(extents));
    entries
        .push(Entry { body: Body::File { size: 1_000_000, content: Content::Paged(id) }, ..plain(b"all") });
    let root = store.directory(b"", &entries);
    let before = store.questions();
    let (_scratch, at) = laid_out(&store, &root).unwrap();
    // The root, its content, the page, its content, and for both at most four times the bases.
    assert!(store.questions() - before <= 12, "{}", store.questions() - before);
    let mut all = Vec::new();
    for (seed, name) in names.iter().enumerate() {
        let mut bytes = noise(seed as u64, 5_000);
        (1..=seed % 5).for_each(|at| bytes[at] ^= 1);
        assert_eq!(std::fs::read(at.join(name)).unwrap(), bytes);
        all.extend(bytes);
    }
    assert_eq!(std::fs::read(at.join("all")).unwrap(), all);
}

#[test]
fn linked_entries_that_do_not_agree_are_refused() {
    let mut store = MemoryStore::new();
    let one = Entry { link: Some(LINK), ..store.file(b"a", b"one") };
    for other in [
        Entry { link: Some(LINK), ..store.file(b"b", b"two") },
        Entry { name: b"b", mode: 0o600, ..one },
        Entry { name: b"b", mtime: Time { seconds: 1, nanoseconds: 0 }, ..one },
        Entry { name: b"b", body: Body::Fifo, ..one },
    ] {
        let root = store.directory(b"", &[one, other]);
        assert!(is_damaged(laid_out(&store, &root)), "{other:?}");
    }
}

#[test]
fn a_directory_of_many_pages_is_whole() {
    let mut store = MemoryStore::new();
    let names: Vec<String> = (0..5_000).map(|n| format!("{n:04}")).collect();
    let entries: Vec<Entry<'_>> =
        names.iter().map(|name| store.file(name.as_bytes(), name.as_bytes())).collect();
    let pages: Vec<TreeChild<'_>> = entries
        .chunks(1_000)
        .map(|part| {
            let last = part[part.len() - 1].name;
            TreeChild { weight: part.len() as u64, last, id: store.wide_tree(part, 40) }
        })
        .collect();
    let tree = store.put(Kind::Tree, &encode_tree(&Tree::Children(2, pages)));
    let root = Entry { body: Body::Directory { tree }, ..plain(b"") };
    let (_scratch, at) = laid_out(&store, &root).unwrap();
    for name in &names {
        assert_eq!(std::fs::read_to_string(at.join(name)).unwrap(), *name);
    }
    assert_eq!(std::fs::read_dir(&at).unwrap().count(), names.len());
    assert_eq!(mtime(&at), TIME);
}

/// A chain of directories, each in the one before.
fn deep(store: &mut MemoryStore, depth: usize) -> Entry<'static> {
    let mut inner = store.directory(b"d", &[]);
    for _ in 1..depth {
        inner = store.directory(b"d", &[inner]);
    }
    store.directory(b"", &[inner])
}

#[test]
fn a_path_has_at_most_a_thousand_names() {
    let mut store = MemoryStore::new();
    let root = deep(&mut store, 1_000);
    let (scratch, at) = laid_out(&store, &root).unwrap();
    let mut fd: OwnedFd = File::open(&at).unwrap().into();
    for _ in 0..1_000 {
        fd = rustix::fs::openat(&fd, "d", OPEN, Mode::empty()).unwrap();
        let stat = rustix::fs::fstat(&fd).unwrap();
        assert_eq!((stat.st_mtime, stat.st_mtime_nsec, stat.st_mode), (TIME.0, TIME.1, 0o040755));
    }
    let root = deep(&mut store, 1_001);
    assert!(is_damaged(laid_out(&store, &root)));
    drop(scratch);
}

#[test]
fn states_that_no_writer_makes_are_refused() {
    let mut store = MemoryStore::new();
    let chunk = store.data(&noise(1, 10_000));
    let short = Extent { length: 9_999, ..chunk };
    let page = store.page(Page::Extents(vec![chunk]));
    let lied = store.page(Page::Extents(vec![short]));
    let above = |store: &mut MemoryStore, level, weight, id| {
        store.page(Page::Children(level, vec![PageChild { weight, id }]))
    };
    let right = above(&mut store, 1, 10_000, page);
    let level = above(&mut store, 2, 10_000, page);
    let weight = above(&mut store, 1, 10_001, page);
    let overflow = vec![PageChild { weight: i64::MAX as u64, id: page }; 256];
    let overflow = store.page(Page::Children(1, overflow));
    let tree = store.tree(&[]);
    let blob = store.put(Kind::Blob, b"four");
    let paged = |size, id| Body::File { size, content: Content::Paged(id) };
    let single = |size, id| Body::File { size, content: Content::Blob(id) };
    for (body, good) in [
        (paged(10_000, right), true),
        (paged(10_000, page), true),
        (paged(10_001, page), false),
        (paged(9_999, lied), false),
        (paged(10_000, level), false),
        (paged(10_001, weight), false),
        (paged(10_000, overflow), false),
        (paged(10_000, [1; 32]), false),
        (paged(10_000, tree), false),
        (single(4, blob), true),
        (single(3, blob), false),
        (single(5, blob), false),
        (single(5, [1; 32]), false),
        (single(5, page), false),
    ] {
        let root = store.directory(b"", &[Entry { body, ..plain(b"a") }]);
        assert_eq!(laid_out(&store, &root).is_ok(), good, "{body:?}");
        assert_eq!(is_damaged(laid_out(&store, &root)), !good, "{body:?}");
    }
    let (a, b) = (store.tree(&[plain(b"a"), plain(b"b")]), store.tree(&[plain(b"c")]));
    let child = |weight, last: &'static [u8], id| TreeChild { weight, last, id };
    for (level, children, good) in [
        (1, vec![child(2, b"b", a), child(1, b"c", b)], true),
        (1, vec![child(3, b"b", a), child(1, b"c", b)], false),
        (1, vec![child(2, b"bb", a), child(1, b"c", b)], false),
        (1, vec![child(1, b"c", b), child(2, b"d", a)], false),
        (1, vec![child(2, b"b", a), child(2, b"bb", a)], false),
        (1, vec![child(u64::MAX >> 1, b"b", a)], false),
        (2, vec![child(2, b"b", a), child(1, b"c", b)], false),
        (1, vec![child(1, b"x", tree)], false),
        (1, vec![child(1, b"x", [1; 32])], false),
    ] {
        let tree = store.put(Kind::Tree, &encode_tree(&Tree::Children(level, children.clone())));
        let root = Entry { body: Body::Directory { tree }, ..plain(b"") };
        assert_eq!(laid_out(&store, &root).is_ok(), good, "{children:?}");
        assert_eq!(is_damaged(laid_out(&store, &root)), !good, "{children:?}");
    }
    let attrs = Entry { attrs: Some([1; 32]), ..plain(b"a") };
    let root = store.directory(b"", &[attrs]);
    assert!(is_damaged(laid_out(&store, &root)));
    let root = Entry { attrs: Some([1; 32]), ..store.directory(b"", &[]) };
    assert!(is_damaged(laid_out(&store, &root)));
}

#[test]
fn what_no_file_system_holds_is_said() {
    let mut store = MemoryStore::new();
    let time = Entry { mtime: Time { seconds: i64::MAX, nanoseconds: 0 }, ..plain(b"a") };
    let size = i64::MAX as u64;
    let id = store.page(Page::Extents(vec![Extent { length: size, id: None }]));
    let large = Entry { body: Body::File { size, content: Content::Paged(id) }, ..plain(b"a") };
    let many: Vec<(String, Vec<u8>)> = (0..15).map(|n| (format!("user.{n:02}"), vec![1; 65_536])).collect();
    let attrs = store.put(Kind::Attrs, &encode_attrs(&many));
    // A megabyte of attributes is more than ext4, xfs and btrfs take, and tmpfs has a limit too.
    for entry in [time, large, Entry { attrs: Some(attrs), ..plain(b"a") }] {
        let root = store.directory(b"", &[entry]);
        let done = laid_out(&store, &root);
        assert!(matches!(done, Err(Error::Unfit(_))), "{done:?}");
    }
}

#[test]
fn only_an_empty_directory_is_filled_and_nothing_is_overwritten() {
    let mut store = MemoryStore::new();
    let root = store.directory(b"", &[plain(b"a")]);
    let (_scratch, at) = laid_out(&store, &root).unwrap();
    assert!(matches!(lay_out(&store, &root, &at, Options::default()), Err(Error::Conflict(_))));
    let file = File::open(at.join("a")).unwrap();
    let done =
        store.serve(|reader, client| checkout(reader, &root, file.as_fd(), Options::default(), client));
    assert!(matches!(done, Err(Error::Conflict(_))), "{done:?}");
    let done =
        store.serve(|reader, client| checkout(reader, &plain(b""), file.as_fd(), Options::default(), client));
    assert!(matches!(done, Err(Error::Invalid(_))), "{done:?}");
}

/// Run with the rights of nobody, and with a umask that takes everything.
fn as_nobody<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    let run = || {
        // SAFETY: both calls change this thread alone (and those that it starts), and it ends below.
        unsafe {
            assert_eq!(libc::unshare(libc::CLONE_FS), 0, "a umask of its own");
            libc::umask(0o777);
            if libc::geteuid() == 0 {
                assert_eq!(libc::syscall(libc::SYS_setresgid, 65_534, 65_534, 65_534), 0);
                assert_eq!(libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534), 0);
            }
        }
        work()
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}

#[test]
fn no_right_is_needed_and_no_umask_matters() {
    let mut store = MemoryStore::new();
    let attrs = store.put(Kind::Attrs, &encode_attrs(&[("user.a", "x")]));
    let file = Entry { mode: 0o444, attrs: Some(attrs), link: Some(LINK), ..store.file(b"file", b"x") };
    let fifo = Entry { mode: 0o400, body: Body::Fifo, ..plain(b"fifo") };
    let inner = Entry { mode: 0, attrs: Some(attrs), ..store.directory(b"locked", &[fifo, file]) };
    let outer = Entry { mode: 0o555, ..store.directory(b"outer", &[inner]) };
    let root = store.directory(b"", &[file, outer]);
    let scratch = Scratch::new();
    let at = scratch.path().join("tree");
    std::fs::create_dir(&at).unwrap();
    for path in [scratch.path(), &at] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).unwrap();
    }
    let directory = File::open(&at).unwrap();
    if is_root() {
        std::os::unix::fs::chown(&at, Some(65_534), Some(65_534)).unwrap();
    }
    store
        .serve(|reader, client| {
            as_nobody(|| {
                checkout(
                    reader,
                    &root,
                    directory.as_fd(),
                    Options { threads: 2, ..Options::default() },
                    client,
                )
            })
        })
        .unwrap();
    let mode = |name: &str| stat(&at.join(name)).st_mode;
    assert_eq!(mode("outer"), 0o040555);
    assert_eq!(mode("file"), 0o100444);
    // Nobody may look any deeper without the rights of root.
    if is_root() {
        assert_eq!((mode("outer/locked"), mode("outer/locked/fifo")), (0o040000, 0o010400));
        assert_eq!(stat(&at.join("outer/locked/file")).st_ino, stat(&at.join("file")).st_ino);
        assert_eq!(stat(&at.join("outer/locked/file")).st_uid, 65_534);
    }
}

#[test]
fn set_id_bits_that_do_not_stay_are_said() {
    if !is_root() {
        return;
    }
    let mut store = MemoryStore::new();
    let root = store.directory(b"", &[Entry { mode: 0o2755, ..plain(b"a") }]);
    let scratch = Scratch::new();
    // What is made in it gets its group, which nobody is not in.
    std::os::unix::fs::chown(scratch.path(), Some(65_534), Some(12_345)).unwrap();
    std::fs::set_permissions(scratch.path(), PermissionsExt::from_mode(0o2777)).unwrap();
    let directory = File::open(scratch.path()).unwrap();
    let done = store.serve(|reader, client| {
        as_nobody(|| checkout(reader, &root, directory.as_fd(), Options::default(), client))
    });
    assert!(matches!(done, Err(Error::Unfit(_))), "{done:?}");
}

#[test]
fn a_caller_that_stops_ends_the_work() {
    let mut store = MemoryStore::new();
    let root = store.directory(b"", &[plain(b"a")]);
    let scratch = Scratch::new();
    let directory = File::open(scratch.path()).unwrap();
    let done = store.serve(|reader, client| {
        client.stop();
        checkout(reader, &root, directory.as_fd(), Options::default(), client)
    });
    assert!(matches!(done, Err(Error::Stopped)), "{done:?}");
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0);
}

#[test]
fn progress_ends_where_it_said() {
    let mut store = MemoryStore::new();
    let link = Entry { link: Some(LINK), ..store.file(b"a", b"four") };
    let hole = Extent { length: 100_000, id: None };
    let tail = store.data(b"tail");
    let id = store.page(Page::Extents(vec![hole, tail]));
    let large = Entry { body: Body::File { size: 100_004, content: Content::Paged(id) }, ..plain(b"large") };
    let fifo = Entry { body: Body::Fifo, ..plain(b"fifo") };
    let inner = store.directory(b"inner", &[link, Entry { name: b"b", ..link }, plain(b"empty")]);
    let root = store.directory(b"", &[Entry { name: b"c", ..link }, fifo, inner, large]);
    let scratch = Scratch::new();
    let directory = File::open(scratch.path()).unwrap();
    let done = store.serve(|reader, client| {
        let options = Options { counted: true, ..Options::default() };
        checkout(reader, &root, directory.as_fd(), options, client)?;
        Ok(client.done.clone())
    });
    let done = done.unwrap();
    let count = |value: &std::sync::atomic::AtomicU64| value.load(Ordering::Relaxed);
    assert_eq!((count(&done.files), count(&done.files_in_all)), (5, 5));
    assert_eq!((count(&done.bytes), count(&done.bytes_in_all)), (100_008, 100_008));
}

#[test]
fn few_directories_are_open_at_a_time() {
    let mut store = MemoryStore::new();
    let names: Vec<String> = (0..400).map(|n| format!("{n:03}")).collect();
    // Each holds a linked name, so none is finished before the end.
    let directories: Vec<Entry<'_>> = names
        .iter()
        .map(|name| {
            let mut link = [0; 16];
            link[..3].copy_from_slice(name.as_bytes());
            store.directory(name.as_bytes(), &[Entry { link: Some(link), ..plain(b"a") }])
        })
        .collect();
    let tree = store.wide_tree(&directories, 100);
    let root = Entry { body: Body::Directory { tree }, ..plain(b"") };
    let scratch = Scratch::new();
    let directory = File::open(scratch.path()).unwrap();
    store
        .serve(|reader, client| {
            let layout = Layout::new(reader, client, Options::default(), false);
            let dir = Dir::root(open_empty(directory.as_fd())?, layout.metadata(&root));
            let first = Task::List { dir, cursor: Cursor::new(tree, None) };
            Pool::new(vec![first]).run(2, client, |pool, task| layout.perform(pool, task))?;
            let target = |fd: std::io::Result<std::fs::DirEntry>| fd.ok()?.path().read_link().ok();
            let open = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(target);
            let open = open.filter(|path| path.starts_with(scratch.path())).count();
            assert!((100..=135).contains(&open), "{open} of 401 directories");
            layout.finish()
        })
        .unwrap();
    assert!(names.iter().all(|name| mtime(&scratch.path().join(name)) == TIME));
}
