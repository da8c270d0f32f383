"""What a sandbox on gVisor takes of the host beside what its guest takes: the memory of its own kernel. Pure."""

from __future__ import annotations

from agent_sandbox.types import SandboxSpec

_KERNEL_MB, MOST_KERNEL_MB = 64, 192
"""What a sandbox's kernel takes by itself, and with its guest's processes, of about 1 MiB of the host's memory each.
Without it a full house of small processes would end the kernel, and so the sandbox."""


def memory_mb(spec: SandboxSpec) -> int:
    """The memory of the host, MiB, for a guest of ``spec`` together with its kernel."""
    return spec.memory_mb + min(_KERNEL_MB + spec.pids_limit, MOST_KERNEL_MB)


def memory_note() -> str:
    """What a backend's note on its limit of memory says."""
    return (
        f"with up to {MOST_KERNEL_MB} MiB more for the sandbox's own kernel; where that is passed the whole sandbox "
        "stops, its workspace kept; that a command ran out of memory is not told"
    )
