"""Files in full by both SDKs."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent_sandbox import errors
from agent_sandbox.client import file_requests
from agent_sandbox.client.file_requests import PIECE_BYTES
from agent_sandbox.client.local_files import gathered
from tests.unit.client_pair import Awaited, Scripted, all_of, json_reply, open_client, sandbox_of
from tests.unit.server_harness import KEY, Running, running, settings_for

LIMIT = 100_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_for(tmp_path_factory.mktemp("server"), max_file_bytes=LIMIT)) as it:
        yield it


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    which: str = request.param
    return which


@pytest_asyncio.fixture
async def sandbox(server: Running, kind: str) -> AsyncIterator[Any]:
    async with open_client(kind, server.url, KEY) as client, await client.create() as it:
        yield it


async def test_names_are_made_looked_at_moved_and_removed(sandbox: Any) -> None:
    made = await sandbox.mkdir("a/b", mode=0o750)
    assert (made.path, made.type, made.mode) == ("/workspace/a/b", "directory", "750")
    await sandbox.write_file("a/b/odd \udcff", "12345", mode=0o600)
    seen = await sandbox.stat("a/b/odd \udcff")
    assert (seen.name, seen.size, seen.mode, seen.type) == ("odd \udcff", 5, "600", "file")
    assert (await sandbox.chmod("a/b/odd \udcff", 0o4711)).mode == "4711"
    assert (await sandbox.move("a/b/odd \udcff", "a/new")).path == "/workspace/a/new"
    await sandbox.write_file("other", "x")
    with pytest.raises(errors.ConflictError):
        await sandbox.move("other", "a/new", replace=False)
    with pytest.raises(errors.ConflictError):
        await sandbox.mkdir("a", parents=False)
    with pytest.raises(errors.ConflictError):
        await sandbox.remove("a")
    assert await sandbox.remove("a", recursive=True) == 3
    with pytest.raises(errors.NotFoundError):
        await sandbox.stat("a")


async def test_a_part_of_a_file(sandbox: Any) -> None:
    await sandbox.write_file("f", b"0123456789")
    assert await sandbox.read_file("f", offset=3, length=4) == b"3456"
    assert await sandbox.read_file("f", offset=8) == b"89"
    assert await sandbox.read_file("f", offset=8, length=100) == b"89"
    assert await sandbox.read_file("f", length=1) == b"0"
    assert await sandbox.read_file("f", offset=10) == b""
    assert await sandbox.read_file("f", offset=1000, length=5) == b""
    for wrong in ({"offset": -1}, {"length": 0}):
        with pytest.raises(errors.InvalidRequestError):
            await sandbox.read_file("f", **wrong)


async def test_a_server_that_does_not_know_parts_is_found_out(kind: str) -> None:
    async with open_client(kind, Scripted(json_reply("whole")).url) as client:
        with pytest.raises(errors.ValidationError, match="206"):
            await sandbox_of(client).read_file("f", offset=5)


async def test_a_file_goes_up_and_down_by_path_and_by_open_file(sandbox: Any, tmp_path: Path) -> None:
    content = os.urandom(90_000)
    (tmp_path / "in").write_bytes(content)
    for source in (tmp_path / "in", str(tmp_path / "in"), io.BytesIO(content), iter([content[:7], content[7:]])):
        info = await sandbox.upload("up", source, mode=0o640)
        assert (info.path, info.size) == ("/workspace/up", 90_000)
        assert (await sandbox.stat("up")).mode == "640"
        (tmp_path / "out").write_text("old")
        assert await sandbox.download("up", tmp_path / "out") == 90_000
        assert (tmp_path / "out").read_bytes() == content
        opened = io.BytesIO()
        assert await sandbox.download("up", opened) == 90_000
        assert opened.getvalue() == content
        await sandbox.remove("up")
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


async def test_a_file_that_is_too_large_for_one_request_comes_in_parts(
    sandbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_requests, "PART_BYTES", 50_000)
    content = os.urandom(LIMIT * 2 + 1)
    await sandbox.upload_archive("/workspace", io.BytesIO(tar_of({"big": content})))
    with pytest.raises(errors.PayloadTooLargeError):
        await sandbox.read_file("big")
    assert await sandbox.download("big", tmp_path / "big") == len(content)
    assert (tmp_path / "big").read_bytes() == content


async def test_a_file_that_changes_between_the_parts_is_a_conflict(
    sandbox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_requests, "PART_BYTES", 90_000)
    await sandbox.upload_archive("/workspace", io.BytesIO(tar_of({"big": bytes(LIMIT + 1)})))

    class Meddling(io.BytesIO):
        def write(self, data: Any) -> int:
            inner = sandbox.inner if isinstance(sandbox, Awaited) else None
            if inner is not None:
                inner.write_file("big", bytes(LIMIT - 1))
            else:
                asyncio.run_coroutine_threadsafe(sandbox.write_file("big", bytes(LIMIT - 1)), loop).result(10)
            return super().write(data)

    loop = asyncio.get_running_loop()
    with pytest.raises(errors.ConflictError, match="changed"):
        await sandbox.download("big", Meddling())


async def test_what_fails_leaves_a_local_file_as_it_was(sandbox: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    with pytest.raises(errors.NotFoundError):
        await sandbox.download("nothing", tmp_path / "f")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(errors.PayloadTooLargeError):
        await sandbox.upload("f", io.BytesIO(bytes(LIMIT + 1)))
    with pytest.raises(FileNotFoundError):
        await sandbox.upload("f", tmp_path / "nothing")

    def broken() -> Iterator[bytes]:
        yield b"some"
        raise KeyError("the caller's own")

    with pytest.raises(KeyError):
        await sandbox.upload("f", broken())
    assert await sandbox.list_files() == []
    assert (await sandbox.exec("true")).ok, "the connection must not be left broken"


def tar_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


async def test_directories_as_archives(sandbox: Any, tmp_path: Path) -> None:
    await sandbox.upload_archive("in", io.BytesIO(tar_of({"a": b"A", "sub/b": b"B"})))
    assert await sandbox.read_file("in/sub/b") == b"B"
    size = await sandbox.download_archive("in", tmp_path / "out.tar")
    assert size == (tmp_path / "out.tar").stat().st_size
    with tarfile.open(tmp_path / "out.tar") as tar:
        assert {entry.name for entry in tar if entry.isfile()} == {"a", "sub/b"}
    data = b"".join(await all_of(sandbox.stream_archive("in")))
    await sandbox.upload_archive("again", iter([data[:700], data[700:]]))
    assert await sandbox.read_file("again/a") == b"A"
    with pytest.raises(errors.NotFoundError):
        await sandbox.download_archive("nothing", io.BytesIO())
    with pytest.raises(errors.InvalidRequestError):
        await sandbox.upload_archive("bad", io.BytesIO(b"x" * 5000))


async def test_a_watch_tells_what_changes_until_it_is_closed(sandbox: Any) -> None:
    async with aclosing(sandbox.watch()) as events:
        assert (await anext(aiter(events))).type == "ready"
        await sandbox.write_file("f", "x")
        async for event in events:
            if event.path == "/workspace/f":
                break
        assert event.type in ("created", "modified", "moved")
        await sandbox.remove("f")
        async for event in events:
            if event.type == "removed":
                break
        assert (event.path, event.directory) == ("/workspace/f", False)
    with pytest.raises(errors.NotFoundError):
        await all_of(sandbox.watch("nothing"))


def test_small_pieces_are_joined_and_none_is_lost() -> None:
    pieces = [bytes([number % 256]) * (number % 700) for number in range(3000)]
    joined = list(gathered(iter(pieces)))
    assert b"".join(joined) == b"".join(pieces)
    assert [len(piece) >= PIECE_BYTES for piece in joined] == [True] * (len(joined) - 1) + [False]
    assert list(gathered([b"", b""])) == []
