"""The checkout cache: states laid out once on this host, for workspaces that are mounted over them.

::

    <directory>/<name>/tree/       the layer: a whole state, or what makes the layer below look like this one
    <directory>/<name>/done        the completion marker (JSON), written when the layer is whole
    <directory>/.new-*, .gone-*    being built, being removed
    <directory>/.old-<name>-*      what a layer that was built anew had been

Strategy
--------
* A state is found by a name made of its root entry and of the owner that its files get. Nothing here is the only
  copy of anything: what is damaged, half-built or evicted is built again from the store.
* A new state is laid out as a difference over the nearest ancestor that is here and that the store still has (a
  layer may outlive its state: ``Store.forget``), so that a rollback or fork costs what changed. One on which the
  stack would become too deep is passed over for an older one, since cold lookups grow with each layer; without any,
  the state is laid out whole.
* Overlay layers must never change under a mount. So a layer is built beside and renamed, a lease keeps it while
  somebody mounts it, and ``in_use`` (asked before anything is removed) names those that environments stand on.
* A marker counts if it was written after the layer was synced, or in this boot. Syncing is done behind the caller's
  back, since what a power loss takes can be built again.
* Eviction is by age of use, when the layers together are larger than ``max_bytes``. Renaming makes a layer gone;
  the slow removal comes after, outside the lock.
* A layer of which somebody removed a part is built anew in its place. What is left of the old one stays as long as
  ``in_use`` names the place: something may be mounted over it.

Everything blocks; threads may share one cache, processes may not.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from agent_sandbox.errors import BackendError, StoreDamagedError, StoreError
from agent_sandbox.store import walk
from agent_sandbox.store.objects import Entry, encode_root
from agent_sandbox.store.ports import Engine, Objects, Options
from agent_sandbox.store.trees import disk_bytes, remove_tree

MAX_DEPTH = 8
"""Layers of one stack: a cold lookup in the lowest of 10 takes 41 µs, in a single one 25 (seen on one machine)."""
MAX_ANCESTORS = 64
"""How far back the nearest state is looked for; each step reads one commit."""
VERSION = 1
_OLD = ".old-"

_libc = ctypes.CDLL(None, use_errno=True)
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS, _FS_TOPDIR_FL = 0x80086601, 0x40086602, 0x00020000
"""Of linux/fs.h, on machines of 64 bits."""


@dataclass(slots=True)
class _Layer:
    name: str
    below: str | None
    depth: int
    size: int = 0
    synced: bool = False
    used: int = 0
    leases: int = 0


@dataclass(slots=True)
class _Building:
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Checkouts:
    """A cache of layers in ``directory``, which it makes. One object for each directory.

    ``reading`` keeps gc away from the store while a layer is built. ``in_use`` gives the paths of layers that
    environments have; when it raises, nothing is removed.
    """

    def __init__(
        self,
        directory: Path,
        objects: Objects,
        engine: Engine,
        *,
        reading: Callable[[], AbstractContextManager[None]],
        max_bytes: int,
        in_use: Callable[[], set[str]],
    ) -> None:
        self._directory = directory
        self._objects = objects
        self._engine = engine
        self._reading = reading
        self._max_bytes = max_bytes
        self._in_use = in_use
        self._lock = threading.Lock()
        self._tidying = threading.Lock()
        self._layers: dict[str, _Layer] = {}
        self._building: dict[str, _Building] = {}
        self._clock = 0
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def start(self) -> None:
        """Find the layers of earlier processes; remove what is half-built or cannot be trusted.

        Where nobody knows what is in use, only that goes which a power loss may have torn.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _spread_subdirectories(self._directory)
        markers = {path.name: self._marker(path) for path in self._directory.iterdir() if path.is_dir()}
        kept = {name: layer for name, layer in markers.items() if layer is not None}
        for name in [name for name, layer in kept.items() if not self._stands(layer, kept)]:
            del kept[name]
        try:
            in_use = self._in_use()
        except BackendError:  # some backend is down
            in_use = {str(self.path(name)) for name in markers}
        for name in markers:
            if name.startswith(_OLD):  # tidy sees to it
                continue
            # What runs stands on layers of this boot. One that a power loss may have torn is better missing than wrong.
            torn = self._is_torn(self._directory / name)
            if name not in kept and (torn or str(self.path(name)) not in in_use):
                self._discard(self._directory / name)
        self._layers = {name: layer for name, layer in kept.items() if layer is not None}

    def path(self, name: str) -> Path:
        """Where the files of a layer are."""
        return self._directory / name / "tree"

    @contextmanager
    def lease(self, commit: bytes, owner: tuple[int, int]) -> Iterator[tuple[Path, ...]]:
        """Give the layers that show a commit's state, the topmost first, building what is missing.

        Files without a recorded owner get ``owner``. The layers stay while the block runs, and as long as ``in_use``
        names them. Raises what the engine's checkout does, and :class:`StoreDamagedError`.
        """
        stack = self._hold(commit, owner)
        try:
            yield tuple(self.path(layer.name) for layer in stack)
        finally:
            with self._lock:
                for layer in stack:
                    layer.leases -= 1

    def size(self) -> int:
        """What the layers take on the disk, in bytes, as far as it was counted."""
        with self._lock:
            return sum(layer.size for layer in self._layers.values())

    def tidy(self) -> int:
        """Sync and count new layers, evict the oldest above ``max_bytes``; return how many went. One at a time."""
        with self._tidying:
            return self._tidy()

    # ---- within ----------------------------------------------------------------------------------------------------

    def _tidy(self) -> int:
        with self._lock:
            fresh = [layer for layer in self._layers.values() if not layer.synced]
            for layer in fresh:
                layer.leases += 1
        for layer in fresh:
            try:
                layer.size = self._sync(layer)
                if self._layers.get(layer.name) is layer:  # and was not built anew meanwhile
                    layer.synced = True
                    self._mark(self._directory / layer.name, layer)
            except FileNotFoundError:  # somebody removed it
                self._forget(layer)
            finally:
                with self._lock:
                    layer.leases -= 1
        with self._lock:
            idle = [(layer.used, layer) for layer in self._layers.values() if not layer.leases]
        # Asked after that: who has no lease now either has an environment that is known already, or takes a lease anew.
        old = [path for path in self._directory.iterdir() if path.name.startswith(_OLD)]
        in_use = self._in_use() if old or self.size() > self._max_bytes else set()
        gone = [path for path in old if str(self.path(path.name.removeprefix(_OLD).partition("-")[0])) not in in_use]
        evicted = 0
        with self._lock:
            below = {layer.below for layer in self._layers.values()}
            total = sum(layer.size for layer in self._layers.values())
            for used, layer in sorted(idle, key=lambda item: item[0]):
                if total <= self._max_bytes:
                    break
                if layer.leases or layer.used != used or layer.name in below:
                    continue
                if str(self.path(layer.name)) in in_use or layer.name not in self._layers:
                    continue
                aside = self._directory / f".gone-{secrets.token_hex(8)}"
                with suppress(FileNotFoundError):  # somebody removed it
                    (self._directory / layer.name).rename(aside)
                    gone.append(aside)
                del self._layers[layer.name]
                total -= layer.size
                evicted += 1
        for aside in gone:
            remove_tree(aside)
        return evicted

    def _forget(self, layer: _Layer) -> None:
        with self._lock:
            if self._layers.get(layer.name) is layer:
                del self._layers[layer.name]

    def _hold(self, commit: bytes, owner: tuple[int, int]) -> list[_Layer]:
        root = walk.commit(self._objects, commit).root
        name = _name(root, owner)
        while True:
            with self._lock:
                stack = self._stack(name)
                if stack:
                    self._clock += 1
                    for layer in stack:
                        layer.leases += 1
                        layer.used = self._clock
                    return stack
                building = self._building.get(name)
                mine = building is None
                if building is None:
                    building = self._building[name] = _Building()
            if mine:
                try:
                    with self._reading():
                        self._build(name, commit, root, owner)
                except BaseException as error:
                    building.error = error
                    raise
                finally:
                    with self._lock:
                        del self._building[name]
                    building.done.set()
            else:
                building.done.wait()
                if building.error is not None:
                    raise StoreError("the state could not be laid out for somebody else just now; try again")

    def _stack(self, name: str) -> list[_Layer]:
        """The layers from ``name`` down, or none when one is missing; what somebody removed is forgotten."""
        stack: list[_Layer] = []
        at: str | None = name
        while at is not None:
            layer = self._layers.get(at)
            if layer is None or not self.path(at).is_dir():
                self._layers.pop(name, None)
                return []
            stack.append(layer)
            at = layer.below
        return stack

    def _build(self, name: str, commit: bytes, root: Entry, owner: tuple[int, int]) -> None:
        base = self._nearest(commit, owner)
        aside = self._directory / f".new-{secrets.token_hex(8)}"
        tree = aside / "tree"
        try:
            tree.mkdir(parents=True)
            aside.chmod(0o700)
            options = Options(owners=root.owner is not None, owner=owner)
            with _opened(tree) as descriptor:
                if base is None:
                    self._engine.checkout(root, descriptor, self._objects, options=options)
                else:
                    self._engine.difference(base[0], root, descriptor, self._objects, options=options)
            layer = _Layer(name, None, 1) if base is None else _Layer(name, base[1].name, base[1].depth + 1)
            self._mark(aside, layer)
            with self._lock:
                target = self._directory / name
                if target.exists():  # somebody removed a part of it, or of what it stands on
                    target.rename(self._directory / f"{_OLD}{name}-{secrets.token_hex(8)}")
                aside.rename(target)
                self._layers[name] = layer
        except BaseException:
            remove_tree(aside)
            raise
        finally:
            if base is not None:
                with self._lock:
                    for layer in base[2]:
                        layer.leases -= 1

    def _nearest(self, commit: bytes, owner: tuple[int, int]) -> tuple[Entry, _Layer, list[_Layer]] | None:
        """The newest ancestor by first parents whose state is here, not forgotten and not too deep, held by leases."""
        at = commit
        for _ in range(MAX_ANCESTORS):
            try:
                note = walk.commit(self._objects, at)
            except StoreDamagedError:
                return None
            assert note.root.content is not None, "a root is a directory"
            is_kept = self._objects.locate([note.root.content]) != [None]  # what is below it is there with it
            with self._lock:
                stack = self._stack(_name(note.root, owner))
                if is_kept and stack and stack[0].depth < MAX_DEPTH:
                    for layer in stack:
                        layer.leases += 1
                    return note.root, stack[0], stack
            if not note.parents:
                return None
            at = note.parents[0]
        return None

    @property
    def unsynced(self) -> bool:
        """Whether there are layers that a power loss would take; :meth:`tidy` syncs them."""
        with self._lock:
            return any(not layer.synced for layer in self._layers.values())

    def _is_torn(self, path: Path) -> bool:
        """Whether a layer is known to be of an earlier boot, and was not synced in it."""
        try:
            with (path / "done").open("rb") as file:
                found: Any = json.loads(file.read(4_096))
            return found["synced"] is False and found["boot"] != self._boot
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _marker(self, path: Path) -> _Layer | None:
        try:
            with (path / "done").open("rb") as file:
                found: Any = json.loads(file.read(4_096))
            if found["version"] != VERSION or not (found["synced"] is True or found["boot"] == self._boot):
                return None
            below, depth, size = found["below"], found["depth"], found["bytes"]
            if not (below is None or isinstance(below, str)) or not isinstance(depth, int) or not isinstance(size, int):
                return None
            if not (path / "tree").is_dir():
                return None
            return _Layer(path.name, below, depth, size, bool(found["synced"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _stands(self, layer: _Layer | None, layers: dict[str, _Layer]) -> bool:
        for _ in range(MAX_DEPTH):
            if layer is None:
                return False
            if layer.below is None:
                return True
            layer = layers.get(layer.below)
        return False

    def _mark(self, place: Path, layer: _Layer) -> None:
        marker = {
            "version": VERSION,
            "boot": self._boot,
            "synced": layer.synced,
            "below": layer.below,
            "depth": layer.depth,
            "bytes": layer.size,
        }
        aside = place / ".done.new"
        with aside.open("w") as file:
            json.dump(marker, file)
            file.flush()
            if layer.synced:
                os.fsync(file.fileno())
        aside.replace(place / "done")

    def _sync(self, layer: _Layer) -> int:
        """Bring a layer to the disk and count its bytes there."""
        total = disk_bytes(self._directory / layer.name)
        with _opened(self._directory) as descriptor:
            if _libc.syncfs(descriptor) != 0:
                raise OSError(ctypes.get_errno(), "the checkouts could not be synced")
        return total

    def _discard(self, path: Path) -> None:
        aside = self._directory / f".gone-{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            path.rename(aside)
        remove_tree(aside)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _spread_subdirectories(directory: Path) -> None:
    """Have ext4 begin each new layer in another part of the disk (``chattr +T``), where the file system has that.

    Beside files that were removed a short while ago, as evicted layers are, ext4 looks at each of their inodes again
    for every file that is made, since it does not use them for a while: 10,000 files then took 6 s instead of one.
    """
    with suppress(OSError), _opened(directory) as descriptor:
        flags = bytearray(8)
        fcntl.ioctl(descriptor, _FS_IOC_GETFLAGS, flags)
        wanted = int.from_bytes(flags[:4], sys.byteorder) | _FS_TOPDIR_FL
        fcntl.ioctl(descriptor, _FS_IOC_SETFLAGS, wanted.to_bytes(4, sys.byteorder) + bytes(4))


def _name(root: Entry, owner: tuple[int, int]) -> str:
    """The name of a state's layer: of everything that its files show."""
    return blake3(b"%d:%d\n" % owner + encode_root(root)).hexdigest()[:40]
