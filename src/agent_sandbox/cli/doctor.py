"""``doctor``: look at this machine, and say what keeps sandboxes from running and how to mend it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import typer

from agent_sandbox import installing
from agent_sandbox.cli import checks, exit_codes, options, output
from agent_sandbox.config import Settings, load_settings, unknown_variables
from agent_sandbox.errors import SandboxError

TOOL_SECONDS = 10
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))
_UNIT = "agent-sandbox.service"
_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    app.command()(doctor)


def doctor(as_json: options.Json = False) -> None:
    """Check this machine: kernel, cgroups, runtime, disk and the rest, each with how to mend it.

    Ends with 1 when a backend that AGENT_SANDBOX_BACKENDS names cannot run here.
    """
    findings = checks.run(gather(load_settings()))
    if as_json:
        output.data([dataclasses.asdict(finding) for finding in findings])
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            output.line(f"{_MARKS[finding.status]}  {finding.check:<{width}}  {finding.detail}")
            if finding.remedy:
                output.line(f"      {'':<{width}}  -> {finding.remedy}")
    raise typer.Exit(exit_codes.FAILED if any(finding.status == "fail" for finding in findings) else exit_codes.OK)


def gather(settings: Settings) -> checks.Probe:
    """Look at the machine; whatever cannot be read counts as not there."""
    v1, v2 = _cgroups()
    sandboxd, problem = _sandboxd(settings)
    docker, docker_problem = _docker(settings)
    machines = _microvms(settings)
    data_dir = settings.data_dir
    try:
        found: os.stat_result | None = data_dir.stat()
    except OSError:
        found = None
    return checks.Probe(
        system=platform.system(),
        kernel=platform.release(),
        euid=os.geteuid(),
        capabilities=_capabilities(),
        filesystems=frozenset(line.split()[-1] for line in _read("/proc/filesystems").splitlines() if line.split()),
        cgroup_v1=v1,
        cgroup_v2=v2,
        loop_control=Path("/dev/loop-control").exists(),
        tools={
            "runc": _tool("runc", "--version"),
            "runsc": _tool("runsc", "--version"),
            "mke2fs": _tool("mke2fs", "-V"),
            "skopeo": _tool("skopeo", "--version"),
            "umoci": _tool("umoci", "--version"),
            "mkfs.erofs": _tool("mkfs.erofs", "-V"),
        },
        max_user_namespaces=_number("/proc/sys/user/max_user_namespaces"),
        idmap_problem=_idmap_problem(data_dir),
        overlay_problem=_overlay_problem(),
        workspaces=settings.workspaces,
        systemd=_systemd(),
        kvm=_kvm(),
        kvm_problem=machines.kvm_problem,
        accelerated=machines.accelerated,
        qemu=machines.qemu,
        qemu_problem=machines.qemu_problem,
        runc_wanted="runc" in settings.backends,
        loops_wanted=bool({"runc", "gvisor", "docker"} & {*settings.backends}),
        qemu_wanted="qemu" in settings.backends,
        firecracker=machines.firecracker,
        firecracker_problem=machines.firecracker_problem,
        firecracker_wanted="firecracker" in settings.backends,
        machine_kernel=machines.kernel,
        machine_kernel_problem=machines.kernel_problem,
        allow_tcg=settings.allow_tcg,
        docker=docker,
        docker_problem=docker_problem,
        docker_wanted="docker" in settings.backends,
        disk_free_bytes=_disk_free(data_dir),
        min_free_mb=settings.min_free_mb,
        sandboxd=sandboxd,
        sandboxd_error=problem,
        installs_sandboxd=installing.remedy("server"),
        data_dir=os.fspath(data_dir),
        data_dir_mode=None if found is None else found.st_mode & 0o7777,
        data_dir_uid=None if found is None else found.st_uid,
        backends=settings.backends,
        known_backends=tuple(_backend_names()),
        unknown_variables=unknown_variables(os.environ),
    )


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _capabilities() -> int:
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _cgroups() -> tuple[frozenset[str], frozenset[str] | None]:
    v1: set[str] = set()
    v2: frozenset[str] | None = None
    for line in _read("/proc/self/mounts").splitlines():
        parts = line.split()
        if len(parts) < 4:
            continue
        if parts[2] == "cgroup":
            v1.update(parts[3].split(","))
        elif parts[2] == "cgroup2":
            v2 = frozenset(_read(Path(parts[1]) / "cgroup.controllers").split())
    return frozenset(v1 & {*checks.CONTROLLERS, "freezer", "devices", "cpuset"}), v2


def _tool(name: str, flag: str) -> str:
    path = shutil.which(name, path=_PATH)
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, flag],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter((done.stdout or done.stderr).splitlines()), "")


@dataclasses.dataclass
class _MicroVms:
    """What was found of what microVMs need; of each fact and its problem one is empty."""

    qemu: str = ""
    qemu_problem: str = ""
    firecracker: str = ""
    firecracker_problem: str = ""
    accelerated: bool = False
    kvm_problem: str = ""
    kernel: str = ""
    kernel_problem: str = ""


def _microvms(settings: Settings) -> _MicroVms:
    found = _MicroVms()
    if platform.system() != "Linux":
        return found
    from agent_sandbox.backends.microvm.firecracker import FirecrackerMonitor
    from agent_sandbox.backends.microvm.monitor import Monitor
    from agent_sandbox.backends.microvm.qemu import QemuMonitor
    from agent_sandbox.images.machine import MachineImages

    async def look(monitor: Monitor) -> str:
        try:
            facts = await monitor.find()
        finally:
            await monitor.close()
        # Firecracker comes last: where it is there, what it says of KVM counts.
        found.accelerated, found.kvm_problem = facts.accelerated, facts.why
        return facts.version.partition(",")[0]

    try:
        found.qemu = f"QEMU {asyncio.run(look(QemuMonitor(settings.qemu)))}"
    except SandboxError as error:
        found.qemu_problem = error.message
    try:
        firecracker = FirecrackerMonitor(settings.firecracker, settings.jailer)
        found.firecracker = f"Firecracker {asyncio.run(look(firecracker))} with its jailer"
    except SandboxError as error:
        found.firecracker_problem = error.message
    try:
        found.kernel = MachineImages(settings.machine_directory()).describe_kernel()
    except SandboxError as error:
        found.kernel_problem = error.message
    return found


def _docker(settings: Settings) -> tuple[str, str]:
    """What the engine of the docker backend is, and what keeps sandboxes from it: one of both is empty."""
    from agent_sandbox.backends.docker import facts

    try:
        return asyncio.run(facts.describe(settings.docker_host, settings.docker_runtime)), ""
    except SandboxError as error:
        return "", error.message


def _idmap_problem(data_dir: Path) -> str | None:
    if platform.system() != "Linux" or os.geteuid() != 0:
        return None
    from agent_sandbox.backends.oci import idmap

    while not data_dir.exists() and data_dir != data_dir.parent:
        data_dir = data_dir.parent
    return idmap.why_not((Path("/usr"), data_dir))


def _overlay_problem() -> str | None:
    if platform.system() != "Linux" or os.geteuid() != 0:
        return None
    from agent_sandbox.backends.linux.overlay import why_no_overlay

    return why_no_overlay(Path("/run"))


def _backend_names() -> list[str]:
    from agent_sandbox.backends import backend_names

    return backend_names()


def _systemd() -> Literal["absent", "running", "running with our unit"]:
    if not Path("/run/systemd/system").is_dir():  # sd_booted(3)
        return "absent"
    places = (Path("/etc/systemd/system"), Path("/usr/lib/systemd/system"), Path("/lib/systemd/system"))
    return "running with our unit" if any((place / _UNIT).exists() for place in places) else "running"


def _kvm() -> Literal["absent", "no access", "usable"]:
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return "absent"
    except OSError:
        return "no access"
    return "usable"


def _disk_free(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _sandboxd(settings: Settings) -> tuple[str, str]:
    try:
        if settings.sandboxd:
            path = Path(settings.sandboxd)
        else:
            from agent_sandbox_engine import sandboxd_path

            path = sandboxd_path()
        if not os.access(path, os.X_OK):
            return "", f"{path} cannot be executed"
    except ModuleNotFoundError:
        return "", "agent-sandbox-engine is not installed"
    except OSError as error:
        return "", str(error)
    done = _tool(os.fspath(path), "--version")
    return (f"{path} ({done})" if done else ""), f"{path} does not run"
