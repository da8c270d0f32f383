"""The user's local server: found, or started on demand.

The server listens on a unix socket in a directory of its user alone. One data directory has one local server: the
default one is at ``/run/agent-sandbox/server.sock`` (root) or ``$XDG_RUNTIME_DIR/agent-sandbox/server.sock``; any other
data directory holds its own ``run/server.sock``, so that a command never talks to the server of other data.

Starting is race-free: whoever holds the lock beside the socket asks again whether a server answers, then starts one in
a session of its own and waits until it is ready. The question is a look at a sandbox that cannot be, which restarts
the server's idle clock: a server that answered stays long enough for the request that follows.

The server gets a chosen part of the environment (see :func:`server_environment`): the settings and what finding
programs takes, none of the caller's secrets. Its output goes to ``server.log`` in the data directory (0600, one older
file kept).
"""

from __future__ import annotations

import fcntl
import http.client
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agent_sandbox.cli import starting
from agent_sandbox.cli.exit_codes import LocalServerError, NeedsRootError
from agent_sandbox.config import PREFIX, default_data_dir
from agent_sandbox.errors import ForbiddenError, InvalidRequestError

IDLE_EXIT_SECONDS = 600
STOP_SECONDS = 15.0
PROBE_SECONDS = 10.0
"""Longest wait for one answer, which comes from memory: a busy machine may still need a while."""
LOG_BYTES = 1 << 20
TAIL_BYTES, TAIL_LINES = 4096, 12
SOCKET_PATH_BYTES = 107
"""``sun_path`` of unix(7) holds 108 bytes with the closing NUL."""

_PASSED = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")
_KEPT_BACK = {PREFIX + "URL", PREFIX + "API_KEY", PREFIX + "API_KEYS", PREFIX + "HOST", PREFIX + "PORT"}
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def socket_path(data_dir: Path, environ: Mapping[str, str] | None = None) -> Path:
    """Return where the local server of a data directory listens; :class:`InvalidRequestError` for too long a path."""
    environ = os.environ if environ is None else environ
    if data_dir != default_data_dir():
        path = data_dir / "run" / "server.sock"
    elif os.geteuid() == 0:
        path = Path("/run/agent-sandbox/server.sock")
    else:
        runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
        path = Path(runtime) / "agent-sandbox" / "server.sock"
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise InvalidRequestError(
            f"the socket path {path} is longer than {SOCKET_PATH_BYTES} bytes: use a shorter AGENT_SANDBOX_DATA_DIR"
        )
    return path


def ensure(data_dir: Path) -> Path:
    """Return the socket of a local server that answers, starting one where none does.

    Raises :class:`NeedsRootError` for a user who cannot start one, :class:`LocalServerError` when it does not become
    ready.
    """
    path = socket_path(data_dir)
    if answers(path):
        return path
    if os.geteuid() != 0:
        raise NeedsRootError(
            "sandboxes on this machine need root: run with sudo, or set AGENT_SANDBOX_URL (and AGENT_SANDBOX_API_KEY) "
            "to use a server elsewhere"
        )
    _private_directory(path.parent)
    with _lock(path.parent / "start.lock"):
        if not answers(path) and _predecessor_has_gone(path):
            _refuse_beside_another(data_dir)
            _start(path, data_dir)
    return path


def answers(path: Path) -> bool:
    """Whether a server answers on the socket; what it answers does not matter here."""
    connection = http.client.HTTPConnection("localhost", timeout=PROBE_SECONDS)
    try:
        connection.sock = _connect(path)
        connection.request("GET", "/v1/sandboxes/sb0")
        connection.getresponse().read(65536)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def stop(data_dir: Path) -> bool:
    """End the local server and wait until it has gone; ``False`` when none runs. Its sandboxes stay.

    The process is the one that the kernel names as the socket's peer, never one found by name or by an old file.
    """
    try:
        with _connect(socket_path(data_dir)) as peer:
            raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid = struct.unpack("3i", raw)[0]
            handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while not _ended(handle, deadline - time.monotonic()):
            if time.monotonic() >= deadline:
                raise LocalServerError(f"the local server (process {pid}) did not end within {STOP_SECONDS:.0f} s")
    finally:
        os.close(handle)
    return True


def server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that the local server gets: settings, locale, and where programs are."""
    kept = {
        name: value
        for name, value in environ.items()
        if name in _PASSED or name.startswith("LC_") or (name.startswith(PREFIX) and name not in _KEPT_BACK)
    }
    config = PREFIX + "CONFIG"
    if config in kept:
        kept[config] = os.fspath(Path(kept[config]).absolute())
    kept["PATH"] = ":".join(filter(None, (kept.get("PATH"), _SYSTEM_PATH)))
    return kept


def _connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(PROBE_SECONDS)
        sock.connect(os.fspath(path))
    except BaseException:
        sock.close()
        raise
    return sock


def _start(path: Path, data_dir: Path) -> None:
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = data_dir / "server.log"
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    began = time.monotonic()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        begin = os.fstat(fd).st_size
        command = [sys.executable, "-P", "-m", "agent_sandbox.cli", "serve"]
        command += ["--unix", os.fspath(path), "--idle-exit", str(IDLE_EXIT_SECONDS), "--data-dir", os.fspath(data_dir)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=fd,
            stderr=fd,
            cwd="/",
            env=server_environment(os.environ),
            start_new_session=True,
            umask=0o077,
        )
    finally:
        os.close(fd)
    with starting.told(f"the local server starts and is waited for as long as it works; its log is {log}"):
        is_ready = _becomes_ready(process, path, log, begin)
    if is_ready:
        process.returncode = 0  # it outlives us: nobody waits for it, and no warning should say so
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    waited = time.monotonic() - began
    raise LocalServerError(f"the local server was not ready after {waited:.0f} s", details=_tail(log, begin))


def _becomes_ready(process: subprocess.Popen[bytes], path: Path, log: Path, begin: int) -> bool:
    """Wait for a server that was started; ``False`` when patience with it is over."""
    patience = starting.Patience(time.monotonic())
    while patience.lasts(now := time.monotonic()):
        code = process.poll()
        if code is not None:
            raise LocalServerError(
                f"the local server ended with code {code} while it started", details=_tail(log, begin)
            )
        if path.exists() and answers(path):
            return True
        if patience.wants_look(now):
            patience.look(now, starting.worked(process.pid))
        time.sleep(0.02)
    return False


def _refuse_beside_another(data_dir: Path) -> None:
    """Start nothing where a server that listens elsewhere has the data directory (``manager/state.py``)."""
    try:
        fd = os.open(data_dir / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # there is none; or the server says what is wrong with it
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
        raise LocalServerError(
            f"a server that listens elsewhere (process {holder}) uses {data_dir}: set AGENT_SANDBOX_URL "
            "(and AGENT_SANDBOX_API_KEY) to talk to it"
        ) from None
    finally:
        os.close(fd)


def _predecessor_has_gone(path: Path) -> bool:
    """Wait for a server that is ending; ``False`` when it answers after all.

    A server holds the lock beside its socket as long as it lives (``server/listen.py``).
    """
    deadline = time.monotonic() + STOP_SECONDS
    fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                pass
            if answers(path):
                return False
            if time.monotonic() > deadline:
                raise LocalServerError(f"a server holds {path} and does not answer: agent-sandbox serve --stop")
            time.sleep(0.05)
    finally:
        os.close(fd)


def _tail(log: Path, begin: int) -> dict[str, object]:
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(begin, end - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).decode("utf-8", "replace").splitlines()
    return {"log": os.fspath(log), "lines": [line for line in lines if line.strip()][-TAIL_LINES:]}


def _private_directory(path: Path) -> None:
    """Make a directory for the socket, or narrow one that only we could write to; refuse any other."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ForbiddenError(f"{path} must be a directory of this user alone, mode 0700: remove it and try again")
    if found.st_mode & 0o077:
        path.chmod(0o700)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the start lock; whoever waits longer than a start and a stop can take is told so."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + starting.LONGEST_SECONDS + STOP_SECONDS
        with starting.told("another command starts the local server, and is waited for"):
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise LocalServerError(
                            f"another command holds {path} and does not get the server ready"
                        ) from None
                    time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _ended(pidfd: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1000))
