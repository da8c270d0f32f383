"""cp against a sandbox that lies: nothing lands outside the target, and what is left out is said."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from agent_sandbox.cli import files
from agent_sandbox.cli.files import Copied, download, upload
from agent_sandbox.errors import InvalidRequestError, NotFoundError, PayloadTooLargeError


@dataclass
class Entry:
    name: str
    type: str
    path: str = "/etc/shadow"


class Box:
    """A sandbox of plain values: directories as lists of entries, files as bytes. It may say anything."""

    def __init__(self, tree: Mapping[str, list[Entry] | bytes]) -> None:
        self.tree = dict(tree)
        self.written: dict[str, tuple[bytes, int]] = {}

    def list_files(self, path: str) -> list[Entry]:
        found = self.tree.get(path)
        if found is None:
            raise NotFoundError(f"no {path}")
        if isinstance(found, bytes):
            raise InvalidRequestError(f"{path} is a file")
        return found

    def read_file(self, path: str) -> bytes:
        found = self.tree.get(path)
        if found is None:
            raise NotFoundError(f"no {path}")
        assert isinstance(found, bytes)
        return found

    def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.written[path] = (data, mode)


def fetch(tree: Mapping[str, list[Entry] | bytes], source: str, target: Path) -> Copied:
    done = Copied()
    download(cast(Any, Box(tree)), source, target, done)
    return done


def send(box: Box, source: Path, target: str) -> Copied:
    done = Copied()
    upload(cast(Any, box), source, target, done)
    return done


def everything_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_a_tree_comes_out_as_it_is(tmp_path: Path) -> None:
    tree: dict[str, list[Entry] | bytes] = {
        "/workspace/src": [Entry("a.txt", "file"), Entry("sub", "directory"), Entry("empty", "directory")],
        "/workspace/src/a.txt": b"A\0",
        "/workspace/src/sub": [Entry("b\udcff \n.bin", "file")],
        "/workspace/src/sub/b\udcff \n.bin": b"B",
        "/workspace/src/empty": [],
    }
    done = fetch(tree, "/workspace/src", tmp_path / "out")
    assert everything_below(tmp_path) == {"out", "out/a.txt", "out/sub", "out/sub/b\udcff \n.bin", "out/empty"}
    assert (tmp_path / "out/a.txt").read_bytes() == b"A\0"
    assert (done.files, done.bytes, done.skipped) == (2, 3, [])


@pytest.mark.parametrize("name", ["..", ".", "", "../../escape", "/etc/cron.d/x", "a/b", "a\0b"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_hostile_names_are_left_out(tmp_path: Path, name: str, kind: str) -> None:
    target = tmp_path / "deep" / "out"
    target.parent.mkdir()
    done = fetch({"/w": [Entry(name, kind), Entry("good", "file")], "/w/good": b"g"}, "/w", target)
    assert everything_below(tmp_path) == {"deep", "deep/out", "deep/out/good"}
    assert [reason for _, reason in done.skipped] == ["a name that leads elsewhere"]


def test_links_and_special_files_are_left_out_and_said(tmp_path: Path) -> None:
    done = fetch({"/w": [Entry("l", "symlink"), Entry("fifo", "other")]}, "/w", tmp_path / "out")
    assert done.skipped == [("/w/l", "a symbolic link"), ("/w/fifo", "not a regular file")]


def test_a_link_that_lies_in_the_target_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    target = tmp_path / "out"
    (target / "w").mkdir(parents=True)
    (target / "w" / "dir").symlink_to(outside)
    (target / "w" / "file").symlink_to(outside / "file")
    with pytest.raises(InvalidRequestError, match="links are not followed"):
        fetch({"/w": [Entry("dir", "directory")], "/w/dir": [Entry("new", "file")], "/w/dir/new": b"x"}, "/w", target)
    with pytest.raises(InvalidRequestError, match="links are not followed"):
        fetch({"/w": [Entry("file", "file")], "/w/file": b"theirs"}, "/w", target)
    assert (outside / "file").read_text() == "mine"
    assert everything_below(outside) == {"file"}


def test_a_fifo_that_lies_in_the_target_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    with pytest.raises(InvalidRequestError):
        fetch({"/w/f": b"x"}, "/w/f", tmp_path / "f")


def test_a_tree_without_an_end_is_cut_off(tmp_path: Path) -> None:
    class Endless(Box):
        def list_files(self, path: str) -> list[Entry]:
            return [Entry("d", "directory")]

    with pytest.raises(PayloadTooLargeError, match="levels"):
        download(cast(Any, Endless({})), "/w", tmp_path / "out", Copied())


def test_a_listing_without_an_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ENTRIES", 5)
    with pytest.raises(PayloadTooLargeError, match="entries"):
        fetch({"/w": [Entry(f"l{n}", "symlink") for n in range(6)]}, "/w", tmp_path / "out")


def test_a_file_goes_to_the_named_file_or_into_the_named_directory(tmp_path: Path) -> None:
    tree: dict[str, list[Entry] | bytes] = {"/w/f.txt": b"data"}
    fetch(tree, "/w/f.txt", tmp_path / "other.txt")
    fetch(tree, "/w/f.txt", tmp_path)
    assert everything_below(tmp_path) == {"other.txt", "f.txt"}
    (tmp_path / "f.txt").write_text("longer than before")
    fetch(tree, "/w/f.txt", tmp_path / "f.txt")
    assert (tmp_path / "f.txt").read_bytes() == b"data"


def test_a_local_tree_goes_in_with_its_modes(tmp_path: Path) -> None:
    root = tmp_path / "src"
    (root / "sub").mkdir(parents=True)
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "sub" / "data").write_bytes(b"\0\xff")
    (root / "sub" / "data").chmod(0o600)
    (root / "void").mkdir()
    (root / "link").symlink_to("/etc/passwd")
    (root / "dirlink").symlink_to("/etc")
    os.mkfifo(root / "fifo")
    box = Box({})
    done = send(box, root, "/workspace/dst")
    assert box.written == {
        "/workspace/dst/run.sh": (b"#!/bin/sh\n", 0o755),
        "/workspace/dst/sub/data": (b"\0\xff", 0o600),
    }
    assert sorted((Path(path).name, reason) for path, reason in done.skipped) == [
        ("dirlink", "not a regular file"),
        ("fifo", "not a regular file"),
        ("link", "not a regular file"),
        ("void", "an empty directory"),
    ]


def test_a_source_goes_into_a_directory_that_exists(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    box = Box({"/workspace/dir": []})
    send(box, tmp_path / "f", "/workspace/dir")
    send(box, tmp_path / "f", "/workspace/new/")
    send(box, tmp_path / "f", "/workspace/name")
    assert set(box.written) == {"/workspace/dir/f", "/workspace/new/f", "/workspace/name"}


def test_a_source_that_is_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for source in (tmp_path / "fifo", Path("/dev/zero"), tmp_path / "link"):
        with pytest.raises(InvalidRequestError, match="regular"):
            send(Box({}), source, "/workspace/x")


def test_a_missing_source_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        send(Box({}), tmp_path / "nothing", "/workspace/x")
    with pytest.raises(NotFoundError):
        fetch({}, "/w", tmp_path / "out")
    assert everything_below(tmp_path) == set()


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("", "/workspace"),
        ("a/b", "/workspace/a/b"),
        ("/tmp/x", "/tmp/x"),
        ("a/", "/workspace/a/"),
        ("../x", "/x"),
        ("/", "/"),
    ],
)
def test_paths_in_a_sandbox_are_relative_to_the_workspace(given: str, path: str) -> None:
    assert files._inside(given) == path
