//! The daemon as the first process of a microVM (`docs/design/microvm.md`).
//!
//! ```text
//! boot ──everything mounted, "sandboxd ready" on the console──► waiting ──beginning, keyed drive──► serving
//!                                                                  ▲ │                               │   ▲ │
//!                                            beginning, no key ────┘ └ a template is saved here      │   └─┘ beginning:
//!                                                                                                    │       the drive is
//! serving ──sys.shutdown──► goodbye ──► commands killed, disk synced and read-only ──► power off     │       read again
//! ```
//!
//! The daemon learns at a beginning, and only then, that its machine is another one: the drive names another instance.
//! Then, before the beginning is answered, it feeds the kernel fresh entropy, takes the new key, names and limits. The
//! clock comes with the client's proof of that key.

pub mod beginning;
mod boot;
pub mod group;
mod identity;
pub mod port;
mod vsock;

use crate::conn::Conn;
use crate::daemon::{Daemon, fill_random};
use crate::standing;
use crate::transport::Transport;
use boot::{Booted, Channel, Layers};
use group::Group;
use identity::Identity;
use port::Port;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, mount_remount};
use rustix::system::{RebootCommand, reboot, sethostname};
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};
use std::cell::{Cell, OnceCell};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{LocalSet, spawn_local};
use vsock::Listener;

/// A clock that is off by less is left alone: steps are felt by what runs.
const CLOCK_SLACK_NS: u64 = 50_000_000;
/// The kernel's ioctls of `/dev/random` (include/uapi/linux/random.h).
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
/// After it the machine is powered off whether everything is on its disk or not.
const FAREWELL: Duration = Duration::from_millis(50);

/// What a daemon that is a machine's first process has more than another.
pub struct Machine {
    pub group: Group,
    config_drive: OwnedFd,
    layers: Layers,
    /// What the workspace's changes are in, where it is mounted over layers; unset before that is known.
    changes: OnceCell<Option<OwnedFd>>,
    hostname: File,
    hosts: File,
    machine_id: File,
    instance: Cell<[u8; 16]>,
    user: OnceCell<(u32, u32)>,
}

/// Whether this process was started by a kernel from an initramfs.
pub fn is_init() -> bool {
    std::process::id() == 1 && std::env::args_os().next().is_some_and(|name| name == "/init")
}

/// Boot, serve until told to end, and power the machine off.
pub fn run() -> ! {
    if let Err(message) = boot::boot().and_then(serve) {
        crate::complain(&message);
    }
    power_off()
}

fn serve(booted: Booted) -> Result<(), String> {
    crate::harden()?;
    let open_files = crate::raise_open_files();
    let standing = standing::first();
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| format!("cannot open /dev/null: {errno}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start: {error}"))?;
    let Booted { identity, config_drive, layers, channel, hostname, hosts, machine_id, group } = booted;
    let machine = Rc::new(Machine {
        group,
        config_drive,
        layers,
        changes: OnceCell::new(),
        hostname,
        hosts,
        machine_id,
        instance: Cell::new([0; 16]),
        user: OnceCell::new(),
    });
    machine.renew(&identity)?;
    drop(identity);
    LocalSet::new().block_on(&runtime, async {
        let broken = |error: io::Error| format!("the way to the host: {error}");
        let door = match channel {
            Channel::Port(port) => Door::Port(Rc::new(Port::new(port).map_err(broken)?)),
            Channel::Vsock(socket) => Door::Vsock(Listener::new(socket).map_err(broken)?),
        };
        crate::say_ready();
        let (visitor, identity) = machine.next(&door).await.map_err(broken)?;
        let (uid, gid) = (identity.config.uid, identity.config.gid);
        boot::own_workspace("/workspace", uid, gid)?;
        let _ = machine.user.set((uid, gid));
        let daemon = Daemon::new(identity.config, open_files, null, None, false, Some(machine.clone()))
            .map_err(|error| format!("cannot start: {error}"))?;
        standing.into_iter().for_each(|one| daemon.pool.expect(Some(one)));
        let mut children =
            signal(SignalKind::child()).map_err(|error| format!("cannot watch signals: {error}"))?;
        let reaper = daemon.clone();
        spawn_local(async move {
            loop {
                reaper.reap();
                children.recv().await;
            }
        });
        let ended = tokio::select! {
            ended = carry(&daemon, &machine, &door, visitor) => ended.map_err(broken),
            () = daemon.shutdown.notified() => Ok(()),
        };
        daemon.say_goodbye("shutdown", "the daemon was told to end");
        tokio::time::sleep(FAREWELL).await;
        let _ = machine.group.kill();
        rustix::fs::sync();
        machine.layers.close();
        ended
    })
}

/// Where clients come in.
enum Door {
    Port(Rc<Port>),
    Vsock(Listener),
}

/// Who has come: by the port the one after the other, each with a nonce to be echoed; by a vsock as many as want.
enum Visitor {
    Beginning(Rc<Port>, [u8; 16]),
    Socket(UnixStream),
}

/// Serve whoever comes.
async fn carry(daemon: &Rc<Daemon>, machine: &Machine, door: &Door, first: Visitor) -> io::Result<()> {
    let mut visitor = first;
    loop {
        match visitor {
            Visitor::Socket(socket) => daemon.meet(socket),
            Visitor::Beginning(port, nonce) => {
                if port.echo(nonce).await.is_ok() {
                    let mut own = [0; 32];
                    fill_random(&mut own)?;
                    let conn = Conn::new(daemon.key.get(), own);
                    daemon.know(&conn);
                    let daemon = daemon.clone();
                    // A task of its own, which goes on to say goodbye.
                    let _ =
                        spawn_local(async move { conn.serve(&daemon, Transport::Port(port)).await }).await;
                }
            }
        }
        let (next, identity) = machine.next(door).await?;
        daemon.key.set(identity.config.key);
        visitor = next;
    }
}

impl Machine {
    /// The directory that holds what differs from the layers below the workspace, where it has some.
    pub fn changes(&self) -> Option<&OwnedFd> {
        self.changes.get()?.as_ref()
    }

    /// Wait for somebody to come while the drive has a key, and read it then.
    async fn next(&self, door: &Door) -> io::Result<(Visitor, Identity)> {
        loop {
            let visitor = match door {
                Door::Port(port) => Visitor::Beginning(port.clone(), port.begin().await?),
                Door::Vsock(listener) => Visitor::Socket(listener.accept().await?),
            };
            if let Some(identity) = self.known() {
                return Ok((visitor, identity));
            }
        }
    }

    /// What the drive says now, and everything done that comes with it; `None`, and words on the console, where this
    /// machine is nobody's or cannot be what it says.
    ///
    /// It reads 8 KiB of the host's page cache and waits for them: nobody is being served by the port meanwhile.
    fn known(&self) -> Option<Identity> {
        let renewed = Identity::read(&self.config_drive).and_then(|identity| {
            if identity.instance != self.instance.get() {
                self.renew(&identity)?;
            }
            Ok(identity)
        });
        match renewed {
            Ok(identity) => identity.keyed.then_some(identity),
            Err(message) => {
                crate::complain(&message);
                None
            }
        }
    }

    /// Become the machine that an identity describes.
    fn renew(&self, identity: &Identity) -> Result<(), String> {
        let config = &identity.config;
        if self.user.get().is_some_and(|&user| user != (config.uid, config.gid)) {
            return Err("the config drive names another user than the one whose commands run".to_string());
        }
        add_entropy(&identity.entropy).map_err(|error| format!("cannot add entropy: {error}"))?;
        let name = &identity.hostname;
        sethostname(name.as_bytes()).map_err(|errno| format!("cannot set the hostname: {errno}"))?;
        let hosts =
            format!("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 {name}\n");
        for (file, words) in [
            (&self.hostname, format!("{name}\n")),
            (&self.hosts, hosts),
            (&self.machine_id, format!("{}\n", identity.machine_id)),
        ] {
            file.set_len(0)
                .and_then(|()| file.write_all_at(words.as_bytes(), 0))
                .map_err(|error| format!("cannot write the machine's names: {error}"))?;
        }
        self.group.limit(identity.memory_bytes, config.pids_limit)?;
        boot::resize_tmp(identity.tmp_bytes)?;
        if identity.keyed && self.changes.get().is_none() {
            let changes = if identity.layered { Some(self.layers.mount()?) } else { None };
            let _ = self.changes.set(changes);
        }
        self.instance.set(identity.instance);
        Ok(())
    }
}

/// A client has proved the key. Set a machine's clock by its, and let go on what was frozen for a checkpoint: whoever froze
/// it is gone, or was a client of the machine that this one was saved from.
pub fn arrived(daemon: &Daemon, clock_ns: Option<u64>) {
    let Some(machine) = &daemon.machine else { return };
    if let Some(Err(errno)) = clock_ns.map(set_clock) {
        crate::complain(&format!("cannot set the clock: {errno}"));
    }
    if daemon.absence.is_on() {
        match machine.group.thaw() {
            Ok(()) => daemon.absence.end(tokio::time::Instant::now()),
            Err(errno) => crate::complain(&format!("cannot let the commands go on: {errno}")),
        }
    }
}

/// Set the clock to what a client says that it is, in nanoseconds since the epoch.
pub fn set_clock(now_ns: u64) -> rustix::io::Result<()> {
    let own = clock_gettime(ClockId::Realtime);
    let own_ns = i128::from(own.tv_sec) * 1_000_000_000 + i128::from(own.tv_nsec);
    if (own_ns - i128::from(now_ns)).unsigned_abs() <= u128::from(CLOCK_SLACK_NS) {
        return Ok(());
    }
    let (seconds, nanoseconds) = (now_ns / 1_000_000_000, now_ns % 1_000_000_000);
    clock_settime(ClockId::Realtime, Timespec { tv_sec: seconds as i64, tv_nsec: nanoseconds as _ })
}

/// Mix in bytes that the host made for this machine alone, count them, and have every generator begin anew.
fn add_entropy(bytes: &[u8; 64]) -> io::Result<()> {
    #[repr(C)]
    struct Pool {
        entropy_bits: libc::c_int,
        size: libc::c_int,
        bytes: [u8; 64],
    }
    let random = rustix::fs::open("/dev/random", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let pool = Pool { entropy_bits: 512, size: 64, bytes: *bytes };
    // SAFETY: the kernel reads the structure, whose size it takes from its second field.
    if unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, &raw const pool) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: no argument is read.
    if unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn power_off() -> ! {
    rustix::fs::sync();
    let _ = mount_remount("/workspace", MountFlags::RDONLY, c"");
    // Firecracker has no power to switch off: there a kernel would halt for ever, and a restart is the end.
    let ending = if boot::has_vsock() { RebootCommand::Restart } else { RebootCommand::PowerOff };
    let _ = reboot(ending);
    let _ = reboot(RebootCommand::Restart);
    loop {
        std::thread::park();
    }
}
