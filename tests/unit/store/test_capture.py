"""Capturing one tree: what is kept, what is left out, what it costs, and the limits.

More than 400 lines: one small tree for each promise, and each test reads alone.
"""

from __future__ import annotations

import os
import random
import resource
import socket
import subprocess
import time
from pathlib import Path

import pytest

from agent_sandbox.errors import ForbiddenError, InvalidRequestError, SandboxError
from agent_sandbox.store import walk
from agent_sandbox.store.chunks import cuts
from agent_sandbox.store.objects import Entry, Extent, Kind, Type, link_id
from agent_sandbox.store.oserrors import MEANINGS, failure, shown
from agent_sandbox.store.outcomes import Left, LeftOut
from agent_sandbox.store.ports import Engine, Options
from tests.unit.store.engines import capture, checkout, each_engine, let_in, memory, opened, state, unprivileged
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.trees import scratch, state_of


def entry_of(store: MemoryObjects, root: Entry, path: bytes) -> Entry:
    return walk.resolve(store, root, path)


def chain(directory: Path, names: list[bytes]) -> None:
    """Make directories inside each other, by descriptors: their path may be longer than the system takes."""
    fd = os.open(directory, os.O_RDONLY)
    for name in names:
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open(b"bottom", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)


# ---- what is kept --------------------------------------------------------------------------------------------------


@each_engine
@pytest.mark.parametrize(
    ("size", "form"),
    [(0, "empty"), (1, "blob"), (131_071, "blob"), (131_072, "pages"), (400 * 1_024, "pages")],
)
def test_the_form_of_a_file_follows_its_size(engine: Engine, size: int, form: str) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        data = os.urandom(size)
        (place / "tree" / "file").write_bytes(data)
        store = memory(place)
        file = entry_of(store, capture(engine, place / "tree", store).root, b"file")
        assert (file.size, file.content is None, file.paged) == (size, form == "empty", form == "pages")
        assert b"".join(walk.data(store, file)) == data


@each_engine
def test_each_run_of_data_is_cut_as_the_page_says(engine: Engine) -> None:
    # More than is in memory at once, so that cuts could go wrong where one part ends.
    with scratch() as place:
        (place / "tree").mkdir()
        runs = [os.urandom(5 << 19), os.urandom(3 << 19)]
        file = os.open(place / "tree" / "file", os.O_WRONLY | os.O_CREAT)
        os.pwrite(file, runs[0], 0)
        os.pwrite(file, runs[1], 5 << 20)
        os.close(file)
        store = memory(place)
        entry = entry_of(store, capture(engine, place / "tree", store).root, b"file")
        first, second = ([end - start for start, end in cuts(run)] for run in runs)
        expected = [*first, (5 << 20) - (5 << 19), *second]
        assert [extent.length for extent in walk.extents(store, entry)] == expected


@each_engine
def test_a_hole_of_a_small_file_is_kept_however_many_blocks_it_has(engine: Engine) -> None:
    # An attribute outside of the inode counts in st_blocks (ext4), so that the file looks dense.
    with scratch() as place:
        (place / "tree").mkdir()
        file = os.open(place / "tree" / "file", os.O_WRONLY | os.O_CREAT)
        os.pwrite(file, b"x" * 4_096, 4_096)
        os.setxattr(file, "user.long", b"y" * 2_000)
        os.close(file)
        store = memory(place)
        entry = entry_of(store, capture(engine, place / "tree", store).root, b"file")
        assert [(extent.length, extent.id is None) for extent in walk.extents(store, entry)] == [
            (4_096, True),
            (4_096, False),
        ]


@each_engine
def test_terabytes_of_holes_cost_their_data(engine: Engine) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        file = os.open(place / "tree" / "file", os.O_WRONLY | os.O_CREAT)
        for offset in (0, 1 << 39, (1 << 40) + 4_096):
            os.pwrite(file, b"x" * 4_096, offset)
        os.ftruncate(file, 2 << 40)
        os.close(file)
        os.truncate(os.open(place / "tree" / "hole", os.O_WRONLY | os.O_CREAT), 1 << 40)
        store = memory(place)
        captured = capture(engine, place / "tree", store)
        assert (captured.report.read, captured.report.bytes) == (3 * 4_096, 3 * 4_096)
        hole = entry_of(store, captured.root, b"hole")
        assert list(walk.extents(store, hole)) == [Extent(1 << 40, None)]
        checkout(engine, captured.root, place / "copy", store)
        assert state_of(place / "copy") == state_of(place / "tree")


@each_engine
def test_the_smallest_path_names_an_inode(engine: Engine) -> None:
    # "a.b" comes before "a/b", although a walk meets "a" first.
    with scratch() as place:
        tree = place / "tree"
        (tree / "a").mkdir(parents=True)
        (tree / "a" / "b").write_text("file")
        os.link(tree / "a" / "b", tree / "a.b")
        (tree / "link").symlink_to("target")
        os.link(tree / "link", tree / "a" / "link", follow_symlinks=False)
        os.mkfifo(tree / "pipe")
        os.link(tree / "pipe", tree / "z")
        (tree / "alone").write_text("one name inside")
        os.link(tree / "alone", place / "outside")
        store = memory(place)
        root = capture(engine, tree, store).root
        for first, second in ((b"a.b", b"a/b"), (b"a/link", b"link"), (b"pipe", b"z")):
            assert entry_of(store, root, first).link == entry_of(store, root, second).link == link_id(first)
        assert entry_of(store, root, b"alone").link is None


@each_engine
def test_owners_are_kept_only_when_asked_for(engine: Engine) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        (place / "tree" / "link").symlink_to("x")
        store = memory(place)
        ids = (os.geteuid(), os.getegid())
        plain = capture(engine, place / "tree", store).root
        owned = capture(engine, place / "tree", store, options=Options(owners=True)).root
        assert (plain.owner, entry_of(store, plain, b"link").owner) == (None, None)
        assert (owned.owner, entry_of(store, owned, b"link").owner) == (ids, ids)


# ---- what is left out ----------------------------------------------------------------------------------------------


@each_engine
def test_sockets_are_left_out_and_named(engine: Engine) -> None:
    with scratch() as place:
        (place / "tree" / "below").mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place / "tree" / "below" / "socket"))
            report = capture(engine, place / "tree", memory(place)).report
        assert report.left_out == (LeftOut(b"below/socket", Left.SOCKET),)
        assert (report.left_out_count, report.files, report.directories) == (1, 0, 1)


@each_engine
def test_what_may_not_be_read_is_left_out_and_named(engine: Engine) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        tree = place / "tree"
        with unprivileged(place, tree):
            store = memory(place)
            for name in ("locked", "listed", "open"):
                (tree / name).mkdir()
                (tree / name / "file").write_text(name)
            (tree / "open" / "file").chmod(0)
            os.mkfifo(tree / "fifo", 0)
            (tree / "locked").chmod(0)
            (tree / "listed").chmod(0o400)
            captured = capture(engine, tree, store)
            (tree / "locked").chmod(0o700)
            (tree / "listed").chmod(0o700)
        assert set(captured.report.left_out) == {
            LeftOut(b"locked", Left.UNREADABLE),
            LeftOut(b"listed/file", Left.UNREADABLE),
            LeftOut(b"open/file", Left.UNREADABLE),
        }
        assert {path for path, _ in walk.walk(store, captured.root)} == {b"listed", b"open", b"fifo"}


@each_engine
def test_a_directory_that_may_not_be_read_is_refused(engine: Engine) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        place.chmod(0o755)
        store = memory(place)
        with opened(place / "tree") as fd:
            (place / "tree").chmod(0)
            with unprivileged(place / "tree"), pytest.raises(ForbiddenError):
                engine.capture(fd, store, store)


@each_engine
def test_the_report_names_ten_thousand_and_counts_the_rest(engine: Engine) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place / "tree" / "s"))
        for number in range(10_004):
            os.link(place / "tree" / "s", place / "tree" / f"s{number}")
        report = capture(engine, place / "tree", memory(place)).report
        assert (report.left_out_count, len(report.left_out)) == (10_005, 10_000)


@pytest.mark.real
@each_engine
def test_other_file_systems_and_devices_are_left_out(engine: Engine) -> None:
    with scratch() as place:
        tree = place / "tree"
        (tree / "mount").mkdir(parents=True)
        (tree / "file").write_text("")
        os.mknod(tree / "null", 0o20666, os.makedev(1, 3))
        os.mknod(tree / "whiteout", 0o20000, os.makedev(0, 0))
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tree / "mount"], check=True)
        try:
            (tree / "mount" / "inside").write_text("secret")
            subprocess.run(["mount", "--bind", tree / "mount" / "inside", tree / "file"], check=True)
            try:
                store = memory(place)
                captured = capture(engine, tree, store)
            finally:
                subprocess.run(["umount", tree / "file"], check=True)
        finally:
            subprocess.run(["umount", tree / "mount"], check=True)
        assert set(captured.report.left_out) == {
            LeftOut(b"mount", Left.OTHER_FILESYSTEM),
            LeftOut(b"file", Left.OTHER_FILESYSTEM),
            LeftOut(b"null", Left.DEVICE),
            LeftOut(b"whiteout", Left.DEVICE),
        }
        assert list(walk.walk(store, captured.root)) == []


@pytest.mark.real
@each_engine
def test_attributes_that_are_too_large_are_left_out_alone(engine: Engine) -> None:
    # ext4 takes no more than a block of them; tmpfs does.
    with scratch() as place:
        tree = place / "tree"
        tree.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tree], check=True)
        try:
            (tree / "below").mkdir()
            for path in (tree / "file", tree / "most"):
                path.write_text("content")
            for number in range(20):
                for path in (tree / "file", tree / "below", tree):
                    os.setxattr(path, f"user.{number}", b"x" * 60_000)
            os.setxattr(tree / "most", "user.a", b"x" * 65_536)
            store = memory(place)
            time.sleep(0.06)
            captured = [capture(engine, tree, store, cache=place / "cache") for _ in range(2)]
        finally:
            subprocess.run(["umount", tree], check=True)
        for report in (captured[0].report, captured[1].report):
            assert set(report.left_out) == {LeftOut(path, Left.ATTRIBUTES) for path in (b"file", b"below", b"")}
        root = captured[0].root
        assert root.attrs is entry_of(store, root, b"file").attrs is entry_of(store, root, b"below").attrs is None
        assert b"".join(walk.data(store, entry_of(store, root, b"file"))) == b"content"
        assert len(store.read(entry_of(store, root, b"most").attrs or b"", Kind.ATTRS)) > 65_536


@each_engine
def test_a_fifo_is_never_opened(engine: Engine) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        os.mkfifo(place / "tree" / "pipe")
        store = memory(place)
        with let_in(place / "tree" / "pipe") as opened_by_somebody:
            root = capture(engine, place / "tree", store).root
            assert not opened_by_somebody.wait(0.1)
        assert entry_of(store, root, b"pipe").type is Type.FIFO


# ---- limits --------------------------------------------------------------------------------------------------------


@each_engine
def test_a_thousand_directories_deep_with_few_descriptors(engine: Engine) -> None:
    names = [b"%03d" % number + b"x" * 252 for number in range(1_000)]
    with scratch() as place:
        (place / "tree").mkdir()
        chain(place / "tree", names)
        store = memory(place)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        # 128 directories and what the workers have open besides: far less than one for each directory.
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 128 + 32, hard))
        try:
            root = capture(engine, place / "tree", store).root
            checkout(engine, root, place / "copy", store)
            assert capture(engine, place / "copy", store).root == root
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert entry_of(store, root, b"/".join([*names, b"bottom"])).type is Type.FILE


@each_engine
def test_one_directory_more_is_refused(engine: Engine) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        chain(place / "tree", [b"d"] * 1_001)
        with pytest.raises(InvalidRequestError, match="1000 directories"):
            capture(engine, place / "tree", memory(place))


@each_engine
def test_a_huge_directory_has_pages_of_several_levels(engine: Engine) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        names = [b"%d" % number for number in range(8_000)]
        with opened(place / "tree") as fd:
            for name in names:
                os.symlink(b"x", name, dir_fd=fd)
                os.utime(name, ns=(0, 7), dir_fd=fd, follow_symlinks=False)
        store = memory(place)
        root = capture(engine, place / "tree", store).root
        assert store.read(root.content or b"", Kind.TREE)[0] == 2
        links = [Entry(name, Type.SYMLINK, 0o777, 7, target=b"x") for name in names]
        assert state(store, links).content == root.content


# ---- what it costs -------------------------------------------------------------------------------------------------


@each_engine
def test_what_replaces_something_is_kept_as_a_patch_of_it(engine: Engine) -> None:
    with scratch() as place:
        tree = place / "tree"
        (tree / "many").mkdir(parents=True)
        rng = random.Random(1)  # where an edit happens to move a cut, more is new
        data = rng.randbytes(1 << 20)
        small = rng.randbytes(20_000)
        (tree / "large").write_bytes(data)
        (tree / "small").write_bytes(small)
        for number in range(300):
            (tree / "many" / f"{number}").symlink_to(os.urandom(20).hex())
        store = memory(place)
        old = capture(engine, tree, store).root

        (tree / "large").write_bytes(data[:500_000] + b"0123456789" + data[500_010:])
        new = capture(engine, tree, store, base=old)
        # A chunk of 8 to 32 KiB, the pages above it (each chunk 34 bytes) and the root's tree, all as patches.
        assert new.report.stored < 1_500
        (tree / "large").write_bytes(b"0123456789" + data)
        assert capture(engine, tree, store, base=old).report.stored < 1_500
        (tree / "large").write_bytes(data)
        (tree / "small").write_bytes(small[:10_000] + b"0123456789" + small[10_010:])
        assert capture(engine, tree, store, base=old).report.stored < 1_000
        (tree / "small").write_bytes(small)
        os.utime(tree / "many" / "150", ns=(0, 12_345), follow_symlinks=False)
        assert capture(engine, tree, store, base=old).report.stored < 1_500


@each_engine
def test_a_small_file_that_grows_large_is_patched_too_and_back(engine: Engine) -> None:
    with scratch() as place:
        (place / "tree").mkdir()
        file = place / "tree" / "file"
        data = os.urandom(150_000)
        file.write_bytes(data[:30_000])
        store = memory(place)
        small = capture(engine, place / "tree", store).root
        file.write_bytes(data)
        large = capture(engine, place / "tree", store, base=small)
        assert large.report.stored < 150_000 - 7_000  # the first chunk, 8 KiB at least, is in the old blob
        file.write_bytes(data[:8_000] + b"!")
        assert capture(engine, place / "tree", store, base=large.root).report.stored < 1_000


@each_engine
def test_the_report_counts_names_and_the_data_of_inodes(engine: Engine) -> None:
    with scratch() as place:
        tree = place / "tree"
        (tree / "a" / "b").mkdir(parents=True)
        (tree / "one").write_bytes(bytes(10_000))
        os.link(tree / "one", tree / "two")
        (tree / "a" / "link").symlink_to("x")
        os.mkfifo(tree / "a" / "b" / "pipe")
        store = memory(place)
        told: list[tuple[int, int, int, int]] = []
        before = store.written
        report = capture(engine, tree, store, progress=lambda *numbers: told.append(numbers)).report
        assert (report.files, report.directories, report.symlinks, report.fifos) == (2, 2, 1, 1)
        assert (report.bytes, report.read, report.stored) == (10_000, 10_000, store.written - before)
        files, all_files, done, total = told[-1]
        assert (files, done) == (all_files, total)
        assert (all_files, total) == (2, 10_000)


# ---- errors --------------------------------------------------------------------------------------------------------


def test_errors_name_the_path_and_what_it_means() -> None:
    for number, kind in MEANINGS.items():
        error = failure(OSError(number, os.strerror(number)), "read", b"a/b")
        assert type(error) is kind
        assert error.message == f"cannot read a/b: {os.strerror(number)}"
    assert issubclass(type(failure(OSError(5, "Input/output error"), "read", b"")), SandboxError)
    assert failure(OSError(5, "Input/output error"), "read", b"").code == "store_error"


def test_paths_in_messages_are_short_and_printable() -> None:
    assert shown(b"a\xff\x1b[31m\n") == r"a\xff\x1b[31m\n"
    assert shown("ä".encode()) == "ä"
    assert len(shown(b"x" * 100_000)) < 500
    assert shown(b"") == "the directory itself"
