"""Reading the layout of control groups, their counters, and the mount table; on texts as kernels write them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from agent_sandbox.backends.linux import cgroups, failures
from agent_sandbox.backends.linux.cgroups import Groups, Hierarchies, parse_counter, parse_hierarchies
from agent_sandbox.backends.linux.disk import clone
from agent_sandbox.backends.linux.inspection import parse_mounts, parse_status
from agent_sandbox.backends.linux.mounts import mounted_below, unescape
from agent_sandbox.errors import BackendError, ConflictError, LimitExceededError

V2 = """\
22 28 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw
29 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate
"""
HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 master:2 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
90 31 0:32 / /somewhere/else rw,relatime - cgroup cgroup rw,memory
"""


def test_the_unified_layout() -> None:
    found = parse_hierarchies(V2, "cpuset cpu io memory pids\n")
    assert found.is_v2
    assert found.all() == [Path("/sys/fs/cgroup")]
    assert found.directory("memory") == Path("/sys/fs/cgroup")
    assert found.directory("hugetlb") is None
    assert cgroups.enforced(found) == {"cpus", "memory", "pids"}
    assert cgroups.enforced(parse_hierarchies(V2, "memory")) == {"memory"}
    assert cgroups.has_swap_limit(found)


def test_the_hybrid_layout() -> None:
    found = parse_hierarchies(HYBRID, "")
    assert not found.is_v2
    assert found.unified == Path("/sys/fs/cgroup/unified")
    assert found.directory("cpu") == found.directory("cpuacct") == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert found.directory("memory") == Path("/sys/fs/cgroup/memory")
    assert Path("/sys/fs/cgroup/systemd") in found.all()
    assert len(found.all()) == 5


def test_no_control_groups() -> None:
    found = parse_hierarchies("22 28 0:21 / /proc rw - proc proc rw\n", "")
    assert found.all() == []
    assert cgroups.enforced(found) == frozenset()
    assert not cgroups.has_swap_limit(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", 3),
        ("low 0\nhigh 0\nmax 12\noom 4\noom_kill 2\noom_group_kill 0\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\n", None),
        ("oom_kill x\n", None),
        ("", None),
        (None, None),
    ],
)
def test_the_count_of_memory_kills(text: str | None, expected: int | None) -> None:
    assert parse_counter(text, "oom_kill") == expected


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_limits_of_v1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "cpu/a/b/cpu.cfs_quota_us": "50000\n",
            "cpu/a/b/cpu.cfs_period_us": "100000\n",
            "memory/a/b/memory.limit_in_bytes": "268435456\n",
            "memory/a/b/memory.memsw.limit_in_bytes": "9223372036854771712\n",
            "memory/a/b/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
            "pids/a/b/pids.max": "64\n",
        },
    )
    found = Hierarchies(None, {name: tmp_path / name for name in ("cpu", "memory", "pids")})
    groups = Groups(found, "/a/b")
    assert groups.limits() == {"cpus": 0.5, "memory_bytes": 268435456, "memory_swap_bytes": None, "pids": 64}
    assert groups.oom_kills() == 7
    assert len(groups.directories()) == 3
    unknown = Groups(found, "/a/c")
    assert set(unknown.limits().values()) == {None}
    assert unknown.oom_kills() is None
    assert unknown.processes() == set()


def test_the_memory_of_sockets_has_a_limit_of_its_own_in_v1_alone(tmp_path: Path) -> None:
    group, name = tmp_path / "a/b", "memory.kmem.tcp.limit_in_bytes"
    group.mkdir(parents=True)
    v1 = Hierarchies(None, {"memory": tmp_path})
    v2 = Hierarchies(tmp_path, {}, frozenset({"memory"}), is_v2=True)
    Groups(v1, "/a/b").limit_sockets(5)
    assert not cgroups.has_socket_limit(v1)
    assert list(group.iterdir()) == []
    for directory in (tmp_path, group):
        (directory / name).write_text("9223372036854771712\n")
    Groups(v2, "/a/b").limit_sockets(5)
    assert (group / name).read_text() == "9223372036854771712\n"
    Groups(v1, "/a/b").limit_sockets(5)
    assert (group / name).read_text() == "5"
    assert cgroups.has_socket_limit(v1)
    assert cgroups.has_socket_limit(v2)
    assert not cgroups.has_socket_limit(Hierarchies(None))


def test_limits_of_v2(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a/b/cpu.max": "150000 100000\n",
            "a/b/memory.max": "268435456\n",
            "a/b/memory.swap.max": "0\n",
            "a/b/pids.max": "max\n",
            "a/b/memory.events": "low 0\noom 1\noom_kill 1\n",
            "a/b/cgroup.procs": "10\n11\n",
            "a/b/c/cgroup.procs": "12\n0\n",
        },
    )
    groups = Groups(Hierarchies(tmp_path, {}, frozenset({"cpu", "memory", "pids"}), is_v2=True), "/a/b")
    assert groups.limits() == {"cpus": 1.5, "memory_bytes": 268435456, "memory_swap_bytes": 268435456, "pids": None}
    assert groups.oom_kills() == 1
    assert groups.processes() == {10, 11, 12}


def test_mount_points_are_found_innermost_first() -> None:
    table = "\n".join(
        [
            "1 0 8:1 / / rw - ext4 /dev/sda rw",
            "2 1 7:0 / /data/env/sb1-1/mnt rw,nosuid - ext4 /dev/loop0 rw",
            "3 1 7:0 / /data/env/sb1-10/mnt rw,nosuid - ext4 /dev/loop1 rw",
            r"4 2 0:9 / /data/env/sb1-1/root\040with\134odd\011names rw - overlay overlay rw",
        ]
    )
    found = mounted_below(Path("/data/env/sb1-1"), table)
    assert found == [Path("/data/env/sb1-1/root with\\odd\tnames"), Path("/data/env/sb1-1/mnt")]
    assert unescape(r"\351") == "\udce9"


def test_what_inspect_reads() -> None:
    line = r"64 58 7:0 /workspace /workspace rw,nosuid,nodev,relatime shared:1 - ext4 /dev/loop0 rw,errors=remount-ro"
    assert parse_mounts(line + "\nnonsense\n") == [
        {"target": "/workspace", "type": "ext4", "source": "/dev/loop0", "options": "rw,nosuid,nodev,relatime"}
    ]
    status = "Name:\tsandboxd\nCapEff:\t00000000000001eb\nCapBnd:\t00000000000001eb\nNoNewPrivs:\t1\nSeccomp:\t2\n"
    assert parse_status(status) == {
        "capabilities_effective": "00000000000001eb",
        "capabilities_bounding": "00000000000001eb",
        "no_new_privs": "1",
        "seccomp_mode": "2",
    }


def test_copies_of_sparse_files_are_sparse(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.seek(5 << 20)
        file.write(b"middle")
        file.truncate(64 << 20)
    clone(source, tmp_path / "copy")
    copy = (tmp_path / "copy").stat()
    assert copy.st_size == 64 << 20
    assert copy.st_blocks * 512 < 1 << 20
    assert copy.st_mode & 0o777 == 0o600
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    (tmp_path / "hole").write_bytes(b"")
    clone(tmp_path / "hole", tmp_path / "hole-copy")
    assert (tmp_path / "hole-copy").read_bytes() == b""
    with pytest.raises(FileExistsError):
        clone(source, tmp_path / "copy")


@pytest.mark.parametrize("number", sorted(failures.TABLE))
def test_every_error_of_the_table_becomes_its_type(number: int) -> None:
    kind, text = failures.TABLE[number]
    error = failures.translate(OSError(number, "words of the system", "/secret/path"), "creating the sandbox")
    assert type(error) is kind
    assert text in error.message
    assert "/secret/path" not in error.message


def test_other_errors_are_the_backends() -> None:
    assert failures.TABLE[errno.ENOSPC][0] is LimitExceededError
    assert type(failures.translate(OSError(errno.EXDEV, "x"), "moving")) is BackendError
    assert type(failures.translate(ValueError("odd"), "reading")) is BackendError
    ours = ConflictError("mine")
    assert failures.translate(ours, "anything") is ours


def test_a_group_that_no_runtime_makes_gets_both_limits_in_either_layout(tmp_path: Path) -> None:
    v2, cpu, memory, freezer = (tmp_path / name for name in ("v2", "cpu", "memory", "freezer"))
    for root, names in (
        (v2, ("cpu.max", "memory.max")),
        (cpu, ("cpu.cfs_period_us", "cpu.cfs_quota_us")),
        (memory, ("memory.limit_in_bytes",)),
        (freezer, ()),
    ):
        (root / "servers/box").mkdir(parents=True)  # the kernel makes the files with the directory
        for name in names:
            (root / "servers/box" / name).touch()
    unified = Hierarchies(v2, {}, frozenset({"cpu", "memory", "pids"}), is_v2=True)
    Groups(unified, "/servers/box").make(1.5, 4096)
    assert (v2 / "servers/box/cpu.max").read_text() == "150000 100000"
    assert (v2 / "servers/box/memory.max").read_text() == "4096"
    assert [(v2 / top / "cgroup.subtree_control").read_text() for top in (".", "servers")] == ["+cpu +memory"] * 2
    assert not (v2 / "servers/box/cgroup.subtree_control").exists()
    legacy = Hierarchies(None, {"cpu": cpu, "memory": memory, "freezer": freezer})
    groups = Groups(legacy, "/servers/box")
    groups.make(0.001, 4096)
    assert (cpu / "servers/box/cpu.cfs_period_us").read_text() == "100000"
    assert (cpu / "servers/box/cpu.cfs_quota_us").read_text() == "1000"
    assert (memory / "servers/box/memory.limit_in_bytes").read_text() == "4096"
    groups.add(77)
    assert [(root / "servers/box/cgroup.procs").read_text() for root in (cpu, memory, freezer)] == ["77"] * 3


def test_a_group_is_made_without_the_limits_that_the_kernel_lacks(tmp_path: Path) -> None:
    (tmp_path / "freezer").mkdir()
    groups = Groups(Hierarchies(tmp_path / "v2", {"freezer": tmp_path / "freezer"}), "/servers/box")
    groups.make(1.0, 4096)
    assert {path.relative_to(tmp_path).parts[0] for path in groups.directories()} == {"v2", "freezer"}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
