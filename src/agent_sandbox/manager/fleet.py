"""The sandboxes of this server: found again at start, watched, and removed when their time is over.

At start, for each backend (one that is down is tried again on every sweep, its records are kept meanwhile):

* record, its environment is listed: kept; ``running`` as the backend says, so a stopped sandbox keeps its workspace,
  and what a stop that was cut short, or a crash, still holds beside that is freed;
* record, its environment is not listed: the sandbox is gone already, the record is removed, with a line in the log;
* record, ``creating`` or ``destroying``: never acknowledged, or ended on purpose; both are removed;
* record that cannot be read: left alone, with every environment whose id begins with the sandbox's;
* environment without a record: an orphan (of a rollback, or a removal cut short), destroyed.

Before the first call is served, a sandbox whose time ended meanwhile is asked for running commands, which may keep it
(see ``entries.py``).

An unreadable record counts against MAX_SANDBOXES, because something lives behind it; a caller can still destroy it by
its id.

Removal runs in tracked tasks, never in the caller's: a caller who goes away does not stop it, :meth:`Fleet.close`
waits for it, and what fails is tried again on the next sweep.

The file is long because start, sweep and removal share one picture of what lives; parted, each would need the others'.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TypeVar

from agent_sandbox.backends.base import Backend
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, LimitExceededError, NotFoundError, SandboxError, UnsupportedError
from agent_sandbox.manager.checkpoints import Checkpoints
from agent_sandbox.manager.entries import HOLD_SECONDS, Entry, stopped
from agent_sandbox.manager.parking import Parking
from agent_sandbox.manager.records import SandboxRecord, SnapshotRecord
from agent_sandbox.manager.snapshots import SnapshotFiles
from agent_sandbox.manager.state import DataLock, StateStore, StoredSandbox, prepare_data_dir
from agent_sandbox.manager.tasks import Tasks, uninterrupted
from agent_sandbox.manager.workspaces import Workspaces

log = logging.getLogger(__name__)

_T = TypeVar("_T")

# Backend calls of upkeep at once: enough to hide their latency, too few to starve the callers'.
_AT_ONCE = 8
_CLOSE_SECONDS = 30.0
# How long a guest may take to list its commands when its time is over: one that stalls is not kept by them.
_ASK_SECONDS = 5.0
# How long the removal of an environment may take to make room on a full disk; a large disk image goes in half a second.
_ROOM_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8)


class Fleet:
    """Everything that lives, and the upkeep of it. One per DATA_DIR, which its lock sees to."""

    def __init__(self, settings: Settings, backends: Mapping[str, Backend], clock: Callable[[], float]) -> None:
        if not backends:
            raise ValueError("a manager needs at least one backend")
        self.settings = settings
        self.backends = dict(backends)
        self.default = next(iter(self.backends))
        self.clock = clock
        self.state = StateStore(settings.data_dir / "state.db")
        self.files = SnapshotFiles(settings.data_dir / "snapshots")
        self.checkpoints = Checkpoints(settings.data_dir / "checkpoints")
        self.workspaces = Workspaces(settings.data_dir, settings.checkout_cache_mb << 20, self._layers_in_use)
        self.tasks = Tasks()
        self.parking = Parking(
            settings,
            self.state,
            self.workspaces,
            self.tasks,
            backend=self.backend,
            retire=self.retire,
            clock=clock,
        )
        self.entries: dict[str, Entry] = {}
        self.unreadable: dict[str, StoredSandbox] = {}
        self._lock = DataLock(settings.data_dir / "lock")
        self._down: dict[str, str] = {}
        self._started: set[str] = set()
        self._orphans: dict[str, str] = {}
        self._removing: set[str] = set()
        self._upkeep = asyncio.Semaphore(_AT_ONCE)
        self._taking_over = asyncio.Lock()
        self._sweeper: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Open the state, start the backends, and put records and environments in accord.

        :class:`ConflictError` when another server has the DATA_DIR or a newer one wrote it; :class:`BackendError`
        when no backend can start: one that is down does not stop the others.
        """
        await asyncio.to_thread(prepare_data_dir, self.settings.data_dir)
        await asyncio.to_thread(self._lock.acquire)
        try:
            await self.state.open()
            in_store = {item.id for item in await self.state.list_snapshots(None) if item.commit is not None}
            await self.files.start(await self.state.snapshot_ids() - in_store)
            await self.checkpoints.start(await self.state.snapshot_ids())
            for row in await self.state.load_sandboxes():
                if row.record is None:
                    self.unreadable[row.id] = row
                else:
                    entry = self.entries[row.id] = Entry(row.record, row.environments, self.clock)
                    entry.mark("restart")
                    entry.asked = False
            self._down = dict.fromkeys(self.backends, "it has not been started")
            for name in self.backends:
                try:
                    await self._bring_up(name)
                except SandboxError as error:
                    if len(self.backends) == 1:
                        raise
                    self._down[name] = error.message
                    log.warning("backend %s is down: %s", name, error)
            if len(self._down) == len(self.backends):
                raise BackendError(f"no backend is up; {self.default}: {self._down[self.default]}")
            await self._start_workspaces()
        except BaseException:
            self.tasks.cancel()
            await self.tasks.settle(_CLOSE_SECONDS)
            await self._let_go()
            raise
        self._sweeper = asyncio.create_task(self._sweep_for_ever(), name="sweep")
        self.tasks.spawn(self._take_over_files(), "take snapshots over into the store")

    async def close(self) -> None:
        """End what is under way and let go of everything; sandboxes and their commands keep running."""
        self._closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        for entry in self.entries.values():
            entry.shut()
        if not await self.tasks.settle(_CLOSE_SECONDS):
            log.warning("some removals did not end in time; the next start goes on with them")
            self.tasks.cancel()
            await self.tasks.settle(_CLOSE_SECONDS)
        await self._let_go()

    def _require_open(self) -> None:
        if self._closing:
            raise BackendError("the server is shutting down")

    async def settle(self) -> None:
        """Wait until no removal is under way in the background."""
        await self.tasks.settle()

    @property
    def down(self) -> Collection[str]:
        """The backends that have not come up yet. One that came up and fails later says so on every call."""
        return self._down.keys()

    def backend(self, name: str) -> Backend:
        """Give a backend that is up. :class:`BackendError` says why it is not."""
        if name not in self.backends:
            raise BackendError(f"backend {name!r} is not configured in this server; add it to AGENT_SANDBOX_BACKENDS")
        if name in self._down:
            raise BackendError(f"backend {name!r} is down: {self._down[name]}")
        return self.backends[name]

    def find(self, id: str) -> Entry:
        """Give a sandbox that is not gone for its callers. :class:`NotFoundError`."""
        self._require_open()
        entry = self.entries.get(id)
        if entry is None or entry.expired:
            if id in self.unreadable:
                raise BackendError(
                    f"the record of sandbox {id} cannot be read, so it is left alone; destroying it removes it for good"
                )
            raise NotFoundError(f"sandbox {id} does not exist, or no longer does")
        return entry

    def usable(self, id: str) -> tuple[Entry, Backend]:
        """Give a sandbox in which commands and files work, with its backend. No await, no database: the hot path."""
        entry = self.find(id)
        entry.require("use")
        backend = self.backend(entry.record.backend)
        if not entry.record.running:
            raise stopped(id)
        return entry, backend

    async def observe(self, entry: Entry) -> None:
        """Ask the backend whether the environment runs; where it does not answer, what was known stays."""
        record = entry.record
        if entry.state not in {"running", "rolling_back"}:
            return
        try:
            is_running = await self.backend(record.backend).is_running(record.env_id)
        except SandboxError as error:
            log.warning("sandbox %s: %s", record.id, error)
            return
        if entry.state in {"running", "rolling_back"} and entry.record.env_id == record.env_id:
            entry.record = dataclasses.replace(entry.record, running=is_running)

    async def look(self, entry: Entry) -> None:
        """Bring a record up to date for who reads it: whether it runs, and when it expires."""
        await self.observe(entry)
        try:
            await self.hold(entry)
        except SandboxError as error:
            log.warning("sandbox %s: %s", entry.record.id, error)

    async def look_at_all(self, entries: Iterable[Entry]) -> None:
        """:meth:`look` at many, a few at once."""
        await self._each(list(entries), self.look)

    # Commands that keep a sandbox

    def begin_command(self, entry: Entry, seconds: float) -> object:
        """Count a command of this process, which ends within ``seconds``."""
        token = object()
        entry.attached[token] = self.clock() + seconds
        return token

    def end_command(self, entry: Entry, token: object) -> None:
        """Count it no more. Where it alone kept the sandbox, its results can still be read for a while."""
        if entry.due and entry.busy and entry.state in {"running", "rolling_back"} and not entry.closing:
            self.tasks.spawn(entry.renew(self.state, expires_at=self._held(entry)), f"hold {entry.record.id}")
        entry.attached.pop(token, None)

    async def hold(self, entry: Entry) -> None:
        """Move the expiry of a sandbox that lives on because of a command, so that ``expires_at`` is true."""
        if entry.due and entry.busy and entry.state in {"running", "rolling_back"}:
            await uninterrupted(entry.renew(self.state, expires_at=self._held(entry)))

    def _held(self, entry: Entry) -> float:
        return min(entry.record.latest_at, self.clock() + HOLD_SECONDS)

    async def learn(self, entry: Entry) -> None:
        """Learn which commands go on in an environment that was restored: they keep it as if they began here."""
        entry.kept.clear()
        entry.asked = False
        await self._ask(entry)

    async def _ask(self, entry: Entry) -> None:
        """Learn from the daemon which kept commands run; where it does not say, what was known stays."""
        before, record, backend = set(entry.kept), entry.record, self.backends[entry.record.backend]
        if not backend.capabilities.guest or not record.running:
            entry.kept.clear()
            entry.asked = True
            return
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                listed = await backend.list_execs(record.env_id)
        except (SandboxError, TimeoutError) as error:
            log.warning("sandbox %s does not say which commands run: %s", record.id, error)
            return
        running = {status.id for status in listed if status.running}
        for id in before - running:
            entry.kept.pop(id, None)
        for id in running:
            entry.kept.setdefault(id, record.latest_at)
        entry.asked = True

    async def _tend(self, entry: Entry) -> None:
        """What a sweep does for a sandbox whose time is over, or soon: keep it by its commands, or end it."""
        try:
            if entry.state in {"running", "rolling_back"} and (entry.kept or not entry.asked):
                await self._ask(entry)
            await self.hold(entry)
        except SandboxError as error:
            log.warning("sandbox %s: %s", entry.record.id, error)
        if not entry.gone and (entry.expired or entry.state == "destroying"):
            self.begin_destroy(entry, in_turn=True)

    # Quota

    async def make_room(self) -> None:
        """Where the quota or the disk is used up, remove expired sandboxes now instead of on the next sweep.

        :class:`LimitExceededError` when the disk still has less free than its floor.
        """
        if self._is_full() or await self._free_mb() < self.settings.min_free_mb:
            expired = [entry for entry in self.entries.values() if entry.expired]
            await asyncio.gather(*(asyncio.shield(self.begin_destroy(e)) for e in expired), return_exceptions=True)
        floor, free = self.settings.min_free_mb, await self._free_mb()
        if free < floor:
            raise LimitExceededError(
                f"the server's disk has {free} MiB free and keeps {floor} (AGENT_SANDBOX_MIN_FREE_MB) for what runs; "
                "remove snapshots, images or sandboxes, or use a larger disk for AGENT_SANDBOX_DATA_DIR",
                details={"free_mb": free, "min_free_mb": floor},
            )

    async def _free_mb(self) -> int:
        state = await asyncio.to_thread(os.statvfs, self.settings.data_dir)
        return state.f_bavail * state.f_frsize >> 20

    def reserve(self, record: SandboxRecord) -> Entry:
        """Take a place for a new sandbox. :class:`LimitExceededError`. No await between the check and the place."""
        self._require_open()
        if self._is_full():
            limit = self.settings.max_sandboxes
            raise LimitExceededError(
                f"there are {limit} sandboxes already, which is AGENT_SANDBOX_MAX_SANDBOXES; destroy one"
            )
        entry = Entry(record, 1, self.clock)
        self.entries[record.id] = entry
        return entry

    def _is_full(self) -> bool:
        return len(self.entries) + len(self.unreadable) >= self.settings.max_sandboxes

    # Removal

    def begin_destroy(self, entry: Entry, *, in_turn: bool = False) -> asyncio.Task[None]:
        """Start the destruction of a sandbox, or give the one under way. Await it shielded.

        ``in_turn`` is for upkeep: a few at once.
        """
        if entry.destruction is None or entry.destruction.done():
            entry.doom()
            entry.destruction = self.tasks.spawn(self._destroy(entry, in_turn), f"destroy {entry.record.id}")
        return entry.destruction

    async def _destroy(self, entry: Entry, in_turn: bool) -> None:
        if in_turn:
            async with self._upkeep:
                await self._destroy(entry, False)
            return
        try:
            async with entry.lock:
                await self._destroy_locked(entry)
        except SandboxError as error:
            log.warning("destroying sandbox %s, to be tried again: %s", entry.record.id, error)
            raise

    async def _destroy_locked(self, entry: Entry) -> None:
        try:
            # So that a crash in the middle is not taken for a sandbox that stopped. Without it, less is lost than by
            # refusing to destroy because the disk is full.
            await entry.commit(self.state, "destroy")
        except SandboxError as error:
            log.warning("sandbox %s: %s", entry.record.id, error)
        await self.parking.end(entry)
        await self.backend(entry.record.backend).destroy(entry.record.env_id)
        await self.retired(entry)
        await self._forget(entry)
        entry.mark("removed")
        del self.entries[entry.record.id]
        await self.workspaces.gone(entry.record.env_id)

    async def _forget(self, entry: Entry) -> None:
        # On a full disk the row goes as soon as the environment's files have, which is in the background.
        for pause in _ROOM_PAUSES_SECONDS:
            try:
                return await entry.forget(self.state)
            except LimitExceededError:
                await asyncio.sleep(pause)
        return await entry.forget(self.state)

    def retire(self, entry: Entry, env_id: str) -> None:
        """Destroy an environment that is not the sandbox's any more, or never became it, in the background."""
        self._orphans[env_id] = entry.record.backend
        task = self.tasks.spawn(self._remove_orphan(env_id), f"destroy {env_id}")
        entry.retiring.add(task)
        task.add_done_callback(entry.retiring.discard)

    async def retired(self, entry: Entry) -> None:
        """Wait for what :meth:`retire` started."""
        if entry.retiring:
            await asyncio.wait(set(entry.retiring))

    async def _remove_orphan(self, env_id: str) -> None:
        name = self._orphans.get(env_id)
        if name is None or env_id in self._removing:  # it was in the list of an earlier sweep too
            return
        self._removing.add(env_id)
        try:
            await self.backend(name).destroy(env_id)
            await self.workspaces.gone(env_id)
            del self._orphans[env_id]
        except SandboxError as error:
            log.warning("destroying environment %s, to be tried again: %s", env_id, error)
        finally:
            self._removing.discard(env_id)

    async def remove_unreadable(self, id: str) -> None:
        """Destroy what is behind a record that cannot be read, then the record, because its owner asked for it."""
        row = self.unreadable[id]
        backend = self.backend(row.backend)
        gone = [env_id for env_id in await backend.list_ids() if _belongs(env_id, row)]
        for env_id in gone:
            await backend.destroy(env_id)
        await self.state.delete_sandbox(id)
        self.unreadable.pop(id, None)
        await self._clear(gone)

    async def _clear(self, environments: Iterable[str]) -> None:
        """Let go of what was kept for sandboxes whose rows went without :meth:`begin_destroy`."""
        for env_id in environments:
            await self.workspaces.gone(env_id)
        await self.parking.sweep({*self.entries, *self.unreadable})

    # Start and sweep

    async def _bring_up(self, name: str) -> None:
        backend = self.backends[name]
        self._started.add(name)
        await backend.start()
        listed = set(await backend.list_ids())
        del self._down[name]
        gone: set[str] = set()
        for entry in [entry for entry in self.entries.values() if entry.record.backend == name]:
            if entry.state == "destroying":
                self.begin_destroy(entry, in_turn=True)
            elif entry.record.env_id not in listed:
                log.warning("sandbox %s is gone: its environment was removed while no server ran", entry.record.id)
                await self.state.delete_sandbox(entry.record.id)
                del self.entries[entry.record.id]
                gone |= {entry.record.env_id, entry.record.parked or entry.record.env_id} - listed
        if gone and self.workspaces.is_open:  # else opening them sees to that
            await self._clear(gone)
        mine = [entry for entry in self.entries.values() if entry.record.backend == name]
        await self._each([entry for entry in mine if entry.state == "running"], self._find_again)
        for entry in mine:
            if entry.record.parked is not None and entry.record.parked not in listed:
                entry.record = dataclasses.replace(entry.record, parked=None)  # it was kept, and removed
        if self.workspaces.is_open:
            self._keep_parked(mine)
        mapped = {id for entry in self.entries.values() for id in (entry.record.env_id, entry.record.parked)}
        for env_id in sorted(listed - mapped):
            if any(_belongs(env_id, row) for row in self.unreadable.values()):
                log.warning("environment %s is left alone: its record cannot be read", env_id)
                continue
            log.warning("environment %s has no record; destroying it", env_id)
            self._orphans[env_id] = name
        self._start_removals()

    async def _start_workspaces(self) -> None:
        environments = {row.env_id for row in self.unreadable.values()}
        for entry in self.entries.values():
            environments |= {entry.record.env_id, entry.record.parked or entry.record.env_id}
        await self.workspaces.start(await self.state.snapshot_ids(), environments, set(self.unreadable))
        await self.parking.sweep({*self.entries, *self.unreadable})
        for entry in self.entries.values():
            if entry.record.commit is None and entry.record.source_snapshot_id is not None:
                await self._find_beginning(entry)
            if entry.record.commit is not None and entry.record.commit_bytes is not None:
                self.workspaces.know(entry.record.commit, entry.record.commit_bytes)
        self._keep_parked(entry for entry in self.entries.values() if entry.record.backend not in self._down)

    async def _find_beginning(self, entry: Entry) -> None:
        """Note what a sandbox of an earlier version began with, which did not write it down."""
        try:
            snapshot = await self.state.get_snapshot(entry.record.source_snapshot_id or "")
            if snapshot.commit is not None:
                await self.workspaces.stand(entry.record.env_id, snapshot.commit)
                entry.record = dataclasses.replace(
                    entry.record, commit=snapshot.commit, commit_bytes=snapshot.size_bytes
                )
        except NotFoundError:
            return  # deleted since: its next snapshot begins a history anew
        except SandboxError as error:
            log.warning("sandbox %s: %s", entry.record.id, error)

    def _keep_parked(self, entries: Iterable[Entry]) -> None:
        """Go on with automatic snapshots that a server which ended did not finish."""
        for entry in entries:
            if entry.record.parked is not None and entry.state == "running" and entry.parking is None:
                self.parking.begin(entry)

    async def _take_over_files(self) -> None:
        """Bring snapshots that an earlier version kept as files into the store, one by one."""
        for snapshot in await self.state.list_snapshots(None):
            try:
                await self.in_store(snapshot.id)
            except NotFoundError:
                continue  # deleted meanwhile
            except SandboxError as error:
                log.warning("snapshot %s stays a file: %s", snapshot.id, error)

    async def in_store(self, snapshot_id: str) -> SnapshotRecord:
        """Give a snapshot with its state in the store, where one that is a file is brought now.

        :class:`NotFoundError`; :class:`BackendError` when the file is damaged or missing: it stays as it is.
        """
        snapshot = await self.state.get_snapshot(snapshot_id)
        if snapshot.commit is not None:
            return snapshot
        async with self._taking_over:
            snapshot = await self.state.get_snapshot(snapshot_id)
            if snapshot.commit is None:
                snapshot = await uninterrupted(self._take_over(snapshot))
        return snapshot

    async def _take_over(self, snapshot: SnapshotRecord) -> SnapshotRecord:
        try:
            commit = await self.workspaces.adopt(snapshot.id, self.files.path(snapshot.id), snapshot.digest)
        except SandboxError:
            await self.state.get_snapshot(snapshot.id)  # says so when it was deleted a moment ago
            raise
        taken = dataclasses.replace(snapshot, commit=commit, digest="")
        if not await self.state.replace_snapshot(taken):
            await self.workspaces.drop(snapshot.id)
            raise NotFoundError(f"snapshot {snapshot.id} was deleted meanwhile")
        await self.files.delete(snapshot.id)
        return taken

    async def _layers_in_use(self) -> set[str]:
        used = {entry.record.backend for entry in self.entries.values()}
        used |= {row.backend for row in self.unreadable.values()}
        if unknown := sorted(used - set(self.backends)):
            raise BackendError(f"there are sandboxes of backend {unknown[0]!r}, which is not configured any more")
        found: set[str] = set()
        for name, backend in self.backends.items():
            if name in self._down:
                raise BackendError(f"backend {name!r} is down: {self._down[name]}")
            if backend.capabilities.layered_workspace:
                found |= await backend.layers_in_use()
        return found

    async def _find_again(self, entry: Entry) -> None:
        entry.record = dataclasses.replace(entry.record, running=True)  # until it says otherwise
        await self.observe(entry)
        if entry.due:
            await self._tend(entry)
        if not entry.record.running:
            self.tasks.spawn(self._free(entry), f"free {entry.record.id}")

    async def _free(self, entry: Entry) -> None:
        """Stop a sandbox that does not run, which frees all but its workspace; it may be stopped already."""
        try:
            async with self._upkeep, entry.exclusive("use"):
                if not entry.record.running:
                    await self.backend(entry.record.backend).stop_environment(entry.record.env_id)
        except UnsupportedError:
            return
        except SandboxError as error:
            if entry.state == "running":
                log.warning("sandbox %s does not run, and what it holds was not freed: %s", entry.record.id, error)

    def _start_removals(self) -> None:
        waiting = [env_id for env_id in self._orphans if env_id not in self._removing]
        if waiting:
            self.tasks.spawn(self._each(waiting, self._remove_orphan), "remove orphans")

    async def _sweep_for_ever(self) -> None:
        while True:
            try:
                await self._sweep()
            except Exception:
                log.exception("a sweep failed; the next one goes on")
            await asyncio.sleep(self.settings.reap_interval_seconds)

    async def _sweep(self) -> None:
        for name in list(self._down):
            try:
                await self._bring_up(name)
            except SandboxError as error:
                self._down[name] = error.message
        soon = self.clock() + 2 * self.settings.reap_interval_seconds
        waiting = []
        for entry in self.entries.values():
            if entry.record.backend not in self.backends or entry.record.backend in self._down:
                continue
            if entry.due or entry.state == "destroying" or (not entry.asked and entry.record.expires_at < soon):
                waiting.append(entry)
        await self._each(waiting, self._tend)
        self._start_removals()
        await self.workspaces.tidy()

    async def _each(self, items: Iterable[_T], work: Callable[[_T], Awaitable[None]]) -> None:
        """Do ``work`` for many, ``_AT_ONCE`` at once. ``work`` raises nothing but cancellation."""
        queue = iter(items)

        async def worker() -> None:
            for item in queue:
                await work(item)

        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(worker())

    async def _let_go(self) -> None:
        for name in sorted(self._started):  # what was never started may be another server's
            try:
                await self.backends[name].close()
            except SandboxError as error:
                log.warning("closing backend %s: %s", name, error)
        await self.workspaces.close()
        await self.checkpoints.close()
        await self.state.close()
        await asyncio.to_thread(self._lock.release)


def _belongs(env_id: str, row: StoredSandbox) -> bool:
    return env_id == row.env_id or env_id.rpartition("-")[0] == row.id
