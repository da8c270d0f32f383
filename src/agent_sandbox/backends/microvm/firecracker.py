"""Firecracker as a monitor: each machine is one process that outlives the server, under Firecracker's own jailer.

Strategy
--------
* The jailer gives each monitor a root directory, a user, limits and a system call filter of its own. What the machine
  needs gets a name in there first: kernel, drives and memory by hard links, which cost nothing and keep the content.
* A guest that has taken its monitor over is a user without rights in a directory of a few files, with no network, that
  nobody else can look into. It can write the workspace's drive, and what the server makes for it to write when it saves
  the machine. Once the sockets are there, the directories are the server's again.
* What the server then reads of these files it opens without following links, and bounds: a file of one name, of the
  monitor's user, and of the size that it must have.
* Everything is asked for by the API, before the guest runs; an error comes with Firecracker's words.
* Memory is saved as what changed since it was saved last (a "diff"), and added to a sparse copy of that. ``base`` is
  what it was then: nothing at a boot, what a machine went on from, or its last snapshot. It is taken away before
  each saving and comes back with its end, so where something broke off, the next saving is of everything.
* Machines that go on map the same file privately; it is the server's, and nobody can write it.

::

    spec.jail/base                             the memory that the monitor counts changes from
    spec.jail/<program>/<id>/root/             the monitor's root
    ├── api.sock, guest.sock                   its sockets
    ├── kernel, initrd, root, workspace, config, layers
    └── memory, state                          of a machine that goes on
    spec.directory/jail                        leads to that root

    dest/memory     the guest's memory, sparse
    dest/state      the devices', in Firecracker's own format
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.linux.processor import machine as machine_kind
from agent_sandbox.backends.linux.spawning import spawn
from agent_sandbox.backends.linux.waiting import settled
from agent_sandbox.backends.microvm import firecracker_api as api
from agent_sandbox.backends.microvm import firecracker_probe as probe
from agent_sandbox.backends.microvm import firecracker_requests as asking
from agent_sandbox.backends.microvm import memory
from agent_sandbox.backends.microvm.children import (
    CONSOLE_BYTES,
    OUTPUT_BYTES,
    PAUSE_SECONDS,
    Children,
    clean,
    find,
    memfd,
    owned,
    room,
    run,
    said,
    thread,
)
from agent_sandbox.backends.microvm.firecracker_requests import API_SOCKET, GUEST_SOCKET, SAVED_MEMORY, SAVED_STATE
from agent_sandbox.backends.microvm.monitor import MEMORY_FILE, STATE_FILE, Adopt, Facts, Machine, MachineSpec
from agent_sandbox.errors import BackendError, ConflictError
from agent_sandbox.guest import Carrier, vsock

REMEDY = (
    "get firecracker and jailer of one release and put both into PATH, or set AGENT_SANDBOX_FIRECRACKER and "
    "AGENT_SANDBOX_JAILER"
)
_NAME = "firecracker"
_ID = "machine"
"""Of each monitor in its jail."""
_START_SECONDS = 60.0
_SAVE_SECONDS = 300.0
"""A machine of 64 GiB on a disk that takes 250 MB a second."""
_NO_ROOM = f"(os error {errno.ENOSPC})"
"""How Rust ends what it says of a full disk."""
_STATE_BYTES = 64 << 20
"""Of device state: some 20 KB."""
_THREADS = 32
"""Beside those of its processors: Firecracker has one for itself and one for its API."""
_FILES = 256
_SAID = 80
"""Characters of what another program answers."""
_MIB = 1 << 20
_ELF = b"\x7fELF"
_REFUSED = ((os.ST_NODEV, "nodev"), (os.ST_NOEXEC, "noexec"))
"""Options of a file system on which there can be no jail, see statvfs(3)."""
_VERSION = re.compile(r"^Firecracker v(\S+)", re.MULTILINE)
_JAILER_VERSION = re.compile(r"^Jailer v(\S+)", re.MULTILINE)


class FirecrackerMonitor:
    """Machines on Firecracker. See the rules in ``monitor.py``. Use it from one event loop."""

    overhead_mb = 64
    """Firecracker itself takes some MiB; more while it saves a machine."""
    carrier = Carrier.VSOCK
    guest_socket = f"jail/{GUEST_SOCKET}"

    def __init__(self, program: str = "", jailer: str = "") -> None:
        self._names = program or _NAME, jailer or "jailer"
        self._program = self._jailer = self._unshare = self._prlimit = ""
        self._facts: Facts | None = None
        self._children = Children()

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            raise BackendError("the monitor was not looked for yet")
        return self._facts

    async def find(self) -> Facts:
        if self._facts is None or not os.access(self._program, os.X_OK):
            self._program = str(await thread(Path(find(self._names[0], REMEDY)).resolve))
            self._jailer = find(self._names[1], REMEDY)
            self._unshare, self._prlimit = (
                find(name, "install it with: apt-get install util-linux") for name in ("unshare", "prlimit")
            )
            self._facts = await self._look()
        return self._facts

    async def start(self, spec: MachineSpec, adopt: Adopt | None = None) -> Machine:
        return await self._start(spec, None, adopt)

    async def start_from(self, spec: MachineSpec, saved: Path, adopt: Adopt | None = None) -> Machine:
        return await self._start(spec, saved, adopt)

    async def pause(self, machine: Machine) -> None:
        await self._ask(machine, *asking.PAUSE)

    async def resume(self, machine: Machine) -> None:
        await self._ask(machine, *asking.RESUME)

    async def running(self, machine: Machine) -> bool:
        return (await self._ask(machine, "GET", "/")).get("state") == "Running"

    async def save(self, machine: Machine, memory_mb: int, dest: Path) -> None:
        if (await self._ask(machine, "GET", "/")).get("state") != "Paused":
            raise BackendError("a machine is saved only while it is paused")
        with room():
            jail = await thread(_jail_of, machine)
            base = await thread(_take_base, jail)
            try:
                if not await thread(_make_targets, jail) and base is not None:
                    os.close(base)
                    base = None
                try:
                    await self._ask(machine, *asking.saves(base is not None), _SAVE_SECONDS)
                except api.FirecrackerError as error:
                    if _NO_ROOM in error.message:
                        raise OSError(errno.ENOSPC, error.message) from error
                    raise
                await thread(_keep, jail, base, memory_mb * _MIB, dest)
            finally:
                if base is not None:
                    os.close(base)
                await thread(_drop_targets, jail)

    async def connect(self, machine: Machine, seconds: float) -> socket.socket:
        place = machine.directory / self.guest_socket
        return await vsock.dial(functools.partial(vsock.connect_to, place), seconds)

    async def console(self, machine: Machine) -> str:
        return await thread(self._children.console, machine.process)

    async def close(self) -> None:
        self._children.close()

    async def _ask(
        self,
        machine: Machine,
        method: str,
        target: str,
        body: Mapping[str, object] | None = None,
        seconds: float = api.SECONDS,
    ) -> dict[str, object]:
        return await api.request(machine.directory / "jail" / API_SOCKET, method, target, body, seconds=seconds)

    # -- looking --------------------------------------------------------------------------

    async def _look(self) -> Facts:
        version = await self._version(self._program, _VERSION, "Firecracker")
        jailer = await self._version(self._jailer, _JAILER_VERSION, "Firecracker's jailer")
        if version != jailer:
            raise BackendError(f"{self._program} is of version {version} and {self._jailer} of {jailer}; {REMEDY}")
        if _NAME not in Path(self._program).name:
            raise BackendError(
                f"the jailer takes no program without {_NAME} in its name, as {self._program}; rename it"
            )
        why = await thread(probe.why_not) or await probe.why_not_run(self._program, REMEDY)
        cpu = f"host {await thread(machine_kind)}"
        return Facts(_NAME, f"{version}, layout {asking.LAYOUT}", not why, cpu, why, emulates=False)

    async def _version(self, program: str, pattern: re.Pattern[str], what: str) -> str:
        code, output = await run([program, "--version"], REMEDY)
        found = pattern.search(output)
        if code != 0 or found is None:
            raise BackendError(
                f"{program} does not answer as {what}: {clean(output, _SAID) or f'exit code {code}'}; {REMEDY}"
            )
        return found[1]

    # -- starting -------------------------------------------------------------------------

    async def _start(self, spec: MachineSpec, saved: Path | None, adopt: Adopt | None) -> Machine:
        root = spec.jail / Path(self._program).name / _ID / "root"
        with ExitStack() as stack, room():
            errors = memfd(stack, "errors", OUTPUT_BYTES)
            console = memfd(stack, "console", CONSOLE_BYTES)
            undone = stack.enter_context(ExitStack())
            undone.callback(_remove, spec)  # some names, which takes a moment
            written = await thread(_furnish, root, spec, saved)
            argv = [
                *(self._unshare, "--net", "--ipc", "--"),
                # A core of 0 would not keep the host's handler from getting the guest's memory.
                *(self._prlimit, f"--nproc={spec.vcpus + _THREADS}", "--core=1", "--"),
                *(self._jailer, "--id", _ID, "--exec-file", self._program),
                *("--uid", str(spec.uid), "--gid", str(spec.gid)),
                *("--chroot-base-dir", str(spec.jail)),
                *("--resource-limit", f"fsize={written}", "--resource-limit", f"no-file={_FILES}"),
                *("--", "--api-sock", API_SOCKET, "--level", "Warn"),
            ]
            pid = spawn(argv, console, (), REMEDY, errors)
            try:
                self._children.watch(pid)
                process = Process.of(pid)
                if process is None:
                    raise BackendError("the jailer has ended")
                if adopt is not None:
                    await thread(adopt, pid)
                machine = Machine(spec.directory, process)
                await self._answering(machine)
                for method, target, body in asking.goes_on() if saved is not None else asking.boots(spec):
                    await self._ask(machine, method, target, body, _START_SECONDS)
                # Before the guest runs its first instruction.
                await thread(_close_jail, root)
                await self._ask(machine, *(asking.START if saved is None else asking.RESUME))
            except BaseException as error:
                await settled(asyncio.ensure_future(self._children.kill(pid)))
                if isinstance(error, BackendError) and (words := clean(said(errors) or said(console))):
                    raise BackendError(f"the machine did not start: {error.message}; {words}") from error
                raise
            undone.pop_all()
            self._children.keep_console(process, console)
            return machine

    async def _answering(self, machine: Machine) -> None:
        """Return once the monitor's API answers."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                await self._ask(machine, "GET", "/")
                return
            except BackendError:
                if not await thread(machine.process.alive) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(PAUSE_SECONDS)


# -- the monitor's root ----------------------------------------------------------------------


def _furnish(root: Path, spec: MachineSpec, saved: Path | None) -> int:
    """Make the monitor's root and what it needs there; give the size of the largest file that it may write."""
    with spec.kernel.open("rb") as file:
        if file.read(len(_ELF)) != _ELF:
            raise BackendError(
                f"{spec.kernel} is packed, and Firecracker starts unpacked kernels alone (ELF); prepare one whose "
                "packing is known, such as Debian's: agent-sandbox image kernel"
            )
    root.mkdir(mode=0o755, parents=True)
    if refused := [name for flag, name in _REFUSED if os.statvfs(root).f_flag & flag]:
        raise BackendError(
            f"{spec.jail.parent} is on a file system that is mounted {' and '.join(refused)}, and a monitor runs there "
            "with a /dev/kvm of its own; put AGENT_SANDBOX_DATA_DIR on another"
        )
    (spec.directory / "jail").symlink_to(root)
    _give(spec.kernel, root / "kernel", spec)
    _give(spec.initrd, root / "initrd", spec)
    _give(spec.root, root / "root", spec)
    _give(spec.layers, root / "layers", spec)
    _give(spec.config, root / "config", spec, alone=True)
    os.chown(spec.workspace, spec.uid, spec.gid)
    _link(spec.workspace, root / "workspace")
    base = spec.jail / "base"
    if saved is None:
        with base.open("xb") as file:
            file.truncate(spec.memory_mb * _MIB)
    else:
        content = saved / MEMORY_FILE
        size = _size(content)
        if size != spec.memory_mb * _MIB:
            raise ConflictError(
                f"the saved memory has {size} bytes, and a machine with {spec.memory_mb} MiB is asked for"
            )
        _give(content, root / MEMORY_FILE, spec)
        _link(content, base)
        state = root / STATE_FILE
        shutil.copyfile(saved / STATE_FILE, state)
        state.chmod(0o444)
    return max(spec.workspace.stat().st_size, spec.memory_mb * _MIB, _STATE_BYTES)


def _give(content: Path, name: Path, spec: MachineSpec, *, alone: bool = False) -> None:
    """Let a monitor read a file by a name in its root, ``alone`` where it holds what others may not know."""
    if alone:
        os.chown(content, spec.uid, spec.gid)
    content.chmod(0o400 if alone else 0o444)
    _link(content, name)


def _link(content: Path, name: Path) -> None:
    try:
        name.hardlink_to(content.resolve())
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise BackendError(
            f"{content.resolve()} is on another file system than the data directory, and a monitor in its jail needs "
            "it under another name; put AGENT_SANDBOX_MACHINE_DIR on that of the data directory"
        ) from None


def _size(content: Path) -> int:
    try:
        return content.lstat().st_size
    except FileNotFoundError:
        raise ConflictError("the machine's saved memory is not there") from None


def _close_jail(root: Path) -> None:
    """Take from a monitor the right to make files, as its sockets are there, and the devices that no machine has."""
    for device in ("dev/net/tun", "dev/userfaultfd"):
        (root / device).unlink(missing_ok=True)
    for _, _, _, descriptor in os.fwalk(root):
        os.fchown(descriptor, 0, 0)
        os.fchmod(descriptor, 0o755)


def _remove(spec: MachineSpec) -> None:
    """Remove what was made for a monitor that has ended. The drives keep their own names."""
    (spec.directory / "jail").unlink(missing_ok=True)
    shutil.rmtree(spec.jail, ignore_errors=True)


# -- saving ------------------------------------------------------------------------------------


def _jail_of(machine: Machine) -> Path:
    """The monitor's root."""
    return (machine.directory / "jail").readlink()


def _base(root: Path) -> Path:
    return root.parents[2] / "base"


def _take_base(root: Path) -> int | None:
    """Open what changes are counted from, and take its name away until they were saved."""
    base = _base(root)
    try:
        descriptor = os.open(base, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    base.unlink()
    return descriptor


def _make_targets(root: Path) -> bool:
    """Make the files that the monitor saves into; say whether it can be told afterwards which parts were written."""
    uid = (root / "workspace").lstat().st_uid
    _drop_targets(root)
    for name in (SAVED_MEMORY, SAVED_STATE):
        descriptor = os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb"):
            told = memory.tells_holes(descriptor)
            os.fchown(descriptor, uid, -1)
    return told


def _drop_targets(root: Path) -> None:
    for name in (SAVED_MEMORY, SAVED_STATE):
        (root / name).unlink(missing_ok=True)


def _keep(root: Path, base: int | None, size: int, dest: Path) -> None:
    """Write what the monitor has saved, on top of what its memory was before, into ``dest``."""
    with ExitStack() as stack:
        changed = _saved(stack, root / SAVED_MEMORY)
        if os.fstat(changed).st_size != size:
            raise BackendError("Firecracker did not save the machine's memory whole")
        target = owned(stack, os.open(dest / MEMORY_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.ftruncate(target, size)
        if base is not None:
            memory.copy_data(base, target, size)
        memory.copy_data(changed, target, size, zeros=base is not None)
        state = _saved(stack, root / SAVED_STATE)
        if not 0 < os.fstat(state).st_size <= _STATE_BYTES:
            raise BackendError("Firecracker did not save the machine's devices whole")
        with os.fdopen(os.dup(state), "rb") as source, (dest / STATE_FILE).open("xb") as file:
            file.write(source.read(_STATE_BYTES))
    _link(dest / MEMORY_FILE, _base(root))


def _saved(stack: ExitStack, path: Path) -> int:
    """Open what a monitor has written, which may be something else by now."""
    descriptor = owned(stack, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise BackendError("what lies in the place of the machine's saved memory is no file")
    return descriptor


__all__ = ["FirecrackerMonitor"]
