"""What a source of an image is: told by its name when it is in a registry, by its content when it is a file here.

A tar is a root file system when it has a directory at its top that only those have, or nothing of a packed image.
Docker's own archives of today are both kinds of packed image at once; then it is the OCI layout that counts, since it
has digests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from agent_sandbox.errors import InvalidRequestError
from agent_sandbox.images.references import names_a_registry, parse_registry_reference
from agent_sandbox.images.sources import decompressed, members, whole_tar

Kind = Literal["dir", "tar", "oci", "docker-archive", "registry"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_ROOT = {"bin", "dev", "etc", "home", "lib", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "tmp", "usr", "var"}


@dataclass(frozen=True, slots=True)
class Source:
    """Where an image comes from.

    ``location`` is a path, or a registry reference. ``ref`` chooses one of several images in a file by its tag.
    ``authfile`` is a file of registry credentials as ``skopeo login`` writes it; skopeo's default when None.
    """

    kind: Kind
    location: str
    ref: str = ""
    authfile: Path | None = None

    @property
    def path(self) -> Path:
        """The location as a path."""
        return Path(self.location)


def find_source(text: str, kind: Kind | None = None, ref: str = "", authfile: Path | None = None) -> Source:
    """Say what ``text`` is; ``kind`` forces it. :class:`InvalidRequestError` when it is nothing that can be imported.

    Reads the file where that is needed to tell.
    """
    found = kind or _kind(text)
    if kind not in (None, "registry"):
        path = Path(text)
        if not path.exists():
            raise InvalidRequestError(f"there is no {text}")
        if not (path.is_dir() if kind == "dir" else path.is_file() or (kind == "oci" and path.is_dir())):
            raise InvalidRequestError(f"{text} is not of the kind {kind}")
    if found == "registry":
        parse_registry_reference(text)
    if ref and found not in ("oci", "docker-archive"):
        raise InvalidRequestError(f"a ref chooses among the images of an OCI layout or archive, and {text} is none")
    return Source(found, text, ref, authfile)


def _kind(text: str) -> Kind:
    path = Path(text)
    if path.is_dir():
        return "oci" if (path / "oci-layout").is_file() and (path / "index.json").is_file() else "dir"
    if path.is_file():
        return _kind_of_tar(path)
    if not path.exists() and names_a_registry(text):
        return "registry"
    raise InvalidRequestError(
        f"{text} is neither a directory nor an archive here, nor a reference with a registry's host (docker://…)"
    )


def _kind_of_tar(path: Path) -> Kind:
    found: set[str] = set()
    with whole_tar(path), path.open("rb") as raw, decompressed(raw) as stream:
        for _, member in members(stream):
            name = member.name.removeprefix("./").partition("/")[0]
            if name in _ROOT:
                return "tar"
            found |= {name} & {"oci-layout", "index.json", "manifest.json"}
            if {"oci-layout", "index.json"} <= found:
                return "oci"
    return "docker-archive" if "manifest.json" in found else "oci" if "oci-layout" in found else "tar"
