//! Single files: look at them, read them, write them.
//!
//! All of it runs on threads that are the sandbox user, so the kernel decides what is allowed. Reads follow
//! links inside the sandbox's own root. No open can hang: what is no regular file is refused before it is opened
//! for reading, and the open itself does not block should the file be exchanged in between.

use crate::conn::{Gone, Input, Stream};
use crate::daemon::Daemon;
use crate::errors::{Code, Failure};
use crate::listing::Listing;
use crate::lookup::open;
use crate::pack::MapWriter;
use crate::resolve;
use crate::uploads::{Number, Replacing, is_unfinished};
use crate::wire::{HEADER, Kind, MAX_PAYLOAD, header};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RawDir, RenameFlags, Stat, fstat, fstatfs, openat, renameat,
    renameat_with, statat,
};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

/// How much of a file one job moves.
const PIECE: usize = 256 << 10;
/// What one DATA frame carries beside its channel.
const FRAME_DATA: usize = MAX_PAYLOAD - 1;
const OPEN_TRIES: usize = 10;

/// File systems whose files are windows into the kernel: proc, sysfs, cgroup, cgroup2, debugfs, tracefs,
/// securityfs, bpf, configfs, pstore, efivarfs, binfmt_misc, selinuxfs.
const KERNEL_FILE_SYSTEMS: [u64; 13] = [
    0x9fa0,
    0x6265_6572,
    0x27_e0eb,
    0x6367_7270,
    0x6462_6720,
    0x7472_6163,
    0x7363_6673,
    0xcafe_4a11,
    0x6265_6570,
    0x6165_676c,
    0xde5e_81e4,
    0x4249_4e4d,
    0xf97c_ff8c,
];

pub type Answer = Result<Option<Vec<u8>>, Failure>;

pub fn kind_of(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

fn entry(name: &[u8], path: &[u8], stat: &Stat) -> Vec<u8> {
    let kind = match kind_of(stat) {
        FileType::RegularFile => "file",
        FileType::Directory => "directory",
        FileType::Symlink => "symlink",
        _ => "other",
    };
    let mtime = stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(stat.st_mtime_nsec as i64);
    MapWriter::new(6)
        .bin("name", name)
        .bin("path", path)
        .str("type", kind)
        .uint("size", stat.st_size as u64)
        .uint("mode", u64::from(stat.st_mode & 0o7777))
        .int("mtime_ns", mtime)
        .done()
}

fn base_name(path: &[u8]) -> &[u8] {
    path.split(|&byte| byte == b'/').rfind(|part| !part.is_empty()).unwrap_or(b"/")
}

pub fn entry_map(path: &[u8], stat: &Stat) -> Vec<u8> {
    MapWriter::new(1).raw("entry", &entry(base_name(path), path, stat)).done()
}

pub async fn stat(daemon: &Daemon, path: Vec<u8>, follow: bool) -> Result<Vec<u8>, Failure> {
    let flags = if follow { OFlags::PATH } else { OFlags::PATH | OFlags::NOFOLLOW };
    daemon
        .files
        .run(move || {
            let file = open(&path, flags)?;
            Ok(entry_map(&path, &fstat(&file)?))
        })
        .await
}

pub async fn list(daemon: &Daemon, stream: &Rc<Stream>, path: Vec<u8>) -> Answer {
    let mut path = path;
    while path.len() > 1 && path.ends_with(b"/") {
        path.pop();
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK;
    let opening = path.clone();
    let mut directory = daemon.files.run(move || open(&opening, flags)).await?;
    let mut count = 0u64;
    loop {
        let at = path.clone();
        let (back, frames, listed, more) = daemon.files.run(move || list_piece(directory, &at)).await?;
        directory = back;
        count += listed;
        for frame in frames {
            if frame.send(stream).await.is_err() {
                return Ok(None);
            }
        }
        if !more {
            return Ok(Some(MapWriter::new(1).uint("count", count).done()));
        }
    }
}

/// Read some entries, in the directory's own order.
fn list_piece(directory: OwnedFd, path: &[u8]) -> Result<(OwnedFd, Vec<Listing>, u64, bool), Failure> {
    // One call of the kernel fills the buffer once, so no entry that it handed out is left behind.
    let mut buffer = [MaybeUninit::uninit(); 8 << 10];
    let mut frames: Vec<Listing> = Vec::new();
    let (mut count, mut more) = (0, true);
    let mut reader = RawDir::new(&directory, &mut buffer);
    while frames.len() < 2 || !reader.is_buffer_empty() {
        let Some(item) = reader.next() else {
            more = false;
            break;
        };
        let item = match item {
            Ok(item) => item,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        };
        let name = item.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        let stat = match statat(&directory, item.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => continue,
            // A directory that may be read but not searched tells names and types.
            Err(Errno::ACCESS) => {
                let mut stat = fstat(&directory)?;
                (stat.st_size, stat.st_mtime, stat.st_mtime_nsec) = (0, 0, 0);
                stat.st_mode = item.file_type().as_raw_mode();
                stat
            }
            Err(errno) => return Err(errno.into()),
        };
        if is_unfinished(name, kind_of(&stat)) {
            continue;
        }
        let separator: &[u8] = if path == b"/" { b"" } else { b"/" };
        let full = [path, separator, name].concat();
        Listing::add(&mut frames, &entry(name, &full, &stat));
        count += 1;
    }
    Ok((directory, frames, count, more))
}

pub struct ReadRequest {
    pub path: Vec<u8>,
    pub offset: u64,
    pub length: Option<u64>,
    pub max_bytes: Option<u64>,
}

pub async fn read(daemon: &Daemon, stream: &Rc<Stream>, request: ReadRequest) -> Answer {
    let mut offset = request.offset;
    let (mut file, mut left) = daemon.files.run(move || open_to_read(&request)).await?;
    let mut sent = 0u64;
    while left > 0 {
        let Ok(room) = stream.wait_room(2).await else {
            return Ok(None);
        };
        // Each frame costs its channel byte.
        let room = room.min(PIECE);
        let wanted = (room - room.div_ceil(MAX_PAYLOAD)).min(usize::try_from(left).unwrap_or(PIECE));
        stream.charge(wanted + wanted.div_ceil(FRAME_DATA));
        let id = stream.id;
        let (back, frames, count) = daemon.files.run(move || read_frames(file, id, offset, wanted)).await?;
        file = back;
        stream.send_frames(frames);
        offset += count as u64;
        sent += count as u64;
        left -= count as u64;
        if count < wanted {
            break;
        }
    }
    Ok(Some(MapWriter::new(1).uint("size", sent).done()))
}

/// Open a regular file and say how many bytes are to be sent.
fn open_to_read(request: &ReadRequest) -> Result<(OwnedFd, u64), Failure> {
    for _ in 0..OPEN_TRIES {
        let seen = open(&request.path, OFlags::PATH)?;
        let stat = fstat(&seen)?;
        if !kind_of(&stat).is_file() {
            return Err(Failure::invalid("not a regular file"));
        }
        if KERNEL_FILE_SYSTEMS.contains(&(fstatfs(&seen)?.f_type as u64)) {
            return Err(Failure::invalid("not a file but a window into the kernel"));
        }
        let file = match open(&request.path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY) {
            Err(Errno::NXIO) => continue,
            result => result?,
        };
        let opened = fstat(&file)?;
        if (stat.st_dev, stat.st_ino) != (opened.st_dev, opened.st_ino) || !kind_of(&opened).is_file() {
            continue;
        }
        let left = (opened.st_size as u64).saturating_sub(request.offset);
        let left = left.min(request.length.unwrap_or(u64::MAX));
        return match request.max_bytes {
            Some(most) if left > most => {
                Err(Failure::new(Code::TooLarge, format!("{left} bytes, above the limit of {most}")))
            }
            _ => Ok((file, left)),
        };
    }
    Err(Failure::invalid("the path changes all the time"))
}

/// Read into finished DATA frames, so that nothing is copied again on its way to the socket.
fn read_frames(
    file: OwnedFd,
    stream: u32,
    mut offset: u64,
    wanted: usize,
) -> Result<(OwnedFd, Vec<u8>, usize), Failure> {
    let mut frames = Vec::with_capacity(wanted + wanted.div_ceil(FRAME_DATA) * (HEADER + 1));
    let mut count = 0;
    while count < wanted {
        let size = (wanted - count).min(FRAME_DATA);
        let start = frames.len();
        frames.extend_from_slice(&header(Kind::Data, stream, size + 1));
        frames.push(1);
        let body = frames.len();
        frames.resize(body + size, 0);
        let mut got = 0;
        while got < size {
            match rustix::io::pread(&file, &mut frames[body + got..], offset) {
                Ok(0) => break,
                Ok(n) => {
                    got += n;
                    offset += n as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        count += got;
        if got < size {
            // The file has become shorter. What was charged for the rest is of no use to anyone.
            frames.truncate(if got == 0 { start } else { body + got });
            if got > 0 {
                frames[start..body - 1].copy_from_slice(&header(Kind::Data, stream, got + 1));
            }
            break;
        }
    }
    Ok((file, frames, count))
}

/// A file on its way to its place. Dropped before it is there, it is removed.
struct Upload {
    target: resolve::Target,
    number: Number,
    replacing: Arc<Replacing>,
    file: OwnedFd,
    placed: bool,
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.placed {
            let _ = rustix::fs::unlinkat(&self.target.parent, self.number.name(), AtFlags::empty());
        }
    }
}

pub async fn write(daemon: &Daemon, stream: &Rc<Stream>, path: Vec<u8>, mode: u32) -> Answer {
    let (workspace, to) = (daemon.config.workspace.clone(), path.clone());
    let replacing = daemon.replacing.clone();
    let mut upload = daemon.files.run(move || Upload::begin(&workspace, &to, replacing)).await?;
    let mut ended = false;
    while !ended {
        let mut parts = Vec::new();
        let mut bytes = 0;
        let mut input = match stream.input().await {
            Ok(input) => Some(input),
            Err(Gone) => {
                // Its removal is file work too.
                daemon.files.post(move || drop(upload));
                return Ok(None);
            }
        };
        while let Some(part) = input {
            match part {
                Input::Data(part) => {
                    bytes += part.len();
                    parts.push(part);
                }
                Input::Eof => ended = true,
            }
            input = if ended || bytes >= PIECE { None } else { stream.take_input() };
        }
        if bytes > 0 {
            upload = daemon
                .files
                .run(move || {
                    for part in parts {
                        write_all(&upload.file, &part)?;
                    }
                    Ok::<_, Failure>(upload)
                })
                .await?;
        }
    }
    daemon.files.run(move || upload.finish(mode).map(|stat| Some(entry_map(&path, &stat)))).await
}

/// Write to the end of a file.
pub fn write_all(file: &OwnedFd, mut bytes: &[u8]) -> Result<(), Failure> {
    while !bytes.is_empty() {
        match rustix::io::write(file, bytes) {
            Ok(count) => bytes = &bytes[count.min(bytes.len())..],
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

impl Upload {
    fn begin(workspace: &[u8], path: &[u8], replacing: Arc<Replacing>) -> Result<Upload, Failure> {
        let target = resolve::target(workspace, path)?;
        let number = Number::fresh()?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&target.parent, number.name(), flags, Mode::RUSR | Mode::WUSR)?;
        Ok(Upload { target, number, replacing, file, placed: false })
    }

    /// The mode comes after the bytes, since a write takes setuid away.
    fn finish(mut self, mode: u32) -> Result<Stat, Failure> {
        rustix::fs::fchmod(&self.file, Mode::from_raw_mode(mode))?;
        rustix::fs::fsync(&self.file)?;
        self.place()?;
        self.placed = true;
        Ok(fstat(&self.file)?)
    }

    fn place(&self) -> rustix::io::Result<()> {
        let (parent, name) = (&self.target.parent, &self.target.name[..]);
        let unfinished = &self.number.name()[..];
        match renameat_with(parent, unfinished, parent, name, RenameFlags::NOREPLACE) {
            // Not every system, and not every file system, knows the flag.
            Err(Errno::EXIST | Errno::INVAL | Errno::NOSYS) => {
                if statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
                    self.replacing.note(self.number);
                }
                renameat(parent, unfinished, parent, name)
            }
            result => result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_last_part() {
        assert_eq!(base_name(b"/a/b"), b"b");
        assert_eq!(base_name(b"/a/b//"), b"b");
        assert_eq!(base_name(b"/"), b"/");
    }
}
