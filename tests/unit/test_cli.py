"""The command line without a server: usage, errors, exit codes, and what loading it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox import __version__
from agent_sandbox.cli.app import main
from agent_sandbox.installing import remedy

COMMANDS = [
    *("quickstart", "run", "exec", "shell", "execs", "logs", "kill", "create", "ls", "inspect", "stats", "start"),
    *(
        "stop",
        "rm",
        "cp",
        "watch",
        "snapshot",
        "snapshots",
        "rollback",
        "fork",
        "changes",
        "diff",
        "log",
        "export",
        "merge",
        "image",
        "store",
        "serve",
        "openapi",
    ),
    "backends",
    "doctor",
]


def cli(*arguments: str, code: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; ``code`` runs before it."""
    program = f"import sys; sys.argv[0] = 'agent-sandbox'; {code}\nfrom agent_sandbox.cli import main; main()"
    env = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_SANDBOX_")} | environ
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, env=env
    )


def test_help_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in out
    assert "125 run, exec and shell only" in " ".join(out.split())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"agent-sandbox {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["ls", "--nonsense"],
        ["run"],
        ["cp", "a", "b"],
        ["cp", "sb1:a", "sb1:b"],
        ["run", "-e", "=x", "true"],
        ["run", "-e", "NO_SUCH_VARIABLE_IS_SET", "true"],
        ["fork", "snap1", "--count", "0"],
        ["exec", "-d", "-i", "sb1", "true"],
        ["exec", "-d", "-t", "sb1", "true"],
        ["exec", "-t", "--json", "sb1", "true"],
        ["run", "-t", "--json", "true"],
        ["run", "-v", "/no/such/directory", "true"],
        ["run", "-v", "/etc/passwd:x", "true"],
    ],
)
def test_wrong_usage_ends_with_2_and_says_so(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "Error" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line_with_the_remedy() -> None:
    done = cli("ls", AGENT_SANDBOX_URL="http://127.0.0.1:9")
    assert done.returncode == 75
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "127.0.0.1:9" in done.stderr
    assert "agent-sandbox serve" in done.stderr


def test_run_and_exec_report_errors_of_ours_with_125() -> None:
    assert cli("run", "--", "true", AGENT_SANDBOX_URL="http://127.0.0.1:9").returncode == 125
    assert cli("exec", "sb1", "--", "true", AGENT_SANDBOX_URL="http://127.0.0.1:9").returncode == 125


def test_a_url_that_is_none_is_an_invalid_request() -> None:
    done = cli("ls", AGENT_SANDBOX_URL="ftp://somewhere")
    assert done.returncode == 64
    assert "ftp://somewhere" in done.stderr


def test_a_bad_setting_is_named(tmp_path: Path) -> None:
    done = cli("ls", AGENT_SANDBOX_DATA_DIR=str(tmp_path), AGENT_SANDBOX_PORT="many")
    assert done.returncode == 64
    assert "AGENT_SANDBOX_PORT" in done.stderr


def test_without_root_the_remedy_is_said(tmp_path: Path) -> None:
    done = cli("ls", code="import os; os.geteuid = lambda: 1000", AGENT_SANDBOX_DATA_DIR=str(tmp_path))
    assert done.returncode == 77
    assert "sudo" in done.stderr
    assert "AGENT_SANDBOX_URL" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("module", "extra"), [("typer", "cli"), ("httptools", ""), ("fastapi", "server")])
def test_a_missing_extra_is_one_line_with_the_remedy(module: str, extra: str) -> None:
    done = cli("openapi", code=f"sys.modules[{module!r}] = None")
    if not extra:
        assert done.returncode == 0  # what the command does not need does not matter
        return
    assert done.returncode == 2
    assert done.stderr == f"agent-sandbox: {module} is not installed: {remedy(extra)}\n"


def test_help_loads_neither_the_client_nor_the_server() -> None:
    done = cli(
        "--help",
        code="import atexit; atexit.register(lambda: print('LOADED', *sorted(sys.modules), file=sys.stderr))",
    )
    loaded = set(done.stderr.split())
    assert "LOADED" in loaded
    assert "agent_sandbox.cli.quickstart" in loaded
    assert not loaded & {"httpx", "fastapi", "uvicorn", "agent_sandbox.client", "agent_sandbox.manager"}


def test_openapi_prints_the_document() -> None:
    done = cli("openapi")
    assert done.returncode == 0
    assert json.loads(done.stdout)["info"]["title"] == "agent-sandbox"


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    program = "from agent_sandbox.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "openapi"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_doctor_prints_json(tmp_path: Path) -> None:
    done = cli("doctor", "--json", AGENT_SANDBOX_DATA_DIR=str(tmp_path / "data"), AGENT_SANDBOX_SANDBOXD="/nonexistent")
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert findings["kernel"]["detail"] == f"Linux {os.uname().release}"
    assert findings["sandboxd"]["status"] == "fail"
    assert findings["sandboxd"]["remedy"]
    assert done.returncode == 1
    assert not (tmp_path / "data").exists()
