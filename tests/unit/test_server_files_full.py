"""Files in full over HTTP: ranges, streams, entries, archives, watches; and every way to ask for them wrongly."""

from __future__ import annotations

import hashlib
import io
import json
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import BackendError
from agent_sandbox.server import streams
from agent_sandbox.server.ranges import NotSatisfiable, Range, parse_range
from tests.unit.server_harness import KEY, Running, running, settings_for

MAX_FILE = 2_000_000
LARGE = bytes(range(256)) * 4_000  # 1,024,000 bytes: above SMALL_BYTES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = {"max_file_bytes": MAX_FILE, "max_snapshot_bytes": 3_000_000}
    with running(settings_for(tmp_path_factory.mktemp("server"), **limits)) as it:
        yield it


@pytest.fixture
def box(server: Running) -> Iterator[str]:
    path = f"/v1/sandboxes/{server.create()}"
    yield path
    server.call("DELETE", path)


def raw(server: Running, head: str) -> socket.socket:
    sock = server.connect()
    sock.sendall(f"{head}\r\nHost: localhost\r\nX-API-Key: {KEY}\r\n".encode())
    return sock


def everything(sock: socket.socket) -> bytes:
    with sock:
        seen = b""
        while data := sock.recv(65536):
            seen += data
        return seen


# -- reading in parts ----------------------------------------------------------------------------------------


def test_a_large_file_goes_both_ways_in_pieces(server: Running, box: str) -> None:
    stored = server.call("PUT", f"{box}/files?path=big&mode=600", LARGE)
    assert (stored.status, stored.json["size"]) == (200, len(LARGE))
    reply = server.call("GET", f"{box}/files?path=big")
    assert (reply.status, reply.body == LARGE) == (200, True)
    assert reply.headers["content-length"] == str(len(LARGE))
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert (reply.headers["content-disposition"], reply.headers["accept-ranges"]) == ("attachment", "bytes")


@pytest.mark.parametrize("data", [b"0123456789", LARGE])
@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=2-5", 2, 6),
        ("bytes=7-", 7, None),
        ("bytes=-3", -3, None),
        ("Bytes = 5-99999999", 5, None),
    ],
)
def test_a_range(server: Running, box: str, data: bytes, header: str, start: int, end: int | None) -> None:
    server.call("PUT", f"{box}/files?path=f", data)
    reply = server.call("GET", f"{box}/files?path=f", Range=header)
    wanted = data[start:end]
    first = start % len(data)
    assert (reply.status, reply.body == wanted) == (206, True)
    assert reply.headers["content-range"] == f"bytes {first}-{first + len(wanted) - 1}/{len(data)}"
    assert reply.headers["content-length"] == str(len(wanted))


def test_a_range_behind_the_end(server: Running, box: str) -> None:
    server.call("PUT", f"{box}/files?path=f", b"0123456789")
    server.call("PUT", f"{box}/files?path=empty", b"")
    for path, header, size in (("f", "bytes=10-", 10), ("f", "bytes=-0", 10), ("empty", "bytes=0-", 0)):
        reply = server.call("GET", f"{box}/files?path={path}", Range=header)
        assert (reply.status, reply.error["code"]) == (416, "invalid_request")
        assert reply.headers["content-range"] == f"bytes */{size}"


@pytest.mark.parametrize(
    "header", ["", "bytes", "bytes=", "bytes=-", "bytes=5-2", "bytes=0-1,3-4", "lines=1-2", "x" * 5000]
)
def test_what_is_no_single_range_of_bytes_is_ignored(server: Running, box: str, header: str) -> None:
    server.call("PUT", f"{box}/files?path=f", b"0123456789")
    reply = server.call("GET", f"{box}/files?path=f", Range=header)
    assert (reply.status, reply.body) == (200, b"0123456789")


@given(st.integers(0, 50), st.none() | st.integers(0, 60), st.integers(0, 50))
def test_ranges_are_slices(first: int, last: int | None, size: int) -> None:
    data = bytes(range(size))
    wanted = parse_range(f"bytes={first}-{'' if last is None else last}")
    if last is not None and last < first:
        assert wanted is None
        return
    assert wanted == Range(first, last)
    assert wanted is not None
    expected = data[first : None if last is None else last + 1]
    try:
        start, length = wanted.of(size)
    except NotSatisfiable:
        assert expected == b""
    else:
        assert data[start : start + length] == expected != b""


def test_a_file_above_the_limit_is_read_in_parts(server: Running, box: str) -> None:
    sandbox_id = box.rpartition("/")[2]
    environment = server.backend.environments[f"{sandbox_id}-1"]
    server.call("PUT", f"{box}/files?path=f", b"x")
    environment.files["/workspace/f"].data = bytes(MAX_FILE + 1)
    for wanted in ("bytes", "bytes=0-"):
        reply = server.call("GET", f"{box}/files?path=f", Range=wanted)
        assert (reply.status, "Range" in reply.error["message"]) == (413, True)
    part = server.call("GET", f"{box}/files?path=f", Range=f"bytes=1-{MAX_FILE}")
    assert (part.status, len(part.body)) == (206, MAX_FILE)


@pytest.mark.parametrize("header", ["bytes", "bytes=0-1"])
@pytest.mark.parametrize(("path", "status"), [("no", 404), (".", 400), ("/workspace/a%00b", 400), ("", 400)])
def test_reading_what_is_no_file(server: Running, box: str, path: str, status: int, header: str) -> None:
    assert server.call("GET", f"{box}/files?path={path}", Range=header).status == status


def test_a_file_that_shrinks_while_it_is_read_is_cut_off(
    server: Running, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.call("PUT", f"{box}/files?path=f", LARGE)
    real = server.backend.open_file

    async def short(id: str, path: str, *, offset: int, length: int) -> Any:
        async for piece in real(id, path, offset=offset, length=length // 2):
            yield piece

    monkeypatch.setattr(server.backend, "open_file", short)
    sock = raw(server, f"GET {box}/files?path=f HTTP/1.1")
    sock.sendall(b"\r\n")
    seen = everything(sock)
    assert b"content-length: 1024000" in seen.lower()
    assert len(seen) < len(LARGE)


# -- writing -----------------------------------------------------------------------------------------------


def test_an_upload_above_the_limit_leaves_the_old_file(server: Running, box: str) -> None:
    server.call("PUT", f"{box}/files?path=f", b"old")
    assert server.call("PUT", f"{box}/files?path=f", bytes(MAX_FILE + 1)).status == 413
    sock = raw(server, f"PUT {box}/files?path=f HTTP/1.1")
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    sock.sendall(b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 40 + b"0\r\n\r\n")
    with sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")
    assert server.call("GET", f"{box}/files?path=f").body == b"old"
    assert len(server.call("GET", f"{box}/files/list").json["entries"]) == 1


@pytest.mark.parametrize("sent", [10, 500_000])
def test_an_upload_that_is_cut_short_leaves_the_old_file(server: Running, box: str, sent: int) -> None:
    server.call("PUT", f"{box}/files?path=f", b"old")
    with raw(server, f"PUT {box}/files?path=f HTTP/1.1") as sock:
        sock.sendall(b"Content-Length: 1000000\r\n\r\n" + b"x" * sent)
        time.sleep(0.1)
    deadline = time.monotonic() + 10
    # Nothing is under way any more: a snapshot would wait for it.
    assert server.call("POST", f"{box}/snapshots").status == 201
    assert time.monotonic() < deadline
    assert server.call("GET", f"{box}/files?path=f").body == b"old"


def test_an_upload_that_stalls_is_given_up(server: Running, box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BODY_STALL_SECONDS", 0.2)
    for tail in ("files?path=f", "archive"):
        with raw(server, f"PUT {box}/{tail} HTTP/1.1") as sock:
            sock.sendall(b"Content-Length: 1000000\r\n\r\n" + b"x" * 400_000)
            assert sock.recv(100).startswith(b"HTTP/1.1 400 ")


def test_an_upload_to_nowhere_is_answered_and_the_connection_goes_on(server: Running, box: str) -> None:
    for path, status in ((f"{box}x/files?path=f", b"404"), (f"{box}/files?path=/etc/f", b"400")):
        with raw(server, f"PUT {path} HTTP/1.1") as sock:
            sock.sendall(b"Content-Length: 1000000\r\n\r\n" + bytes(1_000_000))
            assert sock.recv(4096).startswith(b"HTTP/1.1 " + status)
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")


def test_two_uploads_into_one_new_directory(server: Running, box: str) -> None:
    replies = []

    def put(name: str) -> None:
        replies.append(server.call("PUT", f"{box}/files?path=new/dir/{name}", name.encode() * 200_000).status)

    threads = [threading.Thread(target=put, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert replies == [200] * 4
    for name in "abcd":
        assert server.call("GET", f"{box}/files?path=new/dir/{name}").body == name.encode() * 200_000


# -- entries -----------------------------------------------------------------------------------------------


def test_stat_mkdir_move_chmod_remove(server: Running, box: str) -> None:
    made = server.call("POST", f"{box}/files/mkdir", {"path": "a/b", "mode": "700"})
    assert (made.status, made.json["type"], made.json["path"], made.json["mode"]) == (
        *(200, "directory", "/workspace/a/b", "700"),
    )
    assert server.call("POST", f"{box}/files/mkdir", {"path": "a/b"}).status == 200
    assert server.call("POST", f"{box}/files/mkdir", {"path": "a/b", "parents": False}).status == 409
    assert server.call("POST", f"{box}/files/mkdir", {"path": "x/y", "parents": False}).status == 404
    server.call("PUT", f"{box}/files?path=a/f", b"123")
    assert server.call("GET", f"{box}/files/stat?path=a/f").json == {
        "name": "f",
        "path": "/workspace/a/f",
        "type": "file",
        "size": 3,
        "modified_at": server.call("GET", f"{box}/files/list?path=a").json["entries"][1]["modified_at"],
        "mode": "644",
    }
    assert server.call("POST", f"{box}/files/chmod", {"path": "a/f", "mode": "4755"}).json["mode"] == "4755"
    moved = server.call("POST", f"{box}/files/move", {"from": "a/f", "to": "a/b/g"})
    assert (moved.status, moved.json["path"]) == (200, "/workspace/a/b/g")
    server.call("PUT", f"{box}/files?path=h", b"")
    assert server.call("POST", f"{box}/files/move", {"from": "h", "to": "a/b/g", "replace": False}).status == 409
    assert server.call("POST", f"{box}/files/move", {"from": "nothing", "to": "x"}).status == 404
    assert server.call("POST", f"{box}/files/remove", {"path": "a"}).status == 409
    assert server.call("POST", f"{box}/files/remove", {"path": "a", "recursive": True}).json == {"removed": 3}
    assert server.call("POST", f"{box}/files/remove", {"path": "a"}).status == 404
    assert server.call("GET", f"{box}/files/stat?path=a").status == 404


def test_names_are_bytes_from_the_query_and_from_a_body(server: Running, box: str) -> None:
    server.call("POST", f"{box}/files/mkdir", {"path": "new"})
    for name, coded in (("sp ace", "sp%20ace"), ("a%2Fb", "a%252Fb"), ("\udcff\n'\"😀", "%FF%0A%27%22%F0%9F%98%80")):
        server.call("PUT", f"{box}/files?path={coded}", b"x")
        assert server.call("GET", f"{box}/files/stat?path={coded}").json["name"] == name
        renamed = server.call("POST", f"{box}/files/move", {"from": name, "to": f"new/{name}"})
        assert renamed.json["name"] == name
        assert server.call("GET", f"{box}/files?path=new/{coded}").body == b"x"


@pytest.mark.parametrize(
    ("tail", "body", "status"),
    [
        ("mkdir", {"path": "/etc/x"}, 400),
        ("mkdir", {"path": "/workspace"}, 400),
        ("mkdir", {"path": "../x"}, 400),
        ("mkdir", {"path": ""}, 400),
        ("mkdir", {"path": "x" * 5000}, 400),
        ("mkdir", {"path": "a\0b"}, 400),
        ("mkdir", {"path": "\ud800"}, 400),
        ("mkdir", {"path": 7}, 422),
        ("mkdir", {"path": "x", "mode": 755}, 422),
        ("mkdir", {"path": "x", "mode": "888"}, 422),
        ("mkdir", {"path": "x", "mode": "07777"}, 422),
        ("mkdir", {"path": "x", "parents": "no"}, 422),
        ("mkdir", {"path": "x", "owner": 0}, 422),
        ("move", {"from": "x", "to": "/etc/x"}, 400),
        ("move", {"from": "/etc/passwd", "to": "x"}, 400),
        ("move", {"from": "x"}, 422),
        ("move", {"from_": "x", "to": "y"}, 422),
        ("remove", {"path": "/workspace", "recursive": True}, 400),
        ("remove", {"path": "x", "recursive": 1}, 422),
        ("chmod", {"path": "x"}, 422),
        ("chmod", {"path": "x", "mode": ""}, 422),
        ("chmod", {"path": "x", "mode": "644"}, 404),
        ("chmod", {"path": "/tmp/x", "mode": "644"}, 400),
    ],
)
def test_entries_asked_for_wrongly(server: Running, box: str, tail: str, body: Any, status: int) -> None:
    reply = server.call("POST", f"{box}/files/{tail}", body)
    assert (reply.status, reply.error["code"] != "") == (status, True)
    assert server.call("GET", f"{box}/files/list").json["entries"] == []


@pytest.mark.parametrize(
    "tail", ["files/stat", "files/stat?path=a&follow=yes", "watch?recursive=1", "watch?x=1", "archive?path=a&path=b"]
)
def test_queries_asked_wrongly(server: Running, box: str, tail: str) -> None:
    assert server.call("GET", f"{box}/{tail}").error["code"] == "validation_error"


# -- archives -----------------------------------------------------------------------------------------------


def names(archive: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name.removeprefix("./") for member in tar.getmembers()} - {"", "."}


def test_a_directory_goes_out_and_comes_back(server: Running, box: str) -> None:
    server.call("PUT", f"{box}/files?path=d/one", b"1")
    server.call("PUT", f"{box}/files?path=d/sub/big", LARGE)
    reply = server.call("GET", f"{box}/archive?path=d")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/x-tar")
    assert reply.headers["content-disposition"] == "attachment"
    assert names(reply.body) == {"one", "sub", "sub/big"}
    assert server.call("PUT", f"{box}/archive?path=copy/here", reply.body).status == 204
    back = server.call("GET", f"{box}/files?path=copy/here/sub/big")
    assert hashlib.sha256(back.body).digest() == hashlib.sha256(LARGE).digest()
    assert "copy/here/one" in names(server.call("GET", f"{box}/archive").body)


def test_archives_that_cannot_be(server: Running, box: str) -> None:
    for method, body in (("GET", None), ("PUT", b"")):
        assert server.call(method, f"{box}/archive?path=/etc", body).status == 400
        assert server.call(method, f"{box}x/archive", body).status == 404
    assert server.call("GET", f"{box}/archive?path=nothing").status == 404
    assert server.call("PUT", f"{box}/archive", b"this is no archive").status == 400
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("one", "two"):
            info = tarfile.TarInfo(name)
            info.size = 2_000_000
            tar.addfile(info, io.BytesIO(bytes(2_000_000)))
    assert server.call("PUT", f"{box}/archive", packed.getvalue()).status == 413
    assert server.call("PUT", f"{box}/archive", packed.getvalue()[:1_000_000]).status == 400


def test_an_archive_that_breaks_is_cut_off(server: Running, box: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(id: str, path: str, dest: Any, max_bytes: int) -> Any:
        await dest(b"x" * 1000)
        raise BackendError("lost")

    monkeypatch.setattr(server.backend, "export_directory", broken)
    sock = raw(server, f"GET {box}/archive HTTP/1.1")
    sock.sendall(b"\r\n")
    seen = everything(sock)
    assert seen.startswith(b"HTTP/1.1 200")
    assert not seen.endswith(b"0\r\n\r\n")

    async def early(id: str, path: str, dest: Any, max_bytes: int) -> Any:
        raise BackendError("lost")

    monkeypatch.setattr(server.backend, "export_directory", early)
    assert server.call("GET", f"{box}/archive").error["code"] == "backend_error"


# -- watching ------------------------------------------------------------------------------------------------


class Watch:
    """A watch being read."""

    def __init__(self, server: Running, path: str) -> None:
        self.sock = raw(server, f"GET {path} HTTP/1.1")
        self.sock.sendall(b"\r\n")
        self.file = self.sock.makefile("rb")
        assert b"200" in self.file.readline()
        while self.file.readline() != b"\r\n":
            pass

    def line(self) -> dict[str, Any]:
        size = int(self.file.readline(), 16)
        data = self.file.read(size + 2)
        told: dict[str, Any] = json.loads(data)
        return told

    def close(self) -> None:
        self.file.close()
        self.sock.close()


def test_a_watch_says_ready_and_then_what_changes(server: Running, box: str) -> None:
    server.call("POST", f"{box}/files/mkdir", {"path": "d"})
    watch = Watch(server, f"{box}/watch?path=d")
    assert watch.line() == {"type": "ready"}
    server.call("PUT", f"{box}/files?path=d/%FF", b"x")
    told = {"type": "created", "path": "/workspace/d/\udcff", "directory": False}
    assert watch.line() == told
    server.call("POST", f"{box}/files/move", {"from": "d/\udcff", "to": "d/b"})
    assert watch.line() == {**told, "type": "moved", "to": "/workspace/d/b"}
    server.call("POST", f"{box}/files/remove", {"path": "d/b"})
    assert watch.line() == {"type": "removed", "path": "/workspace/d/b", "directory": False}
    server.call("POST", f"{box}/stop")
    assert watch.line()["code"] == "conflict"
    watch.close()


def test_watches_end_with_their_clients_and_cannot_be_anywhere(server: Running, box: str) -> None:
    assert server.call("GET", f"{box}/watch?path=nothing").status == 404
    server.call("PUT", f"{box}/files?path=f", b"")
    assert server.call("GET", f"{box}/watch?path=f").status == 400
    environment = server.backend.environments[f"{box.rpartition('/')[2]}-1"]
    for _ in range(20):  # more than a sandbox can have at once
        watch = Watch(server, f"{box}/watch")
        assert watch.line() == {"type": "ready"}
        watch.close()
        deadline = time.monotonic() + 10
        while environment.files.watchers:
            assert time.monotonic() < deadline
            time.sleep(0.01)
