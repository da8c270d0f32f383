"""Images by name and by digest: importing, listing, resolving, removing. Every method blocks.

::

    DATA_DIR/images/            0700
    ├── index.json              names → digests; replaced whole, under a lock on the directory
    ├── sha256-<hex>/rootfs     one image's content; image.json beside it says what it is
    ├── host/<fingerprint>/     the host image's skeletons
    └── .new-<random>/          an import under way, locked by its importer; a stale one is removed

An image is built aside, synced, and renamed into place; only then does a name lead to it. The same content imported
twice is stored once. Several processes may use one store: the server runs from it while the command line imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_sandbox.errors import BackendError, ConflictError, InvalidRequestError, NotFoundError
from agent_sandbox.images.confined import Tree, TreeWriter
from agent_sandbox.images.digest import summarize
from agent_sandbox.images.host import HostImage
from agent_sandbox.images.prepare import prepare_rootfs
from agent_sandbox.images.references import HOST, check_name, parse_reference
from agent_sandbox.images.sources import Progress, read_source
from agent_sandbox.types import ResolvedImage

VERSION = 1
MAX_IMAGES = 1000
"""Names in the index, which is read whole."""
_JSON_BYTES = 4 << 20
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """One image as it is listed. ``name`` is empty where only the digest leads to it; times are Unix seconds."""

    name: str
    digest: str
    file_bytes: int = 0
    entries: int = 0
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ImageRoot:
    """Where an image's content is, and which host directories are to be shown in it read-only, in order."""

    rootfs: Path
    binds: tuple[tuple[Path, str], ...] = ()


class ImageStore:
    """The images below ``data_dir``; ``uid`` and ``gid`` are the sandbox user, who gets an entry in each."""

    def __init__(self, data_dir: Path, uid: int = 1000, gid: int = 1000) -> None:
        self._directory = data_dir / "images"
        self._index = self._directory / "index.json"
        self._uid, self._gid = uid, gid
        self._host = HostImage(self._directory / "host", uid, gid)

    def prepare(self, in_use: set[Path]) -> None:
        """Build the host image as the host is now and clear what crashed imports left.

        ``in_use`` are root directories that something runs on; they stay.
        """
        self._make_directory()
        for aside in self._directory.glob(".new-*"):
            with contextlib.suppress(OSError), _locked(aside, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(aside)
        self._host.prepare(in_use)

    def resolve(self, reference: str) -> ResolvedImage:
        """Find the content behind a reference. :class:`NotFoundError`, or :class:`InvalidRequestError` for none."""
        parsed = parse_reference(reference)
        if parsed.name == HOST:
            if parsed.digest:
                raise InvalidRequestError("the host image has no digest: its programs are the host's")
            return ResolvedImage(HOST, "", pinned=False)
        digest = parsed.digest or self._names().get(parsed.name, "")
        if not digest or not self._home(digest).is_dir():
            raise NotFoundError(
                f"there is no image {reference!r}; import one with: agent-sandbox image import NAME DIRECTORY-OR-TAR"
            )
        return ResolvedImage(parsed.name or digest, digest, pinned=True)

    def open(self, name: str, digest: str) -> ImageRoot:
        """The content to run: of ``digest``, or what ``name`` leads to where that is empty. :class:`NotFoundError`."""
        if not digest:
            digest = self.resolve(name).digest
        if not digest:
            return ImageRoot(self._host.rootfs(), tuple(self._host.binds()))
        rootfs = self._home(digest) / "rootfs"
        if not rootfs.is_dir():
            raise NotFoundError(f"the image {name!r} ({digest}) is no longer there; import it again")
        return ImageRoot(rootfs)

    def list(self) -> list[ImageInfo]:
        """Every image: the host's, the named ones by name, and those without a name."""
        names = self._names()
        found = [ImageInfo(HOST, "")]
        found += [self._info(name, digest) for name, digest in sorted(names.items())]
        digests = (path.name.replace("sha256-", "sha256:") for path in self._directory.glob("sha256-*"))
        return found + [self._info("", digest) for digest in sorted(set(digests) - set(names.values()))]

    def import_image(self, name: str, source: Path, progress: Progress = lambda phase, done, total: None) -> ImageInfo:
        """Import a directory or a tar of a root file system as ``name``, which then leads to it.

        :class:`InvalidRequestError` for sources and names that cannot be right, :class:`LimitExceededError` above the
        limits on images, :class:`BackendError` when the disk is full. Nothing is left behind by a failure.
        """
        if check_name(name) == HOST:
            raise InvalidRequestError("the name 'host' is taken: it is this host's own programs")
        self._make_directory()
        aside = self._directory / f".new-{secrets.token_hex(8)}"
        aside.mkdir(mode=0o700)
        try:
            with _locked(aside, fcntl.LOCK_EX):
                return self._import(name, source, aside, progress)
        except OSError as error:
            raise BackendError(f"importing {source.name} failed: {error.strerror or error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _import(self, name: str, source: Path, aside: Path, progress: Progress) -> ImageInfo:
        rootfs = aside / "rootfs"
        rootfs.mkdir(mode=0o755)
        with Tree(rootfs) as tree:
            writer = TreeWriter(tree)
            read_source(source, writer, progress)
            writer.finish()
            summary = summarize(rootfs, lambda done: progress("digest", done, 0))
            prepare_rootfs(tree, self._uid, self._gid)
        info = ImageInfo("", summary.digest, summary.file_bytes, summary.entries, time.time())
        _write_json(aside / "image.json", {"version": VERSION, **asdict(info)})
        _sync_file_system(aside)
        home = self._home(summary.digest)
        with _locked(self._directory, fcntl.LOCK_EX):
            if not home.is_dir():
                aside.rename(home)
            names = self._names()
            names[name] = summary.digest
            if len(names) > MAX_IMAGES:
                raise ConflictError(f"there are {MAX_IMAGES} images already; remove some")
            self._write_names(names)
        return self._info(name, summary.digest)

    def remove(self, reference: str, in_use: Collection[str] = ()) -> None:
        """Remove a name, and the content once no name leads to it. A digest removes the content and all its names.

        :class:`NotFoundError`; :class:`ConflictError` when the content's digest is ``in_use`` and would go.
        """
        parsed = parse_reference(reference)
        if parsed.name == HOST:
            raise InvalidRequestError("the host image cannot be removed: it is the host's own programs")
        digest = self.resolve(reference).digest
        with _locked(self._directory, fcntl.LOCK_EX):
            names = self._names()
            gone = [name for name, value in names.items() if value == digest and parsed.name in ("", name)]
            kept = {name: value for name, value in names.items() if name not in gone}
            if digest in kept.values():
                self._write_names(kept)
                return
            if digest in in_use:
                raise ConflictError(f"the image {reference!r} is in use; destroy its sandboxes and snapshots first")
            self._write_names(kept)
            dead = self._directory / f".new-{secrets.token_hex(8)}"
            with contextlib.suppress(FileNotFoundError):
                self._home(digest).rename(dead)
        shutil.rmtree(dead, ignore_errors=True)

    # -- files -------------------------------------------------------------------------

    def _make_directory(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _home(self, digest: str) -> Path:
        return self._directory / digest.replace(":", "-")

    def _names(self) -> dict[str, str]:
        value = _read_json(self._index)
        return {} if value is None else {str(name): str(digest) for name, digest in value["names"].items()}

    def _write_names(self, names: dict[str, str]) -> None:
        _write_json(self._index, {"version": VERSION, "names": names})

    def _info(self, name: str, digest: str) -> ImageInfo:
        value = _read_json(self._home(digest) / "image.json") or {}
        numbers = {key: value[key] for key in ("file_bytes", "entries", "created_at") if key in value}
        return ImageInfo(name, digest, **numbers)


@contextlib.contextmanager
def _locked(path: Path, operation: int) -> Iterator[None]:
    """Hold a lock of flock(2) on a directory; other processes that want it wait, or fail with LOCK_NB."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_JSON_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BackendError(f"{path} cannot be read; restore it or remove it and import the images again") from error
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise BackendError(f"{path} is of another version of agent-sandbox")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.new")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(descriptor)
    aside.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _sync_file_system(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(descriptor)
