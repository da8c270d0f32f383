"""The public release of the reference implementation, client and server, in a virtual environment of its own."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

RELEASE = "sic-agent-sandbox[server]==0.2.1"
FLOW = Path(__file__).with_name("public_client_flow.py")
_BUILD = Path(__file__).parents[2] / "build"


def public_directory() -> Path:
    """The ``bin`` of an environment that holds the release and nothing of ours, made once in ``build/``."""
    home = _BUILD / "sic-agent-sandbox-server-0.2.1"
    complete = home / "complete"
    _BUILD.mkdir(exist_ok=True)
    with (_BUILD / "public-client.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(home, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            subprocess.run([str(home / "bin/python"), "-m", "pip", "install", "--quiet", RELEASE], check=True)
            complete.touch()
    return home / "bin"


def run_flow(url: str, key: str, backend: str) -> str:
    """Run the whole flow of the public client against a server; return what it printed."""
    done = subprocess.run(
        [str(public_directory() / "python"), "-I", str(FLOW), url, key, backend],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


LIMITS = {"max_file_bytes": "200000", "max_exec_output_bytes": "100000", "max_sandboxes": "3"}
"""Of the server that the flow meets: three sandboxes, one and its two forks, live at once before it meets the limit."""
