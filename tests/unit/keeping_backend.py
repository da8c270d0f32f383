"""Checkpoints as the kit's checks want them, and one backend for each rule that may be broken.

Beside :mod:`tests.unit.checkpoint_backend`, on which it stands, processes can be held still here, environments have
names, clocks and keys of their own, and a checkpoint says what it is of. ``Keeping.breaks`` names the one rule that is
broken, in the words that stand where it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agent_sandbox.backends.fake.programs import Process, Program
from agent_sandbox.backends.fake.state import Environment, File, Tree, put
from agent_sandbox.backends.guest_backend import Endpoint
from agent_sandbox.config import Settings
from agent_sandbox.errors import ConflictError
from agent_sandbox.types import WORKSPACE, HeldWorkspace, PreparedWorkspace, SandboxSpec
from tests.unit.checkpoint_backend import CheckpointBackend, StreamedCheckpointBackend

STILL: set[int] = set()
"""The environments whose processes are held, by their identity here."""


async def _moves(process: Process) -> None:
    """What a program waits for before its next step."""
    await asyncio.sleep(0.005)
    while id(process.environment) in STILL:
        await asyncio.sleep(0.005)


async def write_diary(process: Process) -> int:
    """What ``diary.DIARY`` does; its number is in its variables, which a checkpoint holds."""
    path = f"{WORKSPACE}/diary"
    while True:
        await _moves(process)
        number = int(process.env.get("NUMBER", "0")) + 1
        seed = process.env.get("SEED")
        drawn = os.urandom(8).hex() if seed is None else hashlib.sha256(f"{seed}{number}".encode()).hexdigest()
        file = process.environment.files.get(path)
        before = b"" if file is None else file.data or b""
        put(process.environment, path, before + f"{number} {drawn}\n".encode(), 0o644)
        process.env["NUMBER"] = str(number)


async def hold_file(process: Process) -> int:
    """What ``diary.HOLDER`` does, whose file is in its variables."""
    process.env.setdefault("HELD", "still here")
    put(process.environment, f"{WORKSPACE}/ready", b"", 0o644)
    while f"{WORKSPACE}/go" not in process.environment.files:
        await _moves(process)
    put(process.environment, f"{WORKSPACE}/found", process.env["HELD"].encode(), 0o644)
    return 0


def file_of(process: Process, name: str) -> bytes:
    return process.environment.files[f"/etc/{name}"].data or b""


async def date(process: Process) -> int:
    await process.out(b"%.6f\n" % (time.time() - float(file_of(process, "behind"))))
    return 0


async def uname(process: Process) -> int:
    await process.out(file_of(process, "hostname") + b"\n")
    return 0


async def od(process: Process) -> int:
    await process.out(os.urandom(16).hex().encode() + b"\n")
    return 0


MADE_UP: dict[str, Program] = {
    "diary": write_diary,
    "holder": hold_file,
    "date": date,
    "uname": uname,
    "od": od,
}
"""Programs for :data:`agent_sandbox.backends.fake.programs.PROGRAMS`."""


class Keeping(CheckpointBackend):
    """Checkpoints as the contract has them, but for the one rule that ``breaks`` names."""

    breaks = ""

    def __init__(self, settings: Settings, scratch: Path) -> None:
        super().__init__(settings, scratch)
        self._shared: dict[str, Tree] = {}

    async def create(self, id: str, spec: SandboxSpec) -> None:
        await super().create(id, spec)
        files = self.environments[id].files
        for name, data in (("hostname", id), ("machine-id", os.urandom(16).hex()), ("behind", "0")):
            files[f"/etc/{name}"] = File(data.encode(), 0o644)

    async def endpoint(self, id: str) -> Endpoint:
        endpoint = await super().endpoint(id)
        env = {"SEED": "1"} if self.breaks == "entropy is shared" else {}
        return dataclasses.replace(endpoint, image_env={**endpoint.image_env, **env})

    @asynccontextmanager
    async def checkpoint(self, id: str, dest: str) -> AsyncIterator[HeldWorkspace | None]:
        environment, place = self._environment(id), Path(dest)
        held_still = _identity(environment)
        holds = any(command.id == "holder" and command.running for command in environment.commands.values())
        if holds and self.breaks == "a deleted file is refused without its name":
            raise ConflictError("it cannot be kept")
        if self.breaks != "processes run on":
            STILL.add(held_still)
        try:
            async with super().checkpoint(id, dest) as held:
                yield held
                if self.breaks == "the memory is of a later moment":
                    await self._a_moment_later(environment, held_still)
            if self.breaks == "the memory is of a later moment":
                (place / "memory").write_text(json.dumps(self._all_kept(environment)))
            self._seal(environment, place)
        except BaseException:
            for path in place.iterdir():
                path.unlink()
            if self.breaks == "what was broken off counts":
                (place / "memory").write_text(json.dumps(self._all_kept(environment)))
                self._seal(environment, place)
            raise
        finally:
            if self.breaks != "it stays frozen":
                STILL.discard(held_still)
            if self.breaks == "it ends":
                await self.kill_guest(id)

    async def _a_moment_later(self, environment: Environment, held_still: int) -> None:
        STILL.discard(held_still)
        await asyncio.sleep(0.2)
        STILL.add(held_still)

    def _all_kept(self, environment: Environment) -> dict[str, object]:
        places = ("/tmp/",) if self.capabilities.layered_workspace else ("/tmp/", WORKSPACE + "/")
        return self._kept(environment, *places)

    def _seal(self, environment: Environment, place: Path) -> None:
        digest = hashlib.sha256((place / "memory").read_bytes()).hexdigest()
        manifest = {"version": 1, "memory_mb": environment.spec.memory_mb, "digest": digest}
        if self.breaks == "it hangs on its sandbox":
            manifest["of"] = _identity(environment)
        if self.breaks == "the key goes on":
            manifest["key"] = environment.key.hex()
        if self.breaks == "names go on":
            manifest["name"] = (environment.files["/etc/hostname"].data or b"").decode()
        (place / "manifest.json").write_text(json.dumps(manifest))

    async def restore(self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace, src: str) -> None:
        manifest = self._read(id, spec, Path(src))
        if self.breaks == "a refused one stays" and manifest is None:
            await self.create(id, spec)
        if manifest is None:
            raise ConflictError("it is another one, or damaged")
        if "of" in manifest and manifest["of"] not in [
            _identity(environment) for environment in self.environments.values()
        ]:
            raise ConflictError("its sandbox has gone")
        await super().restore(id, spec, workspace, src)
        environment = self.environments[id]
        for command in environment.commands.values():
            if self.breaks == "the memory is lost":
                command.env.pop("NUMBER", None)
            if self.breaks == "a deleted file is lost" and command.id == "holder":
                command.env["HELD"] = ""
            if self.breaks == "nothing goes on":
                command.signal(9)
        if self.breaks == "forks share their files":
            environment.files = self._shared.setdefault(src, environment.files)
        if self.breaks == "a restore changes it":
            (Path(src) / "memory").touch()
        if self.breaks == "the clock stands still":
            environment.files["/etc/behind"] = File(b"100", 0o644)
        if "name" in manifest:
            environment.files["/etc/hostname"] = File(str(manifest["name"]).encode(), 0o644)
        if "key" in manifest:
            await self.drop_guest(id)
            environment.key = bytes.fromhex(str(manifest["key"]))
        if self.breaks == "a cancelled one stays":
            await asyncio.sleep(0.5)

    def _read(self, id: str, spec: SandboxSpec, place: Path) -> dict[str, object] | None:
        """The manifest of a checkpoint that can go on as this; ``None`` where it cannot."""
        try:
            manifest = json.loads((place / "manifest.json").read_bytes())
            memory = (place / "memory").read_bytes()
        except (OSError, ValueError):
            return None
        is_whole = hashlib.sha256(memory).hexdigest() == manifest["digest"] or self.breaks == "damage is not seen"
        is_ours = manifest["version"] == 1 or self.breaks == "versions are not compared"
        fits = manifest["memory_mb"] <= spec.memory_mb or self.breaks == "sizes are not compared"
        return manifest if is_whole and is_ours and fits else None


class StreamedKeeping(Keeping, StreamedCheckpointBackend):  # type: ignore[misc]  # its block gives None
    """The same where the checkpoint holds the workspace."""


def _identity(environment: Environment) -> int:
    return id(environment)
