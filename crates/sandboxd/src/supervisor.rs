//! The small root process above every command.
//!
//! The daemon forks it, it forks the command. It is a child subreaper, so that everything the command starts,
//! double forks and new sessions included, stays below a parent that the command cannot signal. It has one
//! descriptor, [`CONTROL`]: reports go up, [`KILL`] and [`SIGNAL`] come down, and the end of it means that the
//! daemon is gone. A standing one (`standing.rs`) was there before its command and waits for the next when the tree is
//! empty; another is forked for one command, has a copy of its plan, and ends with its tree.
//!
//! It may have been forked from a process with threads, so it makes system calls only: no allocation, no lock, no
//! formatting. Killing the tree needs no new process or thread and goes on until there is no child left: scan,
//! SIGKILL, and reap when all are dead. The rounds are bounded by time, since a process stuck in the kernel dies
//! later than its signal; the supervisor then reports the failure and goes on trying.

use crate::launch::{self, Command, Plan};
use crate::tree::Outcome;
use libc::{c_int, c_ulong, pid_t};
use std::convert::Infallible;
use std::io;

/// The descriptor of the control socket in the supervisor and, close-on-exec, in the child.
pub const CONTROL: c_int = 3;
/// The control group of the command, in a machine.
pub const GROUP: c_int = 4;
/// Above the descriptors that are put in their places.
const OUT_OF_THE_WAY: c_int = 64;
/// A message from the daemon has two bytes: what to do and a number for it.
pub const KILL: u8 = b'K';
/// Send a signal to every process of the tree.
pub const SIGNAL: u8 = b'S';
const NONE: c_ulong = 0;
/// Linux 5.7 (include/uapi/linux/sched.h).
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// How long one attempt to end a tree lasts.
const KILL_SECONDS: i64 = 5;
/// The same in a machine, where the kernel has killed everybody at once and the rest is the time that an emulated processor,
/// one of a busy host, takes for hundreds of ends.
const MACHINE_KILL_SECONDS: i64 = 25;

/// How long a supervisor tries to end a tree before it says that it cannot.
pub fn kill_time(in_machine: bool) -> std::time::Duration {
    std::time::Duration::from_secs(kill_seconds(in_machine) as u64)
}

fn kill_seconds(in_machine: bool) -> i64 {
    if in_machine { MACHINE_KILL_SECONDS } else { KILL_SECONDS }
}

/// What the child was doing when it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Fork = 1,
    Setup = 2,
    Workdir = 3,
    Exec = 4,
}

/// One message from the supervisor or its child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// The command was not started; an [`Report::Exit`] follows unless the fork itself failed.
    Failed { stage: Stage, errno: i32 },
    /// The command's own process has ended: `wait4`'s status and the resources it and the children it waited for used.
    Exit { status: i32, user_us: u64, system_us: u64, max_rss_kb: u64 },
    /// The answer to [`KILL`]; `empty` when nothing of the tree is left.
    Killed { empty: bool },
    /// The program runs. It comes behind [`Report::Failed`] too, when it does not, and never behind [`Report::Exit`].
    Started { pid: i32 },
    /// The answer to [`SIGNAL`].
    Signalled { processes: u64, outcome: Outcome },
    /// The last word about a tree of which nothing is left, or the first of a new supervisor: it waits for a command.
    Idle { pid: i32 },
}

pub const REPORT_BYTES: usize = 40;

impl Report {
    pub fn failed(stage: Stage, errno: i32) -> Report {
        Report::Failed { stage, errno }
    }

    fn encode(self) -> [u8; REPORT_BYTES] {
        let fields: [u64; 5] = match self {
            Report::Failed { stage, errno } => [1, stage as u64, errno as u64, 0, 0],
            Report::Exit { status, user_us, system_us, max_rss_kb } => {
                [2, status as u64, user_us, system_us, max_rss_kb]
            }
            Report::Killed { empty } => [3, u64::from(empty), 0, 0, 0],
            Report::Started { pid } => [4, pid as u64, 0, 0, 0],
            Report::Signalled { processes, outcome } => [5, processes, outcome as u64, 0, 0],
            Report::Idle { pid } => [6, pid as u64, 0, 0, 0],
        };
        let mut bytes = [0; REPORT_BYTES];
        for (place, field) in bytes.chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&field.to_ne_bytes());
        }
        bytes
    }

    pub fn decode(bytes: &[u8; REPORT_BYTES]) -> Option<Report> {
        let mut fields = [0u64; 5];
        for (field, chunk) in fields.iter_mut().zip(bytes.chunks_exact(8)) {
            *field = u64::from_ne_bytes(chunk.try_into().ok()?);
        }
        let [kind, first, second, third, fourth] = fields;
        Some(match kind {
            1 => {
                let stage = [Stage::Fork, Stage::Setup, Stage::Workdir, Stage::Exec]
                    .into_iter()
                    .find(|stage| *stage as u64 == first)?;
                Report::Failed { stage, errno: second as i32 }
            }
            2 => Report::Exit { status: first as i32, user_us: second, system_us: third, max_rss_kb: fourth },
            3 => Report::Killed { empty: first != 0 },
            4 => Report::Started { pid: i32::try_from(first).ok()? },
            5 => {
                let outcome = [Outcome::Done, Outcome::Hidden, Outcome::Exhausted, Outcome::Unsettled]
                    .into_iter()
                    .find(|outcome| *outcome as u64 == second)?;
                Report::Signalled { processes: first, outcome }
            }
            6 => Report::Idle { pid: i32::try_from(first).ok()? },
            _ => return None,
        })
    }

    /// Send it up. A daemon that is gone hears nothing.
    pub fn send(self, fd: c_int) {
        let bytes = self.encode();
        // SAFETY: the kernel reads the array's bytes and no more.
        unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    }
}

/// The daemon's ends stay with the daemon; these are the supervisor's and the command's. All are above 2.
pub struct Descriptors {
    pub control: c_int,
    pub stdin: c_int,
    pub stdout: c_int,
    pub stderr: c_int,
    /// The directory of the control group that the command is forked into, -1 for none.
    pub group: c_int,
    /// Say when the program runs.
    pub announce: bool,
}

/// Fork a supervisor that starts the plan's command and ends with its tree, and answer its process id.
pub fn spawn(plan: &Plan, fds: &Descriptors) -> io::Result<pid_t> {
    // SAFETY: the child makes system calls alone and never returns.
    fork_with(|| unsafe { supervise(plan, fds) })
}

/// Fork a child that runs `child` and answer its process id.
pub fn fork_with(child: impl FnOnce() -> Infallible) -> io::Result<pid_t> {
    // SAFETY: signals are blocked around the fork, so none of the daemon's handlers, which write to pipes that
    // parent and child share, can run in the child before it has put them away. The child never returns.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let pid = fork();
        if pid == 0 {
            child();
        }
        let error = io::Error::last_os_error();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        if pid < 0 { Err(error) } else { Ok(pid) }
    }
}

/// The bare system call: the C library's `fork` runs handlers and takes locks that nothing here needs.
///
/// # Safety
/// The child may only make system calls and has to leave by `_exit` or `execve`.
unsafe fn fork() -> pid_t {
    // SAFETY: no flag but the exit signal, no new stack: a plain fork. The order of the remaining arguments
    // differs between architectures, but all are 0.
    unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD as c_ulong, NONE, NONE, NONE, NONE) as pid_t }
}

/// Fork a child that is in a control group from its first moment on, so that the group's limits hold for it too.
///
/// # Safety
/// As for [`fork`].
unsafe fn fork_into(group: c_int) -> pid_t {
    // SAFETY: zeros and a descriptor are a plain fork with one flag; the kernel reads the structure.
    unsafe {
        let mut args: libc::clone_args = std::mem::zeroed();
        args.flags = CLONE_INTO_CGROUP;
        args.exit_signal = libc::SIGCHLD as u64;
        args.cgroup = group as u64;
        libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) as pid_t
    }
}

extern "C" fn wake(_: c_int) {}

/// # Safety
/// Only in a process that was just forked, with every signal blocked.
unsafe fn supervise(plan: &Plan, fds: &Descriptors) -> ! {
    // SAFETY: system calls on this process's own descriptors and signals.
    unsafe {
        let settled = settle();
        let group = match fds.group {
            -1 => -1,
            group => libc::fcntl(group, libc::F_DUPFD_CLOEXEC, OUT_OF_THE_WAY),
        };
        // All four are above 2, so no copy overwrites one that is still needed, and the copies to 0, 1 and 2
        // come before the one to 3.
        let placed = settled
            && libc::dup2(fds.stdin, 0) >= 0
            && libc::dup2(fds.stdout, 1) >= 0
            && libc::dup2(fds.stderr, 2) >= 0
            && (fds.control == CONTROL || libc::dup3(fds.control, CONTROL, libc::O_CLOEXEC) >= 0);
        let placed = placed && (fds.group < 0 || libc::dup3(group, GROUP, libc::O_CLOEXEC) >= 0);
        if !placed {
            Report::failed(Stage::Setup, *libc::__errno_location()).send(fds.control);
            libc::_exit(1);
        }
        close_from(if fds.group < 0 { CONTROL } else { GROUP } + 1);
        match begin(&plan.command(), fds.group >= 0, fds.announce) {
            Some(tree) => watch(tree),
            None => libc::_exit(1),
        }
        libc::_exit(0)
    }
}

/// Be a supervisor: what is the same for every command; `false` when something of it cannot be.
///
/// # Safety
/// As for [`supervise`].
pub unsafe fn settle() -> bool {
    // SAFETY: system calls on this process alone.
    unsafe {
        reset_signals();
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1 as c_ulong);
        libc::prctl(libc::PR_SET_NAME, c"sandboxd-exec".as_ptr());
        launch::empty_bounding_set() >= 0
    }
}

/// Start the command, whose descriptors are in their places, and keep none of them but the group; `None`, and a report,
/// where there is no process for it.
///
/// # Safety
/// As for [`supervise`].
pub unsafe fn begin(command: &Command<'_>, grouped: bool, announce: bool) -> Option<Tree> {
    // SAFETY: system calls on this process's own descriptors.
    unsafe {
        // Whoever holds the writing end has not executed its program yet.
        let mut running = [-1; 2];
        let mut child = -1;
        if !announce || libc::pipe2(running.as_mut_ptr(), libc::O_CLOEXEC) == 0 {
            child = if grouped { fork_into(GROUP) } else { fork() };
        }
        if child == 0 {
            launch::start(command);
        }
        if child < 0 {
            Report::failed(Stage::Fork, *libc::__errno_location()).send(CONTROL);
        }
        // The command's output ends when the command and its children are done with it.
        for fd in 0..CONTROL {
            libc::close(fd);
        }
        if running[1] >= 0 {
            libc::close(running[1]);
        }
        if child < 0 {
            if running[0] >= 0 {
                libc::close(running[0]);
            }
            return None;
        }
        Some(Tree { command: child, starting: running[0], grouped })
    }
}

/// # Safety
/// As for [`supervise`].
unsafe fn reset_signals() {
    // SAFETY: numbers that may not be changed are refused by the call; the structures are fully initialised.
    // The bare call is used because the C library keeps two signals to itself, which may have been ignored by
    // whoever started the daemon. Zeros are the kernel's structure for the default disposition.
    unsafe {
        let default = [0u64; 4];
        let set_size = size_of::<u64>();
        for signal in 1..=64 {
            libc::syscall(libc::SYS_rt_sigaction, signal, &raw const default, NONE, set_size);
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        // An ignored signal would not end a wait. Executing a program sets this one back.
        action.sa_sigaction = wake as extern "C" fn(c_int) as usize;
        libc::sigaction(libc::SIGCHLD, &raw const action, std::ptr::null_mut());
    }
}

/// # Safety
/// As for [`supervise`].
pub unsafe fn close_from(first: c_int) {
    // SAFETY: nothing in this process uses the descriptors that are closed.
    unsafe {
        // The highest number that a descriptor can have: gVisor takes a higher one for a negative, and refuses.
        let last = c_int::MAX as c_ulong;
        if libc::syscall(libc::SYS_close_range, first as c_ulong, last, 0 as c_ulong) == 0 {
            return;
        }
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        let end = c_int::try_from(limit.rlim_cur).unwrap_or(1 << 20).min(1 << 20);
        for fd in first..end {
            libc::close(fd);
        }
    }
}

/// What a supervisor is there for.
pub struct Tree {
    command: pid_t,
    /// Its end means that the program runs, or will not; -1 when that is nobody's business or was said.
    starting: c_int,
    /// It has a control group of its own.
    grouped: bool,
}

impl Tree {
    /// Say once that the program runs.
    ///
    /// # Safety
    /// As for [`supervise`].
    unsafe fn started(&mut self) {
        if self.starting >= 0 {
            // SAFETY: the descriptor is this process's own and is used no more.
            unsafe { libc::close(self.starting) };
            self.starting = -1;
            Report::Started { pid: self.command }.send(CONTROL);
        }
    }
}

/// What a round of reaping has met.
struct Reaped {
    count: u64,
    /// There is no child left.
    empty: bool,
}

/// Reap whatever has ended, and report the command's own end, once: its number may be given out again.
///
/// A child can ask its parent to trace it (PTRACE_TRACEME), and then each of its signals stops it and looks like an end
/// to `wait4`. Nobody here wants to trace, so it is let go with the signal that it was about to get, except the one that
/// only tells a tracer of a new program.
///
/// # Safety
/// As for [`supervise`].
unsafe fn reap(tree: &mut Tree) -> Reaped {
    let mut count = 0;
    loop {
        // SAFETY: the kernel fills both structures.
        unsafe {
            let mut status = 0;
            let mut usage: libc::rusage = std::mem::zeroed();
            let pid = libc::wait4(-1, &raw mut status, libc::WNOHANG, &raw mut usage);
            if pid <= 0 {
                return Reaped { count, empty: pid < 0 };
            }
            if libc::WIFSTOPPED(status) {
                let signal = libc::WSTOPSIG(status);
                let passed = if signal == libc::SIGTRAP { 0 } else { signal };
                libc::ptrace(libc::PTRACE_DETACH, pid, NONE, passed as c_ulong);
                continue;
            }
            count += 1;
            if pid == tree.command {
                tree.started();
                tree.command = 0;
                let micros = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
                let (user_us, system_us) = (micros(usage.ru_utime), micros(usage.ru_stime));
                let max_rss_kb = usage.ru_maxrss as u64;
                Report::Exit { status, user_us, system_us, max_rss_kb }.send(CONTROL);
            }
        }
    }
}

/// Wait for one of two descriptors (-1 for none) or a child's end, at most for `milliseconds` where that is not
/// negative, and answer which of them have something.
///
/// # Safety
/// As for [`supervise`].
unsafe fn pause(fds: [c_int; 2], milliseconds: i64) -> [bool; 2] {
    // SAFETY: the structures are initialised; the mask lets SIGCHLD alone in while the call waits, so that none
    // is lost between a reap and the wait.
    unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut mask);
        libc::sigdelset(&raw mut mask, libc::SIGCHLD);
        let mut poll = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        let time =
            libc::timespec { tv_sec: milliseconds / 1_000, tv_nsec: (milliseconds % 1_000) * 1_000_000 };
        let timeout = if milliseconds < 0 { std::ptr::null() } else { &raw const time };
        let count = libc::ppoll(poll.as_mut_ptr(), 2, timeout, &raw const mask);
        poll.map(|poll| count > 0 && poll.revents != 0)
    }
}

fn seconds() -> i64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills the structure.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec
}

/// Be there until the last child is gone.
///
/// # Safety
/// As for [`supervise`].
pub unsafe fn watch(mut tree: Tree) {
    let mut control = CONTROL;
    let mut doomed = false;
    // SAFETY: as the functions called say; this process does nothing else.
    unsafe {
        loop {
            if reap(&mut tree).empty {
                return;
            }
            if doomed {
                kill_tree(&mut tree);
            }
            let [heard, started] = pause([control, tree.starting], if doomed { 100 } else { -1 });
            if started {
                tree.started();
            }
            if !heard {
                continue;
            }
            let mut message = [0u8; 2];
            match (libc::recv(CONTROL, message.as_mut_ptr().cast(), 2, libc::MSG_DONTWAIT), message) {
                (0, _) => {
                    control = -1;
                    doomed = true;
                }
                (2, [KILL, _]) => {
                    doomed = true;
                    let empty = kill_tree(&mut tree).empty;
                    Report::Killed { empty }.send(CONTROL);
                }
                (2, [SIGNAL, signal]) if c_int::from(signal) == libc::SIGKILL => {
                    let end = kill_tree(&mut tree);
                    let outcome = if end.empty { Outcome::Done } else { Outcome::Unsettled };
                    Report::Signalled { processes: end.count, outcome }.send(CONTROL);
                }
                (2, [SIGNAL, signal]) => {
                    let (processes, outcome) = crate::tree::signal(tree.command, signal.into());
                    Report::Signalled { processes, outcome }.send(CONTROL);
                }
                _ => {}
            }
        }
    }
}

/// End every descendant; not `empty` when time ran out first.
///
/// Nothing is reaped until a scan meets dead children only, twice in a row. A dead child that is not reaped keeps
/// its place under the limit of processes, so that a fork storm runs out of places instead of refilling those
/// that each kill makes free. Whoever is left by a dead parent becomes a child of this process before that
/// parent can be waited for, hence twice: the second scan shows whom the first one's dead have left.
///
/// # Safety
/// As for [`supervise`].
unsafe fn kill_tree(tree: &mut Tree) -> Reaped {
    let end = seconds() + kill_seconds(tree.grouped);
    let mut quiet = 0;
    let mut count = 0;
    if tree.grouped {
        // SAFETY: as for this function.
        unsafe { kill_group() };
    }
    loop {
        let mut alive = false;
        crate::children::for_each(|pid| {
            // SAFETY: a child of this process that has not been reaped keeps its number, so no stranger is hit.
            unsafe {
                if !has_ended(pid) {
                    alive = true;
                    libc::kill(pid, libc::SIGKILL);
                }
            }
        });
        quiet = if alive { 0 } else { quiet + 1 };
        if quiet >= 2 {
            // SAFETY: as for this function.
            let reaped = unsafe { reap(tree) };
            count += reaped.count;
            if reaped.empty {
                return Reaped { count, empty: true };
            }
        }
        if seconds() > end {
            return Reaped { count, empty: false };
        }
        if alive {
            // SAFETY: as for this function.
            unsafe { pause([-1; 2], 1) };
        }
    }
}

/// Have the kernel kill everybody in the command's group, with whom they are forking at the moment: nobody escapes by being
/// faster. Who is dead has to be reaped all the same.
///
/// # Safety
/// As for [`supervise`].
unsafe fn kill_group() {
    // SAFETY: constant strings and a descriptor that is closed again.
    unsafe {
        let fd = libc::openat(GROUP, c"cgroup.kill".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, c"1".as_ptr().cast(), 1);
            libc::close(fd);
        }
    }
}

/// Whether a child has ended and waits to be reaped.
///
/// # Safety
/// Only for a child of this process.
pub unsafe fn has_ended(pid: pid_t) -> bool {
    // SAFETY: the kernel fills the structure, which is zero where the child has not ended.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        libc::waitid(libc::P_PID, pid as libc::id_t, &raw mut info, flags) == 0 && info.si_pid() == pid
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_survive_their_encoding() {
        for report in [
            Report::failed(Stage::Exec, 2),
            Report::Exit { status: 9, user_us: 1, system_us: u64::MAX, max_rss_kb: 3 },
            Report::Killed { empty: true },
            Report::Started { pid: 77 },
            Report::Signalled { processes: 3, outcome: Outcome::Unsettled },
            Report::Idle { pid: 78 },
        ] {
            assert_eq!(Report::decode(&report.encode()), Some(report));
        }
        assert_eq!(Report::decode(&[0xff; REPORT_BYTES]), None);
    }
}
