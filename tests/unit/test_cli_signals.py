"""The first signal unwinds and releases, the second leaves at once; in processes of their own, with real signals."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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
