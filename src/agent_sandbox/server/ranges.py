"""The ``Range`` header for one range of bytes (RFC 9110, section 14). Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.exceptions import HTTPException

_RANGE = re.compile(r"bytes[ \t]*=[ \t]*([0-9]{0,19})-([0-9]{0,19})[ \t]*\Z", re.IGNORECASE | re.ASCII)


class NotSatisfiable(HTTPException):
    """The range begins behind the end of the file, whose size ``Content-Range`` tells."""

    def __init__(self, size: int) -> None:
        super().__init__(416, f"the file has {size} bytes", {"Content-Range": f"bytes */{size}"})


@dataclass(frozen=True)
class Range:
    """From ``first`` to ``last`` (the end where it is ``None``), or the last ``last`` bytes where ``first`` is."""

    first: int | None
    last: int | None

    def of(self, size: int) -> tuple[int, int]:
        """Give the first byte and the length within a file of ``size``. Raises :class:`NotSatisfiable`."""
        if self.first is None:
            assert self.last is not None
            start, end = max(0, size - self.last), size
        else:
            start, end = self.first, size if self.last is None else min(size, self.last + 1)
        if start >= end:
            raise NotSatisfiable(size)
        return start, end - start


def parse_range(header: str) -> Range | None:
    """Read the header; ``None`` for several ranges, another unit or nonsense, which are to be ignored as if absent."""
    found = _RANGE.match(header.strip())
    if found is None or not (found[1] or found[2]):
        return None
    first, last = (int(text) if text else None for text in found.groups())
    if first is not None and last is not None and last < first:
        return None
    return Range(first, last)
