"""The contract over made-up environments."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from agent_sandbox.backends.fake.daemon import serve
from agent_sandbox.backends.fake.state import Environment, File, Tree
from agent_sandbox.backends.guest_backend import Endpoint, GuestBackend
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, ConflictError, NotFoundError, SandboxError, UnsupportedError
from agent_sandbox.types import (
    WORKSPACE,
    Capabilities,
    EnvironmentInfo,
    PreparedWorkspace,
    ResolvedImage,
    SandboxSpec,
)


class FakeBackend(GuestBackend):
    """Environments in memory, behind the real wire."""

    name = "fake"
    capabilities = Capabilities(
        isolation="process",
        guest=True,
        notes={"isolation": "a made-up daemon in the server's own process, for tests", "enforces": "no limit"},
        enforces=frozenset({"cpus", "memory", "pids", "disk", "network"}),
    )

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.environments: dict[str, Environment] = {}
        self.failures: dict[str, list[SandboxError]] = {}

    def _maybe_fail(self, method: str) -> None:
        if self.failures.get(method):
            raise self.failures[method].pop(0)

    async def start(self) -> None:
        self._maybe_fail("start")

    async def ping(self) -> None:
        self._maybe_fail("ping")

    async def resolve_image(self, name: str) -> ResolvedImage:
        if name == "missing":
            raise NotFoundError(f"there is no image {name!r}")
        return ResolvedImage(name=name, digest="", pinned=False)

    async def create(self, id: str, spec: SandboxSpec) -> None:
        if not spec.read_only_rootfs:
            raise UnsupportedError("writable_rootfs", self.name)
        if spec.network != "none":
            raise UnsupportedError("network", self.name)
        if id in self.environments:
            raise ConflictError(f"environment {id} exists already")
        files = Tree({WORKSPACE: File(None, 0o755), "/tmp": File(None, 0o1777)})
        environment = Environment(spec, os.urandom(32), files)
        self.environments[id] = environment
        try:
            await asyncio.sleep(0)
            self._maybe_fail("create")
            await self.guest_ready(id)
        except BaseException:
            await self.destroy(id)
            raise

    async def destroy(self, id: str) -> None:
        self._maybe_fail("destroy")
        await self.drop_guest(id)
        environment = self.environments.pop(id, None)
        if environment is not None:
            environment.running = False
            for task in [*environment.connections, *environment.execs]:
                task.cancel()

    async def start_environment(self, id: str, workspace: PreparedWorkspace | None = None) -> None:
        self._maybe_fail("start_environment")
        environment = self._environment(id)
        if not environment.running:
            for path in [path for path in environment.files if path.startswith("/tmp/")]:
                del environment.files[path]
            environment.running = True
        try:
            await self.guest_ready(id)
        except BaseException:
            environment.running = False
            raise

    async def stop_environment(self, id: str) -> None:
        self._maybe_fail("stop_environment")
        environment = self._environment(id)
        await self.drop_guest(id)
        await self.kill_guest(id)
        environment.commands.clear()

    def _environment(self, id: str) -> Environment:
        if id not in self.environments:
            raise NotFoundError(f"there is no environment {id!r}")
        return self.environments[id]

    async def list_ids(self) -> list[str]:
        return list(self.environments)

    async def is_running(self, id: str) -> bool:
        environment = self.environments.get(id)
        return environment is not None and environment.running

    async def inspect(self, id: str) -> EnvironmentInfo:
        environment = self._environment(id)
        usage = {"memory_bytes": sum(len(file.data or b"") for file in environment.files.values()), "cpu_seconds": 0.25}
        return EnvironmentInfo(id, environment.running, {"usage": usage})

    async def import_workspace(self, id: str, src: Any, max_bytes: int) -> None:
        self._maybe_fail("import_workspace")
        await super().import_workspace(id, src, max_bytes)

    async def export_workspace(self, id: str, dest: Any, max_bytes: int) -> Any:
        self._maybe_fail("export_workspace")
        return await super().export_workspace(id, dest, max_bytes)

    async def endpoint(self, id: str) -> Endpoint:
        environment = self._environment(id)
        if not environment.running:
            raise BackendError("the made-up daemon does not run")
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        task = asyncio.create_task(serve(environment, theirs))
        environment.connections.add(task)
        task.add_done_callback(environment.connections.discard)
        task.add_done_callback(lambda _: theirs.close())  # also when it was cancelled before its first step
        return Endpoint(ours, environment.key, environment.spec, {"FAKE": "1"})

    async def kill_guest(self, id: str) -> None:
        environment = self.environments.get(id)
        if environment is not None:
            environment.running = False
            for task in [*environment.connections, *environment.execs]:
                task.cancel()

    def oom_kills(self, id: str) -> int | None:
        return self.environments[id].oom_kills if id in self.environments else None
