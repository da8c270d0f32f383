"""Images of the engine: found, pulled where they are missing, and named by their content.

An image's id is the digest of its configuration, which names the digests of its layers: the same id is the same
content, wherever a tag has gone. That id is what environments are made from.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from agent_sandbox.backends.docker.engine import Engine
from agent_sandbox.errors import (
    BackendError,
    ForbiddenError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    SandboxError,
    UnsupportedError,
)
from agent_sandbox.images import ImageConfig
from agent_sandbox.images.allowed import is_allowed
from agent_sandbox.images.image_config import parse_config
from agent_sandbox.types import ImagePull

_log = logging.getLogger(__name__)

_STALLED_SECONDS = 120.0
"""How long a registry may send nothing before a pull counts as failed."""
_PROGRESS_SECONDS = 2.0
_NAME = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._@:\[\]-]*(/[A-Za-z0-9][A-Za-z0-9._@:-]*)*")
"""What the parts of references are made of (registry, path, tag, digest), or an id. It is put into the path of a call:
``..`` would make another call of that, about a container or an image that nobody is allowed to use."""
_SHORT_ID = re.compile(r"[0-9a-f]{1,64}")
_NAME_BYTES = 512
"""A path has 255 at most, a digest 71, a registry's name 253."""
_LABELS, _LABELS_BYTES = 1000, 64 << 10
"""Images have a handful; their names are in each sandbox's record."""
_SAME = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386", "i386": "386"}
"""The kernel's names of architectures (uname(2)) by those of images (Go's)."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image of the engine; ``tags`` are the names that lead to it there, ``labels`` the names of its labels."""

    id: str
    config: ImageConfig = field(default_factory=ImageConfig)
    tags: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()


class Pulls:
    """What is being pulled at this moment."""

    def __init__(self) -> None:
        self._under_way: dict[object, tuple[str, dict[str, tuple[int, int]]]] = {}

    @contextmanager
    def begun(self, name: str) -> Iterator[dict[str, tuple[int, int]]]:
        """Count a pull while the block runs; what it gives is to be filled: bytes done and in all, by layer."""
        token, layers = object(), dict[str, tuple[int, int]]()
        self._under_way[token] = (name, layers)
        try:
            yield layers
        finally:
            del self._under_way[token]

    def told(self) -> list[ImagePull]:
        """How far each is."""
        return [ImagePull(name, *_sums(layers)) for name, layers in self._under_way.values()]


async def find(engine: Engine, name: str, machine: str, backend: str, pulls: Pulls | None = None) -> Image:
    """The image that ``name`` (a tag, a digest or an id) has now, pulled when the engine has none.

    ``machine`` is the engine's architecture; ``pulls`` tells of a pull meanwhile. :class:`NotFoundError` when there is
    none anywhere, :class:`UnsupportedError` for one of another architecture.
    """
    try:
        return await inspect(engine, name, machine, backend)
    except NotFoundError:
        if name.startswith("sha256:"):
            raise
    with (pulls or Pulls()).begun(name) as layers:
        await pull(engine, name, layers)
    return await inspect(engine, name, machine, backend)


async def inspect(engine: Engine, name: str, machine: str, backend: str) -> Image:
    """The image as the engine has it. Errors as with :func:`find`."""
    if len(name) > _NAME_BYTES or not _NAME.fullmatch(name):
        raise InvalidRequestError(f"{name[:200]!r} is no name of an image")
    try:
        found = await engine.get(f"/images/{quote(name, safe='/:@')}/json")
    except NotFoundError:
        raise NotFoundError(f"the Docker engine has no image {name!r}; pull or build it there") from None
    if not isinstance(found, dict) or not isinstance(found.get("Id"), str):
        raise BackendError(f"the Docker engine's answer about image {name!r} is malformed")
    made_for = str(found.get("Architecture") or "")
    if found.get("Os") not in ("linux", "", None) or (made_for and made_for != _SAME.get(machine, machine)):
        raise UnsupportedError(
            "image", backend, f"{name!r} is made for {found.get('Os')}/{made_for}, this engine runs linux/{machine}"
        )
    tags = found.get("RepoTags")
    names = tuple(str(tag) for tag in tags) if isinstance(tags, list) else ()
    return Image(found["Id"], parse_config({"config": found.get("Config")}), names, _labels(found.get("Config")))


def refuse_by_id(name: str, image: Image, allowed: Sequence[str]) -> None:
    """Raise :class:`ForbiddenError` where ``name`` is the beginning of the id of an image that is not ``allowed``.

    An engine takes up to the whole id for a name, which may look like an allowed one: ``cafe`` where ``ca*`` is.
    """
    if not _SHORT_ID.fullmatch(name) or f"{name}:latest" in image.tags:
        return
    if not any(is_allowed(one, allowed) for one in (image.id, *image.tags)):
        raise ForbiddenError(
            f"image {name!r} is the id of another one, which is not allowed here; AGENT_SANDBOX_ALLOWED_IMAGES says "
            "which are"
        )


async def pull(engine: Engine, name: str, layers: dict[str, tuple[int, int]]) -> None:
    """Have the engine fetch an image; ``layers`` and the log tell how far it is.

    :class:`NotFoundError` when no registry has it.
    """
    reference = name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"
    _log.info("image %s: pulling", reference)
    told = time.monotonic()
    try:
        async with aclosing(engine.lines("/images/create", _STALLED_SECONDS, fromImage=reference)) as lines:
            async for line in lines:
                if "error" in line:
                    raise _refused(name, str(line["error"]))
                _count(layers, line)
                if time.monotonic() - told > _PROGRESS_SECONDS:
                    told = time.monotonic()
                    _log.info("image %s: %s", reference, progress(layers))
    except (NotFoundError, UnsupportedError):
        raise
    except SandboxError as error:
        raise _refused(name, error.message) from error
    _log.info("image %s: pulled, %s", reference, progress(layers))


def progress(layers: Mapping[str, tuple[int, int]]) -> str:
    """How far a pull is, in words, from the bytes that have come and that there are, by layer."""
    done, total = _sums(layers)
    return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB in {len(layers)} layers"


def _labels(config: object) -> tuple[str, ...]:
    found = (config.get("Labels") if isinstance(config, dict) else None) or {}
    if not isinstance(found, dict):
        raise InvalidRequestError("the image's config is damaged: Labels is not what it should be")
    if len(found) > _LABELS or sum(len(name.encode()) for name in found) > _LABELS_BYTES:
        raise LimitExceededError(
            f"the image has more than {_LABELS} labels, or {_LABELS_BYTES >> 10} KiB of their names"
        )
    return tuple(found)


def _sums(layers: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    return sum(done for done, _ in layers.values()), sum(total for _, total in layers.values())


def _count(layers: dict[str, tuple[int, int]], line: Mapping[str, Any]) -> None:
    id, status, detail = line.get("id"), line.get("status"), line.get("progressDetail")
    if not isinstance(id, str) or len(layers) > 1000:
        return
    if status == "Downloading" and isinstance(detail, dict) and detail.get("total"):
        layers[id] = (int(detail.get("current") or 0), int(detail["total"]))
    elif status in ("Download complete", "Pull complete") and id in layers:
        layers[id] = (layers[id][1], layers[id][1])


def _refused(name: str, words: str) -> SandboxError:
    lowered = words.lower()
    if any(sign in lowered for sign in ("not found", "manifest unknown", "does not exist", "no such image")):
        return NotFoundError(f"there is no image {name!r}, neither on the Docker engine nor where its name points to")
    if "no matching manifest" in lowered:
        return NotFoundError(f"there is no image {name!r} for this engine's architecture")
    return NotFoundError(
        f"the Docker engine has no image {name!r} and could not pull it ({words[:300].strip()}); load it there with "
        "docker pull, docker load or docker build"
    )
