"""The record and key of an environment: whatever stands on the disk is read whole and right, or is one typed error."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.backends.linux.environments import write_private
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


RECORD = Record("sb1-1", SPEC, Path("/image/rootfs"), 2_013_265_920, {"LANG": "C.UTF-8"})


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    environment = Environment(tmp_path, tmp_path / "box", "sb1-1")
    environment.reserve()
    environment.make(RECORD)
    return environment


def test_what_was_written_is_read_and_is_private(environment: Environment) -> None:
    assert environment.record() == RECORD
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
        changed(ids="2013265920"),
        changed(ids=-65536),
        changed(ids=0),
        changed(ids=1 << 40),
        changed(image_env={"A": None}),
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
    environment.forget()
    for read in (environment.record, environment.key):
        with pytest.raises(NotFoundError):
            read()


def test_a_record_of_an_older_release_has_no_range(environment: Environment) -> None:
    path = environment.directory / "spec.json"
    value = json.loads(path.read_bytes())
    del value["ids"], value["image_env"]
    path.write_text(json.dumps(value))
    assert environment.record() == Record("sb1-1", SPEC, Path("/image/rootfs"), None, {})


class Daemon:
    """An environment whose daemon binds its own socket, in a directory that is the sandbox's to change."""

    def __init__(self, place: Path) -> None:
        self.environment = Environment(place, place / "box", "sb1-1", "daemon/sock")
        self.environment.reserve()
        self.environment.daemon.mkdir()
        self.others = place / "others"
        self._sockets: list[socket.socket] = []

    def listen(self, path: Path) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        self._sockets.append(listener)
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        return listener

    def close(self) -> None:
        for listener in self._sockets:
            listener.close()


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Daemon]:
    monkeypatch.chdir(tmp_path)  # addresses of sockets are short
    daemon = Daemon(Path())
    yield daemon
    daemon.close()


def test_a_daemon_is_met_where_it_listens(daemon: Daemon) -> None:
    listener = daemon.listen(daemon.environment.endpoint)
    with daemon.environment.connect(), listener.accept()[0]:
        pass


def test_a_link_in_a_sockets_place_leads_the_server_nowhere(daemon: Daemon) -> None:
    """To the engine's socket, for one, or to another sandbox's daemon."""
    listener = daemon.listen(daemon.others)
    daemon.environment.endpoint.symlink_to(daemon.others.absolute())
    with pytest.raises(ConnectionRefusedError):
        daemon.environment.connect()
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, os.mkfifo])
def test_what_is_no_socket_is_nobody(daemon: Daemon, make: Callable[[Path], None]) -> None:
    make(daemon.environment.endpoint)
    with pytest.raises(ConnectionRefusedError):
        daemon.environment.connect()


def test_a_private_file_is_written_through_no_link(tmp_path: Path) -> None:
    victim, place = tmp_path / "victim", tmp_path / "place"
    victim.write_text("kept")
    place.mkdir()
    for name in (".config.new", "config"):
        (place / name).symlink_to(victim)
    write_private(place / "config", b"secret")
    assert victim.read_text() == "kept"
    assert (place / "config").read_bytes() == b"secret"
    assert not (place / "config").is_symlink()
    assert [path.name for path in place.iterdir()] == ["config"]
