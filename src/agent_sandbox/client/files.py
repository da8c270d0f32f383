"""The files of one sandbox: the part of :class:`~agent_sandbox.client.Sandbox` that is about them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from agent_sandbox import models
from agent_sandbox.client import exec_requests, file_requests
from agent_sandbox.client.http import Http
from agent_sandbox.client.local_files import Sink, Source, reading, writing
from agent_sandbox.errors import ConflictError, PayloadTooLargeError
from agent_sandbox.types import WORKSPACE


class SandboxFiles:
    """Relative paths start at ``/workspace``; what changes files acts beneath it only."""

    _http: Http

    @property
    def id(self) -> str:
        raise NotImplementedError

    def read_file(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file, or ``length`` bytes of it from ``offset`` on; behind its end there are none."""
        return self._http.send(file_requests.read(self.id, path, offset, length))

    def read_text(self, path: str, encoding: str = "utf-8") -> str:
        """Read a file as text."""
        return self.read_file(path).decode(encoding)

    def write_file(self, path: str, data: bytes | str, *, mode: int = 0o644) -> models.FileInfo:
        """Create or replace a file under ``/workspace`` with its parents; text is written as UTF-8."""
        return self._http.send(file_requests.write(self.id, path, data, mode))

    def download(self, path: str, file: Sink) -> int:
        """Read a file of any size into a local one (a path, or an open binary file); return its size in bytes.

        One that is too large for one request comes in parts; :class:`ConflictError` when it changes meanwhile. A path
        gets the whole file or is left as it was.
        """
        size = 0
        with writing(file) as write:
            try:
                with closing(self._http.pieces(file_requests.read(self.id, path))) as pieces:
                    for piece in pieces:
                        write(piece)
                        size += len(piece)
                return size
            except PayloadTooLargeError:
                if size:
                    raise
            before = self.stat(path)
            begin = -1
            while size > begin:
                begin = size
                part = file_requests.read(self.id, path, size, file_requests.PART_BYTES)
                with closing(self._http.pieces(part)) as pieces:
                    for piece in pieces:
                        write(piece)
                        size += len(piece)
            after = self.stat(path)
            if (before.size, before.modified_at) != (after.size, after.modified_at) or size != after.size:
                raise ConflictError(f"{path} changed while it was read: try again")
        return size

    def upload(self, path: str, file: Source, *, mode: int = 0o644) -> models.FileInfo:
        """Create or replace a file from a local one: a path, an open binary file, or pieces of bytes.

        It is sent as it is read. The server's limit on files holds: :class:`PayloadTooLargeError` above it.
        """
        with reading(file) as pieces:
            return self._http.send(file_requests.write(self.id, path, None, mode), pieces)

    def list_files(self, path: str = WORKSPACE) -> list[models.FileInfo]:
        """List the direct children of a directory."""
        return self._http.send(file_requests.list_files(self.id, path))

    def stat(self, path: str, *, follow: bool = True) -> models.FileStat:
        """Look at one file; at a symbolic link itself without ``follow``."""
        return self._http.send(file_requests.stat(self.id, path, follow=follow))

    def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = True) -> models.FileStat:
        """Make a directory. With ``parents`` missing ones are made, and one that exists is fine."""
        return self._http.send(file_requests.mkdir(self.id, path, mode, parents=parents))

    def move(self, source: str, target: str, *, replace: bool = True) -> models.FileStat:
        """Give a file or directory another name. :class:`ConflictError` for a name that is taken."""
        return self._http.send(file_requests.move(self.id, source, target, replace=replace))

    def remove(self, path: str, *, recursive: bool = False) -> int:
        """Remove a file, a link itself, or a directory (with ``recursive`` a full one); return how many names went."""
        return self._http.send(file_requests.remove(self.id, path, recursive=recursive))

    def chmod(self, path: str, mode: int) -> models.FileStat:
        """Change permission bits."""
        return self._http.send(file_requests.chmod(self.id, path, mode))

    def stream_archive(self, path: str = WORKSPACE) -> Generator[bytes, None, None]:
        """Yield a directory under ``/workspace`` as a tar, names relative to it. What is in it is the sandbox's word.

        Extracting needs care: names and links in it may lead anywhere. The command line's ``cp`` does it safely.
        """
        return self._http.pieces(file_requests.archive(self.id, path))

    def download_archive(self, path: str, file: Sink) -> int:
        """Write a directory as a tar into a local file; return the tar's size in bytes. See :meth:`stream_archive`."""
        size = 0
        with writing(file) as write, closing(self.stream_archive(path)) as pieces:
            for piece in pieces:
                write(piece)
                size += len(piece)
        return size

    def upload_archive(self, path: str, file: Source) -> None:
        """Extract a tar (a path, an open binary file, or pieces of bytes) into a directory, made where it is missing.

        Existing files are replaced. What was extracted before an error stays.
        """
        with reading(file, gather=True) as pieces:
            self._http.send(file_requests.extract(self.id, path), pieces)

    def watch(self, path: str = WORKSPACE, *, recursive: bool = True) -> Generator[models.WatchEvent, None, None]:
        """Yield what changes beneath a directory: first ``ready``, then changes, until the iterator is closed.

        ``lost`` means that more changed than could be told: look again at everything.
        """
        with closing(self._http.lines(file_requests.watch(self.id, path, recursive=recursive))) as events:
            for event in events:
                if event.type == "error":
                    raise exec_requests.broken(event)
                yield event
