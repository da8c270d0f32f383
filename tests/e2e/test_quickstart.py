"""The main job, and the documents' own examples, on the embedded backend."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_sandbox_engine import sandboxd_path

from agent_sandbox.cli import quickstart
from tests.e2e.local import Local
from tests.ports import free_port

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    local = Local(tmp_path_factory.mktemp("quickstart") / "data")
    yield local
    local.stop()


def nothing_is_left(local: Local) -> bool:
    return not local.json("ls") and not local.json("snapshots")


def test_every_step_has_the_expected_result(local: Local) -> None:
    report = local.json("quickstart")
    assert report["ok"] is True
    assert [step["ok"] for step in report["steps"]] == [True] * 13
    assert all(step["ms"] > 0 for step in report["steps"])
    fastest = report["steps"][11]["seen"][-1]
    assert fastest.removeprefix("fastest: ") in quickstart.CANDIDATES
    assert nothing_is_left(local)


def test_it_tells_people_what_it_did(local: Local) -> None:
    out = local.out("quickstart")
    for number in range(1, 14):
        assert re.search(rf"^ ?{number}\. .+ \d+ ms$", out, re.MULTILINE), number
    assert "fastest: " in out
    assert "Everything was as expected" in out


def test_an_unexpected_result_is_said_ends_with_1_and_leaves_nothing(local: Local, tmp_path: Path) -> None:
    root = tmp_path / "rootfs"
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    shutil.copy(sandboxd_path(), root / "bin" / "tool")
    other = Local(local.data.parent / "other", AGENT_SANDBOX_DEFAULT_IMAGE="no-python:1")
    other.out("image", "import", "no-python:1", str(root))
    try:
        done = other.run("quickstart")
        assert done.returncode == 1
        assert "FAILED" in done.stdout
        assert "python3 main.py ended with 127" in done.stderr
        assert nothing_is_left(other)
    finally:
        other.stop()


@pytest.mark.parametrize("after", ["create a sandbox", "snapshot the workspace", "fork the snapshot"])
def test_an_interrupt_leaves_nothing(local: Local, after: str) -> None:
    with local.start("quickstart") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if after in line.decode():
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert nothing_is_left(local)


def test_the_number_of_primes_is_right() -> None:
    divisors = [n for n in range(2, 550) if all(n % d for d in range(2, n))]
    assert quickstart.LIMIT < 550**2
    assert sum(all(n % p or n == p for p in divisors) for n in range(2, quickstart.LIMIT)) == quickstart.PRIMES


def run_python(local: Local, program: str) -> list[str]:
    """Run a program of the documentation against the local server; its lines that are not empty."""
    local.out("ls")
    environ = {**local.environ, "AGENT_SANDBOX_URL": f"unix://{local.socket}"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if line]


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_readmes_python_examples_run(local: Local) -> None:
    first, second = examples("README.md")
    lines = run_python(local, first)
    assert lines[0] == "hello from /workspace/hello.py"
    streamed = " ".join(lines[1:-1]).replace("stdout ", "").split()
    assert streamed == ["hello.py", "hello", "from", "/workspace/hello.py", "exit"]
    assert lines[-1] == "print('hello from', __file__)"
    lines = run_python(local, second)
    assert lines[0].startswith("started") or lines[0] == "stdout b'1\\n'"
    assert lines[-4:] == ["exit b''", "0", "a", "b"]
    assert nothing_is_left(local)


def test_the_examples_of_the_sdks_page_run(local: Local, tmp_path: Path) -> None:
    begin, *parts, terminal = examples("docs/how-to/use-the-sdk.md")
    assert "with Sandbox.create" in begin
    (tmp_path / "big.bin").write_bytes(bytes(range(256)))
    with tarfile.open(tmp_path / "src.tar", "w") as tar:
        tar.add(ROOT / "README.md", "README.md")
    body = "\n".join(parts).replace("make -j2", "echo made").replace('"/tmp/', f'"{tmp_path}/')
    body = body.replace('"src.tar"', f'"{tmp_path}/src.tar"').replace("cursor=4096", "cursor=1")
    body = body.replace('"before.tar"', f'"{tmp_path}/before.tar"')
    program = "from agent_sandbox import Sandbox\nwith Sandbox.create(timeout_seconds=60) as sandbox:\n"
    program += "".join(f"    {line}\n" for line in body.splitlines())
    vim = terminal.replace("vim notes.txt", "read x").replace(":q\\r", "typed\\r")
    program += "".join(f"    {line}\n" for line in vim.splitlines())
    lines = run_python(local, program)
    assert lines[:3] == ["a", "b", " 0"]
    assert "stdout b'made\\n'" in lines
    assert "ready " in lines
    assert lines[-1] == "0"
    assert (tmp_path / "copy.bin").read_bytes() == bytes(range(256))
    assert tarfile.is_tarfile(tmp_path / "before.tar")
    assert "merged []" in lines
    local.out("rm", *(item["id"] for item in local.json("snapshots")))


def test_the_readmes_command_prints_42(local: Local) -> None:
    commands = re.findall(r"^agent-sandbox run .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 1
    done = subprocess.run(["bash", "-c", commands[0]], env=local.environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "42\n")


def test_a_server_with_keys_lets_in_who_has_one(tmp_path: Path) -> None:
    port, key = str(free_port()), "k" * 24
    local = Local(tmp_path / "data", AGENT_SANDBOX_API_KEYS=key)
    with local.start("serve", "--host", "127.0.0.1", "--port", port) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == f"agent-sandbox listens on http://127.0.0.1:{port}\n".encode()
        local.environ |= {"AGENT_SANDBOX_URL": f"http://127.0.0.1:{port}", "AGENT_SANDBOX_API_KEY": key}
        assert local.json("ls") == []
        local.environ["AGENT_SANDBOX_API_KEY"] = "x" * 24
        assert local.run("ls").returncode == 66
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=30)
    assert server.returncode == 0


def test_the_tutorial_works_as_written(local: Local, tmp_path: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "tutorial" / "first-sandbox.md").read_text(), re.DOTALL)
    assert blocks[0].startswith("make setup\nexport PATH=")
    script = "\n".join(["set -euo pipefail", blocks[0].splitlines()[2], *blocks[1:]])
    done = subprocess.run(
        ["bash", "-c", script], env=local.environ, cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n42\n" in done.stdout
    assert done.stdout.endswith("\none\none\n")
    assert (tmp_path / "notes-from-fork.txt").read_text() == "one\ntwo\n"
    assert nothing_is_left(local)
