"""Hard links in a merge: which names of the result are one file.

The relation "these two names are one file" is merged like any other field, pair by pair: what both sides say holds,
what one side changed against the common ancestor holds, and a side that does not have both names says nothing.

Files are what such pairs join. It is a conflict (``LINK``) where names get into one file although a side parted them
(one side gave a file a third name, the other made two files of it); where both sides added two names and only one side
made them one file; and where the names of one file do not come to the same content and metadata. Of a file that only
one side gave another name, the new name follows what the merge makes of the old ones.

Files have names all over the tree and the link id comes from the first of them, so this is planned before trees are
merged. Only files whose links changed on a side matter: both differences are read for them and, only where there are
any, the common ancestor once for the rest of their names. Pairs are never listed, since one file may have very many
names: what a side has as one file is taken as a set, and how its members are labelled on the other side and in the
ancestor says what is joined and what contradicts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from agent_sandbox.errors import LimitExceededError
from agent_sandbox.store import walk
from agent_sandbox.store.diff import diff
from agent_sandbox.store.objects import Entry, Type, link_id
from agent_sandbox.store.outcomes import ConflictKind
from agent_sandbox.store.ports import Objects
from agent_sandbox.store.threeway import Choice, choose, unlinked

MAX_NAMES = 100_000
"""Names of linked files that one merge arranges; each takes about 1 KB of memory."""
OLD, LEFT, RIGHT = range(3)
_Label = tuple[bool, bytes] | None
"""A link id, or the path of a file without one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of the names of linked files, and every directory on the way to one."""

    choices: dict[bytes, Choice] = field(default_factory=dict)
    above: set[bytes] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Name:
    """A path that stays, with what it would be as the only name of its file. ``labels``: its file in the ancestor, on
    the left and on the right, None where there is none. Names with one label are one file there."""

    entry: Entry
    labels: tuple[_Label, _Label, _Label]


def plan(objects: Objects, base: Entry, left: Entry, right: Entry) -> Plan:
    """Return what becomes of every file whose links changed on a side.

    Raises :class:`LimitExceededError` where such files have more than 100,000 names.
    """
    out = Plan()
    names: dict[bytes, _Name] = {}
    for path, (old, one, two) in _find(objects, base, left, right).items():
        choice = choose(objects, old and unlinked(old), one and unlinked(one), two and unlinked(two))
        if choice.entry is not None and choice.entry.type is Type.DIRECTORY:
            continue
        out.choices[path] = choice
        if choice.entry is not None and not choice.kinds:
            names[path] = _Name(choice.entry, (_label(path, old), _label(path, one), _label(path, two)))
    groups, doubtful = _groups(names)
    for group in groups:
        entry = None if doubtful & group else _agreed(names, group)
        link = link_id(min(group)) if len(group) > 1 else None
        for path in group:
            own = names[path].entry
            if entry is None:
                out.choices[path] = Choice(own, (ConflictKind.LINK,))
            else:
                out.choices[path] = Choice(replace(entry, name=own.name, link=link))
    for path in out.choices:
        while path:
            path = path.rpartition(b"/")[0]
            out.above.add(path)
    return out


def _label(path: bytes, entry: Entry | None) -> _Label:
    if entry is None or entry.type is Type.DIRECTORY:
        return None
    return (True, entry.link) if entry.link is not None else (False, path)


def _find(
    objects: Objects, base: Entry, left: Entry, right: Entry
) -> dict[bytes, tuple[Entry | None, Entry | None, Entry | None]]:
    """Every name of every file whose links changed on a side: its entries in the ancestor, left and right."""
    names: set[bytes] = set()
    links: set[bytes] = set()

    def add(path: bytes) -> None:
        names.add(path)
        if len(names) > MAX_NAMES:
            raise LimitExceededError(f"a merge can arrange {MAX_NAMES:,} names of linked files; here are more")

    for side in (left, right):
        for change in diff(objects, base, side):
            found = [entry.link for entry in (change.old, change.new) if entry is not None and entry.link is not None]
            if found:
                links.update(found)
                add(change.path)
    if not names:
        return {}
    old: dict[bytes, Entry | None] = {}
    for path, entry in walk.walk(objects, base):
        if entry.link in links:
            old[path] = entry
            add(path)
    new: list[dict[bytes, Entry | None]] = [{}, {}]
    for side, entries in zip((left, right), new, strict=True):
        for change in diff(objects, base, side):
            if change.path in names:
                old[change.path] = change.old
                entries[change.path] = change.new
    return {path: (old.get(path), new[0].get(path, old.get(path)), new[1].get(path, old.get(path))) for path in names}


# ---- which names are one file --------------------------------------------------------------------------------------


def _groups(names: dict[bytes, _Name]) -> tuple[list[set[bytes]], set[bytes]]:
    """The names of each file of the result, and the names over which nobody can say which file they are."""
    above: dict[bytes, bytes] = {path: path for path in names}

    def top(path: bytes) -> bytes:
        while above[path] != path:
            above[path] = above[above[path]]
            path = above[path]
        return path

    def join(paths: Iterable[bytes]) -> None:
        first: bytes | None = None
        for path in paths:
            first = top(path) if first is None else first
            above[top(path)] = first

    doubtful: set[bytes] = set()
    for this, other in ((LEFT, RIGHT), (RIGHT, LEFT)):
        for group in _parts(names, names, this).values():
            there = [path for path in group if names[path].labels[other] is not None]
            known = [path for path in there if names[path].labels[OLD] is not None]
            parts = _parts(names, there, other)
            if len(there) < len(group):
                join(group)  # the other side says nothing against its own names being those that it lacks
            if len(_parts(names, known, OLD)) > 1:
                join(known)  # linked here; were other files, and so the other side has parted nothing
            for part in parts.values():
                join(part)  # one file on both sides
            if len(parts) > 1:
                doubtful.update(path for path in there if names[path].labels[OLD] is None)
    groups: dict[bytes, set[bytes]] = {}
    for path in names:
        groups.setdefault(top(path), set()).add(path)
    for group_ in groups.values():
        if _contradicts(names, group_):
            doubtful |= group_
    return list(groups.values()), doubtful


def _parts(names: dict[bytes, _Name], paths: Iterable[bytes], which: int) -> dict[_Label, list[bytes]]:
    """Paths by their label on one side, without those that have none."""
    parts: dict[_Label, list[bytes]] = {}
    for path in paths:
        if (label := names[path].labels[which]) is not None:
            parts.setdefault(label, []).append(path)
    return parts


def _contradicts(names: dict[bytes, _Name], group: set[bytes]) -> bool:
    """Whether two names of a group are different files on a side, and not because the other side linked them.

    Where one side has several files in it, all of their names must be one file on the other side, and each two that are
    different here must have been so in the ancestor.
    """
    for this, other in ((LEFT, RIGHT), (RIGHT, LEFT)):
        parts = _parts(names, group, this)
        if len(parts) < 2:
            continue
        here = [path for part in parts.values() for path in part]
        was: dict[_Label, _Label] = {}
        for path in here:
            labels = names[path].labels
            if labels[OLD] is None or labels[other] is None or labels[other] != names[here[0]].labels[other]:
                return True
            if was.setdefault(labels[OLD], labels[this]) != labels[this]:
                return True
    return False


def _agreed(names: dict[bytes, _Name], group: set[bytes]) -> Entry | None:
    """What the file is, by those of its names that both sides have; None where they do not come to the same."""
    both = [path for path in group if None not in (names[path].labels[LEFT], names[path].labels[RIGHT])]
    entries = {replace(names[path].entry, name=b"") for path in both or group}
    types = {names[path].entry.type for path in group}
    return entries.pop() if len(entries) == len(types) == 1 else None
