"""Any calls, in any order, several at once, failing, cancelled or cut off by a crash: what was promised holds.

Hypothesis draws batches. The calls of a batch run at once on the real manager over the fake backend; after some turns
of the event loop the batch is awaited, cancelled, or the server crashes and another one starts. Then the model is
compared:

* the backend holds exactly the environments of the records, memory exactly the sandboxes that are listed;
* what was acknowledged is there, with its deadline and content, and what was acknowledged as gone is not;
* what failed or was cancelled left nothing; a crash may leave a finished sandbox or snapshot whose reply was lost;
* a sandbox is stopped only where that was asked for, and starts again with its content;
* every snapshot has its file and every file its snapshot;
* the quota holds, and refuses only where it must.

Where calls of one batch touch the same sandbox, the model holds every value that some order allows, and learns which
it was. A batch of one call that is awaited leaves no room: it must succeed, with exactly its effect.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agent_sandbox.errors import BackendError, LimitExceededError, NotFoundError, SandboxError
from agent_sandbox.manager import CreateOptions, ForkOptions, SandboxRecord, SnapshotRecord
from agent_sandbox.manager.entries import HOLD_SECONDS
from tests.unit.manager_harness import Server, kept_states, make_settings

MEMORY = Path("/dev/shm")
QUOTA = 4
NOTHING: bytes | None = None
"""The content of a workspace without the file."""


@dataclass
class Sandbox:
    """What may be true of one acknowledged sandbox."""

    contents: set[bytes | None]
    deadlines: set[float]
    may_be_gone: bool = False


@dataclass(frozen=True)
class Call:
    """One call to make: on the ``one``-th sandbox and the ``two``-th snapshot, counted round."""

    kind: Literal[
        "create",
        "fork",
        "destroy",
        "write",
        "snapshot",
        "rollback",
        "delete",
        "renew",
        "exec",
        "stop",
        "start",
        "pass time",
    ]
    one: int = 0
    two: int = 0
    number: int = 0


@dataclass
class Made:
    """A call under way, with the ids it was made on."""

    call: Call
    task: asyncio.Task[Any]
    sandbox: str | None = None
    snapshot: str | None = None
    deadline: float = 0.0
    outcome: Any = field(default=None)


CALLS = st.builds(
    Call,
    kind=st.sampled_from(
        [
            "create",
            "create",
            "fork",
            "destroy",
            "write",
            "snapshot",
            "rollback",
            "rollback",
            "delete",
            "renew",
            "exec",
            "stop",
            "start",
            "pass time",
        ]
    ),
    one=st.integers(0, QUOTA - 1),
    two=st.integers(0, 5),
    number=st.integers(1, 100),
)
FAILURES = st.sampled_from(
    ["create", "destroy", "import_workspace", "export_workspace", "stop_environment", "start_environment"]
)


class Lifecycle(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # In memory where that is possible: thousands of syncs on a busy disk are minutes, and no power fails here.
        self.directory = Path(tempfile.mkdtemp(prefix="lifecycle-", dir=MEMORY if MEMORY.is_dir() else None))
        self.runner = asyncio.Runner()
        self.sandboxes: dict[str, Sandbox] = {}
        self.snapshots: dict[str, set[bytes | None]] = {}
        self.deleted: set[str | None] = set()
        self.may_have_stopped = False
        self.server: Server

    @initialize()
    def begin(self) -> None:
        async def start() -> None:
            self.server = Server(make_settings(self.directory / "data", max_sandboxes=QUOTA))
            await self.server.start()

        self.runner.run(start())

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.runner.run(self.server.end())
        self.runner.close()
        shutil.rmtree(self.directory)

    @rule(call=CALLS)
    def alone(self, call: Call) -> None:
        self.runner.run(self.batch([call], "await", 0, []))

    @rule(
        calls=st.lists(CALLS, min_size=1, max_size=5),
        end=st.sampled_from(["await", "cancel", "crash"]),
        turns=st.integers(0, 60),
        failures=st.lists(FAILURES, max_size=2),
    )
    def together(
        self, calls: list[Call], end: Literal["await", "cancel", "crash"], turns: int, failures: list[str]
    ) -> None:
        self.runner.run(self.batch(calls, end, turns, failures))

    @rule()
    def restart(self) -> None:
        self.runner.run(self.server.restart())

    @rule()
    def close_and_start(self) -> None:
        async def again() -> None:
            await self.server.manager.close()
            await self.server.start()

        self.runner.run(again())

    # -- a batch ---------------------------------------------------------------------------------------------

    async def batch(self, calls: list[Call], end: str, turns: int, failures: list[str]) -> None:
        server = self.server
        for method in failures:
            server.fake.failures.setdefault(method, []).append(BackendError("injected"))
        self.times = [server.clock.now]
        living = len(self.sandboxes)
        made = [self.make(call) for call in calls]
        for turn in range(turns):
            # Real time now and then: replies of the threads come with it.
            await asyncio.sleep(0.0005 if turn % 8 == 7 else 0)
        if end == "cancel":
            for one in made:
                one.task.cancel()
        elif end == "crash":
            await server.crash()
        await asyncio.wait([one.task for one in made])
        server.fake.failures.clear()
        for one in made:
            one.outcome = self.outcome(one, may_be_cancelled=end != "await")
        if end == "crash":
            await server.start()
        await server.manager.settle()
        await server.manager._fleet._sweep()
        await server.manager.settle()
        self.may_have_stopped = any(one.call.kind == "stop" for one in made)
        self.expect(made, is_certain=len(calls) == 1 and end == "await" and not failures)
        if end == "await" and not failures and len(calls) == 1 and isinstance(made[0].outcome, LimitExceededError):
            assert living >= QUOTA
        await self.compare(is_crash=end == "crash")

    def make(self, call: Call) -> Made:
        manager = self.server.manager
        ids, snapshots = list(self.sandboxes), list(self.snapshots)
        id = ids[call.one % len(ids)] if ids else "sb0000000000000000"
        snapshot = snapshots[call.two % len(snapshots)] if snapshots else "snap0000000000000000"
        work: Coroutine[Any, Any, Any]
        deadline = self.server.clock.now + call.number
        match call.kind:
            case "create":
                work, id = manager.create(CreateOptions(timeout_seconds=call.number)), ""
            case "fork":
                work, id = manager.fork(snapshot, ForkOptions(timeout_seconds=call.number)), ""
            case "destroy":
                work = manager.destroy(id)
            case "write":
                work = manager.write_file(id, "x", b"%d" % call.number, 0o644)
            case "snapshot":
                work = manager.snapshot(id)
            case "rollback":
                work = manager.rollback(id, snapshot)
            case "delete":
                work = manager.delete_snapshot(snapshot)
            case "renew":
                work = manager.set_timeout(id, call.number)
            case "exec":
                work = manager.exec(id, "echo ok")
            case "stop":
                work = manager.stop(id)
            case "start":
                work = manager.start_sandbox(id)
            case "pass time":
                work = self.pass_time(call.number / 10)
        return Made(call, asyncio.create_task(work), id or None, snapshot, deadline)

    async def pass_time(self, seconds: float) -> None:
        self.server.clock.now += seconds
        self.times.append(self.server.clock.now)
        await self.server.manager._fleet._sweep()

    def outcome(self, made: Made, *, may_be_cancelled: bool) -> Any:
        if made.task.cancelled():
            assert may_be_cancelled
            return asyncio.CancelledError()
        error = made.task.exception()
        assert error is None or isinstance(error, SandboxError), error
        return error or made.task.result()

    # -- the model ---------------------------------------------------------------------------------------------

    def expect(self, made: list[Made], *, is_certain: bool) -> None:
        if is_certain:
            self.expect_one(made[0])
            return
        written: dict[str, set[bytes | None]] = {id: set(s.contents) for id, s in self.sandboxes.items()}
        for one in made:  # every order: contents first, since snapshots and rollbacks read them
            if one.call.kind == "write" and one.sandbox in written:
                written[one.sandbox].add(b"%d" % one.call.number)
            elif one.call.kind == "rollback" and one.sandbox in written:
                written[one.sandbox] |= self.snapshots.get(one.snapshot or "", set())
        for id, sandbox in self.sandboxes.items():
            renewals = [one for one in made if one.call.kind == "renew" and one.sandbox == id]
            told = [one.outcome.expires_at for one in renewals if isinstance(one.outcome, SandboxRecord)]
            if len(renewals) == 1 and told:
                sandbox.deadlines = set(told)
            else:
                sandbox.deadlines |= {time + one.call.number for one in renewals for time in self.times}
            if any(one.call.kind == "exec" and one.sandbox == id for one in made):
                sandbox.deadlines |= {time + HOLD_SECONDS for time in self.times}
            sandbox.contents = written[id]
            sandbox.may_be_gone |= any(one.call.kind == "destroy" and one.sandbox == id for one in made)
        for one in made:
            if isinstance(one.outcome, SnapshotRecord):
                self.snapshots[one.outcome.id] = written[one.outcome.sandbox_id]
        for one in made:
            if one.call.kind == "fork" and isinstance(one.outcome, SandboxRecord):
                self.add(one.outcome, self.snapshots[one.snapshot or ""])
            elif one.call.kind == "create" and isinstance(one.outcome, SandboxRecord):
                self.add(one.outcome, {NOTHING})
            elif one.call.kind == "destroy" and one.outcome is None:
                self.sandboxes.pop(one.sandbox or "", None)
        self.deleted = {one.snapshot for one in made if one.call.kind == "delete"}
        for one in made:
            if one.call.kind == "delete" and one.outcome is None:
                self.snapshots.pop(one.snapshot or "", None)

    def expect_one(self, made: Made) -> None:
        """A call alone, awaited, without a failure: it succeeds where it can, and its effect is known."""
        self.deleted = set()
        call, outcome = made.call, made.outcome
        has_sandbox, has_snapshot = made.sandbox in self.sandboxes, made.snapshot in self.snapshots
        needs = {
            "create": len(self.sandboxes) < QUOTA,
            "fork": has_snapshot and len(self.sandboxes) < QUOTA,
            "rollback": has_sandbox and has_snapshot,
            "delete": has_snapshot,
            "pass time": True,
        }
        assert isinstance(outcome, SandboxError) != needs.get(call.kind, has_sandbox), outcome
        if isinstance(outcome, SandboxError):
            is_full = len(self.sandboxes) >= QUOTA and (call.kind == "create" or (call.kind == "fork" and has_snapshot))
            assert isinstance(outcome, LimitExceededError if is_full else NotFoundError)
            return
        sandbox = self.sandboxes.get(made.sandbox or "", Sandbox(set(), set()))
        match call.kind:
            case "create":
                self.add(outcome, {NOTHING})
            case "fork":
                self.add(outcome, self.snapshots[made.snapshot or ""])
            case "destroy":
                del self.sandboxes[made.sandbox or ""]
            case "write":
                sandbox.contents = {b"%d" % call.number}
            case "snapshot":
                self.snapshots[outcome.id] = set(sandbox.contents)
            case "rollback":
                sandbox.contents = set(self.snapshots[made.snapshot or ""])
            case "delete":
                del self.snapshots[made.snapshot or ""]
            case "renew":
                sandbox.deadlines = {made.deadline}
                assert outcome.expires_at == made.deadline
            case "stop" | "start":
                assert outcome.running is (call.kind == "start")
            case "exec":
                assert outcome.stdout == b"ok\n"

    def add(self, record: SandboxRecord, contents: set[bytes | None]) -> None:
        self.sandboxes.setdefault(record.id, Sandbox(set(contents), {record.expires_at}))

    async def compare(self, *, is_crash: bool) -> None:
        server, manager, now = self.server, self.server.manager, self.server.clock.now
        listed = {record.id: record for record in await manager.list_sandboxes()}
        assert set(manager._fleet.entries) == set(listed)
        assert sorted(await server.fake.list_ids()) == sorted(record.env_id for record in listed.values())
        assert len(listed) <= QUOTA
        for id, sandbox in list(self.sandboxes.items()):
            if id not in listed:
                assert sandbox.may_be_gone or min(sandbox.deadlines) <= now, (id, sandbox)
                del self.sandboxes[id]
        for id, record in listed.items():
            if not record.running:
                assert self.may_have_stopped
                record = await manager.start_sandbox(id)
            assert (record.state, record.running) == ("running", True)
            actual = await self.content(id)
            if id not in self.sandboxes:
                assert is_crash, id  # ready, but the reply was lost with the server
                self.sandboxes[id] = Sandbox({actual}, {record.expires_at})
            known = self.sandboxes[id]
            assert actual in known.contents
            assert record.expires_at in known.deadlines
            assert record.expires_at > now
            self.sandboxes[id] = Sandbox({actual}, {record.expires_at})
        stored = {record.id: record for record in await manager.list_snapshots()}
        assert kept_states(server.settings) == set(stored)
        for id in list(self.snapshots):
            if id not in stored:
                assert id in self.deleted, id
                del self.snapshots[id]
        for id in set(stored) - set(self.snapshots):
            await manager.delete_snapshot(id)  # finished, but the caller was not there any more

    async def content(self, id: str) -> bytes | None:
        try:
            return await self.server.manager.read_file(id, "x")
        except NotFoundError:
            return NOTHING

    @invariant()
    def nothing_is_under_way(self) -> None:
        if hasattr(self, "server"):
            fleet = self.server.manager._fleet
            assert (len(fleet.tasks), fleet._orphans, fleet._removing) == (0, {}, set())


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(
    max_examples=30, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
