"""What every backend must do, as tests that its author runs through a factory.

::

    class TestMine(BackendSuite, CommandSuite, FileSuite, SnapshotSuite, LimitSuite, EscapeSuite):
        def make_backend(self, tmp_path): return MyBackend(load_settings({"data_dir": tmp_path}, {}))

:class:`BackendSuite` asks for the contract's methods and needs of the guest only ``sh``, ``echo``, ``cat``, ``sleep``,
``printenv`` and ``pwd``; the others need ordinary tools and python3 inside. Every value comes from
``backends/base.py``, ``spec/wire.md``, the manual pages named in the tests, or the known faults of this field.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import pathlib
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import ClassVar

import pytest
import pytest_asyncio

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.linux.waiting import settled
from agent_sandbox.conformance.box import MAX_BYTES, Box, new_id
from agent_sandbox.conformance.checklist import unsupported
from agent_sandbox.conformance.known import known_failures
from agent_sandbox.errors import (
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    SandboxError,
    UnsupportedError,
)
from agent_sandbox.types import WORKSPACE, ExecExit, ExecOutput, SandboxSpec

GONE_SECONDS, GVISOR_GONE_SECONDS = 60.0, 180.0
"""For what is removed behind a destroy that was answered. Most is gone within a second; an engine that has to take the
exits of all the processes of a gVisor sandbox one after another was seen to need 80 s for its record."""


def suite_of(kind: type, name: str) -> str:
    """The name of the suite that a test of a class comes from."""
    return next(parent.__name__ for parent in kind.__mro__ if name in vars(parent))


async def start(backend: Backend) -> None:
    """Start a backend as a server does: one that cannot start is closed, so that it leaves nothing on the host."""
    try:
        await backend.start()
    except BaseException:
        await settled(asyncio.ensure_future(backend.close()))
        raise


class SuiteBase:
    """The factory and its fixtures. A test class overrides :meth:`make_backend`, and :attr:`spec` if it must."""

    spec: ClassVar[SandboxSpec] = SandboxSpec(
        image="host",
        image_digest="",
        cpus=1.0,
        memory_mb=256,
        pids_limit=64,
        disk_mb=64,
        tmp_mb=32,
        env={"FROM_SPEC": "1"},
    )
    successor: Backend | None = None

    def make_backend(self, tmp_path: pathlib.Path) -> Backend:
        """Return the backend, not yet started, with all its state beneath ``tmp_path``."""
        raise AssertionError("a backend's test class says how to make it")

    def make_backend_with_daemon(self, tmp_path: pathlib.Path, daemon: pathlib.Path) -> Backend | None:
        """The same with another executable as its daemon, which will not start; ``None`` where that cannot be."""
        return None

    async def reopened(self, backend: Backend, tmp_path: pathlib.Path) -> Backend:
        """What a new process of the server would have: another backend over the same state, the old one closed."""
        await backend.close()
        self.successor = self.make_backend(tmp_path)
        await start(self.successor)
        return self.successor

    @pytest_asyncio.fixture
    async def backend(self, tmp_path: pathlib.Path) -> AsyncIterator[Backend]:
        backend = self.make_backend(tmp_path)
        await start(backend)
        try:
            yield backend
        finally:
            await settled(asyncio.ensure_future(self._remove_all(self.successor or backend)))

    async def _remove_all(self, backend: Backend) -> None:
        for id in await backend.list_ids():
            await backend.destroy(id)
        is_gvisor = backend.capabilities.isolation == "gvisor"
        deadline = time.monotonic() + (GVISOR_GONE_SECONDS if is_gvisor else GONE_SECONDS)
        while (left := await backend.list_ids()) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        await backend.close()
        assert left == []

    @pytest_asyncio.fixture(autouse=True)
    async def applies(self, backend: Backend, request: pytest.FixtureRequest) -> None:
        """Leave out what the backend declares that it lacks, and expect what it is known to fail."""
        name = str(request.function.__name__)
        check = f"{suite_of(type(self), name)}.{name}"
        if reason := unsupported(check, backend.capabilities):
            pytest.skip(f"unsupported: {reason}")
        known = known_failures(backend)
        if reason := known.get(request.node.name) or known.get(name):
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    @pytest_asyncio.fixture
    async def box(self, backend: Backend) -> Box:
        return await self.new_box(backend)

    async def new_box(self, backend: Backend, **changes: object) -> Box:
        """Make another environment, with some fields of the spec changed."""
        spec = dataclasses.replace(self.spec, **changes)  # type: ignore[arg-type]
        id = new_id()
        await backend.create(id, spec)
        return Box(backend, id, spec)


class BackendSuite(SuiteBase):
    """The methods of the contract."""

    async def test_ping_and_capabilities(self, backend: Backend) -> None:
        await backend.ping()
        assert backend.name
        assert "none" in backend.capabilities.network

    async def test_a_new_workspace_is_empty_and_writable(self, box: Box) -> None:
        assert await box.backend.list_files(box.id, WORKSPACE) == []
        assert await box.shell("echo hello > f; cat f") == "hello\n"
        assert await box.get("f") == b"hello\n"

    async def test_output_then_exactly_one_exit(self, box: Box) -> None:
        result = await box.run("echo out; echo err >&2; exit 3")
        assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
        assert (result.exit.code, result.exit.signal, result.exit.timed_out) == (3, None, False)

    async def test_a_signal_is_not_an_exit_code(self, box: Box) -> None:
        result = await box.run("kill -9 $$")
        assert (result.exit.code, result.exit.signal, result.exit.timed_out) == (None, 9, False)

    async def test_environment_is_put_together_in_order(self, box: Box) -> None:
        result = await box.run(["printenv", "FROM_SPEC", "HOME", "MINE"], env={"MINE": "é"})
        assert result.text == "1\n/workspace\né\n"
        assert (await box.run(["printenv", "FROM_SPEC"], env={"FROM_SPEC": "2"})).text == "2\n"
        assert (await box.run(["printenv", "MINE"])).status == 1

    async def test_working_directory(self, box: Box) -> None:
        await box.shell("mkdir -p a/b")
        assert (await box.run(["pwd"], workdir=f"{WORKSPACE}/a/b")).text == "/workspace/a/b\n"
        for missing in (f"{WORKSPACE}/none", f"{WORKSPACE}/f"):
            await box.put("f", b"")
            with pytest.raises(InvalidRequestError):
                await box.run(["true"], workdir=missing)

    async def test_a_missing_program_is_127_with_a_message(self, box: Box) -> None:
        result = await box.run(["no-such-program"])
        assert result.exit.code == 127
        assert "no-such-program" in result.exit.message

    async def test_a_timeout_keeps_the_output_and_says_so(self, box: Box) -> None:
        async with asyncio.timeout(60):
            result = await box.run("echo before; sleep 300", timeout=2)
        assert result.stdout == b"before\n"
        assert result.exit.timed_out
        assert (result.exit.signal, result.exit.code) == (9, None)

    async def test_output_arrives_while_the_command_runs(self, box: Box) -> None:
        argv = ["sh", "-c", "echo first; sleep 20"]
        events = box.backend.exec(box.id, argv, env={}, workdir=WORKSPACE, timeout_seconds=30)
        async with aclosing(events), asyncio.timeout(5):
            assert await anext(events) == ExecOutput("stdout", b"first\n")

    async def test_leaving_a_stream_early_leaves_the_sandbox_usable(self, box: Box) -> None:
        events = box.backend.exec(box.id, ["yes"], env={}, workdir=WORKSPACE, timeout_seconds=30)
        async with aclosing(events):
            await anext(events)
        assert await box.shell("echo still here") == "still here\n"

    async def test_many_commands_at_once(self, box: Box) -> None:
        # Each command is two processes, its supervisor and itself, and all of them count against 64.
        results = await asyncio.gather(*(box.run(["echo", str(n)]) for n in range(24)))
        assert [result.text for result in results] == [f"{n}\n" for n in range(24)]

    async def test_files(self, box: Box) -> None:
        data = bytes(range(256)) * 4_096
        entry = await box.backend.write_file(box.id, f"{WORKSPACE}/d/e/f.bin", data, 0o640)
        assert (entry.name, entry.path) == ("f.bin", "/workspace/d/e/f.bin")
        assert (entry.type, entry.size, entry.mode) == ("file", len(data), 0o640)
        assert await box.get("d/e/f.bin") == data
        await box.put("d/e/f.bin", b"")
        assert await box.get("d/e/f.bin") == b""
        listed = await box.backend.list_files(box.id, f"{WORKSPACE}/d")
        assert [(e.name, e.path, e.type) for e in listed] == [("e", "/workspace/d/e", "directory")]

    async def test_names_are_bytes(self, box: Box) -> None:
        names = sorted([".hidden", "a b", "q\"'", "new\nline", "100%2F", "\N{PARTY POPPER}", os.fsdecode(b"\xff\xfe")])
        for name in names:
            await box.put(name, name.encode("utf-8", "surrogateescape"))
        listed = await box.backend.list_files(box.id, WORKSPACE)
        assert sorted(entry.name for entry in listed) == names
        for name in names:
            assert await box.get(name) == name.encode("utf-8", "surrogateescape")

    async def test_what_cannot_be_read(self, box: Box) -> None:
        await box.put("f", b"12345")
        with pytest.raises(NotFoundError):
            await box.get("none")
        with pytest.raises(InvalidRequestError):
            await box.get("/workspace")
        with pytest.raises(PayloadTooLargeError):
            await box.backend.read_file(box.id, f"{WORKSPACE}/f", 4)
        assert await box.backend.read_file(box.id, f"{WORKSPACE}/f", 5) == b"12345"
        with pytest.raises(NotFoundError):
            await box.backend.list_files(box.id, f"{WORKSPACE}/none")
        with pytest.raises(InvalidRequestError):
            await box.backend.list_files(box.id, f"{WORKSPACE}/f")

    async def test_what_cannot_be_written(self, box: Box) -> None:
        await box.put("d/f", b"")
        for path in ("/workspace/d", "/workspace/d/f/x", "/etc/passwd", "/tmp/x", "/workspace", "/workspace/../etc/x"):
            with pytest.raises((InvalidRequestError, ForbiddenError)):
                await box.backend.write_file(box.id, path, b"x", 0o644)
        with pytest.raises(NotFoundError):
            await box.get("/tmp/x")

    async def test_export_and_import_give_the_same_tree(self, backend: Backend, box: Box) -> None:
        await box.put("a/b.txt", b"hello", 0o755)
        await box.put("empty", b"")
        archive = await box.export()
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            assert {"a", "a/b.txt", "empty"} <= {info.name.removesuffix("/") for info in tar}
        other = await self.new_box(backend)
        await other.load(archive)
        assert await other.get("a/b.txt") == b"hello"
        before = await backend.list_files(box.id, f"{WORKSPACE}/a")
        assert await backend.list_files(other.id, f"{WORKSPACE}/a") == before

    async def test_export_and_import_stop_at_the_limit(self, backend: Backend, box: Box) -> None:
        await box.put("f", b"x" * 100_000)

        async def drop(data: bytes) -> None:
            pass

        with pytest.raises(PayloadTooLargeError):
            await backend.export_workspace(box.id, drop, 99_999)
        report = await backend.export_workspace(box.id, drop, 100_000)
        assert report.file_bytes == 100_000
        other = await self.new_box(backend)
        with pytest.raises(PayloadTooLargeError):
            await other.load(await box.export(), max_bytes=99_999)

    async def test_destroy_twice_and_the_unknown(self, backend: Backend, box: Box) -> None:
        assert await backend.list_ids() == [box.id]
        assert await backend.is_running(box.id)
        await backend.destroy(box.id)
        assert not await backend.is_running(box.id)
        await backend.destroy(box.id)
        await backend.destroy("sbnever-1")
        assert not await backend.is_running("sbnever-1")
        for operation in (
            box.run(["true"]),
            box.get("f"),
            box.put("f", b""),
            backend.list_files(box.id, WORKSPACE),
            box.export(),
            backend.inspect(box.id),
        ):
            with pytest.raises(NotFoundError):
                await operation
        async with asyncio.timeout(20):
            while await backend.list_ids():
                await asyncio.sleep(0.05)

    async def test_destroy_under_a_running_command(self, backend: Backend, box: Box) -> None:
        events = backend.exec(box.id, ["sleep", "300"], env={}, workdir=WORKSPACE, timeout_seconds=300)
        task = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.2)
        await backend.destroy(box.id)
        with pytest.raises(SandboxError):
            async with asyncio.timeout(60):
                await task
        await events.aclose()

    async def test_environments_do_not_share(self, backend: Backend, box: Box) -> None:
        other = await self.new_box(backend)
        await box.put("mine", b"1")
        assert await backend.list_files(other.id, WORKSPACE) == []
        await backend.destroy(other.id)
        assert await box.get("mine") == b"1"

    async def test_an_absent_capability_is_refused_before_any_effect(self, backend: Backend) -> None:
        for policy in {"full", "allowlist"} - backend.capabilities.network:
            with pytest.raises(UnsupportedError):
                await self.new_box(backend, network=policy)
        assert await backend.list_ids() == []

    async def test_inspect_tells_what_was_asked(self, backend: Backend, box: Box) -> None:
        info = await backend.inspect(box.id)
        assert info.id == box.id
        assert info.running


__all__ = ["MAX_BYTES", "BackendSuite", "Box", "ExecExit", "SuiteBase"]
