"""What ``doctor`` asks, as pure functions over one :class:`Probe`: no file, process or clock is touched here.

``fail`` means that a backend which is asked for cannot run; ``warn`` that something is missing which only some things
need. Every finding that is not ``ok`` says how to mend it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "warn", "fail"]

OLDEST_KERNEL = (5, 6)
"""openat2(2) and pidfds; older ones miss what the daemon's file work stands on."""
OLDEST_RUNC = (1, 1)
"""The oldest that this project is tested with."""
OLDEST_RUNSC = 20240101
"""The date of the oldest gVisor that the gvisor backend takes."""
_SHARED = "without, sandboxes share one user id of the host"
LOW_DISK_BYTES = 5 << 30
CONTROLLERS = ("cpu", "memory", "pids")
_LOOP_USERS = "backends without machines"
CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_SETUID": 7, "CAP_SETGID": 6, "CAP_CHOWN": 0, "CAP_MKNOD": 27}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was seen of a machine. An empty text, a ``None`` or an absent key means "not there"."""

    system: str = "Linux"
    kernel: str = ""
    euid: int = 0
    capabilities: int = 0
    filesystems: frozenset[str] = frozenset()
    cgroup_v1: frozenset[str] = frozenset()
    cgroup_v2: frozenset[str] | None = None
    loop_control: bool = False
    tools: Mapping[str, str] = field(default_factory=dict)
    max_user_namespaces: int | None = None
    idmap_problem: str | None = None
    overlay_problem: str | None = None
    workspaces: str = "auto"
    systemd: Literal["absent", "running", "running with our unit"] = "absent"
    kvm: Literal["absent", "no access", "usable"] = "absent"
    kvm_problem: str = ""
    accelerated: bool = False
    qemu: str = ""
    qemu_problem: str = ""
    runc_wanted: bool = True
    loops_wanted: bool = True
    qemu_wanted: bool = False
    firecracker: str = ""
    firecracker_problem: str = ""
    firecracker_wanted: bool = False
    machine_kernel: str = ""
    machine_kernel_problem: str = ""
    allow_tcg: bool = False
    docker: str = ""
    docker_problem: str = ""
    docker_wanted: bool = False
    disk_free_bytes: int = 0
    min_free_mb: int = 512
    sandboxd: str = ""
    sandboxd_error: str = ""
    installs_sandboxd: str = "pip install 'agent-sandbox[server]'"
    data_dir: str = ""
    data_dir_mode: int | None = None
    data_dir_uid: int | None = None
    backends: tuple[str, ...] = ("runc",)
    known_backends: tuple[str, ...] = ("runc",)
    unknown_variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def microvms_wanted(self) -> bool:
        """Whether a backend of microVMs is asked for."""
        return self.qemu_wanted or self.firecracker_wanted


@dataclass(frozen=True)
class Finding:
    """One answer: ``remedy`` is empty where there is nothing to mend."""

    check: str
    status: Status
    detail: str
    remedy: str = ""


def version(text: str) -> tuple[int, ...]:
    """Return the first dotted number in a text, as numbers; empty where there is none."""
    found = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def kernel(probe: Probe) -> Finding:
    """Linux, and new enough."""
    if probe.system != "Linux":
        return Finding(
            "kernel", "fail", probe.system, "the embedded backend needs Linux: use a server on a Linux machine"
        )
    if version(probe.kernel) < OLDEST_KERNEL:
        oldest = ".".join(map(str, OLDEST_KERNEL))
        return Finding("kernel", "fail", f"Linux {probe.kernel}", f"a kernel of at least {oldest} is needed")
    return Finding("kernel", "ok", f"Linux {probe.kernel}")


def root(probe: Probe) -> Finding:
    """Root, with the capabilities that a runtime uses."""
    if probe.euid != 0:
        return Finding(
            "root", "fail", f"uid {probe.euid}", "run with sudo, or set AGENT_SANDBOX_URL to a server elsewhere"
        )
    missing = [name for name, bit in CAPABILITIES.items() if not probe.capabilities >> bit & 1]
    if missing:
        remedy = "this is a restricted container: start it with these capabilities, or use the machine itself"
        return Finding("root", "fail", f"root without {', '.join(missing)}", remedy)
    return Finding("root", "ok", "root, with the capabilities needed")


def cgroups(probe: Probe) -> Finding:
    """The controllers that hold the limits, in either version."""
    there = probe.cgroup_v1 | (probe.cgroup_v2 or frozenset())
    layout = "v2" if not probe.cgroup_v1 else "v1" if probe.cgroup_v2 is None else "v1 and v2 (hybrid)"
    missing = [name for name in CONTROLLERS if name not in there]
    if not there:
        return Finding("cgroups", "fail", "none mounted", "mount them: mount -t cgroup2 none /sys/fs/cgroup")
    if missing:
        remedy = f"enable them: kernel parameter cgroup_enable={missing[0]}, or cgroup.subtree_control of the root (v2)"
        return Finding("cgroups", "fail", f"{layout}, without {', '.join(missing)}", remedy)
    return Finding("cgroups", "ok", f"{layout}, with {', '.join(CONTROLLERS)}")


def overlayfs(probe: Probe) -> Finding:
    """Writable root filesystems stand on it."""
    if "overlay" in probe.filesystems:
        return Finding("overlayfs", "ok", "in the kernel")
    return Finding("overlayfs", "warn", "not loaded", "for writable root filesystems: modprobe overlay")


def workspaces(probe: Probe) -> Finding:
    """How a rollback or fork makes a workspace; only root can try overlays."""
    cost = "rollback and fork copy the whole workspace"
    if probe.workspaces == "copy":
        return Finding("workspaces", "ok", f"copied, by AGENT_SANDBOX_WORKSPACES; {cost}")
    if probe.overlay_problem is None:
        return Finding("workspaces", "warn", "not tried", "run doctor as root, which alone can try overlays")
    if not probe.overlay_problem:
        return Finding("workspaces", "ok", "overlays over shared layers")
    if probe.workspaces == "overlay":
        remedy = "set AGENT_SANDBOX_WORKSPACES to auto or copy"
        return Finding("workspaces", "fail", f"no overlays: {probe.overlay_problem}", remedy)
    remedy = f"load overlayfs (modprobe overlay), in a machine and not in a container; without, {cost}"
    return Finding("workspaces", "warn", f"copied: {probe.overlay_problem}", remedy)


def loop_devices(probe: Probe) -> Finding:
    """Disk limits are loop-mounted ext4 images."""
    if not probe.loop_control:
        remedy = "modprobe loop (in a container: pass the devices in)"
        return _for_whom(probe.loops_wanted, "loop devices", "no /dev/loop-control", remedy, _LOOP_USERS)
    if "ext4" not in probe.filesystems:
        return _for_whom(probe.loops_wanted, "loop devices", "the kernel has no ext4", "modprobe ext4", _LOOP_USERS)
    return Finding("loop devices", "ok", "with ext4")


def runc(probe: Probe) -> Finding:
    """The runtime of the embedded backend."""
    found = probe.tools.get("runc", "")
    if not found:
        return _for_whom(probe.runc_wanted, "runc", "not found", "apt-get install runc", "the runc backend")
    if version(found) < OLDEST_RUNC:
        remedy = f"at least {'.'.join(map(str, OLDEST_RUNC))} is needed: apt-get install runc"
        return _for_whom(probe.runc_wanted, "runc", found, remedy, "the runc backend")
    return Finding("runc", "ok", found)


def runsc(probe: Probe) -> Finding:
    """The runtime of the gvisor backend, which only those who ask for it need."""
    found = probe.tools.get("runsc", "")
    remedy = "for AGENT_SANDBOX_BACKENDS=gvisor: apt-get install -t bookworm-backports runsc, or gVisor's own package"
    if not found:
        return Finding("runsc", "warn", "not found", remedy)
    date = re.search(r"\d{8}", found)
    if date is None or int(date[0]) < OLDEST_RUNSC:
        return Finding("runsc", "warn", found, f"a release of at least {OLDEST_RUNSC} is needed; {remedy}")
    return Finding("runsc", "ok", found)


def e2fsprogs(probe: Probe) -> Finding:
    """Makes the disk of a sandbox."""
    found = probe.tools.get("mke2fs", "")
    if not found:
        return Finding("e2fsprogs", "fail", "no mke2fs", "apt-get install e2fsprogs")
    return Finding("e2fsprogs", "ok", found)


def user_namespaces(probe: Probe) -> Finding:
    """Each sandbox has host ids of its own where they can be made."""
    if not probe.max_user_namespaces:
        return Finding("user namespaces", "warn", "switched off", f"sysctl user.max_user_namespaces=10000; {_SHARED}")
    return Finding("user namespaces", "ok", f"up to {probe.max_user_namespaces}")


def idmapped_mounts(probe: Probe) -> Finding:
    """What shows the root filesystem under a sandbox's own ids; only root can try them."""
    if probe.idmap_problem is None:
        return Finding("idmapped mounts", "warn", "not tried", "run doctor as root, which alone can try them")
    if probe.idmap_problem:
        remedy = f"Linux 5.19 on ext4, xfs or btrfs has them: put AGENT_SANDBOX_DATA_DIR on one; {_SHARED}"
        return Finding("idmapped mounts", "warn", probe.idmap_problem, remedy)
    return Finding("idmapped mounts", "ok", "for /usr and the data directory")


def image_tools(probe: Probe) -> Finding:
    """Packed images are unpacked by them."""
    missing = [name for name in ("skopeo", "umoci") if not probe.tools.get(name)]
    if missing:
        remedy = f"for OCI images, docker archives and registries: apt-get install {' '.join(missing)}"
        return Finding("image tools", "warn", f"no {' and no '.join(missing)}", remedy)
    return Finding("image tools", "ok", "; ".join(probe.tools[name] for name in ("skopeo", "umoci")))


def systemd(probe: Probe) -> Finding:
    """Keeps a server running; sandboxes do not need it."""
    if probe.systemd == "absent":
        return Finding("systemd", "ok", "not running; only needed to keep a server running")
    ours = "with agent-sandbox.service" if probe.systemd == "running with our unit" else "without agent-sandbox.service"
    return Finding("systemd", "ok", f"running, {ours}")


def qemu(probe: Probe) -> Finding:
    """Runs microVMs, which nobody needs who does not ask for them."""
    if probe.qemu:
        return Finding("qemu", "ok", probe.qemu + ("" if probe.qemu_wanted else "; not in AGENT_SANDBOX_BACKENDS"))
    problem, _, remedy = probe.qemu_problem.partition("; ")
    problem, remedy = problem or "not found", remedy or "apt-get install qemu-system-x86"
    return _for_whom(probe.qemu_wanted, "qemu", problem, remedy, "the qemu backend")


def firecracker(probe: Probe) -> Finding:
    """Runs microVMs as well, for those who ask for it."""
    if probe.firecracker:
        unused = "" if probe.firecracker_wanted else "; not in AGENT_SANDBOX_BACKENDS"
        return Finding("firecracker", "ok", probe.firecracker + unused)
    problem, _, remedy = probe.firecracker_problem.rpartition("; ")
    problem, remedy = problem or "not found", remedy or "put firecracker and jailer of one release into PATH"
    return _for_whom(probe.firecracker_wanted, "firecracker", problem, remedy, "the firecracker backend")


def kvm(probe: Probe) -> Finding:
    """Without it microVMs are emulated."""
    if probe.accelerated:
        return Finding("kvm", "ok", "/dev/kvm runs machines" + _unused(probe))
    if probe.kvm == "usable" and not (probe.qemu or probe.firecracker):
        return Finding("kvm", "ok", "/dev/kvm opens; only QEMU or Firecracker could try it")
    problem = probe.kvm_problem or f"/dev/kvm: {probe.kvm}"
    remedy = (
        "use a machine with virtualization switched on (a virtual one: nested), and load kvm_intel or kvm_amd; "
        "AGENT_SANDBOX_ALLOW_TCG=true lets QEMU emulate microVMs, which is slow and no security boundary"
    )
    if probe.allow_tcg and probe.qemu_wanted and not probe.firecracker_wanted:
        return Finding("kvm", "warn", f"microVMs are emulated: {problem}", remedy)
    return _for_microvms(probe, "kvm", problem, remedy)


def erofs_utils(probe: Probe) -> Finding:
    """Makes the root filesystems of microVMs."""
    found = probe.tools.get("mkfs.erofs", "")
    if found:
        return Finding("erofs-utils", "ok", found + _unused(probe))
    return _for_microvms(probe, "erofs-utils", "no mkfs.erofs", "apt-get install erofs-utils")


def machine_kernel(probe: Probe) -> Finding:
    """What microVMs boot."""
    if probe.machine_kernel:
        return Finding("microVM kernel", "ok", probe.machine_kernel + _unused(probe))
    problem, _, remedy = probe.machine_kernel_problem.partition("; run: ")
    return _for_microvms(probe, "microVM kernel", problem or "none prepared", remedy or "agent-sandbox image kernel")


def _unused(probe: Probe) -> str:
    return "" if probe.microvms_wanted else "; neither qemu nor firecracker is in AGENT_SANDBOX_BACKENDS"


def _for_microvms(probe: Probe, check: str, problem: str, remedy: str) -> Finding:
    return _for_whom(probe.microvms_wanted, check, problem, remedy, "microVMs")


def _for_whom(wanted: bool, check: str, problem: str, remedy: str, whom: str) -> Finding:
    if wanted:
        return Finding(check, "fail", problem, remedy)
    return Finding(check, "ok", f"{problem}; only {whom} need{'' if whom.endswith('s') else 's'} it")


def docker(probe: Probe) -> Finding:
    """The engine of the docker backend, which nobody needs who does not ask for it."""
    if probe.docker_problem and probe.docker_wanted:
        problem, _, remedy = probe.docker_problem.partition("; ")
        return Finding("docker", "fail", problem, remedy or "choose another backend in AGENT_SANDBOX_BACKENDS")
    if probe.docker:
        unused = "" if probe.docker_wanted else "; not in AGENT_SANDBOX_BACKENDS"
        return Finding("docker", "ok", probe.docker + unused)
    return Finding("docker", "ok", "no engine; not needed")


def disk(probe: Probe) -> Finding:
    """Room for workspaces and snapshots."""
    text = f"{probe.disk_free_bytes >> 20} MiB free for {probe.data_dir}"
    if probe.min_free_mb:
        text += f"; no sandbox is made below {probe.min_free_mb} MiB"
    if probe.disk_free_bytes < probe.min_free_mb << 20:
        remedy = "free some space, or set AGENT_SANDBOX_DATA_DIR to a larger disk, or AGENT_SANDBOX_MIN_FREE_MB lower"
        return Finding("disk", "fail", text, remedy)
    if probe.disk_free_bytes < LOW_DISK_BYTES:
        remedy = "a sandbox may use up to AGENT_SANDBOX_DEFAULT_DISK_MB; free some space"
        return Finding("disk", "warn", text, remedy)
    return Finding("disk", "ok", text)


def daemon(probe: Probe) -> Finding:
    """The sandboxd binary."""
    if probe.sandboxd:
        return Finding("sandboxd", "ok", probe.sandboxd)
    return Finding("sandboxd", "fail", probe.sandboxd_error, probe.installs_sandboxd)


def data_directory(probe: Probe) -> Finding:
    """Of its owner alone."""
    if probe.data_dir_mode is None:
        return Finding("data directory", "ok", f"{probe.data_dir} is made with the first sandbox")
    if probe.data_dir_uid != probe.euid:
        return Finding(
            "data directory",
            "fail",
            f"{probe.data_dir} is of uid {probe.data_dir_uid}",
            f"chown {probe.euid} {probe.data_dir}",
        )
    if probe.data_dir_mode & 0o077:
        return Finding(
            "data directory",
            "warn",
            f"{probe.data_dir} has mode {probe.data_dir_mode:o}",
            f"chmod 700 {probe.data_dir}",
        )
    return Finding("data directory", "ok", f"{probe.data_dir}, mode {probe.data_dir_mode:o}")


def settings(probe: Probe) -> Finding:
    """Names that somebody knows."""
    if unknown := [name for name in probe.backends if name not in probe.known_backends]:
        remedy = f"known here: {', '.join(probe.known_backends)}"
        return Finding("settings", "fail", f"AGENT_SANDBOX_BACKENDS names {', '.join(unknown)}", remedy)
    if probe.unknown_variables:
        near = [f"{name} may be meant as {other}" for name, other in probe.unknown_variables.items() if other]
        remedy = "; ".join(near) or "docs/reference/settings.md has them all"
        return Finding("settings", "warn", f"{', '.join(probe.unknown_variables)}: no such setting, ignored", remedy)
    return Finding("settings", "ok", f"backends: {', '.join(probe.backends)}")


CHECKS: tuple[Callable[[Probe], Finding], ...] = (
    kernel,
    root,
    settings,
    cgroups,
    overlayfs,
    workspaces,
    loop_devices,
    runc,
    runsc,
    e2fsprogs,
    daemon,
    data_directory,
    disk,
    user_namespaces,
    idmapped_mounts,
    image_tools,
    systemd,
    qemu,
    firecracker,
    kvm,
    machine_kernel,
    erofs_utils,
    docker,
)


def run(probe: Probe) -> list[Finding]:
    """Answer every check, in order."""
    return [check(probe) for check in CHECKS]
