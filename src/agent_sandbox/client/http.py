"""The one file that talks HTTP: carries a :class:`~agent_sandbox.client.requests.Call` to the server by httpx."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import httpx

from agent_sandbox.client.errors import ReplyLostError, ServerUnreachableError, from_reply
from agent_sandbox.client.requests import Call
from agent_sandbox.errors import InvalidRequestError

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8080"
URL_VARIABLE, KEY_VARIABLE = "AGENT_SANDBOX_URL", "AGENT_SANDBOX_API_KEY"

CONNECT_SECONDS = 10.0
"""How long a connection may take to come about: a server that is there accepts at once."""

KEEP_ALIVE_SECONDS = 60.0
"""How long an idle connection is kept: shorter than the server keeps it, so that it never closes under a request."""

MAX_LINE_BYTES = 16 * 1024 * 1024
"""Longest line of a stream: far above what a server sends, so that a broken one cannot fill the memory."""


class Http:
    """A connection pool to one server.

    The address is ``http(s)://…`` or ``unix:///path``; it and the key come from ``AGENT_SANDBOX_URL`` and
    ``AGENT_SANDBOX_API_KEY`` when not given. ``timeout`` is in seconds, for calls that set none of their own.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 300.0,
        uds: str | os.PathLike[str] | None = None,
        http_client: httpx.Client | None = None,
    ) -> None:
        url = base_url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        key = api_key or os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = timeout
        if http_client is not None:
            self._client, self.address = http_client, str(http_client.base_url)
            self._client.headers.update(headers)
            return
        parts = urlsplit(url)
        path = os.fspath(uds) if uds is not None else (unquote(parts.path) if parts.scheme == "unix" else None)
        options: dict[str, Any] = {"headers": headers, "timeout": httpx.Timeout(timeout, connect=CONNECT_SECONDS)}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=KEEP_ALIVE_SECONDS)
        if path is not None:
            self.address = f"unix://{path}"
            transport = httpx.HTTPTransport(uds=path, limits=limits)
            self._client = httpx.Client(base_url="http://localhost", transport=transport, **options)
            return
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(f"{url!r} is no address of a server; use http://HOST:PORT or unix:///PATH")
        self.address = url
        # A proxy of the environment is for the world outside; it would not find this machine's own server.
        self._client = httpx.Client(base_url=url, limits=limits, trust_env=not _is_here(parts.hostname), **options)

    def close(self) -> None:
        """Close every connection."""
        self._client.close()

    def send(self, call: Call[T]) -> T:
        """Carry out a call and return its value.

        Raises the server's error as its class, :class:`ServerUnreachableError`, or :class:`ReplyLostError`.
        """
        with self._translated():
            response = self._client.send(self._request(call))
        if not response.is_success:
            raise from_reply(response.status_code, response.content)
        return call.decode(response.content)

    def lines(self, call: Call[T]) -> Iterator[T]:
        """Carry out a streaming call and yield each line's value; closing the iterator closes the connection."""
        with self._translated():
            response = self._client.send(self._request(call), stream=True)
        try:
            with self._translated():
                if not response.is_success:
                    raise from_reply(response.status_code, response.read())
                pieces = response.iter_bytes()
            rest: list[bytes] = []
            held = 0
            while True:
                with self._translated():
                    piece = next(pieces, None)
                if piece is None:
                    return
                *whole, last = piece.split(b"\n")
                if whole:
                    whole[0] = b"".join([*rest, whole[0]])
                    rest, held = [], 0
                    for line in whole:
                        if line.strip():
                            yield call.decode(line)
                rest.append(last)
                held += len(last)
                if held > MAX_LINE_BYTES:
                    raise ReplyLostError(f"the server at {self.address} sent a line above {MAX_LINE_BYTES} bytes")
        finally:
            response.close()

    def _request(self, call: Call[Any]) -> httpx.Request:
        wait = httpx.Timeout(self._timeout if call.wait is None else call.wait, connect=CONNECT_SECONDS)
        headers = {"Content-Type": call.content_type} if call.content is not None else {}
        return self._client.build_request(call.method, call.path, content=call.content, headers=headers, timeout=wait)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise ServerUnreachableError(
                f"no server answers at {self.address} ({error}); start one with `agent-sandbox serve`, "
                f"or set {URL_VARIABLE}"
            ) from error
        except httpx.TimeoutException as error:
            raise ReplyLostError(
                f"the server at {self.address} did not answer in time; whether the request was carried out is unknown"
            ) from error
        except httpx.TransportError as error:
            raise ReplyLostError(
                f"the connection to {self.address} broke ({error}); whether the request was carried out is unknown"
            ) from error


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
