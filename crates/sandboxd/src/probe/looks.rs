//! What can be read: `/proc`, `/sys`, limits. Nothing is changed, and a file that is not there is a finding too.

use super::{Finding, Verdict};
use std::io::Read;

/// More than any file read here has on an ordinary machine.
const MAX_READ: u64 = 256 * 1024;
/// What the daemon needs of capabilities(7), by bit: see `spec/wire.md` and the launcher.
const NEEDED: [(u32, &str); 7] = [
    (0, "CHOWN"),
    (1, "DAC_OVERRIDE"),
    (3, "FOWNER"),
    (5, "KILL"),
    (6, "SETGID"),
    (7, "SETUID"),
    (8, "SETPCAP"),
];
const SYS_ADMIN: u32 = 21;
/// File systems on which layers, disks and shared volumes can stand.
const USEFUL: [&str; 9] = ["ext4", "xfs", "btrfs", "overlay", "erofs", "squashfs", "fuse", "9p", "virtiofs"];

pub fn platform() -> Vec<(&'static str, String)> {
    let system = read("/etc/os-release")
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="))
        .map(|name| name.trim_matches('"').to_string())
        .unwrap_or_default();
    let memory = field(&read("/proc/meminfo"), "MemTotal:");
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    vec![
        ("kernel", read("/proc/sys/kernel/osrelease").trim().to_string()),
        ("machine", std::env::consts::ARCH.to_string()),
        ("system", system),
        ("virtualization", virtualization()),
        ("cpus", cpus.to_string()),
        ("memory", memory),
    ]
}

pub fn all() -> Vec<Finding> {
    let status = read("/proc/self/status");
    let mounts = read("/proc/self/mountinfo");
    let mut found = vec![
        Finding::new("B2", "file systems of this kernel", Verdict::Look, file_systems()),
        Finding::new("B2", "what is mounted where work could be", Verdict::Look, places(&mounts)),
        executable_here(),
        capabilities(&status),
        user(&status),
        Finding::new(
            "B4",
            "confinement of this process",
            Verdict::Look,
            format!(
                "no new privileges {}, seccomp {}, security module {}",
                field(&status, "NoNewPrivs:"),
                field(&status, "Seccomp:"),
                or_none(&read("/proc/self/attr/current"))
            ),
        ),
        first_process(),
        virtio_ports(),
        hidden_processes(&mounts),
        Finding::new("B11", "control group", Verdict::Look, control_group()),
    ];
    found.extend(limits());
    found.push(Finding::new("B15", "network interfaces", Verdict::Look, interfaces()));
    found
}

fn read(path: &str) -> String {
    let mut data = Vec::new();
    if let Ok(file) = std::fs::File::open(path) {
        let _ = file.take(MAX_READ).read_to_end(&mut data);
    }
    String::from_utf8_lossy(&data).into_owned()
}

fn or_none(text: &str) -> &str {
    let text = text.trim_matches(|char: char| char.is_whitespace() || char == '\0');
    if text.is_empty() { "none" } else { text }
}

/// The value of a line such as `Name:\tvalue`; empty when there is none.
fn field(text: &str, name: &str) -> String {
    text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim().to_string()
}

fn virtualization() -> String {
    let vendor = read("/sys/class/dmi/id/sys_vendor");
    let product = read("/sys/class/dmi/id/product_name");
    let dmi = format!("{} {}", vendor.trim(), product.trim());
    let guest = read("/proc/cpuinfo").split_whitespace().any(|flag| flag == "hypervisor");
    let gvisor =
        read("/proc/version").contains("gVisor") || read("/proc/sys/kernel/osrelease").trim() == "4.4.0";
    match (gvisor, guest) {
        (true, _) => "gVisor (by its kernel's name)".to_string(),
        (_, true) if dmi.trim().is_empty() => "a virtual machine".to_string(),
        (_, true) => format!("a virtual machine ({})", dmi.trim()),
        _ => "none that shows".to_string(),
    }
}

fn file_systems() -> String {
    let known = read("/proc/filesystems");
    let found: Vec<&str> = USEFUL
        .into_iter()
        .filter(|name| known.lines().any(|line| line.split_whitespace().next_back() == Some(name)))
        .collect();
    if found.is_empty() { "none of the useful ones".to_string() } else { found.join(" ") }
}

/// Mount point, type and options of mountinfo's lines (proc(5)).
fn mounted(mounts: &str) -> impl Iterator<Item = (&str, &str, &str, &str)> {
    mounts.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(4);
        let mut right = right.split(' ');
        let (point, options) = (left.next()?, left.next()?);
        Some((point, right.next()?, options, right.nth(1).unwrap_or("")))
    })
}

fn places(mounts: &str) -> String {
    let mut told = Vec::new();
    for place in ["/", "/tmp", "/home", "/workspace", "/var", "/mnt", "/data", "/dev/shm"] {
        if let Some((_, kind, options, _)) = mounted(mounts).filter(|(point, ..)| *point == place).last() {
            let read_only = options.split(',').any(|option| option == "ro");
            told.push(format!("{place} {kind}{}", if read_only { " read-only" } else { "" }));
        }
    }
    if told.is_empty() { "nothing that is known".to_string() } else { told.join(", ") }
}

fn executable_here() -> Finding {
    let place = std::env::current_exe().map_or_else(|_| "unknown".into(), |path| path.display().to_string());
    Finding::new("B3", "an uploaded file runs", Verdict::Yes, format!("this one does, at {place}"))
}

fn capabilities(status: &str) -> Finding {
    let effective = u64::from_str_radix(&field(status, "CapEff:"), 16).unwrap_or(0);
    let missing: Vec<&str> =
        NEEDED.into_iter().filter(|(bit, _)| effective >> bit & 1 == 0).map(|(_, name)| name).collect();
    let more = if effective >> SYS_ADMIN & 1 == 1 { "SYS_ADMIN too" } else { "no SYS_ADMIN" };
    let (verdict, detail) = if missing.is_empty() {
        (Verdict::Yes, format!("all of the daemon's are here, {more}"))
    } else {
        (Verdict::No, format!("missing {}; {more}", missing.join(" ")))
    };
    Finding::new("B4", "capabilities of the daemon", verdict, detail)
}

fn user(status: &str) -> Finding {
    let id = field(status, "Uid:").split_whitespace().nth(1).unwrap_or("?").to_string();
    let map = read("/proc/self/uid_map").split_whitespace().collect::<Vec<_>>().join(" ");
    let verdict = if id == "0" { Verdict::Yes } else { Verdict::No };
    Finding::new("B4", "root inside", verdict, format!("uid {id}, map {}", or_none(&map)))
}

fn first_process() -> Finding {
    let name = read("/proc/1/comm");
    let own = std::process::id();
    let detail = match own {
        1 => "this program is the first process: it reaps orphans".to_string(),
        _ => format!("this is process {own}; the first is {}", or_none(&name)),
    };
    Finding::new("B4", "the first process", Verdict::Look, detail)
}

fn virtio_ports() -> Finding {
    let names: Vec<String> = std::fs::read_dir("/sys/class/virtio-ports")
        .into_iter()
        .flatten()
        .flatten()
        .take(16)
        .map(|entry| read(&format!("{}/name", entry.path().display())).trim().to_string())
        .collect();
    let detail = if names.is_empty() { "none".to_string() } else { names.join(" ") };
    Finding::new("B6", "virtio-serial ports", Verdict::Look, detail)
}

fn hidden_processes(mounts: &str) -> Finding {
    let Some((_, _, options, special)) = mounted(mounts).filter(|(point, ..)| *point == "/proc").last()
    else {
        return Finding::new("B10", "/proc", Verdict::No, "not mounted");
    };
    let hidden = format!("{options},{special}");
    let hidden = hidden.split(',').find(|option| option.starts_with("hidepid")).unwrap_or("no hidepid");
    Finding::new("B10", "/proc", Verdict::Yes, hidden)
}

fn control_group() -> String {
    let own = read("/proc/self/cgroup");
    let unified = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("");
    let v1 = own.lines().filter(|line| !line.starts_with("0::")).count();
    let place = format!("/sys/fs/cgroup{unified}");
    let kill = std::path::Path::new(&place).join("cgroup.kill").exists();
    let made = std::fs::metadata(&place).is_ok_and(|state| !state.permissions().readonly());
    format!(
        "unified {}, {v1} older hierarchies, {}{}",
        or_none(unified),
        if kill { "cgroup.kill is there" } else { "no cgroup.kill" },
        if made { "" } else { ", read-only" }
    )
}

fn limits() -> Vec<Finding> {
    let own = read("/proc/self/cgroup");
    let unified = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/").to_string();
    let v1 = |controller: &str, file: &str| {
        let group = own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let names = parts.next()?;
            names.split(',').any(|name| name == controller).then(|| parts.next().unwrap_or("/").to_string())
        });
        // Inside a container the group that is named is the mount's root.
        let group = group.unwrap_or_default();
        [format!("/sys/fs/cgroup/{controller}{group}/{file}"), format!("/sys/fs/cgroup/{controller}/{file}")]
    };
    let v2 = |file: &str| [format!("/sys/fs/cgroup{unified}/{file}"), format!("/sys/fs/cgroup/{file}")];
    let mut found = Vec::new();
    for (check, new, old) in [
        ("memory limit", "memory.max", ("memory", "memory.limit_in_bytes")),
        ("process limit", "pids.max", ("pids", "pids.max")),
        ("CPU limit", "cpu.max", ("cpu", "cpu.cfs_quota_us")),
    ] {
        let value = v2(new)
            .iter()
            .chain(&v1(old.0, old.1))
            .map(|path| read(path).trim().to_string())
            .find(|text| !text.is_empty());
        let detail = value.unwrap_or_else(|| "cannot be read".to_string());
        found.push(Finding::new("B14", check, Verdict::Look, detail));
    }
    let limits = read("/proc/self/limits");
    for (check, name) in
        [("limit of open files", "Max open files"), ("limit of a user's processes", "Max processes")]
    {
        let words: Vec<String> =
            field(&limits, name).split_whitespace().take(2).map(str::to_string).collect();
        found.push(Finding::new(
            "B14",
            check,
            Verdict::Look,
            or_none(&words.join(" of at most ")).to_string(),
        ));
    }
    found
}

fn interfaces() -> String {
    let devices = read("/proc/net/dev");
    let names: Vec<&str> = devices
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, _)| name.trim())
        .take(16)
        .collect();
    let route = read("/proc/net/route")
        .lines()
        .skip(1)
        .any(|line| line.split_whitespace().nth(1) == Some("00000000"));
    let names = if names.is_empty() { "none".to_string() } else { names.join(" ") };
    format!("{names}; {}", if route { "a default route" } else { "no default route" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_is_read_as_its_manual_page_says() {
        let text = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n\
                    22 21 0:5 / /proc ro,nosuid - proc proc rw,hidepid=2\n\
                    broken line\n";
        let found: Vec<_> = mounted(text).collect();
        assert_eq!(found[0], ("/mnt2", "ext3", "rw,noatime", "rw,errors=continue"));
        assert_eq!(found.len(), 2);
        assert_eq!(hidden_processes(text).detail, "hidepid=2");
        assert_eq!(hidden_processes("").verdict, Verdict::No);
    }

    #[test]
    fn capabilities_are_counted_by_bit() {
        let all = capabilities("CapEff:\t00000000000001eb\n");
        assert_eq!(
            (all.verdict, all.detail.as_str()),
            (Verdict::Yes, "all of the daemon's are here, no SYS_ADMIN")
        );
        let few = capabilities("CapEff:\t00000000002000ea\n");
        assert_eq!((few.verdict, few.detail.as_str()), (Verdict::No, "missing CHOWN SETPCAP; SYS_ADMIN too"));
        assert_eq!(capabilities("").verdict, Verdict::No);
    }
}
