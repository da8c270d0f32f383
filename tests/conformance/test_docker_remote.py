"""The Docker backend on an engine that shares no files with this host: volumes, uploads, and the wire through exec.

The engine is the tests' own, reached over TCP, so that nothing of this host may be taken for granted.
"""

import asyncio
import contextlib
import pathlib
import secrets
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import ClassVar

import pytest
import pytest_asyncio

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.docker import DockerBackend
from agent_sandbox.config import load_settings
from agent_sandbox.conformance import BackendSuite, NoLayerSuite
from agent_sandbox.types import SandboxSpec
from tests.real.rootfs import build_rootfs

IMAGE = f"asb-test-remote:{secrets.token_hex(4)}"
PROGRAMS = ("echo", "sleep", "printenv", "pwd", "yes")


@pytest.fixture(scope="module", autouse=True)
def _image(docker_host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place = tmp_path_factory.mktemp("image")
    subprocess.run(
        ["tar", "-C", str(build_rootfs(place / "root", PROGRAMS)), "-cf", str(place / "root.tar"), "."], check=True
    )
    docker = ["docker", "--host", docker_host]
    subprocess.run([*docker, "import", str(place / "root.tar"), IMAGE], check=True, capture_output=True)
    yield
    subprocess.run([*docker, "rmi", "-f", IMAGE], check=False, capture_output=True)


class Remote:
    """The factory."""

    spec: ClassVar[SandboxSpec] = SandboxSpec(
        image=IMAGE,
        image_digest="",
        cpus=1.0,
        memory_mb=256,
        pids_limit=64,
        disk_mb=64,
        tmp_mb=32,
        env={"FROM_SPEC": "1"},
    )

    @pytest_asyncio.fixture(autouse=True)
    async def _engine(self, docker_host: str) -> AsyncIterator[None]:
        connections: set[asyncio.Task[None]] = set()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            theirs, ours = await asyncio.open_unix_connection(docker_host.removeprefix("unix://"))
            try:
                await asyncio.gather(_copy(reader, ours), _copy(theirs, writer))
            except asyncio.CancelledError:
                pass
            finally:
                connections.discard(task)

        server = await asyncio.start_server(carry, "127.0.0.1", 0)
        self.docker_host = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield
        server.close()
        for task in list(connections):
            task.cancel()
        if connections:
            await asyncio.wait(list(connections))

    def make_backend(self, tmp_path: pathlib.Path) -> Backend:
        values = {"data_dir": tmp_path / "data", "docker_host": self.docker_host, "allow_unenforced": "true"}
        return DockerBackend(load_settings(values, {}))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()


@pytest.mark.real
class TestDockerRemote(Remote, BackendSuite):
    """A first sandbox."""

    async def test_what_such_an_engine_cannot_do_is_declared(self, backend: Backend) -> None:
        assert "disk" not in backend.capabilities.enforces
        assert backend.capabilities.network == {"none"}
        assert {"disk", "layered_workspace", "network"} <= set(backend.capabilities.notes)

    async def test_stopped_it_keeps_its_workspace_and_another_server_finds_it(
        self, backend: Backend, tmp_path: pathlib.Path
    ) -> None:
        box = await self.new_box(backend)
        await box.shell("echo kept > f")
        await backend.stop_environment(box.id)
        assert not await backend.is_running(box.id)
        await backend.start_environment(box.id)
        assert await box.get("f") == b"kept\n"
        successor = await self.reopened(backend, tmp_path)
        assert await successor.is_running(box.id)
        assert await successor.read_file(box.id, "/workspace/f", 10) == b"kept\n"


@pytest.mark.real
class TestDockerRemoteLayers(Remote, NoLayerSuite):
    """Workspaces begin empty there."""
