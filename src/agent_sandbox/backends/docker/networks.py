"""The bridge network of sandboxes that may talk to the outside, and what they must not reach from it.

The network is made with communication between its containers off. The kernel's filter on this host refuses, for
whatever comes in through its bridge: the host itself (every port of every address of it), and link-local addresses,
where clouds keep their machines' credentials. The rules stand in ``INPUT`` and in ``DOCKER-USER``, which the engine
keeps in front of its own and leaves alone; they are looked at before every start of such a sandbox, since a firewall
that is loaded anew forgets them. Where they cannot be set, the backend has no network.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from agent_sandbox.backends.docker import container
from agent_sandbox.backends.docker.engine import Engine
from agent_sandbox.errors import BackendError, ConflictError, NotFoundError

_PATH = os.pathsep.join(("/usr/sbin", "/sbin", "/usr/bin", "/bin"))
_FILTER_SECONDS = "10"
"""How long iptables waits for another that changes the rules."""
_LINK_LOCAL = "169.254.0.0/16"


class Network:
    """The network ``name`` of one engine, shared by all servers on it."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self.bridge = f"asb-{hashlib.sha256(name.encode()).hexdigest()[:10]}"  # interface names have 15 characters

    async def why_not(self) -> str:
        """Why sandboxes can have no network here; empty when they can. Changes nothing."""
        if shutil.which("iptables", path=_PATH) is None:
            return "iptables is not installed, without which the host's ports would be open to sandboxes"
        code, words = await _iptables("-S", "DOCKER-USER")
        if code != 0:
            return f"the engine's packet filter cannot be used ({words})"
        try:
            _check(await self._engine.get(f"/networks/{self._name}"), self._name, self.bridge)
        except NotFoundError:
            pass
        except ConflictError as error:
            return error.message
        return ""

    async def ensure(self) -> str:
        """Make the network and its rules where they are missing, and return its id.

        :class:`ConflictError` when something else has its name, :class:`BackendError` when a rule cannot be set.
        """
        try:
            found = await self._engine.get(f"/networks/{self._name}")
        except NotFoundError:
            found = await self._make()
        _check(found, self._name, self.bridge)
        if not await asyncio.to_thread(Path(f"/sys/class/net/{self.bridge}").exists):
            raise BackendError("the sandboxes' bridge is not on this host, so its traffic cannot be filtered")
        for rule in rules(self.bridge):
            await _keep(rule)
        return str(found["Id"])

    async def _make(self) -> Any:
        try:
            await self._engine.post("/networks/create", network(self._name, self.bridge))
        except ConflictError:  # another server made it in this moment
            pass
        return await self._engine.get(f"/networks/{self._name}")


def network(name: str, bridge: str) -> dict[str, Any]:
    """The body that creates the network."""
    return {
        "Name": name,
        "CheckDuplicate": True,
        "Driver": "bridge",
        "EnableIPv6": False,
        "Labels": {f"{container.LABEL}.managed": "true"},
        "Options": {
            "com.docker.network.bridge.name": bridge,
            "com.docker.network.bridge.enable_icc": "false",
            "com.docker.network.bridge.enable_ip_masquerade": "true",
        },
    }


def rules(bridge: str) -> list[tuple[str, ...]]:
    """The rules as iptables takes them: chain first. Answers to what the host began pass."""
    return [
        ("INPUT", "-i", bridge, "-m", "conntrack", "!", "--ctstate", "ESTABLISHED,RELATED", "-j", "REJECT"),
        ("DOCKER-USER", "-i", bridge, "-d", _LINK_LOCAL, "-j", "REJECT"),
        ("DOCKER-USER", "-i", bridge, "-o", bridge, "-j", "DROP"),
    ]


def _check(found: Any, name: str, bridge: str) -> None:
    labels, options = found.get("Labels") or {}, found.get("Options") or {}
    same = (
        labels.get(f"{container.LABEL}.managed") == "true"
        and options.get("com.docker.network.bridge.name") == bridge
        and options.get("com.docker.network.bridge.enable_icc") == "false"
    )
    if not same:
        raise ConflictError(
            f"the network {name} on the Docker engine is not one of agent-sandbox's; name another in "
            "AGENT_SANDBOX_NETWORK_NAME"
        )


async def _keep(rule: tuple[str, ...]) -> None:
    if (await _iptables("-C", *rule))[0] == 0:
        return
    code, words = await _iptables("-I", *rule)
    if code != 0:
        raise BackendError(f"a rule of the sandboxes' network could not be set ({words})")


async def _iptables(*arguments: str) -> tuple[int, str]:
    program = shutil.which("iptables", path=_PATH) or "iptables"
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "-w",
            _FILTER_SECONDS,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": _PATH},
        )
    except OSError as error:
        return 1, str(error)
    _, errors = await process.communicate()
    return process.returncode or 0, errors[-300:].decode(errors="replace").strip()
