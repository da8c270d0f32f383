"""``agent-sandbox store``: the way of a directory through history, as a person types it."""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.cli.app import main
from agent_sandbox.errors import ConflictError, NotFoundError
from agent_sandbox.store import Store as VersionedStore

Store = Callable[..., Any]


@pytest.fixture
def store(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> Store:
    """Run one command on a store of its own; its output, or with ``code`` that exit code's two streams."""

    def run(*arguments: object, code: int = 0, as_json: bool = False) -> Any:
        argv = ["store", "--store", str(tmp_path / "states"), *map(str, arguments), *(["--json"] if as_json else [])]
        assert main(argv) == code, capsysbinary.readouterr().err
        done = capsysbinary.readouterr()
        if code and not as_json:
            return done.err.decode()
        return json.loads(done.out) if as_json else done.out

    return run


@pytest.fixture
def site(tmp_path: Path) -> Path:
    directory = tmp_path / "site"
    (directory / "pages").mkdir(parents=True)
    (directory / "index.html").write_text("one\ntwo\n")
    (directory / "pages" / "a").write_bytes(os.urandom(200_000))
    return directory


def test_a_directory_through_history(store: Store, site: Path, tmp_path: Path) -> None:
    first = store("init", "site", site, as_json=True)
    assert (first["outcome"], first["files"], first["directories"]) == ("created", 2, 1)
    assert store("commit", "site", site, as_json=True)["outcome"] == "up_to_date"
    (site / "index.html").write_text("one\n2\n")
    (site / "new").write_text("")
    second = store("commit", "site", site, "-m", "numbers", "--author", "me", as_json=True)
    assert second["outcome"] == "created"
    assert second["stored_bytes"] < 2_000
    assert [(item["commit"], item["message"]) for item in store("log", "site", as_json=True)] == [
        (second["commit"], "numbers"),
        (first["commit"], ""),
    ]
    changes = store("diff", "site@0", "site", as_json=True)
    assert {(item["path"], item["kind"]) for item in changes if item["path"]} == {
        ("index.html", "modified"),
        ("new", "added"),
    }
    text = store("diff", "site@0", "site", "--text").decode()
    assert "M index.html  (8 B → 6 B)" in text
    assert "-two\n+2\n" in text
    assert store("cat", "site@0", "index.html") == b"one\ntwo\n"
    store("checkout", "site@0", tmp_path / "old")
    assert (tmp_path / "old" / "index.html").read_text() == "one\ntwo\n"
    assert (tmp_path / "old" / "pages" / "a").read_bytes() == (site / "pages" / "a").read_bytes()


def test_branches_and_merges(store: Store, site: Path, tmp_path: Path) -> None:
    store("init", "site", site)
    assert store("fork", "site", "site:idea") == b"site:idea\n"
    (site / "index.html").write_text("mine\n")
    store("commit", "site", site)
    store("checkout", "site:idea", tmp_path / "idea")
    (tmp_path / "idea" / "pages" / "b").write_text("theirs\n")
    store("commit", "site:idea", tmp_path / "idea")
    assert store("merge", "site", "site:idea", as_json=True)["outcome"] == "created"
    assert store("cat", "site", "pages/b") == b"theirs\n"
    assert store("cat", "site", "index.html") == b"mine\n"
    (tmp_path / "idea" / "index.html").write_text("other\n")
    store("commit", "site:idea", tmp_path / "idea")
    refused = store("merge", "site", "site:idea", code=1, as_json=True)
    assert refused["outcome"] == "conflicts"
    assert "content" in {item["path"]: item["kinds"] for item in refused["conflicts"]}["index.html"]
    assert store("add", "site", as_json=True)["outcome"] == "created"
    assert store("tag", "site", "v1") == b"site:v1\n"
    names = {(row["name"], row["kind"]) for row in store("ls", as_json=True)}
    assert names == {("main", "branch"), ("idea", "branch"), ("v1", "tag"), ("@0", "layer"), ("@1", "layer")}


def test_archives_and_care(store: Store, site: Path, tmp_path: Path) -> None:
    store("init", "site", site)
    store("export", "site", tmp_path / "site.tar")
    with tarfile.open(tmp_path / "site.tar") as tar:
        assert "./index.html" in tar.getnames() or "index.html" in tar.getnames()
    store("init", "copy")
    store("import", "copy", tmp_path / "site.tar")
    assert [item for item in store("diff", "site", "copy", as_json=True) if item["path"]] == []
    before = store("stats", as_json=True)
    store("rm", "site", "--project")
    store("rm", "copy", "--project")
    freed = store("gc", as_json=True)
    assert before["objects"] > 0
    assert freed["kept"] == 0
    assert store("check", as_json=True)["damage_count"] == 0


def test_a_store_that_somebody_else_uses_already_stays_when_its_maker_fails(
    store: Store, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init, calls = VersionedStore.init, []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 1:
            return init(*arguments, **options)
        store("init", "other", site)
        raise ConflictError("as asked")

    monkeypatch.setattr(VersionedStore, "init", failing)
    store("init", "mine", site, code=69)
    assert sorted({item["project"] for item in store("ls", as_json=True)}) == ["other"]


def test_two_make_a_store_at_once(store: Store, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = VersionedStore.open
    calls: list[Any] = []

    def late(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        try:
            return opened(*arguments, **options)
        except NotFoundError:
            if len(calls) == 1:
                store("init", "other", site)
            raise

    monkeypatch.setattr(VersionedStore, "open", late)
    store("init", "mine", site)
    assert sorted({item["project"] for item in store("ls", as_json=True)}) == ["mine", "other"]


def test_a_store_is_made_in_an_empty_directory_and_in_no_other(store: Store, site: Path, tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    store("init", "site", site)
    argv = ["store", "--store", str(site), "init", "site"]
    assert main(argv) == 64
    assert sorted(path.name for path in site.iterdir()) == ["index.html", "pages"]


def test_a_pipe_or_device_is_written_to_and_stays(store: Store, site: Path, tmp_path: Path) -> None:
    store("init", "site", site)
    pipe, taken = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: taken.append(pipe.read_bytes()), daemon=True)
    reader.start()
    store("export", "site", pipe)
    assert pipe.is_fifo()
    reader.join()
    with tarfile.open(fileobj=io.BytesIO(taken[0])) as archive:
        assert "pages/a" in archive.getnames()
    (tmp_path / "null").symlink_to("/dev/null")
    store("export", "site", tmp_path / "null")
    assert (tmp_path / "null").is_symlink()
    assert store("export", "site", "/dev/full", code=1) == "agent-sandbox: /dev/full: No space left on device\n"


def test_what_is_refused(store: Store, site: Path, tmp_path: Path) -> None:
    assert "store init" in store("ls", code=68)
    assert not (tmp_path / "states").exists()
    store("init", "site", tmp_path / "missing", code=68)
    assert not (tmp_path / "states").exists()
    store("init", "site", site)
    store("init", "site", site, code=69)
    assert "there are: main" in store("log", "site:none", code=68)
    store("checkout", "site", site, code=69)
    store("cat", "site", "pages", code=64)
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../out"))
    (tmp_path / "evil.tar").write_bytes(evil.getvalue())
    store("import", "site", tmp_path / "evil.tar", code=64)
    store("export", "site", site, code=64)  # a directory is no place for a file
    assert list(tmp_path.glob(".*")) == []


def test_a_lost_index_is_made_anew(store: Store, site: Path, tmp_path: Path) -> None:
    store("init", "site", site)
    (site / "new").write_text("more")
    second = store("commit", "site", site, as_json=True)["commit"]
    index = tmp_path / "states" / "index.sqlite"
    whole = index.read_bytes()
    index.unlink()
    assert "rebuild" in store("ls", code=80)
    found = store("rebuild", "--quiet", as_json=True)
    assert (found["states"], found["incomplete"], found["unnamed"], found["lost"]) == (2, 0, 1, [])
    assert store("cat", "rebuilt@0", "new") == b"more"
    assert store("log", "rebuilt", as_json=True)[0]["commit"] == second
    index.write_bytes(whole)
    store("commit", "site", site)
    assert store("rebuild", "--quiet") == b""
    assert [row["name"] for row in store("ls", "site", as_json=True)] == ["main", "@0"]
    (tmp_path / "states" / "packs" / "0000000002.pack").write_bytes(b"")
    assert store("rebuild", "--quiet", code=1, as_json=True)["lost"] == ["site:main"]
    assert store("check") == b""
