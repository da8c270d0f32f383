"""What the product says to people, looked at as a whole."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.config import PREFIX, describe

SOURCE = Path(__file__).parents[2] / "src" / "agent_sandbox"
DOCS = SOURCE.parents[1] / "docs"
SETTINGS = [variable.removeprefix(PREFIX) for variable, _, _ in describe()]
BARE = re.compile(
    rf"(?<![A-Za-z_])({'|'.join(name for name in SETTINGS if '_' in name or name.endswith('S'))})(?![A-Za-z_])"
)
"""A setting without the variable's prefix. HOST, PORT and SANDBOXD are words of their own."""


def texts(tree: ast.AST) -> Iterator[str]:
    """Every literal text of a module but its docstrings, an f-string as one with its holes left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        yield from texts(node)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_setting_is_named_by_its_variable(path: Path) -> None:
    said = set(texts(ast.parse(path.read_text())))
    assert [text for text in said if BARE.search(text) and text not in SETTINGS] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_so_it_is_in_the_documentation(page: Path) -> None:
    assert [line for line in page.read_text().splitlines() if BARE.search(line)] == []


def test_the_search_finds_what_it_looks_for() -> None:
    program = 'def f():\n "DATA_DIR"\n raise E(f"{a}; see DATA_DIR", "x AGENT_SANDBOX_DATA_DIR", "use MAX_CPUS.")'
    said = list(texts(ast.parse(program)))
    assert [text for text in said if BARE.search(text)] == ["\0; see DATA_DIR", "; see DATA_DIR", "use MAX_CPUS."]
