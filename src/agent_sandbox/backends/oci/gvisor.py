"""The gvisor backend: sandboxes on runsc, each with a kernel of its own in user space.

Strategy
--------
* Everything about an environment is as with runc (``backend.py``): directory, disk, overlay, control group, roads of
  creating, stopping and removing. What differs is here.
* The daemon binds its socket itself, in a private directory of the host that is bound for it, since gVisor takes no
  listening socket that was handed in. Its start is not waited for by the runtime, so a connection is tried again while
  the sandbox runs.
* Processes are counted by the sandbox's own kernel, by the daemon's order: the host's control group would count the
  threads of that kernel. All other limits are the host's and hold for the guest and its kernel together.
* Host ids: the processes of a guest are no processes of the host, so there is nobody to keep apart.
* A workspace is held by pausing the sandbox, which stops its processes between two system calls; they write through to
  the host's files. Which files they have mapped cannot be seen from outside, so each is taken for one that is.
* A checkpoint needs the daemon's sockets closed, and open files that were deleted it cannot keep. The second is looked
  for in what the sandbox holds open on the host, before the caller commits; what else runsc refuses changes nothing.
* Whatever breaks a hold or a checkpoint off, the sandbox is resumed and its daemon told to listen, or else by the next
  server: it finds the sandbox paused, or its socket missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from agent_sandbox.backends.guest_backend import Endpoint
from agent_sandbox.backends.linux import cgroups, sentry
from agent_sandbox.backends.linux.failures import translated
from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.linux.waiting import settled
from agent_sandbox.backends.oci import bundle, checkpoints
from agent_sandbox.backends.oci.backend import OciBackend
from agent_sandbox.backends.oci.building import CONTAINER_PREFIX, Host, Listening, daemon_config, process_limits
from agent_sandbox.backends.oci.environment import Environment, Record
from agent_sandbox.backends.oci.places import Places
from agent_sandbox.backends.oci.requirements import gvisor_capabilities
from agent_sandbox.backends.oci.runsc import Runsc
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, ConflictError, SandboxError
from agent_sandbox.guest import HELLO_SECONDS
from agent_sandbox.types import Capabilities, HeldWorkspace, LimitName, PreparedWorkspace, SandboxSpec

_log = logging.getLogger(__name__)

_LISTEN_SIGNAL = "SIGUSR1"
"""What tells a daemon to listen again; see ``spec/wire.md``."""
_PAUSE_SECONDS = 0.01


class GvisorBackend(OciBackend):
    """Sandboxes as runsc containers with ``sandboxd`` as their first process. See the contract in ``base.py``."""

    name = "gvisor"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._parted: dict[str, asyncio.Event] = {}

    # -- the runtime ---------------------------------------------------------------------

    def _make_places(self) -> Places:
        return Places(self._settings.data_dir, self._settings.id_range_base, self.name, "runsc", "daemon/sock")

    def _make_runtime(self) -> Runsc:
        return Runsc(self._places.runtime)

    @property
    def _runsc(self) -> Runsc:
        assert isinstance(self._runtime, Runsc)
        return self._runtime

    def _capabilities(self, limits: frozenset[LimitName], *, no_userns: str, no_layers: str) -> Capabilities:
        has_swap_limit = cgroups.has_swap_limit(self._hierarchies)
        return gvisor_capabilities(limits, has_swap_limit=has_swap_limit, no_layers=no_layers)

    def _host_for(self, source: Path | None) -> Host:
        host = super()._host_for(source)
        return host if source is None else replace(host, sandboxd=self._daemons.find(checkpoints.read(source).daemon))

    def _why_no_ids(self) -> str:
        return "a guest's processes are none of the host's"

    def _counted(self, limits: frozenset[LimitName]) -> frozenset[LimitName]:
        return limits - {"pids"}

    def _filter(self) -> Mapping[str, Any] | None:
        return None

    def _listening(self, environment: Environment, spec: SandboxSpec) -> Listening:
        args = ("--listen", f"{bundle.PRIVATE}/sock", "--config", f"{bundle.PRIVATE}/config")
        # Many that fork at once slip past the controller; past the count of each user's processes they do not.
        limits = {**process_limits(), "nproc": spec.pids_limit}
        return Listening(args, environment.daemon, limits)

    async def _launch(self, environment: Environment, record: Record, key: bytes, source: Path | None) -> None:
        config = {**daemon_config(record, key), "pids_limit": record.spec.pids_limit}
        await self._thread(environment.make_daemon, msgspec.msgpack.encode(config))
        name = CONTAINER_PREFIX + environment.id
        with contextlib.ExitStack() as stack:
            log = await self._thread(environment.open_log)
            stack.callback(os.close, log)
            await self._runsc.run(name, environment.directory, log, source)
        if source is not None:
            await self._runsc.signal(name, _LISTEN_SIGNAL)

    def _finish(self, host: Host, environment: Environment, record: Record) -> None:
        """Give the sandbox's kernel memory beside the guest's, which sees the limit that it was started with.

        The root file system is not hidden: the runtime's own mounts of it come from where it stands.
        """
        if "memory" in host.enforces:
            size = sentry.memory_mb(record.spec) * bundle.MIB
            cgroups.Groups(host.hierarchies, host.cgroups_path(record.id)).allow_memory(size)

    def _observe(self, process: Process | None, groups: cgroups.Groups) -> dict[str, Any]:
        """The limits alone: of its first process the host sees the sandbox's kernel, not the daemon."""
        details: dict[str, Any] = {"limits": groups.limits()}
        return details if process is None else {**details, "pid": process.pid}

    def oom_kills(self, id: str) -> int | None:
        return None

    async def endpoint(self, id: str) -> Endpoint:
        """As with runc, and once a daemon that starts, or that a checkpoint has parted from its socket, listens."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + HELLO_SECONDS
        while True:
            parted = self._parted.get(id)
            if parted is not None:
                await parted.wait()
            try:
                return await super().endpoint(id)
            except (BackendError, ConflictError) as error:
                runs = await self.is_running(id)
                if not runs and id in self._changes:
                    raise BackendError("the sandbox ended as soon as it was started") from error
                if not runs or loop.time() > deadline:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _let_go_on(self) -> None:
        for id in await self._thread(self._list):
            name = CONTAINER_PREFIX + id
            if not await self.is_running(id):
                continue
            try:
                if await self._thread(self._runsc.is_paused, name):
                    await self._runsc.resume(name)
                if not await self._thread(self._places.environment(id).has_socket):
                    await self._runsc.signal(name, _LISTEN_SIGNAL)
            except BackendError as error:
                _log.error("environment %s was held when its server ended and does not go on: %s", id, error.message)

    # -- the workspace from outside, and memory ------------------------------------------------

    @contextlib.asynccontextmanager
    async def hold_workspace(self, id: str) -> AsyncGenerator[HeldWorkspace, None]:
        record = await self._held_record(id)
        try:
            async with translated("holding the sandbox still"):
                await self._runsc.pause(CONTAINER_PREFIX + id)
            yield self._held(record)
        finally:
            await settled(asyncio.ensure_future(self._resume(id)))

    @contextlib.asynccontextmanager
    async def checkpoint(self, id: str, dest: str) -> AsyncGenerator[HeldWorkspace, None]:
        record = await self._held_record(id)
        if id in self._parted:
            raise ConflictError("another checkpoint of the sandbox is being made")
        name, place, listens = CONTAINER_PREFIX + id, Path(dest), asyncio.Event()
        guest = await self._guest(id)
        self._parted[id] = listens
        try:
            async with translated("keeping the processes' memory"):
                await guest.prepare_checkpoint()
                await self.drop_guest(id)
                await self._runsc.pause(name)
                unkeepable = await self._thread(checkpoints.open_deleted, self._runsc.process(name))
            if unkeepable:
                raise ConflictError(
                    f"the processes' memory cannot be kept: files are open and deleted: {', '.join(unkeepable)}"
                )
            yield self._held(record)
            async with translated("keeping the processes' memory"):
                try:
                    await self._runsc.checkpoint(name, place)
                    daemon = await self._thread(self._daemon_of, record.id)
                    await self._thread(checkpoints.seal, place, self._made_of(record, daemon))
                except BaseException:
                    await self._thread(checkpoints.discard, place)
                    raise
        finally:
            await settled(asyncio.ensure_future(self._listen_again(id, listens)))

    async def restore(self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace, src: str) -> None:
        source = Path(src)
        async with translated("reading the checkpoint"):
            made = await self._thread(checkpoints.read, source)
            image = await self._thread(self._images.open, spec.image, spec.image_digest)
        checkpoints.require(made, self._made_of(Record(id, spec, image.rootfs), made.daemon))
        await self._create_prepared(id, spec, workspace, source)

    def _made_of(self, record: Record, daemon: str) -> checkpoints.Made:
        return checkpoints.made_of(record, f"runsc {self._version}", daemon)

    def _daemon_of(self, id: str) -> str:
        """The digest of the daemon's program that an environment was started with."""
        return bundle.daemon_of(self._places.environment(id).bundle()).name

    async def _held_record(self, id: str) -> Record:
        record = await self._record(id)
        if not await self.is_running(id):
            raise ConflictError("the sandbox is stopped; start it, its workspace is kept")
        return record

    def _held(self, record: Record) -> HeldWorkspace:
        disk = self._places.environment(record.id).disk
        return HeldWorkspace(str(disk.workspace), True, str(disk.changes) if record.layers else None)

    async def _resume(self, id: str) -> None:
        name = CONTAINER_PREFIX + id
        with contextlib.suppress(SandboxError):
            if await self.is_running(id) and await self._thread(self._runsc.is_paused, name):
                await self._runsc.resume(name)

    async def _listen_again(self, id: str, listens: asyncio.Event) -> None:
        try:
            await self._resume(id)
            if await self.is_running(id) and not self._places.environment(id).has_socket():
                await self._runsc.signal(CONTAINER_PREFIX + id, _LISTEN_SIGNAL)
        except SandboxError as error:
            _log.error("environment %s: its daemon could not be told to listen: %s", id, error.message)
        finally:
            self._parted.pop(id, None)
            listens.set()


__all__ = ["GvisorBackend"]
