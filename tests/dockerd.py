"""A Docker engine for tests: the one that answers here, or a private one that ends with the tests.

A private engine has its own socket, data and state, all in one directory below the system's temporary one, and a
bridge of no name, so that it touches nothing of another engine's. It knows the runtime ``runsc`` where that is
installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

SYSTEM = pathlib.Path("/var/run/docker.sock")
RUNSC = {"path": "/usr/bin/runsc", "runtimeArgs": ["--network=none", "--host-uds=create", "--overlay2=none"]}
"""The network of runsc of Debian 12 does not start on kernels of today, which show it more than it knows."""
_STARTING = pathlib.Path(tempfile.gettempdir()) / "asb-dockerd.lock"
"""Held by who starts an engine: two that start at once make the same chains of iptables, and one of them fails."""
_STARTS_SECONDS = 90.0
_ENDS_SECONDS = 60.0


def answers(sock: pathlib.Path) -> bool:
    """Whether an engine answers at the socket."""
    asked = subprocess.run(
        ["docker", "--host", f"unix://{sock}", "version", "--format", "{{.Server.Version}}"],
        capture_output=True,
        check=False,
        timeout=60,
    )
    return asked.returncode == 0


def has_runtime(host: str, name: str) -> bool:
    """Whether the engine at ``host`` knows an OCI runtime."""
    asked = subprocess.run(
        ["docker", "--host", host, "info", "--format", "{{json .Runtimes}}"], capture_output=True, check=True
    )
    return name in json.loads(asked.stdout)


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """The engine's address, as ``AGENT_SANDBOX_DOCKER_HOST`` takes it."""
    if SYSTEM.exists() and answers(SYSTEM) and has_runtime(f"unix://{SYSTEM}", "runsc"):
        yield f"unix://{SYSTEM}"
        return
    with private_engine() as engine:
        yield engine.host


class PrivateEngine:
    """A dockerd of the tests' own in ``directory``, which can be killed and started again."""

    def __init__(self, directory: pathlib.Path, *arguments: str) -> None:
        self.directory = directory
        self.socket = directory / "docker.sock"
        self.host = f"unix://{self.socket}"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        config = self.directory / "daemon.json"
        config.write_text(json.dumps({"runtimes": {"runsc": RUNSC}}))
        argv = ["dockerd", "--config-file", str(config), "--host", self.host, "--pidfile", f"{self.directory}/pid"]
        argv += ["--data-root", f"{self.directory}/data", "--exec-root", f"{self.directory}/exec"]
        argv += ["--bridge", "none", *self._arguments]
        with (self.directory / "log").open("ab") as log, _STARTING.open("ab") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            deadline = time.monotonic() + _STARTS_SECONDS
            while not answers(self.socket):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"dockerd did not start:\n{(self.directory / 'log').read_text()[-3000:]}")
                time.sleep(0.1)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it; its containers end with it when it is asked to, and go on when it is killed."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(_ENDS_SECONDS)
            self._process = None
            # Its containerd ends with it, but is taken to be alive for as long as nobody has reaped it.
            (self.directory / "exec/containerd/containerd.pid").unlink(missing_ok=True)


@contextlib.contextmanager
def private_engine(*arguments: str) -> Iterator[PrivateEngine]:
    """An engine of the tests' own, with more arguments of dockerd's; nothing is left of it."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="asb-dockerd-"))
    engine = PrivateEngine(directory, *arguments)
    try:
        engine.start()
        yield engine
    finally:
        try:
            engine.end()
        finally:
            _unmount_below(directory)
            shutil.rmtree(directory, ignore_errors=True)


def _unmount_below(directory: pathlib.Path) -> None:
    table = pathlib.Path("/proc/self/mountinfo").read_text()
    points = [line.split(" ", 5)[4] for line in table.splitlines()]
    for point in reversed([point for point in points if point.startswith(f"{directory}{os.sep}")]):
        subprocess.run(["umount", "--lazy", point], check=False)
