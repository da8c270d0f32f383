"""What goes wrong around the store: errors keep their names, and workspaces are kept all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    LimitExceededError,
    NotFoundError,
    PayloadTooLargeError,
    StoreBusyError,
    StoreFullError,
)
from agent_sandbox.manager import workspaces as module
from agent_sandbox.manager.keeping import from_directory
from agent_sandbox.manager.taken import Taken
from agent_sandbox.manager.workspaces import Workspaces
from agent_sandbox.store import Report, Store
from agent_sandbox.store.catalog import Ref
from agent_sandbox.store.outcomes import Left, LeftOut
from agent_sandbox.types import HeldWorkspace


async def no_layers() -> set[str]:
    return set()


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (RecursionError, RecursionError),
        (RuntimeError, RuntimeError),
        (OSError, BackendError),
        (StoreFullError, LimitExceededError),
    ],
)
async def test_an_error_within_is_no_shutdown(tmp_path: Path, raised: type[Exception], seen: type[Exception]) -> None:
    def work(_: Store) -> None:
        raise raised("as made")

    workspaces = Workspaces(tmp_path, 1 << 30, no_layers)
    await workspaces.start([], [])
    try:
        with pytest.raises(seen) as caught:
            await workspaces.ask(work)
        assert "shutting down" not in str(caught.value)
    finally:
        await workspaces.close()
    with pytest.raises(BackendError, match="shutting down"):
        await workspaces.ask(work)


async def test_a_workspace_is_kept_though_the_state_that_it_began_with_is_lost(tmp_path: Path) -> None:
    """Somebody put a damaged store away, and the server made a new one."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "file").write_text("text")
    workspaces = Workspaces(tmp_path, 1 << 30, no_layers)
    await workspaces.start([], ["sandbox-1"])
    try:
        with pytest.raises(NotFoundError):
            await workspaces.stand("sandbox-1", "ab" * 32)
        source = from_directory(HeldWorkspace(str(workspace), False))
        with pytest.raises(ConflictError, match="take a snapshot"):
            async with workspaces.aside("sandbox-1", "ab" * 32, source, 1 << 20):
                raise AssertionError("compared with nothing")
        taken = await workspaces.take("sandbox-1", "snapshot", source, 1 << 20)
        assert taken.report.files == 1
        assert await workspaces.head("sandbox-1") == taken.commit
    finally:
        await workspaces.close()


def test_a_record_names_few_and_short_paths() -> None:
    """A sandbox may hide a hundred sockets below a thousand names of 255 bytes."""

    def named(*paths: bytes) -> list[str]:
        left = tuple(LeftOut(path, Left.SOCKET) for path in paths)
        report = Report(0, 0, 0, 0, 0, 0, 0, left, len(left))
        return [path for path, _ in Taken("", report).skipped()]

    assert named(b"a", b"b") == ["a", "b"]
    assert len(named(*[b"a"] * 150)) == 100
    assert named(b"first", *[b"x" * 250_000] * 100) == ["first"]
    assert sum(map(len, named(*[b"x" * 4_000] * 100))) <= 48 << 10


async def test_a_snapshot_follows_one_that_was_deleted(tmp_path: Path) -> None:
    """Its bytes are counted from a state that is still there, whatever was forgotten meanwhile."""
    below, upper, merged = (tmp_path / name for name in ("below", "upper", "merged"))
    for place, names in ((below, "a"), (upper, "b"), (merged, "ab")):
        place.mkdir()
        for name in names:
            (place / name).write_text(name)
    workspaces = Workspaces(tmp_path, 1 << 30, no_layers)
    await workspaces.start([], ["first-1", "sandbox-1"])
    try:
        began = await workspaces.take("first-1", "begin", from_directory(HeldWorkspace(str(below), False)), 1 << 20)
        await workspaces.stand("sandbox-1", began.commit)
        source = from_directory(HeldWorkspace(str(merged), False, str(upper)))
        taken = await workspaces.take("sandbox-1", "snapshot", source, 1 << 20)
        assert taken.report.bytes == 2
        await workspaces.drop("snapshot")
        for place in (upper, merged):
            (place / "c").write_text("c")
        assert (await workspaces.take("sandbox-1", "next", source, 1 << 20)).report.bytes == 3
    finally:
        await workspaces.close()


async def test_a_workspace_that_is_too_large_says_so_though_its_last_snapshot_was_deleted(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "file").write_text("text")
    workspaces = Workspaces(tmp_path, 1 << 30, no_layers)
    await workspaces.start([], ["sandbox-1"])
    try:
        source = from_directory(HeldWorkspace(str(workspace), False))
        await workspaces.take("sandbox-1", "first", source, 100)
        (workspace / "file").write_text("more text")
        taken = await workspaces.take("sandbox-1", "second", source, 100)
        (workspace / "file").write_text("x" * 200)
        with pytest.raises(PayloadTooLargeError):
            await workspaces.take("sandbox-1", "large", source, 100)
        assert await workspaces.head("sandbox-1") == taken.commit
        await workspaces.drop("second")
        with pytest.raises(PayloadTooLargeError):
            await workspaces.take("sandbox-1", "large", source, 100)
        (first,) = await workspaces.ask(lambda store: [pin.commit.hex() for pin in store.pins() if pin.name == "first"])
        assert await workspaces.head("sandbox-1") == first
    finally:
        await workspaces.close()


async def test_garbage_is_collected_while_a_snapshot_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gc comes right after the pin went, and takes the commit with it."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "file").write_text("text")
    workspaces = Workspaces(tmp_path, 1 << 30, no_layers)
    await workspaces.start([], ["sandbox-1"])
    try:
        await workspaces.take("sandbox-1", "snapshot", from_directory(HeldWorkspace(str(workspace), False)), 1 << 20)
        await workspaces.gone("sandbox-1")
        unpin = Store.unpin

        def unpin_and_collect(store: Store, name: str) -> None:
            unpin(store, name)
            store.gc()

        monkeypatch.setattr(Store, "unpin", unpin_and_collect)
        await workspaces.drop("snapshot")
        assert await workspaces.ask(lambda store: list(store.pins())) == []
    finally:
        await workspaces.close()


async def test_a_snapshot_whose_deletion_was_cut_off_gives_its_room_back(tmp_path: Path) -> None:
    """Its row went, and the server was killed: the sandbox's next state leads to it, and is no reason to keep it."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    source = from_directory(HeldWorkspace(str(workspace), False))
    workspaces = Workspaces(tmp_path, 1 << 30, no_layers)
    await workspaces.start([], ["sandbox-1"])
    (workspace / "file").write_text("text")
    old = await workspaces.take("sandbox-1", "old", source, 1 << 20)
    (workspace / "file").write_text("other")
    await workspaces.take("sandbox-1", "new", source, 1 << 20)
    await workspaces.close()
    later = Workspaces(tmp_path, 1 << 30, no_layers)
    await later.start(["new"], ["sandbox-1"])
    try:
        assert await later.ask(
            lambda store: [(e.id.hex(), e.forgotten) for e in store.log("sandboxes:sandbox-1", 2)][1:]
        ) == [(old.commit, True)]
    finally:
        await later.close()


async def test_what_was_removed_before_a_kill_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the disk is so full that gc has to come twice."""

    def fail(*_: object, **__: object) -> None:
        raise StoreFullError("the disk is full")

    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "file").write_text("text")
    workspaces = Workspaces(tmp_path, 1 << 30, no_layers)
    await workspaces.start([], ["sandbox-1"])
    taken = await workspaces.take(
        "sandbox-1", "snapshot", from_directory(HeldWorkspace(str(workspace), False)), 1 << 20
    )
    await workspaces.gone("sandbox-1")
    await workspaces.drop("snapshot")
    await workspaces.close()
    later = Workspaces(tmp_path, 1 << 30, no_layers)
    await later.start([], [])
    try:
        await later.tidy()
        assert await later.ask(lambda store: store.resolve(taken.commit).hex()) == taken.commit, "not at once"
        monkeypatch.setattr(module, "_GC_SECONDS", -1.0)
        with monkeypatch.context() as full:
            full.setattr(Store, "gc", fail)
            await later.tidy()
        await later.tidy()
        with pytest.raises(NotFoundError):
            await later.ask(lambda store: store.resolve(taken.commit))
    finally:
        await later.close()


@pytest.mark.parametrize("error", [StoreBusyError, StoreFullError])
async def test_what_gc_or_a_full_disk_keeps_from_being_removed_goes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error("not now")

    workspace = tmp_path / "workspace"
    workspace.mkdir()
    workspaces = Workspaces(tmp_path, 1 << 30, no_layers)
    await workspaces.start([], ["sandbox-1"])
    try:
        taken = await workspaces.take(
            "sandbox-1", "snapshot", from_directory(HeldWorkspace(str(workspace), False)), 1 << 20
        )
        await workspaces.stand("sandbox-2", taken.commit)
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(Store, "unpin", fail)
            meanwhile.setattr(Store, "delete", fail)
            await workspaces.drop("snapshot")
            await workspaces.gone("sandbox-1")
            await workspaces.gone("sandbox-2")
            await workspaces.tidy()
        await workspaces.tidy()
        assert await workspaces.ask(lambda store: list(store.pins())) == []
        assert await workspaces.ask(lambda store: [ref.name for ref in store.refs("sandboxes")]) == ["main"]
    finally:
        await workspaces.close()


async def test_a_server_starts_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody could make room; what is left over goes with a later start."""

    def fail(*_: object) -> None:
        raise StoreFullError("the disk is full")

    workspace = tmp_path / "workspace"
    workspace.mkdir()
    workspaces = Workspaces(tmp_path, 1 << 30, no_layers)
    await workspaces.start([], ["sandbox-1"])
    await workspaces.take("sandbox-1", "snapshot", from_directory(HeldWorkspace(str(workspace), False)), 1 << 20)
    await workspaces.close()
    later = Workspaces(tmp_path, 1 << 30, no_layers)
    with monkeypatch.context() as full:
        for name in ("unpin", "delete", "forget"):
            full.setattr(Store, name, fail)
        await later.start([], [])
    await later.close()
    last = Workspaces(tmp_path, 1 << 30, no_layers)
    await last.start([], [])
    try:
        assert await last.ask(lambda store: list(store.pins())) == []
    finally:
        await last.close()


async def test_what_is_removed_while_a_server_starts_does_not_stay(tmp_path: Path) -> None:
    """Sandboxes that were being destroyed go on being that, beside the opening of the store."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    workspaces = Workspaces(tmp_path, 1 << 30, no_layers)
    await workspaces.start([], ["sandbox-1"])
    taken = await workspaces.take(
        "sandbox-1", "snapshot", from_directory(HeldWorkspace(str(workspace), False)), 1 << 20
    )
    await workspaces.stand("sandbox-1", taken.commit)
    await workspaces.close()
    later = Workspaces(tmp_path, 1 << 30, no_layers)
    await later.drop("snapshot")
    await later.gone("sandbox-1")
    await later.start(["snapshot"], ["sandbox-1"])  # as rows were a moment before
    try:
        await later.tidy()
        assert await later.ask(lambda store: list(store.pins())) == []
        assert await later.ask(lambda store: [ref.name for ref in store.refs("sandboxes")]) == ["main"]
    finally:
        await later.close()


async def test_a_removal_in_the_middle_of_the_opening_takes_nothing_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    first = Workspaces(tmp_path, 1 << 30, no_layers)
    await first.start([], ["sandbox-1"])
    await first.take("sandbox-1", "snapshot", from_directory(HeldWorkspace(str(workspace), False)), 1 << 20)
    await first.close()
    later, loop, refs = Workspaces(tmp_path, 1 << 30, no_layers), asyncio.get_running_loop(), Store.refs

    def refs_and_a_removal(store: Store, project: str) -> Iterator[Ref]:
        found = list(refs(store, project))
        asyncio.run_coroutine_threadsafe(later.gone("sandbox-1"), loop).result(30)
        return iter(found)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "refs", refs_and_a_removal)
        await later.start(["snapshot"], [])
    try:
        await later.tidy()
        assert await later.ask(lambda store: [ref.name for ref in store.refs("sandboxes")]) == ["main"]
    finally:
        await later.close()
    await later.close()  # as a server does whose start failed, and which closes it then
