"""Every call that is about sandboxes and snapshots, built as a value. No I/O, so that any client can use them.

Plain commands are here too; kept ones are in ``exec_requests.py``, files in ``file_requests.py``, what looks back
in ``history_requests.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from agent_sandbox import models
from agent_sandbox.client.call import (
    Call,
    as_list,
    as_nothing,
    as_object,
    as_shape,
    flag,
    given,
    new_key,
    post,
    sandbox_path,
    snapshot_path,
)
from agent_sandbox.errors import InvalidRequestError

LONGEST_EXEC_SECONDS = 3600.0
"""What a server allows a command by default: the wait when the call names no deadline of its own."""

SLACK_SECONDS = 30.0
"""What a reply may take beyond the command's deadline: killing its tree, and the way."""


def health() -> Call[dict[str, Any]]:
    """Ask whether the server and its backend answer."""
    return Call("GET", "/healthz", as_object)


def backends() -> Call[list[models.Backend]]:
    """List what the server can isolate with."""
    return Call("GET", "/v1/backends", as_list("backends", _backend))


def create(
    image: str | None,
    *,
    network: bool,
    read_only_rootfs: bool,
    env: Mapping[str, str] | None,
    metadata: Mapping[str, str] | None = None,
    source: models.Snapshot | str | None = None,
    idempotency_key: str | None = None,
    **limits: Any,
) -> Call[dict[str, Any]]:
    """Create a sandbox; limits that are ``None`` are left to the server."""
    body = {"network": network, "read_only_rootfs": read_only_rootfs, "env": dict(env or {})}
    begin = source.id if isinstance(source, models.Snapshot) else source
    body.update(given(image=image, metadata=dict(metadata) if metadata else None, **limits, **{"from": begin}))
    return post("/v1/sandboxes", body, as_object, idempotency_key=idempotency_key or new_key())


def get(sandbox_id: str) -> Call[dict[str, Any]]:
    """Look at a sandbox."""
    return Call("GET", sandbox_path(sandbox_id), as_object)


def list_sandboxes(metadata: Mapping[str, str] | None = None) -> Call[list[dict[str, Any]]]:
    """List sandboxes, of all or of those that have every one of these labels."""
    query = urlencode([("metadata", f"{name}={value}") for name, value in (metadata or {}).items()])
    return Call("GET", "/v1/sandboxes" + (f"?{query}" if query else ""), as_list("sandboxes", dict))


def destroy(sandbox_id: str) -> Call[None]:
    """Destroy a sandbox."""
    return Call("DELETE", sandbox_path(sandbox_id), as_nothing)


def set_timeout(sandbox_id: str, timeout_seconds: int) -> Call[dict[str, Any]]:
    """Set the time to live, counted from now."""
    return post(sandbox_path(sandbox_id, "/timeout"), {"timeout_seconds": timeout_seconds}, as_object)


def start(sandbox_id: str) -> Call[dict[str, Any]]:
    """Start a stopped sandbox again."""
    return Call("POST", sandbox_path(sandbox_id, "/start"), as_object)


def stop(sandbox_id: str) -> Call[dict[str, Any]]:
    """End a sandbox's processes and keep its workspace."""
    return Call("POST", sandbox_path(sandbox_id, "/stop"), as_object)


def stats(sandbox_id: str) -> Call[models.SandboxStats]:
    """Ask what a sandbox uses now."""
    return Call("GET", sandbox_path(sandbox_id, "/stats"), as_shape(models.SandboxStats))


def exec(
    sandbox_id: str,
    command: str | Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    timeout_seconds: float | None = None,
) -> Call[models.ExecResult]:
    """Run a command to its end."""
    body = command_body(command, env, workdir, timeout_seconds)
    return post(
        sandbox_path(sandbox_id, "/exec"), body, as_shape(models.ExecResult), wait=longest_wait(timeout_seconds)
    )


def exec_stream(sandbox_id: str, command: str | Sequence[str], **options: Any) -> Call[models.ExecEvent]:
    """Run a command and stream its output; ``decode`` reads one line."""
    whole = exec(sandbox_id, command, **options)
    path = sandbox_path(sandbox_id, "/exec/stream")
    return Call("POST", path, as_shape(models.ExecEvent), whole.content, wait=whole.wait)


def command_body(
    command: str | Sequence[str], env: Mapping[str, str] | None, workdir: str | None, timeout_seconds: float | None
) -> dict[str, Any]:
    """The fields that every kind of command has."""
    body: dict[str, Any] = {"command": command if isinstance(command, str) else list(command)}
    return body | given(env=dict(env) if env else None, workdir=workdir, timeout_seconds=timeout_seconds)


def longest_wait(timeout_seconds: float | None) -> float:
    """How long a command with this deadline may be silent."""
    return (LONGEST_EXEC_SECONDS if timeout_seconds is None else timeout_seconds) + SLACK_SECONDS


def snapshot(
    sandbox_id: str, name: str | None, *, memory: bool = False, idempotency_key: str | None = None
) -> Call[models.Snapshot]:
    """Keep the workspace; with ``memory`` what runs in it as well."""
    path, key = sandbox_path(sandbox_id, "/snapshots"), idempotency_key or new_key()
    body = {"name": name} | ({"memory": True} if memory else {})
    return post(path, body, as_shape(models.Snapshot), idempotency_key=key)


def rollback(sandbox_id: str, snapshot: models.Snapshot | str, *, memory: bool | None = None) -> Call[dict[str, Any]]:
    """Go back to a snapshot."""
    if not _id(snapshot):
        raise InvalidRequestError("a snapshot's id must not be empty")
    body = {"snapshot_id": _id(snapshot), **given(memory=memory)}
    return post(sandbox_path(sandbox_id, "/rollback"), body, as_object)


def list_snapshots(sandbox_id: str | None, auto: bool) -> Call[list[models.Snapshot]]:
    """List snapshots, of one sandbox or of all."""
    wanted = {"sandbox_id": sandbox_id} if sandbox_id else {}
    if auto:
        wanted["auto"] = flag(auto)
    path = "/v1/snapshots" + (f"?{urlencode(wanted)}" if wanted else "")
    return Call("GET", path, as_list("snapshots", models.Snapshot.from_json))


def get_snapshot(snapshot_id: str) -> Call[models.Snapshot]:
    """Look at a snapshot."""
    return Call("GET", snapshot_path(snapshot_id), as_shape(models.Snapshot))


def delete_snapshot(snapshot: models.Snapshot | str) -> Call[None]:
    """Delete a snapshot."""
    return Call("DELETE", snapshot_path(_id(snapshot)), as_nothing)


def fork(
    snapshot: models.Snapshot | str,
    *,
    metadata: Mapping[str, str] | None = None,
    idempotency_key: str | None = None,
    **options: Any,
) -> Call[dict[str, Any]]:
    """Create a sandbox from a snapshot; options that are ``None`` are the snapshot's."""
    body = given(metadata=dict(metadata) if metadata else None, **options)
    key = idempotency_key or new_key()
    return post(snapshot_path(_id(snapshot), "/fork"), body, as_object, idempotency_key=key)


def _id(snapshot: models.Snapshot | str) -> str:
    return snapshot if isinstance(snapshot, str) else snapshot.id


def _backend(data: Mapping[str, Any]) -> models.Backend:
    known = models.BackendCapabilities.from_json(data.get("capabilities", {}))
    pulls = [models.ImagePull.from_json(pull) for pull in data.get("pulls", ())]
    return models.Backend.from_json({**data, "capabilities": known, "pulls": pulls})
