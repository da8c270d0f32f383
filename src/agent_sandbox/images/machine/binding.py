"""Run a program that sees directories of this host within another directory, where nobody else sees them.

A program of its own, started by its path and with the standard library alone::

    python -I binding.py SOURCE TARGET [SOURCE TARGET …] -- PROGRAM [ARGUMENT …]

It makes a mount namespace, binds each source read-only onto its target, and becomes the program. The binds end with it.
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLONE_NEWNS = 0x0002_0000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18


def main(arguments: list[str]) -> None:
    """Bind and execute. :class:`OSError` when the kernel says no."""
    split = arguments.index("--")
    pairs, program = arguments[:split], arguments[split + 1 :]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]

    def call(result: int, what: str) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), what)

    call(libc.unshare(_CLONE_NEWNS), "a mount namespace")
    call(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "/")
    for source, target in zip(pairs[::2], pairs[1::2], strict=True):
        place = os.fsencode(target)
        call(libc.mount(os.fsencode(source), place, None, _MS_BIND, None), target)
        call(libc.mount(None, place, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY, None), target)
    os.execvp(program[0], program)  # noqa: S606


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
