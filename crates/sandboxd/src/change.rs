//! Directories and names: make, move, remove, change the mode.
//!
//! All of it runs as the sandbox user and beneath the workspace (`resolve.rs`). The removal of a tree goes by
//! descriptor: it opens directories below the ones it holds and never a link, so whatever is exchanged meanwhile,
//! it removes names of directories that it reached from the workspace. It keeps at most [`MAX_OPEN`] of them open
//! and goes back to the others through `..`, provided that they are still the same.

use crate::conn::{Fate, Stream};
use crate::daemon::Daemon;
use crate::errors::{Code, Failure};
use crate::fsops::{Answer, entry_map, kind_of};
use crate::lookup;
use crate::pack::MapWriter;
use crate::resolve::{self, Target};
use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, RawDir, RenameFlags, Stat, chmodat, fchmod, fstat, linkat, mkdirat, openat,
    renameat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Directories that one removal has open at once.
const MAX_OPEN: usize = 64;
/// The deepest tree that is removed: what its levels need stays below a MiB or so.
const MAX_DEPTH: usize = 16 << 10;
/// How often a tree may turn out to be another than a moment ago.
const MAX_SURPRISES: usize = 1_000;
/// What one job removes before others have their turn.
const TURN: u64 = 1_000;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn in_workspace(target: &Target, path: &[u8]) -> Result<Vec<u8>, Failure> {
    Ok(entry_map(path, &statat(&target.parent, &target.name[..], AtFlags::SYMLINK_NOFOLLOW)?))
}

/// A name that can be moved or removed.
fn named(workspace: &[u8], path: &[u8]) -> Result<Target, Failure> {
    resolve::name(workspace, path, false)?
        .ok_or_else(|| Failure::invalid("the path is the workspace itself, or ends in `..`"))
}

pub async fn mkdir(daemon: &Daemon, path: Vec<u8>, mode: u32, parents: bool) -> Answer {
    let workspace = daemon.config.workspace.clone();
    daemon.files.run(move || make(&workspace, &path, Mode::from_raw_mode(mode), parents).map(Some)).await
}

fn make(workspace: &[u8], path: &[u8], mode: Mode, parents: bool) -> Result<Vec<u8>, Failure> {
    let Some(target) = resolve::name(workspace, path, parents)? else {
        return existing(workspace, path, parents);
    };
    match mkdirat(&target.parent, &target.name[..], Mode::RWXU) {
        Ok(()) => {
            // The mode asked for, whatever the umask says.
            let made = lookup::directory(&target.parent, &target.name, DIRECTORY)?;
            fchmod(&made, mode)?;
            Ok(entry_map(path, &fstat(&made)?))
        }
        Err(Errno::EXIST) => existing(workspace, path, parents),
        Err(errno) => Err(errno.into()),
    }
}

fn existing(workspace: &[u8], path: &[u8], fine: bool) -> Result<Vec<u8>, Failure> {
    match resolve::directory(workspace, path, false) {
        Ok(directory) if fine => Ok(entry_map(path, &fstat(&directory)?)),
        Ok(_) => Err(Failure::new(Code::Conflict, "the directory exists")),
        Err(failure) if failure.code == Code::NotFound && fine => {
            Err(Failure::new(Code::Conflict, "a link that leads nowhere has the name"))
        }
        Err(failure) if failure == Errno::NOTDIR.into() => {
            Err(Failure::new(Code::Conflict, "something else has the name"))
        }
        Err(failure) => Err(failure),
    }
}

pub async fn rename(daemon: &Daemon, from: Vec<u8>, to: Vec<u8>, replace: bool) -> Answer {
    let workspace = daemon.config.workspace.clone();
    daemon.files.run(move || move_name(&workspace, &from, &to, replace).map(Some)).await
}

fn move_name(workspace: &[u8], from: &[u8], to: &[u8], replace: bool) -> Result<Vec<u8>, Failure> {
    let (source, target) = (named(workspace, from)?, named(workspace, to)?);
    let (old, new) = (&source.name[..], &target.name[..]);
    let result = if replace {
        renameat(&source.parent, old, &target.parent, new)
    } else {
        match renameat_with(&source.parent, old, &target.parent, new, RenameFlags::NOREPLACE) {
            Err(Errno::INVAL) => rename_where_free(source.parent.as_fd(), old, target.parent.as_fd(), new),
            result => result,
        }
    };
    match result {
        Ok(()) => in_workspace(&target, to),
        Err(Errno::INVAL) => Err(Failure::invalid("a directory cannot be moved into itself")),
        Err(Errno::XDEV) => Err(Failure::invalid("the two names are on different file systems")),
        Err(errno) => Err(errno.into()),
    }
}

/// The same on a file system that cannot promise it (gVisor's). What is no directory gets the second name, which fails
/// when that is taken, and loses the first. A directory cannot have two: what takes its name between the look and the
/// renaming is another directory that is empty, or makes it fail.
fn rename_where_free(from: BorrowedFd<'_>, old: &[u8], to: BorrowedFd<'_>, new: &[u8]) -> Result<(), Errno> {
    match linkat(from, old, to, new, AtFlags::empty()) {
        Ok(()) => return unlinkat(from, old, AtFlags::empty()),
        Err(Errno::PERM) => {}
        Err(errno) => return Err(errno),
    }
    match statat(to, new, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Err(Errno::EXIST),
        Err(Errno::NOENT) => renameat(from, old, to, new),
        Err(errno) => Err(errno),
    }
}

pub async fn chmod(daemon: &Daemon, path: Vec<u8>, mode: u32) -> Answer {
    let workspace = daemon.config.workspace.clone();
    let mode = Mode::from_raw_mode(mode);
    daemon
        .files
        .run(move || {
            let Some(target) = resolve::thing(&workspace, &path)? else {
                chmodat(CWD, &workspace[..], mode, AtFlags::empty())?;
                return Ok(Some(entry_map(&path, &statat(CWD, &workspace[..], AtFlags::empty())?)));
            };
            // Should a command have put a link here by now, the user's own file gets the mode.
            chmodat(&target.parent, &target.name[..], mode, AtFlags::empty())?;
            in_workspace(&target, &path).map(Some)
        })
        .await
}

pub async fn remove(daemon: &Daemon, stream: &Stream, path: Vec<u8>, recursive: bool) -> Answer {
    let workspace = daemon.config.workspace.clone();
    let begin = move || Removal::begin(&workspace, &path, recursive);
    let mut removal = daemon.files.run(begin).await?;
    while !removal.levels.is_empty() {
        if stream.fate() != Fate::Open {
            return Ok(None);
        }
        removal = daemon.files.run(move || removal.turn()).await?;
    }
    Ok(Some(MapWriter::new(1).uint("removed", removal.removed).done()))
}

/// A directory on the way down.
struct Level {
    fd: Option<OwnedFd>,
    identity: (u64, u64),
    name: Box<[u8]>,
    /// Its mode was widened once, as its owner may.
    widened: bool,
}

/// The removal of a tree between two turns.
struct Removal {
    target: Target,
    levels: Vec<Level>,
    removed: u64,
    surprises: usize,
}

enum Step {
    Removed,
    /// Somebody was faster.
    Gone,
    /// A directory with something in it.
    Full,
}

enum Look {
    Empty,
    /// Something was removed, or is to be looked at again.
    Some,
    Full(Vec<u8>),
}

impl Removal {
    /// Remove what is no full directory at once; there is nothing more to do when there are no levels.
    fn begin(workspace: &[u8], path: &[u8], recursive: bool) -> Result<Removal, Failure> {
        let target = named(workspace, path)?;
        let mut removal = Removal { target, levels: Vec::new(), removed: 0, surprises: 0 };
        let name = removal.target.name.clone();
        // Whatever is found must be there: nothing is not a success.
        statat(&removal.target.parent, &name[..], AtFlags::SYMLINK_NOFOLLOW)?;
        match take(&removal.target.parent, &name)? {
            Step::Removed => removal.removed = 1,
            Step::Gone => return Err(Errno::NOENT.into()),
            Step::Full if recursive => removal.enter(&name)?,
            Step::Full => return Err(Failure::new(Code::Conflict, "the directory is not empty")),
        }
        Ok(removal)
    }

    fn surprise(&mut self) -> Result<(), Failure> {
        self.surprises += 1;
        if self.surprises > MAX_SURPRISES {
            return Err(Failure::new(Code::Conflict, "the tree changes all the time"));
        }
        Ok(())
    }

    /// Go into a directory below where we stand. What is none any more is left to the next look.
    fn enter(&mut self, name: &[u8]) -> Result<(), Failure> {
        if self.levels.len() >= MAX_DEPTH {
            return Err(Failure::invalid(format!("the tree is deeper than {MAX_DEPTH} directories")));
        }
        let above = match self.levels.last() {
            None => Some(&self.target.parent),
            Some(level) => level.fd.as_ref(),
        };
        let above = above.ok_or(Errno::NOENT)?;
        let opened = match lookup::directory(above, name, DIRECTORY) {
            Err(Errno::ACCESS) => {
                // Its owner may not read it at the moment. Should it be a link by now, the user's own file gets the mode.
                chmodat(above, name, Mode::RWXU, AtFlags::empty())?;
                lookup::directory(above, name, DIRECTORY)
            }
            result => result,
        };
        let fd = match opened {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                return match self.levels.is_empty() {
                    true => Err(Failure::new(Code::Conflict, "the name changes all the time")),
                    false => self.surprise(),
                };
            }
            Err(errno) => return Err(errno.into()),
        };
        let stat = fstat(&fd)?;
        self.levels.push(Level {
            fd: Some(fd),
            identity: identity(&stat),
            name: name.into(),
            widened: false,
        });
        if let Some(old) = self.levels.len().checked_sub(MAX_OPEN + 1) {
            self.levels[old].fd = None;
        }
        Ok(())
    }

    /// Remove until the turn is over or nothing is left.
    fn turn(mut self) -> Result<Removal, Failure> {
        let end = self.removed + TURN;
        while self.removed < end && !self.levels.is_empty() {
            match self.look(end) {
                Ok(Look::Full(name)) => self.enter(&name)?,
                Ok(Look::Some) => {}
                Ok(Look::Empty) => self.leave()?,
                Err(Errno::ACCESS) => self.widen()?,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(self)
    }

    fn widen(&mut self) -> Result<(), Failure> {
        match self.levels.last_mut() {
            Some(Level { fd: Some(fd), widened, .. }) if !*widened => {
                *widened = true;
                Ok(fchmod(fd, Mode::RWXU)?)
            }
            _ => Err(Errno::ACCESS.into()),
        }
    }

    /// Remove names of the deepest directory from its start, until one is a full directory.
    fn look(&mut self, end: u64) -> Result<Look, Errno> {
        let Some(Level { fd: Some(fd), .. }) = self.levels.last() else {
            return Err(Errno::NOENT);
        };
        rustix::fs::seek(fd, rustix::fs::SeekFrom::Start(0))?;
        let mut buffer = [MaybeUninit::uninit(); 8 << 10];
        let mut reader = RawDir::new(fd, &mut buffer);
        let mut empty = true;
        while let Some(item) = reader.next() {
            let item = match item {
                Ok(item) => item,
                Err(Errno::INTR) => continue,
                // The directory itself was removed.
                Err(Errno::NOENT) => break,
                Err(errno) => return Err(errno),
            };
            let name = item.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            empty = false;
            match take(fd, name)? {
                Step::Removed => self.removed += 1,
                Step::Gone => {}
                Step::Full => return Ok(Look::Full(name.to_vec())),
            }
            if self.removed >= end {
                break;
            }
        }
        Ok(if empty { Look::Empty } else { Look::Some })
    }

    /// Go back to the directory above and remove the name that was come by.
    fn leave(&mut self) -> Result<(), Failure> {
        let Some(child) = self.levels.pop() else {
            return Ok(());
        };
        if let Some(above) = self.levels.last_mut()
            && above.fd.is_none()
        {
            let child = child.fd.as_ref().ok_or(Errno::NOENT)?;
            let fd = openat(child, "..", DIRECTORY, Mode::empty())?;
            if identity(&fstat(&fd)?) != above.identity {
                return Err(Failure::new(Code::Conflict, "a directory was moved away while it was removed"));
            }
            above.fd = Some(fd);
        }
        let above = match self.levels.last() {
            None => &self.target.parent,
            Some(level) => level.fd.as_ref().ok_or(Errno::NOENT)?,
        };
        match take(above, &child.name)? {
            Step::Removed => self.removed += 1,
            Step::Gone => {}
            // Somebody put something into it, or something else there.
            Step::Full => {
                self.surprise()?;
                self.enter(&child.name)?;
            }
        }
        Ok(())
    }
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

/// Remove one name, if it is no directory with something in it.
fn take(directory: &OwnedFd, name: &[u8]) -> Result<Step, Errno> {
    match unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) => return Ok(Step::Removed),
        Err(Errno::NOENT) => return Ok(Step::Gone),
        Err(Errno::ISDIR) => {}
        // For a directory other systems say this.
        Err(Errno::PERM)
            if statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|s| kind_of(&s).is_dir()) => {}
        Err(errno) => return Err(errno),
    }
    match unlinkat(directory, name, AtFlags::REMOVEDIR) {
        Ok(()) => Ok(Step::Removed),
        Err(Errno::NOENT) => Ok(Step::Gone),
        // A directory that has become something else is removed at the next look.
        Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => Ok(Step::Full),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_name_that_is_taken_stays_without_the_kernels_promise_too() {
        let place = std::env::temp_dir().join(format!("asb-change-{}", std::process::id()));
        let _ = fs::remove_dir_all(&place);
        for name in ["d", "e", "full/x"] {
            fs::create_dir_all(place.join(name)).unwrap();
        }
        for name in ["f", "g"] {
            fs::write(place.join(name), name).unwrap();
        }
        let at = rustix::fs::open(&place, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let rename =
            |old: &str, new: &str| rename_where_free(at.as_fd(), old.as_bytes(), at.as_fd(), new.as_bytes());
        for (old, new, expected) in [
            ("f", "g", Err(Errno::EXIST)),
            ("f", "d", Err(Errno::EXIST)),
            ("d", "f", Err(Errno::EXIST)),
            ("d", "e", Err(Errno::EXIST)),
            ("none", "h", Err(Errno::NOENT)),
            ("d", "d/in", Err(Errno::INVAL)),
            ("f", "h", Ok(())),
            ("d", "i", Ok(())),
        ] {
            assert_eq!(rename(old, new), expected, "{old} {new}");
        }
        let mut left: Vec<_> =
            fs::read_dir(&place).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        assert_eq!(left, ["e", "full", "g", "h", "i"]);
        assert_eq!(fs::read_to_string(place.join("g")).unwrap(), "g");
        fs::remove_dir_all(&place).unwrap();
    }
}
