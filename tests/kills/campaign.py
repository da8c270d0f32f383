"""One run: load, kill, start, look; again and again; at the end nothing may be left."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from agent_sandbox.errors import SandboxError
from agent_sandbox.store import Store
from tests.e2e.serving import KEY, Served
from tests.kills import aftermath
from tests.kills.api import Api, Lost, Refused, Stuck
from tests.kills.gun import Gun, Plan
from tests.kills.worker import OPS, Worker
from tests.real.leaks import resources

WORKERS = 4
PHASE_SECONDS = 240.0
"""One phase of all workers: a load ends within seconds, and each call of a check is bounded by itself."""

SETTLE_SECONDS = 30.0
"""Until removals in the background are done."""

SETTINGS = {"max_sandboxes": "60", "reap_interval_seconds": "0.5"}


@contextlib.contextmanager
def target(place: Path, **settings: str) -> Iterator[Served]:
    """A server to be killed, over a directory below ``place``; however a run ends, nothing of it is left."""
    served = Served(place / "data", "runc", **SETTINGS, **settings)
    try:
        yield served
    finally:
        served.stop(signal.SIGKILL)
        if resources(served.data):
            served.start()
            with served.client() as client:
                for sandbox in client.list_sandboxes():
                    with contextlib.suppress(SandboxError):
                        sandbox.destroy()
        served.stop()


class Campaign:
    """A seed's run over a server that is not started yet. ``meddle`` is called between each kill and the next start."""

    def __init__(
        self,
        served: Served,
        seed: int,
        *,
        ops: Mapping[str, float] = OPS,
        say: Callable[[str], None] = print,
        meddle: Callable[[Campaign], None] = lambda campaign: None,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self.served = served
        self.seed = seed
        self.workers = [Worker(number, seed, ops) for number in range(WORKERS)]
        self.findings: list[str] = []
        self.kills = 0
        self._ops = ops
        self._rng = random.Random(f"{seed} kills")
        self._say = say
        self._meddle = meddle
        self._settle_seconds = settle_seconds

    def run(self, kills: int, seconds: float = float("inf"), enough: Callable[[], bool] = lambda: False) -> None:
        """Kill so often, or until the time is over or it is ``enough``; then look at everything and remove it."""
        begun = time.monotonic()
        self.served.start()
        with ThreadPoolExecutor(WORKERS) as pool:
            while self.kills < kills and time.monotonic() - begun < seconds and not enough():
                plan = Plan.draw(self._rng, list(self._ops), WORKERS)
                started = time.monotonic()
                self._load_and_kill(pool, plan)
                self._meddle(self)
                self._start(plan)
                self._each(pool, aftermath.check)
                self._compare_all()
                took = time.monotonic() - started
                boxes = sum(len(worker.boxes) for worker in self.workers)
                snaps = sum(len(worker.snaps) for worker in self.workers)
                programs = sum(len(box.programs) for worker in self.workers for box in worker.boxes)
                self._say(
                    f"kill {self.kills}/{kills}: {plan}; {took:.1f} s; {boxes} sandboxes, {snaps} snapshots, "
                    f"{programs} commands; {len(self.findings)} findings"
                )
            self._each(pool, aftermath.finish)
        self._compare_all()
        self.served.stop()
        self._compare_host()

    def summary(self) -> str:
        """What was done, in a few lines."""
        done: Counter[str] = sum((worker.done for worker in self.workers), Counter())
        twice = sum(worker.made_twice for worker in self.workers)
        outlived = sum(worker.outlived for worker in self.workers)
        did = ", ".join(f"{count} {op}" for op, count in sorted(done.items()))
        return (
            f"seed {self.seed}: {self.kills} kills, {done.total()} requests acknowledged ({did}); {outlived} commands "
            f"read to their end after a kill that they outlived; {twice} made again because their reply had not been "
            f"noted; {len(self.findings)} findings"
        )

    def _load_and_kill(self, pool: ThreadPoolExecutor, plan: Plan) -> None:
        gun = Gun(plan, self.served.pid)
        self._each(pool, lambda worker: worker.load(gun))
        gun.fire()
        gun.put_away()
        self._stop()

    def _stop(self) -> None:
        self.served.stop(signal.SIGKILL)
        self.kills += 1
        data = b"AGENT_SANDBOX_DATA_DIR=" + os.fsencode(self.served.data)
        for text in self._until_right(
            lambda: [f"process {pid} of the server lives on" for pid in _with_variable(data)]
        ):
            self._find(text)

    def _start(self, plan: Plan) -> None:
        if plan.again is not None:
            self.served.spawn()
            time.sleep(plan.again)
            self._stop()
        self.served.start()

    def _each(self, pool: ThreadPoolExecutor, work: Callable[[Worker], None]) -> None:
        """Let every worker do something at once, and gather what they found."""

        def guarded(worker: Worker) -> None:
            worker.api = Api(self.served.url, KEY)
            try:
                work(worker)
            except (Lost, Refused, Stuck) as error:
                worker.find(f"{type(error).__name__} where nothing was killed: {error}")
            finally:
                worker.api.close()

        futures = [pool.submit(guarded, worker) for worker in self.workers]
        late = wait(futures, PHASE_SECONDS).not_done
        for worker in self.workers:
            for text in worker.findings:
                self._find(text, worker.number)
            worker.findings.clear()
        if late:
            self.served.stop(signal.SIGKILL)  # so that nobody waits any longer
            raise AssertionError(f"seed {self.seed}, kill {self.kills}: {len(late)} workers hang")
        for future in futures:
            future.result()

    def _find(self, text: str, worker: int | None = None) -> None:
        where = f"seed {self.seed}, kill {self.kills}" + ("" if worker is None else f", worker {worker}")
        self.findings.append(f"{where}: {text}")
        self._say(f"FINDING {self.findings[-1]}")

    # The whole

    def _compare_all(self) -> None:
        """What the server lists is what the workers know, and the host holds what those need."""
        api = Api(self.served.url, KEY)
        with contextlib.closing(api):
            for text in self._until_right(lambda: list(self._differences(api))):
                self._find(text)

    def _differences(self, api: Api) -> Iterator[str]:
        brief = {box.id for worker in self.workers for box in worker.boxes if box.is_brief}
        steady = {box.id for worker in self.workers for box in worker.boxes} - brief
        listed: dict[str, Any] = {item["id"]: item for item in api.ask("GET", "/v1/sandboxes")["sandboxes"]}
        for id in sorted(steady - set(listed)):
            yield f"{id} is not listed"
        for id in sorted(set(listed) - steady - brief):
            yield f"nobody knows {id}, which is listed: {listed[id]}"
        snaps = {snap.id for worker in self.workers for snap in worker.snaps}
        found = api.ask("GET", "/v1/snapshots", params={"auto": "true"})["snapshots"]
        kept = {item["id"] for item in found if not item["auto"]}
        undo = {item["id"]: item["sandbox_id"] for item in found if item["auto"]}
        for id, count in Counter(undo.values()).items():
            if id not in listed or count > 1:
                yield f"{count} automatic snapshots of {id}, which is {'listed' if id in listed else 'not listed'}"
        if kept != snaps:
            yield f"snapshots {sorted(snaps - kept)} are not listed, and nobody knows {sorted(kept - snaps)}"
        with Store.open(self.served.data / "store") as store:
            pins = {pin.name for pin in store.pins()}
            damages = store.check().damages
        began = {pin for pin in pins if pin.rpartition("-")[0] in listed}
        sources = {id for id, item in listed.items() if item["source_snapshot_id"] is not None}
        if pins - began != {*kept, *undo}:
            yield f"states {sorted(pins - began)} in the store for the snapshots {sorted({*kept, *undo})}"
        if sorted(pin.rpartition("-")[0] for pin in began) != sorted(sources):
            yield f"states {sorted(began)} in the store below the sandboxes {sorted(sources)}"
        for damage in damages:
            yield f"the store is damaged: {damage}"
        yield from self._host_differences(listed, brief)

    def _host_differences(self, listed: Mapping[str, Any], brief: set[str]) -> Iterator[str]:
        held = resources(self.served.data)
        environments = held.get("environments", [])
        owners = Counter(name.rpartition("-")[0] for name in environments)
        for id, count in owners.items():
            if id not in listed or count > 1:
                yield f"{count} environments of {id}, which is {'listed once' if id in listed else 'not listed'}"
        running = {name for name in environments if listed.get(name.rpartition("-")[0], {}).get("status") == "running"}
        for kind in ("mount points", "runtime state"):
            names = {name.removeprefix("asb-") for name in held.get(kind, [])}
            if names != running:
                yield f"{kind} {sorted(names)} for the running environments {sorted(running)}"
        for kind, count in (("loop devices", len(running)), ("id ranges", len(environments))):
            if len(held.get(kind, [])) != count:
                yield f"{len(held.get(kind, []))} {kind} where {count} are needed: {held.get(kind)}"

    def _compare_host(self) -> None:
        """With everything deleted and the server ended, nothing is left."""
        data = self.served.data
        instance = hashlib.sha256(os.fsencode(os.path.realpath(data))).hexdigest()[:12]

        def left() -> list[str]:
            found = [f"left on the host: {kind} {values}" for kind, values in resources(data).items()]
            if Path(f"/run/agent-sandbox/{instance}").exists():
                found.append(f"left on the host: /run/agent-sandbox/{instance}")
            return found

        for text in self._until_right(left):
            self._find(text)

    def _until_right(self, differences: Callable[[], list[str]]) -> list[str]:
        end = time.monotonic() + self._settle_seconds
        while (wrong := differences()) and time.monotonic() < end:
            time.sleep(0.1)
        return wrong


def _with_variable(setting: bytes) -> list[str]:
    """The processes that have this in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if setting in (entry / "environ").read_bytes().split(b"\0"):
                found.append(entry.name)
    return found
