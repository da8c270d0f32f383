"""Commands as objects on the embedded backend: over a killed server, on a terminal, when nothing can be started."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.e2e.raw import HEADERS, ask, call, lines, opened
from tests.e2e.serving import Served, serving

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("execs") / "data", reap_interval_seconds="0.5") as served:
        yield served


@pytest.fixture
def box(server: Served) -> Iterator[str]:
    path = f"/sandboxes/{ask(server, 'POST', '/sandboxes', {'disk_mb': 64, 'pids_limit': 64})['id']}"
    yield path
    call(server, "DELETE", path)


def detached(server: Served, box: str, command: Any, **more: Any) -> str:
    reply = ask(server, "POST", f"{box}/execs", {"command": command, "detach": True, **more})
    return f"{box}/execs/{reply['id']}"


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event.get("data", "") for event in events)


def test_f24_commands_go_on_while_the_server_is_dead(server: Served, box: str) -> None:
    wait = "until [ -e go ]; do sleep 0.1; done"
    path = detached(server, box, f"echo 1; sleep 1; echo 2; {wait}; echo 3; exit 7")
    with opened(server, "POST", f"{box}/execs", {"command": f"{wait}; echo end; exit 8"}) as response:
        attached = json.loads(response.readline())["id"]
        server.stop(signal.SIGKILL)
    time.sleep(1)
    server.start()
    listed = ask(server, "GET", f"{box}/execs")["execs"]
    assert {exec["id"]: exec["status"] for exec in listed} == {
        path.rpartition("/")[2]: "running",
        attached: "running",
    }
    ask(server, "POST", f"{box}/exec", {"command": "echo > go"})
    for one, output, code in ((path, "1\n2\n3\n", 7), (f"{box}/execs/{attached}", "end\n", 8)):
        events = lines(call(server, "GET", f"{one}/output")[1])
        assert text_of(events) == output
        assert (events[-1]["type"], events[-1]["exit_code"]) == ("exit", code)


def test_f5_leaving_ends_the_tree_of_who_started_it_and_nobody_elses(server: Served, box: str) -> None:
    script = "setsid sleep 301 & (setsid sleep 302 &) ; echo up; sleep 303"
    with opened(server, "POST", f"{box}/execs", {"command": script}) as response:
        exec_id = json.loads(response.readline())["id"]
        assert json.loads(response.readline())["data"] == "up\n"
        with opened(server, "GET", f"{box}/execs/{exec_id}/output") as reader:
            assert json.loads(reader.readline())["data"] == "up\n"
        assert ask(server, "GET", f"{box}/execs/{exec_id}")["status"] == "running"
    end = lines(call(server, "GET", f"{box}/execs/{exec_id}/output")[1])[-1]
    assert end["signal"] == 9
    seen = ask(server, "POST", f"{box}/exec", {"command": "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"})["stdout"]
    assert "sleep 30" not in seen


def test_a_sandbox_without_a_free_process_still_lists_and_kills(server: Served, box: str) -> None:
    fork = "import os, time\nwhile True:\n try: os.fork() or time.sleep(300)\n except OSError: time.sleep(0.1)"
    path = detached(server, box, ["python3", "-c", fork])
    deadline = time.monotonic() + 30
    while call(server, "POST", f"{box}/exec", {"command": ["true"]})[0] == 200:
        assert time.monotonic() < deadline
    assert ask(server, "GET", f"{box}/execs")["execs"][0]["status"] == "running"
    assert ask(server, "POST", f"{path}/signal", {"signal": "KILL"})["processes"] > 10
    assert call(server, "DELETE", path)[0] == 204
    deadline = time.monotonic() + 30
    while call(server, "POST", f"{box}/exec", {"command": ["true"]})[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_f08_want_of_memory_is_told_later_and_by_another_server(server: Served) -> None:
    box = f"/sandboxes/{ask(server, 'POST', '/sandboxes', {'disk_mb': 64, 'memory_mb': 64})['id']}"
    hog = 'len(b"x" * 2**31)'
    paths: dict[str, bool] = {}

    def ended(expected: bool, *command: str, **more: float) -> None:
        # One after the other: the memory of a sandbox is counted as a whole, so who dies beside a hog died of want too.
        path = detached(server, box, list(command), **more)
        assert lines(call(server, "GET", f"{path}/output")[1])[-1]["type"] == "exit"
        paths[path] = expected

    def told() -> list[list[bool | None]]:
        listed = {exec["id"]: exec["oom_killed"] for exec in ask(server, "GET", f"{box}/execs")["execs"]}
        outputs = [lines(call(server, "GET", f"{path}/output")[1])[-1]["oom_killed"] for path in paths]
        single = [ask(server, "GET", path)["oom_killed"] for path in paths]
        return [outputs, single, [listed[path.rpartition("/")[2]] for path in paths]]

    ended(True, "python3", "-c", hog)
    ended(True, "sh", "-c", f"python3 -c '{hog}'; exit $?")
    ended(False, "sh", "-c", "kill -9 $$")
    ended(False, "sh", "-c", "exit 3")
    ended(False, "sleep", "60", timeout_seconds=0.5)
    assert told() == [list(paths.values())] * 3
    server.stop(signal.SIGKILL)
    server.start()
    assert told() == [list(paths.values())] * 3
    call(server, "DELETE", box)


def test_what_a_sandbox_uses(server: Served, box: str) -> None:
    detached(server, box, ["sleep", "300"])
    ask(server, "POST", f"{box}/exec", {"command": "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"})
    stats = ask(server, "GET", f"{box}/stats")
    assert 1_000_000 < stats["memory_bytes"] < 512 << 20
    assert 0.05 < stats["cpu_seconds"] < 60
    assert stats["processes"] >= 1
    assert stats["execs"] == 1


def test_f29_a_running_command_keeps_its_sandbox(server: Served) -> None:
    created = ask(server, "POST", "/sandboxes", {"timeout_seconds": 4})
    box = f"/sandboxes/{created['id']}"
    result = ask(server, "POST", f"{box}/exec", {"command": "sleep 6; echo done > out; echo done"})
    assert (result["stdout"], result["exit_code"]) == ("done\n", 0)
    assert call(server, "GET", f"{box}/files?path=out") == (200, b"done\n")
    assert ask(server, "GET", box)["expires_at"] > created["expires_at"]
    call(server, "DELETE", box)


def test_f26_a_stopped_sandbox_keeps_its_workspace_over_a_restart(server: Served, box: str) -> None:
    ask(server, "PUT", f"{box}/files?path=d/kept", b"here")
    assert ask(server, "POST", f"{box}/stop")["status"] == "stopped"
    server.stop(signal.SIGKILL)
    server.start()
    assert ask(server, "GET", box)["status"] == "stopped"
    status, body = call(server, "POST", f"{box}/exec", {"command": "true"})
    assert (status, "start it" in json.loads(body)["error"]["message"]) == (409, True)
    assert ask(server, "POST", f"{box}/start")["status"] == "running"
    assert ask(server, "POST", f"{box}/exec", {"command": "cat d/kept"})["stdout"] == "here"


# -- the terminal --------------------------------------------------------------------------------------------


def dial(server: Served, path: str) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}/v1{path}", additional_headers=HEADERS)


def until(socket: ClientConnection, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        message = socket.recv(30)
        seen += message if isinstance(message, bytes) else b""
    return seen


def test_a_person_works_in_a_terminal(server: Served, box: str) -> None:
    with dial(server, f"{box}/terminal?rows=33&cols=99") as socket:
        socket.send(b"PS1='> '; stty size; echo $TERM; tty\r")
        assert b"33 99\r\nxterm-256color\r\n/dev/pts/" in until(socket, b"/dev/pts/")
        socket.send(b"sleep 300\r")
        time.sleep(0.5)
        socket.send(b"\x03")
        socket.send(b"echo code=$?\r")
        until(socket, b"code=130")
        socket.send(json.dumps({"type": "resize", "rows": 11, "cols": 44}))
        socket.send(b"stty size\r")
        until(socket, b"11 44")
        socket.send(b"exit 5\r")
        told: list[dict[str, Any]] = []
        try:
            while True:
                message = socket.recv(30)
                if isinstance(message, str):
                    told.append(json.loads(message))
        except ConnectionClosed:
            pass
    assert (told[-1]["type"], told[-1]["exit_code"]) == ("exit", 5)


def test_a_terminal_is_left_and_found_again(server: Served, box: str) -> None:
    path = detached(server, box, ["/bin/sh", "-i"], tty={"rows": 24, "cols": 80}, env={"PS1": "> "})
    exec_id = path.rpartition("/")[2]
    with dial(server, f"{box}/terminal?exec={exec_id}") as socket:
        socket.send(b"left=behind\r")
        until(socket, b"left=behind")
    with dial(server, f"{box}/terminal?exec={exec_id}&rows=5&cols=50") as socket:
        socket.send(b"echo found=$left; stty size\r")
        until(socket, b"found=behind\r\n5 50")
        assert call(server, "DELETE", path)[0] == 204


def test_memory_stays_flat_while_a_command_floods_a_reader_that_stalls(server: Served, box: str) -> None:
    def peak() -> int:
        text = Path(f"/proc/{server.pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0])

    ask(server, "POST", f"{box}/exec", {"command": "true"})
    before = peak()
    with opened(server, "POST", f"{box}/execs", {"command": "yes"}) as response:
        response.readline()
        time.sleep(3)
        assert peak() - before < 16 * 1024  # KiB
    path = detached(server, box, "head -c 50000000 /dev/zero; echo end")
    events = lines(call(server, "GET", f"{path}/output")[1])
    assert events[-1]["exit_code"] == 0
    assert ask(server, "GET", path)["cursor"] == 50_000_004
    assert peak() - before < 16 * 1024
