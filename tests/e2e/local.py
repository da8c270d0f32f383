"""The command line as processes, over a data directory and so a local server of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = str(Path(sys.executable).parent / "agent-sandbox")
SECONDS = 200


class Local:
    """Runs ``agent-sandbox``; nothing of the caller's own sandboxes is touched."""

    def __init__(self, data: Path, **environ: str) -> None:
        self.data = data
        self.socket = data / "run" / "server.sock"
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AGENT_SANDBOX_")},
            "PATH": f"{Path(PROGRAM).parent}:{os.environ['PATH']}",
            "AGENT_SANDBOX_DATA_DIR": str(data),
            **environ,
        }

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command with its output in pipes."""
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen([PROGRAM, *arguments], env=self.environ, **options)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [PROGRAM, *arguments],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )

    def out(self, *arguments: str) -> str:
        """Run a command that must succeed; its output without the last newline."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.removesuffix("\n")

    def json(self, *arguments: str) -> Any:
        """Run a command that must succeed and print JSON."""
        return json.loads(self.out(*arguments, "--json"))

    def servers(self) -> list[int]:
        """The processes that serve this data directory."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"serve" in argv and os.fsencode(self.data) in argv:
                found.append(int(entry.name))
        return found

    def stop(self) -> None:
        """Remove what is left, also by a server that was killed, and end the server."""
        environments = self.data / "runc" / "env"
        if not self.servers() and not (environments.is_dir() and any(environments.iterdir())):
            return
        left = [item["id"] for item in self.json("ls") + self.json("snapshots")]
        if left:
            self.out("rm", *left)
        self.out("serve", "--stop")
