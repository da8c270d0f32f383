"""Putting an environment's runtime half together: disk, root file system, bundle, container.

The same road for a new environment and for one that was stopped; they differ in where the disk comes from.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from agent_sandbox.backends.linux import cgroups
from agent_sandbox.backends.linux.disk import Templates
from agent_sandbox.backends.oci import bundle
from agent_sandbox.backends.oci.environment import Environment, Record
from agent_sandbox.backends.oci.runc import Runc
from agent_sandbox.errors import LimitExceededError, StoreFullError
from agent_sandbox.images import ImageRoot
from agent_sandbox.types import LimitName

CONTAINER_PREFIX = "asb-"
_SOCKETS_SHARE = 4
"""Socket buffers may take as much as a quarter of memory, beside it, where the kernel counts them apart."""


@dataclass(frozen=True, slots=True)
class Host:
    """What all environments of one backend share.

    ``enforces`` are the limits that control groups keep, ``seccomp`` the filter that the runtime lays on a sandbox.
    """

    instance: str
    group: str
    sandboxd: Path
    hierarchies: cgroups.Hierarchies
    enforces: frozenset[LimitName]
    seccomp: Mapping[str, Any] | None
    templates: Templates

    def cgroups_path(self, id: str) -> str:
        """Where the control groups of environment ``id`` are below every hierarchy."""
        return f"/{self.group}/{id}"


@dataclass(frozen=True, slots=True)
class Listening:
    """How a daemon comes to its socket and configuration: its arguments, and the fields of :class:`bundle.Layout`."""

    args: tuple[str, ...]
    private: Path | None = None
    limits: Mapping[str, int] | None = None


DESCRIPTORS = Listening(("--listen-fd", str(bundle.LISTEN_FD), "--config-fd", str(bundle.CONFIG_FD)))
"""Both are handed to it open."""


def furnish(
    host: Host,
    environment: Environment,
    record: Record,
    image: ImageRoot,
    namespace: int | None,
    listening: Listening,
    *,
    new: bool,
    fill: Callable[[int, tuple[int, int]], None] | None = None,
) -> None:
    """Mount the disk, made when ``new``, put the root file system together and write the bundle. Blocks for 20 ms.

    ``namespace`` is a descriptor of the user namespace with the record's ids; None where it has none. It must stay open
    until the container runs. ``fill`` lays out what a new workspace begins with, which takes as long as that is large.
    """
    spec, disk = record.spec, environment.disk
    if new:
        disk.make(host.templates.get(spec.disk_mb), spec.uid, spec.gid, record.ids or 0)
        if fill is not None:
            _fill_workspace(environment, record, fill)
    else:
        disk.open()
    if record.layers:
        environment.make_workspace(record, namespace, new=new)
    rootfs, binds = record.rootfs, image.binds
    writable = not spec.read_only_rootfs
    if writable or namespace is not None:
        environment.make_root(rootfs, binds, namespace, writable=writable)
        rootfs, binds = disk.root, ()
    layout = bundle.Layout(
        rootfs=rootfs,
        workspace=disk.workspace,
        sandboxd=host.sandboxd,
        cgroups_path=host.cgroups_path(environment.id),
        daemon_args=listening.args,
        binds=tuple(bundle.Bind(source, destination) for source, destination in binds),
        enforces=host.enforces,
        has_swap_limit=cgroups.has_swap_limit(host.hierarchies),
        user_namespace=None if namespace is None else f"/proc/{os.getpid()}/fd/{namespace}",
        ids=record.ids or 0,
        private=listening.private,
        limits=listening.limits,
    )
    environment.write_bundle(bundle.config(environment.id, host.instance, spec, layout, host.seccomp))


def _fill_workspace(environment: Environment, record: Record, fill: Callable[[int, tuple[int, int]], None]) -> None:
    base, spec = record.ids or 0, record.spec
    descriptor = os.open(environment.disk.workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fill(descriptor, (base + spec.uid, base + spec.gid))
    except StoreFullError as error:
        raise LimitExceededError(
            f"the state does not fit on a disk of {spec.disk_mb} MiB; ask for a larger disk_mb"
        ) from error
    finally:
        os.close(descriptor)
    environment.disk.write_out()


def process_limits() -> dict[str, int]:
    """The limits of each process of a sandbox on this host, by prlimit(1)'s names."""
    return bundle.process_limits(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def daemon_config(record: Record, key: bytes) -> dict[str, Any]:
    """The daemon's private configuration; see ``crates/sandboxd/src/config.rs``."""
    memory = record.spec.memory_mb * bundle.MIB
    return {"key": key, "uid": record.spec.uid, "gid": record.spec.gid, "memory_bytes": memory}


async def launch(runc: Runc, environment: Environment, record: Record, key: bytes) -> None:
    """Start the container, with the socket that its daemon listens on and the daemon's private configuration."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(environment.listen())
        log = environment.open_log()
        stack.callback(os.close, log)
        config = os.memfd_create("sandboxd-config", os.MFD_CLOEXEC)
        stack.callback(os.close, config)
        os.write(config, msgspec.msgpack.encode(daemon_config(record, key)))
        os.lseek(config, 0, os.SEEK_SET)
        name = CONTAINER_PREFIX + environment.id
        await runc.run(name, environment.directory, log, [listener.fileno(), config], process_limits())


def finish_groups(host: Host, record: Record) -> None:
    """Do what runc leaves undone: bound the memory of sockets, let the sandbox read its groups whatever our umask."""
    groups = cgroups.Groups(host.hierarchies, host.cgroups_path(record.id))
    groups.show()
    groups.limit_sockets(record.spec.memory_mb * bundle.MIB // _SOCKETS_SHARE)
