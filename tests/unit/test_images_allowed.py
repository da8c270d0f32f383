"""Which names the operator's globs let through, and that no registry's comes under another's."""

from __future__ import annotations

import pytest

from agent_sandbox.images.allowed import is_allowed

DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("name", "glob"),
    [
        ("host", "*"),
        ("registry.example:5000/a/b:1", "*"),
        ("python:3.12-slim", "python:*"),
        ("python:3.12-slim", "python*"),
        ("python:3.12-slim", "python:3.1[0-9]*"),
        ("team/py:3", "team/*"),
        ("ghcr.io/team/a/b:3", "ghcr.io/team/*"),
        ("ghcr.io/team/a:3", "ghcr.io/*/a:*"),
        ("a.corp.example:5000/x", "*.corp.example:*/x"),
        ("localhost/x", "localhost/x"),
        ("[::1]:5000/x", "[::1]:5000/x"),
        (DIGEST, DIGEST),
        (DIGEST, "sha256:*"),
        (f"team/py@{DIGEST}", "team/*"),
        (f"team/py:3@{DIGEST}", "team/py:*"),
        (f"python@{DIGEST}", "python:*"),
        (f"python:3@{DIGEST}", f"python:3@{DIGEST}"),
        (f"python:3@{DIGEST}", "python:3@*"),
    ],
)
def test_a_glob_lets_its_own_through(name: str, glob: str) -> None:
    assert is_allowed(name, ("other", glob))


@pytest.mark.parametrize(
    ("name", "glob"),
    [
        ("python:5000/evil", "python:*"),  # a registry with a port
        ("python.example/evil", "python*"),
        ("pythonista/evil", "python*"),  # somebody else's repositories on the same registry
        ("ghcr.io/teamster/x", "ghcr.io/team*"),
        ("team-x.example/tools", "team-*/tools"),
        ("localhost/tools", "local*/tools"),
        ("Team/tools", "?eam/tools"),  # engines take it for a host
        ("evil.example/a.corp.example/x", "*.corp.example/*"),
        ("evil.example/x", "*/x"),
        ("evil.example/x:3", "*:3"),
        ("ghcr.io/team", "ghcr.io/team/*"),
        ("team", "team/*"),
        (DIGEST, "s*"),  # content, whatever it is called
        (f"python:3@{DIGEST}", "python:3*"),  # the digest may be another tag's
        (f"python:3@{DIGEST}", "python:3"),
        (f"python:5000/evil@{DIGEST}", "python:*"),
        ("Python", "python"),
        ("python", ""),
    ],
)
def test_a_glob_lets_nobody_elses_through(name: str, glob: str) -> None:
    assert not is_allowed(name, ("other", glob))
