"""What happened to a workspace, asked of a real server: differences, changes, logs, archives."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.client import AsyncSandboxClient, Sandbox, SandboxClient
from agent_sandbox.errors import ConflictError, NotFoundError
from tests.e2e.raw import ask, call
from tests.e2e.serving import KEY, PROGRAM, Served, serving

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("history") / "data") as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[SandboxClient]:
    with server.client() as client:
        yield client


@pytest.fixture
def sandbox(client: SandboxClient) -> Iterator[Sandbox]:
    with client.create(memory_mb=64, disk_mb=128) as sandbox:
        yield sandbox


def cli(server: Served, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "AGENT_SANDBOX_URL": server.url, "AGENT_SANDBOX_API_KEY": KEY}
    done = subprocess.run([PROGRAM, *arguments], env=env, capture_output=True, timeout=60)
    assert done.returncode == code, done
    return done


def told(server: Served, path: str) -> list[tuple[Any, ...]]:
    """What a comparison says of each path, without its text."""
    found = ask(server, "GET", path)
    assert (found["truncated"], found["text_truncated"]) == (False, False)
    names = ("path", "kind", "old_type", "new_type", "old_size", "new_size")
    return [tuple(change[name] for name in names) for change in found["changes"]]


CHANGED = [
    ("/workspace/by\udcffte", "added", None, "file", None, 1),
    ("/workspace/d", "type", "directory", "symlink", None, None),
    ("/workspace/d/in", "removed", "file", None, 1, None),
    ("/workspace/gone", "removed", "file", None, 4, None),
    ("/workspace/kept", "metadata", "file", "file", 5, 5),
    ("/workspace/text", "modified", "file", "file", 8, 10),
]


def make_two_states(sandbox: Sandbox) -> None:
    run(
        sandbox,
        "printf 'one\\ntwo\\n' > text; printf 'g\\tn\\n' > gone; echo kept > kept; mkdir d; printf x > d/in; mkdir e",
    )


def change(sandbox: Sandbox) -> None:
    run(sandbox, "printf 'one\\nthree\\n' > text; rm gone; chmod 600 kept; rm -r d; ln -s e d; printf y > $'by\\377te'")


def run(sandbox: Sandbox, command: str) -> None:
    done = sandbox.exec(["bash", "-c", command])
    assert done.exit_code == 0, done


def test_two_snapshots_are_compared(server: Served, client: SandboxClient, sandbox: Sandbox) -> None:
    make_two_states(sandbox)
    before = sandbox.snapshot()
    change(sandbox)
    after = sandbox.snapshot()
    assert told(server, f"/snapshots/{before.id}/diff/{after.id}") == CHANGED
    assert told(server, f"/snapshots/{after.id}/diff/{after.id}") == []
    found = client.diff(before, after, text=True)
    texts = {item.path: item.text for item in found.changes}
    assert texts["/workspace/text"] == "--- a/text\n+++ b/text\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
    assert texts["/workspace/gone"] == "--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-g\tn\n"
    assert texts["/workspace/kept"] == ""
    assert client.diff(before, after).changes[0].text is None
    short = client.diff(before, after, limit=2)
    assert ([item.path for item in short.changes], short.truncated) == ([path for path, *_ in CHANGED[:2]], True)
    shown = cli(server, "diff", before.id, after.id, "--text").stdout.decode()
    assert "M /workspace/text  (8 B → 10 B)\n--- a/text\n" in shown
    assert "\n-g\tn\n" in shown
    assert "A /workspace/by\\udcffte  (1 B)\n" in shown
    listed = json.loads(cli(server, "diff", before.id, after.id, "--json").stdout)
    assert [item["path"] for item in listed["changes"]] == [path for path, *_ in CHANGED]


def test_the_workspace_is_compared_with_where_it_was(server: Served, client: SandboxClient, sandbox: Sandbox) -> None:
    path = f"/sandboxes/{sandbox.id}/changes"
    assert told(server, path) == []
    make_two_states(sandbox)
    names = [item[0].removeprefix("/workspace/") for item in told(server, path)]
    assert names == ["d", "d/in", "e", "gone", "kept", "text"]
    kept = sandbox.snapshot()
    assert told(server, path) == []
    change(sandbox)
    assert told(server, path) == CHANGED
    assert told(server, path) == CHANGED, "asking changes nothing"
    assert "M /workspace/text" in cli(server, "changes", sandbox.id).stdout.decode()
    sandbox.rollback(kept)
    assert told(server, path) == []
    with client.fork(kept) as fork:
        assert told(server, f"/sandboxes/{fork.id}/changes") == []
        change(fork)
        assert told(server, f"/sandboxes/{fork.id}/changes") == CHANGED
        client.delete_snapshot(kept)
        assert told(server, f"/sandboxes/{fork.id}/changes") == CHANGED, "what it stands on stays"
        fork.snapshot()
        assert fork.changes().changes == []
    sandbox.stop()
    with pytest.raises(ConflictError, match="is stopped"):
        sandbox.changes()
    assert client.list_snapshots(sandbox.id) == []


def test_a_log_tells_what_led_to_a_snapshot(server: Served, client: SandboxClient, sandbox: Sandbox) -> None:
    run(sandbox, "echo 1 > a")
    first = sandbox.snapshot()
    twin = sandbox.snapshot()
    run(sandbox, "echo 2 > a")
    second = sandbox.snapshot()
    states = client.log(second)
    assert [sorted(state.snapshot_ids) for state in states] == [[second.id], sorted([first.id, twin.id]), []]
    assert [state.parents for state in states] == [[states[1].commit], [states[2].commit], []]
    assert [state.commit for state in client.log(second, 1)] == [states[0].commit]
    for one in (first, twin):
        client.delete_snapshot(one)
    assert [(state.snapshot_ids, state.kept) for state in client.log(second)][1] == ([], False)
    assert cli(server, "log", second.id).stdout.decode().split("\n")[2].endswith("(deleted)")
    assert json.loads(cli(server, "log", second.id, "--json").stdout)[0]["snapshot_ids"] == [second.id]


def test_a_snapshot_is_read_as_a_tar(server: Served, client: SandboxClient, sandbox: Sandbox, tmp_path: Path) -> None:
    run(sandbox, "echo data > f; ln f hard; ln -s f soft; mkdir d; head -c 3000000 /dev/urandom > d/big; chmod 640 f")
    digest = sandbox.exec("sha256sum < d/big").stdout.split()[0]
    kept = sandbox.snapshot()
    run(sandbox, "rm -r *")
    status, packed = call(server, "GET", f"/snapshots/{kept.id}/archive")
    assert status == 200
    assert cli(server, "export", kept.id, "-").stdout == packed
    assert client.download_snapshot(kept, tmp_path / "a.tar") == len(packed) == (tmp_path / "a.tar").stat().st_size
    cli(server, "export", kept.id, str(tmp_path / "b.tar"))
    assert (tmp_path / "b.tar").read_bytes() == packed
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        kinds = {member.name.removeprefix("./").rstrip("/"): member.type for member in tar.getmembers()}
    assert (kinds["d"], kinds["soft"], kinds["d/big"]) == (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.REGTYPE)
    assert {kinds["f"], kinds["hard"]} == {tarfile.REGTYPE, tarfile.LNKTYPE}
    sandbox.upload_archive(".", io.BytesIO(packed))
    assert sandbox.exec("sha256sum < d/big").stdout.split()[0] == digest
    assert sandbox.exec("stat -c '%a %h' f").stdout == "640 2\n"


def test_what_is_not_there_is_not_found(server: Served, client: SandboxClient, sandbox: Sandbox) -> None:
    kept = sandbox.snapshot()
    for path in (f"{kept.id}/diff/snapnone", f"snapnone/diff/{kept.id}", "snapnone/log", "snapnone/archive"):
        assert call(server, "GET", f"/snapshots/{path}")[0] == 404
    assert call(server, "GET", "/sandboxes/sbnone/changes")[0] == 404
    for query in ("limit=0", "limit=10001", "limit=x", "text=1", "other=1"):
        assert call(server, "GET", f"/snapshots/{kept.id}/diff/{kept.id}?{query}")[0] == 422
        assert call(server, "GET", f"/sandboxes/{sandbox.id}/changes?{query}")[0] == 422
    with pytest.raises(NotFoundError):
        client.diff(kept, "snapnone")
    assert b"snapnone" in cli(server, "export", "snapnone", "-", code=68).stderr


def test_the_asynchronous_client_does_the_same(server: Served, sandbox: Sandbox, tmp_path: Path) -> None:
    run(sandbox, "echo 1 > a")
    kept = sandbox.snapshot()
    run(sandbox, "echo 2 > a")

    async def ask_all() -> None:
        async with AsyncSandboxClient(server.url, KEY) as client:
            found = await (await client.get(sandbox.id)).changes(text=True)
            assert [(item.path, item.kind) for item in found.changes] == [("/workspace/a", "modified")]
            assert (await client.diff(kept, kept)).changes == []
            assert (await client.log(kept))[0].snapshot_ids == [kept.id]
            assert await client.download_snapshot(kept, tmp_path / "a.tar") == (tmp_path / "a.tar").stat().st_size

    asyncio.run(ask_all())


def test_a_workspace_of_many_changes_is_cut(sandbox: Sandbox) -> None:
    run(sandbox, "mkdir many; cd many; for i in $(seq 1200); do echo $i > $i; done; head -c 3000000 /dev/zero > z")
    run(sandbox, "seq 200000 > long; head -c 900000 /dev/zero | tr '\\0' a > a; cp a b")
    found = sandbox.changes(text=True)
    assert (len(found.changes), found.truncated, found.text_truncated) == (1000, True, True)
    assert sum(len(item.text or "") for item in found.changes) <= 1 << 20
    assert len(sandbox.changes(limit=10_000).changes) == 1205


def test_a_forks_work_comes_back(server: Served, client: SandboxClient, sandbox: Sandbox) -> None:
    run(sandbox, "echo 1 > both; echo 1 > mine; echo 1 > yours; truncate -s 1M hole; echo x >> hole; ln hole twin")
    base = sandbox.snapshot()
    with client.fork(base) as fork:
        run(fork, "echo 2 > yours; echo new > added")
        theirs = fork.snapshot()
        run(fork, "echo 3 > mine")
        conflicting = fork.snapshot()
    run(sandbox, "echo 2 > mine; (sleep 1000 &) ")

    refused = sandbox.merge(conflicting)
    assert (refused.outcome, refused.conflict_count, refused.snapshot_id) == ("conflicts", 1, None)
    assert [(item.path, item.kinds[0]) for item in refused.conflicts] == [("/workspace/mine", "content")]
    shown = cli(server, "merge", sandbox.id, conflicting.id, code=1)
    assert b": /workspace/mine\n" in shown.stdout
    assert b"nothing was changed" in shown.stderr
    assert client.list_snapshots(sandbox.id) == [base]
    assert sandbox.exec("pgrep -x sleep").exit_code == 0, "processes go on"
    assert [item.path for item in sandbox.changes().changes] == ["/workspace/mine"]

    done = sandbox.merge(theirs)
    assert (done.outcome, done.conflicts, done.sandbox.id) == ("merged", [], sandbox.id)
    assert sandbox.exec("cat both mine yours added").stdout == "1\n2\n2\nnew\n"
    assert sandbox.exec("pgrep -x sleep").exit_code == 1
    assert sandbox.info.source_snapshot_id == done.snapshot_id
    assert sandbox.changes().changes == []
    assert done.snapshot_id is not None
    assert done.before_snapshot_id is not None
    again = sandbox.snapshot()
    merged, before = (client.get_snapshot(id) for id in (done.snapshot_id, done.before_snapshot_id))
    assert merged.size_bytes == again.size_bytes, "as a capture counts"
    assert merged.name == f"merge of {theirs.id}"
    states = client.log(merged)
    assert sorted(states[0].snapshot_ids) == sorted([merged.id, again.id])
    assert {id for state in states[1:] for id in state.snapshot_ids} == {before.id, theirs.id, base.id}
    same = json.loads(cli(server, "merge", sandbox.id, theirs.id, "--json").stdout)
    assert (same["outcome"], same["snapshot_id"]) == ("up_to_date", None)
    sandbox.rollback(before)
    assert sandbox.exec("cat both mine yours; ls added").stdout == "1\n2\n1\n"


def test_a_merge_with_what_has_nothing_in_common(server: Served, client: SandboxClient, sandbox: Sandbox) -> None:
    run(sandbox, "echo 1 > a")
    with client.create(memory_mb=64, disk_mb=128) as other:
        run(other, "echo 2 > b")
        theirs = other.snapshot()
    assert sandbox.merge(theirs).outcome == "merged", "both began empty"
    assert sandbox.exec("cat a b").stdout == "1\n2\n"
    run(sandbox, "echo 3 > between")  # so that the common state is no longer what the merged workspace stands on
    base = sandbox.snapshot()
    with client.fork(base) as fork:
        run(fork, "echo 3 > c")
        theirs = fork.snapshot()
    run(sandbox, "echo 4 > d")
    sandbox.snapshot()
    for snapshot in client.list_snapshots(sandbox.id)[:-1]:
        client.delete_snapshot(snapshot)
    with pytest.raises(ConflictError, match="forgotten"):
        sandbox.merge(theirs)
    assert sandbox.exec("cat d").stdout == "4\n"
    assert call(server, "POST", f"/sandboxes/{sandbox.id}/merge", {"snapshot_id": "snapnone"})[0] == 404
    assert call(server, "POST", "/sandboxes/sbnone/merge", {"snapshot_id": theirs.id})[0] == 404
    sandbox.stop()
    with pytest.raises(ConflictError, match="is stopped"):
        sandbox.merge(theirs)
