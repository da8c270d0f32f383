"""``backends`` says which way workspaces are kept, and why it is not the best one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from agent_sandbox.cli import backends

COPIED = "copied: EPERM; a rollback or fork costs the whole workspace"


@pytest.mark.parametrize(
    ("layered", "note", "shown"),
    [(True, "", "yes"), (True, COPIED, "copied"), (False, "the engine is reached over a network", "no")],
)
def test_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], layered: bool, note: str, shown: str
) -> None:
    capabilities = SimpleNamespace(
        isolation="container",
        accelerated=True,
        layered_workspace=layered,
        checkpoint=False,
        network=["none"],
        notes={"layered_workspace": note} if note else {},
    )
    item = SimpleNamespace(name="runc", healthy=True, message="", versions={}, capabilities=capabilities)
    client = SimpleNamespace(backends=lambda: [item])
    monkeypatch.setattr(backends, "connect", lambda: nullcontext(client))
    backends.backends()
    told = capsys.readouterr()
    assert told.out.splitlines()[1].split() == ["runc", "container", "yes", shown, "no", "none", "-"]
    assert (f"backend runc: workspaces: {note}" in told.err) == bool(note)
