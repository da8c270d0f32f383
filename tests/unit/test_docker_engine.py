"""The engine's client against sockets that are no engine, end in the middle, or answer what they should not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_sandbox.backends.docker import images
from agent_sandbox.backends.docker.engine import Engine
from agent_sandbox.errors import (
    BackendError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    SandboxError,
    UnsupportedError,
)


@contextlib.asynccontextmanager
async def answering(path: Path, *answers: bytes) -> AsyncIterator[Engine]:
    """An engine at ``path`` that gives these answers in turn, each on a connection of its own, whatever is asked."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(left.pop(0))
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, str(path))
    engine = Engine(f"unix://{path}")
    try:
        yield engine
    finally:
        await engine.close()
        server.close()


def reply(body: object, status: str = "200 OK") -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status.encode(), len(text), text)


@pytest.fixture
def sock(tmp_path: Path) -> Path:
    return tmp_path / "s"


async def test_nobody_there_says_how_to_start_one(sock: Path) -> None:
    engine = Engine(f"unix://{sock}")
    with pytest.raises(BackendError, match="systemctl start docker"):
        await engine.negotiate()
    await engine.close()


@pytest.mark.parametrize(
    "answer",
    [
        reply({"hello": "world"}),
        reply(b"<html>"),
        reply([1, 2]),
        reply({"ApiVersion": "new", "MinAPIVersion": "1.12"}),
        reply(b"nothing", "404 Not Found"),
        reply({"error": "?"}, "500 Internal Server Error"),
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"[" * 100_000,
    ],
)
async def test_a_wrong_socket_is_no_engine(sock: Path, answer: bytes) -> None:
    async with answering(sock, answer) as engine:
        with pytest.raises(BackendError) as told:
            await engine.negotiate()
    assert "Docker engine" in told.value.message


@pytest.mark.parametrize(
    ("newest", "oldest", "spoken"), [("1.41", "1.12", "v1.41"), ("1.52", "1.44", "v1.44"), ("1.43", "1.24", "v1.41")]
)
async def test_the_version_is_one_that_both_speak(sock: Path, newest: str, oldest: str, spoken: str) -> None:
    async with answering(sock, reply({"ApiVersion": newest, "MinAPIVersion": oldest, "Version": "x"})) as engine:
        await engine.negotiate()
        assert engine._prefix == f"/{spoken}"


async def test_one_that_is_too_old_is_told(sock: Path) -> None:
    async with answering(sock, reply({"ApiVersion": "1.40", "MinAPIVersion": "1.12"})) as engine:
        with pytest.raises(BackendError, match=r"20\.10"):
            await engine.negotiate()


async def test_one_that_ends_in_the_middle_leaves_the_outcome_unknown(sock: Path) -> None:
    for answer in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"):
        async with answering(sock, answer) as engine:
            with pytest.raises(BackendError, match="unknown"):
                await engine.post("/containers/x/start")
        sock.unlink(missing_ok=True)


async def test_an_image_for_another_machine_is_refused(sock: Path) -> None:
    other = {"Id": "sha256:1", "Os": "linux", "Architecture": "arm64", "Config": {}}
    async with answering(sock, reply(other)) as engine:
        with pytest.raises(UnsupportedError, match="arm64"):
            await images.find(engine, "x", "x86_64", "docker")


async def test_a_pull_that_fails_says_how_to_bring_the_image(sock: Path) -> None:
    refused = reply({"message": "No such image: x"}, "404 Not Found")
    down = (
        json.dumps({"status": "Pulling"}).encode() + b"\n" + json.dumps({"error": "dial tcp: refused"}).encode() + b"\n"
    )
    async with answering(sock, refused, reply(down)) as engine:
        with pytest.raises(NotFoundError, match="docker load"):
            await images.find(engine, "x", "x86_64", "docker")


async def test_a_pull_is_told_while_it_goes_on(sock: Path) -> None:
    """The registry has sent a part: whoever waits for the image can ask how far it is."""
    missing, found = {"message": "No such image: x"}, {"Id": "sha256:1", "Os": "linux", "Architecture": "amd64"}
    sizes = [{"id": layer, "status": "Downloading", "progressDetail": {"current": 10, "total": 40}} for layer in "ab"]
    begun = "".join(json.dumps(line) + "\n" for line in sizes).encode()
    arrived, go_on = asyncio.Event(), asyncio.Event()
    answers = [reply(missing, "404 Not Found"), None, reply(found)]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        answer = answers.pop(0)
        if answer is None:
            answer = b"%x\r\n%s\r\n" % (len(begun), begun)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + answer)
            await writer.drain()
            arrived.set()
            await go_on.wait()
            answer = b"0\r\n\r\n"
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, str(sock))
    engine, pulls = Engine(f"unix://{sock}"), images.Pulls()
    finding = asyncio.create_task(images.find(engine, "x", "x86_64", "docker", pulls))
    await arrived.wait()
    while [(pull.image, pull.done_bytes, pull.total_bytes) for pull in pulls.told()] != [("x", 20, 80)]:
        await asyncio.sleep(0.01)
    go_on.set()
    assert (await finding).id == "sha256:1"
    assert pulls.told() == []
    await engine.close()
    server.close()


async def test_a_digest_that_has_gone_is_not_pulled_as_something_else(sock: Path) -> None:
    async with answering(sock, reply({"message": "No such image"}, "404 Not Found")) as engine:
        with pytest.raises(NotFoundError, match="no image"):
            await images.find(engine, "sha256:" + "0" * 64, "x86_64", "docker")


async def test_the_beginning_of_an_id_is_no_way_around_what_is_allowed(sock: Path) -> None:
    found = {"Id": "sha256:cafe" + "0" * 60, "Os": "linux", "Architecture": "amd64", "RepoTags": ["secret/x:1"]}
    async with answering(sock, reply(found), reply({**found, "RepoTags": ["cafe:latest"]})) as engine:
        image = await images.find(engine, "cafe", "x86_64", "docker")
        for allowed in (["*"], ["ca*", "secret/*"], ["sha256:*"]):
            images.refuse_by_id("cafe", image, allowed)
        with pytest.raises(ForbiddenError, match="ALLOWED_IMAGES"):
            images.refuse_by_id("cafe", image, ["ca*"])
        named = await images.find(engine, "cafe", "x86_64", "docker")
        images.refuse_by_id("cafe", named, ["ca*"])


async def test_an_image_that_says_nonsense_is_refused(sock: Path) -> None:
    found = {"Id": "sha256:1", "Os": "linux", "Architecture": "amd64", "Config": {"Env": [1]}}
    async with answering(sock, reply(found)) as engine:
        with pytest.raises(InvalidRequestError, match="Env"):
            await images.find(engine, "x", "x86_64", "docker")


@pytest.mark.parametrize(
    "name",
    [
        *("../containers/other", "../../info", "x/../../containers/other", "./x", "x/./y", "x//y", "/x", "x/"),
        *("allowed:x/../other:latest", "x?y", "x#y", "x%2f..%2fy", "x\\y", "-x", "x\u00e9", "a" * 600),
    ],
)
async def test_a_name_never_becomes_another_path_of_the_api(sock: Path, name: str) -> None:
    """An engine that has something at every path, as a container with its environment, is not asked."""
    there = reply({"Id": "c0ffee", "Config": {"Env": ["PASSWORD=hush"]}})
    async with answering(sock, there) as engine:
        with pytest.raises(InvalidRequestError, match="no name of an image"):
            await images.find(engine, name, "x86_64", "docker")


@pytest.mark.parametrize(
    "name",
    [
        *("python", "python:3.12-slim", "library/a__b", "localhost:5000/a/b:_tag", "[::1]:5000/a"),
        *("registry.example.org/a.b/c@sha256:" + "0" * 64, "sha256:" + "0" * 64, "0123456789ab"),
    ],
)
async def test_names_as_engines_have_them_are_asked_for(sock: Path, name: str) -> None:
    async with answering(sock, reply({"Id": "sha256:1", "Os": "linux", "Config": {}})) as engine:
        assert (await images.find(engine, name, "x86_64", "docker")).id == "sha256:1"


@pytest.mark.parametrize("name", ["", "two words", "a\nb", "a\x00b"])
async def test_a_name_that_cannot_be_one_is_not_asked_for(sock: Path, name: str) -> None:
    async with answering(sock) as engine:
        with pytest.raises(SandboxError):
            await images.find(engine, name, "x86_64", "docker")
