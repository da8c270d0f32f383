"""A server of ours as a process of its own, on the embedded backend, on a free port of the loopback."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from agent_sandbox.client import SandboxClient
from agent_sandbox.errors import SandboxError
from tests.ports import free_port

KEY = f"e2e-key-{secrets.token_hex(8)}"
"""Of this run alone: a test looks for it in what every process shows, and another run may be on the machine."""
PROGRAM = str(pathlib.Path(sys.executable).parent / "agent-sandbox")


class Served:
    """A server process over one data directory; it can be killed and started again."""

    def __init__(self, data: pathlib.Path, backend: str, **settings: str) -> None:
        self.data, self.backend, self.port = data, backend, free_port()
        self.log = data.parent / f"{data.name}.log"
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AGENT_SANDBOX_")},
            "AGENT_SANDBOX_DATA_DIR": str(data),
            "AGENT_SANDBOX_API_KEYS": KEY,
            "AGENT_SANDBOX_PORT": str(self.port),
            "AGENT_SANDBOX_BACKENDS": backend,
            **{f"AGENT_SANDBOX_{name.upper()}": value for name, value in settings.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the server and return at once."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "serve"], env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self._process

    def start(self) -> None:
        """Start the server and return once it answers."""
        process = self.spawn()
        for _ in range(1_200):
            if process.poll() is not None:
                break
            with contextlib.suppress(SandboxError), self.client() as client:
                client.health()
                return
            time.sleep(0.1)
        raise AssertionError(f"the server does not answer:\n{self.log.read_text()[-3000:]}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the server and wait for its end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            self._process.wait(30)

    def environments(self) -> set[str]:
        """The environments of the embedded backend that still hold something."""
        return {place.name for place in (self.data / self.backend / "env").iterdir()}

    def client(self) -> SandboxClient:
        """A client of ours with the right key."""
        return SandboxClient(self.url, KEY)


@contextlib.contextmanager
def serving(data: pathlib.Path, backend: str = "runc", **settings: str) -> Iterator[Served]:
    """Run a server; every sandbox it made is gone afterwards."""
    served = Served(data, backend, **settings)
    served.start()
    try:
        yield served
    finally:
        with contextlib.suppress(SandboxError), served.client() as client:
            for sandbox in client.list_sandboxes():
                sandbox.destroy()
        served.stop()
