"""The host's disk is full: what is kept and put back on each way is told with its remedy, and works again with room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.backends.linux import mounts
from agent_sandbox.errors import BackendError, LimitExceededError
from agent_sandbox.manager import CreateOptions
from tests.real.test_everywhere import World, world

__all__ = ["world"]

pytestmark = pytest.mark.real


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A disk of 110 MiB."""
    small = tmp_path / "small"
    small.mkdir()
    mounts.mount("none", small, "tmpfs", 0, "size=110m")
    yield small
    mounts.unmount(small)


async def test_a_full_host_disk(world: World) -> None:
    sandbox = await world.manager.create(CreateOptions(memory_mb=128, disk_mb=64))
    box = world.box(sandbox)
    await box.shell("head -c 12000000 /dev/urandom > big")
    kept = await world.manager.snapshot(sandbox.id)
    await box.shell("head -c 12000000 /dev/urandom > more")
    await world.backend.sync(sandbox.env_id)  # the image of its disk has all that it needs
    filler = world.data.parent / "filler"
    state = os.statvfs(filler.parent)
    filler.write_bytes(bytes(state.f_bavail * state.f_frsize - 3_000_000))
    before = world.packs()
    with pytest.raises(LimitExceededError, match="full"):
        await world.manager.snapshot(sandbox.id)
    assert [record.id for record in await world.manager.list_snapshots()] == [kept.id]
    assert world.packs() - before < 3_000_000
    with pytest.raises((LimitExceededError, BackendError)):
        await world.manager.rollback(sandbox.id, kept.id)
    filler.unlink()
    assert await box.shell("stat -c %s big more") == "12000000\n12000000\n"
    later = await world.manager.snapshot(sandbox.id)
    rolled = world.box(await world.manager.rollback(sandbox.id, kept.id))
    assert await rolled.shell("ls") == "big\n"
    assert later.size_bytes == 24_000_000
