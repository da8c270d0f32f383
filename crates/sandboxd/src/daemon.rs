//! What all connections share: the identity, the threads, the supervisors.

use crate::absence::Absence;
use crate::children;
use crate::config::Config;
use crate::conn::Conn;
use crate::exec::{Objects, Pool};
use crate::machine::Machine;
use crate::machine::group::{self, Slot};
use crate::memory::Kills;
use crate::transport::Transport;
use crate::uploads::Replacing;
use crate::workers::{self, Workers};
use rustix::net::SocketAddrAny;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::sleep;

/// Connections that have not finished their hello. The oldest goes first.
const MAX_STRANGERS: usize = 16;
/// Connections that have.
const MAX_ADMITTED: usize = 64;
const FILE_THREADS: usize = 4;
const ARCHIVE_THREADS: usize = 2;
/// How long strays are hunted after a supervisor has died.
const STRAYS_TIME: Duration = Duration::from_secs(5);
/// One read of a pipe. A frame carries one byte less than its payload.
pub const SCRATCH: usize = 65_535;

pub struct Daemon {
    pub config: Config,
    /// The limit of open files that commands get, as the daemon was started with it.
    pub open_files: libc::rlimit,
    pub null: OwnedFd,
    pub files: Workers,
    pub archives: Workers,
    pub started: Instant,
    /// For reading pipes; nobody holds it over an await.
    pub scratch: RefCell<Vec<u8>>,
    pub objects: Objects,
    pub kills: Kills,
    pub replacing: Arc<Replacing>,
    /// Where the daemon listens, if it is a socket.
    pub address: Option<SocketAddrAny>,
    /// The daemon is a machine's first process.
    pub machine: Option<Rc<Machine>>,
    /// Watches that are going on.
    pub watches: Cell<usize>,
    /// The daemon is to end.
    pub shutdown: Notify,
    /// The host's sockets are to be closed until the daemon is told to listen again.
    pub parting: Notify,
    pub absence: Absence,
    /// The daemon made its socket itself, so it can make it again.
    pub can_part: bool,
    /// What proves a client: that of the configuration, until a restored daemon is given another.
    pub key: Cell<[u8; 32]>,
    /// Supervisors that wait for a command.
    pub pool: Pool,
    /// Those that have one, by their process ids, with its group.
    supervisors: RefCell<HashMap<i32, Option<Slot>>>,
    hunting: Cell<bool>,
    strangers: RefCell<VecDeque<Weak<Conn>>>,
    admitted: RefCell<Vec<Weak<Conn>>>,
}

impl Daemon {
    /// Start the threads and get hold of everything that must not fail later.
    pub fn new(
        config: Config,
        open_files: libc::rlimit,
        null: OwnedFd,
        address: Option<SocketAddrAny>,
        can_part: bool,
        machine: Option<Rc<Machine>>,
    ) -> io::Result<Rc<Daemon>> {
        let (uid, gid) = (config.uid, config.gid);
        Ok(Rc::new(Daemon {
            files: Workers::start("files", FILE_THREADS, move || workers::become_user(uid, gid))?,
            archives: Workers::start("archives", ARCHIVE_THREADS, || Ok(()))?,
            replacing: Arc::default(),
            kills: Kills::new(match machine {
                Some(_) => Some(group::EVENTS.to_vec()),
                None => config.memory_events.clone(),
            }),
            key: Cell::new(config.key),
            config,
            open_files,
            null,
            started: Instant::now(),
            scratch: RefCell::new(vec![0; SCRATCH]),
            objects: Objects::default(),
            address,
            machine,
            watches: Cell::new(0),
            shutdown: Notify::new(),
            parting: Notify::new(),
            absence: Absence::default(),
            can_part,
            pool: Pool::default(),
            supervisors: RefCell::default(),
            hunting: Cell::new(false),
            strangers: RefCell::default(),
            admitted: RefCell::default(),
        }))
    }

    /// Take connections for ever.
    pub async fn accept(self: &Rc<Daemon>, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((socket, _)) => self.meet(socket),
                // Out of descriptors or memory: a connection that ends gives some back.
                Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    }

    /// Serve a connection, beside all others.
    pub fn meet(self: &Rc<Daemon>, socket: UnixStream) {
        let mut nonce = [0u8; 32];
        if fill_random(&mut nonce).is_err() {
            return;
        }
        let conn = Conn::new(self.key.get(), nonce);
        self.know(&conn);
        let daemon = self.clone();
        spawn_local(async move { conn.serve(&daemon, Transport::Socket(socket)).await });
    }

    /// Count a connection that has yet to prove the key. The oldest of too many ends.
    pub fn know(&self, conn: &Rc<Conn>) {
        let mut strangers = self.strangers.borrow_mut();
        strangers.retain(|other| other.strong_count() > 0);
        if strangers.len() >= MAX_STRANGERS
            && let Some(oldest) = strangers.pop_front().and_then(|oldest| oldest.upgrade())
        {
            oldest.leave("too_many", "too many connections without a hello");
        }
        strangers.push_back(Rc::downgrade(conn));
    }

    /// Count a connection that has proved the key; `false` when there are too many.
    pub fn admit(&self, conn: &Rc<Conn>) -> bool {
        let same = |other: &Weak<Conn>| std::ptr::eq(other.as_ptr(), Rc::as_ptr(conn));
        self.strangers.borrow_mut().retain(|other| !same(other));
        let mut admitted = self.admitted.borrow_mut();
        admitted.retain(|other| other.strong_count() > 0);
        if admitted.len() >= MAX_ADMITTED {
            return false;
        }
        admitted.push(Rc::downgrade(conn));
        true
    }

    /// Close every connection, and tell those that proved the key why.
    pub fn say_goodbye(&self, code: &'static str, message: &'static str) {
        for conn in self.admitted.borrow().iter().filter_map(Weak::upgrade) {
            conn.leave(code, message);
        }
        for conn in self.strangers.borrow().iter().filter_map(Weak::upgrade) {
            conn.leave(code, message);
        }
    }

    pub fn supervisor_started(&self, pid: i32, slot: Option<Slot>) {
        self.supervisors.borrow_mut().insert(pid, slot);
    }

    /// A command is over with all that it left, and its supervisor may have another.
    pub fn supervisor_idle(&self, pid: i32, control: Rc<AsyncFd<OwnedFd>>) {
        if let Some(slot) = self.supervisors.borrow_mut().remove(&pid) {
            if let (Some(machine), Some(slot)) = (&self.machine, slot) {
                machine.group.give(slot);
            }
            self.pool.give(control, pid);
        }
    }

    /// How many processes the commands of a machine are.
    pub fn command_processes(&self) -> rustix::io::Result<u64> {
        self.supervisors.borrow().values().flatten().map(Slot::processes).sum()
    }

    /// Commands that are running or have left something running.
    pub fn execs(&self) -> usize {
        self.supervisors.borrow().len()
    }

    /// Reap every child that has ended: supervisors, and as PID 1 whatever else was left to us.
    pub fn reap(self: &Rc<Daemon>) {
        while let Ok(Some((pid, status))) = waitpid(None, WaitOptions::NOHANG) {
            self.pool.forget(pid);
            let supervisor = self.supervisors.borrow_mut().remove(&pid.as_raw_nonzero().get());
            let Some(slot) = supervisor else { continue };
            let died = status.exit_status().is_none();
            if let (Some(machine), Some(slot)) = (&self.machine, slot) {
                if died { machine.group.give_up(slot) } else { machine.group.give(slot) }
            }
            if died {
                self.hunt_strays();
            }
        }
    }

    /// A supervisor was killed (by the kernel, when memory ran out), so its tree has become ours. Whatever is a
    /// child of the daemon and no supervisor is such an orphan: end them all, and what they leave in turn.
    fn hunt_strays(self: &Rc<Daemon>) {
        if self.hunting.replace(true) {
            return;
        }
        let daemon = self.clone();
        spawn_local(async move {
            let end = Instant::now() + STRAYS_TIME;
            while Instant::now() < end {
                let mut found = false;
                children::for_each(|pid| {
                    if !daemon.supervisors.borrow().contains_key(&pid)
                        && let Some(pid) = Pid::from_raw(pid)
                        && !daemon.pool.has(pid)
                    {
                        found = true;
                        let _ = kill_process(pid, Signal::KILL);
                    }
                });
                daemon.reap();
                if !found {
                    break;
                }
                sleep(Duration::from_millis(1)).await;
            }
            daemon.hunting.set(false);
        });
    }
}

/// Random bytes of the kernel.
pub fn fill_random(bytes: &mut [u8]) -> rustix::io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(())
}
