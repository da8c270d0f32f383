"""One client: draws requests, makes them, and notes what was acknowledged and what a kill left open.

Every request that changes something is made under :meth:`Worker.asking`, which holds what is to be done when its reply
is lost. After the next start that is called (``aftermath.py``), and finds out what happened.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.kills import aftermath
from tests.kills.api import Api, Lost, Refused, Stuck
from tests.kills.expected import LOOK, Box, Program, Snap, Workspace, digest, files_of
from tests.kills.gun import Gun

OPS: Mapping[str, float] = {
    "create": 2,
    "brief": 0.7,
    "write": 5,
    "read": 2,
    "exec": 4,
    "detach": 3,
    "attach": 2,
    "follow": 3,
    "snapshot": 3,
    "rollback": 1.5,
    "fork": 1.5,
    "timeout": 1,
    "stop": 1,
    "start": 2,
    "delete": 1,
    "drop": 1,
}
"""What a worker does, and how often."""

MOST_BOXES = 3
MOST_BRIEF = 3
MOST_SNAPS = 5
MOST_PROGRAMS = 6
LIMITS = {"cpus": 1, "memory_mb": 128, "pids_limit": 64, "disk_mb": 128}
SECONDS = (3_000, 9_000)
"""Times to live: longer than a run, so that only those of ``brief`` end in it."""
SIZES = (0, 10, 5_000, 5_000, 5_000, 200_000, 1_000_000)


class Worker:
    """One client thread's world."""

    def __init__(self, number: int, seed: int, ops: Mapping[str, float]) -> None:
        self.number = number
        self.rng = random.Random(f"{seed} worker {number}")
        self.boxes: list[Box] = []
        self.snaps: list[Snap] = []
        self.gone: list[str] = []
        self.pending: Callable[[], None] | None = None
        self.findings: list[str] = []
        self.done: Counter[str] = Counter()
        self.made_twice = 0
        self.outlived = 0
        self.undone = 0
        self.api: Api
        self._ops = ops
        self._gun: Gun | None = None
        self._labels = 0

    # What the campaign calls

    def load(self, gun: Gun) -> None:
        """Work until the server is killed."""
        self._gun = gun
        before = 0
        while not gun.fired.is_set():
            wanted = gun.plan.how != "moment" and gun.plan.worker == self.number and before >= gun.plan.warm
            try:
                self.step(gun.plan.op if wanted else None)
            except Lost as error:
                if not gun.fired.wait(5):
                    self.find(f"a connection broke while the server ran: {error}")
                break
            before += 1
        self._gun = None

    def find(self, text: str) -> None:
        """Note something that is wrong."""
        self.findings.append(text)

    def expect(self, holds: bool, text: str) -> None:
        """Note ``text`` unless it holds."""
        if not holds:
            self.find(text)

    # The choice

    def step(self, wanted: str | None) -> None:
        """Do one thing: what is wanted where that is possible, or what makes it possible."""
        op = wanted or self.rng.choices(list(self._ops), list(self._ops.values()))[0]
        op = self._possible(op)
        box = None
        try:
            box = self._pick(op)
            getattr(self, f"_{op}")(box)
            self.done[op] += 1
        except (Refused, Stuck) as error:
            self.pending = None
            self.find(f"{op} of {box.id if box else 'nothing'} failed: {error}")
            if box is not None:
                self.abandon(box)

    def _possible(self, op: str) -> str:
        steady = [box for box in self.boxes if not box.is_brief]
        running = [box for box in steady if not box.is_stopped]
        if op in ("create", "fork") and len(steady) >= MOST_BOXES:
            return "delete"
        if op == "brief" and len(self.boxes) - len(steady) >= MOST_BRIEF:
            return self._possible("write")
        if op in ("create", "brief"):
            return op
        if op == "snapshot" and len(self.snaps) >= MOST_SNAPS:
            return "drop"
        if op in ("fork", "drop", "rollback") and not self.snaps:
            return self._possible("snapshot")
        if op in ("fork", "drop"):
            return op
        if not steady:
            return "create"
        if op == "start" and len(running) == len(steady):
            return "stop"
        if op in ("timeout", "delete", "start"):
            return op
        if not running:
            return "start"
        if op == "follow" and not any(box.programs for box in running):
            return "detach"
        if op == "detach" and all(len(box.programs) >= MOST_PROGRAMS for box in running):
            return "follow"
        return op

    def _pick(self, op: str) -> Box | None:
        if op in ("create", "brief", "fork", "drop"):
            return None
        boxes = [box for box in self.boxes if not box.is_brief]
        if op == "start":
            boxes = [box for box in boxes if box.is_stopped]
        elif op not in ("timeout", "delete"):
            boxes = [box for box in boxes if not box.is_stopped]
        if op == "follow":
            boxes = [box for box in boxes if box.programs]
        elif op == "detach":
            boxes = [box for box in boxes if len(box.programs) < MOST_PROGRAMS]
        return self.rng.choice(boxes)

    @contextmanager
    def asking(self, op: str, when_lost: Callable[[], None]) -> Iterator[None]:
        """Make one request; ``when_lost`` finds out what became of it."""
        self.pending = when_lost
        if self._gun is not None:
            self._gun.sent(self.number, op)
        yield
        self.answered(op)
        self.pending = None

    def answered(self, op: str) -> None:
        """The server said that it did it."""
        if self._gun is not None:
            self._gun.replied(self.number, op)

    def label(self, op: str) -> str:
        """A name of which there is one in the whole run."""
        self._labels += 1
        return f"{op}-{self.number}-{self._labels}"

    # Sandboxes

    def _create(self, _: Box | None) -> None:
        self.make("create", "/v1/sandboxes", self.rng.randint(*SECONDS), Box(self.label("create"), Workspace()))

    def _brief(self, _: Box | None) -> None:
        box = Box(self.label("brief"), Workspace(), is_brief=True)
        self.make("brief", "/v1/sandboxes", self.rng.randint(2, 6), box)

    def _fork(self, _: Box | None) -> None:
        snap = self.rng.choice(self.snaps)
        box = Box(self.label("fork"), snap.workspace(), snap.id)
        self.make("fork", f"/v1/snapshots/{snap.id}/fork", self.rng.randint(*SECONDS), box)

    def make(self, op: str, path: str, seconds: int, box: Box) -> None:
        """Make a sandbox by ``POST path``."""
        body = {"timeout_seconds": seconds, "metadata": {"op": box.label}} | (LIMITS if op != "fork" else {})
        asked = time.time()
        with self.asking(op, lambda: aftermath.made(self, path, body, box, asked)):
            data = self.api.ask("POST", path, body, key=box.label)
        self.adopt(box, data)

    def adopt(self, box: Box, data: Mapping[str, Any]) -> None:
        """Take a sandbox over as the server shows it."""
        box.id, box.expires = data["id"], data["expires_at"]
        self.boxes.append(box)

    def _timeout(self, box: Box) -> None:
        seconds = self.rng.randint(*SECONDS)
        asked = time.time()

        def when_lost() -> None:
            box.until = (asked + seconds - 1, time.time() + seconds + 1)

        with self.asking("timeout", when_lost):
            box.expires = self.api.ask("POST", f"{box.path}/timeout", {"timeout_seconds": seconds})["expires_at"]

    def _stop(self, box: Box) -> None:
        with self.asking("stop", lambda: aftermath.stopped_or_not(self, box)):
            data = self.api.ask("POST", f"{box.path}/stop")
        self.expect(data["status"] == "stopped", f"{box.id} is {data['status']} after a stop")
        box.is_stopped, box.programs = True, []

    def _start(self, box: Box) -> None:
        self.start(box)

    def start(self, box: Box) -> None:
        """Start a stopped sandbox, and compare what it kept."""
        with self.asking("start", lambda: aftermath.stopped_or_not(self, box)):
            data = self.api.ask("POST", f"{box.path}/start")
        self.expect(data["status"] == "running", f"{box.id} is {data['status']} after a start")
        box.is_stopped = False
        self.compare(box)

    def _delete(self, box: Box) -> None:
        self.boxes.remove(box)
        self.gone.append(box.path)
        with self.asking("delete", lambda: self.remove(box.path)):
            self.api.ask("DELETE", box.path)

    def remove(self, path: str) -> None:
        """Delete what may be gone already."""
        try:
            self.api.ask("DELETE", path)
        except Refused as error:
            self.expect(error.status == 404, f"DELETE {path}: {error}")

    def abandon(self, box: Box) -> None:
        """Get rid of a sandbox of which something wrong was found, so that it is not found again."""
        if box in self.boxes:
            self.boxes.remove(box)
        try:
            self.remove(box.path)
        except Stuck as error:
            self.find(f"DELETE {box.path}: {error}")

    # Files and commands

    def look(self, box: Box) -> str:
        """Everything in a workspace, exactly."""
        done = self.api.ask("POST", f"{box.path}/exec", {"command": ["python3", "-c", LOOK]})
        if done["exit_code"] != 0 or done["truncated"]:
            self.find(f"{box.id}: looking at it ended with {done['exit_code']}: {done['stderr'][-300:]}")
        return str(done["stdout"])

    def compare(self, box: Box) -> str:
        """Compare a workspace with what was acknowledged; what was open is known afterwards."""
        tree = self.look(box)
        for text in box.work.settle(files_of(tree)):
            self.find(f"{box.id}: {text}")
        return tree

    def _write(self, box: Box) -> None:
        old = [path for path in box.work.sure if path.startswith("/workspace/w")]
        path = f"/workspace/w{self.rng.randrange(3)}/{self.label('f')}"
        if old and self.rng.random() < 0.4:
            path = self.rng.choice(old)
        data = self.rng.randbytes(self.rng.choice(SIZES))
        with self.asking("write", lambda: box.work.doubt(path, box.work.sure.get(path), digest(data))):
            self.api.ask("PUT", f"{box.path}/files", content=data, params={"path": path})
        box.work.sure[path] = digest(data)

    def _read(self, box: Box) -> None:
        if not box.work.sure:
            return self._write(box)
        path = self.rng.choice(sorted(box.work.sure))
        with self.asking("read", _nothing):
            data = self.api.ask("GET", f"{box.path}/files", params={"path": path})
        self.expect(digest(data) == box.work.sure[path], f"{box.id}: {path} reads otherwise than it was written")
        return None

    def _exec(self, box: Box) -> None:
        name = self.label("e")
        path = f"/workspace/{name}"
        script = 'printf %s "$1" > "$1.new" && mv "$1.new" "$1" && echo "made $1"; exit 3'

        def when_lost() -> None:
            box.work.doubt(path, None, digest(name.encode()), lasting=True)
            box.work.doubt(f"{path}.new", None, digest(b""), digest(name.encode()), lasting=True)

        with self.asking("exec", when_lost):
            done = self.api.ask("POST", f"{box.path}/exec", {"command": ["/bin/sh", "-c", script, "sh", name]})
        box.work.sure[path] = digest(name.encode())
        seen = done["stdout"], done["stderr"], done["exit_code"]
        self.expect(seen == (f"made {name}\n", "", 3), f"{box.id}: a command gave {seen}")

    def _program(self, longest: int) -> Program:
        head = 1_500_000 if self.rng.random() < 0.15 else 0
        return Program(self.label("p"), self.rng.randint(1, longest), 0.1, head, self.rng.choice((0, 1, 7, 255)))

    def _detach(self, box: Box) -> None:
        program = self._program(150)
        body = {"command": program.argv(), "detach": True, "tag": program.tag}
        with self.asking("detach", lambda: aftermath.detached(self, box, program, body)):
            data = self.api.ask("POST", f"{box.path}/execs", body, key=program.tag)
        self.expect(data["pid"] > 0 and data["tag"] == program.tag, f"{box.id}: a detached command is {data}")
        box.programs.append(program.started(data["id"]))

    def _attach(self, box: Box) -> None:
        program, id, events = self._program(8), "", []
        body = {"command": program.argv(), "tag": program.tag}
        with self.asking("attach", lambda: aftermath.attached(self, box, program, id)):
            for event in self.api.lines("POST", f"{box.path}/execs", body):
                events.append(event)
                if event["type"] == "started":
                    id = event["id"]
                    self.answered("attach")
        program = program.started(id)
        for text in program.follow(events):
            self.find(f"{box.id}: {text}")
        self.expect(not any(event["type"] == "gap" for event in events), f"{box.id}: its starter missed output")
        self.expect(program.ended, f"{box.id}: the stream of {id} ended without an exit")
        if len(box.programs) < MOST_PROGRAMS:
            box.programs.append(program)
        else:
            self.api.ask("DELETE", f"{box.path}/execs/{id}")

    def _follow(self, box: Box) -> None:
        program = self.rng.choice(box.programs)
        with self.asking("follow", _nothing):
            self.follow(box, program, program.cursor if self.rng.random() < 0.5 else 0)
        if program.ended and self.rng.random() < 0.5:
            box.programs.remove(program)
            with self.asking("forget", lambda: self.remove(f"{box.path}/execs/{program.id}")):
                self.api.ask("DELETE", f"{box.path}/execs/{program.id}")

    def follow(self, box: Box, program: Program, start: int, *, to_the_end: bool = False) -> None:
        """Read a command's output from a byte on and compare."""
        params = {"cursor": str(start), "follow": "true" if to_the_end else "false"}
        ran = not program.ended
        events = self.api.lines("GET", f"{box.path}/execs/{program.id}/output", params=params)
        for text in program.follow(events, start):
            self.find(f"{box.id}: {text}")
        self.outlived += ran and program.ended and program.has_survived

    # Snapshots

    def _snapshot(self, box: Box) -> None:
        tree, label = self.compare(box), self.label("snapshot")
        with self.asking("snapshot", lambda: aftermath.snapshot(self, box, tree, label)):
            data = self.api.ask("POST", f"{box.path}/snapshots", {"name": label}, key=label)
        self.snaps.append(Snap(data["id"], tree))

    def _rollback(self, box: Box) -> None:
        self._write(box)  # so that before and after always differ
        snap, before = self.rng.choice(self.snaps), box.work.copy()
        if before.sure == snap.workspace().sure:
            return
        with self.asking("rollback", lambda: aftermath.rollback(self, box, snap, before)):
            data = self.api.ask("POST", f"{box.path}/rollback", {"snapshot_id": snap.id})
        self.expect(data["source_snapshot_id"] == snap.id, f"{box.id}: a rollback shows {data}")
        self.rolled_back(box, snap, before)
        if self.rng.random() < 0.3:
            self.expect(self.look(box) == snap.tree, f"{box.id}: a rollback to {snap.id} gave another tree")

    def rolled_back(self, box: Box, snap: Snap, before: Workspace) -> None:
        """Note that a sandbox is a snapshot again, and what it was before."""
        box.work, box.source, box.programs, box.undo = snap.workspace(), snap.id, [], before

    def _drop(self, _: Box | None) -> None:
        snap = self.snaps.pop(self.rng.randrange(len(self.snaps)))
        path = f"/v1/snapshots/{snap.id}"
        self.gone.append(path)
        with self.asking("drop", lambda: self.remove(path)):
            self.api.ask("DELETE", path)


def _nothing() -> None:
    """What a request that changes nothing leaves open."""
