"""The daemon as the first process of a real microVM: what it holds, ends and stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent_sandbox.backends.microvm import MicrovmBackend
from agent_sandbox.config import Settings
from agent_sandbox.guest import Guest
from agent_sandbox.types import ExecExit, SandboxSpec
from tests import microvms
from tests.real.leaks import wait_until_clean

pytestmark = pytest.mark.real

SPEC = SandboxSpec(image="host", image_digest="", cpus=1.0, memory_mb=256, pids_limit=400, disk_mb=64, tmp_mb=32)
MAGIC = b"\xf5sandboxd-begin\n"


@pytest_asyncio.fixture
async def machine(tmp_path: Path, machine_dir: Path) -> AsyncIterator[MicrovmBackend]:
    settings = Settings(data_dir=tmp_path / "data", machine_dir=str(machine_dir), allow_tcg=True)
    backend = microvms.make_backend(settings)
    await backend.start()
    try:
        await backend.create("sb1-1", SPEC)
        yield backend
    finally:
        await backend.destroy("sb1-1")
        await wait_until_clean(settings.data_dir, 30)
        await backend.close()


async def run(backend: MicrovmBackend, command: str, timeout: float = 60) -> ExecExit:
    argv = ["sh", "-c", command]
    events = backend.exec("sb1-1", argv, env={}, workdir="/workspace", timeout_seconds=timeout)
    (end,) = [event async for event in events if isinstance(event, ExecExit)]
    return end


async def test_a_fork_bomb_ends_with_its_command_and_freezing_stops_what_runs(machine: MicrovmBackend) -> None:
    bomb = await run(machine, "bomb() { bomb | bomb & }; bomb; while :; do :; done", 3)
    assert (bomb.signal, bomb.timed_out) == (9, True)
    assert (await machine.guest_stats("sb1-1")).processes == 0
    assert (await run(machine, "exit 3")).code == 3

    counter = "i=0; while :; do i=$((i+1)); echo $i > new; mv new count; done"
    counting = asyncio.create_task(run(machine, counter, 600))

    async def count() -> bytes:
        return await machine.read_file("sb1-1", "/workspace/count", 100)

    async with asyncio.timeout(120):
        while not await machine_has(machine, "count"):
            await asyncio.sleep(0.05)
        guest: Guest = await machine._guest("sb1-1")
        await guest.freeze()
        frozen = await count()
        await asyncio.sleep(0.5)
        assert await count() == frozen
        await guest.thaw()
        while await count() == frozen:
            await asyncio.sleep(0.05)
    counting.cancel()
    await asyncio.wait([counting])


async def machine_has(machine: MicrovmBackend, name: str) -> bool:
    return name in {entry.name for entry in await machine.list_files("sb1-1", "/workspace")}


async def test_the_ports_own_magic_is_data_like_any_other(machine: MicrovmBackend) -> None:
    data = MAGIC * 1_000 + MAGIC[:15] * 1_000 + MAGIC[:7]
    await machine.write_file("sb1-1", "/workspace/magic", data, 0o644)
    assert await machine.read_file("sb1-1", "/workspace/magic", len(data)) == data
