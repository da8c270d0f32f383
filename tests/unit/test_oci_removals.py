"""Removals that fail are tried again until they succeed, one at a time, and end with the server."""

from __future__ import annotations

import asyncio

import pytest

from agent_sandbox.backends.linux import removals
from agent_sandbox.backends.linux.removals import Removals


class Place:
    """Something to remove, which refuses as often as it is told."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.attempts = 0
        self.at_once = 0
        self.times: list[float] = []
        self.gone = asyncio.Event()
        self.let = asyncio.Event()
        self.let.set()

    async def remove(self, id: str) -> None:
        self.times.append(asyncio.get_running_loop().time())
        self.attempts += 1
        self.at_once += 1
        assert self.at_once == 1
        try:
            await self.let.wait()
            if self.attempts <= self.refusals:
                raise OSError("busy")
            self.gone.set()
        finally:
            self.at_once -= 1


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(removals, "LONGEST_PAUSE_SECONDS", 0.05)


async def test_what_fails_is_tried_again_after_longer_pauses_until_it_is_gone() -> None:
    place = Place(refusals=4)
    them = Removals(place.remove)
    them.begin("sb1-1")
    assert "sb1-1" in them
    await asyncio.wait_for(place.gone.wait(), 60)
    await asyncio.sleep(0)
    assert "sb1-1" not in them
    pauses = [after - before for before, after in zip(place.times, place.times[1:], strict=False)]
    assert len(pauses) == 4
    for pause, least in zip(pauses, (0.02, 0.04, 0.05, 0.05), strict=True):
        assert pause >= least - 0.005
    await asyncio.sleep(0.1)
    assert place.attempts == 5


async def test_asking_again_tries_at_once_and_never_twice_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "FIRST_PAUSE_SECONDS", 60.0)
    place = Place(refusals=1)
    place.let.clear()
    them = Removals(place.remove)
    for _ in range(5):
        them.begin("sb1-1")
    await asyncio.sleep(0)
    place.let.set()
    await asyncio.sleep(0.01)
    assert (place.attempts, "sb1-1" in them) == (1, True)
    them.begin("sb1-1")
    await asyncio.wait_for(place.gone.wait(), 60)
    await asyncio.sleep(0)
    assert (place.attempts, "sb1-1" in them) == (2, False)


async def test_closing_waits_for_what_runs_and_tries_nothing_again() -> None:
    failing, slow = Place(refusals=1_000_000), Place(refusals=1)
    waiting, running = Removals(failing.remove), Removals(slow.remove)
    waiting.begin("sb1-1")
    slow.let.clear()
    running.begin("sb2-1")
    await asyncio.sleep(0.01)
    asyncio.get_running_loop().call_later(0.05, slow.let.set)
    await waiting.close(60)
    await running.close(60)
    attempts = failing.attempts
    await asyncio.sleep(0.15)
    assert (failing.attempts, slow.attempts, slow.at_once) == (attempts, 1, 0)


async def test_closing_does_not_wait_for_ever() -> None:
    place = Place(refusals=0)
    place.let.clear()
    them = Removals(place.remove)
    them.begin("sb1-1")
    await asyncio.wait_for(them.close(0.05), 60)
    place.let.set()
    await asyncio.wait_for(place.gone.wait(), 60)
