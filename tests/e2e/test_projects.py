"""Projects and directories of a person's, on the embedded backend: start from, publish, merge, bring back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.cli import exit_codes
from agent_sandbox.client import Sandbox
from tests.e2e.person import Person
from tests.e2e.serving import KEY, PROGRAM, Served, serving

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("projects") / "data") as served:
        yield served


@pytest.fixture
def site(tmp_path: Path) -> Path:
    place = tmp_path / "site"
    (place / "lib").mkdir(parents=True)
    (place / "text").write_text("one\ntwo\n")
    (place / "gone").write_text("gone\n")
    (place / "lib" / "link").symlink_to("../text")
    return place


def environ(server: Served) -> dict[str, str]:
    return {**os.environ, "AGENT_SANDBOX_URL": server.url, "AGENT_SANDBOX_API_KEY": KEY}


def cli(server: Served, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [PROGRAM, *arguments],
        env=environ(server),
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done
    return done


def out(server: Served, *arguments: str) -> str:
    return cli(server, *arguments).stdout.removesuffix("\n")


def run(sandbox: Sandbox, command: str) -> str:
    done = sandbox.exec(command)
    assert done.exit_code == 0, done
    return done.stdout


def test_a_project_from_its_directory_to_its_third_layer(server: Served, site: Path) -> None:
    assert out(server, "project", "init", "site", str(site)) == "site@0"
    first = out(server, "create", "--from", "site", "-m", "64", "--disk", "64")
    with server.client() as client, client.create(project="site", memory_mb=64, disk_mb=64) as two:
        one = client.get(first)
        run(one, "test -L lib/link; cat lib/link; echo three >> text; rm gone")
        assert out(server, "project", "add", "site", one.id) == "site@1"
        run(two, "echo mine > mine")
        refused = cli(server, "project", "add", "site", two.id, code=exit_codes.BY_CODE["conflict"]).stderr
        assert "agent-sandbox merge SANDBOX site@1" in refused
        assert two.merge("site@1").outcome == "merged"
        assert client.add_layer("site", two.id).layer.number == 2
        shown = out(server, "project", "log", "site").split("\n")
        assert [row.split()[0] for row in shown] == ["LAYER", "site@2", "site@1", "site@0"]
        assert out(server, "project", "ls").split("\n")[1].split()[:2] == ["site", "site@2"]
        listed = out(server, "run", "--from", "site", "-m", "64", "--", "sh", "-c", "cat text; ls")
        assert listed == "one\ntwo\nthree\nlib\nmine\ntext"
        kept = two.snapshot()
        with client.create(from_=kept, memory_mb=96, disk_mb=64) as third, client.create(from_="site@0") as fourth:
            assert (third.info.memory_mb, run(fourth, "ls")) == (96, "gone\nlib\ntext\n")
            cli(server, "project", "rm", "site")
            client.delete_snapshot(kept)
            for sandbox in (one, third, fourth):
                sandbox.stop().start()
                before = sandbox.changes().changes
                run(sandbox, "cat lib/link > late")
                after = [change.path for change in sandbox.changes().changes if change not in before]
                assert after == ["/workspace/late"]
        one.destroy()
    cli(server, "create", "--from", "site", code=exit_codes.BY_CODE["not_found"])


AGENT = "echo three >> text; rm gone; mkdir new; echo n > new/f; chmod 700 lib; ln -s /etc/passwd out; exit 3"


def test_what_a_command_changed_is_brought_back_after_asking(server: Served, site: Path, tmp_path: Path) -> None:
    pull = ("run", "-m", "64", "--disk", "64", "-v", str(site), "--pull-changes")
    shown = cli(server, *pull, "--", "sh", "-c", AGENT, code=exit_codes.NOT_WRITTEN).stderr
    assert f"M {site}/text  (8 B → 14 B)\n" in shown
    assert "the command ended with 3" in shown
    assert "left out out: a link that leads out" in shown
    assert (site / "gone").exists()
    done = cli(server, *pull, "--yes", "--json", "--", "sh", "-c", AGENT, code=3)
    told = json.loads(done.stdout)
    assert [(item["kind"], item["path"]) for item in told["changes"]] == [
        ("removed", "gone"),
        ("metadata", "lib"),
        ("added", "new"),
        ("added", "new/f"),
        ("modified", "text"),
    ]
    assert (told["exit_code"], told["written"]) == (3, 5)
    assert (site / "text").read_text() == "one\ntwo\nthree\n"
    assert {path.name for path in site.iterdir()} == {"lib", "new", "text"}
    assert (site / "lib").stat().st_mode & 0o777 == 0o700


def test_a_person_is_asked(server: Served, site: Path, tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    aside.mkdir()
    with Person({**environ(server), "TMPDIR": str(aside)}) as person:
        command = f"{PROGRAM} run -m 64 --disk 64 -v {site} --pull-changes -- sh -c 'echo four >> text'"
        person.enter(command)
        person.expect(r"\[d\]iff: ", 60)
        person.type("\x03")
        person.expect("outer> ")
        assert (site / "text").read_text() == "one\ntwo\n"
        person.enter(command)
        person.expect(r"\[d\]iff: ", 60)
        person.enter("d")
        person.expect(r"\+four")
        person.expect(r"\[d\]iff: ")
        person.enter("y")
        person.expect("1 of 1 changes are written")
        person.expect("outer> ")
    assert (site / "text").read_text() == "one\ntwo\nfour\n"
    assert list(aside.iterdir()) == []
