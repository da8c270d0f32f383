"""The compiled parts of agent-sandbox: the engine of its store, and where the static ``sandboxd`` executable is."""

from pathlib import Path

__all__ = ["sandboxd_path"]


def sandboxd_path() -> Path:
    """Return the absolute path of the static ``sandboxd`` executable of this machine's architecture.

    Raises :class:`FileNotFoundError` when the package was installed without it.
    """
    path = Path(__file__).resolve().parent / "_bin" / "sandboxd"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: install agent-sandbox-engine again (in a checkout: make setup)")
    return path
