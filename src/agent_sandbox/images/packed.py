"""From a packed image (OCI layout, ``docker save``, registry) to a root file system, by skopeo and umoci.

Strategy
--------
::

    OCI layout ──────┐
    docker archive ──┼─ skopeo copy ─► scratch/layout ─ check platform ─ umoci raw unpack ─► rootfs ─ clean
    registry ────────┘                  one image, verified

* skopeo brings every kind into one local layout and verifies each blob by its digest; umoci applies the layers with
  their whiteouts and verifies what is in them. Neither is given a path of the user's: names with colons or tags in them
  would be read as something else. A source layout is shown to skopeo as a directory of ours that lists only the chosen
  image and borrows the other's blobs; an archive is passed as an open file.
* What is said about the image (index, manifest, config) we read ourselves, by digest, before a byte of a layer moves:
  which image is meant, whether it is for this machine, whether it is whole, whether it fits on the disk.
* umoci is taken to stay inside its directory, and nothing more. (umoci 0.4 removes the directory above, too, when a
  layer has a whiteout for ``..``: so there is one of ours above that holds nothing else.) What it leaves is walked
  before anything else looks at it. Devices and sockets go, extended attributes go (file capabilities, and names that
  overlayfs would obey), and the limits are those of every other import. Set-id bits stay: a sandbox's mounts are
  nosuid.
* A registry is asked once, and what it said is what is fetched: the copy names the digest that was checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_sandbox.errors import BackendError, ForbiddenError, InvalidRequestError, NotFoundError, SandboxError
from agent_sandbox.images import layout as oci
from agent_sandbox.images.confined import MAX_DEPTH, Tree, TreeWriter, check_size
from agent_sandbox.images.digest import fail
from agent_sandbox.images.image_config import ImageConfig, parse_config
from agent_sandbox.images.kinds import Source
from agent_sandbox.images.layout import Layout
from agent_sandbox.images.references import RegistryReference, parse_registry_reference
from agent_sandbox.images.room import Room
from agent_sandbox.images.sources import Progress, decompressed, members, read_tar, whole_tar
from agent_sandbox.images.tools import Tick, ToolFailedError, run

_TAG = "image"
_PIECE = 1 << 20
_POLICIES = ("/etc/containers/policy.json", ".config/containers/policy.json")


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What came with the files: the image's config, and the digests of the manifests that led to it, outermost first.

    A ``docker save`` archive has no manifest of its own, and so no digest.
    """

    config: ImageConfig
    manifests: tuple[str, ...]
    file_bytes: int


def unpack(source: Source, rootfs: Path, scratch: Path, room: Room, progress: Progress) -> Unpacked:
    """Unpack the image into ``rootfs``, which does not exist yet; ``scratch`` is an empty directory beside it.

    :class:`InvalidRequestError` for damaged, foreign or ambiguous images; :class:`LimitExceededError` for too large
    ones; :class:`NotFoundError`, :class:`ForbiddenError` as a registry answers; :class:`BackendError` when a tool is
    missing or a registry cannot be reached.
    """
    work = _Work(scratch, room, progress)
    if source.kind == "registry":
        manifests = work.fetch(parse_registry_reference(source.location), source.authfile)
    elif source.kind == "docker-archive":
        manifests = work.copy_archive(source.path, source.ref)
    else:
        manifests = work.copy_layout(source.path, source.ref)
    config = work.apply(rootfs)
    return Unpacked(config, manifests, clean(rootfs))


class _Work:
    def __init__(self, scratch: Path, room: Room, progress: Progress) -> None:
        self._scratch, self._room, self._progress = scratch, room, progress
        self._layout = Layout(scratch / "layout")

    def copy_layout(self, path: Path, ref: str) -> tuple[str, ...]:
        if not path.is_dir():
            extracted = self._scratch / "extracted"
            extracted.mkdir()
            with Tree(extracted) as tree:
                writer = TreeWriter(tree, self._room.check)
                read_tar(path, writer, self._progress, plain_files_only=True)
                writer.finish()
            path = extracted
        source = Layout(path)
        way = source.choose(ref)
        manifest = source.manifest(way[-1])
        oci.check_platform(source.config(manifest))
        source.check_blobs(manifest)
        self._room.check(manifest.layer_bytes)
        shown = Layout(self._scratch / "shown")
        shown.directory.mkdir()
        (shown.directory / "blobs").symlink_to((path / "blobs").absolute())
        shown.write(way[-1], _TAG)
        with _said_by(path.name):
            self._copy(f"oci:shown:{_TAG}", manifest.layer_bytes)
        return tuple(one.digest for one in way)

    def copy_archive(self, path: Path, ref: str) -> tuple[str, ...]:
        plain = self._plain(path)
        index = _archive_index(plain, path.name, ref)
        with plain.open("rb") as file, _said_by(path.name):
            name = f"docker-archive:/proc/self/fd/{file.fileno()}:@{index}"
            self._copy(name, 0, descriptors=[file.fileno()])
        return ()

    def _plain(self, path: Path) -> Path:
        """The archive unpacked: skopeo 1.9 fails on compressed ones."""
        with whole_tar(path), path.open("rb") as raw, decompressed(raw) as stream:
            if stream is raw:
                return path
            total, done = path.stat().st_size, 0
            plain = self._scratch / "archive.tar"
            with plain.open("wb") as file:
                while piece := stream.read(_PIECE):
                    done += file.write(piece)
                    check_size(0, done)
                    self._room.check()
                    self._progress("read", raw.tell(), total)
        return plain

    def fetch(self, reference: RegistryReference, authfile: Path | None) -> tuple[str, ...]:
        options = [f"--authfile={authfile.absolute()}"] if authfile is not None else []
        tls = ["--tls-verify=false"] if reference.loopback else []
        with _said_by_registry(reference):

            def inspect(name: str) -> bytes:
                argv = ["skopeo", "inspect", "--raw", *options, *tls, f"docker://{name}"]
                return run(argv, self._scratch, self._tick("copy", 0))

            pinned = f"{reference.repository}@{reference.digest}"
            content = inspect(pinned if reference.digest else f"{reference.repository}:{reference.tag}")
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            if reference.digest:
                oci.verify(content, reference.digest)
            digests: tuple[str, ...] = (digest,)
            if oci.is_index(content):
                digest = oci.for_this_machine(oci.parse_index(content)).digest
                content = inspect(f"{reference.repository}@{digest}")
                oci.verify(content, digest)
                digests += (digest,)
            size = oci.parse_manifest(content).layer_bytes
            self._room.check(size)
            source = ["--src-tls-verify=false"] if reference.loopback else []
            self._copy(f"docker://{reference.repository}@{digest}", size, [*options, *source])
        return digests

    def _copy(self, name: str, size: int, options: Sequence[str] = (), descriptors: Sequence[int] = ()) -> None:
        self._layout.directory.mkdir()
        policy = [] if _has_policy() else ["--insecure-policy"]
        argv = ["skopeo", *policy, "--tmpdir=.", "copy", "--quiet", "--remove-signatures"]
        argv += ["--dest-oci-accept-uncompressed-layers", *options, name, f"oci:layout:{_TAG}"]
        run(argv, self._scratch, self._tick("copy", size), descriptors=descriptors)

    def apply(self, rootfs: Path) -> ImageConfig:
        [descriptor] = self._layout.choose(_TAG)
        manifest = self._layout.manifest(descriptor)
        document = self._layout.config(manifest)
        oci.check_platform(document)
        config = parse_config(document)
        plain = self._layout.make_plain(descriptor, self._room)
        self._layout.write(plain, _TAG)
        manifest = self._layout.manifest(plain)
        with _said_by("the image"):
            tick = self._tick("unpack", manifest.layer_bytes, reads=True)
            (self._scratch / "below").mkdir()
            argv = ["umoci", "raw", "unpack", "--image", f"layout:{_TAG}", "below/unpacked"]
            run(argv, self._scratch, tick)
        try:
            (self._scratch / "below/unpacked").rename(rootfs)
        except FileNotFoundError:
            raise InvalidRequestError("the image is damaged: its layers remove its own root directory") from None
        return config

    def _tick(self, phase: str, total: int, *, reads: bool = False) -> Tick:
        def tick(read: int, written: int) -> None:
            self._room.check()
            if reads:
                check_size(0, written)
            done = read if reads else written
            self._progress(phase, min(done, total) if total else done, total)

        return tick


def clean(rootfs: Path) -> int:
    """Remove what no image keeps from a tree that nobody else works on; return the bytes of its regular files.

    :class:`LimitExceededError` above the limits on images, :class:`InvalidRequestError` when it is too deep.
    """
    entries = file_bytes = 0
    base = os.fsencode(rootfs)
    for top, directories, files, descriptor in os.fwalk(base, onerror=fail):
        if top[len(base) :].count(b"/") > MAX_DEPTH:
            raise InvalidRequestError(f"the image holds directories that are nested deeper than {MAX_DEPTH}")
        _drop_attributes(b"/proc/self/fd/%d" % descriptor, follow=True)
        entries += 1 + len(files)
        for name in files + [name for name in directories if _is_link(name, descriptor)]:
            state = os.lstat(name, dir_fd=descriptor)
            kind = stat.S_IFMT(state.st_mode)
            if kind in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK):
                os.unlink(name, dir_fd=descriptor)
                continue
            _drop_attributes(b"/proc/self/fd/%d/%s" % (descriptor, name), follow=False)
            if kind == stat.S_IFREG:
                file_bytes += state.st_size
        check_size(entries, file_bytes)
    return file_bytes


def _is_link(name: bytes, directory: int) -> bool:
    return stat.S_ISLNK(os.lstat(name, dir_fd=directory).st_mode)


def _drop_attributes(path: bytes, *, follow: bool) -> None:
    for name in os.listxattr(path, follow_symlinks=follow):
        if name != "security.selinux":
            os.removexattr(path, name, follow_symlinks=follow)


def _archive_index(plain: Path, shown: str, ref: str) -> int:
    """Which of the images that manifest.json lists is meant."""
    with whole_tar(plain), plain.open("rb") as file:
        content = b""
        for archive, member in members(file):
            if member.name.removeprefix("./") == "manifest.json" and member.isfile():
                if member.size > oci.MAX_DOCUMENT_BYTES:
                    raise InvalidRequestError(f"{shown} is damaged: its manifest.json is too large")
                stream = archive.extractfile(member)
                assert stream is not None
                content = stream.read(oci.MAX_DOCUMENT_BYTES)
                break
    tags = _archive_tags(content, shown)
    if ref:
        wanted = {ref, f"{ref}:latest"} if ":" not in ref else {ref}
        found = [at for at, names in enumerate(tags) if wanted & {name for tag in names for name in _spellings(tag)}]
    else:
        found = list(range(len(tags)))
    if len(found) == 1:
        return found[0]
    listed = ", ".join(tag for names in tags for tag in names)[:300]
    problem = "several images; choose one with --ref" if len(found) > 1 else f"no image {ref!r}"
    raise InvalidRequestError(f"{shown} holds {problem}: {listed or 'none has a tag'}")


def _archive_tags(content: bytes, shown: str) -> list[list[str]]:
    images = oci.parse_list(content) if content else []
    if not images:
        raise InvalidRequestError(f"{shown} holds no image: its manifest.json is missing or empty")
    tags = []
    for image in images:
        names = image.get("RepoTags") if isinstance(image, dict) else None
        tags.append([name for name in names if isinstance(name, str)] if isinstance(names, list) else [])
    return tags


def _spellings(tag: str) -> Iterator[str]:
    yield tag
    short = tag.removeprefix("docker.io/").removeprefix("library/")
    if short != tag:
        yield short


def _has_policy() -> bool:
    home = os.environ.get("HOME", "/root")
    return any(Path(home, name).is_file() for name in _POLICIES)


# What a registry's refusal means, by words of skopeo's last line, the first match counts.
_REFUSALS: tuple[tuple[tuple[str, ...], Callable[[str], SandboxError], str], ...] = (
    (("unauthorized", "authentication required", "denied", "no basic auth"), ForbiddenError,
     "; log in with skopeo login --authfile FILE and name the file with --authfile"),
    (("manifest unknown", "name unknown", "not found", "name invalid"), NotFoundError, ""),
    (("Digest did not match", "digest mismatch", "does not match"), InvalidRequestError, ""),
    (("toomanyrequests", "too many requests"), BackendError, "; try again later, or log in"),
)  # fmt: skip


@contextlib.contextmanager
def _said_by_registry(reference: RegistryReference) -> Iterator[None]:
    try:
        yield
    except ToolFailedError as error:
        for words, kind, remedy in _REFUSALS:
            if any(word.lower() in error.message.lower() for word in words):
                raise kind(f"{reference} cannot be had: {error.message}{remedy}") from error
        raise BackendError(f"{reference} cannot be had: {error.message}") from error


@contextlib.contextmanager
def _said_by(what: str) -> Iterator[None]:
    try:
        yield
    except ToolFailedError as error:
        if "no space left" in error.message:
            raise BackendError(f"{what} cannot be unpacked: the disk is full") from error
        raise InvalidRequestError(f"{what} is damaged, or not what it says: {error.message}") from error
    except tarfile.TarError as error:
        raise InvalidRequestError(f"{what} is not a whole tar archive: {error}") from error
