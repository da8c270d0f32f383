"""Files in full on the embedded backend: large ones, odd names, links that lead out, archives, watches."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.raw import ask, call, opened
from tests.e2e.serving import Served, serving

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("files") / "data") as served:
        yield served


@pytest.fixture
def box(server: Served) -> Iterator[str]:
    path = f"/sandboxes/{ask(server, 'POST', '/sandboxes', {'disk_mb': 256, 'memory_mb': 64})['id']}"
    yield path
    call(server, "DELETE", path)


def run(server: Served, box: str, command: str) -> str:
    result = ask(server, "POST", f"{box}/exec", {"command": command})
    assert result["exit_code"] == 0, result
    return str(result["stdout"])


def test_f22_files_stream_and_the_servers_memory_stays_flat(server: Served, box: str) -> None:
    data = os.urandom(40_000_000)
    ask(server, "PUT", f"{box}/files?path=small", b"x")

    def peak() -> int:
        return int(Path(f"/proc/{server.pid}/status").read_text().partition("VmHWM:")[2].split()[0])

    before = peak()
    for _ in range(2):
        assert ask(server, "PUT", f"{box}/files?path=big", data)["size"] == len(data)
        status, back = call(server, "GET", f"{box}/files?path=big")
        assert (status, back == data) == (200, True)
    assert peak() - before < 16 * 1024  # KiB
    assert run(server, box, "sha256sum < big").split()[0] == hashlib.sha256(data).hexdigest()
    status, part = call(server, "GET", f"{box}/files?path=big", Range="bytes=39999990-")
    assert (status, part) == (206, data[-10:])


def test_f17_names_are_bytes(server: Served, box: str) -> None:
    names = [b"sp ace", b"quo'te\"", b"new\nline", b"per%2Fcent", "smile 😀".encode(), b"by\xffte", b"-rf"]
    for name in names:
        coded = "".join(f"%{byte:02X}" for byte in name)
        ask(server, "PUT", f"{box}/files?path=d/{coded}", name)
        entry = ask(server, "GET", f"{box}/files/stat?path=d/{coded}")
        assert os.fsencode(entry["name"]) == name
        moved = {"from": f"d/{os.fsdecode(name)}", "to": f"d/{os.fsdecode(name)}2"}
        assert os.fsencode(ask(server, "POST", f"{box}/files/move", moved)["path"]) == b"/workspace/d/" + name + b"2"
        assert call(server, "GET", f"{box}/files?path=d/{coded}2") == (200, name)
    with tarfile.open(fileobj=io.BytesIO(call(server, "GET", f"{box}/archive?path=d")[1])) as tar:
        found = {os.fsencode(member.name) for member in tar.getmembers() if member.isfile()}
    assert found == {name + b"2" for name in names}
    removed = ask(server, "POST", f"{box}/files/remove", {"path": "d", "recursive": True})
    assert removed == {"removed": len(names) + 1}


def test_f20_no_link_leads_out(server: Served, box: str) -> None:
    run(server, box, "ln -s /etc etc; ln -s /tmp/x dangling; ln -s ../.. up; mkdir real; ln -s /workspace/real inside")
    for path in ("etc/x", "up/etc/x", "dangling/x"):
        for tail, body in (
            ("mkdir", {"path": path}),
            ("move", {"from": "real", "to": path}),
            ("chmod", {"path": path, "mode": "777"}),
            ("remove", {"path": path, "recursive": True}),
        ):
            status, content = call(server, "POST", f"{box}/files/{tail}", body)
            assert status in (400, 403, 404), (tail, path, content)
    assert ask(server, "POST", f"{box}/files/mkdir", {"path": "inside/made"})["type"] == "directory"
    assert run(server, box, "ls real") == "made\n"
    assert ask(server, "GET", f"{box}/files/stat?path=etc&follow=false")["type"] == "symlink"
    assert ask(server, "GET", f"{box}/files/stat?path=etc")["type"] == "directory"
    assert ask(server, "POST", f"{box}/files/remove", {"path": "etc"}) == {"removed": 1}
    assert run(server, box, "ls /etc/passwd") == "/etc/passwd\n"


def test_a_directory_goes_out_and_comes_back(server: Served, box: str) -> None:
    run(
        server,
        box,
        "mkdir -p d/sub; echo 1 > d/one; ln d/one d/hard; ln -s one d/soft; chmod 4711 d/one; echo 2 > d/sub/two",
    )
    status, archive = call(server, "GET", f"{box}/archive?path=d")
    assert status == 200
    assert call(server, "PUT", f"{box}/archive?path=copy", archive) == (204, b"")
    listing = "cd {}; stat -c '%n %F %a %h' one hard soft sub sub/two; cat one sub/two; readlink soft"
    assert run(server, box, listing.format("copy")) == run(server, box, listing.format("d"))


def test_f34_a_hostile_archive_writes_nothing_outside(server: Served, box: str) -> None:
    for name, kind, target in (
        ("/tmp/absolute", tarfile.REGTYPE, ""),
        ("../up", tarfile.REGTYPE, ""),
        ("hard", tarfile.LNKTYPE, "/etc/passwd"),
        ("hard", tarfile.LNKTYPE, "../../etc/passwd"),
    ):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)
        assert call(server, "PUT", f"{box}/archive?path=in", packed.getvalue())[0] == 400
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/tmp"
        tar.addfile(link)
        through = tarfile.TarInfo("link/through")
        tar.addfile(through, io.BytesIO())
    call(server, "PUT", f"{box}/archive?path=in", packed.getvalue())
    assert run(server, box, "ls /tmp; ls / | grep -c through || true") == "0\n"


def test_a_watch_sees_what_commands_and_the_api_change(server: Served, box: str) -> None:
    run(server, box, "mkdir d")
    with opened(server, "GET", f"{box}/watch?path=d") as response:
        assert json.loads(response.readline()) == {"type": "ready"}
        run(server, box, "mkdir -p d/new; sleep 0.2; touch d/new/file; mv d/new/file d/moved")
        wanted = {
            ("created", "/workspace/d/new", None),
            ("created", "/workspace/d/new/file", None),
            ("moved", "/workspace/d/new/file", "/workspace/d/moved"),
        }
        while wanted:
            told = json.loads(response.readline())
            wanted.discard((told["type"], told.get("path"), told.get("to")))
        for kind in ("created", "modified"):
            ask(server, "PUT", f"{box}/files?path=d/api", b"x" * 100_000)
            told = json.loads(response.readline())
            assert told == {"type": kind, "path": "/workspace/d/api", "directory": False}
