"""The record and key of an environment: whatever stands on the disk is read whole and right, or is one typed error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.backends.oci.environment import Environment, Record
from agent_sandbox.errors import BackendError, NotFoundError
from agent_sandbox.types import SandboxSpec

SPEC = SandboxSpec(
    image="host",
    image_digest="",
    cpus=1.5,
    memory_mb=256,
    pids_limit=64,
    disk_mb=64,
    tmp_mb=32,
    env={"TOKEN": "hush", "BYTES": "\udcff\n"},
)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    environment = Environment(tmp_path, "sb1-1")
    environment.make(Record("sb1-1", SPEC, Path("/image/rootfs")))
    return environment


def test_what_was_written_is_read_and_is_private(environment: Environment) -> None:
    assert environment.record() == Record("sb1-1", SPEC, Path("/image/rootfs"))
    assert len(environment.key()) == 32
    assert {path.stat().st_mode & 0o777 for path in environment.directory.iterdir()} == {0o600}


def changed(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda raw: json.dumps({**json.loads(raw), **changes}).encode()


def with_spec(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda raw: changed(spec={**json.loads(raw)["spec"], **changes})(raw)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[: len(raw) // 2],
        lambda raw: bytes(len(raw)),
        lambda raw: b"\xff\xfe",
        lambda raw: b"[]",
        lambda raw: b"null",
        lambda raw: b"[" * 200_000,
        changed(version=2),
        changed(version=None),
        changed(id="sb2-1"),
        changed(rootfs=5),
        changed(spec=None),
        with_spec(env=None),
        with_spec(env=["A"]),
        with_spec(env={"A": 5}),
        with_spec(memory_mb="256"),
        with_spec(network="some"),
        with_spec(uid=None),
    ],
)
def test_a_damaged_record_is_one_typed_error(environment: Environment, damage: Callable[[bytes], bytes]) -> None:
    path = environment.directory / "spec.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BackendError, match="destroy it"):
        environment.record()


@pytest.mark.parametrize("name", ["spec.json", "key"])
@pytest.mark.parametrize("kind", ["directory", "loop"])
def test_what_is_no_file_is_damage_too(environment: Environment, name: str, kind: str) -> None:
    path = environment.directory / name
    path.unlink()
    path.mkdir() if kind == "directory" else path.symlink_to(path)
    with pytest.raises(BackendError, match="destroy it"):
        environment.record() if name == "spec.json" else environment.key()


def test_what_is_missing_is_not_found(environment: Environment) -> None:
    assert environment.is_known()
    environment.forget()
    assert not environment.is_known()
    for read in (environment.record, environment.key):
        with pytest.raises(NotFoundError):
            read()
