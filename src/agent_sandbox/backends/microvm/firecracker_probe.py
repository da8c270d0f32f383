"""Whether Firecracker can run a machine on this host, found by trying.

A /dev/kvm that opens says little: some hosts have one that makes machines and runs none. So a guest of some 30 bytes is
run in Firecracker itself, with the processor that guests get: an ELF file that is entered in 64-bit mode, says one byte
on the serial port and restarts the machine through the keyboard controller, by which Firecracker ends. It is handed in
as a file without a name; nothing touches the disk. One byte, since Firecracker's log may come between two.

What else may lie behind /dev/kvm than a processor's own virtualization can pass that and fail in a kernel's boot, so
the module that drives it must be one that Firecracker knows.
"""

from __future__ import annotations

import json
import os
import signal
import struct
from contextlib import ExitStack
from pathlib import Path

from agent_sandbox.backends.microvm.children import PROBE_SECONDS, clean, memfd, run

KVM = Path("/dev/kvm")
MODULES = Path("/sys/module")
_DRIVERS = ("kvm_intel", "kvm_amd")
_PROOF = "\x06"
"""Acknowledge, in ASCII: no log has it."""
_ENTRY, _PAGE = 0x10_0000, 0x1000
_MEMORY_MIB = 16
_SERIAL_PORT, _KEYBOARD_PORT, _RESTART = 0x3F8, 0x64, 0xFE


def why_not(device: Path = KVM, modules: Path = MODULES) -> str:
    """What is in the way of KVM as far as looking tells, "" when nothing is. Blocks."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return f"there is no {device} (load kvm_intel or kvm_amd; in a virtual machine, enable nested virtualization)"
    except OSError as error:
        return f"{device} cannot be opened: {error.strerror}"
    if not any((modules / name).exists() for name in _DRIVERS):
        there = sorted(path.name for path in modules.glob("kvm_*"))
        return f"{device} is not driven by {' or '.join(_DRIVERS)} but by {', '.join(there) or 'something else'}"
    return ""


async def why_not_run(program: str, remedy: str) -> str:
    """What keeps the Firecracker ``program`` from running a guest on KVM, "" when nothing does.

    :class:`BackendError` with the ``remedy`` when it cannot be started.
    """
    settings = {
        "boot-source": {"kernel_image_path": "/proc/self/fd/4", "boot_args": ""},
        "drives": [],
        "machine-config": {"vcpu_count": 1, "mem_size_mib": _MEMORY_MIB},
    }
    text = json.dumps(settings).encode()
    with ExitStack() as stack:
        given = memfd(stack, "settings", len(text), text), memfd(stack, "guest", len(_GUEST), _GUEST)
        code, output = await run([program, "--no-api", "--config-file", "/proc/self/fd/3"], remedy, given)
    if _PROOF in output:
        return ""
    if code == -signal.SIGKILL:
        return f"a guest of a few instructions did not finish within {PROBE_SECONDS:g} seconds on it"
    # Its log lines begin with time and thread; the last that is no farewell says why.
    lines = [line.partition("] ")[2] or line for line in output.splitlines()]
    told = [line for line in lines if "error" in line.casefold()] or lines
    return f"a guest does not run on it: {clean(told[-1]) if told else f'Firecracker ended with code {code}'}"


def _guest() -> bytes:
    """The guest's ELF file (elf(5)): one segment, loaded and entered at 1 MiB."""
    code = b"\x66\xba" + _SERIAL_PORT.to_bytes(2, "little")  # mov dx, port
    code += b"\xb0" + _PROOF.encode() + b"\xee"  # mov al, proof; out dx, al
    code += b"\xb0%c\x66\xba" % _RESTART + _KEYBOARD_PORT.to_bytes(2, "little") + b"\xee"
    code += b"\xf4\xeb\xfd"  # hlt, for ever
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<16s2HI3QI6H", ident, 2, 62, 1, _ENTRY, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<2I6Q", 1, 5, _PAGE, _ENTRY, _ENTRY, len(code), len(code), _PAGE)
    return (header + segment).ljust(_PAGE, b"\0") + code


_GUEST = _guest()

__all__ = ["why_not", "why_not_run"]
