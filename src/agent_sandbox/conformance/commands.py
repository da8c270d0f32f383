"""Commands on a backend that runs real programs: whole trees, deadlines, streams. Numbers are the fault list's."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from agent_sandbox.conformance.box import Box
from agent_sandbox.conformance.suite import SuiteBase
from agent_sandbox.errors import InvalidRequestError, SandboxError
from agent_sandbox.types import WORKSPACE, ExecOutput

DETACH = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
time.sleep(300)  # NEEDLE
"""


class CommandSuite(SuiteBase):
    """Faults 1 to 15 that need no server."""

    async def test_f01_a_waiting_shell_returns_at_the_deadline(self, box: Box) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with asyncio.timeout(60):
            result = await box.run("sleep 301 & wait", timeout=1)
        assert result.exit.timed_out
        assert loop.time() - started > 0.9
        assert await box.processes("301") == 0

    @pytest.mark.parametrize("starter", ["setsid sleep 302", "setsid sh -c 'sleep 302 & sleep 302'"])
    async def test_f02_a_new_session_does_not_outlive_the_timeout(self, box: Box, starter: str) -> None:
        result = await box.run(f"{starter} & sleep 302", timeout=1)
        assert result.exit.timed_out
        assert await box.processes("302") == 0

    async def test_f02_a_double_fork_does_not_outlive_the_timeout(self, box: Box) -> None:
        await box.put("detach.py", DETACH.encode())
        result = await box.run("python3 detach.py; sleep 30", timeout=1.5)
        assert result.exit.timed_out
        assert await box.processes("detach.py") == 0

    async def test_its_streams_can_be_opened_by_name(self, box: Box) -> None:
        result = await box.run("echo out > /dev/stdout; echo err > /dev/stderr; echo too > /proc/self/fd/1")
        assert (result.stdout, result.stderr, result.status) == (b"out\ntoo\n", b"err\n", 0)

    async def test_f02_a_detached_child_does_not_keep_the_call_open(self, box: Box) -> None:
        async with asyncio.timeout(60):
            assert (await box.run("setsid sleep 303 & echo done", timeout=250)).text == "done\n"
        assert await box.processes("303") == 1

    async def test_f03_a_background_child_goes_on_and_the_call_returns(self, box: Box) -> None:
        async with asyncio.timeout(60):
            result = await box.run("> ticks; (while :; do sleep 0.1; echo x >> ticks; done) & echo done", timeout=250)
            assert result.text == "done\n"
            for _ in range(2):
                seen = len(await box.get("ticks"))
                while len(await box.get("ticks")) == seen:
                    await asyncio.sleep(0.05)

    async def test_f03_the_output_of_a_background_child_is_drained(self, box: Box) -> None:
        assert b"done\n" in (await box.run("(head -c 3000000 /dev/zero; echo > finished) & echo done")).stdout
        for _ in range(300):
            if (await box.run(["test", "-e", "finished"])).status == 0:
                return
            await asyncio.sleep(0.1)
        pytest.fail("the background child hangs on a full pipe")

    async def test_f04_emptying_tmp_and_workspace_changes_nothing(self, box: Box) -> None:
        wipe = "rm -rf /tmp/* /tmp/.[!.]* /workspace/* /workspace/.[!.]* 2>/dev/null;"
        assert (await box.run(f"{wipe} exit 7")).exit.code == 7
        assert (await box.run(f"{wipe} sleep 30", timeout=1)).exit.timed_out

    async def test_f05_leaving_a_stream_ends_the_whole_tree(self, box: Box) -> None:
        argv = ["sh", "-c", "setsid sleep 304 & echo go; sleep 304"]
        events = box.backend.exec(box.id, argv, env={}, workdir=WORKSPACE, timeout_seconds=300)
        async with aclosing(events):
            assert await anext(events) == ExecOutput("stdout", b"go\n")
            assert await box.processes("304") > 0
        assert await box.gone("304")

    async def test_f06_output_before_the_timeout_is_kept(self, box: Box) -> None:
        result = await box.run("echo out; echo err >&2; head -c 100000 /dev/zero; sleep 300", timeout=3)
        assert result.stdout == b"out\n" + bytes(100_000)
        assert result.stderr == b"err\n"
        assert result.exit.timed_out

    async def test_f07_what_cannot_start_says_why(self, box: Box) -> None:
        missing = await box.run(["/no/such/program"])
        assert (missing.exit.code, "/no/such/program" in missing.exit.message) == (127, True)
        await box.put("plain", b"#!/bin/sh\nexit 0\n", 0o644)
        denied = await box.run([f"{WORKSPACE}/plain"])
        assert (denied.exit.code, "plain" in denied.exit.message) == (126, True)
        await box.put("garbage", b"\x00\x01\x02", 0o755)
        assert (await box.run([f"{WORKSPACE}/garbage"])).exit.code == 126
        assert (await box.run([WORKSPACE])).exit.code == 126
        with pytest.raises(InvalidRequestError):
            await box.run(["true"], workdir="/no/such/place")

    async def test_f08_running_out_of_memory_is_said_and_survived(self, box: Box) -> None:
        result = await box.python("x = bytearray(2 * 1024 ** 3)\nfor i in range(0, len(x), 4096): x[i] = 1", timeout=60)
        assert result.status == 137
        assert result.exit.oom_killed in (True, None)
        assert await box.shell("echo alive") == "alive\n"
        assert (await box.run("kill -9 $$")).exit.oom_killed in (False, None)

    async def test_f10_stdin_is_empty(self, box: Box) -> None:
        await box.shell("cat > f", timeout=5)
        assert await box.get("f") == b""
        assert (await box.shell("readlink /proc/self/fd/0")) == "/dev/null\n"

    async def test_f11_long_argument_lists(self, box: Box) -> None:
        words = [f"{n:0104d}" for n in range(10_000)]
        result = await box.run(["python3", "-c", "import sys; print(len(sys.argv), sum(map(len, sys.argv)))", *words])
        assert result.text == f"10001 {10_000 * 104 + 2}\n"
        with pytest.raises(SandboxError):  # E2BIG: a quarter of the stack's limit at most, execve(2)
            await box.run(["true", *(words * 5)])
        assert await box.shell("echo fine") == "fine\n"

    async def test_f12_many_short_commands_leave_nothing(self, box: Box) -> None:
        count = "import os; print(sum(p.isdigit() for p in os.listdir('/proc')))"
        before = int((await box.python(count)).text)
        for _ in range(300):
            assert (await box.run(["true"])).status == 0
        assert int((await box.python(count)).text) == before

    async def test_f12_sixty_four_at_once(self, backend: object, box: Box) -> None:
        big = await self.new_box(box.backend, pids_limit=512)
        async with asyncio.timeout(60):
            results = await asyncio.gather(*(big.run(f"echo {n}; exit {n}") for n in range(64)))
        assert [(r.text, r.exit.code) for r in results] == [(f"{n}\n", n) for n in range(64)]

    async def test_f13_bytes_arrive_as_written(self, box: Box) -> None:
        for text in (b"no newline", b"a\rb\rc", b"\n\n\nblank\n\n", b"nul\x00nul", bytes(range(256)) * 300):
            await box.put("f", text)
            result = await box.run("cat f; cat f >&2")
            assert result.stdout == text
            assert result.stderr == text

    async def test_f14_much_output_is_whole(self, box: Box) -> None:
        total = 0
        argv = ["head", "-c", "52428800", "/dev/zero"]
        async with aclosing(box.backend.exec(box.id, argv, env={}, workdir=WORKSPACE, timeout_seconds=60)) as events:
            async for event in events:
                total += len(event.data) if isinstance(event, ExecOutput) else 0
        assert total == 52_428_800

    async def test_f14_a_slow_reader_holds_the_command_back(self, box: Box) -> None:
        events = box.backend.exec(box.id, ["yes"], env={}, workdir=WORKSPACE, timeout_seconds=60)
        async with aclosing(events):
            await anext(events)
            usage = (
                "import resource,os\nprint(sum(int(open(f'/proc/{p}/stat').read().split()[13]) "
                "for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid() "
                "and b'yes' in open(f'/proc/{p}/cmdline','rb').read()))"
            )
            used = [(await box.python(usage)).text]
            for _ in range(20):  # until pipe and window are full, which a busy machine takes a while for
                await asyncio.sleep(0.5)
                used.append((await box.python(usage)).text)
                if used[-3:] == used[-1:] * 3:
                    break
            assert used[-3:] == used[-1:] * 3
            assert await box.shell("echo others go on") == "others go on\n"

    async def test_the_deadline_holds_for_a_stalled_reader(self, box: Box) -> None:
        events = box.backend.exec(box.id, ["yes"], env={}, workdir=WORKSPACE, timeout_seconds=1)
        async with aclosing(events):
            seen = [await anext(events)]  # a start that takes longer than the deadline is the end at once
            assert await box.gone("yes")
            seen += [event async for event in events]
        assert getattr(seen[-1], "timed_out", False)

    async def test_ignoring_signals_and_stopping_does_not_help(self, box: Box) -> None:
        result = await box.run("trap '' TERM INT HUP; kill -STOP $$", timeout=1)
        assert result.exit.timed_out

    @pytest.mark.parametrize("ignore", ["", "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"])
    async def test_a_fork_storm_ends_with_its_deadline(self, box: Box, ignore: str) -> None:
        storm = ignore + "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
        for _ in range(3):
            result = await box.python(storm, timeout=1.5)
            assert result.exit.timed_out
            assert await box.answers_again()
            assert await box.processes("os.fork") == 0

    async def test_only_three_descriptors(self, box: Box) -> None:
        listed = await box.python("import os; print(sorted(int(f) for f in os.listdir('/proc/self/fd')))")
        assert listed.text in ("[0, 1, 2, 3]\n",)  # 3 is the listing's own

    async def test_default_signals_mask_and_umask(self, box: Box) -> None:
        status = await box.shell("grep -E '^(SigBlk|SigIgn)' /proc/self/status; umask")
        assert status.split() == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16, "0022"]
