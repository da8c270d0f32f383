"""The config.json of a sandbox and its seccomp profile, against what the design promises."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.backends.linux import seccomp
from agent_sandbox.backends.oci import bundle
from agent_sandbox.errors import BackendError
from agent_sandbox.types import SandboxSpec

SPEC = SandboxSpec(
    image="host",
    image_digest="",
    cpus=1.5,
    memory_mb=512,
    pids_limit=100,
    disk_mb=1024,
    tmp_mb=256,
    env={"SECRET": "hush-1234"},
)
LAYOUT = bundle.Layout(
    rootfs=Path("/data/images/x/rootfs"),
    workspace=Path("/data/env/sb1-1/mnt/workspace"),
    sandboxd=Path("/opt/sandboxd"),
    cgroups_path="/agent-sandbox-abc/sb1-1",
    daemon_args=("--listen-fd", "3", "--config-fd", "4"),
    binds=(bundle.Bind(Path("/usr"), "/usr"), bundle.Bind(Path("/empty"), "/usr/local")),
)


def made(spec: SandboxSpec = SPEC, layout: bundle.Layout = LAYOUT) -> dict[str, Any]:
    return bundle.config("sb1-1", "abc", spec, layout, seccomp.profile("x86_64"))


def options(config: dict[str, Any], destination: str) -> list[str]:
    [mount] = [mount for mount in config["mounts"] if mount["destination"] == destination]
    return list(mount["options"])


def test_the_daemon_has_seven_capabilities_and_no_more() -> None:
    process = made()["process"]
    expected = {f"CAP_{name}" for name in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SETPCAP")}
    assert {name: set(names) for name, names in process["capabilities"].items()} == {
        "bounding": expected,
        "effective": expected,
        "permitted": expected,
    }
    assert process["noNewPrivileges"] is True
    assert process["args"] == ["/run/sandboxd", "--listen-fd", "3", "--config-fd", "4"]
    assert process["terminal"] is False


def test_every_namespace_is_its_own() -> None:
    namespaces = made()["linux"]["namespaces"]
    assert {namespace["type"] for namespace in namespaces} == {"pid", "ipc", "uts", "mount", "network", "cgroup"}
    assert all("path" not in namespace for namespace in namespaces)


def test_no_value_of_the_environment_is_in_it() -> None:
    assert "hush-1234" not in json.dumps(made())
    assert "SECRET" not in json.dumps(made())


def test_labels() -> None:
    assert made()["annotations"] == {
        "io.agent-sandbox.managed": "true",
        "io.agent-sandbox.id": "sb1-1",
        "io.agent-sandbox.instance": "abc",
    }


def test_limits() -> None:
    resources = made()["linux"]["resources"]
    assert resources["cpu"] == {"quota": 150_000, "period": 100_000}
    assert resources["memory"] == {"limit": 536_870_912, "swap": 536_870_912}
    assert resources["pids"] == {"limit": 100}
    assert resources["devices"] == [{"allow": False, "access": "rwm"}]


def test_a_limit_that_the_kernel_lacks_is_left_out() -> None:
    layout = dataclasses.replace(LAYOUT, enforces=frozenset({"memory"}), has_swap_limit=False)
    resources = made(layout=layout)["linux"]["resources"]
    assert resources == {
        "devices": [{"allow": False, "access": "rwm"}],
        "memory": {"limit": 536_870_912},
    }


@pytest.mark.parametrize(("cpus", "quota"), [(0.01, 1000), (0.001, 1000), (0.5, 50_000), (4, 400_000)])
def test_cpu_quota(cpus: float, quota: int) -> None:
    assert made(dataclasses.replace(SPEC, cpus=cpus))["linux"]["resources"]["cpu"]["quota"] == quota


@pytest.mark.parametrize(
    ("memory_mb", "tmp_mb", "tmp", "shm"), [(512, 256, 256, 64), (512, 300, 256, 64), (64, 256, 32, 32), (1, 9, 1, 1)]
)
def test_memory_file_systems_fit_into_half_of_the_memory(memory_mb: int, tmp_mb: int, tmp: int, shm: int) -> None:
    config = made(dataclasses.replace(SPEC, memory_mb=memory_mb, tmp_mb=tmp_mb))
    assert f"size={tmp}m" in options(config, "/tmp")
    assert f"size={shm}m" in options(config, "/dev/shm")


@given(st.booleans(), st.integers(16, 4096), st.integers(1, 4096))
def test_no_mount_brings_privileges_and_each_has_a_size(read_only: bool, memory_mb: int, tmp_mb: int) -> None:
    config = made(dataclasses.replace(SPEC, read_only_rootfs=read_only, memory_mb=memory_mb, tmp_mb=tmp_mb))
    for mount in config["mounts"]:
        assert "nosuid" in mount["options"]
        assert "nodev" in mount["options"] or mount["destination"] in ("/dev", "/dev/pts")
        if mount["type"] == "tmpfs":
            assert any(option.startswith("size=") for option in mount["options"])
    assert config["root"]["readonly"] is read_only


def test_order_and_kind_of_mounts() -> None:
    config = made()
    order = [mount["destination"] for mount in config["mounts"]]
    assert order.index("/usr") < order.index("/usr/local")
    assert order.index("/dev") < order.index("/dev/shm")
    assert order.index("/run") < order.index("/run/sandboxd")
    assert "ro" in options(config, "/usr")
    assert "ro" in options(config, "/run/sandboxd")
    assert "rw" in options(config, "/workspace")
    assert {"hidepid=2", "gid=0"} <= set(options(config, "/proc"))
    assert "noexec" in options(config, "/run")
    assert "noexec" not in options(config, "/tmp")


@pytest.mark.parametrize(("host", "expected"), [(1024, 1024), (1 << 20, 20_000), (-1, 20_000)])
def test_descriptors_are_what_the_host_allows(host: int, expected: int) -> None:
    assert bundle.process_limits(host) == {"nofile": expected, "core": 1}


def test_its_own_ids() -> None:
    linux = made(layout=dataclasses.replace(LAYOUT, user_namespace="/proc/1/fd/9", ids=2_013_265_920))["linux"]
    assert [each for each in linux["namespaces"] if "path" in each] == [{"type": "user", "path": "/proc/1/fd/9"}]
    assert linux["uidMappings"] == linux["gidMappings"] == [
        {"containerID": 0, "hostID": 2_013_265_920, "size": 65_536}
    ]  # fmt: skip
    assert "uidMappings" not in made()["linux"]


def test_control_groups_are_shown_read_only_and_alone() -> None:
    config = made()
    order = [mount["destination"] for mount in config["mounts"]]
    assert order.index("/sys") < order.index("/sys/fs") < order.index("/sys/fs/cgroup")
    for place in ("/sys", "/sys/fs", "/sys/fs/cgroup"):
        assert {"ro", "nosuid", "nodev", "noexec"} <= set(options(config, place))
    assert "/sys/fs/cgroup" in config["linux"]["readonlyPaths"]


def test_the_sandbox_has_its_own_low_ports_and_pings() -> None:
    sysctl = made(dataclasses.replace(SPEC, gid=77))["linux"]["sysctl"]
    assert sysctl == {"net.ipv4.ip_unprivileged_port_start": "0", "net.ipv4.ping_group_range": "77 77"}


# -- seccomp ---------------------------------------------------------------------------------


def decide(name: str, *args: int) -> int | None:
    """What the profile answers to a call: None when it passes, else the errno. The strictest matching rule counts."""
    profile = seccomp.profile("x86_64")
    actions = [rule for rule in profile["syscalls"] if name in rule["names"] and matches(rule.get("args", []), args)]
    if not actions:
        return int(profile["defaultErrnoRet"])
    refusals = [int(rule["errnoRet"]) for rule in actions if rule["action"] == "SCMP_ACT_ERRNO"]
    return refusals[0] if refusals else None


def matches(conditions: list[dict[str, Any]], args: tuple[int, ...]) -> bool:
    def one(condition: dict[str, Any]) -> bool:
        value = args[condition["index"]] if condition["index"] < len(args) else 0
        match condition["op"]:
            case "SCMP_CMP_EQ":
                return bool(value == condition["value"])
            case "SCMP_CMP_GT":
                return bool(value > condition["value"])
            case "SCMP_CMP_MASKED_EQ":
                return bool(value & condition["value"] == condition["valueTwo"])
        raise AssertionError(condition)

    return all(one(condition) for condition in conditions)


def test_what_is_unknown_is_missing() -> None:
    assert decide("a_call_of_the_future") == 38
    assert decide("clone3") == 38


DANGEROUS = """
mount umount2 pivot_root chroot unshare setns bpf perf_event_open userfaultfd keyctl add_key request_key
init_module finit_module delete_module kexec_load reboot swapon swapoff open_by_handle_at io_uring_setup
io_uring_enter fsopen fsmount move_mount open_tree mount_setattr sethostname settimeofday clock_settime syslog
quotactl pidfd_getfd kcmp iopl ioperm modify_ldt acct fanotify_init
"""


@pytest.mark.parametrize("name", DANGEROUS.split())
def test_what_is_dangerous_is_refused(name: str) -> None:
    assert decide(name) == 1


NEEDED = """
read write openat openat2 execve fork vfork mmap ptrace process_vm_readv setresuid setresgid setgroups capset
prctl seccomp kill tgkill pidfd_open pidfd_send_signal wait4 waitid fchownat renameat2 memfd_create epoll_wait
futex rseq statx close_range getrandom accept4 sendmsg setsockopt clock_nanosleep inotify_add_watch
"""


@pytest.mark.parametrize("name", NEEDED.split())
def test_what_ordinary_programs_and_the_daemon_need_passes(name: str) -> None:
    assert decide(name) is None


@pytest.mark.parametrize(
    ("family", "protocol", "answer"),
    [
        (1, 0, None),
        (2, 6, None),
        (10, 17, None),
        (16, 0, None),
        (16, 9, 1),
        (17, 0, 1),
        (38, 0, 1),
        (40, 0, 1),
        (0, 0, 1),
    ],
)
def test_sockets(family: int, protocol: int, answer: int | None) -> None:
    assert decide("socket", family, 1, protocol) == answer


def test_processes_and_threads_but_no_namespaces() -> None:
    assert decide("clone", 17) is None
    assert decide("clone", 0x003D0F00) is None
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide("clone", flag | 17) == 1


def test_no_call_is_in_two_lists() -> None:
    assert not {name for name in seccomp.allowed() if name.startswith("io_")}, "one number of contexts for the host"
    assert not set(seccomp.allowed()) & set(seccomp.refused())
    special = {"clone", "socket", "personality", "clone3"}
    assert not special & (set(seccomp.allowed()) | set(seccomp.refused()))


def test_a_machine_without_a_profile_is_refused() -> None:
    assert seccomp.profile("aarch64")["architectures"] == ["SCMP_ARCH_AARCH64"]
    with pytest.raises(BackendError, match="riscv64"):
        seccomp.profile("riscv64")
