"""How long a local server that starts is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_sandbox.cli import local_server, starting
from agent_sandbox.cli.exit_codes import LocalServerError
from agent_sandbox.cli.starting import LONGEST_SECONDS, QUIET_SECONDS, Patience, told, worked


def test_a_process_is_waited_for_as_long_as_it_works() -> None:
    patience = Patience(1000.0)
    for second in range(1, 200):
        assert patience.lasts(1000.0 + second)
        patience.look(1000.0 + second, ticks=second)
    last = 1000.0 + 199
    for quiet in (1.0, 10.0, QUIET_SECONDS - 1):
        patience.look(last + quiet, ticks=199)
        assert patience.lasts(last + quiet)
    assert not patience.lasts(last + QUIET_SECONDS)


def test_a_process_that_works_for_ever_is_given_up() -> None:
    patience = Patience(0.0)
    for second in range(int(LONGEST_SECONDS)):
        assert patience.lasts(second)
        patience.look(second, ticks=second)
    assert not patience.lasts(LONGEST_SECONDS)


def test_work_is_looked_at_once_a_second() -> None:
    patience = Patience(0.0)
    assert patience.wants_look(0.0)
    patience.look(0.0, 1)
    assert not patience.wants_look(0.9)
    assert patience.wants_look(1.0)


def test_the_kernel_tells_what_a_session_has_worked() -> None:
    spin = "import subprocess, sys, time; t = time.process_time() + 0.2\nwhile time.process_time() < t: pass\n"
    wait = "print(flush=True); sys.stdin.read()"
    nested = f"{spin}subprocess.run([sys.executable, '-c', {spin!r}]); {wait}"
    with subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ticks = worked(process.pid)
        assert ticks / os.sysconf("SC_CLK_TCK") >= 0.38  # both, to a tick
        process.communicate()
    assert worked(process.pid) == 0


READY = """
import socket, sys, threading, time
time.sleep(float(sys.argv[1]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[2])
listener.listen()
while True:
    peer, _ = listener.accept()
    peer.recv(4096)
    peer.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    peer.close()
"""


@contextmanager
def server(path: Path, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", READY, str(seconds), str(path)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_one_that_works_becomes_ready_later_than_a_quiet_one_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "server.log"
    log.write_text("it is here\n")
    monkeypatch.setattr(starting, "QUIET_SECONDS", 0.5)
    monkeypatch.setattr(starting, "_LOOK_SECONDS", 0.0)
    with monkeypatch.context() as quiet, server(tmp_path / "never", 3600) as process:
        quiet.setattr(starting, "worked", lambda session: 1)
        assert not local_server._becomes_ready(process, tmp_path / "never", log, 0)
    monkeypatch.setattr(starting, "worked", lambda session: time.monotonic_ns())
    with server(tmp_path / "late", 1.5) as process:
        assert local_server._becomes_ready(process, tmp_path / "late", log, 0)
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(LocalServerError, match="ended with code 3"):
        local_server._becomes_ready(process, tmp_path / "ended", log, 0)


def test_who_waits_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with told("never"):
        pass
    monkeypatch.setattr(starting, "TOLD_SECONDS", 0.01)
    said = ""
    with told("it takes a while"):
        for _ in range(2_000):
            if said := said + capsys.readouterr().err:
                break
            time.sleep(0.01)
    assert said == "agent-sandbox: it takes a while\n"
