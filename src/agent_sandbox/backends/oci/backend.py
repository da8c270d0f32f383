"""The embedded backend: sandboxes on runc, on one Linux host, without an engine.

Strategy
--------
* An environment is a directory (``environment.py``), a disk (``disk.py``), a container of runc's, and a control group.
  All of them are named by its id, so a new server process finds every one again, and each can be removed alone.
* Creating is a line of steps; when one fails, or the caller goes, everything of that id is removed by the road that
  ``destroy`` takes, which works from any subset of the parts: there is no undo list to keep right.
* Destroying kills first, through the control group, and replies when no process is left. Unmounting and deleting follow
  in the background; ``list_ids`` shows the id until nothing is left, and what failed is tried again (``removals.py``).
* Blocking work runs on threads of the backend's own, and a step that began is waited for also when its caller is
  cancelled: otherwise it would go on behind the removal's back.
* Asking whether an environment runs starts no process: runc's state file names the first one.

The step names in the debug log are what the tests interrupt at.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import platform
import re
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from agent_sandbox.backends.guest_backend import Endpoint, GuestBackend
from agent_sandbox.backends.oci import bundle, cgroups, seccomp
from agent_sandbox.backends.oci.disk import Templates
from agent_sandbox.backends.oci.ending import end_processes
from agent_sandbox.backends.oci.environment import Environment, Record
from agent_sandbox.backends.oci.failures import translated
from agent_sandbox.backends.oci.inspection import observe
from agent_sandbox.backends.oci.removals import Removals
from agent_sandbox.backends.oci.requirements import capabilities, find_sandboxd, require_disks, require_root
from agent_sandbox.backends.oci.runc import INSTALL, Runc
from agent_sandbox.backends.oci.waiting import ended, settled
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, ConflictError, InvalidRequestError, NotFoundError, UnsupportedError
from agent_sandbox.images import ImageRoot, ImageStore
from agent_sandbox.types import EnvironmentInfo, LimitName, ResolvedImage, SandboxSpec

T = TypeVar("T")

_log = logging.getLogger(__name__)

RUN_DIRECTORY = Path("/run/agent-sandbox")
_PREFIX = "asb-"
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_THREADS = 16
"""More than creations that make progress at once on common machines; waiting ones queue."""
_SOCKETS_SHARE = 4
"""Socket buffers may take as much as a quarter of memory, beside it, where the kernel counts them apart."""
_CONNECT_TRIES = 40
_CONNECT_PAUSE_SECONDS = 0.05
_CLOSE_SECONDS = 10.0
"""How long closing waits for removals under way; what is left is found again by the next server."""


class OciBackend(GuestBackend):
    """Sandboxes as runc containers with ``sandboxd`` as their first process. See the contract in ``base.py``."""

    name = "runc"

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        real = os.path.realpath(settings.data_dir)  # the mount table has no symbolic links
        self._home = Path(real) / "runc"
        self._environments = self._home / "env"
        self.instance = hashlib.sha256(os.fsencode(real)).hexdigest()[:12]
        self._run_directory = RUN_DIRECTORY / self.instance
        self._runc = Runc(self._run_directory / "runc")
        self._templates = Templates(self._home / "templates")
        self._images = ImageStore(Path(real), *settings.sandbox_ids())
        self._hierarchies = cgroups.Hierarchies(None)
        self._seccomp = {"defaultAction": "SCMP_ACT_ERRNO"}
        self._sandboxd = Path()
        self._version = ""
        self.capabilities = capabilities(frozenset(), has_swap_limit=False, has_socket_limit=False)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="oci")
        self._records: dict[str, Record] = {}
        self._creating: dict[str, asyncio.Task[None]] = {}
        self._removals = Removals(self._clear)

    # -- the backend as a whole ------------------------------------------------------

    async def start(self) -> None:
        require_root()
        self._version = await self._runc.find()
        await self._runc.quiesce()
        async with translated("starting the runc backend"):
            self._seccomp = seccomp.profile(platform.machine())
            self._sandboxd = find_sandboxd(self._settings.sandboxd)
            await self._thread(self._prepare)

    def _prepare(self) -> None:
        require_disks()
        self._hierarchies = cgroups.find_hierarchies()
        if not self._hierarchies.all():
            raise BackendError(
                "no control groups below /sys/fs/cgroup; mount them (cgroup2) or use a host that has them"
            )
        self._settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._settings.data_dir.chmod(0o700)
        for directory in (self._home, self._environments):
            directory.mkdir(mode=0o700, exist_ok=True)
        RUN_DIRECTORY.mkdir(mode=0o755, exist_ok=True)
        for directory in (self._run_directory, self._runc.root):
            directory.mkdir(mode=0o700, exist_ok=True)
        limits = cgroups.enforced(self._hierarchies)
        self.capabilities = capabilities(
            limits,
            has_swap_limit=cgroups.has_swap_limit(self._hierarchies),
            has_socket_limit=cgroups.has_socket_limit(self._hierarchies),
        )
        self._templates.clear()
        self._images.prepare(in_use=self._root_directories())

    def _root_directories(self) -> set[Path]:
        """The image directories that existing environments may run from: all of them, when a record is damaged."""
        found = set()
        for directory in self._environments.iterdir():
            try:
                found.add(Environment(self._environments, directory.name).record().rootfs)
            except NotFoundError:
                continue
            except BackendError as error:
                _log.warning("%s", error.message)
                return set(self._home.parent.glob("images/host/*/rootfs"))
        return found

    async def close(self) -> None:
        await super().close()
        await self._removals.close(_CLOSE_SECONDS)
        self._pool.shutdown(wait=False, cancel_futures=True)
        roots = [root / f"agent-sandbox-{self.instance}" for root in self._hierarchies.all()]
        for directory in (*roots, self._runc.root, self._run_directory):
            with contextlib.suppress(OSError):
                directory.rmdir()

    async def ping(self) -> None:
        if not self._runc.installed():
            raise BackendError(f"runc is no longer installed; {INSTALL}")
        if not os.access(self._environments, os.W_OK):
            raise BackendError(f"the data directory {self._settings.data_dir} cannot be written")

    async def resolve_image(self, name: str) -> ResolvedImage:
        async with translated("resolving the image"):
            return await self._thread(self._images.resolve, name)

    # -- create --------------------------------------------------------------------------

    async def create(self, id: str, spec: SandboxSpec) -> None:
        self._check(id, spec)
        if id in self._creating or id in self._removals or self._environment(id).directory.exists():
            raise ConflictError(f"environment {id} exists already")
        task = self._creating[id] = asyncio.create_task(self._create(id, spec))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and (current is None or not current.cancelling()):
                raise ConflictError(f"environment {id} was destroyed while it was created") from None
            task.cancel()
            await ended(task)
            if not task.cancelled() and task.exception() is None:
                await settled(asyncio.ensure_future(self._undo(id)))
            raise
        finally:
            self._creating.pop(id, None)

    def _check(self, id: str, spec: SandboxSpec) -> None:
        if not _ID.fullmatch(id):
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

    async def _create(self, id: str, spec: SandboxSpec) -> None:
        environment = self._environment(id)
        started = time.monotonic()

        def step(name: str) -> None:
            _log.debug("create %s: %s at %.1f ms", id, name, (time.monotonic() - started) * 1000)

        try:
            async with translated("creating the sandbox"):
                await self._build(environment, spec, step)
        except BaseException as error:
            tail = await self._thread(environment.log_tail)
            await settled(asyncio.ensure_future(self._undo(id)))
            if type(error) is BackendError and tail:
                raise BackendError(f"{error.message}; its log ends with: {tail}") from error
            raise

    async def _build(self, environment: Environment, spec: SandboxSpec, step: Callable[[str], None]) -> None:
        step("image")
        image = await self._thread(self._images.open, spec.image, spec.image_digest)
        step("record")
        record = Record(environment.id, spec, image.rootfs)
        key = await self._thread(environment.make, record)
        step("disk")
        await self._thread(self._make_disk, environment, spec, image)
        step("start")
        await self._start(environment, key, spec)
        step("hello")
        self._records[environment.id] = record
        await self.guest_ready(environment.id)
        step("ready")

    def _make_disk(self, environment: Environment, spec: SandboxSpec, image: ImageRoot) -> None:
        environment.disk.make(self._templates.get(spec.disk_mb), spec.uid, spec.gid)
        rootfs = image.rootfs
        if not spec.read_only_rootfs:
            environment.make_root(rootfs)
            rootfs = environment.root
        layout = bundle.Layout(
            rootfs=rootfs,
            workspace=environment.disk.workspace,
            sandboxd=self._sandboxd,
            cgroups_path=self._cgroups_path(environment.id),
            daemon_args=("--listen-fd", str(bundle.LISTEN_FD), "--config-fd", str(bundle.CONFIG_FD)),
            binds=tuple(bundle.Bind(source, destination) for source, destination in image.binds),
            enforces=self.capabilities.enforces,
            has_swap_limit=cgroups.has_swap_limit(self._hierarchies),
            nofile_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        )
        environment.write_bundle(bundle.config(environment.id, self.instance, spec, layout, self._seccomp))

    async def _start(self, environment: Environment, key: bytes, spec: SandboxSpec) -> None:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(environment.listen())
            log = environment.open_log()
            stack.callback(os.close, log)
            daemon_config = os.memfd_create("sandboxd-config", os.MFD_CLOEXEC)
            stack.callback(os.close, daemon_config)
            values = {"key": key, "uid": spec.uid, "gid": spec.gid, "memory_bytes": spec.memory_mb * bundle.MIB}
            os.write(daemon_config, msgspec.msgpack.encode(values))
            os.lseek(daemon_config, 0, os.SEEK_SET)
            name = _PREFIX + environment.id
            await self._runc.run(name, environment.directory, log, [listener.fileno(), daemon_config])
        await self._thread(self._groups(environment.id).limit_sockets, spec.memory_mb * bundle.MIB // _SOCKETS_SHARE)

    async def _undo(self, id: str) -> None:
        try:
            await self._clear(id)
        except (OSError, BackendError):
            _log.exception("environment %s could not be removed after it failed", id)
            self._removals.begin(id)

    # -- destroy -------------------------------------------------------------------------

    async def destroy(self, id: str) -> None:
        if not _ID.fullmatch(id):
            return
        creating = self._creating.get(id)
        if creating is not None:
            creating.cancel()
            await ended(creating)
        async with translated("destroying the sandbox"):
            await settled(asyncio.ensure_future(self._end(id)))
        if id in await self.list_ids():
            self._removals.begin(id)

    async def _end(self, id: str) -> None:
        """End every process of the environment; return when none is left."""
        try:
            await self._thread(self._environment(id).forget)
        except OSError as error:
            # A damaged directory, or a disk that has become read-only, must not keep processes alive.
            _log.warning("environment %s: its record stays until it is removed: %s", id, error)
        self._records.pop(id, None)
        await self.drop_guest(id)
        await self._thread(self._kill, id)

    def _kill(self, id: str) -> None:
        end_processes(self._runc.process(_PREFIX + id), self._groups(id))

    async def _clear(self, id: str) -> None:
        """End what still runs and remove everything."""
        await self._end(id)
        await self._remove(id)

    async def _remove(self, id: str) -> None:
        """Remove what is left of an environment without processes; the first failure is raised after all was tried."""
        environment = self._environment(id)
        failed: Exception | None = None
        try:
            await self._runc.delete(_PREFIX + id)
        except BackendError as error:
            failed = error
        for remove in (environment.unmount, self._groups(id).remove, environment.remove):
            try:
                await self._thread(remove)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    # -- looking -----------------------------------------------------------------------

    async def list_ids(self) -> list[str]:
        async with translated("listing the sandboxes"):
            return await self._thread(self._list)

    def _list(self) -> list[str]:
        found = {name.removeprefix(_PREFIX) for name in self._runc.names() if name.startswith(_PREFIX)}
        groups = [root / f"agent-sandbox-{self.instance}" for root in self._hierarchies.all()]
        for directory in (self._environments, *groups):
            with contextlib.suppress(FileNotFoundError):
                found |= {entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)}
        return sorted(id for id in found if _ID.fullmatch(id))

    async def is_running(self, id: str) -> bool:
        return bool(_ID.fullmatch(id)) and await self._thread(self._runs, id)

    def _runs(self, id: str) -> bool:
        # One that a server forgot before it died is as good as ended: nobody can reach it any more.
        process = self._runc.process(_PREFIX + id) if self._environment(id).is_known() else None
        return process is not None and process.alive()

    async def inspect(self, id: str) -> EnvironmentInfo:
        record = await self._record(id)
        async with translated("inspecting the sandbox"):
            process = await self._thread(self._runc.process, _PREFIX + id)
            running = process is not None and process.alive()
            details = await self._thread(observe, process if running else None, self._groups(id).limits())
        details |= {
            "image": record.spec.image,
            "image_digest": record.spec.image_digest,
            "runtime": f"runc {self._version}",
            "endpoint": str(self._environment(id).directory / "sock"),
            "labels": bundle.labels(id, self.instance),
        }
        return EnvironmentInfo(id, running, details)

    # -- the daemon's side ---------------------------------------------------------------

    async def endpoint(self, id: str) -> Endpoint:
        record = await self._record(id)
        environment = self._environment(id)
        async with translated("reaching the sandbox's daemon"):
            key = await self._thread(environment.key)
            for _ in range(_CONNECT_TRIES):
                try:
                    connection = environment.connect()
                except BlockingIOError:
                    await asyncio.sleep(_CONNECT_PAUSE_SECONDS)
                except OSError as error:
                    if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                        raise BackendError("the sandbox is not running; destroy it and create another") from None
                    raise
                else:
                    return Endpoint(connection, key, record.spec, {})
        raise BackendError("the sandbox's daemon takes no connection; it may be overloaded")

    async def kill_guest(self, id: str) -> None:
        try:
            await self._thread(self._kill, id)
        except (OSError, BackendError):
            _log.exception("environment %s could not be killed", id)

    def oom_kills(self, id: str) -> int | None:
        return self._groups(id).oom_kills()

    # -- parts -----------------------------------------------------------------------------

    async def _record(self, id: str) -> Record:
        if not _ID.fullmatch(id):
            raise NotFoundError(f"there is no environment {id}")
        if id not in self._records:
            record = await self._thread(self._environment(id).record)
            self._records[id] = record
        return self._records[id]

    def _environment(self, id: str) -> Environment:
        return Environment(self._environments, id)

    def _cgroups_path(self, id: str) -> str:
        return f"/agent-sandbox-{self.instance}/{id}"

    def _groups(self, id: str) -> cgroups.Groups:
        return cgroups.Groups(self._hierarchies, self._cgroups_path(id))

    async def _thread(self, work: Callable[..., T], *args: object) -> T:
        """Run blocking work on a thread and see it through, also when the caller is cancelled."""
        return await settled(asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args)))
