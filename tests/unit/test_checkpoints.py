"""The directory of checkpoints: what counts, what a crash leaves, what is refused, what waits for whom."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_sandbox.errors import BackendError, ConflictError, LimitExceededError
from agent_sandbox.manager.checkpoints import Checkpoints
from agent_sandbox.manager.records import SnapshotRecord
from agent_sandbox.types import SandboxSpec

SPEC = SandboxSpec("host", "", 1.0, 128, 64, 64, 32)
COMMIT = "ab" * 32


def record(id: str = "snap1", **changes: Any) -> SnapshotRecord:
    values: dict[str, Any] = {
        **{"id": id, "sandbox_id": "sb1", "name": None, "backend": "gvisor", "spec": SPEC, "size_bytes": 0},
        **{"stored_bytes": 0, "created_at": 1.0, "skipped": (), "skipped_total": 0, "commit": COMMIT},
        "memory_bytes": 6,
    }
    return SnapshotRecord(**{**values, **changes})


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Checkpoints]:
    store = Checkpoints(tmp_path / "checkpoints")
    await store.start(set())
    yield store
    await store.close()


def write(place: Path) -> None:
    (place / "image").write_bytes(b"memory")


async def make(
    store: Checkpoints, id: str = "snap1", *, memory_mb: int = 128, fill: Callable[[Path], None] = write
) -> int:
    async with store.making(id, memory_mb, 0) as making:
        fill(Path(making.state))
        return await store.keep(making, "gvisor", COMMIT)


def names(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "checkpoints").iterdir()}


async def test_what_was_kept_can_be_used_by_many_at_once(store: Checkpoints, tmp_path: Path) -> None:
    assert await make(store) == 6
    assert (tmp_path / "checkpoints").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "checkpoints" / "snap1").stat().st_mode & 0o777 == 0o700
    async with store.use(record()) as one, store.use(record()) as two:
        assert one == two
        assert Path(one, "image").read_bytes() == b"memory"


@pytest.mark.parametrize("kept", [False, True])
async def test_a_block_that_fails_leaves_nothing(store: Checkpoints, tmp_path: Path, kept: bool) -> None:
    async def fail() -> None:
        async with store.making("snap1", 128, 0) as making:
            write(Path(making.state))
            if kept:
                await store.keep(making, "gvisor", COMMIT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert names(tmp_path) == set()


async def test_a_start_removes_what_no_snapshot_names(store: Checkpoints, tmp_path: Path) -> None:
    for id in ("snap1", "snap2"):
        await make(store, id)
    (tmp_path / "checkpoints" / ".new-snap3" / "state").mkdir(parents=True)
    again = Checkpoints(tmp_path / "checkpoints")
    await again.start({"snap1", "snap4"})
    assert names(tmp_path) == {"snap1"}
    async with again.use(record()):
        pass
    await again.close()


async def test_a_deleted_one_goes_when_the_last_reader_lets_go(store: Checkpoints, tmp_path: Path) -> None:
    await make(store)
    async with store.use(record()) as first:
        async with store.use(record()):
            await store.delete("snap1")
            assert Path(first, "image").exists()
        assert Path(first, "image").exists()
    assert names(tmp_path) == set()
    await store.delete("snap1")  # there is none any more


async def test_room_is_asked_for_before_anything_is_written(
    store: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 128 + 128 + 500
    for free, fits in ((needed, True), (needed - 1, False)):
        room = SimpleNamespace(f_bavail=free, f_frsize=1 << 20)
        monkeypatch.setattr(os, "statvfs", lambda path, room=room: room)
        if fits:
            async with store.making("snap1", 128, 500):
                pass
            await store.delete("snap1")
        else:
            with pytest.raises(LimitExceededError, match="without memory"):
                async with store.making("snap1", 128, 500):
                    raise AssertionError("not reached")
    assert names(tmp_path) == set()


async def test_more_than_the_sandbox_may_hold_is_refused(store: Checkpoints, tmp_path: Path) -> None:
    def fill(place: Path) -> None:
        write(place)
        os.truncate(place / "image", (16 << 20) + (128 << 20) + 1)

    with pytest.raises(LimitExceededError, match="more than its own limit"):
        await make(store, memory_mb=16, fill=fill)
    assert names(tmp_path) == set()


async def test_only_plain_files_count(store: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="plain files"):
        await make(store, fill=lambda place: (place / "link").symlink_to("/etc/shadow"))
    assert names(tmp_path) == set()


def _damage(home: Path, how: str) -> None:
    manifest = home / "manifest.json"
    if how == "gone":
        home.rename(home.with_name("elsewhere"))
    elif how == "cut":
        os.truncate(home / "state" / "image", 5)
    elif how == "no manifest":
        manifest.unlink()
    elif how == "half a manifest":
        os.truncate(manifest, 20)
    elif how == "a newer one":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 2}))
    elif how == "not a table":
        manifest.write_text("[]")


@pytest.mark.parametrize("how", ["gone", "cut", "no manifest", "half a manifest", "a newer one", "not a table"])
async def test_damage_is_a_conflict_with_the_remedy(store: Checkpoints, tmp_path: Path, how: str) -> None:
    await make(store)
    _damage(tmp_path / "checkpoints" / "snap1", how)
    with pytest.raises(ConflictError, match="memory: false"):
        async with store.use(record()):
            raise AssertionError("not reached")


@pytest.mark.parametrize("change", [{"commit": "cd" * 32}, {"backend": "docker"}, {"memory_bytes": 7}])
async def test_it_is_used_with_its_own_snapshot_alone(store: Checkpoints, change: dict[str, Any]) -> None:
    await make(store)
    with pytest.raises(ConflictError, match="memory: false"):
        async with store.use(record(**change)):
            raise AssertionError("not reached")
