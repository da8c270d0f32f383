"""Random histories of workspaces: write, snapshot, change, roll back, fork, stop; whole trees compared from inside.

Most over overlays; a third as many, and at least one, on workspaces that are copied.
``HISTORIES`` (3) is how many, ``HISTORIES_SEED`` (1) where they begin; ``make test-histories`` runs 500.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from agent_sandbox.client import Sandbox, SnapshotInfo
from tests.e2e.serving import Served, serving

pytestmark = pytest.mark.real

HISTORIES = int(os.environ.get("HISTORIES", "3"))
SEED = int(os.environ.get("HISTORIES_SEED", "1"))
STEPS = 10

EDIT = r"""
import os, random, sys
random.seed(int(sys.argv[1])); os.chdir('/workspace')
def paths(want):
    found = []
    for place, names, files in os.walk('.'):
        for name in (names if want == 'd' else files):
            path = os.path.join(place, name)
            if want == 'd' or os.path.isfile(path) and not os.path.islink(path): found.append(path)
    return sorted(found)
def pick(want): return random.choice(paths(want) or [None])
def fresh():
    return os.path.join(random.choice(['.', *paths('d')]), random.choice('abcdefgh') + str(random.randrange(9)))
def data(): return random.randbytes(random.choice([0, 1, 900, 70_000, 140_000, 300_000]))
def edit():
    what = random.randrange(15)
    path, file, directory = fresh(), pick('f'), pick('d')
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path): os.unlink(path)  # open(2) waits
    if what <= 2:
        with open(path, 'wb') as out: out.write(data())
    elif what == 3: os.makedirs(path)
    elif what == 4 and file: os.link(file, path)
    elif what == 5: os.symlink(random.choice(['a1', '../x', '/etc/passwd']), path)
    elif what == 6 and file:
        with open(file, 'r+b') as out: out.seek(random.randrange(os.path.getsize(file) + 1)); out.write(b'changed')
    elif what == 7 and directory: os.rename(directory, path)
    elif what == 8 and file: os.rename(file, path)
    elif what == 9 and file: os.unlink(file)
    elif what == 10 and directory:
        import shutil; shutil.rmtree(directory)
    elif what == 11 and file: os.chmod(file, random.choice([0o600, 0o755, 0o4711, 0o444]))
    elif what == 12 and file: os.setxattr(file, 'user.' + random.choice('ab'), random.randbytes(9))
    elif what == 13:
        with open(path, 'wb') as out: out.truncate(2_000_000); out.seek(1_000_000); out.write(b'island')
    elif what == 14: os.mkfifo(path)
for _ in range(12):
    try: edit()
    except OSError: pass
"""

STATE = r"""
import hashlib, json, os, stat
os.chdir('/workspace')
found, inodes = {}, {}
def look(path):
    s = os.lstat(path)
    entry = [stat.S_IFMT(s.st_mode), stat.S_IMODE(s.st_mode), s.st_mtime_ns, s.st_uid]
    if stat.S_ISLNK(s.st_mode): entry.append(os.readlink(path))
    elif stat.S_ISREG(s.st_mode):
        with open(path, 'rb') as file: entry += [s.st_size, hashlib.sha256(file.read()).hexdigest()]
        names = [name for name in sorted(os.listxattr(path)) if name.startswith('user.')]
        entry += [[name, os.getxattr(path, name).hex()] for name in names]
        entry.append(inodes.setdefault(s.st_ino, path))
    found[path] = entry
look('.')
for place, names, files in sorted(os.walk('.')):
    for name in sorted(names + files): look(os.path.join(place, name))
print(json.dumps(found, sort_keys=True))
"""


@pytest.fixture(scope="module", params=["overlay", "copy"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("histories") / "data", workspaces=request.param) as server:
        yield server


def state(sandbox: Sandbox) -> Any:
    done = sandbox.exec(["python3", "-c", STATE])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(120 + 20 * HISTORIES)
def test_random_histories(served: Served, request: pytest.FixtureRequest) -> None:
    copied = request.node.callspec.params["served"] == "copy"
    with served.client() as client:
        for number in range(SEED, SEED + (max(1, HISTORIES // 3) if copied else HISTORIES)):
            rng = random.Random(number)
            boxes = [client.create(disk_mb=64)]
            kept: list[tuple[SnapshotInfo, Any]] = []
            try:
                for _ in range(STEPS):
                    box = rng.choice(boxes)
                    match rng.choice(["edit", "edit", "snapshot", "snapshot", "rollback", "fork", "restart", "delete"]):
                        case "edit":
                            done = box.exec(["python3", "-c", EDIT, str(rng.randrange(1 << 30))])
                            assert done.exit_code == 0, done.stderr
                        case "snapshot":
                            before = state(box)
                            kept.append((box.snapshot(), before))
                            assert state(box) == before, f"history {number}: a snapshot changed the workspace"
                        case "rollback" if kept:
                            snapshot, expected = rng.choice(kept)
                            box.rollback(snapshot)
                            assert state(box) == expected, f"history {number}: another state after a rollback"
                        case "fork" if kept and len(boxes) < 4:
                            snapshot, expected = rng.choice(kept)
                            boxes.append(client.fork(snapshot))
                            assert state(boxes[-1]) == expected, f"history {number}: another state in a fork"
                        case "restart":
                            before = state(box)
                            box.stop()
                            box.start()
                            assert state(box) == before, f"history {number}: another state after a restart"
                        case "delete" if len(kept) > 1:
                            client.delete_snapshot(kept.pop(rng.randrange(len(kept)))[0])
                for snapshot, expected in kept:
                    boxes[0].rollback(snapshot)
                    assert state(boxes[0]) == expected, f"history {number}: another state at the end"
            finally:
                for box in boxes:
                    box.destroy()
                for snapshot, _ in kept:
                    client.delete_snapshot(snapshot)
