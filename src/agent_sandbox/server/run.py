"""Serve: one process, one event loop, a TCP or a unix socket.

The manager is started here and not in the application's lifespan, so that a backend that is missing ends as its typed
error and not as a traceback. Stopping (SIGTERM, SIGINT, or idleness) takes these steps, together within
:data:`STOP_SECONDS`: no more connections; idle ones closed; requests get :data:`DRAIN_SECONDS` to end; what still runs
is cancelled, which kills streamed commands with their trees; the manager lets go of its backends. Sandboxes stay.
A second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvicorn
import uvloop

from agent_sandbox.backends import make_backends
from agent_sandbox.backends.base import Backend
from agent_sandbox.config import Settings
from agent_sandbox.manager import Manager
from agent_sandbox.server.app import create_app
from agent_sandbox.server.auth import require_keys
from agent_sandbox.server.listen import BACKLOG, tcp_socket, unix_socket
from agent_sandbox.server.peer import Protocol

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
DRAIN_SECONDS = 2
CANCEL_SECONDS = 1.0

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays: longer than the pools of common clients and proxies keep theirs."""


MAX_FRAME_BYTES = 256 * 1024
"""Largest message on a WebSocket: more than a person pastes into a terminal; a client cuts what is larger."""

PING_SECONDS = 20.0
"""How often a WebSocket is asked for a sign of life, and how long it may take: a client that vanished is noticed."""


def serve(
    settings: Settings,
    *,
    uds: Path | None = None,
    backends: Mapping[str, Backend] | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal or idleness ends it; with ``uds`` on that unix socket, else on ``host`` and ``port``.

    ``backends`` are the settings' by default. ``ready`` gets the address once clients can connect; it prints a line by
    default. Raises what the manager's start raises, and the errors of :mod:`agent_sandbox.server.listen`;
    :class:`~agent_sandbox.errors.InvalidRequestError` when a TCP server has no keys.
    """
    with ExitStack() as stack:
        if uds is not None:
            sock = stack.enter_context(unix_socket(uds))
            address = f"unix://{uds}"
        else:
            require_keys(settings)
            sock = stack.enter_context(tcp_socket(settings.host, settings.port))
            address = f"http://{settings.host if ':' not in settings.host else f'[{settings.host}]'}:{settings.port}"
        manager = Manager(settings, make_backends(settings) if backends is None else backends)
        announce = ready or _print_ready
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(manager, settings, sock, lambda: announce(address)))


async def _serve(manager: Manager, settings: Settings, sock: socket.socket, ready: Callable[[], None]) -> None:
    try:
        await manager.start()
        await make_server(manager, settings, ready).serve(sockets=[sock])
    finally:
        try:
            async with asyncio.timeout(STOP_SECONDS - DRAIN_SECONDS - CANCEL_SECONDS):
                await manager.close()
        except TimeoutError:
            log.warning("what was being undone or removed did not end in time; the next start goes on with it")


def make_server(manager: Manager, settings: Settings, ready: Callable[[], None]) -> uvicorn.Server:
    """Make the server of a manager that is started; ``ready`` is called once clients can connect."""

    seen, since = 0, time.monotonic()

    async def stop_when_idle() -> None:
        # Any request counts, also one that asks the manager nothing: who was answered may rely on the server a while.
        nonlocal seen, since
        state, now = server.server_state, time.monotonic()
        if state.tasks or state.total_requests != seen:
            seen, since = state.total_requests, now
        if settings.idle_exit_seconds and min(now - since, manager.idle_seconds()) > settings.idle_exit_seconds:
            server.should_exit = True

    config = uvicorn.Config(
        create_app(manager, settings, manager_started=True),
        http=Protocol,
        ws="websockets-sansio",
        ws_max_size=MAX_FRAME_BYTES,
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        timeout_notify=1,
        callback_notify=stop_when_idle,
    )
    logging.getLogger("uvicorn.error").addFilter(_names_no_address)
    server = _Server(config, ready)
    return server


def _names_no_address(record: logging.LogRecord) -> bool:
    """Keep out uvicorn's lines about WebSockets: their address holds a terminal's command."""
    return "WebSocket" not in str(record.msg)


class _Server(uvicorn.Server):
    """uvicorn with its own signals, a word when it is ready, and an end that waits for what it cancelled."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if rest := list(self.server_state.tasks):
            for task in rest:
                task.cancel()
            await asyncio.wait(rest, timeout=CANCEL_SECONDS)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own raises the signal again at its end, which would kill the process before the manager is closed.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def _print_ready(address: str) -> None:
    print(f"agent-sandbox listens on {address}", flush=True)
