"""One server's containers and volumes on an engine, found by their labels and names and touched by their full ids.

A name alone is no reason to touch something: another program may have made what has it. Nor are labels: a container has
those of its image, and an image made of a sandbox (``docker commit``) has the sandbox's. So what counts as this
server's is what has the labels **and** the name that it gives to that environment, which no image can bring along; or
whose full id the engine acknowledged to it, whatever it is called by now. What it asked for and got no answer about has
both, and so is found again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_sandbox.backends.docker import container
from agent_sandbox.backends.docker.engine import Engine, Frames
from agent_sandbox.backends.linux import sentry
from agent_sandbox.backends.linux.cgroups import Groups, Hierarchies
from agent_sandbox.backends.linux.process import Process
from agent_sandbox.errors import BackendError, ConflictError, NotFoundError
from agent_sandbox.types import SandboxSpec

MARKER = b"sandboxd ready generation="
_READY_SECONDS = 60.0
_LOG_BYTES = 2000
_PIECE = 4096
_SOCKETS_SHARE = 4
"""Socket buffers may take as much as a quarter of memory, beside it, where the kernel counts them apart."""
_GONE_SECONDS = 30.0
_PAUSE_SECONDS = 0.1


class Containers:
    """The containers and volumes of the server ``instance``."""

    def __init__(self, engine: Engine, instance: str) -> None:
        self._engine = engine
        self._instance = instance
        self._acknowledged: set[str] = set()

    def know(self, cid: str) -> None:
        """Take a container for this server's, by the full id that the engine acknowledged."""
        if cid:
            self._acknowledged.add(cid)

    async def find(self, id: str | None = None) -> list[dict[str, Any]]:
        """The containers of one environment, or of all, as the engine lists them: stopped and half-made ones too."""
        listed = await self._engine.get("/containers/json", all="true", filters=container.filters(self._instance, id))
        found = [one for one in listed if isinstance(one, dict) and isinstance(one.get("Id"), str)]
        return [one for one in found if one["Id"] in self._acknowledged or _has_our_name(one)]

    async def volumes(self, id: str | None = None) -> list[dict[str, Any]]:
        """The volumes of one environment, or of all."""
        listed = await self._engine.get("/volumes", filters=container.filters(self._instance, id))
        found = [one for one in (listed or {}).get("Volumes") or () if isinstance(one, dict)]
        return [one for one in found if f"{one.get('Name')}-".startswith(f"{container.PREFIX}{_environment(one)}-")]

    async def make_volume(self, body: Mapping[str, Any]) -> None:
        """Make a volume, or find the one that was made for the same. :class:`ConflictError` for somebody else's.

        The engine answers with a volume that has the name already as if it had made it.
        """
        made = await self._engine.post("/volumes/create", dict(body))
        if (made.get("Labels") or {}) != body["Labels"]:
            raise ConflictError(f"the Docker engine has another volume {body['Name']}, which was left alone; remove it")

    async def ids(self) -> set[str]:
        """The environments that have something on the engine."""
        found = [*await self.find(), *await self.volumes()]
        return {_environment(one) for one in found} - {""}

    async def create(self, id: str, body: Mapping[str, Any]) -> str:
        """Create a container that is not started; return the full id that the engine acknowledges.

        :class:`ConflictError` when something else has its name, :class:`NotFoundError` when its image has gone.
        """
        name = container.PREFIX + id
        try:
            made = await self._engine.post("/containers/create", dict(body), name=name)
        except ConflictError as error:
            raise ConflictError(
                f"the Docker engine has another container {name}, which was left alone; remove it or use another "
                "data directory"
            ) from error
        except NotFoundError as error:
            if "image" in error.message.lower():
                raise NotFoundError(f"the sandbox's image has gone from the Docker engine ({error.message})") from None
            raise BackendError(f"the sandbox could not be created: {error.message}") from error
        self.know(str(made["Id"]))
        return str(made["Id"])

    async def start(self, cid: str) -> None:
        """Start a container, and return once its daemon says on its output that it is ready.

        :class:`BackendError`, with the end of what it said, when it does not start.
        """
        said = bytearray()
        attached = self._engine.hijack(f"/containers/{cid}/attach", {}, stream="true", stdout="true", stderr="true")
        try:
            async with asyncio.timeout(_READY_SECONDS), attached as stream:
                await self._engine.post(f"/containers/{cid}/start")
                if await _says_ready(stream, said):
                    return
        except TimeoutError:
            pass
        except NotFoundError as error:
            raise BackendError(f"the sandbox could not be started: {error.message}") from error
        tail = said.decode(errors="replace").strip()
        raise BackendError("the sandbox's daemon did not start" + (f"; its log ends with: {tail}" if tail else ""))

    async def inspect(self, cid: str) -> dict[str, Any]:
        """What the engine knows of a container. :class:`NotFoundError` when it has none."""
        return dict(await self._engine.get(f"/containers/{cid}/json"))

    async def state(self, cid: str) -> dict[str, Any]:
        """Its state. :class:`NotFoundError` when there is none."""
        return dict((await self.inspect(cid)).get("State") or {})

    async def kill(self, id: str) -> None:
        """End every process of an environment; return when the engine says that none runs."""
        for one in await self.find(id):
            if one.get("State") in ("created", "exited", "dead"):
                continue
            with contextlib.suppress(NotFoundError):
                with contextlib.suppress(ConflictError):  # it does not run
                    await self._engine.post(f"/containers/{one['Id']}/kill", signal="SIGKILL")
                await self.wait(one["Id"])

    async def wait(self, cid: str) -> None:
        """Return when a container does not run. :class:`BackendError` when it goes on."""
        for _ in range(int(_GONE_SECONDS / _PAUSE_SECONDS)):
            try:
                state = await self.state(cid)
            except NotFoundError:
                return
            if not state.get("Running"):
                return
            await asyncio.sleep(_PAUSE_SECONDS)
        raise BackendError("the sandbox's container does not end; look at the engine's log")

    async def remove_volume(self, id: str, name: str) -> None:
        """Remove one volume of an environment, which no container has any more."""
        if name in {one.get("Name") for one in await self.volumes(id)}:
            with contextlib.suppress(NotFoundError):
                await self._engine.delete(f"/volumes/{name}")

    async def remove(self, id: str, *, volumes: bool) -> None:
        """Remove the containers of an environment, whatever their state, and its volumes where asked for."""
        for one in await self.find(id):
            with contextlib.suppress(NotFoundError):
                await self._engine.delete(f"/containers/{one['Id']}", force="true", v="true")
            self._acknowledged.discard(one["Id"])
        if volumes:
            for volume in await self.volumes(id):
                with contextlib.suppress(NotFoundError):
                    await self._engine.delete(f"/volumes/{volume['Name']}")


def _environment(one: Mapping[str, Any]) -> str:
    return str((one.get("Labels") or {}).get(f"{container.LABEL}.id", ""))


def _has_our_name(one: Mapping[str, Any]) -> bool:
    name = f"/{container.PREFIX}{_environment(one)}"
    return bool({name, f"{name}{container.SETUP}"} & set(map(str, one.get("Names") or ())))


def live_process(state: Mapping[str, Any]) -> Process | None:
    """The first process of a running container of an engine on this host, by its state; None where it is not seen."""
    pid = state.get("Pid")
    if not state.get("Running") or not isinstance(pid, int) or pid <= 0:
        return None
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return Process(pid, int(text[text.rindex(")") + 2 :].split()[19]))


def groups_of(process: Process, cid: str, hierarchies: Hierarchies) -> Groups | None:
    """The control groups of a container on this host, by its first process; None where they are not its own."""
    try:
        table = Path(f"/proc/{process.pid}/cgroup").read_text()
    except OSError:
        return None
    for line in table.splitlines():
        parts = line.split(":", 2)[2].split("/")
        for number, part in enumerate(parts):
            if cid in part:  # docker/<id>, or system.slice/docker-<id>.scope
                return Groups(hierarchies, "/".join(parts[: number + 1]))
    return None


def finish_groups(groups: Groups, spec: SandboxSpec, is_gvisor: bool) -> None:
    """Bound the memory of sockets; give gVisor's kernel some beside its guest's, who sees the limit from before."""
    groups.limit_sockets(spec.memory_mb * container.MIB // _SOCKETS_SHARE)
    if is_gvisor:
        groups.allow_memory(sentry.memory_mb(spec) * container.MIB)


async def _says_ready(stream: Any, said: bytearray) -> bool:
    """Keep the end of what comes in ``said``; whether the marker came before the end."""
    frames = Frames()
    while data := await stream.read(_PIECE):
        for _, piece in frames.feed(data):
            said += piece
            del said[:-_LOG_BYTES]
            if MARKER in said:
                return True
    return False
