"""Commands as objects on a backend that runs real programs: trees, terminals, used-up limits. Needs python3 inside."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing

from agent_sandbox.backends.guest_backend import GuestBackend
from agent_sandbox.conformance.box import Box
from agent_sandbox.conformance.execs import SIZE, attached, ended, pieces, request, watch
from agent_sandbox.conformance.suite import SuiteBase
from agent_sandbox.errors import ConnectionLostError, NotFoundError
from agent_sandbox.types import ExecOutput, ExecStarted, TerminalSize

BOMB = "import os,time\nwhile True:\n try:\n  if os.fork() == 0: time.sleep(300)\n except OSError: time.sleep(0.05)"
TERMINAL = """
import fcntl, os, signal, sys, termios, time
def resized(number, frame): os.write(1, b'resized %d %d\\n' % tuple(os.get_terminal_size()))
signal.signal(signal.SIGWINCH, resized)
tty = os.open('/dev/tty', os.O_RDWR)
print(all(os.isatty(n) for n in (0, 1, 2)), os.getsid(0) == os.getpid() == os.tcgetpgrp(tty), os.ttyname(0), flush=True)
print('on standard error', file=sys.stderr, flush=True)
while True: time.sleep(0.1)
"""


async def said(box: Box, id: str, needle: bytes, seconds: float = 60.0) -> bytes:
    """What a running command has put out, once ``needle`` is in it."""
    async with asyncio.timeout(seconds):
        while needle not in (data := (await attached(box, id, follow=False)).data):
            await asyncio.sleep(0.05)
    return data


class ExecTreeSuite(SuiteBase):
    """Objects with whole trees beneath them."""

    async def test_f05_a_lost_wire_leaves_the_whole_tree(self, box: Box) -> None:
        assert isinstance(box.backend, GuestBackend)
        events = box.backend.open_exec(box.id, request("setsid sleep 311 & sleep 311; echo end", "a"))
        async with aclosing(events):
            assert isinstance(await anext(events), ExecStarted)
            async with asyncio.timeout(60):
                while await box.processes("311") < 3:  # the shell and both
                    await asyncio.sleep(0.05)
            await box.backend.drop_guest(box.id)
            try:
                await anext(events)
                raise AssertionError("the wire is not lost")
            except ConnectionLostError:
                pass
        await asyncio.sleep(0.5)
        assert await box.processes("311") >= 2
        await box.backend.forget_exec(box.id, "a")
        assert await box.gone("311")

    async def test_f05_a_lost_wire_loses_no_output_that_fits_the_ring(self, box: Box) -> None:
        assert isinstance(box.backend, GuestBackend)
        command = "import time\nfor n in range(3000): print(n, flush=True); time.sleep(0.0005)"
        events = box.backend.open_exec(box.id, request(["python3", "-c", command], "a"))
        data = b""
        async with aclosing(events):
            while len(data) < 2_000:
                event = await anext(events)
                data += event.data if isinstance(event, ExecOutput) else b""
            await box.backend.drop_guest(box.id)
            try:
                async for event in events:
                    data += event.data if isinstance(event, ExecOutput) else b""
            except ConnectionLostError:
                pass
        rest = await attached(box, "a", cursor=len(data))
        assert data + rest.data == "".join(f"{n}\n" for n in range(3_000)).encode()
        assert rest.gaps == 0

    async def test_f02_the_deadline_of_a_detached_command_ends_its_tree(self, box: Box) -> None:
        command = request("setsid sleep 312 & setsid sh -c 'sleep 312 & sleep 312' & sleep 312", "a", timeout_seconds=1)
        await box.backend.start_exec(box.id, command)
        assert (await ended(box, "a")).timed_out
        assert await box.processes("312") == 0

    async def test_a_signal_reaches_the_whole_tree(self, box: Box) -> None:
        script = "setsid sleep 313 & sh -c 'sleep 313; true' & wait"
        await box.backend.start_exec(box.id, request(script, "a"))
        async with asyncio.timeout(10):
            while await box.processes("313") < 4:
                await asyncio.sleep(0.05)
        assert await box.backend.signal_exec(box.id, "a", 10) >= 4
        assert (await ended(box, "a")).signal == 10
        assert await box.gone("313")

    async def test_f12_commands_that_end_leave_nothing(self, box: Box) -> None:
        count = "import os; print(sum(p.isdigit() for p in os.listdir('/proc')))"
        before = int((await box.python(count)).text)
        for number in range(300):
            id = f"n{number}"
            seen = await watch(box.backend.open_exec(box.id, request(["true"], id, stdin=True)))
            assert seen.end is not None
            assert seen.end.code == 0
            await box.backend.forget_exec(box.id, id)
        for number in range(50):
            await box.backend.start_exec(box.id, request(["true"], f"t{number}", tty=SIZE))
            await ended(box, f"t{number}")
        async with asyncio.timeout(60):
            while int((await box.python(count)).text) != before:
                await asyncio.sleep(0.1)

    async def test_f14_rings_are_bounded_for_the_sandbox(self, box: Box) -> None:
        for number in range(12):
            command = request(["head", "-c", "3000000", "/dev/zero"], f"n{number}")
            await box.backend.start_exec(box.id, command)
            await ended(box, f"n{number}")
        stats = await box.backend.guest_stats(box.id)
        assert stats.ring_bytes == 8 * 1024 * 1024
        assert stats.memory_bytes < 64 * 1024 * 1024
        kept = [status.cursor - status.first for status in await box.backend.list_execs(box.id)]
        assert kept == [0] * 4 + [1024 * 1024] * 8

    async def test_f14_nobody_holds_a_detached_command_back(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request(["head", "-c", "200000000", "/dev/zero"], "a"))
        assert (await ended(box, "a")).code == 0
        status = await box.backend.exec_status(box.id, "a")
        assert (status.cursor, status.first) == (200_000_000, 200_000_000 - 1024 * 1024)

    async def test_processes_used_up_still_lists_and_signals(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request(["python3", "-c", BOMB], "bomb"))
        before = 0
        async with asyncio.timeout(20):
            while (now := (await box.backend.guest_stats(box.id)).processes) > before or now < 20:
                before = now
                await asyncio.sleep(0.5)
        listed = await box.backend.list_execs(box.id)
        assert [(status.id, status.running) for status in listed] == [("bomb", True)]
        assert await box.backend.signal_exec(box.id, "bomb", 9) > 10
        assert (await ended(box, "bomb")).signal == 9
        assert await box.answers_again()

    async def test_processes_used_up_still_forgets(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request(["python3", "-c", BOMB], "bomb"))
        await asyncio.sleep(2)
        await box.backend.forget_exec(box.id, "bomb")
        assert await box.backend.list_execs(box.id) == []
        assert await box.answers_again()

    async def test_a_terminal_is_the_controlling_one_of_a_new_session(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request(["python3", "-c", TERMINAL], "a", tty=SIZE))
        data = await said(box, "a", b"on standard error")
        assert data.startswith(b"True True /dev/")
        await box.backend.resize_exec(box.id, "a", TerminalSize(40, 120))
        assert b"resized 120 40" in await said(box, "a", b"resized")
        with contextlib.suppress(NotFoundError):  # the command may end before the stream of its input does
            await box.backend.write_stdin(box.id, "a", pieces(b"\x03"))
        assert (await ended(box, "a")).signal == 2
        assert b"KeyboardInterrupt" in (await attached(box, "a")).data

    async def test_control_c_ends_the_foreground_job_of_a_shell(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request(["bash", "--norc", "-i"], "a", tty=SIZE))
        await box.backend.write_stdin(box.id, "a", pieces(b"sleep 314\n"))
        async with asyncio.timeout(10):
            while await box.processes("314") < 1:
                await asyncio.sleep(0.05)
        await box.backend.write_stdin(box.id, "a", pieces(b"\x03"))
        assert await box.gone("314")
        with contextlib.suppress(NotFoundError):
            await box.backend.write_stdin(box.id, "a", pieces(b"echo st''ill here; exit 9\n"))
        assert (await ended(box, "a")).code == 9
        assert b"still here" in (await attached(box, "a")).data

    async def test_the_end_of_input_is_the_terminals_own(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request("cat > f; echo over", "a", tty=SIZE))
        await box.backend.write_stdin(box.id, "a", pieces(b"typed\n"))
        await box.backend.close_stdin(box.id, "a")
        assert (await ended(box, "a")).code == 0
        assert await box.get("f") == b"typed\n"

    async def test_a_command_that_closes_its_input_takes_no_more(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request("exec <&-; sleep 60", "a", stdin=True))
        try:
            async with asyncio.timeout(10):
                while True:
                    await box.backend.write_stdin(box.id, "a", pieces(b"x" * 10_000))
                    await asyncio.sleep(0.05)
        except NotFoundError:
            pass
        assert (await box.backend.exec_status(box.id, "a")).running

    async def test_a_background_child_of_an_ended_object_goes_on(self, box: Box) -> None:
        await box.backend.start_exec(box.id, request("sleep 315 & echo done", "a"))
        assert (await attached(box, "a")).data == b"done\n"
        assert await box.processes("315") == 1
