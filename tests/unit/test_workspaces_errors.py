"""What goes wrong around the store: errors keep their names, and workspaces are kept all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox.errors import BackendError, ConflictError, LimitExceededError, NotFoundError, StoreFullError
from agent_sandbox.manager.keeping import from_directory
from agent_sandbox.manager.workspaces import Taken, Workspaces
from agent_sandbox.store import Report, Store
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
