"""How registry references are read, and what a pulled image is called."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import InvalidRequestError
from agent_sandbox.images.references import (
    Reference,
    RegistryReference,
    names_a_registry,
    parse_reference,
    parse_registry_reference,
)

DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("text", "expected", "name"),
    [
        ("debian", RegistryReference("docker.io", "library/debian", "latest", ""), "debian:latest"),
        ("docker://debian:12", RegistryReference("docker.io", "library/debian", "12", ""), "debian:12"),
        ("team/tool:V1", RegistryReference("docker.io", "team/tool", "V1", ""), "team/tool:V1"),
        ("docker.io/library/debian:12", RegistryReference("docker.io", "library/debian", "12", ""), "debian:12"),
        ("GHCR.io/a/b/c", RegistryReference("ghcr.io", "a/b/c", "latest", ""), "ghcr.io/a/b/c:latest"),
        ("localhost/x:1", RegistryReference("localhost", "x", "1", ""), "localhost/x:1"),
        ("localhost:5000/x:1", RegistryReference("localhost:5000", "x", "1", ""), "localhost:5000/x:1"),
        (f"quay.io/x@{DIGEST}", RegistryReference("quay.io", "x", "", DIGEST), "quay.io/x"),
        (f"quay.io/x:1@{DIGEST}", RegistryReference("quay.io", "x", "1", DIGEST), "quay.io/x:1"),
    ],
)
def test_registry_references(text: str, expected: RegistryReference, name: str) -> None:
    assert parse_registry_reference(text) == expected
    assert expected.local_name() == name
    assert parse_reference(name) == Reference(name, "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "docker://",
        "A/b",
        "x y",
        "-x",
        "x:",
        "x:a:b",
        "localhost:x/y",
        "host.tld/",
        "host.tld//a",
        "host.tld/a/../b",
        "host.tld/A",
        "user:secret@host.tld/a",
        f"host.tld/a@{DIGEST}0",
        "host.tld/a@md5:00",
        "host.tld/a?b",
        "host.tld/" + "a" * 256,
        "--help",
        "[::1/x",
    ],
)
def test_what_is_no_registry_reference(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_registry_reference(text)


def test_only_this_machine_is_spoken_to_in_the_clear() -> None:
    loopback = ["localhost/x", "localhost:5000/x", "127.0.0.1:5000/x", "127.9.9.9/x", "[::1]:5000/x"]
    others = ["docker.io/x", "localhost.evil.com/x", "127.0.0.1.nip.io/x", "10.0.0.1:5000/x", "[fe80::1]/x"]
    assert [text for text in loopback if not parse_registry_reference(text).loopback] == []
    assert [text for text in others if parse_registry_reference(text).loopback] == []


def test_an_address_in_brackets_needs_another_name() -> None:
    with pytest.raises(InvalidRequestError, match="image name"):
        parse_registry_reference("[::1]:5000/x").local_name()


def test_what_can_only_mean_a_registry() -> None:
    assert all(names_a_registry(text) for text in ("docker://x", "ghcr.io/a/b", "localhost:5000/x", "localhost/x"))
    assert not any(names_a_registry(text) for text in ("x", "team/tool", "./ghcr.io/a", "../a.b/c", "/a.b/c", "a.tar"))
