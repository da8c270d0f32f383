"""A small backend with checkpoints: the made-up environments, whose workspaces are laid out on the host to be read.

A checkpoint holds what is outside the workspace and the commands that run. :func:`count` is a program that can be kept
in it: where it has come to is in its variables.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from agent_sandbox.backends.fake import FakeBackend
from agent_sandbox.backends.fake.execs import Command
from agent_sandbox.backends.fake.programs import PROGRAMS, Process
from agent_sandbox.backends.fake.state import Environment, File
from agent_sandbox.config import Settings
from agent_sandbox.errors import ConflictError
from agent_sandbox.types import WORKSPACE, HeldWorkspace, PreparedWorkspace, SandboxSpec


async def count(process: Process) -> int:
    """Print 1, 2, 3, … as ``tick`` lets it: from where it was on, when it is restored."""
    while True:
        number = int(process.env.get("COUNT", "0")) + 1
        await process.out(b"%d\n" % number)
        process.env["COUNT"] = str(number)
        await asyncio.sleep(0.005)


PROGRAMS["count"] = count  # type: ignore[index]


class CheckpointBackend(FakeBackend):
    """Environments in memory with layers and checkpoints; ``version`` is that of its runtime."""

    name = "kept"
    version = "1"

    def __init__(self, settings: Settings, scratch: Path) -> None:
        super().__init__(settings)
        self.capabilities = replace(FakeBackend.capabilities, layered_workspace=True, checkpoint=True)
        self.versions = {"made-up": self.version}
        self.restored: list[str] = []
        self._scratch = scratch

    @asynccontextmanager
    async def hold_workspace(self, id: str) -> AsyncIterator[HeldWorkspace]:
        self._maybe_fail("hold_workspace")
        place = self._scratch / id
        _lay_out(self._environment(id).files, place)
        try:
            yield HeldWorkspace(str(place), mapped=True)
        finally:
            shutil.rmtree(place)

    @asynccontextmanager
    async def checkpoint(self, id: str, dest: str) -> AsyncIterator[HeldWorkspace | None]:
        self._maybe_fail("checkpoint")
        assert list(Path(dest).iterdir()) == []
        environment = self._environment(id)
        await self.drop_guest(id)  # the real ones close every connection
        kept = self._kept(environment, "/tmp/")
        async with self.hold_workspace(id) as held:
            yield held
        self._maybe_fail("write")
        (Path(dest) / "memory").write_text(json.dumps(kept))

    def _kept(self, environment: Environment, *places: str) -> dict[str, object]:
        """What a checkpoint holds: the files below ``places``, and the commands that run."""
        return {
            "version": self.version,
            "files": {
                path: [file.data.hex(), file.mode]
                for path, file in environment.files.items()
                if path.startswith(places) and file.data is not None
            },
            "commands": [
                {
                    "id": command.id,
                    "tag": command.tag,
                    "argv": [os.fsdecode(arg) for arg in command.argv],
                    "env": dict(command.env),
                    "timeout": command.timeout,
                    "output": b"".join(data for _, _, data in command._ring).hex(),
                }
                for command in environment.commands.values()
                if command.running
            ],
        }

    async def create_from(self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace) -> None:
        await self.create(id, spec)
        for path, file in _read(workspace).items():
            self.environments[id].files[path] = file

    async def restore(self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace, src: str) -> None:
        self._maybe_fail("restore")
        kept = json.loads((Path(src) / "memory").read_text())
        if kept["version"] != self.version:
            raise ConflictError(f"it was written by version {kept['version']}, and this is {self.version}")
        await self.create_from(id, spec, workspace)
        environment = self.environments[id]
        for path, (data, mode) in kept["files"].items():
            environment.files[path] = File(bytes.fromhex(data), mode)
        for one in kept["commands"]:
            argv = [os.fsencode(arg) for arg in one["argv"]]
            command = Command(
                environment, one["id"], one["tag"], argv, one["env"], WORKSPACE, one["timeout"], None, False
            )
            output = bytes.fromhex(one["output"])
            if output:
                command._ring.append((0, 1, output))
                command.cursor = len(output)
            environment.commands[one["id"]] = command
        self.restored.append(id)

    async def layers_in_use(self) -> set[str]:
        return set()  # what is in layers was copied


class StreamedCheckpointBackend(CheckpointBackend):
    """As that, but its workspaces come and go as archives, and a checkpoint holds the workspace itself."""

    def __init__(self, settings: Settings, scratch: Path) -> None:
        super().__init__(settings, scratch)
        self.capabilities = replace(self.capabilities, layered_workspace=False)

    @asynccontextmanager
    async def checkpoint(self, id: str, dest: str) -> AsyncIterator[None]:
        self._maybe_fail("checkpoint")
        assert list(Path(dest).iterdir()) == []
        environment = self._environment(id)
        kept = self._kept(environment, WORKSPACE + "/", "/tmp/")
        yield None
        self._maybe_fail("write")
        (Path(dest) / "memory").write_text(json.dumps(kept))

    async def restore(self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace, src: str) -> None:
        assert workspace == PreparedWorkspace()
        await super().restore(id, spec, workspace, src)


def _lay_out(files: dict[str, File], place: Path) -> None:
    place.mkdir(parents=True)
    for path in sorted(files):
        if path == WORKSPACE or not path.startswith(WORKSPACE + "/"):
            continue
        target = place / path.removeprefix(WORKSPACE + "/")
        data = files[path].data
        if data is None:
            target.mkdir()
        else:
            target.write_bytes(data)
        target.chmod(files[path].mode)


def _read(workspace: PreparedWorkspace) -> dict[str, File]:
    """The files that layers show, the lowest first, so that each covers those below."""
    found: dict[str, File] = {}
    for layer in reversed(workspace.lowers):
        for place, directories, names in os.walk(layer):
            for name in [*directories, *names]:
                path = Path(place, name)
                info = path.lstat()
                shown = f"{WORKSPACE}/{path.relative_to(layer)}"
                if stat.S_ISCHR(info.st_mode):  # a whiteout
                    for gone in [known for known in found if known == shown or known.startswith(shown + "/")]:
                        del found[gone]
                else:
                    data = None if stat.S_ISDIR(info.st_mode) else path.read_bytes()
                    found[shown] = File(data, stat.S_IMODE(info.st_mode))
    return found
