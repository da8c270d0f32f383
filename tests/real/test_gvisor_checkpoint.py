"""Checkpoints on the real runsc: processes go on, in several environments at once; what cannot be kept is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.oci import GvisorBackend, OciBackend
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, ConflictError, NotFoundError, UnsupportedError
from agent_sandbox.types import ExecOutput, ExecRequest, PreparedWorkspace, SandboxSpec
from tests.real.leaks import wait_until_clean

pytestmark = pytest.mark.real

SPEC = SandboxSpec(image="host", image_digest="", cpus=1.0, memory_mb=256, pids_limit=64, disk_mb=64, tmp_mb=32)
LS = "ls --ignore=count.new"  # which is there for a moment, again and again
COUNTER = """
import os, time
held = open('held', 'w+')
n = 0
while True:
    n += 1
    held.seek(0); held.write(str(n)); held.flush()
    with open('count.new', 'w') as file: file.write(str(n))
    os.rename('count.new', 'count')
    with open('/tmp/new', 'w') as file: file.write(str(n))
    os.rename('/tmp/new', '/tmp/memory')
    time.sleep(0.05)
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data")


@pytest_asyncio.fixture
async def backend(settings: Settings) -> AsyncIterator[GvisorBackend]:
    backend = GvisorBackend(settings)
    await backend.start()
    yield backend
    for id in await backend.list_ids():
        await backend.destroy(id)
    await wait_until_clean(settings.data_dir, 30)
    await backend.close()


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """An empty state, as a manager lays one out."""
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    return make_layer(tmp_path / "empty")


def make_layer(directory: Path) -> Path:
    directory.mkdir()
    os.chown(directory, SPEC.uid, SPEC.gid)
    return directory


async def shell(backend: Backend, id: str, command: str) -> str:
    found = b""
    async for event in backend.exec(id, ["sh", "-c", command], env={}, workdir="/workspace", timeout_seconds=60):
        found += event.data if isinstance(event, ExecOutput) else b""
    return found.decode()


async def count(backend: Backend, id: str) -> int:
    return int(await backend.read_file(id, "/workspace/count", 100))


async def counts_on(backend: Backend, id: str, start: int) -> int:
    """Wait until the counter of an environment is past ``start``; return where it is."""
    async with asyncio.timeout(60):
        while True:
            try:
                if (now := await count(backend, id)) > start:
                    return now
            except NotFoundError:
                pass
            await asyncio.sleep(0.05)


async def start_counter(backend: Backend, id: str) -> None:
    request = ExecRequest(("python3", "-c", COUNTER), {}, "/workspace", 3000.0, "counter")
    await backend.start_exec(id, request)
    await counts_on(backend, id, 3)


async def keep(backend: Backend, id: str, place: Path) -> tuple[Path, Path, int]:
    """Checkpoint an environment; return the checkpoint, the state committed with it, and the counter in both."""
    place.mkdir()
    image, state = place / "image", make_layer(place / "state")
    image.mkdir(mode=0o700)
    async with backend.checkpoint(id, str(image)) as held:
        assert held is not None  # of a backend with layers
        process = await asyncio.create_subprocess_exec("cp", "-a", f"{held.path}/.", str(state))
        assert await process.wait() == 0
        before = (state / "count").read_text()
        await asyncio.sleep(0.3)
        assert Path(held.path, "count").read_text() == before
        assert held.mapped
    return image, state, int(before)


async def test_a_counter_goes_on_from_where_it_was_in_two_environments_at_once(
    backend: GvisorBackend, layer: Path, tmp_path: Path
) -> None:
    assert backend.capabilities.checkpoint
    await backend.create_from("sb1-1", SPEC, PreparedWorkspace((str(layer),)))
    await start_counter(backend, "sb1-1")
    image, state, kept = await keep(backend, "sb1-1", tmp_path / "kept")
    assert stat_mode(image / "manifest.json") == 0o600
    files = {path.name: path.read_bytes() for path in image.iterdir()}
    # The sandbox itself goes on, and on.
    later = await counts_on(backend, "sb1-1", kept)
    prepared = PreparedWorkspace((str(state),))
    await asyncio.gather(*(backend.restore(id, SPEC, prepared, str(image)) for id in ("sb2-1", "sb3-1")))
    for id in ("sb2-1", "sb3-1"):
        first = await counts_on(backend, id, kept)
        assert int(await shell(backend, id, "cat /tmp/memory")) >= kept
        assert first < later + 1_000
        running = await backend.exec_status(id, "counter")
        assert running.running
    # Each is its own: one that is stopped, or writes, does not touch the other.
    await backend.signal_exec("sb2-1", "counter", 9)
    await shell(backend, "sb2-1", "echo mine > mine")
    stopped = await count(backend, "sb2-1")
    await counts_on(backend, "sb3-1", await count(backend, "sb3-1") + 5)
    assert await count(backend, "sb2-1") == stopped
    assert await shell(backend, "sb3-1", LS) == await shell(backend, "sb1-1", LS) == "count\nheld\n"
    assert {path.name: path.read_bytes() for path in image.iterdir()} == files
    assert (await backend.exec_status("sb1-1", "counter")).running
    # A restored one can be kept again.
    await keep(backend, "sb3-1", tmp_path / "again")
    await counts_on(backend, "sb3-1", await count(backend, "sb3-1"))


def stat_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


async def test_files_that_are_open_and_deleted_are_named_and_the_sandbox_goes_on(
    backend: GvisorBackend, layer: Path, tmp_path: Path
) -> None:
    await backend.create_from("sb1-1", SPEC, PreparedWorkspace((str(layer),)))
    await start_counter(backend, "sb1-1")
    holder = "exec 5> 'a (deleted)' 6> gone 7> /tmp/fine; rm gone /tmp/fine; exec sleep 3000"
    await backend.start_exec("sb1-1", ExecRequest(("sh", "-c", holder), {}, "/workspace", 3000.0, "holder"))
    async with asyncio.timeout(30):
        while "gone" in await shell(backend, "sb1-1", "ls") or "(deleted)" not in await shell(backend, "sb1-1", "ls"):
            await asyncio.sleep(0.05)
    image = tmp_path / "image"
    image.mkdir()
    with pytest.raises(ConflictError, match=r"open and deleted: /workspace/gone$"):
        async with backend.checkpoint("sb1-1", str(image)):
            pytest.fail("the block was entered")
    assert list(image.iterdir()) == []
    await counts_on(backend, "sb1-1", await count(backend, "sb1-1"))
    await backend.signal_exec("sb1-1", "holder", 9)
    await keep(backend, "sb1-1", tmp_path / "kept")


async def test_a_socket_of_a_command_is_refused_and_the_sandbox_goes_on(
    backend: GvisorBackend, layer: Path, tmp_path: Path
) -> None:
    await backend.create_from("sb1-1", SPEC, PreparedWorkspace((str(layer),)))
    await start_counter(backend, "sb1-1")
    bound = "import socket,time\ns=socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen(); time.sleep(3000)"
    await backend.start_exec("sb1-1", ExecRequest(("python3", "-c", bound), {}, "/workspace", 3000.0, "bound"))
    async with asyncio.timeout(30):
        while "sock" not in await shell(backend, "sb1-1", "ls"):
            await asyncio.sleep(0.05)
    image = tmp_path / "image"
    image.mkdir()
    with pytest.raises(ConflictError, match="unix socket"):
        async with backend.checkpoint("sb1-1", str(image)):
            pass
    assert list(image.iterdir()) == []
    await counts_on(backend, "sb1-1", await count(backend, "sb1-1"))


async def test_whatever_breaks_it_off_the_sandbox_goes_on(backend: GvisorBackend, layer: Path, tmp_path: Path) -> None:
    await backend.create_from("sb1-1", SPEC, PreparedWorkspace((str(layer),)))
    await start_counter(backend, "sb1-1")
    image = tmp_path / "image"
    image.mkdir()

    async def break_off() -> None:
        async with backend.checkpoint("sb1-1", str(image)):
            with pytest.raises(ConflictError):
                async with backend.checkpoint("sb1-1", str(image)):
                    pass
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await break_off()
    assert list(image.iterdir()) == []
    await counts_on(backend, "sb1-1", await count(backend, "sb1-1"))
    entered = asyncio.Event()

    async def held() -> None:
        async with backend.checkpoint("sb1-1", str(image)):
            entered.set()
            await asyncio.sleep(3000)

    task = asyncio.create_task(held())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await counts_on(backend, "sb1-1", await count(backend, "sb1-1"))


@pytest.mark.parametrize("kind", ["hold_workspace", "checkpoint"])
async def test_a_server_that_ended_meanwhile_leaves_it_to_the_next(
    settings: Settings, layer: Path, tmp_path: Path, kind: str
) -> None:
    first = GvisorBackend(settings)
    await first.start()
    await first.create_from("sb1-1", SPEC, PreparedWorkspace((str(layer),)))
    await start_counter(first, "sb1-1")
    image = tmp_path / "image"
    image.mkdir()
    holding = first.hold_workspace("sb1-1") if kind == "hold_workspace" else first.checkpoint("sb1-1", str(image))
    await holding.__aenter__()
    second = GvisorBackend(settings)
    await second.start()
    await counts_on(second, "sb1-1", await count(second, "sb1-1"))
    await second.destroy("sb1-1")
    await wait_until_clean(settings.data_dir, 30)
    await second.close()
    await first.close()


async def test_what_a_checkpoint_does_not_belong_to_is_refused_before_any_effect(
    backend: GvisorBackend, layer: Path, tmp_path: Path
) -> None:
    await backend.create_from("sb1-1", SPEC, PreparedWorkspace((str(layer),)))
    await start_counter(backend, "sb1-1")
    image, state, kept = await keep(backend, "sb1-1", tmp_path / "kept")
    prepared = PreparedWorkspace((str(state),))
    manifest = image / "manifest.json"
    whole = manifest.read_text()

    async def refused(spec: SandboxSpec, words: str) -> None:
        with pytest.raises(ConflictError, match=words):
            await backend.restore("sb2-1", spec, prepared, str(image))
        assert await backend.list_ids() == ["sb1-1"]

    def changed(**fields: object) -> str:
        return json.dumps({**json.loads(whole), **fields})

    for text, words in (
        (changed(runtime="runsc 20300101"), "runtime"),
        (changed(machine="another"), "machine"),
        (changed(image_digest="sha256:" + 64 * "0"), "image's content"),
        (changed(version=99), "format"),
        ("{", "damaged"),
    ):
        manifest.write_text(text)
        await refused(SPEC, words)
    manifest.write_text(whole)
    await refused(dataclasses.replace(SPEC, pids_limit=63), "processes")
    await refused(dataclasses.replace(SPEC, memory_mb=255), "memory")
    manifest.unlink()
    await refused(SPEC, "no whole checkpoint")
    manifest.write_text(whole)
    (image / "checkpoint.img").write_bytes(b"garbage")
    with pytest.raises(BackendError):
        await backend.restore("sb2-1", SPEC, prepared, str(image))
    assert await backend.list_ids() == ["sb1-1"]
    assert kept > 0


async def test_runc_declares_that_it_has_none(tmp_path: Path, settings: Settings) -> None:
    backend = OciBackend(settings)
    await backend.start()
    try:
        assert not backend.capabilities.checkpoint
        assert "gvisor" in backend.capabilities.notes["checkpoint"]
        with pytest.raises(UnsupportedError):
            backend.checkpoint("sb1-1", str(tmp_path))
        with pytest.raises(UnsupportedError):
            await backend.restore("sb1-1", SPEC, PreparedWorkspace(("/x",)), str(tmp_path))
    finally:
        await backend.close()
