"""Files, archives, watches, tunnels and the daemon itself; with the commands, everything that a guest does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from agent_sandbox import wire
from agent_sandbox.errors import BackendError, InvalidRequestError, PayloadTooLargeError
from agent_sandbox.guest import limits, replies
from agent_sandbox.guest.commands import Commands
from agent_sandbox.guest.tunnel import GuestTunnel
from agent_sandbox.types import ChangesLost, ExportReport, FileChange, FileEntry, GuestStats

_PIECE = 4 * 1024 * 1024


class Guest(Commands):
    """One daemon. What its methods promise is written on the backend's contract, with bytes for paths."""

    # -- files -------------------------------------------------------------------

    async def stat(self, path: bytes, *, follow: bool = True) -> FileEntry:
        """One file's entry; links are followed inside the sandbox unless ``follow`` is false."""
        return await self._entry("fs.stat", {"path": path, "follow": follow}, path)

    async def list_files(self, path: bytes) -> list[FileEntry]:
        """The children of a directory by name. :class:`PayloadTooLargeError` above 100,000 entries or 32 MiB."""
        entries: list[FileEntry] = []
        total = 0
        counts: list[int] = []
        pieces = self.download("fs.list", {"path": path}, replies.Counted, lambda told: counts.append(told.count))
        async with aclosing(pieces):
            async for piece in pieces:
                total += len(piece)
                entries += replies.listing_of(piece, path)
                if len(entries) > limits.MAX_LISTING_ENTRIES or total > limits.MAX_LISTING_BYTES:
                    raise PayloadTooLargeError(f"the directory has more than {limits.MAX_LISTING_ENTRIES:,} entries")
        if counts != [len(entries)]:
            raise BackendError("the sandbox's daemon counted the entries of a directory wrong")
        entries.sort(key=lambda entry: os.fsencode(entry.name))
        return entries

    async def read_file(self, path: bytes, max_bytes: int) -> bytes:
        """The bytes of a regular file. :class:`PayloadTooLargeError` above ``max_bytes``."""
        content: list[bytes] = []
        size = 0
        pieces = self._read({"path": path, "max_bytes": max_bytes})
        async with aclosing(pieces):
            async for piece in pieces:
                size += len(piece)
                if size > max_bytes:
                    raise PayloadTooLargeError(f"{os.fsdecode(path)!r} is larger than {max_bytes:,} bytes")
                content.append(piece)
        return b"".join(content)

    async def open_file(self, path: bytes, offset: int, length: int | None) -> AsyncGenerator[bytes, None]:
        """A regular file's bytes from ``offset`` on, at most ``length``, piece by piece."""
        args = {"path": path, "offset": offset} | ({} if length is None else {"length": length})
        size = 0
        pieces = self._read(args)
        async with aclosing(pieces):
            async for piece in pieces:
                size += len(piece)
                if length is not None and size > length:
                    raise BackendError("the sandbox's daemon sent more of a file than was asked for")
                yield piece

    async def _read(self, args: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        told: list[int] = []
        size = 0
        pieces = self.download("fs.read", args, replies.Sent, lambda sent: told.append(sent.size))
        async with aclosing(pieces):
            async for piece in pieces:
                size += len(piece)
                yield piece
        if told != [size]:
            raise BackendError("the sandbox's daemon did not send a file whole")

    async def write_file(self, path: bytes, data: bytes, mode: int) -> FileEntry:
        """Create or replace a file beneath the workspace; parents are created."""
        view = memoryview(data)

        async def pieces() -> AsyncIterator[memoryview]:
            for start in range(0, len(view), _PIECE):
                yield view[start : start + _PIECE]

        return await self.store_file(path, pieces(), mode)

    async def store_file(self, path: bytes, src: AsyncIterator[bytes | memoryview], mode: int) -> FileEntry:
        """As :meth:`write_file`, from a stream."""
        told = await self.upload("fs.write", {"path": path, "mode": mode}, src, replies.EntryResult)
        return replies.entry_of(told.entry, path)

    async def make_directory(self, path: bytes, mode: int, *, parents: bool = True) -> FileEntry:
        """Create a directory beneath the workspace."""
        made = await self._entry("fs.mkdir", {"path": path, "mode": mode, "parents": parents}, path)
        if made.type != "directory":
            raise BackendError("the sandbox's daemon made something that is no directory")
        return made

    async def move_file(self, source: bytes, target: bytes, *, replace: bool = True) -> FileEntry:
        """Give a name beneath the workspace another."""
        return await self._entry("fs.move", {"from": source, "to": target, "replace": replace}, target)

    async def remove_file(self, path: bytes, *, recursive: bool = False) -> int:
        """Remove a name beneath the workspace; return how many entries went."""
        args = {"path": path, "recursive": recursive}
        return (await self.call("fs.remove", args, replies.Removed, seconds=limits.LONG_SECONDS)).removed

    async def change_mode(self, path: bytes, mode: int) -> FileEntry:
        """Change the permission bits of a file beneath the workspace."""
        return await self._entry("fs.chmod", {"path": path, "mode": mode}, path)

    async def _entry(self, op: str, args: dict[str, Any], path: bytes) -> FileEntry:
        return replies.entry_of((await self.call(op, args, replies.EntryResult)).entry, path)

    async def watch(
        self, path: bytes, *, recursive: bool = True, ready: asyncio.Event | None = None
    ) -> AsyncGenerator[FileChange | ChangesLost, None]:
        """Yield changes beneath a directory; ``ready`` is set once they are seen."""
        stream = self.open("fs.watch", {"path": path, "recursive": recursive})
        try:
            await stream.note("ready")
            if ready is not None:
                ready.set()
            while True:
                event = await stream.next(None)
                if isinstance(event, wire.Ended):
                    replies.result(event.result, dict[str, Any])
                    raise BackendError("the sandbox's daemon ended a watch without a reason")
                if isinstance(event, wire.Data):
                    if event.channel != wire.CHANNEL_OUT:
                        raise BackendError("the sandbox's daemon sent changes on another channel")
                    for change in replies.changes_of(event.data, path):
                        yield change
        finally:
            stream.close()

    # -- archives -----------------------------------------------------------------

    async def export_tar(self, path: bytes, dest: Callable[[bytes], Awaitable[None]], max_bytes: int) -> ExportReport:
        """Write a directory as a tar stream to ``dest``; at most ``max_bytes`` of regular files."""
        return await self._export("tar.export", {"max_bytes": max_bytes, "path": path}, dest, max_bytes)

    async def export_changes(self, dest: Callable[[bytes], Awaitable[None]], max_bytes: int) -> ExportReport:
        """Write what the workspace differs in from the layers below it, as an OCI image layer.

        Its commands must be frozen. :class:`UnsupportedError` where there are no layers, :class:`ConflictError` for
        what a layer cannot express, before anything was written.
        """
        return await self._export("tar.changes", {"max_bytes": max_bytes}, dest, max_bytes)

    async def _export(
        self, op: str, args: dict[str, Any], dest: Callable[[bytes], Awaitable[None]], max_bytes: int
    ) -> ExportReport:
        report: list[replies.Exported] = []
        most, size = 2 * max_bytes + 64 * 1024 * 1024, 0
        pieces = self.download(op, args, replies.Exported, report.append)
        async with aclosing(pieces):
            async for piece in pieces:
                size += len(piece)
                if size > most:
                    raise PayloadTooLargeError(f"the archive of the workspace is larger than {most:,} bytes")
                await dest(piece)
        return replies.export_of(report[0], size)

    async def import_tar(self, path: bytes, src: AsyncIterator[bytes], max_bytes: int) -> None:
        """Extract a tar stream into a directory."""
        await self.upload("tar.import", {"max_bytes": max_bytes, "path": path}, src, dict[str, Any])

    # -- ports and the daemon --------------------------------------------------------

    async def dial(self, *, port: int | None = None, path: bytes | None = None) -> GuestTunnel:
        """Connect to a server inside: a port of its loopback or a unix socket."""
        if (port is None) == (path is None) or not 1 <= (1 if port is None else port) <= 65_535:
            raise InvalidRequestError("name a port of 1 to 65,535, or the path of a unix socket")
        stream = self.open("net.dial", {"port": port} if path is None else {"path": path})
        try:
            await stream.note("connected")
        except BaseException:
            stream.close()
            raise
        return GuestTunnel(stream)

    async def info(self) -> replies.GuestInfo:
        """What the daemon says of itself."""
        return await self.call("sys.info", {}, replies.GuestInfo)

    async def stats(self) -> GuestStats:
        """What the daemon counts."""
        told = await self.call("sys.stats", {}, replies.Stats)
        return GuestStats(told.processes, told.execs, told.memory_bytes, told.ring_bytes)

    async def sync(self) -> None:
        """Return once the workspace's filesystem is on its storage."""
        await self.call("sys.sync", {}, dict[str, Any], seconds=limits.LONG_SECONDS)

    async def freeze(self) -> None:
        """Return once every command is stopped where it is; their deadlines wait until :meth:`thaw`.

        :class:`UnsupportedError` where the daemon has no freezer of its own: it has one as the first process of a
        machine.
        """
        await self.call("sys.freeze", {}, dict[str, Any])

    async def thaw(self, clock_ns: int | None = None) -> None:
        """Let frozen commands go on, after setting the machine's clock (nanoseconds since the epoch) where it is given.

        Without a freeze before it, it sets the clock alone.
        """
        await self.call("sys.thaw", {} if clock_ns is None else {"clock_ns": clock_ns}, dict[str, Any])

    async def shutdown(self) -> None:
        """Return once the daemon has promised to end, and a machine with it, its disk synced."""
        await self.call("sys.shutdown", {}, dict[str, Any])

    async def prepare_checkpoint(self) -> None:
        """Return once the daemon has closed its sockets, this connection among them, and listens no more.

        It listens again when the host sends it SIGUSR1. :class:`BackendError` when it cannot.
        """
        await self.call("sys.prepare-checkpoint", {}, dict[str, Any])
        try:
            async with asyncio.timeout(limits.HELLO_SECONDS):
                await self.wait_closed()
        except TimeoutError:
            raise BackendError("the sandbox's daemon did not close its connection for a checkpoint") from None
