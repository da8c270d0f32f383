"""OCI image layers: what makes one state of another, as an archive with whiteouts, both ways.

Source: OCI image specification 1.1, layer.md. Decisions where it leaves them open:

* Written: explicit whiteouts alone, before their siblings; every directory on the way to a change, since unpacking a
  change changes the times of what holds it; a file with holes with its map (the specification advises against them,
  since not every reader knows them; but a layer is as exact as an archive, and a terabyte of zeros helps nobody).
* A name that begins with ``.wh.`` cannot be in a layer. One that would have to be is refused before the first byte.
* Hard links: where a name of an inode changes, all of its names are in the layer, so that it needs no file outside.
  They are found without reading anything else, but for one case: when an inode that stays as it is gains a name, its
  other names may be in directories that are equal in both states, and the new state's directories (not its files) are
  searched once.
* Read: explicit and opaque whiteouts in any order; they hide what the base has and nothing of the layer. A hard link
  may lead to a file of the base. A whiteout of nothing, and one below what is not there, does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent_sandbox.errors import InvalidRequestError, StoreDamagedError
from agent_sandbox.store import chunks, walk
from agent_sandbox.store.objects import Entry, Type, link_id
from agent_sandbox.store.oserrors import shown
from agent_sandbox.store.ports import Captured, Objects, Options, Progress, Writer
from agent_sandbox.store.tarin import Cut, Intake, names
from agent_sandbox.store.tarinput import Limits
from agent_sandbox.store.tarout import Archive, Sink
from agent_sandbox.store.tarread import MemberKind, Stream

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"


def write_layer(
    objects: Objects,
    old_root: Entry | None,
    new_root: Entry,
    out: Sink,
    *,
    owner: tuple[int, int] = (0, 0),
    progress: Progress | None = None,
) -> None:
    """Write to ``out`` the layer that makes the state ``old_root`` (None: nothing) into ``new_root``.

    The rest is as for :func:`agent_sandbox.store.tarout.write_tar`. Raises :class:`InvalidRequestError` with the path
    that a layer cannot express, before anything is written. Equal directories are not read but as said above.
    """
    changes = _Changes(objects, old_root, new_root)
    changes.prepare()
    archive = Archive(objects, out, owner, progress)
    for path, entry in changes.paths():
        if entry is None:
            head, slash, name = path.rpartition(b"/")
            archive.empty(head + slash + WHITEOUT + name)
        else:
            archive.add(path, entry)
    archive.close()


class _Changes:
    def __init__(self, objects: Objects, old: Entry | None, new: Entry) -> None:
        self._objects = objects
        self._old = old
        self._new = new
        self._more: set[bytes] = set()
        """Unchanged paths that have to be there all the same, and the directories on the way to them."""

    def prepare(self) -> None:
        """Refuse what cannot be expressed, and find the other names of changed inodes."""
        seen: set[bytes] = set()
        whole: set[bytes] = set()
        for path, entry in self.paths():
            _check(path)
            if entry is not None and entry.link is not None:
                seen.add(entry.link)
                if link_id(path) == entry.link:
                    whole.add(entry.link)
        partly = seen - whole  # Where the first name changed every name did: they agree in all that they have.
        if not partly:
            return
        for path, entry in walk.walk(self._objects, self._new):
            if entry.link in partly:
                while path not in self._more:
                    _check(path)
                    self._more.add(path)
                    path = path.rpartition(b"/")[0]

    def paths(self) -> Iterator[tuple[bytes, Entry | None]]:
        """Yield what is new or changed, and with None what is gone: a directory, its whiteouts, what is in it."""
        if self._old == self._new and not self._more:
            return
        yield b"", self._new
        stack = [(b"", self._below(b"", self._old, self._new))]
        while stack:
            following = next(stack[-1][1], None)
            if following is None:
                stack.pop()
                continue
            path, old, new = following
            yield path, new
            if new is not None and new.type is Type.DIRECTORY:
                if len(stack) > walk.MAX_DEPTH:
                    raise StoreDamagedError("a damaged directory: too deep")
                stack.append((path, self._below(path, old, new)))

    def _below(self, path: bytes, old: Entry | None, new: Entry) -> Iterator[tuple[bytes, Entry | None, Entry | None]]:
        """Yield path, old and new entry of each name that differs in one directory; first those that are gone."""
        if old is not None and old.type is not Type.DIRECTORY:
            old = None
        if old is not None and old.content == new.content and path not in self._more:
            return
        prefix = path + b"/" if path else b""
        for name, before, after in self._pairs(old, new):
            if after is None:
                yield prefix + name, before, None
        for name, before, after in self._pairs(old, new):
            if after is not None and (before != after or prefix + name in self._more):
                yield prefix + name, before, after

    def _pairs(self, old: Entry | None, new: Entry) -> Iterator[tuple[bytes, Entry | None, Entry | None]]:
        """Yield each name of two directories with its entries, in order."""
        olds = walk.entries(self._objects, old) if old is not None else iter(())
        news = walk.entries(self._objects, new)
        before, after = next(olds, None), next(news, None)
        while before is not None or after is not None:
            if after is None or (before is not None and before.name < after.name):
                assert before is not None
                yield before.name, before, None
                before = next(olds, None)
            elif before is None or after.name < before.name:
                yield after.name, None, after
                after = next(news, None)
            else:
                yield after.name, before, after
                before, after = next(olds, None), next(news, None)


def _check(path: bytes) -> None:
    if path.rpartition(b"/")[2].startswith(WHITEOUT):
        raise InvalidRequestError(f"a layer cannot express a name that begins with '.wh.': {shown(path)}")


def read_layer(
    file: Stream,
    objects: Objects,
    writer: Writer,
    base: Entry | None,
    *,
    options: Options | None = None,
    limits: Limits | None = None,
    cut: Cut = chunks.cut,
    progress: Progress | None = None,
) -> Captured:
    """Apply the layer ``file``, plain or compressed, to the state ``base`` (None: nothing), and return what comes out.

    All else is as for :func:`agent_sandbox.store.tarin.read_tar`, errors too. The report counts names in the
    directories that the layer changes. What it does not change is not read, unless it changes the names of an inode:
    then the other directories of ``base`` are searched for the rest of them.
    """
    intake = Intake(file, objects, writer, base, base, options, limits, cut, progress, layered=True)
    for member in intake.members():
        path = names(member.path)
        if any(name.startswith(WHITEOUT) for name in path[:-1]):
            raise InvalidRequestError(f"the layer has a name below a whiteout: {shown(member.path)}")
        if not path or not path[-1].startswith(WHITEOUT):
            intake.take(member)
            continue
        hidden = path[-1].removeprefix(WHITEOUT)
        if member.kind is MemberKind.FILE and path[-1] == OPAQUE:
            intake.assembly.opaque(path[:-1])
        elif member.kind is MemberKind.FILE and hidden not in (b"", b".", b"..") and not hidden.startswith(WHITEOUT):
            intake.assembly.whiteout((*path[:-1], hidden))
        else:
            raise InvalidRequestError(f"the layer has a whiteout that hides nothing: {shown(member.path)}")
    return intake.finish()
