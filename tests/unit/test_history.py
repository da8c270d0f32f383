"""Looking back: the bounds of a comparison, archives at their reader's speed, and backends that keep no history."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from agent_sandbox import models
from agent_sandbox.client import history_requests
from agent_sandbox.errors import BackendError, InvalidRequestError, ValidationError
from agent_sandbox.manager import history, pieces
from agent_sandbox.manager.history import Differences, compare
from agent_sandbox.manager.keeping import from_directory
from agent_sandbox.manager.workspaces import EMPTY, PROJECT, Workspaces
from agent_sandbox.store import Created, Store
from agent_sandbox.types import HeldWorkspace
from tests.unit.server_harness import Running, running, settings_for


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as store:
        store.init("p")
        yield store


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


def committed(store: Store, tree: Path) -> str:
    made = store.commit("p", tree)
    assert isinstance(made, Created)
    return made.commit.hex()


def paths(found: Differences) -> list[str]:
    return [change.path for change in found.changes]


def test_a_directory_that_is_merely_newer_is_left_out(store: Store, tree: Path) -> None:
    for name in ("quiet", "moded"):
        (tree / name).mkdir()
    (tree / "quiet" / "f").write_text("1")
    before = committed(store, tree)
    (tree / "quiet" / "f").write_text("22")
    (tree / "moded").chmod(0o700)
    for name in ("quiet", "moded", "."):
        os.utime(tree / name, ns=(1, 1))
    found = compare(store, before, committed(store, tree), limit=10, text=False)
    assert [(change.path, change.kind) for change in found.changes] == [
        ("/workspace/moded", "metadata"),
        ("/workspace/quiet/f", "modified"),
    ]
    assert (found.changes[1].old_size, found.changes[1].new_size) == (1, 2)
    tree.chmod(0o700)
    assert paths(compare(store, before, committed(store, tree), limit=10, text=False))[0] == "/workspace"


def test_the_list_ends_at_its_bounds_and_says_so(store: Store, tree: Path) -> None:
    before = committed(store, tree)
    for name in "abc":
        (tree / name).write_text(name)
    after = committed(store, tree)

    def cut(limit: int, path_bytes: int = 100) -> tuple[list[str], bool]:
        found = compare(store, before, after, limit=limit, text=False, path_bytes=path_bytes)
        return paths(found), found.truncated

    assert cut(3) == (["/workspace/a", "/workspace/b", "/workspace/c"], False)
    assert cut(2) == (["/workspace/a", "/workspace/b"], True)
    assert cut(3, path_bytes=3) == cut(3)
    assert cut(3, path_bytes=2) == cut(2)


def test_a_text_is_whole_or_left_out(store: Store, tree: Path) -> None:
    before = committed(store, tree)
    for name, text in (("a", "é\n"), ("b", "much more of it\n"), ("c", "3\n")):
        (tree / name).write_text(text)
    after = committed(store, tree)
    whole = compare(store, before, after, limit=9, text=True)
    size = {change.path[-1]: len((change.text or "").encode()) for change in whole.changes}
    assert (whole.text_truncated, size["a"]) == (False, len("--- /dev/null\n+++ b/a\n@@ -0,0 +1 @@\n+é\n".encode()))

    def texts(room: int) -> tuple[str, bool, bool]:
        found = compare(store, before, after, limit=9, text=True, text_bytes=room)
        kept = "".join(change.path[-1] for change in found.changes if change.text is not None)
        return kept, found.text_truncated, found.truncated

    assert texts(sum(size.values())) == ("abc", False, False)
    assert texts(sum(size.values()) - 1) == ("ab", True, False)
    assert texts(size["a"] + size["c"]) == ("ac", True, False)


def test_a_comparison_that_takes_too_long_is_cut(store: Store, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = committed(store, tree)
    (tree / "a").write_text("1")
    after = committed(store, tree)
    monkeypatch.setattr(history, "_SECONDS", -1.0)
    assert compare(store, before, after, limit=9, text=True) == Differences((), True, False)


def test_the_bytes_of_a_state_are_counted_as_its_capture_counted_them(store: Store, tree: Path) -> None:
    (tree / "d").mkdir()
    with (tree / "d" / "holes").open("wb") as file:
        file.truncate(8 << 20)
        file.write(b"x" * 102_400)  # whole pages: a hole ends where one does
    (tree / "twice").write_bytes(os.urandom(3_000_000))
    (tree / "again").hardlink_to(tree / "twice")
    (tree / "link").symlink_to("twice")
    (tree / "empty").touch()
    made = store.commit("p", tree)
    assert isinstance(made, Created)
    assert made.report.bytes == 3_102_400
    assert store.data_bytes(made.commit.hex()) == made.report.bytes


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Workspaces]:
    async def in_use() -> set[str]:
        return set()

    held = Workspaces(tmp_path / "data", 1 << 30, in_use)
    (tmp_path / "data").mkdir()
    await held.start((), ())
    yield held
    await held.close()


async def test_a_state_aside_leaves_no_name(kept: Workspaces, tree: Path) -> None:
    (tree / "f").write_text("1")
    held = from_directory(HeldWorkspace(str(tree), False))
    async with kept.aside("sb1", EMPTY, held, 1 << 20) as now:
        found = await kept.ask(lambda store: compare(store, EMPTY, now.taken.commit, limit=9, text=False))
        assert paths(found) == ["/workspace/f"]
        assert await kept.head("sb1") is None
    assert await kept.ask(lambda store: [ref.name for ref in store.refs(PROJECT)]) == ["main"]
    with pytest.raises(InvalidRequestError):
        async with kept.aside("sb1", "no state", held, 1 << 20):
            raise AssertionError("it began nowhere")


async def test_a_state_aside_that_a_crash_left_goes_with_the_next_start(
    kept: Workspaces, tree: Path, tmp_path: Path
) -> None:
    async def in_use() -> set[str]:
        return set()

    held = from_directory(HeldWorkspace(str(tree), False))
    (tree / "f").write_text("1")
    commit = (await kept.take("sb1", "snap1", held, 1 << 20)).commit
    async with kept.aside("sb1", commit, held, 1 << 20):
        later = Workspaces(tmp_path / "data", 1 << 30, in_use)
        await later.start(("snap1",), ("sb1",))
        assert {ref.name for ref in await later.ask(lambda store: list(store.refs(PROJECT)))} == {"main", "sb1"}
        await later.close()


async def test_comparisons_hold_no_snapshot_up(kept: Workspaces, tree: Path) -> None:
    ended = threading.Event()
    busy = [asyncio.ensure_future(kept.study(lambda _: ended.wait(30))) for _ in range(9)]
    await kept.take("sb1", "snap1", from_directory(HeldWorkspace(str(tree), False)), 1 << 20)
    assert not ended.is_set()
    assert not any(one.done() for one in busy)
    ended.set()
    assert await asyncio.gather(*busy) == [True] * 9


async def take_a_large_state(kept: Workspaces, tree: Path) -> str:
    (tree / "big").write_bytes(os.urandom(8 << 20))
    return (await kept.take("sb1", "snap1", from_directory(HeldWorkspace(str(tree), False)), 1 << 30)).commit


async def test_an_archive_waits_for_a_reader_at_its_very_end(kept: Workspaces, tree: Path) -> None:
    commit = await take_a_large_state(kept, tree)
    pieces = []
    async with aclosing(kept.archive(commit)) as archive:
        async for piece in archive:
            await asyncio.sleep(0.01)
            pieces.append(piece)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        found = tar.extractfile("big")
        assert found is not None
        assert found.read() == (tree / "big").read_bytes()


async def test_a_reader_that_stands_still_loses_its_archive(
    kept: Workspaces, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = await take_a_large_state(kept, tree)
    monkeypatch.setattr(pieces, "STALL_SECONDS", 0.0)
    for seconds in (1.5, 6, 30):  # the writer looks every half second, unless the machine has no time for it
        archive = kept.archive(commit)
        await anext(archive)
        await asyncio.sleep(seconds)
        try:
            [piece async for piece in archive]
        except BackendError as error:
            said = error.message
            break
    else:
        pytest.fail("the archive came whole")
    assert "nobody reads" in said


async def test_an_archive_that_nobody_wants_any_more_ends(kept: Workspaces, tree: Path) -> None:
    commit = await take_a_large_state(kept, tree)
    for _ in range(6):  # more than there are threads
        archive = kept.archive(commit)
        await anext(archive)
        await archive.aclose()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_for(tmp_path_factory.mktemp("server"))) as it:
        yield it


def test_a_backend_without_layers_has_a_history_all_the_same(server: Running) -> None:
    sandbox = f"/v1/sandboxes/{server.create()}"
    server.call("PUT", sandbox + "/files?path=d/kept", b"12345")
    name = server.call("POST", sandbox + "/snapshots").json["id"]
    snap = f"/v1/snapshots/{name}"
    server.call("PUT", sandbox + "/files?path=d/kept", b"other\n")
    changes = server.call("GET", f"{sandbox}/changes").json["changes"]
    assert [(change["path"], change["kind"]) for change in changes] == [("/workspace/d/kept", "modified")]
    later = server.call("POST", sandbox + "/snapshots").json["id"]
    found = server.call("GET", f"{snap}/diff/{later}?text=true").json["changes"]
    assert [change["text"] for change in found] == [
        "--- a/d/kept\n+++ b/d/kept\n@@ -1 +1 @@\n-12345\n\\ No newline at end of file\n+other\n"
    ]
    assert [entry["snapshot_ids"] for entry in server.call("GET", f"/v1/snapshots/{later}/log").json["states"]][:2] == [
        [later],
        [name],
    ]
    for path in (f"{snap}/diff/none", f"/v1/snapshots/none/diff/{name}", "/v1/snapshots/none/archive"):
        assert server.call("GET", path).status == 404
    reply = server.call("GET", f"{snap}/archive")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/x-tar")
    assert reply.headers["x-content-type-options"] == "nosniff"
    with tarfile.open(fileobj=io.BytesIO(reply.body)) as tar:
        assert "d/kept" in {member.name.removeprefix("./") for member in tar.getmembers()}


def test_a_fork_is_merged_back_without_layers(server: Running) -> None:
    sandbox = f"/v1/sandboxes/{server.create()}"
    server.call("PUT", sandbox + "/files?path=both", b"1")
    name = server.call("POST", sandbox + "/snapshots").json["id"]
    fork = f"/v1/sandboxes/{server.call('POST', f'/v1/snapshots/{name}/fork').json['id']}"
    server.call("PUT", fork + "/files?path=theirs", b"2")
    server.call("PUT", sandbox + "/files?path=ours", b"3")
    theirs = server.call("POST", fork + "/snapshots").json["id"]
    reply = server.call("POST", f"{sandbox}/merge", {"snapshot_id": theirs})
    assert (reply.status, reply.json["outcome"]) == (200, "merged")
    assert [server.call("GET", f"{sandbox}/files?path={path}").body for path in ("both", "theirs", "ours")] == [
        b"1",
        b"2",
        b"3",
    ]


def test_calls_name_snapshots_safely_and_send_what_is_given() -> None:
    assert history_requests.diff("a/b", "c?d", text=False, limit=None).path == "/v1/snapshots/a%2Fb/diff/c%3Fd"
    assert history_requests.diff("a", "b", text=True, limit=5).path == "/v1/snapshots/a/diff/b?text=true&limit=5"
    assert history_requests.changes("sb1", text=True, limit=None).path == "/v1/sandboxes/sb1/changes?text=true"
    assert history_requests.log("a", 3).path == "/v1/snapshots/a/log?limit=3"
    assert history_requests.archive("a").path == "/v1/snapshots/a/archive"
    with pytest.raises(InvalidRequestError):
        history_requests.diff("a", "", text=False, limit=None)


def test_replies_are_read_with_what_they_do_not_know_and_refused_without_what_they_need() -> None:
    decode = history_requests.changes("sb1", text=False, limit=None).decode
    item = b'{"path": "/workspace/\\udcff", "kind": "added", "old_type": null, "new_type": "file", "old_size": null, '
    item += b'"new_size": 1, "later": 2}'
    found = decode(b'{"changes": [' + item + b'], "truncated": false, "later": 1}')
    assert (found.changes[0].path, found.changes[0].new_size, found.text_truncated) == ("/workspace/\udcff", 1, False)
    assert isinstance(found.changes[0], models.Change)
    for broken in (b"{}", b'{"changes": 1, "truncated": false}', b'{"changes": [1], "truncated": false}', b"[]"):
        with pytest.raises(ValidationError):
            decode(broken)
