"""A microVM's workspace is kept in the store and comes back: on a drive, over which only what changed is its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent_sandbox.backends.base import ByteSink
from agent_sandbox.config import load_settings
from agent_sandbox.conformance.box import Box
from agent_sandbox.conformance.files import BUILD, DUMP
from agent_sandbox.manager import CreateOptions, ForkOptions, Manager
from agent_sandbox.manager.records import SandboxRecord
from agent_sandbox.types import ExportReport
from tests import microvms
from tests.real.leaks import wait_until_clean

pytestmark = pytest.mark.real


class World:
    """A manager over a backend of microVMs."""

    def __init__(self, data: Path, machine_dir: Path) -> None:
        told = {"data_dir": data, "min_free_mb": 0, "machine_dir": str(machine_dir), "allow_tcg": True}
        settings = load_settings({**told, "backends": microvms.MONITOR}, {})
        self.backend = microvms.make_backend(settings)
        self.manager = Manager(settings, {microvms.MONITOR: self.backend})

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


BASE = """
import os
for name in ("same", "gone", "kind", "d/gone", "d/in/x", "e/x", "opaque/old", "mode", "times"):
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    open(name, "w").write(name * 100)
os.link("same", "other")
os.symlink("same", "link")
os.setxattr("mode", "user.kept", b"1")
"""
CHANGE = """
import os, shutil
os.remove("gone"); os.remove("d/gone"); os.remove("kind"); os.mkdir("kind"); open("kind/now", "w").write("a directory")
shutil.rmtree("e"); open("e", "w").write("a file")
shutil.rmtree("opaque"); os.mkdir("opaque"); open("opaque/new", "w").write("n")
os.chmod("mode", 0o4711); os.setxattr("mode", "user.more", b"2"); os.utime("times", ns=(1, 1234567890123456789))
open("d/in/new", "w").write("new"); os.link("d/in/new", "d/new too"); os.symlink("nowhere", "d/\\u00ff")
os.mkfifo("fifo"); os.chmod("d/in", 0o700); os.truncate(os.open("sparse", os.O_CREAT | os.O_WRONLY), 8 << 20)
"""


async def test_only_what_changed_moves_and_every_entry_is_what_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = []
    inner = world.backend.export_workspace

    async def counted(id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        whole.append(id)
        return await inner(id, dest, max_bytes)

    monkeypatch.setattr(world.backend, "export_workspace", counted)

    async def fork_of(record: SandboxRecord) -> SandboxRecord:
        """A sandbox that begins as another one is now, and shows the same."""
        snapshot = await world.manager.snapshot(record.id)
        fork = await world.manager.fork(snapshot.id, ForkOptions())
        assert (await world.box(fork).python(DUMP)).text == (await world.box(record).python(DUMP)).text
        return fork

    async def change(record: SandboxRecord, program: str) -> None:
        done = await world.box(record).python(program)
        assert done.status == 0, done.stderr

    first = await world.manager.create(CreateOptions(memory_mb=128, disk_mb=64, min_isolation="vm"))
    await change(first, BASE)
    second = await fork_of(first)
    assert whole == [first.env_id]  # it began with nothing
    await change(second, CHANGE)
    await fork_of(second)
    assert whole == [first.env_id]
    # What a layer does not say is sent whole: here a renamed directory, and a file of the state with two names.
    await change(second, "import os; os.rename('d', 'renamed'); open('same', 'a').write('both')")
    third = await fork_of(second)
    assert whole == [first.env_id, second.env_id]
    # Of the last one, which has a file that is nearly all hole, nothing is on a drive.
    await change(third, "open('f', 'w').write('f')")
    await fork_of(third)
    assert whole == [first.env_id, second.env_id, third.env_id]
