"""cp against a sandbox that lies, and both ways on a real server: where things land, and what is left of a failure."""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from agent_sandbox.cli import copying, files
from agent_sandbox.cli.copying import Copied
from agent_sandbox.cli.files import download, upload
from agent_sandbox.cli.unpacking import unpack
from agent_sandbox.client import FileStat, Sandbox, SandboxClient
from agent_sandbox.errors import ConflictError, InvalidRequestError, NotFoundError, PayloadTooLargeError
from tests.unit.server_harness import KEY, running, settings_for
from tests.unit.test_cli_unpacking import archive, member


@dataclass
class Entry:
    name: str
    type: str
    path: str = "/etc/shadow"


class Box:
    """A sandbox of plain values: directories as lists of entries, files as bytes. It may say anything."""

    def __init__(self, tree: Mapping[str, list[Entry] | bytes]) -> None:
        self.tree = dict(tree)
        self.mode = "644"

    def list_files(self, path: str) -> list[Entry]:
        found = self.tree.get(path)
        if found is None:
            raise NotFoundError(f"no {path}")
        if isinstance(found, bytes):
            raise InvalidRequestError(f"{path} is a file")
        return found

    def stat(self, path: str) -> FileStat:
        found = self.tree.get(path)
        if found is None:
            raise NotFoundError(f"no {path}")
        kind: Any = "file" if isinstance(found, bytes) else "directory"
        return FileStat(name="x", path="/etc/shadow", type=kind, size=1 << 60, modified_at="", mode=self.mode)

    def read_file(self, path: str) -> bytes:
        found = self.tree.get(path)
        if found is None:
            raise NotFoundError(f"no {path}")
        assert isinstance(found, bytes)
        return found

    def download(self, path: str, file: Any) -> None:
        file.write(self.read_file(path))


def fetch(tree: Mapping[str, list[Entry] | bytes], source: str, target: Path) -> Copied:
    done = Copied()
    download(cast(Any, Box(tree)), source, target, done)
    return done


def everything_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_a_tree_comes_out_as_it_is(tmp_path: Path) -> None:
    tree: dict[str, list[Entry] | bytes] = {
        "/tmp/src": [Entry("a.txt", "file"), Entry("sub", "directory"), Entry("empty", "directory")],
        "/tmp/src/a.txt": b"A\0",
        "/tmp/src/sub": [Entry("b\udcff \n.bin", "file")],
        "/tmp/src/sub/b\udcff \n.bin": b"B",
        "/tmp/src/empty": [],
    }
    done = fetch(tree, "/tmp/src", tmp_path / "out")
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
        download(cast(Any, Endless({"/w": []})), "/w", tmp_path / "out", Copied())


def test_a_listing_without_an_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MAX_ENTRIES", 5)
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


def test_a_missing_source_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        fetch({}, "/w", tmp_path / "out")
    assert everything_below(tmp_path) == set()


def test_what_is_exchanged_for_a_link_leads_to_no_mode_and_no_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root copies into a directory of somebody else's, who exchanges the unfinished copy for a link to what is not."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "secret").touch(mode=0o600)

    class Exchanging(Box):
        def download(self, path: str, file: Any) -> None:
            super().download(path, file)
            unfinished = Path(file._file.name)
            unfinished.unlink()
            unfinished.symlink_to(victim / "secret")

    download(cast(Any, Exchanging({"/w/f": b"data"})), "/w/f", tmp_path / "f", Copied())
    real = tempfile.mkdtemp

    def exchanging(**options: Any) -> str:
        made = Path(real(**options))
        made.rmdir()
        made.symlink_to(victim)
        return str(made)

    monkeypatch.setattr(tempfile, "mkdtemp", exchanging)
    with pytest.raises(InvalidRequestError, match="links are not followed"):
        fetch({"/w": [Entry("name", "file")], "/w/name": b"data"}, "/w", tmp_path / "out")
    assert everything_below(victim) == {"secret"}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (victim, victim / "secret")] == [0o700, 0o600]


def test_what_makes_version_control_run_programs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box = Box({"/w/.git/hooks/pre-commit": b"evil", "/w/f": b"x"})
    (tmp_path / ".git" / "hooks").mkdir(parents=True)
    for source, target in (("/w/.git/hooks/pre-commit", tmp_path / ".git/hooks/post-merge"), ("/w/f", tmp_path / "f")):
        done = Copied()
        download(cast(Any, box), source, target, done)
        done.report()
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if "look at" in line] == [
        "agent-sandbox: look at post-merge before you go there: git and the like run programs that it names"
    ]
    done = Copied()
    repository = [member(name, tarfile.DIRTYPE) for name in ("bare", "bare/objects", "bare/refs")]
    files_ = [(member(name), b"1") for name in ("bare/HEAD", "bare/config", ".hg/hgrc", "f")]
    pieces = iter([archive(*repository, *files_)])
    with files._directory(tmp_path) as fd:
        unpack(pieces, fd, done)
    assert done.noticed.told() == [".hg/hgrc", "bare"]


def test_a_mode_that_is_none_is_an_ordinary_one(tmp_path: Path) -> None:
    for mode, seen in (("6755", 0o755), ("600", 0o600), ("-1", 0o644), ("x" * 1000, 0o644)):
        box = Box({"/w/f": b"x"})
        box.mode = mode
        download(cast(Any, box), "/w/f", tmp_path / "f", Copied())
        assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == seen


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxClient]:
    settings = settings_for(tmp_path_factory.mktemp("server"), max_file_bytes=100_000)
    with running(settings) as server, SandboxClient(server.url, KEY) as it:
        yield it


@pytest.fixture
def sandbox(client: SandboxClient) -> Iterator[Sandbox]:
    with client.create() as it:
        yield it


def send(sandbox: Sandbox, source: Path, target: str) -> Copied:
    done = Copied()
    upload(sandbox, source, target, done)
    return done


def inside(sandbox: Sandbox, path: str = "/workspace") -> dict[str, str]:
    """Every name below a directory of the sandbox, with its type and mode."""
    found = {}
    for entry in sandbox.list_files(path):
        seen = sandbox.stat(entry.path, follow=False)
        found[entry.path.removeprefix("/workspace/")] = f"{seen.type} {seen.mode}"
        if entry.type == "directory":
            found |= inside(sandbox, entry.path)
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "src"
    (root / "sub").mkdir(parents=True)
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "sub" / "data").write_bytes(b"\0\xff")
    (root / "sub" / "data").chmod(0o600)
    (root / "void").mkdir(mode=0o700)
    return root


def test_a_local_tree_goes_in_and_comes_out_whole(sandbox: Sandbox, source: Path, tmp_path: Path) -> None:
    done = send(sandbox, source, "/workspace/new/dst")
    assert (done.files, done.skipped) == (2, [])
    seen = inside(sandbox)
    assert seen == {
        "new": "directory 755",
        "new/dst": "directory 755",
        "new/dst/run.sh": "file 755",
        "new/dst/sub": "directory 755",
        "new/dst/sub/data": "file 600",
        "new/dst/void": "directory 700",
    }
    done = Copied()
    download(sandbox, "/workspace/new/dst", tmp_path / "out", done)
    assert everything_below(tmp_path / "out") == everything_below(source)
    assert stat.S_IMODE((tmp_path / "out" / "void").stat().st_mode) == 0o700
    assert everything_below(tmp_path) == {
        *(f"{top}/{name}" for top in ("src", "out") for name in everything_below(source)),
        "src",
        "out",
    }


def test_a_source_goes_into_a_directory_that_exists(sandbox: Sandbox, source: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    sandbox.mkdir("dir")
    send(sandbox, tmp_path / "f", "/workspace/dir")
    send(sandbox, tmp_path / "f", "/workspace/new/")
    send(sandbox, tmp_path / "f", "/workspace/name")
    send(sandbox, source, "/workspace/dir")
    names = set(inside(sandbox))
    assert {"dir/f", "new/f", "name", "dir/src/run.sh"} <= names
    sandbox.write_file("dir/src/own", "stays")
    (source / "run.sh").write_text("changed")
    send(sandbox, source, "/workspace/dir")
    assert sandbox.read_file("dir/src/own") == b"stays"
    assert sandbox.read_file("dir/src/run.sh") == b"changed"
    (tmp_path / "out" / "src").mkdir(parents=True)
    (tmp_path / "out" / "src" / "mine").write_text("stays")
    download(sandbox, "/workspace/dir/src", tmp_path / "out", Copied())
    assert (tmp_path / "out/src/mine").read_text() == "stays"
    assert (tmp_path / "out/src/run.sh").read_text() == "changed"


def test_a_file_above_the_limit_on_files_goes_both_ways(sandbox: Sandbox, tmp_path: Path) -> None:
    content = os.urandom(250_000)
    (tmp_path / "big").write_bytes(content)
    (tmp_path / "big").chmod(0o640)
    done = send(sandbox, tmp_path / "big", "/workspace/d/big")
    assert (done.files, done.bytes) == (1, 250_000)
    assert sandbox.stat("d/big").mode == "640"
    assert sandbox.stat("d/big").size == 250_000


def test_what_cannot_take_the_place_is_refused(sandbox: Sandbox, source: Path, tmp_path: Path) -> None:
    sandbox.write_file("file", "x")
    sandbox.mkdir("d/f")
    with pytest.raises(ConflictError):
        send(sandbox, source, "/workspace/file")
    (tmp_path / "f").write_text("x")
    with pytest.raises(ConflictError):
        send(sandbox, tmp_path / "f", "/workspace/d")
    (tmp_path / "out" / "file").mkdir(parents=True)
    with pytest.raises(ConflictError):
        download(sandbox, "/workspace/file", tmp_path / "out", Copied())
    with pytest.raises(NotFoundError):
        send(sandbox, tmp_path / "nothing", "/workspace/x")
    assert sandbox.read_file("file") == b"x"


def test_a_copy_that_fails_leaves_nothing(
    sandbox: Sandbox, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(sandbox, source, "/workspace/there")
    monkeypatch.setattr(copying, "MAX_ENTRIES", 3)
    with pytest.raises(PayloadTooLargeError):
        download(sandbox, "/workspace/there", tmp_path / "out", Copied())
    with pytest.raises(PayloadTooLargeError):
        send(sandbox, source, "/workspace/again")
    assert {path.name for path in tmp_path.iterdir()} == {"src"}
    assert {entry.name for entry in sandbox.list_files()} == {"there"}


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


def test_a_source_that_is_a_pipe_or_a_device_is_refused_and_not_waited_for(sandbox: Sandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for special in (tmp_path / "fifo", Path("/dev/zero"), tmp_path / "link"):
        with pytest.raises(InvalidRequestError, match="regular"):
            send(sandbox, special, "/workspace/x")
