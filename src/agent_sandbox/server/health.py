"""``GET /healthz``: whether a backend answers. No key, so it must be cheap however often it is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from agent_sandbox import __version__, models
from agent_sandbox.errors import BackendError, SandboxError
from agent_sandbox.server import errors
from agent_sandbox.server.codec import JsonReply

PING_SECONDS = 5.0
"""How long a backend may take to answer: longer than a busy machine needs, shorter than a probe waits."""

FRESH_SECONDS = 1.0
"""How long an answer counts for others who ask: the open route cannot be used to load the backend."""

router = APIRouter(tags=["health"])


class Pulse:
    """Ping at most once at a time, bounded, and remember the outcome for a moment."""

    def __init__(self, ping: Callable[[], Awaitable[str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ping = ping
        self._clock = clock
        self._task: asyncio.Task[SandboxError | str] | None = None
        self._ended = 0.0

    async def check(self) -> SandboxError | str:
        """Give the name of what answers, or what is wrong."""
        if self._task is None or (self._task.done() and self._clock() - self._ended >= FRESH_SECONDS):
            self._task = asyncio.create_task(self._beat())
        return await asyncio.shield(self._task)

    async def _beat(self) -> SandboxError | str:
        try:
            async with asyncio.timeout(PING_SECONDS):
                return await self._ping()
        except SandboxError as error:
            return error
        except TimeoutError:
            return BackendError(f"the backend did not answer within {PING_SECONDS:.0f} s")
        finally:
            self._ended = self._clock()


@router.get("/healthz", response_model=models.Health, responses=errors.documented(403, 503))
async def health(request: Request) -> Response:
    """Report whether a backend of the server answers, and which is the first that does. Needs no key."""
    outcome = await request.app.state.pulse.check()
    if isinstance(outcome, SandboxError):
        return errors.for_error(outcome, status=503)
    return JsonReply(models.Health(status="ok", backend=outcome, version=__version__))
