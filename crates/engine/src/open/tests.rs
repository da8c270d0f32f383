use super::Place;
use crate::testing::Scratch;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::sync::atomic::Ordering;

/// A chain of directories whose path is longer than the kernel takes at once.
fn deep(scratch: &Scratch) -> Vec<u8> {
    let name = "d".repeat(200);
    let mut at: std::os::fd::OwnedFd = File::open(scratch.path()).unwrap().into();
    for _ in 0..50 {
        rustix::fs::mkdirat(&at, &name, Mode::RWXU).unwrap();
        at = rustix::fs::openat(&at, &name, OFlags::DIRECTORY, Mode::empty()).unwrap();
    }
    rustix::fs::mkdirat(&at, "last", Mode::RWXU).unwrap();
    format!("{}last", format!("{name}/").repeat(50)).into_bytes()
}

fn both(root: &File, test: impl Fn(&Place<'_>)) {
    let place = Place::new(root.as_fd());
    test(&place);
    place.stepwise.store(true, Ordering::Relaxed);
    test(&place);
}

#[test]
fn a_path_of_any_length_is_opened() {
    let scratch = Scratch::new();
    let path = deep(&scratch);
    assert!(path.len() > 10_000);
    both(&File::open(scratch.path()).unwrap(), |place| {
        let parent = place.directory(&path[..path.len() - 5]).unwrap();
        let last = rustix::fs::fstat(place.directory(&path).unwrap()).unwrap();
        let want = rustix::fs::statat(parent, "last", rustix::fs::AtFlags::empty()).unwrap();
        assert_eq!(last.st_ino, want.st_ino);
        let root = rustix::fs::fstat(place.directory(b"").unwrap()).unwrap();
        assert_eq!(root.st_ino, rustix::fs::fstat(place.root()).unwrap().st_ino);
    });
}

#[test]
fn no_link_is_followed() {
    let scratch = Scratch::new();
    std::fs::create_dir_all(scratch.path().join("real/inner")).unwrap();
    std::fs::write(scratch.path().join("real/file"), "x").unwrap();
    symlink("real", scratch.path().join("link")).unwrap();
    symlink("real/file", scratch.path().join("linked")).unwrap();
    let root = File::open(scratch.path()).unwrap();
    both(&root, |place| {
        place.directory(b"real/inner").unwrap();
        for path in [&b"link"[..], b"link/inner"] {
            assert!(matches!(place.directory(path), Err(Errno::LOOP | Errno::NOTDIR)));
        }
        assert!(matches!(place.directory(b"real/file"), Err(Errno::NOTDIR)));
        assert!(matches!(place.directory(b"real/absent"), Err(Errno::NOENT)));
        place.file(&root, b"real/file").unwrap();
        assert!(matches!(place.file(&root, b"linked"), Err(Errno::LOOP)));
    });
}

#[test]
fn opening_waits_for_nobody() {
    let scratch = Scratch::new();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        scratch.path().join("pipe"),
        rustix::fs::FileType::Fifo,
        Mode::RWXU,
        0,
    )
    .unwrap();
    let root = File::open(scratch.path()).unwrap();
    Place::new(root.as_fd()).file(&root, b"pipe").unwrap();
}
