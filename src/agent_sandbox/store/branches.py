"""Moving branches: read a head, work, and put a commit in its place if it is still there.

Each function is one operation of :class:`~agent_sandbox.store.store.Store`, which explains its outcomes. All of them
keep gc away until they end, and change names in one index transaction: what it checks stays true until it ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from agent_sandbox.errors import ConflictError, InvalidRequestError, NotFoundError
from agent_sandbox.store import chunks, history, refs, walk
from agent_sandbox.store.catalog import Ref, RefKind
from agent_sandbox.store.merge import merge
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import MAX_AUTHOR, MAX_MESSAGE, Commit, Entry, Kind, Type, encode_commit
from agent_sandbox.store.outcomes import Conflicts, Created, HeadMoved, Report, UpToDate
from agent_sandbox.store.ports import Captured, Writer
from agent_sandbox.store.refs import Target
from agent_sandbox.store.writer import PackedWriter


@dataclass(frozen=True, slots=True)
class Note:
    """Who makes a commit, and why; :class:`InvalidRequestError` for what a commit cannot keep."""

    author: str
    message: str

    def __post_init__(self) -> None:
        for what, text, most in (("author", self.author, MAX_AUTHOR), ("message", self.message, MAX_MESSAGE)):
            try:
                size = len(text.encode())
            except UnicodeEncodeError:
                raise InvalidRequestError(f"the {what} is not valid Unicode") from None
            if size > most:
                raise InvalidRequestError(f"the {what} has {size:,} bytes; a commit keeps {most:,}")


Take = Callable[[Writer, Entry | None, bool], Captured]
"""Read a state into the writer. Given the root that it probably resembles, and whether owners are recorded."""


def state(database: ObjectDatabase, commit: bytes) -> Entry:
    """Return the root of a commit's state; :class:`NotFoundError` when that is no longer there."""
    if not database.index.has_state(commit):
        raise NotFoundError(f"the state of commit {commit.hex()} is gone: it was forgotten, or nothing led to it")
    return walk.commit(database, commit).root


def begin(database: ObjectDatabase, project: str, take: Take | None, *, owners: bool, note: Note) -> Created:
    """Make a project whose layer 0 is what ``take`` reads (None: an empty directory), and its branch ``main``."""
    refs.check_project(project)
    if database.index.project(project) is not None:
        raise ConflictError(f"there is a project {project!r} already")
    now = time.time_ns()
    with database.writer() as writer:
        if take is not None:
            captured = take(writer, None, owners)
        else:
            owner = (os.geteuid(), os.getegid()) if owners else None
            tree = chunks.put_tree((), writer.put)
            captured = Captured(Entry(b"", Type.DIRECTORY, 0o755, now, owner, content=tree), Report())
        commit = _put(writer, Commit(captured.root, (), None, now, note.author, note.message))
        writer.seal()
        with database.transaction(writer) as change:
            change.add_project(project, now, owners=owners)
            layer = change.add_layer(project, commit)
            change.add_ref(Ref(project, refs.MAIN, RefKind.BRANCH, commit, layer.number))
    return Created(commit, captured.report)


def advance(
    database: ObjectDatabase, text: str, take: Take, *, note: Note, expected: bytes | None
) -> Created | UpToDate | HeadMoved:
    """Make what ``take`` reads the new head of a branch."""
    names = database.index
    with database.writer() as writer:
        branch = refs.branch(names, text)
        if expected is not None and branch.head != expected:
            return HeadMoved(branch.head)
        head = walk.commit(database, branch.head).root
        captured = take(writer, head, refs.project(names, branch.project).owners)
        if captured.root == head:
            now = refs.find(names, branch.project, branch.name).head
            return UpToDate(now, captured.report) if now == branch.head else HeadMoved(now)
        commit = _put_on(database, writer, branch, captured.root, (branch.head,), note)
        return _move(database, writer, branch, commit) or Created(commit, captured.report)


def merge_into(
    database: ObjectDatabase, target: str, source: str, *, note: Note
) -> Created | UpToDate | HeadMoved | Conflicts:
    """Merge a state into a branch."""
    with database.writer() as writer:
        branch = refs.branch(database.index, target)
        other = refs.resolve(database, source)
        best = history.common(database, branch.head, other.commit)
        if not best:
            raise ConflictError(f"{target} and {source} have no common history; there is nothing to merge against")
        base = best[0]
        if base == other.commit:
            return UpToDate(branch.head)
        root = state(database, other.commit)
        numbers = [number for number in (branch.base, standing(database, branch.project, other)) if number is not None]
        newer = replace(branch, base=max(numbers, default=None))
        if base == branch.head:
            return _move(database, writer, newer, other.commit) or Created(other.commit)
        if not database.index.has_state(base):
            raise ConflictError(
                f"commit {base.hex()}, the common ancestor of both, was forgotten; they cannot be merged"
            )
        merged = merge(database, writer, state(database, base), state(database, branch.head), root)
        if merged.root is None:
            return Conflicts(base, merged.conflicts, merged.count)
        commit = _put_on(database, writer, newer, merged.root, (branch.head, other.commit), note)
        return _move(database, writer, newer, commit) or Created(commit)


def publish(database: ObjectDatabase, text: str) -> Created | UpToDate | HeadMoved:
    """Make the head of a branch the next layer of its project."""
    with database.transaction() as change:
        branch = refs.branch(change, text)
        last = change.last_layer(branch.project)
        if last is not None and last.commit == branch.head:
            return UpToDate(branch.head)
        if last is not None and history.common(database, branch.head, last.commit) != [last.commit]:
            return HeadMoved(last.commit)
        layer = change.add_layer(branch.project, branch.head)
        change.move_ref(branch.project, branch.name, branch.head, expected=branch.head, base=layer.number)
        return Created(branch.head)


def extend(database: ObjectDatabase, project: str, source: str) -> Created | UpToDate | HeadMoved:
    """Make any state the next layer of a project; its branch ``main`` goes along where it is at the last one."""
    with database.reading():
        commit = refs.resolve(database, source).commit
        state(database, commit)
        with database.transaction() as change:
            refs.project(change, project)
            if any(layer.commit == commit for layer in change.layers(project)):
                return UpToDate(commit)
            last = change.last_layer(project)
            if last is not None and history.common(database, commit, last.commit) != [last.commit]:
                return HeadMoved(last.commit)
            layer = change.add_layer(project, commit)
            main = change.ref(project, refs.MAIN)
            if main is not None and last is not None and main.head == last.commit:
                change.move_ref(project, refs.MAIN, commit, expected=main.head, base=layer.number)
            return Created(commit)


def reset(database: ObjectDatabase, text: str, source: str) -> Ref:
    """Move a branch to any state."""
    with database.reading():
        target = refs.resolve(database, source)
        state(database, target.commit)
        with database.transaction() as change:
            branch = refs.branch(change, text)
            base = standing(database, branch.project, target)
            change.move_ref(branch.project, branch.name, target.commit, expected=branch.head, base=base)
            return refs.find(change, branch.project, branch.name)


def name(database: ObjectDatabase, source: str, project: str, name: str, kind: RefKind) -> Ref:
    """Make a branch or tag at any state."""
    with database.reading():
        target = refs.resolve(database, source)
        refs.project(database.index, project)
        state(database, target.commit)
        ref = Ref(project, name, kind, target.commit, standing(database, project, target))
        with database.transaction() as change:
            change.add_ref(ref)
    return ref


def standing(database: ObjectDatabase, project: str, target: Target) -> int | None:
    """Return the number of the project's layer that a state stands on; None when it came from elsewhere."""
    if target.project == project:
        return target.base
    commits = {target.commit, walk.commit(database, target.commit).base}
    return max((layer.number for layer in database.index.layers(project) if layer.commit in commits), default=None)


def _put_on(
    database: ObjectDatabase, writer: Writer, branch: Ref, root: Entry, parents: tuple[bytes, ...], note: Note
) -> bytes:
    """Keep a commit for a branch, made now."""
    layer = None if branch.base is None else database.index.layer(branch.project, branch.base)
    base = None if layer is None else layer.commit
    return _put(writer, Commit(root, parents, base, time.time_ns(), note.author, note.message))


def _put(writer: Writer, commit: Commit) -> bytes:
    return writer.put(Kind.COMMIT, encode_commit(commit))


def _move(database: ObjectDatabase, writer: PackedWriter, branch: Ref, commit: bytes) -> HeadMoved | None:
    """Move a branch from the head that was read, together with the objects; None when it is there.

    Its layer may have been raised meanwhile (published at the same head), and is never lowered.
    """
    writer.seal()
    with database.transaction(writer) as change:
        now = refs.find(change, branch.project, branch.name)
        base = max((number for number in (now.base, branch.base) if number is not None), default=None)
        if change.move_ref(branch.project, branch.name, commit, expected=branch.head, base=base):
            return None
        change.rollback()
        return HeadMoved(now.head)
