"""A machine's memory as a file: read from a process as QEMU has it, sealed for forks, sparse."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.backends.microvm import memory
from agent_sandbox.errors import BackendError, ConflictError

MIB = memory.MIB
IDLER = "import sys; print('ready', flush=True); sys.stdin.read()"
HOLDER = """
import mmap, os, sys
flags = mmap.MAP_SHARED if sys.argv[1] == "shared" else mmap.MAP_PRIVATE
file = os.open(f"/proc/self/fd/{sys.argv[2]}", os.O_RDWR)
machine = mmap.mmap(file, 0, flags)
for offset, value in (part.split(":") for part in sys.argv[3:]):
    machine[int(offset) : int(offset) + len(value)] = value.encode()
print("ready", flush=True)
sys.stdin.read()
"""


def holding(given: int, how: str, **values: int) -> Iterator[Process]:
    """A process that maps a memory as QEMU does, and has written ``values`` to offsets of it."""
    return waiting(given, HOLDER, how, str(given), *(f"{offset}:{value}" for value, offset in values.items()))


def waiting(given: int, program: str = IDLER, *arguments: str) -> Iterator[Process]:
    """A process that has the descriptor ``given``."""
    child = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(given,),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        process = Process.of(child.pid)
        assert process is not None
        yield process
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()


def test_a_booted_machine_and_a_fork_are_saved_whole_and_sparse(tmp_path: Path) -> None:
    blank = memory.blank(8)
    for process in holding(blank, "shared", first=0, later=5 * MIB + 17):
        memory.save(process, blank, 8, tmp_path / "one")
    os.close(blank)
    one = (tmp_path / "one").read_bytes()
    assert len(one) == 8 * MIB
    assert (one[:5], one[5 * MIB + 17 : 5 * MIB + 22]) == (b"first", b"later")
    assert one.count(0) == 8 * MIB - 10
    assert (tmp_path / "one").stat().st_blocks * 512 <= 256 * 1024
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o600

    fork = memory.filled(tmp_path / "one", 8)
    for process in holding(fork, "private", other=0, fresh=7 * MIB):
        memory.save(process, fork, 8, tmp_path / "two")
    two = (tmp_path / "two").read_bytes()
    assert (two[:5], two[5 * MIB + 17 : 5 * MIB + 22], two[7 * MIB : 7 * MIB + 5]) == (b"other", b"later", b"fresh")
    assert os.pread(fork, 5, 0) == b"first"
    os.close(fork)


def test_what_forks_share_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "saved").write_bytes(b"kept".ljust(MIB, b"\0"))
    fork = memory.filled(tmp_path / "saved", 1)
    again = os.open(f"/proc/self/fd/{fork}", os.O_RDWR)
    for refused in (lambda: os.pwrite(again, b"x", 0), lambda: os.ftruncate(again, 0)):
        with pytest.raises(OSError) as caught:
            refused()
        assert caught.value.errno == errno.EPERM
    with pytest.raises(OSError):
        mmap.mmap(again, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    mine = mmap.mmap(again, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    mine[:4] = b"mine"
    assert os.pread(fork, 4, 0) == b"kept"
    mine.close()
    os.close(again)
    os.close(fork)


def test_a_filled_memory_is_kept_for_the_next_and_made_anew_for_another_file(tmp_path: Path) -> None:
    fills = memory.Fills()
    saved = tmp_path / "saved"
    saved.write_bytes(bytes(MIB))
    one, two = fills.open(saved, 1), fills.open(saved, 1)
    assert os.fstat(one).st_ino == os.fstat(two).st_ino
    with pytest.raises(ConflictError, match="2 MiB"):
        fills.open(saved, 2)
    for number in range(memory.KEPT):
        (tmp_path / f"{number}").write_bytes(bytes(MIB))
        os.close(fills.open(tmp_path / f"{number}", 1))
    three = fills.open(saved, 1)
    assert os.fstat(three).st_ino != os.fstat(one).st_ino
    with pytest.raises(ConflictError, match="not there"):
        fills.open(tmp_path / "none", 1)
    fills.close()
    assert os.pread(one, 1, 0) == b"\0"  # who has it keeps it
    for descriptor in (one, two, three):
        os.close(descriptor)


def test_only_the_latest_filled_memory_may_be_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT_BYTES", 3 * MIB)
    fills = memory.Fills()

    def inode(name: str, megabytes: int) -> int:
        path = tmp_path / name
        if not path.exists():
            path.write_bytes(b"x" * (megabytes * MIB))
        descriptor = fills.open(path, megabytes)
        try:
            return os.fstat(descriptor).st_ino
        finally:
            os.close(descriptor)

    small, other = inode("small", 1), inode("other", 1)
    assert (inode("small", 1), inode("other", 1)) == (small, other)  # small ones are kept beside each other
    large = inode("large", 8)
    assert inode("large", 8) == large  # many go on from the one that was saved last
    inode("another", 1)
    assert inode("large", 8) != large  # which does not stay once others are asked for
    fills.close()


def test_a_filled_memory_goes_with_its_file(tmp_path: Path) -> None:
    fills = memory.Fills()
    for name in ("deleted", "there"):
        (tmp_path / name).write_bytes(b"secret".ljust(MIB, b"x"))
    os.close(fills.open(tmp_path / "deleted", 1))

    def held() -> int:
        links = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return sum("memfd:guest-memory" in str(link) for link in links)

    before = held()
    (tmp_path / "deleted").unlink()
    os.close(fills.open(tmp_path / "there", 1))
    assert held() == before  # one came and one went
    fills.close()
    assert held() == before - 1


def test_a_monitor_that_put_a_pipe_in_its_memorys_place_makes_nobody_wait(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Nobody writes to it, so whoever opens it for reading waits.
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for process in waiting(reading):
        with ThreadPoolExecutor(1) as pool:
            saving = pool.submit(memory.save, process, reading, 1, tmp_path / "saved")
            done, _ = wait([saving], 60)
            os.close(os.open(pipe, os.O_RDWR))  # lets go whoever does wait
        assert done, "the monitor decides when memory.save returns"
        with pytest.raises(BackendError, match="as it was started"):
            saving.result()
    os.close(reading)


def test_a_monitor_that_ended_or_has_another_memory_is_refused(tmp_path: Path) -> None:
    blank, other = memory.blank(2), memory.blank(1)
    for process in holding(blank, "shared", x=0):
        with pytest.raises(BackendError, match="as it was started"):
            memory.save(process, blank, 1, tmp_path / "wrong")
        assert not (tmp_path / "wrong").exists()
        with pytest.raises(BackendError, match="ended"):
            memory.save(Process(process.pid, process.start + 1), blank, 2, tmp_path / "later")
    with pytest.raises(BackendError, match="ended"):
        memory.save(process, blank, 2, tmp_path / "gone")
    for process in holding(other, "shared", x=0):
        with pytest.raises(BackendError, match="as it was started"):
            memory.save(process, other, 2, tmp_path / "small")
    os.close(blank)
    os.close(other)


@pytest.mark.parametrize(
    ("ranges", "result"),
    [
        ([], []),
        ([(4, 8), (0, 4)], [(0, 8)]),
        ([(0, 2), (3, 5)], [(0, 2), (3, 5)]),
        ([(0, 10), (2, 3), (9, 12), (20, 21)], [(0, 12), (20, 21)]),
    ],
)
def test_ranges_are_merged(ranges: list[memory.Range], result: list[memory.Range]) -> None:
    assert memory.merged(ranges) == result
