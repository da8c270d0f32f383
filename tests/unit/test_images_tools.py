"""Running tools: their output and time are bounded, their end is ours, and nothing of them stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from agent_sandbox.errors import BackendError, LimitExceededError
from agent_sandbox.images import tools
from agent_sandbox.images.tools import ToolFailedError, run


def quiet(read: int, written: int) -> None:
    pass


def test_a_tools_output_comes_back(tmp_path: Path) -> None:
    assert run(["sh", "-c", "pwd; printf '\\377'; cat"], tmp_path, quiet) == f"{tmp_path}\n".encode() + b"\xff"


def test_a_failure_is_the_tools_last_word(tmp_path: Path) -> None:
    logged = r"""time="2026" level=fatal msg="reading \"x\": Get https://a/b?X-Sig=secret: gone" """
    for script, said in (
        ("echo one >&2; echo '   ⨯ two' >&2; exit 3", "two"),
        (f"cat >&2 <<'END'\n{logged}\nEND\nexit 1", 'reading "x": Get https://a/b?… gone'),
        ("yes x | head -c 100000 >&2; echo end >&2; exit 1", "end"),
        ("exit 9", "exit code 9"),
        ("kill -9 $$", "exit code -9"),
    ):
        with pytest.raises(ToolFailedError) as failed:
            run(["sh", "-c", script], tmp_path, quiet)
        assert failed.value.message == said


def test_too_much_output_ends_the_tool(tmp_path: Path) -> None:
    with pytest.raises(LimitExceededError):
        run(["sh", "-c", "exec cat /dev/zero"], tmp_path, quiet)


def test_a_tool_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="no-such-tool is not installed; install them with: apt-get install skopeo"):
        run(["no-such-tool"], tmp_path, quiet)


def test_an_exception_of_the_callback_ends_the_tool_and_its_children(tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    def stop(read: int, written: int) -> None:
        if (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().count("\n") == 2:
            raise Stop

    with pytest.raises(Stop):
        run(["sh", "-c", "sleep 3600 & echo $! >pids; echo $$ >>pids; wait"], tmp_path, stop)
    deadline = time.monotonic() + 60
    for pid in (tmp_path / "pids").read_text().split():
        while _lives(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_tool_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_STALL_SECONDS", 0.5)
    with pytest.raises(BackendError, match="sleep made no progress"):
        run(["sleep", "300"], tmp_path, quiet)


def test_a_slow_tool_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_STALL_SECONDS", 2.0)
    seen: list[int] = []
    run(
        ["sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do sleep 0.3; echo $i >>f; done"],
        tmp_path,
        lambda r, w: seen.append(w),
    )
    assert seen == sorted(seen)
    assert seen[-1] >= 10


def test_a_tool_gets_little_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_API_KEYS", "secret-secret-secret")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", "/x/auth.json")
    names = {line.partition("=")[0] for line in run(["env"], tmp_path, quiet).decode().splitlines()}
    assert "AGENT_SANDBOX_API_KEYS" not in names
    assert {"PATH", "TMPDIR", "LC_ALL", "REGISTRY_AUTH_FILE"} <= names


def test_a_tool_dies_with_us(tmp_path: Path) -> None:
    """Killed outright, a process cannot clean up: the kernel does."""
    pid = os.fork()
    if pid == 0:
        run(["sh", "-c", "echo $$ >pid; exec sleep 300"], tmp_path, quiet)
        os._exit(1)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    tool = (tmp_path / "pid").read_text().strip()
    assert _lives(tool)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    while _lives(tool):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
