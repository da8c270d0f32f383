//! The system call filter of every command, on top of the runtime's own profile.
//!
//! It closes what a process without capabilities could still use to reach outside its sandbox: new
//! namespaces, socket families that no network namespace confines (vsock above all), foreign system call
//! tables that would pass the numbers below unread, and large kernel interfaces that agents' commands do not
//! need. A call that is refused answers EPERM; `clone3` answers ENOSYS, because its flags lie in memory that a
//! filter cannot read and the C library then falls back to `clone`.
//!
//! `ptrace` stays for what a process started itself (PTRACE_TRACEME, as debuggers and strace do), but not by attaching:
//! two processes that trace each other and ask for exit stops (PTRACE_O_TRACEEXIT) wait for each other when they are
//! killed, and nothing ends them any more, not even their control group. Those who trace only their own children
//! cannot form such a ring; nor can one command's tracer hold the dead of another's tree.
//!
//! A changed limit of core dumps is answered by success and nothing happens: programs insist on setting it to 0 (key
//! agents end without it), but the launcher's 1 is what dumps nothing (`launch.rs`).
//!
//! The kernel reads `int` arguments as their low 32 bits, so the filter compares exactly those and never the
//! high half, which a caller may fill as it likes.
//!
//! The numbers are looked for by halves. As the kernel takes a filter it runs it for every number there is, to
//! remember which are always allowed, and that is a part of each command's start: 110 comparisons one after the other
//! took ten times as long.

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, c_long, sock_filter,
};

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: u32 = 0xc000_00b7;

const OFFSET_NR: u32 = 0;
const OFFSET_ARCH: u32 = 4;
const X32_BIT: u32 = 0x4000_0000;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const EPERM: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
const DONE: u32 = libc::SECCOMP_RET_ERRNO;
const ENOSYS: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

/// `clone` has its exit signal in the low byte, where `unshare` has CLONE_NEWTIME.
const CLONE_NEWTIME: u32 = 0x80;
const CLONE_NEW: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32;

/// `S_IFCHR`, which is in `S_IFBLK` too. Linux asks for a capability that no command has; gVisor does not, and there a
/// node of one's own gets around the mode of the one in `/dev`.
const DEVICE: u32 = 0o020000;
/// `open_tree_attr`, younger than the C library's headers; the same number on every architecture.
const SYS_OPEN_TREE_ATTR: c_long = 467;

/// So few rules are asked one after the other.
const LINE: usize = 3;

/// The two ways to trace a process that did not ask for it.
const ATTACHING: [u32; 2] = [libc::PTRACE_ATTACH, libc::PTRACE_SEIZE];

const REFUSED: &[c_long] = &[
    libc::SYS_setns,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    SYS_OPEN_TREE_ATTR,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
];

fn statement(code: u32, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

fn load(offset: u32) -> sock_filter {
    statement(BPF_LD | BPF_W | BPF_ABS, offset)
}

/// The low half of an argument on a little-endian machine.
fn load_argument(index: u32) -> sock_filter {
    load(16 + 8 * index)
}

fn answer(action: u32) -> sock_filter {
    statement(BPF_RET | BPF_K, action)
}

/// Go `yes` or `no` instructions further.
fn branch(test: u32, k: u32, yes: u8, no: u8) -> sock_filter {
    sock_filter { code: (BPF_JMP | test | BPF_K) as u16, jt: yes, jf: no, k }
}

/// A system call and what is to be done about it, which ends in an answer on every way.
type Rule = (u32, Vec<sock_filter>);

/// Run the rule of the number in the accumulator, or allow it. `rules` are sorted.
fn find(rules: &[Rule]) -> Vec<sock_filter> {
    if rules.len() > LINE {
        let (below, rest) = rules.split_at(rules.len() / 2);
        let (below, rest_start) = (find(below), rest[0].0);
        let mut program = vec![branch(BPF_JGE, rest_start, below.len() as u8, 0)];
        program.extend(below);
        program.extend(find(rest));
        return program;
    }
    let mut program = Vec::new();
    for (number, then) in rules {
        program.push(branch(BPF_JEQ, *number, 0, then.len() as u8));
        program.extend_from_slice(then);
    }
    program.push(answer(ALLOW));
    program
}

/// The program, ready for `PR_SET_SECCOMP`.
pub fn filter() -> Vec<sock_filter> {
    let mut rules = rules();
    rules.sort_unstable_by_key(|rule| rule.0);
    let mut program = vec![
        load(OFFSET_ARCH),
        branch(BPF_JEQ, AUDIT_ARCH, 1, 0),
        answer(EPERM),
        load(OFFSET_NR),
        branch(BPF_JSET, X32_BIT, 0, 1),
        answer(EPERM),
    ];
    program.extend(find(&rules));
    program
}

fn rules() -> Vec<Rule> {
    let mut rules = Vec::new();
    let mut when = |number: c_long, then: &[sock_filter]| rules.push((number as u32, then.to_vec()));
    for &number in REFUSED {
        when(number, &[answer(EPERM)]);
    }
    when(libc::SYS_clone3, &[answer(ENOSYS)]);
    let flags = |mask| [load_argument(0), branch(BPF_JSET, mask, 0, 1), answer(EPERM), answer(ALLOW)];
    when(libc::SYS_clone, &flags(CLONE_NEW));
    when(libc::SYS_unshare, &flags(CLONE_NEW | CLONE_NEWTIME));
    let [attach, seize] = ATTACHING;
    let requests = [
        load_argument(0),
        branch(BPF_JEQ, attach, 1, 0),
        branch(BPF_JEQ, seize, 0, 1),
        answer(EPERM),
        answer(ALLOW),
    ];
    when(libc::SYS_ptrace, &requests);
    let core = libc::RLIMIT_CORE;
    let limits = [load_argument(0), branch(BPF_JEQ, core, 0, 1), answer(DONE), answer(ALLOW)];
    when(libc::SYS_setrlimit, &limits);
    let limits = [
        load_argument(1),
        branch(BPF_JEQ, core, 0, 5),
        // Without new values, a null pointer, it only asks.
        load_argument(2),
        branch(BPF_JEQ, 0, 0, 2),
        load(16 + 8 * 2 + 4),
        branch(BPF_JEQ, 0, 1, 0),
        answer(DONE),
        answer(ALLOW),
    ];
    when(libc::SYS_prlimit64, &limits);
    let families = [
        load_argument(0),
        branch(BPF_JEQ, libc::AF_UNIX as u32, 5, 0),
        branch(BPF_JEQ, libc::AF_INET as u32, 4, 0),
        branch(BPF_JEQ, libc::AF_INET6 as u32, 3, 0),
        branch(BPF_JEQ, libc::AF_NETLINK as u32, 0, 3),
        load_argument(2),
        branch(BPF_JEQ, libc::NETLINK_ROUTE as u32, 0, 1),
        answer(ALLOW),
        answer(EPERM),
    ];
    when(libc::SYS_socket, &families);
    when(libc::SYS_socketpair, &families);
    // Files of the kinds that are devices; of the others that may be made so, none has this bit.
    let kinds =
        |argument| [load_argument(argument), branch(BPF_JSET, DEVICE, 0, 1), answer(EPERM), answer(ALLOW)];
    #[cfg(target_arch = "x86_64")]
    when(libc::SYS_mknod, &kinds(1));
    when(libc::SYS_mknodat, &kinds(2));
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Call {
        arch: u32,
        nr: u32,
        args: [u64; 6],
    }

    /// As much of classic BPF as the program uses.
    fn run(program: &[sock_filter], call: &Call) -> u32 {
        let mut data = Vec::new();
        data.extend_from_slice(&call.nr.to_le_bytes());
        data.extend_from_slice(&call.arch.to_le_bytes());
        data.extend_from_slice(&[0; 8]);
        for argument in call.args {
            data.extend_from_slice(&argument.to_le_bytes());
        }
        let (mut at, mut accumulator) = (0, 0u32);
        loop {
            let step = program[at];
            at += 1;
            match u32::from(step.code) {
                code if code == BPF_LD | BPF_W | BPF_ABS => {
                    let k = step.k as usize;
                    accumulator = u32::from_le_bytes(data[k..k + 4].try_into().unwrap());
                }
                code if code == BPF_RET | BPF_K => return step.k,
                code if code == BPF_JMP | BPF_JEQ | BPF_K => {
                    at += usize::from(if accumulator == step.k { step.jt } else { step.jf });
                }
                code if code == BPF_JMP | BPF_JGE | BPF_K => {
                    at += usize::from(if accumulator >= step.k { step.jt } else { step.jf });
                }
                code if code == BPF_JMP | BPF_JSET | BPF_K => {
                    at += usize::from(if accumulator & step.k != 0 { step.jt } else { step.jf });
                }
                code => panic!("instruction {code:#x}"),
            }
        }
    }

    fn answer_to(nr: c_long, args: [u64; 6]) -> u32 {
        run(&filter(), &Call { arch: AUDIT_ARCH, nr: nr as u32, args })
    }

    fn first(argument: u64) -> [u64; 6] {
        [argument, 0, 0, 0, 0, 0]
    }

    #[test]
    fn the_listed_calls_are_refused_and_others_pass() {
        for &number in REFUSED {
            assert_eq!(answer_to(number, [0; 6]), EPERM, "{number}");
        }
        assert_eq!(answer_to(libc::SYS_clone3, [0; 6]), ENOSYS);
        for number in
            [libc::SYS_read, libc::SYS_execve, libc::SYS_openat, libc::SYS_ptrace, libc::SYS_openat2]
        {
            assert_eq!(answer_to(number, [u64::MAX; 6]), ALLOW, "{number}");
        }
    }

    /// Against the rules asked one after the other, for numbers far beyond those that there are.
    #[test]
    fn looking_by_halves_finds_what_looking_in_a_row_does() {
        let rules = rules();
        let program = filter();
        assert!(rules.iter().all(|rule| rule.1.len() < 255) && program.len() < 255, "a jump is one byte");
        for nr in (0..1_024).chain([X32_BIT - 1]) {
            for args in [[0; 6], [u64::MAX; 6], [16, 2, 0, 0, 0, 0], [4, 4, 1, 0, 0, 0]] {
                let call = Call { arch: AUDIT_ARCH, nr, args };
                let mut found = rules.iter().filter(|rule| rule.0 == nr);
                let expected = found.next().map_or(ALLOW, |rule| run(&rule.1, &call));
                assert!(found.next().is_none(), "two rules for {nr}");
                assert_eq!(run(&program, &call), expected, "{nr} {args:?}");
            }
        }
    }

    #[test]
    fn foreign_tables_are_refused_whole() {
        for arch in [0x4000_0003, 0x4000_0028, 0, AUDIT_ARCH ^ 1] {
            for nr in [0, 39, 57, 1000] {
                assert_eq!(run(&filter(), &Call { arch, nr, args: [0; 6] }), EPERM);
            }
        }
        for nr in [X32_BIT, X32_BIT | 39, u32::MAX] {
            assert_eq!(run(&filter(), &Call { arch: AUDIT_ARCH, nr, args: [0; 6] }), EPERM);
        }
    }

    #[test]
    fn namespaces_are_refused_and_threads_are_not() {
        for bit in [17u32, 25, 26, 27, 28, 29, 30] {
            let flags = 1u64 << bit;
            for noise in [0, libc::SIGCHLD as u64, 0xffff_ffff_0000_0000] {
                assert_eq!(answer_to(libc::SYS_clone, first(flags | noise)), EPERM, "bit {bit}");
                assert_eq!(answer_to(libc::SYS_unshare, first(flags | noise)), EPERM, "bit {bit}");
            }
        }
        let thread =
            libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
        assert_eq!(answer_to(libc::SYS_clone, first(thread as u64)), ALLOW);
        assert_eq!(answer_to(libc::SYS_clone, first(u64::from(CLONE_NEWTIME))), ALLOW, "an exit signal");
        assert_eq!(answer_to(libc::SYS_unshare, first(u64::from(CLONE_NEWTIME))), EPERM);
        assert_eq!(answer_to(libc::SYS_unshare, first(libc::CLONE_FS as u64)), ALLOW);
    }

    #[test]
    fn tracing_is_for_those_who_ask_for_it() {
        for request in 0..0x4300u32 {
            let expected = if ATTACHING.contains(&request) { EPERM } else { ALLOW };
            assert_eq!(answer_to(libc::SYS_ptrace, first(request.into())), expected, "{request:#x}");
        }
    }

    #[test]
    fn the_limit_of_core_dumps_stays() {
        let core = u64::from(libc::RLIMIT_CORE);
        for high in [0, 0xffff_ffff_0000_0000u64] {
            assert_eq!(answer_to(libc::SYS_setrlimit, first(core | high)), DONE);
            assert_eq!(answer_to(libc::SYS_setrlimit, first(7 | high)), ALLOW);
            for (new, expected) in [(0, ALLOW), (1, DONE), (1 << 32, DONE), (u64::MAX, DONE)] {
                assert_eq!(answer_to(libc::SYS_prlimit64, [0, core | high, new, 0, 0, 0]), expected);
                assert_eq!(answer_to(libc::SYS_prlimit64, [0, 7 | high, new, 0, 0, 0]), ALLOW);
            }
        }
    }

    #[test]
    fn no_device_is_made() {
        for permissions in [0, 0o777] {
            for (kind, expected) in [
                (libc::S_IFCHR, EPERM),
                (libc::S_IFBLK, EPERM),
                (libc::S_IFIFO, ALLOW),
                (libc::S_IFREG, ALLOW),
                (libc::S_IFSOCK, ALLOW),
                (0, ALLOW),
            ] {
                let mode = u64::from(kind | permissions);
                #[cfg(target_arch = "x86_64")]
                assert_eq!(answer_to(libc::SYS_mknod, [u64::MAX, mode, 0x700, 0, 0, 0]), expected);
                assert_eq!(answer_to(libc::SYS_mknodat, [0, u64::MAX, mode, 0x700, 0, 0]), expected);
            }
        }
    }

    #[test]
    fn sockets_are_of_four_families() {
        for call in [libc::SYS_socket, libc::SYS_socketpair] {
            for high in [0, 0xffff_ffff_0000_0000u64] {
                for family in 0..64u64 {
                    let expected = if [1, 2, 10, 16].contains(&family) { ALLOW } else { EPERM };
                    assert_eq!(answer_to(call, [family | high, 1, high, 0, 0, 0]), expected, "{family}");
                }
                for protocol in 1..32 {
                    assert_eq!(answer_to(call, [16 | high, 3, protocol | high, 0, 0, 0]), EPERM);
                }
            }
        }
    }

    /// The kernel takes the program and answers as the interpreter above does.
    #[test]
    fn the_kernel_agrees() {
        let program = filter();
        let fprog = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
        // SAFETY: the child makes system calls alone, allocates nothing and leaves by _exit; the parent waits.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
                let mut wrong = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &fprog);
                let refused =
                    |result: c_long, errno| i32::from(result != -1 || *libc::__errno_location() != errno);
                for &number in REFUSED {
                    wrong |= refused(libc::syscall(number, -1, -1, -1, -1, -1, -1), libc::EPERM);
                }
                wrong |= refused(libc::syscall(libc::SYS_clone3, 0, 0), libc::ENOSYS);
                wrong |= refused(libc::syscall(libc::SYS_ptrace, ATTACHING[0], -1), libc::EPERM);
                wrong |= refused(libc::syscall(libc::SYS_unshare, libc::CLONE_NEWUSER), libc::EPERM);
                wrong |= refused(
                    libc::syscall(libc::SYS_clone, libc::CLONE_NEWNET | libc::SIGCHLD, 0),
                    libc::EPERM,
                );
                wrong |= refused(libc::syscall(libc::SYS_socket, 40, libc::SOCK_STREAM, 0), libc::EPERM);
                wrong |= i32::from(libc::syscall(libc::SYS_socket, libc::AF_UNIX, libc::SOCK_STREAM, 0) < 0);
                wrong |= i32::from(libc::syscall(libc::SYS_getpid) <= 0);
                libc::_exit(i32::from(wrong != 0));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            status
        };
        assert_eq!(status, 0);
    }
}
