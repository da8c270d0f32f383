"""How callers name a state of the store: what ``from`` and ``project`` of a new sandbox mean, and a merge's source.

======================  ================================================================================
``snap…``               a snapshot
``NAME``                the newest layer of a project
``NAME@N``              its layer ``N``, counted from 0
``NAME:BRANCH``         the head of one of its branches, or a tag (``agent-sandbox store`` makes them)
hexadecimal digits      a commit, by 8 or more digits of its id
======================  ================================================================================

Where a project is given beside, ``N`` alone is its layer and any other name its branch. ``sandboxes`` is the project in
which the server keeps the history of sandboxes: nobody can name a state of it but by its snapshot or its id.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from agent_sandbox.errors import InvalidRequestError, NotFoundError
from agent_sandbox.manager.history import History, require_commit
from agent_sandbox.manager.records import SnapshotRecord
from agent_sandbox.manager.workspaces import PROJECT
from agent_sandbox.store import Layer, Store, refs

SANDBOX_ID = re.compile(r"sb[a-z0-9]{16}")
SNAPSHOT_ID = re.compile(r"snap[a-z0-9]{16}")
_SHOWN = 10
_NUMBER = re.compile(r"@?(0|[1-9][0-9]{0,6})")


@dataclass(frozen=True)
class Origin:
    """What a workspace begins as: a state of the store and the bytes in its files.

    ``text`` is its reference in full, ``project`` the one that it is of; of a snapshot there is its record.
    """

    commit: str
    data_bytes: int
    text: str = ""
    project: str | None = None
    snapshot: SnapshotRecord | None = None

    @classmethod
    def of(cls, snapshot: SnapshotRecord) -> Origin:
        """Take a snapshot's state."""
        return cls(require_commit(snapshot), snapshot.size_bytes, snapshot.id, None, snapshot)


class References(History):
    """Finds states by their references."""

    async def origin(self, text: str | None, project: str | None = None) -> Origin:
        """Find a state. One of both may be None.

        :class:`InvalidRequestError` for what is no reference, :class:`NotFoundError` for what is not there.
        """
        if text is not None and SNAPSHOT_ID.fullmatch(text):
            found = Origin.of(await self._fleet.in_store(text))
            if project is not None:
                check_project(project)
            return Origin(found.commit, found.data_bytes, text, project, found.snapshot)
        commit, full, named = await self._fleet.workspaces.ask(lambda store: _find(store, text, project))
        return Origin(commit, await self._fleet.workspaces.data_bytes(commit), full, named)


def check_project(name: str) -> str:
    """Give the name of a project of the callers'. :class:`InvalidRequestError` for one that cannot be."""
    refs.check_project(name)
    if name == PROJECT or SNAPSHOT_ID.fullmatch(name) or SANDBOX_ID.fullmatch(name):
        raise InvalidRequestError(f"{name!r} cannot be a project: the server uses such names itself")
    return name


def newest(store: Store, project: str) -> Layer:
    """Give the last layer of a project, which has at least the one that it was made with."""
    for layer in deque(store.layers(project), maxlen=1):
        return layer
    raise NotFoundError(f"project {project!r} was removed meanwhile")


def _find(store: Store, text: str | None, project: str | None) -> tuple[str, str, str | None]:
    """The commit, its reference in full, and the project that it was named in."""
    if project is not None:
        check_project(project)
        number = None if text is None else _NUMBER.fullmatch(text)
        if text is None:
            text = project
        elif number is not None:
            text = f"{project}@{number[1]}"
        elif not refs.parse(text).digits and ":" not in text and "@" not in text:
            text = f"{project}:{text}"
    reference = refs.parse(text or "")
    assert text
    if reference.project == PROJECT:
        raise InvalidRequestError(f"{PROJECT} is the server's own project; name a snapshot in place of {text!r}")
    if not reference.digits:
        require_project(store, reference.project)
    if not reference.digits and reference.layer is None and ":" not in text:
        text = f"{reference.project}@{newest(store, reference.project).number}"
    commit = store.resolve(text).hex()
    next(iter(store.entries(commit)), None)  # says so when the state is gone
    return commit, commit if reference.digits else text, project or reference.project or None


def require_project(store: Store, name: str) -> None:
    """Say which of the callers' projects there are, when it is none of them."""
    names = []
    for project in store.projects():
        if project.name == name:
            return
        if project.name != PROJECT:
            names.append(project.name)
    known = (
        f"there are: {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}" if names else "there is none"
    )
    raise NotFoundError(f"no project {name!r}; {known} (agent-sandbox project init NAME DIR makes one)")
