"""One creation for one key: waiting, replaying, conflicts, bounds, and crashes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_sandbox.errors import ConflictError, InvalidRequestError, LimitExceededError
from agent_sandbox.manager import CreateOptions, Reply
from agent_sandbox.manager.idempotency import KEEP_SECONDS
from tests.unit.manager_harness import Server, serving


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path) as running:
        yield running


class Maker:
    """Creates sandboxes and counts them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.made: list[str] = []

    async def __call__(self) -> Reply:
        record = await self.server.manager.create(CreateOptions())
        self.made.append(record.id)
        return Reply(201, record.id.encode())


async def test_the_reply_is_given_again_also_after_a_restart(server: Server) -> None:
    make = Maker(server)
    first = await server.manager.replies.once("me", "k", b"POST /v1/sandboxes {}", make)
    again = await server.manager.replies.once("me", "k", b"POST /v1/sandboxes {}", make)
    manager = await server.restart()
    after = await manager.replies.once("me", "k", b"POST /v1/sandboxes {}", make)
    assert again == after == Reply(201, first.body, replayed=True)
    assert not first.replayed
    assert len(make.made) == len(await manager.list_sandboxes()) == 1


async def test_another_request_with_the_key_is_a_conflict_and_anothers_key_is_none(server: Server) -> None:
    make = Maker(server)
    await server.manager.replies.once("me", "k", b"one", make)
    with pytest.raises(ConflictError, match="another request"):
        await server.manager.replies.once("me", "k", b"two", make)
    assert not (await server.manager.replies.once("you", "k", b"two", make)).replayed
    assert not (await server.manager.replies.once("me", "K", b"one", make)).replayed
    assert len(make.made) == 3


async def test_a_second_waits_for_the_first(server: Server) -> None:
    make = Maker(server)
    arrived = server.wire.hold("create")
    calls = [asyncio.create_task(server.manager.replies.once("me", "k", b"one", make)) for _ in range(5)]
    await arrived.wait()
    with pytest.raises(ConflictError):
        await server.manager.replies.once("me", "k", b"two", make)
    server.wire.free("create")
    replies = await asyncio.gather(*calls)
    assert len(make.made) == 1
    assert [reply.replayed for reply in replies].count(False) == 1
    assert {reply.body for reply in replies} == {make.made[0].encode()}


async def test_a_failure_is_not_kept_and_the_next_who_waits_tries(server: Server) -> None:
    make = Maker(server)
    server.fake.failures["create"] = [LimitExceededError("full")]
    calls = [asyncio.create_task(server.manager.replies.once("me", "k", b"one", make)) for _ in range(3)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(result, LimitExceededError) for result in results] == [True, False, False]
    assert len(make.made) == 1


async def test_a_caller_who_leaves_frees_the_key(server: Server) -> None:
    make = Maker(server)
    arrived = server.wire.hold("create")
    first = asyncio.create_task(server.manager.replies.once("me", "k", b"one", make))
    await arrived.wait()
    first.cancel()
    await asyncio.wait({first})
    server.wire.free("create")
    assert not (await server.manager.replies.once("me", "k", b"one", make)).replayed


async def test_a_creation_cut_short_by_a_crash_is_made_anew(server: Server) -> None:
    make = Maker(server)
    arrived = server.wire.hold("create")
    first = asyncio.create_task(server.manager.replies.once("me", "k", b"one", make))
    await arrived.wait()
    manager = await server.restart()
    await asyncio.wait({first})
    reply = await manager.replies.once("me", "k", b"one", make)
    assert not reply.replayed
    assert [record.id.encode() for record in await manager.list_sandboxes()] == [reply.body]


async def test_a_day_later_the_key_is_new(server: Server) -> None:
    make = Maker(server)
    await server.manager.replies.once("me", "k", b"one", make)
    server.clock.now += KEEP_SECONDS
    assert (await server.manager.replies.once("me", "k", b"one", make)).replayed
    server.clock.now += 1
    assert not (await server.manager.replies.once("me", "k", b"two", make)).replayed


async def test_what_was_made_is_told_also_when_its_reply_cannot_be_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*args: object) -> None:
        raise LimitExceededError("the disk is full")

    monkeypatch.setattr(server.manager._fleet.state, "put_reply", full)
    assert (await server.manager.replies.once("me", "k", b"one", Maker(server))).status == 201


@pytest.mark.parametrize("key", ["", "x" * 256, "a\nb", "é", "\x7f"])
async def test_a_key_that_cannot_be_one(server: Server, key: str) -> None:
    with pytest.raises(InvalidRequestError, match="printable"):
        await server.manager.replies.once("me", key, b"one", Maker(server))
