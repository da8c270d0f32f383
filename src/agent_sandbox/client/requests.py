"""Every call of the API as a value: method, path, body, how to read the reply. No I/O, so that any client can use it.

Paths inside a sandbox are ``str`` with surrogate escapes and go into the query as bytes. ``wait`` is how long the reply
may take in seconds, where the call itself says so; ``None`` leaves it to the client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

from agent_sandbox import models
from agent_sandbox.errors import ValidationError
from agent_sandbox.types import WORKSPACE

T = TypeVar("T")

LONGEST_EXEC_SECONDS = 3600.0
"""What a server allows a command by default: the wait when the call names no deadline of its own."""

SLACK_SECONDS = 30.0
"""What a reply may take beyond the command's deadline: killing its tree, and the way."""

_JSON, _BYTES = "application/json", "application/octet-stream"


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, and how to turn the body of a good reply into a value."""

    method: str
    path: str
    decode: Callable[[bytes], T]
    content: bytes | None = None
    content_type: str = _JSON
    wait: float | None = None


def health() -> Call[dict[str, Any]]:
    """Ask whether the server and its backend answer."""
    return Call("GET", "/healthz", _object)


def backends() -> Call[list[models.Backend]]:
    """List what the server can isolate with."""
    return Call("GET", "/v1/backends", _each("backends", _backend))


def create(
    image: str | None,
    *,
    network: bool,
    read_only_rootfs: bool,
    env: Mapping[str, str] | None,
    **limits: Any,
) -> Call[dict[str, Any]]:
    """Create a sandbox; limits that are ``None`` are left to the server."""
    body = {"network": network, "read_only_rootfs": read_only_rootfs, "env": dict(env or {})}
    return _post("/v1/sandboxes", {**body, **_given(image=image, **limits)}, _object)


def get(sandbox_id: str) -> Call[dict[str, Any]]:
    """Look at a sandbox."""
    return Call("GET", _sandbox(sandbox_id), _object)


def list_sandboxes() -> Call[list[dict[str, Any]]]:
    """List sandboxes."""
    return Call("GET", "/v1/sandboxes", _each("sandboxes", dict))


def destroy(sandbox_id: str) -> Call[None]:
    """Destroy a sandbox."""
    return Call("DELETE", _sandbox(sandbox_id), _nothing)


def set_timeout(sandbox_id: str, timeout_seconds: int) -> Call[dict[str, Any]]:
    """Set the time to live, counted from now."""
    return _post(_sandbox(sandbox_id, "/timeout"), {"timeout_seconds": timeout_seconds}, _object)


def exec(
    sandbox_id: str,
    command: str | Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    timeout_seconds: float | None = None,
) -> Call[models.ExecResult]:
    """Run a command to its end."""
    body = {"command": command if isinstance(command, str) else list(command)}
    body.update(_given(env=dict(env) if env else None, workdir=workdir, timeout_seconds=timeout_seconds))
    wait = (LONGEST_EXEC_SECONDS if timeout_seconds is None else timeout_seconds) + SLACK_SECONDS
    return _post(_sandbox(sandbox_id, "/exec"), body, _shape(models.ExecResult), wait=wait)


def exec_stream(sandbox_id: str, command: str | Sequence[str], **options: Any) -> Call[models.ExecEvent]:
    """Run a command and stream its output; ``decode`` reads one line."""
    whole = exec(sandbox_id, command, **options)
    path = _sandbox(sandbox_id, "/exec/stream")
    return Call("POST", path, _shape(models.ExecEvent), whole.content, wait=whole.wait)


def read_file(sandbox_id: str, path: str) -> Call[bytes]:
    """Read a file."""
    return Call("GET", _sandbox(sandbox_id, "/files", path=path), bytes)


def write_file(sandbox_id: str, path: str, data: bytes | str, mode: int) -> Call[models.FileInfo]:
    """Write a file; text is written as UTF-8."""
    content = data.encode() if isinstance(data, str) else data
    target = _sandbox(sandbox_id, "/files", path=path, mode=f"{mode:03o}")
    return Call("PUT", target, _shape(models.FileInfo), content, _BYTES)


def list_files(sandbox_id: str, path: str = WORKSPACE) -> Call[list[models.FileInfo]]:
    """List a directory."""
    target = _sandbox(sandbox_id, "/files/list", path=path)
    return Call("GET", target, _each("entries", models.FileInfo.from_json))


def snapshot(sandbox_id: str, name: str | None) -> Call[models.Snapshot]:
    """Keep the workspace."""
    return _post(_sandbox(sandbox_id, "/snapshots"), {"name": name}, _shape(models.Snapshot))


def rollback(sandbox_id: str, snapshot: models.Snapshot | str) -> Call[dict[str, Any]]:
    """Go back to a snapshot."""
    return _post(_sandbox(sandbox_id, "/rollback"), {"snapshot_id": _id(snapshot)}, _object)


def list_snapshots(sandbox_id: str | None) -> Call[list[models.Snapshot]]:
    """List snapshots, of one sandbox or of all."""
    path = "/v1/snapshots" + (f"?{urlencode({'sandbox_id': sandbox_id})}" if sandbox_id else "")
    return Call("GET", path, _each("snapshots", models.Snapshot.from_json))


def get_snapshot(snapshot_id: str) -> Call[models.Snapshot]:
    """Look at a snapshot."""
    return Call("GET", _snapshot(snapshot_id), _shape(models.Snapshot))


def delete_snapshot(snapshot: models.Snapshot | str) -> Call[None]:
    """Delete a snapshot."""
    return Call("DELETE", _snapshot(_id(snapshot)), _nothing)


def fork(snapshot: models.Snapshot | str, **options: Any) -> Call[dict[str, Any]]:
    """Create a sandbox from a snapshot; options that are ``None`` are the snapshot's."""
    return _post(_snapshot(_id(snapshot)) + "/fork", _given(**options), _object)


def _post(path: str, body: Mapping[str, Any], decode: Callable[[bytes], T], *, wait: float | None = None) -> Call[T]:
    return Call("POST", path, decode, json.dumps(body, allow_nan=False).encode("ascii"), wait=wait)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _id(snapshot: models.Snapshot | str) -> str:
    return snapshot if isinstance(snapshot, str) else snapshot.id


def _snapshot(snapshot_id: str) -> str:
    return f"/v1/snapshots/{quote(snapshot_id, safe='')}"


def _sandbox(sandbox_id: str, suffix: str = "", **parameters: str) -> str:
    path = f"/v1/sandboxes/{quote(sandbox_id, safe='')}{suffix}"
    if parameters:
        path += "?" + urlencode({name: text.encode("utf-8", "surrogateescape") for name, text in parameters.items()})
    return path


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise ValidationError(f"the server's reply is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValidationError("the server's reply is not a JSON object")
    return value


def _nothing(body: bytes) -> None:
    return None


def _shape(cls: Any) -> Callable[[bytes], Any]:
    return lambda body: cls.from_json(_object(body))


def _each(name: str, build: Callable[[Any], T]) -> Callable[[bytes], list[T]]:
    def decode(body: bytes) -> list[T]:
        items = _object(body).get(name)
        if not isinstance(items, list):
            raise ValidationError(f"the server's reply has no list {name!r}")
        return [build(item) for item in items]

    return decode


def _backend(data: Mapping[str, Any]) -> models.Backend:
    known = models.BackendCapabilities.from_json(data.get("capabilities", {}))
    return models.Backend.from_json({**data, "capabilities": known})
