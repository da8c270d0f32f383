"""The embedded backend: sandboxes on runc, on one Linux host, without an engine.

Strategy
--------
* An environment is a directory (``environment.py``), a disk (``disk.py``), a container of runc's, and a control group.
  All of them are named by its id, so a new server process finds every one again, and each can be removed alone.
* Creating is a line of steps; when one fails, or the caller goes, everything of that id is removed by the road that
  ``destroy`` takes, which works from any subset of the parts: there is no undo list to keep right.
* Destroying kills first, through the control group, and replies when no process is left. Unmounting and deleting follow
  in the background; ``list_ids`` shows the id until nothing is left, and what failed is tried again (``removals.py``).
* Stopping frees everything that a reboot of the host would, and starting begins with that: so a stop or a start that
  was cut off anywhere is mended by the next start, and there is one road back from a stop, a crash and a reboot.
* Each environment has a range of host ids of its own where the host lets it, which is tried once; what
  ``capabilities.userns`` says is what every new one gets, or its creation fails.
* Blocking work runs on threads of the backend's own, and a step that began is waited for also when its caller is
  cancelled: otherwise it would go on behind the removal's back.
* Asking whether an environment runs starts no process: runc's state file names the first one.

The step names in the debug log are what the tests interrupt at. The file is long because it holds every change of an
environment's state, and only that: what each step does to the host is in the modules beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import platform
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

from agent_sandbox.backends.base import ByteSource
from agent_sandbox.backends.guest_backend import Endpoint
from agent_sandbox.backends.linux import cgroups, seccomp
from agent_sandbox.backends.linux.disk import Templates
from agent_sandbox.backends.linux.ending import end_processes
from agent_sandbox.backends.linux.failures import translated
from agent_sandbox.backends.linux.inspection import has_shared_map, observe
from agent_sandbox.backends.linux.overlay import MAX_LAYERS
from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.linux.requirements import find_sandboxd, require_disks, require_root
from agent_sandbox.backends.linux.roads import DiskBackend, is_id
from agent_sandbox.backends.linux.waiting import settled
from agent_sandbox.backends.oci import bundle, idmap
from agent_sandbox.backends.oci.building import (
    CONTAINER_PREFIX,
    DESCRIPTORS,
    Host,
    Listening,
    finish_groups,
    furnish,
    launch,
)
from agent_sandbox.backends.oci.daemons import Daemons
from agent_sandbox.backends.oci.environment import Environment, Record
from agent_sandbox.backends.oci.places import Places
from agent_sandbox.backends.oci.program import Runtime
from agent_sandbox.backends.oci.requirements import capabilities
from agent_sandbox.backends.oci.runc import Runc
from agent_sandbox.config import Settings
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    UnsupportedError,
)
from agent_sandbox.images import ImageRoot, ImageStore
from agent_sandbox.types import (
    Capabilities,
    EnvironmentInfo,
    Fill,
    HeldWorkspace,
    LimitName,
    PreparedWorkspace,
    ResolvedImage,
    SandboxSpec,
)

_log = logging.getLogger(__name__)

_CONNECT_TRIES = 40
_CONNECT_PAUSE_SECONDS = 0.05


class OciBackend(DiskBackend[Record]):
    """Sandboxes as runc containers with ``sandboxd`` as their first process. See the contract in ``base.py``.

    The methods below "the runtime" are what another runtime does otherwise.
    """

    name = "runc"
    _places: Places

    def __init__(self, settings: Settings) -> None:
        super().__init__("oci")
        self._settings = settings
        self._places = self._make_places()
        self.instance = self._places.instance
        self._runtime = self._make_runtime()
        self._templates = Templates(self._places.templates)
        self._daemons = Daemons(self._places.home / "daemons")
        self._images = ImageStore(self._places.data_dir, *settings.sandbox_ids())
        self._hierarchies = cgroups.Hierarchies(None)
        self._host: Host | None = None
        self._version = ""
        self.capabilities = self._capabilities(frozenset(), no_userns="not started", no_layers="")

    # -- the backend as a whole ------------------------------------------------------

    async def start(self) -> None:
        require_root(self.name)
        self._version = await self._runtime.find()
        self.versions = {self._runtime.program: self._version}
        await self._runtime.quiesce()
        async with translated(f"starting the {self.name} backend"):
            await self._thread(self._prepare)
            await self._let_go_on()

    def _prepare(self) -> None:
        sandboxd = find_sandboxd(self._settings.sandboxd)
        require_disks()
        self._hierarchies = cgroups.find_hierarchies()
        if not self._hierarchies.all():
            raise BackendError(
                "no control groups below /sys/fs/cgroup; mount them (cgroup2) or use a host that has them"
            )
        self._places.prepare()
        self._templates.clear()
        self._images.prepare(in_use=self._places.root_directories())
        limits = cgroups.enforced(self._hierarchies)
        why_copied = self._choose_projection()
        self.capabilities = self._capabilities(limits, no_userns=self._why_no_ids(), no_layers=why_copied)
        self._host = Host(
            self.instance,
            self._places.group,
            self._daemons.keep(sandboxd),
            self._hierarchies,
            self._counted(limits),
            self._filter(),
            self._templates,
        )

    def _choose_projection(self) -> str:
        """Choose how workspaces begin as a state; say why they are copied, where they are."""
        asked = self._settings.workspaces
        why = "AGENT_SANDBOX_WORKSPACES=copy" if asked == "copy" else self._places.why_no_layers()
        if why and asked == "overlay":
            raise BackendError(f"AGENT_SANDBOX_WORKSPACES=overlay cannot be: {why}; set it to auto or copy")
        self.projection = "copy" if why else "overlay"
        if why:
            _log.warning("workspaces are copied, not mounted over layers: %s", why)
        else:
            _log.info("workspaces are mounted over layers (overlayfs)")
        return why

    async def close(self) -> None:
        await super().close()
        for root in self._hierarchies.all():
            with contextlib.suppress(OSError):
                (root / self._places.group).rmdir()
        self._places.close()

    async def ping(self) -> None:
        if not self._runtime.installed():
            raise BackendError(f"{self._runtime.program} is no longer installed; {self._runtime.remedy}")
        if not os.access(self._places.environments, os.W_OK):
            raise BackendError(f"the data directory {self._settings.data_dir} cannot be written")

    async def resolve_image(self, name: str) -> ResolvedImage:
        async with translated("resolving the image"):
            return await self._thread(self._images.resolve_allowed, name, self._settings.allowed_images)

    # -- create --------------------------------------------------------------------------

    async def create(self, id: str, spec: SandboxSpec) -> None:
        await self._create_over(id, spec, ())

    async def create_from(self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace) -> None:
        await self._create_prepared(id, spec, workspace)

    async def _create_prepared(
        self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace, source: Path | None = None
    ) -> None:
        if self.projection == "overlay":
            await self._create_over(id, spec, workspace.lowers, source=source)
        elif workspace.fill is not None:
            await self._create_over(id, spec, (), workspace.fill, source=source)
        else:
            raise UnsupportedError(
                "layered_workspace", self.name, "workspaces are copied here, not mounted over layers"
            )

    async def _create_over(
        self,
        id: str,
        spec: SandboxSpec,
        layers: tuple[str, ...],
        fill: Fill | None = None,
        *,
        source: Path | None = None,
    ) -> None:
        self._check(id, spec)
        if len(layers) > MAX_LAYERS:
            raise InvalidRequestError(f"a workspace can have {MAX_LAYERS} layers, not {len(layers)}")
        if id in self._removals or self._places.environment(id).directory.exists():
            raise ConflictError(f"environment {id} exists already")
        try:
            await self._changes.alone(id, self._create(id, spec, layers, fill, source))
        except asyncio.CancelledError:
            if id not in self._removals and self._places.environment(id).directory.exists():
                await settled(asyncio.ensure_future(self._undo(id)))
            raise

    def _check(self, id: str, spec: SandboxSpec) -> None:
        if not is_id(id):
            raise InvalidRequestError(f"{id!r} is not an environment id")
        if spec.network not in self.capabilities.network:
            raise UnsupportedError("network", self.name, f"only {sorted(self.capabilities.network)} here")
        if spec.image == "host" and not spec.read_only_rootfs:
            raise UnsupportedError(
                "writable_rootfs", self.name, "the host image is the host's own /usr; import an image"
            )
        limits: tuple[LimitName, ...] = ("cpus", "memory", "pids", "disk")
        missing = [limit for limit in limits if limit not in self.capabilities.enforces]
        if missing and not self._settings.allow_unenforced:
            remedy = "this kernel lacks the control group; AGENT_SANDBOX_ALLOW_UNENFORCED=true accepts that"
            raise UnsupportedError(f"limit {missing[0]}", self.name, remedy)

    async def _create(
        self, id: str, spec: SandboxSpec, layers: tuple[str, ...], fill: Fill | None, source: Path | None
    ) -> None:
        environment, step = self._places.environment(id), _steps("create", id)
        try:
            async with translated("creating the sandbox"):
                step("image")
                image = await self._thread(self._images.open, spec.image, spec.image_digest)
                step("record")
                record, key = await self._thread(self._record_new, environment, spec, image, layers)
                step("disk")
                await self._build(environment, record, key, image, step, new=True, fill=fill, source=source)
        except BaseException as error:
            tail = await self._thread(environment.log_tail)
            await settled(asyncio.ensure_future(self._undo(id)))
            explained = _with_log(error, tail)
            if explained is error:
                raise
            raise explained from error

    def _record_new(
        self, environment: Environment, spec: SandboxSpec, image: ImageRoot, layers: tuple[str, ...]
    ) -> tuple[Record, bytes]:
        environment.reserve()
        ids = self._places.ranges.claim(environment.directory) if self.capabilities.userns else None
        record = Record(environment.id, spec, image.rootfs, ids, image.env, layers)
        return record, environment.make(record)

    async def _build(
        self,
        environment: Environment,
        record: Record,
        key: bytes,
        image: ImageRoot,
        step: Callable[[str], None],
        *,
        new: bool,
        fill: Fill | None = None,
        source: Path | None = None,
    ) -> None:
        host, listening, unwanted = self._host_for(source), self._listening(environment, record.spec), threading.Event()
        filling = None if fill is None else lambda place, owner: fill(place, owner, unwanted.is_set)
        with contextlib.ExitStack() as stack:
            namespace = None
            if record.ids is not None:
                namespace = await self._thread(idmap.make_namespace, record.ids)
                stack.callback(os.close, namespace)
            furnishing = asyncio.get_running_loop().run_in_executor(
                self._pool,
                lambda: furnish(host, environment, record, image, namespace, listening, new=new, fill=filling),
            )
            await settled(furnishing, unwanted.set)
            step("start")
            await self._launch(environment, record, key, source)
        await self._thread(self._finish, host, environment, record)
        step("hello")
        self._records[environment.id] = record
        await self.guest_ready(environment.id)
        step("ready")

    # -- ending -------------------------------------------------------------------------

    async def _end_processes(self, id: str) -> None:
        await self.drop_guest(id)
        await self._thread(self._kill, id)

    def _kill(self, id: str) -> None:
        end_processes(self._runtime.process(CONTAINER_PREFIX + id), self._groups(id))

    async def _clear(self, id: str) -> None:
        """End what still runs and remove everything."""
        await self._end(id)
        await self._remove(id)

    async def _remove(self, id: str) -> None:
        """Remove what is left of an environment without processes.

        Its directory goes last: by that it is listed, so what a kill leaves half removed is found again.
        """
        environment = self._places.environment(id)
        await self._free(id)
        await self._thread(self._places.ranges.release, environment.directory)
        await self._thread(environment.remove)

    async def _free(self, id: str, *more: Callable[[], None]) -> None:
        """Free what an environment without processes holds of the host, and do ``more``.

        Everything is tried; then the first failure is raised.
        """
        failed: Exception | None = None
        try:
            await self._runtime.delete(CONTAINER_PREFIX + id)
        except BackendError as error:
            failed = error
        for work in (self._places.environment(id).unmount, self._groups(id).remove, *more):
            try:
                await self._thread(work)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    # -- stop and start ----------------------------------------------------------------

    async def _halt(self, id: str) -> None:
        """End every process and free all that a reboot would; the disk, the record and the key stay."""
        await self._end_processes(id)
        await self._free(id, self._places.environment(id).clear)

    async def start_environment(self, id: str, workspace: PreparedWorkspace | None = None) -> None:
        record = await self._known(id)
        if record.ids is not None and not self.capabilities.userns:
            raise UnsupportedError("userns", self.name, self.capabilities.notes["userns"])
        async with translated("starting the sandbox"):
            await self._changes.alone(id, self._start_again(record, workspace))

    async def _start_again(self, record: Record, workspace: PreparedWorkspace | None) -> None:
        id, environment, step = record.id, self._places.environment(record.id), _steps("start", record.id)
        if await self.is_running(id):
            return
        try:
            step("halt")
            await self._halt(id)
            if record.ids is not None and not await self._thread(
                self._places.ranges.keep, record.ids, environment.directory
            ):
                raise ConflictError("another sandbox has the host ids of this one; destroy that one first")
            key = await self._thread(environment.key)
            image = await self._thread(self._images.open, record.spec.image, record.spec.image_digest)
            if workspace is not None and record.layers:
                environment.has_right_layers = True
                if workspace.lowers != record.layers:
                    record = dataclasses.replace(record, layers=workspace.lowers)
                    await self._thread(environment.replace, record)
            step("disk")
            await self._build(environment, record, key, image, step, new=False)
        except BaseException as error:
            tail = await self._thread(environment.log_tail)
            try:
                await settled(asyncio.ensure_future(self._halt(id)))
            except (OSError, BackendError):
                _log.exception("environment %s did not start and could not be cleared; start it again", id)
            explained = _with_log(error, tail)
            if explained is error:
                raise
            raise explained from error

    # -- the workspace from outside --------------------------------------------------------

    @contextlib.asynccontextmanager
    async def hold_workspace(self, id: str) -> AsyncGenerator[HeldWorkspace, None]:
        record = await self._record(id)
        if not await self.is_running(id):
            raise ConflictError("the sandbox is stopped; start it, its workspace is kept")
        groups, disk = self._groups(id), self._places.environment(id).disk
        try:
            async with translated("holding the sandbox still"):
                if not await self._thread(groups.freeze):
                    raise ConflictError("the sandbox's processes did not stop within seconds; its disk may be busy")
                mapped = await self._thread(lambda: has_shared_map(groups.frozen()))
            yield HeldWorkspace(str(disk.workspace), mapped, str(disk.changes) if record.layers else None)
        finally:
            await self._thread(groups.thaw)

    # -- looking -----------------------------------------------------------------------

    async def list_ids(self) -> list[str]:
        async with translated("listing the sandboxes"):
            return await self._thread(self._list)

    def _list(self) -> list[str]:
        found = self._places.names()
        found |= {
            name.removeprefix(CONTAINER_PREFIX) for name in self._runtime.names() if name.startswith(CONTAINER_PREFIX)
        }
        for root in self._hierarchies.all():
            with contextlib.suppress(FileNotFoundError), os.scandir(root / self._places.group) as entries:
                found |= {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        return sorted(id for id in found if is_id(id))

    async def is_running(self, id: str) -> bool:
        return is_id(id) and await self._thread(self._runs, id)

    def _runs(self, id: str) -> bool:
        # One that a server forgot before it died is as good as ended: nobody can reach it any more.
        process = self._runtime.process(CONTAINER_PREFIX + id) if self._places.environment(id).is_known() else None
        return process is not None and process.alive()

    async def inspect(self, id: str) -> EnvironmentInfo:
        record = await self._record(id)
        async with translated("inspecting the sandbox"):
            process = await self._thread(self._runtime.process, CONTAINER_PREFIX + id)
            running = process is not None and process.alive()
            groups = self._groups(id)
            details = await self._thread(self._observe, process if running else None, groups)
        details |= {
            "usage": groups.usage() if running else {},
            "image": record.spec.image,
            "image_digest": record.spec.image_digest,
            "runtime": f"{self._runtime.program} {self._version}",
            "endpoint": str(self._places.environment(id).endpoint),
            "labels": bundle.labels(id, self.instance),
        }
        return EnvironmentInfo(id, running, details)

    # -- the daemon's side ---------------------------------------------------------------

    async def endpoint(self, id: str) -> Endpoint:
        record = await self._record(id)
        environment = self._places.environment(id)
        async with translated("reaching the sandbox's daemon"):
            key = await self._thread(environment.key)
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

    async def import_workspace(self, id: str, src: ByteSource, max_bytes: int) -> None:
        record, disk = await self._record(id), self._places.environment(id).disk
        async with translated("restoring the workspace"):
            await self._thread(disk.lend_reserve, (record.ids or 0) + record.spec.uid)
        await super().import_workspace(id, src, max_bytes)
        async with translated("restoring the workspace"):
            await self._thread(disk.lend_reserve, 0)

    async def kill_guest(self, id: str) -> None:
        try:
            await self._thread(self._kill, id)
        except (OSError, BackendError):
            _log.exception("environment %s could not be killed", id)

    def oom_kills(self, id: str) -> int | None:
        return self._groups(id).oom_kills()

    # -- the runtime -----------------------------------------------------------------------

    def _make_places(self) -> Places:
        return Places(self._settings.data_dir, self._settings.id_range_base)

    def _make_runtime(self) -> Runtime:
        return Runc(self._places.runtime)

    def _capabilities(self, limits: frozenset[LimitName], *, no_userns: str, no_layers: str) -> Capabilities:
        """What is offered where control groups keep ``limits``."""
        return capabilities(
            limits,
            has_swap_limit=cgroups.has_swap_limit(self._hierarchies),
            has_socket_limit=cgroups.has_socket_limit(self._hierarchies),
            no_userns=no_userns,
            no_layers=no_layers,
        )

    def _why_no_ids(self) -> str:
        """Why sandboxes get no host ids of their own; empty where they do."""
        return self._places.prepare_ranges()

    def _counted(self, limits: frozenset[LimitName]) -> frozenset[LimitName]:
        """Those of ``limits`` that a sandbox's control groups are to keep."""
        return limits

    def _filter(self) -> Mapping[str, Any] | None:
        """The system calls that a sandbox may make, its daemon too."""
        return seccomp.profile(platform.machine())

    def _host_for(self, source: Path | None) -> Host:
        """What an environment stands on; one that goes on from a checkpoint, on what that needs."""
        if self._host is None:
            raise BackendError(f"the {self.name} backend was not started")
        return self._host

    def _listening(self, environment: Environment, spec: SandboxSpec) -> Listening:
        return DESCRIPTORS

    async def _launch(self, environment: Environment, record: Record, key: bytes, source: Path | None) -> None:
        """Start the container, going on from the checkpoint in ``source``; its daemon need not answer yet."""
        assert isinstance(self._runtime, Runc)
        await launch(self._runtime, environment, record, key)

    def _finish(self, host: Host, environment: Environment, record: Record) -> None:
        """Do what is left to do once the container runs."""
        finish_groups(host, record)
        environment.hide_root()

    def _observe(self, process: Process | None, groups: cgroups.Groups) -> dict[str, Any]:
        return observe(process, groups.limits())

    async def _let_go_on(self) -> None:
        """Let sandboxes go on that a server held when it ended."""
        for id in await self._thread(self._list):
            await self._thread(self._groups(id).thaw)

    # -- parts -----------------------------------------------------------------------------

    async def _read_record(self, id: str) -> Record:
        return await self._thread(self._places.environment(id).record)

    def _groups(self, id: str) -> cgroups.Groups:
        return cgroups.Groups(self._hierarchies, f"/{self._places.group}/{id}")


def _steps(change: str, id: str) -> Callable[[str], None]:
    """A function that logs the step that a change comes to."""
    what, started = f"{change} {id}", time.monotonic()

    def step(name: str) -> None:
        _log.debug("%s: %s at %.1f ms", what, name, (time.monotonic() - started) * 1000)

    return step


def _with_log(error: BaseException, tail: str) -> BaseException:
    """The error with the daemon's last words, where it is one that they may explain."""
    if type(error) is BackendError and tail:
        return BackendError(f"{error.message}; its log ends with: {tail}")
    return error
