"""While a sandbox is being made: say that its image is being fetched, which may take minutes.

The call that makes it answers at its end alone. So another one asks the server meanwhile what it fetches
(``GET /v1/backends``), from a thread that is an aid and nothing more: whatever goes wrong there is not told.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agent_sandbox.cli import output

if TYPE_CHECKING:
    from agent_sandbox.client import SandboxClient

FIRST_SECONDS, AGAIN_SECONDS = 2.0, 5.0
"""When it is asked first, as most sandboxes are there long before, and how often then."""


@contextmanager
def fetching_told(client: SandboxClient, image: str | None) -> Iterator[None]:
    """Say in notes how far ``image`` has come while the block waits for a sandbox of it; ``None`` is the default one.

    Which that is the server knows alone, so then every image is told that it fetches.
    """
    ended = threading.Event()

    def ask() -> None:
        pause, told = FIRST_SECONDS, ""
        try:
            while not ended.wait(pause):
                pulls = [pull for backend in client.backends() for pull in backend.pulls]
                for pull in pulls:
                    text = f"the server prepares image {pull.image}: {_progress(pull.done_bytes, pull.total_bytes)}"
                    if image in (None, pull.image) and text != told and not ended.is_set():
                        output.note(text)
                        told = text
                pause = AGAIN_SECONDS
        except Exception:  # noqa: BLE001 - the sandbox is what is waited for
            return

    threading.Thread(target=ask, name="fetching", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _progress(done: int, total: int) -> str:
    return f"{output.size(done)} of {output.size(total)}" if total else "begun"
