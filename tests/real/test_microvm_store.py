"""A microVM's workspace is kept in the store and comes back, as an archive that its daemon streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent_sandbox.backends.microvm import MicrovmBackend
from agent_sandbox.config import load_settings
from agent_sandbox.conformance.box import Box
from agent_sandbox.conformance.files import BUILD, DUMP
from agent_sandbox.manager import CreateOptions, ForkOptions, Manager
from agent_sandbox.manager.records import SandboxRecord
from tests.real.leaks import wait_until_clean

pytestmark = pytest.mark.real


class World:
    """A manager over a backend of microVMs."""

    def __init__(self, data: Path, machine_dir: Path) -> None:
        told = {"data_dir": data, "min_free_mb": 0, "machine_dir": str(machine_dir), "allow_tcg": True}
        settings = load_settings({**told, "backends": "qemu"}, {})
        self.backend = MicrovmBackend(settings)
        self.manager = Manager(settings, {"qemu": self.backend})

    def box(self, record: SandboxRecord) -> Box:
        return Box(self.backend, record.env_id, record.spec)


@pytest_asyncio.fixture
async def world(tmp_path: Path, machine_dir: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "data", machine_dir)
    await world.manager.start()
    yield world
    for record in await world.manager.list_sandboxes():
        await world.manager.destroy(record.id)
    await world.manager.settle()
    await wait_until_clean(tmp_path / "data", 30)
    await world.manager.close()


async def test_f31_everything_survives_rollback_and_fork(world: World) -> None:
    sandbox = await world.manager.create(CreateOptions(memory_mb=128, disk_mb=64, min_isolation="vm"))
    box = world.box(sandbox)
    built = await box.python(BUILD)
    assert built.status == 0, built.stderr
    before = [line for line in (await box.python(DUMP)).text.splitlines() if "/workspace/sock'" not in line]
    snapshot = await world.manager.snapshot(sandbox.id)
    assert [path for path, _ in snapshot.skipped] == ["sock"]
    await box.shell("chmod -R u+w . && rm -rf ./* && echo other > plain")
    found = await world.manager.changes(sandbox.id, limit=99, text=False)
    assert ("/workspace/plain", "modified") in [(change.path, change.kind) for change in found.changes]
    rolled = world.box(await world.manager.rollback(sandbox.id, snapshot.id))
    fork = world.box(await world.manager.fork(snapshot.id, ForkOptions()))
    for restored in (rolled, fork):
        assert (await restored.python(DUMP)).text.splitlines() == before
