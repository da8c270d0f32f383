"""The public client of this API, unchanged and in an environment of its own, against our server."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import KEY, serving

RELEASE = "sic-agent-sandbox==0.2.1"
ROOT = Path(__file__).parents[2]
FLOW = Path(__file__).with_name("public_client_flow.py")

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def public_python() -> Path:
    """The interpreter of a virtual environment that holds the release and nothing of ours, made once in ``build/``."""
    home = ROOT / "build" / RELEASE.replace("==", "-")
    python = home / "bin" / "python"
    complete = home / "complete"
    home.parent.mkdir(exist_ok=True)
    with (home.parent / "public-client.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(home, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", RELEASE], check=True)
            complete.touch()
    return python


@pytest.mark.parametrize("backend", ["fake", "runc"])
def test_the_public_client_works_unchanged(backend: str, public_python: Path, tmp_path: Path) -> None:
    # Three sandboxes: one and its two forks live at once, and the flow then meets the limit.
    settings = {"max_file_bytes": "200000", "max_exec_output_bytes": "100000", "max_sandboxes": "3"}
    with serving(tmp_path / "data", backend, **settings) as server:
        done = subprocess.run(
            [str(public_python), "-I", str(FLOW), server.url, KEY, backend],
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.endswith("done\n")
