"""Sandboxes as microVMs: one machine each, with a kernel of its own and ``sandboxd`` as its first process.

Strategy
--------
* An environment is a directory (``places.py``), a monitor's process under host ids of its own, and a control group. All
  are named by its id, so a new server finds every one again, and each can be removed alone.
* A machine's devices are its drives and one port for the daemon: the image's content, read-only and shared by all that
  have it; the workspace, as large as ``disk_mb``; and the configuration with the key. There is no network device. What
  a guest has written is never mounted on this host: everything goes through the daemon.
* Creating is a line of steps; when one fails, or the caller goes, everything of that id is removed by the road that
  ``destroy`` takes, which works from any subset of the parts.
* Destroying ends the monitor and replies; the rest goes in the background, again and again until it is gone.
* A new machine is not booted: it goes on from a template (``templates.py``), a machine of the same kind that was saved
  before it had a key. Where there is none, the new environment's own machine is booted without a key and saved first.
* A checkpoint is the machine with its drive while its commands are frozen, and goes on in any number of others. Each
  reads its own configuration when it goes on: key, name, entropy. What breaks a checkpoint off, it is let go on; and
  by the next server where this one ends, which a mark in the run directory tells it.
* A machine that ended (by itself, or with its host) is a stopped sandbox: its workspace is kept, and starting begins by
  clearing what is left of the last time. The guest's kernel mends its file system's journal itself.
* The guest is told its memory and processes; the machine has some memory more, for its kernel. The share of the CPU is
  the host's control group's, so the emulation counts.
* Whatever runs under an environment's host ids is its monitor: so one is ended also where the server was killed
  between starting it and writing down what it started.

Blocking work runs on threads of the backend's own, and a step that began is waited for also when its caller is
cancelled. The file is long because it holds every change of an environment's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from agent_sandbox.backends.base import ByteSink
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
from agent_sandbox.backends.microvm import checkpoints
from agent_sandbox.backends.microvm.config_image import MIB
from agent_sandbox.backends.microvm.firecracker import FirecrackerMonitor
from agent_sandbox.backends.microvm.inspecting import details
from agent_sandbox.backends.microvm.layers import Layers
from agent_sandbox.backends.microvm.monitor import Adopt, Machine, MachineSpec, Monitor
from agent_sandbox.backends.microvm.places import Environment, Places, Record
from agent_sandbox.backends.microvm.qemu import QemuMonitor
from agent_sandbox.backends.microvm.requirements import capabilities, require_accelerated, require_mkfs
from agent_sandbox.backends.microvm.roots import Roots
from agent_sandbox.backends.microvm.templates import Templates
from agent_sandbox.config import Settings
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    SandboxError,
    UnsupportedError,
)
from agent_sandbox.guest import HELLO_SECONDS, Carrier
from agent_sandbox.images import ImageRoot, ImageStore
from agent_sandbox.images.machine import Kernel, MachineImages, MachineRoot
from agent_sandbox.types import (
    Capabilities,
    EnvironmentInfo,
    ExportReport,
    ImagePull,
    PreparedWorkspace,
    ResolvedImage,
    SandboxSpec,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_THREADS = 16
_KERNEL_MB = 96
"""Of a machine's memory, beside what its processes may take: the guest's kernel with its tables, and the daemon."""
_BOOT_SECONDS = 120.0
"""An emulated machine with a whole core of its own boots in 4 s; one with a tenth of a busy host's in a minute."""
_SHUTDOWN_SECONDS = 10.0
"""How long a guest may take to write everything out and switch itself off, before the monitor is ended."""
_PAUSE_SECONDS = 0.05
_READY = "sandboxd ready"
"""What a daemon says on its console once it waits for a key, or for a client; see ``crates/sandboxd/src/main.rs``."""
_CLOSE_SECONDS = 10.0
_CONSOLE_CHARACTERS = 1000
"""Of the machine's last words in an error: a panic's reason stands before its trace."""


class MicrovmBackend(GuestBackend):
    """Sandboxes as microVMs of one monitor. See the contract in ``base.py``."""

    name = "qemu"
    projection = "disk"

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

    def _make_monitor(self) -> Monitor:
        return QemuMonitor(self._settings.qemu)

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

    # -- create --------------------------------------------------------------------------

    async def create(self, id: str, spec: SandboxSpec) -> None:
        self._check(id, spec)
        await self._make(id, self._create(id, spec))

    async def create_from(self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace) -> None:
        self._check(id, spec)
        await self._make(id, self._create(id, spec, workspace))

    async def _make(self, id: str, creation: Coroutine[Any, Any, None]) -> None:
        if id in self._removals or self._places.environment(id).directory.exists():
            creation.close()
            raise ConflictError(f"environment {id} exists already")
        try:
            await self._changes.alone(id, creation)
        except asyncio.CancelledError:
            if id not in self._removals and self._places.environment(id).directory.exists():
                await settled(asyncio.ensure_future(self._undo(id)))
            raise

    def _check(self, id: str, spec: SandboxSpec) -> None:
        if not _ID.fullmatch(id):
            raise InvalidRequestError(f"{id!r} is not an environment id")
        if spec.network not in self.capabilities.network:
            raise UnsupportedError("network", self.name, self.capabilities.notes["network"])
        if not spec.read_only_rootfs:
            raise UnsupportedError("writable_rootfs", self.name, "its root is a read-only drive that all share")
        if "cpus" not in self.capabilities.enforces and not self._settings.allow_unenforced:
            remedy = "this kernel lacks the control group; AGENT_SANDBOX_ALLOW_UNENFORCED=true accepts that"
            raise UnsupportedError("limit cpus", self.name, remedy)

    async def _create(
        self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace | None = None, saved: Path | None = None
    ) -> None:
        environment = self._places.environment(id)
        try:
            async with translated("creating the sandbox"):
                image, root = await self._root(spec)
                record = await self._thread(self._record_new, environment, spec, image, root)
                await self._give_layers(environment, spec, workspace, saved)
                if saved is None:
                    await self._build(environment, record)
                else:
                    await self._go_on(environment, record, saved)
        except BaseException:
            await settled(asyncio.ensure_future(self._undo(id)))
            raise

    async def _give_layers(
        self, environment: Environment, spec: SandboxSpec, workspace: PreparedWorkspace | None, saved: Path | None
    ) -> None:
        """Give the environment its drive of layers, made where nobody has begun with that state before."""
        place, key = environment.layers, ""
        if saved is not None:
            key = (await self._thread(checkpoints.read, saved)).layers
            if key:
                await self._thread(self._layers.link_known, key, place)
        elif workspace is not None:
            fill, unwanted = workspace.fill, threading.Event()
            if fill is None:
                raise UnsupportedError("layered_workspace", self.name, "its layers are a drive of their own")
            owner = (spec.uid, spec.gid)
            making = asyncio.get_running_loop().run_in_executor(
                self._pool, self._layers.link, workspace.state, owner, fill, unwanted.is_set, place
            )
            key = await settled(making, unwanted.set)
        if key:
            await self._thread(environment.write_layers_key, key)
        else:
            await self._thread(self._layers.link_blank, place)

    async def _root(self, spec: SandboxSpec) -> tuple[ImageRoot, MachineRoot]:
        image = await self._thread(self._images.open, spec.image, spec.image_digest)
        return image, await self._roots.get(spec.image, image, spec.image_digest)

    def _record_new(self, environment: Environment, spec: SandboxSpec, image: ImageRoot, root: MachineRoot) -> Record:
        environment.reserve()
        user = self._places.ranges.claim(environment.directory)
        record = Record(environment.id, spec, user, image.env)
        environment.make(record)
        environment.link_root(root.path, root.key)
        return record

    async def _build(self, environment: Environment, record: Record) -> None:
        """Let a machine go on from the template of its kind, which is made first where there is none."""
        kernel = self._booted()
        root = await self._thread(environment.root_key)
        template = checkpoints.template_of(self._made(environment, record, root), kernel.name)

        async def make(dest: Path) -> None:
            await self._make_template(environment, record, dest)

        async with self._templates.use(template, make) as saved:
            await self._go_on(environment, record, saved)

    async def _make_template(self, environment: Environment, record: Record, dest: Path) -> None:
        """Boot a machine that has no key, in the environment's own places, and save it once it waits for one."""
        await self._thread(lambda: environment.make_workspace(self._blanks.get(record.spec.disk_mb)))
        spec = await self._thread(self._furnish, environment, record, False)
        # What a template has read of its drives is in all that go on from it.
        spec = replace(spec, layers=self._layers.blank)
        machine = await self._monitor.start(spec, self._adopting(environment))
        try:
            await self._idle(machine)
            await self._monitor.pause(machine)
            await self._monitor.save(machine, spec.memory_mb, dest)
            await self._thread(checkpoints.keep_disk, spec.workspace, dest)
        finally:
            await settled(asyncio.ensure_future(self._halt(record.id)))

    async def _idle(self, machine: Machine) -> None:
        """Return once the daemon of a machine without a key says that it waits."""
        deadline = asyncio.get_running_loop().time() + _BOOT_SECONDS
        while _READY not in (said := await self._monitor.console(machine)):
            if not await self._thread(machine.process.alive):
                raise BackendError(f"the machine ended while it booted; its console ends with: {_end_of(said)}")
            if asyncio.get_running_loop().time() > deadline:
                raise BackendError(f"the machine did not boot within {_BOOT_SECONDS:g} s: {_end_of(said)}")
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _go_on(self, environment: Environment, record: Record, saved: Path) -> None:
        """Let the environment's machine go on from a saved one, with a copy of its drive."""
        await self._thread(environment.make_workspace, saved / checkpoints.DISK)
        spec = await self._thread(self._furnish, environment, record, True)
        machine = await self._monitor.start_from(spec, saved, self._adopting(environment))
        await self._meet(record, machine)

    async def _boot(self, environment: Environment, record: Record) -> None:
        """Boot the environment's machine with the drive that it has."""
        if not await self._thread(environment.has_root):
            _, root = await self._root(record.spec)
            await self._thread(environment.link_root, root.path, root.key)
        spec = await self._thread(self._furnish, environment, record, True)
        await self._meet(record, await self._monitor.start(spec, self._adopting(environment)))

    def _adopting(self, environment: Environment) -> Adopt:
        def adopt(pid: int) -> None:
            self._groups(environment.id).add(pid)
            environment.write_process(pid)

        return adopt

    async def _meet(self, record: Record, machine: Machine) -> None:
        self._records[record.id] = record
        try:
            await self.guest_ready(record.id, _BOOT_SECONDS)
        except BackendError as error:
            words = await self._last_words(machine)
            if not words:
                raise
            raise BackendError(f"{error.message}; the machine's console ends with: {words}") from error

    def _furnish(self, environment: Environment, record: Record, keyed: bool) -> MachineSpec:
        """Make what a monitor needs beside the workspace's drive."""
        environment.write_config(record, keyed=keyed)
        environment.make_run()
        machine = self._machine_spec(environment, record)
        # Twice: a page that a saved machine's memory did not hold is counted as its and as the machine's own.
        limit_mb = 2 * machine.memory_mb + self._monitor.overhead_mb
        self._groups(record.id).make(record.spec.cpus, limit_mb * MIB)
        return machine

    def _machine_spec(self, environment: Environment, record: Record) -> MachineSpec:
        kernel, spec = self._booted(), record.spec
        return MachineSpec(
            kernel=kernel.image,
            initrd=kernel.initramfs,
            root=environment.root,
            workspace=environment.workspace,
            config=environment.config,
            layers=environment.layers,
            memory_mb=spec.memory_mb + _KERNEL_MB,
            vcpus=max(1, math.ceil(spec.cpus)),
            directory=environment.run,
            jail=environment.jail,
            uid=record.user,
            gid=record.user,
        )

    def _made(self, environment: Environment, record: Record, root: str) -> checkpoints.Made:
        machine = self._machine_spec(environment, record)
        return checkpoints.made_of(record.spec, machine, self._monitor.facts, self._booted().version, root)

    def _booted(self) -> Kernel:
        if self._kernel is None:
            raise BackendError(f"the {self.name} backend was not started")
        return self._kernel

    async def _last_words(self, machine: Machine) -> str:
        try:
            said = await self._monitor.console(machine)
        except (OSError, SandboxError):
            return ""
        return _end_of(said)

    async def _undo(self, id: str) -> None:
        try:
            await self._clear(id)
        except (OSError, SandboxError):
            _log.exception("environment %s could not be removed after it failed", id)
            self._removals.begin(id)

    # -- destroy -------------------------------------------------------------------------

    async def destroy(self, id: str) -> None:
        if not _ID.fullmatch(id):
            return
        await self._changes.end(id)
        async with translated("destroying the sandbox"):
            await settled(asyncio.ensure_future(self._end(id)))
        if id in await self.list_ids():
            self._removals.begin(id)

    async def _end(self, id: str) -> None:
        """End the monitor of the environment, which cannot be found from now on; return when it has gone."""
        user = await self._thread(self._user, id)
        try:
            await self._thread(self._places.environment(id).forget)
        except OSError as error:
            # A damaged directory, or a disk that has become read-only, must not keep a machine alive.
            _log.warning("environment %s: its record stays until it is removed: %s", id, error)
        self._records.pop(id, None)
        await self._end_monitor(id, user)

    async def _end_monitor(self, id: str, user: int | None) -> None:
        await self.drop_guest(id)
        await self._thread(self._kill, id, user)

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

    async def _clear(self, id: str) -> None:
        """End what still runs and remove everything. The directory goes last: by that it is listed."""
        await self._end(id)
        environment = self._places.environment(id)
        await self._thread(self._groups(id).remove)
        await self._thread(self._places.ranges.release, environment.directory)
        await self._thread(environment.remove)

    # -- stop and start ----------------------------------------------------------------

    async def stop_environment(self, id: str) -> None:
        await self._known(id)
        async with translated("stopping the sandbox"):
            await self._changes.alone(id, self._stop(id))

    async def _stop(self, id: str) -> None:
        machine = await self._thread(self._machine, id)
        if machine is not None:
            with contextlib.suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(_SHUTDOWN_SECONDS):
                    await (await self._guest(id)).shutdown()
                    await self._ended(machine)
        await self._halt(id)
        await self._thread(self._places.environment(id).flush)

    async def _ended(self, machine: Machine) -> None:
        """Return when the guest has switched itself off, or has had time enough for it."""
        for _ in range(int(_SHUTDOWN_SECONDS / _PAUSE_SECONDS)):
            if not await self._thread(machine.process.alive):
                return
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _halt(self, id: str) -> None:
        """End the monitor and free all that a reboot would; the drives, the record and the key stay."""
        await self._end_monitor(id, await self._thread(self._user, id))
        await self._thread(self._groups(id).remove)
        await self._thread(self._places.environment(id).clear)

    async def start_environment(self, id: str, workspace: PreparedWorkspace | None = None) -> None:
        record = await self._known(id)
        async with translated("starting the sandbox"):
            await self._changes.alone(id, self._start_again(record))

    async def _start_again(self, record: Record) -> None:
        id, environment = record.id, self._places.environment(record.id)
        if await self.is_running(id):
            return
        try:
            await self._halt(id)
            if not await self._thread(environment.layers.exists):
                await self._thread(self._layers.link_blank, environment.layers)
            if not await self._thread(self._places.ranges.keep, record.user, environment.directory):
                raise ConflictError("another sandbox has the host ids of this one; destroy that one first")
            await self._boot(environment, record)
        except BaseException:
            try:
                await settled(asyncio.ensure_future(self._halt(id)))
            except (OSError, SandboxError):
                _log.exception("environment %s did not start and could not be cleared; start it again", id)
            raise

    # -- memory ------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def checkpoint(self, id: str, dest: str) -> AsyncGenerator[None, None]:
        record, environment, place = await self._known(id), self._places.environment(id), Path(dest)
        layers = await self._thread(environment.layers_key)
        try:
            async with self._holding(id) as machine:
                yield None
                async with translated("keeping the processes' memory"):
                    await self._monitor.pause(machine)
                    await self._monitor.save(machine, self._machine_spec(environment, record).memory_mb, place)
                    await self._thread(checkpoints.keep_disk, environment.workspace, place)
            async with translated("keeping the processes' memory"):
                if layers:
                    await self._thread(self._layers.keep, layers, place / checkpoints.LAYERS)
                made = self._made(environment, record, await self._thread(environment.root_key))
                await self._thread(checkpoints.seal, place, replace(made, layers=layers))
        except BaseException:
            await self._thread(checkpoints.discard, place)
            raise

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

    @contextlib.asynccontextmanager
    async def hold_changes(self, id: str) -> AsyncGenerator[str | None, None]:
        await self._known(id)
        state = (await self._thread(self._places.environment(id).layers_key)).partition("-")[0] or None
        if id in self._held:  # by a checkpoint, whose part this is
            yield state
            return
        async with self._holding(id):
            yield state

    async def export_changes(self, id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        return await (await self._guest(id)).export_changes(dest, max_bytes)

    async def layers_in_use(self) -> set[str]:
        return set()  # nobody else makes or removes them

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

    async def restore(self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace, src: str) -> None:
        self._check(id, spec)
        async with translated("reading the checkpoint"):
            made = await self._thread(checkpoints.read, Path(src))
            _, root = await self._root(spec)
        checkpoints.require(made, self._made(self._places.environment(id), Record(id, spec, 0), root.key))
        await self._make(id, self._create(id, spec, saved=Path(src)))

    # -- looking -----------------------------------------------------------------------

    async def list_ids(self) -> list[str]:
        async with translated("listing the sandboxes"):
            return await self._thread(self._list)

    def _list(self) -> list[str]:
        found = self._places.names()
        for root in self._hierarchies.all():
            with contextlib.suppress(FileNotFoundError), os.scandir(root / self._places.group) as entries:
                found |= {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        return sorted(id for id in found if _ID.fullmatch(id))

    async def is_running(self, id: str) -> bool:
        return bool(_ID.fullmatch(id)) and await self._thread(self._machine, id) is not None

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
            seconds = _BOOT_SECONDS if id in self._changes else HELLO_SECONDS
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

    # -- parts -----------------------------------------------------------------------------

    async def _known(self, id: str) -> Record:
        record = await self._record(id)
        if id in self._removals:
            raise NotFoundError(f"there is no environment {id}")
        return record

    async def _record(self, id: str) -> Record:
        if not _ID.fullmatch(id):
            raise NotFoundError(f"there is no environment {id}")
        if id not in self._records:
            self._records[id] = await self._thread(self._places.environment(id).record)
        return self._records[id]

    def _groups(self, id: str) -> cgroups.Groups:
        return cgroups.Groups(self._hierarchies, f"/{self._places.group}/{id}")

    async def _thread(self, work: Callable[..., T], *args: object) -> T:
        """Run blocking work on a thread and see it through, also when the caller is cancelled."""
        return await settled(asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args)))


class FirecrackerBackend(MicrovmBackend):
    """Sandboxes as microVMs of Firecracker."""

    name = "firecracker"

    def _make_monitor(self) -> Monitor:
        return FirecrackerMonitor(self._settings.firecracker, self._settings.jailer)


def _end_of(said: str) -> str:
    """The last of what a console said before a trace."""
    return said.partition("Call Trace:")[0][-_CONSOLE_CHARACTERS:].strip()
