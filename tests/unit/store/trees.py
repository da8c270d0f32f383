"""Random directory trees and random edits of them, made with plain system calls, and a full description of a tree.

Nothing here imports the store: what a test compares its work with must come from elsewhere. A tree is a list of
:data:`Edit` applied to an empty directory, so one strategy gives both trees and edits, and a failing example shrinks to
a few edits. Edits name their targets by number, taken modulo what is there when they are applied; one that finds
nothing to do does nothing.

More than 400 lines: making, editing and describing share what an entry is, and each helper reads alone.

::

    with scratch() as place:                     # a directory that supports user.* attributes and holes
        tree = place / "tree"
        build(tree, data.draw(trees()))
        before = state_of(tree)
        apply(tree, data.draw(edits()))
"""

# Names are bytes, which pathlib does not know.
# ruff: noqa: PTH101, PTH102, PTH104, PTH108, PTH115, PTH118, PTH211

from __future__ import annotations

import errno
import hashlib
import os
import random
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

BLOCK = 4_096
SIZES = (0, 1, 100, 4_096, 8_191, 8_192, 8_193, 32_768, 131_071, 131_072, 400 * 1_024)
"""Sizes on both sides of each limit of the format."""
MIN_TIME = -(1 << 31) * 10**9
MAX_TIME = ((1 << 34) - (1 << 31) - 1) * 10**9
"""The times that ext4 with 256-byte inodes can hold (fs/ext4/ext4.h, ``EXT4_EXTRA_TIMESTAMP_MAX``)."""


# ---- what a tree is made of ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Bytes of a file: ``size`` of them from ``seed``, without the blocks (of 4,096 bytes) in ``holes``."""

    size: int
    seed: int = 0
    holes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Looks:
    """What an entry has besides its content."""

    mode: int
    mtime_ns: int
    attributes: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True)
class Make:
    """Put a new entry there, in place of what has the name. ``what``: bytes for a symlink's target."""

    parent: int
    name: bytes
    what: Data | bytes | None
    """Data: a file. Bytes: a symlink. None: a directory or FIFO."""
    fifo: bool
    looks: Looks


@dataclass(frozen=True)
class Fill:
    """Put many small files into a directory, so that it needs several pages."""

    parent: int
    count: int
    seed: int


@dataclass(frozen=True)
class Link:
    """Give an inode that is no directory one more name."""

    target: int
    parent: int
    name: bytes


@dataclass(frozen=True)
class Rename:
    """Move an entry, over what has the name."""

    target: int
    parent: int
    name: bytes


@dataclass(frozen=True)
class Remove:
    """Remove an entry with all below it."""

    target: int


@dataclass(frozen=True)
class Write:
    """Overwrite part of a file, or make it longer; ``quiet`` puts its mtime back afterwards."""

    target: int
    offset: int
    data: Data
    quiet: bool


@dataclass(frozen=True)
class Insert:
    """Shift a file's content back by some bytes put in front."""

    target: int
    data: bytes


@dataclass(frozen=True)
class Resize:
    """Cut a file, or lengthen it by a hole."""

    target: int
    size: int


@dataclass(frozen=True)
class Look:
    """Change mode, mtime and attributes; the content stays."""

    target: int
    looks: Looks


Edit = Make | Fill | Link | Rename | Remove | Write | Insert | Resize | Look


# ---- strategies ----------------------------------------------------------------------------------------------------

_number = st.integers(0, 1_000)
_name = st.sampled_from(
    [b"a", b"b", b"c", b"a.b", b"a-", b"A", b"\xff\xfe", b"\xc3\xa4", b" ", b"\n", b"-f", b"..."]
) | (
    st.binary(min_size=1, max_size=12).filter(lambda name: name not in (b".", b"..") and not {0, 47} & set(name))
    | st.integers(0, 9).map(lambda digit: b"%d" % digit * 255)
)
_time = st.sampled_from([0, -1, 1, MIN_TIME, (1 << 33) * 10**9 + 7, MAX_TIME]) | st.integers(MIN_TIME, MAX_TIME)
_attributes = st.dictionaries(
    st.sampled_from([b"user.a", b"user.b", b"user.\xff"])
    | st.binary(min_size=1, max_size=8).filter(lambda name: 0 not in name).map(lambda name: b"user." + name),
    st.binary(max_size=60),
    max_size=3,
).map(lambda attributes: tuple(sorted(attributes.items())))
_looks = st.builds(Looks, st.sampled_from([0o644, 0o755, 0o4755, 0o2711, 0o1777, 0o500, 0]), _time, _attributes)
_sizes = st.sampled_from(SIZES) | st.integers(0, 20_000)
_holes = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 40)), max_size=3).map(tuple)
_data = st.builds(Data, _sizes, _number, st.just(()) | _holes)
_target = st.sampled_from([b"a", b"../a", b"/etc/passwd", b"\xff", b"x" * 4_095]) | (
    st.binary(min_size=1, max_size=20).filter(lambda target: 0 not in target)
)
_make = st.builds(
    lambda parent, name, what, looks: Make(parent, name, None if what in (True, False) else what, what is True, looks),
    _number,
    _name,
    st.one_of(_data, _data, st.just(False), st.just(False), _target, st.booleans()),
    _looks,
)
_fill = st.builds(Fill, _number, st.sampled_from([31, 33, 33, 300]), st.integers(0, 2))
_link = st.builds(Link, _number, _number, _name)
_change = st.one_of(
    st.builds(Rename, _number, _number, _name),
    st.builds(Remove, _number),
    st.builds(Write, _number, st.integers(0, 450_000), st.builds(Data, st.integers(1, 40_000), _number), st.booleans()),
    st.builds(Insert, _number, st.binary(min_size=1, max_size=10)),
    st.builds(Resize, _number, st.sampled_from(SIZES)),
    st.builds(Look, _number, _looks),
)


@st.composite
def trees(draw: st.DrawFn) -> list[Edit]:
    """Edits that make a tree out of an empty directory: every type, links, holes, attributes, hard names."""
    count = draw(st.integers(0, 30))
    made: list[Edit] = draw(st.lists(st.one_of(_make, _make, _make, _make, _link), min_size=count, max_size=count))
    if draw(st.integers(0, 7)) == 7:
        made.insert(draw(st.integers(0, len(made))), draw(_fill))
    return made


def edits() -> st.SearchStrategy[list[Edit]]:
    """Edits of a tree that is there: some of everything that a program can do to one."""
    one = st.one_of(_make, _link, _change, _change, _change)
    return st.integers(1, 12).flatmap(lambda count: st.lists(one, min_size=count, max_size=count))


# ---- applying them -------------------------------------------------------------------------------------------------


def content(data: Data) -> bytes:
    """Return the bytes of ``data``, its holes as zeros: random ones for an even seed, else words that compress."""
    source = random.Random(data.seed)
    if data.seed % 2 == 0:
        return source.randbytes(data.size)
    words = [source.randbytes(source.randrange(1, 9)) for _ in range(200)]
    return b"".join(source.choices(words, k=data.size // 4 + 1))[: data.size].ljust(data.size, b".")


def write(file: int, data: Data, offset: int = 0) -> None:
    """Write ``data`` into the open file at ``offset``, leaving its holes out."""
    holes = {block for start, count in data.holes for block in range(start, start + count)}
    everything = content(data)
    for block in range(-(-data.size // BLOCK)):
        if block not in holes:
            os.pwrite(file, everything[block * BLOCK : (block + 1) * BLOCK], offset + block * BLOCK)
    if os.fstat(file).st_size < offset + data.size:
        os.ftruncate(file, offset + data.size)


def _listing(root: bytes) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """All directories, all names but the root's, and all regular files, in an order that depends on names alone."""
    directories, names, files = [root], [], []
    for parent, below, others in os.walk(root):
        for name in sorted(below) + sorted(others):
            path = os.path.join(parent, name)
            names.append(path)
            kind = os.lstat(path).st_mode
            if stat.S_ISDIR(kind):
                directories.append(path)
            elif stat.S_ISREG(kind):
                files.append(path)
    return sorted(directories), sorted(names), sorted(files)


def _remove(path: bytes) -> None:
    if not os.path.lexists(path):
        return
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    subprocess.run(["rm", "-rf", "--", path], check=True)


def _dress(path: bytes, looks: Looks) -> None:
    kind = os.lstat(path).st_mode
    mode = looks.mode | (0 if os.geteuid() == 0 else 0o700 if stat.S_ISDIR(kind) else 0o600)
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
        os.chmod(path, 0o700)
        for name in os.listxattr(path):
            if name.startswith("user."):
                os.removexattr(path, name)
        for attribute, value in looks.attributes:
            os.setxattr(path, attribute, value)
    if not stat.S_ISLNK(kind):
        os.chmod(path, mode)
    os.utime(path, ns=(0, looks.mtime_ns), follow_symlinks=False)


def _make_entry(path: bytes, edit: Make) -> None:
    match edit.what:
        case Data() as data:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            write(file, data)
            os.close(file)
        case bytes() as target:
            os.symlink(target, path)
        case None if edit.fifo:
            os.mkfifo(path)
        case None:
            os.mkdir(path)
    _dress(path, edit.looks)


def _apply(root: bytes, edit: Edit) -> None:
    directories, names, files = _listing(root)
    match edit:
        case Make():
            path = os.path.join(directories[edit.parent % len(directories)], edit.name)
            _remove(path)
            _make_entry(path, edit)
        case Fill():
            directory = directories[edit.parent % len(directories)]
            for number in range(edit.count):
                path = os.path.join(directory, hashlib.sha256(b"%d %d" % (edit.seed, number)).hexdigest()[:20].encode())
                if not os.path.lexists(path):
                    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                    os.write(file, b"%d" % (number // 2))
                    os.close(file)
        case Link() if names:
            path = os.path.join(directories[edit.parent % len(directories)], edit.name)
            target = names[edit.target % len(names)]
            if not os.path.lexists(path) and not stat.S_ISDIR(os.lstat(target).st_mode):
                os.link(target, path, follow_symlinks=False)
        case Rename() if names:
            path = os.path.join(directories[edit.parent % len(directories)], edit.name)
            source = names[edit.target % len(names)]
            if not (path + b"/").startswith(source + b"/") and not (source + b"/").startswith(path + b"/"):
                _remove(path)
                os.rename(source, path)
        case Remove() if names:
            _remove(names[edit.target % len(names)])
        case Write() if files:
            path = files[edit.target % len(files)]
            before = os.lstat(path)
            file = os.open(path, os.O_WRONLY)
            write(file, edit.data, min(edit.offset, before.st_size))
            os.close(file)
            if edit.quiet:
                os.utime(path, ns=(0, before.st_mtime_ns))
        case Insert() if files:
            path = files[edit.target % len(files)]
            old = Path(os.fsdecode(path)).read_bytes()
            Path(os.fsdecode(path)).write_bytes(edit.data + old)
        case Resize() if files:
            os.truncate(files[edit.target % len(files)], edit.size)
        case Look() if names:
            _dress(names[edit.target % len(names)], edit.looks)
        case _:
            pass


def apply(directory: Path, changes: Sequence[Edit]) -> None:
    """Apply edits in order. One that needs a path longer than the system takes finds nothing to do."""
    for change in changes:
        try:
            _apply(os.fsencode(directory), change)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise


def build(directory: Path, tree: Sequence[Edit]) -> None:
    """Create ``directory`` and make the tree in it."""
    directory.mkdir()
    apply(directory, tree)


# ---- describing a tree ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """All of one entry that the store promises to keep."""

    type: str
    """As ``ls -l`` shows it: ``-``, ``d``, ``l``, ``p``, and ``s``, ``c``, ``b`` for what the store leaves out."""
    mode: int
    mtime_ns: int
    attributes: tuple[tuple[str, bytes], ...] = ()
    size: int = 0
    runs: tuple[tuple[int, int], ...] = ()
    """Start and end of each run of data, holes between them."""
    digest: str = ""
    """SHA-256 of the bytes of the runs."""
    target: bytes = b""
    names: frozenset[bytes] = frozenset()
    """Paths that are the same inode, where they are several."""
    owner: tuple[int, int] | None = None


def _content_of(path: bytes, size: int) -> tuple[tuple[tuple[int, int], ...], str]:
    runs: list[tuple[int, int]] = []
    digest = hashlib.sha256()
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        at = 0
        while at < size:
            try:
                start = os.lseek(file, at, os.SEEK_DATA)
            except OSError:  # ENXIO: no data after here
                break
            at = min(os.lseek(file, start, os.SEEK_HOLE), size)
            runs.append((start, at))
            while start < at:
                piece = os.pread(file, min(at - start, 1 << 20), start)
                digest.update(piece)
                start += len(piece)
    finally:
        os.close(file)
    return tuple(runs), digest.hexdigest()


def state_of(directory: Path, *, owners: bool = False) -> dict[bytes, State]:
    """Describe everything below ``directory``, and itself under the empty path."""
    root = os.fsencode(directory)
    paths = [root]
    for parent, below, others in os.walk(root):
        paths += [os.path.join(parent, name) for name in below + others]
    inodes: dict[tuple[int, int], set[bytes]] = {}
    for path in paths[1:]:
        about = os.lstat(path)
        if not stat.S_ISDIR(about.st_mode):
            inodes.setdefault((about.st_dev, about.st_ino), set()).add(path[len(root) + 1 :])
    states = {}
    for path in paths:
        about = os.lstat(path)
        names = inodes.get((about.st_dev, about.st_ino), set())
        runs: tuple[tuple[int, int], ...] = ()
        size, digest, target = 0, "", b""
        attributes: tuple[tuple[str, bytes], ...] = ()
        if stat.S_ISREG(about.st_mode):
            size = about.st_size
            runs, digest = _content_of(path, size)
        elif stat.S_ISLNK(about.st_mode):
            target = os.readlink(path)
        if stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode):
            found = sorted(name for name in os.listxattr(path) if name.startswith("user."))
            attributes = tuple((name, os.getxattr(path, name)) for name in found)
        states[path[len(root) + 1 :]] = State(
            stat.filemode(about.st_mode)[0],
            stat.S_IMODE(about.st_mode),
            about.st_mtime_ns,
            attributes,
            size,
            runs,
            digest,
            target,
            frozenset(names) if len(names) > 1 else frozenset(),
            (about.st_uid, about.st_gid) if owners else None,
        )
    return states


# ---- where -----------------------------------------------------------------------------------------------------


def _supports(directory: str) -> bool:
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            os.setxattr(file.name, "user.probe", b"1")
            os.ftruncate(file.fileno(), 1 << 20)
            os.pwrite(file.fileno(), b"x", 1 << 19)
            return os.lseek(file.fileno(), 0, os.SEEK_DATA) > 0
    except OSError:
        return False


def place() -> str:
    """Return a directory for temporary files whose file system has ``user.*`` attributes and holes."""
    repository = str(Path(__file__).parents[3])
    for candidate in (tempfile.gettempdir(), "/var/tmp", repository, "/dev/shm"):
        if _supports(candidate):
            return candidate
    raise RuntimeError("these tests need a file system with user.* attributes and holes; set TMPDIR to one")


@contextmanager
def scratch() -> Iterator[Path]:
    """Give a new empty directory in :func:`place`, and remove it with all that is in it, however deep and locked."""
    directory = Path(tempfile.mkdtemp(prefix="trees-", dir=place()))
    try:
        yield directory
    finally:
        if os.geteuid() != 0:
            with suppress(subprocess.CalledProcessError):
                subprocess.run(["chmod", "-R", "u+rwx", "--", directory], check=True, stderr=subprocess.DEVNULL)
        _remove(os.fsencode(directory))
