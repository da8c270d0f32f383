"""What the checklist asks beside methods, faults and refusals. Numbers are the checklist's and the fault list's."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pathlib
import stat
from collections.abc import Callable, Iterator

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.guest_backend import GuestBackend
from agent_sandbox.conformance.box import Box, new_id
from agent_sandbox.conformance.layers import Layers
from agent_sandbox.conformance.suite import SuiteBase, start
from agent_sandbox.errors import BackendError, ConflictError, NotFoundError, SandboxError, UnsupportedError
from agent_sandbox.types import WORKSPACE, PreparedWorkspace

DEAD_DAEMON = "#!/bin/sh\necho 'the last words of this daemon' >&2\nexit 3\n"
MAX_SEARCHED = 4 * 1024 * 1024
"""Larger files of a backend's state are disks and images; a key in one is the guest's own business."""


class ChecklistSuite(SuiteBase):
    """For every backend; needs ``sh``, ``cat``, ``echo`` and ``sleep`` of the guest."""

    missing_image = "missing"
    """The name of an image that the backend does not have."""

    async def none_left(self, backend: Backend) -> bool:
        """Whether the backend holds nothing any more, now or soon."""
        for _ in range(200):
            if not await backend.list_ids():
                return True
            await asyncio.sleep(0.1)
        return False

    async def test_b01_an_image_is_pinned_or_says_that_it_is_not(
        self, backend: Backend, record_property: Callable[[str, object], None]
    ) -> None:
        image = await backend.resolve_image(self.spec.image)
        assert image.pinned == bool(image.digest)
        assert await backend.resolve_image(self.spec.image) == image
        record_property("evidence", image.digest[:19] or f"{self.spec.image}: cannot be pinned, and says so")
        with pytest.raises((NotFoundError, BackendError)):
            await backend.resolve_image(self.missing_image)

    async def test_b01_what_exists_is_not_adopted_by_its_name(self, backend: Backend, box: Box) -> None:
        await box.put("f", b"first")
        with pytest.raises(ConflictError):
            await backend.create(box.id, self.spec)
        assert await backend.list_ids() == [box.id]
        assert await box.get("f") == b"first"

    async def test_b02_two_sandboxes_stand_on_one_volume(
        self, backend: Backend, tmp_path: pathlib.Path, record_property: Callable[[str, object], None]
    ) -> None:
        for directory in (tmp_path, *tmp_path.parents[:2]):
            directory.chmod(0o755)
        layers = Layers(tmp_path / "layers", (self.spec.uid, self.spec.gid))
        boxes = [Box(backend, new_id(), self.spec) for _ in range(2)]
        await asyncio.gather(*(backend.create_from(box.id, self.spec, layers.prepared) for box in boxes))
        assert await asyncio.gather(*(box.shell("echo $0 >> f; cat f") for box in boxes)) == ["high\n/bin/sh\n"] * 2
        assert (layers.high / "f").read_text() == "high\n"
        record_property("evidence", f"one kernel, layers on {filesystem_of(tmp_path)}")

    async def test_b05_a_daemon_that_does_not_start_leaves_its_last_words(self, tmp_path: pathlib.Path) -> None:
        program = tmp_path / "daemon"
        program.write_text(DEAD_DAEMON)
        program.chmod(0o755)
        (tmp_path / "b05").mkdir()
        backend = self.make_backend_with_daemon(tmp_path / "b05", program)
        if backend is None:
            pytest.skip("unsupported: the factory cannot make a backend with another daemon")
        await start(backend)
        try:
            with pytest.raises(BackendError, match="the last words of this daemon"):
                await backend.create(new_id(), self.spec)
            assert await self.none_left(backend)
        finally:
            await backend.close()

    async def test_b10_what_is_observed_is_data(self, backend: Backend, box: Box) -> None:
        info = await backend.inspect(box.id)
        assert (info.id, info.running) == (box.id, True)
        json.dumps(dict(info.details))
        with pytest.raises(NotFoundError):
            await backend.inspect("sbnever-1")

    async def test_b11_stopped_it_keeps_its_workspace_and_starts_again(self, backend: Backend, box: Box) -> None:
        await box.shell("echo kept > f; echo lost > /tmp/f")
        try:
            await backend.stop_environment(box.id)
        except UnsupportedError as error:
            assert await backend.is_running(box.id)
            pytest.skip(f"unsupported: {error.message}")
        await backend.stop_environment(box.id)
        assert not await backend.is_running(box.id)
        assert await backend.list_ids() == [box.id]
        with pytest.raises(SandboxError):
            await box.run(["echo", "never"])
        await backend.start_environment(box.id)
        assert await box.shell("cat f") == "kept\n"
        with pytest.raises(NotFoundError):
            await box.get("/tmp/f")

    async def test_b13_a_new_server_finds_it_again(self, backend: Backend, box: Box, tmp_path: pathlib.Path) -> None:
        await box.put("f", b"kept")
        successor = await self.reopened(backend, tmp_path)
        assert await successor.list_ids() == [box.id]
        again = Box(successor, box.id, box.spec)
        assert await successor.is_running(box.id)
        assert await again.get("f") == b"kept"
        assert await again.shell("echo goes on") == "goes on\n"

    async def test_b16_whoever_is_unknown_is_told_so(self, backend: Backend) -> None:
        stranger = Box(backend, "sbnever-1", self.spec)
        for attempt in (stranger.run(["true"]), stranger.put("f", b""), stranger.export()):
            with pytest.raises(NotFoundError):
                await attempt
        with pytest.raises((NotFoundError, UnsupportedError)):
            await backend.stop_environment("sbnever-1")
        with pytest.raises((NotFoundError, UnsupportedError)):
            await backend.start_environment("sbnever-1")
        assert await backend.list_ids() == []

    async def test_b16_a_layer_that_is_not_there_leaves_nothing(self, backend: Backend, tmp_path: pathlib.Path) -> None:
        with pytest.raises((BackendError, UnsupportedError)):
            await backend.create_from(new_id(), self.spec, PreparedWorkspace((str(tmp_path / "missing"),)))
        assert await self.none_left(backend)

    async def test_b17_the_key_is_in_closed_files_only(
        self, backend: Backend, box: Box, tmp_path: pathlib.Path
    ) -> None:
        if not isinstance(backend, GuestBackend):
            pytest.skip("unsupported: guest: no daemon, no key")
        endpoint = await backend.endpoint(box.id)
        endpoint.socket.close()
        forms = (endpoint.key, endpoint.key.hex().encode(), base64.b64encode(endpoint.key))
        seen = json.dumps(dict((await backend.inspect(box.id)).details)).encode()
        assert not any(form in seen for form in forms)
        for path in files_beneath(tmp_path):
            data = path.read_bytes()
            if any(form in data for form in forms):
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, f"{path} holds the key and is open to others"

    async def test_b17_the_environment_of_commands_is_in_no_process_of_the_host(self, backend: Backend) -> None:
        secret = f"kit-{os.urandom(12).hex()}"
        box = await self.new_box(backend, env={"SECRET": secret})
        assert await box.shell("echo $SECRET") == f"{secret}\n"
        seen = []
        for name in ("cmdline", "environ"):
            for path in pathlib.Path("/proc").glob(f"[0-9]*/{name}"):
                try:
                    seen.append(path.read_bytes())
                except OSError:
                    continue
        assert seen
        assert not any(secret.encode() in data for data in seen)
        assert secret not in json.dumps(dict((await backend.inspect(box.id)).details))

    async def test_f09_a_dead_daemon_is_a_typed_error(self, backend: Backend, box: Box) -> None:
        if not isinstance(backend, GuestBackend):
            pytest.skip("unsupported: guest: no daemon that could be killed")
        await backend.kill_guest(box.id)
        with pytest.raises(SandboxError):
            async with asyncio.timeout(30):
                await box.run(["echo", "never"])
        with pytest.raises(SandboxError):
            async with asyncio.timeout(30):
                await backend.list_files(box.id, WORKSPACE)
        await backend.destroy(box.id)
        assert await self.none_left(backend)

    @pytest.mark.parametrize("milliseconds", [0, 3, 20, 60])
    async def test_f28_cancelling_a_creation_leaves_nothing(self, backend: Backend, milliseconds: int) -> None:
        id = new_id()
        creating = asyncio.create_task(backend.create(id, self.spec))
        await asyncio.sleep(milliseconds / 1000)
        creating.cancel()
        await asyncio.wait([creating])
        await backend.destroy(id)
        await backend.destroy(id)
        assert await self.none_left(backend)


def files_beneath(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """The regular files that are small enough to be read whole, of this file system alone."""
    device = directory.stat().st_dev
    for place, names, files in os.walk(directory):
        names[:] = [name for name in names if _device(pathlib.Path(place, name)) == device]
        for name in files:
            path = pathlib.Path(place, name)
            state = path.lstat()
            if stat.S_ISREG(state.st_mode) and state.st_size <= MAX_SEARCHED:
                yield path


def _device(path: pathlib.Path) -> int:
    try:
        return path.lstat().st_dev
    except OSError:
        return -1


def filesystem_of(path: pathlib.Path) -> str:
    """The type of the file system that holds ``path``, as mountinfo names it."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        parts = line.split()
        if parts[2] == wanted:
            return parts[parts.index("-") + 1]
    return "an unknown file system"
