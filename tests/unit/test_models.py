"""The public shapes: strictness, tolerance, and times."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import TypeAdapter
from pydantic import ValidationError as Refused

from agent_sandbox import models
from agent_sandbox.errors import InvalidRequestError, ValidationError


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "1970-01-01T00:00:00.000000Z"),
        (1_767_225_599_999_999, "2025-12-31T23:59:59.999999Z"),  # date -u -d @1767225599
        (-1, "1969-12-31T23:59:59.999999Z"),
        (2**63, "9999-12-31T23:59:59.999999Z"),
        (-(2**63), "0001-01-01T00:00:00.000000Z"),
    ],
)
def test_times_are_rfc3339_in_utc_and_never_fail(microseconds: int, text: str) -> None:
    assert models.rfc3339(microseconds) == text


# The first contract's replies, field by field (api.md): public clients unpack the first four as they come.
EXACT = {
    models.ExecResult: ["stdout", "stderr", "exit_code", "timed_out", "truncated", "duration_ms"],
    models.ExecEvent: ["type", "data", "exit_code", "timed_out", "duration_ms"],
    models.FileInfo: ["name", "path", "type", "size", "modified_at"],
    models.FileList: ["path", "entries"],
    models.SandboxList: ["sandboxes"],
    models.SnapshotList: ["snapshots"],
}
AT_LEAST = {
    models.Health: ["status", "backend", "version"],
    models.Sandbox: [
        *("id", "status", "image", "cpus", "memory_mb", "pids_limit", "network", "read_only_rootfs"),
        *("created_at", "expires_at", "source_snapshot_id"),
    ],
    models.Snapshot: ["id", "sandbox_id", "name", "image", "size_bytes", "created_at"],
}


def test_replies_have_the_fields_of_the_contract() -> None:
    for shape, fields in EXACT.items():
        assert [field.name for field in dataclasses.fields(shape)] == fields
    for shape, fields in AT_LEAST.items():
        assert [field.name for field in dataclasses.fields(shape)][: len(fields)] == fields


def test_a_client_survives_a_newer_and_an_older_server() -> None:
    old = {
        "id": "sb1",
        "status": "running",
        "image": "host",
        "cpus": 1.0,
        "memory_mb": 512,
        "pids_limit": 256,
        "network": False,
        "read_only_rootfs": True,
        "created_at": "2026-01-01T00:00:00Z",
        "expires_at": "2026-01-01T00:15:00Z",
        "source_snapshot_id": None,
    }
    assert models.Sandbox.from_json(old).backend == ""
    assert models.Sandbox.from_json({**old, "labels": {"a": "b"}}) == models.Sandbox.from_json(old)
    with pytest.raises(ValidationError, match="expires_at"):
        models.Sandbox.from_json({name: value for name, value in old.items() if name != "expires_at"})


def accepts(shape: Any, value: Any) -> Any:
    return TypeAdapter(shape).validate_python(value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpus", True),
        ("cpus", "1"),
        ("cpus", 0),
        ("cpus", -1.5),
        ("cpus", float("nan")),
        ("cpus", float("inf")),
        ("cpus", 10**400),
        ("memory_mb", True),
        ("memory_mb", 512.0),
        ("memory_mb", "512"),
        ("memory_mb", 15),
        ("pids_limit", 7),
        ("disk_mb", 15),
        ("timeout_seconds", 0),
        ("timeout_seconds", -1),
        ("timeout_seconds", 1.5),
        ("network", 1),
        ("network", None),
        ("read_only_rootfs", "true"),
        ("env", {"A": 1}),
        ("env", [["A", "b"]]),
        ("env", None),
        ("image", 7),
        ("backend", []),
        ("min_isolation", "jail"),
        ("snapshot", "x"),
    ],
)
def test_create_refuses_what_is_not_of_its_type_or_range(field: str, value: Any) -> None:
    with pytest.raises(Refused) as refused:
        accepts(models.SandboxCreate, {field: value})
    assert [problem["loc"][0] for problem in refused.value.errors()] == [field] * refused.value.error_count()


def test_an_int_passes_where_a_float_belongs() -> None:
    assert accepts(models.SandboxCreate, {"cpus": 2}).cpus == 2.0
    assert accepts(models.ExecRequest, {"command": "true", "timeout_seconds": 1}).timeout_seconds == 1.0


@pytest.mark.parametrize("command", [None, 7, True, {"a": "b"}, ["a", 7], [["a"]], b"a"])
def test_a_command_is_a_string_or_a_list_of_strings(command: Any) -> None:
    with pytest.raises(Refused):
        accepts(models.ExecRequest, {"command": command})


@pytest.mark.parametrize(
    ("shape", "value"),
    [
        (models.ExecRequest, {"command": "a\0b"}),
        (models.ExecRequest, {"command": ["a", "b\0"]}),
        (models.ExecRequest, {"command": "a", "workdir": "/\0"}),
        (models.ExecRequest, {"command": "a", "env": {"A\0": "b"}}),
        (models.ExecRequest, {"command": "a", "env": {"A": "b\0"}}),
        (models.SandboxCreate, {"image": "\0"}),
        (models.SnapshotCreate, {"name": "\0"}),
    ],
)
def test_nul_cannot_be_right_anywhere(shape: Any, value: Any) -> None:
    with pytest.raises(InvalidRequestError):
        accepts(shape, value)


def test_strings_keep_bytes_that_are_not_utf8() -> None:
    request = accepts(models.ExecRequest, {"command": ["cat", "\udcff"], "workdir": "/workspace/\udcfe"})
    assert (request.command, request.workdir) == (["cat", "\udcff"], "/workspace/\udcfe")


def test_a_snapshot_name_has_at_most_128_characters() -> None:
    assert accepts(models.SnapshotCreate, {"name": "é" * 128}).name == "é" * 128
    with pytest.raises(Refused, match="at most 128"):
        accepts(models.SnapshotCreate, {"name": "é" * 129})
