"""Deleting trees: renamed aside at once, removed by a process of its own that nobody waits for.

A hundred thousand files take twenty seconds. The rename is what counts: after it nothing finds the tree. When the
machine stops in between, the next :func:`sweep` goes on. ``rm`` is used because it takes trees of any depth.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path

_GONE = ".gone-"


def discard(path: Path) -> None:
    """Remove ``path`` in the background; it is no longer there when this returns. Nothing happens when it is not."""
    aside = path.parent / f"{_GONE}{secrets.token_hex(8)}"
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        _remove([aside])


def sweep(directory: Path) -> None:
    """Go on with every removal in ``directory`` that was cut short."""
    left = sorted(directory.glob(f"{_GONE}*"))
    if left:
        _remove(left)


def _remove(paths: Sequence[Path]) -> None:
    argv = ["setsid", "--fork", "rm", "-rf", "--one-file-system", "--", *map(str, paths)]
    null = subprocess.DEVNULL
    subprocess.run(argv, cwd="/", check=False, timeout=60, stdin=null, stdout=null, stderr=null)
