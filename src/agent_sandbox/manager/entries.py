"""The living sandboxes in memory: one entry each, with what keeps its calls in order.

Who waits for whom
------------------
* Creation, rollback, snapshot, stop, start and destruction hold ``lock``, one at a time.
* Destruction does not wait for the others: it marks the state, cancels the task in ``operation``, and takes the lock
  when that has cleaned up. So a guest that stalls its own export cannot keep itself alive.
* Renewal holds no lock: its decision is one step of the event loop. ``renewing`` keeps the entry from expiring until
  the new deadline is on the disk, so the caller and the sweep never both win.
* ``writing`` orders the writes of the record; each starts from what the one before left.
* ``gate`` keeps writes through the API out while a snapshot, rollback or stop is under way.

Commands and the time to live
-----------------------------
A command that runs within its own timeout keeps its sandbox from expiring, until ``latest_at`` of the record. Those of
this process are counted in ``attached``; those that are kept in the sandbox in ``kept``, which the fleet compares with
what the daemon says once the time is over. ``asked`` is false for a sandbox that was found again and not asked yet.
``expires_at`` is moved on the disk by :meth:`fleet.Fleet.hold`.

Everything lives in the entry, so it is gone with its sandbox.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from agent_sandbox.errors import BackendError, ConflictError, NotFoundError, SandboxError
from agent_sandbox.manager.lifecycle import Event, State, advance
from agent_sandbox.manager.records import SandboxRecord
from agent_sandbox.manager.state import StateStore
from agent_sandbox.manager.tasks import Gate

HOLD_SECONDS = 30.0
"""How far a running command moves the expiry at a time: also what is left to read its results once it has ended."""


class Life(NamedTuple):
    """What a call relies on: the environment, and that it was not stopped meanwhile."""

    env_id: str
    stops: int


def stopped(id: str) -> ConflictError:
    """Say that a sandbox is stopped, with the remedy."""
    return ConflictError(
        f"sandbox {id} is stopped and keeps its workspace; start it: agent-sandbox start {id}, or POST"
        f" /v1/sandboxes/{id}/start"
    )


class Entry:
    """One sandbox: its record, the last environment number used, and its locks."""

    def __init__(self, record: SandboxRecord, environments: int, clock: Callable[[], float]) -> None:
        self.record = record
        self.environments = environments
        self.gone = False
        self.closing = False
        self.lock = asyncio.Lock()
        self.gate = Gate()
        self.operation: asyncio.Task[Any] | None = None
        self.destruction: asyncio.Task[None] | None = None
        self.retiring: set[asyncio.Task[None]] = set()
        self.parking: asyncio.Task[None] | None = None
        self.attached: dict[object, float] = {}
        self.kept: dict[str, float] = {}
        self.asked = True
        self.stops = 0
        self._writing = asyncio.Lock()
        self._renewing = 0
        self._clock = clock

    @property
    def state(self) -> State:
        """Its state in the lifecycle's table."""
        return "gone" if self.gone else self.record.state

    @property
    def life(self) -> Life:
        """What a call that begins now relies on."""
        return Life(self.record.env_id, self.stops)

    @property
    def due(self) -> bool:
        """Whether ``expires_at`` has passed. One that is being created, or renewed at this moment, has time."""
        return self.record.state != "creating" and not self._renewing and self._clock() >= self.record.expires_at

    @property
    def busy(self) -> bool:
        """Whether a command keeps it from expiring."""
        now = self._clock()
        return now < self.record.latest_at and any(
            end > now for ends in (self.attached, self.kept) for end in ends.values()
        )

    @property
    def expired(self) -> bool:
        """Whether its time is over and no command keeps it."""
        return self.due and not self.busy

    def require(self, event: Event) -> None:
        """Raise what a caller is told where ``event`` is not allowed; an expired sandbox is gone."""
        if self.expired:
            raise NotFoundError(f"sandbox {self.record.id} has expired")
        if self.closing:
            raise BackendError("the server is shutting down")
        advance(self.state, event, self.record.id)

    def shut(self) -> None:
        """End the operation under way, because the server shuts down."""
        self.closing = True
        if self.operation is not None:
            self.operation.cancel()

    def doom(self) -> None:
        """Mark it as being destroyed and end the operation under way."""
        self.mark("destroy", running=False)
        if self.operation is not None:
            self.operation.cancel()

    def mark(self, event: Event, **changes: Any) -> None:
        """Take an edge of the table in memory alone."""
        state = advance(self.state, event, self.record.id)
        if state == "gone":
            self.gone = True
        else:
            self.record = dataclasses.replace(self.record, state=state, **changes)

    async def commit(self, store: StateStore, event: Event, **changes: Any) -> None:
        """Take an edge on the disk, then in memory. Run it under :func:`tasks.uninterrupted`.

        When the sandbox was doomed meanwhile, the changes stay, the state does not, and where the table has it so, the
        caller is told.
        """
        async with self._writing:
            state = advance(self.state, event, self.record.id)
            assert state != "gone"
            await store.put_sandbox(dataclasses.replace(self.record, state=state, **changes), self.environments)
            self.record = dataclasses.replace(self.record, **changes)
            self.mark(event)

    def renew(self, store: StateStore, **times: float) -> Coroutine[Any, Any, None]:
        """Decide on a renewal now; give its write, to be run at once under :func:`tasks.uninterrupted`."""
        self.require("use")
        self._renewing += 1
        return self._renew(store, times)

    async def _renew(self, store: StateStore, times: dict[str, float]) -> None:
        try:
            await self.commit(store, "use", **times)
        finally:
            self._renewing -= 1

    async def unpark(self, store: StateStore, env_id: str) -> None:
        """Let go of a parked environment, unless another one took its place. Run it as :meth:`commit`."""
        async with self._writing:
            if self.record.parked == env_id:
                await store.put_sandbox(dataclasses.replace(self.record, parked=None), self.environments)
                self.record = dataclasses.replace(self.record, parked=None)

    async def forget(self, store: StateStore) -> None:
        """Remove the row, after every write that is under way."""
        async with self._writing:
            await store.delete_sandbox(self.record.id)

    @asynccontextmanager
    async def exclusive(self, event: Event) -> AsyncIterator[None]:
        """Hold the lock for one lifecycle operation, which destruction and shutdown may cancel."""
        async with self.lock:
            self.require(event)
            self.operation = asyncio.current_task()
            try:
                yield
            except asyncio.CancelledError:
                if self.closing:
                    raise BackendError("the server is shutting down") from None
                if (ended := self.ended(self.life)) is not None:
                    raise ended from None
                raise
            finally:
                self.operation = None

    def ended(self, life: Life) -> SandboxError | None:
        """Say why what ran in a life ended with it, or ``None`` while that is the sandbox's."""
        if self.gone or self.record.state == "destroying":
            why = "has expired" if self.expired else "was destroyed"
            return NotFoundError(f"sandbox {self.record.id} {why} meanwhile")
        if self.record.env_id != life.env_id:
            return ConflictError(f"sandbox {self.record.id} was rolled back meanwhile, which ends what runs in it")
        if self.stops != life.stops:
            return ConflictError(f"sandbox {self.record.id} was stopped meanwhile, which ends what runs in it")
        return None
