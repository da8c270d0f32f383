//! What can only be known by trying, each in a child of its own.

use super::{Finding, Verdict};
use std::ffi::CStr;
use std::time::{Duration, Instant};

/// How long one attempt may take: each is a handful of system calls.
pub const SECONDS: u64 = 2;
/// How long a child that was killed is waited for.
const GRACE: Duration = Duration::from_millis(500);
/// Whoever commands usually are; an id that owns nothing.
const ORDINARY: libc::uid_t = 1000;

type Tried = Result<(), i32>;

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    Refused(i32),
    Killed(i32),
    Hung,
    NotTried,
}

struct Attempt {
    item: &'static str,
    check: &'static str,
    /// What it means when it can be done, and when it cannot.
    means: (Verdict, Verdict),
    work: fn() -> Tried,
}

const fn wanted(item: &'static str, check: &'static str, work: fn() -> Tried) -> Attempt {
    Attempt { item, check, means: (Verdict::Yes, Verdict::No), work }
}

const fn told(item: &'static str, check: &'static str, work: fn() -> Tried) -> Attempt {
    Attempt { item, check, means: (Verdict::Look, Verdict::Look), work }
}

const ATTEMPTS: &[Attempt] = &[
    told("B2", "overlay in a mount namespace", overlay),
    wanted("B3", "files in memory (memfd_create)", memfd),
    wanted("B4", "no new privileges", no_new_privs),
    wanted("B4", "a seccomp filter", seccomp_filter),
    wanted("B4", "orphans come to the daemon (subreaper)", subreaper),
    wanted("B4", "become another user without groups", become_ordinary),
    told("B4", "user namespace by an ordinary user", user_namespace),
    told("B4", "mount and unmount in a namespace", mount_and_unmount),
    told("B4", "ptrace of a child", trace),
    told("B4", "open /dev/fuse", || open_device(c"/dev/fuse")),
    told("B4", "open /dev/kvm", || open_device(c"/dev/kvm")),
    wanted("B6", "unix socket", unix_socket),
    wanted("B6", "loopback port", loopback_port),
    told("B6", "vsock", vsock),
    wanted("B7", "close_range", close_range),
    told("B7", "openat2", openat2),
    wanted("B8", "a terminal (/dev/ptmx)", || open_device(c"/dev/ptmx")),
    told("B9", "pidfd_open", pidfd_open),
    wanted("B11", "killed with its parent (PR_SET_PDEATHSIG)", die_with_parent),
];

/// Try everything that there is time for.
pub fn all(deadline: Instant) -> Vec<Finding> {
    ATTEMPTS
        .iter()
        .map(|attempt| {
            let (verdict, detail) = match in_child(attempt.work, deadline) {
                Outcome::Done => (attempt.means.0, "can be done".to_string()),
                Outcome::Refused(errno) => {
                    (attempt.means.1, std::io::Error::from_raw_os_error(errno).to_string())
                }
                Outcome::Killed(signal) => (attempt.means.1, format!("ended by signal {signal}")),
                Outcome::Hung => (attempt.means.1, format!("no answer within {SECONDS} s")),
                Outcome::NotTried => (Verdict::Look, "not tried: time is up".to_string()),
            };
            Finding::new(attempt.item, attempt.check, verdict, detail)
        })
        .collect()
}

fn in_child(work: fn() -> Tried, deadline: Instant) -> Outcome {
    let now = Instant::now();
    if now >= deadline {
        return Outcome::NotTried;
    }
    // SAFETY: the child makes system calls and leaves with `_exit`; the probe itself has one thread, and in tests the
    // work allocates nothing.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return Outcome::Refused(errno());
    }
    if child == 0 {
        // SAFETY: system calls on numbers; leaving without handlers is what a forked child has to do.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::setsid();
            libc::_exit(work().err().unwrap_or(0));
        }
    }
    let limit = deadline.min(now + Duration::from_secs(SECONDS));
    if let Some(outcome) = wait(child, limit) {
        return outcome;
    }
    // SAFETY: the child was not waited for yet, so the number is still its own; a session's group has its number.
    unsafe { libc::kill(-child, libc::SIGKILL) };
    let _ = wait(child, Instant::now() + GRACE);
    Outcome::Hung
}

fn wait(child: libc::pid_t, limit: Instant) -> Option<Outcome> {
    loop {
        let mut status = 0;
        // SAFETY: the kernel writes the status.
        if unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child {
            return Some(match status {
                0 => Outcome::Done,
                status if libc::WIFSIGNALED(status) => Outcome::Killed(libc::WTERMSIG(status)),
                status => Outcome::Refused(libc::WEXITSTATUS(status)),
            });
        }
        if Instant::now() >= limit {
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn errno() -> i32 {
    // SAFETY: the C library's errno of this thread always exists.
    unsafe { *libc::__errno_location() }
}

fn must(result: impl Into<i64>) -> Tried {
    if result.into() < 0 { Err(errno()) } else { Ok(()) }
}

fn no_new_privs() -> Tried {
    // SAFETY: a call on numbers, as all of the following that say nothing else.
    must(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })
}

fn seccomp_filter() -> Tried {
    no_new_privs()?;
    // One instruction: allow everything (SECCOMP_RET_ALLOW).
    let allow = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0x7fff_0000 };
    let program = libc::sock_fprog { len: 1, filter: (&raw const allow).cast_mut() };
    // SAFETY: the kernel copies the program, which lives until the call returns.
    must(unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::c_ulong::from(libc::SECCOMP_MODE_FILTER), &raw const program)
    })
}

fn subreaper() -> Tried {
    // SAFETY: numbers.
    must(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) })
}

fn die_with_parent() -> Tried {
    // SAFETY: numbers.
    must(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) })
}

fn become_ordinary() -> Tried {
    // SAFETY: numbers, and an empty list of groups. Raw calls: the C library's would signal every thread.
    unsafe {
        must(libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()))?;
        must(libc::syscall(libc::SYS_setresgid, ORDINARY, ORDINARY, ORDINARY))?;
        must(libc::syscall(libc::SYS_setresuid, ORDINARY, ORDINARY, ORDINARY))
    }
}

fn user_namespace() -> Tried {
    // SAFETY: numbers.
    if unsafe { libc::geteuid() } == 0 {
        become_ordinary()?;
    }
    // SAFETY: numbers.
    must(unsafe { libc::unshare(libc::CLONE_NEWUSER) })
}

/// A mount namespace whose mounts reach nobody, with an empty file system at `/tmp`.
fn private_tmp() -> Tried {
    // SAFETY: numbers and strings that live for ever. Nothing is mounted before the namespace is private.
    unsafe {
        must(libc::unshare(libc::CLONE_NEWNS))?;
        let private = libc::MS_REC | libc::MS_PRIVATE;
        must(libc::mount(std::ptr::null(), c"/".as_ptr(), std::ptr::null(), private, std::ptr::null()))?;
        let flags = libc::MS_NOSUID | libc::MS_NODEV;
        let size = c"size=1m".as_ptr().cast();
        must(libc::mount(c"tmpfs".as_ptr(), c"/tmp".as_ptr(), c"tmpfs".as_ptr(), flags, size))
    }
}

fn mount_and_unmount() -> Tried {
    private_tmp()?;
    // SAFETY: a string that lives for ever.
    must(unsafe { libc::umount2(c"/tmp".as_ptr(), 0) })
}

fn overlay() -> Tried {
    private_tmp()?;
    // SAFETY: strings that live for ever; everything is in the file system made above, which nobody else sees.
    unsafe {
        for name in [c"/tmp/lower", c"/tmp/upper", c"/tmp/work", c"/tmp/merged"] {
            must(libc::mkdir(name.as_ptr(), 0o700))?;
        }
        let options = c"lowerdir=/tmp/lower,upperdir=/tmp/upper,workdir=/tmp/work".as_ptr().cast();
        must(libc::mount(c"overlay".as_ptr(), c"/tmp/merged".as_ptr(), c"overlay".as_ptr(), 0, options))
    }
}

fn trace() -> Tried {
    // SAFETY: numbers; the grandchild only waits, and is ended here or with this child.
    unsafe {
        let own = libc::fork();
        must(own)?;
        if own == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::alarm(SECONDS as libc::c_uint);
            libc::pause();
            libc::_exit(0);
        }
        let result = must(libc::ptrace(libc::PTRACE_SEIZE, own, 0, 0));
        libc::kill(own, libc::SIGKILL);
        result
    }
}

fn open_device(path: &CStr) -> Tried {
    // SAFETY: a string that lives for ever.
    must(unsafe {
        libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC | libc::O_NOCTTY | libc::O_NONBLOCK)
    })
}

fn memfd() -> Tried {
    // SAFETY: a string that lives for ever.
    must(unsafe { libc::memfd_create(c"probe".as_ptr(), libc::MFD_CLOEXEC) })
}

fn unix_socket() -> Tried {
    // SAFETY: an address of zeros with a family is a value; the kernel copies it. With the family alone it picks a free
    // abstract name (unix(7), autobind).
    unsafe {
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0);
        must(socket)?;
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        must(libc::bind(socket, (&raw const address).cast(), size_of::<libc::sa_family_t>() as u32))?;
        must(libc::listen(socket, 1))
    }
}

fn loopback_port() -> Tried {
    // SAFETY: as above; port 0 lets the kernel pick a free one.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
        must(socket)?;
        let mut address: libc::sockaddr_in = std::mem::zeroed();
        address.sin_family = libc::AF_INET as libc::sa_family_t;
        address.sin_addr.s_addr = u32::from(std::net::Ipv4Addr::LOCALHOST).to_be();
        must(libc::bind(socket, (&raw const address).cast(), size_of::<libc::sockaddr_in>() as u32))?;
        must(libc::listen(socket, 1))
    }
}

fn vsock() -> Tried {
    // SAFETY: numbers.
    must(unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0) })
}

fn close_range() -> Tried {
    // SAFETY: descriptors of this child that are not open.
    must(unsafe { libc::syscall(libc::SYS_close_range, 1_000_000_000, u32::MAX, 0) })
}

fn openat2() -> Tried {
    let how: [u64; 3] = [(libc::O_PATH | libc::O_CLOEXEC) as u64, 0, 0];
    // SAFETY: the kernel reads the string and three numbers, whose size is given.
    must(unsafe {
        libc::syscall(libc::SYS_openat2, libc::AT_FDCWD, c"/".as_ptr(), how.as_ptr(), size_of_val(&how))
    })
}

fn pidfd_open() -> Tried {
    // SAFETY: numbers.
    must(unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    #[test]
    fn an_attempt_says_how_it_ended() {
        assert_eq!(in_child(|| Ok(()), soon()), Outcome::Done);
        assert_eq!(in_child(|| Err(libc::EPERM), soon()), Outcome::Refused(libc::EPERM));
        let killed = || {
            // SAFETY: the child ends itself.
            must(unsafe { libc::kill(libc::getpid(), libc::SIGKILL) })
        };
        assert_eq!(in_child(killed, soon()), Outcome::Killed(libc::SIGKILL));
        assert_eq!(in_child(|| Ok(()), Instant::now()), Outcome::NotTried);
    }

    #[test]
    fn one_that_hangs_is_ended() {
        let hangs = || loop {
            // SAFETY: waits for a signal.
            unsafe { libc::pause() };
        };
        assert_eq!(in_child(hangs, Instant::now() + Duration::from_millis(50)), Outcome::Hung);
    }

    #[test]
    fn what_every_linux_has_is_found() {
        for (name, work) in [
            ("no new privileges", no_new_privs as fn() -> Tried),
            ("subreaper", subreaper),
            ("unix socket", unix_socket),
            ("loopback", loopback_port),
            ("memfd", memfd),
        ] {
            assert_eq!(in_child(work, soon()), Outcome::Done, "{name}");
        }
        assert_eq!(in_child(|| open_device(c"/dev/no-such-device"), soon()), Outcome::Refused(libc::ENOENT));
    }
}
