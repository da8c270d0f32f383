"""Driving runsc, gVisor's runtime, and reading the state it keeps.

What it does otherwise than runc was found by trying (docs/design/gvisor.md):

* The first process that the host sees is the sandbox itself, gVisor's own kernel; the guest's pids mean nothing here.
* ``delete`` waits two seconds for what is dead already. All that it would remove are three files of its state, so they
  are removed here, once no process is left.
* ``checkpoint`` ends the sandbox that it cannot keep, unless it is to leave it running: then nothing happens to it.
* State names no start time, so a process is known by its pid and by the root and name on its command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.oci.program import Runtime
from agent_sandbox.errors import BackendError, ConflictError

OLDEST = 20240101
"""The date of the oldest release that this project is tried with; older ones lack parts of ``checkpoint``."""
_RUN_SECONDS, _CALL_SECONDS, _CHECKPOINT_SECONDS = 30.0, 30.0, 300.0
"""A start takes 150 ms, pausing 25, and a checkpoint as long as its memory takes to be written."""
_STATE_BYTES = 1 << 20
_STATE = re.compile(r"(?P<name>.+)_sandbox:(?P=name)\.state")
_UNKEEPABLE = {
    "deleted and invalidated dentries": "a file that is open and deleted",
    "endpoint with bound host socket": "a unix socket that is bound to a name in a directory other than /tmp",
}
"""What runsc says of what it cannot keep, and what it is."""


class Runsc(Runtime):
    """runsc with its own network of a loopback alone, and guests that may bind unix sockets in bound directories."""

    program = "runsc"
    remedy = (
        "install it with: apt-get install -t bookworm-backports runsc (Debian 12), or gVisor's own package; "
        f"a release of at least {OLDEST} is needed"
    )
    options = ("--platform=systrap", "--network=none", "--host-uds=create", "--overlay2=none")

    async def find(self) -> str:
        version = await super().find()
        found = re.search(r"\d{8}", version)
        if found is None or int(found[0]) < OLDEST:
            raise BackendError(f"runsc {version} is too old; {self.remedy}")
        return version

    async def run(self, name: str, bundle: Path, output: int, image: Path | None = None) -> None:
        """Start a container, or go on from the checkpoint in ``image``; return once its first process runs.

        ``output`` is its standard output and error. :class:`BackendError` when it does not start; what runsc said is
        in ``output``.
        """
        argv = ["run"] if image is None else ["restore", "--image-path", str(image)]
        code = await self._call([*argv, "--detach", "--bundle", str(bundle), name], output, _RUN_SECONDS)
        if code != 0:
            raise BackendError(f"runsc could not {argv[0]} the sandbox (exit code {code})")

    async def pause(self, name: str) -> None:
        """Stop every process of a container at the edge of a system call."""
        await self._do(["pause", name])

    async def resume(self, name: str) -> None:
        """Let them go on. :class:`BackendError` when it is not paused."""
        await self._do(["resume", name])

    async def signal(self, name: str, signal: str) -> None:
        """Send a signal, by its name, to a container's first process."""
        await self._do(["kill", name, signal])

    async def checkpoint(self, name: str, directory: Path) -> None:
        """Write the memory of a paused container, which stays paused, to ``directory``.

        :class:`ConflictError` for what cannot be kept.
        """
        argv = ["checkpoint", "--leave-running", "--image-path", str(directory), name]
        code, output = await self._capture(argv, _CHECKPOINT_SECONDS)
        if code == 0:
            return
        for words, what in _UNKEEPABLE.items():
            if words in output:
                raise ConflictError(f"the processes' memory cannot be kept: they have {what}")
        raise BackendError(f"runsc could not keep the processes' memory: {output.splitlines()[0] if output else code}")

    async def _do(self, argv: list[str]) -> None:
        code, output = await self._capture(argv, _CALL_SECONDS)
        if code != 0:
            raise BackendError(f"runsc {argv[0]} failed (exit code {code}): {output}")

    async def delete(self, name: str) -> None:
        if self.process(name) is not None:
            raise BackendError("runsc's sandbox still runs; it cannot be removed")

        def remove() -> None:
            stem = f"{name}_sandbox:{name}"
            for file in (f"runsc-{name}.sock", f"{stem}.lock", f"{stem}.state"):
                (self.root / file).unlink(missing_ok=True)

        await asyncio.to_thread(remove)

    def names(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            found = (_STATE.fullmatch(entry.name) for entry in os.scandir(self.root))
            return sorted(match["name"] for match in found if match is not None)
        return []

    def process(self, name: str) -> Process | None:
        state = self.state(name)
        try:
            pid = int(state["sandbox"]["pid"])
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if os.fsencode(f"--root={self.root}") not in words or os.fsencode(name) not in words:
                return None
            text = Path(f"/proc/{pid}/stat").read_text()
            return Process(pid, int(text[text.rindex(")") + 2 :].split()[19]))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None

    def is_paused(self, name: str) -> bool:
        """Whether its processes were stopped by :meth:`pause`."""
        return self.state(name).get("status") == "paused"

    def state(self, name: str) -> dict[str, Any]:
        """What runsc recorded of a container; empty without readable state."""
        try:
            with (self.root / f"{name}_sandbox:{name}.state").open("rb") as file:
                found = json.loads(file.read(_STATE_BYTES))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
