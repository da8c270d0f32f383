"""Files of a sandbox, in pieces where they may be large. What changes them waits for snapshots (``tasks.Gate``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from agent_sandbox.backends.base import Backend, ByteSink
from agent_sandbox.errors import PayloadTooLargeError
from agent_sandbox.manager import policy
from agent_sandbox.manager.core import Core
from agent_sandbox.types import ChangesLost, ExportReport, FileChange, FileEntry


class Files(Core):
    """The calls on files. Paths are absolute, or relative to ``/workspace``."""

    async def read_file(self, id: str, path: str, max_bytes: int | None = None) -> bytes:
        """Give a file's bytes. :class:`PayloadTooLargeError` above ``max_bytes``, by default MAX_FILE_BYTES."""
        full = policy.normalize_path(path)
        most = self._settings.max_file_bytes
        limit = most if max_bytes is None else min(max_bytes, most)
        return await self._on(id, lambda backend, env: backend.read_file(env, full, limit))

    def open_file(self, id: str, path: str, *, offset: int, length: int) -> AsyncGenerator[bytes, None]:
        """Give a file's bytes from ``offset`` on, at most ``length``, in pieces; nothing behind its end.

        :class:`PayloadTooLargeError` for a ``length`` above MAX_FILE_BYTES.
        """
        full = policy.normalize_path(path)
        if length > self._settings.max_file_bytes:
            raise PayloadTooLargeError(
                f"one request reads at most {self._settings.max_file_bytes} bytes; read a larger file in parts (Range)"
            )

        def open(backend: Backend, env: str) -> AsyncGenerator[bytes, None]:
            return backend.open_file(env, full, offset=offset, length=length)

        return self._stream(id, open)

    async def write_file(self, id: str, path: str, data: bytes, mode: int) -> FileEntry:
        """Create or replace a file inside ``/workspace``. Waits while a snapshot, rollback or stop is under way."""
        full, mode = policy.require_in_workspace(path), policy.file_mode(mode)
        if len(data) > self._settings.max_file_bytes:
            raise PayloadTooLargeError(f"a file may have at most {self._settings.max_file_bytes} bytes")
        return await self._write(id, lambda backend, env: backend.write_file(env, full, data, mode))

    async def store_file(self, id: str, path: str, src: AsyncIterator[bytes], mode: int) -> FileEntry:
        """As :meth:`write_file`, from pieces; ``src`` bounds their sum. What it raises passes, and nothing is written.

        :class:`ConflictError` when a snapshot, rollback or stop has waited ten seconds for it.
        """
        full, mode = policy.require_in_workspace(path), policy.file_mode(mode)
        return await self._write(id, lambda backend, env: backend.store_file(env, full, src, mode))

    async def list_files(self, id: str, path: str) -> tuple[str, list[FileEntry]]:
        """Give the absolute path of a directory and its direct children by name."""
        full = policy.normalize_path(path)
        return full, await self._on(id, lambda backend, env: backend.list_files(env, full))

    async def stat_file(self, id: str, path: str, *, follow: bool = True) -> FileEntry:
        """Give one file's entry; that of a link itself unless ``follow``."""
        full = policy.normalize_path(path)
        return await self._on(id, lambda backend, env: backend.stat_file(env, full, follow=follow))

    async def make_directory(self, id: str, path: str, mode: int, *, parents: bool) -> FileEntry:
        """Make a directory inside ``/workspace``; with ``parents`` those too, and one that exists is fine."""
        full, mode = policy.require_in_workspace(path), policy.file_mode(mode)
        return await self._write(id, lambda backend, env: backend.make_directory(env, full, mode, parents=parents))

    async def move_file(self, id: str, source: str, target: str, *, replace: bool) -> FileEntry:
        """Rename inside ``/workspace``. :class:`ConflictError` for a target that is taken, unless ``replace``."""
        old, new = policy.require_in_workspace(source), policy.require_in_workspace(target)
        return await self._write(id, lambda backend, env: backend.move_file(env, old, new, replace=replace))

    async def remove_file(self, id: str, path: str, *, recursive: bool) -> int:
        """Remove a name inside ``/workspace`` and give how many went. :class:`ConflictError`: a directory not empty."""
        full = policy.require_in_workspace(path)
        return await self._write(id, lambda backend, env: backend.remove_file(env, full, recursive=recursive))

    async def change_mode(self, id: str, path: str, mode: int) -> FileEntry:
        """Change permission bits inside ``/workspace``."""
        full, mode = policy.require_in_workspace(path), policy.file_mode(mode)
        return await self._write(id, lambda backend, env: backend.change_mode(env, full, mode))

    async def export_directory(self, id: str, path: str, dest: ByteSink) -> ExportReport:
        """Write a directory of ``/workspace`` as a tar stream. :class:`PayloadTooLargeError` at MAX_SNAPSHOT_BYTES."""
        full, limit = policy.directory_in_workspace(path), self._settings.max_snapshot_bytes
        return await self._on(id, lambda backend, env: backend.export_directory(env, full, dest, limit))

    async def import_directory(self, id: str, path: str, src: AsyncIterator[bytes]) -> None:
        """Extract a tar stream into a directory of ``/workspace``; what was extracted before an error stays."""
        full, limit = policy.directory_in_workspace(path), self._settings.max_snapshot_bytes
        await self._write(id, lambda backend, env: backend.import_directory(env, full, src, limit))

    def watch(
        self, id: str, path: str, *, recursive: bool, ready: asyncio.Event
    ) -> AsyncGenerator[FileChange | ChangesLost, None]:
        """Yield what changes beneath a directory; ``ready`` is set once every later change will be seen."""
        full = policy.normalize_path(path)

        def open(backend: Backend, env: str) -> AsyncGenerator[FileChange | ChangesLost, None]:
            return backend.watch(env, full, recursive=recursive, ready=ready)

        return self._stream(id, open)
