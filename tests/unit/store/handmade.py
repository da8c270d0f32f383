"""States made by hand, without an engine: nested dicts of names to bytes or dicts, kept through any writer.

``old`` is the state that a new one replaces: its objects at the same places become bases of patches, as an engine does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from agent_sandbox.store.catalog import Ref, RefKind
from agent_sandbox.store.chunks import cut, cuts, put_pages, put_tree
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import (
    SMALL_FILE,
    Child,
    Commit,
    Entry,
    Extent,
    Kind,
    Type,
    decode_page,
    encode_attrs,
    encode_commit,
    link_id,
)
from agent_sandbox.store.ports import Objects, Writer
from agent_sandbox.store.walk import commit as load_commit
from agent_sandbox.store.walk import data, entries, extents, walk

Tree = dict[bytes, "Tree | bytes | Linked | WithAttrs | Chunked"]


@dataclass(frozen=True)
class Linked:
    """A file whose inode has its first name at ``first``."""

    first: bytes
    data: bytes


@dataclass(frozen=True)
class WithAttrs:
    """A file with extended attributes."""

    data: bytes
    attrs: dict[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunked:
    """A large file whose chunks are known: :func:`recut` finds those of an edit without cutting everything again."""

    data: bytes
    cuts: list[tuple[int, int]]


def recut(data: bytes, old: list[tuple[int, int]], at: int, shift: int = 0) -> list[tuple[int, int]]:
    """Return the cuts of ``data``, which differs from what ``old`` cut in a few bytes at ``at``, grown by ``shift``."""
    kept = [cut for cut in old if cut[1] <= at]
    ends = {end + shift: number for number, (_, end) in enumerate(old) if end > at}
    start = kept[-1][1] if kept else 0
    while start not in ends:
        end = cut(data, start, len(data))
        kept.append((start, end))
        start = end
    return kept + [(one + shift, two + shift) for one, two in old[ends[start] + 1 :]]


class Hand:
    """Puts states through a writer; ``objects`` is where old states are read from."""

    def __init__(self, objects: Objects, writer: Writer) -> None:
        self._objects = objects
        self._writer = writer

    def commit(
        self,
        tree: Tree,
        *,
        parents: tuple[bytes, ...] = (),
        old: Entry | None = None,
        base: bytes | None = None,
        message: str = "",
    ) -> bytes:
        """Keep a state and its commit, and return the commit's id."""
        root = self.root(tree, old)
        return self._writer.put(
            Kind.COMMIT, encode_commit(Commit(root, parents, base, 1_700_000_000_000_000_000, "hand", message))
        )

    def root(self, tree: Tree, old: Entry | None = None) -> Entry:
        """Keep a state and return its root."""
        return self._directory(b"", tree, old)

    def _directory(self, name: bytes, tree: Tree, old: Entry | None) -> Entry:
        before = {entry.name: entry for entry in entries(self._objects, old)} if old is not None else {}
        items = []
        for child, value in sorted(tree.items()):
            was = before.get(child)
            if isinstance(value, dict):
                items.append(self._directory(child, value, was if was and was.type is Type.DIRECTORY else None))
            else:
                items.append(self._file(child, value, was if was and was.type is Type.FILE else None))
        replaced = old.content if old is not None else None
        id = put_tree(items, lambda kind, canonical: self._writer.put(kind, canonical, replaced))
        return Entry(name, Type.DIRECTORY, 0o755, 1_600_000_000_000_000_000, content=id)

    def _file(self, name: bytes, value: bytes | Linked | WithAttrs | Chunked, was: Entry | None) -> Entry:
        content = value if isinstance(value, bytes) else value.data
        link = link_id(value.first) if isinstance(value, Linked) else None
        attrs = None
        if isinstance(value, WithAttrs):
            attrs = self._writer.put(Kind.ATTRS, encode_attrs(sorted(value.attrs.items())))
        old = list(extents(self._objects, was)) if was is not None else []
        if isinstance(value, Chunked):
            pieces = value.cuts
        elif len(content) >= SMALL_FILE:
            pieces = list(cuts(content))
        else:
            pieces = [(0, len(content))] if content else []
        made = [
            Extent(end - start, self._writer.put(Kind.BLOB, content[start:end], old[at].id if at < len(old) else None))
            for at, (start, end) in enumerate(pieces)
        ]
        id = None
        if len(content) >= SMALL_FILE:
            bases = self._pages(was.content) if was is not None and was.paged and was.content else {}

            def put(kind: Kind, canonical: bytes) -> bytes:
                left = bases.get(canonical[0])
                return self._writer.put(kind, canonical, left.pop(0) if left else None)

            id = put_pages(made, put)
        elif made:
            id = made[0].id
        return Entry(
            name,
            Type.FILE,
            0o644,
            1_600_000_000_123_456_789,
            attrs=attrs,
            link=link,
            size=len(content),
            content=id,
            paged=len(content) >= SMALL_FILE,
        )

    def _pages(self, root: bytes) -> dict[int, list[bytes]]:
        """The pages of an old list of chunks by level, in order: each is what the new one at its place resembles."""
        found: dict[int, list[bytes]] = {}
        row = [root]
        while row:
            below: list[bytes] = []
            for id in row:
                level, items = decode_page(self._objects.read(id, Kind.PAGE))
                found.setdefault(level, []).append(id)
                below += [item.id for item in items if isinstance(item, Child)]
            row = below
        return found


def contents(objects: Objects, root: Entry) -> Iterator[tuple[bytes, bytes]]:
    """Yield every file's path and bytes, in order."""
    for path, entry in walk(objects, root):
        if entry.type is Type.FILE:
            yield path, b"".join(data(objects, entry))


def keep(database: ObjectDatabase, tree: Tree, name: str = "main", *, message: str = "") -> bytes:
    """Commit ``tree`` to branch ``name`` of project ``p``, making both as needed, on top of where the branch is."""
    head = database.index.ref("p", name)
    with database.writer() as writer:
        old = load_commit(database, head.head).root if head is not None else None
        parents = (head.head,) if head is not None else ()
        commit = Hand(database, writer).commit(tree, parents=parents, old=old, message=message)
        writer.seal()
        with database.transaction(writer) as change:
            if change.project("p") is None:
                change.add_project("p", 0)
            if head is None:
                change.add_ref(Ref("p", name, RefKind.BRANCH, commit, None))
            elif commit != head.head:
                assert change.move_ref("p", name, commit, expected=head.head)
    return commit


def put(database: ObjectDatabase, *blobs: bytes, base: bytes | None = None) -> list[bytes]:
    """Keep blobs that nothing leads to, as patches of ``base`` where that is smaller, and return their ids."""
    with database.writer() as writer:
        ids = [writer.put(Kind.BLOB, blob, base) for blob in blobs]
        writer.seal()
        with database.transaction(writer):
            pass
    return ids
