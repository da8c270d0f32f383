"""What ``inspect`` shows of a microVM: what its machine was asked to be, and its monitor as the host sees it."""

from __future__ import annotations

from typing import Any

from agent_sandbox.backends.linux.cgroups import Groups
from agent_sandbox.backends.linux.inspection import observe
from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.microvm.config_image import MIB
from agent_sandbox.backends.microvm.monitor import Facts
from agent_sandbox.types import SandboxSpec


def details(spec: SandboxSpec, process: Process | None, groups: Groups, facts: Facts) -> dict[str, Any]:
    """The details of an environment whose monitor is ``process``, None where it is stopped. Blocks for a moment.

    The share of the CPU is what the host's control group holds; the other limits are the guest's, which nothing but its
    daemon could ask, and its drive's.
    """
    shown = observe(process, {})
    shown.pop("mounts", None)  # the monitor's, which are the host's
    return shown | {
        "limits": {
            "cpus": groups.limits()["cpus"],
            "memory_bytes": spec.memory_mb * MIB,
            "memory_swap_bytes": spec.memory_mb * MIB,
            "pids": spec.pids_limit,
            "disk_bytes": spec.disk_mb * MIB,
        },
        "usage": {"cpu_seconds": groups.usage()["cpu_seconds"]} if process else {},
        "image": spec.image,
        "image_digest": spec.image_digest,
        "runtime": f"{facts.name} {facts.version} ({'KVM' if facts.accelerated else 'TCG'})",
    }
