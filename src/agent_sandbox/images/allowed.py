"""Which images may be used: the operator's globs against an image's name. Pure.

A name has parts, and a wildcard must not lead from one into another: ``python:*`` is every tag of ``python``, and not
``python:5000/evil``, which is another registry's. So

* a glob is compared part by part, between slashes; only a lone ``*`` at its end is everything from there on;
* a name whose first part is a registry (as :func:`~.references.parse_registry_reference` tells) needs a glob whose
  first part is one as well, whatever wildcards that has: ``*.example.com/team/*``. Only ``*`` alone leaves it open;
* a digest alone is content and no name: the glob has to begin with ``sha256:``, or be ``*``;
* beside a digest a tag says nothing, for the digest alone chooses the content: the glob must allow every tag of it, or
  name the digest itself.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from agent_sandbox.images.references import looks_like_a_host

_DIGEST = "sha256:"


def is_allowed(name: str, globs: Iterable[str]) -> bool:
    """Tell whether one of ``globs`` allows the image called ``name``: a name, one with ``@digest``, or a digest."""
    return any(glob in ("*", name) or any(_matches(form, glob) for form in _forms(name, glob)) for glob in globs)


def _forms(name: str, glob: str) -> tuple[str, ...]:
    """What a glob may match: the name, and where a digest chooses, what stands for each tag that it may have had."""
    path, at, digest = name.partition("@")
    if not at or "@" in glob:
        return (name,)
    before, slash, last = path.rpartition("/")
    repository = before + slash + last.partition(":")[0]
    return (f"{repository}@{digest}", f"{repository}:@{digest}")


def _matches(name: str, glob: str) -> bool:
    parts, patterns = name.split("/"), glob.split("/")
    if _has_registry(parts) and not _has_registry(patterns):
        return False
    if name.startswith(_DIGEST) and not glob.startswith(_DIGEST):
        return False
    if patterns[-1] == "*" and len(parts) > len(patterns):
        parts = parts[: len(patterns)]
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _has_registry(parts: list[str]) -> bool:
    """Upper case counts too: an engine takes such a part for a host's name."""
    return len(parts) > 1 and (looks_like_a_host(parts[0]) or parts[0] != parts[0].lower())
