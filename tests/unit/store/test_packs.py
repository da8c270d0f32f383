"""Packs: what is appended, what is cut back, and what a reader refuses."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.errors import StoreDamagedError, StoreError, StoreFullError
from agent_sandbox.store.packs import MAX_DESCRIPTORS, OsFiles, Pack, PackFile, PackReader, pack_name
from agent_sandbox.store.ports import Location

STORE = bytes(range(16))


class Faulty:
    """A pack's file that takes few bytes at a time and fails when told to."""

    def __init__(self, file: PackFile) -> None:
        self.file = file
        self.most = 1 << 30
        self.write_error: int | None = None
        self.sync_error: int | None = None
        self.truncate_error: int | None = None
        self.syncs = 0
        self.closed = 0

    def write(self, data: bytes | memoryview, offset: int) -> int:
        assert not self.closed
        if self.write_error is not None and self.most == 0:
            raise OSError(self.write_error, os.strerror(self.write_error))
        taken = self.file.write(memoryview(data)[: self.most], offset)
        if self.write_error is not None:
            self.most -= taken
        return taken

    def sync(self) -> None:
        assert not self.closed
        self.syncs += 1
        if self.sync_error is not None:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        self.file.sync()

    def truncate(self, size: int) -> None:
        assert not self.closed
        if self.truncate_error is not None:
            raise OSError(self.truncate_error, os.strerror(self.truncate_error))
        self.file.truncate(size)

    def close(self) -> None:
        self.closed += 1
        self.file.close()


class FaultyFiles(OsFiles):
    def __init__(self, directory: int) -> None:
        super().__init__(directory)
        self.made: list[Faulty] = []
        self.sync_error: int | None = None

    def create(self, name: str) -> PackFile:
        self.made.append(Faulty(super().create(name)))
        return self.made[-1]

    def sync(self) -> None:
        if self.sync_error is not None:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        super().sync()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def files(directory: int) -> FaultyFiles:
    return FaultyFiles(directory)


def test_pack_begins_with_its_header_and_is_synced(files: FaultyFiles, tmp_path: Path) -> None:
    Pack(files, STORE, 7).close()
    content = (tmp_path / "0000000007.pack").read_bytes()
    assert content == b"ASBPACK1" + STORE + (7).to_bytes(8, "little")
    assert files.made[0].syncs == 1


def test_pack_is_created_exclusively(files: FaultyFiles, tmp_path: Path) -> None:
    (tmp_path / pack_name(7)).write_bytes(b"somebody's")
    with pytest.raises(FileExistsError):
        Pack(files, STORE, 7)
    assert (tmp_path / pack_name(7)).read_bytes() == b"somebody's"


def test_directory_that_cannot_be_synced_makes_no_pack(files: FaultyFiles) -> None:
    files.sync_error = errno.EIO
    with pytest.raises(StoreError):
        Pack(files, STORE, 7)


@pytest.mark.parametrize("most", [1, 3, 31, 64])
def test_short_writes_are_carried_on(files: FaultyFiles, tmp_path: Path, most: int) -> None:
    pack = Pack(files, STORE, 1)
    files.made[0].most = most
    pack.append(bytes(range(100)))
    pack.append(b"next")
    pack.close()
    assert (tmp_path / pack_name(1)).read_bytes()[32:] == bytes(range(100)) + b"next"
    assert pack.size == 136


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EFBIG, StoreFullError),
        (errno.EIO, StoreError),
    ],
)
def test_failed_write_is_cut_back_and_ends_the_pack(
    files: FaultyFiles, tmp_path: Path, number: int, error: type[StoreError]
) -> None:
    pack = Pack(files, STORE, 1)
    pack.append(b"kept")
    pack.sync()
    pack.kept = pack.size
    pack.append(b"synced by nobody")
    files.made[0].write_error, files.made[0].most = number, 5
    with pytest.raises(error) as raised:
        pack.append(b"too much")
    assert type(raised.value) is error
    assert not pack.usable
    assert (tmp_path / pack_name(1)).read_bytes()[32:] == b"kept"


def test_failed_write_that_cannot_be_cut_back_ends_the_pack_too(files: FaultyFiles) -> None:
    pack = Pack(files, STORE, 1)
    files.made[0].write_error, files.made[0].most, files.made[0].truncate_error = errno.ENOSPC, 5, errno.EIO
    with pytest.raises(StoreFullError):
        pack.append(b"too much")
    assert not pack.usable


def test_failed_sync_ends_the_pack_and_is_not_asked_again(files: FaultyFiles, tmp_path: Path) -> None:
    pack = Pack(files, STORE, 1)
    pack.append(b"lost")
    files.made[0].sync_error = errno.EIO
    with pytest.raises(StoreError):
        pack.sync()
    assert not pack.usable
    assert files.made[0].syncs == 2
    assert (tmp_path / pack_name(1)).stat().st_size == 32


@pytest.mark.parametrize("truncate_error", [None, errno.EIO])
def test_failed_pack_is_closed_once_and_its_descriptor_never_used_again(
    files: FaultyFiles, truncate_error: int | None
) -> None:
    """Its number may be another file's by then."""
    pack = Pack(files, STORE, 1)
    file = files.made[0]
    file.write_error, file.most, file.truncate_error = errno.EIO, 5, truncate_error
    with pytest.raises(StoreError):
        pack.append(b"too much")
    pack.cut()
    pack.close()
    with pytest.raises(StoreError, match="begin again"):
        pack.append(b"more")
    with pytest.raises(StoreError, match="begin again"):
        pack.sync()
    assert file.closed == 1


def test_cut_gives_up_only_what_no_transaction_leads_to(files: FaultyFiles, tmp_path: Path) -> None:
    pack = Pack(files, STORE, 1)
    pack.append(b"first")
    pack.kept = pack.size
    pack.append(b"second")
    pack.cut()
    pack.append(b"third")
    pack.close()
    assert (tmp_path / pack_name(1)).read_bytes()[32:] == b"firstthird"


def test_reader_keeps_few_descriptors(directory: int, tmp_path: Path) -> None:
    for number in range(MAX_DESCRIPTORS * 2):
        (tmp_path / pack_name(number)).write_bytes(number.to_bytes(4, "little"))
    reader = PackReader(directory)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(MAX_DESCRIPTORS * 2):
        assert reader.read(Location(number, 0, 4), 0, 4) == number.to_bytes(4, "little")
    assert len(list(Path("/proc/self/fd").iterdir())) == before + MAX_DESCRIPTORS
    reader.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_reader_lets_go_of_removed_packs(directory: int, tmp_path: Path) -> None:
    path = tmp_path / pack_name(1)
    path.write_bytes(b"old!")
    reader = PackReader(directory)
    reader.refresh()
    assert reader.read(Location(1, 0, 4), 0, 4) == b"old!"
    path.unlink()
    reader.refresh()
    with pytest.raises(StoreDamagedError, match="missing"):
        reader.read(Location(1, 0, 4), 0, 4)
    reader.close()


def test_reader_refuses_the_end_of_a_pack_links_and_special_files(directory: int, tmp_path: Path) -> None:
    (tmp_path / pack_name(1)).write_bytes(b"short")
    (tmp_path / pack_name(2)).symlink_to(pack_name(1))
    os.mkfifo(tmp_path / pack_name(3))
    reader = PackReader(directory)
    for number in (1, 2, 3, 4):
        with pytest.raises(StoreDamagedError):
            reader.read(Location(number, 2, 10), 0, 10)
    reader.close()


def test_no_descriptor_left_is_no_damage(directory: int, tmp_path: Path) -> None:
    (tmp_path / pack_name(1)).write_bytes(b"there")
    reader = PackReader(directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (directory, hard))
    try:
        with pytest.raises(StoreError) as raised:
            reader.read(Location(1, 0, 5), 0, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert type(raised.value) is StoreError
    assert reader.read(Location(1, 0, 5), 0, 5) == b"there"
    reader.close()
