"""The QEMU Machine Protocol, as far as it is needed: one command at a time over a connection of its own.

Strategy
--------
* Each operation connects, says its few commands and leaves. QEMU serves one client at a time and another's greeting
  waits until then, so nothing has to be shared between servers, before and after a restart.
* The other side counts as hostile: a line has at most ``LINE_BYTES``, everything together must be done by a deadline,
  events are dropped, and of what it says only a short clean text reaches a message.
* Descriptors are sent beside a command (SCM_RIGHTS), which is how QEMU gets files that it may not open.

The protocol is in QEMU's own manual, "QEMU Machine Protocol Specification": a greeting, ``qmp_capabilities``, then one
JSON object a line, each answered by one with ``return`` or ``error``; lines with ``event`` may come in between.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agent_sandbox.backends.microvm.children import clean
from agent_sandbox.errors import BackendError

LINE_BYTES = 256 * 1024
"""The longest answer that is asked for is 64 KiB of console in Base64."""
SECONDS = 10.0
"""For a connection and its commands. An idle QEMU answers in 1 ms, a host that swaps in seconds."""
_RECEIVE_BYTES = 64 * 1024


class QmpError(BackendError):
    """QEMU refused a command: ``kind`` is the class of its error."""

    def __init__(self, command: str, kind: str, words: str) -> None:
        super().__init__(f"QEMU refused {command}: {words}")
        self.kind = kind


class Qmp:
    """One connection, from ``async with``. Use it from one task."""

    def __init__(self, path: Path, seconds: float = SECONDS) -> None:
        self._path = path
        self._seconds = seconds
        self._deadline = 0.0
        self._socket: socket.socket | None = None
        self._received = bytearray()

    async def __aenter__(self) -> Self:
        """Connect and shake hands. :class:`BackendError` when nobody listens, or says what QEMU would."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + self._seconds
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        self._socket = connection
        try:
            async with asyncio.timeout_at(self._deadline):
                await loop.sock_connect(connection, str(self._path))
                greeting = await self._line(connection)
            if not isinstance(greeting.get("QMP"), dict):
                raise BackendError("what answers on QEMU's control socket is not QEMU")
            await self.execute("qmp_capabilities")
        except OSError as error:
            self.close()
            raise self._failed("connecting", error) from error
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect. May be called again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def execute(
        self, command: str, arguments: dict[str, Any] | None = None, descriptors: Sequence[int] = ()
    ) -> Any:
        """Say one command and give what it returns. ``descriptors`` are sent with it and stay the caller's.

        :class:`QmpError` when QEMU refuses, :class:`BackendError` when it is gone or does not answer in time.
        """
        connection = self._socket
        if connection is None:
            raise BackendError("the control connection to QEMU is closed")
        text = json.dumps({"execute": command, "arguments": arguments or {}}).encode() + b"\n"
        try:
            async with asyncio.timeout_at(self._deadline):
                if descriptors:
                    # The peer has read all that was sent before, so this little is taken at once and whole.
                    socket.send_fds(connection, [text], descriptors)
                else:
                    await asyncio.get_running_loop().sock_sendall(connection, text)
                while True:
                    answer = await self._line(connection)
                    if "return" in answer:
                        return answer["return"]
                    if "error" in answer:
                        raise _refused(command, answer["error"])
        except OSError as error:
            self.close()
            raise self._failed(command, error) from error

    async def _line(self, connection: socket.socket) -> dict[str, Any]:
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > LINE_BYTES:
                raise BackendError("QEMU's control socket sent a line without end")
            data = await asyncio.get_running_loop().sock_recv(connection, _RECEIVE_BYTES)
            if not data:
                raise BackendError("QEMU has ended, or closed its control socket")
            self._received += data
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise BackendError("QEMU's control socket sent what is not QMP")
        return message

    def _failed(self, doing: str, error: OSError) -> BackendError:
        if isinstance(error, TimeoutError):
            return BackendError(f"QEMU did not answer within {self._seconds:g} seconds ({doing})")
        return BackendError(f"QEMU does not run ({doing}: {error.strerror or type(error).__name__})")


def _refused(command: str, error: object) -> QmpError:
    table = error if isinstance(error, dict) else {}
    return QmpError(command, clean(str(table.get("class", ""))), clean(str(table.get("desc", ""))))


__all__ = ["LINE_BYTES", "SECONDS", "Qmp", "QmpError"]
