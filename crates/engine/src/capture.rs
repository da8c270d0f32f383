//! Capture: read a directory tree into objects.
//!
//! How it goes
//! -----------
//! 1. A scan of all names and metadata (`scan.rs`): totals, and which inodes have several names.
//! 2. What the stat cache remembers is taken from there. The other files go to the workers (`capture/worker.rs`), a
//!    directory at a time; large ones are cut by one worker and hashed by all (`capture/large.rs`), or compared with
//!    the file that they replace (`capture/lower.rs`).
//! 3. Directories become trees, the deepest first (`capture/trees.rs`).
//!
//! Objects go from worker to caller as `sink.rs` says. What is in memory beyond the scan is bounded.
//!
//! What makes it safe on a tree that changes
//! -----------------------------------------
//! * No symlink is followed, no FIFO or device is opened for what it is; everything is opened relative to a directory
//!   that was proved to be the one that the scan saw.
//! * A file has the same inode, size, mtime and ctime before and after it is read, a directory before and after it is
//!   listed. Otherwise it is read again, twice at most; then [`Error::Conflict`] names it.
//! * An inode with several names must be what the scan saw; then so are its names.
//!
//! Known ugliness: before Linux 6.13 a second write within the clock tick of the first leaves the same ctime, so that a
//! file which is written meanwhile can be kept half old, half new. Whoever needs one instant stops the writers first.

mod large;
mod lower;
mod past;
mod remembered;
mod trees;
mod upper;
mod worker;

use crate::attributes::{self, Attributes};
use crate::error::{Error, Result};
use crate::format::{Body, Content, Id, Kind, Link, decode_root, link_id};
use crate::host::{Client, Host, serve};
use crate::open::Place;
use crate::read::Reader;
use crate::scan::{Left, LeftOut, Scan, Type, Visit, changed, failed};
use crate::sink::{Batch, Collector, Outlet, Seen, Storer};
use crate::statcache::{Form, StatCache};
use crossbeam_channel::{Receiver, Sender, select};
use past::{OldFile, Past};
use remembered::{Remembered, recall};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;
use trees::Trees;
use upper::{Mark, Upper};
use worker::{About, Answer, ReadFile, Shared, Task, with_workers};

/// Files and bytes that are given to a worker at a time.
const TASK_FILES: usize = 256;
const TASK_BYTES: u64 = 4 << 20;
const MOST_THREADS: usize = 8;

/// What to capture.
pub struct Request<'a> {
    pub directory: BorrowedFd<'a>,
    /// A directory whose content is that of `base`.
    pub lower: Option<BorrowedFd<'a>>,
    /// The directory of the packs.
    pub packs: OwnedFd,
    /// The root entry of the state before.
    pub base: Option<&'a [u8]>,
    /// The stat cache of this directory.
    pub cache: Option<&'a Path>,
    /// Whether `directory` is the upper directory of an overlay whose lower ones show `base`; see `capture/upper.rs`.
    pub overlay: bool,
    /// Whether owners are recorded.
    pub owners: bool,
    /// Workers; 0 is one for each core, at most 8.
    pub threads: usize,
}

#[derive(Debug, Default)]
pub struct Report {
    pub files: u64,
    /// Without the root.
    pub directories: u64,
    pub symlinks: u64,
    pub fifos: u64,
    /// Bytes of data, holes not counted, an inode once.
    pub bytes: u64,
    pub read: u64,
    pub left_out: LeftOut,
}

#[derive(Debug)]
pub struct Captured {
    /// The root entry, encoded as in a commit.
    pub root: Vec<u8>,
    pub report: Report,
}

/// What was found out about the nodes of a scan.
#[derive(Default)]
struct Found {
    /// By node; of files alone.
    contents: Vec<Option<Content>>,
    attrs: HashMap<u32, Id>,
    /// Bytes of data where they are fewer than the size.
    data: HashMap<u32, u64>,
    links: HashMap<u32, Link>,
    /// Names of an inode behind its first, with that.
    followers: HashMap<u32, u32>,
    /// Files that are no longer as the scan saw them.
    renewed: HashMap<u32, About>,
    unreadable: HashSet<u32>,
    /// Files whose attributes were left out.
    partial: HashSet<u32>,
}

impl Found {
    fn about(&self, scan: &Scan, node: u32) -> About {
        let seen = &scan.nodes[node as usize];
        let about = About { state: seen.state, mode: seen.mode, uid: seen.uid, gid: seen.gid };
        self.renewed.get(&node).copied().unwrap_or(about)
    }
}

/// Read the tree in `request.directory` and give its objects to `host`.
pub fn capture(host: &mut dyn Host, request: &Request<'_>) -> Result<Captured> {
    let started = SystemTime::now();
    let seen = Seen::default();
    let (captured, remembered) = serve(host, |client| work(&client, request, &seen))?;
    if let Some(path) = request.cache {
        // Without it the next capture only takes longer.
        let _ = remembered.save(path, started);
    }
    Ok(captured)
}

/// Keeps the attributes of directories while they are open.
struct DirectoryAttributes<'c, 'a> {
    collector: &'c mut Collector<'a, Storer<'a>>,
    attrs: HashMap<u32, Id>,
    /// Those of an upper directory, where it is one.
    marks: Option<HashMap<u32, Mark>>,
}

impl Visit for DirectoryAttributes<'_, '_> {
    fn directory(&mut self, node: u32, directory: BorrowedFd<'_>) -> Result<bool, Error> {
        self.attrs.remove(&node);
        if let Some(marks) = &mut self.marks {
            match upper::mark(directory)? {
                Some(mark) => drop(marks.insert(node, mark)),
                None => drop(marks.remove(&node)),
            }
        }
        match attributes::read(directory) {
            Ok(Attributes::None) | Err(Errno::NODATA) => Ok(true),
            Ok(Attributes::Some(canonical)) => {
                self.attrs.insert(node, self.collector.put(Kind::Attrs, &canonical, None)?);
                Ok(true)
            }
            Ok(Attributes::TooLarge) => Ok(false),
            Err(errno) => Err(failed(errno, b"")),
        }
    }

    fn hides(&self) -> bool {
        self.marks.is_some()
    }
}

fn work(client: &Client, request: &Request<'_>, seen: &Seen) -> Result<(Captured, Remembered)> {
    let packs = request.packs.try_clone().map_err(|error| Error::io(error, b""))?;
    let reader = Reader::new(packs, client);
    let place = Place::new(request.directory);
    let mut collector = Collector::new(seen, Storer::new(client.clone(), &reader));
    let base = base(request, client)?;
    if request.overlay {
        upper::sees_marks(request.directory)?;
        if base.is_none() {
            return Err(Error::Refused("the store does not have the state below".to_owned()));
        }
        let owned = |bytes| decode_root(bytes).map(|root| root.owner.is_some());
        if request.base.map(owned).transpose()? != Some(request.owners) {
            return Err(Error::Refused("owners are recorded in only one of the states".to_owned()));
        }
    }
    let marks = request.overlay.then(HashMap::new);
    let mut visit = DirectoryAttributes { collector: &mut collector, attrs: HashMap::new(), marks };
    let mut scan = Scan::new(&place, &mut visit, &|| client.check())?;
    let (attrs, marks) = (visit.attrs, visit.marks);
    collector.hand_on(true)?;
    collector.outlet.finish()?;

    let mut found = Found { contents: vec![None; scan.nodes.len()], attrs, ..Found::default() };
    let upper = match (marks, base) {
        (Some(marks), Some(base)) => Some(Upper::new(&reader, &scan, &marks, base, &|| client.check())?),
        _ => None,
    };
    link(&mut scan, &mut found)?;
    let cache = request.cache.and_then(|path| StatCache::load(path, scan.device));
    let trusted = cache.as_ref().is_some_and(|cache| Some(cache.root) == base);
    if let Some(cache) = &cache {
        recall(cache, trusted, &scan, &mut found, client)?;
    }

    let (held, linked) = (AtomicUsize::new(0), found.links.keys().copied().collect());
    // What shows through a directory that was moved is elsewhere in the lower one.
    let lower = request.lower.filter(|_| !request.overlay).map(Place::new);
    let shared = Shared {
        scan: &scan,
        place: &place,
        lower: lower.as_ref(),
        reader: &reader,
        client,
        seen,
        linked: &linked,
        held: &held,
    };
    let mut past = match &upper {
        Some(upper) => Past::over(&reader, &upper.lower),
        None => Past::new(&reader, base),
    };
    let mut left = Vec::new();
    let threads = match request.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS),
        threads => threads.min(MOST_THREADS),
    };
    let known = |dir: u32| {
        let state = scan.nodes[scan.dirs[dir as usize].node as usize].state;
        match cache.as_ref().filter(|_| trusted)?.find(state.inode)?.form {
            Form::Directory(tree) => Some(tree),
            Form::File(_) => None,
        }
    };
    let (read, (root, roots)) = with_workers(threads, &shared, |tasks, answers| {
        read_files(&shared, &mut past, &mut found, &mut left, tasks, answers)?;
        let mut collector = Collector::new(seen, Delegate { tasks });
        let mut trees = Trees::new(&scan, &found, &mut past, upper.as_ref(), request, &mut collector);
        trees.make(&known, &|| client.check())?;
        let done = (trees.root()?, std::mem::take(&mut trees.roots));
        collector.hand_on(true)?;
        Ok(done)
    })?;
    let mut report = report(&scan, &found, read);
    report.left_out = std::mem::take(&mut scan.left_out);
    for (node, why) in left {
        report.left_out.add(scan.path(node), why);
    }
    Ok((Captured { root, report }, Remembered { scan, found, roots }))
}

/// The root tree of the state before, if the store has it: then it has everything below.
fn base(request: &Request<'_>, client: &Client) -> Result<Option<Id>> {
    let Some(bytes) = request.base else { return Ok(None) };
    let Body::Directory { tree } = decode_root(bytes)?.body else { return Ok(None) };
    let held = client.ask(vec![tree])?.recv().map_err(|_| Error::Stopped)?;
    Ok(held.first().is_some_and(|held| *held).then_some(tree))
}

/// Find the inodes with several names.
fn link(scan: &mut Scan, found: &mut Found) -> Result<()> {
    for group in scan.links() {
        let first = group[0];
        let state = |node: u32| scan.nodes[node as usize].state;
        if let Some(other) = group.iter().find(|node| state(**node) != state(first)) {
            return Err(changed(&scan.path(*other)));
        }
        let link = link_id(&scan.path(first));
        found.links.extend(group.iter().map(|node| (*node, link)));
        found.followers.extend(group[1..].iter().map(|node| (*node, first)));
    }
    Ok(())
}

/// Gives batches to the workers.
struct Delegate<'t> {
    tasks: &'t Sender<Task>,
}

impl Outlet for Delegate<'_> {
    fn take(&mut self, batch: Batch) -> Result<Batch> {
        self.tasks.send(Task::Batch(batch)).map_err(|_| Error::Stopped)?;
        Ok(Batch::default())
    }
}

/// Have all files read of which nothing is known.
fn read_files(
    shared: &Shared<'_>,
    past: &mut Past<'_>,
    found: &mut Found,
    left: &mut Vec<(u32, Left)>,
    tasks: &Sender<Task>,
    answers: &Receiver<Answer>,
) -> Result<()> {
    let (scan, done) = (shared.scan, &shared.client.done);
    let files = (0u32..).zip(&scan.nodes).filter(|(_, node)| node.kind == Type::File);
    let wanted = |found: &Found, node: u32| {
        scan.nodes[node as usize].kind == Type::File
            && found.contents[node as usize].is_none()
            && !found.followers.contains_key(&node)
    };
    for (number, node) in files {
        let size = if found.followers.contains_key(&number) { 0 } else { node.state.size };
        done.files_in_all.fetch_add(1, Ordering::Relaxed);
        done.bytes_in_all.fetch_add(size, Ordering::Relaxed);
        if !wanted(found, number) {
            done.files.fetch_add(1, Ordering::Relaxed);
            done.bytes.fetch_add(size, Ordering::Relaxed);
        }
    }
    let mut outstanding = 0usize;
    for (number, dir) in (0u32..).zip(&scan.dirs) {
        let nodes: Vec<u32> =
            (dir.first..dir.first + dir.count).filter(|node| wanted(found, *node)).collect();
        if nodes.is_empty() {
            continue;
        }
        let old = past.files(scan, number, &nodes)?;
        let mut rest = nodes.into_iter().zip(old).peekable();
        while rest.peek().is_some() {
            let mut bytes = 0;
            let fits = |(node, _): &(u32, Option<OldFile>)| {
                let first = bytes == 0;
                bytes += 1 + scan.nodes[*node as usize].state.size;
                first || bytes <= TASK_BYTES
            };
            let mut fits = fits;
            let mut files = Vec::new();
            while files.len() < TASK_FILES
                && let Some(file) = rest.next_if(&mut fits)
            {
                files.push(file);
            }
            let mut task = Some(Task::Files { dir: number, files });
            outstanding += 1;
            while let Some(next) = task.take() {
                select! {
                    recv(answers) -> answer => {
                        outstanding -= 1;
                        note(scan, found, left, answer.map_err(|_| Error::Stopped)??);
                        task = Some(next);
                    }
                    send(tasks, next) -> sent => sent.map_err(|_| Error::Stopped)?,
                }
            }
        }
    }
    while outstanding > 0 {
        note(scan, found, left, answers.recv().map_err(|_| Error::Stopped)??);
        outstanding -= 1;
    }
    for (node, first) in &found.followers {
        found.contents[*node as usize] = found.contents[*first as usize];
        if let Some(id) = found.attrs.get(first).copied() {
            found.attrs.insert(*node, id);
        }
        if found.unreadable.contains(first) {
            found.unreadable.insert(*node);
            left.push((*node, Left::Unreadable));
        }
        if found.partial.contains(first) {
            left.push((*node, Left::Attributes));
        }
    }
    Ok(())
}

/// Take down what a worker found.
fn note(scan: &Scan, found: &mut Found, left: &mut Vec<(u32, Left)>, outcomes: Vec<worker::Outcome>) {
    for worker::Outcome { node, file } in outcomes {
        let Some(ReadFile { content, data, attrs, whole, about }) = file else {
            found.unreadable.insert(node);
            left.push((node, Left::Unreadable));
            continue;
        };
        found.contents[node as usize] = Some(content);
        found.attrs.extend(attrs.map(|id| (node, id)));
        if data != about.state.size {
            found.data.insert(node, data);
        }
        if about != found.about(scan, node) {
            found.renewed.insert(node, about);
        }
        if !whole {
            found.partial.insert(node);
            left.push((node, Left::Attributes));
        }
    }
}

fn report(scan: &Scan, found: &Found, read: u64) -> Report {
    let mut report = Report { read, ..Report::default() };
    for (number, node) in (0u32..).zip(&scan.nodes).skip(1) {
        if found.unreadable.contains(&number) || !scan.kept(number) {
            continue;
        }
        match node.kind {
            Type::File => {
                report.files += 1;
                if !found.followers.contains_key(&number) {
                    let size = found.about(scan, number).state.size;
                    report.bytes += found.data.get(&number).copied().unwrap_or(size);
                }
            }
            Type::Directory => report.directories += 1,
            Type::Symlink => report.symlinks += 1,
            Type::Fifo => report.fifos += 1,
        }
    }
    report
}

#[cfg(test)]
mod tests;
