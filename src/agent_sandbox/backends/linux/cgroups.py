"""Control groups as this host has them: where a sandbox's are, what they count, how they are frozen and killed.

Three layouts exist, and runc chooses among them by what is mounted on ``/sys/fs/cgroup``:

* **unified** (v2): one hierarchy there, all controllers in it.
* **legacy** (v1): one hierarchy for each controller.
* **hybrid**: legacy, plus an empty v2 hierarchy beside it, in which ``cgroup.kill`` and ``cgroup.freeze`` work.

A sandbox has the same path in every hierarchy. Reading the layout and the files' formats is pure; the rest touches
``/sys/fs/cgroup`` only, blocks for microseconds, and treats what has gone as gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent_sandbox.backends.linux.mounts import unescape
from agent_sandbox.types import LimitName

ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""Above this a v1 memory limit means "none": the kernel shows the largest multiple of a page."""
_SOCKETS = "memory.kmem.tcp.limit_in_bytes"
"""Of v1; in spite of its name for UDP, too. Runtimes no longer set it, and without it socket buffers count nowhere."""
_PERIOD_US, _LEAST_QUOTA_US = 100_000, 1_000
"""The kernel's usual period, and its smallest quota (Documentation/scheduler/sched-bwc.rst)."""
_FREEZE_SECONDS = 2.0
_HOLD_SECONDS = 5.0
"""How long stopping every process may take: a little more than a slow disk keeps one waiting."""
_REMOVE_SECONDS = 2.0
_ROUNDS = 1000
"""Kill rounds where there is no ``cgroup.kill``: with frozen processes one is enough; a bound, not a tuning."""


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """The mounted hierarchies: ``unified`` is the v2 one or None, ``legacy`` the v1 ones by controller.

    ``controllers`` are those that v2 can give to its groups; ``is_v2`` says whether runc uses it for limits.
    """

    unified: Path | None
    legacy: Mapping[str, Path] = field(default_factory=dict)
    controllers: frozenset[str] = frozenset()
    is_v2: bool = False

    def directory(self, controller: str) -> Path | None:
        """The root of the hierarchy that has ``controller``, or None."""
        if self.is_v2:
            return self.unified if controller in self.controllers else None
        return self.legacy.get(controller)

    def all(self) -> list[Path]:
        """Every distinct hierarchy root."""
        roots = [*self.legacy.values(), *([self.unified] if self.unified else [])]
        return list(dict.fromkeys(roots))


def parse_hierarchies(mountinfo: str, controllers: str) -> Hierarchies:
    """Read the layout out of a mount table and the root's ``cgroup.controllers``.

    Of several mounts of one hierarchy the one below ``/sys/fs/cgroup`` counts, where runc looks.
    """
    unified: Path | None = None
    legacy: dict[str, Path] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if len(fields) < 5 or not tail or tail[0] not in ("cgroup", "cgroup2"):
            continue
        point = Path(unescape(fields[4]))
        if point != ROOT and ROOT not in point.parents:
            continue
        if tail[0] == "cgroup2":
            unified = point
            continue
        for option in (tail[2] if len(tail) > 2 else "").split(","):
            if option not in ("rw", "ro") and not option.startswith("release_agent"):
                legacy[option.removeprefix("name=")] = point
    return Hierarchies(unified, legacy, frozenset(controllers.split()), is_v2=unified == ROOT)


def find_hierarchies() -> Hierarchies:
    """Read this host's layout."""
    mountinfo = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
    return parse_hierarchies(mountinfo, _read(ROOT / "cgroup.controllers") or "")


def enforced(hierarchies: Hierarchies) -> frozenset[LimitName]:
    """The limits that this kernel keeps through control groups, found by reading alone."""
    limits: set[LimitName] = set()
    if hierarchies.is_v2:
        names: dict[str, LimitName] = {"cpu": "cpus", "memory": "memory", "pids": "pids"}
        limits = {limit for controller, limit in names.items() if controller in hierarchies.controllers}
        return frozenset(limits)
    probes: tuple[tuple[str, str, LimitName], ...] = (
        ("cpu", "cpu.cfs_quota_us", "cpus"),
        ("memory", "memory.limit_in_bytes", "memory"),
        ("pids", "cgroup.procs", "pids"),
    )
    for controller, name, limit in probes:
        root = hierarchies.directory(controller)
        if root is not None and (root / name).exists():
            limits.add(limit)
    return frozenset(limits)


def has_swap_limit(hierarchies: Hierarchies) -> bool:
    """Whether swap is limited together with memory."""
    root = hierarchies.directory("memory")
    if root is None:
        return False
    return hierarchies.is_v2 or (root / "memory.memsw.limit_in_bytes").exists()


def has_socket_limit(hierarchies: Hierarchies) -> bool:
    """Whether the memory of sockets is limited: within memory in v2, by a number of its own in v1."""
    root = hierarchies.directory("memory")
    if root is None:
        return False
    return hierarchies.is_v2 or (root / _SOCKETS).exists()


def parse_counter(text: str | None, key: str) -> int | None:
    """The value of ``key`` in a file of ``key value`` lines; None where it is not there."""
    for line in (text or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isascii() and value.isdigit():
            return int(value)
    return None


class Groups:
    """The control groups of one environment: ``path`` below every hierarchy, as in config.json, with leading slash."""

    def __init__(self, hierarchies: Hierarchies, path: str) -> None:
        self._hierarchies = hierarchies
        self._path = path.lstrip("/")

    def _file(self, controller: str, name: str) -> Path | None:
        root = self._hierarchies.directory(controller)
        return None if root is None else root / self._path / name

    def oom_kills(self) -> int | None:
        """How many processes the kernel killed for this environment's memory limit; None when it cannot be known."""
        name = "memory.events" if self._hierarchies.is_v2 else "memory.oom_control"
        return parse_counter(_read(self._file("memory", name)), "oom_kill")

    def limits(self) -> dict[str, float | int | None]:
        """The limits as the kernel holds them now: cpus, memory_bytes, memory_swap_bytes, pids; None is unlimited."""
        if self._hierarchies.is_v2:
            quota, _, period = (_read(self._file("cpu", "cpu.max")) or "").strip().partition(" ")
            swap = _number(_read(self._file("memory", "memory.swap.max")))
            memory = _number(_read(self._file("memory", "memory.max")))
            total = None if memory is None or swap is None else memory + swap
        else:
            quota = (_read(self._file("cpu", "cpu.cfs_quota_us")) or "").strip()
            period = (_read(self._file("cpu", "cpu.cfs_period_us")) or "").strip()
            memory = _number(_read(self._file("memory", "memory.limit_in_bytes")))
            total = _number(_read(self._file("memory", "memory.memsw.limit_in_bytes")))
        cpus = int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None
        pids = _number(_read(self._file("pids", "pids.max")))
        return {"cpus": cpus, "memory_bytes": memory, "memory_swap_bytes": total, "pids": pids}

    def usage(self) -> dict[str, float | int | None]:
        """What is used now: memory_bytes as it counts against the limit, cpu_seconds since the start; None: unknown."""
        if self._hierarchies.is_v2:
            memory = _number(_read(self._file("memory", "memory.current")))
            used = parse_counter(_read(self._file("cpu", "cpu.stat")), "usage_usec")
            return {"memory_bytes": memory, "cpu_seconds": None if used is None else used / 1e6}
        memory = _number(_read(self._file("memory", "memory.usage_in_bytes")))
        used = _number(_read(self._file("cpuacct", "cpuacct.usage")))
        return {"memory_bytes": memory, "cpu_seconds": None if used is None else used / 1e9}

    def limit_sockets(self, size: int) -> None:
        """Let buffers of internet sockets take ``size`` bytes where they are not part of memory.

        It holds for sockets that are made afterwards. :class:`OSError` when a kernel that has the limit refuses it.
        """
        path = self._file("memory", _SOCKETS)
        if not self._hierarchies.is_v2 and path is not None and path.exists():
            path.write_text(str(size))

    def make(self, cpus: float, memory: int) -> None:
        """Make the group, for a process that no runtime puts there: ``cpus`` cores and ``memory`` bytes at most.

        A limit that this kernel does not keep is left out, as :func:`enforced` says. :class:`OSError` when it refuses.
        """
        quota, period = str(max(_LEAST_QUOTA_US, round(cpus * _PERIOD_US))), str(_PERIOD_US)
        if self._hierarchies.is_v2:
            values = {"cpu": {"cpu.max": f"{quota} {period}"}, "memory": {"memory.max": str(memory)}}
            self._pass_down([name for name in values if name in self._hierarchies.controllers])
        else:
            values = {
                "cpu": {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota},
                "cpuacct": {},
                "freezer": {},
                "memory": {"memory.limit_in_bytes": str(memory)},
                "systemd": {},  # which ends what it finds there when the server's unit stops
            }
            for name in values:
                if (root := self._hierarchies.directory(name)) is not None:
                    (root / self._path).mkdir(parents=True, exist_ok=True)
        if self._hierarchies.unified is not None:
            (self._hierarchies.unified / self._path).mkdir(parents=True, exist_ok=True)
        for controller, files in values.items():
            for file, value in files.items():
                path = self._file(controller, file)
                if path is not None and path.exists():
                    path.write_text(value)

    def _pass_down(self, controllers: list[str]) -> None:
        """Let the groups above have ``controllers``, down to this one."""
        above = self._hierarchies.unified
        assert above is not None
        for name in self._path.split("/"):
            (above / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in controllers))
            above /= name
            above.mkdir(exist_ok=True)

    def add(self, pid: int) -> None:
        """Put a process, with all its threads, into the group, which was made. :class:`OSError` when it has gone."""
        for directory in self.directories():
            (directory / "cgroup.procs").write_text(str(pid))

    def allow_memory(self, size: int) -> None:
        """Raise the limit of memory, and that of memory and swap together, to ``size`` bytes."""
        names = ("memory.max",) if self._hierarchies.is_v2 else ("memory.memsw.limit_in_bytes", "memory.limit_in_bytes")
        for name in names:
            path = self._file("memory", name)
            if path is not None and path.exists():
                path.write_text(str(size))

    def show(self) -> None:
        """Let everybody look into the group's directories. Nobody writes through that: the files have their own modes.

        A sandbox's root is nobody here, and the runtime makes the directories with its caller's umask.
        """
        for directory in self.directories():
            directory.chmod(0o755)

    def directories(self) -> list[Path]:
        """The group's directories that exist, one for each hierarchy."""
        return [path for root in self._hierarchies.all() if (path := root / self._path).is_dir()]

    def processes(self) -> set[int]:
        """The processes in any hierarchy, of subgroups as well."""
        return {pid for directory in self.directories() for pid in _members(directory)}

    def frozen(self) -> set[int]:
        """The processes that :meth:`freeze` stops, of subgroups as well."""
        state, unified = self._file("freezer", "freezer.state"), self._hierarchies.unified
        directory = state.parent if state is not None else unified / self._path if unified is not None else None
        return set() if directory is None else set(_members(directory))

    def kill(self) -> None:
        """Send SIGKILL to every process, so that none can fork its way out. They may take a moment to be gone."""
        unified = self._hierarchies.unified
        everybody = self.processes()
        group = None if unified is None else unified / self._path
        if group is not None and everybody <= set(_members(group)) and _write(group / "cgroup.kill", "1"):
            self.thaw()
            return
        if everybody:
            self._freeze_and_kill()

    def freeze(self) -> bool:
        """Stop every process where it is, those of subgroups as well; False when some did not stop within seconds.

        Call :meth:`thaw` in any case. A process that waits for a disk stops once it has waited.
        """
        deadline = time.monotonic() + _HOLD_SECONDS
        state = self._file("freezer", "freezer.state")
        if state is not None:
            while _write(state, "FROZEN") and (_read(state) or "").strip() != "FROZEN":
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
            return (_read(state) or "").strip() == "FROZEN"
        if self._hierarchies.unified is None:
            return False
        group = self._hierarchies.unified / self._path
        if not _write(group / "cgroup.freeze", "1"):
            return False
        while parse_counter(_read(group / "cgroup.events"), "frozen") != 1:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def thaw(self) -> None:
        """Let every process go on. Nothing happens where none was stopped."""
        freezer = self._file("freezer", "freezer.state")
        if freezer is not None:
            _write(freezer, "THAWED")
        if self._hierarchies.unified is not None:
            _write(self._hierarchies.unified / self._path / "cgroup.freeze", "0")

    def _freeze_and_kill(self) -> None:
        state = self._file("freezer", "freezer.state")
        deadline = time.monotonic() + _FREEZE_SECONDS
        while state is not None and time.monotonic() < deadline:
            if not _write(state, "FROZEN") or (_read(state) or "").strip() == "FROZEN":
                break
            time.sleep(0.001)
        killed: set[int] = set()
        for _ in range(_ROUNDS):
            new = self.processes() - killed
            if not new:
                break
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            killed |= new
        self.thaw()

    def remove(self) -> None:
        """Remove the group's directories, waiting for processes that are about to go. :class:`OSError` if they stay."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        for directory in self.directories():
            for child in (*_subgroups(directory), directory):
                while not _rmdir(child):
                    if time.monotonic() > deadline:
                        raise OSError(errno.EBUSY, "a control group still holds processes", str(child))
                    time.sleep(0.005)


def _subgroups(directory: Path) -> Iterator[Path]:
    for parent, names, _ in os.walk(directory, topdown=False):
        for name in names:
            yield Path(parent) / name


def _members(directory: Path) -> Iterator[int]:
    for path in (directory, *_subgroups(directory)):
        for line in (_read(path / "cgroup.procs") or "").split():
            if line.isdigit() and line != "0":
                yield int(line)


def _rmdir(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text()
    except OSError:
        return None


def _write(path: Path, value: str) -> bool:
    try:
        path.write_text(value)
    except OSError:
        return False
    return True


def _number(text: str | None) -> int | None:
    value = (text or "").strip()
    if not value.isdigit() or int(value) >= UNLIMITED:
        return None
    return int(value)
