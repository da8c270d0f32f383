"""doctor's checks, each against machines that pass and machines that do not."""

from __future__ import annotations

import dataclasses

import pytest

from agent_sandbox.cli import checks
from agent_sandbox.cli.checks import Probe

GOOD = Probe(
    kernel="6.1.0-18-amd64",
    euid=0,
    capabilities=(1 << 41) - 1,
    filesystems=frozenset({"ext4", "overlay", "proc"}),
    cgroup_v2=frozenset({"cpu", "cpuset", "io", "memory", "pids"}),
    loop_control=True,
    tools={
        "runc": "runc version 1.1.5+ds1",
        "runsc": "runsc version 0.0~20240729.0",
        "mke2fs": "mke2fs 1.47.0 (5-Feb-2023)",
        "skopeo": "skopeo version 1.9.3",
        "umoci": "umoci version 0.4.7",
        "mkfs.erofs": "mkfs.erofs 1.5",
    },
    max_user_namespaces=95000,
    idmap_problem="",
    overlay_problem="",
    systemd="running with our unit",
    kvm="usable",
    accelerated=True,
    qemu="QEMU 7.2.22",
    firecracker="Firecracker 1.12.1 with its jailer",
    machine_kernel="6.1.0-57-cloud-amd64 from linux-image-6.1.0-57-cloud-amd64_6.1.192-3_amd64",
    docker="Docker 20.10.24 with runc, on this host",
    disk_free_bytes=100 << 30,
    sandboxd="/opt/sandboxd",
    data_dir="/var/lib/agent-sandbox",
    data_dir_mode=0o700,
    data_dir_uid=0,
)


def verdict(probe: Probe, check: str) -> checks.Finding:
    return next(finding for finding in checks.run(probe) if finding.check == check)


def test_a_good_machine_passes_every_check() -> None:
    findings = checks.run(GOOD)
    assert [finding.status for finding in findings] == ["ok"] * len(checks.CHECKS)
    assert len({finding.check for finding in findings}) == len(checks.CHECKS)


def test_a_machine_without_anything_fails_and_every_finding_has_a_remedy() -> None:
    findings = checks.run(Probe(euid=1000, data_dir="/x", sandboxd_error="not installed"))
    for finding in findings:
        assert finding.status == "ok" or finding.remedy, finding
    failed = {finding.check for finding in findings if finding.status == "fail"}
    assert failed == {"kernel", "root", "cgroups", "loop devices", "runc", "e2fsprogs", "sandboxd", "disk"}


@pytest.mark.parametrize(
    ("change", "check", "status", "detail"),
    [
        ({"system": "Darwin"}, "kernel", "fail", "Darwin"),
        ({"kernel": "5.4.0-150-generic"}, "kernel", "fail", "Linux 5.4.0-150-generic"),
        ({"kernel": "5.6.0"}, "kernel", "ok", "Linux 5.6.0"),
        ({"kernel": "10.0-rc1"}, "kernel", "ok", "Linux 10.0-rc1"),
        ({"euid": 1000}, "root", "fail", "uid 1000"),
        ({"capabilities": (1 << 41) - 1 - (1 << 21)}, "root", "fail", "root without CAP_SYS_ADMIN"),
        ({"cgroup_v2": None}, "cgroups", "fail", "none mounted"),
        ({"cgroup_v2": frozenset({"cpu", "pids"})}, "cgroups", "fail", "v2, without memory"),
        (
            {"cgroup_v1": frozenset({"cpu", "memory", "pids"}), "cgroup_v2": frozenset()},
            "cgroups",
            "ok",
            "v1 and v2 (hybrid), with cpu, memory, pids",
        ),
        (
            {"cgroup_v1": frozenset({"cpu", "memory", "pids"}), "cgroup_v2": None},
            "cgroups",
            "ok",
            "v1, with cpu, memory, pids",
        ),
        ({"filesystems": frozenset({"ext4"})}, "overlayfs", "warn", "not loaded"),
        ({"filesystems": frozenset({"overlay"})}, "loop devices", "fail", "the kernel has no ext4"),
        ({"loop_control": False}, "loop devices", "fail", "no /dev/loop-control"),
        (
            {"loop_control": False, "loops_wanted": False},
            "loop devices",
            "ok",
            "no /dev/loop-control; only backends without machines need it",
        ),
        ({"tools": {}, "runc_wanted": False}, "runc", "ok", "not found; only the runc backend needs it"),
        ({"tools": {"mke2fs": "1.47"}}, "runc", "fail", "not found"),
        ({"tools": {"runc": "runc version 1.0.0-rc6"}}, "runc", "fail", "runc version 1.0.0-rc6"),
        ({"tools": {"runc": "runc version 1.3.0"}}, "e2fsprogs", "fail", "no mke2fs"),
        ({"tools": {"runc": "runc version 1.1.5"}}, "runsc", "warn", "not found"),
        ({"tools": {"runsc": "runsc version 0.0~20221219.0"}}, "runsc", "warn", "runsc version 0.0~20221219.0"),
        ({"tools": {"runsc": "runsc version release-20240401.0"}}, "runsc", "ok", "runsc version release-20240401.0"),
        ({"sandboxd": "", "sandboxd_error": "gone"}, "sandboxd", "fail", "gone"),
        ({"data_dir_mode": None}, "data directory", "ok", "/var/lib/agent-sandbox is made with the first sandbox"),
        ({"data_dir_mode": 0o755}, "data directory", "warn", "/var/lib/agent-sandbox has mode 755"),
        ({"data_dir_uid": 33}, "data directory", "fail", "/var/lib/agent-sandbox is of uid 33"),
        (
            {"disk_free_bytes": 1 << 30},
            "disk",
            "warn",
            "1024 MiB free for /var/lib/agent-sandbox; no sandbox is made below 512 MiB",
        ),
        (
            {"disk_free_bytes": 512 << 20},
            "disk",
            "warn",
            "512 MiB free for /var/lib/agent-sandbox; no sandbox is made below 512 MiB",
        ),
        (
            {"disk_free_bytes": (512 << 20) - 1},
            "disk",
            "fail",
            "511 MiB free for /var/lib/agent-sandbox; no sandbox is made below 512 MiB",
        ),
        (
            {"disk_free_bytes": 10 << 30, "min_free_mb": 20_480},
            "disk",
            "fail",
            "10240 MiB free for /var/lib/agent-sandbox; no sandbox is made below 20480 MiB",
        ),
        ({"disk_free_bytes": 1 << 20, "min_free_mb": 0}, "disk", "warn", "1 MiB free for /var/lib/agent-sandbox"),
        ({"max_user_namespaces": 0}, "user namespaces", "warn", "switched off"),
        ({"idmap_problem": None}, "idmapped mounts", "warn", "not tried"),
        ({"overlay_problem": None}, "workspaces", "warn", "not tried"),
        ({"overlay_problem": "EPERM"}, "workspaces", "warn", "copied: EPERM"),
        ({"overlay_problem": "EPERM", "workspaces": "overlay"}, "workspaces", "fail", "no overlays: EPERM"),
        (
            {"workspaces": "copy"},
            "workspaces",
            "ok",
            "copied, by AGENT_SANDBOX_WORKSPACES; rollback and fork copy the whole workspace",
        ),
        ({"idmap_problem": "no: EINVAL"}, "idmapped mounts", "warn", "no: EINVAL"),
        ({"tools": {"umoci": "umoci version 0.4.7"}}, "image tools", "warn", "no skopeo"),
        ({"tools": {}}, "image tools", "warn", "no skopeo and no umoci"),
        ({"systemd": "absent"}, "systemd", "ok", "not running; only needed to keep a server running"),
        ({"systemd": "running"}, "systemd", "ok", "running, without agent-sandbox.service"),
        ({}, "kvm", "ok", "/dev/kvm runs machines; neither qemu nor firecracker is in AGENT_SANDBOX_BACKENDS"),
        ({"qemu_wanted": True}, "kvm", "ok", "/dev/kvm runs machines"),
        (
            {"kvm": "no access", "qemu": "", "firecracker": "", "accelerated": False},
            "kvm",
            "ok",
            "/dev/kvm: no access; only microVMs need it",
        ),
        (
            {"qemu": "", "firecracker": "", "accelerated": False},
            "kvm",
            "ok",
            "/dev/kvm opens; only QEMU or Firecracker could try it",
        ),
        (
            {"accelerated": False, "kvm_problem": "a guest does not run on it", "qemu_wanted": True},
            "kvm",
            "fail",
            "a guest does not run on it",
        ),
        (
            {"accelerated": False, "kvm": "absent", "qemu_wanted": True, "allow_tcg": True},
            "kvm",
            "warn",
            "microVMs are emulated: /dev/kvm: absent",
        ),
        (
            {"accelerated": False, "kvm": "absent", "firecracker_wanted": True, "allow_tcg": True},
            "kvm",
            "fail",
            "/dev/kvm: absent",
        ),
        (
            {
                "firecracker": "",
                "firecracker_problem": "firecracker is not installed; put both into PATH",
                "firecracker_wanted": True,
            },
            "firecracker",
            "fail",
            "firecracker is not installed",
        ),
        ({"firecracker": ""}, "firecracker", "ok", "not found; only the firecracker backend needs it"),
        ({}, "firecracker", "ok", "Firecracker 1.12.1 with its jailer; not in AGENT_SANDBOX_BACKENDS"),
        ({"firecracker_wanted": True}, "firecracker", "ok", "Firecracker 1.12.1 with its jailer"),
        ({"firecracker_wanted": True, "qemu": ""}, "qemu", "ok", "not found; only the qemu backend needs it"),
        ({"tools": {}, "firecracker_wanted": True}, "erofs-utils", "fail", "no mkfs.erofs"),
        ({"qemu": ""}, "qemu", "ok", "not found; only the qemu backend needs it"),
        ({"qemu": "", "qemu_wanted": True}, "qemu", "fail", "not found"),
        ({"qemu_wanted": True}, "qemu", "ok", "QEMU 7.2.22"),
        ({"tools": {}, "qemu_wanted": True}, "erofs-utils", "fail", "no mkfs.erofs"),
        ({"tools": {}}, "erofs-utils", "ok", "no mkfs.erofs; only microVMs need it"),
        (
            {
                "machine_kernel": "",
                "machine_kernel_problem": "no kernel is prepared; run: agent-sandbox image kernel",
                "qemu_wanted": True,
            },
            "microVM kernel",
            "fail",
            "no kernel is prepared",
        ),
        ({"machine_kernel": ""}, "microVM kernel", "ok", "none prepared; only microVMs need it"),
        ({"docker": ""}, "docker", "ok", "no engine; not needed"),
        ({}, "docker", "ok", "Docker 20.10.24 with runc, on this host; not in AGENT_SANDBOX_BACKENDS"),
        ({"docker_wanted": True}, "docker", "ok", "Docker 20.10.24 with runc, on this host"),
        (
            {"docker": "", "docker_wanted": True, "docker_problem": "no engine answers; start it"},
            "docker",
            "fail",
            "no engine answers",
        ),
    ],
)
def test_each_check(change: dict[str, object], check: str, status: str, detail: str) -> None:
    finding = verdict(dataclasses.replace(GOOD, **change), check)  # type: ignore[arg-type]
    assert (finding.status, finding.detail) == (status, detail)
    assert bool(finding.remedy) == (status != "ok")


def test_version_reads_the_first_dotted_number() -> None:
    assert checks.version("runc version 1.1.5+ds1\ncommit: 1.1.5") == (1, 1, 5)
    assert checks.version("no number 7 here") == ()


def test_names_that_nobody_knows_are_told() -> None:
    wrong = dataclasses.replace(GOOD, backends=("rnc", "docker"), known_backends=("docker", "runc"))
    assert (verdict(wrong, "settings").status, verdict(wrong, "settings").remedy) == (
        "fail",
        "known here: docker, runc",
    )
    assert "rnc" in verdict(wrong, "settings").detail
    misspelt = dataclasses.replace(
        GOOD, unknown_variables={"AGENT_SANDBOX_MAX_SANDBOXS": "AGENT_SANDBOX_MAX_SANDBOXES"}
    )
    assert verdict(misspelt, "settings").status == "warn"
    assert "AGENT_SANDBOX_MAX_SANDBOXES" in verdict(misspelt, "settings").remedy
    strange = dataclasses.replace(GOOD, unknown_variables={"AGENT_SANDBOX_X": ""})
    assert "settings.md" in verdict(strange, "settings").remedy
