"""The one file that talks HTTP: carries a :class:`~agent_sandbox.client.call.Call` to the server by httpx.

:class:`Http` and :class:`AsyncHttp` differ in how they wait and in nothing else: where the server is, what a failure
means, when a call is sent again and where a line ends are decided here once, without I/O.

A call is sent again only if it has an ``Idempotency-Key`` and its connection broke, so that its first sending may have
been carried out: the server then gives the first one's result. A server that could not be reached at all, and one that
did not answer in time, are reported at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import httpx

from agent_sandbox.client.call import Call
from agent_sandbox.client.errors import URL_VARIABLE, ReplyLostError, TransportError, from_reply, unreachable
from agent_sandbox.errors import InvalidRequestError

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8080"
KEY_VARIABLE = "AGENT_SANDBOX_API_KEY"

CONNECT_SECONDS = 10.0
"""How long a connection may take to come about: a server that is there accepts at once."""

KEEP_ALIVE_SECONDS = 60.0
"""How long an idle connection is kept: shorter than the server keeps it, so that it never closes under a request."""

MAX_LINE_BYTES = 16 * 1024 * 1024
"""Longest line of a stream: far above what a server sends, so that a broken one cannot fill the memory."""

PAUSES = (0.1, 0.3, 1.0, 2.0, 4.0, 4.0, 4.0)
"""Seconds before each new attempt: long enough together for a server that is started again."""

IDEMPOTENCY_HEADER = "Idempotency-Key"


@dataclass(frozen=True)
class Target:
    """Where a server is and how to talk to it. ``key`` stays out of every repr."""

    address: str
    base_url: str
    uds: str | None
    headers: dict[str, str]
    trust_env: bool

    def __repr__(self) -> str:
        return f"Target({self.address!r})"

    @classmethod
    def find(cls, base_url: str | None, api_key: str | None, uds: str | os.PathLike[str] | None) -> Target:
        """Read the arguments, and the environment for what is not given.

        :class:`InvalidRequestError` for what is no address of a server.
        """
        url = base_url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        key = api_key or os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        parts = urlsplit(url)
        path = os.fspath(uds) if uds is not None else (unquote(parts.path) if parts.scheme == "unix" else None)
        if path is not None:
            return cls(f"unix://{path}", "http://localhost", path, headers, trust_env=False)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(f"{url!r} is no address of a server; use http://HOST:PORT or unix:///PATH")
        # A proxy of the environment is for the world outside; it would not find this machine's own server.
        return cls(url, url, None, headers, trust_env=not _is_here(parts.hostname))

    def options(self, timeout: float) -> dict[str, Any]:
        """What both of httpx's clients are made with."""
        return {
            "base_url": self.base_url,
            "headers": self.headers,
            "timeout": httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            "limits": _LIMITS,
            "trust_env": self.trust_env,
        }


_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=KEEP_ALIVE_SECONDS)


class Lines:
    """Cut a stream into lines, whatever pieces it comes in. Pure."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._rest: list[bytes] = []
        self._held = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that a piece completes; blank ones are left out."""
        *whole, last = piece.split(b"\n")
        if whole:
            whole[0] = b"".join([*self._rest, whole[0]])
            self._rest, self._held = [], 0
        self._rest.append(last)
        self._held += len(last)
        if self._held > MAX_LINE_BYTES:
            raise ReplyLostError(f"the server at {self._address} sent a line above {MAX_LINE_BYTES} bytes")
        return [line for line in whole if line.strip()]


class Attempts:
    """When a call is sent again after its connection failed. Pure."""

    def __init__(self, call: Call[Any]) -> None:
        self._pauses = iter(PAUSES if call.idempotency_key else ())
        self._lost: ReplyLostError | None = None

    def pause(self, error: TransportError) -> float:
        """Return the seconds until the next attempt; raise what the caller is to know when there is none."""
        if isinstance(error, ReplyLostError) and not error.timed_out:
            self._lost = self._lost or error
        elif self._lost is None or isinstance(error, ReplyLostError):
            raise error
        pause = next(self._pauses, None)
        if pause is None:
            assert self._lost is not None
            raise self._lost from error
        return pause


class _Common:
    """What both ways of waiting share: the server, the requests, the meaning of failures."""

    _client: httpx.Client | httpx.AsyncClient
    address: str
    target: Target | None
    """``None`` where the caller brought a client of httpx of their own."""
    _timeout: float

    def _request(self, call: Call[Any], body: Any = None) -> httpx.Request:
        wait = self._timeout if call.wait is None else call.wait
        timeout = httpx.Timeout(None if wait == math.inf else wait, connect=CONNECT_SECONDS)
        content = call.content if body is None else body
        headers = dict(call.headers)
        if content is not None:
            headers["Content-Type"] = call.content_type
        if call.idempotency_key:
            headers[IDEMPOTENCY_HEADER] = call.idempotency_key
        return self._client.build_request(call.method, call.path, content=content, headers=headers, timeout=timeout)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise our errors in place of the HTTP library's, whose words are kept and whose traceback is not."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise unreachable(self.address, error) from None
        except httpx.TimeoutException:
            raise ReplyLostError(
                f"the server at {self.address} did not answer in time; whether the request was carried out is unknown",
                timed_out=True,
            ) from None
        except httpx.TransportError as error:
            raise ReplyLostError(
                f"the connection to {self.address} broke ({error}); whether the request was carried out is unknown"
            ) from None


class Http(_Common):
    """A connection pool to one server, for code that blocks.

    The address is ``http(s)://…`` or ``unix:///path``; it and the key come from ``AGENT_SANDBOX_URL`` and
    ``AGENT_SANDBOX_API_KEY`` when not given. ``timeout`` is in seconds, for calls that set none of their own.
    """

    _client: httpx.Client

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 300.0,
        uds: str | os.PathLike[str] | None = None,
        http_client: httpx.Client | None = None,
    ) -> None:
        self._timeout = timeout
        if http_client is not None:
            self._client, self.address, self.target = http_client, str(http_client.base_url), None
            self._client.headers.update(_own_key(api_key))
            return
        self.target = Target.find(base_url, api_key, uds)
        self.address = self.target.address
        transport = httpx.HTTPTransport(uds=self.target.uds, limits=_LIMITS) if self.target.uds else None
        self._client = httpx.Client(transport=transport, **self.target.options(timeout))

    def close(self) -> None:
        """Close every connection."""
        self._client.close()

    def send(self, call: Call[T], body: Iterator[bytes] | None = None) -> T:
        """Carry out a call and return its value; ``body`` is sent piece by piece.

        Raises the server's error as its class, :class:`ServerUnreachableError`, or :class:`ReplyLostError`.
        """
        attempts = Attempts(call)
        while True:
            try:
                with self._translated():
                    response = self._client.send(self._request(call, body))
                break
            except TransportError as error:
                pause = attempts.pause(error)
            time.sleep(pause)
        return _decoded(call, response)

    def pieces(self, call: Call[Any]) -> Generator[bytes, None, None]:
        """Carry out a call and yield its reply's bytes as they come; closing the iterator closes the connection."""
        with self._translated():
            response = self._client.send(self._request(call), stream=True)
        try:
            with self._translated():
                if not call.accepts(response.status_code):
                    raise from_reply(response.status_code, response.read())
                if response.status_code in call.instead:
                    yield call.instead[response.status_code]
                    return
                pieces = response.iter_bytes()
            while True:
                with self._translated():
                    piece = next(pieces, None)
                if piece is None:
                    return
                yield piece
        finally:
            response.close()

    def lines(self, call: Call[T]) -> Generator[T, None, None]:
        """Carry out a streaming call and yield each line's value; closing the iterator closes the connection."""
        cut = Lines(self.address)
        pieces = self.pieces(call)
        try:
            for piece in pieces:
                for line in cut.feed(piece):
                    yield call.decode(line)
        finally:
            pieces.close()


class AsyncHttp(_Common):
    """A connection pool to one server, for code on an event loop. Otherwise as :class:`Http`."""

    _client: httpx.AsyncClient

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 300.0,
        uds: str | os.PathLike[str] | None = None,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        self._timeout = timeout
        if http_client is not None:
            self._client, self.address, self.target = http_client, str(http_client.base_url), None
            self._client.headers.update(_own_key(api_key))
            return
        self.target = Target.find(base_url, api_key, uds)
        self.address = self.target.address
        transport = httpx.AsyncHTTPTransport(uds=self.target.uds, limits=_LIMITS) if self.target.uds else None
        self._client = httpx.AsyncClient(transport=transport, **self.target.options(timeout))

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def send(self, call: Call[T], body: AsyncIterator[bytes] | None = None) -> T:
        """As :meth:`Http.send`."""
        attempts = Attempts(call)
        while True:
            try:
                with self._translated():
                    response = await self._client.send(self._request(call, body))
                break
            except TransportError as error:
                pause = attempts.pause(error)
            await asyncio.sleep(pause)
        return _decoded(call, response)

    async def pieces(self, call: Call[Any]) -> AsyncGenerator[bytes, None]:
        """As :meth:`Http.pieces`."""
        with self._translated():
            response = await self._client.send(self._request(call), stream=True)
        try:
            with self._translated():
                if not call.accepts(response.status_code):
                    raise from_reply(response.status_code, await response.aread())
                if response.status_code in call.instead:
                    yield call.instead[response.status_code]
                    return
                pieces = response.aiter_bytes()
            while True:
                with self._translated():
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                yield piece
        finally:
            await response.aclose()

    async def lines(self, call: Call[T]) -> AsyncGenerator[T, None]:
        """As :meth:`Http.lines`."""
        cut = Lines(self.address)
        pieces = self.pieces(call)
        try:
            async for piece in pieces:
                for line in cut.feed(piece):
                    yield call.decode(line)
        finally:
            await pieces.aclose()


def _decoded(call: Call[T], response: httpx.Response) -> T:
    if not call.accepts(response.status_code):
        raise from_reply(response.status_code, response.content)
    return call.decode(call.instead.get(response.status_code, response.content))


def _own_key(api_key: str | None) -> dict[str, str]:
    key = api_key or os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
