"""A directory tree in memory that grows name by name in any order, and becomes a state at the end.

Strategy
--------
* Content goes into the store as it comes; of each name only its :class:`Entry` is held, since a later member of an
  archive may replace an earlier one, and a directory's object needs all of its names. That is about 400 bytes for a
  name, counted against a bound that the caller gives; names that were replaced stay counted.
* Every path is walked from the root through directories of this tree alone. A symlink or file on the way is refused, so
  there is no link to follow and nothing outside to reach. Missing directories on the way are made with mode 0755, the
  epoch as mtime, and root as owner where owners are recorded: what no archive said is the same whoever reads it.
* Names of one inode share one :class:`_Inode`. When all is there, the inodes that have several names get the link id of
  their first (``spec/store.md``, "Hard links").
* With a base, the tree begins as that state, and a directory of it is read only when something in it changes. What was
  not read keeps its id. Hard links alone reach further: when a name of a linked inode of the base comes or goes, the
  base's other directories are searched for its other names, whose link id may change.
* ``own`` are the names that were put since: whiteouts of a layer hide what the base has and never those
  (OCI image specification, layer.md, "Whiteouts").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from agent_sandbox.errors import InvalidRequestError, PayloadTooLargeError
from agent_sandbox.store import walk
from agent_sandbox.store.chunks import Put, put_tree
from agent_sandbox.store.objects import Entry, Type, link_id
from agent_sandbox.store.oserrors import shown
from agent_sandbox.store.ports import Objects

MADE_MODE = 0o755
_NAME_BYTES = 400
"""What a name takes besides its own bytes: entry, id, numbers, its place in the directory (measured)."""


@dataclass(slots=True)
class _Inode:
    """What several names, or names that may become several, stand for."""

    entry: Entry
    touched: bool
    """Whether its names are not those of the base."""
    first: bytes = b""
    names: int = 0


@dataclass(slots=True)
class _Directory:
    mode: int
    mtime_ns: int
    owner: tuple[int, int] | None
    attrs: bytes | None = None
    content: bytes | None = None
    """The base's tree, while it was not read."""
    names: dict[bytes, _Node] = field(default_factory=dict)
    own: set[bytes] | None = None
    """Names that were put there since; only for a layer."""
    pure: bool = False
    """Whether nothing of the base is in it or below, so that no whiteout need look again."""

    def entry(self, name: bytes) -> Entry:
        return Entry(name, Type.DIRECTORY, self.mode, self.mtime_ns, self.owner, self.attrs, content=self.content)


_Node = Entry | _Inode | _Directory


@dataclass(slots=True)
class Counts:
    """How many names of each type a finished tree has in the directories that were looked at, without the root."""

    files: int = 0
    directories: int = 0
    symlinks: int = 0
    fifos: int = 0


class Assembly:
    """One tree. Paths are sequences of names that can be in a workspace; the root is the empty one."""

    def __init__(self, objects: Objects, base: Entry | None, *, layered: bool, owners: bool, memory: int) -> None:
        self._objects = objects
        self._owners = owners
        self._memory = memory
        self._held = 0
        self._inodes: dict[bytes, _Inode] = {}
        """Those of the base that were met, by link id."""
        self._linked = False
        self._layered = layered
        self._root = self._made() if base is None else self._directory(base)

    @property
    def _made_owner(self) -> tuple[int, int] | None:
        return (0, 0) if self._owners else None

    def _made(self) -> _Directory:
        return _Directory(MADE_MODE, 0, self._made_owner, pure=True)

    def _directory(self, entry: Entry) -> _Directory:
        return _Directory(entry.mode, entry.mtime_ns, entry.owner, entry.attrs, entry.content)

    def hold(self, size: int) -> None:
        """Count ``size`` bytes, and what a name takes besides, against the bound."""
        self._held += size + _NAME_BYTES
        if self._held > self._memory:
            raise PayloadTooLargeError(
                f"the names in the archive and in the directories that it changes need more than {self._memory} bytes"
            )

    def _own(self, directory: _Directory, name: bytes) -> None:
        if self._layered:
            directory.own = directory.own or set()
            directory.own.add(name)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def _names(self, directory: _Directory) -> dict[bytes, _Node]:
        """The names of a directory, read from the base where they were not yet."""
        if directory.content is None:
            return directory.names
        for entry in walk.entries(self._objects, directory.entry(b"")):
            self.hold(len(entry.name) + len(entry.target))
            node: _Node = entry
            if entry.type is Type.DIRECTORY:
                node = self._directory(entry)
            elif entry.link is not None:
                node = self._inodes.setdefault(entry.link, _Inode(entry, touched=False))
            directory.names[entry.name] = node
        directory.content = None
        return directory.names

    def _parent(self, path: Sequence[bytes], *, make: bool) -> _Directory | None:
        """The directory that holds the last name of ``path``."""
        if len(path) > walk.MAX_DEPTH + 1:
            raise InvalidRequestError(f"more than {walk.MAX_DEPTH} directories inside each other: {_text(path)}")
        at = self._root
        for depth, name in enumerate(path[:-1]):
            below = self._names(at).get(name)
            if below is None:
                if not make:
                    return None
                self.hold(len(name))
                below = self._made()
                at.names[name] = below
                self._own(at, name)
            if not isinstance(below, _Directory):
                where = _text(path[: depth + 1])
                raise InvalidRequestError(f"{_text(path)} leads through {where}, which is no directory")
            at = below
        return at

    # ---- changing --------------------------------------------------------------------------------------------------

    def put(self, path: Sequence[bytes], entry: Entry) -> None:
        """Put a file, symlink or FIFO, whose name is the last of ``path``, in place of whatever is there."""
        self._place(path, entry, len(entry.target))

    def directory(self, path: Sequence[bytes], entry: Entry) -> None:
        """Put a directory at ``path``, or give one that is there the mode, mtime, owner and attributes of ``entry``."""
        if len(path) > walk.MAX_DEPTH:
            raise InvalidRequestError(f"more than {walk.MAX_DEPTH} directories inside each other: {_text(path)}")
        there: _Node | None = self._root
        if path:
            parent = self._parent(path, make=True)
            assert parent is not None
            there = self._names(parent).get(path[-1])
            self._own(parent, path[-1])
        if isinstance(there, _Directory):
            there.mode, there.mtime_ns, there.owner, there.attrs = entry.mode, entry.mtime_ns, entry.owner, entry.attrs
        else:
            self._place(path, _Directory(entry.mode, entry.mtime_ns, entry.owner, entry.attrs, pure=True), 0)

    def remove(self, path: Sequence[bytes]) -> None:
        """Remove what is at ``path``, as when something that is left out replaces it."""
        parent = self._parent(path, make=False) if path else None
        if parent is not None and (there := self._names(parent).pop(path[-1], None)) is not None:
            self._dropped(there)

    def link(self, path: Sequence[bytes], target: Sequence[bytes]) -> None:
        """Give the inode at ``target`` one more name; it must be there and be no directory."""
        parent = self._parent(target, make=False) if target else None
        node = self._names(parent).get(target[-1]) if parent is not None else None
        if parent is None or node is None or isinstance(node, _Directory):
            why = "which is a directory" if not target or node is not None else "which did not come before it"
            raise InvalidRequestError(f"{_text(path)} is a hard link to {_text(target)}, {why}")
        self._linked = True
        if not isinstance(node, _Inode):
            node = _Inode(node, touched=True)
            parent.names[target[-1]] = node
        node.touched = True
        self._place(path, node, 0)

    def _place(self, path: Sequence[bytes], node: _Node, size: int) -> None:
        parent = self._parent(path, make=True)
        assert parent is not None
        names = self._names(parent)
        there = names.get(path[-1])
        if there is not None:
            self._dropped(there)
        else:
            self.hold(len(path[-1]))
        self._held += size
        names[path[-1]] = node
        self._own(parent, path[-1])

    # ---- whiteouts -------------------------------------------------------------------------------------------------

    def whiteout(self, path: Sequence[bytes]) -> None:
        """Hide what the base has at ``path``."""
        parent = self._parent(path, make=False)
        if parent is not None and path[-1] in self._names(parent):
            self._hide(parent, path[-1])

    def opaque(self, path: Sequence[bytes]) -> None:
        """Hide all that the base has in the directory at ``path``."""
        parent = self._parent(path, make=False) if path else None
        there = self._root if not path else self._names(parent).get(path[-1]) if parent is not None else None
        if not isinstance(there, _Directory) or there.pure:
            return
        if there.content is not None:
            self._dropped(there)
            there.content = None
        for name in list(there.names):
            self._hide(there, name)
        there.pure = True

    def _hide(self, parent: _Directory, name: bytes) -> None:
        """Remove the base's part of one name: all of it, or what is below where names were put there since."""
        stack: list[tuple[_Directory, bytes, Iterator[bytes] | None]] = [(parent, name, None)]
        while stack:
            parent, name, rest = stack.pop()
            node = parent.names[name]
            own = parent.own is not None and name in parent.own
            if not isinstance(node, _Directory):
                if not own:
                    self._dropped(node)
                    del parent.names[name]
                continue
            if node.pure:
                continue
            if rest is None:
                if node.content is not None:
                    self._dropped(node)
                    node.content = None
                rest = iter(list(node.names))
            below = next(rest, None)
            if below is not None:
                stack += [(parent, name, rest), (node, below, None)]
                continue
            node.pure = True
            if not own:
                if node.names:
                    node.mode, node.mtime_ns, node.owner, node.attrs = MADE_MODE, 0, self._made_owner, None
                    self._own(parent, name)
                else:
                    del parent.names[name]

    def _dropped(self, node: _Node) -> None:
        """Note the linked inodes that lose a name with ``node``."""
        stack = [node]
        while stack:
            node = stack.pop()
            if isinstance(node, _Inode):
                node.touched = True
            elif isinstance(node, _Directory):
                stack += node.names.values()
                if node.content is not None:
                    for _, entry in walk.walk(self._objects, node.entry(b"")):
                        if entry.link is None:
                            continue
                        if entry.link not in self._inodes:
                            self.hold(len(entry.name) + len(entry.target))
                        self._inodes.setdefault(entry.link, _Inode(entry, touched=True)).touched = True

    # ---- the end ---------------------------------------------------------------------------------------------------

    def finish(self, put: Callable[[tuple[bytes, ...]], Put]) -> tuple[Entry, Counts]:
        """Keep the trees, each by what ``put`` gives for its path; return the root, and what was counted."""
        self._find_other_names()
        if self._linked or self._inodes:
            self._name_inodes()
        counts = Counts()
        path: list[bytes] = []
        stack = [(self._root, self._below(self._root))]
        while stack:
            directory, rest = stack[-1]
            following = next(rest, None)
            if following is not None:
                path.append(following[0])
                stack.append((following[1], self._below(following[1])))
                continue
            stack.pop()
            if directory.content is None:
                directory.content = put_tree(self._entries(directory, counts), put(tuple(path)))
                directory.names = {}
            del path[-1:]
        return self._root.entry(b""), counts

    def _below(self, directory: _Directory) -> Iterator[tuple[bytes, _Directory]]:
        return (item for item in directory.names.items() if isinstance(item[1], _Directory))  # type: ignore[misc]

    def _entries(self, directory: _Directory, counts: Counts) -> Iterator[Entry]:
        for name in sorted(directory.names):
            node = directory.names[name]
            if isinstance(node, _Directory):
                entry = node.entry(name)
            elif isinstance(node, Entry):
                entry = node
            else:
                link = node.entry.link
                if node.touched:
                    link = link_id(node.first) if node.names > 1 else None
                entry = replace(node.entry, name=name, link=link)
            match entry.type:
                case Type.FILE:
                    counts.files += 1
                case Type.DIRECTORY:
                    counts.directories += 1
                case Type.SYMLINK:
                    counts.symlinks += 1
                case Type.FIFO:
                    counts.fifos += 1
            yield entry

    def _find_other_names(self) -> None:
        """Read the directories of the base that hold names of an inode whose names changed."""
        wanted = {link for link, inode in self._inodes.items() if inode.touched}
        if not wanted:
            return
        stack = [self._root]
        while stack:
            directory = stack.pop()
            if directory.content is not None:
                for path, entry in walk.walk(self._objects, directory.entry(b"")):
                    if entry.link in wanted:
                        at = directory
                        for name in path.split(b"/"):
                            below = self._names(at)[name]
                            if isinstance(below, _Directory):
                                at = below
            else:
                stack += (below for _, below in self._below(directory))

    def _name_inodes(self) -> None:
        """Count the names of each inode and find its first, comparing whole paths as bytes."""
        path = bytearray()
        stack = [(0, self._sorted(self._root))]
        while stack:
            length, rest = stack[-1]
            del path[length:]
            following = next(rest, None)
            if following is None:
                stack.pop()
                continue
            name, node = following
            if isinstance(node, _Directory):
                path += name + b"/"
                stack.append((len(path), self._sorted(node)))
            elif isinstance(node, _Inode):
                if not node.names:
                    node.first = bytes(path) + name
                node.names += 1

    def _sorted(self, directory: _Directory) -> Iterator[tuple[bytes, _Node]]:
        def key(item: tuple[bytes, _Node]) -> bytes:
            return item[0] + b"/" if isinstance(item[1], _Directory) else item[0]

        return iter(sorted(directory.names.items(), key=key))


def _text(path: Sequence[bytes]) -> str:
    return shown(b"/".join(path))
