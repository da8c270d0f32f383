"""What to type to install an extra of this package, however it came here.

From an index the name of the package is enough. From a directory it is not: the engine that the server needs lies in
that directory, and an index may have another package of this name. pip notes where it took a package from in
``direct_url.json`` (PEP 610).
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

_NAME = "agent-sandbox"


def remedy(extra: str) -> str:
    """The command that installs ``agent-sandbox[extra]`` here."""
    directory, editable = _directory()
    if directory is None:
        return f"pip install '{_NAME}[{extra}]'"
    if editable and Path(sys.prefix) == directory / ".venv":
        return f"make -C {shlex.quote(str(directory))} setup"
    words = ["pip", "install"]
    if extra in ("server", "conformance"):
        words.append(shlex.quote(str(directory / "crates/engine")))
    if editable:
        words.append("-e")
    return " ".join([*words, shlex.quote(f"{directory}[{extra}]")])


def _directory() -> tuple[Path | None, bool]:
    """The directory that this package was installed from, or none, and whether it is used in place."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        told = json.loads(distribution(_NAME).read_text("direct_url.json") or "{}")
        url, info = urlsplit(told["url"]), told["dir_info"]
        if url.scheme == "file":
            return Path(unquote(url.path)), bool(info.get("editable"))
    except (PackageNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        pass
    return None, False
