"""The seccomp profile of every sandbox: one allow list, as an OCI ``linux.seccomp`` value. Pure.

Strategy
--------
* What is not named answers ENOSYS, as on a kernel that lacks the call: programs probe for new calls and fall back,
  which they do not after EPERM. A call of a future kernel is therefore closed until somebody adds it here.
* Calls that are known and refused answer EPERM, so that an error names the reason: no permission, not "no such call".
* The profile serves the daemon and its commands alike, since a filter is inherited. The daemon's launcher adds its own
  and stricter filter before a command starts (``docs/design``, privilege split); here stands what not even a
  taken-over daemon may do.
* ``clone3`` hides its flags behind a pointer that a filter cannot read, so it is ENOSYS and the C library uses
  ``clone``, whose namespace flags are refused. ``socket`` is open for UNIX, INET, INET6 and NETLINK_ROUTE alone: vsock
  has no namespace and would lead out of a sandbox without a network.
* The old asynchronous I/O (``io_setup`` and its kin) is not named: its contexts come out of one number for the whole
  host (``fs.aio-max-nr``), which one call can use up. What would use it falls back to threads.
* Calls of a foreign architecture (32-bit ones) kill the caller, as libseccomp does for what is not named here. x32 is
  named, since its calls are those of x86_64 with another number: so the launcher's EPERM is what a command meets.

When adding a call: name the ordinary program that needs it in the commit, and check that it does nothing without a
capability that the daemon does not have.
"""

from __future__ import annotations

from typing import Any

from agent_sandbox.errors import BackendError

EPERM, ENOSYS = 1, 38

ARCHITECTURES = {
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X32"],
    "aarch64": ["SCMP_ARCH_AARCH64"],
}

_FILES = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate
fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr fstat
fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr getxattrat inotify_add_watch inotify_init
inotify_init1 inotify_rm_watch ioctl lchown lgetxattr link linkat listxattr listxattrat llistxattr lremovexattr lseek
lsetxattr lstat mkdir mkdirat mknod mknodat name_to_handle_at newfstatat open openat openat2 pread64 preadv preadv2
pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr removexattrat rename renameat renameat2
rmdir sendfile setxattr setxattrat splice stat statfs statx symlink symlinkat sync sync_file_range syncfs tee truncate
umask unlink unlinkat utime utimensat utimes vmsplice write writev
"""

_WAITING = """
epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2
pipe pipe2 poll ppoll pselect6 select signalfd
signalfd4 timerfd_create timerfd_gettime timerfd_settime
"""

_MEMORY = """
brk cachestat get_mempolicy madvise map_shadow_stack membarrier memfd_create mincore mlock mlock2 mlockall mmap mprotect
mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect process_madvise process_mrelease
remap_file_pages
"""

_PROCESSES = """
arch_prctl capget capset execve execveat exit exit_group fork futex futex_requeue futex_wait futex_waitv futex_wake
get_robust_list get_thread_area getcpu getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority
getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self pause pidfd_open pidfd_send_signal prctl prlimit64 process_vm_readv
process_vm_writev ptrace restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity
sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam
sched_setscheduler sched_yield seccomp set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid
setgroups setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack sysinfo tgkill
times tkill uname vfork wait4 waitid
"""

_TIME = """
adjtimex alarm clock_adjtime clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep setitimer time
timer_create timer_delete timer_getoverrun timer_gettime timer_settime
"""

_TALKING = """
accept accept4 bind connect getpeername getrandom getsockname getsockopt listen mq_getsetattr mq_notify mq_open
mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd recvfrom recvmmsg recvmsg semctl semget semop
semtimedop sendmmsg sendmsg sendto setsockopt shmat shmctl shmdt shmget shutdown socketpair
"""

_REFUSED = """
acct add_key bpf chroot clock_settime delete_module fanotify_init fanotify_mark finit_module fsconfig fsmount fsopen
fspick init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl
listmount lookup_dcookie lsm_set_self_attr mbind migrate_pages modify_ldt mount mount_setattr move_mount move_pages
nfsservctl open_by_handle_at open_tree open_tree_attr perf_event_open pidfd_getfd pivot_root quotactl quotactl_fd reboot
request_key set_mempolicy set_mempolicy_home_node setdomainname sethostname setns settimeofday statmount swapoff swapon
syslog umount umount2 unshare userfaultfd uselib vhangup
"""

CLONE_NAMESPACES = {
    "CLONE_NEWTIME": 0x00000080,
    "CLONE_NEWNS": 0x00020000,
    "CLONE_NEWCGROUP": 0x02000000,
    "CLONE_NEWUTS": 0x04000000,
    "CLONE_NEWIPC": 0x08000000,
    "CLONE_NEWUSER": 0x10000000,
    "CLONE_NEWPID": 0x20000000,
    "CLONE_NEWNET": 0x40000000,
}
"""Namespace flags. NEWTIME lies in the bits of clone's exit signal, so only clone3 and unshare have it."""

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16

_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)
"""PER_LINUX, PER_LINUX32, both with UNAME26, ADDR_NO_RANDOMIZE (debuggers), and the query."""


def profile(machine: str) -> dict[str, Any]:
    """Build the ``linux.seccomp`` object of a config.json for a machine as ``os.uname()`` names it.

    Raises :class:`BackendError` for a machine that has no reviewed profile.
    """
    if machine not in ARCHITECTURES:
        raise BackendError(f"no seccomp profile for {machine} machines; supported: {', '.join(sorted(ARCHITECTURES))}")
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": ENOSYS,
        "architectures": list(ARCHITECTURES[machine]),
        "syscalls": [_allow(allowed()), _refuse(refused()), *_clone(), *_socket(), *_personality()],
    }


def allowed() -> list[str]:
    """The calls that are open whatever their arguments."""
    return sorted(set(" ".join((_FILES, _WAITING, _MEMORY, _PROCESSES, _TIME, _TALKING)).split()))


def refused() -> list[str]:
    """The calls that answer EPERM whatever their arguments."""
    return sorted(_REFUSED.split())


def _allow(names: list[str], *args: dict[str, Any]) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": names, "action": "SCMP_ACT_ALLOW"}
    return {**rule, "args": list(args)} if args else rule


def _refuse(names: list[str], *args: dict[str, Any]) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM}
    return {**rule, "args": list(args)} if args else rule


def _equal(index: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": value, "op": "SCMP_CMP_EQ"}


def _masked(index: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _clone() -> list[dict[str, Any]]:
    flags = [flag for name, flag in CLONE_NAMESPACES.items() if name != "CLONE_NEWTIME"]
    return [_allow(["clone"], _masked(0, sum(flags), 0)), *(_refuse(["clone"], _masked(0, bit, bit)) for bit in flags)]


def _socket() -> list[dict[str, Any]]:
    rules = [_allow(["socket"], _equal(0, family)) for family in (AF_UNIX, AF_INET, AF_INET6)]
    rules.append(_allow(["socket"], _equal(0, AF_NETLINK), _equal(2, 0)))
    rules.append(_refuse(["socket"], _equal(0, AF_NETLINK), {"index": 2, "value": 0, "op": "SCMP_CMP_GT"}))
    others = set(range(AF_NETLINK)) - {AF_UNIX, AF_INET, AF_INET6}
    rules += [_refuse(["socket"], _equal(0, family)) for family in sorted(others)]
    rules.append(_refuse(["socket"], {"index": 0, "value": AF_NETLINK, "op": "SCMP_CMP_GT"}))
    return rules


def _personality() -> list[dict[str, Any]]:
    return [_allow(["personality"], _equal(0, value)) for value in _PERSONALITIES]
