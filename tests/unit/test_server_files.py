"""Files over HTTP: bytes in names, limits, and connections that survive a refusal."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from urllib.parse import quote_from_bytes

import pytest
from starlette.requests import Request

from agent_sandbox import models
from agent_sandbox.server import views
from agent_sandbox.server.codec import encode
from agent_sandbox.server.files import LONG_LISTING_ENTRIES, list_files
from agent_sandbox.types import FileEntry
from tests.unit.server_harness import KEY, Running, running, settings_for

LIMIT = 100_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(settings_for(tmp_path_factory.mktemp("server"), max_file_bytes=LIMIT)) as it:
        yield it


@pytest.fixture
def files(server: Running) -> Iterator[str]:
    sandbox_id = server.create()
    yield f"/v1/sandboxes/{sandbox_id}/files"
    server.call("DELETE", f"/v1/sandboxes/{sandbox_id}")


def test_bytes_there_and_back(server: Running, files: str) -> None:
    data = bytes(range(256)) * 10
    written = server.call("PUT", files + "?path=/workspace/a/b.bin&mode=0755", data)
    assert written.status == 200
    shown = written.json
    assert set(shown) == {"name", "path", "type", "size", "modified_at"}
    assert (shown["name"], shown["path"], shown["type"], shown["size"]) == (
        "b.bin",
        "/workspace/a/b.bin",
        "file",
        len(data),
    )
    reply = server.call("GET", files + "?path=a/b.bin")
    assert (reply.status, reply.body) == (200, data)
    assert reply.headers["content-type"] == "application/octet-stream"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["content-disposition"] == "attachment"
    assert server.call("GET", files + "/list?path=a").json == {"path": "/workspace/a", "entries": [shown]}
    assert [entry["type"] for entry in server.call("GET", files + "/list").json["entries"]] == ["directory"]


@pytest.mark.parametrize("name", [b"a b", b"a+b", b"q\"'", b"new\nline", b"%2F", "😀".encode(), b"\xff\xfe", b"&=#?"])
def test_names_are_bytes(server: Running, files: str, name: bytes) -> None:
    path = f"?path={quote_from_bytes(name)}"
    written = server.call("PUT", files + path, b"inside")
    assert written.status == 200
    assert written.json["name"].encode("utf-8", "surrogateescape") == name
    assert server.call("GET", files + path).body == b"inside"
    (entry,) = server.call("GET", files + "/list").json["entries"]
    assert entry["name"].encode("utf-8", "surrogateescape") == name


def test_a_plus_is_a_space_and_an_encoded_slash_a_slash(server: Running, files: str) -> None:
    assert server.call("PUT", files + "?path=d%2Fa+b", b"").json["path"] == "/workspace/d/a b"


@pytest.mark.parametrize("count", [LONG_LISTING_ENTRIES - 1, LONG_LISTING_ENTRIES, LONG_LISTING_ENTRIES + 1])
def test_a_long_listing_is_made_off_the_loop_and_reads_the_same(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[bool] = set()

    def show(entry: FileEntry) -> models.FileInfo:
        made.add(threading.current_thread() is threading.main_thread())
        return file(entry)

    file = views.file
    monkeypatch.setattr(views, "file", show)
    names = [f"{n:05d}" for n in range(count - 1)] + ["\udcff"]
    entries = [FileEntry(name, f"/workspace/{name}", "file", 1, 0o644, 5) for name in names]

    class Listing:
        async def list_files(self, id: str, path: str) -> tuple[str, list[FileEntry]]:
            return path, entries

    app = SimpleNamespace(state=SimpleNamespace(manager=Listing()))
    request = Request({"type": "http", "query_string": b"", "app": app})
    reply = asyncio.run(list_files("sb1", request))
    shown = json.loads(bytes(reply.body))
    assert [entry["name"] for entry in shown["entries"]] == names
    assert made == {count <= LONG_LISTING_ENTRIES}


def test_json_says_names_that_are_not_utf8_as_surrogate_escapes() -> None:
    assert encode({"name": "a\udcff"}) == b'{"name":"a\\udcff"}'


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("", 422, "path: is required"),
        ("?mode=644", 422, "path: is required"),
        ("?path=a&path=b", 422, "path: given more than once"),
        ("?path=a&pth=b", 422, "pth: unknown parameter"),
        ("?path=", 400, ""),
        ("?path=a%00b", 400, "NUL"),
        ("?path=/etc/passwd", 400, "/workspace"),
        ("?path=../etc/passwd", 400, "/workspace"),
        ("?path=a/..%2F..%2Fetc/passwd", 400, "/workspace"),
        ("?path=/workspace", 400, ""),
        ("?path=" + "a" * 20_000, 400, ""),
        ("?path=a&mode=", 400, "octal"),
        ("?path=a&mode=888", 400, "octal"),
        ("?path=a&mode=-1", 400, "octal"),
        ("?path=a&mode=00644", 400, "octal"),
        ("?path=a&mode=0o644", 400, "octal"),
        ("?path=a&mode=6%0A", 400, "octal"),
    ],
)
def test_bad_writes(server: Running, files: str, query: str, status: int, words: str) -> None:
    reply = server.call("PUT", files + query, b"x")
    assert reply.status == status, reply.body
    assert words in reply.error["message"]
    assert server.call("GET", files + "/list").json["entries"] == []


@pytest.mark.parametrize(
    ("path", "status"),
    [("nothing", 404), ("", 400), ("%00", 400), ("/workspace", 400), ("a/" * 3000, 400)],
)
def test_bad_reads(server: Running, files: str, path: str, status: int) -> None:
    assert server.call("GET", files + f"?path={path}").status == status
    assert server.call("GET", files).status == 422
    assert server.call("GET", files + "/list?path=nothing").status == 404


def test_the_limit_is_exact(server: Running, files: str) -> None:
    assert server.call("PUT", files + "?path=a", b"x" * LIMIT).json["size"] == LIMIT
    refused = server.call("PUT", files + "?path=b", b"x" * (LIMIT + 1))
    assert (refused.status, refused.error["code"]) == (413, "payload_too_large")
    assert server.call("GET", files + "?path=b").status == 404


def head(files: str, name: str, *headers: str) -> bytes:
    lines = [f"PUT {files}?path={name} HTTP/1.1", "Host: localhost", f"X-API-Key: {KEY}", *headers, "", ""]
    return "\r\n".join(lines).encode()


def answer(stream: object) -> tuple[int, bytes, bool]:
    """Read one reply: its status, its body, and whether the server said that it closes."""
    readline, read = stream.readline, stream.read  # type: ignore[attr-defined]
    status, length, closes = int(readline().split()[1]), 0, False
    while (line := readline()) != b"\r\n":
        name, _, value = line.strip().lower().partition(b": ")
        length = int(value) if name == b"content-length" else length
        closes = closes or (name == b"connection" and value == b"close")
    return status, read(length), closes


def test_a_declared_size_is_refused_before_the_body_is_sent(server: Running, files: str) -> None:
    with server.connect() as sock, sock.makefile("rb") as stream:
        sock.sendall(head(files, "a", f"Content-Length: {LIMIT + 1}"))
        assert answer(stream)[0] == 413
        # The client may send the body all the same; the connection goes on behind it.
        sock.sendall(b"x" * (LIMIT + 1) + head(files, "b", "Content-Length: 2") + b"ok")
        assert answer(stream)[0] == 200


def test_a_client_that_waits_for_leave_is_refused_without_it(server: Running, files: str) -> None:
    with server.connect() as sock, sock.makefile("rb") as stream:
        sock.sendall(head(files, "a", f"Content-Length: {LIMIT + 1}", "Expect: 100-continue"))
        status, _, closes = answer(stream)
        assert (status, closes) == (413, True)
        assert stream.read() == b""


def test_a_body_without_a_size_stops_at_the_limit(server: Running, files: str) -> None:
    with server.connect() as sock, sock.makefile("rb") as stream:
        sock.sendall(head(files, "a", "Transfer-Encoding: chunked"))
        piece = b"x" * 10_000
        for _ in range(12):
            sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        assert answer(stream)[0] == 413
        sock.sendall(b"0\r\n\r\n" + head(files, "b", "Transfer-Encoding: chunked") + b"2\r\nok\r\n0\r\n\r\n")
        assert answer(stream)[0] == 200
    assert server.call("GET", files + "?path=a").status == 404


def test_an_upload_that_breaks_off_writes_nothing(server: Running, files: str) -> None:
    with server.connect() as sock:
        sock.sendall(head(files, "a", "Content-Length: 1000") + b"x" * 500)
    assert server.call("GET", files + "/list").json["entries"] == []
    assert server.call("GET", "/healthz").status == 200
