"""What a server does with machines that an earlier one had held when it ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.microvm import MicrovmBackend
from agent_sandbox.backends.microvm.monitor import Machine
from agent_sandbox.config import Settings


async def test_one_stuck_machine_keeps_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MicrovmBackend(Settings(data_dir=tmp_path))
    held = {"sb1-1", "sb2-1", "sb3-1"}
    both, went_on = asyncio.Barrier(len(held)), set[str]()

    async def go_on(id: str, machine: Machine) -> None:
        await both.wait()
        went_on.add(id)

    machine = Machine(tmp_path, Process(1, 1))
    monkeypatch.setattr(backend, "_list", lambda: sorted({*held, "sb4-1"}))
    monkeypatch.setattr(backend, "_machine", lambda id: machine)
    monkeypatch.setattr(backend, "_go_on_after", go_on)
    monkeypatch.setattr(
        "agent_sandbox.backends.microvm.places.Environment.is_held", lambda environment: environment.id in held
    )
    async with asyncio.timeout(60):
        await backend._let_go_on()
    assert went_on == held
