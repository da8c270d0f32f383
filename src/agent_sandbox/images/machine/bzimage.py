"""What a Linux kernel image for x86 says about itself: its version, and whether a 64-bit machine can start it.

The fields are those of the boot protocol (the kernel's Documentation/arch/x86/boot.rst), from 2.12 on, which is Linux
3.8.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from agent_sandbox.errors import InvalidRequestError

MAX_BYTES = 256 << 20
"""Ten times a distribution's kernel with everything built in."""
_HEADER_BYTES = 64 << 10
"""The setup code, which the version's text is in: at most 64 sectors."""
_OLDEST_PROTOCOL = 0x020C
_STARTS_AT_64_BIT = 1
_VERSION = re.compile(rb"[0-9]+\.[0-9]+[A-Za-z0-9.+~_-]{0,64}")
_OTHERS = (
    (0, b"\x7fELF", "an uncompressed kernel (ELF): name the bzImage that was built with it, arch/x86/boot/bzImage"),
    (0x38, b"ARM\x64", "a kernel for arm64, and microVMs are amd64 here"),
    (0, b"\x1f\x8b", "packed with gzip, as kernels for other architectures are"),
)
REMEDY = "without --kernel, the command takes Debian's linux-image-cloud-amd64"


def read_version(path: Path) -> str:
    """The version of the kernel image at ``path``, as ``uname -r`` in it shows it.

    :class:`InvalidRequestError` when it is no whole kernel image for amd64; :class:`OSError` when it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
        size = file.seek(0, 2)
    if size > MAX_BYTES:
        raise _refused(path, f"larger than {MAX_BYTES >> 20} MiB")
    if head[0x202:0x206] != b"HdrS" or head[0x1FE:0x200] != b"\x55\xaa" or len(head) < 0x260:
        for at, magic, what in _OTHERS:
            if head.startswith(magic, at):
                raise _refused(path, what)
        raise _refused(path, "no bzImage")
    protocol, at, load = (struct.unpack_from("<H", head, where)[0] for where in (0x206, 0x20E, 0x236))
    if protocol < _OLDEST_PROTOCOL or not load & _STARTS_AT_64_BIT:
        raise _refused(path, "a kernel for 32-bit machines, and microVMs are amd64 here")
    whole = ((head[0x1F1] or 4) + 1) * 512 + struct.unpack_from("<I", head, 0x1F4)[0] * 16
    if size < whole:
        raise _refused(path, f"cut off: {size} bytes of {whole}")
    found = _VERSION.match(head, at + 0x200) if at else None
    if found is None:
        raise _refused(path, "damaged: it does not tell its version")
    return found[0].decode()


def _refused(path: Path, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path.name} is no kernel that a microVM can start: it is {what}; {REMEDY}")
