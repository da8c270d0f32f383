"""Difference: the overlay layer that makes one state look like another, reading only what differs.

``layout.py`` makes it. What is found out before is the one thing that comparing names does not show: a file whose
entries did not all change, because it only got one more name. In the layer all of its names have to be there, or the
new one would be another inode. Where they are is known to nobody, so they are sought in the whole new state; this, and
nothing else, opens directories that are equal.

When there is something to seek: link ids come from the smallest path of an inode. Where the entry of that path changed,
every name changed with it, for they agree; and where it was added, the link id is new. So an inode is complete if the
smallest path is among what changed.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent_sandbox.errors import StoreDamagedError
from agent_sandbox.store import walk
from agent_sandbox.store.layout import Forced, lay_out, paired
from agent_sandbox.store.objects import Entry, Type, link_id
from agent_sandbox.store.ports import Objects, Options


def difference(old: Entry, new: Entry, directory: int, objects: Objects, *, options: Options) -> None:
    """See :meth:`~agent_sandbox.store.ports.Engine.difference`."""
    forced = _names_of(objects, new, _incomplete(objects, old, new))
    lay_out(new, directory, objects, old=old, forced=forced, options=options)


def _incomplete(objects: Objects, old: Entry, new: Entry) -> set[bytes]:
    """Link ids among what changed whose other names did not."""
    complete: dict[bytes, bool] = {}
    names: list[bytes] = []
    stack = [_changes(objects, old, new)]
    while stack:
        before, entry = next(stack[-1], (None, None))
        if entry is None:
            stack.pop()
            names = names[:-1]
        elif entry.type is Type.DIRECTORY:
            if len(stack) > walk.MAX_DEPTH:
                raise StoreDamagedError("a damaged directory: too deep")
            names.append(entry.name)
            stack.append(_changes(objects, before, entry))
        elif entry.link is not None:
            first = entry.link == link_id(b"/".join([*names, entry.name]))
            complete[entry.link] = complete.get(entry.link, False) or first
    return {link for link, whole in complete.items() if not whole}


def _changes(objects: Objects, old: Entry | None, new: Entry) -> Iterator[tuple[Entry | None, Entry]]:
    """Entries of the new directory that are not as in the old one."""
    if old is None or old.content != new.content:
        for _, before, entry in paired(objects, old, new):
            if entry is not None and before != entry:
                yield before, entry


def _names_of(objects: Objects, root: Entry, links: set[bytes]) -> Forced:
    """Where the names of these inodes are."""
    found = Forced()
    if not links:
        return found
    stack = [walk.entries(objects, root)]
    names: list[bytes] = []
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
            names = names[:-1]
        elif entry.type is Type.DIRECTORY:
            if len(stack) > walk.MAX_DEPTH:
                raise StoreDamagedError("a damaged directory: too deep")
            names.append(entry.name)
            stack.append(walk.entries(objects, entry))
        elif entry.link in links:
            place = found
            for name in names:
                place = place.setdefault(name, Forced())
            place[entry.name] = Forced()
    return found
