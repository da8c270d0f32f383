"""The connection's side of the server: who connects to the unix socket, and how long a request's head may be.

A subclass of uvicorn's httptools protocol adds what uvicorn leaves out:

* On a unix socket the kernel tells the peer's user (SO_PEERCRED, unix(7)). Root and the server's own user are let in
  and marked as trusted; any other is cut off before a byte of it is read.
* A TCP peer that vanished without a word is noticed by the kernel's probes (tcp(7)), also by a stream that is silent.
* The head of a request (request line and headers) is bounded; the parser alone would collect it for ever.
* Bytes that are no HTTP get the error shape, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from agent_sandbox.server import errors
from agent_sandbox.server.gate import TRUSTED_PEER

log = logging.getLogger("agent_sandbox.server")

MAX_HEAD_BYTES = 64 * 1024
"""Longest head: the longest query (16 KiB), a key, and what proxies add."""

_PROBES = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))
"""Seconds of silence before the first probe, seconds between probes, probes without an answer."""

_CREDENTIALS = struct.Struct("3i")


class Protocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            uid = peer_uid(sock)
            if uid not in (0, os.geteuid()):
                log.warning("refused a connection of user %d to the unix socket", uid)
                self.transport = transport
                transport.abort()
                return
            self.app_state = {**self.app_state, TRUSTED_PEER: True}
        elif sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _PROBES:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the head of a request may have {MAX_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        body = bytes(errors.reply(status, "invalid_request", message).body)
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()


def peer_uid(sock: socket.socket) -> int:
    """Ask the kernel for the user who connected to a unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
