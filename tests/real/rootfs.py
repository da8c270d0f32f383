"""A small root file system of the host's own programs and the libraries that they load."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PROGRAMS = ("sh", "head", "bash", "cat", "id", "ls", "touch", "mkdir", "mount")


def build_rootfs(root: Path, more: tuple[str, ...] = ()) -> Path:
    """Make the root file system in ``root``, which does not exist yet; ``more`` are further programs in it."""
    for name in ("bin", "etc", "data"):
        (root / name).mkdir(parents=True)
    (root / "data").chmod(0o777)
    (root / "etc/marker").write_text("of the image\n")
    (root / "data/lower").write_text("lower\n")
    (root / "data/lower").chmod(0o666)
    libraries: set[str] = set()
    for program in (*PROGRAMS, *more):
        path = shutil.which(program, path="/usr/bin:/bin")
        assert path is not None
        shutil.copy(path, root / "bin" / program)
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        libraries |= {word for word in listed.split() if word.startswith("/")}
    for library in libraries:
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    return root
