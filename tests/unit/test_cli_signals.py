"""The first signal unwinds and releases, the second leaves at once; in processes of their own, with real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.server_harness import KEY, Running, running, settings_for

PROGRAM = """
import signal, sys, time
from agent_sandbox.cli import signals

# Whoever runs the tests may ignore some of them, as nohup does.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)

def say(word): print(word, flush=True)
def make(): say("made"); time.sleep({make}); return "box"
def release(box): say("releasing"); time.sleep({release}); say("released " + box)

try:
    with signals.handled():
        with signals.owning(make, release, lambda box: box + " is left"):
            say("inside"); time.sleep({inside})
except signals.Interrupted as interrupted:
    say("interrupted"); sys.exit(interrupted.exit_code)
"""


def start(*, make: float = 0, inside: float = 0, release: float = 0) -> subprocess.Popen[str]:
    program = PROGRAM.format(make=make, inside=inside, release=release)
    return subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True)


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    pytest.fail(f"{word!r} never came")


def test_without_a_signal_it_is_released_once() -> None:
    out, err = start().communicate(timeout=20)
    assert out.split("\n") == ["made", "inside", "releasing", "released box", ""]
    assert err == ""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_releases_and_ends_with_128_and_its_number(signum: signal.Signals) -> None:
    with start(inside=30) as process:
        read_until(process, "inside")
        process.send_signal(signum)
        out, _ = process.communicate(timeout=20)
    assert out.split("\n") == ["releasing", "released box", "interrupted", ""]
    assert process.returncode == 128 + signum


def test_a_signal_while_it_is_made_waits_until_it_is_known_and_then_releases_it() -> None:
    with start(make=0.5, inside=30) as process:
        read_until(process, "made")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    assert out.split("\n") == ["releasing", "released box", "interrupted", ""]
    assert process.returncode == 130


def test_a_second_signal_leaves_at_once_and_says_what_stays() -> None:
    with start(inside=30, release=30) as process:
        read_until(process, "inside")
        process.send_signal(signal.SIGINT)
        read_until(process, "releasing")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert "released" not in out
    assert "box is left" in err
    assert process.returncode == 130


def environ(server: Running) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "AGENT_SANDBOX_URL": server.url, "AGENT_SANDBOX_API_KEY": KEY}


def command(*arguments: str) -> list[str]:
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    return [sys.executable, "-c", f"{program}from agent_sandbox.cli import main; main()", *arguments]


class Held:
    """A server on the fake backend whose creations begin and do not end before they are let go."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.arrived, self.go = threading.Event(), threading.Event()
        create = server.backend.create

        async def held(*args: Any, **options: Any) -> None:
            self.arrived.set()
            while not self.go.is_set():
                await asyncio.sleep(0.01)
            await create(*args, **options)

        server.backend.create = held  # type: ignore[method-assign]

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        options = {"stdout": -1, "stderr": -1, "text": True, **options}
        return subprocess.Popen(command(*arguments), env=environ(self.server), **options)

    def left(self) -> list[str]:
        return [sandbox["id"] for sandbox in self.server.call("GET", "/v1/sandboxes").json["sandboxes"]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(settings_for(tmp_path)) as it:
        yield it


def test_a_creation_that_is_interrupted_leaves_no_sandbox_and_says_what_it_waits_for(server: Running) -> None:
    held = Held(server)
    with held.start("create") as process:
        assert held.arrived.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.readline()
        assert len(held.left()) == 1
        held.go.set()
        out, _ = process.communicate(timeout=60)
    assert "a second interrupt does not wait" in said
    assert (out, process.returncode, held.left()) == ("", 130, [])


def test_a_fork_that_is_interrupted_says_which_sandboxes_there_are(server: Running) -> None:
    first = server.create()
    snapshot = server.call("POST", f"/v1/sandboxes/{first}/snapshots").json["id"]
    server.call("DELETE", f"/v1/sandboxes/{first}")
    held = Held(server)
    with held.start("fork", snapshot, "--count", "3") as process:
        assert held.arrived.wait(60)
        process.send_signal(signal.SIGINT)
        held.go.set()
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.split() == held.left()


def test_a_sandbox_whose_id_cannot_be_told_goes(server: Running) -> None:
    held = Held(server)
    held.go.set()
    with Path("/dev/full").open("w") as full, held.start("create", stdout=full) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "agent-sandbox: standard output: No space left on device\n"
    assert held.left() == []


def test_a_standard_stream_that_is_closed_is_an_empty_one(server: Running) -> None:
    for closed, told in (("0<", ""), ("1>", ""), ("2>", ""), ("1>", "nowhere")):
        shell = ["/bin/sh", "-c", f'exec "$@" {closed}&-', "sh", *command(*(("inspect", told) if told else ("ls",)))]
        done = subprocess.run(shell, env=environ(server), capture_output=True, text=True, timeout=60)
        assert (done.returncode, bool(done.stdout)) == (68 if told else 0, not closed.startswith("1"))
        assert done.stderr == ("agent-sandbox: sandbox nowhere does not exist, or no longer does\n" if told else "")
