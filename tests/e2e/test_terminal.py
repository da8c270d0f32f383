"""A person can work in ``agent-sandbox shell``: an editor, a full screen program, keys, sizes; and the way back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.local import PROGRAM, Local
from tests.e2e.person import PROMPT, Person

pytestmark = pytest.mark.real

INSIDE = "inside> "


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    local = Local(tmp_path_factory.mktemp("terminal") / "data")
    yield local
    local.stop()


@pytest.fixture(scope="module")
def box(local: Local) -> str:
    return local.out("create", "--ttl", "900")


@pytest.fixture
def person(local: Local) -> Iterator[Person]:
    with Person(local.environ) as it:
        yield it


def go_inside(person: Person, box: str) -> None:
    """Start the shell and give it a prompt that the echo of typing it does not show."""
    person.enter(f"agent-sandbox shell {box}")
    person.expect(r"[$#>] ")
    person.enter("PS1='in''side> '")
    person.expect(re.escape(INSIDE))


def leave(person: Person, code: int = 0) -> None:
    person.enter(f"exit {code}")
    person.expect(re.escape(PROMPT))


def test_a_file_is_edited_with_vim(person: Person, local: Local, box: str) -> None:
    editor = next(path.name for path in (Path("/usr/bin/vim.tiny"), Path("/usr/bin/vim.basic")) if path.exists())
    go_inside(person, box)
    person.enter(f"{editor} -u NONE -N notes.txt")
    person.expect(r"notes\.txt")
    person.type("ihello from vim")
    person.type("\x1b")
    person.type("osecond line\x1b")
    person.type("k0dwi")
    person.type("HELLO \x1b")
    person.type(":wq\r")
    person.expect(r"written")
    person.expect(re.escape(INSIDE))
    leave(person)
    assert local.out("exec", box, "--", "cat", "notes.txt") == "HELLO from vim\nsecond line"


def test_top_starts_and_quits(person: Person, box: str) -> None:
    go_inside(person, box)
    person.enter("top")
    person.expect(r"load average")
    person.expect(r"PID USER")
    person.type("q")
    person.expect(re.escape(INSIDE))
    person.enter("echo code=$?")
    person.expect(r"code=0\r")
    leave(person)


def test_f08_a_terminal_tells_that_memory_ran_out(person: Person) -> None:
    person.enter("""agent-sandbox run -m 64 -t -- python3 -c "len(b'x' * 2**31)"; echo code=$?""")
    person.expect(r"memory is used up; -m MIB makes one with more")
    person.expect(r"code=137\r")


def test_the_size_is_this_terminals_and_follows_it(person: Person, box: str) -> None:
    person.resize(31, 97)
    go_inside(person, box)
    person.enter("stty size; trap 'stty size' WINCH")
    person.expect(r"[\r\n]31 97\r")
    person.resize(40, 120)
    time.sleep(0.5)
    person.enter("stty size")
    person.expect(r"[\r\n]40 120\r")
    leave(person)


def test_keys_reach_the_programs_inside(person: Person, box: str) -> None:
    go_inside(person, box)
    person.enter("sleep 100")
    time.sleep(0.5)
    began = time.monotonic()
    person.type("\x03")
    person.expect(re.escape(INSIDE))
    person.enter("echo code=$?")
    person.expect(r"code=130\r")
    assert time.monotonic() - began < 20
    person.enter("sleep 100")
    time.sleep(0.5)
    person.type("\x1a")
    person.expect(r"Stopped")
    person.expect(re.escape(INSIDE))
    person.enter("kill %1; cat")
    time.sleep(0.5)
    person.enter("typed é")
    person.expect(r"typed é\r\n.*typed é")
    person.type("\x04")
    person.expect(re.escape(INSIDE))
    person.type("\x04")
    person.expect(re.escape(PROMPT))


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_passes_and_the_terminal_is_as_before(person: Person, box: str, code: int) -> None:
    person.enter("stty -g > /dev/null; before=$(stty -g); echo ready")
    person.expect(r"[\r\n]ready\r")
    go_inside(person, box)
    person.enter(f"exit {code}")
    person.expect(re.escape(PROMPT))
    person.enter("echo code=$?; test $before = $(stty -g) && echo 'sa''me'")
    person.expect(rf"code={code}\r")
    person.expect(r"same")


def program(person: Person, box: str) -> int:
    """The process of the command that the person has started."""
    wanted = [b"shell", box.encode()]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if [part for part in wanted if part in argv] == wanted:
                return int(entry.name)
    raise AssertionError("no shell command runs")


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGHUP], [signal.SIGTERM, signal.SIGTERM]])
def test_a_signal_gives_the_terminal_back(person: Person, box: str, signals: list[signal.Signals]) -> None:
    person.enter("before=$(stty -g); echo ready")
    person.expect(r"[\r\n]ready\r")
    go_inside(person, box)
    person.enter("sleep 700")
    time.sleep(0.3)
    pid = program(person, box)
    for signum in signals:
        os.kill(pid, signum)
    person.expect(re.escape(PROMPT))
    person.enter("echo code=$?; test $before = $(stty -g) && echo 'sa''me'")
    person.expect(rf"code={128 + signals[0]}\r")
    person.expect(r"same")


def test_what_ran_on_a_terminal_that_went_away_has_ended(local: Local, box: str) -> None:
    with Person(local.environ) as person:
        go_inside(person, box)
        person.enter("sleep 701")
        time.sleep(0.3)
    script = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 70[01]'"
    for _ in range(100):
        if local.run("exec", box, "--", "sh", "-c", script).stdout == "0\n":
            return
    pytest.fail("it still runs")


def test_a_terminal_for_one_command(person: Person, box: str) -> None:
    person.resize(33, 66)
    person.enter(
        f"SECRET=hidden agent-sandbox exec -it -e SECRET {box} -- sh -c 'stty size; echo $SECRET $TERM; exit 5'"
    )
    person.expect(r"[\r\n]33 66\r")
    person.expect(r"hidden xterm-256color\r")
    person.expect(re.escape(PROMPT))
    person.enter("echo code=$?")
    person.expect(r"code=5\r")
    person.enter("agent-sandbox run -it -- sh -c 'tty; read x; echo got $x'")
    person.expect(r"/dev/pts/\d+")
    person.enter("this")
    person.expect(r"got this\r")
    person.expect(re.escape(PROMPT))


def test_a_terminal_command_leaves_nothing(local: Local, box: str) -> None:
    assert [item["id"] for item in local.json("ls")] == [box]
    assert [item for item in local.json("execs", box) if item["status"] == "running"] == []


def test_a_server_that_dies_gives_the_terminal_back(local: Local, box: str, person: Person) -> None:
    person.enter("before=$(stty -g); echo ready")
    person.expect(r"[\r\n]ready\r")
    go_inside(person, box)
    (pid,) = local.servers()
    os.kill(pid, signal.SIGKILL)
    person.expect(r"agent-sandbox: .*broke")
    person.expect(re.escape(PROMPT))
    person.enter("echo code=$?; test $before = $(stty -g) && echo 'sa''me'")
    person.expect(r"code=125\r")
    person.expect(r"same")


@pytest.mark.parametrize("arguments", [["shell"], ["exec", "-it"]])
def test_without_a_terminal_it_says_so(local: Local, box: str, arguments: list[str]) -> None:
    done = subprocess.run(
        [PROGRAM, *arguments, box, *(["true"] if len(arguments) > 1 else [])],
        env=local.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.count("\n") == 1
    assert "terminal" in done.stderr
