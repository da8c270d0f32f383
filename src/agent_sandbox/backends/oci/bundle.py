"""The OCI bundle of a sandbox: what asked, what image and which paths, turned into a config.json value. Pure.

The rules
---------
* Nothing secret goes in: no value of the sandbox's environment, no key. The runtime copies the file into its state.
* ``/proc`` hides other users' processes (``hidepid=2``), so a command does not see the daemon; the daemon sees
  them by its group, the sandbox's root's. What tells about the host or changes it is masked or read-only, the list that
  container engines use, and more.
* Every file system that a guest can write has a size: ``/tmp`` and ``/dev/shm`` count against its memory,
  ``/workspace`` is on its own disk, the others are small and root's.
* With a range of host ids of its own, the sandbox's root is nobody on the host, and so is its user. Devices
  are then bound from the host by the runtime, since no such root may make one.
* Control groups are shown read-only, in a namespace of their own: a program reads its limits there and sees nothing
  else. ``/sys/fs`` holds nothing but them: other files there name the host's disks.
* The network is the sandbox's own, also its low ports and echo requests.
* The daemon is bound from the host into ``/run``, a file system of the sandbox's own, so images need no place for it.
* Mounts are made in the order of the list; one that covers a part of another comes after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_sandbox.backends.linux.idranges import SIZE
from agent_sandbox.types import WORKSPACE, LimitName, SandboxSpec

LABEL = "io.agent-sandbox"
DAEMON = "/run/sandboxd"
PRIVATE = "/run/asb"
"""Where the daemon finds the directory that is its own, where it gets no descriptors."""
LISTEN_FD, CONFIG_FD = 3, 4
DAEMON_CAPABILITIES = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
)
CPU_PERIOD_US = 100_000
"""The kernel's default period; with it the smallest quota, 1 ms, is a hundredth of a core."""
NOFILE = 20_000
"""Descriptors of a process: enough for servers and build tools, and a bound on loops that close "all" of them."""
CORE = 1
"""No core dump at all. 0 would still start the host's handler, as the host's root, where ``core_pattern`` is a program
(core(5)); with 1 the kernel gives up before."""
PTYS = 128
"""Pseudoterminals of a sandbox. All sandboxes and containers of a host share some 3,000 (``kernel.pty.max``)."""
SHM_MB = 64
"""Size of /dev/shm, at most half of the memory: the default of container engines."""
MIB = 1024 * 1024
_UNLIMITED = 1 << 64
"""Limits are unsigned for the kernel and the runtime; taken by this modulus, Python's -1 is the largest."""

MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/cmdline",
    "/proc/diskstats",
    "/proc/fs",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/key-users",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/locks",
    "/proc/partitions",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/block",
    "/sys/class/block",
    "/sys/dev/block",
    "/sys/devices/virtual/block",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
"""More than engines mask by default: each sandbox's disk is a device of the host, so what lists devices, mounted file
systems and locks tells of all sandboxes; the kernel's command line may hold what is the host's alone."""
READ_ONLY = ("/proc/bus", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Bind:
    """A host path shown read-only in the sandbox, without set-id bits and devices."""

    source: Path
    destination: str


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of one environment are on the host.

    ``daemon_args`` follow the daemon's path; ``binds`` come from the image; ``enforces`` are the limits that the kernel
    can keep and ``has_swap_limit`` says whether it limits swap with memory: the runtime fails on others; ``private`` is
    shown at :data:`PRIVATE`, and ``limits`` are those of each process by prlimit(1)'s names where the runtime's own do
    not reach it. ``user_namespace`` is the path of the one to join, None where the sandbox shares the host's ids, and
    ``ids`` the first host id in it.
    """

    rootfs: Path
    workspace: Path
    sandboxd: Path
    cgroups_path: str
    daemon_args: tuple[str, ...]
    binds: tuple[Bind, ...] = ()
    enforces: frozenset[LimitName] = frozenset({"cpus", "memory", "pids"})
    has_swap_limit: bool = True
    user_namespace: str | None = None
    ids: int = 0
    private: Path | None = None
    limits: Mapping[str, int] | None = None


def config(
    id: str, instance: str, spec: SandboxSpec, layout: Layout, seccomp: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Build the config.json of environment ``id``; its limits are those of ``spec``."""
    capabilities = list(DAEMON_CAPABILITIES)
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "annotations": labels(id, instance),
        "root": {"path": str(layout.rootfs), "readonly": spec.read_only_rootfs},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": [DAEMON, *layout.daemon_args],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            "noNewPrivileges": True,
            **_process_limits(layout),
        },
        "mounts": mounts(spec, layout),
        "linux": {
            **namespaces(layout),
            "sysctl": {
                "net.ipv4.ip_unprivileged_port_start": "0",
                "net.ipv4.ping_group_range": f"{spec.gid} {spec.gid}",
            },
            "cgroupsPath": layout.cgroups_path,
            "resources": resources(spec, layout.enforces, has_swap_limit=layout.has_swap_limit),
            **({} if seccomp is None else {"seccomp": dict(seccomp)}),
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
            "rootfsPropagation": "rprivate",
        },
    }


def daemon_of(config: Mapping[str, Any]) -> Path:
    """The host's path of the daemon's executable in a config.json."""
    return next(Path(mount["source"]) for mount in config["mounts"] if mount["destination"] == DAEMON)


def namespaces(layout: Layout) -> dict[str, Any]:
    """The namespaces of a sandbox, all of them its own, and how its ids map to the host's where it has its own."""
    new = [{"type": name} for name in ("pid", "ipc", "uts", "mount", "network", "cgroup")]
    if layout.user_namespace is None:
        return {"namespaces": new}
    mapped = [{"containerID": 0, "hostID": layout.ids, "size": SIZE}]
    return {
        "namespaces": [*new, {"type": "user", "path": layout.user_namespace}],
        "uidMappings": mapped,
        "gidMappings": mapped,
    }


def process_limits(host_nofile: int) -> dict[str, int]:
    """The limits of each process by prlimit(1)'s names; ``host_nofile`` is the host's hard limit of descriptors."""
    return {"nofile": min(NOFILE, host_nofile % _UNLIMITED), "core": CORE}


def _process_limits(layout: Layout) -> dict[str, Any]:
    if layout.limits is None:
        return {}
    rows = [{"type": f"RLIMIT_{name.upper()}", "hard": most, "soft": most} for name, most in layout.limits.items()]
    return {"rlimits": rows}


def labels(id: str, instance: str) -> dict[str, str]:
    """The labels by which an environment and its server are known."""
    return {f"{LABEL}.managed": "true", f"{LABEL}.id": id, f"{LABEL}.instance": instance}


def resources(spec: SandboxSpec, enforces: frozenset[LimitName], *, has_swap_limit: bool) -> dict[str, Any]:
    """The limits of ``spec`` as OCI resources; memory counts without swap, devices are the default set."""
    found: dict[str, Any] = {"devices": [{"allow": False, "access": "rwm"}]}
    if "memory" in enforces:
        limit = spec.memory_mb * MIB
        found["memory"] = {"limit": limit, "swap": limit} if has_swap_limit else {"limit": limit}
    if "cpus" in enforces:
        found["cpu"] = {"quota": max(1000, round(spec.cpus * CPU_PERIOD_US)), "period": CPU_PERIOD_US}
    if "pids" in enforces:
        found["pids"] = {"limit": spec.pids_limit}
    return found


def mounts(spec: SandboxSpec, layout: Layout) -> list[dict[str, Any]]:
    """The mounts of a sandbox, in the order in which they are made."""
    half = max(1, spec.memory_mb // 2)
    tmp, shm = min(spec.tmp_mb, half), min(SHM_MB, half)
    return [
        *(_bind(bind.source, bind.destination, "ro") for bind in layout.binds),
        _mount("proc", "/proc", "nosuid", "nodev", "noexec", "hidepid=2", "gid=0"),
        _mount("sysfs", "/sys", "nosuid", "nodev", "noexec", "ro"),
        _mount("tmpfs", "/sys/fs", "nosuid", "nodev", "noexec", "ro", "mode=0555", "size=64k"),
        _mount("cgroup", "/sys/fs/cgroup", "nosuid", "nodev", "noexec", "ro"),
        _mount("tmpfs", "/dev", "nosuid", "noexec", "mode=0755", "size=1m"),
        _mount("devpts", "/dev/pts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", f"max={PTYS}"),
        _mount("tmpfs", "/dev/shm", "nosuid", "nodev", "noexec", "mode=1777", f"size={shm}m"),
        _mount("tmpfs", "/tmp", "nosuid", "nodev", "mode=1777", f"size={tmp}m"),
        _mount("tmpfs", "/run", "nosuid", "nodev", "noexec", "mode=0755", "size=1m"),
        _bind(layout.sandboxd, DAEMON, "ro"),
        _bind(layout.workspace, WORKSPACE, "rw"),
        *([] if layout.private is None else [_bind(layout.private, PRIVATE, "rw")]),
    ]


def _mount(kind: str, destination: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": kind, "options": list(options)}


def _bind(source: Path, destination: str, mode: str) -> dict[str, Any]:
    options: Sequence[str] = ("bind", mode, "nosuid", "nodev")
    return {"destination": destination, "type": "bind", "source": str(source), "options": list(options)}
