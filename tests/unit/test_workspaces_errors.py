"""What goes wrong in a thread of the store keeps its name: only a closed store says that it is closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox.errors import BackendError, LimitExceededError, StoreFullError
from agent_sandbox.manager.workspaces import Workspaces
from agent_sandbox.store import Store


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
