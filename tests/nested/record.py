"""Record what Firecracker is asked and what it answers, for ``tests/unit/firecracker-1.12.1.json``.

::

    python -m tests.nested -- python3 -m tests.nested.record

writes it to standard output: a machine boots, is saved, goes on, is saved again, and another is refused whose state is
damaged. When changing what is asked for: record again; the replay in ``tests/unit`` holds both together.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h11

from agent_sandbox.backends.linux.requirements import find_sandboxd
from agent_sandbox.backends.microvm import firecracker_api as api
from agent_sandbox.backends.microvm.firecracker import FirecrackerMonitor
from agent_sandbox.backends.microvm.monitor import STATE_FILE, Machine, MachineSpec
from agent_sandbox.errors import BackendError
from agent_sandbox.images.machine import MachineImages

MEMORY_MB = 224
USER = 1_900_000_000
DISK_BYTES = 1 << 20


class Recording(h11.Connection):
    """Keeps what the other side sent last, byte for byte."""

    received = b""

    def receive_data(self, data: bytes) -> None:
        Recording.received += data
        super().receive_data(data)


def record() -> list[dict[str, Any]]:
    """From now on keep every question that is answered, and its answer."""
    kept: list[dict[str, Any]] = []
    ask = api._exchange

    async def exchange(place: Path, method: str, target: str, body: Mapping[str, object] | None) -> tuple[int, bytes]:
        Recording.received = b""
        answer = await ask(place, method, target, body)
        kept.append({"method": method, "target": target, "body": body, "reply": Recording.received.decode("latin-1")})
        return answer

    api._exchange = exchange
    h11.Connection = Recording  # type: ignore[misc]
    return kept


def spec(directory: Path, name: str) -> MachineSpec:
    """A machine whose drives hold nothing: it is saved long before its kernel looks."""
    kernel = MachineImages(Path(os.environ["MICROVM_MACHINE_DIR"])).kernel(find_sandboxd(""))
    (home := directory / name).mkdir()
    boots = {"kernel": kernel.image, "initrd": kernel.initramfs}
    for part, path in boots.items():
        shutil.copyfile(path, home / part)
    for drive in ("root", "workspace", "config", "layers"):
        with (home / drive).open("wb") as file:
            file.truncate(DISK_BYTES)
    (home / "run").mkdir()
    files = {part: home / part for part in (*boots, "root", "workspace", "config", "layers")}
    places = {"directory": home / "run", "jail": home / "jail"}
    return MachineSpec(**files, **places, memory_mb=MEMORY_MB, vcpus=1, uid=USER, gid=USER)


async def play(directory: Path) -> None:
    """Do what is to be recorded."""
    monitor = FirecrackerMonitor()
    await monitor.find()
    first, second = directory / "first", directory / "second"
    first.mkdir()
    second.mkdir()

    async def saved(machine: Machine, dest: Path) -> None:
        await monitor.pause(machine)
        await monitor.save(machine, MEMORY_MB, dest)

    booted = await monitor.start(spec(directory, "booted"))
    await saved(booted, first)
    os.kill(booted.process.pid, signal.SIGKILL)
    forked = await monitor.start_from(spec(directory, "forked"), first)
    await saved(forked, second)
    await monitor.running(forked)
    await monitor.resume(forked)
    os.kill(forked.process.pid, signal.SIGKILL)
    with (second / STATE_FILE).open("r+b") as file:
        file.seek(64)
        file.write(bytes(64))
    try:
        await monitor.start_from(spec(directory, "damaged"), second)
    except BackendError:
        return
    raise AssertionError("a damaged state was taken")


def main() -> None:
    """Record, and write it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        kept = record()
        asyncio.run(play(Path(directory)))
    print(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
