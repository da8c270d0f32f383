"""References: how people and programs name a state.

====================  ============================================================================================
``PROJECT``           the head of its branch ``main``
``PROJECT:NAME``      the head of a branch, or where a tag is; a project's branches and tags share one set of names
``PROJECT@N``         the project's layer ``N``, counted from 0
hexadecimal digits    a commit, by the first 8 or more digits of its id, if only one commit begins so
====================  ============================================================================================

Names of projects, branches, tags and pins are 1 to 100 ASCII letters, digits, ``.``, ``_`` and ``-``, the first one a
letter or digit. A project's name may not look like a commit id, so no reference ever has two meanings. An error says
what there is instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from agent_sandbox.errors import InvalidRequestError, NotFoundError
from agent_sandbox.store.catalog import Names, Project, Ref, RefKind
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import ID_BYTES, Kind

MAIN = "main"
"""The branch that every project begins with."""
MIN_DIGITS = 8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_COMMIT = re.compile(rf"[0-9A-Fa-f]{{{MIN_DIGITS},{2 * ID_BYTES}}}")
_LAYER = re.compile(r"0|[1-9][0-9]{0,17}")
_SHOWN = 10
"""Names that an error lists."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed reference: a name or layer of a project, or the first digits of a commit id."""

    project: str = ""
    name: str | None = None
    layer: int | None = None
    digits: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """What a reference leads to: a commit, the project that it was named in, the layer that it stands on there, and
    the branch or tag."""

    commit: bytes
    project: str | None = None
    base: int | None = None
    ref: Ref | None = None


def parse(text: str) -> Reference:
    """Parse a reference; :class:`InvalidRequestError` when it is none."""
    if _COMMIT.fullmatch(text):
        return Reference(digits=text.lower())
    project, mark, rest = text.partition(":")
    if mark and _NAME.fullmatch(project) and _NAME.fullmatch(rest):
        return Reference(project, name=rest)
    project, mark, rest = text.partition("@")
    if mark and _NAME.fullmatch(project) and _LAYER.fullmatch(rest):
        return Reference(project, layer=int(rest))
    if not mark and _NAME.fullmatch(project):
        return Reference(project, name=MAIN)
    raise InvalidRequestError(
        f"{_quoted(text)} is no reference; use PROJECT, PROJECT:NAME, PROJECT@LAYER, or 8 or more digits of a commit id"
    )


def check_name(name: str, what: str = "name") -> str:
    """Return a name of a branch, tag or pin; :class:`InvalidRequestError` when it cannot be one."""
    if not _NAME.fullmatch(name):
        rule = "1 to 100 letters, digits, '.', '_' and '-', a letter or digit first"
        raise InvalidRequestError(f"{_quoted(name)} cannot be a {what}: use {rule}")
    return name


def check_project(name: str) -> str:
    """Return the name of a project; :class:`InvalidRequestError` when it cannot be one."""
    if _COMMIT.fullmatch(name):
        raise InvalidRequestError(f"{name!r} cannot be a project: 8 to 64 hexadecimal digits mean a commit")
    return check_name(name, "project")


def project(names: Names, name: str) -> Project:
    """Return a project; :class:`NotFoundError` with those that there are."""
    found = names.project(name)
    if found is None:
        raise NotFoundError(f"no project {_quoted(name)}; {_there_are(project.name for project in names.projects())}")
    return found


def branch(names: Names, text: str) -> Ref:
    """Return the branch that a reference names.

    Raises what :func:`resolve` does, and :class:`InvalidRequestError` for what is no branch.
    """
    reference = parse(text)
    if reference.name is None:
        raise InvalidRequestError(f"{_quoted(text)} is no branch; only PROJECT and PROJECT:NAME can be one")
    ref = find(names, reference.project, reference.name)
    if ref.kind is not RefKind.BRANCH:
        raise InvalidRequestError(f"{ref.name!r} in project {ref.project!r} is a tag, which stays where it is")
    return ref


def resolve(database: ObjectDatabase, text: str) -> Target:
    """Return what a reference leads to; its state may have been forgotten.

    Raises :class:`InvalidRequestError` for what is no reference and :class:`NotFoundError` for what is not there.
    """
    reference = parse(text)
    names = database.index
    if reference.digits:
        return Target(_commit(database, reference.digits))
    if reference.layer is not None:
        layer = names.layer(reference.project, reference.layer)
        if layer is None:
            last = names.last_layer(project(names, reference.project).name)
            rest = "it has none" if last is None else f"its last one is {last.number}"
            raise NotFoundError(f"no layer {reference.layer} in project {reference.project!r}; {rest}")
        return Target(layer.commit, layer.project, layer.number)
    ref = find(names, reference.project, reference.name or MAIN)
    return Target(ref.head, ref.project, ref.base, ref)


def named(text: str) -> tuple[str, str]:
    """Return project and name of a branch or tag that is to be made or removed: both have to be said."""
    reference = parse(text)
    if reference.name is None or ":" not in text:
        raise InvalidRequestError(f"{_quoted(text)} does not say which branch or tag; use PROJECT:NAME")
    return reference.project, reference.name


def find(names: Names, in_project: str, name: str) -> Ref:
    """Return a branch or tag; :class:`NotFoundError` with those that there are."""
    ref = names.ref(in_project, name)
    if ref is None:
        project(names, in_project)
        there = _there_are(ref.name for ref in names.refs(in_project))
        raise NotFoundError(f"no branch or tag {name!r} in project {in_project!r}; {there}")
    return ref


def _commit(database: ObjectDatabase, digits: str) -> bytes:
    with database.reading():
        ids = database.index.find(digits, _SHOWN + 1)
        commits = [id for id in ids if database.load(id)[0].kind is Kind.COMMIT]
    if len(commits) == 1 and len(ids) <= _SHOWN:
        return commits[0]
    if not ids or (not commits and len(ids) <= _SHOWN):
        raise NotFoundError(f"no commit whose id begins with {digits}")
    raise InvalidRequestError(f"several ids begin with {digits}; give more digits")


def _there_are(names: Iterable[str]) -> str:
    some = list(islice(names, _SHOWN + 1))
    if not some:
        return "there is none"
    return "there are: " + ", ".join(some[:_SHOWN]) + (", …" if len(some) > _SHOWN else "")


def _quoted(text: str) -> str:
    return ascii(text if len(text) <= 100 else text[:100] + "…")
