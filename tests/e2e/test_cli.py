"""The command line on the embedded backend: from a user's command to a process in a sandbox, and back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_sandbox_engine import sandboxd_path

from agent_sandbox.client import SandboxClient
from tests.e2e.local import PROGRAM, Local

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    local = Local(tmp_path_factory.mktemp("cli") / "data", A_SECRET_OF_THE_CALLER="hunter2")
    yield local
    local.stop()


@pytest.fixture
def box(local: Local) -> Iterator[str]:
    id = local.out("create", "--ttl", "3600")
    yield id
    local.run("rm", id)


def wait_until(condition: object, seconds: float = 60) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.05)


def test_run_prints_42_with_no_server_started_by_hand(local: Local) -> None:
    assert local.servers() == []
    done = local.run("run", "--", "python3", "-c", "print(6*7)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")
    assert local.json("ls") == []


def test_the_local_server_is_its_users_alone_and_knows_no_secret_of_its_caller(local: Local) -> None:
    local.out("ls")
    (pid,) = local.servers()
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    assert b"hunter2" not in Path(f"/proc/{pid}/environ").read_bytes()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (local.data, local.socket.parent, local.socket)}
    assert modes == {"data": 0o700, "run": 0o700, "server.sock": 0o600}
    assert stat.S_IMODE((local.data / "server.log").stat().st_mode) == 0o600
    assert {Path(f"/proc/{pid}/fd/{fd}").readlink() for fd in (0, 1, 2)} == {
        Path("/dev/null"),
        local.data / "server.log",
    }


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "exit 255"], 255),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
    ],
)
def test_the_exit_code_is_the_commands(local: Local, box: str, command: list[str], code: int) -> None:
    assert local.run("exec", box, "--", *command).returncode == code


@pytest.mark.parametrize("flag", [[], ["--json"]])
@pytest.mark.parametrize(("program", "code"), [("no-such-program", 127), ("/etc/passwd", 126)])
def test_a_program_that_cannot_start_is_named(local: Local, box: str, program: str, code: int, flag: list[str]) -> None:
    done = local.run("exec", *flag, box, "--", program)
    assert done.returncode == code
    told = json.loads(done.stdout)["stderr"] if flag else done.stderr
    assert told.startswith(f"{program}: ")
    assert told.count("\n") == 1


def test_output_is_kept_apart_and_as_it_was_written(local: Local) -> None:
    script = r"printf 'a\r\n\n\0é'; printf 'no newline' >&2"
    with local.start("run", "sh", "-c", script) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, b"a\r\n\n\0\xc3\xa9", b"no newline")


def test_output_comes_while_the_command_runs(local: Local) -> None:
    with local.start("run", "--", "sh", "-c", "echo first; sleep 60") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_and_destroys_the_sandbox(local: Local, signum: signal.Signals, code: int) -> None:
    with local.start("run", "--", "sh", "-c", "echo ready; sleep 600") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert len(local.json("ls")) == 1
        process.send_signal(signum)
        process.communicate(timeout=60)
    assert process.returncode == code
    assert local.json("ls") == []


def test_a_signal_during_exec_ends_the_command_and_keeps_the_sandbox(local: Local, box: str) -> None:
    with local.start("exec", box, "--", "sh", "-c", "echo ready; sleep 601; echo never") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    script = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 60[1]'"
    wait_until(lambda: local.run("exec", box, "--", "sh", "-c", script).stdout == "0\n")


def test_a_reader_that_leaves_ends_everything(local: Local) -> None:
    with local.start("run", "--", "yes") as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"y\ny\n"
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(60) == 141
    assert local.json("ls") == []


def test_a_deadline_says_what_happened(local: Local) -> None:
    done = local.run("run", "--timeout", "5", "--", "sh", "-c", "echo before; sleep 600")
    assert (done.returncode, done.stdout) == (137, "before\n")
    assert "--timeout" in done.stderr


def test_want_of_memory_says_what_happened_and_what_to_do(local: Local) -> None:
    hog = "len(b'x' * 2**31)"
    done = local.run("run", "-m", "64", "--", "python3", "-c", hog)
    note = "the command was killed: the sandbox's memory is used up; -m MIB makes one with more"
    assert (done.returncode, done.stderr) == (137, f"agent-sandbox: {note}\n")
    sandbox = local.json("create", "-m", "64")["id"]
    exec_id = local.out("exec", "-d", sandbox, "--", "python3", "-c", hog)
    assert local.run("logs", "-f", sandbox, exec_id).stderr == f"agent-sandbox: {note}\n"
    assert "signal 9, out of memory" in local.out("execs", sandbox)
    local.out("rm", sandbox)


def test_environment_and_directory(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    local.environ["PASSED_ON"] = "mine"
    script = 'echo "$GIVEN $PASSED_ON ${A_SECRET_OF_THE_CALLER:-none} $PWD"'
    arguments = ["-e", "GIVEN=a=b", "-e", "PASSED_ON", "-w", "/tmp", "--", "sh", "-c", script]
    assert local.out("run", *arguments) == "a=b mine none /tmp"


def test_results_as_json(local: Local) -> None:
    done = local.run("run", "--json", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert done.returncode == 3
    assert '"stdout": "out\\n"' in done.stdout
    assert '"exit_code": 3' in done.stdout
    assert json.loads(done.stdout)["oom_killed"] is False


def test_want_of_memory_is_told_as_json(local: Local) -> None:
    done = local.run("run", "-m", "32", "--json", "--", "tail", "/dev/zero")
    assert done.returncode == 137
    told = json.loads(done.stdout)
    assert (told["exit_code"], told["timed_out"], told["oom_killed"]) == (137, False, True)


def test_a_sandbox_from_birth_to_death(local: Local, tmp_path: Path) -> None:
    sandbox = local.json("create", "--ttl", "3600", "--memory", "128", "--cpus", "0.5", "-e", "COLOUR=red")
    box = sandbox["id"]
    assert (sandbox["memory_mb"], sandbox["cpus"], sandbox["network"]) == (128, 0.5, False)
    assert box in local.out("ls")

    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "tool").write_text("#!/bin/sh\necho $COLOUR\n")
    (tmp_path / "in" / "tool").chmod(0o755)
    (tmp_path / "in" / "sub" / "odd name\udcff").write_bytes(bytes(range(256)))
    assert "copied 2 files" in local.run("cp", str(tmp_path / "in"), f"{box}:things").stderr
    assert local.out("exec", box, "--", "things/tool") == "red"

    snapshot = local.out("snapshot", box, "--name", "first")
    listed = local.json("snapshots", box)
    assert [(item["id"], item["name"], item["sandbox_id"]) for item in listed] == [(snapshot, "first", box)]
    assert listed[0]["size_bytes"] == 256 + len("#!/bin/sh\necho $COLOUR\n")
    assert snapshot in local.out("snapshots")

    local.out("exec", box, "--", "sh", "-c", "rm -rf things; echo new > new")
    assert local.out("rollback", box, snapshot) == box
    assert local.out("exec", box, "--", "sh", "-c", "ls; things/tool") == "things\nred"

    forks = local.out("fork", snapshot, "--count", "2", "--ttl", "3600").split()
    assert len({box, *forks}) == 3
    local.out("exec", forks[0], "--", "rm", "-rf", "things")
    assert local.out("exec", forks[1], "--", "things/tool") == "red"

    local.run("cp", f"{box}:things", str(tmp_path / "out"))
    assert (tmp_path / "out" / "sub" / "odd name\udcff").read_bytes() == bytes(range(256))
    assert (tmp_path / "out" / "tool").read_text() == "#!/bin/sh\necho $COLOUR\n"

    local.out("rm", box, *forks)
    assert local.json("ls") == []
    assert [item["id"] for item in local.json("snapshots")] == [snapshot]
    local.out("rm", snapshot)
    assert local.json("snapshots") == []


def test_files_that_the_sandbox_made_to_mislead(local: Local, box: str, tmp_path: Path) -> None:
    script = "mkdir d; ln -s /etc/passwd d/link; mkfifo d/fifo; printf x > 'd/-rf'; printf y > 'd/a\nb'; ln -s . d/loop"
    local.out("exec", box, "--", "sh", "-c", f"{script}; ln -s ../../x d/up; chmod 4755 d/-rf; cp -a d /tmp/d")
    done = local.run("cp", f"{box}:d", str(tmp_path / "out"))
    assert done.returncode == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"-rf", "a\nb", "loop"}
    assert stat.S_IMODE((tmp_path / "out" / "-rf").stat().st_mode) == 0o755
    assert done.stderr.count("left out") == 3
    listed = local.json("cp", f"{box}:/tmp/d", str(tmp_path / "from-tmp"))
    assert {path.name for path in (tmp_path / "from-tmp").iterdir()} == {"-rf", "a\nb"}
    assert (listed["files"], len(listed["left_out"])) == (2, 4)


def test_input_is_passed_on_byte_by_byte_and_ends(local: Local, box: str) -> None:
    content = bytes(range(256)) * 4000
    for arguments in (["exec", "-i", box], ["run", "-i"]):
        with local.start(*arguments, "--", "cat", stdin=subprocess.PIPE) as process:
            out, err = process.communicate(content, timeout=60)
        assert (process.returncode, out == content, err) == (0, True, b"")
    with local.start("exec", "-i", box, "--", "head", "-c1", stdin=subprocess.PIPE) as process:
        out, _ = process.communicate(content, timeout=60)
    assert (process.returncode, out) == (0, b"\0")
    assert local.out("exec", box, "--", "cat") == "", "without -i it is empty"


def test_a_command_is_left_running_read_and_ended(local: Local, box: str) -> None:
    exec_id = local.out("exec", "-d", box, "--", "sh", "-c", "echo one; printf '\\377'; sleep 600")
    wait_until(lambda: [item["cursor"] for item in local.json("execs", box)] == [5])
    with local.start("logs", box, exec_id) as process:
        assert process.communicate(timeout=60)[0] == b"one\n\xff"
    local.out("serve", "--stop")
    (kept,) = local.json("execs", box)
    assert (kept["id"], kept["status"]) == (exec_id, "running")
    with local.start("logs", "-f", box, exec_id) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"one\n\xff"
        assert local.json("kill", box, exec_id, "-s", "KILL")["processes"] >= 1
        assert process.communicate(timeout=60)[0] == b""
    assert process.returncode == 0
    assert local.run("kill", box, exec_id).returncode == 68
    assert local.run("logs", box, "exnone").returncode == 68
    assert "signal 9" in local.out("execs", box)


def test_a_stopped_sandbox_is_started_again(local: Local, box: str) -> None:
    local.out("exec", box, "--", "sh", "-c", "echo kept > file")
    assert local.out("stop", box) == box
    assert [item["status"] for item in local.json("ls") if item["id"] == box] == ["stopped"]
    refused = local.run("exec", box, "--", "true")
    assert refused.returncode == 125
    assert "start" in refused.stderr
    assert local.json("start", box)[0]["status"] == "running"
    assert local.out("exec", box, "--", "cat", "file") == "kept"
    assert local.json("inspect", box)["id"] == box
    assert local.json("stats", box)["daemon_memory_bytes"] > 0
    assert local.json("rm", box) == [{"id": box, "removed": True}]


def test_a_directory_is_copied_in_before_a_run(local: Local, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "tool").write_text("#!/bin/sh\necho ran in $PWD\n")
    (tmp_path / "project" / "tool").chmod(0o755)
    assert local.out("run", "-v", str(tmp_path / "project"), "--", "./tool") == "ran in /workspace"
    volume = f"{tmp_path / 'project'}:sub"
    assert local.out("run", "-v", volume, "-w", "sub", "--", "./tool") == "ran in /workspace/sub"
    assert local.json("ls") == []


def test_a_copy_that_is_interrupted_leaves_nothing(local: Local, box: str, tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    for number in range(100):
        (tmp_path / "big" / f"f{number}").write_bytes(os.urandom(1 << 20))
    with local.start("cp", str(tmp_path / "big"), f"{box}:big") as process:
        with SandboxClient(uds=local.socket) as client:
            sandbox = client.get(box)
            wait_until(lambda: sandbox.list_files() != [])
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    assert local.out("exec", box, "--", "ls", "-A") == ("big" if process.returncode == 0 else "")
    local.out("exec", box, "--", "sh", "-c", "mkdir -p out; head -c 60000000 /dev/urandom > out/f")
    (tmp_path / "here").mkdir()
    with local.start("cp", f"{box}:out", str(tmp_path / "here" / "out")) as process:
        wait_until(lambda: any((tmp_path / "here").iterdir()))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    assert {path.name for path in (tmp_path / "here").iterdir()} == ({"out"} if process.returncode == 0 else set())


def test_what_changes_is_told(local: Local, box: str) -> None:
    with local.start("watch", box) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline() == b"agent-sandbox: watching /workspace\n"
        local.out("exec", box, "--", "sh", "-c", "mkdir d; echo > 'd/a\nb'")
        assert process.stdout.readline() == b"created /workspace/d/\n"
        assert b"/workspace/d/a\\nb" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130


def test_ids_are_completed_and_no_server_is_started_for_it(local: Local, box: str, tmp_path: Path) -> None:
    def complete(where: Local, words: str) -> list[str]:
        where.environ |= {
            "_AGENT_SANDBOX_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        try:
            return where.out().split()
        finally:
            for name in ("_AGENT_SANDBOX_COMPLETE", "COMP_WORDS", "COMP_CWORD"):
                where.environ.pop(name)

    assert complete(local, "agent-sandbox exec ") == [box]
    assert complete(local, f"agent-sandbox stop {box[:4]}") == [box]
    assert complete(local, "agent-sandbox cp sb") == [f"{box}:"]
    assert "snapshots" in complete(local, "agent-sandbox snap")
    other = Local(tmp_path / "data")
    assert complete(other, "agent-sandbox exec ") == []
    assert other.servers() == []


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["exec", "sbnone", "--", "true"], 125, "sbnone"),
        (["rm", "sbnone"], 68, "sbnone"),
        (["rollback", "sbnone", "snapnone"], 68, "sbnone"),
        (["fork", "snapnone"], 68, "snapnone"),
        (["create", "--memory", "1000000"], 64, "memory"),
        (["create", "--image", "no/such:image"], 68, "image import"),
        (["create", "--network"], 67, "network"),
        (["cp", "sbnone:x", "/tmp/never"], 68, "sbnone"),
    ],
)
def test_errors_are_one_line_and_have_codes(local: Local, arguments: list[str], code: int, word: str) -> None:
    done = local.run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("agent-sandbox: ")
    assert done.stderr.count("\n") == 1
    assert word in done.stderr


def test_images(local: Local, tmp_path: Path) -> None:
    root = tmp_path / "rootfs"
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    shutil.copy(sandboxd_path(), root / "bin" / "tool")
    info = local.json("image", "import", "tiny:1", str(root))
    assert info["name"] == "tiny:1"
    assert info["digest"].startswith("sha256:")
    assert [image["name"] for image in local.json("image", "ls")] == ["host", "tiny:1"]

    assert local.out("run", "--image", "tiny:1", "--", "/bin/tool", "--version").startswith("sandboxd ")
    box = local.out("create", "--image", "tiny:1", "--ttl", "3600")
    refused = local.run("image", "rm", "tiny:1")
    assert refused.returncode == 69
    assert "in use" in refused.stderr
    local.out("rm", box)
    local.out("image", "rm", "tiny:1")
    assert [image["name"] for image in local.json("image", "ls")] == ["host"]
    assert local.run("image", "rm", "host").returncode == 64


def test_two_commands_that_find_no_server_start_one(local: Local) -> None:
    local.stop()
    wait_until(lambda: local.servers() == [])
    processes = [local.start("ls", "--json") for _ in range(4)]
    for process in processes:
        with process:
            out, err = process.communicate(timeout=60)
            assert (process.returncode, out, err) == (0, b"[]\n", b"")
    assert len(local.servers()) == 1


def test_a_dead_servers_socket_is_no_obstacle(local: Local) -> None:
    local.out("ls")
    (pid,) = local.servers()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: local.servers() == [])
    assert local.socket.exists()
    assert local.json("ls") == []
    assert local.servers() != [pid]


def test_sandboxes_outlive_the_server(local: Local, box: str) -> None:
    local.out("exec", box, "--", "sh", "-c", "echo kept > file")
    local.out("serve", "--stop")
    assert local.servers() == []
    assert local.out("exec", box, "--", "cat", "file") == "kept"


def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    local = Local(tmp_path / "data", AGENT_SANDBOX_SANDBOXD="/no/such/sandboxd")
    done = local.run("ls")
    assert done.returncode == 78
    assert "/no/such/sandboxd" in done.stderr
    assert local.servers() == []


def test_an_idle_server_ends_by_itself_and_takes_its_socket_with_it(tmp_path: Path) -> None:
    local = Local(tmp_path / "data")
    with local.start("serve", "--unix", str(local.socket), "--idle-exit", "1", "--data-dir", str(local.data)) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == f"agent-sandbox listens on unix://{local.socket}\n".encode()
        assert local.json("ls") == []
        server.communicate(timeout=30)
    assert server.returncode == 0
    assert not local.socket.exists()


def test_a_terminal_that_goes_away_ends_the_server_in_order(tmp_path: Path) -> None:
    local = Local(tmp_path / "data")
    with local.start("serve", "--unix", str(local.socket)) as server:
        assert server.stdout is not None
        server.stdout.readline()
        server.send_signal(signal.SIGHUP)
        server.communicate(timeout=30)
    assert server.returncode == 0
    assert not local.socket.exists()


def test_doctor_finds_this_machine_fit(local: Local) -> None:
    done = local.run("doctor", "--json")
    assert done.returncode == 0, done.stdout


def test_a_server_without_keys_is_refused(tmp_path: Path) -> None:
    done = Local(tmp_path / "data").run("serve", "--port", "18080")
    assert done.returncode == 64
    assert "AGENT_SANDBOX_API_KEYS" in done.stderr


def test_a_user_without_root_is_told_what_to_do(tmp_path: Path) -> None:
    assert os.geteuid() == 0
    tmp_path.chmod(0o777)
    done = subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", PROGRAM, "run", "true"],
        env={"PATH": os.environ["PATH"], "AGENT_SANDBOX_DATA_DIR": str(tmp_path / "data"), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 125
    assert "sudo" in done.stderr
