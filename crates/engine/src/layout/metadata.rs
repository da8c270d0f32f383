//! Attributes, owner, mode and times of what was laid out, in the order that the kernel demands.
//!
//! Attributes come first, since `user.*` may be set only on what its mode lets write; then the owner, since a change
//! of it takes set-id bits away; then the mode, whatever the umask says; times last.

use super::Options;
use crate::error::{Error, Result, shown};
use crate::format::{Entry, Id, Kind, Owner, Time, decode_attrs};
use crate::read::{Location, Reader};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_OMIT, Uid, XattrFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// What the names of one inode share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metadata {
    pub mode: u32,
    pub mtime: Time,
    /// To be applied: `None` also where nobody asked for one.
    pub owner: Option<Owner>,
    pub attrs: Option<Id>,
}

impl Metadata {
    pub fn of(entry: &Entry<'_>, options: Options) -> Metadata {
        let owner = entry.owner.filter(|_| options.owners).or(options.owner);
        Metadata { mode: entry.mode, mtime: entry.mtime, owner, attrs: entry.attrs }
    }
}

fn unfit(what: &str, path: &[u8]) -> Error {
    Error::Unfit(format!("this file system cannot hold {what} of {}", shown(path)))
}

/// Set everything on an open file, directory or FIFO.
pub fn apply(
    reader: &Reader<'_>,
    fd: BorrowedFd<'_>,
    metadata: &Metadata,
    attrs: Option<Location>,
    path: &dyn Fn() -> Vec<u8>,
) -> Result<()> {
    if let Some(id) = &metadata.attrs {
        let bytes = reader.list(id, Kind::Attrs, attrs)?;
        for (name, value) in decode_attrs(&bytes)? {
            // Whatever the reason is: this file system does not take them.
            rustix::fs::fsetxattr(fd, name, value, XattrFlags::empty())
                .map_err(|_| unfit("the extended attributes", &path()))?;
        }
    }
    let refused = |error| Error::refused("set the metadata of", error, &path());
    if let Some(owner) = metadata.owner {
        rustix::fs::fchown(fd, Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)))
            .map_err(refused)?;
    }
    rustix::fs::fchmod(fd, Mode::from_raw_mode(metadata.mode)).map_err(refused)?;
    rustix::fs::futimens(fd, &times(metadata.mtime)).map_err(refused)?;
    if metadata.mode & 0o6000 != 0 || !certain(metadata.mtime) {
        let stat = rustix::fs::fstat(fd).map_err(refused)?;
        if stat.st_mode & 0o7777 != metadata.mode {
            return Err(unfit("the mode", &path()));
        }
        check_time(&stat, metadata.mtime, path)?;
    }
    Ok(())
}

/// Set owner and times of a symlink.
pub fn apply_to_symlink(
    dir: BorrowedFd<'_>,
    name: &[u8],
    metadata: &Metadata,
    path: &dyn Fn() -> Vec<u8>,
) -> Result<()> {
    let refused = |error| Error::refused("set the metadata of", error, &path());
    let flags = AtFlags::SYMLINK_NOFOLLOW;
    if let Some(owner) = metadata.owner {
        let (uid, gid) = (Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)));
        rustix::fs::chownat(dir, name, uid, gid, flags).map_err(refused)?;
    }
    rustix::fs::utimensat(dir, name, &times(metadata.mtime), flags).map_err(refused)?;
    if !certain(metadata.mtime) {
        let stat = rustix::fs::statat(dir, name, flags).map_err(refused)?;
        check_time(&stat, metadata.mtime, path)?;
    }
    Ok(())
}

fn times(mtime: Time) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec { tv_sec: mtime.seconds, tv_nsec: mtime.nanoseconds.into() },
    }
}

/// Whether every file system can hold this time; the kernel cuts others without a word.
fn certain(mtime: Time) -> bool {
    (0..1 << 31).contains(&mtime.seconds)
}

fn check_time(stat: &Stat, mtime: Time, path: &dyn Fn() -> Vec<u8>) -> Result<()> {
    if stat.st_mtime == mtime.seconds { Ok(()) } else { Err(unfit("the time", &path())) }
}

/// Whether the umask may take rights of the owner away from what is made.
pub fn umask_hides_owner() -> bool {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let umask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    umask.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).is_none_or(|umask| umask & 0o700 != 0)
}

/// Change the mode of a name that is no symlink.
pub fn chmod(dir: BorrowedFd<'_>, name: &[u8], mode: u32) -> rustix::io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::openat(dir, name, flags, Mode::empty())?;
    let path = format!("/proc/self/fd/{}", found.as_fd().as_raw_fd());
    rustix::fs::chmod(path, Mode::from_raw_mode(mode))
}
