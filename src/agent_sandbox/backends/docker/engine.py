"""The Docker Engine's HTTP API, as far as this backend calls it. Asynchronous, over httpx.

Every failure leaves as an error of our own tree, and says what is known: an engine that cannot be reached did nothing;
one whose connection broke in the middle may have done what was asked. A call is made once, never again by itself.

The API's version is the oldest that has everything asked for here, or the oldest that a newer engine still speaks.
Source of the calls: the engine's API reference, version 1.41.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from agent_sandbox.errors import BackendError, ConflictError, LimitExceededError, NotFoundError, SandboxError

WANTED = (1, 41)
"""Of Docker 20.10, the oldest with private control group namespaces."""
REMEDY = "start it (systemctl start docker), or name its socket in AGENT_SANDBOX_DOCKER_HOST"
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 120.0
"""A busy engine takes seconds for a container; removing a large one on a slow disk takes more."""
_CONNECTIONS = 64
"""More than creations and removals at once on one host; waiting ones queue."""
_ANSWER_BYTES = 64 << 20
"""A listing of ten thousand containers; more is no engine's."""
_LINE_BYTES = 1 << 20
_MESSAGE_BYTES = 500


class Engine:
    """One engine, named as ``DOCKER_HOST`` names it: ``unix:///path`` or ``tcp://host:port``."""

    def __init__(self, host: str) -> None:
        self.host = host
        scheme, _, address = host.partition("://")
        if scheme == "unix" and address.startswith("/"):
            self.socket: Path | None = Path(address)
            base = "http://docker"
        elif scheme == "tcp" and address:
            self.socket = None
            base = f"http://{address.rstrip('/')}"
        else:
            raise BackendError(
                f"AGENT_SANDBOX_DOCKER_HOST is {host!r}; it must be unix:///path or tcp://host:port (for one over ssh: "
                "forward its socket with ssh -L)"
            )
        transport = httpx.AsyncHTTPTransport(
            uds=None if self.socket is None else str(self.socket), limits=httpx.Limits(max_connections=_CONNECTIONS)
        )
        timeout = httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS)
        self._client = httpx.AsyncClient(transport=transport, base_url=base, timeout=timeout, trust_env=False)
        self._prefix = ""

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def negotiate(self) -> dict[str, Any]:
        """Find the API version to speak; return what the engine says of itself (``/version``).

        :class:`BackendError` when nobody answers, or somebody who is no Docker engine, or one that is too old.
        """
        self._prefix = ""
        try:
            found = await self.get("/version")
            newest, oldest = (_version(found[name]) for name in ("ApiVersion", "MinAPIVersion"))
        except (KeyError, TypeError, ValueError, SandboxError) as error:
            if isinstance(error, BackendError):
                raise
            raise BackendError(f"what answers at {self.host} is no Docker engine; {REMEDY}") from None
        if newest < WANTED:
            raise BackendError(f"the Docker engine at {self.host} is too old: it needs to be 20.10 or newer")
        self._prefix = "/v{}.{}".format(*max(WANTED, oldest))
        return dict(found)

    async def get(self, path: str, **query: Any) -> Any:
        """Ask for something; the answer is JSON."""
        return await self._call("GET", path, query)

    async def post(self, path: str, body: Any = None, **query: Any) -> Any:
        """Have something done."""
        return await self._call("POST", path, query, json=body if body is not None else {})

    async def delete(self, path: str, **query: Any) -> Any:
        """Have something removed."""
        return await self._call("DELETE", path, query)

    async def put_archive(self, container: str, path: str, archive: bytes) -> None:
        """Unpack a tar in a container's directory."""
        query = {"path": path, "noOverwriteDirNonDir": "true"}
        headers = {"Content-Type": "application/x-tar"}
        await self._call("PUT", f"/containers/{container}/archive", query, content=archive, headers=headers)

    async def import_image(self, archive: bytes, repository: str, tag: str, change: str) -> None:
        """Make an image of one layer of a tar."""
        query = {"fromSrc": "-", "repo": repository, "tag": tag, "changes": change}
        headers = {"Content-Type": "application/x-tar"}
        call = self._client.stream(
            "POST", self._prefix + "/images/create", params=query, content=archive, headers=headers
        )
        async with self._translated("POST /images/create"), call as answer:
            await _raise_for(answer, "/images/create")
            for line in (await _body(answer, _LINE_BYTES)).splitlines():
                if line.strip() and "error" in (said := json.loads(line)):
                    raise refusal(500, str(said["error"]))

    async def lines(self, path: str, seconds: float, **query: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Post, and give the JSON objects of the answer as they come; ``seconds`` is the longest wait for one."""
        timeout = httpx.Timeout(seconds, connect=_CONNECT_SECONDS)
        call = self._client.stream("POST", self._prefix + path, params=query, timeout=timeout)
        async with self._translated(f"POST {path}"), call as answer:
            await _raise_for(answer, path)
            pending = b""
            async for data in answer.aiter_raw():
                *whole, pending = (pending + data).split(b"\n")
                if len(pending) > _LINE_BYTES:
                    raise BackendError(f"the Docker engine's answer to {path} is malformed")
                for line in whole:
                    if line.strip():
                        yield json.loads(line)

    @contextlib.asynccontextmanager
    async def hijack(self, path: str, body: Mapping[str, Any], **query: Any) -> AsyncIterator[Any]:
        """Post, and take the connection over: a stream with ``read(max)`` and ``write(bytes)`` of httpcore's.

        What comes is in the engine's multiplexed format (:class:`Frames`).
        """
        headers = {"Connection": "Upgrade", "Upgrade": "tcp"}
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        call = self._client.stream(
            "POST", self._prefix + path, params=query, json=dict(body), headers=headers, timeout=timeout
        )
        async with self._translated(f"POST {path}"), call as answer:
            if answer.status_code != httpx.codes.SWITCHING_PROTOCOLS:
                await _raise_for(answer, path)
                raise BackendError(f"the Docker engine at {self.host} gives no stream for {path}")
            yield answer.extensions["network_stream"]

    async def _call(self, method: str, path: str, query: Mapping[str, Any], **content: Any) -> Any:
        params = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in query.items()}
        call = self._client.stream(method, self._prefix + path, params=params, **content)
        async with self._translated(f"{method} {path}"), call as answer:
            await _raise_for(answer, path)
            body = await _body(answer, _ANSWER_BYTES)
            return json.loads(body) if body else None

    @contextlib.asynccontextmanager
    async def _translated(self, call: str) -> AsyncIterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise BackendError(f"no Docker engine answers at {self.host} ({error}); {REMEDY}") from error
        except httpx.TimeoutException as error:
            raise BackendError(
                f"the Docker engine did not answer {call} in time; whether it was done is unknown"
            ) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            words = str(error) or type(error).__name__
            raise BackendError(
                f"the connection to the Docker engine broke during {call} ({words}); whether it was done is unknown"
            ) from error
        except (ValueError, RecursionError) as error:
            raise BackendError(f"what answers at {self.host} is no Docker engine; {REMEDY}") from error


class Frames:
    """Takes the engine's multiplexed streams apart: 8 bytes of header (stream, 0, 0, 0, length), then the piece."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._left = 0
        self._stream = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The pieces in ``data``, each with its stream: 1 is standard output, 2 standard error."""
        found, view = [], memoryview(data)
        while view:
            if self._left:
                piece = view[: self._left]
                found.append((self._stream, bytes(piece)))
                self._left -= len(piece)
                view = view[len(piece) :]
                continue
            missing = 8 - len(self._head)
            self._head += view[:missing]
            view = view[missing:]
            if len(self._head) == 8:
                self._stream = self._head[0]
                self._left = int.from_bytes(self._head[4:])
                self._head.clear()
        return found


async def _body(answer: httpx.Response, most: int) -> bytes:
    body = bytearray()
    async for data in answer.aiter_bytes():
        body += data
        if len(body) > most:
            raise BackendError("the Docker engine's answer is too long")
    return bytes(body)


async def _raise_for(answer: httpx.Response, path: str) -> None:
    if answer.status_code < 400:
        return
    body = await _body(answer, _LINE_BYTES)
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BackendError(f"what answers {path} with {answer.status_code} is no Docker engine; {REMEDY}") from None
    raise refusal(answer.status_code, message)


def refusal(status: int, message: str) -> SandboxError:
    """What the engine's refusal means to the caller."""
    words = message.strip()[:_MESSAGE_BYTES]
    if "no space left on device" in words or "disk quota exceeded" in words:
        return LimitExceededError(f"the Docker engine's disk is full; free some space there ({words})")
    if status == 404:
        return NotFoundError(f"the Docker engine has none: {words}")
    if status == 409:
        return ConflictError(f"the Docker engine refuses: {words}")
    return BackendError(f"the Docker engine refuses: {words}")


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)
