//! One worker: reads files, and stores what others have cut.

use super::large::Segment;
use super::past::OldFile;
use crate::attributes::{self, Attributes};
use crate::error::{Error, Result};
use crate::format::{Content, Id, Kind, SMALL_FILE};
use crate::host::Client;
use crate::open::Place;
use crate::read::Reader;
use crate::scan::{Scan, State, TRIES, changed, failed};
use crate::sink::{Batch, Collector, Outlet, Seen, Storer};
use crossbeam_channel::{Receiver, Sender, bounded, select_biased, unbounded};
use rustix::fs::{FileType, SeekFrom, Stat};
use rustix::io::Errno;
use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What all workers of one capture share.
pub struct Shared<'a> {
    pub scan: &'a Scan,
    pub place: &'a Place<'a>,
    /// A directory whose files are as the state before has them.
    pub lower: Option<&'a Place<'a>>,
    pub reader: &'a Reader<'a>,
    pub client: &'a Client,
    pub seen: &'a Seen,
    /// Files with several names: they must be what the scan saw.
    pub linked: &'a HashSet<u32>,
    /// Extents of old files that are in memory.
    pub held: &'a AtomicUsize,
}

/// Something to do.
pub enum Task {
    /// Read files of one directory.
    Files { dir: u32, files: Vec<(u32, Option<OldFile>)> },
    /// Store objects.
    Batch(Batch),
}

/// A file that was read, or why it was not.
pub struct Outcome {
    pub node: u32,
    pub file: Option<ReadFile>,
}

#[derive(Clone, Copy, Debug)]
pub struct ReadFile {
    pub content: Content,
    /// Bytes of data, holes not counted.
    pub data: u64,
    pub attrs: Option<Id>,
    /// Whether its attributes are kept too; they are not when they are too large.
    pub whole: bool,
    /// What it was before and after it was read.
    pub about: About,
}

/// Metadata of a file that may have changed since the scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    pub state: State,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
}

impl About {
    fn of(stat: &Stat) -> About {
        About {
            state: State::of(stat),
            mode: (stat.st_mode & 0o7777) as u16,
            uid: stat.st_uid,
            gid: stat.st_gid,
        }
    }
}

/// The files of one task, read or left; or what ended the work.
pub type Answer = Result<Vec<Outcome>>;

/// Run `coordinate` beside workers that do its tasks. Returns how many bytes of files they read, and its answer.
pub fn with_workers<R>(
    threads: usize,
    shared: &Shared<'_>,
    coordinate: impl FnOnce(&Sender<Task>, &Receiver<Answer>) -> Result<R>,
) -> Result<(u64, R)> {
    let (tasks, waiting) = bounded::<Task>(4 * threads);
    let (answers, answered) = unbounded::<Answer>();
    let segments = bounded(2 * threads);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                let (waiting, answers, segments) = (waiting.clone(), answers.clone(), segments.clone());
                scope.spawn(move || {
                    let run = || Worker::new(shared, segments).run(&waiting, &answers);
                    let done = catch_unwind(AssertUnwindSafe(run))
                        .unwrap_or_else(|panic| Err(Error::panicked(panic.as_ref())));
                    if done.is_err() {
                        shared.client.stop();
                    }
                    done.map_err(|error| {
                        let _ = answers.send(Err(error));
                        Error::Stopped
                    })
                })
            })
            .collect();
        drop((waiting, answers));
        let coordinated = coordinate(&tasks, &answered);
        if coordinated.is_err() {
            shared.client.stop();
        }
        drop(tasks);
        let read: Vec<_> =
            workers.into_iter().map(|worker| worker.join().unwrap_or(Err(Error::Stopped))).collect();
        // The first that is no consequence of another: of the coordinator, or what a worker said behind its back.
        let told = |error: &Error| !matches!(error, Error::Stopped);
        let done = match coordinated {
            Err(error) if told(&error) => return Err(error),
            coordinated => coordinated,
        };
        if let Some(error) = answered.try_iter().filter_map(Result::err).find(told) {
            return Err(error);
        }
        let read = read.into_iter().sum::<Result<u64>>()?;
        Ok((read, done?))
    })
}

pub struct Worker<'a> {
    pub shared: &'a Shared<'a>,
    pub collector: Collector<'a, Storer<'a>>,
    pub segments: (Sender<Segment<'a>>, Receiver<Segment<'a>>),
    /// Bytes of files that were read, every attempt counted.
    pub read: u64,
    /// Bytes of the file that is being read that count as done.
    told: u64,
}

impl<'a> Worker<'a> {
    pub fn new(shared: &'a Shared<'a>, segments: (Sender<Segment<'a>>, Receiver<Segment<'a>>)) -> Worker<'a> {
        let storer = Storer::new(shared.client.clone(), shared.reader);
        Worker { shared, collector: Collector::new(shared.seen, storer), segments, read: 0, told: 0 }
    }

    /// Work until there are no more tasks; returns how many bytes of files were read.
    pub fn run(mut self, tasks: &Receiver<Task>, answers: &Sender<Answer>) -> Result<u64> {
        let segments = self.segments.1.clone();
        loop {
            self.shared.client.check()?;
            // What was cut holds memory: it goes first.
            select_biased! {
                recv(segments) -> segment => if let Ok(segment) = segment { self.segment(segment)? },
                recv(tasks) -> task => match task {
                    Ok(Task::Files { dir, files }) => {
                        let outcomes = self.files(dir, &files)?;
                        answers.send(Ok(outcomes)).map_err(|_| Error::Stopped)?;
                    }
                    Ok(Task::Batch(batch)) => drop(self.collector.outlet.take(batch)?),
                    Err(_) => break,
                },
            }
        }
        self.collector.hand_on(true)?;
        self.collector.outlet.finish()?;
        Ok(self.read)
    }

    pub fn files(&mut self, dir: u32, files: &[(u32, Option<OldFile>)]) -> Result<Vec<Outcome>> {
        let scan = self.shared.scan;
        let node = scan.dirs[dir as usize].node;
        let path = scan.path(node);
        let opened = match self.shared.place.directory(&path) {
            Ok(opened) => opened,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS | Errno::PERM) => {
                return Err(changed(&path));
            }
            Err(errno) => return Err(failed(errno, &path)),
        };
        let about = rustix::fs::fstat(&opened).map_err(|errno| failed(errno, &path))?;
        if about.st_dev != scan.device || about.st_ino != scan.nodes[node as usize].state.inode {
            return Err(changed(&path));
        }
        let mut outcomes = Vec::with_capacity(files.len());
        for (node, old) in files {
            self.shared.client.check()?;
            self.told = 0;
            let file = self.file(&opened, *node, old.as_ref(), &path)?;
            self.shared.client.done.files.fetch_add(1, Ordering::Relaxed);
            self.tell(scan.nodes[*node as usize].state.size.saturating_sub(self.told));
            outcomes.push(Outcome { node: *node, file });
        }
        Ok(outcomes)
    }

    /// Count bytes of the file that is being read as done.
    pub fn tell(&mut self, bytes: u64) {
        self.told += bytes;
        self.shared.client.done.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Read one file; `None` when this process may not.
    fn file(
        &mut self,
        directory: &OwnedFd,
        node: u32,
        old: Option<&OldFile>,
        above: &[u8],
    ) -> Result<Option<ReadFile>> {
        let scan = self.shared.scan;
        let name = scan.name(node);
        for _ in 0..TRIES {
            let file = match self.shared.place.file(directory, name) {
                Ok(file) => file,
                Err(Errno::ACCESS | Errno::PERM) => return Ok(None),
                Err(errno) if gone(errno) => continue,
                Err(errno) => return Err(failed(errno, &scan.path(node))),
            };
            match self.whole(&file, node, old, above) {
                Ok(Some(read)) => return Ok(Some(read)),
                Ok(None) => {}
                Err(Trouble::System(Errno::ACCESS | Errno::PERM)) => return Ok(None),
                Err(Trouble::System(errno)) if gone(errno) => {}
                Err(Trouble::System(errno)) => return Err(failed(errno, &scan.path(node))),
                Err(Trouble::Other(error)) => return Err(error),
            }
        }
        Err(changed(&scan.path(node)))
    }

    /// Read content and attributes of an open file; `None` when it changes meanwhile.
    fn whole(
        &mut self,
        file: &OwnedFd,
        node: u32,
        old: Option<&OldFile>,
        above: &[u8],
    ) -> Result<Option<ReadFile>, Trouble> {
        let scan = self.shared.scan;
        let before = rustix::fs::fstat(file)?;
        let about = About::of(&before);
        if FileType::from_raw_mode(before.st_mode) != FileType::RegularFile || before.st_dev != scan.device {
            return Ok(None);
        }
        // Its other names were seen with another state, or are others by now.
        if about.state != scan.nodes[node as usize].state
            && (before.st_nlink > 1 || self.shared.linked.contains(&node))
        {
            return Ok(None);
        }
        let size = about.state.size;
        let content = if size == 0 {
            Some((Content::Empty, 0))
        } else if size < SMALL_FILE && hole(file.as_fd(), 0, size)? == size {
            self.small(file, size, old)?.map(|id| (Content::Blob(id), size))
        } else {
            self.large(file.as_fd(), size, old, (above, node))?.map(|(id, data)| (Content::Paged(id), data))
        };
        let Some((content, data)) = content else { return Ok(None) };
        let (attrs, whole) = match attributes::read(file.as_fd())? {
            Attributes::None => (None, true),
            Attributes::Some(canonical) => (Some(self.collector.put(Kind::Attrs, &canonical, None)?), true),
            Attributes::TooLarge => (None, false),
        };
        if About::of(&rustix::fs::fstat(file)?) != about {
            return Ok(None);
        }
        Ok(Some(ReadFile { content, data, attrs, whole, about }))
    }

    fn small(&mut self, file: &OwnedFd, size: u64, old: Option<&OldFile>) -> Result<Option<Id>, Trouble> {
        let arena = self.collector.room();
        let start = arena.len();
        arena.resize(start + size as usize, 0);
        let read = fill(file.as_fd(), &mut arena[start..], 0)?;
        self.read += read as u64;
        if read as u64 != size {
            arena.truncate(start);
            return Ok(None);
        }
        let base = match old {
            Some(old) => old.front(self.shared.reader)?,
            None => None,
        };
        Ok(Some(self.collector.keep(start, base)?))
    }
}

/// Why reading a file ended early.
pub enum Trouble {
    /// The system refused; what that means depends on the name that it was opened by.
    System(Errno),
    Other(Error),
}

impl From<Errno> for Trouble {
    fn from(errno: Errno) -> Trouble {
        Trouble::System(errno)
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Other(error)
    }
}

/// Whether the system says that something is no longer what it was, or is being changed (a lease).
fn gone(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::NOENT
            | Errno::NOTDIR
            | Errno::LOOP
            | Errno::ISDIR
            | Errno::NXIO
            | Errno::NODEV
            | Errno::STALE
            | Errno::NODATA
            | Errno::AGAIN
    )
}

/// Where the data at `offset` ends: at the next hole, or at `size`.
pub fn hole(file: BorrowedFd<'_>, offset: u64, size: u64) -> Result<u64, Errno> {
    match rustix::fs::seek(file, SeekFrom::Hole(offset)) {
        Ok(end) => Ok(end.clamp(offset, size)),
        // A file system without holes.
        Err(Errno::INVAL | Errno::NOTSUP) => Ok(size),
        // Cut off meanwhile: its size tells.
        Err(Errno::NXIO) => Ok(size),
        Err(errno) => Err(errno),
    }
}

/// Where the next data at or behind `offset` begins, or `size`.
pub fn data(file: BorrowedFd<'_>, offset: u64, size: u64) -> Result<u64, Errno> {
    match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Ok(start) => Ok(start.clamp(offset, size)),
        Err(Errno::INVAL | Errno::NOTSUP) => Ok(offset),
        Err(Errno::NXIO) => Ok(size),
        Err(errno) => Err(errno),
    }
}

/// Read until `bytes` are full or the file ends; returns how many were read.
pub fn fill(file: BorrowedFd<'_>, bytes: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pread(file, &mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}
