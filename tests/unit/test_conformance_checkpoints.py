"""The kit's checks of checkpoints pass a backend that keeps the rules, and fail one that breaks any of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.fake.programs import PROGRAMS
from agent_sandbox.config import load_settings
from agent_sandbox.conformance import CheckpointSuite, checkpoints, diary
from agent_sandbox.errors import SandboxError
from tests.unit.keeping_backend import MADE_UP, STILL, Keeping, StreamedKeeping


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, since nothing made-up takes a moment of its own; and programs that only these tests have."""
    for name, program in MADE_UP.items():
        monkeypatch.setitem(PROGRAMS, name, program)
    monkeypatch.setattr(checkpoints, "STILL_SECONDS", 0.2)
    monkeypatch.setattr(checkpoints, "BETWEEN_SECONDS", 0.0)


class Kit(CheckpointSuite):
    """The factory."""

    kind: ClassVar[type[Keeping]] = Keeping
    diary = ("diary",)
    holder = ("holder",)

    def make_backend(self, tmp_path: Path) -> Keeping:
        backend = self.kind(load_settings({"data_dir": tmp_path}, {}), tmp_path / "scratch")
        backend.capabilities = dataclasses.replace(backend.capabilities, isolation="vm")
        return backend

    async def reopened(self, backend: Backend, tmp_path: Path) -> Backend:
        """Its environments live in the object; what was held goes on, as at any start of a server."""
        assert isinstance(backend, Keeping)
        await backend.close()
        if backend.breaks != "the next server lets nothing go on":
            STILL.clear()
        return backend


class TestKeeping(Kit):
    """With layers."""


class TestStreamedKeeping(Kit):
    """Without."""

    kind = StreamedKeeping


BROKEN = (
    ("the memory is lost", "three_forks", "did not go on with the memory"),
    ("nothing goes on", "three_forks", "does not go on"),
    ("forks share their files", "three_forks", "did not go on|a fork sees what another one wrote"),
    ("a restore changes it", "three_forks", "a restore changed the checkpoint"),
    ("the memory is of a later moment", "one_moment", "did not go on|the memory is of a later moment"),
    ("entropy is shared", "one_moment", "shares its entropy"),
    ("processes run on", "unharmed", "a process goes on while its workspace is read"),
    ("it stays frozen", "unharmed", "does not go on"),
    ("it ends", "unharmed", "the made-up daemon does not run|connection"),
    ("the clock stands still", "clock", "the clock stood still"),
    ("names go on", "names", "one name or machine id"),
    ("the key goes on", "old_key", "the key of the sandbox that was kept"),
    ("sizes are not compared", "does_not_belong", "DID NOT RAISE"),
    ("versions are not compared", "does_not_belong", "DID NOT RAISE"),
    ("a refused one stays", "does_not_belong", "something is left"),
    ("damage is not seen", "damaged", "Expecting value|Unterminated"),
    ("what was broken off counts", "checkpoint_that_is_broken_off", "DID NOT RAISE"),
    ("it stays frozen", "checkpoint_that_is_broken_off", "does not go on"),
    ("a cancelled one stays", "restore_that_is_broken_off", "these are left"),
    ("the next server lets nothing go on", "server_that_ends", "does not go on"),
    ("it hangs on its sandbox", "outlives", "its sandbox has gone"),
    ("a deleted file is lost", "open_and_deleted", "still here"),
    ("a deleted file is refused without its name", "open_and_deleted", "does not name the file"),
)
CHECKS = [name for name in vars(CheckpointSuite) if name.startswith("test_")]


def test_every_check_is_shown_to_fail() -> None:
    failing = {name for name in CHECKS for _, part, _ in BROKEN if part in name}
    assert failing == set(CHECKS)


@pytest.mark.parametrize(
    ("rule", "part", "words", "kind"),
    [
        (*row, kind)
        for row in BROKEN
        for kind in (Keeping, StreamedKeeping)
        # With layers what is read was laid out once, of one moment with the memory.
        if (row[0], kind) != ("processes run on", Keeping)
    ],
)
async def test_a_broken_rule_is_found(
    rule: str, part: str, words: str, kind: type[Keeping], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diary, "SECONDS", 1.0)  # which it waits for in vain
    (check,) = (name for name in CHECKS if part in name)

    class Mine(Kit):
        pass

    Mine.kind = kind
    kit = Mine()
    backend = kit.make_backend(tmp_path)
    backend.breaks = rule
    await backend.start()
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception, SandboxError, ValueError), match=words):
            await getattr(kit, check)(backend, tmp_path)
    finally:
        STILL.clear()
        for id in await backend.list_ids():
            await backend.destroy(id)
        await backend.close()
