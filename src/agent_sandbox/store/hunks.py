"""The text that differs between two versions of a path, as ``diff -u`` and git show it.

Both sides are read whole and compared in Python, so there is a bound: files of at most 1 MiB, which holds source files
and excludes what nobody reads line by line. Larger ones, and content that is not text (a NUL, or not UTF-8), are told
in one line, as diff does for binary files.

``difflib`` finds the lines that stay, but needs minutes for ten thousand lines of which many are the same, and a
sandbox chooses what is in its files. So lines that occur once on each side are matched first (the longest run of them
that ascends on both, as in Bram Cohen's patience diff), difflib compares what is between them, and where its work would
be too much, that part is shown as removed and added whole: a correct difference, though not the shortest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher

from agent_sandbox.store import walk
from agent_sandbox.store.diff import Change, ChangeKind, content
from agent_sandbox.store.objects import Entry, Type
from agent_sandbox.store.ports import Objects

MAX_TEXT = 1 << 20
"""Bytes of each side that are compared line by line."""
WORK = 20_000_000
"""Steps of difflib in one file, estimated: a few seconds in the worst case."""
_NO_NEWLINE = "\\ No newline at end of file\n"
_ESCAPES = {7: "\\a", 8: "\\b", 9: "\\t", 10: "\\n", 11: "\\v", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}

Opcode = tuple[str, int, int, int, int]
"""As difflib has them: what to do, and start and end on both sides."""


def hunks(objects: Objects, change: Change, context: int = 3) -> Iterator[str]:
    """Yield the lines of a unified difference, each with its newline; ``patch -p1`` and ``git apply`` take them.

    Nothing comes for directories, FIFOs, and where only metadata changed. A symlink's text is its target. A path that
    changed its type is shown as removed, then as added. Names that need it are quoted as git quotes them.
    """
    if change.kind is ChangeKind.TYPE:
        yield from _file(objects, change.path, change.old, None, context)
        yield from _file(objects, change.path, None, change.new, context)
    else:
        yield from _file(objects, change.path, change.old, change.new, context)


def _file(objects: Objects, path: bytes, old: Entry | None, new: Entry | None, context: int) -> Iterator[str]:
    old, new = (entry if entry and entry.type in (Type.FILE, Type.SYMLINK) else None for entry in (old, new))
    if (old and content(old)) == (new and content(new)):
        return
    names = quoted(b"a/" + path) if old else "/dev/null", quoted(b"b/" + path) if new else "/dev/null"
    sides = [_text(objects, entry) for entry in (old, new)]
    if None in sides:
        large = any(entry is not None and entry.size > MAX_TEXT for entry in (old, new))
        yield f"{'Files larger than 1 MiB' if large else 'Binary files'} {names[0]} and {names[1]} differ\n"
        return
    yield from unified(names, sides[0] or "", sides[1] or "", context)


def unified(names: tuple[str, str], old: str, new: str, context: int = 3) -> Iterator[str]:
    """Yield the lines of a unified difference of two texts, each with its newline; nothing where they are the same."""
    before, after = _lines(old), _lines(new)
    first = True
    for group in _grouped(opcodes(before, after), context):
        if first:
            yield f"--- {names[0]}\n"
            yield f"+++ {names[1]}\n"
            first = False
        yield from _hunk(group, before, after)


def quoted(name: bytes) -> str:
    """Return a name as git shows it: in quotes with escapes where it is not printable UTF-8 without quotes."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        text = ""
    if text and text.isprintable() and not set(text) & set('"\\'):
        return text
    return '"' + "".join(_ESCAPES.get(b) or (chr(b) if 32 <= b < 127 else f"\\{b:03o}") for b in name) + '"'


def _text(objects: Objects, entry: Entry | None) -> str | None:
    """The text of a file or symlink ("" for None), or None where it is too large or no text."""
    if entry is None:
        return ""
    if entry.size > MAX_TEXT:
        return None
    data = entry.target if entry.type is Type.SYMLINK else b"".join(walk.data(objects, entry))
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


def _lines(text: str) -> list[str]:
    """The lines with their newlines; only "\\n" ends one."""
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


# ---- what stays ----------------------------------------------------------------------------------------------------


def opcodes(before: list[str], after: list[str]) -> list[Opcode]:
    """Return how to make ``after`` of ``before``: covering both, in order, no two of the same kind in a row."""
    out: list[Opcode] = []
    work = WORK
    i = j = 0
    for next_i, next_j in [*_anchors(before, after), (len(before), len(after))]:
        work -= _between(before, after, (i, next_i, j, next_j), work, out)
        if next_i < len(before):
            _add(out, "equal", next_i, next_i + 1, next_j, next_j + 1)
        i, j = next_i + 1, next_j + 1
    return out


def _anchors(before: list[str], after: list[str]) -> list[tuple[int, int]]:
    """The longest ascending run of lines that occur once on each side, after the common front and before the end."""
    counts = Counter(before), Counter(after)
    where = {line: j for j, line in enumerate(after) if counts[1][line] == 1}
    pairs = [(i, where[line]) for i, line in enumerate(before) if counts[0][line] == 1 and line in where]
    tails: list[int] = []
    ends: list[int] = []
    previous: list[int] = []
    for number, (_, j) in enumerate(pairs):
        place = bisect_left(tails, j)
        previous.append(ends[place - 1] if place else -1)
        tails[place : place + 1] = [j]
        ends[place : place + 1] = [number]
    chain: list[tuple[int, int]] = []
    at = ends[-1] if ends else -1
    while at >= 0:
        chain.append(pairs[at])
        at = previous[at]
    return chain[::-1]


def _between(before: list[str], after: list[str], span: tuple[int, int, int, int], work: int, out: list[Opcode]) -> int:
    """Compare what lies between two anchors; returns the work that it took."""
    i, i_end, j, j_end = span
    head = 0
    while i + head < i_end and j + head < j_end and before[i + head] == after[j + head]:
        head += 1
    _add(out, "equal", i, i + head, j, j + head)
    i, j, tail = i + head, j + head, 0
    while i < i_end - tail and j < j_end - tail and before[i_end - tail - 1] == after[j_end - tail - 1]:
        tail += 1
    left, right = before[i : i_end - tail], after[j : j_end - tail]
    counts = Counter(right)
    needed = min(len(left), len(right)) * (len(left) + sum(counts[line] for line in left))
    if needed <= work:
        for tag, a, a_end, b, b_end in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
            _add(out, tag, i + a, i + a_end, j + b, j + b_end)
    else:
        needed = 0
        _add(out, "replace", i, i_end - tail, j, j_end - tail)
    _add(out, "equal", i_end - tail, i_end, j_end - tail, j_end)
    return needed


def _add(out: list[Opcode], tag: str, i: int, i_end: int, j: int, j_end: int) -> None:
    """Add a part, joined with the one before where both are equal lines, or both are changes."""
    if i == i_end and j == j_end:
        return
    if out and (out[-1][0] == "equal") == (tag == "equal"):
        _, i, _, j, _ = out.pop()
    if tag != "equal":
        tag = "insert" if i == i_end else "delete" if j == j_end else "replace"
    out.append((tag, i, i_end, j, j_end))


# ---- how it is shown -----------------------------------------------------------------------------------------------


def _grouped(codes: list[Opcode], context: int) -> Iterator[list[Opcode]]:
    """Groups of changes with the lines around them; difflib's own grouping, over our opcodes."""
    if not any(tag != "equal" for tag, *_ in codes):
        return
    matcher = SequenceMatcher(None, "", "")
    matcher.opcodes = codes  # type: ignore[attr-defined]
    yield from matcher.get_grouped_opcodes(context)


def _hunk(group: list[Opcode], before: list[str], after: list[str]) -> Iterator[str]:
    first, last = group[0], group[-1]
    yield f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@\n"
    for tag, i, i_end, j, j_end in group:
        if tag == "equal":
            yield from _marked(" ", before[i:i_end])
        else:
            yield from _marked("-", before[i:i_end])
            yield from _marked("+", after[j:j_end])


def _range(start: int, end: int) -> str:
    """As POSIX ``diff -u`` writes it: an empty range names the line before it, a range of one line no length."""
    length = end - start
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"


def _marked(mark: str, lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield mark + line if line.endswith("\n") else f"{mark}{line}\n"
        if not line.endswith("\n"):
            yield _NO_NEWLINE
