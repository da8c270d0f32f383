//! Supervisors that are there before their command.
//!
//! ```text
//!        job: strings, terms, descriptors          nothing of the tree is left
//! Idle ──────────────────────────────────► busy ───────────────────────────────► Idle
//!   └─ the end of its socket: it ends        └─ told to breed: a new Idle one beside it
//! ```
//!
//! A fork of the daemon copies the page tables of a process with threads and a heap, and later every page that either
//! side writes; then the new process sets itself up. The first standing supervisors are forked before the daemon has
//! threads or a configuration, and do all that once: a job costs it a message and the fork of the command. Others
//! are forked by it, as children of the daemon (`CLONE_PARENT`), when a job takes the last idle one, after the
//! command's own fork. So none has seen what the daemon learns. (In a machine the first are forked behind the boot,
//! which has read the drive with the key unless it was a template's; as long as the machine runs the daemon holds that
//! key too.)
//!
//! What it was sent is wiped before it is idle again. Between jobs it has one descriptor, its socket. Like every
//! supervisor it makes system calls only, and commands cannot signal it. A job that is too large is not for it, and
//! where none is idle the daemon forks one supervisor for one command (`supervisor::spawn`).

use crate::launch::{Command, Plan, Terms};
use crate::supervisor::{self, CONTROL, GROUP, Report};
use libc::{c_char, c_int, c_ulong, pid_t, sock_filter};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::convert::Infallible;
use std::ffi::CStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null;

/// The first byte of a job. Other messages that meet an idle supervisor were for a tree that is gone.
const JOB: u8 = b'J';
/// The longest job. It has to fit into a socket whole, with room for a signal or two.
const MOST_BYTES: usize = 32 << 10;
/// How many strings one may have.
const MOST_STRINGS: usize = 1_024;
const HEADER: usize = 32;
/// Standard input, output and error, the group, the newborn's socket.
const MOST_DESCRIPTORS: usize = 5;

/// A descriptor of the command's control group comes along.
const GROUPED: u8 = 1;
/// Say when the program runs.
const ANNOUNCED: u8 = 2;
/// The last descriptor is the socket of a new supervisor.
const BREED: u8 = 4;
const TTY: u8 = 8;

/// How many there are from the beginning: where none can be forked beside another, one for whoever runs a command after
/// the other, whose last supervisor may not be idle again yet.
const FIRST: usize = 2;

/// Fork supervisors that wait for jobs, as far as there is room, and answer the daemon's ends of their sockets. Only while
/// this process has one thread.
pub fn first() -> Vec<OwnedFd> {
    let filter = crate::seccomp::filter();
    let one = || -> io::Result<OwnedFd> {
        let (own, other) = pair()?;
        // SAFETY: the child makes system calls alone and never returns.
        supervisor::fork_with(|| unsafe { stand(other.as_raw_fd(), &filter) })?;
        Ok(own)
    };
    (0..FIRST).map_while(|_| one().ok()).collect()
}

/// The two ends of a supervisor's socket: the daemon's, which does not block, and the other.
pub fn pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let (own, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::io::ioctl_fionbio(&own, true)?;
    Ok((own, other))
}

/// What a job is besides its plan.
pub struct Job<'a> {
    pub streams: [BorrowedFd<'a>; 3],
    pub group: Option<BorrowedFd<'a>>,
    pub breed: Option<BorrowedFd<'a>>,
    pub announce: bool,
}

/// The message for a plan, or `None` where it is too large for one.
pub fn message(plan: &Plan) -> Option<Vec<u8>> {
    let (strings, arguments) = plan.strings();
    let terms = plan.terms();
    let mut bytes = Vec::with_capacity(HEADER + 1_024);
    bytes.extend([JOB, if terms.tty { TTY } else { 0 }, 0, 0]);
    bytes.extend(terms.uid.to_ne_bytes());
    bytes.extend(terms.gid.to_ne_bytes());
    bytes.extend((arguments as u32).to_ne_bytes());
    bytes.extend(terms.open_files.rlim_cur.to_ne_bytes());
    bytes.extend(terms.open_files.rlim_max.to_ne_bytes());
    for (index, string) in strings.enumerate() {
        let string = string.as_bytes_with_nul();
        if index >= MOST_STRINGS || bytes.len() + string.len() > MOST_BYTES {
            return None;
        }
        bytes.extend(string);
    }
    Some(bytes)
}

/// Hand a job to an idle supervisor.
pub fn give(control: &OwnedFd, message: &mut [u8], job: &Job<'_>) -> rustix::io::Result<()> {
    let flags = [(job.group.is_some(), GROUPED), (job.announce, ANNOUNCED), (job.breed.is_some(), BREED)];
    message[1] = message[1] & TTY | flags.iter().filter(|flag| flag.0).fold(0, |all, flag| all | flag.1);
    let mut fds = job.streams.to_vec();
    fds.extend(job.group.iter().chain(&job.breed));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(control, &[IoSlice::new(message)], &mut ancillary, SendFlags::NOSIGNAL).map(drop)
}

/// Memory for one job. Nothing of it is touched beyond what a job fills.
struct Room {
    bytes: MaybeUninit<[u8; MOST_BYTES]>,
    pointers: [MaybeUninit<*const c_char>; MOST_STRINGS + 2],
}

/// # Safety
/// Only in a process that was just forked from one without other threads, with every signal blocked.
unsafe fn stand(control: c_int, filter: &[sock_filter]) -> Infallible {
    // SAFETY: system calls on this process's own descriptors, signals and memory.
    unsafe {
        if !supervisor::settle() || (control != CONTROL && libc::dup3(control, CONTROL, libc::O_CLOEXEC) < 0)
        {
            libc::_exit(1);
        }
        for fd in 0..CONTROL {
            libc::close(fd);
        }
        supervisor::close_from(CONTROL + 1);
        let mut room =
            Room { bytes: MaybeUninit::uninit(), pointers: [MaybeUninit::uninit(); MOST_STRINGS + 2] };
        let mut breeds = true;
        loop {
            Report::Idle { pid: libc::getpid() }.send(CONTROL);
            let length = receive(&mut room);
            serve(&mut room, length, filter, &mut breeds);
        }
    }
}

/// Wait for a job, see that its descriptors are where they belong, and answer its length.
///
/// # Safety
/// As for [`stand`].
unsafe fn receive(room: &mut Room) -> usize {
    // SAFETY: the kernel fills structures of the sizes that it is told; the header's end is where CMSG_LEN says.
    unsafe {
        loop {
            let mut part = libc::iovec { iov_base: room.bytes.as_mut_ptr().cast(), iov_len: MOST_BYTES };
            let mut space = [0u64; 8];
            let mut header: libc::msghdr = std::mem::zeroed();
            header.msg_iov = &raw mut part;
            header.msg_iovlen = 1;
            header.msg_control = space.as_mut_ptr().cast();
            header.msg_controllen = size_of_val(&space) as _;
            let length = libc::recvmsg(CONTROL, &raw mut header, 0);
            if length < 0 && *libc::__errno_location() == libc::EINTR {
                continue;
            }
            let Ok(length @ 1..) = usize::try_from(length) else { libc::_exit(0) };
            let bytes = room.bytes.as_ptr().cast::<u8>();
            if *bytes != JOB {
                continue;
            }
            if header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 || length < HEADER {
                libc::_exit(1);
            }
            let flags = *bytes.add(1);
            let rights = libc::CMSG_FIRSTHDR(&raw const header);
            let count = 3 + c_int::from(flags & GROUPED != 0) + c_int::from(flags & BREED != 0);
            if rights.is_null() || (*rights).cmsg_len as usize != libc::CMSG_LEN(4 * count as u32) as usize {
                libc::_exit(1);
            }
            // The kernel gives the lowest numbers that are free, and 3 alone is not.
            for index in 0..count {
                let place = if index < CONTROL { index } else { index + 1 };
                let fd = libc::CMSG_DATA(rights).cast::<c_int>().add(index as usize).read_unaligned();
                if fd != place || (place > CONTROL && libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) < 0) {
                    libc::_exit(1);
                }
            }
            return length;
        }
    }
}

/// Start a job's command, be there until its tree is gone, and forget everything about it.
///
/// # Safety
/// As for [`stand`].
unsafe fn serve(room: &mut Room, length: usize, filter: &[sock_filter], breeds: &mut bool) {
    // SAFETY: the kernel has filled that many bytes.
    let bytes = unsafe { std::slice::from_raw_parts(room.bytes.as_ptr().cast::<u8>(), length) };
    let flags = bytes[1];
    let grouped = flags & GROUPED != 0;
    // SAFETY: as for this function.
    unsafe {
        let Some(command) = read(bytes, &mut room.pointers, filter) else { libc::_exit(1) };
        let tree = supervisor::begin(&command, grouped, flags & ANNOUNCED != 0);
        if flags & BREED != 0 && breed(if grouped { GROUP + 1 } else { GROUP }, breeds) {
            // This is the new one, which has no tree.
            libc::explicit_bzero(room.bytes.as_mut_ptr().cast(), length);
            return;
        }
        if let Some(tree) = tree {
            supervisor::watch(tree);
        }
        libc::explicit_bzero(room.bytes.as_mut_ptr().cast(), length);
        if grouped {
            libc::close(GROUP);
        }
    }
}

/// What a job says, as [`message`] has put it.
fn read<'a>(
    bytes: &[u8],
    pointers: &mut [MaybeUninit<*const c_char>; MOST_STRINGS + 2],
    filter: &'a [sock_filter],
) -> Option<Command<'a>> {
    let (header, mut rest) = bytes.split_at_checked(HEADER)?;
    let number = |at: usize| Some(u32::from_ne_bytes(header.get(at..at + 4)?.try_into().ok()?));
    let limit = |at: usize| Some(u64::from_ne_bytes(header.get(at..at + 8)?.try_into().ok()?));
    let terms = Terms {
        uid: number(4)?,
        gid: number(8)?,
        open_files: libc::rlimit { rlim_cur: limit(16)?, rlim_max: limit(24)? },
        tty: header[1] & TTY != 0,
    };
    let arguments = number(12)? as usize;
    let mut next = || {
        let string = CStr::from_bytes_until_nul(rest).ok()?;
        rest = &rest[string.count_bytes() + 1..];
        Some(string.as_ptr())
    };
    let cwd = next()?;
    let mut filled = 0;
    let mut put = |pointer| {
        pointers.get_mut(filled)?.write(pointer);
        filled += 1;
        Some(())
    };
    for _ in 0..arguments {
        put(next()?)?;
    }
    put(null())?;
    while let Some(variable) = next() {
        put(variable)?;
    }
    put(null())?;
    let argv = pointers.as_ptr().cast::<*const c_char>();
    // The null pointer behind the arguments was put there, so what comes behind it is in the array.
    (arguments > 0).then(|| Command { argv, envp: argv.wrapping_add(arguments + 1), cwd, terms, filter })
}

/// Fork a supervisor beside this one, where this kernel `breeds` any; `true` in it.
///
/// gVisor takes `CLONE_PARENT` and makes a child all the same, which would be one of the tree. Such a one ends at once, and
/// is reaped before anybody can ask for the tree; it was the last.
///
/// # Safety
/// As for [`stand`].
unsafe fn breed(socket: c_int, breeds: &mut bool) -> bool {
    const NONE: c_ulong = 0;
    // SAFETY: a plain fork, whose child has the parent of this process for its own; and descriptors of its own.
    unsafe {
        if !*breeds {
            libc::close(socket);
            return false;
        }
        let own = libc::getpid();
        let flags = (libc::CLONE_PARENT | libc::SIGCHLD) as c_ulong;
        let child = libc::syscall(libc::SYS_clone, flags, NONE, NONE, NONE, NONE) as pid_t;
        if child != 0 {
            // Where it failed the daemon hears of it by the end of this socket.
            libc::close(socket);
            // Nobody can wait for a process that is not a child.
            *breeds = child < 0 || libc::waitpid(child, std::ptr::null_mut(), 0) < 0;
            return false;
        }
        if libc::getppid() == own {
            libc::_exit(0);
        }
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1 as c_ulong);
        if libc::dup3(socket, CONTROL, libc::O_CLOEXEC) < 0 {
            libc::_exit(1);
        }
        supervisor::close_from(CONTROL + 1);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;

    fn plan(argv: &[&[u8]], env: &[&[u8]], tty: bool) -> Plan {
        let owned = |strings: &[&[u8]]| strings.iter().map(|string| string.to_vec()).collect();
        let open_files = libc::rlimit { rlim_cur: 20_000, rlim_max: u64::MAX };
        Plan::new(owned(argv), owned(env), b"/work", (1000, 1001), open_files, tty).expect("no NUL")
    }

    /// SAFETY of the caller: the array ends with a null pointer.
    fn strings(mut array: *const *const c_char) -> Vec<CString> {
        let mut found = Vec::new();
        // SAFETY: see above.
        unsafe {
            while !(*array).is_null() {
                found.push(CStr::from_ptr(*array).to_owned());
                array = array.add(1);
            }
        }
        found
    }

    #[test]
    fn a_job_says_what_its_plan_does() {
        let (shell, variables): (&[&[u8]], &[&[u8]]) = (&[b"sh", b"", b"-c"], &[b"A=1", b"B="]);
        for (argv, env) in [(shell, variables), (&shell[..1], &[])] {
            for tty in [false, true] {
                let plan = plan(argv, env, tty);
                let bytes = message(&plan).expect("it is small");
                let mut pointers = [MaybeUninit::uninit(); MOST_STRINGS + 2];
                let (read, planned) =
                    (read(&bytes, &mut pointers, &[]).expect("well formed"), plan.command());
                assert_eq!(strings(read.argv), strings(planned.argv));
                assert_eq!(strings(read.envp), strings(planned.envp));
                // SAFETY: both are strings that end with a NUL.
                assert_eq!(unsafe { (CStr::from_ptr(read.cwd), read.terms.tty) }, (c"/work", tty));
                assert_eq!((read.terms.uid, read.terms.gid), (1000, 1001));
                assert_eq!(
                    (read.terms.open_files.rlim_cur, read.terms.open_files.rlim_max),
                    (20_000, u64::MAX)
                );
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_not_for_it() {
        assert!(message(&plan(&[&b"true"[..]; MOST_STRINGS - 1], &[], false)).is_some());
        assert!(message(&plan(&[&b"true"[..]; MOST_STRINGS], &[], false)).is_none());
        let most = MOST_BYTES - HEADER - b"/work\0".len() - 1;
        assert!(message(&plan(&[&vec![b'a'; most]], &[], false)).is_some_and(|job| job.len() == MOST_BYTES));
        assert!(message(&plan(&[&vec![b'a'; most + 1]], &[], false)).is_none());
    }

    #[test]
    fn half_a_job_is_none() {
        let whole = message(&plan(&[b"sh", b"-c", b"true"], &[], false)).expect("it is small");
        for length in 0..whole.len() {
            let mut pointers = [MaybeUninit::uninit(); MOST_STRINGS + 2];
            assert!(read(&whole[..length], &mut pointers, &[]).is_none(), "{length}");
        }
    }
}
