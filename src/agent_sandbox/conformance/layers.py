"""Workspaces that begin as a state: what a sandbox sees and may do in them, and what the host sees of it.

Whether the backend mounts layers, copies the state or shows it on a drive (``Backend.projection``), the same is asked.
An overlay must
behave as a plain directory does; where overlayfs by default does not, the kernel's
Documentation/filesystems/overlayfs.rst ("Non-standard behavior") names the case.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pathlib
import secrets
import shutil
import tarfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
import pytest_asyncio

from agent_sandbox.backends.base import Backend
from agent_sandbox.conformance.box import Box, new_id
from agent_sandbox.conformance.suite import SuiteBase
from agent_sandbox.errors import BackendError, ConflictError, NotFoundError, UnsupportedError
from agent_sandbox.types import HeldWorkspace, PreparedWorkspace


class Layers:
    """Two layers as a manager lays them out: a whole state, and above it one more."""

    def __init__(self, directory: pathlib.Path, owner: tuple[int, int]) -> None:
        self.low, self.high = directory / "low", directory / "high"
        (self.low / "d" / "deep").mkdir(parents=True)
        (self.low / "f").write_text("low\n")
        (self.low / "d" / "x").write_text("x\n")
        (self.low / "d" / "deep" / "y").write_text("y\n")
        (self.low / "one").write_text("linked\n")
        os.link(self.low / "one", self.low / "two")
        (self.low / "gone").write_text("gone\n")
        self.high.mkdir()
        os.mknod(self.high / "gone", 0o020000, 0)
        (self.high / "f").write_text("high\n")
        for layer in (self.low, self.high):
            for place, _, names in os.walk(layer):
                for name in ("", *names):
                    os.chown(pathlib.Path(place) / name, *owner)
        self.high.chmod(0o750)
        os.utime(self.high, ns=(0, 1_234_567_890_123_456_789))
        lowers = (str(self.high), str(self.low))
        self.prepared = PreparedWorkspace(lowers, self.fill, secrets.token_hex(32))

    def fill(self, directory: int, owner: tuple[int, int], unwanted: Callable[[], bool]) -> None:
        """Lay out what both layers together show."""
        place = pathlib.Path(f"/proc/self/fd/{directory}")
        for name in ("d", "d/deep"):
            (place / name).mkdir()
        for source, name in ((self.high, "f"), (self.low, "d/x"), (self.low, "d/deep/y"), (self.low, "one")):
            shutil.copy2(source / name, place / name)
        os.link(place / "one", place / "two")
        for name in ("d", "d/deep", "f", "d/x", "d/deep/y", "one", ""):
            os.chown(place / name, *owner)
        place.chmod(0o750)
        os.utime(place, ns=(0, 1_234_567_890_123_456_789))

    def state(self) -> dict[str, tuple[int, int, bytes]]:
        """Everything in the layers: mode, mtime and content by path."""
        found = {}
        for layer in (self.low, self.high):
            for place, names, files in os.walk(layer):
                for name in ("", *names, *files):
                    path = pathlib.Path(place) / name
                    state = path.stat()
                    data = path.read_bytes() if path.is_file() else b""
                    found[str(path)] = (state.st_mode, state.st_mtime_ns, data)
        return found


class LayerSuite(SuiteBase):
    """For backends with the capability ``layered_workspace``; the place of the layers is on this host.

    One that copies has no layers in use, and may be interrupted while it does.
    """

    @pytest.fixture
    def layers(self, tmp_path: pathlib.Path) -> Layers:
        for directory in (tmp_path, *tmp_path.parents[:2]):
            directory.chmod(0o755)
        return Layers(tmp_path / "layers", (self.spec.uid, self.spec.gid))

    @pytest_asyncio.fixture
    async def layered(self, backend: Backend, layers: Layers) -> Box:
        id = new_id()
        await backend.create_from(id, self.spec, layers.prepared)
        return Box(backend, id, self.spec)

    async def test_the_capability_is_declared(self, backend: Backend) -> None:
        assert backend.capabilities.layered_workspace

    async def test_a_sandbox_begins_as_its_layers_show(self, layered: Box) -> None:
        assert await layered.shell("ls; cat f d/x d/deep/y two") == "d\nf\none\ntwo\nhigh\nx\ny\nlinked\n"
        assert await layered.shell("stat -c '%a %u %Y' . f; stat -c %a d") == (
            f"750 {self.spec.uid} 1234567890\n" + await layered.shell("stat -c '%a %u %Y' f") + "755\n"
        )
        assert await layered.get("f") == b"high\n"

    async def test_its_changes_are_its_own(self, backend: Backend, layers: Layers, layered: Box) -> None:
        before = layers.state()
        id = new_id()
        await backend.create_from(id, self.spec, layers.prepared)
        other = Box(backend, id, self.spec)
        await layered.shell("echo mine > f; rm -r d; chmod 700 .; touch -d @5 one; echo more >> two; mkdir new")
        assert await other.shell("cat f d/x one; ls") == "high\nx\nlinked\nd\nf\none\ntwo\n"
        assert await layered.shell("cat f one two; ls") == "mine\nlinked\nmore\nlinked\nmore\nf\nnew\none\ntwo\n"
        assert layers.state() == before
        used = set(layers.prepared.lowers) if backend.projection == "overlay" else set()
        assert await backend.layers_in_use() == used

    async def test_what_an_overlay_does_otherwise_by_default(self, layered: Box) -> None:
        assert await layered.shell("mv d e; cat e/deep/y; mv e/deep .; ls d e deep 2> /dev/null || true") == (
            "y\ndeep:\ny\n\ne:\nx\n"
        )
        await layered.shell("echo again >> one; test one -ef two")
        numbers = await layered.shell("stat -c %i f; echo changed >> f; stat -c %i f")
        assert len(set(numbers.split())) == 1
        assert await layered.shell("exec 3< two; echo last >> one; cat <&3") == "linked\nagain\nlast\n"

    async def test_files_and_archives_work_there(self, layered: Box) -> None:
        await layered.put("d/new", b"put")
        assert await layered.shell("cat d/new; stat -c ' %u' d/new") == f"put {self.spec.uid}\n"
        archive = await layered.export()
        assert b"high\n" in archive
        assert b"gone\n" not in archive

    async def test_the_disk_limit_holds_there(self, layered: Box) -> None:
        full = await layered.run("head -c 200000000 /dev/zero > fill; echo status $?")
        assert "No space left" in full.stderr.decode()
        assert await layered.shell("rm fill; cat f") == "high\n"

    async def test_held_it_stands_still_and_then_goes_on(self, backend: Backend, layered: Box) -> None:
        await layered.shell("(while true; do date +%N >> ticks; done) > /dev/null 2>&1 &")
        await layered.shell("until [ -s ticks ]; do sleep 0.01; done")
        ticks = None
        async with holding(backend, layered.id) as held:
            if isinstance(held, HeldWorkspace):
                path = pathlib.Path(held.path)
                assert not held.mapped or backend.capabilities.isolation == "gvisor"  # maps cannot be seen there
                assert sorted(entry.name for entry in path.iterdir())[:2] == ["d", "f"]
                ticks = (path / "ticks").stat().st_size
                await asyncio.sleep(0.3)
                assert (path / "ticks").stat().st_size == ticks
            else:
                ticks = len(await layered.get("ticks"))
                await asyncio.sleep(0.3)
                assert len(await layered.get("ticks")) == ticks
        for _ in range(600):
            if len(await layered.get("ticks")) > ticks:
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("the processes did not go on")

    async def test_a_shared_writable_map_is_told(self, backend: Backend, layered: Box) -> None:
        if backend.projection == "disk":
            pytest.skip("unsupported: the host sees nothing of its workspace")
        program = (
            "import mmap,os,time\nf=open('f','r+b'); m=mmap.mmap(f.fileno(),0); m[:1]=b'H'\n"
            "while not os.path.exists('go'): time.sleep(0.05)\nm.close(); print('unmapped')\n"
        )
        mapping = asyncio.create_task(layered.python(program, timeout=100))
        async with asyncio.timeout(60):
            while await layered.get("f") != b"High\n":
                await asyncio.sleep(0.1)
        async with backend.hold_workspace(layered.id) as held:
            assert held.mapped
            assert pathlib.Path(held.path, "f").read_bytes() == b"High\n"
        await layered.put("go", b"")
        assert (await mapping).text == "unmapped\n"
        async with backend.hold_workspace(layered.id) as held:
            assert not held.mapped or backend.capabilities.isolation == "gvisor"  # maps cannot be seen there

    async def test_one_that_is_stopped_keeps_its_changes_and_starts_over_its_layers(
        self, backend: Backend, layered: Box
    ) -> None:
        await layered.shell("echo kept > f; mv d e; echo more >> one")
        await backend.stop_environment(layered.id)
        with pytest.raises(ConflictError):
            async with holding(backend, layered.id):
                pass
        await backend.start_environment(layered.id)
        assert await layered.shell("cat f e/x two; ls") == "kept\nx\nlinked\nmore\ne\nf\none\ntwo\n"

    async def test_another_process_of_the_server_finds_it_and_what_was_held_goes_on(
        self, backend: Backend, layered: Box, tmp_path: pathlib.Path
    ) -> None:
        left = holding(backend, layered.id)
        await left.__aenter__()
        successor = await self.reopened(backend, tmp_path)
        assert await Box(successor, layered.id, self.spec).shell("cat f") == "high\n"
        assert len(await successor.layers_in_use()) == (2 if successor.projection == "overlay" else 0)
        with contextlib.suppress(BackendError, RuntimeError):  # the old process has no threads any more
            await left.__aexit__(None, None, None)

    async def test_what_cannot_be(self, backend: Backend, layers: Layers, tmp_path: pathlib.Path) -> None:
        with pytest.raises(NotFoundError):
            async with holding(backend, new_id()):
                pass

        def fail(directory: int, owner: tuple[int, int], unwanted: Callable[[], bool]) -> None:
            os.close(os.open("half", os.O_CREAT, dir_fd=directory))
            raise BackendError("a layer is missing")

        id = new_id()
        with pytest.raises(BackendError, match="layer"):
            await backend.create_from(id, self.spec, PreparedWorkspace((str(tmp_path / "missing"),), fail, "0" * 64))
        assert id not in await backend.list_ids()
        assert await backend.layers_in_use() == set()

    async def test_a_copy_that_nobody_waits_for_ends_and_leaves_nothing(self, backend: Backend) -> None:
        if backend.projection == "overlay":
            pytest.skip("unsupported: it copies nothing")
        begun = threading.Event()

        def fill(directory: int, owner: tuple[int, int], unwanted: Callable[[], bool]) -> None:
            while not unwanted():
                begun.set()
                time.sleep(0.01)
            raise BackendError("nobody waits")

        id = new_id()
        creating = asyncio.create_task(backend.create_from(id, self.spec, PreparedWorkspace(fill=fill, state="1" * 64)))
        assert await asyncio.to_thread(begun.wait, 30)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(30):
                await creating
        assert id not in await backend.list_ids()

    async def test_what_differs_comes_from_a_sandbox_whose_disk_is_its_own(
        self, backend: Backend, layers: Layers, layered: Box
    ) -> None:
        if backend.projection != "disk":
            pytest.skip("unsupported: its workspace is read on the host")

        async def differs() -> dict[str, tarfile.TarInfo]:
            archive = io.BytesIO()

            async def take(data: bytes) -> None:
                archive.write(data)

            async with backend.hold_changes(layered.id) as state:
                assert state == layers.prepared.state
                await backend.export_changes(layered.id, take, 1 << 30)
            archive.seek(0)
            return {info.name: info for info in tarfile.open(fileobj=archive)}

        assert set(await differs()) == {"."}
        await layered.shell("rm -r d f && mkdir -p d/in && echo new > d/in/new && chmod 711 . && mkfifo f")
        await layered.shell("rm two one && mkdir one")
        found = await differs()
        whiteouts = {".wh.two", "d/.wh..wh..opq", "one/.wh..wh..opq"}
        assert set(found) == {".", "d", "d/in", "d/in/new", "f", "one"} | whiteouts
        assert (found["."].mode, found["d/in/new"].size, found["f"].type) == (0o711, 4, tarfile.FIFOTYPE)

    async def test_what_a_layer_cannot_say_is_refused_before_a_byte(self, backend: Backend, layered: Box) -> None:
        if backend.projection != "disk":
            pytest.skip("unsupported: its workspace is read on the host")
        sent: list[bytes] = []

        async def take(data: bytes) -> None:
            sent.append(data)

        for change, back in (("mv d e", "mv e d"), ("touch .wh.f", "rm .wh.f"), ("echo >> one", "true")):
            await layered.shell(change)
            with pytest.raises(ConflictError):
                async with backend.hold_changes(layered.id):
                    await backend.export_changes(layered.id, take, 1 << 30)
            assert not sent
            await layered.shell(back)


def holding(backend: Backend, id: str) -> AbstractAsyncContextManager[HeldWorkspace | str | None]:
    """Hold a workspace still in the way that the backend has."""
    return backend.hold_changes(id) if backend.projection == "disk" else backend.hold_workspace(id)


class NoLayerSuite(SuiteBase):
    """For backends without it: a typed refusal before any effect."""

    async def test_layers_are_refused(self, backend: Backend, box: Box) -> None:
        assert not backend.capabilities.layered_workspace
        with pytest.raises(UnsupportedError):
            await backend.create_from(new_id(), self.spec, PreparedWorkspace(("/x",)))
        with pytest.raises(UnsupportedError):
            backend.hold_workspace(box.id)
        with pytest.raises(UnsupportedError):
            await backend.layers_in_use()
        assert await backend.list_ids() == [box.id]
