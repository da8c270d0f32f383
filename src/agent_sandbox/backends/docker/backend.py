"""Sandboxes on a Docker engine: one hardened container each, with ``sandboxd`` as its first process.

Strategy
--------
* An environment is a directory of the server's (``places.py``) and what the engine has with its labels: a container,
  volumes. It is found by directory, and by labels and name together, and every part can be removed alone.
* Where the engine shares this host's files (``facts.py``), the workspace is on a disk of this host, as with the oci
  backend: bound into the container, or, over layers, an overlay that the engine mounts as a volume. That it arrived is
  proven before the sandbox counts as made: the daemon has to read through ``/workspace`` what was put there. Elsewhere
  it is a volume of the engine's.
* The daemon is reached by a socket that it binds in a directory mounted for it; where that cannot be, through the
  engine (``bridge.py``). Its key comes in a file of mode 0600, mounted or uploaded, and is nowhere else.
* Creating is a line of steps; when one fails, or the caller goes, everything of that id is removed by the road that
  ``destroy`` takes, which works from any subset of the parts.
* Destroying ends the processes and replies; the rest goes in the background, again and again until it is gone.
* A container that ended (by the engine's restart, or by itself) is a stopped sandbox: its disk is kept, and starting
  begins by clearing what is left of the last time. One whose container somebody removed gets a new one.

Every call to the engine is made once. The file is long because it holds every change of an environment's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_sandbox.backends.base import ByteSource
from agent_sandbox.backends.docker import container, facts, images
from agent_sandbox.backends.docker.admission import require_no_volume_within, require_possible
from agent_sandbox.backends.docker.bridge import Bridges
from agent_sandbox.backends.docker.building import Builder, begin, nonce_name
from agent_sandbox.backends.docker.container import DAEMON, DELIVERED, PREFIX, PRIVATE
from agent_sandbox.backends.docker.containers import Containers, finish_groups, groups_of, live_process
from agent_sandbox.backends.docker.engine import Engine
from agent_sandbox.backends.docker.facts import UNSTARTED
from agent_sandbox.backends.docker.hostimage import NAME as HOST
from agent_sandbox.backends.docker.hostimage import HostOnEngine
from agent_sandbox.backends.docker.networks import Network
from agent_sandbox.backends.docker.places import Environment, Places, Record
from agent_sandbox.backends.guest_backend import Endpoint
from agent_sandbox.backends.linux import cgroups
from agent_sandbox.backends.linux.disk import Templates
from agent_sandbox.backends.linux.ending import end_processes
from agent_sandbox.backends.linux.failures import translated
from agent_sandbox.backends.linux.inspection import has_shared_map, observe
from agent_sandbox.backends.linux.overlay import MAX_LAYERS
from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.linux.requirements import find_sandboxd, require_disks
from agent_sandbox.backends.linux.roads import DiskBackend, is_id
from agent_sandbox.backends.linux.waiting import settled
from agent_sandbox.config import Settings
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    SandboxError,
    UnsupportedError,
)
from agent_sandbox.types import (
    WORKSPACE,
    Capabilities,
    EnvironmentInfo,
    HeldWorkspace,
    ImagePull,
    PreparedWorkspace,
    ResolvedImage,
    SandboxSpec,
)

_log = logging.getLogger(__name__)

_CONNECT_TRIES = 40
_CONNECT_PAUSE_SECONDS = 0.05
_KNOWN_FAILURES = {
    "test_the_daemon_is_hidden": "an engine mounts /proc without hidepid: the daemon is seen there, and shows nothing",
}


class _Live:
    """What is known of a container that runs on this host: its first process and its control groups."""

    def __init__(self, cid: str, process: Process, groups: cgroups.Groups) -> None:
        self.cid, self.process, self.groups = cid, process, groups


class DockerBackend(DiskBackend[Record]):
    """Sandboxes as containers of a Docker engine. See the contract in ``base.py``."""

    name = "docker"
    _places: Places

    def __init__(self, settings: Settings) -> None:
        super().__init__("docker")
        self._settings = settings
        self._places = Places(settings.data_dir)
        self.instance = self._places.instance
        self._engine = Engine(settings.docker_host)
        self._containers = Containers(self._engine, self.instance)
        self._network = Network(self._engine, settings.network_name)
        self._bridges = Bridges(self._engine)
        self._pulls = images.Pulls()
        self._templates = Templates(self._places.templates)
        self._host = HostOnEngine(
            self._engine, self._places.home / "host", self._places.run / "host", *settings.sandbox_ids()
        )
        self._hierarchies = cgroups.Hierarchies(None)
        self._facts = UNSTARTED
        self._builder = Builder(self._engine, self._containers, self._network, self._host, self.instance, self._thread)
        self.capabilities: Capabilities = facts.capabilities(UNSTARTED, no_layers="not started", no_network="")
        self._live: dict[str, _Live] = {}

    # -- the backend as a whole ------------------------------------------------------

    async def start(self) -> None:
        self._facts = await facts.find(self._engine, self._settings.docker_runtime, self.instance)
        async with translated("starting the docker backend"):
            await self._thread(self._prepare)
        no_network = await self._why_no_network()
        no_layers = self._facts.not_shared or await self._thread(self._places.why_no_layers)
        self.capabilities = facts.capabilities(self._facts, no_layers=no_layers, no_network=no_network)
        self.versions = {"docker": self._facts.version, self._facts.runtime: self._facts.runtime_version}
        self.known_failures = _KNOWN_FAILURES
        await self._thaw_all()

    async def _why_no_network(self) -> str:
        if not self._facts.has_network:
            return f"the engine runs {self._facts.runtime} with --network=none"
        if not self._facts.shares_files:
            return f"{self._facts.not_shared}, so what sandboxes reach of its host cannot be filtered"
        return await self._network.why_not()

    def _prepare(self) -> None:
        self._places.prepare(shares_files=self._facts.shares_files)
        daemon = self._places.keep_daemon(find_sandboxd(self._settings.sandboxd))
        self._builder.prepare(self._facts, daemon, self._templates)
        if self._facts.shares_files:
            require_disks()
            self._templates.clear()
            self._host.prepare()
            self._hierarchies = cgroups.find_hierarchies()

    async def _thaw_all(self) -> None:
        """Let go on what a server held still that then ended."""
        for one in await self._containers.find():
            if one.get("State") == "paused":
                with contextlib.suppress(ConflictError, NotFoundError):
                    await self._engine.post(f"/containers/{one['Id']}/unpause")
            elif one.get("State") == "running" and self._facts.shares_files:
                id = (one.get("Labels") or {}).get(f"{container.LABEL}.id", "")
                with contextlib.suppress(NotFoundError):
                    live = await self._look(id, one["Id"])
                    if live is not None:
                        await self._thread(live.groups.thaw)

    async def close(self) -> None:
        await super().close()
        await self._bridges.close()
        await self._engine.close()
        if self._facts.shares_files:
            self._host.close()
        self._places.close()

    async def ping(self) -> None:
        await self._engine.get("/version")
        if not os.access(self._places.environments, os.W_OK):
            raise BackendError(f"the data directory {self._settings.data_dir} cannot be written")

    async def resolve_image(self, name: str) -> ResolvedImage:
        if name == HOST and self._facts.shares_files:
            await self._image(name)
            return ResolvedImage(name, "", False)
        if name == HOST:
            raise NotFoundError(
                f"there is no image 'host' here, since {self._facts.not_shared}: name one of the Docker engine's, or "
                "set AGENT_SANDBOX_DEFAULT_IMAGE"
            )
        image = await images.find(self._engine, name, self._facts.machine, self.name, self._pulls)
        images.refuse_by_id(name, image, self._settings.allowed_images)
        return ResolvedImage(name, image.id, True, image.config.env)

    def pulls(self) -> list[ImagePull]:
        return self._pulls.told()

    async def _image(self, name: str, digest: str = "") -> images.Image:
        """What an environment is made from: the content that was resolved, which has to be there still."""
        if name == HOST and not digest and self._facts.shares_files:
            return await self._host.ensure(await self._thread(self._host.rootfs))
        return await images.inspect(self._engine, digest or name, self._facts.machine, self.name)

    # -- create --------------------------------------------------------------------------

    async def create(self, id: str, spec: SandboxSpec) -> None:
        await self._create_over(id, spec, ())

    async def create_from(self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace) -> None:
        if not self.capabilities.layered_workspace:
            raise UnsupportedError("layered_workspace", self.name, self.capabilities.notes["layered_workspace"])
        await self._create_over(id, spec, workspace.lowers)

    async def _create_over(self, id: str, spec: SandboxSpec, layers: tuple[str, ...]) -> None:
        if not is_id(id):
            raise InvalidRequestError(f"{id!r} is not an environment id")
        require_possible(spec, self.capabilities, self.name, allow_unenforced=self._settings.allow_unenforced)
        if len(layers) > MAX_LAYERS:
            raise InvalidRequestError(f"a workspace can have {MAX_LAYERS} layers, not {len(layers)}")
        if id in self._removals or await self._is_there(id):
            raise ConflictError(f"environment {id} exists already")
        await self._changes.alone(id, self._create(id, spec, layers))

    async def _create(self, id: str, spec: SandboxSpec, layers: tuple[str, ...]) -> None:
        environment = self._places.environment(id)
        try:
            async with translated("creating the sandbox"):
                image = await self._image(spec.image, spec.image_digest)
                require_no_volume_within(spec.image, image.config.volumes, self.name)
                record = Record(
                    id,
                    spec,
                    image.id,
                    self._facts.shares_files,
                    image_env=dict(image.config.env),
                    volumes=image.config.volumes,
                    layers=layers,
                    image_labels=image.labels,
                )
                key = await self._thread(environment.reserve, record)
                await self._build(environment, record, key, new=True)
        except BaseException:
            await settled(asyncio.ensure_future(self._undo(id)))
            raise

    async def _build(
        self, environment: Environment, record: Record, key: bytes, *, new: bool, other_layers: bool = False
    ) -> None:
        """Make or open the workspace, make the container where there is none, start it and meet its daemon."""
        nonce = secrets.token_hex(16)
        record = await self._builder.build(environment, record, key, nonce if new else "", other_layers=other_layers)
        try:
            await self._containers.start(record.container)
        except BackendError as error:
            if "runtime" not in error.message:
                raise
            words = f"{error.message}; is {self._facts.runtime} installed on its host, and new enough?"
            raise BackendError(words) from error
        self._records[record.id] = record
        live = await self._look(record.id, record.container)
        if live is not None:
            await self._thread(finish_groups, live.groups, record.spec, self._facts.is_gvisor)
        await self.guest_ready(record.id)
        if new and record.shares_files:
            await self._prove(record, nonce)

    async def _prove(self, record: Record, nonce: str) -> None:
        """See that ``/workspace`` is the one made here: the daemon reads there what was put in, which then goes."""
        try:
            read = await self.read_file(record.id, f"{WORKSPACE}/{nonce_name(nonce)}", len(nonce))
        except (NotFoundError, InvalidRequestError):
            read = b""
        if read != nonce.encode():
            raise BackendError(
                "the sandbox's /workspace is not the one that this server made: the Docker engine does not share this "
                "host's files as it seemed to"
            )
        await self._thread(begin, await self._workspace_path(record), nonce, record)

    # -- ending -------------------------------------------------------------------------

    async def _is_there(self, id: str) -> bool:
        """Whether something of the environment is here or on the engine."""
        if id in await self._thread(self._places.names):
            return True
        return bool(await self._containers.find(id) or await self._containers.volumes(id))

    async def _forget(self, id: str) -> None:
        with contextlib.suppress(SandboxError):  # its container may be called otherwise by now
            await self._record(id)
        await super()._forget(id)

    async def _end_processes(self, id: str, *, by_engine: bool = True) -> None:
        """End what runs; where this host cannot, the engine does, unless that is about to remove it all anyhow."""
        await self.drop_guest(id)
        live = self._live.pop(id, None)
        if live is not None:
            await self._thread(end_processes, live.process, live.groups)
        elif by_engine:
            await self._containers.kill(id)

    async def _clear(self, id: str) -> None:
        """End what still runs and remove everything. The directory goes last: by that it is listed."""
        await self._forget(id)
        await self._end_processes(id, by_engine=False)
        await self._containers.remove(id, volumes=True)
        environment = self._places.environment(id)
        await self._thread(environment.unmount)
        await self._thread(environment.remove)

    # -- stop and start ----------------------------------------------------------------

    async def _halt(self, id: str) -> None:
        """End every process and free what a reboot would; the container, the disk, the record and the key stay."""
        await self._end_processes(id, by_engine=False)
        await self._containers.kill(id)
        await self._thread(self._places.environment(id).unmount)

    async def start_environment(self, id: str, workspace: PreparedWorkspace | None = None) -> None:
        record = await self._known(id)
        if record.shares_files and not self._facts.shares_files:
            raise ConflictError(f"the sandbox's disk is on this host, but {self._facts.not_shared}")
        async with translated("starting the sandbox"):
            await self._changes.alone(id, self._start_again(record, workspace))

    async def _start_again(self, record: Record, workspace: PreparedWorkspace | None) -> None:
        id, environment = record.id, self._places.environment(record.id)
        if await self.is_running(id):
            return
        try:
            await self._halt(id)
            key = await self._thread(environment.key)
            there = {one["Id"] for one in await self._containers.find(id)}
            if record.container not in there:
                await self._containers.remove(id, volumes=False)
                record = replace(record, container="")
            layers = record.layers if workspace is None or not record.layers else workspace.lowers
            if layers != record.layers:
                await self._containers.remove(id, volumes=False)
                await self._containers.remove_volume(id, PREFIX + id)  # an overlay, which names them
                record = replace(record, layers=layers, container="")
                await self._thread(environment.write, record)
                self._records[id] = record
            await self._build(environment, record, key, new=False, other_layers=workspace is not None and bool(layers))
        except BaseException:
            try:
                await settled(asyncio.ensure_future(self._halt(id)))
            except (OSError, SandboxError) as error:
                _log.error("environment %s did not start and could not be cleared; start it again: %s", id, error)
            raise

    # -- the workspace from outside --------------------------------------------------------

    def hold_workspace(self, id: str) -> contextlib.AbstractAsyncContextManager[HeldWorkspace]:
        if not self.capabilities.layered_workspace:
            raise UnsupportedError("layered_workspace", self.name, self.capabilities.notes["layered_workspace"])
        return self._held(id)

    @contextlib.asynccontextmanager
    async def _held(self, id: str) -> AsyncGenerator[HeldWorkspace, None]:
        record = await self._record(id)
        live = await self._running(record)
        if live is None:
            raise ConflictError("the sandbox is stopped; start it, its workspace is kept")
        path = await self._workspace_path(record)
        upper = str(self._places.environment(id).disk.changes) if record.layers else None
        if self._facts.is_gvisor:  # the guest's own kernel has to stop, which the runtime does, and its maps are unseen
            async with translated("holding the sandbox still"):
                await self._engine.post(f"/containers/{live.cid}/pause")
            try:
                yield HeldWorkspace(str(path), True, upper)
            finally:
                with contextlib.suppress(ConflictError, NotFoundError):  # it was ended meanwhile
                    await settled(asyncio.ensure_future(self._engine.post(f"/containers/{live.cid}/unpause")))
            return
        try:
            async with translated("holding the sandbox still"):
                if not await self._thread(live.groups.freeze):
                    raise ConflictError("the sandbox's processes did not stop within seconds; its disk may be busy")
                mapped = await self._thread(lambda: has_shared_map(live.groups.frozen()))
            yield HeldWorkspace(str(path), mapped, upper)
        finally:
            await self._thread(live.groups.thaw)

    async def _workspace_path(self, record: Record) -> Path:
        """Where this host sees the workspace: on the disk, or where the engine has mounted the overlay."""
        disk = self._places.environment(record.id).disk
        if not record.layers:
            return disk.workspace
        volume = await self._engine.get(f"/volumes/{PREFIX}{record.id}")
        return Path(str(volume["Mountpoint"]))

    async def layers_in_use(self) -> set[str]:
        if not self.capabilities.layered_workspace:
            raise UnsupportedError("layered_workspace", self.name, self.capabilities.notes["layered_workspace"])
        return await super().layers_in_use()

    # -- looking -----------------------------------------------------------------------

    async def list_ids(self) -> list[str]:
        found = await self._containers.ids()
        async with translated("listing the sandboxes"):
            found |= await self._thread(self._places.names)
        return sorted(id for id in found if is_id(id))

    async def is_running(self, id: str) -> bool:
        try:
            record = await self._record(id)
            state = await self._containers.state(record.container) if record.container else {}
        except NotFoundError:
            return False
        if not state.get("Running") or not self._facts.shares_files:
            return bool(state.get("Running"))
        process = await self._thread(live_process, state)  # an engine may learn of an end much later than the host
        return process is not None and await self._thread(process.alive)

    async def inspect(self, id: str) -> EnvironmentInfo:
        record = await self._record(id)
        try:
            seen = await self._containers.inspect(record.container)
        except NotFoundError:
            seen = {}
        running = await self.is_running(id)
        live = await self._running(record) if running else None
        config = seen.get("HostConfig") or {}
        details: dict[str, Any] = {
            "limits": {
                "cpus": config.get("CpuQuota", 0) / (config.get("CpuPeriod") or 1),
                "memory_bytes": config.get("Memory"),
                "memory_swap_bytes": config.get("MemorySwap"),
                "pids": config.get("PidsLimit"),
            }
        }
        if live is not None:
            async with translated("inspecting the sandbox"):
                observed = live.process if not self._facts.is_gvisor else None
                details = await self._thread(lambda: observe(observed, live.groups.limits()))
                details["usage"] = await self._thread(live.groups.usage)
                if self._facts.is_gvisor:  # kept by the guest's own kernel
                    details["limits"]["pids"] = record.spec.pids_limit
        details |= {
            "image": record.spec.image,
            "image_digest": record.image_id,
            "runtime": f"{self._facts.runtime} of Docker {self._facts.version}",
            "container": record.container,
            "network_mode": config.get("NetworkMode"),
            "endpoint": "unix socket" if self._facts.binds_sockets else "exec bridge",
            "labels": container.labels(id, self.instance),
        }
        return EnvironmentInfo(id, running, details)

    # -- the daemon's side ---------------------------------------------------------------

    async def endpoint(self, id: str) -> Endpoint:
        record = await self._record(id)
        environment = self._places.environment(id)
        async with translated("reaching the sandbox's daemon"):
            key = await self._thread(environment.key)
            await self._running(record)
            if not self._facts.binds_sockets:
                return Endpoint(await self._bridge(record), key, record.spec, record.image_env)
            for _ in range(_CONNECT_TRIES):
                try:
                    connection = environment.connect()
                except BlockingIOError:
                    await asyncio.sleep(_CONNECT_PAUSE_SECONDS)
                except OSError as error:
                    if error.errno == errno.ENOENT:
                        raise ConflictError("the sandbox is stopped; start it, its workspace is kept") from None
                    if error.errno == errno.ECONNREFUSED:
                        raise BackendError("the sandbox is not running; start it again or destroy it") from None
                    raise
                else:
                    return Endpoint(connection, key, record.spec, record.image_env)
        raise BackendError("the sandbox's daemon takes no connection; it may be overloaded")

    async def _bridge(self, record: Record) -> Any:
        daemon = DAEMON if record.shares_files else f"{DELIVERED}/sandboxd"
        try:
            return await self._bridges.open(record.container, [daemon, "bridge", f"{PRIVATE}/sock"])
        except (ConflictError, NotFoundError):
            raise ConflictError("the sandbox is stopped; start it, its workspace is kept") from None

    async def import_workspace(self, id: str, src: ByteSource, max_bytes: int) -> None:
        record, disk = await self._record(id), self._places.environment(id).disk
        if not record.shares_files:
            await super().import_workspace(id, src, max_bytes)
            return
        async with translated("restoring the workspace"):
            await self._thread(disk.lend_reserve, record.spec.uid)
        await super().import_workspace(id, src, max_bytes)
        async with translated("restoring the workspace"):
            await self._thread(disk.lend_reserve, 0)

    async def kill_guest(self, id: str) -> None:
        try:
            live = self._live.get(id)
            if live is not None:
                await self._thread(end_processes, live.process, live.groups)
            else:
                await self._containers.kill(id)
        except (OSError, SandboxError):
            _log.exception("environment %s could not be killed", id)

    def oom_kills(self, id: str) -> int | None:
        live = self._live.get(id)
        return None if live is None or self._facts.is_gvisor else live.groups.oom_kills()

    # -- parts -----------------------------------------------------------------------------

    async def _read_record(self, id: str) -> Record:
        record = await self._thread(self._places.environment(id).record)
        self._containers.know(record.container)
        return record

    async def _running(self, record: Record) -> _Live | None:
        """What is known of the running container on this host; asked for when it is not known or has ended."""
        live = self._live.get(record.id)
        if live is not None and live.cid == record.container and await self._thread(live.process.alive):
            return live
        self._live.pop(record.id, None)
        try:
            return await self._look(record.id, record.container)
        except NotFoundError:
            return None

    async def _look(self, id: str, cid: str) -> _Live | None:
        if not self._facts.shares_files or not cid:
            return None
        process = live_process(await self._containers.state(cid))
        groups = None if process is None else await self._thread(groups_of, process, cid, self._hierarchies)
        if process is None or groups is None:
            return None
        self._live[id] = _Live(cid, process, groups)
        return self._live[id]
