"""A lean HTTP/1.1 client over one kept connection: so little work that it measures the server and not itself."""

from __future__ import annotations

import json
import select
import socket
from typing import Any


class Lean:
    """One keep-alive connection to a server on the loopback. Requests are made one after another."""

    def __init__(self, port: int, key: str) -> None:
        self._address, self._key = ("127.0.0.1", port), key
        self._socket = self._connect()
        self._buffer = b""

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self._address, 120)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def request(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> tuple[int, bytes]:
        """Send one request and return status and body."""
        if select.select([self._socket], [], [], 0)[0]:  # closed by the server while it was idle
            self._socket.close()
            self._socket = self._connect()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        if len(body) > 65_536:
            self._socket.sendall(head)
            self._socket.sendall(body)
        else:
            self._socket.sendall(head + body)
        while b"\r\n\r\n" not in self._buffer:
            self._fill()
        header, _, rest = self._buffer.partition(b"\r\n\r\n")
        status, length, chunked = int(header.split(None, 2)[1]), 0, False
        for line in header.lower().split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name == b"content-length":
                length = int(value)
            chunked = chunked or (name == b"transfer-encoding" and b"chunked" in value)
        if chunked:
            self._buffer = rest
            return status, self._chunks()
        pieces, have = [rest], len(rest)
        while have < length:
            pieces.append(self._socket.recv(1 << 20))
            have += len(pieces[-1])
            if not pieces[-1]:
                raise ConnectionError("the server closed the connection")
        whole = b"".join(pieces)
        self._buffer = whole[length:]
        return status, whole[:length]

    def _chunks(self) -> bytes:
        pieces = []
        while True:
            while b"\r\n" not in self._buffer:
                self._fill()
            line, _, self._buffer = self._buffer.partition(b"\r\n")
            size = int(line, 16)
            while len(self._buffer) < size + 2:
                self._fill()
            pieces.append(self._buffer[:size])
            self._buffer = self._buffer[size + 2 :]
            if not size:
                return b"".join(pieces)

    def _fill(self) -> None:
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._buffer += data

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send JSON and return the decoded reply; raise on every status that is not 2xx."""
        status, data = self.request(method, path, json.dumps(body).encode() if body is not None else b"")
        if not 200 <= status < 300:
            raise RuntimeError(f"{method} {path}: {status} {data[:300]!r}")
        return json.loads(data) if data else None
