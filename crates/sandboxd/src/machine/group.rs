//! The control group of a machine's commands: their limits, what was killed of them, and the freezer.
//!
//! The machine has more memory than the sandbox was promised, and its kernel more processes, so what commands take
//! beyond the promise is refused them while the daemon, outside the group, goes on. A command enters it as it is forked
//! (`CLONE_INTO_CGROUP`); its supervisor stays outside, so that a full group and a frozen one can still be ended.
//! To a scheduler that is fair to processes the daemon would be one among hundreds; with the `cpu` controller all commands
//! together are one beside it and each supervisor.
//!
//! Below it each command has a group of its own, a [`Slot`], for `cgroup.kill`: that ends a tree whose processes fork faster
//! than a supervisor can look at them, which under emulation is any that tries. An empty one is used again.

use rustix::fs::{AtFlags, CWD, Mode, OFlags, mkdirat, openat, unlinkat};
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Where everybody sees it.
pub const EVENTS: &[u8] = b"/sys/fs/cgroup/commands/memory.events";
/// How long freezing may take: a process that the kernel is busy for freezes when that is over.
const FREEZE_TIME: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(1);

/// Empty slots that are kept. More than one are needed at once by commands that run at once.
const MAX_IDLE: usize = 32;

pub struct Group {
    directory: OwnedFd,
    idle: RefCell<Vec<Slot>>,
    /// Slots that had somebody in them when they were given up.
    left: RefCell<Vec<Slot>>,
    made: Cell<u64>,
}

/// The group of one command.
pub struct Slot {
    directory: OwnedFd,
    name: String,
}

impl Slot {
    /// What the command is forked into.
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// How many processes the command is.
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
}

impl Group {
    /// Make the group in the hierarchy that is mounted on `root`.
    pub fn make(root: &str) -> Result<Group, String> {
        let failed = |what: &str, error: &dyn std::fmt::Display| format!("control groups: {what}: {error}");
        let control = format!("{root}/cgroup.subtree_control");
        std::fs::write(&control, "+cpu +memory +pids").map_err(|error| failed(&control, &error))?;
        let path = format!("{root}/commands");
        std::fs::create_dir(&path).map_err(|error| failed(&path, &error))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory =
            openat(CWD, &path[..], flags, Mode::empty()).map_err(|error| failed(&path, &error))?;
        Ok(Group { directory, idle: RefCell::default(), left: RefCell::default(), made: Cell::new(0) })
    }

    /// Set what commands may have together.
    pub fn limit(&self, memory_bytes: Option<u64>, processes: Option<u64>) -> Result<(), String> {
        let number = |limit: Option<u64>| limit.map_or("max".to_string(), |limit| limit.to_string());
        for (file, value) in [("memory.max", number(memory_bytes)), ("pids.max", number(processes))] {
            write(&self.directory, file, value.as_bytes())
                .map_err(|errno| format!("control groups: {file}: {errno}"))?;
        }
        Ok(())
    }

    /// A group for one command.
    pub fn take(&self) -> Result<Slot, Errno> {
        self.left.borrow_mut().retain(|slot| self.remove(slot) == Err(Errno::BUSY));
        if let Some(slot) = self.idle.borrow_mut().pop() {
            return Ok(slot);
        }
        let name = self.made.get().to_string();
        mkdirat(&self.directory, &name, Mode::from_raw_mode(0o755))?;
        self.made.set(self.made.get() + 1);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Slot { directory: openat(&self.directory, &name, flags, Mode::empty())?, name })
    }

    /// Take a group back that nobody is in any more.
    pub fn give(&self, slot: Slot) {
        if self.idle.borrow().len() < MAX_IDLE {
            self.idle.borrow_mut().push(slot);
        } else if self.remove(&slot).is_err() {
            self.left.borrow_mut().push(slot);
        }
    }

    /// End whoever is in a group whose supervisor is gone.
    pub fn give_up(&self, slot: Slot) {
        let _ = write(&slot.directory, "cgroup.kill", b"1");
        self.left.borrow_mut().push(slot);
    }

    fn remove(&self, slot: &Slot) -> Result<(), Errno> {
        unlinkat(&self.directory, &slot.name, AtFlags::REMOVEDIR)
    }

    /// Kill every command at once.
    pub fn kill(&self) -> Result<(), Errno> {
        write(&self.directory, "cgroup.kill", b"1")
    }

    /// Stop every command where it is; `false` when one of them could not be stopped in time, and then none is.
    pub async fn freeze(&self) -> Result<bool, Errno> {
        write(&self.directory, "cgroup.freeze", b"1")?;
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
        write(&self.directory, "cgroup.freeze", b"0")
    }

    fn read(&self, file: &str) -> Result<Vec<u8>, Errno> {
        let file = openat(&self.directory, file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut bytes = vec![0; 256];
        let count = rustix::io::read(&file, &mut bytes[..])?;
        bytes.truncate(count);
        Ok(bytes)
    }
}

fn write(directory: &OwnedFd, file: &str, bytes: &[u8]) -> Result<(), Errno> {
    let file = openat(directory, file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, bytes).map(drop)
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
