"""The machines of one backend as they are: what it is made of, which of them there are, and how one is reached.

What changes an environment is in ``backend.py``, whose rules hold here too. Beside looking there is one thing that is
done to a machine here: it is held still, and goes on. A hold leaves a mark in the run directory, so that the next
server lets go on what this one held when it ended.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from agent_sandbox.backends.guest_backend import Endpoint, GuestBackend
from agent_sandbox.backends.linux import cgroups
from agent_sandbox.backends.linux.changes import Changes
from agent_sandbox.backends.linux.disk import Templates as BlankDisks
from agent_sandbox.backends.linux.ending import end_processes
from agent_sandbox.backends.linux.failures import translated
from agent_sandbox.backends.linux.process import processes_of
from agent_sandbox.backends.linux.removals import Removals
from agent_sandbox.backends.linux.requirements import find_sandboxd, require_root
from agent_sandbox.backends.linux.waiting import settled
from agent_sandbox.backends.microvm.inspecting import details
from agent_sandbox.backends.microvm.layers import Layers
from agent_sandbox.backends.microvm.monitor import Machine, Monitor
from agent_sandbox.backends.microvm.places import Places, Record
from agent_sandbox.backends.microvm.requirements import capabilities, require_accelerated, require_mkfs
from agent_sandbox.backends.microvm.roots import Roots
from agent_sandbox.backends.microvm.templates import Templates
from agent_sandbox.config import Settings
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    NotFoundError,
    SandboxError,
)
from agent_sandbox.guest import HELLO_SECONDS, Carrier
from agent_sandbox.images import ImageStore
from agent_sandbox.images.machine import Kernel, MachineImages
from agent_sandbox.types import (
    Capabilities,
    EnvironmentInfo,
    ImagePull,
    ResolvedImage,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

ID = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
BOOT_SECONDS = 120.0
"""An emulated machine with a whole core of its own boots in 4 s; one with a tenth of a busy host's in a minute."""
_THREADS = 16
_CLOSE_SECONDS = 10.0


class Machines(GuestBackend):
    """What a backend of microVMs has before it changes anything. See the contract in ``base.py``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._places = Places(settings.data_dir, settings.id_range_base, self.name)
        self.instance = self._places.instance
        self._monitor = self._make_monitor()
        self._blanks = BlankDisks(self._places.templates)
        self._templates = Templates(settings.machine_directory() / "template")
        self._layers = Layers(self._places.layers, self.name, settings.checkout_cache_mb << 20)
        self._images = ImageStore(self._places.data_dir, *settings.sandbox_ids())
        self._machine_images = MachineImages(settings.machine_directory())
        self._roots = Roots(self._machine_images)
        self._kernel: Kernel | None = None
        self._hierarchies = cgroups.Hierarchies(None)
        self.capabilities: Capabilities = capabilities(None, has_cpu_limit=False)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="microvm")
        self._records: dict[str, Record] = {}
        self._changes = Changes()
        self._held: set[str] = set()
        self._removals = Removals(self._clear)

    @abc.abstractmethod
    def _make_monitor(self) -> Monitor:
        """Give the monitor that all machines run on."""

    @abc.abstractmethod
    async def _clear(self, id: str) -> None:
        """End what still runs of an environment and remove everything of it."""

    # -- the backend as a whole ------------------------------------------------------

    async def start(self) -> None:
        require_root(self.name)
        facts = await self._monitor.find()
        require_accelerated(facts, self._settings.allow_tcg)
        async with translated(f"starting the {self.name} backend"):
            await self._thread(self._prepare)
            await self._let_go_on()
        has_cpu_limit = "cpus" in cgroups.enforced(self._hierarchies)
        self.capabilities = capabilities(facts, has_cpu_limit=has_cpu_limit)
        kernel = self._kernel.version if self._kernel else ""
        self.versions = {facts.name: facts.version, "guest kernel": kernel}

    def _prepare(self) -> None:
        require_mkfs()
        self._hierarchies = cgroups.find_hierarchies()
        self._places.prepare()
        self._blanks.clear()
        self._templates.clear()
        self._layers.prepare()
        # Others of this server's backends run from skeletons of the host image: all that there are stay.
        self._images.prepare(in_use=set(self._places.data_dir.glob("images/host/*/rootfs")))
        self._machine_images.prepare()
        kernel = self._machine_images.kernel(find_sandboxd(self._settings.sandboxd))
        image, initramfs = self._places.keep_kernel(kernel.name, kernel.image, kernel.initramfs)
        self._kernel = replace(kernel, vmlinux=image, initramfs=initramfs)

    async def _let_go_on(self) -> None:
        """Let machines go on that a server had paused when it ended: all at once, as each may be stuck for a while."""

        async def one(id: str) -> None:
            machine = await self._thread(self._machine, id)
            if machine is not None and await self._thread(self._places.environment(id).is_held):
                await self._go_on_after(id, machine)

        await asyncio.gather(*(one(id) for id in await self._thread(self._list)))

    async def close(self) -> None:
        await super().close()
        await self._roots.close()
        await self._removals.close(_CLOSE_SECONDS)
        await self._monitor.close()
        self._layers.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for root in self._hierarchies.all():
            with contextlib.suppress(OSError):
                (root / self._places.group).rmdir()
        self._places.close()

    async def ping(self) -> None:
        if not os.access(self._places.environments, os.W_OK):
            raise BackendError(f"the data directory {self._settings.data_dir} cannot be written")
        await self._monitor.find()

    async def resolve_image(self, name: str) -> ResolvedImage:
        async with translated("resolving the image"):
            return await self._thread(self._images.resolve_allowed, name, self._settings.allowed_images)

    def pulls(self) -> list[ImagePull]:
        return self._roots.told()

    # -- held still --------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _holding(self, id: str) -> AsyncGenerator[Machine, None]:
        """Hold what runs inside still. One that a server left so goes on when the next one starts."""
        environment = self._places.environment(id)
        machine = await self._thread(self._machine, id)
        if machine is None:
            raise ConflictError("the sandbox is stopped; start it, its workspace is kept")
        if id in self._held:
            raise ConflictError("the sandbox is held still for another snapshot")
        self._held.add(id)
        try:
            try:
                async with translated("holding the sandbox still"):
                    await self._thread(environment.hold)
                    await (await self._guest(id)).freeze()
                yield machine
            finally:
                await settled(asyncio.ensure_future(self._go_on_after(id, machine)))
        finally:
            self._held.discard(id)

    async def _go_on_after(self, id: str, machine: Machine) -> None:
        """Let a machine go on that was held to be saved, and what is frozen in it."""
        try:
            await self._resume(machine)
            if self._monitor.carrier is Carrier.VSOCK:
                # Saving the machine has ended its connections, which this side may not have noticed yet.
                await self.drop_guest(id)
            await (await self._guest(id)).thaw(time.time_ns())
            await self._thread(self._places.environment(id).release)
        except (OSError, SandboxError) as error:
            _log.error("environment %s was held and goes on only when it is called next: %s", id, error)
            # A freeze or a pause that was given up may still arrive: see endpoint().
            await self.drop_guest(id)

    async def _resume(self, machine: Machine) -> None:
        if not await self._monitor.running(machine):
            await self._monitor.resume(machine)

    # -- looking -----------------------------------------------------------------------

    async def list_ids(self) -> list[str]:
        async with translated("listing the sandboxes"):
            return await self._thread(self._list)

    def _list(self) -> list[str]:
        found = self._places.names()
        for root in self._hierarchies.all():
            with contextlib.suppress(FileNotFoundError), os.scandir(root / self._places.group) as entries:
                found |= {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        return sorted(id for id in found if ID.fullmatch(id))

    async def is_running(self, id: str) -> bool:
        return bool(ID.fullmatch(id)) and await self._thread(self._machine, id) is not None

    def _machine(self, id: str) -> Machine | None:
        """The machine of an environment that is known and runs."""
        environment = self._places.environment(id)
        process = environment.process() if environment.is_known() else None
        return Machine(environment.run, process) if process is not None and process.alive() else None

    async def inspect(self, id: str) -> EnvironmentInfo:
        record = await self._record(id)
        async with translated("inspecting the sandbox"):
            machine, facts = await self._thread(self._machine, id), self._monitor.facts
            process = None if machine is None else machine.process
            shown = await self._thread(details, record.spec, process, self._groups(id), facts)
        shown |= {
            "guest_kernel": self._booted().version,
            "endpoint": str(self._places.environment(id).run / self._monitor.guest_socket),
            "labels": {
                "io.agent-sandbox.managed": "true",
                "io.agent-sandbox.id": id,
                "io.agent-sandbox.instance": self.instance,
            },
        }
        return EnvironmentInfo(id, machine is not None, shown)

    # -- the daemon's side ---------------------------------------------------------------

    async def endpoint(self, id: str) -> Endpoint:
        record = await self._record(id)
        environment = self._places.environment(id)
        async with translated("reaching the sandbox's daemon"):
            key = await self._thread(environment.key)
            machine = await self._thread(self._machine, id)
            if machine is None:
                if await self._thread(environment.process) is None:
                    raise ConflictError("the sandbox is stopped; start it, its workspace is kept")
                raise BackendError("the sandbox's machine has ended; start it again, its workspace is kept")
            if id not in self._held and await self._thread(environment.is_held):
                # A checkpoint could not let it go on. What is frozen inside, the daemon thaws for whoever connects.
                await self._resume(machine)
            seconds = BOOT_SECONDS if id in self._changes else HELLO_SECONDS
            connection = await self._monitor.connect(machine, seconds)
            carrier = self._monitor.carrier
            return Endpoint(connection, key, record.spec, record.image_env, carrier=carrier, seconds=seconds)

    async def kill_guest(self, id: str) -> None:
        try:
            await self._thread(self._kill, id, None)
        except (OSError, BackendError):
            _log.exception("environment %s could not be killed", id)

    def oom_kills(self, id: str) -> int | None:
        return None

    def _kill(self, id: str, user: int | None) -> None:
        groups, environment = self._groups(id), self._places.environment(id)
        process = environment.process()
        end_processes(process, groups)
        if process is None and user is not None:
            for stray in processes_of(user):
                end_processes(stray, groups)

    def _user(self, id: str) -> int | None:
        """The host id of an environment's monitor, where it is known."""
        return self._places.ranges.find(self._places.environment(id).directory)

    # -- parts -----------------------------------------------------------------------------

    def _booted(self) -> Kernel:
        if self._kernel is None:
            raise BackendError(f"the {self.name} backend was not started")
        return self._kernel

    async def _known(self, id: str) -> Record:
        record = await self._record(id)
        if id in self._removals:
            raise NotFoundError(f"there is no environment {id}")
        return record

    async def _record(self, id: str) -> Record:
        if not ID.fullmatch(id):
            raise NotFoundError(f"there is no environment {id}")
        if id not in self._records:
            self._records[id] = await self._thread(self._places.environment(id).record)
        return self._records[id]

    def _groups(self, id: str) -> cgroups.Groups:
        return cgroups.Groups(self._hierarchies, f"/{self._places.group}/{id}")

    async def _thread(self, work: Callable[..., T], *args: object) -> T:
        """Run blocking work on a thread and see it through, also when the caller is cancelled."""
        return await settled(asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args)))
