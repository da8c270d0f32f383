"""What this backend can promise on the host that it is on."""

from __future__ import annotations

from agent_sandbox.backends.linux import sentry
from agent_sandbox.types import Capabilities, LimitName


def capabilities(
    limits: frozenset[LimitName], *, has_swap_limit: bool, has_socket_limit: bool, no_userns: str, no_layers: str = ""
) -> Capabilities:
    """What this backend offers where the kernel keeps ``limits`` by control groups.

    ``no_userns`` says why sandboxes get no host ids of their own; it is empty where they do. ``no_layers`` says why
    workspaces are no overlays of layers but copies.
    """
    notes = {"disk": "size only; its bandwidth is not limited"}
    if no_userns:
        notes["userns"] = (
            f"{no_userns}; commands run as a user id of the host (AGENT_SANDBOX_SANDBOX_USER): sandboxes share the "
            "kernel's limits for each user, and a user of the host with that id can read and signal commands; choose "
            "one that nobody has"
        )
    notes |= {
        limit: "this kernel lacks the control group" for limit in ("cpus", "memory", "pids") if limit not in limits
    }
    if "memory" in limits and not has_swap_limit:
        notes["memory"] = "this kernel does not limit swap with memory; turn swap off on this host"
    elif "memory" in limits and not has_socket_limit:
        notes["memory"] = "this kernel does not limit the buffers of internet sockets"
    notes["checkpoint"] = "runc keeps no memory of processes; the gvisor backend does"
    if no_layers:
        notes["layered_workspace"] = f"copied: {no_layers}; a rollback or fork costs the whole workspace"
    return Capabilities(
        isolation="container",
        enforces=limits | {"disk", "network"},
        network=frozenset({"none"}),
        userns=not no_userns,
        guest=True,
        layered_workspace=True,
        notes=notes,
    )


def gvisor_capabilities(limits: frozenset[LimitName], *, has_swap_limit: bool, no_layers: str) -> Capabilities:
    """What the gvisor backend offers where the host's control groups keep ``limits``; ``no_layers`` as above."""
    notes = {
        "disk": "size only; its bandwidth is not limited",
        "memory": sentry.memory_note(),
        "pids": "counted by the sandbox's own kernel",
        "userns": "a guest's processes are none of the host's: its files alone have ids of the host, those of "
        "AGENT_SANDBOX_SANDBOX_USER",
        "checkpoint": "commands go on, streams of them are cut and can be attached to again; open files that were "
        "deleted, and unix sockets bound outside of /tmp, are refused",
    }
    notes |= {limit: "this kernel lacks the control group" for limit in ("cpus", "memory") if limit not in limits}
    if "memory" in limits and not has_swap_limit:
        notes["memory"] += "; this kernel does not limit swap with memory: turn swap off on this host"
    if no_layers:
        notes["layered_workspace"] = f"copied: {no_layers}; a rollback or fork costs the whole workspace"
    return Capabilities(
        isolation="gvisor",
        enforces=limits | {"pids", "disk", "network"},
        network=frozenset({"none"}),
        userns=False,
        guest=True,
        layered_workspace=True,
        checkpoint=True,
        notes=notes,
    )
