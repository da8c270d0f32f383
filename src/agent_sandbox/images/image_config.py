"""What an OCI image says about itself, as far as we keep it. Pure.

``env`` becomes the image's part of every command's environment. The rest is shown and not obeyed: commands run as the
sandbox user, never as the image's; nothing is started by itself; a sandbox has one writable place, ``/workspace``, and
no volumes. Source of the fields: OCI image specification, "config".

The image's digest covers what is kept: two images of equal files and unequal environments are two images. For an image
that says nothing, as an imported directory, it is the tree's digest; else ``sha256:`` and the SHA-256 over::

    agent-sandbox image 1\\n<digest of the tree>\\n<the kept fields as JSON, keys sorted, without spaces, ASCII>

When changing this: count the first line up. Stored digests stay as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agent_sandbox.errors import InvalidRequestError, LimitExceededError

MAX_ENV_BYTES = 64 << 10
"""What a command's message on the wire leaves for the image's variables."""
_MAX_ITEMS, _MAX_TEXT = 1000, 64 << 10
"""Of what is only shown; Docker's own images have a handful of each."""
_PER_VARIABLE = 16


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What is kept of an image's config. Only ``env`` has an effect."""

    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    working_dir: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, defaults included."""
        return asdict(self) | {"env": dict(self.env)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ImageConfig:
        """Read back what :meth:`to_json` gave."""
        lists = {name: tuple(value.get(name, ())) for name in ("entrypoint", "command", "volumes")}
        return cls(dict(value.get("env", {})), value.get("user", ""), value.get("working_dir", ""), **lists)


def image_digest(tree_digest: str, config: ImageConfig) -> str:
    """The digest of an image, as the page above says."""
    if config == ImageConfig():
        return tree_digest
    kept = json.dumps(config.to_json(), sort_keys=True, separators=(",", ":"))
    text = f"agent-sandbox image 1\n{tree_digest}\n{kept}"
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def parse_config(document: Mapping[str, Any]) -> ImageConfig:
    """Read the config document of an image, which is hostile input.

    :class:`InvalidRequestError` for fields of the wrong type, :class:`LimitExceededError` for too much of them.
    """
    value = document.get("config")
    if value is None:
        return ImageConfig()
    if not isinstance(value, dict):
        raise _wrong("config")
    volumes = value.get("Volumes") or {}
    if not isinstance(volumes, dict):
        raise _wrong("Volumes")
    return ImageConfig(
        env=_environment(_texts(value, "Env")),
        user=_text(value, "User"),
        working_dir=_text(value, "WorkingDir"),
        entrypoint=_texts(value, "Entrypoint"),
        command=_texts(value, "Cmd"),
        volumes=tuple(sorted(_texts({"Volumes": list(volumes)}, "Volumes"))),
    )


def _environment(pairs: tuple[str, ...]) -> dict[str, str]:
    env: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise InvalidRequestError(f"the image's config holds a variable that is none: {pair[:80]!r}")
        env[name] = value
    if sum(len(name.encode()) + len(value.encode()) + _PER_VARIABLE for name, value in env.items()) > MAX_ENV_BYTES:
        raise LimitExceededError(f"the image's environment is larger than {MAX_ENV_BYTES >> 10} KiB")
    return env


def _texts(table: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = table.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong(name)
    if len(value) > _MAX_ITEMS:
        raise LimitExceededError(f"the image's config holds more than {_MAX_ITEMS} items of {name}")
    return tuple(_checked(one, name) for one in value)


def _text(table: Mapping[str, Any], name: str) -> str:
    value = table.get(name)
    return "" if value is None else _checked(value, name)


def _checked(value: object, name: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise _wrong(name)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise _wrong(name) from None
    if size > _MAX_TEXT:
        raise LimitExceededError(f"the image's config holds more than {_MAX_TEXT >> 10} KiB of {name}")
    return value


def _wrong(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"the image's config is damaged: {name} is not what it should be")
