"""Nothing that users see is undocumented, nothing documented is out of date."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from agent_sandbox import errors
from agent_sandbox.cli.app import app
from agent_sandbox.config import describe

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "spec").glob("*.md")])


def commands(prefix: str = "agent-sandbox", group: Any = None) -> Iterator[str]:
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(f"{prefix} {name}", command)
        else:
            yield f"{prefix} {name}"


def test_generated_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_setting_is_documented() -> None:
    page = (REFERENCE / "settings.md").read_text()
    names = [name for name, _, _ in describe()]
    assert len(names) > 20
    assert [name for name in names if f"| `{name}` |" not in page] == []


def test_every_command_is_documented_and_in_the_readme() -> None:
    page, readme = (REFERENCE / "cli.md").read_text(), (ROOT / "README.md").read_text()
    found = list(commands())
    assert len(found) == 62
    assert [name for name in found if f"## {name}\n" not in page] == []
    shown = re.findall(r"`(?:agent-sandbox )?((?:image |store |project )?[a-z]+)", readme)
    assert [name for name in found if name.removeprefix("agent-sandbox ") not in shown] == []


def test_every_error_code_is_documented() -> None:
    page = (REFERENCE / "errors.md").read_text()
    codes = {value.code for value in vars(errors).values() if isinstance(value, type) and hasattr(value, "code")}
    assert len(codes) == 15
    assert [code for code in codes if f"| `{code}` |" not in page] == []


def test_every_route_is_documented_and_no_other() -> None:
    document = json.loads((ROOT / "spec" / "openapi.json").read_text())
    routes = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert len(routes) >= 18
    documented = set(re.findall(r"\| `([A-Z]+ /[^`]*)` \|", (REFERENCE / "rest.md").read_text()))
    assert documented == routes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            headings = [re.sub(r"[^a-z0-9 -]", "", line.lower()) for line in target.read_text().splitlines()]
            assert anchor in {heading.strip(" #").replace(" ", "-") for heading in headings}, f"{link} has no heading"


def test_every_page_of_the_documentation_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
        todo += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} <= seen
