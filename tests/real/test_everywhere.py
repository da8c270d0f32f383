"""Faults 30, 31, 33 and 34 and what a snapshot costs, on every way in which a workspace is kept and comes back.

Layered over an overlay, copied into a plain directory, and streamed as an archive by the daemon, which is how backends
without layers have it: the embedded backend plays one here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.backends.oci.places import Places
from agent_sandbox.config import load_settings
from agent_sandbox.conformance.box import Box
from agent_sandbox.conformance.execs import pieces
from agent_sandbox.conformance.files import BUILD, DUMP, hostile_tar, member
from agent_sandbox.errors import BackendError, InvalidRequestError, LimitExceededError, PayloadTooLargeError
from agent_sandbox.manager import CreateOptions, ForkOptions, Manager
from agent_sandbox.manager.records import SandboxRecord

pytestmark = pytest.mark.real


class WithoutLayers(OciBackend):
    """The embedded backend as one that only exports and imports."""

    async def start(self) -> None:
        await super().start()
        self.capabilities = dataclasses.replace(self.capabilities, layered_workspace=False)


class World:
    """A manager over one such backend."""

    def __init__(self, data: Path, way: str) -> None:
        settings = load_settings(
            {
                "data_dir": data,
                "min_free_mb": 0,
                "workspaces": "copy" if way == "copied" else "auto",
                "max_snapshot_bytes": 50_000_000,
            },
            {},
        )
        self.backend = WithoutLayers(settings) if way == "streamed" else OciBackend(settings)
        self.manager = Manager(settings, {"runc": self.backend})
        self.data = data

    def box(self, record: SandboxRecord) -> Box:
        return Box(self.backend, record.env_id, record.spec)

    def packs(self) -> int:
        return sum(path.stat().st_size for path in (self.data / "store" / "packs").iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(params=["layered", "copied", "streamed"])
async def world(request: pytest.FixtureRequest, place: Path) -> AsyncIterator[World]:
    world = World(place / "data", request.param)
    await world.manager.start()
    try:
        yield world
        assert world.backend.projection == ("copy" if request.param == "copied" else "overlay")
    finally:
        for record in await world.manager.list_sandboxes():
            await world.manager.destroy(record.id)
        await world.manager.settle()
        await world.manager.close()


async def test_f31_everything_survives_rollback_and_fork(world: World) -> None:
    sandbox = await world.manager.create(CreateOptions(memory_mb=128, disk_mb=64))
    box = world.box(sandbox)
    built = await box.python(BUILD)
    assert built.status == 0, built.stderr
    before = [line for line in (await box.python(DUMP)).text.splitlines() if "/workspace/sock'" not in line]
    snapshot = await world.manager.snapshot(sandbox.id)
    assert [path for path, _ in snapshot.skipped] == ["sock"]
    assert snapshot.skipped_total == 1
    assert snapshot.size_bytes < 100_000
    await box.shell("chmod -R u+w . && rm -rf ./* && echo other > plain")
    rolled = world.box(await world.manager.rollback(sandbox.id, snapshot.id))
    fork = world.box(await world.manager.fork(snapshot.id, ForkOptions()))
    for restored in (rolled, fork):
        assert (await restored.python(DUMP)).text.splitlines() == before
        assert (await restored.shell("stat -c %i plain deep/hard | uniq | wc -l")).strip() == "1"
        assert int((await restored.shell("du -k sparse")).split()[0]) < 1000
    again = await world.manager.snapshot(sandbox.id)
    assert (await world.manager.diff(snapshot.id, again.id, limit=9, text=False)).changes == ()


async def test_f30_f33_states_come_back_whole_and_links_and_maps_are_what_they_were(world: World) -> None:
    sandbox = await world.manager.create(CreateOptions(memory_mb=128, disk_mb=64))
    box = world.box(sandbox)
    await box.shell("mkdir -p d/e; echo 0 > d/e/f; ln d/e/f d/g; head -c 8192 /dev/zero > mapped; echo x > gone")
    await box.shell("touch -d @1000 mapped")
    for turn in range(3):
        snapshot = await world.manager.snapshot(sandbox.id)
        await box.shell("rm -f gone; mv d moved; echo late > late")
        box = world.box(await world.manager.rollback(sandbox.id, snapshot.id))
        listing = await box.shell("ls; cat d/e/f; stat -c %h d/g")
        assert listing == f"d\ngone\nmapped\n{turn}\n2\n"
        await box.shell("mv d e; mv e/e inner; mv inner e/e; mv e d")
        await box.shell(f"echo {turn + 1} > d/g; [ $(cat d/e/f) = {turn + 1} ]")
        mapping = (
            "import mmap, os\nf = open('mapped', 'r+b')\nm = mmap.mmap(f.fileno(), 0)\n"
            f"m[0] = {65 + turn}\nm.flush()\nm.close()\nf.close()\nos.utime('mapped', (1000, 1000))"
        )
        assert (await box.python(mapping)).status == 0
    last = await world.manager.snapshot(sandbox.id)
    fork = world.box(await world.manager.fork(last.id, ForkOptions()))
    assert await fork.shell("head -c 1 mapped; cat d/e/f") == "C3\n"


async def test_f34_a_hostile_archive_lands_nothing_outside_a_restored_workspace(world: World) -> None:
    sandbox = await world.manager.create(CreateOptions(memory_mb=128, disk_mb=64))
    await world.box(sandbox).shell("mkdir in; echo kept > in/kept")
    snapshot = await world.manager.snapshot(sandbox.id)
    box = world.box(await world.manager.rollback(sandbox.id, snapshot.id))
    outside = await box.shell("ls -A / /tmp /workspace; cat /etc/passwd")
    for members in (
        [(member("/tmp/absolute"), b"x")],
        [(member("../up"), b"x")],
        [(member("hard", tarfile.LNKTYPE, "/etc/passwd"), b"")],
        [(member("hard", tarfile.LNKTYPE, "../../etc/passwd"), b"")],
        [(member("link", tarfile.SYMTYPE, "/tmp"), b""), (member("link/through"), b"x")],
    ):
        with contextlib.suppress(InvalidRequestError):
            await world.backend.import_directory(box.id, "/workspace/in", pieces(hostile_tar(*members)), 1_000_000)
        assert await box.shell("ls -A / /tmp /workspace; cat /etc/passwd") == outside
        assert await box.shell("test -e in/hard || cat in/kept") == "kept\n"


async def test_storage_grows_by_what_changed_and_history_works(world: World) -> None:
    sandbox = await world.manager.create(CreateOptions(memory_mb=128, disk_mb=64))
    box = world.box(sandbox)
    await box.shell("head -c 3000000 /dev/urandom > big; for i in $(seq 200); do echo $i > f$i; done")
    first = await world.manager.snapshot(sandbox.id)
    before = world.packs()
    await box.shell("echo changed > f7; echo more >> big")
    found = await world.manager.changes(sandbox.id, limit=9, text=False)
    assert [(change.path, change.kind) for change in found.changes] == [
        ("/workspace/big", "modified"),
        ("/workspace/f7", "modified"),
    ]
    second = await world.manager.snapshot(sandbox.id)
    assert world.packs() - before < 100_000
    assert second.size_bytes == first.size_bytes + len("changed\n") - len("7\n") + len("more\n")
    assert [state.snapshots for state in await world.manager.log(second.id, limit=2)] == [(second.id,), (first.id,)]
    fork = await world.manager.fork(first.id, ForkOptions())
    await world.box(fork).shell("echo theirs > theirs; rm f9")
    theirs = await world.manager.snapshot(fork.id)
    merged = await world.manager.merge(sandbox.id, theirs.id)
    assert merged.outcome == "merged"
    assert await world.box(merged.record).shell("cat f7 theirs; ls f9 2>/dev/null || tail -c 5 big") == (
        "changed\ntheirs\nmore\n"
    )


async def test_bad_times(world: World) -> None:
    """A full workspace, one above the limit, one that is written to all the while, a directory of many names."""
    sandbox = await world.manager.create(CreateOptions(memory_mb=128, disk_mb=48))
    box = world.box(sandbox)
    await box.shell("echo kept > kept")
    small = await world.manager.snapshot(sandbox.id)
    assert (await box.run("head -c 100000000 /dev/zero | tr '\\0' x > fill")).status != 0
    full = await world.manager.snapshot(sandbox.id)
    size = (await box.shell("stat -c %s fill")).strip()
    box = world.box(await world.manager.rollback(sandbox.id, small.id))
    assert await box.shell("ls") == "kept\n"
    box = world.box(await world.manager.rollback(sandbox.id, full.id))
    assert (await box.shell("stat -c %s fill")).strip() == size
    box = world.box(await world.manager.rollback(sandbox.id, small.id))
    await box.shell("mkdir many; cd many; seq 4000 | sed 's/^/a-rather-long-name-of-a-file-/' | xargs touch")
    await box.shell(
        "(while true; do head -c 3000000 /dev/urandom > noise; rm -f noise2; mv noise noise2; done) > /dev/null 2>&1 &"
    )
    busy = await world.manager.snapshot(sandbox.id)
    fork = world.box(await world.manager.fork(busy.id, ForkOptions()))
    assert await fork.shell("ls many | wc -l; cat kept") == "4000\nkept\n"
    record = await world.manager.rollback(sandbox.id, small.id)
    assert await world.box(record).shell("ls") == "kept\n"


async def test_a_state_that_is_too_large_for_a_disk_is_refused_and_nothing_is_left(world: World) -> None:
    if world.backend.projection == "overlay" and world.backend.capabilities.layered_workspace:
        return  # what a sandbox began with is not on its disk
    sandbox = await world.manager.create(CreateOptions(memory_mb=128, disk_mb=64))
    await world.box(sandbox).shell("head -c 30000000 /dev/urandom > big")
    snapshot = await world.manager.snapshot(sandbox.id)
    tiny = await world.manager.create(CreateOptions(memory_mb=128, disk_mb=16))
    await world.box(tiny).shell("echo kept > kept")
    with pytest.raises(LimitExceededError):
        await world.manager.rollback(tiny.id, snapshot.id)
    assert await world.box(tiny).shell("cat kept") == "kept\n"
    await world.box(sandbox).shell("head -c 25000000 /dev/urandom > more")
    with pytest.raises(PayloadTooLargeError):
        await world.manager.snapshot(sandbox.id)
    await world.manager.settle()
    assert len(await world.backend.list_ids()) == 2
    assert [record.id for record in await world.manager.list_snapshots()] == [snapshot.id]


async def test_two_rollbacks_at_once_and_a_snapshot_that_is_deleted_meanwhile(world: World) -> None:
    sandbox = await world.manager.create(CreateOptions(memory_mb=128, disk_mb=64))
    snapshots = []
    for name in ("a", "b"):
        await world.box(sandbox).shell(f"echo {name} > f; head -c 2000000 /dev/urandom > big")
        snapshots.append(await world.manager.snapshot(sandbox.id))
    first = asyncio.create_task(world.manager.rollback(sandbox.id, snapshots[1].id))
    second = asyncio.create_task(world.manager.rollback(sandbox.id, snapshots[0].id))
    await asyncio.sleep(0.1)
    await world.manager.delete_snapshot(snapshots[1].id)
    await asyncio.gather(first, second)
    assert await world.box(await second).shell("cat f") == "a\n"
    await world.manager.settle()
    for _ in range(100):
        if len(await world.backend.list_ids()) == 1:
            break
        await asyncio.sleep(0.1)
    assert await world.backend.list_ids() == [(await second).env_id]


async def test_what_was_made_one_way_goes_on_under_a_server_of_another(tmp_path: Path) -> None:
    """Somebody changes the setting, or moves to a kernel that cannot mount what a stopped sandbox does not need."""
    first = World(tmp_path / "data", "layered")
    await first.manager.start()
    sandbox = await first.manager.create(CreateOptions(memory_mb=128, disk_mb=64))
    await first.box(sandbox).shell("mkdir d; echo 1 > d/f; ln d/f g")
    snapshot = await first.manager.snapshot(sandbox.id)
    fork = await first.manager.fork(snapshot.id, ForkOptions())
    await first.box(fork).shell("mv d e; echo 2 > e/f")
    await first.manager.close()
    second = World(tmp_path / "data", "copied")
    await second.manager.start()
    try:
        await second.manager.stop(fork.id)
        await second.manager.start_sandbox(fork.id)
        kept = await second.manager.snapshot(fork.id)
        copy = await second.manager.fork(kept.id, ForkOptions())
        assert await second.box(copy).shell("cat e/f g; ls") == "2\n2\ne\ng\n"
        await second.box(copy).shell("echo 3 > g")
        found = await second.manager.changes(copy.id, limit=9, text=False)
        assert [change.path for change in found.changes] == ["/workspace/e/f", "/workspace/g"]
        back = await second.manager.rollback(fork.id, snapshot.id)
        assert await second.box(back).shell("cat d/f g; ls") == "1\n1\nd\ng\n"
        await second.manager.settle()
        assert await second.backend.layers_in_use() == set()
    finally:
        for record in await second.manager.list_sandboxes():
            await second.manager.destroy(record.id)
        await second.manager.settle()
        await second.manager.close()


@pytest.mark.parametrize(("asked", "why"), [("auto", ""), ("auto", "EPERM"), ("overlay", "EPERM"), ("copy", "")])
async def test_the_way_is_chosen_at_start_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: str, why: str
) -> None:
    monkeypatch.setattr(Places, "why_no_layers", lambda _: why)
    backend = OciBackend(load_settings({"data_dir": tmp_path / "data", "workspaces": asked}, {}))
    try:
        if asked == "overlay":
            with pytest.raises(BackendError, match="WORKSPACES=overlay cannot be: EPERM; set it to auto or copy"):
                await backend.start()
            return
        with caplog.at_level("INFO"):
            await backend.start()
        note = backend.capabilities.notes.get("layered_workspace", "")
        if asked == "auto" and not why:
            assert (backend.projection, note) == ("overlay", "")
            assert "mounted over layers (overlayfs)" in caplog.text
        else:
            reason = why or "AGENT_SANDBOX_WORKSPACES=copy"
            assert backend.projection == "copy"
            assert note.startswith(f"copied: {reason};")
            assert f"workspaces are copied, not mounted over layers: {reason}" in caplog.text
        assert backend.capabilities.layered_workspace
    finally:
        await backend.close()
