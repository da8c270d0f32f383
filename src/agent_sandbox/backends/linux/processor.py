"""The kind of this machine's processor, as memory that was saved depends on it."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """This machine's kind: its architecture and a digest of its processor's features (proc_cpuinfo(5)). Blocks."""
    features: set[str] = set()
    for line in cpuinfo.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            features |= set(value.split())
    return f"{platform.machine()}-{hashlib.sha256(' '.join(sorted(features)).encode()).hexdigest()[:12]}"
