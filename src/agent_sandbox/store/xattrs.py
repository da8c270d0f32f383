"""Extended attributes: the ``user.*`` ones of a file or directory (xattr(7)); no other namespace is read or kept."""

from __future__ import annotations

import errno
import os

from agent_sandbox.store.encoding import block
from agent_sandbox.store.objects import MAX_CANONICAL, Kind

_ABSENT = (errno.ENOTSUP, errno.ENOSYS)
_NAMESPACE = b"user."


class TooLargeError(Exception):
    """They are more than one object can hold."""


def read(file: int) -> list[tuple[bytes, bytes]]:
    """Return the ``user.*`` attributes of an open file or directory, sorted by name.

    Raises :class:`TooLargeError` above what an ``attrs`` object holds, before all of them are in memory, and
    :class:`OSError`; a file system without attributes has none.
    """
    try:
        names = sorted(os.fsencode(name) for name in os.listxattr(file))
    except OSError as error:
        if error.errno in _ABSENT:
            return []
        raise
    attributes, size = [], 0
    for name in names:
        if name.startswith(_NAMESPACE) and name != _NAMESPACE:
            value = os.getxattr(file, name)
            size += len(block(name)) + len(block(value))
            if size > MAX_CANONICAL[Kind.ATTRS]:
                raise TooLargeError
            attributes.append((name, value))
    return attributes
