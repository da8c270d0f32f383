"""Images by name and by digest: importing, listing, resolving, removing. Every method blocks.

::

    DATA_DIR/images/            0700
    ├── index.json              names → digests; replaced whole, under a lock on the directory
    ├── sha256-<hex>/rootfs     one image's content; image.json beside it says what it is
    ├── host/<fingerprint>/     the host image's skeletons
    ├── .new-<random>/          an import under way, locked by its importer; a stale one is removed
    └── .gone-<random>/         a removal under way

An image is built aside, synced, and renamed into place; only then does a name lead to it. The same image imported
twice is stored once. Several processes may use one store: the server runs from it while the command line imports.

Removing asks what is in use after the content was renamed away, and renames it back when it is. A sandbox is recorded
before its backend opens the image: so either the record is seen, or the backend finds no image and says so; no sandbox
comes to stand on content that is being removed.

When changing what is in image.json: count its version up and keep reading the old ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent_sandbox.errors import BackendError, ConflictError, ForbiddenError, InvalidRequestError, NotFoundError
from agent_sandbox.images.allowed import is_allowed
from agent_sandbox.images.confined import Tree, TreeWriter
from agent_sandbox.images.digest import summarize
from agent_sandbox.images.host import HostImage
from agent_sandbox.images.image_config import ImageConfig, image_digest
from agent_sandbox.images.kinds import Source, find_source
from agent_sandbox.images.machine import MachineImages
from agent_sandbox.images.packed import unpack
from agent_sandbox.images.prepare import prepare_rootfs
from agent_sandbox.images.references import HOST, check_name, parse_reference
from agent_sandbox.images.removal import discard, sweep
from agent_sandbox.images.room import Room
from agent_sandbox.images.sources import Progress, read_directory, read_tar
from agent_sandbox.types import ResolvedImage

INDEX_VERSION = 1
IMAGE_VERSION = 2
"""Version 1 had neither ``config`` nor ``manifests``."""
MAX_IMAGES = 1000
"""Names in the index, which is read whole."""
_JSON_BYTES = 4 << 20
_MAX_MANIFESTS = 20
"""Kept of one image, the latest first: an image rebuilt to the same files has new manifests each time."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """One image as it is listed. ``name`` is empty where only the digest leads to it; times are Unix seconds.

    ``manifests`` are digests of registry manifests and layout indexes that it was imported from.
    """

    name: str
    digest: str
    file_bytes: int = 0
    entries: int = 0
    created_at: float = 0.0
    config: ImageConfig = field(default_factory=ImageConfig)
    manifests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageRoot:
    """Where an image's content is, and which host directories are to be shown in it read-only, in order.

    ``env`` is the image's part of every command's environment. ``file_bytes`` are in its files, where that is known.
    """

    rootfs: Path
    binds: tuple[tuple[Path, str], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    file_bytes: int = 0


class ImageStore:
    """The images below ``data_dir``; ``uid`` and ``gid`` are the sandbox user, who gets an entry in each.

    ``machines`` is where microVMs have theirs, ``machine`` in ``data_dir`` when None: what is removed goes there, too.
    """

    def __init__(self, data_dir: Path, uid: int = 1000, gid: int = 1000, machines: Path | None = None) -> None:
        self._directory = data_dir / "images"
        self._index = self._directory / "index.json"
        self._uid, self._gid = uid, gid
        self._machines = MachineImages(machines or data_dir / "machine")
        self._host = HostImage(self._directory / "host", uid, gid)

    def prepare(self, in_use: set[Path]) -> None:
        """Build the host image as the host is now and clear what crashed imports left.

        ``in_use`` are root directories that something runs on; they stay.
        """
        self._make_directory()
        with _locked(self._directory, fcntl.LOCK_EX):
            for aside in self._directory.glob(".new-*"):
                with contextlib.suppress(OSError), _locked(aside, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    discard(aside)
            sweep(self._directory)
        self._host.prepare(in_use)

    def resolve(self, reference: str) -> ResolvedImage:
        """Find the content behind a reference. :class:`NotFoundError`, or :class:`InvalidRequestError` for none."""
        parsed = parse_reference(reference)
        if parsed.name == HOST:
            if parsed.digest:
                raise InvalidRequestError("the host image has no digest: its programs are the host's")
            return ResolvedImage(HOST, "", pinned=False)
        digest = self._find(parsed.name, parsed.digest)
        if not digest:
            raise NotFoundError(
                f"there is no image {reference!r}; import one with: agent-sandbox image import NAME SOURCE"
            )
        return ResolvedImage(parsed.name or digest, digest, pinned=True, env=self._info("", digest).config.env)

    def _find(self, name: str, digest: str) -> str:
        if not digest:
            digest = self._names().get(name, "")
        if not digest or self._home(digest).is_dir():
            return digest
        for home in self._directory.glob("sha256-*"):
            info = self._info("", _digest_of(home))
            if digest in info.manifests:
                return info.digest
        return ""

    def resolve_allowed(self, reference: str, globs: Iterable[str]) -> ResolvedImage:
        """As :meth:`resolve`, for content that the operator's ``globs`` allow. :class:`ForbiddenError` else.

        Of a reference with a digest that counts, whatever the name before it says: the content must have an allowed
        name, or none any more.
        """
        found = self.resolve(reference)
        names = self.names(found.digest) if "@" in reference else []
        if names and not any(is_allowed(own, globs) for own in names):
            raise ForbiddenError(
                f"image {reference!r} is another one, which is not allowed here; "
                "AGENT_SANDBOX_ALLOWED_IMAGES says which are"
            )
        return found

    def names(self, digest: str) -> list[str]:
        """The names that lead to some content now."""
        return sorted(name for name, value in self._names().items() if value == digest)

    def open(self, name: str, digest: str) -> ImageRoot:
        """The content to run: of ``digest``, or what ``name`` leads to where that is empty. :class:`NotFoundError`."""
        if not digest:
            digest = self.resolve(name).digest
        if not digest:
            return ImageRoot(self._host.rootfs(), tuple(self._host.binds()))
        rootfs = self._home(digest) / "rootfs"
        if not rootfs.is_dir():
            raise NotFoundError(f"the image {name!r} ({digest}) is no longer there; import it again")
        info = self._info(name, digest)
        return ImageRoot(rootfs, env=info.config.env, file_bytes=info.file_bytes)

    def inspect(self, reference: str) -> ImageInfo:
        """Everything known of one image. Errors as of :meth:`resolve`."""
        resolved = self.resolve(reference)
        return self._info("" if resolved.name == resolved.digest else resolved.name, resolved.digest)

    def list(self) -> list[ImageInfo]:
        """Every image: the host's, the named ones by name, and those without a name."""
        names = self._names()
        found = [ImageInfo(HOST, "")]
        found += [self._info(name, digest) for name, digest in sorted(names.items())]
        digests = (_digest_of(path) for path in self._directory.glob("sha256-*"))
        return found + [self._info("", digest) for digest in sorted(set(digests) - set(names.values()))]

    def import_image(
        self, name: str, source: Path | Source, progress: Progress = lambda phase, done, total: None
    ) -> ImageInfo:
        """Import what ``source`` is as ``name``, which then leads to it. A path is looked at to tell what it is.

        :class:`InvalidRequestError` for sources and names that cannot be right, :class:`LimitExceededError` above the
        limits on images or what the disk has room for, :class:`BackendError` when a tool is missing or a registry
        cannot be reached; :class:`NotFoundError` and :class:`ForbiddenError` as a registry says. Nothing is left behind
        by a failure, or by an exception of ``progress``.
        """
        if check_name(name) == HOST:
            raise InvalidRequestError("the name 'host' is taken: it is this host's own programs")
        self._make_directory()
        try:
            if isinstance(source, Path):
                source = find_source(str(source))
            with self._aside() as aside:
                return self._import(name, source, aside, progress)
        except OSError as error:
            raise BackendError(f"importing {name} failed: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _aside(self) -> Iterator[Path]:
        """A directory to build an image in, which is removed unless it was renamed."""
        aside = self._directory / f".new-{secrets.token_hex(8)}"
        with contextlib.ExitStack() as stack:
            stack.callback(discard, aside)
            with _locked(self._directory, fcntl.LOCK_EX):
                aside.mkdir(mode=0o700)
                stack.enter_context(_locked(aside, fcntl.LOCK_EX))
            yield aside

    def _import(self, name: str, source: Source, aside: Path, progress: Progress) -> ImageInfo:
        rootfs, room = aside / "rootfs", Room(aside)
        config, total = ImageConfig(), 0
        manifests: tuple[str, ...] = ()
        if source.kind in ("dir", "tar"):
            rootfs.mkdir()
            rootfs.chmod(0o755)
            with Tree(rootfs) as tree:
                writer = TreeWriter(tree, room.check)
                read = read_directory if source.kind == "dir" else read_tar
                read(source.path, writer, progress)
                writer.finish()
        else:
            with self._aside() as scratch:
                unpacked = unpack(source, rootfs, scratch, room, progress)
            config, manifests, total = unpacked.config, unpacked.manifests, unpacked.file_bytes
        summary = summarize(rootfs, lambda done: progress("digest", done, total))
        with Tree(rootfs) as tree:
            prepare_rootfs(tree, self._uid, self._gid)
        digest = image_digest(summary.digest, config)
        info = ImageInfo("", digest, summary.file_bytes, summary.entries, time.time(), config, manifests)
        _write_info(aside, info)
        _sync_file_system(aside)
        home = self._home(digest)
        with _locked(self._directory, fcntl.LOCK_EX):
            names = self._names() | {name: digest}
            if len(names) > MAX_IMAGES:
                raise ConflictError(f"there are {MAX_IMAGES} images already; remove some")
            if home.is_dir():
                there = self._info("", digest)
                merged = tuple(dict.fromkeys((*manifests, *there.manifests)))[:_MAX_MANIFESTS]
                info = replace(there, manifests=merged)
                if info != there:
                    _write_info(home, info)
            else:
                aside.rename(home)
            self._write_names(names)
        return replace(info, name=name)

    def remove(self, reference: str, in_use: Callable[[], Collection[str]] = tuple) -> None:
        """Remove a name, and the content once no name leads to it. A digest removes the content and all its names.

        ``in_use`` says what digests something stands on, when it is asked. :class:`NotFoundError`;
        :class:`ConflictError` when the content would go and is in use. Big trees are deleted in the background.
        """
        parsed = parse_reference(reference)
        if parsed.name == HOST:
            raise InvalidRequestError("the host image cannot be removed: it is the host's own programs")
        self._make_directory()
        with _locked(self._directory, fcntl.LOCK_EX):
            digest = self.resolve(reference).digest
            names = self._names()
            gone = [name for name, value in names.items() if value == digest and parsed.name in ("", name)]
            kept = {name: value for name, value in names.items() if name not in gone}
            if digest in kept.values():
                self._write_names(kept)
                return
            refusal = ConflictError(f"the image {reference!r} is in use; destroy its sandboxes and snapshots first")
            if digest in in_use():
                raise refusal
            home, dead = self._home(digest), self._directory / f".new-{secrets.token_hex(8)}"
            self._write_names(kept)
            home.rename(dead)
            try:
                if digest in in_use():
                    raise refusal
            except BaseException:
                dead.rename(home)
                self._write_names(names)
                raise
        discard(dead)
        self._machines.forget(digest)

    # -- files -------------------------------------------------------------------------

    def _make_directory(self) -> None:
        self._directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.mkdir(mode=0o700, exist_ok=True)

    def _home(self, digest: str) -> Path:
        return self._directory / digest.replace(":", "-")

    def _names(self) -> dict[str, str]:
        value = _read_json(self._index, INDEX_VERSION)
        return {} if value is None else {str(name): str(digest) for name, digest in value["names"].items()}

    def _write_names(self, names: dict[str, str]) -> None:
        _write_json(self._index, {"version": INDEX_VERSION, "names": names})

    def _info(self, name: str, digest: str) -> ImageInfo:
        value = _read_json(self._home(digest) / "image.json", IMAGE_VERSION) or {}
        numbers = {key: value[key] for key in ("file_bytes", "entries", "created_at") if key in value}
        config = ImageConfig.from_json(value.get("config", {}))
        return ImageInfo(name, digest, **numbers, config=config, manifests=tuple(value.get("manifests", ())))


def _digest_of(home: Path) -> str:
    return home.name.replace("sha256-", "sha256:")


def _write_info(directory: Path, info: ImageInfo) -> None:
    values = {"digest": info.digest, "file_bytes": info.file_bytes, "entries": info.entries}
    more = {"created_at": info.created_at, "config": info.config.to_json(), "manifests": list(info.manifests)}
    _write_json(directory / "image.json", {"version": IMAGE_VERSION, **values, **more})


@contextlib.contextmanager
def _locked(path: Path, operation: int) -> Iterator[None]:
    """Hold a lock of flock(2) on a directory; other processes that want it wait, or fail with LOCK_NB."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def _read_json(path: Path, newest: int) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_JSON_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BackendError(f"{path} cannot be read; restore it or remove it and import the images again") from error
    if not isinstance(value, dict) or value.get("version") not in range(1, newest + 1):
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
