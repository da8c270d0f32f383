"""Reading an OCI image layout: which image is meant, what it says about itself, whether its parts are there.

Everything in a layout is hostile input. Documents are read whole, at most 4 MiB of them, and only with the digest and
size that their descriptor names; a blob is a regular file, never a link, so that nothing outside can be meant by one.
The layers are only looked at from outside here: their bytes are skopeo's and umoci's to verify.

Source of the formats: OCI image specification 1.1 (image-layout, image-index, manifest, config).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_sandbox.errors import InvalidRequestError
from agent_sandbox.images.confined import check_size
from agent_sandbox.images.references import check_digest
from agent_sandbox.images.room import Room
from agent_sandbox.images.sources import ZSTD_MAGIC, ZstdError, open_zstd

MAX_DOCUMENT_BYTES = 4 << 20
"""What registries take for a manifest."""
_MAX_DEPTH = 4
"""Of indexes in indexes; build tools make two."""
_MAX_LAYERS = 1000
"""Overlay file systems end at 500, Docker at 127."""
REF_NAME = "org.opencontainers.image.ref.name"
_INDEXES = {
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
}
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
_MANIFESTS = {MANIFEST, "application/vnd.docker.distribution.manifest.v2+json"}
_CONFIGS = {
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
}
_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "armv6l": "arm",
    "i686": "386",
    "loongarch64": "loong64",
}
"""Where the specification, with Go's names, and the kernel call a machine differently."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob by type, digest and size; ``platform`` is ``os/architecture`` or empty, ``ref`` a tag or empty."""

    media_type: str
    digest: str
    size: int
    platform: str = ""
    ref: str = ""

    @property
    def is_index(self) -> bool:
        """Whether it leads to several images."""
        return self.media_type in _INDEXES


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image's manifest: its config and its layers, the lowest first."""

    config: Descriptor
    layers: tuple[Descriptor, ...]

    @property
    def layer_bytes(self) -> int:
        """Bytes of the layers as they are packed."""
        return sum(layer.size for layer in self.layers)


class Layout:
    """A layout in a directory. Making the object reads nothing; all else raises :class:`InvalidRequestError`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def index(self) -> list[Descriptor]:
        """What index.json lists."""
        return parse_index(_read(self.directory / "index.json"))

    def choose(self, ref: str = "") -> tuple[Descriptor, ...]:
        """The way to the image that is meant, from index.json's descriptor to the manifest's.

        ``ref`` is the tag to choose; it may be empty when there is one image only.
        """
        found = _chosen(self.index(), ref)
        way: tuple[Descriptor, ...] = (found,)
        while found.is_index:
            if len(way) > _MAX_DEPTH:
                raise InvalidRequestError("the image's indexes are nested too deeply")
            found = for_this_machine(parse_index(self.document(found)))
            way += (found,)
        return way

    def manifest(self, descriptor: Descriptor) -> Manifest:
        """The manifest that ``descriptor`` names."""
        return parse_manifest(self.document(descriptor))

    def config(self, manifest: Manifest) -> dict[str, Any]:
        """The config document of an image. Registries hold other things under the same manifests."""
        if manifest.config.media_type not in _CONFIGS:
            raise InvalidRequestError(f"this is no container image but a {manifest.config.media_type[:80]!r}")
        return parse_document(self.document(manifest.config))

    def document(self, descriptor: Descriptor) -> bytes:
        """The bytes of a small blob, verified."""
        content = _read(self.blob(descriptor.digest))
        verify(content, descriptor.digest)
        return content

    def check_blobs(self, manifest: Manifest) -> None:
        """Look whether each layer is there, in its size."""
        for layer in manifest.layers:
            try:
                state = self.blob(layer.digest).lstat()
            except OSError:
                raise InvalidRequestError(f"the image is not complete: its layer {layer.digest} is missing") from None
            if not stat.S_ISREG(state.st_mode) or state.st_size != layer.size:
                raise InvalidRequestError(f"the image is damaged: its layer {layer.digest} is no file of its size")

    def blob(self, digest: str) -> Path:
        """Where a blob is."""
        return self.directory / "blobs" / "sha256" / check_digest(digest).removeprefix("sha256:")

    def write(self, manifest: Descriptor, ref: str) -> None:
        """Write index.json and oci-layout so that the layout has this one image, under ``ref``."""
        entry = {"mediaType": manifest.media_type, "digest": manifest.digest, "size": manifest.size}
        index = {"schemaVersion": 2, "manifests": [{**entry, "annotations": {REF_NAME: ref}}]}
        (self.directory / "index.json").write_text(json.dumps(index))
        (self.directory / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')

    def make_plain(self, descriptor: Descriptor, room: Room) -> Descriptor:
        """Call each layer what it is and unpack those that are packed with zstd; return the new manifest's descriptor.

        skopeo 1.9 calls the plain layers of a docker archive gzip, and umoci 0.4 does not read zstd. A plain layer's
        digest is what the config calls its diff id, and is verified as that by umoci.
        """
        document = parse_document(self.document(descriptor))
        for layer, parsed in zip(document["layers"], self.manifest(descriptor).layers, strict=True):
            with self.blob(parsed.digest).open("rb") as file:
                magic = file.read(4)
            layer["mediaType"] = LAYER + ("+gzip" if magic.startswith(b"\x1f\x8b") else "")
            if magic == ZSTD_MAGIC:
                layer["digest"], layer["size"] = self._unpack_zstd(parsed.digest, room)
        content = json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.blob(digest).write_bytes(content)
        return Descriptor(descriptor.media_type, digest, len(content))

    def _unpack_zstd(self, digest: str, room: Room) -> tuple[str, int]:
        found, size = hashlib.sha256(), 0
        aside = self.directory / "unpacking"
        try:
            with self.blob(digest).open("rb") as raw, open_zstd(raw) as stream, aside.open("wb") as plain:
                while piece := stream.read(1 << 20):
                    found.update(piece)
                    size += plain.write(piece)
                    check_size(0, size)
                    room.check()
        except ZstdError as error:
            raise InvalidRequestError(
                f"the image is damaged: its layer {digest} cannot be unpacked: {error}"
            ) from error
        unpacked = f"sha256:{found.hexdigest()}"
        aside.replace(self.blob(unpacked))
        return unpacked, size


def this_platform() -> str:
    """``os/architecture`` of this machine, as images spell it."""
    machine = platform.machine()
    return f"linux/{_ARCHITECTURES.get(machine, machine)}"


def check_platform(config: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidRequestError` when an image's config says that it is for another kind of machine."""
    said = f"{config.get('os') or 'linux'}/{config.get('architecture') or this_platform().partition('/')[2]}"
    if said != this_platform():
        raise InvalidRequestError(
            f"the image is for {said[:80]!r}, and this machine is {this_platform()}; use an image that is for it",
            details={"image_platform": said[:80], "platform": this_platform()},
        )


def for_this_machine(found: list[Descriptor]) -> Descriptor:
    """The entry of an index for this machine. :class:`InvalidRequestError` when there is none."""
    fitting = [one for one in found if one.platform == this_platform()] or [one for one in found if not one.platform]
    if not fitting:
        others = sorted({one.platform for one in found if one.platform})
        raise InvalidRequestError(
            f"the image has nothing for {this_platform()}, only for {', '.join(others)[:200] or 'no machine at all'}",
            details={"image_platforms": others[:20], "platform": this_platform()},
        )
    return fitting[0]


def parse_index(content: bytes) -> list[Descriptor]:
    """Read an image index, or a manifest list of Docker's."""
    entries = parse_document(content).get("manifests")
    if not isinstance(entries, list):
        raise _damaged("an index without a list of manifests")
    return [_descriptor(entry) for entry in entries]


def parse_manifest(content: bytes) -> Manifest:
    """Read an image manifest, OCI's or Docker's second schema."""
    document = parse_document(content)
    if document.get("schemaVersion") == 1:
        raise InvalidRequestError("the image's manifest is of Docker's first schema, which is no longer read anywhere")
    layers = document.get("layers")
    if not isinstance(layers, list) or len(layers) > _MAX_LAYERS:
        raise _damaged(f"a manifest without a list of at most {_MAX_LAYERS} layers")
    return Manifest(_descriptor(document.get("config")), tuple(_descriptor(layer) for layer in layers))


def parse_document(content: bytes) -> dict[str, Any]:
    """Read a JSON object."""
    value = _parse(content)
    if not isinstance(value, dict):
        raise _damaged("a document that is no JSON object")
    return value


def parse_list(content: bytes) -> list[Any]:
    """Read a JSON list."""
    value = _parse(content)
    if not isinstance(value, list):
        raise _damaged("a document that is no JSON list")
    return value


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damaged("a document that is no JSON") from error


def is_index(content: bytes) -> bool:
    """Whether the document is an index and not one image's manifest."""
    document = parse_document(content)
    return document.get("mediaType") in _INDEXES or "manifests" in document


def verify(content: bytes, digest: str) -> None:
    """Raise :class:`InvalidRequestError` when ``content`` is not what ``digest`` names."""
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
        raise _damaged(f"a document that does not have its digest {digest}")


def _chosen(found: list[Descriptor], ref: str) -> Descriptor:
    if ref:
        tagged = [one for one in found if one.ref == ref]
        if not tagged:
            raise InvalidRequestError(f"there is no image {ref!r} in the layout{_tags(found)}")
        return tagged[0] if len(tagged) == 1 else for_this_machine(tagged)
    images = [one for one in found if one.is_index or one.media_type in _MANIFESTS]
    if not images:
        raise _damaged("an index without an image")
    if len({one.digest for one in images}) > 1 and len({one.ref for one in images}) > 1:
        raise InvalidRequestError(f"there are several images; choose one with --ref{_tags(images)}")
    return images[0] if len({one.digest for one in images}) == 1 else for_this_machine(images)


def _tags(found: list[Descriptor]) -> str:
    tags = ", ".join(one.ref for one in found if one.ref)
    return f": {tags[:300]}" if tags else ""


def _descriptor(value: object) -> Descriptor:
    if not isinstance(value, dict):
        raise _damaged("a descriptor that is no JSON object")
    media_type, digest, size = value.get("mediaType", ""), value.get("digest"), value.get("size")
    if not isinstance(media_type, str) or not isinstance(digest, str) or type(size) is not int or size < 0:
        raise _damaged("a descriptor without type, digest or size")
    platform_, annotations = value.get("platform"), value.get("annotations")
    shown = ""
    if isinstance(platform_, dict):
        shown = f"{platform_.get('os')}/{platform_.get('architecture')}"[:80]
    ref = annotations.get(REF_NAME, "") if isinstance(annotations, dict) else ""
    return Descriptor(media_type, check_digest(digest), size, shown, ref if isinstance(ref, str) else "")


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequestError(f"the image is not complete: {path.name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _damaged(f"{path.name}, which is no file")
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise _damaged(f"{path.name}, which is larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
    return content


def _damaged(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the image is damaged: it holds {what}")
