"""QEMU as a monitor: each machine is one process that outlives the server and has no rights of its own.

Strategy
--------
* The server opens files, binds sockets and makes the memory; QEMU is started by ``setpriv`` as a user without rights,
  with these descriptors, under its own system call filter. It needs no path, so its directories may be closed.
* A guest that has taken QEMU over is a stranger with a user id of its own on the host: ``unshare`` leaves it no network
  and no abstract socket, and limits of its process keep it from growing its drive, endless threads and core dumps.
  It still sees the files and sockets that everybody may open.
* It starts with its processors stopped. Its control socket answers once everything is in place, so an error comes
  before the guest has run, with QEMU's words.
* A machine is saved from outside: device state through QMP, without memory (some 15 KB), and the memory as
  ``memory.py`` says. It goes on in a QEMU that gets the state over a socket and maps the memory.
* Whether KVM works is tried with the processor that guests get: some hosts have a /dev/kvm that opens and runs nothing.

Known ugliness: device state without memory is written by ``xen-save-devices-state``, which works without Xen. Migration
with ``x-ignore-shared`` leaves memory out as well, but only of machines that are no forks.

::

    dest/memory     the guest's memory, sparse
    dest/state      the devices', in QEMU's own format
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.linux.processor import machine as machine_kind
from agent_sandbox.backends.linux.spawning import spawn
from agent_sandbox.backends.linux.waiting import settled
from agent_sandbox.backends.microvm import command, memory
from agent_sandbox.backends.microvm.children import (
    CONSOLE_BYTES,
    OUTPUT_BYTES,
    PAUSE_SECONDS,
    PROBE_SECONDS,
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
from agent_sandbox.backends.microvm.command import Given
from agent_sandbox.backends.microvm.monitor import MEMORY_FILE, STATE_FILE, Adopt, Facts, Machine, MachineSpec
from agent_sandbox.backends.microvm.qmp import Qmp
from agent_sandbox.errors import BackendError, ConflictError
from agent_sandbox.guest import Carrier, vsock

KVM = Path("/dev/kvm")
REMEDY = "install it with: apt-get install qemu-system-x86"
QMP_SOCKET, GUEST_SOCKET = "qmp.sock", "guest.sock"
_PROBE_PORT, _PROBE_VALUE = 0x501, 0x21
_PROBE_CODE = _PROBE_VALUE * 2 + 1
"""What QEMU ends with when the guest writes the value to the port of its device isa-debug-exit."""
_PROBE_FIRMWARE = (
    # mov al, value; mov dx, port; out dx, al; then hlt for ever
    bytes([0xB0, _PROBE_VALUE, 0xBA, *_PROBE_PORT.to_bytes(2, "little"), 0xEE, 0xF4, 0xEB, 0xFD]).ljust(0xFFF0, b"\xf4")
    # at the reset vector: jmp f000:0000
    + bytes([0xEA, 0, 0, 0, 0xF0]).ljust(16, b"\xf4")
)
_START_SECONDS = 60.0
"""QEMU is ready in 0.1 s; a host with more machines than processors takes longer."""
_NOBODY = 65534
_STATE_BYTES = 64 << 20
"""Of device state: some 15 KB, of which a machine's buffers are a part. A monitor that sends more is broken."""
_PIPE_BYTES = 64 * 1024
_THREADS = 128
"""Beside those of its processors: QEMU has at most 64 for its drives, and a few more."""
_SOCKET_PATH_BYTES = 107
"""unix(7): an address holds 108 bytes with the zero at its end."""
_VERSION = re.compile(r"^QEMU emulator version (\S+(?: \([^)]*\))?)")


class QemuMonitor:
    """Machines on QEMU. See the rules in ``monitor.py``. Use it from one event loop."""

    overhead_mb = 160
    """QEMU itself takes 40 MiB, with devices and threads; translated code under TCG has a cache of its own size."""

    carrier = Carrier.PORT
    guest_socket = GUEST_SOCKET

    def __init__(self, program: str = "") -> None:
        self._name = program or "qemu-system-x86_64"
        self._program = ""
        self._setpriv = ""
        self._unshare = ""
        self._prlimit = ""
        self._facts: Facts | None = None
        self._tsc_khz: int | None = None
        self._fills = memory.Fills()
        self._children = Children()

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            raise BackendError("the monitor was not looked for yet")
        return self._facts

    async def find(self) -> Facts:
        if self._facts is None or not os.access(self._program, os.X_OK):
            self._program = find(self._name, REMEDY)
            self._setpriv, self._unshare, self._prlimit = (
                find(name, "install it with: apt-get install util-linux") for name in ("setpriv", "unshare", "prlimit")
            )
            self._facts = await self._look()
        return self._facts

    async def start(self, spec: MachineSpec, adopt: Adopt | None = None) -> Machine:
        return await self._start(spec, None, adopt)

    async def start_from(self, spec: MachineSpec, saved: Path, adopt: Adopt | None = None) -> Machine:
        return await self._start(spec, saved, adopt)

    async def pause(self, machine: Machine) -> None:
        async with Qmp(machine.directory / QMP_SOCKET) as qmp:
            await qmp.execute("stop")

    async def resume(self, machine: Machine) -> None:
        async with Qmp(machine.directory / QMP_SOCKET) as qmp:
            await qmp.execute("cont")

    async def running(self, machine: Machine) -> bool:
        async with Qmp(machine.directory / QMP_SOCKET) as qmp:
            return _status(await qmp.execute("query-status")) == "running"

    async def save(self, machine: Machine, memory_mb: int, dest: Path) -> None:
        async with Qmp(machine.directory / QMP_SOCKET) as qmp:
            if _status(await qmp.execute("query-status")) != "paused":
                raise BackendError("a machine is saved only while it is paused")
            state = await _device_state(qmp)
        with room():
            await thread(_write, dest / STATE_FILE, state)
            await thread(memory.save, machine.process, Given.MEMORY, memory_mb, dest / MEMORY_FILE)

    async def connect(self, machine: Machine, seconds: float) -> socket.socket:
        return await thread(vsock.connect_to, machine.directory / GUEST_SOCKET)

    async def console(self, machine: Machine) -> str:
        return await thread(self._children.console, machine.process)

    async def close(self) -> None:
        self._children.close()
        await thread(self._fills.close)

    # -- looking --------------------------------------------------------------------------

    async def _look(self) -> Facts:
        code, output = await run([self._program, "--version"], REMEDY)
        found = _VERSION.match(output)
        if code != 0 or found is None:
            raise BackendError(f"{self._program} does not answer as QEMU: {clean(output) or f'exit code {code}'}")
        cpuinfo = await thread(lambda: Path("/proc/cpuinfo").read_text(errors="replace"))
        self._tsc_khz = command.tsc_khz(cpuinfo)
        why = await self._why_not_kvm()
        version = f"{found[1]}, layout {command.LAYOUT}"
        if not why:
            return Facts("qemu", version, True, f"host {await thread(machine_kind)}")
        # A guest's clock under TCG goes by the host's: on a host of another rate it would go wrong.
        rate = f"{self._tsc_khz / 1e6:.2f} GHz" if self._tsc_khz else "unknown rate"
        return Facts("qemu", version, False, f"emulated at {rate}", why)

    async def _why_not_kvm(self) -> str:
        """Try it with a guest of a few bytes, as a user without rights; say what is in the way, "" when nothing is."""
        if not await thread(KVM.exists):
            return (
                "there is no /dev/kvm (load kvm_intel or kvm_amd; in a virtual machine, enable nested virtualization)"
            )
        with ExitStack() as stack:
            firmware = memfd(stack, "firmware", len(_PROBE_FIRMWARE), _PROBE_FIRMWARE)
            code, output = await run(
                [
                    *self._without_rights(_NOBODY, _NOBODY, True),
                    self._program,
                    *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
                    *("-machine", "microvm", "-accel", "kvm", "-cpu", command.cpu_model(True), "-m", "16M"),
                    *("-bios", "/proc/self/fd/3"),
                    *("-device", f"isa-debug-exit,iobase={_PROBE_PORT:#x},iosize=1"),
                ],
                REMEDY,
                (firmware,),
            )
        if code == _PROBE_CODE:
            return ""
        if "Permission denied" in output:
            return "a monitor, which has no rights, may not open it; run: chgrp kvm /dev/kvm && chmod 0660 /dev/kvm"
        if code == -signal.SIGKILL:
            return f"a guest of a few instructions did not finish within {PROBE_SECONDS:g} seconds on it"
        return f"a guest does not run on it: {clean(output) or f'QEMU ended with code {code}'}"

    # -- starting -------------------------------------------------------------------------

    async def _start(self, spec: MachineSpec, saved: Path | None, adopt: Adopt | None) -> Machine:
        with ExitStack() as stack:
            listening = stack.enter_context(ExitStack())
            errors = memfd(stack, "errors", OUTPUT_BYTES)
            console = memfd(stack, "console", CONSOLE_BYTES)
            files = await thread(self._open, stack, listening, spec, saved)
            ours: socket.socket | None = None
            if saved is not None:
                ours, theirs = _pair(stack)
                files.append(listening.enter_context(theirs).fileno())
            argv = [
                *(self._unshare, "--net", "--ipc", "--"),
                *(self._prlimit, *await thread(_limits, spec), "--"),
                *self._without_rights(spec.uid, spec.gid, self.facts.accelerated),
                self._program,
                *command.arguments(spec, self.facts, goes_on=saved is not None, tsc_khz=self._tsc_khz),
            ]
            state = b"" if saved is None else await thread(_read, saved / STATE_FILE)
            pid = spawn(argv, console, files, REMEDY, errors)
            try:
                self._children.watch(pid)
                process = Process.of(pid)
                listening.close()  # so that a QEMU which ends takes its sockets with it
                if adopt is not None:
                    await thread(adopt, pid)
                await _let_run(spec.directory, ours, state)
            except BaseException as error:
                await settled(asyncio.ensure_future(self._children.kill(pid)))
                if isinstance(error, BackendError) and (words := clean(said(errors))):
                    raise BackendError(f"the machine did not start: {words}") from error
                raise
            if process is None:
                raise BackendError("QEMU has ended")
            self._children.keep_console(process, console)
            return Machine(spec.directory, process)

    def _open(self, stack: ExitStack, listening: ExitStack, spec: MachineSpec, saved: Path | None) -> list[int]:
        """Open what QEMU is given, in the order of :class:`Given`, all but the state."""
        for file in (spec.kernel, spec.initrd):
            if not file.stat().st_mode & 0o004:
                raise BackendError(f"{file} must be readable by everybody; run: chmod 644 {file}")
        sockets = [_listen(listening, spec.directory / name) for name in (QMP_SOCKET, GUEST_SOCKET)]
        drives = (
            (spec.root, os.O_RDONLY),
            (spec.workspace, os.O_RDWR),
            (spec.config, os.O_RDONLY),
            (spec.layers, os.O_RDONLY),
        )
        files = [
            owned(stack, os.open(path, flags | os.O_CLOEXEC))
            for path, flags in ((spec.kernel, os.O_RDONLY), (spec.initrd, os.O_RDONLY), *drives)
        ]
        if saved is None:
            memory_file = memory.blank(spec.memory_mb)
        else:
            memory_file = self._fills.open(saved / MEMORY_FILE, spec.memory_mb)
        return [*sockets, *files, owned(stack, memory_file)]

    def _without_rights(self, uid: int, gid: int, with_kvm: bool) -> list[str]:
        """What runs before QEMU to take its rights from it: all but those to /dev/kvm that a group has."""
        groups = "--clear-groups"
        if with_kvm:
            with contextlib.suppress(OSError):
                groups = f"--groups={KVM.stat().st_gid}"
        return [self._setpriv, f"--reuid={uid}", f"--regid={gid}", groups, "--no-new-privs", "--"]


def _limits(spec: MachineSpec) -> list[str]:
    """What a monitor may take of the host beside memory and time, as prlimit(1) takes it."""
    written = max(spec.workspace.stat().st_size, CONSOLE_BYTES, OUTPUT_BYTES)
    # A core of 0 would not keep the host's handler from getting the guest's memory where core_pattern is a program.
    return [f"--fsize={written}", f"--nproc={spec.vcpus + _THREADS}", "--core=1"]


async def _let_run(directory: Path, feeding: socket.socket | None, state: bytes) -> None:
    """Wait until everything is in place, and let the processors go."""
    async with Qmp(directory / QMP_SOCKET, _START_SECONDS) as qmp:
        if feeding is not None:
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.get_running_loop().sock_sendall(feeding, state)
            feeding.shutdown(socket.SHUT_WR)  # so that a state which was cut off is an error, and not waited for
            while True:
                status = _status(await qmp.execute("query-status"))
                if status == "paused":
                    break
                if status != "inmigrate":
                    raise BackendError(f"the machine that was saved cannot go on: it is {status}")
                await asyncio.sleep(PAUSE_SECONDS)
        await qmp.execute("cont")


async def _device_state(qmp: Qmp) -> bytes:
    """The state of a paused machine's devices and processors, all but its memory.

    It comes through a pipe, so that it cannot grow. QEMU would truncate what it has as a descriptor, which a pipe
    refuses; opened again by its number it does not, and for that it must be everybody's to write. QEMU keeps its end
    until the machine runs again, so the end is where nothing more is there once QEMU has answered.
    """
    loop, received = asyncio.get_running_loop(), bytearray()
    with ExitStack() as stack:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        owned(stack, read_end)
        with ExitStack() as writing:
            owned(writing, write_end)
            os.fchmod(write_end, 0o622)
            added = await qmp.execute("add-fd", descriptors=(write_end,))
        if not isinstance(added, dict) or not all(type(added.get(key)) is int for key in ("fd", "fdset-id")):
            raise BackendError("QEMU did not take a descriptor")
        os.set_blocking(read_end, False)
        loop.add_reader(read_end, _receive, read_end, received)
        try:
            arguments = {"filename": f"/proc/self/fd/{added['fd']}", "live": False}
            await qmp.execute("xen-save-devices-state", arguments)
            await qmp.execute("remove-fd", {"fdset-id": added["fdset-id"]})
        finally:
            loop.remove_reader(read_end)
        while _receive(read_end, received):
            pass
    if not 0 < len(received) <= _STATE_BYTES:
        raise BackendError(f"QEMU said {len(received)} bytes of its devices")
    return bytes(received)


def _receive(pipe: int, received: bytearray) -> bool:
    """Add what is in a pipe to what was received, at most a little more than may be; say whether there was any."""
    if len(received) > _STATE_BYTES:
        return False
    try:
        data = os.read(pipe, _PIPE_BYTES)
    except BlockingIOError:
        return False
    received += data
    return bool(data)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            state = file.read(_STATE_BYTES + 1)
    except FileNotFoundError:
        raise ConflictError("the machine's saved state is not there") from None
    if not 0 < len(state) <= _STATE_BYTES:
        raise ConflictError("the machine's saved state is damaged")
    return state


def _write(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)


def _listen(stack: ExitStack, path: Path) -> int:
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise BackendError(f"{path} is too long for a socket; at most {_SOCKET_PATH_BYTES} bytes can be used")
    path.unlink(missing_ok=True)
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen()
    return listener.fileno()


def _pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return stack.enter_context(ours), theirs


def _status(answer: object) -> str:
    status = answer.get("status") if isinstance(answer, dict) else None
    return status if isinstance(status, str) else "unknown"


__all__ = ["QemuMonitor"]
