"""The tools of asynchronous order: what cancellation cannot split, tasks that nobody forgets, and the gate."""

from __future__ import annotations

import asyncio

import pytest

from agent_sandbox.manager.tasks import Gate, Tasks, uninterrupted


async def test_uninterrupted_work_ends_before_the_cancellation_goes_on() -> None:
    steps: list[str] = []
    go = asyncio.Event()

    async def work() -> int:
        steps.append("begun")
        await go.wait()
        steps.append("ended")
        return 7

    task = asyncio.create_task(uninterrupted(work()))
    await asyncio.sleep(0.01)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
    assert (steps, task.done()) == (["begun"], False)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["begun", "ended"]
    assert await uninterrupted(work()) == 7


async def test_an_error_of_uninterrupted_work_wins_over_a_cancellation() -> None:
    go = asyncio.Event()

    async def work() -> None:
        await go.wait()
        raise ValueError("mine")

    task = asyncio.create_task(uninterrupted(work()))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    go.set()
    with pytest.raises(ValueError, match="mine"):
        await task


async def test_an_owned_task_is_cancelled_with_its_caller_who_waits_for_its_cleanup() -> None:
    tasks, steps, go = Tasks(), list[str](), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await go.wait()
            steps.append("cleaned")

    caller = asyncio.create_task(tasks.own(work(), "work"))
    await asyncio.sleep(0.01)
    caller.cancel()
    await asyncio.sleep(0.01)
    assert (len(tasks), caller.done()) == (1, False)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert (steps, len(tasks)) == (["cleaned"], 0)


async def test_settling_waits_for_tasks_that_tasks_start() -> None:
    tasks, steps = Tasks(), list[int]()

    async def work(depth: int) -> None:
        await asyncio.sleep(0.01)
        steps.append(depth)
        if depth:
            tasks.spawn(work(depth - 1), f"work {depth - 1}")

    tasks.spawn(work(3), "work 3")
    assert not await tasks.settle(0.001)
    assert await tasks.settle(10)
    assert steps == [3, 2, 1, 0]
    assert await tasks.settle()


async def test_cancelling_all() -> None:
    tasks = Tasks()
    task = tasks.spawn(asyncio.Event().wait(), "for ever")
    tasks.cancel()
    await tasks.settle(10)
    assert task.cancelled()


async def test_many_pass_an_open_gate_at_once() -> None:
    gate = Gate()
    async with gate.passing(), gate.passing(), asyncio.timeout(5), gate.passing():
        pass


async def test_a_closed_gate_keeps_out_and_closing_waits_for_those_inside() -> None:
    gate, order = Gate(), list[str]()
    inside, leave, reopen = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def early() -> None:
        async with gate.passing():
            inside.set()
            await leave.wait()
            order.append("early left")

    async def closer() -> None:
        async with gate.closed():
            order.append("closed")
            await reopen.wait()
            order.append("reopened")

    async def late() -> None:
        async with gate.passing():
            order.append("late passed")

    first = asyncio.create_task(early())
    await inside.wait()
    second = asyncio.create_task(closer())
    await asyncio.sleep(0.01)
    third = asyncio.create_task(late())
    await asyncio.sleep(0.01)
    assert order == []
    leave.set()
    await asyncio.sleep(0.01)
    assert order == ["early left", "closed"]
    reopen.set()
    async with asyncio.timeout(5):
        await asyncio.gather(first, second, third)
    assert order == ["early left", "closed", "reopened", "late passed"]


async def test_a_closer_that_is_cancelled_while_it_waits_opens_the_gate_again() -> None:
    gate = Gate()

    async def close() -> None:
        async with gate.closed():
            raise AssertionError("somebody was inside")

    async with gate.passing():
        closer = asyncio.create_task(close())
        await asyncio.sleep(0.01)
        closer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closer
        async with asyncio.timeout(5), gate.passing():
            pass


async def test_waiters_at_a_gate_may_be_cancelled() -> None:
    gate = Gate()

    async def enter() -> None:
        async with gate.passing():
            raise AssertionError("it was closed")

    async with gate.closed():
        waiter = asyncio.create_task(enter())
        await asyncio.sleep(0.01)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    async with asyncio.timeout(5), gate.closed():
        pass
