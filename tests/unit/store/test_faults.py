"""Disks that fail under a store: whatever breaks when, it opens, checks clean and holds all that was acknowledged."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent_sandbox.errors import StoreError, StoreFullError
from agent_sandbox.store.check import check
from agent_sandbox.store.gc import collect
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Kind
from agent_sandbox.store.walk import commit
from tests.unit.store.faults import Failing, PowerCut, Powered
from tests.unit.store.handmade import Tree, contents, keep

TEXT = random.Random(1).randbytes(30_000)


@dataclass
class Acknowledged:
    """Branches that were acknowledged, and what is in their states."""

    heads: dict[str, bytes] = field(default_factory=dict)
    states: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict)
    failed: int = 0


def version(number: int) -> Tree:
    return {
        b"text": TEXT[: number * 100] + b"%d" % number + TEXT[number * 100 :],
        b"d": {b"%d" % other: b"file %d" % other for other in range(number, number + 8)},
    }


def flat(tree: Tree) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= {name + b"/" + path: data for path, data in flat(value).items()}
        else:
            assert isinstance(value, bytes)
            found[name] = value
    return found


def work(database: ObjectDatabase, done: Acknowledged) -> None:
    """Commit, give up, remove and collect; what fails is counted and the work goes on."""

    def attempt(number: int, name: str) -> None:
        try:
            head = keep(database, version(number), name)
        except StoreError:
            done.failed += 1
        else:
            done.heads[name] = head
            done.states[head] = flat(version(number))

    def gc() -> None:
        try:
            collect(database, wait_seconds=1)
        except StoreError:
            done.failed += 1

    attempt(0, "gone")
    for number in range(1, 4):
        attempt(number, "main")
    try:
        with database.writer() as writer:
            writer.put(Kind.BLOB, TEXT[::-1])
    except StoreError:
        done.failed += 1
    attempt(4, "other")
    with database.transaction() as change:
        change.remove_ref("p", "gone")
    done.heads.pop("gone", None)
    gc()
    attempt(5, "main")
    with database.transaction() as change:
        change.remove_ref("p", "other")
    done.heads.pop("other", None)
    gc()
    attempt(6, "main")


def hold(database: ObjectDatabase, done: Acknowledged, *, heads: bool = True) -> None:
    """Compare the store with what was acknowledged; without ``heads`` the last operation may have happened or not."""
    report = check(database)
    assert report.damages == ()
    there = {ref.name: ref.head for ref in database.index.refs("p")}
    if heads:
        assert there == done.heads
    for head in done.heads.values():
        assert dict(contents(database, commit(database, head).root)) == done.states[head]
        parents = commit(database, head).parents
        while parents:
            assert dict(contents(database, commit(database, parents[0]).root)) == done.states[parents[0]]
            parents = commit(database, parents[0]).parents


def total_steps(path: Path) -> int:
    """Steps of the work when nothing fails."""
    with ObjectDatabase.create(path):
        pass
    files = Failing(path / "packs")
    with ObjectDatabase.open(path, files=files) as database:
        done = Acknowledged()
        work(database, done)
        assert done.failed == 0
    return files.steps


def every_step(path: Path, first: int, of: int) -> Iterator[int]:
    """Each step at which something may fail, shared between ``of`` tests."""
    steps = total_steps(path / "unbroken")
    assert steps > 40
    yield from range(first, steps + 1, of)


@pytest.mark.parametrize("short", [1, 4_000])
def test_short_writes_cost_time_alone(tmp_path: Path, short: int) -> None:
    with ObjectDatabase.create(tmp_path / "store"):
        pass
    files = Failing(tmp_path / "store" / "packs", short=short)
    with ObjectDatabase.open(tmp_path / "store", files=files) as database:
        done = Acknowledged()
        keep(database, version(1))
        if short > 1:
            work(database, done)
            done.heads["main"] = database.index.ref("p", "main").head  # type: ignore[union-attr]
            assert done.failed == 0
        assert check(database).damages == ()


@pytest.mark.parametrize("part", range(1, 5))
def test_one_error_at_every_step(tmp_path: Path, part: int) -> None:
    rng = random.Random(part)
    for at in every_step(tmp_path, part, 4):
        error, torn = rng.choice((errno.ENOSPC, errno.EIO)), rng.choice((0, 1, 50))
        path = tmp_path / str(at)
        with ObjectDatabase.create(path):
            pass
        done = Acknowledged()
        files = Failing(path / "packs", at=at, error=error, torn=torn)
        with ObjectDatabase.open(path, files=files) as database:
            work(database, done)
            hold(database, done)
        with ObjectDatabase.open(path) as database:
            hold(database, done)
            collect(database, wait_seconds=1)
            hold(database, done)
            rows = {f"{row.number:010d}.pack" for row in database.index.packs()}
            assert {file.name for file in database.packs.iterdir()} == rows


@pytest.mark.parametrize("part", range(1, 4))
def test_disk_that_stays_broken_from_any_step_on(tmp_path: Path, part: int) -> None:
    for at in every_step(tmp_path, part, 3):
        path = tmp_path / str(at)
        with ObjectDatabase.create(path):
            pass
        done = Acknowledged()
        files = Failing(path / "packs", at=at, error=errno.EIO, torn=10, times=10_000)
        with ObjectDatabase.open(path, files=files) as database:
            work(database, done)
            hold(database, done)
        with ObjectDatabase.open(path) as database:
            hold(database, done)
            done.heads["main"] = keep(database, version(7))
            done.states[done.heads["main"]] = flat(version(7))
            collect(database, wait_seconds=1)
            hold(database, done)


@pytest.mark.parametrize("part", range(1, 5))
def test_power_that_goes_at_every_step(tmp_path: Path, part: int) -> None:
    rng = random.Random(part)
    for at in every_step(tmp_path, part, 4):
        path, after = tmp_path / str(at), tmp_path / f"after {at}"
        with ObjectDatabase.create(path):
            pass
        done = Acknowledged()
        database = ObjectDatabase.open(path, files=Powered(path, at, after, rng))
        with pytest.raises(PowerCut):
            work(database, done)
        with ObjectDatabase.open(after) as found:
            hold(found, done, heads=False)
            report = collect(found, wait_seconds=1)
            assert check(found).unreachable == 0
            assert report.after <= report.before
            hold(found, done, heads=False)
            head = keep(found, version(8))
            assert dict(contents(found, commit(found, head).root)) == flat(version(8))
        database.index.close()


# ---- what SQLite meets ---------------------------------------------------------------------------------------------


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let every write beyond ``size`` bytes of a file fail with EFBIG; Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", range(0, 60_000, 6_000))
def test_index_that_cannot_grow(tmp_path: Path, room: int) -> None:
    """The WAL cannot be written, at some page of some transaction; the packs can."""
    done = Acknowledged()
    with ObjectDatabase.create(tmp_path / "store") as database:
        done.heads["main"] = head = keep(database, {b"first": b"1"})
        done.states[head] = {b"first": b"1"}
        database.index.checkpoint()
        pack = max(file.stat().st_size for file in database.packs.iterdir())
        with files_up_to(pack + room):
            for number in range(40):
                try:
                    head = keep(database, {b"%d" % number: b"%d" % number})
                except StoreError:
                    done.failed += 1
                else:
                    done.heads["main"] = head
                    done.states[head] = {b"%d" % number: b"%d" % number}
        assert done.failed > 0
        hold(database, done)
    with ObjectDatabase.open(tmp_path / "store") as database:
        hold(database, done)
        collect(database, wait_seconds=1)
        hold(database, done)
        head = keep(database, version(1))
        assert dict(contents(database, commit(database, head).root)) == flat(version(1))


@contextmanager
def small_file_system(kind: str, place: Path) -> Iterator[Path]:
    """Mount a file system of 3 MiB (needs root)."""
    mounted = place / "mounted"
    mounted.mkdir()
    if kind == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", mounted], check=True)
    else:
        image = place / "image"
        with image.open("wb") as file:
            file.truncate(3 << 20)
        block = kind.removeprefix("ext4 ")
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-b", block, "-O", "^has_journal", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, mounted], check=True)
    try:
        yield mounted
    finally:
        subprocess.run(["umount", mounted], check=True)


_FILL = """
import random, sys
from pathlib import Path
from agent_sandbox.errors import StoreFullError
from agent_sandbox.store.objectdb import ObjectDatabase
from tests.unit.store.handmade import keep
rng = random.Random(1)
with ObjectDatabase.open(Path(sys.argv[1])) as database:
    try:
        for number in range(1000):
            head = keep(database, {b"%d" % number: rng.randbytes(int(sys.argv[2]))}, "fill")
            print(head.hex(), number, flush=True)
    except StoreFullError as error:
        print(error.code)
"""


@pytest.mark.real
@pytest.mark.parametrize("size", [150, 9_000, 120_000])
@pytest.mark.parametrize("kind", ["tmpfs", "ext4 4096", "ext4 1024"])
def test_disk_that_fills_up(tmp_path: Path, kind: str, size: int) -> None:
    with small_file_system(kind, tmp_path) as place:
        path = place / "store"
        ballast = place / "what the user removes to make room"
        ballast.write_bytes(bytes(600_000))
        with ObjectDatabase.create(path) as database:
            kept = keep(database, {b"kept": b"1"})
        filled = subprocess.run(
            [sys.executable, "-c", _FILL, path, str(size)], capture_output=True, text=True, check=True, timeout=100
        ).stdout.splitlines()
        assert filled[-1] == "store_full"
        assert len(filled) > 2
        if kind.startswith("ext4"):  # SQLite may need a block to open the index at all: without, StoreFullError says so
            ballast.unlink()
        with ObjectDatabase.open(path) as database:
            assert check(database).damages == ()
            ref = database.index.ref("p", "fill")
            assert ref is not None
            assert ref.head.hex() == filled[-2].split()[0]
            assert dict(contents(database, commit(database, kept).root)) == {b"kept": b"1"}
            ballast.unlink(missing_ok=True)
            with database.transaction() as change:
                change.remove_ref("p", "fill")
            report = collect(database, wait_seconds=1)
            assert report.freed > 500_000
            head = keep(database, version(1))
            assert check(database).damages == ()
            assert dict(contents(database, commit(database, head).root)) == flat(version(1))


@pytest.mark.real
def test_full_disk_with_blocks_smaller_than_pages_is_told_before_anything_is_mapped(tmp_path: Path) -> None:
    """Otherwise it is SIGBUS in SQLite, which no error handling sees: so this runs in a process of its own."""
    program = "import sys; from pathlib import Path; from agent_sandbox.store.objectdb import ObjectDatabase;"
    program += "from agent_sandbox.errors import StoreFullError\ntry: ObjectDatabase.open(Path(sys.argv[1]))\n"
    program += "except StoreFullError as error: print(error.code)\n"
    with small_file_system("ext4 1024", tmp_path) as place:
        ObjectDatabase.create(place / "store").close()
        with (place / "full").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1024))
        # Room for the one block of each page that SQLite asks for, and not for all of them.
        os.truncate(place / "full", (place / "full").stat().st_size - 9 * 1024)
        opened = subprocess.run([sys.executable, "-c", program, place / "store"], capture_output=True, text=True)
        assert (opened.returncode, opened.stdout) == (0, "store_full\n")
        (place / "full").unlink()
        ObjectDatabase.open(place / "store").close()


def test_descriptors_that_run_out(tmp_path: Path) -> None:
    done = Acknowledged()
    with ObjectDatabase.create(tmp_path / "store") as database:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = os.open("/dev/null", os.O_RDONLY)
        for room in range(6):
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken + room, hard))
            try:
                head = keep(database, version(room))
            except StoreFullError:
                pytest.fail("a process without descriptors is no full disk")
            except StoreError:
                done.failed += 1
            else:
                done.heads["main"] = head
                done.states[head] = flat(version(room))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(taken)
        assert done.failed > 0
        assert done.heads
        hold(database, done)
