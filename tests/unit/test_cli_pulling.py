"""What an agent changed in a copy of a directory comes back to where it was, and to nowhere else."""

from __future__ import annotations

import io
import os
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.cli import exit_codes, pulling, signals, writing_back
from agent_sandbox.cli.copying import Copied
from agent_sandbox.cli.packing import pack_directory
from agent_sandbox.cli.pulling import Pull
from agent_sandbox.cli.version_control import runs_programs
from agent_sandbox.errors import InvalidRequestError, PayloadTooLargeError
from tests.unit.test_cli_unpacking import archive, member, tree


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory of a person's: what lies beside it must never change."""
    place = tmp_path / "here"
    (place / "sub").mkdir(parents=True)
    (place / "kept").write_text("kept\n")
    (place / "text").write_text("one\ntwo\n")
    (place / "sub" / "gone").write_text("gone\n")
    (place / "tool").write_text("#!/bin/sh\n")
    (place / "link").symlink_to("text")
    (tmp_path / "beside").write_text("untouched")
    return place


class Trip:
    """A directory that was sent; :meth:`back` is what the sandbox sends."""

    def __init__(self, pull: Pull, copy: Path, place: Path) -> None:
        self.pull, self.copy, self._place = pull, copy, place
        self.done = Copied()

    def back(self, data: bytes | None = None) -> list[tuple[str, str]]:
        """Take back an archive, or the copy as it is now; give the changes."""
        sent = data if data is not None else b"".join(pack_directory(self.copy, Copied()))
        pulling.take_back(self.pull, iter([sent]), self._place, self.done)
        return [(step.kind, step.name) for step in self.pull.steps]

    def write(self) -> dict[str, str]:
        """Write everything; give what could not be."""
        writing_back.write_back(self.pull, lambda: None)
        return {step.name: step.problem for step in self.pull.steps if step.problem}


@pytest.fixture
def trip(here: Path, tmp_path: Path) -> Iterator[Trip]:
    with signals.handled(), pulling.opened([(here, "/workspace")]) as (pull,), pulling.aside() as place:
        sent = io.BytesIO(b"".join(pack_directory(here, Copied(), pull.sent)))
        copy = tmp_path / "copy"
        with tarfile.open(fileobj=sent) as tar:
            tar.extractall(copy, filter="fully_trusted")
        yield Trip(pull, copy, place)
    assert not place.exists()
    assert (tmp_path / "beside").read_text() == "untouched"


def shape(root: Path) -> dict[str, object]:
    """A tree without times, which Python's archives keep as fractions."""
    return {name: value[:2] if isinstance(value, tuple) else value for name, (_, value) in tree(root).items()}


def change(copy: Path) -> None:
    (copy / "text").write_text("one\nthree\n")
    (copy / "sub" / "gone").unlink()
    (copy / "tool").chmod(0o755)
    (copy / "link").unlink()
    (copy / "link").symlink_to("sub/new")
    (copy / "new" / "deep").mkdir(parents=True)
    (copy / "new" / "deep" / "odd \udcff\n").write_bytes(bytes(300_000))
    (copy / "new" / "twin").hardlink_to(copy / "kept")
    (copy / "new").chmod(0o750)


def test_everything_that_changed_comes_back(here: Path, trip: Trip) -> None:
    assert trip.back() == []
    change(trip.copy)
    assert trip.back() == [
        ("modified", "link"),
        ("added", "new"),
        ("added", "new/deep"),
        ("added", "new/deep/odd \udcff\n"),
        ("added", "new/twin"),
        ("removed", "sub/gone"),
        ("modified", "text"),
        ("metadata", "tool"),
    ]
    before = (here / "kept").stat()
    assert trip.write() == {}
    assert shape(here) == shape(trip.copy)
    assert (here / "text").stat().st_mtime == pytest.approx((trip.copy / "text").stat().st_mtime, abs=1e-5)
    assert (here / "kept").stat() == before, "what did not change is not touched"
    assert (here / "new" / "twin").stat().st_nlink == 1
    assert trip.pull.left_out == []


def test_a_large_file_is_compared_as_well(here: Path, trip: Trip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_HELD_BYTES", 4)
    assert trip.back() == []
    (trip.copy / "text").write_text("one\ntWo\n")
    assert trip.back() == [("modified", "text")]
    assert trip.write() == {}
    assert (here / "text").read_text() == "one\ntWo\n"


def test_a_thing_becomes_another_kind_of_thing(here: Path, trip: Trip) -> None:
    (trip.copy / "text").unlink()
    (trip.copy / "text").mkdir()
    (trip.copy / "text" / "in").write_text("1")
    (trip.copy / "sub" / "gone").unlink()
    (trip.copy / "sub").rmdir()
    (trip.copy / "sub").write_text("now a file")
    (trip.copy / "tool").unlink()
    (trip.copy / "tool").symlink_to("kept")
    assert ("type", "sub") in trip.back()
    assert trip.write() == {}
    assert shape(here) == shape(trip.copy)


def test_what_was_changed_here_meanwhile_stays(here: Path, trip: Trip) -> None:
    change(trip.copy)
    (trip.copy / "sub" / "also").write_text("theirs")
    (trip.copy / "kept").unlink()
    (trip.copy / "both").mkdir()
    trip.back()
    (here / "text").write_text("mine\n")
    (here / "sub" / "gone").write_text("mine too")
    (here / "sub" / "also").write_text("mine as well")
    (here / "link").unlink()
    (here / "tool").unlink()
    (here / "kept").write_text("kept\n")  # the same bytes: nobody loses anything
    (here / "both").mkdir()
    problems = {
        "text": writing_back.CHANGED,
        "sub/gone": writing_back.CHANGED,
        "sub/also": "there is something of this name here now",
        "link": "it was removed here meanwhile",
        "tool": "it was removed here meanwhile",
    }
    writing_back.examine(trip.pull)
    assert {step.name: step.problem for step in trip.pull.steps if step.problem} == problems
    assert trip.write() == problems
    assert (here / "text").read_text() == "mine\n"
    assert (here / "sub" / "gone").read_text() == "mine too"
    assert (here / "sub" / "also").read_text() == "mine as well"
    assert not (here / "kept").exists()
    assert (here / "new" / "deep").is_dir()


def test_a_directory_goes_only_when_it_is_empty(here: Path, trip: Trip) -> None:
    (trip.copy / "sub" / "gone").unlink()
    (trip.copy / "sub").rmdir()
    trip.back()
    (here / "sub" / "mine").write_text("1")
    assert trip.write() == {"sub": "it is not empty here"}
    assert [path.name for path in (here / "sub").iterdir()] == ["mine"]


def test_no_link_is_followed_out_of_the_directory(here: Path, tmp_path: Path, trip: Trip) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "gone").write_text("gone\n")
    change(trip.copy)
    (trip.copy / "sub" / "new").write_text("1")
    trip.back()
    (here / "sub" / "gone").unlink()
    (here / "sub").rmdir()
    (here / "sub").symlink_to(outside)
    problems = trip.write()
    assert set(problems) == {"sub/gone", "sub/new"}
    assert "in the way" in problems["sub/new"]
    assert [path.name for path in outside.iterdir()] == ["gone"]


HOSTILE = archive(
    (member("/abs"), b"1"),
    (member("../up"), b"1"),
    (member("a/../../up"), b"1"),
    member("out", tarfile.SYMTYPE, linkname="../beside"),
    member("abs-link", tarfile.SYMTYPE, linkname="/etc/passwd"),
    (member("out/through"), b"1"),
    member("hard", tarfile.LNKTYPE, linkname="../beside"),
    member("pipe", tarfile.FIFOTYPE),
    member("device", tarfile.CHRTYPE),
    (member("file"), b"1"),
    (member("file/below"), b"1"),
    (member(".git/hooks/post-checkout", mode=0o755), b"#!/bin/sh\n"),
    (member(".GIT/config"), b"[core]\n"),
    (member("setuid", mode=0o6755), b"1"),
)


def test_a_hostile_archive_writes_nothing_elsewhere(here: Path, tmp_path: Path, trip: Trip) -> None:
    trip.back(HOSTILE)
    reasons = dict(trip.pull.left_out)
    assert set(reasons) == {
        *("/abs", "../up", "a/../../up", "out", "abs-link", "pipe", "device"),
        *(".git/hooks/post-checkout", ".GIT/config"),
    }
    problems = trip.write()
    assert set(problems) == {"out/through", "file/below"}
    assert {path.name for path in here.iterdir()} == {"file", "setuid"}, "what is not in it was removed"
    assert (here / "setuid").stat().st_mode & 0o7777 == 0o755
    assert {path.name for path in tmp_path.iterdir()} == {"here", "copy", "beside"}


def test_a_damaged_archive_changes_nothing(here: Path, trip: Trip) -> None:
    with pytest.raises(InvalidRequestError, match="damaged"):
        trip.back(HOSTILE[:2000])
    assert trip.pull.steps == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (".git/config", True),
        ("sub/.git/hooks/pre-commit", True),
        (".git/modules/a/b/config", True),
        (".git/worktrees/w/config.worktree", True),
        (".git/rebase-merge/git-rebase-todo", True),
        (".git/refs/heads/config", False),
        (".git/objects/ab/cd", False),
        (".git/HEAD", False),
        ("hooks/config", False),
        (".git/sl/config", True),
        (".g\u200cit/con\ufb01g", True),
        (".hg/hgrc", True),
        ("sub/.HG/hgrc", True),
        (".hg/sharedpath", True),
        (".hg/store/data/hgrc.i", False),
        (".hg/hgrc.orig", False),
        ("hgrc", False),
        (".sl/config", True),
        (".jj/repo", True),
        (".jj/repo/config.toml", True),
        (".jj/working_copy/tree_state", False),
        (".bzr/branch/branch.conf", True),
        (".pijul/config", True),
        ("_darcs/prefs/defaults", True),
        ("_darcs/inventories/1", False),
        ("CVS/Root", True),
        ("CVS/Entries", False),
        (".fslckout", True),
    ],
)
def test_what_makes_version_control_run_programs(name: str, expected: bool) -> None:
    assert runs_programs(name.split("/")) is expected


def test_names_without_end_are_not_held(trip: Trip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "MAX_NAMES", 5_000)
    links = [member(f"link-{number}", tarfile.SYMTYPE, linkname="a" * 3_000) for number in range(2)]
    with pytest.raises(PayloadTooLargeError, match="names"):
        trip.back(archive(*links))
    assert trip.pull.steps == []


REPOSITORY = ("HEAD", "config", "objects", "refs")


@pytest.mark.parametrize(
    "lead",
    [
        (member(".git"), b"gitdir: innocent\n"),
        member(".git", tarfile.SYMTYPE, linkname="innocent"),
        member("sub/.GIT", tarfile.SYMTYPE, linkname="../innocent"),
        member(".git/modules/sub", tarfile.SYMTYPE, linkname="../../innocent"),
        member(".hg", tarfile.SYMTYPE, linkname="innocent"),
        member("_darcs/prefs", tarfile.SYMTYPE, linkname="../innocent"),
        (member(".git/commondir"), b"../innocent\n"),
        (member(".git/worktrees/w/commondir"), b"../../../innocent\n"),
    ],
)
def test_nothing_leads_version_control_to_another_configuration(trip: Trip, lead: Any) -> None:
    name = (lead[0] if isinstance(lead, tuple) else lead).name
    trip.back(archive((member("innocent/config"), b"[core]\n"), lead))
    assert name in dict(trip.pull.left_out)
    assert name not in [step.name for step in trip.pull.steps]


def test_a_repository_under_any_name_brings_no_configuration(here: Path, trip: Trip) -> None:
    """Git takes the directory that it is run in for a bare repository by what is in it."""
    names = [f"{place}{name}" for place in ("", "fixture/") for name in (*REPOSITORY, "hooks/pre-commit")]
    trip.back(archive(*((member(name), b"1") for name in [*names, "fixture/kept", "config/kept"])))
    assert {name for name, _ in trip.pull.left_out} >= {*names, "config/kept"}
    assert "fixture/kept" in [step.name for step in trip.pull.steps]


def test_a_configuration_that_is_there_gets_no_repository_around_it(here: Path, tmp_path: Path) -> None:
    (here / "later").mkdir()
    (here / "later" / "config").write_text("[core]\n\tfsmonitor = evil\n")
    (here / "later" / "HEAD").write_text("ref: refs/heads/main\n")
    with pulling.opened([(here, "/workspace")]) as (pull,), pulling.aside() as place:
        sent = b"".join(pack_directory(here, Copied(), pull.sent))
        added = archive(*((member(f"later/{name}", tarfile.DIRTYPE)) for name in ("objects", "refs")))
        pulling.take_back(pull, iter([sent[:-1024] + added]), place, Copied())
        assert pull.steps == []
        assert [name for name, _ in pull.left_out] == ["later/objects", "later/refs"]


def test_a_repository_that_is_there_keeps_its_configuration(here: Path) -> None:
    (here / ".git").write_text("gitdir: .bare\n")
    for name in ("objects", "refs"):
        (here / ".bare" / name).mkdir(parents=True)
    (here / ".bare" / "HEAD").write_text("ref: refs/heads/main\n")
    with pulling.opened([(here, "/workspace")]) as (pull,), pulling.aside() as place:
        sent = b"".join(pack_directory(here, Copied(), pull.sent))
        changed = archive((member(".bare/HEAD"), b"ref: refs/heads/other\n"), (member(".bare/config"), b"[core]\n"))
        pulling.take_back(pull, iter([sent[:-1024] + changed]), place, Copied())
        assert [step.name for step in pull.steps] == [".bare/HEAD"]
        assert [name for name, _ in pull.left_out] == [".bare/config"]


def test_a_link_put_in_place_of_what_is_written_changes_nothing_behind_it(
    here: Path, tmp_path: Path, trip: Trip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root writes into a directory that is somebody else's, who exchanges the unfinished file for a link."""
    victim = tmp_path / "beside"
    victim.chmod(0o600)

    def exchange(fd: int, *_: int) -> None:
        place = Path(f"/proc/self/fd/{fd}").readlink()
        place.unlink()
        place.symlink_to(victim)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", exchange)
    (trip.copy / "text").write_text("new")
    (trip.copy / "text").chmod(0o777)
    trip.back()
    trip.write()
    assert victim.stat().st_mode & 0o777 == 0o600


def test_nothing_of_roots_is_given_away_or_opened_by_its_name(
    here: Path, tmp_path: Path, trip: Trip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns the directory puts something of root's under each name at once: by a hard link, or by renaming."""
    victim, theirs, away = here / "kept", here / "theirs", tmp_path / "away"
    theirs.mkdir(mode=0o700)
    (theirs / "secret").write_text("secret")
    away.mkdir()
    kept = [(path.stat().st_ino, path.stat().st_mode) for path in (victim, theirs)]
    changed: list[int] = []

    def exchanged(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, dir_fd: int | None = None) -> Any:
            made = real(*args, dir_fd=dir_fd)
            path = args[1] if name == "symlink" else args[0]
            if dir_fd is not None and (name != "open" or args[1] & os.O_CREAT):
                os.rename(path, away / name, src_dir_fd=dir_fd)
                if name == "mkdir":
                    os.rename(theirs, path, dst_dir_fd=dir_fd)
                else:
                    os.link(victim, path, dst_dir_fd=dir_fd)
            return made

        monkeypatch.setattr(os, name, call)

    def noted(what: str | int, *_: object, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        changed.append(os.stat(what, dir_fd=dir_fd, follow_symlinks=follow_symlinks).st_ino)

    (trip.copy / "text").write_text("new")
    (trip.copy / "pointer").symlink_to("text")
    (trip.copy / "directory").mkdir(mode=0o777)
    trip.back()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 0)
        for name in ("open", "mkdir", "symlink"):
            exchanged(name)
        for name in ("chown", "fchown", "fchmod"):
            patch.setattr(os, name, noted)
        problems = trip.write()
    monkeypatch.undo()
    assert changed, "what was made is given away"
    assert not set(changed) & {inode for inode, _ in kept}
    assert {"directory", "pointer"} <= set(problems)


def test_a_signal_leaves_each_change_whole(here: Path, trip: Trip) -> None:
    for name in ("text", "kept", "tool"):
        (trip.copy / name).write_text(f"new {name}")
    trip.back()
    with pytest.raises(signals.Interrupted):
        writing_back.write_back(trip.pull, lambda: signal.raise_signal(signal.SIGINT))
    written = [path.name for path in here.iterdir() if path.is_file() and path.read_text() == f"new {path.name}"]
    assert written == ["kept"]
    assert (here / "text").read_text() == "one\ntwo\n"
    assert not list(here.glob(".agent-sandbox*"))


def test_what_lies_under_another_directory_is_not_of_this_one(here: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pulling.opened([(here, "/workspace"), (other, "/workspace/lib/x")]) as pulls, pulling.aside() as place:
        assert [pull.others for pull in pulls] == [("lib/x",), ()]
        data = archive(member("lib", tarfile.DIRTYPE), (member("lib/x/f"), b"1"), (member("lib/xy"), b"1"))
        pulling.take_back(pulls[0], iter([data]), place, Copied())
        assert [step.name for step in pulls[0].steps] == ["lib", "lib/xy"]


class Terminal(io.StringIO):
    """Standard input or error of a person."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answers", "yes", "code", "text"),
    [
        (None, False, exit_codes.NOT_WRITTEN, "one\ntwo\n"),
        (None, True, 7, "one\nthree\n"),
        ("n\n", False, 7, "one\ntwo\n"),
        ("", False, 7, "one\ntwo\n"),
        ("what\nd\ny\n", False, 7, "one\nthree\n"),
    ],
)
def test_it_asks_before_it_writes(
    here: Path, trip: Trip, monkeypatch: pytest.MonkeyPatch, answers: str | None, yes: bool, code: int, text: str
) -> None:
    (trip.copy / "text").write_text("one\nthree\n")
    trip.back()
    errors = Terminal() if answers is not None else io.StringIO()
    monkeypatch.setattr("sys.stdin", Terminal(answers) if answers is not None else io.StringIO("y\n"))
    monkeypatch.setattr("sys.stderr", errors)
    assert writing_back.settle([trip.pull], 7, yes=yes, result=None) == code
    assert (here / "text").read_text() == text
    assert f"M {here}/text  (8 B → 10 B)" in errors.getvalue()
    assert ("-two\n+three\n" in errors.getvalue()) is ("d" in (answers or ""))


def test_a_conflict_has_a_code_of_its_own(
    here: Path, trip: Trip, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (trip.copy / "text").write_text("theirs")
    (trip.copy / "kept").write_text("theirs")
    trip.back()
    (here / "text").write_text("mine")
    assert writing_back.settle([trip.pull], 0, yes=True, result=None) == exit_codes.CONFLICTS
    assert ((here / "text").read_text(), (here / "kept").read_text()) == ("mine", "theirs")
    told = capsys.readouterr().err
    assert "! it was changed here meanwhile" in told
    assert "1 of 2 changes are written" in told


def test_as_root_what_is_written_belongs_to_whom_it_did(
    here: Path, trip: Trip, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", lambda fd, uid, gid: given.append((uid, gid)))
    (trip.copy / "text").write_text("new")
    (trip.copy / "added").write_text("new")
    trip.back()
    assert trip.write() == {}
    owner, above = (here / "kept").stat(), here.stat()
    assert given == [(above.st_uid, above.st_gid), (owner.st_uid, owner.st_gid)]
