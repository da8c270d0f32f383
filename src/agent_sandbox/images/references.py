"""How images are named, here and in registries. Pure.

A name is lower-case letters, digits and ``. _ / -``, with an optional ``:tag``, and may begin with a registry's
``host:port/``. A reference is a name, a name with ``@sha256:…``, which asks for exactly this content, or ``sha256:…``
alone. The digest is the image's own, or that of a manifest which it was imported from.

A registry reference is ``[docker://][HOST[:PORT]/]PATH[:TAG][@sha256:…]``. As everywhere in this field, a first part
without a dot, a colon or ``localhost`` is no host, and then the host is docker.io.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from agent_sandbox.errors import InvalidRequestError

HOST = "host"
"""The image that is the host's own programs."""
DOCKER_SCHEME = "docker://"
_DOCKER_IO = "docker.io"

_TAG = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_NAME = re.compile(rf"([a-z0-9][a-z0-9.-]{{0,127}}:[0-9]{{1,5}}/)?[a-z0-9][a-z0-9._/-]{{0,127}}(:{_TAG})?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_REGISTRY_HOST = re.compile(
    r"(?P<name>[a-z0-9](?:[a-z0-9.-]{0,252}[a-z0-9])?|\[[0-9a-f:.]{2,45}\])(?P<port>:[0-9]{1,5})?"
)
_REGISTRY_PATH = re.compile(rf"(?P<path>{_PART}(?:/{_PART}){{0,20}})(?::(?P<tag>{_TAG}))?")


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed reference; at least one part is not empty."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class RegistryReference:
    """An image in a registry: ``host`` with its port, ``path`` in full, and a tag, a digest, or both."""

    host: str
    path: str
    tag: str
    digest: str

    @property
    def repository(self) -> str:
        """``HOST/PATH``."""
        return f"{self.host}/{self.path}"

    @property
    def loopback(self) -> bool:
        """Whether the host is this machine, where plain HTTP is no risk."""
        found = _REGISTRY_HOST.fullmatch(self.host)
        name = found["name"].strip("[]") if found else ""
        try:
            return name == "localhost" or ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def local_name(self) -> str:
        """The name that a pulled image gets: the reference without its digest; docker.io goes without saying."""
        name = self.path.removeprefix("library/") if self.host == _DOCKER_IO else self.repository
        return check_name(f"{name}:{self.tag}" if self.tag else name)

    def __str__(self) -> str:
        tag, digest = self.tag and f":{self.tag}", self.digest and f"@{self.digest}"
        return f"{self.repository}{tag}{digest}"


def parse_reference(text: str) -> Reference:
    """Take a reference apart. :class:`InvalidRequestError` when it is none."""
    if text.startswith("sha256:"):
        return Reference("", check_digest(text))
    name, at, digest = text.partition("@")
    return Reference(check_name(name), check_digest(digest) if at else "")


def check_name(name: str) -> str:
    """Return ``name`` when it can name an image; :class:`InvalidRequestError` else."""
    if not _NAME.fullmatch(name) or ".." in name or "//" in name:
        raise InvalidRequestError(
            f"{name[:140]!r} is not an image name: lower-case letters, digits and ._/- with an optional :tag"
        )
    return name


def check_digest(digest: str) -> str:
    """Return ``digest`` when it is one; :class:`InvalidRequestError` else."""
    if not _DIGEST.fullmatch(digest):
        raise InvalidRequestError(f"{digest[:80]!r} is not an image digest (sha256: and 64 hexadecimal digits)")
    return digest


def parse_registry_reference(text: str) -> RegistryReference:
    """Take a registry reference apart. :class:`InvalidRequestError` when it is none."""
    rest, at, digest = text.removeprefix(DOCKER_SCHEME).partition("@")
    first, slash, path = rest.partition("/")
    if not (slash and looks_like_a_host(first)):
        first, path = _DOCKER_IO, rest if slash else f"library/{rest}"
    host, parts = _REGISTRY_HOST.fullmatch(first.lower()), _REGISTRY_PATH.fullmatch(path)
    if host is None or parts is None or len(path) > 255:
        raise InvalidRequestError(
            f"{text[:300]!r} is not a registry reference: [docker://][HOST[:PORT]/]PATH[:TAG][@sha256:…]"
        )
    checked = check_digest(digest) if at else ""
    return RegistryReference(first.lower(), parts["path"], parts["tag"] or ("" if checked else "latest"), checked)


def names_a_registry(text: str) -> bool:
    """Whether a source that is no file can only mean a registry: by its scheme, or by a host in front."""
    first, slash, _ = text.partition("/")
    return text.startswith(DOCKER_SCHEME) or (bool(slash) and looks_like_a_host(first) and not first.startswith("."))


def looks_like_a_host(text: str) -> bool:
    """Whether the part of a name before the first slash is a registry's host."""
    return text == "localhost" or "." in text or ":" in text
