"""A terminal in a sandbox, over a WebSocket.

Binary frames are the terminal's bytes; text frames say what else happens. The library ``websockets`` is loaded with the
first terminal only: it comes with the extra ``terminal``, not with the SDK.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from agent_sandbox import installing, models
from agent_sandbox.client import exec_requests
from agent_sandbox.client.call import as_object
from agent_sandbox.client.errors import ReplyLostError, from_reply, unreachable
from agent_sandbox.client.http import CONNECT_SECONDS, Http, Target
from agent_sandbox.errors import InvalidRequestError

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

MAX_FRAME_BYTES = 1 << 20
"""Largest frame that is taken: far above a terminal's pieces, so that a broken server cannot fill the memory."""

FRAME_BYTES = 32 * 1024
"""What is sent at once, so that no server takes a long paste for an attack."""


def terminal_parameters(
    command: str | None, workdir: str | None, term: str | None, timeout_seconds: float | None, tag: str
) -> dict[str, str]:
    """The query of a new terminal, without its size."""
    values = {"command": command, "workdir": workdir, "term": term, "tag": tag or None}
    values["timeout_seconds"] = None if timeout_seconds is None else f"{timeout_seconds:g}"
    return {name: value for name, value in values.items() if value is not None}


class Frames:
    """What the frames of a terminal mean. Pure."""

    def __init__(self) -> None:
        self.id = ""
        self.exit: models.ExecOutputEvent | None = None
        self.missed = 0

    def take(self, frame: bytes | str) -> bytes:
        """Return the bytes of a frame, none for what is no output; raises the server's reason for an end."""
        if isinstance(frame, bytes):
            return frame
        event = models.ExecOutputEvent.from_json(as_object(frame.encode("utf-8", "surrogatepass")))
        if event.type == "error":
            raise exec_requests.broken(event)
        if event.type == "started":
            self.id = event.id
        elif event.type == "exit":
            self.exit = event
        elif event.type == "gap":
            self.missed += event.bytes
        return b""

    def closed(self, address: str, reason: object) -> None:
        """Say whether the socket's end is the command's; :class:`ReplyLostError` when it is not."""
        if self.exit is None:
            raise ReplyLostError(f"the terminal's connection to {address} broke ({reason}); how it ended is unknown")


def resize_frame(rows: int, cols: int) -> str:
    """Encode a change of size."""
    return json.dumps({"type": "resize", "rows": rows, "cols": cols})


def connection_options(target: Target | None, path: str) -> tuple[Target, str, dict[str, Any]]:
    """Return where to connect, the address of the socket, and the options of both of the library's ways to do it."""
    if target is None:
        raise InvalidRequestError("a client with an http_client of its own has no terminals: give an address instead")
    parts = urlsplit(target.base_url)
    scheme = "wss" if parts.scheme == "https" else "ws"
    options: dict[str, Any] = {
        "additional_headers": target.headers,
        "compression": None,
        "max_size": MAX_FRAME_BYTES,
        "open_timeout": CONNECT_SECONDS * 3,
        # A person's terminal may stand still as long as they like; the server asks whether we live.
        "ping_timeout": None,
    }
    if not target.trust_env and target.uds is None:
        options["proxy"] = None
    return target, f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}{path}", options


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Turn what the library raises into errors of the SDK."""
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

    try:
        yield
    except InvalidStatus as error:
        raise from_reply(error.response.status_code, bytes(error.response.body or b"")) from None
    except ConnectionClosed as error:
        raise ReplyLostError(f"the terminal's connection to {address} broke ({error})") from None
    except TimeoutError:
        raise ReplyLostError(f"the server at {address} did not answer in time", timed_out=True) from None
    except (InvalidHandshake, EOFError) as error:
        raise ReplyLostError(f"the server at {address} offers no terminal ({error})") from None
    except OSError as error:
        raise unreachable(address, error) from None


def needs_extra(error: ModuleNotFoundError) -> InvalidRequestError:
    """The error for an installation without the extra."""
    if (error.name or "").partition(".")[0] != "websockets":
        raise error
    return InvalidRequestError(f"terminals need websockets: {installing.remedy('terminal')}")


class Terminal:
    """A command on a terminal. One thread may read while another writes; as a context manager it is closed at the end.

    ``exit`` is the ``exit`` event once :meth:`read` has returned nothing.
    """

    def __init__(self, socket: ClientConnection, address: str, held: ExitStack) -> None:
        self._socket = socket
        self._address = address
        self._held = held
        self._frames = Frames()

    @classmethod
    def open(cls, http: Http, path: str) -> Self:
        """Connect to a terminal's path."""
        try:
            from websockets.sync.client import connect, unix_connect
        except ModuleNotFoundError as error:
            raise needs_extra(error) from error

        target, uri, options = connection_options(http.target, path)
        with translated(target.address), ExitStack() as stack:
            made = connect(uri, **options) if target.uds is None else unix_connect(target.uds, uri, **options)
            socket = stack.enter_context(made)
            return cls(socket, target.address, stack.pop_all())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def id(self) -> str:
        """The id of the command, once the server has told it; empty before."""
        return self._frames.id

    @property
    def exit(self) -> models.ExecOutputEvent | None:
        """How the command ended, or ``None`` while that is not known."""
        return self._frames.exit

    @property
    def missed(self) -> int:
        """How many bytes of output an attached terminal was too slow to get."""
        return self._frames.missed

    def read(self) -> bytes:
        """Return the next output; nothing at the end. Raises the server's reason, or :class:`ReplyLostError`."""
        from websockets.exceptions import ConnectionClosed

        while True:
            try:
                frame = self._socket.recv()
            except ConnectionClosed as error:
                self._frames.closed(self._address, error)
                return b""
            if data := self._frames.take(frame):
                return data

    def write(self, data: bytes) -> None:
        """Type bytes: byte 3 interrupts, byte 4 ends input. :class:`ReplyLostError` when the terminal has gone."""
        with translated(self._address):
            for at in range(0, len(data), FRAME_BYTES):
                self._socket.send(data[at : at + FRAME_BYTES])

    def resize(self, rows: int, cols: int) -> None:
        """Change the terminal's size."""
        with translated(self._address):
            self._socket.send(resize_frame(rows, cols))

    def close(self) -> None:
        """Close the connection. A command that was started with it ends."""
        self._held.close()
