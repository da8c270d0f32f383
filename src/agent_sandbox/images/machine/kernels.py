"""The kernel that microVMs boot and its first root file system, prepared once by ``agent-sandbox image kernel``.

::

    MACHINE_DIR/kernel/
    ├── current                        the name of the one that new machines boot
    └── <version>-<digest>/            one kernel; the digest is that of the image and the modules
        ├── kernel.json                what it is, and the sizes and order of what is here
        ├── vmlinuz
        ├── vmlinux                    the same, unpacked, where that can be started
        ├── modules/<name>.ko          those that are needed, unpacked
        └── initramfs-<digest>.cpio    with the daemon of that digest

The first root file system is made again for every new daemon, without a command: packing it takes milliseconds and no
process. It holds ``/init`` (the daemon), ``/modules/*.ko``, ``/modules/order`` (a file name a line) and empty
directories to mount on. It is not compressed: that would cost the machine more than it saves the disk.

When changing what is in it: count ``_FORMAT`` up.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import logging
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_sandbox.errors import BackendError, InvalidRequestError, LimitExceededError
from agent_sandbox.images.machine import bzimage, cpio, debian, files, modules, vmlinux
from agent_sandbox.images.room import Room
from agent_sandbox.images.sources import Progress, ZstdError, decompressed

_log = logging.getLogger(__name__)

COMMAND = "agent-sandbox image kernel"
_FORMAT = 1
_VERSION = 2
_KEPT_KERNELS, _KEPT_INITRAMFS = 4, 8
"""Of 70 and 3 MB each: what has gone only costs preparing it again."""
_JSON_BYTES = 1 << 20
_MAX_MODULE_FILES = 50_000
_SUFFIXES = (".ko", ".ko.xz", ".ko.gz", ".ko.zst")
_DIGEST_CHARACTERS = 12
_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel to boot. ``name`` is of its content, modules and daemon included: the same name, the same machine.

    ``version`` is what ``uname -r`` says, ``modules`` what is loaded, in order, and ``source`` where it came from.
    """

    vmlinuz: Path
    vmlinux: Path | None
    initramfs: Path
    version: str
    name: str
    modules: tuple[str, ...]
    source: str

    @property
    def image(self) -> Path:
        """What a monitor starts: the unpacked kernel, with which a machine has booted sooner, where there is one."""
        return self.vmlinux or self.vmlinuz


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a preparation has made. ``checked_config``: the kernel's configuration was at hand, and checked."""

    version: str
    name: str
    modules: tuple[str, ...]
    source: str
    checked_config: bool


class Kernels:
    """The kernels below ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._daemons: dict[tuple[str, int, int, int], str] = {}

    def find(self, sandboxd: Path) -> Kernel:
        """The current kernel with this daemon. Cheap: without a process, and a few milliseconds for a new daemon.

        :class:`BackendError` when none is prepared, or it is damaged; the message says what to run.
        """
        home, facts = self._current()
        daemon = self._digest(sandboxd)
        initramfs = home / f"initramfs-{daemon}.cpio"
        names = tuple(facts["modules"])
        if not initramfs.is_file():
            with _told("packing the first root file system"):
                self._pack(home, names, sandboxd, initramfs)
        unpacked = home / "vmlinux" if "vmlinux" in facts["sizes"] else None
        name = f"{home.name}-{daemon}"
        return Kernel(home / "vmlinuz", unpacked, initramfs, facts["kernel"], name, names, facts["source"])

    def describe(self) -> str:
        """The current kernel's version and source. Errors as of :meth:`find`."""
        _, facts = self._current()
        return f"{facts['kernel']} from {facts['source']}"

    def sweep(self) -> None:
        """Clear what killed builders left."""
        files.sweep(self._directory)

    def _current(self) -> tuple[Path, dict[str, Any]]:
        try:
            name = (self._directory / "current").read_text().strip()
        except FileNotFoundError:
            raise BackendError(f"no kernel for microVMs is prepared; run: {COMMAND}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise BackendError(f"{self._directory} cannot be read; run: sudo {COMMAND}") from error
        home = self._directory / name
        if "/" in name or not name or name.startswith("."):
            raise _damaged(self._directory)
        try:
            with (home / "kernel.json").open("rb") as file:
                facts = json.loads(file.read(_JSON_BYTES))
            if facts["version"] != _VERSION:
                raise BackendError(f"the kernel in {home} is of another version of agent-sandbox; run: {COMMAND}")
            for file, size in facts["sizes"].items():
                if (home / file).stat().st_size != size:
                    raise _damaged(home)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(home) from error
        return home, facts

    def _digest(self, sandboxd: Path) -> str:
        """Of the daemon's content, which is read once."""
        try:
            state = sandboxd.stat()
            key = (os.fspath(sandboxd), state.st_ino, state.st_size, state.st_mtime_ns)
            if key not in self._daemons:
                whole = hashlib.sha256(b"initramfs %d\n" % _FORMAT + sandboxd.read_bytes())
                self._daemons = {key: whole.hexdigest()[:_DIGEST_CHARACTERS]}
            return self._daemons[key]
        except OSError as error:
            raise BackendError(f"the daemon {sandboxd} cannot be read: {error.strerror}") from error

    def _pack(self, home: Path, names: tuple[str, ...], sandboxd: Path, target: Path) -> None:
        kept = {name: (home / "modules" / name).read_bytes() for name in names}
        content = initramfs(sandboxd.read_bytes(), kept)
        with files.building(home):
            with files.aside(home) as new:
                files.write(new, content)
                new.rename(target)
            files.sync(home)
            _evict(sorted(home.glob("initramfs-*.cpio"), key=_age), _KEPT_INITRAMFS)

    def prepare(
        self,
        kernel: Path | None = None,
        module_directory: Path | None = None,
        progress: Progress = lambda phase, done, total: None,
    ) -> Prepared:
        """Make a kernel the current one: Debian's newest, or ``kernel`` with the modules built for it.

        ``kernel`` is a bzImage, or a kernel package of Debian's; ``module_directory`` the ``/lib/modules/VERSION`` of
        an image. :class:`InvalidRequestError` for what no microVM can boot, with what is missing;
        :class:`LimitExceededError` when the disk has no room; :class:`BackendError` when nothing can be fetched.
        Nothing is left behind by a failure, and the current kernel stays what it was.
        """
        with (
            _told("preparing the kernel"),
            files.building(self._directory),
            files.aside(self._directory) as scratch,
        ):
            scratch.mkdir(mode=0o700)
            found = self._prepare(kernel, module_directory, scratch, progress)
            _evict_kernels(self._directory, found.name)
        return found

    def _prepare(
        self, kernel: Path | None, module_directory: Path | None, scratch: Path, progress: Progress
    ) -> Prepared:
        if (module_directory is not None) and kernel is None:
            raise InvalidRequestError("--modules goes with --kernel: the kernel that these modules were built for")
        if kernel is None or _is_package(kernel):
            if module_directory is not None:
                raise InvalidRequestError(f"{kernel} is a package, which has its own modules: leave --modules out")
            (unpacked := scratch / "unpacked").mkdir()
            package = kernel or debian.fetch(scratch, progress)
            debian.extract(package, unpacked, progress)
            source, image, tree = package.name.removesuffix(".deb"), unpacked / "vmlinuz", unpacked / "modules"
            config = unpacked / "config"
        else:
            if module_directory is None or not module_directory.is_dir():
                raise InvalidRequestError(
                    f"--modules is missing, or no directory: the modules of {kernel.name}, as in /lib/modules/VERSION; "
                    "modules_install makes one for a kernel without modules, too"
                )
            if not kernel.is_file():
                raise InvalidRequestError(f"{kernel} is no file")
            source, image, tree, config = os.fspath(kernel.absolute()), kernel, module_directory, Path()
        version = bzimage.read_version(image)
        if not config.name:
            config = kernel.parent / f"config-{version}" if kernel is not None else config
        checked = config.is_file()
        if checked:
            modules.check_config(_read(config, _CONFIG_BYTES).decode(errors="replace"), version)
        collected = _collect(tree, version)
        progress("check", len(collected), len(collected))
        return self._keep(scratch / "kernel", image, version, collected, source, checked)

    def _keep(
        self, new: Path, image: Path, version: str, collected: Mapping[str, bytes], source: str, checked: bool
    ) -> Prepared:
        """Put the kernel into place and make it the current one."""
        content = _read(image, bzimage.MAX_BYTES)
        images = {"vmlinuz": content} | ({"vmlinux": kernel} if (kernel := vmlinux.unpack(content)) else {})
        Room(self._directory, "the kernel").check(sum(map(len, (*images.values(), *collected.values()))))
        whole = hashlib.sha256(content)
        for name, module in collected.items():
            whole.update(b"\n%s %d\n" % (name.encode(), len(module)) + module)
        name = f"{version}-{whole.hexdigest()[:_DIGEST_CHARACTERS]}"
        new.mkdir(mode=0o700)
        (new / "modules").mkdir(mode=0o700)
        for file, part in images.items():
            files.write(new / file, part)
        for file, module in collected.items():
            files.write(new / "modules" / file, module)
        sizes = {file: len(part) for file, part in images.items()}
        sizes |= {f"modules/{file}": len(module) for file, module in collected.items()}
        facts = {"version": _VERSION, "kernel": version, "source": source, "modules": list(collected), "sizes": sizes}
        files.write(new / "kernel.json", json.dumps(facts, indent=1).encode())
        for directory in (new / "modules", new):
            files.sync(directory)
        home = self._directory / name
        if not _same(home, new, ["kernel.json", *sizes]):
            with files.aside(self._directory) as damaged:
                if home.exists():
                    home.rename(damaged)
                new.rename(home)
        with files.aside(self._directory) as pointer:
            files.write(pointer, name.encode() + b"\n")
            pointer.replace(self._directory / "current")
        files.sync(self._directory)
        _log.info("kernel %s from %s is prepared: %s", version, source, ", ".join(collected) or "everything built in")
        return Prepared(version, name, tuple(collected), source, checked)


def initramfs(daemon: bytes, kept: Mapping[str, bytes]) -> bytes:
    """The first root file system with ``daemon`` as its init and ``kept`` as its modules, which are in load order."""
    entries = [cpio.directory(name) for name in ("dev", "proc", "sys", "root", "modules")]
    entries.append(cpio.file("init", daemon, 0o755))
    entries.append(cpio.file("modules/order", "".join(f"{name}\n" for name in kept).encode()))
    entries += [cpio.file(f"modules/{name}", content) for name, content in kept.items()]
    return cpio.pack(entries)


def _collect(tree: Path, version: str) -> dict[str, bytes]:
    """The modules below ``tree`` that are needed, unpacked, by their file names, in load order."""
    paths = _module_files(tree)
    builtin = frozenset[str]()
    if (tree / "modules.builtin").is_file():
        builtin = modules.parse_builtin(_read(tree / "modules.builtin", _CONFIG_BYTES).decode(errors="replace"))
    contents: dict[str, bytes] = {}

    def read(name: str) -> modules.Module | None:
        if name not in paths:
            return None
        contents[name] = _module(paths[name])
        try:
            module = modules.parse_module(contents[name])
        except ValueError as error:
            raise InvalidRequestError(f"the module {paths[name].name} cannot be used: {error}") from error
        if module.kernel != version:
            raise InvalidRequestError(
                f"the module {paths[name].name} is of kernel {module.kernel or '(none)'}, and the kernel is {version}; "
                f"name the directory /lib/modules/{version} with --modules"
            )
        return module

    found = modules.plan(builtin, read)
    modules.check(found, version)
    return {f"{name}.ko": contents[name] for name in found.order}


def _module_files(tree: Path) -> dict[str, Path]:
    """The files of modules below ``tree``, by the modules' names; no link is followed."""
    found: dict[str, Path] = {}
    for top, _, names in os.walk(tree):
        for name in names:
            stem = name.partition(".")[0]
            if name.endswith(_SUFFIXES):
                found.setdefault(modules.plain(stem), Path(top, name))
        if len(found) > _MAX_MODULE_FILES:
            raise InvalidRequestError(
                f"{tree} holds more than {_MAX_MODULE_FILES} modules: it is no /lib/modules/VERSION"
            )
    return found


def _module(path: Path) -> bytes:
    """The content of a module, unpacked."""
    try:
        with path.open("rb") as raw, decompressed(raw) as stream:
            content = stream.read(modules.MAX_MODULE_BYTES + 1)
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError, ZstdError) as error:
        raise InvalidRequestError(f"the module {path.name} is damaged: {error}") from error
    if len(content) > modules.MAX_MODULE_BYTES:
        raise InvalidRequestError(f"the module {path.name} is larger than {modules.MAX_MODULE_BYTES >> 20} MiB")
    return content


def _same(there: Path, new: Path, names: Iterable[str]) -> bool:
    """Whether a kernel that is there, and may be in use, has the very files of a new one."""
    try:
        return all((there / name).read_bytes() == (new / name).read_bytes() for name in names)
    except OSError:
        return False


def _read(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise InvalidRequestError(f"{path.name} is larger than {most >> 20} MiB")
    return content


def _is_package(path: Path) -> bool:
    return path.is_file() and path.name.endswith(".deb")


def _damaged(home: Path) -> BackendError:
    return BackendError(f"the kernel in {home} is damaged; run: {COMMAND}")


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _evict(oldest_first: list[Path], kept: int) -> None:
    for path in oldest_first[:-kept]:
        if not files.in_use(path):
            files.remove(path)


def _evict_kernels(directory: Path, current: str) -> None:
    homes = sorted((path for path in directory.iterdir() if (path / "vmlinuz").is_file()), key=_age)
    for home in homes[:-_KEPT_KERNELS]:
        if home.name != current and not any(files.in_use(path) for path in home.iterdir() if path.is_file()):
            files.remove(home)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise LimitExceededError(f"{what} failed: the disk is full") from error
        raise BackendError(f"{what} failed: {error.filename or ''} {error.strerror or error}") from error
