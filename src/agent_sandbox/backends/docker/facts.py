"""What an engine is, found by asking it: which limits it keeps, whether it shares this host's files, its runtime.

An engine shares this host's files when a volume that it makes appears here, under the name that it tells, and when its
root is this host's. Then workspaces are on disks of this host. Any other engine gets volumes of its own, and its
daemons are reached through it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from agent_sandbox.backends.docker import container
from agent_sandbox.backends.docker.engine import Engine
from agent_sandbox.backends.linux import sentry
from agent_sandbox.errors import BackendError
from agent_sandbox.types import Capabilities, LimitName

_LIMITS: Mapping[LimitName, tuple[str, ...]] = {
    "cpus": ("CpuCfsQuota",),
    "memory": ("MemoryLimit", "SwapLimit"),
    "pids": ("PidsLimit",),
}
_HOST_SOCKETS = {"--host-uds=create", "--host-uds=all", "-host-uds=create", "-host-uds=all"}
"""Of runsc: it lets a sandbox's daemon bind a socket in a directory of the host's."""

_DESCRIBE_SECONDS = 10.0
_NO_NETWORK = {"--network=none", "-network=none"}


@dataclass(frozen=True, slots=True)
class Facts:
    """One engine. ``not_shared`` says why it does not share this host's files; empty when it does.

    ``runtime`` is what containers run on and ``asked`` the name to ask for it by (empty: it is the default).
    ``binds_sockets`` says whether daemons can be reached through a socket in this host's files.
    """

    version: str
    machine: str
    limits: frozenset[LimitName]
    runtime: str
    asked: str
    is_gvisor: bool
    not_shared: str
    binds_sockets: bool
    has_network: bool = True
    runtime_version: str = ""

    @property
    def shares_files(self) -> bool:
        """Whether workspaces are on this host's disks."""
        return not self.not_shared


UNSTARTED = Facts("", "", frozenset(), "", "", False, "the backend was not started", False)


async def find(engine: Engine, asked: str, instance: str) -> Facts:
    """Ask the engine. :class:`BackendError`, with what to do, when it cannot run sandboxes."""
    version = await engine.negotiate()
    info = await engine.get("/info")
    if info.get("OSType", "linux") != "linux":
        raise BackendError(f"the Docker engine at {engine.host} runs {info['OSType']} containers; it must run Linux's")
    runtimes = info.get("Runtimes") or {}
    runtime = asked or str(info.get("DefaultRuntime") or "runc")
    if asked and asked not in runtimes:
        known = ", ".join(sorted(runtimes))
        raise BackendError(
            f"the Docker engine has no runtime {asked!r} (AGENT_SANDBOX_DOCKER_RUNTIME), only {known}; add it to the "
            "engine's daemon.json and restart the engine"
        )
    how = runtimes.get(runtime) or {}
    is_gvisor = "runsc" in runtime or PurePosixPath(str(how.get("path") or "")).name.startswith("runsc")
    not_shared = await _why_not_shared(engine, info, instance)
    options = set(how.get("runtimeArgs") or ())
    return Facts(
        version=str(version.get("Version", "")),
        machine=str(info.get("Architecture", "")),
        limits=enforced(info),
        runtime=runtime,
        asked=asked,
        is_gvisor=is_gvisor,
        not_shared=not_shared,
        binds_sockets=not not_shared and (not is_gvisor or bool(_HOST_SOCKETS & options)),
        has_network=not _NO_NETWORK & options,
        runtime_version=_component(version, runtime),
    )


def _component(version: Mapping[str, Any], name: str) -> str:
    """The version of a part of the engine's, as it tells it; of runtimes that is its own runc alone."""
    found = (one for one in version.get("Components") or () if isinstance(one, dict) and one.get("Name") == name)
    return next((str(one.get("Version", "")) for one in found), "version not told")


async def describe(host: str, asked: str) -> str:
    """The engine at ``host`` in a few words, for people. Errors are those of :func:`find`."""
    engine = Engine(host)
    try:
        async with asyncio.timeout(_DESCRIBE_SECONDS):
            found = await find(engine, asked, "doctor")
    except TimeoutError:
        raise BackendError(f"the Docker engine at {host} does not answer; look at its log") from None
    finally:
        await engine.close()
    where = "on this host" if found.shares_files else f"with volumes of its own, since {found.not_shared}"
    return f"Docker {found.version} with {found.runtime}, {where}"


def enforced(info: Mapping[str, Any]) -> frozenset[LimitName]:
    """The limits that the engine says its kernel keeps."""
    return frozenset(limit for limit, signs in _LIMITS.items() if all(info.get(sign) is True for sign in signs))


async def _why_not_shared(engine: Engine, info: Mapping[str, Any], instance: str) -> str:
    if engine.socket is None:
        return "the engine is reached over a network"
    options = " ".join(info.get("SecurityOptions") or ())
    for sign, words in (("name=userns", "remaps user ids"), ("name=rootless", "has no root")):
        if sign in options:
            return f"the engine {words}"
    if os.geteuid() != 0:
        return "the server is not root"
    name = f"{container.PREFIX}probe-{secrets.token_hex(4)}"
    body = container.named_volume(name, "probe", instance)
    made = await engine.post("/volumes/create", body)
    try:
        if not await asyncio.to_thread(Path(str(made.get("Mountpoint"))).is_dir):
            return "the engine's files are not this host's"
    finally:
        await engine.delete(f"/volumes/{name}")
    return ""


def capabilities(facts: Facts, *, no_layers: str, no_network: str) -> Capabilities:
    """What the backend offers on this engine. ``no_layers`` and ``no_network`` say why those are absent."""
    limits: set[LimitName] = {*facts.limits, "network"}
    notes = {
        "userns": "commands run as a user id of the engine's host (AGENT_SANDBOX_SANDBOX_USER): sandboxes share the "
        "kernel's limits for each user",
    }
    notes |= {
        limit: "the engine's kernel lacks the control group"
        for limit in ("cpus", "memory", "pids")
        if limit not in limits
    }
    if facts.shares_files:
        limits.add("disk")
        notes["disk"] = (
            "size of the workspace only; its bandwidth is not limited, nor what a writable root file system takes"
        )
    else:
        notes["disk"] = f"{facts.not_shared}, so workspaces are volumes without a limit"
    if facts.is_gvisor:
        notes["memory"] = sentry.memory_note()
        notes["pids"] = "counted by the sandbox's own kernel"
    if no_layers:
        notes["layered_workspace"] = f"{no_layers}; a snapshot, rollback or fork moves the whole workspace"
    if no_network:
        notes["network"] = no_network
    return Capabilities(
        isolation="gvisor" if facts.is_gvisor else "container",
        enforces=frozenset(limits),
        network=frozenset({"none"} if no_network else {"none", "full"}),
        guest=True,
        layered_workspace=not no_layers,
        notes=notes,
    )
