"""Foreign text on a terminal, sizes, tables, and the exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agent_sandbox import errors
from agent_sandbox.cli import exit_codes, output


def every_error() -> list[type[errors.SandboxError]]:
    import agent_sandbox.client  # noqa: F401 - its errors count, too

    found: list[type[errors.SandboxError]] = []
    todo = [errors.SandboxError]
    while todo:
        children = todo.pop().__subclasses__()
        todo += children
        found += children
    return [kind for kind in found if kind.__module__.startswith("agent_sandbox.")]


def test_every_error_code_has_an_exit_code_of_its_own() -> None:
    codes = {kind.code for kind in every_error()}
    assert codes == set(exit_codes.BY_CODE)
    numbers = list(exit_codes.BY_CODE.values())
    assert len(set(numbers)) == len(numbers)
    assert all(64 <= number < exit_codes.OURS for number in numbers)


def test_the_help_names_every_exit_code() -> None:
    for number in (0, 1, 2, 125, 130, 141, 143, *exit_codes.BY_CODE.values()):
        assert f" {number} " in exit_codes.HELP


def test_an_error_of_the_server_has_the_exit_code_of_its_code() -> None:
    from agent_sandbox.client.errors import api_error

    assert exit_codes.of(api_error(404, "not_found", "x")) == 68
    assert exit_codes.of(api_error(501, "unsupported", "x")) == 72
    assert exit_codes.of(api_error(500, "internal_error", "x")) == 73


def test_a_class_below_a_known_one_gets_its_code() -> None:
    class Special(errors.NotFoundError):
        code = "special"

    assert exit_codes.of(Special("x")) == 68


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain text, ü and 雪", "plain text, ü and 雪"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("two\nlines\r", "two\\nlines\\r"),
        ("\udcff", "\\udcff"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
        (7, "7"),
    ],
)
def test_control_characters_are_shown_and_not_sent(raw: object, shown: str) -> None:
    assert output.plain(raw) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (10 * 1024**2, "10.0 MiB"), (3 * 1024**5, "3072.0 TiB")],
)
def test_sizes(count: int, shown: str) -> None:
    assert output.size(count) == shown


def test_a_table_outside_a_terminal_is_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("ID", "NAME"), [("sb1", "a[bold]b"), ("sbxyz", "c\nd")])
    assert capsys.readouterr().out == "ID     NAME\nsb1    a[bold]b\nsbxyz  c\\nd\n"


def test_output_goes_to_its_own_stream_byte_by_byte() -> None:
    program = (
        "from agent_sandbox.cli import output\n"
        "output.raw('stdout', b'a\\r\\0\\xc3\\xa9\\xff')\n"
        "output.raw('stderr', b'no newline')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=20)
    assert (done.stdout, done.stderr) == (b"a\r\0\xc3\xa9\xff", b"no newline")


@pytest.mark.parametrize(
    ("events", "code", "out", "err"),
    [
        ([{"type": "stdout", "data": "a"}, {"type": "stdout", "data_b64": "/w=="}], 0, b"a\xff", ""),
        ([{"type": "stderr", "data": "b"}, {"type": "exit", "exit_code": 7}], 7, b"", "b"),
        ([{"type": "exit", "signal": 15}], 143, b"", ""),
        ([{"type": "exit", "exit_code": 127, "message": "x: not found"}], 127, b"", "x: not found\n"),
        ([{"type": "gap", "bytes": 5}], 0, b"", "agent-sandbox: 5 bytes of output are not kept any more\n"),
        (
            [{"type": "exit", "signal": 9, "timed_out": True, "duration_ms": 1500}],
            137,
            b"",
            "agent-sandbox: the command was killed at its deadline, after 1.5 s: --timeout sets it\n",
        ),
        (
            [{"type": "exit", "signal": 9, "oom_killed": True}],
            137,
            b"",
            "agent-sandbox: the command was killed: the sandbox's memory is used up; -m MIB makes one with more\n",
        ),
    ],
)
def test_events_become_output_notes_and_a_code(
    events: list[dict[str, object]], code: int, out: bytes, err: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    from agent_sandbox.models import ExecOutputEvent

    assert output.follow((ExecOutputEvent.from_json(event) for event in events), deadline_hint=True) == code
    seen = capfdbinary.readouterr()
    assert (seen.out, seen.err) == (out, err.encode())


def test_looking_at_a_log_tells_of_memory_but_not_of_an_option_that_logs_does_not_have(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    from agent_sandbox.models import ExecOutputEvent

    for end in ({"oom_killed": True}, {"timed_out": True}, {"oom_killed": False}):
        output.follow([ExecOutputEvent.from_json({"type": "exit", "signal": 9, **end})])
    note = b"agent-sandbox: the command was killed: the sandbox's memory is used up; -m MIB makes one with more\n"
    assert capfdbinary.readouterr().err == note


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ({"signal": 9, "oom_killed": True}, "signal 9, out of memory"),
        ({"exit_code": 137, "oom_killed": True}, "exit 137, out of memory"),
        ({"signal": 9, "oom_killed": False}, "signal 9"),
        ({"signal": 9, "timed_out": True}, "timed out"),
        ({"exit_code": 3}, "exit 3"),
        ({}, "exit ?"),
    ],
)
def test_how_a_listed_command_ended(end: dict[str, object], shown: str) -> None:
    from agent_sandbox.cli.execs import status
    from agent_sandbox.models import Exec

    fields = {"exit_code": None, "signal": None, "timed_out": False, **end}
    info = Exec.from_json(
        {
            **{"id": "ex1", "tag": "", "command": ["x"], "pid": 7, "status": "exited"},
            **{"started_at": "2026-01-01T00:00:00Z", "tty": False, "cursor": 0, "first_cursor": 0, **fields},
        }
    )
    assert status(info) == shown


def test_an_end_that_nobody_knows_is_an_error() -> None:
    from agent_sandbox.models import ExecOutputEvent

    with pytest.raises(errors.BackendError, match="not known"):
        output.follow([ExecOutputEvent(type="exit")])


def test_an_error_without_a_file_is_about_what_is_written() -> None:
    with pytest.raises(OSError, match=r"out\.tar") as raised, output.writing("out.tar"):
        raise OSError(28, "No space left on device")
    assert raised.value.filename == "out.tar"
    with pytest.raises(OSError, match=r"in\.tar"), output.writing("out.tar"):
        raise OSError(28, "No space left on device", "in.tar")
    with pytest.raises(BrokenPipeError), output.writing():
        raise BrokenPipeError
