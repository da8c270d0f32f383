//! Walk to a place beneath the workspace without ever leaving it.
//!
//! A command can change every directory and link beneath `/workspace` at any moment, so no path string is given
//! to the kernel as a whole. The walk holds a stack of open directories and takes one name at a time with
//! O_NOFOLLOW: a directory is opened below the last one, a link is read and its target put in front of what
//! remains, `..` takes the last directory off the stack, and where the stack is empty that is an escape. Whatever
//! is renamed meanwhile, each step is taken from a directory that was reached this way from the root. `openat2`
//! would do the same in one call but is missing under gVisor.
//!
//! An absolute link that points beneath the workspace starts again at the root; any other is refused.

use crate::errors::Failure;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, mkdirat, openat, readlinkat, statat};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The kernel's own limit.
const MAX_LINKS: usize = 40;
/// Directories that are open at once.
const MAX_DEPTH: usize = 512;
/// How often one name may turn out to be something else than a moment ago; making it counts once.
const MAX_SURPRISES: usize = 100;

/// A name in an open directory.
#[derive(Debug)]
pub struct Target {
    pub parent: OwnedFd,
    pub name: Vec<u8>,
}

/// What the last name of a path may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    /// Free, or what is neither a link nor a directory. Links are followed.
    File,
    /// Anything that is there, links followed.
    Thing,
    /// Whatever it is, or nothing: it is not looked at.
    Name,
}

const DIRECTORY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

struct Walk {
    root: OwnedFd,
    stack: Vec<OwnedFd>,
    rest: VecDeque<Vec<u8>>,
    workspace: Vec<Vec<u8>>,
    links: usize,
    last: Last,
    /// Missing directories on the way are made.
    make: bool,
}

/// Find where to put a file, making the directories on the way that are missing.
pub fn target(workspace: &[u8], path: &[u8]) -> Result<Target, Failure> {
    let walk = Walk::new(workspace, path, Last::File, true)?;
    if path.ends_with(b"/") || path.ends_with(b"/.") {
        return Err(Failure::invalid("the path names a directory"));
    }
    walk.run()
}

/// Find a name as it stands, whatever it is. `None` for a path that ends in `..` or is the workspace itself.
pub fn name(workspace: &[u8], path: &[u8], make: bool) -> Result<Option<Target>, Failure> {
    let walk = Walk::new(workspace, path, Last::Name, make)?;
    match walk.rest.back() {
        Some(last) if last != b".." => walk.run().map(Some),
        _ => Ok(None),
    }
}

/// Find something that is there and no link. `None` for the workspace itself.
pub fn thing(workspace: &[u8], path: &[u8]) -> Result<Option<Target>, Failure> {
    let walk = Walk::new(workspace, path, Last::Thing, false)?;
    if walk.rest.is_empty() { Ok(None) } else { walk.run().map(Some) }
}

/// Open a directory for looking up names in it.
pub fn directory(workspace: &[u8], path: &[u8], make: bool) -> Result<OwnedFd, Failure> {
    Walk::new(workspace, path, Last::Name, make)?.run_into()
}

fn too_deep() -> Failure {
    Failure::invalid(format!("the path has more than {MAX_DEPTH} directories"))
}

fn components(path: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    path.split(|&byte| byte == b'/').filter(|part| !part.is_empty() && *part != b".").map(<[u8]>::to_vec)
}

impl Walk {
    fn new(workspace: &[u8], path: &[u8], last: Last, make: bool) -> Result<Walk, Failure> {
        let root = openat(rustix::fs::CWD, workspace, DIRECTORY, Mode::empty())?;
        let workspace: Vec<Vec<u8>> = components(workspace).collect();
        let mut rest: VecDeque<Vec<u8>> = components(path).collect();
        for part in &workspace {
            if rest.pop_front().as_ref() != Some(part) {
                return Err(Failure::invalid("the path is not beneath the workspace"));
            }
        }
        if rest.len() > MAX_DEPTH + 1 {
            // Before the first directory is made; what links add is counted on the way.
            return Err(too_deep());
        }
        Ok(Walk { root, stack: Vec::new(), rest, workspace, links: 0, last, make })
    }

    fn here(&self) -> BorrowedFd<'_> {
        self.stack.last().unwrap_or(&self.root).as_fd()
    }

    fn run(mut self) -> Result<Target, Failure> {
        let mut surprises = 0;
        while let Some(name) = self.rest.pop_front() {
            let settled = if name == b".." {
                self.leave()?
            } else if self.rest.is_empty() {
                self.settle(&name)?
            } else {
                self.enter(&name)?
            };
            if settled == Settled::Target {
                let parent = self.stack.pop().unwrap_or(self.root);
                return Ok(Target { parent, name });
            }
            self.go_on(settled, name, &mut surprises)?;
        }
        Err(Failure::invalid("the path names a directory"))
    }

    /// Go all the way, also into the last name.
    fn run_into(mut self) -> Result<OwnedFd, Failure> {
        let mut surprises = 0;
        while let Some(name) = self.rest.pop_front() {
            let settled = if name == b".." { self.leave()? } else { self.enter(&name)? };
            self.go_on(settled, name, &mut surprises)?;
        }
        Ok(self.stack.pop().unwrap_or(self.root))
    }

    fn go_on(&mut self, settled: Settled, name: Vec<u8>, surprises: &mut usize) -> Result<(), Failure> {
        if settled == Settled::Passed {
            *surprises = 0;
        } else if settled == Settled::Again {
            *surprises += 1;
            if *surprises > MAX_SURPRISES {
                return Err(Failure::invalid("the path changes all the time"));
            }
            self.rest.push_front(name);
        }
        Ok(())
    }

    fn leave(&mut self) -> Result<Settled, Failure> {
        match self.stack.pop() {
            Some(_) => Ok(Settled::Passed),
            None => Err(Failure::invalid("the path leaves the workspace")),
        }
    }

    /// Go into a directory, or follow a link.
    fn enter(&mut self, name: &[u8]) -> Result<Settled, Failure> {
        match openat(self.here(), name, DIRECTORY, Mode::empty()) {
            Ok(directory) => {
                if self.stack.len() >= MAX_DEPTH {
                    return Err(too_deep());
                }
                self.stack.push(directory);
                Ok(Settled::Passed)
            }
            Err(Errno::NOENT) if self.make => match mkdirat(self.here(), name, Mode::from_raw_mode(0o755)) {
                // Somebody else may make it at the same moment.
                Ok(()) | Err(Errno::EXIST) => Ok(Settled::Again),
                Err(errno) => Err(errno.into()),
            },
            Err(Errno::NOTDIR | Errno::LOOP) => self.follow(name, Errno::NOTDIR),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Look at the last name.
    fn settle(&mut self, name: &[u8]) -> Result<Settled, Failure> {
        if self.last == Last::Name {
            return Ok(Settled::Target);
        }
        match statat(self.here(), name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::Symlink => self.follow(name, Errno::INVAL),
                FileType::Directory if self.last == Last::File => {
                    Err(Failure::invalid("the path names a directory"))
                }
                _ => Ok(Settled::Target),
            },
            Err(Errno::NOENT) if self.last == Last::File => Ok(Settled::Target),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Put a link's target in front of what remains. `otherwise` says what it means when it is no link.
    fn follow(&mut self, name: &[u8], otherwise: Errno) -> Result<Settled, Failure> {
        let target = match readlinkat(self.here(), name, Vec::new()) {
            Ok(target) => target.into_bytes(),
            Err(Errno::INVAL) if otherwise == Errno::NOTDIR => {
                // Either a file stands where a directory has to be, or the link has just become a directory.
                return match statat(self.here(), name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_file() => Err(Errno::NOTDIR.into()),
                    _ => Ok(Settled::Again),
                };
            }
            Err(Errno::INVAL | Errno::NOENT) => return Ok(Settled::Again),
            Err(errno) => return Err(errno.into()),
        };
        self.links += 1;
        if self.links > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        let names_directory = target.ends_with(b"/") || target.ends_with(b"/.") || target.ends_with(b"/..");
        if self.rest.is_empty() && names_directory && self.last == Last::File {
            return Err(Failure::invalid("the path names a directory"));
        }
        let mut parts: VecDeque<Vec<u8>> = components(&target).collect();
        if target.starts_with(b"/") {
            for part in &self.workspace {
                if parts.pop_front().as_ref() != Some(part) {
                    return Err(Failure::invalid("a link on the path leads out of the workspace"));
                }
            }
            self.stack.clear();
        }
        parts.append(&mut self.rest);
        self.rest = parts;
        Ok(Settled::Passed)
    }
}

#[derive(PartialEq, Eq)]
enum Settled {
    Target,
    Passed,
    /// The name is not what it was a moment ago.
    Again,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::Code;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// A workspace in a directory of its own, with a neighbour that must stay as it is.
    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Place {
            let place = std::env::temp_dir().join(format!("asb-resolve-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&place);
            fs::create_dir_all(place.join("w")).unwrap();
            fs::create_dir_all(place.join("outside")).unwrap();
            Place(place)
        }

        fn root(&self) -> String {
            self.0.join("w").to_str().unwrap().to_string()
        }

        fn put(&self, path: &str) -> Result<(), Failure> {
            let root = self.root();
            let target = target(root.as_bytes(), format!("{root}{path}").as_bytes())?;
            let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::EXCL;
            openat(&target.parent, &target.name[..], flags, Mode::RWXU)?;
            Ok(())
        }

        fn refused(&self, path: &str) {
            assert_eq!(self.put(path).unwrap_err().code, Code::InvalidRequest, "{path}");
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn ordinary_paths_and_missing_parents() {
        let place = Place::new("ordinary");
        place.put("/a").unwrap();
        place.put("/x/y/./z//b").unwrap();
        place.put("/x/y/../c").unwrap();
        assert!(place.0.join("w/x/y/z/b").exists() && place.0.join("w/x/c").exists());
        let mode = fs::metadata(place.0.join("w/x/y")).unwrap();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o755);
        for path in
            ["", "/", "/.", "/x", "/x/", "/new/", "/x/..", "/../outside/a", "/x/../../outside/a", "/a/b"]
        {
            place.refused(path);
        }
        let root = place.root();
        assert!(target(root.as_bytes(), b"/etc/passwd").is_err());
        assert!(target(root.as_bytes(), format!("{root}x/a").as_bytes()).is_err());
    }

    #[test]
    fn parents_are_made_down_to_the_last_depth_or_not_at_all() {
        let place = Place::new("deep");
        let below = |name: &str, depth: usize| format!("/{}file", format!("{name}/").repeat(depth));
        place.put(&below("a", MAX_SURPRISES + 1)).unwrap();
        place.put(&below("b", MAX_DEPTH)).unwrap();
        place.refused(&below("c", MAX_DEPTH + 1));
        assert!(!place.0.join("w/c").exists());
    }

    #[test]
    fn links_are_followed_inside_and_nowhere_else() {
        let place = Place::new("links");
        let root = place.root();
        let w = place.0.join("w");
        fs::create_dir(w.join("d")).unwrap();
        symlink("d", w.join("relative")).unwrap();
        symlink(format!("{root}/d"), w.join("absolute")).unwrap();
        symlink("d/new", w.join("dangling")).unwrap();
        symlink("missing/deep/file", w.join("dangling-deep")).unwrap();
        symlink("/etc", w.join("etc")).unwrap();
        symlink("../outside", w.join("up")).unwrap();
        symlink(format!("{root}/../outside"), w.join("around")).unwrap();
        symlink("/proc/self/root", w.join("magic")).unwrap();
        symlink("loop", w.join("loop")).unwrap();
        symlink("d/", w.join("slash")).unwrap();
        place.put("/relative/1").unwrap();
        place.put("/absolute/2").unwrap();
        place.put("/dangling").unwrap();
        place.put("/dangling-deep").unwrap();
        for file in ["d/1", "d/2", "d/new", "missing/deep/file"] {
            assert!(w.join(file).exists(), "{file}");
        }
        for path in [
            "/etc/x",
            "/up/x",
            "/around/x",
            "/magic/tmp/x",
            "/loop",
            "/loop/x",
            "/relative",
            "/slash",
            "/etc",
        ] {
            place.refused(path);
        }
        assert_eq!(fs::read_dir(place.0.join("outside")).unwrap().count(), 0);
    }

    #[test]
    fn a_racing_renamer_gains_nothing() {
        let place = Place::new("race");
        let w = place.0.join("w");
        fs::create_dir_all(w.join("d/sub")).unwrap();
        symlink("../outside", w.join("evil")).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // Exchange the directory and the link, and move the inner directory outside and back.
                    let (d, evil) = (w.join("d"), w.join("evil"));
                    let _ = rustix::fs::renameat_with(
                        rustix::fs::CWD,
                        &d,
                        rustix::fs::CWD,
                        &evil,
                        rustix::fs::RenameFlags::EXCHANGE,
                    );
                    let _ = fs::rename(w.join("d/sub"), place.0.join("outside/sub"));
                    let _ = fs::rename(place.0.join("outside/sub"), w.join("d/sub"));
                }
            });
            for n in 0..3_000 {
                let _ = place.put(&format!("/d/{n}"));
                let _ = place.put(&format!("/d/sub/../up-{n}"));
                let _ = place.put(&format!("/d/sub/../../top-{n}"));
            }
            stop.store(true, Ordering::Relaxed);
        });
        let strangers: Vec<_> =
            fs::read_dir(place.0.join("outside")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(strangers.iter().all(|name| name == "sub"), "{strangers:?}");
        assert!(fs::read_dir(&place.0).unwrap().count() == 2, "nothing beside the workspace");
    }
}
