//! Opening a path inside the sandbox's own root, as its user, through links but not through the magic ones of `/proc`,
//! which would lead through the daemon's own descriptors.
//!
//! `openat2` does that in one call. Where it is missing (gVisor), the path is gone along name by name: each is opened
//! without following, from the directory before it, and a link's target is put in front of what remains. On `/proc` only
//! the links that are plain ones are followed there.

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, fstat, fstatfs, openat, openat2, readlinkat, statat,
};
use rustix::io::{Errno, Result};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

/// The kernel's own limit.
const MAX_LINKS: usize = 40;
/// How often one name may turn out to be something else than a moment ago.
const MAX_SURPRISES: usize = 100;
const PROC: u64 = 0x9fa0;
const STEP: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn tells_magic() -> bool {
    static TELLS_MAGIC: OnceLock<bool> = OnceLock::new();
    *TELLS_MAGIC.get_or_init(|| at_once(b"/", OFlags::PATH | OFlags::CLOEXEC).is_ok())
}

/// Open the directory of this name in another one, for reading. A link in its place is `ENOTDIR`.
pub fn directory(here: impl AsFd, name: &[u8], flags: OFlags) -> Result<OwnedFd> {
    let flags = flags | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    if tells_magic() { openat(here, name, flags, Mode::empty()) } else { in_two_steps(here, name, flags) }
}

/// gVisor follows a link where a directory is asked for, whatever it is told, but for `O_PATH`.
fn in_two_steps(here: impl AsFd, name: &[u8], flags: OFlags) -> Result<OwnedFd> {
    let place = openat(here, name, STEP | OFlags::DIRECTORY, Mode::empty())?;
    openat(place, ".", flags, Mode::empty())
}

/// Open an absolute path. A link in the last place is followed unless `flags` say otherwise.
pub fn open(path: &[u8], flags: OFlags) -> Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC;
    if tells_magic() { at_once(path, flags) } else { by_steps(path, flags) }
}

fn at_once(path: &[u8], flags: OFlags) -> Result<OwnedFd> {
    openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
}

/// The names of a path. One that ends in a slash ends in `.`, which is a directory or nothing.
fn names(path: &[u8]) -> VecDeque<Vec<u8>> {
    let mut names: VecDeque<_> =
        path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect();
    if path.ends_with(b"/") && !names.is_empty() {
        names.push_back(b".".to_vec());
    }
    names
}

fn by_steps(path: &[u8], flags: OFlags) -> Result<OwnedFd> {
    let root = || openat(CWD, "/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let mut here = root()?;
    let mut rest = names(path);
    if rest.is_empty() {
        return openat(CWD, "/", flags, Mode::empty());
    }
    let (mut links, mut surprises) = (0, 0);
    while let Some(name) = rest.pop_front() {
        let last = rest.is_empty();
        if !(last && flags.contains(OFlags::NOFOLLOW)) {
            match readlinkat(&here, &name[..], Vec::new()) {
                Ok(target) => {
                    links += 1;
                    if links > MAX_LINKS || is_magic(&here, target.as_bytes())? {
                        return Err(Errno::LOOP);
                    }
                    let target = target.into_bytes();
                    if target.is_empty() {
                        return Err(Errno::NOENT);
                    }
                    if target.starts_with(b"/") {
                        here = root()?;
                    }
                    let mut ahead = names(&target);
                    ahead.append(&mut rest);
                    rest = ahead;
                    if rest.is_empty() {
                        // A link to the root in the last place.
                        rest.push_back(b".".to_vec());
                    }
                    continue;
                }
                Err(Errno::INVAL) => {}
                Err(errno) => return Err(errno),
            }
        }
        let opened = if last && flags.contains(OFlags::DIRECTORY) && !flags.contains(OFlags::PATH) {
            in_two_steps(&here, &name, flags | OFlags::NOFOLLOW)
        } else if last {
            openat(&here, &name[..], flags | OFlags::NOFOLLOW, Mode::empty())
        } else {
            openat(&here, &name[..], STEP | OFlags::DIRECTORY, Mode::empty())
        };
        let became_link = match &opened {
            Ok(file) if last => !flags.contains(OFlags::NOFOLLOW) && is_link(fstat(file)?.st_mode),
            Ok(_) => false,
            Err(Errno::LOOP | Errno::NOTDIR) => {
                !(last && flags.contains(OFlags::NOFOLLOW))
                    && statat(&here, &name[..], AtFlags::SYMLINK_NOFOLLOW)
                        .is_ok_and(|stat| is_link(stat.st_mode))
            }
            Err(_) => false,
        };
        if became_link {
            surprises += 1;
            if surprises > MAX_SURPRISES {
                return Err(Errno::LOOP);
            }
            rest.push_front(name);
            continue;
        }
        if last {
            return opened;
        }
        here = opened?;
    }
    Err(Errno::NOENT)
}

fn is_link(mode: u32) -> bool {
    FileType::from_raw_mode(mode) == FileType::Symlink
}

/// Whether a link leads to what a process holds open, rather than to the name that reading it gives. The others on `/proc`
/// are `self`, `thread-self`, `mounts` and `net` (proc(5)), whose text no magic one has.
fn is_magic(directory: &OwnedFd, target: &[u8]) -> Result<bool> {
    let plain = target.first().is_some_and(u8::is_ascii_digit) || target.starts_with(b"self/");
    Ok(!plain && fstatfs(directory)?.f_type as u64 == PROC)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicBool, Ordering};

    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Place {
            let place = std::env::temp_dir().join(format!("asb-lookup-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&place);
            fs::create_dir_all(place.join("d/deep")).unwrap();
            fs::write(place.join("d/f"), "f").unwrap();
            Place(place)
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn identity(result: Result<OwnedFd>) -> Result<(u64, u64, u32)> {
        let stat = fstat(&result?)?;
        Ok((stat.st_dev, stat.st_ino, stat.st_mode))
    }

    /// The kernel's own answer is the right one, for every path that it can give one for.
    #[test]
    fn by_steps_it_is_as_at_once() {
        let place = Place::new("same");
        let at = |path: &str| place.0.join(path);
        symlink("d", at("relative")).unwrap();
        symlink(at("d"), at("absolute")).unwrap();
        symlink("relative/f", at("chain")).unwrap();
        symlink("../../d/f", at("d/deep/up")).unwrap();
        symlink("nothing", at("dangling")).unwrap();
        symlink("loop", at("loop")).unwrap();
        symlink("/", at("root")).unwrap();
        symlink("d/", at("slash")).unwrap();
        symlink("d/f/", at("file-slash")).unwrap();
        symlink("/proc/self/root", at("magic")).unwrap();
        symlink("/proc/self/fd/0", at("descriptor")).unwrap();
        symlink("/proc/self/status", at("plain")).unwrap();
        symlink(format!("/{}", "../".repeat(20)), at("above")).unwrap();
        let mut before = "d/f".to_string();
        for number in 0..42 {
            let name = format!("link-{number}");
            symlink(&before, at(&name)).unwrap();
            before = name;
        }
        let long = "x".repeat(256);
        let beneath = [
            "",
            "/",
            "/d",
            "/d/",
            "/d/.",
            "/d/..",
            "/d/f",
            "/d/f/",
            "/d/f/.",
            "/d/f/x",
            "/d//f",
            "/./d/./f",
            "/none",
            "/none/x",
            "/d/../d/f",
            "/relative",
            "/relative/",
            "/relative/f",
            "/absolute/f",
            "/chain",
            "/chain/",
            "/d/deep/up",
            "/dangling",
            "/dangling/x",
            "/loop",
            "/loop/x",
            "/root",
            "/root/",
            "/root/proc",
            "/slash",
            "/slash/f",
            "/file-slash",
            "/magic",
            "/magic/etc",
            "/descriptor",
            "/plain",
            "/above",
            "/above/proc/self/exe",
            "/link-38",
            "/link-39",
            "/link-40",
            "/link-41",
            "/d/deep/../../d/f",
        ]; // fmt: skip
        let elsewhere = [
            "/",
            "//",
            "/.",
            "/..",
            "/../..",
            "/proc/self/cwd",
            "/proc/self/cwd/x",
            "/proc/self/exe",
            "/proc/self/fd/0",
            "/proc/self/root/etc",
            "/proc/1/root",
            "/proc/self/ns/net",
            "/proc/mounts",
            "/proc/net",
            "/proc/net/dev",
            "/proc/self/net/dev",
            "/proc/self/task",
            "/etc/passwd",
            "/dev/null",
            "/dev/stdin",
            "/dev/fd/0",
        ]; // fmt: skip
        let paths = beneath
            .iter()
            .map(|path| format!("{}{path}", place.0.display()))
            .chain(elsewhere.iter().map(ToString::to_string))
            .chain([format!("{}/{long}", place.0.display())]);
        let read = OFlags::RDONLY | OFlags::NONBLOCK;
        for path in paths {
            for flags in [
                OFlags::PATH,
                OFlags::PATH | OFlags::NOFOLLOW,
                read,
                read | OFlags::DIRECTORY,
                read | OFlags::NOFOLLOW,
            ] {
                let flags = flags | OFlags::CLOEXEC;
                let expected = identity(at_once(path.as_bytes(), flags));
                let found = identity(by_steps(path.as_bytes(), flags));
                assert_eq!(found, expected, "{path} {flags:?}");
            }
        }
    }

    #[test]
    fn a_directory_in_two_steps_is_never_one_behind_a_link() {
        let place = Place::new("two-steps");
        symlink("d", place.0.join("link")).unwrap();
        let here = openat(CWD, &place.0, STEP | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        for (name, expected) in [("d", Ok(())), ("link", Err(Errno::NOTDIR)), ("none", Err(Errno::NOENT))] {
            assert_eq!(in_two_steps(&here, name.as_bytes(), flags).map(drop), expected, "{name}");
            assert_eq!(directory(&here, name.as_bytes(), flags).map(drop), expected, "{name}");
        }
        let (found, expected) = (in_two_steps(&here, b"d", flags), openat(&here, "d", flags, Mode::empty()));
        assert_eq!(identity(found), identity(expected));
    }

    #[test]
    fn what_may_not_be_searched_is_not_entered() {
        let place = Place::new("closed");
        fs::set_permissions(place.0.join("d"), fs::Permissions::from_mode(0o0)).unwrap();
        let path = format!("{}/d/f", place.0.display());
        let tried = std::thread::spawn(move || {
            crate::workers::become_user(1234, 1234).unwrap();
            let found = identity(by_steps(path.as_bytes(), OFlags::PATH));
            crate::workers::become_root().unwrap();
            found
        });
        assert_eq!(tried.join().unwrap(), Err(Errno::ACCESS));
        fs::set_permissions(place.0.join("d"), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Whoever exchanges a file and a magic link meanwhile gets the file opened, or nothing.
    #[test]
    fn a_racing_renamer_gains_nothing() {
        let place = Place::new("race");
        fs::create_dir(place.0.join("d/other")).unwrap();
        fs::write(place.0.join("d/other/f"), "f").unwrap();
        symlink("/proc/self/root/etc", place.0.join("evil")).unwrap();
        let (one, two) = (place.0.join("d/other"), place.0.join("evil"));
        let stop = AtomicBool::new(false);
        let path = format!("{}/d/other/passwd", place.0.display());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let exchange = rustix::fs::RenameFlags::EXCHANGE;
                    let _ = rustix::fs::renameat_with(CWD, &one, CWD, &two, exchange);
                }
            });
            for _ in 0..3_000 {
                let found = by_steps(path.as_bytes(), OFlags::RDONLY).map(drop);
                assert!(matches!(found, Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR)), "{found:?}");
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
