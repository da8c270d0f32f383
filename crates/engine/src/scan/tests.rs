use super::{Left, Scan, Type, Visit};
use crate::error::{Error, Result};
use crate::open::Place;
use crate::testing::Scratch;
use rustix::fs::{FileType, Mode, OFlags};
use std::fs::{self, File};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

/// Calls a function for each directory while it is open.
struct Meanwhile<F>(F);

impl<F: FnMut(u32) -> bool> Visit for Meanwhile<F> {
    fn directory(&mut self, node: u32, _directory: BorrowedFd<'_>) -> Result<bool> {
        Ok((self.0)(node))
    }
}

fn scan_with(path: &Path, meanwhile: impl FnMut(u32) -> bool) -> Result<Scan> {
    let root = File::open(path).unwrap();
    Scan::new(&Place::new(root.as_fd()), &mut Meanwhile(meanwhile), &|| Ok(()))
}

fn scan(path: &Path) -> Scan {
    scan_with(path, |_| true).unwrap()
}

fn paths(scan: &Scan) -> Vec<String> {
    let mut paths: Vec<_> =
        (0..scan.nodes.len() as u32).map(|node| String::from_utf8(scan.path(node)).unwrap()).collect();
    paths.sort();
    paths
}

fn mknod(path: &Path, kind: FileType) {
    rustix::fs::mknodat(rustix::fs::CWD, path, kind, Mode::from_raw_mode(0o640), 0).unwrap();
}

#[test]
fn everything_is_seen_once_as_it_is() {
    let scratch = Scratch::new();
    let root = scratch.path();
    fs::create_dir_all(root.join("b/c")).unwrap();
    fs::write(root.join("b/file"), "12345").unwrap();
    fs::set_permissions(root.join("b/file"), fs::Permissions::from_mode(0o4751)).unwrap();
    symlink("somewhere/else", root.join("a")).unwrap();
    mknod(&root.join("z"), FileType::Fifo);
    let scan = scan(root);
    assert_eq!(paths(&scan), ["", "a", "b", "b/c", "b/file", "z"]);
    for node in 0..scan.nodes.len() as u32 {
        let path = String::from_utf8(scan.path(node)).unwrap();
        let want = fs::symlink_metadata(root.join(&path)).unwrap();
        let found = scan.nodes[node as usize];
        let kind = match path.as_str() {
            "a" => Type::Symlink,
            "z" => Type::Fifo,
            "b/file" => Type::File,
            _ => Type::Directory,
        };
        assert_eq!(found.kind, kind, "{path}");
        assert_eq!(u32::from(found.mode), want.mode() & 0o7777, "{path}");
        let state = found.state;
        assert_eq!((state.inode, state.size), (want.ino(), want.size()), "{path}");
        assert_eq!(state.mtime, (want.mtime(), want.mtime_nsec() as u32), "{path}");
        assert_eq!(state.ctime, (want.ctime(), want.ctime_nsec() as u32), "{path}");
        assert_eq!((found.uid, found.gid), (want.uid(), want.gid()), "{path}");
        if path == "a" {
            assert_eq!(scan.target(node), b"somewhere/else");
        }
    }
    assert!(scan.left_out.paths.is_empty());
}

#[test]
fn names_are_sorted_as_bytes_and_children_lie_behind_their_directory() {
    let scratch = Scratch::new();
    for name in ["a", "a.b", "a-b", "B", "é", "a/x"] {
        fs::create_dir_all(scratch.path().join(name)).unwrap();
    }
    let scan = scan(scratch.path());
    for (number, dir) in scan.dirs.iter().enumerate() {
        let names: Vec<_> = (dir.first..dir.first + dir.count).map(|node| scan.name(node)).collect();
        assert!(names.is_sorted());
        assert!(
            (dir.first..dir.first + dir.count)
                .all(|node| node > dir.node && scan.number(node) > number as u32)
        );
    }
}

#[test]
fn sockets_and_devices_are_left_out() {
    let scratch = Scratch::new();
    mknod(&scratch.path().join("socket"), FileType::Socket);
    // Device 0/0 needs no right to make, only a file system that takes it.
    mknod(&scratch.path().join("device"), FileType::CharacterDevice);
    fs::write(scratch.path().join("file"), "").unwrap();
    let scan = scan(scratch.path());
    assert_eq!(paths(&scan), ["", "file"]);
    let mut left = scan.left_out.paths;
    left.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(left, [(b"device".to_vec(), Left::Device), (b"socket".to_vec(), Left::Socket)]);
    assert_eq!(scan.left_out.count, 2);
}

#[test]
fn names_of_one_inode_are_a_group_sorted_by_path() {
    let scratch = Scratch::new();
    let root = scratch.path();
    fs::create_dir(root.join("a")).unwrap();
    fs::write(root.join("a/z"), "").unwrap();
    // As whole paths "a.b" comes before "a/z", in a walk behind it.
    fs::hard_link(root.join("a/z"), root.join("a.b")).unwrap();
    fs::hard_link(root.join("a/z"), root.join("a/y")).unwrap();
    let outside = Scratch::new();
    fs::write(root.join("lone"), "").unwrap();
    fs::hard_link(root.join("lone"), outside.path().join("lone")).unwrap();
    let mut scan = scan(root);
    let groups = scan.links();
    let found: Vec<Vec<_>> =
        groups.iter().map(|group| group.iter().map(|node| scan.path(*node)).collect()).collect();
    assert_eq!(found, [[b"a.b".to_vec(), b"a/y".to_vec(), b"a/z".to_vec()]]);
}

#[test]
fn a_directory_that_changes_once_is_listed_again() {
    let scratch = Scratch::new();
    let root = scratch.path();
    fs::create_dir(root.join("sub")).unwrap();
    fs::write(root.join("sub/file"), "").unwrap();
    let mut changed = false;
    let scan = scan_with(root, |node| {
        if node != 0 && !changed {
            changed = true;
            fs::rename(root.join("sub/file"), root.join("sub/other")).unwrap();
            filetime(&root.join("sub"), 17);
        }
        true
    })
    .unwrap();
    assert_eq!(paths(&scan), ["", "sub", "sub/other"]);
    assert_eq!(scan.nodes[1].state.mtime.0, 17);
}

/// Give a directory another mtime, so that a change shows whatever the clock's tick.
fn filetime(path: &Path, seconds: i64) {
    let time = rustix::fs::Timespec { tv_sec: seconds, tv_nsec: 0 };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, rustix::fs::AtFlags::empty()).unwrap();
}

#[test]
fn a_directory_that_keeps_changing_is_a_conflict() {
    let scratch = Scratch::new();
    let root = scratch.path();
    fs::create_dir(root.join("sub")).unwrap();
    let mut count = 0;
    let found = scan_with(root, |node| {
        if node != 0 {
            count += 1;
            filetime(&root.join("sub"), count);
        }
        true
    });
    assert!(matches!(found, Err(Error::Conflict(text)) if text.starts_with("sub ")));
    assert_eq!(count, 3);
}

#[test]
fn a_directory_that_is_another_by_now_is_a_conflict() {
    for other in ["link", "directory", "nothing"] {
        let scratch = Scratch::new();
        let root = scratch.path();
        for name in ["a", "b", "c"] {
            fs::create_dir(root.join(name)).unwrap();
        }
        // The root is listed and `a` open.
        let found = scan_with(root, |node| {
            if node == 1 {
                fs::rename(root.join("b"), root.join("away")).unwrap();
                match other {
                    "link" => symlink("c", root.join("b")).unwrap(),
                    "directory" => fs::create_dir(root.join("b")).unwrap(),
                    _ => {}
                }
            }
            true
        });
        assert!(matches!(found, Err(Error::Conflict(text)) if text.starts_with("b ")), "{other}");
    }
}

#[test]
fn attributes_that_do_not_fit_are_told() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path().join("sub")).unwrap();
    let scan = scan_with(scratch.path(), |node| node == 0).unwrap();
    assert_eq!(scan.left_out.paths, [(b"sub".to_vec(), Left::Attributes)]);
}

#[test]
fn a_tree_may_be_as_deep_as_it_may() {
    let scratch = Scratch::new();
    let make = |depth: usize| {
        let mut at: std::os::fd::OwnedFd = File::open(scratch.path()).unwrap().into();
        for number in 0..depth {
            if number >= depth - 1 || depth == 1_000 {
                rustix::fs::mkdirat(&at, "d", Mode::RWXU).unwrap();
            }
            at = rustix::fs::openat(&at, "d", OFlags::DIRECTORY, Mode::empty()).unwrap();
        }
    };
    make(1_000);
    assert_eq!(scan(scratch.path()).dirs.len(), 1_001);
    make(1_001);
    let found = scan_with(scratch.path(), |_| true);
    assert!(matches!(found, Err(Error::Invalid(text)) if text.contains("1000 directories")));
}

#[test]
fn a_scan_ends_when_it_shall() {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path().join("a/b")).unwrap();
    let root = File::open(scratch.path()).unwrap();
    let count = std::cell::Cell::new(0);
    let check = || {
        count.set(count.get() + 1);
        if count.get() > 1 { Err(Error::Stopped) } else { Ok(()) }
    };
    let found = Scan::new(&Place::new(root.as_fd()), &mut Meanwhile(|_| true), &check);
    assert!(matches!(found, Err(Error::Stopped)));
}
