"""Sandboxes as bubblewrap namespaces with ``sandboxd`` inside: the example of ``docs/how-to/write-a-backend.md``.

Strategy
--------
* An environment is one directory, ``DATA_DIR/bubblewrap/<id>``, with everything in it: the record, the daemon's key,
  its socket, its log, the number of its first process, ``/etc`` and the workspace. A new server finds it by that.
* The first process of the sandbox's own PID namespace is the daemon, so one SIGKILL of it ends every process inside,
  and the kernel lets it go only after all the others (pid_namespaces(7)).
* The daemon's listening socket and its configuration are handed in as descriptors: the key is in no argument, no
  variable and no file that the sandbox could see.
* What bubblewrap cannot do is declared: it limits neither CPU, memory, processes nor disk. The operator has to accept
  that (``AGENT_SANDBOX_ALLOW_UNENFORCED=true``), so the class is ``process``, the weakest.

bubblewrap itself stays as a second process beside each sandbox. It waits for the first one and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent_sandbox.backends.guest_backend import Endpoint, GuestBackend
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, ConflictError, InvalidRequestError, NotFoundError, UnsupportedError
from agent_sandbox.types import Capabilities, EnvironmentInfo, ResolvedImage, SandboxSpec

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_LISTEN, _CONFIG, _INFO = 10, 11, 12
"""Descriptors of the new process. Sources are moved above 100 first, so none is overwritten before its turn."""
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SETPCAP")
_START_SECONDS = 10.0
_END_SECONDS = 10.0
_LOG_TAIL = 2_000
_MASKED = ("cmdline", "diskstats", "kcore", "keys", "key-users", "latency_stats", "locks", "partitions", "sched_debug",
           "timer_list")  # fmt: skip
"""Files of ``/proc`` that tell about the host; the empty directories cover the others."""
_COVERED = ("fs", "scsi", "acpi")
_LIMITS = ("cpus", "memory", "pids", "disk")
_NONE = "bubblewrap makes namespaces and no control groups"


class BubblewrapBackend(GuestBackend):
    """One PID, mount, network, IPC and UTS namespace for each sandbox. See the rules in ``backends/base.py``."""

    name = "bubblewrap"
    capabilities = Capabilities(
        isolation="process",
        enforces=frozenset({"network"}),
        network=frozenset({"none"}),
        guest=True,
        notes={
            **dict.fromkeys(("cpus", "memory", "pids"), _NONE),
            "disk": "the workspace is a directory of the host's disk",
            "userns": "commands run as a user id of the host, AGENT_SANDBOX_SANDBOX_USER; choose one that nobody has",
            "layered_workspace": "the workspace is a plain directory; snapshots copy it",
            "checkpoint": "bubblewrap cannot write a process to a file",
            "stop": "a sandbox ends with its processes",
        },
    )

    known_failures: Mapping[str, str] = {
        "test_the_daemon_is_hidden": "bubblewrap mounts /proc without hidepid: commands see that there is a daemon",
    }

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._home = settings.data_dir / "bubblewrap"
        self._program = ""
        self._daemon = Path(settings.sandboxd)
        self._monitors: dict[str, int] = {}

    # -- the backend as a whole ------------------------------------------------------

    async def start(self) -> None:
        if os.geteuid() != 0:
            raise BackendError("the bubblewrap backend needs root; run the server with sudo")
        self._program = shutil.which("bwrap") or ""
        await self.ping()
        if not self._settings.sandboxd:
            from agent_sandbox_engine import sandboxd_path

            self._daemon = sandboxd_path()
        done = await asyncio.to_thread(
            subprocess.run, [self._program, "--version"], capture_output=True, text=True, timeout=_START_SECONDS
        )
        self.versions = {"bubblewrap": done.stdout.strip().removeprefix("bubblewrap ")}
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def ping(self) -> None:
        if not os.access(self._program, os.X_OK):
            raise BackendError("bubblewrap is not installed; install it with: apt-get install bubblewrap")

    async def resolve_image(self, name: str) -> ResolvedImage:
        if name != "host":
            raise NotFoundError(f"the bubblewrap backend has the image 'host' alone, not {name!r}")
        return ResolvedImage(name="host", digest="", pinned=False)

    # -- create and destroy ------------------------------------------------------------

    async def create(self, id: str, spec: SandboxSpec) -> None:
        self._check(id, spec)
        box = _Box(self._home / id)
        try:
            box.directory.mkdir(mode=0o700)
        except FileExistsError:
            raise ConflictError(f"environment {id} exists already") from None
        try:
            await self._settled(asyncio.to_thread(box.furnish, spec))
            await self._settled(asyncio.to_thread(self._launch, box, spec))
            await self.guest_ready(id, _START_SECONDS)
        except BaseException as error:
            tail = box.log_tail()
            await self._settled(self.destroy(id))
            if isinstance(error, OSError):
                raise BackendError(f"the sandbox could not be started: {error}; {tail}") from error
            if isinstance(error, BackendError) and tail:
                raise BackendError(f"{error.message}; its log ends with: {tail}") from error
            raise

    @staticmethod
    async def _settled(work: Coroutine[Any, Any, Any]) -> None:
        """Wait for work that has begun, also when the caller is cancelled: it would go on behind our back."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    def _check(self, id: str, spec: SandboxSpec) -> None:
        """Refuse before any effect what cannot be."""
        if not _ID.fullmatch(id):
            raise InvalidRequestError(f"{id!r} is not an environment id")
        if spec.network != "none":
            raise UnsupportedError("network", self.name, "only none")
        if not spec.read_only_rootfs:
            raise UnsupportedError("writable_rootfs", self.name, "the image is the host's own /usr")
        if spec.image != "host":
            raise NotFoundError(f"the bubblewrap backend has the image 'host' alone, not {spec.image!r}")
        if not self._settings.allow_unenforced:
            remedy = f"{_NONE}; AGENT_SANDBOX_ALLOW_UNENFORCED=true accepts that"
            raise UnsupportedError(f"limit {_LIMITS[0]}", self.name, remedy)

    def _launch(self, box: _Box, spec: SandboxSpec) -> None:
        """Start bubblewrap and write down its child, the sandbox's first process. Blocks until that is known."""
        with contextlib.ExitStack() as stack:

            def owned(descriptor: int) -> int:
                """A copy above every target, closed with this block. It is not inherited: dup2 makes what is."""
                copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)
                stack.callback(os.close, copy)
                os.close(descriptor)
                return copy

            listener = owned(box.listen().detach())
            config = owned(os.memfd_create("sandboxd-config", os.MFD_CLOEXEC))
            values = {"key": box.key(), "uid": spec.uid, "gid": spec.gid, "memory_bytes": spec.memory_mb << 20}
            os.write(config, msgspec.msgpack.encode(values))
            os.lseek(config, 0, os.SEEK_SET)
            log = owned(os.open(box.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
            info = owned(os.open(box.info, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
                (os.POSIX_SPAWN_DUP2, listener, _LISTEN),
                (os.POSIX_SPAWN_DUP2, config, _CONFIG),
                (os.POSIX_SPAWN_DUP2, info, _INFO),
            ]
            argv = [self._program, *self._arguments(box, spec)]
            monitor = os.posix_spawn(self._program, argv, {}, file_actions=actions, setsid=True)
        deadline = time.monotonic() + _START_SECONDS
        while not box.first():
            if os.waitpid(monitor, os.WNOHANG)[0] or time.monotonic() > deadline:
                raise BackendError("bubblewrap did not start the sandbox")
            time.sleep(0.002)
        self._monitors[box.directory.name] = monitor

    def _arguments(self, box: _Box, spec: SandboxSpec) -> list[str]:
        words = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        words += ["--hostname", "sandbox", "--as-pid-1", "--clearenv", "--info-fd", str(_INFO)]
        words += ["--cap-drop", "ALL"]
        for name in _CAPABILITIES:
            words += ["--cap-add", f"CAP_{name}"]
        words += ["--ro-bind", "/usr", "/usr", "--tmpfs", "/usr/local", "--remount-ro", "/usr/local"]
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            if Path("/", name).exists():
                words += ["--symlink", f"usr/{name}", f"/{name}"]
        words += ["--ro-bind", str(box.etc), "/etc", "--proc", "/proc", "--dev", "/dev"]
        for name in _MASKED:
            if Path("/proc", name).exists():
                words += ["--ro-bind", "/dev/null", f"/proc/{name}"]
        for name in _COVERED:
            if Path("/proc", name).is_dir():
                words += ["--tmpfs", f"/proc/{name}", "--remount-ro", f"/proc/{name}"]
        words += ["--perms", "1777", "--size", str(spec.tmp_mb << 20), "--tmpfs", "/tmp"]
        words += ["--ro-bind", str(self._daemon), "/run/sandboxd", "--bind", str(box.workspace), "/workspace"]
        words += ["--remount-ro", "/", "--chdir", "/", "--"]
        return [*words, "/run/sandboxd", "--listen-fd", str(_LISTEN), "--config-fd", str(_CONFIG)]

    async def destroy(self, id: str) -> None:
        if not _ID.fullmatch(id) or not (self._home / id).exists():
            return
        box = _Box(self._home / id)
        await self.drop_guest(id)
        await asyncio.to_thread(box.forget)
        await self.kill_guest(id)
        await asyncio.to_thread(box.remove)

    async def kill_guest(self, id: str) -> None:
        monitor = self._monitors.get(id, 0)
        await asyncio.to_thread(_Box(self._home / id).end, monitor)
        self._monitors.pop(id, None)
        if monitor:  # else an earlier server's: init has it
            await asyncio.to_thread(os.waitpid, monitor, 0)

    def oom_kills(self, id: str) -> int | None:
        return None

    # -- looking -------------------------------------------------------------------------

    async def list_ids(self) -> list[str]:
        return sorted(path.name for path in self._home.iterdir())

    async def is_running(self, id: str) -> bool:
        return bool(_ID.fullmatch(id)) and _Box(self._home / id).runs()

    async def inspect(self, id: str) -> EnvironmentInfo:
        box = self._known(id)
        asked = {name: value for name, value in dataclasses.asdict(box.spec()).items() if name != "env"}
        return EnvironmentInfo(id, box.runs(), {"asked": asked, "runtime": f"bubblewrap {self.versions['bubblewrap']}"})

    async def endpoint(self, id: str) -> Endpoint:
        box = self._known(id)
        key, spec = box.key(), box.spec()
        try:
            return Endpoint(box.connect(), key, spec, {})
        except OSError as error:
            raise BackendError(f"the daemon of {id} does not answer: {error.strerror}") from error

    def _known(self, id: str) -> _Box:
        box = _Box(self._home / id)
        if not _ID.fullmatch(id) or not box.record.exists():
            raise NotFoundError(f"there is no environment {id}")
        return box


class _Box:
    """The files of one environment. Making the object touches nothing; everything else blocks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.record = directory / "spec.json"
        self.log = directory / "log"
        self.info = directory / "first.json"
        self.etc = directory / "etc"
        self.workspace = directory / "workspace"

    def furnish(self, spec: SandboxSpec) -> None:
        """Write everything that the sandbox begins with."""
        self.workspace.mkdir(mode=0o755)
        os.chown(self.workspace, spec.uid, spec.gid)
        self.etc.mkdir(mode=0o755)
        user = f"root:x:0:0::/root:/bin/sh\nsandbox:x:{spec.uid}:{spec.gid}::/workspace:/bin/sh\n"
        for name, text in (("passwd", user), ("group", f"root:x:0:\nsandbox:x:{spec.gid}:\n"),
                           ("hosts", "127.0.0.1 localhost sandbox\n")):  # fmt: skip
            (self.etc / name).write_text(text)
            (self.etc / name).chmod(0o644)
        if Path("/etc/alternatives").is_dir():
            shutil.copytree("/etc/alternatives", self.etc / "alternatives", symlinks=True)
        self.write("key", secrets.token_bytes(32))
        self.write("spec.json", json.dumps({**dataclasses.asdict(spec), "env": dict(spec.env)}).encode())

    def write(self, name: str, data: bytes) -> None:
        """Write a file that only root may read, whole or not at all."""
        aside = self.directory / f".{name}"
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        aside.replace(self.directory / name)

    def key(self) -> bytes:
        try:
            return (self.directory / "key").read_bytes()
        except OSError:
            raise NotFoundError(f"there is no environment {self.directory.name}") from None

    def spec(self) -> SandboxSpec:
        try:
            return msgspec.json.decode(self.record.read_bytes(), type=SandboxSpec)
        except FileNotFoundError:
            raise NotFoundError(f"there is no environment {self.directory.name}") from None
        except (OSError, ValueError) as error:
            raise BackendError(f"the record of {self.directory.name} is damaged; destroy it") from error

    def listen(self) -> socket.socket:
        with self._short() as base:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"{base}/sock")
            listener.listen(64)
            return listener

    def connect(self) -> socket.socket:
        with self._short() as base:
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            try:
                connection.connect(f"{base}/sock")
            except OSError:
                connection.close()
                raise
            return connection

    @contextlib.contextmanager
    def _short(self) -> Iterator[str]:
        """A short name of the directory: a socket's address holds 107 bytes (unix(7))."""
        descriptor = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)

    def log_tail(self) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _LOG_TAIL))
                return file.read(_LOG_TAIL).decode(errors="replace").strip()
        except OSError:
            return ""

    def first(self) -> int:
        """The number of the sandbox's first process, which bubblewrap writes down itself; 0 before that."""
        try:
            return int(json.loads(self.info.read_bytes())["child-pid"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    @contextlib.contextmanager
    def _process(self, monitor: int = 0) -> Iterator[int | None]:
        """A descriptor of the first process, or None when it is gone.

        Its number may be another's by now: only ours has our workspace among its mounts. One that has not mounted
        anything yet is known by its parent, the ``monitor``, where that is a child of this server.
        """
        pid = self.first()
        try:
            descriptor = os.pidfd_open(pid) if pid else None
        except OSError:
            descriptor = None
        try:
            mounts = Path(f"/proc/{pid}/mountinfo").read_text() if descriptor is not None else ""
        except OSError:
            mounts = ""
        try:
            is_ours = f"/{self.directory.name}/workspace /workspace " in mounts or (monitor and _parent(pid) == monitor)
            yield descriptor if is_ours else None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def runs(self) -> bool:
        with self._process() as process:
            return process is not None and not select.select([process], [], [], 0)[0]

    def end(self, monitor: int) -> None:
        """Kill the first process, and with it all others. :class:`BackendError` when they are not gone in time."""
        with self._process(monitor) as process:
            if process is None:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            if not select.select([process], [], [], _END_SECONDS)[0]:
                raise BackendError(f"the processes of {self.directory.name} do not end; destroy it again later")

    def forget(self) -> None:
        """From now on nobody finds it, whatever is left."""
        self.record.unlink(missing_ok=True)
        (self.directory / "key").unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the directory. rm(1) goes as deep as a hostile guest has made it, and follows no link."""
        subprocess.run(["rm", "-rf", "--one-file-system", "--", str(self.directory)], check=False)


def _parent(pid: int) -> int:
    """The number of a process's parent, 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
