"""Commands as objects. Needs of the guest ``sh``, ``cat``, ``echo``, ``sleep``, ``stty``, ``tee`` and ``true`` only,
and what :meth:`ExecObjectSuite.out_of_memory` names.

Every value comes from ``backends/base.py`` and ``spec/wire.md``. Numbers are the fault list's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.guest_backend import GuestBackend
from agent_sandbox.conformance.box import Box
from agent_sandbox.conformance.suite import SuiteBase
from agent_sandbox.errors import ConflictError, ConnectionLostError, InvalidRequestError, NotFoundError
from agent_sandbox.types import (
    WORKSPACE,
    AttachEvent,
    ExecExit,
    ExecGap,
    ExecOutput,
    ExecRequest,
    ExecStarted,
    TerminalSize,
)

RING = 1024 * 1024
SIZE = TerminalSize(24, 80)


def request(command: str | list[str], id: str, **changes: Any) -> ExecRequest:
    """A command that is kept: a shell's (text) or a program's (list)."""
    argv = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
    return dataclasses.replace(ExecRequest(argv, {}, WORKSPACE, 60.0, id), **changes)


@dataclasses.dataclass
class Seen:
    """What a reader was told, in order."""

    started: int | None = None
    data: bytes = b""
    stderr: bytes = b""
    gaps: int = 0
    end: ExecExit | None = None


async def watch(events: AsyncGenerator[AttachEvent, None], seconds: float = 30.0) -> Seen:
    """Read to the end. ``data`` is both streams in the order in which they came."""
    seen = Seen()
    async with asyncio.timeout(seconds), aclosing(events):
        async for event in events:
            assert seen.end is None, "something came after the exit"
            match event:
                case ExecStarted():
                    assert seen.started is None
                    assert not seen.data
                    seen.started = event.pid
                case ExecOutput():
                    assert event.data
                    seen.data += event.data
                    seen.stderr += event.data if event.stream == "stderr" else b""
                case ExecGap():
                    seen.gaps += event.bytes
                case ExecExit():
                    seen.end = event
    return seen


async def attached(box: Box, id: str, **options: Any) -> Seen:
    """Attach and read to the end."""
    return await watch(box.backend.attach_exec(box.id, id, **options))


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    """A byte source."""
    for piece in data:
        yield piece


async def ended(box: Box, id: str, seconds: float = 60.0) -> ExecExit:
    """The exit of a command, once it has ended."""
    async with asyncio.timeout(seconds):
        while (status := await box.backend.exec_status(box.id, id)).running:
            await asyncio.sleep(0.05)
    assert status.exit is not None
    return status.exit


class ExecObjectSuite(SuiteBase):
    """A command that is kept: listed, attached to, fed, signalled, forgotten."""

    async def test_a_kept_command_says_that_it_starts_and_is_known_after_its_end(self, box: Box) -> None:
        before = time.time()
        command = request("echo out; sleep 0.3; echo err >&2; exit 3", "first", tag="größe")
        seen = await watch(box.backend.open_exec(box.id, command))
        assert (seen.data, seen.stderr) == (b"out\nerr\n", b"err\n")
        assert seen.end is not None
        assert (seen.end.code, seen.end.signal, seen.end.timed_out) == (3, None, False)
        status = await box.backend.exec_status(box.id, "first")
        assert (status.id, status.tag, status.argv) == ("first", "größe", command.argv)
        assert (status.running, status.tty, status.first, status.cursor) == (False, False, 0, 8)
        assert status.exit == seen.end
        assert status.pid == seen.started
        assert before - 2 < status.started_at < time.time() + 2
        assert (await attached(box, "first")).data == seen.data

    async def test_a_detached_command_runs_without_a_reader(self, box: Box) -> None:
        assert await box.backend.start_exec(box.id, request("echo out; exit 4", "a")) > 1
        seen = await attached(box, "a")
        assert (seen.started, seen.data, seen.gaps) == (None, b"out\n", 0)
        assert seen.end == await ended(box, "a")
        assert seen.end.code == 4

    async def test_a_cursor_is_exact_to_the_byte(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request("echo 12345; sleep 0.3; echo 6789 >&2; sleep 0.3; echo -n x", "a"))
        await ended(box, "a")
        whole = b"12345\n6789\nx"
        for cursor in range(len(whole) + 1):
            seen = await attached(box, "a", cursor=cursor)
            assert (seen.data, seen.gaps) == (whole[cursor:], 0)
            assert seen.stderr == b"12345\n6789\n"[max(cursor, 6) :]
            assert seen.end is not None
        with pytest.raises(InvalidRequestError):
            await attached(box, "a", cursor=len(whole) + 1)

    async def test_without_following_an_attachment_ends_where_the_output_does(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request("echo now; sleep 30; echo later", "a"))
        async with asyncio.timeout(10):
            while (await box.backend.exec_status(box.id, "a")).cursor < 4:
                await asyncio.sleep(0.02)
        seen = await attached(box, "a", follow=False)
        assert (seen.data, seen.end) == (b"now\n", None)
        assert (await box.backend.exec_status(box.id, "a")).running

    async def test_several_readers_get_the_same(self, box: Box) -> None:
        script = "".join(f"echo {n}; sleep 0.01;" for n in range(40))
        await box.backend.start_exec(box.id, request(script, "a"))
        seen = await asyncio.gather(*(attached(box, "a") for _ in range(8)))
        whole = "".join(f"{n}\n" for n in range(40)).encode()
        assert {(reader.data, reader.gaps) for reader in seen} == {(whole, 0)}

    async def test_f14_a_ring_keeps_the_newest_and_says_what_is_missing(self, box: Box) -> None:
        data = b"".join(b"%015d\n" % n for n in range(200_000))
        await box.put("f", data)
        await box.backend.start_exec(box.id, request(["cat", f"{WORKSPACE}/f"], "a"))
        await ended(box, "a")
        status = await box.backend.exec_status(box.id, "a")
        assert (status.first, status.cursor) == (len(data) - RING, len(data))
        seen = await attached(box, "a", cursor=7)
        assert (seen.gaps, seen.data) == (len(data) - RING - 7, data[-RING:])
        seen = await attached(box, "a", cursor=status.first)
        assert (seen.gaps, seen.data) == (0, data[-RING:])

    async def test_f14_a_slow_attachment_is_told_of_its_gap_and_holds_nobody_back(self, box: Box) -> None:
        data = b"".join(b"%015d\n" % n for n in range(400_000))
        await box.put("f", data)
        await box.backend.start_exec(box.id, request("sleep 0.5; cat f", "a"))
        events = box.backend.attach_exec(box.id, "a")
        async with aclosing(events):
            position, gaps = 0, 0
            async for event in events:
                if isinstance(event, ExecOutput):
                    assert event.data == data[position : position + len(event.data)]
                    position += len(event.data)
                elif isinstance(event, ExecGap):
                    position, gaps = position + event.bytes, gaps + event.bytes
                if 0 < position < len(data):
                    await ended(box, "a")
        assert position == len(data)
        assert 0 < gaps <= len(data) - RING

    async def test_the_starter_gets_everything(self, box: Box) -> None:
        data = bytes(range(256)) * 16_384
        await box.put("f", data)
        events = box.backend.open_exec(box.id, request(["cat", f"{WORKSPACE}/f"], "a"))
        async with aclosing(events):
            assert isinstance(await anext(events), ExecStarted)
            await asyncio.sleep(0.5)
            assert (await box.backend.exec_status(box.id, "a")).running, "a slow starter holds its command back"
            seen = await watch(events)
        assert (seen.data, seen.gaps) == (data, 0)

    async def test_f05_a_lost_wire_leaves_the_command_alone(self, box: Box) -> None:
        assert isinstance(box.backend, GuestBackend)
        events = box.backend.open_exec(box.id, request("echo one; sleep 1; echo two; exit 5", "a"))
        async with aclosing(events):
            assert isinstance(await anext(events), ExecStarted)
            assert await anext(events) == ExecOutput("stdout", b"one\n")
            await box.backend.drop_guest(box.id)
            with pytest.raises(ConnectionLostError):
                await anext(events)
        assert (await box.backend.exec_status(box.id, "a")).running
        seen = await attached(box, "a")
        assert seen.data == b"one\ntwo\n"
        assert seen.end is not None
        assert seen.end.code == 5

    async def test_f05_leaving_the_starters_stream_ends_the_command(self, box: Box) -> None:
        events = box.backend.open_exec(box.id, request("echo go; sleep 60", "a"))
        async with aclosing(events):
            await anext(events)
            await anext(events)
        assert (await ended(box, "a")).signal == 9

    async def test_leaving_an_attachment_changes_nothing(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request("echo go; sleep 1; echo done", "a"))
        events = box.backend.attach_exec(box.id, "a")
        async with aclosing(events):
            await anext(events)
        assert (await attached(box, "a")).data == b"go\ndone\n"

    async def test_a_detached_command_outlives_the_server(
        self, backend: Backend, box: Box, tmp_path: pathlib.Path
    ) -> None:
        await backend.start_exec(box.id, request("sleep 1; cat; exit 6", "a", stdin=True))
        other = await self.reopened(backend, tmp_path)
        assert [status.id for status in await other.list_execs(box.id)] == ["a"]
        assert await other.write_stdin(box.id, "a", pieces(b"after the restart")) == 17
        await other.close_stdin(box.id, "a")
        seen = await attached(Box(other, box.id, box.spec), "a")
        assert seen.data == b"after the restart"
        assert seen.end is not None
        assert seen.end.code == 6

    async def test_f06_the_deadline_of_a_detached_command_holds(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request("echo before; sleep 300", "a", timeout_seconds=2))
        seen = await attached(box, "a")
        assert seen.data == b"before\n"
        assert seen.end is not None
        assert (seen.end.signal, seen.end.timed_out) == (9, True)

    async def test_f07_what_cannot_start_is_an_object_that_has_ended(self, box: Box) -> None:
        seen = await watch(box.backend.open_exec(box.id, request(["no-such-program"], "a")))
        assert (seen.started, seen.data) == (None, b"")
        await box.backend.start_exec(box.id, request(["no-such-program"], "b"))
        for end in (seen.end, await ended(box, "a"), await ended(box, "b"), (await attached(box, "b")).end):
            assert end is not None
            assert (end.code, "no-such-program" in end.message) == (127, True)

    def out_of_memory(self) -> Sequence[str]:
        """A program that asks for more memory than there is until it is killed."""
        return ["python3", "-c", "len(b'x' * 2**31)"]

    async def test_f08_why_a_command_was_killed_is_known_as_long_as_its_end(self, box: Box) -> None:
        plain = (await box.run([*self.out_of_memory()])).exit
        assert (plain.signal, plain.oom_killed in (True, None)) == (9, True)
        otherwise = None if plain.oom_killed is None else False
        for number, (program, expected) in enumerate(
            ((self.out_of_memory(), plain.oom_killed), (["sh", "-c", "kill -9 $$"], otherwise))
        ):
            opened, detached = f"opened-{number}", f"detached-{number}"
            seen = [(await watch(box.backend.open_exec(box.id, request([*program], opened)))).end]
            await box.backend.start_exec(box.id, request([*program], detached))
            for id in (opened, detached):
                seen += [(await attached(box, id)).end, await ended(box, id)]
            listed = {status.id: status.exit for status in await box.backend.list_execs(box.id)}
            seen += [listed[opened], listed[detached]]
            assert [end and end.oom_killed for end in seen] == [expected] * len(seen), program

    async def test_f15_a_missing_workdir_leaves_no_object(self, box: Box) -> None:
        wrong = request("true", "a", workdir="/no/such/place")
        with pytest.raises(InvalidRequestError):
            await watch(box.backend.open_exec(box.id, wrong))
        with pytest.raises(InvalidRequestError):
            await box.backend.start_exec(box.id, wrong)
        assert await box.backend.list_execs(box.id) == []
        await box.backend.start_exec(box.id, request("true", "a"))

    async def test_an_id_is_taken_until_it_is_forgotten(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request("sleep 60", "a"))
        with pytest.raises(ConflictError):
            await box.backend.start_exec(box.id, request("true", "a"))
        with pytest.raises(ConflictError):
            await watch(box.backend.open_exec(box.id, request("true", "a")))
        await box.backend.forget_exec(box.id, "a")
        await box.backend.start_exec(box.id, request("exit 7", "a"))
        assert (await ended(box, "a")).code == 7
        with pytest.raises(ConflictError):
            await box.backend.start_exec(box.id, request("true", "a"))

    @pytest.mark.parametrize("id", ["", "A", "a b", "a/b", "x" * 65, "a\n", "ä"])
    async def test_ids_that_cannot_be(self, box: Box, id: str) -> None:
        for wrong in (
            box.backend.exec_status(box.id, id),
            box.backend.signal_exec(box.id, id, 15),
            box.backend.forget_exec(box.id, id),
            box.backend.close_stdin(box.id, id),
            box.backend.write_stdin(box.id, id, pieces(b"x")),
            box.backend.resize_exec(box.id, id, SIZE),
            attached(box, id),
        ):
            with pytest.raises(NotFoundError):
                await wrong
        with pytest.raises(InvalidRequestError):
            await box.backend.start_exec(box.id, request("true", id))
        with pytest.raises(InvalidRequestError):
            await box.backend.start_exec(box.id, request("true", "a", tag="x" * 257))

    async def test_standard_input_reaches_the_command_and_ends(self, box: Box) -> None:
        data = os.urandom(500_000)
        await box.backend.start_exec(box.id, request(["tee", f"{WORKSPACE}/copy"], "a", stdin=True))
        assert await box.backend.write_stdin(box.id, "a", pieces(data[:1], data[1:300_000])) == 300_000
        assert await box.backend.write_stdin(box.id, "a", pieces()) == 0
        assert await box.backend.write_stdin(box.id, "a", pieces(data[300_000:])) == 200_000
        assert (await box.backend.exec_status(box.id, "a")).running
        await box.backend.close_stdin(box.id, "a")
        seen = await attached(box, "a")
        assert (seen.data, seen.end) == (data, await ended(box, "a"))
        assert await box.get("copy") == data
        with pytest.raises(NotFoundError):
            await box.backend.write_stdin(box.id, "a", pieces(b"x"))
        with pytest.raises(NotFoundError):
            await box.backend.close_stdin(box.id, "a")

    async def test_f10_standard_input_is_empty_unless_asked_for(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request("cat; sleep 60", "a"))
        with pytest.raises(NotFoundError):
            await box.backend.write_stdin(box.id, "a", pieces(b"x"))
        with pytest.raises(NotFoundError):
            await box.backend.close_stdin(box.id, "a")
        await box.backend.start_exec(box.id, request("cat; echo over", "b"))
        assert (await attached(box, "b")).data == b"over\n"

    async def test_input_that_nobody_takes_waits_for_the_deadline(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request(["sleep", "60"], "a", stdin=True, timeout_seconds=1.0))
        with pytest.raises(NotFoundError):
            async with asyncio.timeout(10):
                await box.backend.write_stdin(box.id, "a", pieces(*[bytes(65_536)] * 64))
        assert (await ended(box, "a")).timed_out

    async def test_signals(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request(["sleep", "60"], "a"))
        assert await box.backend.signal_exec(box.id, "a", 15) == 1
        assert (await ended(box, "a")).signal == 15
        with pytest.raises(NotFoundError):
            await box.backend.signal_exec(box.id, "a", 15)
        await box.backend.start_exec(box.id, request(["sleep", "60"], "b"))
        for wrong in (0, 65, 2**32):
            with pytest.raises(InvalidRequestError):
                await box.backend.signal_exec(box.id, "b", wrong)
        assert (await box.backend.exec_status(box.id, "b")).running

    async def test_forgetting_ends_what_runs(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request("sleep 60", "a"))
        reader = asyncio.ensure_future(attached(box, "a"))
        await asyncio.sleep(0.1)
        await box.backend.forget_exec(box.id, "a")
        assert await box.backend.list_execs(box.id) == []
        end = (await reader).end
        assert end is not None
        assert end.signal == 9
        with pytest.raises(NotFoundError):
            await box.backend.forget_exec(box.id, "a")
        with pytest.raises(NotFoundError):
            await attached(box, "a")

    async def test_the_list_is_in_order_and_counts(self, box: Box) -> None:
        for number in range(70):
            await box.backend.start_exec(box.id, request(["echo", str(number)], f"n{number}", tag=f"t{number}"))
            await asyncio.sleep(0.002)
        for number in range(70):
            await ended(box, f"n{number}")
        listed = await box.backend.list_execs(box.id)
        assert [(status.id, status.tag) for status in listed] == [(f"n{n}", f"t{n}") for n in range(70)]
        stats = await box.backend.guest_stats(box.id)
        assert stats.ring_bytes == sum(status.cursor - status.first for status in listed) == 10 * 2 + 60 * 3

    async def test_only_the_newest_thousand_that_ended_are_kept(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request(["sleep", "600"], "runs", timeout_seconds=600))
        for start in range(0, 1_020, 20):
            starts = (box.backend.start_exec(box.id, request(["true"], f"n{n}")) for n in range(start, start + 20))
            await asyncio.gather(*starts)
            async with asyncio.timeout(20):
                while [s.id for s in await box.backend.list_execs(box.id) if s.running] != ["runs"]:
                    await asyncio.sleep(0.01)
        listed = await box.backend.list_execs(box.id)
        assert len(listed) == 1_001
        assert listed[0].id == "runs"
        assert {status.id for status in listed} >= {f"n{n}" for n in range(40, 1_020)}

    async def test_a_long_command_line_is_started_whole_and_listed_cut(self, box: Box) -> None:
        words = ["x" * 1_000] * 300
        await box.backend.start_exec(box.id, request(["echo", "-n", *words], "a"))
        assert (await attached(box, "a")).data == " ".join(words).encode()
        shown = (await box.backend.exec_status(box.id, "a")).argv
        assert shown[:3] == ("echo", "-n", "x" * 1_000)
        assert sum(map(len, shown)) <= 4_096

    async def test_a_terminal_has_its_size(self, box: Box) -> None:
        seen = await watch(box.backend.open_exec(box.id, request(["stty", "size"], "a", tty=TerminalSize(33, 101))))
        assert seen.data.split() == [b"33", b"101"]
        assert seen.stderr == b""
        status = await box.backend.exec_status(box.id, "a")
        assert (status.tty, status.cursor) == (True, len(seen.data))
        assert b"33" not in (await watch(box.backend.open_exec(box.id, request(["stty", "size"], "b")))).data

    async def test_a_terminal_is_resized(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request("cat; stty size", "a", tty=SIZE))
        await box.backend.resize_exec(box.id, "a", TerminalSize(50, 132))
        await box.backend.close_stdin(box.id, "a")
        assert b"50 132" in (await attached(box, "a")).data
        with pytest.raises(NotFoundError):
            await box.backend.resize_exec(box.id, "a", SIZE)
        await box.backend.start_exec(box.id, request("sleep 60", "b"))
        with pytest.raises(InvalidRequestError):
            await box.backend.resize_exec(box.id, "b", SIZE)

    async def test_control_c_interrupts(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request(["cat"], "a", tty=SIZE))
        await box.backend.write_stdin(box.id, "a", pieces(b"line\n"))
        async with asyncio.timeout(10):
            while b"line" not in (await attached(box, "a", follow=False)).data:
                await asyncio.sleep(0.02)
        with suppress(NotFoundError):  # what it takes ends it, maybe before the answer
            await box.backend.write_stdin(box.id, "a", pieces(b"\x03"))
        assert (await ended(box, "a")).signal == 2

    async def test_kept_and_plain_commands_do_not_mix(self, box: Box) -> None:
        assert await box.shell("echo plain") == "plain\n"
        assert await box.backend.list_execs(box.id) == []
