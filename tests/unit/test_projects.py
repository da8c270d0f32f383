"""Projects over REST, on the in-memory backend: what a project is made of, what starts from it, what is published."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.client import Project, SandboxClient
from agent_sandbox.errors import (
    ConflictError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    PayloadTooLargeError,
    SandboxError,
    ValidationError,
)
from agent_sandbox.manager import keeping, projects
from agent_sandbox.manager.workspaces import PROJECT
from tests.unit.client_pair import open_client
from tests.unit.server_harness import KEY, Running, running, settings_for
from tests.unit.test_cli_unpacking import archive, member


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_for(tmp_path_factory.mktemp("projects"), max_snapshot_bytes=1 << 20)) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[SandboxClient]:
    """A client of a server on which nothing is, and nothing is left."""
    with SandboxClient(server.url, KEY) as client:
        yield client
        for project in client.list_projects():
            client.delete_project(project.name)
        for snapshot in client.list_snapshots():
            client.delete_snapshot(snapshot)
        assert client.list_sandboxes() == []


TREE = archive(
    member("d", tarfile.DIRTYPE, mode=0o750), (member("d/f"), b"in layer 0\n"), (member("tool", mode=0o755), b"x")
)


def names(client: SandboxClient) -> list[str]:
    return [project.name for project in client.list_projects()]


def test_names_take_no_more_memory_than_those_of_a_workspace(
    client: SandboxClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = archive(*(member(f"{number}-{'n' * 200}") for number in range(300)))
    monkeypatch.setattr(projects, "MAX_NAMES_BYTES", 100_000)
    with pytest.raises(PayloadTooLargeError, match="names"):
        client.create_project("many", io.BytesIO(tar))
    monkeypatch.undo()
    assert keeping.MAX_NAMES_BYTES == 512 << 20
    client.create_project("many", io.BytesIO(tar))


def test_a_project_is_made_of_a_tar_and_sandboxes_start_from_it(client: SandboxClient) -> None:
    made = client.create_project("site", io.BytesIO(TREE))
    assert (made.name, made.layer_count, [layer.number for layer in made.layers]) == ("site", 1, [0])
    assert client.get_project("site") == made
    assert client.list_projects() == [made]
    begun: list[tuple[dict[str, Any], str]] = [
        ({"from_": "site"}, "site@0"),
        ({"project": "site"}, "site@0"),
        ({"from_": "site@0"}, "site@0"),
        ({"project": "site", "from_": "0"}, "site@0"),
        ({"from_": "site:main"}, "site:main"),
        ({"project": "site", "from_": "main"}, "site:main"),
        ({"from_": made.layers[0].commit}, made.layers[0].commit),
        ({"from_": made.layers[0].commit[:12]}, made.layers[0].commit),
    ]
    for asked, source in begun:
        with client.create(timeout_seconds=60, metadata={"a": "b"}, **asked) as sandbox:
            assert sandbox.read_text("d/f") == "in layer 0\n"
            assert sandbox.stat("tool").mode == "755"
            expected = None if len(source) == 64 else "site"
            assert (sandbox.info.source, sandbox.info.project) == (source, expected)
            assert (sandbox.info.source_snapshot_id, sandbox.info.metadata) == (None, {"a": "b"})
            assert client.get(sandbox.id).info.source == source


def test_a_sandbox_starts_from_a_snapshot_with_what_the_request_says(client: SandboxClient) -> None:
    with client.create(env={"A": "1"}, memory_mb=64) as sandbox:
        sandbox.write_file("f", "kept")
        kept = sandbox.snapshot()
    with client.create(from_=kept, memory_mb=128) as other:
        assert other.read_text("f") == "kept"
        assert (other.info.source_snapshot_id, other.info.source, other.info.memory_mb) == (kept.id, kept.id, 128)
    with client.create(from_=kept.id, project="nobody") as other:
        assert other.info.project == "nobody"


def collect(server: Running) -> None:
    """Remove from the server's store whatever nothing leads to."""
    server.wait(server.manager._fleet.workspaces.ask(lambda store: store.gc()))


def test_work_is_published_as_the_next_layer_when_it_comes_from_the_newest(
    server: Running, client: SandboxClient
) -> None:
    client.create_project("site", io.BytesIO(TREE))
    with client.create(project="site") as first, client.create(project="site") as late:
        first.write_file("new", "1")
        added = client.add_layer("site", first.id)
        assert (added.outcome, added.layer.number) == ("created", 1)
        again = client.add_layer("site", first.id)
        assert (again.outcome, again.layer) == ("up_to_date", added.layer)
        assert client.list_snapshots() == [], "what was taken to publish goes again"
        late.write_file("late", "2")
        with pytest.raises(ConflictError, match="agent-sandbox merge SANDBOX site@1"):
            client.add_layer("site", late.id)
        assert client.get_project("site").layer_count == 2
        done = late.merge("site@1")
        assert done.outcome == "merged"
        assert (late.read_text("late"), late.read_text("new")) == ("2", "1")
        assert client.add_layer("site", late.id).layer.number == 2
        kept = late.snapshot()
        assert client.add_layer("site", kept).outcome == "up_to_date"
        assert client.add_layer("site", first.snapshot().id).layer.number == 1, "published before: it is that layer"
    collect(server)
    shown = client.get_project("site", limit=2)
    assert (shown.layer_count, [layer.number for layer in shown.layers]) == (3, [2, 1])
    with client.create(from_="site") as sandbox:
        assert (sandbox.info.source, sandbox.read_text("late")) == ("site@2", "2")
        assert sandbox.changes().changes == []
        sandbox.write_file("mine", "3")
        assert [change.path for change in sandbox.changes().changes] == ["/workspace/mine"]
        commits = [state.commit for state in client.log(sandbox.snapshot())]
        assert commits[1] == shown.layers[0].commit
    with client.create(from_="site@1") as sandbox:
        assert sorted(entry.name for entry in sandbox.list_files()) == ["d", "new", "tool"]


def test_a_layer_is_added_once_under_one_key(client: SandboxClient) -> None:
    client.create_project("site")
    with client.create(project="site") as sandbox:
        numbers = []
        for text in ("1", "2"):
            sandbox.write_file("f", text)
            numbers.append(client.add_layer("site", sandbox.id, idempotency_key="same").layer.number)
    assert (numbers, client.get_project("site").layer_count) == ([1, 1], 2)


def test_sandboxes_outlive_the_project_that_they_came_from(server: Running, client: SandboxClient) -> None:
    client.create_project("site", io.BytesIO(TREE))
    with client.create(project="site") as sandbox:
        client.delete_project("site")
        collect(server)
        assert names(client) == []
        sandbox.write_file("new", "1")
        assert [change.path for change in sandbox.changes().changes] == ["/workspace/new"]
        kept = sandbox.snapshot()
        with client.create(from_=kept) as other:
            assert (other.read_text("d/f"), other.read_text("new")) == ("in layer 0\n", "1")
    with pytest.raises(NotFoundError, match=r"no project 'site'; there is none \(agent-sandbox project init"):
        client.delete_project("site")
    with pytest.raises(NotFoundError):
        client.create(project="site")


@pytest.mark.parametrize(
    ("reference", "error"),
    [
        ("site@1", NotFoundError),
        ("site:nobody", NotFoundError),
        ("nobody", NotFoundError),
        ("0123456789abcdef", NotFoundError),
        ("snap0123456789abcdef", NotFoundError),
        ("", InvalidRequestError),
        ("../etc", InvalidRequestError),
        (PROJECT, InvalidRequestError),
        (f"{PROJECT}:main", InvalidRequestError),
        ("a\udcff", InvalidRequestError),
    ],
)
def test_what_is_not_there_creates_nothing(client: SandboxClient, reference: str, error: type[SandboxError]) -> None:
    client.create_project("site")
    with pytest.raises(error):
        client.create(from_=reference)
    with pytest.raises(error):
        client.add_layer("site", reference)
    assert client.list_sandboxes() == []
    assert client.get_project("site").layer_count == 1


@pytest.mark.parametrize(
    "name", [PROJECT, "a/b", "../x", "-x", "x" * 101, "0123456789ab", "snap0123456789abcdef", "sb0123456789abcdef", "ä"]
)
def test_a_name_that_cannot_be_one_is_refused(client: SandboxClient, name: str) -> None:
    for call in (client.create_project, client.get_project, client.delete_project):
        with pytest.raises((InvalidRequestError, NotFoundError)):
            call(name)
    assert names(client) == []


def test_a_name_is_given_once_and_so_many_of_them(client: SandboxClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.create_project("site")
    with pytest.raises(ConflictError, match="there is a project 'site' already"):
        client.create_project("site", io.BytesIO(TREE))
    monkeypatch.setattr(projects, "MAX_PROJECTS", 1)
    with pytest.raises(LimitExceededError, match="1 projects already"):
        client.create_project("two")
    with client.create(project="site") as sandbox:
        assert sandbox.list_files() == []


HOSTILE: list[tuple[bytes, type[SandboxError]]] = [
    (archive((member("/etc/x"), b"1")), InvalidRequestError),
    (archive((member("../x"), b"1")), InvalidRequestError),
    (archive(member("l", tarfile.SYMTYPE, linkname="/etc"), (member("l/x"), b"1")), InvalidRequestError),
    (archive(member("h", tarfile.LNKTYPE, linkname="/etc/passwd")), InvalidRequestError),
    (TREE[:700], InvalidRequestError),
    (b"no archive at all" * 100, InvalidRequestError),
    (archive((member("big"), bytes(range(256)) * 8192)), PayloadTooLargeError),
]


@pytest.mark.parametrize(("data", "error"), HOSTILE)
def test_a_hostile_archive_makes_no_project(
    server: Running, client: SandboxClient, data: bytes, error: type[SandboxError]
) -> None:
    top = server.settings.data_dir
    before = {path.name for directory in (top, top.parent) for path in directory.iterdir()}
    with pytest.raises(error):
        client.create_project("site", io.BytesIO(data))
    assert names(client) == []
    assert {path.name for directory in (top, top.parent) for path in directory.iterdir()} == before
    client.create_project("site", io.BytesIO(TREE))


def test_devices_are_left_out(client: SandboxClient) -> None:
    client.create_project("site", io.BytesIO(archive(member("null", tarfile.CHRTYPE), (member("f"), b"1"))))
    with client.create(project="site") as sandbox:
        assert [entry.name for entry in sandbox.list_files()] == ["f"]


def test_a_client_that_goes_away_leaves_nothing(server: Running, client: SandboxClient) -> None:
    with server.connect() as sock:
        head = f"PUT /v1/projects/site HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        sock.sendall(head.encode() + b"Content-Length: 1000000\r\n\r\n" + TREE[:1000])
    client.create_project("site", io.BytesIO(TREE))
    assert names(client) == ["site"]


def test_unknown_fields_are_named(server: Running) -> None:
    for path, body in (("/v1/sandboxes", {"from_": "x"}), ("/v1/projects/p/layers", {"from": "x", "more": 1})):
        assert server.call("POST", path, body).error["code"] == ValidationError.code


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_both_sdks_have_projects(server: Running, kind: str, tmp_path: Path) -> None:
    (tmp_path / "site.tar").write_bytes(TREE)
    async with open_client(kind, server.url, KEY) as client:
        made: Any = await client.create_project("site", tmp_path / "site.tar")
        assert isinstance(made, Project)
        assert await client.list_projects() == [made]
        assert await client.get_project("site", 1) == made
        sandbox = await client.create(from_="site")
        await sandbox.write_file("new", "1")
        assert (await client.add_layer("site", sandbox.id)).layer.number == 1
        await client.delete_project("site")
        assert await client.list_projects() == []
        await sandbox.destroy()
