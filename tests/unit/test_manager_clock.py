"""The manager's clock: a step of the host's moves no expiry, and sleep counts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from agent_sandbox.backends.fake import FakeBackend
from agent_sandbox.errors import NotFoundError
from agent_sandbox.manager import CreateOptions, Manager
from agent_sandbox.manager.clock import SteadyClock
from tests.unit.manager_harness import make_settings

DAY = 86_400.0


def test_it_is_set_once_and_goes_by_the_time_since_boot() -> None:
    wall, since_boot = 1_700_000_000.0, 50.0
    clock = SteadyClock(lambda: wall, lambda: since_boot)
    assert clock() == wall
    since_boot += 7.5
    wall += DAY  # somebody sets the host's clock
    assert clock() == 1_700_000_007.5
    wall -= 2 * DAY
    assert clock() == 1_700_000_007.5
    since_boot += DAY  # the machine sleeps, which CLOCK_BOOTTIME counts and CLOCK_MONOTONIC does not
    assert clock() == 1_700_000_007.5 + DAY


def test_it_starts_with_the_hosts_clock() -> None:
    before = time.time()
    clock = SteadyClock()
    assert before - 1 < clock() < time.time() + 1


async def look_for_ever(manager: Manager, id: str) -> None:
    while True:
        await manager.get(id)
        await asyncio.sleep(0.01)


async def test_a_step_of_the_hosts_clock_ends_no_sandbox_and_keeps_none(tmp_path: Path) -> None:
    step = 0.0
    settings = make_settings(tmp_path / "data", reap_interval_seconds=0.05)
    fake = FakeBackend(settings)
    assert isinstance(Manager(settings, {"fake": fake})._clock, SteadyClock)
    manager = Manager(settings, {"fake": fake}, clock=SteadyClock(lambda: time.time() + step))
    await manager.start()
    try:
        short = await manager.create(CreateOptions(timeout_seconds=1))
        long = await manager.create(CreateOptions(timeout_seconds=600))
        step = -DAY
        with pytest.raises(NotFoundError):
            await look_for_ever(manager, short.id)
        step = DAY
        assert (await manager.get(long.id)).expires_at == long.expires_at
        renewed = await manager.set_timeout(long.id, 60)
        assert long.created_at + 60 <= renewed.expires_at < long.created_at + 600
        await manager.destroy(long.id)
    finally:
        await manager.close()
        await fake.close()
