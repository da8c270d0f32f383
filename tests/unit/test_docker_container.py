"""What the engine is asked for, as values, and what its answers mean."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from io import BytesIO
from typing import Any

import pytest

from agent_sandbox.backends.docker import container, facts, images
from agent_sandbox.backends.docker.building import archive, workspace_archive
from agent_sandbox.backends.docker.container import Layout, Mount
from agent_sandbox.backends.docker.engine import Engine, Frames, refusal
from agent_sandbox.backends.docker.networks import network, rules
from agent_sandbox.backends.linux import seccomp
from agent_sandbox.errors import BackendError, ConflictError, LimitExceededError, NotFoundError, SandboxError
from agent_sandbox.types import SandboxSpec

SPEC = SandboxSpec(
    image="i",
    image_digest="sha256:1",
    cpus=0.5,
    memory_mb=64,
    pids_limit=32,
    disk_mb=64,
    tmp_mb=256,
    env={"S": "secret"},
)
LAYOUT = Layout(
    image_id="sha256:1",
    instance="0123456789ab",
    daemon_args=("/run/sandboxd", "--listen", "/run/agent-sandbox/sock", "--config", "/run/agent-sandbox/config"),
    mounts=(Mount("bind", "/x/workspace", "/workspace"), Mount("bind", "/usr/sandboxd", "/run/sandboxd", True)),
    volumes=("/data", "/data/", "/workspace", "/x/../tmp/cache", "/tmp", "/run/tool", "/workspaces"),
)
PROFILE = seccomp.profile("x86_64")


def body(spec: SandboxSpec = SPEC, layout: Layout = LAYOUT) -> dict[str, Any]:
    return container.container("sb1-1", spec, layout, PROFILE)


def test_privileges_are_the_daemons_and_no_more() -> None:
    host = body()["HostConfig"]
    assert (host["CapDrop"], host["CapAdd"]) == (
        ["ALL"],
        ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SETPCAP"],
    )
    assert host["SecurityOpt"][0] == "no-new-privileges:true"
    assert (host["Privileged"], host["ReadonlyRootfs"], host["NetworkMode"]) == (False, True, "none")
    assert (host["IpcMode"], host["CgroupnsMode"], host["PidMode"]) == ("private", "private", "")
    assert host["RestartPolicy"] == {"Name": "no"}


def test_limits_are_the_specs_and_memory_has_no_swap() -> None:
    host = body()["HostConfig"]
    assert (host["Memory"], host["MemorySwap"]) == (64 << 20, 64 << 20)
    assert (host["CpuQuota"], host["CpuPeriod"], host["PidsLimit"]) == (50_000, 100_000, 32)
    assert host["ShmSize"] == 32 << 20  # half of the memory
    assert host["Tmpfs"]["/tmp"] == "rw,exec,nosuid,nodev,mode=1777,size=32m"
    on_gvisor = container.container(
        "sb1-1", SPEC, Layout("i", "0", ("d",), (), runtime="runsc", pids_on_host=False), PROFILE
    )["HostConfig"]
    assert "PidsLimit" not in on_gvisor
    assert on_gvisor["Ulimits"][-1] == {"Name": "nproc", "Soft": 32, "Hard": 32}
    assert (on_gvisor["Runtime"], on_gvisor["Sysctls"]) == ("runsc", {})


def test_nothing_of_the_images_own_is_obeyed_and_its_volumes_are_read_only() -> None:
    made = body()
    assert made["Entrypoint"][0] == "/run/sandboxd"
    assert (made["Cmd"], made["User"], made["Healthcheck"], made["Hostname"]) == (
        [],
        "0:0",
        {"Test": ["NONE"]},
        "sandbox",
    )
    volumes = {one["Target"]: one["ReadOnly"] for one in made["HostConfig"]["Mounts"] if one["Type"] == "volume"}
    assert volumes == {"/data": True, "/workspaces": True}
    names = [one["Source"] for one in made["HostConfig"]["Mounts"] if one["Type"] == "volume"]
    assert names == ["asb-sb1-1-0", "asb-sb1-1-3"]
    memory = {one["Target"]: one["TmpfsOptions"] for one in made["HostConfig"]["Mounts"] if one["Type"] == "tmpfs"}
    assert memory == {
        "/tmp/cache": {"SizeBytes": 32 << 20, "Mode": 0o1777},
        "/run/tool": {"SizeBytes": 1 << 20, "Mode": 0o755},
    }
    targets = [one["Target"] for one in made["HostConfig"]["Mounts"]]
    assert len(targets) == len(set(targets))


def test_a_volume_within_a_mount_of_the_sandboxs_own_is_found() -> None:
    for volume, own in (
        ("/workspace/node_modules", "/workspace"),
        ("/x/../workspace/a/", "/workspace"),
        ("/run/agent-sandbox/sock", "/run/agent-sandbox"),
        ("/run/sandboxd.d/config", "/run/sandboxd.d"),
    ):
        found = container.misplaced_volume(["/data", volume])
        assert found is not None
        assert found[1] == own
    assert container.misplaced_volume(["/workspace/", "/workspaces", "/tmp/x", "/run", "/data"]) is None


def test_a_volume_that_an_engine_adds_is_seen() -> None:
    mounts = [
        {"Type": "volume", "Name": "asb-sb1-1-0", "Destination": "/data"},
        {"Type": "bind", "Destination": "/workspace"},
        {"Type": "volume", "Name": "2a98cd", "Destination": "/more"},
    ]
    assert container.unasked_volumes({"Mounts": mounts}) == ["/more"]


def test_labels_of_the_image_say_nothing_any_more() -> None:
    """A proxy or an updater on the engine's host obeys labels, and a container has those of its image."""
    image_labels = ("traefik.http.routers.x.rule", "io.agent-sandbox.id")
    made = body(layout=dataclasses.replace(LAYOUT, image_labels=image_labels))
    assert made["Labels"] == {**body()["Labels"], "traefik.http.routers.x.rule": ""}


def test_no_secret_is_in_it() -> None:
    assert "secret" not in json.dumps(body())


def test_labels_are_exact_and_filters_ask_for_them_all() -> None:
    assert body()["Labels"] == {
        "io.agent-sandbox.managed": "true",
        "io.agent-sandbox.id": "sb1-1",
        "io.agent-sandbox.instance": "0123456789ab",
    }
    wanted = ["io.agent-sandbox.managed=true", "io.agent-sandbox.instance=0123456789ab"]
    assert container.filters("0123456789ab") == {"label": wanted}
    assert container.filters("0123456789ab", "sb1-1") == {"label": [*wanted, "io.agent-sandbox.id=sb1-1"]}


def test_an_old_engine_learns_what_a_missing_call_answers() -> None:
    profile = container.docker_seccomp(PROFILE)
    assert profile["syscalls"][-1] == {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}
    assert len(PROFILE["syscalls"]) == len(profile["syscalls"]) - 1


def test_the_overlay_is_one_string_of_mount_options() -> None:
    made = container.layered_volume("sb1-1", "0", ["/l/a-0", "/l/a-1"], "/b/changes", "/b/work", "index=on")
    assert made["Name"] == "asb-sb1-1"
    assert made["DriverOpts"] == {
        "type": "overlay",
        "device": "overlay",
        "o": "lowerdir=/l/a-0:/l/a-1,upperdir=/b/changes,workdir=/b/work,index=on,nosuid,nodev",
    }
    for bad in ("/a:b", "/a,b", "relative", "/a\\b", "/a b"):
        with pytest.raises(ValueError, match="mount option"):
            container.layered_volume("sb1-1", "0", [bad], "/u", "/w", "x")
    longest = [f"/run/agent-sandbox/0123456789ab/l/0123456789ab-{number}" for number in range(64)]
    options = container.layered_volume("sb1-1", "0", longest, "/u" * 60, "/w" * 60, "x" * 60)["DriverOpts"]["o"]
    assert len(options) < 4096


def test_the_network_keeps_sandboxes_apart_and_the_host_closed() -> None:
    made = network("asb-network", "asb-0123456789")
    assert made["Options"]["com.docker.network.bridge.enable_icc"] == "false"
    chains = [rule[0] for rule in rules("asb-0123456789")]
    assert chains == ["INPUT", "DOCKER-USER", "DOCKER-USER"]
    assert all("asb-0123456789" in rule for rule in rules("asb-0123456789"))
    assert rules("b")[1][3:5] == ("-d", "169.254.0.0/16")


def test_frames_come_out_the_same_byte_by_byte() -> None:
    wire = b"\x01\0\0\0\0\0\0\x05hello\x02\0\0\0\0\0\0\x02no\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\x01!"
    whole = Frames().feed(wire)
    assert whole == [(1, b"hello"), (2, b"no"), (1, b"!")]
    single = Frames()
    pieces = [piece for byte in wire for piece in single.feed(bytes([byte]))]
    for stream in (1, 2):
        joined = [b"".join(data for number, data in found if number == stream) for found in (whole, pieces)]
        assert joined[0] == joined[1]


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (404, "No such container: x", NotFoundError),
        (409, "Conflict. The container name is already in use", ConflictError),
        (500, "write /var/lib/docker/x: no space left on device", LimitExceededError),
        (500, "OCI runtime create failed", BackendError),
        (400, "invalid reference format", BackendError),
    ],
)
def test_a_refusal_is_the_callers_situation(status: int, message: str, kind: type[SandboxError]) -> None:
    error = refusal(status, message)
    assert type(error) is kind
    assert message in error.message


@pytest.mark.parametrize("host", ["", "docker", "ssh://user@host", "unix://relative", "tcp://", "npipe:////./pipe/x"])
def test_an_address_that_is_none_is_told(host: str) -> None:
    with pytest.raises(BackendError, match="AGENT_SANDBOX_DOCKER_HOST"):
        Engine(host)


def test_limits_are_enforced_as_the_engine_says() -> None:
    info = {"CpuCfsQuota": True, "MemoryLimit": True, "SwapLimit": True, "PidsLimit": True}
    assert facts.enforced(info) == {"cpus", "memory", "pids"}
    assert facts.enforced({**info, "SwapLimit": False}) == {"cpus", "pids"}
    assert facts.enforced({}) == frozenset()


def test_the_progress_of_a_pull_is_of_all_its_layers() -> None:
    assert images.progress({}) == "0.0 of 0.0 MB in 0 layers"
    assert images.progress({"a": (1_000_000, 4_000_000), "b": (500_000, 500_000)}) == "1.5 of 4.5 MB in 2 layers"


def test_what_is_uploaded_belongs_to_whom_it_must() -> None:
    with tarfile.open(fileobj=BytesIO(archive([("sandboxd", 0o755, b"x"), ("config", 0o600, b"key")]))) as tar:
        assert [(one.name, one.mode, one.uid, one.size) for one in tar] == [
            ("sandboxd", 0o755, 0, 1),
            ("config", 0o600, 0, 3),
        ]
    with tarfile.open(fileobj=BytesIO(workspace_archive(SPEC))) as tar:
        assert [(one.name, one.isdir(), one.uid, one.gid) for one in tar] == [("workspace", True, 1000, 1000)]
