"""The servers that are measured, each as a process of its own, and the runtime's own start as the floor."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.bench.lean import Lean
from tests.ports import free_port

PEER = "sic-agent-sandbox[server]==0.2.1"
IMAGE = "bench"
ROOT = pathlib.Path(__file__).parents[2]
BUILD = ROOT / "build" / "bench"


def root_filesystem() -> pathlib.Path:
    """The tar of a small Debian with python3 that both sides run, built once."""
    tar = BUILD / "rootfs.tar"
    if not tar.exists():
        say("building the image (mmdebstrap, about 20 s) …")
        BUILD.mkdir(parents=True, exist_ok=True)
        part = tar.with_suffix(".part.tar")
        command = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=python3-minimal", "bookworm", str(part)]
        subprocess.run(command, check=True)
        part.rename(tar)
    return tar


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _serving(command: list[str], env: dict[str, str], port: int, key: str, log: pathlib.Path) -> Iterator[int]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=output, stderr=output)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                lean = Lean(port, key)
                status, _body = lean.request("GET", "/healthz")
                lean.close()
                if status == 200:
                    break
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        else:
            raise RuntimeError(f"{command[0]} does not answer:\n{log.read_text()[-2000:]}")
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


class Contender:
    """One server with its lean connection. ``image`` is what its sandboxes run."""

    def __init__(self, name: str, port: int, key: str, pid: int, image: str) -> None:
        self.name, self.port, self.key, self.pid, self.image = name, port, key, pid, image
        self.lean = Lean(port, key)

    def create(self) -> str:
        """Make a sandbox and return its id."""
        made: dict[str, Any] = self.lean.call("POST", "/v1/sandboxes", {"image": self.image, "timeout_seconds": 3600})
        return str(made["id"])

    def destroy(self, id: str) -> None:
        """Remove a sandbox."""
        self.lean.call("DELETE", f"/v1/sandboxes/{id}")

    def exec(self, id: str, command: list[str]) -> dict[str, Any]:
        """Run a command to its end."""
        result: dict[str, Any] = self.lean.call("POST", f"/v1/sandboxes/{id}/exec", {"command": command})
        if result["exit_code"] != 0:
            raise RuntimeError(f"{command} ended with {result}")
        return result

    def resident_kib(self) -> int:
        """Resident memory of the server, KiB."""
        status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])


@contextlib.contextmanager
def ours(name: str = "ours", backend: str = "runc", **settings: str) -> Iterator[Contender]:
    """Our server on one of its backends; ``settings`` are more of the server's own."""
    data, key, port = BUILD / f"data-{name}", secrets.token_hex(16), free_port()
    shutil.rmtree(data, ignore_errors=True)
    program = str(pathlib.Path(sys.executable).parent / "agent-sandbox")
    env = {
        "AGENT_SANDBOX_DATA_DIR": str(data),
        "AGENT_SANDBOX_API_KEYS": key,
        "AGENT_SANDBOX_PORT": str(port),
        "AGENT_SANDBOX_MAX_SANDBOXES": "300",
        "AGENT_SANDBOX_BACKENDS": backend,
        **{f"AGENT_SANDBOX_{name.upper()}": value for name, value in settings.items()},
    }
    image = IMAGE
    if backend == "docker":
        image = engine_image()
    else:
        command = [program, "image", "import", IMAGE, str(root_filesystem())]
        subprocess.run(command, env={**os.environ, **env}, check=True, stdout=subprocess.DEVNULL)
    with _serving([program, "serve"], env, port, key, BUILD / f"{name}.log") as pid:
        yield Contender(name, port, key, pid, image)


def engine_image() -> str:
    """The same root filesystem as an image of the Docker engine's, imported once."""
    image = "asb-bench:latest"
    if subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode != 0:
        subprocess.run(["docker", "import", str(root_filesystem()), image], check=True, capture_output=True)
    return image


def gvisor_runs() -> bool:
    """Whether gVisor's runtime is installed."""
    return shutil.which("runsc") is not None


def qemu_runs() -> bool:
    """Whether a QEMU is installed."""
    return shutil.which("qemu-system-x86_64") is not None


def docker_runs() -> bool:
    """Whether a Docker engine answers here."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def peer() -> Iterator[Contender]:
    """The reference implementation of the first contract, from PyPI, on Docker, with the same image."""
    venv = BUILD / "peer-venv"
    if not (venv / "done").exists():
        say(f"installing the peer, {PEER} …")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        subprocess.run([str(venv / "bin" / "pip"), "install", "-q", PEER], check=True)
        (venv / "done").touch()
    image = engine_image()
    data, key, port = BUILD / "peer-data", secrets.token_hex(16), free_port()
    shutil.rmtree(data, ignore_errors=True)
    env = {
        "AGENT_SANDBOX_DATA_DIR": str(data),
        "AGENT_SANDBOX_API_KEYS": key,
        "AGENT_SANDBOX_DEFAULT_IMAGE": image,
    }
    command = [str(venv / "bin" / "agent-sandbox"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with _serving(command, env, port, key, BUILD / "peer.log") as pid:
        yield Contender("peer", port, key, pid, image)


class Floor:
    """``runc run -d`` of a process that sleeps, with the host's programs: what the runtime itself costs."""

    def __init__(self) -> None:
        self._bundle = BUILD / "floor"
        shutil.rmtree(self._bundle, ignore_errors=True)
        (self._bundle / "rootfs" / "usr").mkdir(parents=True)
        subprocess.run(["runc", "spec", "--bundle", str(self._bundle)], check=True)
        config = self._bundle / "config.json"
        spec = json.loads(config.read_text())
        spec["process"] |= {"terminal": False, "args": ["/usr/bin/sleep", "600"]}
        spec["mounts"].append({"destination": "/usr", "source": "/usr", "type": "bind", "options": ["rbind", "ro"]})
        for folder in ("lib", "lib64"):
            if pathlib.Path("/", folder).exists():
                (self._bundle / "rootfs" / folder).symlink_to(f"usr/{folder}")
        config.write_text(json.dumps(spec))

    def run(self) -> float:
        """Start and remove one container; return how many seconds the start took."""
        name = f"asb-bench-{secrets.token_hex(4)}"
        started = time.perf_counter()
        subprocess.run(
            ["runc", "run", "-d", "--bundle", str(self._bundle), name],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        taken = time.perf_counter() - started
        subprocess.run(["runc", "delete", "-f", name], check=True)
        return taken


def start_by_engine() -> float:
    """``docker run -d`` of a process that sleeps, with the same image: what an engine's own start costs, seconds."""
    name = f"asb-bench-{secrets.token_hex(4)}"
    started = time.perf_counter()
    options = ["--network", "none", "--read-only", "--entrypoint", "sleep"]
    subprocess.run(
        ["docker", "run", "-d", "--name", name, *options, engine_image(), "600"],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    taken = time.perf_counter() - started
    subprocess.run(["docker", "rm", "-f", name], check=True, stdout=subprocess.DEVNULL)
    return taken
