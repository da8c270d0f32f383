"""Calls of the runtime's program: one that hangs, dies or lies neither blocks the loop nor counts as done."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sandbox.backends.oci import program
from agent_sandbox.backends.oci import runc as module
from agent_sandbox.backends.oci.runc import Runc
from agent_sandbox.errors import BackendError

VERSION = 'if [ "$3" = --version ]; then echo "runc version 1.0-test"; exit 0; fi\n'


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Runc]:
    def make(body: str) -> Runc:
        script = tmp_path / "bin" / "runc"
        script.parent.mkdir(exist_ok=True)
        script.write_text("#!/bin/sh\n" + VERSION + body)
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
        root = tmp_path / "root"
        (root / "asb-sb1-1").mkdir(parents=True, exist_ok=True)
        return Runc(root)

    return make


def test_the_end_of_the_loop_ends_a_call_that_hangs(
    make: Callable[[str], Runc], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_KILL_GRACE_SECONDS", 0.2)
    runc = make(f"echo $$ > {tmp_path}/pid; exec sleep 1000\n")

    async def leave() -> None:
        await runc.find()
        task = asyncio.create_task(runc.delete("asb-sb1-1"))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        assert not task.done()

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


async def test_a_call_that_hangs_is_killed_in_time(
    make: Callable[[str], Runc], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DELETE_SECONDS", 0.3)
    runc = make("exec sleep 1000\n")
    await runc.find()
    with pytest.raises(BackendError, match="did not finish"):
        await asyncio.wait_for(runc.delete("asb-sb1-1"), 5)


STATE = '{"init_process_pid": 999999999, "init_process_start": 1}'


@pytest.mark.parametrize("body", ["exit 0\n", "exit 1\n", "kill -9 $$\n"])
async def test_a_removal_that_leaves_the_state_has_failed(make: Callable[[str], Runc], body: str) -> None:
    runc = make(body)
    await runc.find()
    (runc.root / "asb-sb1-1" / "state.json").write_text(STATE)
    with pytest.raises(BackendError, match="could not remove"):
        await runc.delete("asb-sb1-1")
    assert runc.names() == ["asb-sb1-1"]


async def test_a_state_that_cannot_be_read_is_removed_without_the_runtime(make: Callable[[str], Runc]) -> None:
    runc = make("exit 1\n")
    await runc.find()
    (runc.root / "asb-sb1-1" / "state.json").write_text("{")
    await runc.delete("asb-sb1-1")
    assert runc.names() == []


async def test_a_missing_program_is_typed_with_the_remedy(make: Callable[[str], Runc], tmp_path: Path) -> None:
    runc = make("exit 0\n")
    await runc.find()
    (tmp_path / "bin" / "runc").unlink()
    assert not runc.installed()
    with pytest.raises(BackendError, match="apt-get install runc"):
        await runc.delete("asb-sb1-1")
