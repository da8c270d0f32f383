//! One signal for every process below a supervisor.
//!
//! The tree is found by passes over `/proc`: whoever has a parent in the tree is in it, and gets the signal once. A
//! pass may miss what is forked while it runs, so there is another one until a pass meets nobody new. The children
//! that a process forks after it got the signal get it too where they are met, but are no reason to go on: a shell
//! that handles the signal and goes on starting programs would keep the passes going for ever. One whose parent died
//! meanwhile is a reason, since that parent may have been missed.
//! Like the rest of the supervisor this makes system calls only: who has been met is a bit in memory that the kernel
//! is asked for. Where processes are hidden from the supervisor nothing is sent at all.

use crate::children;
use crate::supervisor::has_ended;
use libc::{c_int, pid_t};

/// The kernel has no process ids from here on.
const PIDS: usize = 1 << 22;
/// A tree that forks faster than it is scanned does not settle.
const PASSES: usize = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done = 1,
    /// `/proc` does not show the tree. Nothing was sent.
    Hidden = 2,
    /// No memory to remember whom it was sent to. Nothing was sent.
    Exhausted = 3,
    /// New processes appeared all the time.
    Unsettled = 4,
}

/// A set of process ids in memory of its own.
struct Met(*mut u8);

impl Met {
    fn new() -> Option<Met> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: new memory at a place that the kernel chooses.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), PIDS / 8, access, flags, -1, 0) };
        (memory != libc::MAP_FAILED).then_some(Met(memory.cast()))
    }

    fn has(&self, pid: pid_t) -> bool {
        match usize::try_from(pid) {
            // SAFETY: the byte is inside the memory that was mapped.
            Ok(pid) if pid < PIDS => unsafe { *self.0.add(pid / 8) >> (pid % 8) & 1 == 1 },
            _ => false,
        }
    }

    fn add(&mut self, pid: pid_t) {
        if let Ok(pid) = usize::try_from(pid)
            && pid < PIDS
        {
            // SAFETY: the byte is inside the memory that was mapped.
            unsafe { *self.0.add(pid / 8) |= 1 << (pid % 8) };
        }
    }
}

impl Drop for Met {
    fn drop(&mut self) {
        // SAFETY: the memory was mapped with this length and nothing refers to it any more.
        unsafe { libc::munmap(self.0.cast(), PIDS / 8) };
    }
}

/// The time since the system began, as processes count it.
fn hundredths() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills the structure.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    now.tv_sec as u64 * 100 + now.tv_nsec as u64 / 10_000_000
}

/// Send `signal` to every process below this one, and answer to how many.
///
/// # Safety
/// Only in a process that reaps nothing meanwhile; `command` is a child of it, or 0 when it has been reaped.
pub unsafe fn signal(command: pid_t, signal: c_int) -> (u64, Outcome) {
    // SAFETY: a system call without arguments.
    let own = unsafe { libc::getpid() };
    let Some(mut met) = Met::new() else {
        return (0, Outcome::Exhausted);
    };
    let mut hidden = children::look(own).is_none();
    children::for_each(|pid| {
        // SAFETY: it is a child of this process.
        hidden |= children::look(pid).is_none() && !unsafe { has_ended(pid) };
    });
    // SAFETY: the caller says that it is a child; where it is none any more the kernel says so.
    hidden |= command > 0 && children::look(command).is_none() && unsafe { libc::kill(command, 0) } == 0;
    if hidden {
        return (0, Outcome::Hidden);
    }
    let now = hundredths();
    let mut count = 0;
    for _ in 0..PASSES {
        let mut news = false;
        children::everything(|pid, seen| {
            if (seen.parent == own || met.has(seen.parent)) && !met.has(pid) {
                met.add(pid);
                news |= seen.began <= now || seen.parent == own;
                // A process whose first thread has ended looks like a dead one but may live.
                // SAFETY: a number; whoever has it by now is a process of this sandbox.
                count += u64::from(unsafe { libc::kill(pid, signal) } == 0 && !seen.zombie);
            }
        });
        if !news {
            return (count, Outcome::Done);
        }
    }
    (count, Outcome::Unsettled)
}
