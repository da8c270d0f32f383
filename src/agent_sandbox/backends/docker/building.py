"""Putting an environment together, up to a container that can be started: workspace, volumes, daemon, container.

The same road for a new environment and for one that was stopped; they differ in where the disk comes from, and in
whether the container is there already.
"""

from __future__ import annotations

import io
import os
import platform
import tarfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from agent_sandbox.backends.docker import container
from agent_sandbox.backends.docker.container import DAEMON, DELIVERED, PREFIX, PRIVATE, Layout, Mount
from agent_sandbox.backends.docker.containers import Containers
from agent_sandbox.backends.docker.engine import Engine
from agent_sandbox.backends.docker.facts import UNSTARTED, Facts
from agent_sandbox.backends.docker.hostimage import NAME as HOST
from agent_sandbox.backends.docker.hostimage import HostOnEngine
from agent_sandbox.backends.docker.networks import Network
from agent_sandbox.backends.docker.places import Environment, Record
from agent_sandbox.backends.linux import seccomp
from agent_sandbox.backends.linux.disk import Templates
from agent_sandbox.backends.linux.overlay import OVERLAY_OPTIONS, take_after
from agent_sandbox.errors import BackendError
from agent_sandbox.types import WORKSPACE, SandboxSpec

Run = Callable[..., Coroutine[Any, Any, Any]]
"""Runs blocking work, with its arguments, on a thread."""


class Builder:
    """Builds environments of the server ``instance``; ``thread`` runs what blocks."""

    def __init__(
        self,
        engine: Engine,
        containers: Containers,
        network: Network,
        host: HostOnEngine,
        instance: str,
        thread: Run,
    ) -> None:
        self._engine, self._containers, self._network, self._host = engine, containers, network, host
        self._instance = instance
        self._thread = thread
        self._facts = UNSTARTED
        self._sandboxd = Path()
        self._templates: Templates | None = None
        self._seccomp: dict[str, Any] = {}
        self._masked: tuple[str, ...] = ()

    def prepare(self, facts: Facts, sandboxd: Path, templates: Templates) -> None:
        """Learn what the engine is, which daemon to use, and where blank disks come from. Blocks."""
        self._facts, self._sandboxd, self._templates = facts, sandboxd, templates
        self._seccomp = seccomp.profile(platform.machine())
        if facts.shares_files:  # each file system's own entries there name the host's disks
            self._masked = tuple(str(path) for path in Path("/sys/fs").iterdir() if path.name != "cgroup")

    async def build(
        self, environment: Environment, record: Record, key: bytes, nonce: str, *, other_layers: bool = False
    ) -> Record:
        """Return the record with its container, which is there and does not run.

        A new environment's workspace holds ``nonce``; that of one that was stopped is opened, where that is empty. Its
        layers may be ``other_layers`` than it began with, which show the same.
        """
        new = bool(nonce)
        config = daemon_config(record.spec, key, limits_processes=self._facts.is_gvisor)
        if record.shares_files:
            if new:
                await self._thread(environment.make_disk, self._templates, record)
                await self._thread(_put_nonce, _changes(environment, record), nonce, record.spec)
            else:
                await self._thread(environment.disk.open)
            if other_layers:
                await self._thread(environment.fit_changes, await self._thread(environment.short_layers, record))
            await self._thread(environment.prepare_guest, config)
        mounts = await self._mounts(environment, record, new=new)
        if record.container:
            if record.spec.network == "full":
                await self._network.ensure()
            return record
        if not record.shares_files:
            await self._deliver(record, config, new=new)
        network = await self._network.ensure() if record.spec.network == "full" else "none"
        cid = await self._containers.create(record.id, self._body(record, mounts, network))
        if record.volumes and (unasked := container.unasked_volumes(await self._containers.inspect(cid))):
            raise BackendError(
                f"the Docker engine gives the image volumes of its own at {', '.join(unasked)[:500]}, which have no "
                "limit; build the image without them"
            )
        record = replace(record, container=cid)
        await self._thread(environment.write, record)
        return record

    async def _mounts(self, environment: Environment, record: Record, *, new: bool) -> tuple[Mount, ...]:
        """The container's mounts; their volumes are made where they are not there."""
        id = record.id
        terminals: tuple[Mount, ...] = ()
        if not self._facts.is_gvisor:  # whose terminals are its own, and no engine's mount
            await self._containers.make_volume(container.pty_volume(id, self._instance))
            terminals = (Mount("volume", container.pty_volume_name(id), "/dev/pts"),)
        if not record.shares_files:
            for name in (PREFIX + id, f"{PREFIX}{id}-daemon"):
                await self._containers.make_volume(container.named_volume(name, id, self._instance))
            return (
                container.workspace_mount("volume", PREFIX + id),
                Mount("volume", f"{PREFIX}{id}-daemon", DELIVERED, read_only=True),
                *terminals,
            )
        daemon = Mount("bind", str(self._sandboxd), DAEMON, read_only=True)
        at = PRIVATE if self._facts.binds_sockets else DELIVERED
        guest = Mount("bind", str(environment.guest), at, read_only=not self._facts.binds_sockets)
        shown = self._host.mounts() if record.spec.image == HOST else ()
        common = (*shown, daemon, guest, *terminals)
        if not record.layers:
            return container.workspace_mount("bind", str(environment.disk.workspace)), *common
        lowers = await self._thread(environment.short_layers, record)
        disk = environment.disk
        body = container.layered_volume(
            id, self._instance, lowers, str(disk.changes), str(disk.changes_work), OVERLAY_OPTIONS
        )
        if new or PREFIX + id not in {str(one.get("Name")) for one in await self._containers.volumes(id)}:
            await self._containers.make_volume(body)
        return container.workspace_mount("volume", PREFIX + id), *common

    def _body(self, record: Record, mounts: tuple[Mount, ...], network: str) -> dict[str, Any]:
        sock, daemon, config = f"{PRIVATE}/sock", DAEMON, f"{PRIVATE}/config"
        tmpfs = {}
        if not self._facts.binds_sockets:
            config = f"{DELIVERED}/config"
            tmpfs = {PRIVATE: "rw,noexec,nosuid,nodev,mode=0700,size=64k"}
        if not record.shares_files:
            daemon = f"{DELIVERED}/sandboxd"
        layout = Layout(
            image_id=record.image_id,
            instance=self._instance,
            daemon_args=(daemon, "--listen", sock, "--config", config),
            mounts=mounts,
            volumes=record.volumes,
            network=network,
            runtime=self._facts.asked,
            tmpfs=tmpfs,
            pids_on_host=not self._facts.is_gvisor,
            masked=self._masked,
            image_labels=record.image_labels,
        )
        return container.container(record.id, record.spec, layout, self._seccomp)

    async def _deliver(self, record: Record, config: bytes, *, new: bool) -> None:
        """Bring the daemon and its configuration into their volume, and give the workspace's to the sandbox user.

        The engine unpacks archives in a container that is not started: no program runs for it, whatever the image has.
        """
        id = record.id
        mounts = (
            Mount("volume", f"{PREFIX}{id}-daemon", DELIVERED),
            container.workspace_mount("volume", PREFIX + id),
        )
        body = container.messenger(id, record.image_id, self._instance, mounts, record.image_labels)
        cid = await self._containers.create(f"{id}{container.SETUP}", body)
        daemon = await self._thread(self._sandboxd.read_bytes)
        packed = await self._thread(archive, [("sandboxd", 0o755, daemon), ("config", 0o600, config)])
        await self._engine.put_archive(cid, DELIVERED, packed)
        if new:
            await self._engine.put_archive(cid, "/", workspace_archive(record.spec))
        await self._engine.delete(f"/containers/{cid}", force="true", v="true")


def daemon_config(spec: SandboxSpec, key: bytes, *, limits_processes: bool) -> bytes:
    """Pack the daemon's private configuration; ``limits_processes`` has it keep that limit, where the host cannot."""
    values = {"key": key, "uid": spec.uid, "gid": spec.gid, "memory_bytes": spec.memory_mb * container.MIB}
    return msgspec.msgpack.encode(values | ({"pids_limit": spec.pids_limit} if limits_processes else {}))


def _changes(environment: Environment, record: Record) -> Path:
    """The directory that holds what the sandbox itself puts in its workspace."""
    return environment.disk.changes if record.layers else environment.disk.workspace


def nonce_name(nonce: str) -> str:
    """Name the file that a new workspace is known by."""
    return f".asb-{nonce}"


def _put_nonce(directory: Path, nonce: str, spec: SandboxSpec) -> None:
    path = directory / nonce_name(nonce)
    path.write_text(nonce)
    os.chown(path, spec.uid, spec.gid)


def begin(workspace: Path, nonce: str, record: Record) -> None:
    """Take away what the workspace was known by, and have its root be as the topmost layer's.

    :class:`BackendError` when this host does not see the workspace.
    """
    try:
        (workspace / nonce_name(nonce)).unlink()
    except FileNotFoundError:
        raise BackendError(
            "the sandbox's workspace is not to be seen from here: the server does not see what the Docker engine mounts"
        ) from None
    if record.layers:
        take_after(Path(record.layers[0]), workspace, 0)


def archive(files: list[tuple[str, int, bytes]]) -> bytes:
    """Pack files of root's in a tar: name, mode and content of each."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, mode, content in files:
            info = tarfile.TarInfo(name)
            info.mode, info.size = mode, len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def workspace_archive(spec: SandboxSpec) -> bytes:
    """Make a tar that gives the workspace's root to the sandbox user and puts nothing into it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo(WORKSPACE.lstrip("/"))
        info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, 0o755, spec.uid, spec.gid
        tar.addfile(info)
    return packed.getvalue()
