"""The files of one sandbox, with coroutines: as :mod:`agent_sandbox.client.files`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from agent_sandbox import models
from agent_sandbox.client import exec_requests, file_requests
from agent_sandbox.client.http import AsyncHttp
from agent_sandbox.client.local_files import Sink, Source, reading_off_the_loop, writing_off_the_loop
from agent_sandbox.errors import ConflictError, PayloadTooLargeError
from agent_sandbox.types import WORKSPACE


class AsyncSandboxFiles:
    """Relative paths start at ``/workspace``; what changes files acts beneath it only."""

    _http: AsyncHttp

    @property
    def id(self) -> str:
        raise NotImplementedError

    async def read_file(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file, or ``length`` bytes of it from ``offset`` on; behind its end there are none."""
        return await self._http.send(file_requests.read(self.id, path, offset, length))

    async def read_text(self, path: str, encoding: str = "utf-8") -> str:
        """Read a file as text."""
        return (await self.read_file(path)).decode(encoding)

    async def write_file(self, path: str, data: bytes | str, *, mode: int = 0o644) -> models.FileInfo:
        """Create or replace a file under ``/workspace`` with its parents; text is written as UTF-8."""
        return await self._http.send(file_requests.write(self.id, path, data, mode))

    async def download(self, path: str, file: Sink) -> int:
        """Read a file of any size into a local one (a path, or an open binary file); return its size in bytes.

        One that is too large for one request comes in parts; :class:`ConflictError` when it changes meanwhile. A path
        gets the whole file or is left as it was.
        """
        size = 0
        async with writing_off_the_loop(file) as write:
            try:
                async with aclosing(self._http.pieces(file_requests.read(self.id, path))) as pieces:
                    async for piece in pieces:
                        await write(piece)
                        size += len(piece)
                return size
            except PayloadTooLargeError:
                if size:
                    raise
            before = await self.stat(path)
            begin = -1
            while size > begin:
                begin = size
                part = file_requests.read(self.id, path, size, file_requests.PART_BYTES)
                async with aclosing(self._http.pieces(part)) as pieces:
                    async for piece in pieces:
                        await write(piece)
                        size += len(piece)
            after = await self.stat(path)
            if (before.size, before.modified_at) != (after.size, after.modified_at) or size != after.size:
                raise ConflictError(f"{path} changed while it was read: try again")
        return size

    async def upload(self, path: str, file: Source, *, mode: int = 0o644) -> models.FileInfo:
        """Create or replace a file from a local one: a path, an open binary file, or pieces of bytes.

        It is sent as it is read. The server's limit on files holds: :class:`PayloadTooLargeError` above it.
        """
        async with reading_off_the_loop(file) as pieces:
            return await self._http.send(file_requests.write(self.id, path, None, mode), pieces)

    async def list_files(self, path: str = WORKSPACE) -> list[models.FileInfo]:
        """List the direct children of a directory."""
        return await self._http.send(file_requests.list_files(self.id, path))

    async def stat(self, path: str, *, follow: bool = True) -> models.FileStat:
        """Look at one file; at a symbolic link itself without ``follow``."""
        return await self._http.send(file_requests.stat(self.id, path, follow=follow))

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = True) -> models.FileStat:
        """Make a directory. With ``parents`` missing ones are made, and one that exists is fine."""
        return await self._http.send(file_requests.mkdir(self.id, path, mode, parents=parents))

    async def move(self, source: str, target: str, *, replace: bool = True) -> models.FileStat:
        """Give a file or directory another name. :class:`ConflictError` for a name that is taken."""
        return await self._http.send(file_requests.move(self.id, source, target, replace=replace))

    async def remove(self, path: str, *, recursive: bool = False) -> int:
        """Remove a file, a link itself, or a directory (with ``recursive`` a full one); return how many names went."""
        return await self._http.send(file_requests.remove(self.id, path, recursive=recursive))

    async def chmod(self, path: str, mode: int) -> models.FileStat:
        """Change permission bits."""
        return await self._http.send(file_requests.chmod(self.id, path, mode))

    def stream_archive(self, path: str = WORKSPACE) -> AsyncGenerator[bytes, None]:
        """Yield a directory under ``/workspace`` as a tar, names relative to it. What is in it is the sandbox's word.

        Extracting needs care: names and links in it may lead anywhere. The command line's ``cp`` does it safely.
        """
        return self._http.pieces(file_requests.archive(self.id, path))

    async def download_archive(self, path: str, file: Sink) -> int:
        """Write a directory as a tar into a local file; return the tar's size in bytes. See :meth:`stream_archive`."""
        size = 0
        async with writing_off_the_loop(file) as write, aclosing(self.stream_archive(path)) as pieces:
            async for piece in pieces:
                await write(piece)
                size += len(piece)
        return size

    async def upload_archive(self, path: str, file: Source) -> None:
        """Extract a tar (a path, an open binary file, or pieces of bytes) into a directory, made where it is missing.

        Existing files are replaced. What was extracted before an error stays.
        """
        async with reading_off_the_loop(file, gather=True) as pieces:
            await self._http.send(file_requests.extract(self.id, path), pieces)

    async def watch(self, path: str = WORKSPACE, *, recursive: bool = True) -> AsyncGenerator[models.WatchEvent, None]:
        """Yield what changes beneath a directory: first ``ready``, then changes, until the iterator is closed.

        ``lost`` means that more changed than could be told: look again at everything.
        """
        async with aclosing(self._http.lines(file_requests.watch(self.id, path, recursive=recursive))) as events:
            async for event in events:
                if event.type == "error":
                    raise exec_requests.broken(event)
                yield event
