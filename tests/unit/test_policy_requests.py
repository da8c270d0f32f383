"""What may be asked of a living sandbox: paths, commands, deadlines. Long scripts run on this machine's real shells."""

from __future__ import annotations

import math
import os
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent_sandbox.config import Settings
from agent_sandbox.errors import InvalidRequestError, PayloadTooLargeError
from agent_sandbox.manager import policy
from agent_sandbox.manager.requests import MAX_ARGUMENT_BYTES, MAX_COMMAND_BYTES
from agent_sandbox.types import ExecExit

SETTINGS = Settings(data_dir=Path("/nonexistent"))


@pytest.mark.parametrize(
    ("path", "full"),
    [
        ("a", "/workspace/a"),
        ("a/b/", "/workspace/a/b"),
        ("./a/./b", "/workspace/a/b"),
        ("a//b", "/workspace/a/b"),
        ("a/../b", "/workspace/b"),
        (".", "/workspace"),
        ("..", "/"),
        ("../etc/passwd", "/etc/passwd"),
        ("../../../..", "/"),
        ("/", "/"),
        ("//", "/"),
        ("//tmp/x", "/tmp/x"),
        ("///tmp", "/tmp"),
        ("/workspace/../workspace/x", "/workspace/x"),
        ("/tmp/../../x", "/x"),
        ("...", "/workspace/..."),
        ("~", "/workspace/~"),
        (" ", "/workspace/ "),
        ("%2F", "/workspace/%2F"),
        ("a\nb", "/workspace/a\nb"),
        ("😀", "/workspace/😀"),
        ("\udcff", "/workspace/\udcff"),
        # Two escapes that stand for the UTF-8 of one character are the same path as that character.
        ("\udcc3\udca9", "/workspace/é"),
    ],
)
def test_paths(path: str, full: str) -> None:
    assert policy.normalize_path(path) == full


@pytest.mark.parametrize(
    "path", ["", "a\0b", *map(chr, (0xD800, 0xDC7F, 0xDD00, 0xDFFF)), "x" * 4096, "/" + "x" * 4095, "x" * 4085]
)
def test_bad_paths(path: str) -> None:
    with pytest.raises(InvalidRequestError, match="path"):
        policy.normalize_path(path)


def test_the_longest_path() -> None:
    assert len(policy.normalize_path("x" * 4084)) == 4095


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from("/.\udc80\udcff")))
@example("/workspace/..")
def test_a_path_to_write_is_always_inside(path: str) -> None:
    try:
        full = policy.require_in_workspace(path)
    except InvalidRequestError:
        return
    assert full.startswith("/workspace/")
    assert not {"", ".", ".."} & set(full.removeprefix("/workspace/").split("/"))
    assert policy.normalize_path(full) == full
    assert os.fsencode(full).decode("utf-8", "surrogateescape") == full


@pytest.mark.parametrize("path", [".", "/workspace", "/workspace/", "..", "../x", "/workspacex", "/etc/x", "a/../.."])
def test_writes_outside_are_refused(path: str) -> None:
    with pytest.raises(InvalidRequestError, match="inside /workspace"):
        policy.require_in_workspace(path)


def test_commands() -> None:
    assert policy.command_argv("echo $HOME") == ["/bin/sh", "-c", "echo $HOME"]
    assert policy.command_argv(["echo", "", "$HOME"]) == ["echo", "", "$HOME"]
    assert policy.command_argv(("true",)) == ["true"]


@pytest.mark.parametrize("command", ["", [], [""], ["", "x"], "a\0", ["a", "b\0"], "\ud800", [1], [None]])
def test_bad_commands(command: object) -> None:
    with pytest.raises(InvalidRequestError, match="command"):
        policy.command_argv(command)  # type: ignore[arg-type]


def test_limits_of_a_command() -> None:
    assert policy.command_argv(["x", "y" * MAX_ARGUMENT_BYTES])[1] == "y" * MAX_ARGUMENT_BYTES
    with pytest.raises(InvalidRequestError, match="131071"):
        policy.command_argv(["x", "y" * (MAX_ARGUMENT_BYTES + 1)])
    with pytest.raises(InvalidRequestError, match="131071"):  # bytes count, not characters
        policy.command_argv(["x", "é" * (MAX_ARGUMENT_BYTES // 2 + 1)])
    assert policy.command_argv("x" * MAX_COMMAND_BYTES)
    for command in ("x" * (MAX_COMMAND_BYTES + 1), ["x"] * 300_000, ["y" * 100_000] * 40):
        with pytest.raises(PayloadTooLargeError, match=str(MAX_COMMAND_BYTES)):
            policy.command_argv(command)


def run(argv: list[str], shell: str) -> subprocess.CompletedProcess[bytes]:
    """Run an argument list as the daemon does, with another shell behind the name /bin/sh."""
    return subprocess.run(
        [os.fsencode(argument) for argument in argv],
        executable=shell,
        capture_output=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "A": "kept"},
        check=False,
    )


SHELLS = ["/bin/sh", "/bin/bash"]


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_of_a_mebibyte_run_as_they_are(shell: str) -> None:
    seed = random.Random(11)
    alphabet = "abc \t'\"\\$`;&|<>(){}*?[]#~!%é€😀"
    text = "".join(seed.choice(alphabet) for _ in range(900_000)) + "\n-n\n*\n"
    script = f'cat <<\'END OF TEXT\'\n{text}END OF TEXT\nprintf \'%s,\' "$#" "$0" "${{1-unset}}" "$A"\nexit 7'
    assert len(script.encode()) > 1 << 20
    done = run(policy.command_argv(script), shell)
    assert done.stderr == b""
    assert done.stdout == text.encode() + b"0,/bin/sh,unset,kept,"
    assert done.returncode == 7


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_character_cut_in_the_middle_is_whole_again(shell: str, offset: int) -> None:
    script = f"printf %s '{'x' * offset}{'😀' * 100_000}\udcff'"
    argv = policy.command_argv(script)
    assert all(len(os.fsencode(argument)) <= MAX_ARGUMENT_BYTES for argument in argv)
    done = run(argv, shell)
    assert done.stdout == b"x" * offset + "😀".encode() * 100_000 + b"\xff"
    assert (done.stderr, done.returncode) == (b"", 0)


PADDING = "# " + "x" * 140_000 + "\n"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "script",
    [
        "false",
        "exit 42",
        "kill -9 $$",
        "set -e; false; echo not reached",
        "nonsense-command",
        "set -- a b; echo $# $2",
        "echo $A; set | grep -c '^__asb' ; exit 3",
        "trap 'echo bye' EXIT; exit 5",
        "f() { return 9; }; f",
        "echo 'un'\\\n'cut'",
        "echo $LINENO; sh -c 'exit 6'",
    ],
)
def test_a_long_script_behaves_as_a_short_one(shell: str, script: str) -> None:
    long = policy.command_argv(script + "\n" + PADDING)
    assert len(long) > 3
    expected, found = run(policy.command_argv(script), shell), run(long, shell)
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)


def test_the_longest_script_that_is_one_argument_and_the_first_that_is_not() -> None:
    script = "exit 4 #" + "x" * (MAX_ARGUMENT_BYTES - 8)
    assert len(policy.command_argv(script)) == 3
    assert len(policy.command_argv(script + "x")) == 6
    assert run(policy.command_argv(script), "/bin/sh").returncode == 4
    assert run(policy.command_argv(script + "x"), "/bin/sh").returncode == 4


def test_deadlines_of_commands() -> None:
    assert policy.exec_timeout(None, SETTINGS) == 60.0
    assert policy.exec_timeout(0.5, SETTINGS) == 0.5
    assert policy.exec_timeout(3600, SETTINGS) == 3600
    for seconds in (0, -1, 3600.1, math.nan, math.inf, True):
        with pytest.raises(InvalidRequestError, match=r"timeout_seconds.* 0.001 to 3600"):
            policy.exec_timeout(seconds, SETTINGS)


@pytest.mark.parametrize(
    ("exit", "status"),
    [
        (ExecExit(0), 0),
        (ExecExit(127), 127),
        (ExecExit(None, 9), 137),
        (ExecExit(None, 15), 143),
        (ExecExit(None, 9, timed_out=True), 137),
        (ExecExit(0, timed_out=True), 137),
        (ExecExit(None), 255),  # a guest that says nothing did not succeed
        (ExecExit(-1), 255),
        (ExecExit(256), 255),
        (ExecExit(None, 1000), 255),
    ],
)
def test_exit_status(exit: ExecExit, status: int) -> None:
    assert policy.exit_status(exit) == status


def test_file_modes() -> None:
    assert policy.file_mode(0o644) == 0o644
    assert policy.file_mode(0o7777) == 0o7777
    for mode in (-1, 0o10000, True):
        with pytest.raises(InvalidRequestError, match="mode"):
            policy.file_mode(mode)


def test_snapshot_names() -> None:
    assert policy.snapshot_name(None) is None
    assert policy.snapshot_name("before the änderung 😀") == "before the änderung 😀"
    for name in ("", "x" * 201, "a\nb", "a\0", "\x1b[0m", "\ud800"):
        with pytest.raises(InvalidRequestError, match="name"):
            policy.snapshot_name(name)
