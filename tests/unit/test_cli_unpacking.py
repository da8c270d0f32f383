"""What is packed comes out the same; what a hostile archive says lands nowhere but in the target."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.cli import copying
from agent_sandbox.cli.copying import Copied
from agent_sandbox.cli.packing import pack_directory, pack_file, total_bytes
from agent_sandbox.cli.unpacking import stays_inside, unpack
from agent_sandbox.errors import InvalidRequestError, PayloadTooLargeError


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def archive(*entries: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info, data = entry if isinstance(entry, tuple) else (entry, b"")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def extract(data: bytes, target: Path, *, size: int = 1000, new_root: bool = True) -> Copied:
    target.mkdir(exist_ok=True)
    done = Copied()
    fd = os.open(target, os.O_RDONLY)
    try:
        unpack(iter([data[at : at + size] for at in range(0, len(data), size)]), fd, done, new_root=new_root)
    finally:
        os.close(fd)
    return done


def tree(root: Path) -> dict[str, tuple[str, object]]:
    found: dict[str, tuple[str, object]] = {}
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        value: object = f"{stat.S_IMODE(mode):o}"
        kind = "dir"
        if stat.S_ISLNK(mode):
            kind, value = "link", str(path.readlink())
        elif stat.S_ISREG(mode):
            kind, value = "file", (value, path.read_bytes(), path.lstat().st_mtime_ns)
        found[str(path.relative_to(root))] = (kind, value)
    return found


def test_a_tree_comes_out_as_it_went_in(tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "sub" / "deeper").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "sub" / "tool").write_bytes(b"#!/bin/sh\n")
    (source / "sub" / "tool").chmod(0o751)
    (source / "sub" / "odd \udcff\n").write_bytes(bytes(range(256)) * 5)
    (source / ("long" * 50)).write_bytes(b"x" * 512)
    (source / "sub" / "deeper" / "up").symlink_to("../tool")
    (source / "here").symlink_to("sub")
    os.utime(source / "sub" / "tool", ns=(1, 1_234_567_890_123_456_700))
    (source / "sub").chmod(0o700)
    done = Copied()
    data = b"".join(pack_directory(source, done))
    assert len(data) % 512 == 0
    assert done.bytes == total_bytes(source) == 10 + 1280 + 512
    came = extract(data, tmp_path / "out")
    assert came.skipped == []
    assert (came.files, came.bytes) == (3, 1802)
    before, after = tree(source), tree(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, (kind, value) in before.items():
        if kind == "file":
            assert isinstance(value, tuple)
            seen = after[name][1]
            assert isinstance(seen, tuple)
            assert seen[:2] == value[:2]
            assert abs(seen[2] - value[2]) < 1000
        else:
            assert after[name] == (kind, value)


def test_what_is_no_file_is_left_out_when_packing(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
        os.mkfifo(tmp_path / "fifo")
        done = Copied()
        data = b"".join(pack_directory(tmp_path, done))
    assert [(Path(path).name, reason) for path, reason in done.skipped] == [("s", "a socket or device")]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert {entry.name: entry.type for entry in tar} == {".": tarfile.DIRTYPE, "fifo": tarfile.FIFOTYPE}


def test_a_file_that_shrinks_while_it_is_read_keeps_the_archive_whole(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b"a" * 600_000)
    (tmp_path / "z").write_bytes(b"after")
    done = Copied()
    pieces = pack_directory(tmp_path, done)
    data = next(pieces) + next(pieces) + next(pieces)
    os.truncate(big, 300_000)
    data += b"".join(pieces)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        file = tar.extractfile("big")
        assert file is not None
        content = file.read()
        assert tar.getmember("z").size == 5
    assert len(content) == 600_000
    assert content.rstrip(b"\0") == b"a" * 300_000
    assert len(done.skipped) == 1


def test_one_file_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"data")
    extract(b"".join(pack_file(tmp_path / "f", "g", Copied())), tmp_path / "out")
    assert (tmp_path / "out" / "g").read_bytes() == b"data"


@pytest.mark.parametrize("name", ["/etc/cron.d/x", "../escape", "a/../../escape", "..", "x/" * 101 + "f"])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_names_that_lead_elsewhere_are_left_out(tmp_path: Path, name: str, kind: bytes) -> None:
    (tmp_path / "deep").mkdir()
    data = archive(member(name, kind, linkname="good"), (member("good"), b"g"))
    done = extract(data, tmp_path / "deep" / "out")
    assert tree(tmp_path).keys() == {"deep", "deep/out", "deep/out/good"}
    assert [reason for _, reason in done.skipped] == ["a name that leads elsewhere"]


def test_a_link_of_the_archive_is_no_way_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    inside = archive(member("d", tarfile.DIRTYPE), member("l", tarfile.SYMTYPE, linkname="d"), (member("l/f"), b"x"))
    with pytest.raises(InvalidRequestError, match="links are not followed"):
        extract(inside, tmp_path / "one")
    out = archive(member("l", tarfile.SYMTYPE, linkname="../outside"), (member("l/file"), b"theirs"))
    done = extract(out, tmp_path / "two")
    assert [path for path, _ in done.skipped] == ["l"]
    assert (tmp_path / "two" / "l" / "file").read_bytes() == b"theirs"
    assert (outside / "file").read_text() == "mine"


def test_a_link_that_lay_in_the_target_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    target = tmp_path / "out"
    target.mkdir()
    (target / "dir").symlink_to(outside)
    (target / "file").symlink_to(outside / "file")
    with pytest.raises(InvalidRequestError, match="links are not followed"):
        extract(archive((member("dir/new"), b"x")), target)
    extract(archive((member("file"), b"theirs")), target)
    assert (target / "file").read_bytes() == b"theirs"
    assert not (target / "file").is_symlink()
    with pytest.raises(InvalidRequestError):
        extract(archive(member("dir", tarfile.DIRTYPE)), target)
    assert tree(outside).keys() == {"file"}
    assert (outside / "file").read_text() == "mine"


def test_a_hard_link_joins_files_of_the_copy_only(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    target = tmp_path / "out"
    target.mkdir()
    (target / "way").symlink_to("../secret")
    data = archive(
        (member("a"), b"A"),
        member("b", tarfile.LNKTYPE, linkname="a"),
        member("up", tarfile.LNKTYPE, linkname="../secret"),
        member("abs", tarfile.LNKTYPE, linkname=str(tmp_path / "secret")),
        member("soft", tarfile.LNKTYPE, linkname="way"),
        member("none", tarfile.LNKTYPE, linkname="nothing"),
    )
    done = extract(data, target)
    assert (target / "a").stat().st_ino == (target / "b").stat().st_ino
    assert {path for path, _ in done.skipped} == {"up", "abs", "soft", "none"}
    assert (tmp_path / "secret").stat().st_nlink == 1


@pytest.mark.parametrize("kind", [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, b"Z"])
def test_special_files_are_left_out(tmp_path: Path, kind: bytes) -> None:
    done = extract(archive(member("special", kind), (member("good"), b"g")), tmp_path / "out")
    assert tree(tmp_path / "out").keys() == {"good"}
    assert (tmp_path / "out" / "good").read_bytes() == b"g"
    assert [path for path, _ in done.skipped] == ["special"]


def test_no_set_id_bit_comes_out(tmp_path: Path) -> None:
    data = archive((member("f", mode=0o6755), b""), member("d", tarfile.DIRTYPE, mode=0o7777))
    extract(data, tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out" / "f").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "out" / "d").stat().st_mode) == 0o777


def test_the_mode_of_a_directory_that_was_there_stays(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir(mode=0o750)
    data = archive(member(".", tarfile.DIRTYPE, mode=0o777), (member("f"), b"x"))
    extract(data, target, new_root=False)
    assert stat.S_IMODE(target.stat().st_mode) == 0o750
    extract(data, target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o777


def test_a_directory_that_cannot_be_written_is_filled_first(tmp_path: Path) -> None:
    extract(archive(member("d", tarfile.DIRTYPE, mode=0o555), (member("d/f"), b"x")), tmp_path / "out")
    assert (tmp_path / "out/d/f").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("target", "depth", "inside"),
    [
        ("a", 0, True),
        ("a/b", 0, True),
        ("./a", 0, True),
        ("..", 0, False),
        ("../a", 1, True),
        ("../../a", 1, False),
        ("a/..", 5, False),
        ("a/../b", 5, False),
        ("/etc/passwd", 5, False),
        ("", 5, False),
    ],
)
def test_which_links_stay_inside(target: str, depth: int, inside: bool) -> None:
    assert stays_inside(target, depth) is inside


@given(
    links=st.lists(
        st.tuples(
            st.lists(st.sampled_from("abc"), min_size=1, max_size=3),
            st.lists(st.sampled_from(["a", "b", "c", "..", "."]), max_size=5),
        ),
        max_size=8,
    )
)
@settings(max_examples=300, deadline=None)
def test_no_set_of_kept_links_leads_out(links: list[tuple[list[str], list[str]]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        root = Path(place).resolve() / "root"
        for folders in ("a/b/c", "b/a", "c"):
            (root / folders).mkdir(parents=True, exist_ok=True)
        for name, target in links:
            path, text = root.joinpath(*name), "/".join(target)
            way_is_real = all(not parent.is_symlink() and parent.is_dir() for parent in _ways(root, name))
            if way_is_real and not path.exists() and not path.is_symlink() and stays_inside(text, len(name) - 1):
                path.symlink_to(text)
        for path in root.rglob("*"):
            if path.is_symlink():
                try:
                    real = path.resolve()
                except (RuntimeError, OSError):
                    continue  # a loop
                assert real.is_relative_to(root), (path, path.readlink())


def _ways(root: Path, name: list[str]) -> Iterator[Path]:
    for at in range(1, len(name)):
        yield root.joinpath(*name[:at])


@pytest.mark.parametrize("size", [1, 511, 512, 513, 10**6])
def test_any_pieces_give_the_same(tmp_path: Path, size: int) -> None:
    data = archive((member("a"), b"x" * 2000), member("d", tarfile.DIRTYPE), (member("d/b"), b""))
    extract(data, tmp_path / "out", size=size)
    assert (tmp_path / "out/a").read_bytes() == b"x" * 2000


@pytest.mark.parametrize("cut", [0, 100, 512, 700, 1024, 2048])
def test_an_archive_that_was_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    data = archive((member("a"), b"x" * 2000))
    assert len(data) > 2048
    with pytest.raises(InvalidRequestError, match="damaged"):
        extract(data[:cut], tmp_path / "out")


@given(data=st.binary(max_size=3000), at=st.integers(0, 2999), flip=st.binary(min_size=1, max_size=40))
@settings(max_examples=300, deadline=None)
def test_garbage_is_refused_or_stays_inside(data: bytes, at: int, flip: bytes) -> None:
    import tempfile

    whole = bytearray(archive((member("a/b"), data), member("l", tarfile.SYMTYPE, linkname="a"), (member("c"), b"c")))
    whole[at : at + len(flip)] = flip
    with tempfile.TemporaryDirectory() as place:
        try:
            extract(bytes(whole), Path(place) / "out")
        except (InvalidRequestError, PayloadTooLargeError, OSError):
            pass
        assert {path.name for path in Path(place).iterdir()} == {"out"}


def test_a_header_without_an_end_is_cut_off(tmp_path: Path) -> None:
    big = member("f")
    big.pax_headers = {"comment": "x" * (1 << 21)}
    with pytest.raises(InvalidRequestError, match="oversized header"):
        extract(archive(big), tmp_path / "out", size=65536)

    def endless() -> Iterator[bytes]:
        header = tarfile.TarInfo("sparse")
        header.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": "s",
            "GNU.sparse.realsize": "1",
        }
        header.size = 1 << 40
        yield header.tobuf(tarfile.PAX_FORMAT)
        yield b"999999999999\n".ljust(512, b"0")
        while True:
            yield b"1\n" * 32768

    (tmp_path / "two").mkdir()
    fd = os.open(tmp_path / "two", os.O_RDONLY)
    try:
        with pytest.raises(InvalidRequestError, match="oversized header"):
            unpack(endless(), fd, Copied())
    finally:
        os.close(fd)


def test_bounds_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MAX_ENTRIES", 3)
    with pytest.raises(PayloadTooLargeError, match="entries"):
        extract(archive(*(member(f"d{n}", tarfile.DIRTYPE) for n in range(4))), tmp_path / "one")
    monkeypatch.setattr(copying, "MAX_TOTAL_BYTES", 1000)
    with pytest.raises(PayloadTooLargeError, match="holds more"):
        extract(archive((member("f"), b"x" * 1001)), tmp_path / "two")


def test_a_file_with_holes_keeps_them(tmp_path: Path) -> None:
    # GNU sparse 1.0: the map "1 block: 512 bytes at 5 MiB", padded, then the block.
    size = 5 * 1024 * 1024 + 512
    info = tarfile.TarInfo("GNUSparseFile.0/s")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "s",
        "GNU.sparse.realsize": str(size),
    }
    info.size = 1024
    data = info.tobuf(tarfile.PAX_FORMAT) + f"1\n{size - 512}\n512\n".encode().ljust(512, b"\0") + b"d" * 512
    extract(data + bytes(1024), tmp_path / "out", size=4096)
    found = (tmp_path / "out" / "s").stat()
    assert found.st_size == size
    assert found.st_blocks * 512 < 1024 * 1024
    assert (tmp_path / "out" / "s").read_bytes() == bytes(size - 512) + b"d" * 512
