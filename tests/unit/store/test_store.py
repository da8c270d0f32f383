"""The store's face, on a real directory with each engine."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    StoreBusyError,
    StoreDamagedError,
    StoreError,
)
from agent_sandbox.store import (
    ChangeKind,
    Conflict,
    ConflictKind,
    Conflicts,
    Created,
    HeadMoved,
    Left,
    LogEntry,
    Ref,
    RefKind,
    Store,
    UpToDate,
)
from agent_sandbox.store.objects import MAX_AUTHOR, MAX_MESSAGE, Entry, Type
from agent_sandbox.store.ports import Captured, Objects, Options, Progress, Writer
from agent_sandbox.store.reference import ReferenceEngine
from tests.unit.store.engines import ENGINES, opened
from tests.unit.store.trees import scratch, state_of


@pytest.fixture
def place() -> Iterator[Path]:
    with scratch() as directory:
        yield directory


@pytest.fixture(params=ENGINES, ids=lambda engine: type(engine).__name__)
def store(request: pytest.FixtureRequest, place: Path) -> Iterator[Store]:
    with Store.create(place / "store", engine=request.param) as store:
        yield store


def files(directory: Path, **contents: str | None) -> Path:
    """Write files, ``a__b`` being ``a/b``; None removes one."""
    directory.mkdir(exist_ok=True)
    for name, text in contents.items():
        path = directory / name.replace("__", "/")
        if text is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def commit(store: Store, ref: str, directory: Path, message: str = "") -> bytes:
    made = store.commit(ref, directory, message=message)
    assert isinstance(made, Created)
    return made.commit


def settle() -> None:
    """Let a tick of the file system's clock pass: what changed in the tick of a capture is not remembered."""
    time.sleep(0.1)


def packed(store: Store, place: Path) -> int:
    return sum(path.stat().st_size for path in (place / "store" / "packs").iterdir())


# ---- projects, commits, checkouts ----------------------------------------------------------------------------------


def test_an_empty_project_has_a_layer_and_a_branch(store: Store, place: Path) -> None:
    made = store.init("p", author="me", message="begin")
    (ref,), (layer,), (project,) = store.refs("p"), store.layers("p"), store.projects()
    assert ref == Ref("p", "main", RefKind.BRANCH, made.commit, 0)
    assert (layer.number, layer.commit) == (0, made.commit)
    assert (project.name, project.owners) == ("p", False)
    assert list(store.entries("p")) == []
    (entry,) = store.log("p")
    assert (entry.commit.author, entry.commit.message, entry.commit.parents) == ("me", "begin", ())
    assert entry.commit.base is None
    assert abs(entry.commit.time_ns - time.time_ns()) < 60 * 10**9
    assert entry.commit.root.mtime_ns == entry.commit.time_ns
    with pytest.raises(ConflictError, match="already"):
        store.init("p")
    with pytest.raises(InvalidRequestError):
        store.init("deadbeef")
    assert store.check().clean


def test_an_empty_project_reports_what_a_capture_of_an_empty_directory_does(store: Store, place: Path) -> None:
    (place / "empty").mkdir()
    assert replace(store.init("p").report, stored=0) == replace(store.init("q", place / "empty").report, stored=0)


def test_what_is_committed_comes_back(store: Store, place: Path) -> None:
    work = files(place / "work", a="x", d__b="y" * 200_000)
    os.link(work / "a", work / "d" / "other")
    os.mkfifo(work / "pipe")
    (work / "link").symlink_to("d/b")
    os.utime(work / "a", ns=(0, 123_456_789))
    made = store.init("p", work)
    assert (made.report.files, made.report.symlinks, made.report.fifos) == (3, 1, 1)
    files(work, d__new="z", a="changed")
    head = commit(store, "p", work)
    store.checkout("p@0", place / "old")
    store.checkout("p", place / "new")
    assert state_of(place / "new") == state_of(work)
    assert (place / "old" / "a").read_text() == "x"
    assert (place / "old" / "a").stat().st_mtime_ns == 123_456_789
    assert [entry.id for entry in store.log("p")] == [head, made.commit]
    assert [entry.commit.base for entry in store.log("p")] == [made.commit, None]
    assert store.check().clean


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_state_is_laid_out_in_a_directory_of_somebody_elses_until_nobody_wants_it(store: Store, place: Path) -> None:
    work = files(place / "work", **{f"d__f{number}": str(number) * 9_000 for number in range(300)})
    work.chmod(0o751)
    store.init("p", work)
    for name in ("whole", "half"):
        (place / name).mkdir()
    with opened(place / "whole") as descriptor:
        store.lay_out("p", descriptor, owner=(12_345, 54_321))
    found = [place / "whole", *(place / "whole").rglob("*")]
    assert {(path.lstat().st_uid, path.lstat().st_gid) for path in found} == {(12_345, 54_321)}
    assert [path.stat().st_mode for path in (place / "whole", work)] == [0o40751] * 2
    assert len(found) == 302

    def unwanted(*_: int) -> None:
        raise BackendError("nobody waits")

    with opened(place / "half") as descriptor, pytest.raises(BackendError, match="nobody waits"):
        store.lay_out("p", descriptor, owner=(1, 1), progress=unwanted)


def test_a_commit_of_nothing_new_writes_nothing(store: Store, place: Path) -> None:
    work = files(place / "work", a="x")
    settle()
    made = store.init("p", work)
    before = packed(store, place), store.stats()
    again = store.commit("p", work)
    assert isinstance(again, UpToDate)
    assert again.commit == made.commit
    assert again.report.files == 1
    assert again.report.read == 0  # the stat cache knew
    assert (packed(store, place), store.stats()) == before


def test_a_fresh_commit_believes_no_times(store: Store, place: Path) -> None:
    work = files(place / "work", a="x")
    settle()
    store.init("p", work)
    again = store.commit("p", work, fresh=True)
    assert isinstance(again, UpToDate)
    assert again.report.read == 1
    assert list((place / "store" / "cache").iterdir()) == []


def test_the_report_says_what_was_left_out(store: Store, place: Path) -> None:
    work = files(place / "work", a="x")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(work / "socket"))
    made = store.init("p", work)
    assert [(left.path, left.why) for left in made.report.left_out] == [(b"socket", Left.SOCKET)]


def test_owners_are_recorded_where_the_project_says_so(store: Store, place: Path) -> None:
    work = files(place / "work", a="x")
    os.chown(work / "a", 1234, 2345)
    store.init("with", work, owners=True)
    store.init("without", work)
    assert [entry.owner for entry in store.entries("with")] == [(1234, 2345)]
    assert [entry.owner for entry in store.entries("without")] == [None]
    assert isinstance(store.commit("with", work), UpToDate)
    store.checkout("with", place / "out")
    assert state_of(place / "out", owners=True) == state_of(work, owners=True)
    empty = store.init("empty", owners=True)
    assert next(store.log(empty.commit.hex())).commit.root.owner == (os.geteuid(), os.getegid())


@pytest.mark.parametrize(
    ("author", "message"),
    [("a" * (MAX_AUTHOR + 1), ""), ("", "m" * (MAX_MESSAGE + 1)), ("é" * 513, ""), ("\ud800", ""), ("", "\udfff")],
)
def test_notes_that_a_commit_cannot_keep_are_refused(store: Store, place: Path, author: str, message: str) -> None:
    work = files(place / "work", a="x")
    with pytest.raises(InvalidRequestError):
        store.init("p", work, author=author, message=message)
    store.init("p", author="é" * 512, message="m" * MAX_MESSAGE)
    calls: list[Callable[[], object]] = [
        lambda: store.commit("p", work, author=author, message=message),
        lambda: store.merge("p", "p", author=author, message=message),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError):
            call()
    assert len(list(store.log("p"))) == 1


def test_directories_that_cannot_be_committed(store: Store, place: Path) -> None:
    store.init("p")
    (place / "file").touch()
    with pytest.raises(NotFoundError):
        store.commit("p", place / "nothing")
    with pytest.raises(InvalidRequestError):
        store.commit("p", place / "file")
    for holder in (place, place / "store"):
        with pytest.raises(InvalidRequestError, match="the store itself"):
            store.commit("p", holder)


def test_caches_are_kept_for_the_directories_used_last(
    store: Store, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_sandbox.store.store.MAX_CACHES", 2)
    store.init("p")
    for number in range(5):
        files(place / f"work{number}", a=str(number))
    settle()
    for number in range(5):
        commit(store, "p", place / f"work{number}")
    assert len(list((place / "store" / "cache").iterdir())) == 3
    again = store.commit("p", place / "work4")
    assert isinstance(again, UpToDate)
    assert again.report.read == 0


# ---- heads ---------------------------------------------------------------------------------------------------------


def test_an_expected_head_that_is_not_there_stops_before_reading(store: Store, place: Path) -> None:
    work = files(place / "work", a="x")
    first = store.init("p", work).commit
    files(work, a="y")
    made = store.commit("p", work, expected=first)
    assert isinstance(made, Created)
    assert store.commit("p", place / "not there", expected=first) == HeadMoved(made.commit)
    assert store.resolve("p") == made.commit


class Meddling(ReferenceEngine):
    """Does something else while a directory is captured."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        self.meddle = meddle

    def capture(
        self,
        directory: int,
        objects: Objects,
        writer: Writer,
        *,
        base: Entry | None = None,
        lower: int | None = None,
        cache: Path | None = None,
        overlay: bool = False,
        options: Options | None = None,
        progress: Progress | None = None,
    ) -> Captured:
        captured = super().capture(directory, objects, writer, base=base, options=options)
        self.meddle()
        return captured


def test_of_two_commits_at_once_one_has_no_effect(store: Store, place: Path) -> None:
    first, second = files(place / "one", a="1"), files(place / "two", a="2")
    store.init("p")
    other: list[bytes] = []
    engine = Meddling(lambda: other.append(commit(store, "p", second)))
    before = packed(store, place)
    with Store.open(place / "store", engine=engine) as late:
        assert late.commit("p", first) == HeadMoved(other[0])
    assert store.resolve("p") == other[0]
    assert next(store.log("p")).id == other[0]
    assert packed(store, place) > before
    store.gc()
    assert store.check().clean


def test_a_head_that_moved_while_nothing_had_changed_is_told(store: Store, place: Path) -> None:
    work = files(place / "work", a="1")
    store.init("p", work)
    other: list[bytes] = []
    engine = Meddling(lambda: other.append(commit(store, "p", files(place / "two", a="2"))))
    with Store.open(place / "store", engine=engine) as late:
        assert late.commit("p", work) == HeadMoved(other[0])


def test_a_branch_that_went_meanwhile_is_not_found(store: Store, place: Path) -> None:
    work = files(place / "work", a="1")
    store.init("p")
    store.fork("p", "p:b")
    for meddle in (lambda: store.delete("p:b"), lambda: store.delete_project("p")):
        with Store.open(place / "store", engine=Meddling(meddle)) as late, pytest.raises(NotFoundError):
            late.commit("p:b", work)
        if list(store.projects()):
            store.fork("p", "p:b")
    assert list(store.projects()) == []
    assert store.check().clean


_COMMIT = """
import sys
from pathlib import Path
from agent_sandbox.store import Created, HeadMoved, Store
from agent_sandbox.store.reference import ReferenceEngine
store, work, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
with Store.open(store, engine=ReferenceEngine()) as store:
    for number in range(count):
        (work / "file").write_text(f"{work.name} {number}")
        while True:
            made = store.commit("p", work)
            print(type(made).__name__, made.commit.hex() if isinstance(made, Created) else made.head.hex(), flush=True)
            if isinstance(made, Created):
                break
"""


def test_processes_that_commit_to_one_branch_lose_nothing(place: Path) -> None:
    with Store.create(place / "store", engine=ReferenceEngine()) as store:
        first = store.init("p").commit
        workers = []
        for name in ("one", "two"):
            (place / name).mkdir()
            command = [sys.executable, "-c", _COMMIT, str(place / "store"), str(place / name), "8"]
            workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        lines = [line.split() for worker in workers for line in worker.communicate(timeout=100)[0].splitlines()]
        assert [worker.returncode for worker in workers] == [0, 0]
        made = {id for what, id in lines if what == "Created"}
        assert len(made) == 16
        log = list(store.log("p"))
        assert {entry.id.hex() for entry in log} == made | {first.hex()}
        assert all(len(entry.commit.parents) == 1 for entry in log[:-1])
        assert {id for what, id in lines if what == "HeadMoved"} <= made
        assert store.check().clean


# ---- branches, tags, pins ------------------------------------------------------------------------------------------


def test_a_fork_copies_no_content_and_goes_its_own_way(store: Store, place: Path) -> None:
    work = files(place / "work", a="x" * 100_000)
    first = store.init("p", work).commit
    before = packed(store, place)
    assert store.fork("p@0", "p:b") == Ref("p", "b", RefKind.BRANCH, first, 0)
    assert packed(store, place) == before
    files(work, a="y")
    head = commit(store, "p:b", work)
    assert (store.resolve("p"), store.resolve("p:b")) == (first, head)
    with pytest.raises(ConflictError, match="already"):
        store.fork("p", "p:b")
    for target in ("p", "p@0", head.hex(), "x y"):
        with pytest.raises(InvalidRequestError):
            store.fork("p", target)
    with pytest.raises(NotFoundError, match="no project 'q'; there are: p"):
        store.fork("p", "q:b")


def test_a_fork_into_another_project_stands_on_none_of_its_layers(store: Store, place: Path) -> None:
    store.init("p", files(place / "work", a="x"))
    store.init("q")
    assert store.fork("p", "q:from").base is None
    with pytest.raises(ConflictError, match="no common history"):
        store.merge("q", "q:from")
    assert store.add("q:from") == HeadMoved(store.resolve("q@0"))


def test_a_fork_of_a_commit_knows_its_layer(store: Store, place: Path) -> None:
    work = files(place / "work", a="1")
    first = store.init("p", work).commit
    second = commit(store, "p", files(work, a="2"))
    store.add("p")
    third = commit(store, "p", files(work, a="3"))
    assert [store.fork(id.hex(), f"p:b{n}").base for n, id in enumerate((first, second, third))] == [0, 1, 1]


def test_tags_stay_where_they_are(store: Store, place: Path) -> None:
    work = files(place / "work", a="1")
    first = store.init("p", work).commit
    assert store.tag("p", "v1") == Ref("p", "v1", RefKind.TAG, first, 0)
    assert store.tag(first.hex(), "p:v2").head == first
    commit(store, "p", files(work, a="2"))
    assert store.resolve("p:v1") == first
    with pytest.raises(ConflictError):
        store.tag("p", "v1")
    with pytest.raises(ConflictError):
        store.tag("p", "main")
    with pytest.raises(InvalidRequestError, match="tag it as PROJECT:v3"):
        store.tag(first.hex(), "v3")
    with pytest.raises(InvalidRequestError, match="is a tag"):
        store.commit("p:v1", work)
    store.delete("p:v1")
    with pytest.raises(NotFoundError, match="there are: main, v2"):
        store.resolve("p:v1")
    with pytest.raises(NotFoundError):
        store.delete("p:v1")
    with pytest.raises(InvalidRequestError, match="use PROJECT:NAME"):
        store.delete("p")


def test_pins_keep_states(store: Store, place: Path) -> None:
    work = files(place / "work", a="1")
    store.init("p")
    store.fork("p", "p:b")
    head = commit(store, "p:b", work)
    store.pin("snap", "p:b")
    store.delete("p:b")
    store.gc()
    store.checkout(head.hex(), place / "out")
    assert [(pin.name, pin.commit) for pin in store.pins()] == [("snap", head)]
    store.unpin("snap")
    with pytest.raises(NotFoundError, match="no pin 'snap'"):
        store.unpin("snap")
    store.gc()
    with pytest.raises(NotFoundError):
        store.resolve(head.hex())


def test_a_deleted_project_is_gone_with_all_its_names(store: Store, place: Path) -> None:
    store.init("p", files(place / "work", a="x" * 100_000))
    store.delete_project("p")
    with pytest.raises(NotFoundError):
        store.resolve("p")
    with pytest.raises(NotFoundError):
        store.delete_project("p")
    with pytest.raises(NotFoundError):
        store.refs("p")
    store.gc()
    assert store.stats().objects == 0


def test_a_branch_can_be_put_back_to_any_state(store: Store, place: Path) -> None:
    work = files(place / "work", a="1")
    first = store.init("p", work).commit
    second = commit(store, "p", files(work, a="2"))
    store.add("p")
    assert store.reset("p", "p@0") == Ref("p", "main", RefKind.BRANCH, first, 0)
    assert store.resolve("p") == first
    third = commit(store, "p", files(work, a="3"))
    assert [entry.id for entry in store.log("p")] == [third, first]
    assert store.add("p") == HeadMoved(second)  # the last layer is no longer in its history
    assert store.reset("p", second.hex()).base == 1
    assert store.add("p") == UpToDate(second)
    store.tag("p", "v")
    store.forget(third.hex())
    for branch, state, error in (
        ("p:v", "p", InvalidRequestError), ("p:x", "p", NotFoundError), ("p", "p:x", NotFoundError),
        ("p", third.hex(), NotFoundError),
    ):  # fmt: skip
        with pytest.raises(error):
            store.reset(branch, state)
    assert store.resolve("p") == second


def test_publishing_is_a_line(store: Store, place: Path) -> None:
    work = files(place / "work", a="1")
    first = store.init("p", work).commit
    assert store.add("p") == UpToDate(first)
    store.fork("p", "p:late")
    second = commit(store, "p", files(work, a="2"))
    assert store.add("p") == Created(second)
    assert store.add("p") == UpToDate(second)
    assert [layer.commit for layer in store.layers("p")] == [first, second]
    commit(store, "p:late", files(place / "late", a="1", b="1"))
    assert store.add("p:late") == HeadMoved(second)
    merged = store.merge("p:late", "p@1")
    assert isinstance(merged, Created)
    assert next(store.log("p:late")).commit.base == second
    assert store.add("p:late") == Created(merged.commit)
    third = commit(store, "p:late", files(place / "late", b="2", a="2"))
    assert next(store.log(third.hex())).commit.base == merged.commit


def test_a_branch_at_a_published_head_may_go_on(store: Store, place: Path) -> None:
    """Its own layer is older, but the last one is in its history."""
    work = files(place / "work", a="1")
    store.init("p", work)
    commit(store, "p", files(work, a="2"))
    store.fork("p", "p:twin")
    store.add("p")
    head = commit(store, "p:twin", files(work, a="3"))
    assert store.add("p:twin") == Created(head)


def test_a_layer_that_is_published_while_a_commit_is_made_stays_its_base(store: Store, place: Path) -> None:
    work = files(place / "work", a="1")
    store.init("p", work)
    commit(store, "p", files(work, a="2"))
    with Store.open(place / "store", engine=Meddling(lambda: store.add("p"))) as late:
        assert isinstance(late.commit("p", files(work, a="3")), Created)
    assert next(store.refs("p")).base == 1


# ---- merging -------------------------------------------------------------------------------------------------------


def test_merging_brings_both_sides_together(store: Store, place: Path) -> None:
    left, right = files(place / "l", a="1", b="1"), files(place / "r", a="1", b="1")
    for directory in (left, right):
        for path in (*directory.iterdir(), directory):
            os.utime(path, ns=(0, 1))
    base = store.init("p", left).commit
    store.fork("p", "p:b")
    assert isinstance(store.commit("p:b", right), UpToDate)
    theirs = commit(store, "p:b", files(right, b="2", new="3"))
    assert store.merge("p", "p:b") == Created(theirs)  # nothing of its own: it moves there
    assert store.merge("p", "p:b") == UpToDate(theirs)
    assert store.merge("p", "p") == UpToDate(theirs)
    assert store.merge("p", base.hex()) == UpToDate(theirs)
    mine = commit(store, "p", files(left, a="2", b="2", new="3"))
    theirs = commit(store, "p:b", files(right, b="4"))
    made = store.merge("p", "p:b", author="me", message="together")
    assert isinstance(made, Created)
    entry = next(store.log("p"))
    assert (entry.id, entry.commit.parents) == (made.commit, (mine, theirs))
    assert (entry.commit.author, entry.commit.message, entry.commit.base) == ("me", "together", base)
    store.checkout("p", place / "out")
    contents = {path.name: path.read_text() for path in (place / "out").iterdir()}
    assert contents == {"a": "2", "b": "4", "new": "3"}
    assert isinstance(store.commit("p", place / "out"), UpToDate)
    assert store.check().clean


def test_conflicts_change_nothing(store: Store, place: Path) -> None:
    work = files(place / "work", a="1")
    base = store.init("p", work).commit
    store.fork("p", "p:b")
    mine = commit(store, "p", files(work, a="2"))
    theirs = commit(store, "p:b", files(work, a="3"))
    found = store.merge("p", "p:b")
    assert found == Conflicts(base, (Conflict(b"a", (ConflictKind.CONTENT, ConflictKind.MTIME)),), 1)
    assert (store.resolve("p"), store.resolve("p:b")) == (mine, theirs)


def test_unrelated_histories_are_refused(store: Store, place: Path) -> None:
    store.init("p", files(place / "work", a="1"))
    store.init("q", files(place / "work", a="2"))
    before = store.stats()
    with pytest.raises(ConflictError, match="no common history"):
        store.merge("p", "q")
    assert store.stats() == before


def test_a_forgotten_ancestor_cannot_be_merged_against(store: Store, place: Path) -> None:
    work = files(place / "work", a="1")
    store.init("p")
    middle = commit(store, "p", work)
    store.fork("p", "p:b")
    commit(store, "p", files(work, a="2"))
    commit(store, "p:b", files(work, b="2"))
    store.forget(middle.hex())
    with pytest.raises(ConflictError, match="was forgotten"):
        store.merge("p", "p:b")
    store.gc()
    with pytest.raises(ConflictError, match="was forgotten"):
        store.merge("p", "p:b")
    assert [entry.forgotten for entry in store.log("p")] == [False, True, False]
    with pytest.raises(NotFoundError, match="is gone"):
        store.checkout(middle.hex(), place / "out")
    for call in (lambda: store.fork(middle.hex(), "p:c"), lambda: store.pin("x", middle.hex())):
        with pytest.raises(NotFoundError):
            call()
    assert store.check().clean


# ---- reading -------------------------------------------------------------------------------------------------------


def test_differences_and_their_text(store: Store, place: Path) -> None:
    work = files(place / "work", a="1\n", d__b="x", gone="x")
    store.init("p", work)
    commit(store, "p", files(work, a="2\n", gone=None, d__new="y\n"))
    changes = {change.path: change for change in store.diff("p@0", "p")}
    assert {path: change.kind for path, change in changes.items()} == {
        b"": ChangeKind.METADATA,
        b"a": ChangeKind.MODIFIED,
        b"d": ChangeKind.METADATA,
        b"d/new": ChangeKind.ADDED,
        b"gone": ChangeKind.REMOVED,
    }
    text = "".join(store.hunks(changes[b"a"]))
    assert text == "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-1\n+2\n"
    assert list(store.diff("p", "p")) == []


def test_logs_are_bounded(store: Store, place: Path) -> None:
    work = files(place / "work", a="0")
    store.init("p", work)
    for number in range(1, 4):
        commit(store, "p", files(work, a=str(number)), f"number {number}")
    assert [entry.commit.message for entry in store.log("p", 2)] == ["number 3", "number 2"]
    assert len(list(store.log("p"))) == 4
    assert list(store.log("p", 0)) == []
    with pytest.raises(InvalidRequestError):
        store.log("p", -1)


def test_contents_and_entries_are_read_by_path(store: Store, place: Path) -> None:
    work = files(place / "work", d__a="x" * 200_000, e="")
    (work / "link").symlink_to("e")
    store.init("p", work)
    assert b"".join(store.read("p", b"d/a")) == b"x" * 200_000
    assert list(store.read("p", b"e")) == []
    assert [(entry.name, entry.type) for entry in store.entries("p")] == [
        (b"d", Type.DIRECTORY), (b"e", Type.FILE), (b"link", Type.SYMLINK),
    ]  # fmt: skip
    assert [entry.name for entry in store.entries("p", b"d")] == [b"a"]
    for path, error in ((b"no", NotFoundError), (b"d/a/b", NotFoundError), (b"d", InvalidRequestError),
                        (b"link", InvalidRequestError), (b"../x", NotFoundError), (b"/d", NotFoundError)):  # fmt: skip
        with pytest.raises(error):
            store.read("p", path)
    with pytest.raises(InvalidRequestError):
        store.entries("p", b"e")


def test_a_state_that_is_removed_while_it_is_read_is_not_called_damage(store: Store, place: Path) -> None:
    store.init("p")
    store.fork("p", "p:b")
    commit(store, "p:b", files(place / "work", **{f"d{n}__f": str(n) for n in range(50)}))
    changes = store.diff("p@0", "p:b")
    next(changes)
    store.delete("p:b")
    with Store.open(place / "store", engine=ReferenceEngine()) as other:
        other.gc()
    store._database._cache._items.clear()
    with pytest.raises(NotFoundError, match="is gone"):
        list(changes)


def test_a_damaged_object_is_called_damage(store: Store, place: Path) -> None:
    store.init("p", files(place / "work", a="x" * 1_000))
    content = store.read("p", b"a")
    (pack,) = (place / "store" / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[40:] = bytes(len(data) - 40)
    pack.write_bytes(data)
    with pytest.raises(StoreDamagedError):
        list(content)


class Failing(ReferenceEngine):
    """Builds half of a checkout."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def checkout(
        self,
        root: Entry,
        directory: int,
        objects: Objects,
        *,
        options: Options | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().checkout(root, directory, objects, options=options)
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreError("x")])
def test_a_checkout_that_ends_early_leaves_nothing(place: Path, error: BaseException) -> None:
    with Store.create(place / "store", engine=Failing(error)) as store:
        store.init("p", files(place / "work", d__a="x"))
        (place / "empty").mkdir()
        before = sorted(place.iterdir())
        for target in ("new", "empty"):
            with pytest.raises(type(error)):
                store.checkout("p", place / target)
        assert sorted(place.iterdir()) == before
        assert list((place / "empty").iterdir()) == []


def test_a_checkout_goes_into_an_empty_directory_and_no_other(store: Store, place: Path) -> None:
    work = files(place / "work", a="x")
    store.init("p", work)
    (place / "empty").mkdir(0o700)
    store.checkout("p", place / "empty")
    assert state_of(place / "empty") == state_of(work)
    with pytest.raises(ConflictError, match="not empty"):
        store.checkout("p", place / "empty")
    with pytest.raises(NotFoundError):
        store.checkout("nothing", place / "new")
    assert not (place / "new").exists()


# ---- archives ------------------------------------------------------------------------------------------------------


def test_archives_go_out_and_come_in(store: Store, place: Path) -> None:
    work = files(place / "work", a="1", d__b="2" * 200_000)
    os.link(work / "a", work / "d" / "other")
    store.init("p", work)
    archive = io.BytesIO()
    store.export_tar("p", archive)
    store.init("q")
    archive.seek(0)
    made = store.import_tar("q", archive, author="me", message="in")
    assert isinstance(made, Created)
    assert list(store.diff("p", "q")) == []
    archive.seek(0)
    assert isinstance(store.import_tar("q", archive), UpToDate)
    archive.seek(0)
    assert store.import_tar("q", archive, expected=bytes(32)) == HeadMoved(made.commit)
    with pytest.raises(InvalidRequestError):
        store.import_tar("q", io.BytesIO(b"no archive" * 100))
    assert store.resolve("q") == made.commit


def test_a_project_begins_with_an_archive_or_not_at_all(store: Store, place: Path) -> None:
    store.init("p", files(place / "work", a="12", b="345"))
    archive = io.BytesIO()
    store.export_tar("p", archive)

    def begin(name: str, max_bytes: int) -> Created:
        archive.seek(0)
        return store.init_tar(name, archive, message="in", max_bytes=max_bytes)

    with pytest.raises(PayloadTooLargeError, match="more than 4 bytes"):
        begin("q", 4)
    with pytest.raises(InvalidRequestError):
        store.init_tar("q", io.BytesIO(b"no archive" * 100))
    assert [project.name for project in store.projects()] == ["p"]
    made = begin("q", 5)
    assert (made.report.bytes, list(store.diff("p", "q"))) == (5, [])
    assert [layer.commit for layer in store.layers("q")] == [made.commit] == [store.resolve("q")]
    with pytest.raises(ConflictError, match="already"):
        begin("q", 5)


def test_any_state_that_comes_from_the_last_layer_can_be_the_next_one(store: Store, place: Path) -> None:
    work = files(place / "work", a="1")
    store.init("p", work)
    store.init("other")
    store.fork("p", "other:work")
    first = commit(store, "other:work", files(work, a="2"))
    store.fork("p", "other:late")
    late = commit(store, "other:late", files(work, a="3"))
    assert isinstance(store.extend("p", first.hex()), Created)
    assert ([layer.commit for layer in store.layers("p")][1:], store.resolve("p")) == ([first], first)
    assert store.extend("p", late.hex()) == HeadMoved(first)
    second = commit(store, "other:work", files(work, a="4"))
    assert isinstance(store.extend("p", "other:work"), Created)
    assert store.extend("p", first.hex()) == UpToDate(first), "also when others have gone on"
    assert [layer.commit for layer in store.layers("p")][1:] == [first, second]
    mine = commit(store, "p", files(work, a="5"))
    third = commit(store, "other:work", files(work, a="6"))
    assert isinstance(store.extend("p", third.hex()), Created)
    assert store.resolve("p") == mine, "what is not published stays where it is"
    with pytest.raises(NotFoundError, match="no project"):
        store.extend("nobody", first.hex())


def test_layers_go_out_and_come_in(store: Store, place: Path) -> None:
    work = files(place / "work", a="1", d__b="2", gone="x")
    store.init("p", work)
    commit(store, "p", files(work, a="2", d__new="3", gone=None))
    store.init("q")
    for base, ref in ((None, "p@0"), ("p@0", "p")):
        layer = io.BytesIO()
        store.export_layer(ref, base, layer)
        layer.seek(0)
        assert isinstance(store.import_layer("q", layer, author="me", message="in"), Created)
        assert list(store.diff(ref, "q")) == []


# ---- several at once -----------------------------------------------------------------------------------------------


def test_gc_waits_for_what_runs_and_says_when_it_did_not_come_to_it(store: Store, place: Path) -> None:
    work = files(place / "work", a="1")
    store.init("p")
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(60)

    made: list[object] = []

    def work_on() -> None:
        with Store.open(place / "store", engine=Meddling(hold)) as other:
            made.append(other.commit("p", work))

    thread = threading.Thread(target=work_on)
    thread.start()
    assert begun.wait(60)
    with pytest.raises(StoreBusyError):
        store.gc(wait_seconds=0.05)
    go_on.set()
    thread.join()
    assert isinstance(made[0], Created)
    store.gc()
    assert store.check().clean


def test_a_store_is_safe_for_threads(store: Store, place: Path) -> None:
    store.init("p")
    for number in range(4):
        store.fork("p", f"p:b{number}")

    def work_on(number: int) -> None:
        for step in range(5):
            commit(store, f"p:b{number}", files(place / f"work{number}", a=f"{number} {step}"))
            assert b"".join(store.read(f"p:b{number}", b"a")) == f"{number} {step}".encode()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work_on, range(4)))
    assert store.check().clean


def test_the_compiled_engine_is_the_default(place: Path) -> None:
    work = files(place / "work", a="x")
    with Store.create(place / "store") as store:
        store.init("p", work)
        store.checkout("p", place / "out")
    assert state_of(place / "out") == state_of(work)


def test_a_missing_engine_is_said_where_it_is_needed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "agent_sandbox.store.native", None)
    monkeypatch.delattr("agent_sandbox.store.native", raising=False)
    work = files(place / "work", a="x")
    with Store.create(place / "store") as store:
        store.init("p")
        with pytest.raises(StoreError, match=r"install agent-sandbox\[server\]"):
            store.commit("p", work)
        assert len(list(store.log("p"))) == 1


def test_log_entries_are_plain_values(store: Store) -> None:
    made = store.init("p")
    entry = next(store.log("p"))
    assert entry == LogEntry(made.commit, entry.commit, False)
