"""Reading a root file system: from a directory, or from a tar (plain, gzip, xz or zstd).

It is read entry by entry into a :class:`~agent_sandbox.images.confined.TreeWriter`, which keeps it inside.
Devices and sockets are left out: a sandbox gets its own ``/dev``. Extended attributes are left out as well, file
capabilities among them: ``no_new_privs`` would make them void. A directory is read within its file system, so ``/proc``
and the like come as empty directories.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from agent_sandbox import installing
from agent_sandbox.errors import InvalidRequestError
from agent_sandbox.images.confined import Meta, TreeWriter

Progress = Callable[[str, int, int], None]
"""Called as ``progress(phase, done, total)``, phases ``read`` or ``copy`` and ``unpack``, then ``digest``; in bytes.

The total is 0 where it is unknown. An exception of it ends the import."""

_PIECE = 256 * 1024
_HEADER_BYTES = 1 << 20
"""Of one extended header or long name. Real ones are under 10 KiB; tarfile reads them into memory whole."""
_REST_BYTES = 64 << 20
"""Of padding after the end; tar pads to 10 KiB, tapes to some MiB."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_WINDOW = 1 << 27
"""128 MiB, what ``zstd --long`` writes and readers accept by default."""


def read_directory(source: Path, writer: TreeWriter, progress: Progress) -> None:
    """Fill ``writer`` from a directory, within its file system."""
    device = source.stat().st_dev
    names: dict[tuple[int, int], bytes] = {}
    done = 0
    base = os.fsencode(source)
    for top, directories, files, descriptor in os.fwalk(base):
        above = top[len(base) :].strip(b"/")
        state = os.fstat(descriptor)
        writer.directory(above, _meta(state))
        if state.st_dev != device:
            directories.clear()
            continue
        links = [name for name in directories if _is_link(name, descriptor)]
        directories[:] = [name for name in directories if name not in links]
        for name in sorted(files + links):
            path = above + b"/" + name if above else name
            state = os.lstat(name, dir_fd=descriptor)
            key = (state.st_dev, state.st_ino)
            if stat.S_ISLNK(state.st_mode):
                writer.symlink(path, os.readlink(name, dir_fd=descriptor), _meta(state))
            elif stat.S_ISFIFO(state.st_mode):
                writer.fifo(path, _meta(state))
            elif stat.S_ISREG(state.st_mode) and key in names:
                writer.hardlink(path, names[key])
            elif stat.S_ISREG(state.st_mode):
                if state.st_nlink > 1:
                    names[key] = path
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                with os.fdopen(os.open(name, flags, dir_fd=descriptor), "rb", buffering=0) as file:
                    writer.file(path, _meta(state), _pieces(file))
                done += state.st_size
                progress("read", done, 0)


def _is_link(name: bytes, directory: int) -> bool:
    return stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode)


def _meta(state: os.stat_result) -> Meta:
    return Meta(stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid, state.st_mtime_ns)


def _pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(_PIECE):
        yield piece


class _Header(tarfile.TarInfo):
    """A tar header that bounds what is read into memory, and takes an archive without an end for a damaged one."""

    @classmethod
    def fromtarfile(cls, tarfile_: Any) -> Any:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            raise tarfile.ReadError("it ends early") from None

    def _proc_member(self, tarfile_: Any) -> Any:
        extended = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, *b"xgX")
        if self.type in (extended[0], extended[1], b"x", b"g", b"X") and self.size > _HEADER_BYTES:
            raise tarfile.ReadError("it holds an oversized header")
        return super()._proc_member(tarfile_)  # type: ignore[misc]


def read_tar(source: Path, writer: TreeWriter, progress: Progress, *, plain_files_only: bool = False) -> None:
    """Fill ``writer`` from a tar. :class:`InvalidRequestError` when it is none, or damaged.

    ``plain_files_only`` refuses everything but files and directories: what a packed image consists of.
    """
    total = source.stat().st_size
    with whole_tar(source), source.open("rb") as raw, decompressed(raw) as stream:
        for archive, member in members(stream):
            if plain_files_only and not (member.isfile() or member.isdir()):
                raise InvalidRequestError(f"{source.name} holds {member.name[:200]!r}, which is no file")
            _write_member(archive, member, writer)
            progress("read", raw.tell(), total)
        _check_rest(stream)


def members(stream: IO[bytes]) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the entries of a tar as they come, without keeping them."""
    with tarfile.open(
        fileobj=stream, mode="r|", tarinfo=_Header, errors="surrogateescape", encoding="utf-8"
    ) as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]
            yield archive, member


@contextlib.contextmanager
def whole_tar(source: Path) -> Iterator[None]:
    """Say :class:`InvalidRequestError` for a tar that ends early or cannot be read."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, ZstdError) as error:
        raise InvalidRequestError(f"{source.name} is not a whole tar archive: {error}") from error


def _write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, writer: TreeWriter) -> None:
    path = os.fsencode(member.name)
    meta = Meta(stat.S_IMODE(member.mode), member.uid, member.gid, int(member.mtime * 1_000_000_000))
    if member.isdir():
        writer.directory(path, meta)
    elif member.issym():
        writer.symlink(path, os.fsencode(member.linkname), meta)
    elif member.islnk():
        writer.hardlink(path, os.fsencode(member.linkname))
    elif member.isfifo():
        writer.fifo(path, meta)
    elif member.isfile():
        content = archive.extractfile(member)
        assert content is not None
        writer.file(path, meta, _exactly(content, member.size))


def _exactly(content: IO[bytes], size: int) -> Iterator[bytes]:
    for piece in _pieces(content):
        size -= len(piece)
        yield piece
    if size != 0:
        raise tarfile.ReadError("it ends inside a file")


def _check_rest(stream: IO[bytes]) -> None:
    """Read what follows the archive's end, so that a checksum at the end of a compressed stream is looked at."""
    rest = 0
    while piece := stream.read(_PIECE):
        rest += len(piece)
        if rest > _REST_BYTES:
            raise tarfile.ReadError("too much follows its end")


class ZstdError(Exception):
    """A damaged zstd stream, whichever library reads it."""


def decompressed(raw: IO[bytes]) -> IO[bytes]:
    """The stream inside a file: unpacked when it is gzip, xz or zstd, else the file itself."""
    magic = raw.read(6)
    raw.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw, mode="rb"))
    if magic == b"\xfd7zXZ\x00":
        return cast("IO[bytes]", lzma.LZMAFile(raw))
    if magic.startswith(ZSTD_MAGIC):
        return open_zstd(raw)
    return raw


def open_zstd(raw: IO[bytes]) -> IO[bytes]:
    """The stream inside a zstd file; reading raises :class:`ZstdError` when it is damaged."""
    try:
        import zstandard
    except ImportError as error:
        raise InvalidRequestError(f"reading zstd archives needs: {installing.remedy('server')}") from error

    class Reader:
        def __init__(self) -> None:
            decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
            self._stream = decompressor.stream_reader(raw, read_across_frames=True, closefd=False)

        def __enter__(self) -> Reader:
            return self

        def __exit__(self, *exc: object) -> None:
            self._stream.close()  # type: ignore[no-untyped-call]

        def read(self, size: int) -> bytes:
            try:
                return self._stream.read(size)
            except zstandard.ZstdError as error:
                raise ZstdError(str(error)) from error

    return cast("IO[bytes]", Reader())
