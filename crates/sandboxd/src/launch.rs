//! From a freshly forked root process to the sandbox user's command.
//!
//! A [`Plan`] is made in the daemon, where memory may be allocated. [`start`] runs in the child, on the [`Command`] that
//! the plan has or that a standing supervisor was sent (`standing.rs`), and only makes system calls: the daemon has
//! threads, so a lock that one of them held at the fork stays locked here for ever. The C library's `setresuid` and its
//! kin are such traps too (they signal every thread), hence the raw calls. A step that fails ends the child with a
//! report of where and why; there is no way past one.

use crate::supervisor::{CONTROL, Report, Stage};
use libc::{c_char, c_int, c_long, c_ulong};
use std::ffi::CString;

/// The search path of a command whose environment has none.
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// `_LINUX_CAPABILITY_VERSION_3` (include/uapi/linux/capability.h).
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;
const PATH_MAX: usize = 4_096;

/// Everything that the child needs, in the shape in which the kernel takes it.
pub struct Command<'a> {
    /// Strings that end with a NUL, in arrays that end with a null pointer.
    pub argv: *const *const c_char,
    pub envp: *const *const c_char,
    pub cwd: *const c_char,
    pub terms: Terms,
    pub filter: &'a [libc::sock_filter],
}

/// What is not text.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    pub uid: u32,
    pub gid: u32,
    pub open_files: libc::rlimit,
    /// Standard input is a terminal that becomes the controlling one.
    pub tty: bool,
}

/// A command that is yet to be started, with the memory that it is in.
pub struct Plan {
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    cwd: CString,
    terms: Terms,
    filter: Vec<libc::sock_filter>,
    // What the pointers above point into.
    strings: Vec<CString>,
}

impl Plan {
    /// `None` when a string has a NUL in it or `argv` is empty. With `tty` standard input is a terminal that becomes
    /// the controlling one.
    pub fn new(
        argv: Vec<Vec<u8>>,
        env: Vec<Vec<u8>>,
        cwd: &[u8],
        user: (u32, u32),
        open_files: libc::rlimit,
        tty: bool,
    ) -> Option<Plan> {
        let arguments = argv.len();
        let strings: Vec<CString> =
            argv.into_iter().chain(env).map(CString::new).collect::<Result<_, _>>().ok()?;
        let pointers = |strings: &[CString]| {
            strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect::<Vec<_>>()
        };
        if arguments == 0 {
            return None;
        }
        Some(Plan {
            argv: pointers(&strings[..arguments]),
            envp: pointers(&strings[arguments..]),
            cwd: CString::new(cwd).ok()?,
            terms: Terms { uid: user.0, gid: user.1, open_files, tty },
            filter: crate::seccomp::filter(),
            strings,
        })
    }

    pub fn command(&self) -> Command<'_> {
        Command {
            argv: self.argv.as_ptr(),
            envp: self.envp.as_ptr(),
            cwd: self.cwd.as_ptr(),
            terms: self.terms,
            filter: &self.filter,
        }
    }

    pub fn terms(&self) -> Terms {
        self.terms
    }

    /// The directory, the arguments and the variables, and how many of these are arguments.
    pub fn strings(&self) -> (impl Iterator<Item = &CString>, usize) {
        ([&self.cwd].into_iter().chain(&self.strings), self.argv.len() - 1)
    }
}

fn errno() -> c_int {
    // SAFETY: the C library's errno of this thread always exists.
    unsafe { *libc::__errno_location() }
}

/// Report and leave.
fn fail(stage: Stage, errno: c_int) -> ! {
    Report::failed(stage, errno).send(CONTROL);
    // SAFETY: leaving without running any handler of the daemon is what a forked child has to do.
    unsafe { libc::_exit(126) }
}

/// Leave with a report unless the call succeeded.
fn must(stage: Stage, result: c_long) {
    if result < 0 {
        fail(stage, errno());
    }
}

/// Become the command. Descriptors 0 to 2 are in place, [`CONTROL`] is close-on-exec, nothing else is open, every signal
/// has its default disposition and is blocked, and no capability is in the bounding set.
///
/// # Safety
/// Only in a process that was just forked and will do nothing else.
pub unsafe fn start(command: &Command<'_>) -> ! {
    let terms = &command.terms;
    // SAFETY: system calls alone, on memory of the command, which lives as long as this process; no allocation,
    // no lock, no handler.
    unsafe {
        must(Stage::Setup, libc::syscall(libc::SYS_setsid));
        if terms.tty {
            must(Stage::Setup, libc::ioctl(0, libc::TIOCSCTTY, 0).into());
        }
        libc::umask(0o022);
        raise_own_oom_score();
        // The daemon raised its own limit; a command gets the one that the daemon was started with.
        must(Stage::Setup, libc::setrlimit(libc::RLIMIT_NOFILE, &raw const terms.open_files).into());
        refuse_core_dumps();
        drop_privileges(terms.uid, terms.gid);
        must(Stage::Workdir, libc::chdir(command.cwd).into());
        let program =
            libc::sock_fprog { len: command.filter.len() as u16, filter: command.filter.as_ptr().cast_mut() };
        let mode = c_ulong::from(libc::SECCOMP_MODE_FILTER);
        must(Stage::Setup, libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program).into());
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        must(
            Stage::Setup,
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()).into(),
        );
        fail(Stage::Exec, execute(command));
    }
}

/// 1 is the limit at which the kernel starts no dump at all: where the host's `core_pattern` is a program, any other,
/// 0 included, has that program run outside the sandbox, as root, on what a command has in its memory. The filter keeps
/// it. A hard limit of 0 cannot be raised and stays.
///
/// # Safety
/// As for [`start`].
unsafe fn refuse_core_dumps() {
    let least = libc::rlimit { rlim_cur: 1, rlim_max: 1 };
    // SAFETY: the kernel reads the structure.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const least) };
}

/// Commands are the first to go when memory runs out. Where the file is missing or read-only nothing is lost.
///
/// # Safety
/// As for [`start`].
unsafe fn raise_own_oom_score() {
    // SAFETY: constant strings and a descriptor that is closed again.
    unsafe {
        let fd = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, b"1000".as_ptr().cast(), 4);
            libc::close(fd);
        }
    }
}

/// Empty the bounding set, which every child has from its parent.
///
/// # Safety
/// As for [`start`].
pub unsafe fn empty_bounding_set() -> c_int {
    const NONE: c_ulong = 0;
    // SAFETY: system calls that change this one thread, which is the whole process.
    unsafe {
        for capability in 0..64 as c_ulong {
            if libc::prctl(libc::PR_CAPBSET_READ, capability, NONE, NONE, NONE) < 0 {
                break;
            }
            if libc::prctl(libc::PR_CAPBSET_DROP, capability, NONE, NONE, NONE) < 0 {
                return -1;
            }
        }
    }
    0
}

/// Empty every other capability set and become the user for good.
///
/// # Safety
/// As for [`start`].
unsafe fn drop_privileges(uid: u32, gid: u32) {
    const NONE: c_ulong = 0;
    #[repr(C)]
    struct Header {
        version: u32,
        pid: c_int,
    }
    // SAFETY: raw system calls that change this one thread, which is the whole process; the structures are of
    // the sizes that version 3 of the capability interface reads.
    unsafe {
        // Kernels without ambient capabilities have none to clear.
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as c_ulong, NONE, NONE, NONE);
        must(Stage::Setup, libc::syscall(libc::SYS_setgroups, 0, NONE));
        must(Stage::Setup, libc::syscall(libc::SYS_setresgid, gid, gid, gid));
        must(Stage::Setup, libc::syscall(libc::SYS_setresuid, uid, uid, uid));
        let header = Header { version: CAPABILITY_VERSION_3, pid: 0 };
        let empty = [0u32; 6];
        must(Stage::Setup, libc::syscall(libc::SYS_capset, &raw const header, &raw const empty));
        must(Stage::Setup, libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1 as c_ulong, NONE, NONE, NONE).into());
    }
}

/// The first PATH of an environment, or the usual one.
///
/// # Safety
/// As for [`start`], of which `envp` is a part.
unsafe fn search_path<'a>(mut envp: *const *const c_char) -> &'a [u8] {
    // SAFETY: the array ends with a null pointer, and each string before it with a NUL.
    unsafe {
        while !(*envp).is_null() {
            if let Some(path) = std::ffi::CStr::from_ptr(*envp).to_bytes().strip_prefix(b"PATH=") {
                return path;
            }
            envp = envp.add(1);
        }
    }
    DEFAULT_PATH
}

/// Try the candidates as `execvp` does and answer the error number to report. It only comes back on failure.
///
/// # Safety
/// As for [`start`].
unsafe fn execute(command: &Command<'_>) -> c_int {
    // SAFETY: argv, envp and the candidate are NUL-terminated strings in arrays that end with a null pointer.
    unsafe {
        let (argv, envp) = (command.argv, command.envp);
        let program = *argv;
        let name = std::ffi::CStr::from_ptr(program).to_bytes();
        if name.contains(&b'/') {
            libc::execve(program, argv, envp);
            return errno();
        }
        let mut buffer = [0u8; PATH_MAX];
        let mut worst = libc::ENOENT;
        for directory in search_path(envp).split(|&byte| byte == b':') {
            // An empty element is the working directory.
            let directory = if directory.is_empty() { b"." } else { directory };
            let slash = directory.len();
            let end = slash + 1 + name.len();
            if end >= PATH_MAX {
                continue;
            }
            buffer[..slash].copy_from_slice(directory);
            buffer[slash] = b'/';
            buffer[slash + 1..end].copy_from_slice(name);
            buffer[end] = 0;
            libc::execve(buffer.as_ptr().cast(), argv, envp);
            match errno() {
                libc::ENOENT | libc::ENOTDIR | libc::ENODEV | libc::ESTALE | libc::ENAMETOOLONG => {}
                libc::EACCES => worst = libc::EACCES,
                other => return other,
            }
        }
        worst
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_refuses_nul_and_no_command() {
        let limit = libc::rlimit { rlim_cur: 1024, rlim_max: 1024 };
        let plan = |argv: &[&[u8]]| {
            Plan::new(argv.iter().map(|a| a.to_vec()).collect(), vec![], b"/", (1000, 1000), limit, false)
        };
        assert!(plan(&[b"true"]).is_some());
        assert!(plan(&[]).is_none());
        assert!(plan(&[b"a\0b"]).is_none());
    }
}
