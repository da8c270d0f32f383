"""Where the local server's socket is, what it inherits, and who may start one."""

from __future__ import annotations

import logging
import os
import socket
import threading
from pathlib import Path

import pytest

from agent_sandbox.cli import local_server
from agent_sandbox.cli.exit_codes import LocalServerError, NeedsRootError
from agent_sandbox.cli.serve import OneLine, serve
from agent_sandbox.config import default_data_dir
from agent_sandbox.errors import ConflictError, ForbiddenError, InvalidRequestError
from agent_sandbox.manager.state import DataLock


def test_the_default_data_directory_has_the_well_known_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert local_server.socket_path(default_data_dir(), {}) == Path("/run/agent-sandbox/server.sock")
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    data_dir = default_data_dir()
    assert local_server.socket_path(data_dir, {"XDG_RUNTIME_DIR": "/r"}) == Path("/r/agent-sandbox/server.sock")
    assert local_server.socket_path(data_dir, {}) == Path("/run/user/1234/agent-sandbox/server.sock")


def test_another_data_directory_has_a_server_of_its_own() -> None:
    assert local_server.socket_path(Path("/srv/x"), {}) == Path("/srv/x/run/server.sock")


def test_a_socket_path_too_long_for_the_kernel_is_refused() -> None:
    fits = Path("/" + "d" * (107 - len("//run/server.sock")))
    assert len(str(local_server.socket_path(fits, {}))) == 107
    with pytest.raises(InvalidRequestError, match="DATA_DIR"):
        local_server.socket_path(Path(f"{fits}d"), {})


def test_the_server_inherits_settings_and_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "PATH": "/opt/bin",
        "LC_ALL": "C.UTF-8",
        "AGENT_SANDBOX_MAX_SANDBOXES": "3",
        "AGENT_SANDBOX_CONFIG": "conf.toml",
        "AGENT_SANDBOX_API_KEY": "k" * 20,
        "AGENT_SANDBOX_API_KEYS": "k" * 20,
        "AGENT_SANDBOX_URL": "http://else.where",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "LD_PRELOAD": "/tmp/evil.so",
        "PYTHONPATH": "/tmp",
    }
    assert local_server.server_environment(given) == {
        "PATH": "/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "AGENT_SANDBOX_MAX_SANDBOXES": "3",
        "AGENT_SANDBOX_CONFIG": str(tmp_path / "conf.toml"),
    }


def test_a_user_without_root_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NeedsRootError, match=r"sudo.*AGENT_SANDBOX_URL"):
        local_server.ensure(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_others_can_write_to_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(ForbiddenError, match="0700"):
        local_server.ensure(tmp_path)


def test_a_directory_that_others_can_only_enter_is_narrowed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    local_server._private_directory(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o7777 == 0o700


def test_a_socket_file_without_a_server_does_not_answer(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    assert not local_server.answers(path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    assert not local_server.answers(path)


def test_any_http_answer_counts_and_anything_else_does_not(tmp_path: Path) -> None:
    replies = [b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}", b"\x00\x01\x02 hello"]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def serve() -> None:
            for reply in replies:
                peer, _ = listener.accept()
                with peer:
                    peer.recv(4096)
                    peer.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        assert local_server.answers(tmp_path / "s")
        assert not local_server.answers(tmp_path / "s")
        thread.join(10)
        assert not thread.is_alive()


def test_stopping_where_no_server_runs_says_so(tmp_path: Path) -> None:
    assert local_server.stop(tmp_path) is False


def test_no_local_server_is_started_beside_one_that_listens_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "_private_directory", lambda path: path.mkdir(parents=True, exist_ok=True))
    started: list[Path] = []
    monkeypatch.setattr(local_server, "_start", lambda path, data_dir: started.append(data_dir))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    lock = DataLock(tmp_path / "lock")
    lock.acquire()
    with pytest.raises(LocalServerError, match=f"process {os.getpid()}.*AGENT_SANDBOX_URL"):
        local_server.ensure(tmp_path)
    assert started == []
    lock.release()
    local_server.ensure(tmp_path)
    assert started == [tmp_path]


def test_no_server_is_started_beside_the_local_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_DATA_DIR", os.fspath(tmp_path))
    monkeypatch.setattr(local_server, "answers", lambda path: True)
    with pytest.raises(ConflictError, match="serve --stop"):
        serve(insecure_no_auth=True)


def test_no_name_that_is_logged_forges_a_line_or_speaks_to_the_terminal() -> None:
    forged = logging.LogRecord("x", logging.WARNING, "", 0, "no file %s", ("a\nINFO all is well\x1b[2J\udcff",), None)
    assert OneLine("%(levelname)s %(message)s").format(forged) == (
        "WARNING no file a\\nINFO all is well\\x1b[2J\\udcff"
    )
