"""What this backend needs of its host, and what it can promise there."""

from __future__ import annotations

import os
import shutil

from agent_sandbox.backends.microvm.monitor import Facts
from agent_sandbox.errors import BackendError
from agent_sandbox.types import Capabilities, LimitName

_NETWORK = "the machine has no network device"


def require_accelerated(facts: Facts, allow_tcg: bool) -> None:
    """Raise :class:`BackendError` where machines do not run, or emulated ones that the operator has not accepted."""
    if not facts.accelerated and not facts.emulates:
        raise BackendError(
            f"{facts.name} needs KVM, which cannot be used: {facts.why}; give this server a /dev/kvm that works, or "
            "use the qemu backend, which can emulate machines"
        )
    if not facts.accelerated and not allow_tcg:
        raise BackendError(
            f"KVM cannot be used: {facts.why}; give this server a /dev/kvm that works, or set "
            "AGENT_SANDBOX_ALLOW_TCG=true to run microVMs under software emulation, which is slow and no security "
            "boundary"
        )


def require_mkfs() -> None:
    """Raise :class:`BackendError` when a workspace's drive cannot be made here."""
    if shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:" + os.environ.get("PATH", "")) is None:
        raise BackendError("mkfs.ext4 is not installed; install it with: apt-get install e2fsprogs")


def capabilities(facts: Facts | None, has_cpu_limit: bool) -> Capabilities:
    """What is offered with the monitor of ``facts``; None before it was looked for."""
    limits: set[LimitName] = {"memory", "pids", "disk", "network"}
    notes = {
        "disk": "size only; its bandwidth is not limited",
        "memory": "kept by the guest's kernel, whose own comes beside it",
        "pids": "kept by the guest's kernel",
        "network": _NETWORK,
        "userns": "a guest's processes are none of the host's; each monitor has a host id of its own",
        "layered_workspace": "a state with files that have large holes is copied, as an archive",
    }
    if has_cpu_limit:
        limits.add("cpus")
    else:
        notes["cpus"] = "this kernel lacks the control group; the number of virtual CPUs alone is limited"
    if facts is not None and not facts.accelerated:
        notes["accelerated"] = f"software emulation (TCG), which is slow and no security boundary: {facts.why}"
    return Capabilities(
        isolation="vm",
        accelerated=facts is not None and facts.accelerated,
        enforces=frozenset(limits),
        network=frozenset({"none"}),
        userns=False,
        guest=True,
        layered_workspace=True,
        checkpoint=True,
        notes=notes,
    )
