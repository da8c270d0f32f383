"""The command that installs what is missing, for each way in which this package comes (PEP 610, direct_url.json)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from agent_sandbox.installing import remedy


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_url: object) -> None:
    """Have another installation of this package found first."""
    place = tmp_path / "site" / "agent_sandbox-0.1.0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: agent-sandbox\nVersion: 0.1.0\n")
    if direct_url is not None:
        text = direct_url if isinstance(direct_url, str) else json.dumps(direct_url)
        (place / "direct_url.json").write_text(text)
    monkeypatch.syspath_prepend(str(place.parent))


@pytest.mark.parametrize("prefix", ["/elsewhere", "/src/a b/.venv"])
@pytest.mark.parametrize(
    ("direct_url", "extra", "expected"),
    [
        (None, "cli", "pip install 'agent-sandbox[cli]'"),
        (None, "server", "pip install 'agent-sandbox[server]'"),
        ({"url": "https://example.org/x.whl", "archive_info": {}}, "cli", "pip install 'agent-sandbox[cli]'"),
        ({"url": "file:///src/x.whl", "archive_info": {}}, "cli", "pip install 'agent-sandbox[cli]'"),
        ("{broken", "cli", "pip install 'agent-sandbox[cli]'"),
        ("[]", "cli", "pip install 'agent-sandbox[cli]'"),
        ({"url": "file:///src/copy", "dir_info": {}}, "cli", "pip install '/src/copy[cli]'"),
        (
            {"url": "file:///src/copy", "dir_info": {}},
            "server",
            "pip install /src/copy/crates/engine '/src/copy[server]'",
        ),
    ],
)
def test_the_remedy_is_for_this_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, direct_url: object, extra: str, expected: str
) -> None:
    installed(tmp_path, monkeypatch, direct_url)
    monkeypatch.setattr(sys, "prefix", prefix)
    assert remedy(extra) == expected


def test_a_checkout_has_its_own_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, {"url": "file:///src/a%20b", "dir_info": {"editable": True}})
    monkeypatch.setattr(sys, "prefix", "/src/a b/.venv")
    assert remedy("server") == "make -C '/src/a b' setup"
    monkeypatch.setattr(sys, "prefix", "/home/me/venv")
    assert remedy("terminal") == "pip install -e '/src/a b[terminal]'"
    assert remedy("server") == "pip install '/src/a b/crates/engine' -e '/src/a b[server]'"
