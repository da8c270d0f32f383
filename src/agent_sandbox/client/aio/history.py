"""What happened to workspaces: as :mod:`agent_sandbox.client.history`, with coroutines."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from agent_sandbox import models
from agent_sandbox.client import history_requests
from agent_sandbox.client.http import AsyncHttp
from agent_sandbox.client.local_files import Sink, writing_off_the_loop


class AsyncClientHistory:
    """The part of :class:`~agent_sandbox.client.AsyncSandboxClient` that looks back at snapshots."""

    _http: AsyncHttp

    async def diff(
        self, old: models.Snapshot | str, new: models.Snapshot | str, *, text: bool = False, limit: int | None = None
    ) -> models.ChangeList:
        """Compare two snapshots; with ``text`` the lines of text files that differ. ``limit`` is 1,000 paths when left
        out, at most 10,000."""
        return await self._http.send(history_requests.diff(old, new, text=text, limit=limit))

    async def log(self, snapshot: models.Snapshot | str, limit: int | None = None) -> list[models.PastState]:
        """Ask what led to a snapshot, newest first; ``limit`` is 100 states when left out, at most 1,000."""
        return await self._http.send(history_requests.log(snapshot, limit))

    async def stream_snapshot(self, snapshot: models.Snapshot | str) -> AsyncGenerator[bytes, None]:
        """Yield a snapshot as a tar, names relative to the workspace. What is in it is the sandbox's word.

        Extracting needs care: links in it may lead anywhere. A broken stream is an error, never a short archive.
        """
        async with aclosing(self._http.pieces(history_requests.archive(snapshot))) as pieces:
            async for piece in pieces:
                yield piece

    async def download_snapshot(self, snapshot: models.Snapshot | str, file: Sink) -> int:
        """Write a snapshot as a tar into a local file; return its size in bytes. See :meth:`stream_snapshot`."""
        size = 0
        async with writing_off_the_loop(file) as write, aclosing(self.stream_snapshot(snapshot)) as pieces:
            async for piece in pieces:
                await write(piece)
                size += len(piece)
        return size


class AsyncSandboxHistory:
    """The part of :class:`~agent_sandbox.client.AsyncSandbox` that looks back at its workspace."""

    _http: AsyncHttp

    @property
    def id(self) -> str:
        raise NotImplementedError

    async def changes(self, *, text: bool = False, limit: int | None = None) -> models.ChangeList:
        """Compare the workspace with the last snapshot or rollback, or with what it began as; processes stand still
        meanwhile. See :meth:`AsyncClientHistory.diff`."""
        return await self._http.send(history_requests.changes(self.id, text=text, limit=limit))
