"""``run -v DIR --pull-changes``: what the agent changed in a copy of a directory, shown, and asked about.

What was sent is remembered, entry by entry (``packing.Sent``). When the command has ended, the directory comes back as
an archive, whose files are kept aside as far as they differ; then the sandbox goes, so that none waits for a person.
Comparing the two gives the changes; ``writing_back.py`` writes them.

The archive is hostile, as in ``unpacking.py``. What never comes back, and is reported:

* names that lead elsewhere, links that lead out of the directory, FIFOs and devices;
* the configuration and hooks of git and other version control, which run what they say, on this machine and as its
  user, nor what would have them looked for elsewhere (``version_control.py``);
* what lies under another ``-v``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

from agent_sandbox.cli import output, signals
from agent_sandbox.cli.copying import SHOWN, Copied
from agent_sandbox.cli.history import MARKS
from agent_sandbox.cli.packing import Sent
from agent_sandbox.cli.unpacking import Received, received, stays_inside
from agent_sandbox.cli.version_control import repositories, runs_programs
from agent_sandbox.errors import PayloadTooLargeError

Kind = Literal["added", "removed", "modified", "type", "metadata"]
FILE, DIRECTORY, LINK, OTHER = stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, 0

_HELD_BYTES = 1 << 20
"""Of a file in memory, before it is written aside."""
MAX_TEXT = 1 << 20
"""Bytes of each side of a file that is shown line by line; what is larger is told in one line."""
MAX_NAMES = 256 << 20
"""Characters of all names and link targets together, which are held until they are compared: a million of 250."""
MAX_LISTED = 1_000
"""Changes that are listed for a person; all are counted, and --json gives all."""


@dataclass(frozen=True)
class Came:
    """One entry as it came back; ``content`` is a file aside, None where the bytes are those of the entry ``same``."""

    type: int
    mode: int = 0
    mtime: float = 0.0
    size: int = 0
    target: str = ""
    digest: bytes = b""
    content: Path | None = None
    same: str = ""


@dataclass
class Step:
    """One change to write; ``problem`` says why it was not."""

    name: str
    kind: Kind
    old: Sent | None
    new: Came | None
    problem: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The components of its name."""
        return tuple(self.name.split("/"))


@dataclass
class Pull:
    """One ``-v`` directory: where it is and was copied to, what was sent, and what came back."""

    directory: Path
    path: str
    root: int
    others: tuple[str, ...] = ()
    """Where other directories were copied to within this one."""
    sent: dict[str, Sent] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def aside() -> Iterator[Path]:
    """A private directory for what comes back; it goes also when a second signal ends the process."""
    with signals.deferred():
        place = Path(tempfile.mkdtemp(prefix="agent-sandbox-"))
    with signals.also_when_forced(lambda: shutil.rmtree(place, ignore_errors=True)):
        yield place


@contextmanager
def opened(volumes: Iterable[tuple[Path, str]]) -> Iterator[list[Pull]]:
    """Hold the directories open from before they are copied until they are written: the same ones, whatever is renamed.

    :class:`OSError` for one that cannot be opened.
    """
    found = list(volumes)
    pulls: list[Pull] = []
    try:
        for directory, path in found:
            root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            others = tuple(
                other.removeprefix(path).strip("/") for _, other in found if other.startswith(path.rstrip("/") + "/")
            )
            pulls.append(Pull(directory, path, root, others))
        yield pulls
    finally:
        for pull in pulls:
            os.close(pull.root)


def take_back(pull: Pull, pieces: Iterator[bytes], place: Path, done: Copied) -> None:
    """Read what a directory has become and set the steps that make the one here like it.

    :class:`InvalidRequestError` for a damaged archive, :class:`PayloadTooLargeError` above the bounds of a copy.
    """
    came: dict[str, Came] = {}
    held = 0
    for number, entry in enumerate(received(pieces)):
        done.entry(len(entry.parts or ()))
        held += len(entry.member.name) + len(entry.member.linkname)
        if held > MAX_NAMES:
            raise PayloadTooLargeError(f"the names in the tree have more than {MAX_NAMES} characters")
        taken = _taken(entry, pull, came, place / f"{id(pull):x}-{number}", done)
        if taken is not None and entry.parts:
            came["/".join(entry.parts)] = taken
    pull.left_out += done.skipped
    done.skipped.clear()
    pull.steps = list(_steps(pull, came))


def _taken(entry: Received, pull: Pull, came: Mapping[str, Came], place: Path, done: Copied) -> Came | None:
    member, parts = entry.member, entry.parts
    name = "/".join(parts or ())
    if not parts or any(name == other or name.startswith(other + "/") for other in pull.others):
        if parts is None:
            done.skip(member.name[:500], "a name that leads elsewhere")
        for piece in entry.content:
            done.piece(len(piece))
        return None
    mode = member.mode & 0o777
    if member.isdir():
        return Came(DIRECTORY, mode)
    if member.issym():
        return Came(LINK, target=member.linkname)
    if member.islnk():
        source = "/".join(part for part in member.linkname.split("/") if part not in ("", "."))
        return came.get(source)
    if not member.isreg():
        for piece in entry.content:
            done.piece(len(piece))
        return Came(OTHER)
    was = pull.sent.get(name)
    digest, size, kept = _keep(entry.content, place, done, b"" if was is None else was.digest)
    done.file()
    if not kept:
        return Came(FILE, mode, member.mtime, size, digest=digest, same=name)
    return Came(FILE, mode, member.mtime, size, digest=digest, content=place)


def _keep(content: Iterator[bytes], place: Path, done: Copied, known: bytes) -> tuple[bytes, int, bool]:
    """Keep a file aside unless its digest is ``known``; return its digest, its size, and whether it was kept."""
    digest, size = hashlib.blake2b(digest_size=32), 0
    first: list[bytes] = []
    for piece in content:  # most files are small and did not change: they cost no file
        done.piece(len(piece))
        digest.update(piece)
        size += len(piece)
        first.append(piece)
        if size >= _HELD_BYTES:
            break
    if size < _HELD_BYTES and digest.digest() == known:
        return known, size, False
    with place.open("xb", buffering=0) as file:
        size = 0
        for number, piece in enumerate(chain(first, content)):
            if number >= len(first):
                done.piece(len(piece))
                digest.update(piece)
            size += len(piece)
            if piece.count(0) == len(piece):
                file.seek(size)
                continue
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
        file.truncate(size)
    if digest.digest() == known:
        place.unlink()
        return known, size, False
    return digest.digest(), size, True


def _steps(pull: Pull, came: Mapping[str, Came]) -> Iterator[Step]:
    """Compare what was sent with what came, by name, a directory before what is in it."""
    known = repositories(pull.sent)
    made = repositories({*pull.sent, *came}) - known
    for name in sorted({*pull.sent, *came}, key=lambda name: name.split("/")):
        old, new = pull.sent.get(name), came.get(name)
        if (kind := _kind(old, new)) is None:
            continue
        parts = name.split("/")
        if new is not None and new.type == OTHER:
            pull.left_out.append((name, "neither a file, a directory nor a link"))
        elif (
            new is not None
            and new.type == LINK
            and ("\0" in new.target or not stays_inside(new.target, len(parts) - 1))
        ):
            pull.left_out.append((name, f"a link that leads out of the directory, to {new.target[:200]}"))
        elif runs_programs(parts, DIRECTORY if new is None else new.type, known, made):
            pull.left_out.append(
                (name, "it names programs that run by themselves, so it is not written; copy it if you trust it")
            )
        elif "\0" not in name:
            yield Step(name, kind, old, new)


def _kind(old: Sent | None, new: Came | None) -> Kind | None:
    if old is None:
        return "added"
    if new is None:
        return "removed"
    type = stat.S_IFMT(old.stat.st_mode)
    if new.type != type:
        return None if new.type == OTHER and type == stat.S_IFIFO else "type"
    if (new.target, new.digest) != (old.target, old.digest):
        return "modified"
    return "metadata" if type != LINK and new.mode != old.stat.st_mode & 0o777 else None


# ---- what a person sees --------------------------------------------------------------------------------------------


def show(pulls: Iterable[Pull], write: Callable[[str], object]) -> int:
    """List every change and what is left out; return how many changes there are."""
    count = 0
    for pull in pulls:
        for path, reason in pull.left_out[:SHOWN]:
            output.note(f"left out {path}: {reason}")
        if len(pull.left_out) > SHOWN:
            output.note(f"left out {len(pull.left_out) - SHOWN} more")
        for step in pull.steps:
            count += 1
            if count <= MAX_LISTED:
                write(_line(pull, step))
    if count > MAX_LISTED:
        write(f"… and {count - MAX_LISTED} more")
    return count


def _line(pull: Pull, step: Step) -> str:
    old = step.old.stat.st_size if step.old is not None and stat.S_ISREG(step.old.stat.st_mode) else None
    new = step.new.size if step.new is not None and step.new.type == FILE else None
    sizes = [output.size(size) for size in (old, new) if size is not None]
    more = f"  ({' → '.join(sizes)})" if sizes else ""
    if step.kind == "metadata" and step.old is not None and step.new is not None:
        more = f"  (mode {step.old.stat.st_mode & 0o777:o} → {step.new.mode:o})"
    elif step.new is not None and step.new.type == LINK:
        more = f"  → {step.new.target}"
    problem = f"  ! {step.problem}" if step.problem else ""
    return output.plain(f"{MARKS[step.kind]} {pull.directory / step.name}{more}{problem}")


def as_data(pulls: Iterable[Pull]) -> list[dict[str, object]]:
    """Every change, for programs."""
    return [
        {
            "directory": str(pull.directory),
            "path": step.name,
            "kind": step.kind,
            "size": step.new.size if step.new is not None and step.new.type == FILE else None,
            "problem": step.problem or None,
        }
        for pull in pulls
        for step in pull.steps
    ]


def ask(pulls: list[Pull], count: int) -> bool:
    """Ask a person, on the standard error, until the answer is yes or no; nothing is no."""
    where = ", ".join(str(pull.directory) for pull in pulls if pull.steps)
    while True:
        question = (
            f"Write {count} {'change' if count == 1 else 'changes'} to {output.plain(where)}? [y]es, [N]o, [d]iff: "
        )
        print(question, end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if answer.strip().lower() in ("y", "yes"):
            return True
        if answer.strip().lower() in ("d", "diff"):
            for pull in pulls:
                for step in pull.steps:
                    for line in text(pull, step):
                        print("\t".join(map(output.plain, line.removesuffix("\n").split("\t"))), file=sys.stderr)
            continue
        if not answer:
            print(file=sys.stderr)
        if answer.strip().lower() in ("", "n", "no"):
            return False


def text(pull: Pull, step: Step) -> Iterator[str]:
    """Yield the lines of one change as a unified difference; one line says so where it is no text, or too large."""
    from agent_sandbox.cli.writing_back import content_here
    from agent_sandbox.store.hunks import quoted, unified

    name = os.fsencode(step.name)
    sides: list[bytes | None] = [b"", b""]
    shown = ["/dev/null", "/dev/null"]
    if step.old is not None and stat.S_IFMT(step.old.stat.st_mode) in (FILE, LINK):
        shown[0] = quoted(b"a/" + name)
        is_link = stat.S_ISLNK(step.old.stat.st_mode)
        sides[0] = os.fsencode(step.old.target) if is_link else content_here(pull.root, step.parts, MAX_TEXT)
    if step.new is not None and step.new.type in (FILE, LINK):
        shown[1] = quoted(b"b/" + name)
        if step.new.type == LINK:
            sides[1] = os.fsencode(step.new.target)
        elif step.new.content is None:
            sides[1] = content_here(pull.root, tuple(step.new.same.split("/")), MAX_TEXT)
        else:
            sides[1] = step.new.content.read_bytes() if step.new.size <= MAX_TEXT else None
    texts = [_as_text(side) for side in sides]
    if texts[0] is None or texts[1] is None:
        yield f"{shown[0]} and {shown[1]} differ; they are no text, larger than 1 MiB, or changed here meanwhile\n"
        return
    yield from unified((shown[0], shown[1]), texts[0], texts[1])


def _as_text(data: bytes | None) -> str | None:
    try:
        return None if data is None or b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None
