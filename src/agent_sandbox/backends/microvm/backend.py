"""Sandboxes as microVMs: one machine each, with a kernel of its own and ``sandboxd`` as its first process.

Strategy
--------
* An environment is a directory (``places.py``), a monitor's process under host ids of its own, and a control group. All
  are named by its id, so a new server finds every one again, and each can be removed alone.
* A machine's devices are its drives and one port for the daemon: the image's content, read-only and shared by all that
  have it; the workspace, as large as ``disk_mb``; the configuration with the key; and the state that the workspace is
  mounted over (``layers.py``). There is no network device. What a guest has written is never mounted on this host:
  everything goes through the daemon.
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
cancelled. The file is long because it holds every change of an environment's state; what changes nothing is in
``machines.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_sandbox.backends.base import ByteSink
from agent_sandbox.backends.linux.disk import met_errors
from agent_sandbox.backends.linux.failures import translated
from agent_sandbox.backends.linux.waiting import settled
from agent_sandbox.backends.microvm import checkpoints
from agent_sandbox.backends.microvm.config_image import MIB
from agent_sandbox.backends.microvm.firecracker import FirecrackerMonitor
from agent_sandbox.backends.microvm.machines import BOOT_SECONDS, ID, Machines
from agent_sandbox.backends.microvm.monitor import Adopt, Machine, MachineSpec, Monitor
from agent_sandbox.backends.microvm.places import Environment, Record
from agent_sandbox.backends.microvm.qemu import QemuMonitor
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    SandboxError,
    UnsupportedError,
)
from agent_sandbox.images import ImageRoot
from agent_sandbox.images.machine import MachineRoot
from agent_sandbox.types import (
    ExportReport,
    PreparedWorkspace,
    SandboxSpec,
)

_log = logging.getLogger(__name__)

_KERNEL_MB = 96
"""Of a machine's memory, beside what its processes may take: the guest's kernel with its tables, and the daemon."""
_SHUTDOWN_SECONDS = 10.0
"""How long a guest may take to write everything out and switch itself off, before the monitor is ended."""
_PAUSE_SECONDS = 0.05
_READY = "sandboxd ready"
"""What a daemon says on its console once it waits for a key, or for a client; see ``crates/sandboxd/src/main.rs``."""
_CONSOLE_CHARACTERS = 1000
"""Of the machine's last words in an error: a panic's reason stands before its trace."""


class MicrovmBackend(Machines):
    """Sandboxes as microVMs of one monitor. See the contract in ``base.py``."""

    name = "qemu"
    projection = "disk"

    def _make_monitor(self) -> Monitor:
        return QemuMonitor(self._settings.qemu)

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
        if not ID.fullmatch(id):
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
        deadline = asyncio.get_running_loop().time() + BOOT_SECONDS
        while _READY not in (said := await self._monitor.console(machine)):
            if not await self._thread(machine.process.alive):
                raise BackendError(f"the machine ended while it booted; its console ends with: {_end_of(said)}")
            if asyncio.get_running_loop().time() > deadline:
                raise BackendError(f"the machine did not boot within {BOOT_SECONDS:g} s: {_end_of(said)}")
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
            await self.guest_ready(record.id, BOOT_SECONDS)
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
        if not ID.fullmatch(id):
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
            if await self._thread(met_errors, environment.workspace):
                _log.warning(
                    "the file system of %s's workspace met errors when it ran, and nothing here can check it: export "
                    "what matters; a rollback to a snapshot gives the sandbox a new one",
                    id,
                )
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

    async def restore(self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace, src: str) -> None:
        self._check(id, spec)
        async with translated("reading the checkpoint"):
            made = await self._thread(checkpoints.read, Path(src))
            _, root = await self._root(spec)
        checkpoints.require(made, self._made(self._places.environment(id), Record(id, spec, 0), root.key))
        await self._make(id, self._create(id, spec, saved=Path(src)))


class FirecrackerBackend(MicrovmBackend):
    """Sandboxes as microVMs of Firecracker."""

    name = "firecracker"

    def _make_monitor(self) -> Monitor:
        return FirecrackerMonitor(self._settings.firecracker, self._settings.jailer)


def _end_of(said: str) -> str:
    """The last of what a console said before a trace."""
    return said.partition("Call Trace:")[0][-_CONSOLE_CHARACTERS:].strip()
