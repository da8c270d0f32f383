"""Import of an archive: its members become a state, without a file on the way.

Strategy
--------
* :mod:`tarinput` gives plain bytes, :mod:`tarread` members, :mod:`assembly` the tree. Here is decided what of a member
  is kept, and content goes into chunks as it comes: at most one small file or two chunks of it are in memory.
* What tells of an attack or a damaged archive is an :class:`InvalidRequestError` that names the path, and nothing of
  the archive is kept: absolute names, ``..``, NUL, a path through something that is no directory (a symlink is not
  followed, wherever it points), a hard link to what did not come before. What merely has no place in a workspace is
  left out and reported: devices, names above 255 bytes, targets above 4,095, attributes larger than the store takes
  (of these the attributes alone). A hard link to what was left out is left out too.
* As tar does, a later member of a name replaces an earlier one; a directory keeps what is in it.
* Of extended attributes only ``user.*`` of files and directories are kept, as in a capture. A symlink's mode is 0777,
  as Linux has it.
* Zeros that the archive carries stay data; holes are what its map of a sparse file leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from agent_sandbox.errors import InvalidRequestError, PayloadTooLargeError
from agent_sandbox.store import chunks
from agent_sandbox.store.assembly import Assembly
from agent_sandbox.store.content import Keeper, keep_tree
from agent_sandbox.store.objects import (
    MAX_CHUNK,
    MAX_NAME,
    MAX_OWNER,
    MAX_TARGET,
    SMALL_FILE,
    SYMLINK_MODE,
    Entry,
    Extent,
    Kind,
    Type,
    encode_attrs,
)
from agent_sandbox.store.oserrors import shown
from agent_sandbox.store.outcomes import Left, LeftOut, Report
from agent_sandbox.store.past import PastDirectory
from agent_sandbox.store.ports import Captured, Objects, Options, Progress, Writer
from agent_sandbox.store.tarinput import Input, Limits
from agent_sandbox.store.tarread import Member, MemberKind, Stream, TarReader
from agent_sandbox.store.walk import MAX_DEPTH

Cut = Callable[[bytes, int, int], int]
"""Where a chunk ends; see :func:`agent_sandbox.store.chunks.cut`."""

MAX_LOOKUPS = 200_000
"""Directories of the base that are looked up, so that a hostile archive cannot make us go up and down in it for ever.
What comes after them is stored whole where it could have been a patch."""
MAX_PATH = (MAX_DEPTH + 1) * (MAX_NAME + 1)
"""No path that the tree could hold has more bytes."""
MAX_LEFT_OUT = 10_000
MAX_LEFT_OUT_BYTES = 16 << 20
_PIECE = 1 << 20
_EVERY = 64
"""Progress is told after this many members, and after each MiB of a large one."""


def read_tar(
    file: Stream,
    objects: Objects,
    writer: Writer,
    *,
    base: Entry | None = None,
    options: Options | None = None,
    limits: Limits | None = None,
    cut: Cut = chunks.cut,
    progress: Progress | None = None,
) -> Captured:
    """Read the archive ``file``, plain or compressed, into ``writer`` and return the state that it holds.

    The root id is that of a capture of the directory that GNU tar would unpack it into, but for what it does not say:
    directories that it lacks have mode 0755, the epoch as mtime and root as owner. ``base`` is the root of the state
    that it probably resembles: what replaces its objects is kept as patches. ``file`` is read to its end.
    ``progress`` is told members done and bytes read; an archive does not say how many there are (0).

    Raises :class:`InvalidRequestError` for what is no sound or no harmless archive, :class:`PayloadTooLargeError` above
    ``limits``, and the errors of the store. The caller then gives the writer up.
    """
    intake = Intake(file, objects, writer, None, base, options, limits, cut, progress)
    for member in intake.members():
        intake.take(member)
    return intake.finish()


class Intake:
    """What is common to archives and layers: one archive on its way into an :class:`Assembly`."""

    def __init__(
        self,
        file: Stream,
        objects: Objects,
        writer: Writer,
        under: Entry | None,
        base: Entry | None,
        options: Options | None,
        limits: Limits | None,
        cut: Cut,
        progress: Progress | None,
        *,
        layered: bool = False,
    ) -> None:
        limits = limits or Limits()
        self._owners = (options or Options()).owners
        self._objects = objects
        self._writer = writer
        self._written = writer.written
        self._limits = limits
        self._cut = cut
        self._progress = progress
        self._input = Input(file, limits)
        self._reader = TarReader(self._input, empty=layered)
        self._past = [PastDirectory(objects, base)]
        self._past_path: list[bytes] = []
        self._lookups = MAX_LOOKUPS if base is not None else 0
        self.assembly = Assembly(objects, under, layered=layered, owners=self._owners, memory=limits.memory)
        self._done = 0
        self._bytes = 0
        self._left: list[LeftOut] = []
        self._left_count = self._left_bytes = 0
        self._left_paths: set[tuple[bytes, ...]] = set()

    # ---- members ---------------------------------------------------------------------------------------------------

    def members(self) -> Iterator[Member]:
        """Yield the members of the archive; of each the data is taken, or passed over, before the next."""
        while (member := self._reader.next()) is not None:
            if self._done >= self._limits.entries:
                raise PayloadTooLargeError(f"the archive has more than {self._limits.entries} members")
            yield member
            self._done += 1
            if self._done % _EVERY == 0:
                self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._done, 0, self._input.taken, 0)

    def take(self, member: Member) -> None:
        """Put one member into the tree, or leave it out."""
        path = names(member.path)
        if not path and member.kind is not MemberKind.DIRECTORY:
            raise InvalidRequestError(f"the workspace itself would be replaced by a {member.kind.value}")
        why = unfit(path)
        if member.kind is MemberKind.HARD_LINK:
            target = names(member.link)
            if why is None and target not in self._left_paths:
                self._left_paths.discard(path)
                self.assembly.link(path, target)
                return
            why = why or Left.DEVICE
        if member.kind is MemberKind.DEVICE:
            why = why or Left.DEVICE
        if member.kind is MemberKind.SYMLINK:
            if not member.link or b"\0" in member.link:
                raise InvalidRequestError(f"{shown(member.path)} is a symlink that points nowhere")
            if len(member.link) > MAX_TARGET:
                why = why or Left.NAME
        if why is not None:
            self.leave(path, why)
            return
        self._left_paths.discard(path)
        if member.kind is MemberKind.DIRECTORY:
            self.assembly.directory(path, self._entry(path, member, Type.DIRECTORY))
        elif member.kind is MemberKind.FILE:
            content, paged = self._content(path, member)
            self.assembly.put(path, self._entry(path, member, Type.FILE, content, paged))
        elif member.kind is MemberKind.SYMLINK:
            self.assembly.put(path, self._entry(path, member, Type.SYMLINK))
        else:
            self.assembly.put(path, self._entry(path, member, Type.FIFO))

    def _entry(
        self, path: tuple[bytes, ...], member: Member, kind: Type, content: bytes | None = None, paged: bool = False
    ) -> Entry:
        symlink = kind is Type.SYMLINK
        return Entry(
            path[-1] if path else b"",
            kind,
            SYMLINK_MODE if symlink else member.mode,
            member.mtime_ns,
            self._owner(member),
            self._attributes(path, member) if kind in (Type.FILE, Type.DIRECTORY) else None,
            None,
            member.size,
            content,
            paged,
            member.link if symlink else b"",
        )

    def leave(self, path: tuple[bytes, ...], why: Left) -> None:
        """Report a path that the state does not hold."""
        whole = b"/".join(path)
        if why is not Left.ATTRIBUTES:
            if unfit(path) is None:
                self.assembly.remove(path)
            self._left_paths.add(path)
            self.assembly.hold(len(whole))
        self._left_count += 1
        if len(self._left) < MAX_LEFT_OUT and self._left_bytes + len(whole) <= MAX_LEFT_OUT_BYTES:
            self._left_bytes += len(whole)
            self._left.append(LeftOut(whole, why))

    def _owner(self, member: Member) -> tuple[int, int] | None:
        if not self._owners:
            return None
        uid, gid = member.owner
        if uid is None or gid is None or not 0 <= uid <= MAX_OWNER or not 0 <= gid <= MAX_OWNER:
            raise InvalidRequestError(f"{shown(member.path)} belongs to nobody that can be")
        return uid, gid

    def _attributes(self, path: tuple[bytes, ...], member: Member) -> bytes | None:
        attributes = sorted(member.attributes.items())
        if not attributes:
            return None
        if any(b"\0" in name for name, _ in attributes):
            raise InvalidRequestError(f"{shown(member.path)} has an attribute with NUL in its name")
        try:
            canonical = encode_attrs(attributes)
        except ValueError:
            self.leave(path, Left.ATTRIBUTES)
            return None
        return self._writer.put(Kind.ATTRS, canonical)

    # ---- content ---------------------------------------------------------------------------------------------------

    def _content(self, path: Sequence[bytes], member: Member) -> tuple[bytes | None, bool]:
        """Keep a file's content; its id, and whether that is a page."""
        self._bytes += sum(member.pieces[1::2])
        if not member.size:
            return None, False
        keeper = Keeper(self._writer, lambda: self._past_directory(path[:-1]).file(path[-1]))
        if member.size < SMALL_FILE and len(member.pieces) == 2 and member.pieces[1] == member.size:
            return keeper.chunk(0, b"".join(iter(lambda: self._reader.read(_PIECE), b""))), False
        return chunks.put_pages(self._extents(member, keeper), keeper.page), True

    def _extents(self, member: Member, keeper: Keeper) -> Iterator[Extent]:
        at = 0
        for index in range(0, len(member.pieces), 2):
            offset, length = member.pieces[index], member.pieces[index + 1]
            if offset > at:
                yield Extent(offset - at, None)
            yield from self._run(offset, length, keeper)
            at = offset + length
        if at < member.size:
            yield Extent(member.size - at, None)

    def _run(self, at: int, left: int, keeper: Keeper) -> Iterator[Extent]:
        """Cut one run of data, ``left`` bytes from the offset ``at``, into chunks."""
        buffer, start = b"", 0
        while left or start < len(buffer):
            if left and len(buffer) - start < MAX_CHUNK:
                pieces = [buffer[start:]]
                room = _PIECE
                while left and room:
                    pieces.append(self._reader.read(min(left, room)))
                    left -= len(pieces[-1])
                    room -= len(pieces[-1])
                buffer, start = b"".join(pieces), 0
                self._tell()
            end = self._cut(buffer, start, len(buffer))
            yield Extent(end - start, keeper.chunk(at, buffer[start:end]))
            at += end - start
            start = end

    def _past_directory(self, path: Sequence[bytes]) -> PastDirectory:
        """The directory of the base at ``path``; those on the way to it are kept until another way is taken."""
        common = 0
        while common < min(len(path), len(self._past_path)) and path[common] == self._past_path[common]:
            common += 1
        del self._past_path[common:], self._past[common + 1 :]
        self._lookups -= len(path) - common
        if self._lookups < 0:
            return PastDirectory(self._objects, None)
        for name in path[common:]:
            self._past_path.append(name)
            self._past.append(self._past[-1].child(name))
        return self._past[-1]

    # ---- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> Captured:
        """Keep the trees; the root and the report."""
        root, counts = self.assembly.finish(self._keep_tree)
        self._tell()
        report = Report(
            counts.files,
            counts.directories,
            counts.symlinks,
            counts.fifos,
            self._bytes,
            self._bytes,
            self._writer.written - self._written,
            tuple(self._left),
            self._left_count,
        )
        return Captured(root, report)

    def _keep_tree(self, path: Sequence[bytes]) -> chunks.Put:
        return lambda kind, data: keep_tree(self._writer, self._past_directory(path), kind, data)


def names(path: bytes) -> tuple[bytes, ...]:
    """Return the names of a member's path; the workspace itself is the empty one."""
    if path.startswith(b"/"):
        raise InvalidRequestError(f"the archive has an absolute name: {shown(path)}")
    if not path or b"\0" in path:
        raise InvalidRequestError("the archive has a name that is empty or has NUL in it")
    if len(path) > MAX_PATH:
        raise InvalidRequestError(f"the archive has a name of {len(path)} bytes: {shown(path)}")
    found = tuple(name for name in path.split(b"/") if name not in (b"", b"."))
    if b".." in found:
        raise InvalidRequestError(f"the archive has a name with '..' in it: {shown(path)}")
    return found


def unfit(path: Sequence[bytes]) -> Left | None:
    """Return why a path can be in no workspace, or None."""
    return Left.NAME if any(len(name) > MAX_NAME for name in path) else None
