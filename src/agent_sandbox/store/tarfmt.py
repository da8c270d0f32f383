"""The blocks and records of a tar archive, both ways; nothing here does I/O.

Sources: IEEE Std 1003.1-2017, ``pax``; the GNU tar manual, "Sparse Formats" and "Basic Tar Format" (numbers in base
256, attribute names with ``%25`` and ``%3D``). ``crates/sandboxd/src/tarfmt.rs`` is the same for the guest's side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agent_sandbox.errors import InvalidRequestError

BLOCK = 512
MAX_EXTENDED = 4 << 20
"""The most bytes of a pax header or GNU long name. The attributes of one entry (1 MiB) with the longest path fit."""

FILE, HARD_LINK, SYMLINK, DIRECTORY, FIFO, EXTENDED = b"0", b"1", b"2", b"5", b"6", b"x"

_MAGIC = b"ustar\x0000"
_XATTR = b"SCHILY.xattr."
_EXTENDED_NAME = b"././@PaxHeader"
_MAX_OCTAL = 0o77777777777
_MAX_OWNER_OCTAL = 0o7777777
_SECOND = 1_000_000_000
_INT64 = 1 << 63


def padding(size: int) -> int:
    """Return how many bytes fill up the last block."""
    return -size % BLOCK


def malformed(what: str) -> InvalidRequestError:
    """The error for an archive that is not one; ``what`` says what is wrong with it."""
    return InvalidRequestError(f"this is no sound tar archive: {what}")


# ---- numbers and times ---------------------------------------------------------------------------------------------


def number(field: bytes) -> int | None:
    """Return a number of a header, octal or in GNU's base 256; None when it is neither. Empty is 0."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big", signed=True)
        if not field[0] & 0x40:
            value = int.from_bytes(bytes((field[0] & 0x3F,)) + field[1:], "big")
        return value if -_INT64 <= value < _INT64 else None
    digits = field.lstrip(b" ").split(b"\0", 1)[0].split(b" ", 1)[0]
    if not digits:
        return 0
    if digits.strip(b"01234567"):
        return None
    return int(digits, 8)


def decimal(text: bytes) -> int:
    """Return a whole number of a record, at most 2^63 − 1."""
    if not text.isdigit() or len(text) > 19 or (value := int(text)) >= _INT64:
        raise malformed("a number in a pax header")
    return value


def format_time(mtime_ns: int) -> bytes:
    """Return nanoseconds as the exact decimal of a pax record."""
    seconds, nanoseconds = divmod(abs(mtime_ns), _SECOND)
    text = f"{'-' if mtime_ns < 0 else ''}{seconds}.{nanoseconds:09}"
    return text.rstrip("0").rstrip(".").encode()


def parse_time(text: bytes) -> int:
    """Return the nanoseconds of a pax record; digits beyond them are cut off."""
    whole, _, fraction = text.removeprefix(b"-").partition(b".")
    if not whole.isdigit() or (fraction and not fraction.isdigit()) or len(whole) > 19:
        raise malformed("a time in a pax header")
    mtime_ns = int(whole) * _SECOND + int(fraction[:9].ljust(9, b"0"))
    return check_time(-mtime_ns if text.startswith(b"-") else mtime_ns)


def check_time(mtime_ns: int) -> int:
    """Return a time whose seconds fit 64 bits, as the kernel has them; any other is an error."""
    if not -_INT64 <= mtime_ns // _SECOND < _INT64:
        raise malformed("a time that no file can have")
    return mtime_ns


# ---- records of a pax header ---------------------------------------------------------------------------------------


def record(key: bytes, value: bytes) -> bytes:
    """Return one record; its length counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + 1
    while length != rest + len(str(length)):
        length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def parse_records(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a pax header in order."""
    at = 0
    while at < len(body):
        space = body.find(b" ", at, at + 12)
        digits = body[at : max(space, at)]
        end = at + int(digits) if digits.isdigit() else 0
        equals = body.find(b"=", space + 1, end)
        if not 0 <= space < equals < end <= len(body) or body[end - 1] != 0x0A:
            raise malformed("a record in a pax header")
        yield body[space + 1 : equals], body[equals + 1 : end - 1]
        at = end


def xattr_key(name: bytes) -> bytes:
    """Return the keyword of an extended attribute. It may hold no ``=``, which is written as GNU tar does."""
    return _XATTR + name.replace(b"%", b"%25").replace(b"=", b"%3D")


def xattr_name(key: bytes) -> bytes | None:
    """Return the attribute that a keyword stands for, or None when it is of another kind."""
    if not key.startswith(_XATTR):
        return None
    return key[len(_XATTR) :].replace(b"%3D", b"=").replace(b"%25", b"%")


# ---- header blocks -------------------------------------------------------------------------------------------------


def is_header(block: bytes) -> bool:
    """Whether a block has the sum of a header: of its bytes with the sum's own field as spaces.

    Old archivers summed signed bytes.
    """
    said = number(block[148:156])
    others = block[:148] + b" " * 8 + block[156:]
    unsigned = sum(others)
    return said == unsigned or (not others.isascii() and said == unsigned - 256 * sum(byte >> 7 for byte in others))


def _octal(value: int, width: int) -> bytes:
    return b"%0*o\0" % (width - 1, value)


def _text(value: bytes, width: int) -> bytes:
    """What does not fit is in a record; readers without records see a shortened name."""
    plain = value[:width] if value.isascii() else bytes(byte if byte < 0x80 else 0x5F for byte in value[:width])
    return plain.ljust(width, b"\0")


def block(
    kind: bytes, name: bytes, link: bytes, mode: int, owner: tuple[int, int], size: int, mtime_ns: int = 0
) -> bytes:
    """Return one header block; a number that does not fit is 0 there, and the caller writes a record for it."""
    seconds = mtime_ns // _SECOND
    head = b"".join((
        _text(name, 100),
        _octal(mode, 8),
        *(_octal(id if id <= _MAX_OWNER_OCTAL else 0, 8) for id in owner),
        _octal(size if size <= _MAX_OCTAL else 0, 12),
        _octal(seconds if 0 <= seconds <= _MAX_OCTAL else 0, 12),
        b" " * 8,
        kind,
        _text(link, 100),
        _MAGIC,
        bytes(64),
        _octal(0, 8),
        _octal(0, 8),
    )).ljust(BLOCK, b"\0")  # fmt: skip
    return head[:148] + b"%06o\0 " % sum(head) + head[156:]


def header(
    kind: bytes,
    name: bytes,
    link: bytes,
    mode: int,
    owner: tuple[int, int],
    size: int,
    mtime_ns: int,
    records: Iterable[tuple[bytes, bytes]] = (),
) -> bytes:
    """Return an entry's blocks before its data.

    A pax header is among them where something does not fit the plain one or ``records`` has more to say.
    """
    extended: list[tuple[bytes, bytes]] = []
    for key, value in ((b"path", name), (b"linkpath", link)):
        if len(value) > 100 or not value.isascii():
            extended.append((key, value))
    if size > _MAX_OCTAL:
        extended.append((b"size", b"%d" % size))
    if mtime_ns % _SECOND or not 0 <= mtime_ns // _SECOND <= _MAX_OCTAL:
        extended.append((b"mtime", format_time(mtime_ns)))
    for key, id in ((b"uid", owner[0]), (b"gid", owner[1])):
        if id > _MAX_OWNER_OCTAL:
            extended.append((key, b"%d" % id))
    extended += records
    blocks = b""
    if extended:
        if any(key in (b"path", b"linkpath", b"GNU.sparse.name") and not _is_utf8(value) for key, value in extended):
            extended.insert(0, (b"hdrcharset", b"BINARY"))
        body = b"".join(record(key, value) for key, value in extended)
        blocks = block(EXTENDED, _EXTENDED_NAME, b"", 0o644, (0, 0), len(body)) + body + bytes(padding(len(body)))
    return blocks + block(kind, name, link, mode, owner, size, mtime_ns)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
