//! How many processes of the sandbox the kernel has killed for want of memory.
//!
//! It counts them for each control group and raises the count before the victim gets its signal, so a command whose
//! end was heard of is in it. The file is held open from its first use on, the start of a command: at the end of one
//! nothing may be left to open it with. It is not opened before, since the host may still be furnishing the sandbox.

use rustix::fs::{Mode, OFlags};
use std::cell::OnceCell;
use std::os::fd::OwnedFd;

/// Where a sandbox sees its own control group: cgroup v2, then v1 (Documentation/admin-guide of the kernel:
/// cgroup-v2.rst, `memory.events`; cgroup-v1/memory.rst, `memory.oom_control`).
const PLACES: [&str; 2] = ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"];
/// Both files have a few short lines.
const MAX_FILE: usize = 1_024;

pub struct Kills {
    places: Vec<Vec<u8>>,
    file: OnceCell<OwnedFd>,
}

impl Kills {
    /// The sandbox's own count, or what a test has in its place.
    pub fn new(elsewhere: Option<Vec<u8>>) -> Kills {
        let own = || PLACES.iter().map(|path| path.as_bytes().to_vec()).collect();
        Kills { places: elsewhere.map_or_else(own, |path| vec![path]), file: OnceCell::new() }
    }

    /// The count now, or `None` where nobody counts.
    pub fn count(&self) -> Option<u64> {
        let mut bytes = [0u8; MAX_FILE];
        let filled = rustix::io::pread(self.file()?, &mut bytes, 0).ok()?;
        parse(&bytes[..filled])
    }

    fn file(&self) -> Option<&OwnedFd> {
        if self.file.get().is_none() {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let open = |path: &Vec<u8>| rustix::fs::open(&path[..], flags, Mode::empty()).ok();
            let _ = self.file.set(self.places.iter().find_map(open)?);
        }
        self.file.get()
    }
}

fn parse(text: &[u8]) -> Option<u64> {
    let number = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"oom_kill "))?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_the_count() {
        assert_eq!(parse(b"low 0\nhigh 0\nmax 12\noom 4\noom_kill 2\noom_group_kill 7\n"), Some(2));
        assert_eq!(parse(b"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), Some(3));
        for unknown in [&b"oom_kill_disable 0\nunder_oom 0\n"[..], b"oom_kill x\n", b"oom_kill -1\n", b""] {
            assert_eq!(parse(unknown), None);
        }
    }

    #[test]
    fn no_file_is_no_count() {
        assert_eq!(Kills::new(Some(b"/no/such/file".to_vec())).count(), None);
        assert_eq!(Kills::new(Some(b"/".to_vec())).count(), None);
    }
}
