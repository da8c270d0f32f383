//! From the kernel's first process in an initramfs to a sandbox's root with everything mounted.
//!
//! The initramfs holds this program as `/init` and the kernel's modules below `/modules`, named in load order by
//! `/modules/order`. Drives are known by their serial: `root` is the image, read-only; `workspace` an ext4, of which the
//! sandbox gets one directory; `config` what [`super::identity`] reads; `layers` an EROFS that the workspace is mounted
//! over, where the identity says that there are layers, and nothing else. A monitor that gives no serials says on the kernel's
//! command line which drive is which, and whether there is a port or a vsock; the kernel hands on what it does not
//! know as this program's environment. What only the daemon needs (the config drive, the
//! port, the files under `/etc` that change with the machine) is opened here and has no name that a command could reach:
//! it stays behind in the initramfs when the root is switched. A step that fails ends the machine with its reason on the
//! console; nothing is served from half a sandbox.

use super::group::Group;
use super::identity::Identity;
use super::vsock;
use rustix::fs::{
    CWD, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags, chown, makedev, mknodat, symlink,
};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_move, mount_remount};
use rustix::process::{Resource, Rlimit, chdir, chroot, setrlimit};
use std::ffi::{CStr, CString};
use std::fs::{File, OpenOptions, create_dir_all, read_dir, read_to_string, remove_file, write};
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// What other backends' commands have.
const NOFILE: u64 = 20_000;
/// Drives are there once their driver is; the machine may be a slow one.
const DRIVES_TIME: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(2);
const MIB: u64 = 1 << 20;
/// The most that the kernel gives of one attribute, or of all names of a file's.
const XATTR_BYTES: usize = 64 << 10;
const MAX_SHM: u64 = 64 * MIB;
const PORT_NAME: &str = "sandboxd";
/// Words of the kernel's command line. `vsock` listens there; anything else means the port.
const CHANNEL_WORD: &str = "sandboxd_channel";
/// The names of `/dev/vda`, `/dev/vdb` and so on, with commas between.
const DRIVES_WORD: &str = "sandboxd_drives";
const NEW: &str = "/newroot";
const ASIDE: &str = "/aside";
/// Where the daemon writes control groups.
const GROUPS: &str = "/groups";
/// Where layers below a workspace are mounted, in the initramfs.
const LOWER: &str = "/lower";
/// As an overlay of the host's has them (`backends/linux/overlay.py`).
const OVERLAY_OPTIONS: &str = "redirect_dir=on,index=on,metacopy=off,xino=on";
/// The kernel's ioctl that drops what it has cached of a drive (include/uapi/linux/fs.h).
const BLKFLSBUF: libc::c_ulong = 0x1261;
/// The same as in a container.
const MASKED: [&str; 22] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/cmdline",
    "/proc/diskstats",
    "/proc/fs",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/key-users",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/locks",
    "/proc/partitions",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/block",
    "/sys/class/block",
    "/sys/dev/block",
    "/sys/devices/virtual/block",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];
const READ_ONLY: [&str; 4] = ["/proc/bus", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
/// What the machine's files under /etc are in the initramfs.
const FILES: [&str; 3] = ["hostname", "hosts", "machine-id"];

const QUIET: MountFlags = MountFlags::from_bits_retain(
    MountFlags::NOSUID.bits() | MountFlags::NODEV.bits() | MountFlags::NOEXEC.bits(),
);
const DATA: MountFlags = MountFlags::from_bits_retain(MountFlags::NOSUID.bits() | MountFlags::NODEV.bits());

/// What leads to the host: a port, or a socket that listens.
pub enum Channel {
    Port(OwnedFd),
    Vsock(OwnedFd),
}

/// What the daemon keeps of the boot.
pub struct Booted {
    pub identity: Identity,
    pub config_drive: OwnedFd,
    pub layers: Layers,
    pub channel: Channel,
    pub hostname: File,
    pub hosts: File,
    pub machine_id: File,
    pub group: Group,
}

/// Give the workspace to the sandbox user.
pub fn own_workspace(path: &str, uid: u32, gid: u32) -> Result<(), String> {
    chown(path, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
        .map_err(|errno| format!("cannot give {path} to its user: {errno}"))
}

/// What a workspace over layers is made of, once the machine knows that it has some: ways into the initramfs.
pub struct Layers {
    before: OwnedFd,
    drive: OwnedFd,
}

impl Layers {
    fn open() -> Result<Layers, String> {
        create_dir_all(LOWER).map_err(|error| format!("{LOWER}: {error}"))?;
        let path = drive("layers")?;
        let open = |path: &str, flags: OFlags| {
            rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
                .map_err(|errno| format!("{path}: {errno}"))
        };
        Ok(Layers {
            before: open("/", OFlags::PATH | OFlags::DIRECTORY)?,
            drive: open(&path, OFlags::RDONLY)?,
        })
    }

    /// Where a path of the initramfs is, now that the root is another one.
    fn place(&self, path: &str) -> String {
        format!("/proc/self/fd/{}{path}", self.before.as_raw_fd())
    }

    /// Show the workspace's drive over the layers, and give the directory that holds the changes.
    ///
    /// Nobody may have been in the workspace yet. The drive of layers was another one while this machine was a template.
    pub fn mount(&self) -> Result<OwnedFd, String> {
        // SAFETY: no argument is read.
        if unsafe { libc::ioctl(self.drive.as_raw_fd(), BLKFLSBUF, 0) } < 0 {
            return Err(format!("the layers' drive: {}", std::io::Error::last_os_error()));
        }
        let (lower, upper, work) = (
            self.place(LOWER),
            self.place(&format!("{ASIDE}/workspace")),
            self.place(&format!("{ASIDE}/work")),
        );
        let device = format!("/proc/self/fd/{}", self.drive.as_raw_fd());
        attach(&device, &lower, "erofs", DATA | MountFlags::RDONLY, c"")?;
        if std::fs::symlink_metadata(&work).is_err() {
            take_after(&lower, &upper)?;
        }
        require_directory(&work)?;
        require_directory(&upper)?;
        rustix::mount::unmount("/workspace", UnmountFlags::empty())
            .map_err(|errno| format!("cannot replace /workspace: {errno}"))?;
        let options = text(&format!("lowerdir={lower},upperdir={upper},workdir={work},{OVERLAY_OPTIONS}"))?;
        attach("overlay", "/workspace", "overlay", DATA | MountFlags::NOATIME, &options)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::open(&upper, flags, Mode::empty())
            .map_err(|errno| format!("the workspace's changes: {errno}"))
    }

    /// Let no more be written to the workspace's drive.
    pub fn close(&self) {
        let _ = mount_remount("/workspace", MountFlags::RDONLY, c"");
        let _ = mount_remount(self.place(ASIDE), MountFlags::RDONLY, c"");
    }
}

/// Give the directory that holds the changes what the layers' own root has, before there are any.
fn take_after(lower: &str, upper: &str) -> Result<(), String> {
    let failed = |what: &str, errno: Errno| format!("the workspace's own {what}: {errno}");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open =
        |path: &str| rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| failed("directory", errno));
    let (lower, upper) = (open(lower)?, open(upper)?);
    let stat = rustix::fs::fstat(&lower).map_err(|errno| failed("state", errno))?;
    let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
    rustix::fs::fchown(&upper, Some(uid), Some(gid)).map_err(|errno| failed("owner", errno))?;
    let mut list = vec![0u8; XATTR_BYTES];
    let size = rustix::fs::flistxattr(&lower, &mut list[..]).map_err(|errno| failed("attributes", errno))?;
    for name in list[..size].split(|&byte| byte == 0).filter(|name| name.starts_with(b"user.")) {
        let mut value = vec![0u8; XATTR_BYTES];
        rustix::fs::fgetxattr(&lower, name, &mut value[..])
            .and_then(|size| rustix::fs::fsetxattr(&upper, name, &value[..size], XattrFlags::empty()))
            .map_err(|errno| failed("attributes", errno))?;
    }
    rustix::fs::fchmod(&upper, Mode::from_raw_mode(stat.st_mode & 0o7777))
        .map_err(|errno| failed("mode", errno))?;
    let time = |tv_sec: i64, tv_nsec: u64| Timespec { tv_sec, tv_nsec: tv_nsec as _ };
    let times = Timestamps {
        last_access: time(stat.st_mtime, stat.st_mtime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    };
    rustix::fs::futimens(&upper, &times).map_err(|errno| failed("time", errno))
}

/// Change the size of `/tmp`. Where more is in it already, it stays as it is until that is gone.
pub fn resize_tmp(bytes: u64) -> Result<(), String> {
    let data = text(&format!("mode=1777,size={bytes}"))?;
    match mount_remount("/tmp", DATA, data) {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(errno) => Err(format!("cannot resize /tmp: {errno}")),
    }
}

/// Do everything, the switch of the root included.
pub fn boot() -> Result<Booted, String> {
    for (place, kind) in [("/dev", "devtmpfs"), ("/sys", "sysfs")] {
        create_dir_all(place).map_err(|error| format!("{place}: {error}"))?;
        attach(kind, place, kind, MountFlags::NOSUID, c"")?;
    }
    load_modules()?;
    let config_drive = open_drive(&drive("config")?)?;
    let identity = Identity::read(&config_drive)?;
    let layers = Layers::open()?;
    let channel = open_channel()?;
    create_dir_all(GROUPS).map_err(|error| format!("{GROUPS}: {error}"))?;
    attach("cgroup2", GROUPS, "cgroup2", QUIET, c"")?;
    let group = Group::make(GROUPS)?;
    mount_root(&identity)?;
    mount_workspace()?;
    mount_devices(&identity)?;
    let files = FILES.map(file);
    let [hostname, hosts, machine_id] = files;
    let booted = Booted {
        config_drive,
        layers,
        channel,
        hostname: hostname?,
        hosts: hosts?,
        machine_id: machine_id?,
        group,
        identity,
    };
    switch_root()?;
    let failed = |what: &str, errno: Errno| format!("{what}: {errno}");
    for resource in [Resource::Nofile, Resource::Nproc] {
        let most = (resource == Resource::Nofile).then_some(NOFILE);
        setrlimit(resource, Rlimit { current: most, maximum: most })
            .map_err(|errno| failed("limits", errno))?;
    }
    set_kernel(&booted.identity)?;
    raise_loopback().map_err(|errno| failed("the loopback interface", errno))?;
    mask()?;
    Ok(booted)
}

fn text(value: &str) -> Result<CString, String> {
    CString::new(value).map_err(|_| format!("{value:?} has a NUL in it"))
}

fn attach(source: &str, place: &str, kind: &str, flags: MountFlags, data: &CStr) -> Result<(), String> {
    mount(source, place, kind, flags, Some(data))
        .map_err(|errno| format!("cannot mount {kind} on {place}: {errno}"))
}

fn load_modules() -> Result<(), String> {
    let order = read_to_string("/modules/order").map_err(|error| format!("/modules/order: {error}"))?;
    for name in order.lines().filter(|name| !name.is_empty()) {
        let path = format!("/modules/{name}");
        let file = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| format!("{path}: {errno}"))?;
        match rustix::system::finit_module(&file, c"", 0) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(format!("cannot load {path}: {errno}")),
        }
        // The initramfs is memory.
        let _ = remove_file(&path);
    }
    Ok(())
}

fn word(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The device node of a drive: by its place in the list of all, where there is one, or else by its serial.
fn drive(serial: &str) -> Result<String, String> {
    let placed = word(DRIVES_WORD).map(|names| placed(&names, serial)).transpose()?;
    let end = Instant::now() + DRIVES_TIME;
    loop {
        if let Some(path) = placed.as_ref().filter(|path| Path::new(path).exists()) {
            return Ok(path.clone());
        }
        for entry in read_dir("/sys/block").into_iter().flatten().flatten().filter(|_| placed.is_none()) {
            let said = read_to_string(entry.path().join("serial")).unwrap_or_default();
            if said.trim_end_matches(['\0', '\n', ' ']) == serial
                && let Ok(name) = entry.file_name().into_string()
            {
                return Ok(format!("/dev/{name}"));
            }
        }
        if Instant::now() > end {
            return Err(match placed {
                Some(path) => format!("there is no drive {path}, which is to be {serial}"),
                None => format!("there is no drive with the serial {serial}"),
            });
        }
        std::thread::sleep(LOOK);
    }
}

/// Where the drive of a name is when all are named in their order.
fn placed(names: &str, name: &str) -> Result<String, String> {
    let place = names.split(',').position(|other| other == name);
    match place.and_then(|place| (b'a'..=b'z').nth(place)) {
        Some(letter) => Ok(format!("/dev/vd{}", letter as char)),
        None => Err(format!("{DRIVES_WORD}={names} does not name {name}")),
    }
}

fn open_drive(path: &str) -> Result<OwnedFd, String> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| format!("{path}: {errno}"))
}

/// Whether the monitor's way to the daemon is a vsock.
pub fn has_vsock() -> bool {
    word(CHANNEL_WORD).as_deref() == Some("vsock")
}

fn open_channel() -> Result<Channel, String> {
    if !has_vsock() {
        return open_port().map(Channel::Port);
    }
    vsock::listen().map(Channel::Vsock).map_err(|error| format!("cannot listen on a vsock: {error}"))
}

fn open_port() -> Result<OwnedFd, String> {
    let end = Instant::now() + DRIVES_TIME;
    loop {
        for entry in read_dir("/sys/class/virtio-ports").into_iter().flatten().flatten() {
            let said = read_to_string(entry.path().join("name")).unwrap_or_default();
            if said.trim_end() == PORT_NAME
                && let Ok(name) = entry.file_name().into_string()
            {
                let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
                return rustix::fs::open(format!("/dev/{name}"), flags, Mode::empty())
                    .map_err(|errno| format!("/dev/{name}: {errno}"));
            }
        }
        if Instant::now() > end {
            return Err(format!("there is no port named {PORT_NAME}"));
        }
        std::thread::sleep(LOOK);
    }
}

fn mount_root(identity: &Identity) -> Result<(), String> {
    create_dir_all(NEW).map_err(|error| format!("{NEW}: {error}"))?;
    let root = drive("root")?;
    attach(&root, NEW, "erofs", DATA | MountFlags::RDONLY, c"")?;
    attach("proc", &format!("{NEW}/proc"), "proc", QUIET, c"hidepid=2,gid=0")?;
    attach("sysfs", &format!("{NEW}/sys"), "sysfs", QUIET | MountFlags::RDONLY, c"")?;
    // What a command sees of control groups is its own, and only to look at.
    let groups = format!("{NEW}/sys/fs/cgroup");
    attach("tmpfs", &format!("{NEW}/sys/fs"), "tmpfs", QUIET, c"mode=0755,size=64k")?;
    create_dir_all(&groups).map_err(|error| format!("{groups}: {error}"))?;
    attach("cgroup2", &groups, "cgroup2", QUIET | MountFlags::RDONLY, c"")?;
    attach("tmpfs", &format!("{NEW}/run"), "tmpfs", QUIET, c"mode=0755,size=1m")?;
    let data = text(&format!("mode=1777,size={}", identity.tmp_bytes))?;
    attach("tmpfs", &format!("{NEW}/tmp"), "tmpfs", DATA, &data)
}

/// The sandbox's part of the drive is a directory, beside what mkfs and the journal put next to it.
fn mount_workspace() -> Result<(), String> {
    create_dir_all(ASIDE).map_err(|error| format!("{ASIDE}: {error}"))?;
    let workspace = drive("workspace")?;
    attach(&workspace, ASIDE, "ext4", DATA | MountFlags::NOATIME, c"noinit_itable")?;
    let directory = format!("{ASIDE}/workspace");
    require_directory(&directory)?;
    mount_bind(&directory, format!("{NEW}/workspace"))
        .map_err(|errno| format!("cannot mount /workspace: {errno}"))
}

/// Make a directory where there is none. The drive may come from a machine whose kernel was taken over: a link in the
/// directory's place would show the initramfs to commands.
fn require_directory(path: &str) -> Result<(), String> {
    match std::fs::create_dir(path) {
        Ok(()) => std::fs::set_permissions(path, PermissionsExt::from_mode(0o755))
            .map_err(|error| format!("{path}: {error}")),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => match std::fs::symlink_metadata(path) {
            Ok(there) if there.is_dir() => Ok(()),
            _ => Err(format!("{path} is no directory: the workspace's drive is damaged")),
        },
        Err(error) => Err(format!("{path}: {error}")),
    }
}

/// The few devices of a container, and none of the machine's.
fn mount_devices(identity: &Identity) -> Result<(), String> {
    let dev = format!("{NEW}/dev");
    attach("tmpfs", &dev, "tmpfs", MountFlags::NOSUID | MountFlags::NOEXEC, c"mode=0755,size=1m")?;
    let failed = |name: &str, errno: Errno| format!("/dev/{name}: {errno}");
    for (name, major, minor) in
        [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)]
    {
        let path = format!("{dev}/{name}");
        let mode = Mode::from_raw_mode(0o666);
        mknodat(CWD, &path, FileType::CharacterDevice, mode, makedev(major, minor))
            .map_err(|errno| failed(name, errno))?;
        rustix::fs::chmod(&path, mode).map_err(|errno| failed(name, errno))?;
    }
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ] {
        symlink(target, format!("{dev}/{name}")).map_err(|errno| failed(name, errno))?;
    }
    for name in ["pts", "shm"] {
        create_dir_all(format!("{dev}/{name}")).map_err(|error| format!("/dev/{name}: {error}"))?;
    }
    let quiet = MountFlags::NOSUID | MountFlags::NOEXEC;
    attach("devpts", &format!("{dev}/pts"), "devpts", quiet, c"newinstance,ptmxmode=0666,mode=0620")?;
    let shm = identity.memory_bytes.map_or(MAX_SHM, |memory| (memory / 2).min(MAX_SHM));
    attach("tmpfs", &format!("{dev}/shm"), "tmpfs", QUIET, &text(&format!("mode=1777,size={shm}"))?)
}

/// A file under /etc whose words change with the machine. An image without it goes without.
fn file(name: &str) -> Result<File, String> {
    let failed = |error: &dyn std::fmt::Display| format!("/etc/{name}: {error}");
    create_dir_all("/etc").map_err(|error| failed(&error))?;
    let own = format!("/etc/{name}");
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .open(&own)
        .map_err(|error| failed(&error))?;
    let shown = format!("{NEW}/etc/{name}");
    // Not through a link, which would lead out of the new root.
    if std::fs::symlink_metadata(&shown).is_ok_and(|seen| seen.is_file()) {
        mount_bind(&own, &shown).map_err(|errno| failed(&errno))?;
        narrow(&shown)?;
    }
    Ok(file)
}

fn switch_root() -> Result<(), String> {
    let _ = remove_file("/init");
    let failed = |errno: Errno| format!("cannot switch the root: {errno}");
    chdir(NEW).map_err(failed)?;
    mount_move(".", "/").map_err(failed)?;
    chroot(".").map_err(failed)?;
    chdir("/").map_err(failed)
}

/// The same as on other backends, and no user namespaces at all.
fn set_kernel(identity: &Identity) -> Result<(), String> {
    let gid = identity.config.gid;
    for (name, value) in [
        ("user/max_user_namespaces", "0".to_string()),
        ("net/ipv4/ip_unprivileged_port_start", "0".to_string()),
        ("net/ipv4/ping_group_range", format!("{gid} {gid}")),
        ("kernel/dmesg_restrict", "1".to_string()),
        // What is too much says the control group, when it is used; not the machine's size, when it is asked for.
        ("vm/overcommit_memory", "1".to_string()),
    ] {
        let path = Path::new("/proc/sys").join(name);
        match write(&path, value) {
            // A kernel that was built without it has nothing to be set.
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(format!("{}: {error}", path.display()));
            }
            _ => {}
        }
    }
    // Inherited by supervisors, which the kernel then spares; a command raises its own.
    write("/proc/self/oom_score_adj", "-1000").map_err(|error| format!("oom_score_adj: {error}"))
}

/// Make a bind mount read-only, whatever it shows.
fn narrow(place: &str) -> Result<(), String> {
    mount_remount(place, MountFlags::BIND | MountFlags::RDONLY | QUIET, c"")
        .map_err(|errno| format!("cannot narrow {place}: {errno}"))
}

/// Hide what tells of the machine and not of the sandbox.
fn mask() -> Result<(), String> {
    let failed = |place: &str, errno: Errno| format!("cannot hide {place}: {errno}");
    for place in MASKED {
        match std::fs::metadata(place) {
            Err(_) => {}
            Ok(there) if there.is_dir() => {
                attach("tmpfs", place, "tmpfs", QUIET | MountFlags::RDONLY, c"mode=0555,size=4k")?;
            }
            Ok(_) => mount_bind("/dev/null", place).map_err(|errno| failed(place, errno))?,
        }
    }
    for place in READ_ONLY {
        if Path::new(place).exists() {
            mount_bind(place, place).map_err(|errno| failed(place, errno))?;
            narrow(place)?;
        }
    }
    mount_remount("/sys/fs", QUIET | MountFlags::RDONLY, c"").map_err(|errno| failed("/sys/fs", errno))
}

fn raise_loopback() -> Result<(), Errno> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    use std::os::fd::AsRawFd;
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: zeros are a valid structure; the kernel reads its name and flags.
    let done = unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request)
    };
    if done < 0 {
        Err(Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drives_are_found_by_their_place() {
        let names = "root,workspace,config";
        assert_eq!(placed(names, "root").unwrap(), "/dev/vda");
        assert_eq!(placed(names, "config").unwrap(), "/dev/vdc");
        assert!(placed(names, "swap").unwrap_err().contains("does not name swap"));
        assert!(placed("", "root").is_err());
        let many = vec!["x"; 26].join(",") + ",root";
        assert!(placed(&many, "root").is_err());
    }

    #[test]
    fn a_link_in_the_workspaces_place_is_refused() {
        let home = std::env::temp_dir().join(format!("sandboxd-boot-{}", std::process::id()));
        create_dir_all(&home).unwrap();
        let path = home.join("workspace");
        let place = path.to_str().unwrap();
        assert_eq!(require_directory(place), Ok(()));
        assert_eq!(require_directory(place), Ok(()));
        std::fs::remove_dir(&path).unwrap();
        symlink("/", &path).unwrap();
        assert!(require_directory(place).unwrap_err().contains("no directory"));
        std::fs::remove_dir_all(&home).unwrap();
    }
}
