"""Kept commands, standard input and terminals by both SDKs."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from agent_sandbox import errors
from agent_sandbox.client import ReplyLostError, exec_requests
from agent_sandbox.installing import remedy
from tests.unit.client_pair import EXEC, STREAM, Scripted, all_of, chunk, json_reply, open_client, sandbox_of
from tests.unit.server_harness import KEY, Running, running, settings_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_for(tmp_path_factory.mktemp("server"))) as it:
        yield it


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    which: str = request.param
    return which


@pytest_asyncio.fixture
async def sandbox(server: Running, kind: str) -> AsyncIterator[Any]:
    async with open_client(kind, server.url, KEY) as client, await client.create() as it:
        yield it


def text_of(events: list[Any], stream: str = "stdout") -> bytes:
    return b"".join(event.raw for event in events if event.type == stream)


async def test_a_command_is_kept_with_its_output(sandbox: Any) -> None:
    execution = await sandbox.start_exec(["sh", "-c", "echo out; echo err >&2; false"], tag="mine", env={"A": "b"})
    assert execution.id
    info = await execution.wait()
    assert (info.status, info.exit_code, info.signal, info.tag) == ("exited", 1, None, "mine")
    events = await all_of(execution.output())
    assert (text_of(events), text_of(events, "stderr"), events[-1].exit_code) == (b"out\n", b"err\n", 1)
    assert text_of(await all_of(execution.output(2, follow=False))) == b"t\n"
    assert [one.id for one in await sandbox.execs()] == [execution.id]
    assert (await sandbox.get_exec(execution.id)).info == (await execution.refresh()).info
    await execution.delete()
    assert await sandbox.execs() == []
    with pytest.raises(errors.NotFoundError):
        await sandbox.get_exec(execution.id)
    with pytest.raises(errors.NotFoundError):
        await all_of(execution.output())


async def test_output_is_exact(sandbox: Any) -> None:
    content = bytes(range(256)) * 20
    await sandbox.write_file("f", content)
    execution = await sandbox.start_exec(["cat", "f"])
    assert text_of(await all_of(execution.output())) == content
    assert text_of(await all_of(execution.output(100, follow=False))) == content[100:]


async def test_reading_without_following_ends_where_the_output_is(sandbox: Any) -> None:
    execution = await sandbox.start_exec("echo a; sleep 60")
    while not (await execution.refresh()).info.cursor:
        await asyncio.sleep(0.01)
    events = await all_of(execution.output(follow=False))
    assert [event.type for event in events] == ["stdout"]
    assert await execution.signal("KILL") >= 1
    info = await execution.wait()
    assert (info.exit_code, info.signal) == (None, 9)
    with pytest.raises(errors.NotFoundError):
        await execution.signal(15)


async def test_a_program_that_is_not_there_has_exited(sandbox: Any) -> None:
    info = (await sandbox.start_exec(["nothing"])).info
    assert (info.status, info.exit_code) == ("exited", 127)
    assert "nothing" in info.message
    execution = await sandbox.start_exec(["nothing"], detach=False)
    (event,) = [event for event in await all_of(execution.output()) if event.type != "started"]
    assert (event.type, event.exit_code) == ("exit", 127)


async def test_input_is_sent_in_parts_and_ends(sandbox: Any) -> None:
    execution = await sandbox.start_exec(["cat"], stdin=True)
    assert await execution.write_stdin(b"one \xff") == 5
    assert await execution.write_stdin("zwei ü") == 7
    assert await execution.write_stdin(iter([b"3", b"4"])) == 2
    await execution.close_stdin()
    assert text_of(await all_of(execution.output())) == b"one \xffzwei \xc3\xbc34"
    with pytest.raises(errors.NotFoundError):
        await execution.write_stdin(b"late")


@pytest.mark.parametrize(
    ("stdin", "out"),
    [
        (b"bytes", "bytes"),
        ("tëxt", "tëxt"),
        (b"", ""),
        (io.BytesIO(b"file" * 100_000), "file" * 100_000),
        ([b"a", b"b", b"c"], "abc"),
    ],
)
async def test_exec_with_input(sandbox: Any, stdin: Any, out: str) -> None:
    if hasattr(stdin, "seek"):
        stdin.seek(0)
    done = await sandbox.exec(["cat"], stdin=stdin)
    assert (done.stdout, done.exit_code, done.truncated, done.ok) == (out, 0, False, True)


async def test_a_command_that_takes_no_input_ends_all_the_same(sandbox: Any) -> None:
    done = await sandbox.exec(["false"], stdin=b"x" * 1_000_000)
    assert done.exit_code == 1


async def test_an_error_of_the_input_ends_the_command(sandbox: Any) -> None:
    def broken() -> Iterator[bytes]:
        yield b"some"
        raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="own"):
        await sandbox.exec(["cat"], stdin=broken(), timeout_seconds=30)
    for execution in await sandbox.execs():
        assert (await execution.wait()).status == "exited"


async def test_long_output_is_cut_at_the_limit(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_requests, "MAX_OUTPUT_BYTES", 100)
    done = await sandbox.exec(["cat"], stdin=b"x" * 1000)
    assert (done.stdout, done.truncated) == ("x" * 100, True)


async def test_closing_an_attached_output_ends_the_command_and_a_detached_one_does_not(sandbox: Any) -> None:
    attached = await sandbox.start_exec("echo a; sleep 60", detach=False)
    detached = await sandbox.start_exec("echo a; sleep 60")
    for execution in (attached, detached):
        async with aclosing(execution.output()) as events:
            async for event in events:
                if event.type == "stdout":
                    break
    assert (await attached.wait()).status == "exited"
    assert (await detached.refresh()).info.status == "running"


async def test_the_same_key_starts_one_command(sandbox: Any) -> None:
    first = await sandbox.start_exec(["true"], idempotency_key=sandbox.id)
    second = await sandbox.start_exec(["true"], idempotency_key=sandbox.id)
    assert first.id == second.id
    assert len(await sandbox.execs()) == 1


def line(**event: Any) -> bytes:
    return chunk(json.dumps(event).encode() + b"\n")


OUT = {"type": "stdout", "cursor": 2, "data": "ab"}
EXIT = {"type": "exit", "exit_code": 0}


async def execution_of(client: Any, *replies: list[bytes]) -> Any:
    return await sandbox_of(client).get_exec("e1")


async def test_reading_goes_on_behind_the_last_byte_that_came(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_requests, "RECONNECT_PAUSES", (0.01, 0.01))
    shutdown = line(type="error", code="backend_error", message="the server is ending")
    server = Scripted(
        json_reply(EXEC),
        [STREAM, line(**OUT)],
        [],
        [STREAM, line(type="gap", bytes=3, cursor=5), line(type="stderr", data_b64="/w==", cursor=6), shutdown],
        [STREAM, line(type="stdout", data="z", cursor=7), line(**EXIT), b"0\r\n\r\n"],
    )
    async with open_client(kind, server.url) as client:
        events = await all_of((await execution_of(client)).output())
    assert [(event.type, event.raw) for event in events] == [
        ("stdout", b"ab"),
        ("gap", b""),
        ("stderr", b"\xff"),
        ("stdout", b"z"),
        ("exit", b""),
    ]
    asked = [request.split(b" ")[1].decode() for request in server.asked[1:]]
    path = "/v1/sandboxes/sb1/execs/e1/output?cursor={}&follow=true"
    assert asked == [path.format(at) for at in (0, 2, 2, 6)]


async def test_an_attached_command_is_read_on_by_its_id(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_requests, "RECONNECT_PAUSES", (0.01,))
    server = Scripted(
        [STREAM, line(type="started", id="e9", pid=3), line(**OUT)],
        [STREAM, line(type="stdout", data="c", cursor=3), line(**EXIT), b"0\r\n\r\n"],
    )
    async with open_client(kind, server.url) as client:
        execution = await sandbox_of(client).start_exec("x", detach=False)
        assert (execution.id, execution.info.pid) == ("e9", 3)
        assert text_of(await all_of(execution.output())) == b"abc"
    assert b"/execs/e9/output?cursor=2&follow=true" in server.asked[1]


async def test_reading_gives_up_at_last(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_requests, "RECONNECT_PAUSES", (0.01, 0.01))
    server = Scripted(json_reply(EXEC), *[[STREAM, b"0\r\n\r\n"]] * 3)
    async with open_client(kind, server.url) as client:
        with pytest.raises(ReplyLostError, match="unknown"):
            await all_of((await execution_of(client)).output())
    assert len(server.asked) == 4


async def test_an_answer_that_the_command_is_gone_is_the_end(kind: str) -> None:
    gone = json_reply({"error": {"code": "not_found", "message": "no"}}, b"404 Not Found")
    server = Scripted(json_reply(EXEC), [STREAM, line(**OUT)], gone)
    async with open_client(kind, server.url) as client:
        with pytest.raises(errors.NotFoundError):
            await all_of((await execution_of(client)).output())


async def test_a_line_of_broken_base64_is_a_typed_error(kind: str) -> None:
    server = Scripted(json_reply(EXEC), [STREAM, line(type="stdout", data_b64="%%", cursor=1), line(**EXIT)])
    async with open_client(kind, server.url) as client:
        events = await all_of((await execution_of(client)).output())
    with pytest.raises(errors.ValidationError):
        events[0].raw  # noqa: B018


def exit_of(terminal: Any) -> Any:
    return terminal.exit


async def read_until(terminal: Any, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        data = await terminal.read()
        assert data, seen
        seen += data
    return seen


async def test_a_terminal_has_a_size_takes_keys_and_ends(sandbox: Any) -> None:
    async with await sandbox.terminal("stty size; cat", size=(30, 100)) as terminal:
        await read_until(terminal, b"30 100")
        await terminal.write(b"typed\r")
        await read_until(terminal, b"typed")
        assert terminal.id
        assert exit_of(terminal) is None
        (execution,) = await sandbox.execs()
        assert (execution.id, execution.info.tty) == (terminal.id, True)
        await terminal.write(b"\x03")
        while await terminal.read():
            pass
        assert terminal.exit is not None
        assert exec_requests.exit_status(terminal.exit) == 130


async def test_closing_a_terminal_ends_its_command_but_not_that_of_an_attached_one(sandbox: Any) -> None:
    own = await sandbox.terminal("echo a; sleep 60")
    await read_until(own, b"a")
    await own.close()
    (execution,) = await sandbox.execs()
    assert (await execution.wait()).status == "exited"
    kept = await sandbox.start_exec("stty size; sleep 60", tty=(24, 80))
    attached = await sandbox.attach_terminal(kept.id, size=(10, 20))
    await attached.resize(11, 22)
    await read_until(attached, b"24 80")
    await attached.close()
    assert (await kept.refresh()).info.status == "running"


async def test_a_terminal_that_cannot_be_had_is_a_typed_error(sandbox: Any, kind: str, server: Running) -> None:
    with pytest.raises(errors.NotFoundError):
        await sandbox.attach_terminal("nothing")
    with pytest.raises(errors.InvalidRequestError):
        await sandbox.terminal("true", workdir="/nothing")
    async with open_client(kind, server.url, "wrong-key-0123456789") as stranger:
        with pytest.raises(errors.UnauthorizedError):
            await sandbox_of(stranger).terminal()
    with pytest.raises(errors.NotFoundError):
        async with open_client(kind, server.url, KEY) as client:
            await sandbox_of(client).terminal()


async def test_no_other_terminal_is_offered_by_a_server_that_is_none(kind: str) -> None:
    async with open_client(kind, Scripted(json_reply({})).url) as client:
        with pytest.raises((ReplyLostError, errors.BackendError)):
            await sandbox_of(client).terminal()


async def test_without_the_library_the_extra_is_named(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("websockets", "websockets.sync.client", "websockets.asyncio.client"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.InvalidRequestError, match=re.escape(remedy("terminal"))):
        await sandbox.terminal()
