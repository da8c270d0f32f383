"""States as plain dictionaries, turned into objects, and random ones by hypothesis.

What merges and differences are tested against is written here from ``spec/store.md``: a state is a :data:`Tree`, from
path to :class:`Node`, in which names of one file have the same ``inode``. :func:`build` makes canonical objects of it
(link ids from first paths, no link for a lone name), :func:`read` gives the dictionary back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from agent_sandbox.store import walk
from agent_sandbox.store.chunks import put_pages, put_tree
from agent_sandbox.store.objects import Entry, Extent, Kind, Type, decode_attrs, encode_attrs, link_id
from agent_sandbox.store.ports import Objects
from tests.unit.store.memory import MemoryObjects

Path = bytes
Attributes = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Node:
    """What a path holds. ``data``: bytes of a file, target of a symlink; ``holes``: a file kept as pages, its zero
    blocks of 4,096 bytes as holes."""

    type: Type = Type.FILE
    data: bytes = b""
    mode: int = 0o644
    mtime_ns: int = 0
    owner: tuple[int, int] | None = None
    attributes: Attributes = ()
    inode: int | None = None
    holes: bool = False


Tree = dict[Path, Node]

DIRECTORY = Node(Type.DIRECTORY, mode=0o755)


def file(data: bytes = b"", **rest: object) -> Node:
    """A regular file."""
    return replace(Node(data=data), **rest)  # type: ignore[arg-type]


def symlink(target: bytes, **rest: object) -> Node:
    """A symlink."""
    return replace(Node(Type.SYMLINK, target, 0o777), **rest)  # type: ignore[arg-type]


def parent(path: Path) -> Path:
    """The path of the directory that a path is in."""
    return path.rpartition(b"/")[0]


def tree(nodes: Tree | None = None, **named: Node) -> Tree:
    """A state with these paths (``a__b`` means ``a/b``), the directories above them, and the root."""
    out: Tree = {}
    for path, node in {**(nodes or {}), **{name.replace("__", "/").encode(): n for name, n in named.items()}}.items():
        out[path] = node
    out.setdefault(b"", DIRECTORY)
    for path in list(out):
        while path:
            path = parent(path)
            out.setdefault(path, DIRECTORY)
    return dict(sorted(out.items()))


def build(objects: MemoryObjects, state: Tree) -> Entry:
    """Put a state, and return its root."""
    below: dict[Path, list[Path]] = {path: [] for path, node in state.items() if node.type is Type.DIRECTORY}
    for path in state:
        if path:
            below[parent(path)].append(path)
    counts = Counter(node.inode for node in state.values() if node.inode is not None)
    first: dict[int, Path] = {}
    for path in sorted(state):
        if (inode := state[path].inode) is not None:
            first.setdefault(inode, path)
    links = {inode: link_id(path) for inode, path in first.items() if counts[inode] > 1}

    def entry(path: Path) -> Entry:
        node = state[path]
        name = path.rpartition(b"/")[2]
        attrs = objects.put(Kind.ATTRS, encode_attrs(node.attributes)) if node.attributes else None
        out = Entry(name, node.type, node.mode, node.mtime_ns, node.owner, attrs, links.get(node.inode or 0))
        match node.type:
            case Type.DIRECTORY:
                entries = sorted((entry(child) for child in below[path]), key=lambda child: child.name)
                return replace(out, content=put_tree(entries, objects.put))
            case Type.SYMLINK:
                return replace(out, target=node.data)
            case Type.FILE if node.holes:
                return replace(out, size=len(node.data), content=_paged(objects, node.data), paged=True)
            case Type.FILE if node.data:
                return replace(out, size=len(node.data), content=objects.put(Kind.BLOB, node.data))
            case _:
                return out

    return entry(b"")


def _paged(objects: MemoryObjects, data: bytes) -> bytes:
    extents: list[Extent] = []
    for at in range(0, len(data), 4_096):
        block = data[at : at + 4_096]
        if any(block):
            extents.append(Extent(len(block), objects.put(Kind.BLOB, block)))
        elif extents and extents[-1].id is None:
            extents[-1] = Extent(extents[-1].length + len(block), None)
        else:
            extents.append(Extent(len(block), None))
    return put_pages(extents, objects.put)


def read(objects: Objects, root: Entry) -> Tree:
    """Return the state under a root; inodes are numbered by first appearance. Checks that linked entries agree."""
    out: Tree = {}
    inodes: dict[bytes, int] = {}
    agreed: dict[bytes, Entry] = {}
    for path, entry in [(b"", root), *walk.walk(objects, root)]:
        attributes = tuple(decode_attrs(objects.read(entry.attrs, Kind.ATTRS))) if entry.attrs else ()
        data = b"".join(walk.data(objects, entry)) if entry.type is Type.FILE else entry.target
        inode = None
        if entry.link is not None:
            inode = inodes.setdefault(entry.link, len(inodes) + 1)
            assert replace(entry, name=b"") == agreed.setdefault(entry.link, replace(entry, name=b"")), path
        out[path] = Node(
            entry.type, data, entry.mode, entry.mtime_ns, entry.owner, attributes, inode, holes=entry.paged
        )
    return out


# ---- random ones ---------------------------------------------------------------------------------------------------

NAMES = (b"a", b"b", b"c", b"a.b", b"a-", b"\xff")

modes = st.sampled_from([0o644, 0o755, 0o600])
times = st.integers(-3, 3)
owners = st.none()
contents = st.sampled_from([b"", b"one", b"two", b"three"])
attributes = st.sampled_from([(), ((b"user.a", b"1"),), ((b"user.a", b"2"), (b"user.b", b""))])
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(b"/".join)
nodes = st.one_of(
    st.builds(Node, st.just(Type.FILE), contents, modes, times, owners, attributes),
    st.builds(Node, st.just(Type.DIRECTORY), st.just(b""), modes, times, owners, attributes),
    st.builds(Node, st.just(Type.SYMLINK), st.sampled_from([b"a", b"b"]), st.just(0o777), times),
    st.builds(Node, st.just(Type.FIFO), st.just(b""), modes, times),
    st.builds(Node, st.just(Type.FILE), contents, modes, times),
)


def put(state: Tree, path: Path, node: Node) -> Tree:
    """Set a path, replacing what is at or below it, with directories above; returns a new state."""
    out = {
        other: was
        for other, was in state.items()
        if other != path
        and not other.startswith(path + b"/")
        and not (_above(other, path) and was.type is not Type.DIRECTORY)
    }
    if node.type is Type.DIRECTORY and path in state and state[path].type is Type.DIRECTORY:
        out = dict(state)
    return tree(out | {path: node})


def remove(state: Tree, path: Path) -> Tree:
    """Remove a path and all below it; returns a new state."""
    return {other: node for other, node in state.items() if other != path and not other.startswith(path + b"/")}


def link(state: Tree, target: Path, path: Path) -> Tree:
    """Give a file one more name; returns a new state. Nothing happens where that cannot be."""
    if target not in state or state[target].type is Type.DIRECTORY or target == path or _above(target, path):
        return state
    node = state[target]
    if node.inode is None:
        node = replace(node, inode=max((other.inode or 0 for other in state.values()), default=0) + 1)
    out = put(state | {target: node}, path, node)
    return out if target in out else state


def write(state: Tree, path: Path, node: Node) -> Tree:
    """Change a file through one of its names: the others change as well; returns a new state."""
    if path not in state or state[path].type is not node.type:
        return state
    inode = state[path].inode
    same = [path] if inode is None else [other for other, was in state.items() if was.inode == inode]
    return state | {other: replace(node, inode=inode) for other in same}


def _above(path: Path, other: Path) -> bool:
    return not path or other.startswith(path + b"/")


@dataclass(frozen=True)
class Edit:
    """One random edit: ``how`` is put, remove, link or write."""

    how: str
    path: Path
    other: Path
    node: Node

    def apply(self, state: Tree) -> Tree:
        """Return the state after it."""
        match self.how:
            case "put":
                return put(state, self.path, self.node)
            case "remove":
                return remove(state, self.path)
            case "link":
                return link(state, self.other, self.path)
            case _:
                return write(state, self.path, self.node)


def edits(
    max_size: int = 5, hows: tuple[str, ...] = ("put", "put", "remove", "link", "write")
) -> st.SearchStrategy[list[Edit]]:
    """Random edits, to be applied in order."""
    return st.lists(st.builds(Edit, st.sampled_from(hows), paths, paths, nodes), max_size=max_size)


def apply(state: Tree, changes: list[Edit]) -> Tree:
    """Return the state after all edits."""
    for change in changes:
        state = change.apply(state)
    return state


def states(max_size: int = 10) -> st.SearchStrategy[Tree]:
    """Random states: edits of the empty one."""
    return edits(max_size, ("put", "put", "put", "link")).map(lambda changes: apply(tree(), changes))
