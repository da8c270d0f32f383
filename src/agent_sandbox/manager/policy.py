"""What may be created: the server's settings and a backend's capabilities against a request. Pure.

:func:`choose_backend`, then :func:`build_spec` (or :func:`fork_spec`), then the backend resolves the image and
:func:`pin` puts its digest in. Each refuses before anything has happened:

=========================================================  ==========================
a value out of its range                                   InvalidRequestError, with field and range
an image or a network that the operator does not allow     ForbiddenError
an isolation, network or limit that the backend lacks      UnsupportedError
=========================================================  ==========================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from agent_sandbox.config import Settings
from agent_sandbox.errors import ConflictError, ForbiddenError, InvalidRequestError, UnsupportedError
from agent_sandbox.images.allowed import is_allowed
from agent_sandbox.manager.requests import (
    CommandOptions,
    command_argv,
    directory_in_workspace,
    encode_text,
    exec_timeout,
    exit_status,
    file_mode,
    in_range,
    kept_command,
    labels,
    normalize_path,
    require_in_workspace,
    signal_number,
    snapshot_name,
    terminal_size,
    validate_env,
)
from agent_sandbox.types import Capabilities, IsolationClass, LimitName, ResolvedImage, SandboxSpec

__all__ = [
    "CommandOptions",
    "CreateOptions",
    "ForkOptions",
    "build_spec",
    "choose_backend",
    "command_argv",
    "directory_in_workspace",
    "exec_timeout",
    "exit_status",
    "file_mode",
    "fork_spec",
    "kept_command",
    "labels",
    "normalize_path",
    "pin",
    "require_in_workspace",
    "satisfies",
    "signal_number",
    "snapshot_name",
    "terminal_size",
    "time_to_live",
    "validate_env",
]

_T = TypeVar("_T")

_RANK: dict[IsolationClass, int] = {"process": 0, "container": 1, "gvisor": 2, "vm": 3}

# The least that a sandbox can live with: the daemon and one command. Processes and threads: the daemon has seven, two
# supervisors wait, and what is left is a shell and what it starts.
_MIN_CPUS = 0.01
_MIN_MEMORY_MB = 16
_MIN_PIDS = 16
_MIN_DISK_MB = 16


@dataclass(frozen=True, kw_only=True)
class CreateOptions:
    """What a caller asks of a new sandbox; ``None`` means the server's default. Cores, MiB, seconds.

    ``source`` and ``project`` say what its workspace begins as (see ``projects.py``); it is empty without.
    """

    image: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    pids_limit: int | None = None
    disk_mb: int | None = None
    network: bool = False
    read_only_rootfs: bool = True
    timeout_seconds: int | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    backend: str | None = None
    min_isolation: IsolationClass | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    project: str | None = None
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class ForkOptions:
    """What a fork has otherwise than the snapshot's spec; ``None`` means the same. Time to live and labels are new.

    ``memory`` says whether the snapshot's processes go on in it; ``None``: where it has them.
    """

    timeout_seconds: int | None = None
    network: bool | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    backend: str | None = None
    memory: bool | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


def satisfies(capabilities: Capabilities, asked: IsolationClass, *, allow_tcg: bool = False) -> bool:
    """Tell whether a backend isolates at least as well as ``asked``.

    A machine under software emulation (``vm`` without ``accelerated``) is no security boundary and counts as
    ``process``, unless the operator set ``allow_tcg``.
    """
    is_boundary = capabilities.isolation != "vm" or capabilities.accelerated or allow_tcg
    return (_RANK[capabilities.isolation] if is_boundary else _RANK["process"]) >= _RANK[asked]


def choose_backend(
    options: CreateOptions,
    backends: Mapping[str, Capabilities],
    *,
    down: Collection[str] = (),
    allow_tcg: bool = False,
) -> str:
    """Give the name of the backend to use: the one asked for, or the first that isolates well enough.

    ``backends`` is in the operator's order. Of several that isolate as well as ``min_isolation`` asks, one that is up
    goes before those that are ``down``; without it the default is meant, up or down: another may be weaker.
    :class:`InvalidRequestError` for an unknown name or class; :class:`UnsupportedError` when none (or not the one asked
    for) isolates well enough.
    """
    asked = options.min_isolation
    if asked is not None and asked not in _RANK:
        raise InvalidRequestError(f"min_isolation is one of {', '.join(_RANK)}", details={"field": "min_isolation"})
    if options.backend is not None and options.backend not in backends:
        raise unknown_backend(backends)
    candidates = [options.backend] if options.backend is not None else list(backends)
    if asked is None:
        return candidates[0]
    fit = [name for name in candidates if satisfies(backends[name], asked, allow_tcg=allow_tcg)]
    if fit:
        return next((name for name in fit if name not in down), fit[0])
    reason = "its isolation is weaker" if options.backend is not None else "no configured backend isolates as well"
    raise UnsupportedError(f"min_isolation {asked}", candidates[0], reason)


def unknown_backend(backends: Collection[str]) -> InvalidRequestError:
    """Say which backends there are."""
    return InvalidRequestError(f"backend is one of {', '.join(backends)}", details={"field": "backend"})


def build_spec(options: CreateOptions, settings: Settings, backend: str, capabilities: Capabilities) -> SandboxSpec:
    """Give the spec of a new sandbox, its image not pinned yet."""
    image = options.image if options.image is not None else settings.default_image
    asked: dict[LimitName, bool] = {
        "cpus": options.cpus is not None,
        "memory": options.memory_mb is not None,
        "pids": options.pids_limit is not None,
        "disk": options.disk_mb is not None,
    }
    uid, gid = settings.sandbox_ids()
    spec = SandboxSpec(
        image=image,
        image_digest="",
        cpus=_or(options.cpus, settings.default_cpus),
        memory_mb=_or(options.memory_mb, settings.default_memory_mb),
        pids_limit=_or(options.pids_limit, settings.default_pids_limit),
        disk_mb=_or(options.disk_mb, settings.default_disk_mb),
        tmp_mb=0,
        network="full" if options.network else "none",
        read_only_rootfs=options.read_only_rootfs,
        uid=uid,
        gid=gid,
        env=validate_env(options.env),
    )
    return _checked(spec, asked, settings, backend, capabilities)


def fork_spec(
    spec: SandboxSpec, options: ForkOptions, settings: Settings, backend: str, capabilities: Capabilities
) -> SandboxSpec:
    """Give the spec of a fork. What the snapshot has is checked against today's settings as well."""
    changed = dataclasses.replace(
        spec,
        cpus=_or(options.cpus, spec.cpus),
        memory_mb=_or(options.memory_mb, spec.memory_mb),
        network=spec.network if options.network is None else ("full" if options.network else "none"),
    )
    asked: dict[LimitName, bool] = {"cpus": options.cpus is not None, "memory": options.memory_mb is not None}
    return _checked(changed, asked, settings, backend, capabilities)


def pin(spec: SandboxSpec, image: ResolvedImage) -> SandboxSpec:
    """Give the spec with the exact content of its image.

    :class:`ConflictError` when the spec is pinned to other content than the backend found.
    """
    if spec.image_digest and spec.image_digest != image.digest:
        raise ConflictError(
            f"image {spec.image!r} is {image.digest or 'not pinned'}, but {spec.image_digest} is needed;"
            " import that one again"
        )
    return dataclasses.replace(spec, image_digest=image.digest)


def time_to_live(seconds: int | None, settings: Settings) -> int:
    """Give the time to live in whole seconds: the default when none is asked for."""
    if seconds is None:
        return settings.default_timeout_seconds
    return _whole("timeout_seconds", seconds, 1, settings.max_timeout_seconds)


def _checked(
    spec: SandboxSpec, asked: Mapping[LimitName, bool], settings: Settings, backend: str, capabilities: Capabilities
) -> SandboxSpec:
    cpus = float(in_range("cpus", spec.cpus, _MIN_CPUS, settings.max_cpus))
    _whole("memory_mb", spec.memory_mb, _MIN_MEMORY_MB, settings.max_memory_mb)
    _whole("pids_limit", spec.pids_limit, _MIN_PIDS, settings.max_pids_limit)
    _whole("disk_mb", spec.disk_mb, _MIN_DISK_MB, settings.max_disk_mb)
    if not encode_text(spec.image, "image"):
        raise InvalidRequestError("image is empty", details={"field": "image"})
    if not is_allowed(spec.image, settings.allowed_images):
        raise ForbiddenError(f"image {spec.image!r} is not allowed here; AGENT_SANDBOX_ALLOWED_IMAGES says which are")
    if spec.network != "none":
        if not settings.allow_network:
            raise ForbiddenError(
                "network is not allowed here; the operator sets AGENT_SANDBOX_ALLOW_NETWORK=true to allow it"
            )
        if spec.network not in capabilities.network:
            raise UnsupportedError("network", backend, capabilities.notes.get("network", ""))
    for limit, is_asked in asked.items():
        if is_asked and limit not in capabilities.enforces and not settings.allow_unenforced:
            reason = capabilities.notes.get(limit, "it cannot be enforced here; leave it out to accept that")
            raise UnsupportedError(f"a limit of {limit}", backend, reason)
    # /tmp counts against memory, so a larger one could only be filled by killing the sandbox.
    return dataclasses.replace(spec, cpus=cpus, tmp_mb=max(1, min(settings.tmp_size_mb, spec.memory_mb // 2)))


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _whole(field: str, value: int, low: int, high: int) -> int:
    if not isinstance(value, int):
        raise InvalidRequestError(f"{field} is a whole number from {low} to {high}", details={"field": field})
    return int(in_range(field, value, low, high))
