"""What the engine is asked for: the body that creates a sandbox's container, and the workspace's volume. Pure.

The rules
---------
* Nothing secret goes in: no value of the sandbox's environment, no key. The engine shows the body to all its users.
* The image's entrypoint, command, user and health check are replaced, and each of its labels is emptied: a proxy or an
  updater on the engine's host would do what they say with the sandbox. Its volumes would be writable and without a
  limit, so each becomes one that is read-only and shows what the image has there; below ``/tmp`` and ``/run``, which
  are memory, an empty one of memory. An engine makes one for each path that has no mount of exactly that name, so one
  within a mount of the sandbox's own, the workspace above all, is refused.
* Every file system that a guest can write has a size: ``/tmp`` and ``/dev/shm`` count against its memory, ``/run`` is
  small and root's, ``/workspace`` is on the sandbox's own disk where the engine shares this host's files.
* ``/proc`` cannot be given ``hidepid`` through an engine: the daemon is seen there, and shows nothing.
* The engine restarts no container by itself: a sandbox that ended is told as stopped, and started when asked for.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_sandbox.types import WORKSPACE, SandboxSpec

LABEL = "io.agent-sandbox"
PREFIX = "asb-"
SETUP = "-setup"
"""What the name of an environment's messenger has behind it."""
PRIVATE = "/run/agent-sandbox"
"""The daemon's directory, of mode 0700: its socket, and its configuration where the host's files are shared."""
DAEMON, DELIVERED = "/run/sandboxd", "/run/sandboxd.d"
"""The daemon's executable, and the directory that holds it where it is delivered in a volume."""
DAEMON_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SETPCAP")
CPU_PERIOD_US = 100_000
NOFILE = 20_000
"""Descriptors of a process: enough for servers and build tools, and a bound on loops that close "all" of them."""
PTYS = 128
"""Pseudoterminals of a sandbox. All sandboxes and containers of a host share some 3,000 (``kernel.pty.max``)."""
SHM_MB = 64
MIB = 1024 * 1024
MASKED = (
    *(f"/proc/{name}" for name in ("acpi", "asound", "bus", "cmdline", "diskstats", "fs", "interrupts", "kcore")),
    *(f"/proc/{name}" for name in ("key-users", "keys", "latency_stats", "locks", "partitions", "sched_debug", "scsi")),
    *(f"/proc/{name}" for name in ("timer_list", "timer_stats")),
    *("/sys/block", "/sys/class/block", "/sys/dev/block", "/sys/devices/virtual/block"),
    *("/sys/devices/virtual/powercap", "/sys/firmware"),
    *(
        f"/sys/fs/{name}"
        for name in ("bcache", "bpf", "btrfs", "erofs", "ext4", "f2fs", "fuse", "nfs", "pstore", "xfs")
    ),
)
"""More than engines mask by default: each sandbox's disk is a device of the host, so what lists devices, mounted file
systems and locks tells of all sandboxes; the kernel's command line may hold what is the host's alone."""
READ_ONLY = ("/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_OWN = (WORKSPACE, PRIVATE, DAEMON, DELIVERED, "/dev/pts")
"""Where a sandbox has mounts of its own."""
_LOG_BYTES = "64k"


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount of a container: a host's path (``bind``), the name of a ``volume``, or memory (``tmpfs``).

    A volume that ``copies`` begins with what the image has there. ``size`` and ``mode`` are those of memory, in bytes.
    """

    kind: str
    source: str
    target: str
    read_only: bool = False
    copies: bool = False
    size: int = 0
    mode: int = 0

    def body(self, labels: Mapping[str, str]) -> dict[str, Any]:
        """As the engine's API writes it."""
        body = {"Type": self.kind, "Source": self.source, "Target": self.target, "ReadOnly": self.read_only}
        if self.kind == "tmpfs":
            body["TmpfsOptions"] = {"SizeBytes": self.size, "Mode": self.mode}
        elif self.kind == "bind":
            body["BindOptions"] = {"Propagation": "rprivate"}
        else:
            body["VolumeOptions"] = {"Labels": dict(labels), "NoCopy": not self.copies}
        return body


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of one environment are.

    ``daemon_args`` is the daemon's argv; ``network`` the name of a network, or ``none``; ``mounts`` come beside the
    image's volumes, whose paths are ``volumes``; ``runtime`` is empty for the engine's own choice; ``tmpfs`` are more
    of them, with their options; ``masked`` are more paths that nobody is to see; ``image_labels`` are the names of the
    image's labels.
    """

    image_id: str
    instance: str
    daemon_args: tuple[str, ...]
    mounts: tuple[Mount, ...]
    volumes: tuple[str, ...] = ()
    network: str = "none"
    runtime: str = ""
    tmpfs: Mapping[str, str] | None = None
    pids_on_host: bool = True
    masked: tuple[str, ...] = ()
    image_labels: tuple[str, ...] = ()


def labels(id: str, instance: str) -> dict[str, str]:
    """The labels by which a resource and its server are known."""
    return {f"{LABEL}.managed": "true", f"{LABEL}.id": id, f"{LABEL}.instance": instance}


def filters(instance: str, id: str | None = None) -> dict[str, list[str]]:
    """What finds the resources of a server, or of one environment of it, in the engine's listings."""
    wanted = [f"{LABEL}.managed=true", f"{LABEL}.instance={instance}"]
    return {"label": [*wanted, f"{LABEL}.id={id}"] if id is not None else wanted}


def container(id: str, spec: SandboxSpec, layout: Layout, seccomp: Mapping[str, Any]) -> dict[str, Any]:
    """The body that creates the container of environment ``id``."""
    marks = labels(id, layout.instance)
    own = {mount.target for mount in layout.mounts}
    mounts = [*_image_volumes(id, spec, layout.volumes, own), *layout.mounts]
    return {
        "Image": layout.image_id,
        "Hostname": "sandbox",
        "User": "0:0",
        "WorkingDir": "/",
        "Entrypoint": list(layout.daemon_args),
        "Cmd": [],
        "Env": [],
        "Labels": {**dict.fromkeys(layout.image_labels, ""), **marks},
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "HostConfig": {
            **limits(spec, pids_on_host=layout.pids_on_host),
            "Runtime": layout.runtime,
            "Init": False,
            "Privileged": False,
            "CapDrop": ["ALL"],
            "CapAdd": list(DAEMON_CAPABILITIES),
            "SecurityOpt": ["no-new-privileges:true", f"seccomp={json.dumps(docker_seccomp(seccomp))}"],
            "ReadonlyRootfs": spec.read_only_rootfs,
            "NetworkMode": layout.network,
            "IpcMode": "private",
            "CgroupnsMode": "private",
            "PidMode": "",
            "UTSMode": "",
            "MaskedPaths": [*MASKED, *layout.masked],
            "ReadonlyPaths": list(READ_ONLY),
            "RestartPolicy": {"Name": "no"},
            "LogConfig": {"Type": "json-file", "Config": {"max-size": _LOG_BYTES, "max-file": "1"}},
            "Mounts": [mount.body(marks) for mount in mounts],
            "Tmpfs": {**tmpfs(spec), **(layout.tmpfs or {})},
            "Sysctls": sysctls(spec, layout),
        },
    }


def messenger(
    id: str, image_id: str, instance: str, mounts: Sequence[Mount], image_labels: Sequence[str] = ()
) -> dict[str, Any]:
    """The body of a container that is never started: what is uploaded to it lands in its volumes."""
    marks = labels(id, instance)
    return {
        "Image": image_id,
        "Entrypoint": ["/nothing"],
        "Cmd": [],
        "User": "0:0",
        "Labels": {**dict.fromkeys(image_labels, ""), **marks},
        "HostConfig": {
            "NetworkMode": "none",
            "CapDrop": ["ALL"],
            "Mounts": [mount.body(marks) for mount in mounts],
        },
    }


def limits(spec: SandboxSpec, *, pids_on_host: bool) -> dict[str, Any]:
    """The limits of ``spec`` as the engine takes them; memory counts without swap."""
    half = max(1, spec.memory_mb // 2)
    found: dict[str, Any] = {
        "Memory": spec.memory_mb * MIB,
        "MemorySwap": spec.memory_mb * MIB,
        "CpuPeriod": CPU_PERIOD_US,
        "CpuQuota": max(1000, round(spec.cpus * CPU_PERIOD_US)),
        "ShmSize": min(SHM_MB, half) * MIB,
        "Ulimits": [
            {"Name": "nofile", "Soft": NOFILE, "Hard": NOFILE},
            # core(5): 1 keeps the kernel from starting a handler as the host's root, which 0 does not.
            {"Name": "core", "Soft": 1, "Hard": 1},
        ],
    }
    if pids_on_host:
        found["PidsLimit"] = spec.pids_limit
    else:  # gVisor counts by user; what it counts by control group, many that fork at once pass by
        found["Ulimits"].append({"Name": "nproc", "Soft": spec.pids_limit, "Hard": spec.pids_limit})
    return found


def misplaced_volume(volumes: Sequence[str]) -> tuple[str, str] | None:
    """Find a volume of an image that lies within a mount of the sandbox's own; give both, or None where all is well."""
    for volume in map(_normal, volumes):
        for own in _OWN:
            if volume != own and _within(volume, own):
                return volume, own
    return None


def unasked_volumes(seen: Mapping[str, Any]) -> list[str]:
    """Where a container, as the engine shows it, has volumes that nobody asked for: no limit holds in them."""
    found = seen.get("Mounts") or ()
    volumes = [one for one in found if isinstance(one, dict) and one.get("Type") == "volume"]
    return [str(one.get("Destination")) for one in volumes if not str(one.get("Name")).startswith(PREFIX)]


def _image_volumes(id: str, spec: SandboxSpec, volumes: Sequence[str], own: Collection[str]) -> list[Mount]:
    """What stands in the place of an image's volumes; none where the sandbox has a mount of exactly that name."""
    found = []
    for path in dict.fromkeys(map(_normal, volumes)):
        if path in own or path in tmpfs(spec):
            continue
        if _within(path, "/tmp"):
            found.append(Mount("tmpfs", "", path, size=_tmp_mb(spec) * MIB, mode=0o1777))
        elif _within(path, "/run"):
            found.append(Mount("tmpfs", "", path, size=MIB, mode=0o755))
        else:
            found.append(Mount("volume", f"{PREFIX}{id}-{len(found)}", path, read_only=True, copies=True))
    return found


def tmpfs(spec: SandboxSpec) -> dict[str, str]:
    """The memory file systems and their options."""
    return {
        "/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={_tmp_mb(spec)}m",
        "/run": "rw,noexec,nosuid,nodev,mode=0755,size=1m",
    }


def _tmp_mb(spec: SandboxSpec) -> int:
    return min(spec.tmp_mb, max(1, spec.memory_mb // 2))


def sysctls(spec: SandboxSpec, layout: Layout) -> dict[str, str]:
    """The settings of the sandbox's own network: low ports and echo requests are free. gVisor has its own."""
    if layout.runtime:
        return {}
    return {"net.ipv4.ip_unprivileged_port_start": "0", "net.ipv4.ping_group_range": f"{spec.gid} {spec.gid}"}


def docker_seccomp(profile: Mapping[str, Any]) -> dict[str, Any]:
    """An OCI profile as the engine reads it.

    Engines before 23 have no default error, and answer EPERM where a program waits for ENOSYS to go another way; the
    one call for which that matters today is named (libc's own ``clone3``).
    """
    missing = {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": profile["defaultErrnoRet"]}
    return {**profile, "syscalls": [*profile["syscalls"], missing]}


def layered_volume(
    id: str, instance: str, lowers: Sequence[str], upper: str, work: str, options: str
) -> dict[str, Any]:
    """The body that creates a workspace's volume: an overlay, which the engine mounts with the container.

    :class:`ValueError` for paths that mount options cannot hold; those here are made for it.
    """
    for path in (*lowers, upper, work):
        if not re.fullmatch(r"/[A-Za-z0-9._/-]+", path):
            raise ValueError(f"{path!r} cannot be a mount option")
    text = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work},{options},nosuid,nodev"
    return {
        "Name": PREFIX + id,
        "Driver": "local",
        "DriverOpts": {"type": "overlay", "device": "overlay", "o": text},
        "Labels": labels(id, instance),
    }


def pty_volume(id: str, instance: str) -> dict[str, Any]:
    """The body that creates a volume of pseudoterminals: what the engine itself mounts there has no limit."""
    options = f"newinstance,ptmxmode=0666,mode=0620,max={PTYS},nosuid,noexec"
    return {
        "Name": pty_volume_name(id),
        "Driver": "local",
        "DriverOpts": {"type": "devpts", "device": "devpts", "o": options},
        "Labels": labels(id, instance),
    }


def pty_volume_name(id: str) -> str:
    """Its name."""
    return f"{PREFIX}{id}-pts"


def named_volume(name: str, id: str, instance: str) -> dict[str, Any]:
    """The body that creates a plain volume of the engine's."""
    return {"Name": name, "Driver": "local", "Labels": labels(id, instance)}


def workspace_mount(kind: str, source: str) -> Mount:
    """The mount of ``/workspace``."""
    return Mount(kind, source, WORKSPACE)


def _normal(path: str) -> str:
    """A volume's path as an engine takes it."""
    return posixpath.normpath("/" + path.lstrip("/"))


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
