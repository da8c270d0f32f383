"""Waiting that a cancellation does not cut short.

Work on a thread and the removal of half-made things go on whether or not somebody waits for them. To act as if they
had stopped would let the next step run beside them; so these wait for the end, and let the cancellation through then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def settled(future: asyncio.Future[T], hurry: Callable[[], object] | None = None) -> T:
    """The result of ``future``, which runs to its end before a cancellation goes on; ``hurry`` may bring that near."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if hurry is not None:
            hurry()
        await ended(future)
        if not future.cancelled():
            future.exception()
        raise


async def ended(future: asyncio.Future[T]) -> None:
    """Wait until ``future`` is done, whatever its result and however often this is cancelled meanwhile."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
