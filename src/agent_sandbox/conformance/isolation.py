"""Limits hit from inside, and what a command must not be able to do. Every refusal in the contract's list is a test."""

from __future__ import annotations

import asyncio
import base64
import pathlib
import re
import time

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.guest_backend import GuestBackend
from agent_sandbox.conformance.box import Box
from agent_sandbox.conformance.suite import SuiteBase
from agent_sandbox.errors import BackendError, LimitExceededError
from agent_sandbox.guest import Guest

SYSCALL = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in args])
    return 'ok' if result >= 0 else errno.errorcode[ctypes.get_errno()]
"""
X86_64 = {
    "unshare": 272, "setns": 308, "clone3": 435, "mount": 165, "umount2": 166, "pivot_root": 155, "move_mount": 429,
    "open_tree": 428, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "add_key": 248, "request_key": 249,
    "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "open_by_handle_at": 304,
}  # fmt: skip
AARCH64 = {
    "unshare": 97, "setns": 268, "clone3": 435, "mount": 40, "umount2": 39, "pivot_root": 41, "move_mount": 429,
    "open_tree": 428, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "add_key": 217, "request_key": 218,
    "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "open_by_handle_at": 265,
}  # fmt: skip
TRACING = """
import ctypes, errno, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
TRACE_ME, CONTINUE, ATTACH, SET_OPTIONS, SEIZE, TRACE_EXIT = 0, 7, 16, 0x4200, 0x4206, 0x40
def ptrace(*args):
    ctypes.set_errno(0)
    return 'ok' if libc.ptrace(*args) >= 0 else errno.errorcode[ctypes.get_errno()]
"""
NAMESPACES = {"newns": 0x20000, "newuts": 0x4000000, "newipc": 0x8000000, "newuser": 0x10000000, "newpid": 0x20000000,
              "newnet": 0x40000000, "newcgroup": 0x2000000}  # fmt: skip


class LimitSuite(SuiteBase):
    """Fault 35: each limit holds, hit from inside, and others are not hurt."""

    async def test_f35_memory(self, backend: Backend, box: Box) -> None:
        other = await self.new_box(backend)
        result = await box.python(
            "x = bytearray(600 * 1024 * 1024)\nfor i in range(0, len(x), 4096): x[i] = 1", timeout=60
        )
        assert result.status == 137
        assert await other.shell("echo fine") == "fine\n"
        assert await box.shell("echo fine") == "fine\n"

    async def test_f35_memory_by_many_processes(self, box: Box) -> None:
        program = "import os, time\nfor _ in range(20):\n if os.fork() == 0:\n" \
                  "  x = b'y' * (60 * 1024 * 1024); time.sleep(5); os._exit(0)\n" \
                  "while True:\n try: os.wait()\n except ChildProcessError: break"  # fmt: skip
        await box.python(program, timeout=60)
        assert await box.shell("echo fine", timeout=20) == "fine\n"

    async def test_f35_tmp_is_bounded_and_counts_against_memory(self, box: Box) -> None:
        result = await box.run("head -c 200000000 /dev/zero > /tmp/fill; stat -c %s /tmp/fill", timeout=60)
        assert int(result.text) <= box.spec.tmp_mb * 1024 * 1024
        await box.shell("rm /tmp/fill; echo ok > /tmp/small")
        shm = await box.run("head -c 400000000 /dev/zero > /dev/shm/fill; stat -c %s /dev/shm/fill", timeout=60)
        assert int(shm.text or 0) <= 64 * 1024 * 1024

    async def test_f35_processes(self, backend: Backend, box: Box) -> None:
        other = await self.new_box(backend)
        count = (
            "import os, time\nn = 0\ntry:\n while n < 1000:\n  if os.fork() == 0: time.sleep(60); os._exit(0)\n  n += 1\n"
            "except OSError: pass\nprint(n)"
        )
        result = await box.python(count + "\nos.kill(0, 9)", timeout=30)
        assert int(result.text or -1) < box.spec.pids_limit
        assert await other.shell("echo fine") == "fine\n"

    async def test_f35_processes_used_up_is_a_typed_error_and_passes(self, box: Box) -> None:
        bomb = (
            "import os,time\nwhile True:\n try:\n  if os.fork() == 0: time.sleep(60)\n except OSError: time.sleep(0.05)"
        )
        bomber = asyncio.create_task(box.python(bomb, timeout=4))
        await asyncio.sleep(2)
        try:
            result = await box.run(["true"], timeout=60)
            assert result.status in (0, 126, 127)
        except LimitExceededError:
            pass
        assert await box.backend.list_files(box.id, "/workspace") == []
        assert (await bomber).exit.timed_out
        assert await box.answers_again()

    async def test_f35_cpu(self, backend: Backend) -> None:
        box = await self.new_box(backend, cpus=0.25)
        spin = "import os, time\nfor _ in range(3): os.fork() == 0 and None\nt = time.time()\n" \
               "while time.time() - t < 2: pass\nprint(os.times().user)"  # fmt: skip
        began, before = time.monotonic(), await _cpu_seconds(box)
        result = await box.python(spin, timeout=30)
        used, seconds = await _cpu_seconds(box), time.monotonic() - began
        if before is None or used is None:  # what the guest counts: ticks of its clock may go on while it is held back
            before, used, seconds = 0.0, sum(map(float, result.text.split())), 2.0
        assert 0 < used - before < seconds * 0.25 * 1.6 + 0.2

    async def test_f35_disk(self, backend: Backend, box: Box) -> None:
        other = await self.new_box(backend)
        result = await box.run("head -c 200000000 /dev/zero > fill", timeout=60)
        assert result.status != 0
        assert b"No space left" in result.stderr
        assert int(await box.shell("stat -c %s fill")) <= box.spec.disk_mb * 1024 * 1024
        with pytest.raises(LimitExceededError):
            await box.put("another", bytes(1_000_000))
        await other.put("fine", bytes(1_000_000))
        await box.shell("rm fill; echo back > again")
        assert await box.get("again") == b"back\n"

    async def test_f35_an_export_of_too_many_names_fails_and_hurts_nobody(self, backend: Backend) -> None:
        """The names of a directory are sorted in the daemon's memory, which is the sandbox's: more than fit are refused."""
        box = await self.new_box(backend, memory_mb=32, disk_mb=256)
        made = "import os\nopen('a0', 'w')\nfor n in range(60_000): os.link('a0', f'{n:0250}')\n" \
               "open('a1', 'w')\nfor n in range(60_000, 120_000): os.link('a1', f'{n:0250}')\nprint('made')"  # fmt: skip
        assert (await box.python(made, timeout=100)).text == "made\n"
        with pytest.raises(LimitExceededError):
            await box.export()
        assert await box.shell("echo alive") == "alive\n"

    async def test_f35_socket_buffers(self, backend: Backend) -> None:
        """With v1 control groups the buffers of internet sockets are no part of memory, and count nowhere by themselves."""
        box = await self.new_box(backend, memory_mb=64)
        fill = """
import socket
kept, sent = [], 0
def pairs():
    server = socket.create_server(('127.0.0.1', 0), backlog=200)
    for _ in range(100):
        client = socket.create_connection(server.getsockname())
        yield client, server.accept()[0]
    for _ in range(400):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        receiver.bind(('127.0.0.1', 0))
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sender.connect(receiver.getsockname())
        yield sender, receiver
for sender, receiver in pairs():
    sender.setblocking(False)
    kept += [sender, receiver]
    try:
        for _ in range(200): sender.send(bytes(50_000))
    except OSError: pass
held = 0
for receiver in kept[1::2]:
    receiver.setblocking(False)
    try:
        while data := receiver.recv(1 << 16): held += len(data)
    except OSError: pass
print(held)
"""
        result = await box.python(fill, timeout=200)  # an emulated machine copies slowly
        assert result.exit.oom_killed or int(result.text) < 64 * 1024 * 1024
        assert await box.shell("echo alive") == "alive\n"

    async def test_f35_pseudoterminals_are_left_for_others(self, backend: Backend, box: Box) -> None:
        other = await self.new_box(backend)
        take = "import os\nn = 0\ntry:\n while n < 4000: os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY); n += 1\n" \
               "except OSError: pass\nprint(n, flush=True)\nimport time; time.sleep(3)"  # fmt: skip
        taking = asyncio.create_task(box.python(take))
        await asyncio.sleep(1.5)
        assert await other.shell("python3 -c 'import os; os.openpty(); print(1)'") == "1\n"
        assert 16 <= int((await taking).text) < 1000

    async def test_f35_inodes(self, box: Box) -> None:
        made = "import os\nn = 0\ntry:\n while n < 2_000_000: open(f'i{n}', 'w').close(); n += 1\nexcept OSError as e: print(e.errno)"
        assert (await box.python(made, timeout=100)).text == "28\n"
        assert await box.shell("echo alive") == "alive\n"


class NetworkSuite(SuiteBase):
    """Fault 36: with no network there is nothing but the loopback."""

    async def test_f36_no_interface_but_loopback(self, box: Box) -> None:
        devices = await box.shell("cat /proc/net/dev")
        assert re.findall(r"^\s*(\S+):", devices, re.M) == ["lo"]
        assert len((await box.shell("cat /proc/net/route")).splitlines()) <= 1

    async def test_f36_loopback_works(self, box: Box) -> None:
        program = "import socket\ns = socket.create_server(('127.0.0.1', 0))\n" \
                  "socket.create_connection(s.getsockname()).sendall(b'x')\nprint(s.accept()[0].recv(1))"  # fmt: skip
        assert (await box.python(program)).text == "b'x'\n"

    async def test_f36_the_loopback_of_the_host_is_another(self, box: Box) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        program = (
            f"import socket\ntry: socket.create_connection(('127.0.0.1', {port}), 3); print('reached')\n"
            "except OSError as e: print(e.errno)\ntry: print(socket.getaddrinfo('name.invalid', 80))\nexcept OSError: pass"
        )
        async with server:
            assert (await box.python(program)).text == "111\n"

    async def test_f36_no_socket_of_the_host_and_no_vsock(self, box: Box) -> None:
        found = await box.run("find / -xdev -type s 2>/dev/null; find /run /var /tmp /dev -type s 2>/dev/null")
        assert found.stdout == b""
        program = "import socket\nfor family in (40, 17, 31, 38):\n try: socket.socket(family, socket.SOCK_STREAM); print(family)\n" \
                  " except OSError as e: print(e.errno)"  # fmt: skip
        assert (await box.python(program)).text.split() == ["1"] * 4  # vsock, packet, bluetooth, alg

    async def test_f36_abstract_sockets_of_the_host_are_out_of_reach(self, box: Box) -> None:
        assert (await box.shell("cat /proc/net/unix")).count("\n") <= 1 + 8
        assert "@" not in await box.shell("cat /proc/net/unix")


class EscapeSuite(SuiteBase):
    """What no command may do."""

    async def test_identity_is_the_sandbox_user_without_a_capability(self, box: Box) -> None:
        status = dict(
            line.split(":\t", 1) for line in (await box.shell("cat /proc/self/status")).splitlines() if ":\t" in line
        )
        uid, gid = str(box.spec.uid), str(box.spec.gid)
        assert status["Uid"].split() == [uid] * 4
        assert status["Gid"].split() == [gid] * 4
        assert status["Groups"].strip() == ""
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status[name], 16) == 0, name
        assert status["NoNewPrivs"].strip() == "1"
        assert status["Seccomp"].strip() == "2"

    async def test_names_and_places(self, box: Box) -> None:
        name, *places = (await box.shell("uname -n; echo $HOME; pwd")).splitlines()
        assert places == ["/workspace", "/workspace"]
        # A machine has a name of its own, which its forks do not share.
        assert name == (box.id if box.backend.capabilities.isolation == "vm" else "sandbox")

    async def test_the_daemon_is_out_of_reach(self, box: Box) -> None:
        program = """
import os, signal, stat, ctypes
pids = [p for p in os.listdir('/proc') if p.isdigit()]
mine = os.getuid()
for p in ['1'] + pids:
    for name in ('mem', 'fd', 'root', 'cwd', 'exe', 'stack'):
        path = f'/proc/{p}/{name}'
        try:
            owner = os.stat(f'/proc/{p}').st_uid
            if owner == mine: continue
            if name in ('root', 'cwd', 'exe'): os.readlink(path); print('LINK', path)
            elif name == 'fd':
                for number in os.listdir(path):
                    try: state = os.fstat(os.open(f'{path}/{number}', os.O_RDONLY | os.O_NONBLOCK))
                    except OSError: continue
                    everybodys = stat.S_ISCHR(state.st_mode) and state.st_mode & 0o666 == 0o666  # /dev/null
                    if state.st_uid != mine and not everybodys: print('OPENED', path, number)
            elif open(path, 'rb').read(64): print('READ', path)
        except OSError: pass
libc = ctypes.CDLL(None, use_errno=True)
for pid in range(1, 40):
    try:
        same = os.stat(f'/proc/{pid}').st_uid == mine
    except OSError:
        same = False
    if not same:
        try: os.kill(pid, 0); print('SIGNAL', pid)
        except OSError: pass
        if libc.ptrace(16, pid, 0, 0) == 0: print('PTRACE', pid)
try: os.kill(1, 9)
except OSError as e: print('kill', e.errno)
"""
        assert (await box.python(program)).text == "kill 1\n"
        assert await box.shell("echo alive") == "alive\n"

    async def test_the_daemon_tells_nothing_of_itself(self, box: Box) -> None:
        program = """
import os
for p in {'1', *(p for p in os.listdir('/proc') if p.isdigit())}:
    for name in ('environ', 'maps', 'auxv', 'fd'):
        path = f'/proc/{p}/{name}'
        try:
            if os.stat(f'/proc/{p}').st_uid == os.getuid(): continue
            if os.listdir(path) if name == 'fd' else open(path, 'rb').read(64): print(path)
        except OSError: pass
"""
        assert (await box.python(program)).text == ""

    async def test_the_daemon_is_hidden(self, box: Box) -> None:
        """As proc(5) does it with ``hidepid=2``."""
        assert (await box.run("ls -d /proc/1 2>/dev/null")).stdout == b""
        assert (await box.run("cat /proc/1/task/1/children 2>/dev/null")).stdout == b""

    async def test_kill_everything_only_kills_the_own(self, box: Box) -> None:
        await box.run("kill -9 -1; echo gone", timeout=10)
        assert await box.shell("echo alive") == "alive\n"

    async def test_no_process_is_traced_that_did_not_ask_for_it(self, box: Box) -> None:
        """Two that trace each other with exit stops (0x40) could never be ended again, not even by their control group."""
        program = (
            TRACING
            + """
child = os.fork()
if child == 0: time.sleep(60)
for request in (ATTACH, SEIZE):
    print(ptrace(request, child, 0, TRACE_EXIT))
os.kill(child, 9)
os.waitpid(child, 0)
child = os.fork()
if child == 0:
    ptrace(TRACE_ME, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
print(os.WSTOPSIG(os.waitpid(child, 0)[1]) == signal.SIGUSR1)
os.kill(child, 9)
"""
        )
        assert (await box.python(program)).text.split() == ["EPERM", "EPERM", "True"]

    async def test_a_command_that_asks_to_be_traced_ends_when_it_ends(self, box: Box) -> None:
        program = (
            TRACING
            + """
signal.signal(signal.SIGUSR1, lambda *_: print('heard'))
print(ptrace(TRACE_ME, 0, 0, 0), flush=True)
os.kill(os.getpid(), signal.SIGUSR1)
sys.stdout.flush()
os.execv('/bin/sh', ['sh', '-c', 'echo went on; exit 7'])
"""
        )
        result = await box.python(program)
        assert (result.text, result.exit.code) == ("ok\nheard\nwent on\n", 7)

    async def test_exit_stops_do_not_outlive_the_deadline(self, box: Box) -> None:
        program = (
            TRACING
            + """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # one that came would stop a tracee
def descend(depth):
    child = os.fork()
    if child == 0:
        ptrace(TRACE_ME, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        if depth: descend(depth - 1)
        while True: time.sleep(66666)
    os.waitpid(child, 0)
    print(ptrace(SET_OPTIONS, child, 0, TRACE_EXIT), ptrace(CONTINUE, child, 0, 0), flush=True)
    while True: time.sleep(66666)
descend(3)
"""
        )
        for seconds in (3, 60):  # an emulated machine has not come so far in three
            result = await box.python(program, timeout=seconds)
            assert result.exit.timed_out
            assert await box.gone("66666")
            if result.text == "ok ok\n" * 4:
                break
        assert result.text == "ok ok\n" * 4

    async def test_a_crash_starts_nothing_on_the_host(self, box: Box) -> None:
        """core(5): 1 is the only limit at which a ``core_pattern`` that is a program does not run, so it must stay."""
        program = (
            "import os, resource as r\nr.setrlimit(r.RLIMIT_CORE, (0, 0))\nr.setrlimit(r.RLIMIT_CORE, (-1, -1))\n"
            "r.prlimit(0, r.RLIMIT_CORE, (0, 0))\nr.setrlimit(r.RLIMIT_NOFILE, (99, 99))\n"
            "print(r.getrlimit(r.RLIMIT_CORE), r.getrlimit(r.RLIMIT_NOFILE), flush=True)\nos.abort()"
        )
        result = await box.python(program)
        assert (result.text, result.exit.signal) == ("(1, 1) (99, 99)\n", 6)

    async def test_no_setuid_program_helps(self, box: Box) -> None:
        # It looks at every file of the image, which takes an emulated machine a minute.
        found = await box.run("find / -xdev -perm -4000 -exec {} --help \\; 2>/dev/null; id -u", timeout=240)
        assert found.text.splitlines()[-1] == str(box.spec.uid)
        await box.shell("cp /usr/bin/id mine; chmod 6755 mine")
        assert str(box.spec.uid) in await box.shell("./mine")
        for program in ("su -c id", "mount -t tmpfs none /mnt"):
            assert (await box.run(program, timeout=5)).status != 0

    async def test_forbidden_calls(self, box: Box) -> None:
        tables = f"X = {X86_64!r}\nA = {AARCH64!r}\nN = {NAMESPACES!r}\n"
        program = (
            SYSCALL
            + tables
            + """
T = X if os.uname().machine == 'x86_64' else A
for name, flag in N.items(): print('unshare', name, call(T['unshare'], flag))
for name in T:
    if name not in ('unshare',): print(name, call(T[name], 0, 0, 0, 0, 0))
CLONE = 56 if T is X else 220
for name, flag in N.items():
    pid = libc.syscall(ctypes.c_long(CLONE), ctypes.c_long(flag | 17), 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    print('clone', name, 'ok' if pid > 0 else errno.errorcode[ctypes.get_errno()])
if T is X: print('x32', call(0x40000000 + 39))
"""
        )
        lines = (await box.python(program)).text.splitlines()
        assert len(lines) > 30
        wrong = [line for line in lines if not line.endswith((" EPERM", " ENOSYS"))]
        assert wrong == []
        assert "clone3 ENOSYS" in lines

    async def test_no_namespace_by_tools(self, box: Box) -> None:
        for command in (
            "unshare -U true",
            "unshare -Ur true",
            "unshare -m true",
            "unshare -n true",
            "nsenter -t 1 -m true",
        ):
            assert (await box.run(command)).status != 0, command

    async def test_the_workspace_cannot_be_unmounted_or_covered(self, box: Box) -> None:
        await box.put("f", b"kept")
        for command in (
            "umount /workspace",
            "umount -l /workspace",
            "mount -t tmpfs none /workspace",
            "mount --bind /tmp /workspace",
        ):
            assert (await box.run(command)).status != 0, command
        assert await box.get("f") == b"kept"
        assert (await box.run("rmdir /workspace; mv /workspace /workspace2")).status != 0

    async def test_devices(self, box: Box) -> None:
        assert (await box.run(["python3", "-c", "open('/dev/fuse', 'r+b')"])).status != 0
        for command in (
            "mknod dev c 1 3",
            "mknod /tmp/dev b 7 0",
            "head -c 1 /dev/mem",
            "head -c 1 /dev/kmsg",
            "ls /dev/loop0",
        ):
            assert (await box.run(command)).status != 0, command
        nodes = await box.shell("find /dev -type c -o -type b | sort")
        allowed = {"console", "full", "null", "ptmx", "random", "tty", "urandom", "zero"}
        assert {name.removeprefix("/dev/") for name in nodes.split() if "/pts/" not in name} <= allowed

    async def test_the_root_is_read_only(self, box: Box) -> None:
        for place in ("/", "/usr", "/etc", "/bin/", "/var", "/proc/sys/kernel", "/sys", "/run", "/dev"):
            assert (await box.run(["touch", f"{place}/planted"])).status != 0, place
        for name in (
            "/etc/passwd",
            "/proc/sysrq-trigger",
            "/proc/sys/kernel/core_pattern",
            "/sys/kernel/uevent_helper",
        ):
            assert (await box.run(f"echo x >> {name}")).status != 0, name

    async def test_mounts_are_nosuid_and_nodev(self, box: Box) -> None:
        for line in (await box.shell("cat /proc/self/mountinfo")).splitlines():
            root, place, options = line.split()[3:6]
            if root == "/null":  # a masked file of /proc
                continue
            if place in ("/workspace", "/tmp", "/dev/shm", "/usr", "/run") or not options.startswith("ro"):
                assert "nosuid" in options or place.startswith("/dev"), line
                assert "nodev" in options or place.startswith("/dev"), line

    async def test_proc_and_sys_are_masked(self, box: Box) -> None:
        for path in ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/proc/latency_stats"):
            assert (await box.run(f"head -c 1 {path} 2>/dev/null")).stdout == b"", path
        for path in ("/proc/diskstats", "/proc/partitions", "/proc/locks", "/proc/cmdline", "/proc/key-users"):
            assert (await box.run(f"cat {path} 2>/dev/null")).stdout == b"", path
        listed = await box.run(
            "ls -A /proc/fs /sys/block /sys/class/block /sys/dev/block 2>/dev/null | grep -v :$ | grep ."
        )
        assert listed.stdout == b""  # each sandbox's disk is a device of the host
        below = "find /sys/fs -mindepth 2 -not -path '/sys/fs/cgroup/*' 2>/dev/null"
        assert (await box.run(below)).stdout == b""  # its own limits, at most
        assert (await box.run("ls /sys/firmware /proc/acpi /proc/scsi 2>/dev/null | grep -v :$ | grep .")).stdout == b""

    async def test_nothing_of_the_host_is_to_be_seen(self, box: Box) -> None:
        for path in (
            "/root",
            "/home",
            "/var/lib",
            "/var/run/docker.sock",
            "/etc/shadow",
            "/opt",
            "/srv",
            "/mnt",
            "/usr/local/bin",
        ):
            listed = await box.run(f"ls -A {path} 2>/dev/null")
            assert listed.stdout == b"", path
        assert int(await box.shell("ls /proc | grep -c '^[0-9]'")) < 10

    async def test_no_other_sandbox_is_to_be_seen(self, backend: Backend, box: Box) -> None:
        other = await self.new_box(backend)
        task = asyncio.create_task(other.run(["sleep", "77777"], timeout=4))
        await asyncio.sleep(0.5)
        assert await box.processes("77777") == 0
        assert other.id not in await box.shell("cat /proc/self/mountinfo /proc/self/cgroup")
        await task

    async def test_nothing_outlives_the_sandbox(self, backend: Backend, box: Box) -> None:
        await box.run("setsid sh -c 'trap \"\" TERM HUP INT; sleep 88888' & sleep 0.2")
        shared_kernel = backend.capabilities.isolation in ("process", "container")
        assert _on_this_host(b"88888") or not shared_kernel
        await backend.destroy(box.id)
        assert not _on_this_host(b"88888")

    async def test_no_secret_is_to_be_found(self, box: Box) -> None:
        if not isinstance(box.backend, GuestBackend):
            return
        endpoint = await box.backend.endpoint(box.id)
        endpoint.socket.close()
        seen = await box.run("cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; mount; ls -la /run /")
        assert b"sandbox" in seen.stdout
        on_the_host = b"".join(data for name in ("cmdline", "environ") for data in _of_every_process(name))
        for place in (seen.stdout, on_the_host):
            for form in (endpoint.key, endpoint.key.hex().encode(), base64.b64encode(endpoint.key)):
                assert form not in place

    async def test_a_peer_without_the_key_is_refused(self, box: Box) -> None:
        if not isinstance(box.backend, GuestBackend):
            return
        await box.backend.drop_guest(box.id)  # a machine's port takes one peer at a time
        endpoint = await box.backend.endpoint(box.id)
        with pytest.raises(BackendError, match="refused"):
            await Guest.connect(endpoint.socket, b"wrong key" + bytes(23), carrier=endpoint.carrier)
        assert await box.shell("echo still here") == "still here\n"


def _of_every_process(name: str) -> list[bytes]:
    """A file of every process on this host, those that the caller may read."""
    found = []
    for place in pathlib.Path("/proc").glob(f"[0-9]*/{name}"):
        try:
            found.append(place.read_bytes())
        except OSError:
            continue
    return found


def _on_this_host(needle: bytes) -> bool:
    return any(needle in line for line in _of_every_process("cmdline"))


async def _cpu_seconds(box: Box) -> float | None:
    """The processor time of all that runs in the sandbox, as its host counts it; None where the backend has no count."""
    usage = (await box.backend.inspect(box.id)).details.get("usage", {})
    found = usage.get("cpu_seconds") if isinstance(usage, dict) else None
    return found if isinstance(found, float) else None
