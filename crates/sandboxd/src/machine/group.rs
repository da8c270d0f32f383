//! The control group of a machine's commands: their limits, what was killed of them, and the freezer.
//!
//! The machine has more memory than the sandbox was promised, and its kernel more processes, so what commands take
//! beyond the promise is refused them while the daemon, outside the group, goes on. A command enters it as it is forked
//! (`CLONE_INTO_CGROUP`); its supervisor stays outside, so that a full group and a frozen one can still be ended.

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Where everybody sees it.
pub const EVENTS: &[u8] = b"/sys/fs/cgroup/commands/memory.events";
/// How long freezing may take: a process that the kernel is busy for freezes when that is over.
const FREEZE_TIME: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(1);

pub struct Group {
    directory: OwnedFd,
}

impl Group {
    /// Make the group in the hierarchy that is mounted on `root`.
    pub fn make(root: &str) -> Result<Group, String> {
        let failed = |what: &str, error: &dyn std::fmt::Display| format!("control groups: {what}: {error}");
        let control = format!("{root}/cgroup.subtree_control");
        std::fs::write(&control, "+memory +pids").map_err(|error| failed(&control, &error))?;
        let path = format!("{root}/commands");
        std::fs::create_dir(&path).map_err(|error| failed(&path, &error))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory =
            openat(CWD, &path[..], flags, Mode::empty()).map_err(|error| failed(&path, &error))?;
        Ok(Group { directory })
    }

    /// What a command is forked into.
    pub fn descriptor(&self) -> i32 {
        self.directory.as_raw_fd()
    }

    /// Set what commands may have together.
    pub fn limit(&self, memory_bytes: Option<u64>, processes: Option<u64>) -> Result<(), String> {
        let number = |limit: Option<u64>| limit.map_or("max".to_string(), |limit| limit.to_string());
        for (file, value) in [("memory.max", number(memory_bytes)), ("pids.max", number(processes))] {
            self.write(file, value.as_bytes()).map_err(|errno| format!("control groups: {file}: {errno}"))?;
        }
        Ok(())
    }

    /// How many processes the commands are.
    pub fn processes(&self) -> Result<u64, Errno> {
        let file = openat(&self.directory, "cgroup.procs", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let (mut bytes, mut count) = ([0; 4_096], 0);
        loop {
            match rustix::io::read(&file, &mut bytes[..]) {
                Ok(0) => return Ok(count),
                Ok(filled) => count += bytes[..filled].iter().filter(|&&byte| byte == b'\n').count() as u64,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Kill every command at once.
    pub fn kill(&self) -> Result<(), Errno> {
        self.write("cgroup.kill", b"1")
    }

    /// Stop every command where it is; `false` when one of them could not be stopped in time, and then none is.
    pub async fn freeze(&self) -> Result<bool, Errno> {
        self.write("cgroup.freeze", b"1")?;
        let end = Instant::now() + FREEZE_TIME;
        while !is_frozen(&self.read("cgroup.events")?) {
            if Instant::now() > end {
                self.thaw()?;
                return Ok(false);
            }
            sleep(LOOK).await;
        }
        Ok(true)
    }

    pub fn thaw(&self) -> Result<(), Errno> {
        self.write("cgroup.freeze", b"0")
    }

    fn write(&self, file: &str, bytes: &[u8]) -> Result<(), Errno> {
        let file = openat(&self.directory, file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::io::write(&file, bytes).map(drop)
    }

    fn read(&self, file: &str) -> Result<Vec<u8>, Errno> {
        let file = openat(&self.directory, file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut bytes = vec![0; 256];
        let count = rustix::io::read(&file, &mut bytes[..])?;
        bytes.truncate(count);
        Ok(bytes)
    }
}

/// Documentation/admin-guide/cgroup-v2.rst of the kernel: `cgroup.events`.
fn is_frozen(events: &[u8]) -> bool {
    events.split(|&byte| byte == b'\n').any(|line| line == b"frozen 1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frozen_is_what_the_kernel_says() {
        assert!(is_frozen(b"populated 1\nfrozen 1\n"));
        assert!(!is_frozen(b"populated 1\nfrozen 0\n"));
        assert!(!is_frozen(b""));
    }
}
