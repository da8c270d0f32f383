"""What runsc's program and state are read for, and what a checkpoint belongs to."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.linux.processor import machine
from agent_sandbox.backends.oci import checkpoints
from agent_sandbox.backends.oci.daemons import Daemons
from agent_sandbox.backends.oci.runsc import Runsc
from agent_sandbox.errors import BackendError, ConflictError

MADE = checkpoints.Made(
    runtime="runsc 0.0~20240729.0",
    machine="x86_64-abc",
    image="host",
    image_digest="",
    rootfs="abc",
    user="1000:1000",
    read_only_rootfs=True,
    pids_limit=64,
    tmp_mb=32,
    memory_mb=256,
    daemon="d" * 32,
)


def program(directory: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> Runsc:
    script = directory / "bin" / "runsc"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/sh\n{body}")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    (directory / "root").mkdir(exist_ok=True)
    return Runsc(directory / "root")


@pytest.mark.parametrize("version", ["0.0~20240729.0", "release-20240401.0", "0.0~20240101"])
async def test_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    runsc = program(tmp_path, f"echo runsc version {version}; echo spec: 1.0.2-dev", monkeypatch)
    assert await runsc.find() == version


@pytest.mark.parametrize("version", ["0.0~20221219.0", "release-20231231.0", "unknown"])
async def test_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    runsc = program(tmp_path, f"echo runsc version {version}", monkeypatch)
    with pytest.raises(BackendError, match=r"too old; install it with: apt-get install -t bookworm-backports runsc"):
        await runsc.find()


async def test_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runsc, "program", "runsc-that-is-not-there")
    with pytest.raises(BackendError, match=r"not installed; install it with: .* 20240101 is needed"):
        await Runsc(tmp_path).find()


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (
            'gofer.dentry("del").beforeSave: deleted and invalidated dentries can\'t be',
            ConflictError,
            "open and deleted",
        ),
        ("Cannot save endpoint with bound host socket:", ConflictError, "unix socket"),
        ("connecting to control server: connection refused", BackendError, "connection refused"),
    ],
)
async def test_what_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, error: type[Exception], words: str
) -> None:
    text = said.replace('"', '\\"').replace("'", "")
    body = f'case "$*" in *checkpoint*) echo "{text}"; exit 128;; esac\n'
    runsc = program(tmp_path, body + "echo runsc version 0.0~20240729.0", monkeypatch)
    await runsc.find()
    with pytest.raises(error, match=words):
        await runsc.checkpoint("asb-sb1-1", tmp_path)


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    argv = ["sh", "-c", "read x", "runsc-sandbox", f"--root={tmp_path}", "boot", "asb-sb1-1"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        # The kernel answers the call that starts it a moment before the command line can be read.
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.01)
        yield process
        process.kill()


async def test_a_process_is_known_by_its_command_line(tmp_path: Path, sandbox: subprocess.Popen[bytes]) -> None:
    state = {"id": "asb-sb1-1", "status": "paused", "sandbox": {"pid": sandbox.pid}}
    (tmp_path / "asb-sb1-1_sandbox:asb-sb1-1.state").write_text(json.dumps(state))
    (tmp_path / "asb-sb1-1_sandbox:asb-sb1-1.lock").touch()
    (tmp_path / "asb-sb2-1_sandbox:asb-sb2-1.state").write_text(json.dumps({**state, "id": "asb-sb2-1"}))
    runsc = Runsc(tmp_path)
    assert runsc.names() == ["asb-sb1-1", "asb-sb2-1"]
    found = runsc.process("asb-sb1-1")
    assert found is not None
    assert (found.pid, found.alive()) == (sandbox.pid, True)
    assert runsc.process("asb-sb2-1") is None, "another one's pid"
    assert runsc.process("asb-sb3-1") is None
    assert runsc.is_paused("asb-sb1-1")
    with pytest.raises(BackendError, match="still runs"):
        await runsc.delete("asb-sb1-1")
    sandbox.kill()
    sandbox.wait()
    await runsc.delete("asb-sb1-1")
    await runsc.delete("asb-sb1-1")
    assert runsc.names() == ["asb-sb2-1"]
    (tmp_path / "asb-sb2-1_sandbox:asb-sb2-1.state").write_text("{")
    assert runsc.process("asb-sb2-1") is None
    assert not runsc.is_paused("asb-sb2-1")


def test_a_manifest_is_read_back_and_refused_for_each_field(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.img").write_bytes(b"memory")
    (tmp_path / "checkpoint.img").chmod(0o644)
    checkpoints.seal(tmp_path, MADE)
    assert checkpoints.read(tmp_path) == MADE
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    checkpoints.require(MADE, dataclasses.replace(MADE, memory_mb=512, daemon="e" * 32))
    for field in dataclasses.fields(checkpoints.Made):
        if field.name in ("daemon", "memory_mb"):
            continue
        other: Any = not MADE.read_only_rootfs if field.name == "read_only_rootfs" else 7
        with pytest.raises(ConflictError, match=checkpoints._WORDS[field.name]):
            checkpoints.require(MADE, dataclasses.replace(MADE, **{field.name: other}))
    with pytest.raises(ConflictError, match="256 MiB"):
        checkpoints.require(MADE, dataclasses.replace(MADE, memory_mb=255))
    checkpoints.discard(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConflictError, match="no whole checkpoint"):
        checkpoints.read(tmp_path)


def test_the_machine_is_its_features_in_any_order(tmp_path: Path) -> None:
    def kind(text: str) -> str:
        (tmp_path / "cpuinfo").write_text(text)
        return machine(tmp_path / "cpuinfo")

    assert kind("processor : 0\nflags : sse avx\n") == kind("flags\t\t: avx sse\nflags\t\t: avx sse\n")
    assert kind("flags : sse avx\n") != kind("flags : sse\n")


def test_deleted_files_are_found_by_the_descriptors(tmp_path: Path) -> None:
    script = "exec 5> kept 6> gone 7> 'so called (deleted)'; rm gone; echo; read x"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["sh", "-c", script], cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert checkpoints.open_deleted(Process(process.pid, 0)) == [str(tmp_path / "gone")]
        process.kill()


def test_the_daemon_is_kept_by_its_content(tmp_path: Path) -> None:
    daemons, program = Daemons(tmp_path / "daemons"), tmp_path / "sandboxd"
    program.write_bytes(b"one")
    first = daemons.keep(program)
    assert (first.read_bytes(), first.stat().st_mode & 0o777) == (b"one", 0o755)
    number = first.stat().st_ino
    program.write_bytes(b"two")
    second = daemons.keep(program)
    program.write_bytes(b"one")
    assert daemons.keep(program).stat().st_ino == number
    assert daemons.find(second.name) == second
    for wrong in ("", "../sandboxd", "0" * 32):
        with pytest.raises(ConflictError):
            daemons.find(wrong)
    for extra in range(40):
        program.write_bytes(b"%d" % extra)
        daemons.keep(program)
    assert len(list((tmp_path / "daemons").iterdir())) == 32
