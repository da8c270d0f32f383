"""What happened to workspaces: the parts of the SDK for code that blocks which look back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from agent_sandbox import models
from agent_sandbox.client import history_requests
from agent_sandbox.client.http import Http
from agent_sandbox.client.local_files import Sink, writing


class ClientHistory:
    """The part of :class:`~agent_sandbox.client.SandboxClient` that looks back at snapshots."""

    _http: Http

    def diff(
        self, old: models.Snapshot | str, new: models.Snapshot | str, *, text: bool = False, limit: int | None = None
    ) -> models.ChangeList:
        """Compare two snapshots; with ``text`` the lines of text files that differ. ``limit`` is 1,000 paths when left
        out, at most 10,000."""
        return self._http.send(history_requests.diff(old, new, text=text, limit=limit))

    def log(self, snapshot: models.Snapshot | str, limit: int | None = None) -> list[models.PastState]:
        """Ask what led to a snapshot, newest first; ``limit`` is 100 states when left out, at most 1,000."""
        return self._http.send(history_requests.log(snapshot, limit))

    def stream_snapshot(self, snapshot: models.Snapshot | str) -> Generator[bytes, None, None]:
        """Yield a snapshot as a tar, names relative to the workspace. What is in it is the sandbox's word.

        Extracting needs care: links in it may lead anywhere. A broken stream is an error, never a short archive.
        """
        with closing(self._http.pieces(history_requests.archive(snapshot))) as pieces:
            yield from pieces

    def download_snapshot(self, snapshot: models.Snapshot | str, file: Sink) -> int:
        """Write a snapshot as a tar into a local file; return its size in bytes. See :meth:`stream_snapshot`."""
        size = 0
        with writing(file) as write, closing(self.stream_snapshot(snapshot)) as pieces:
            for piece in pieces:
                write(piece)
                size += len(piece)
        return size


class SandboxHistory:
    """The part of :class:`~agent_sandbox.client.Sandbox` that looks back at its workspace."""

    _http: Http

    @property
    def id(self) -> str:
        raise NotImplementedError

    def changes(self, *, text: bool = False, limit: int | None = None) -> models.ChangeList:
        """Compare the workspace with the last snapshot or rollback, or with what it began as; processes stand still
        meanwhile. See :meth:`ClientHistory.diff`."""
        return self._http.send(history_requests.changes(self.id, text=text, limit=limit))
