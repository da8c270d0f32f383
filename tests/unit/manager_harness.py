"""What the manager's tests share: settings, a clock to turn by hand, and a way to crash a server.

The backend is the fake one. :class:`Wire` stands between it and one manager, so that a crash cuts that manager off
while the environments go on, as they do when a server is killed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from agent_sandbox.backends.base import Backend, ByteSink, ByteSource
from agent_sandbox.backends.fake import FakeBackend
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError
from agent_sandbox.manager import Manager
from agent_sandbox.store import Store
from agent_sandbox.types import (
    EnvironmentInfo,
    ExecEvent,
    ExportReport,
    FileEntry,
    PreparedWorkspace,
    ResolvedImage,
    SandboxSpec,
)


class Clock:
    """A wall clock that stands until it is turned."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def make_settings(data_dir: Path, **changes: Any) -> Settings:
    """Settings with their own DATA_DIR and a sweep that does not come by itself within a test."""
    return Settings(**{"data_dir": data_dir, "backends": ("fake",), "reap_interval_seconds": 3600.0, **changes})


class Wire(Backend):
    """Passes calls to a backend until it is cut; :meth:`hold` keeps calls of one method back."""

    name = "fake"

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.cut = False
        self.paused: dict[str, asyncio.Event] = {}
        self.arrived: dict[str, asyncio.Event] = {}
        self.only: dict[str, str] = {}
        self.calls: list[tuple[str, str]] = []

    def hold(self, method: str, id: str = "") -> asyncio.Event:
        """Hold calls of ``method``, or those on one id; give the event that is set when one has come."""
        self.only[method] = id
        self.paused[method] = asyncio.Event()
        self.arrived[method] = asyncio.Event()
        return self.arrived[method]

    def free(self, method: str) -> None:
        """Let the calls that are held go, and those that come."""
        self.paused.pop(method).set()

    async def _pass(self, method: str, id: str = "") -> None:
        if self.cut:
            raise BackendError("this server has crashed")
        self.calls.append((method, id))
        if method in self.paused and self.only[method] in ("", id):
            self.arrived[method].set()
            await self.paused[method].wait()
        if self.cut:
            raise BackendError("this server has crashed")

    async def start(self) -> None:
        await self._pass("start")
        await self.inner.start()

    async def close(self) -> None:
        self.calls.append(("close", ""))

    async def ping(self) -> None:
        await self._pass("ping")
        await self.inner.ping()

    async def resolve_image(self, name: str) -> ResolvedImage:
        await self._pass("resolve_image")
        return await self.inner.resolve_image(name)

    async def create(self, id: str, spec: SandboxSpec) -> None:
        await self._pass("create", id)
        work = asyncio.ensure_future(self.inner.create(id, spec))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            if not self.cut:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            raise

    async def destroy(self, id: str) -> None:
        await self._pass("destroy", id)
        await self.inner.destroy(id)

    async def list_ids(self) -> list[str]:
        await self._pass("list_ids")
        return await self.inner.list_ids()

    async def is_running(self, id: str) -> bool:
        await self._pass("is_running", id)
        return await self.inner.is_running(id)

    async def inspect(self, id: str) -> EnvironmentInfo:
        await self._pass("inspect", id)
        return await self.inner.inspect(id)

    async def exec(
        self, id: str, argv: Sequence[str], *, env: Mapping[str, str], workdir: str, timeout_seconds: float
    ) -> AsyncGenerator[ExecEvent, None]:
        await self._pass("exec", id)
        stream = self.inner.exec(id, argv, env=env, workdir=workdir, timeout_seconds=timeout_seconds)
        async with aclosing(stream) as events:
            async for event in events:
                yield event

    async def start_environment(self, id: str, workspace: PreparedWorkspace | None = None) -> None:
        await self._pass("start_environment", id)
        await self.inner.start_environment(id, workspace)

    async def stop_environment(self, id: str) -> None:
        await self._pass("stop_environment", id)
        await self.inner.stop_environment(id)

    async def read_file(self, id: str, path: str, max_bytes: int) -> bytes:
        await self._pass("read_file", id)
        return await self.inner.read_file(id, path, max_bytes)

    async def write_file(self, id: str, path: str, data: bytes, mode: int) -> FileEntry:
        await self._pass("write_file", id)
        return await self.inner.write_file(id, path, data, mode)

    async def list_files(self, id: str, path: str) -> list[FileEntry]:
        await self._pass("list_files", id)
        return await self.inner.list_files(id, path)

    async def export_workspace(self, id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        await self._pass("export_workspace", id)
        return await self.inner.export_workspace(id, dest, max_bytes)

    async def import_workspace(self, id: str, src: ByteSource, max_bytes: int) -> None:
        await self._pass("import_workspace", id)
        await self.inner.import_workspace(id, src, max_bytes)


def _passing(name: str) -> Any:
    """A method of the wire for one of the backend's that belongs to a guest."""

    async def call(wire: Wire, id: str, *args: Any, **named: Any) -> Any:
        await wire._pass(name, id)
        return await getattr(wire.inner, name)(id, *args, **named)

    async def stream(wire: Wire, id: str, *args: Any, **named: Any) -> AsyncGenerator[Any, None]:
        await wire._pass(name, id)
        async with aclosing(getattr(wire.inner, name)(id, *args, **named)) as items:
            async for item in items:
                yield item

    return stream if inspect.isasyncgenfunction(getattr(FakeBackend, name)) else call


for _name in (
    *("open_exec", "start_exec", "attach_exec", "list_execs", "exec_status", "write_stdin", "close_stdin"),
    *("signal_exec", "resize_exec", "forget_exec", "stat_file", "make_directory", "move_file", "remove_file"),
    *("change_mode", "open_file", "store_file", "export_directory", "import_directory", "watch", "guest_stats"),
    "sync",
):
    setattr(Wire, _name, _passing(_name))


async def _do_nothing(id: str) -> None:
    """A dead server removes nothing."""


def kept_states(settings: Settings) -> set[str]:
    """The snapshots whose states the store keeps."""
    with Store.open(settings.data_dir / "store") as store:
        return {pin.name for pin in store.pins()}


class Server:
    """One manager after another over one backend and one DATA_DIR, as a machine sees servers come and go."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = Clock()
        self.fake = FakeBackend(settings)
        self.wire: Wire
        self.manager: Manager

    async def start(self) -> Manager:
        self.wire = Wire(self.fake)
        self.manager = Manager(self.settings, {"fake": self.wire}, clock=self.clock)
        await self.manager.start()
        await self.manager.settle()
        return self.manager

    async def crash(self) -> None:
        """End the server without its cleanup: from here on it reaches neither its backend nor its state."""
        fleet = self.manager._fleet
        self.wire.cut = True
        for event in self.wire.paused.values():
            event.set()
        fleet.files.delete = _do_nothing  # type: ignore[method-assign]
        fleet.workspaces.drop = _do_nothing  # type: ignore[method-assign, assignment]
        fleet.workspaces._stopping.set()
        await fleet.state.close()
        fleet._lock.release()
        assert fleet._sweeper is not None
        fleet._sweeper.cancel()
        fleet.tasks.cancel()
        await asyncio.wait([fleet._sweeper])
        await fleet.tasks.settle()
        await fleet.workspaces.close()

    async def restart(self) -> Manager:
        await self.crash()
        return await self.start()

    async def end(self) -> None:
        await self.manager.close()
        await self.fake.close()
        for id in await self.fake.list_ids():
            await self.fake.destroy(id)


@asynccontextmanager
async def serving(data_dir: Path, **changes: Any) -> AsyncIterator[Server]:
    """A started server, closed at the end."""
    server = Server(make_settings(data_dir, **changes))
    await server.start()
    try:
        yield server
    finally:
        await server.end()
