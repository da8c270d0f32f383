"""Driving runc, and reading the state it keeps.

Limits of single processes are given to runc itself, by ``prlimit``, for its containers to inherit. Those in a bundle it
would set from outside, which takes a privilege in the sandbox's own user namespace that this host's root may lack.

runc's state directory is only read (``state.json``), which spares a process where nothing changes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.linux.spawning import find_program
from agent_sandbox.backends.oci.program import Runtime
from agent_sandbox.errors import BackendError

_RUN_SECONDS, _DELETE_SECONDS = 30.0, 20.0
"""A start takes 40 ms and a removal 15; these are for hosts that swap."""
_STATE_BYTES = 1 << 20


class Runc(Runtime):
    """runc."""

    program = "runc"
    remedy = "install it with: apt-get install runc"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._limiter = ""

    async def find(self) -> str:
        self._limiter = find_program("prlimit", "install it with: apt-get install util-linux")
        return await super().find()

    async def run(
        self, name: str, bundle: Path, output: int, descriptors: Sequence[int], limits: Mapping[str, int]
    ) -> None:
        """Start the container and return once its first process runs.

        ``descriptors`` become 3, 4, … in it, ``output`` its standard output and error, ``limits`` those of each of its
        processes, by prlimit(1)'s names. :class:`BackendError` when it does not start; what runc said is in ``output``.
        """
        argv = ["run", "--detach", "--preserve-fds", str(len(descriptors)), "--bundle", str(bundle), name]
        limiter = [self._limiter, *(f"--{limit}={value}:{value}" for limit, value in limits.items())]
        code = await self._call(argv, output, _RUN_SECONDS, descriptors, limiter)
        if code != 0:
            raise BackendError(f"runc could not start the sandbox (exit code {code})")

    async def delete(self, name: str) -> None:
        if not (self.root / name).exists():
            return
        code, output = await self._capture(["delete", "--force", name], _DELETE_SECONDS)
        if not (self.root / name).exists():
            return
        if self.process(name) is not None:
            raise BackendError(f"runc could not remove a sandbox (exit code {code}): {output}")
        await asyncio.to_thread(shutil.rmtree, self.root / name)

    def names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def process(self, name: str) -> Process | None:
        try:
            with (self.root / name / "state.json").open("rb") as file:
                state = json.loads(file.read(_STATE_BYTES))
            return Process(int(state["init_process_pid"]), int(state["init_process_start"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
