"""What sets a sandbox apart on a real kernel: its own host ids, its network's rules, its own control groups alone."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_sandbox.backends.oci import OciBackend, idmap
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, LimitExceededError, UnsupportedError
from agent_sandbox.types import ExecOutput, SandboxSpec
from tests.real.leaks import resources, wait_until_clean

pytestmark = pytest.mark.real

SPEC = SandboxSpec(image="host", image_digest="", cpus=0.5, memory_mb=256, pids_limit=64, disk_mb=64, tmp_mb=32)
SIZE = 65_536
BASE = 2_013_265_920


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data")


@pytest.fixture
async def backend(settings: Settings) -> AsyncIterator[OciBackend]:
    backend = OciBackend(settings)
    await backend.start()
    yield backend
    for id in await backend.list_ids():
        await backend.destroy(id)
    await backend.close()
    await wait_until_clean(settings.data_dir)


async def run(backend: OciBackend, command: str, id: str = "sb1-1") -> str:
    """What a shell command prints, errors among it."""
    output = b""
    argv = ["/bin/sh", "-c", f"exec 2>&1; {command}"]
    async for event in backend.exec(id, argv, env={}, workdir="/workspace", timeout_seconds=120):
        if isinstance(event, ExecOutput):
            output += event.data
    return output.decode()


async def python(backend: OciBackend, program: str, id: str = "sb1-1") -> str:
    await backend.write_file(id, "/workspace/program.py", program.encode(), 0o644)
    return await run(backend, "python3 program.py", id)


def ids_of(pid: int) -> tuple[set[int], set[int]]:
    """The user and group ids of a process as the host counts them."""
    fields = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return {int(id) for id in fields["Uid"].split()}, {int(id) for id in fields["Gid"].split()}


async def processes(backend: OciBackend, id: str) -> list[int]:
    group = Path(f"/sys/fs/cgroup/pids/agent-sandbox-{backend.instance}/{id}/cgroup.procs")
    if not group.exists():
        group = Path(f"/sys/fs/cgroup/agent-sandbox-{backend.instance}/{id}/cgroup.procs")
    return [int(pid) for pid in group.read_text().split()]


# -- host ids --------------------------------------------------------------------------------


async def test_each_sandbox_has_its_own_ids(backend: OciBackend) -> None:
    assert backend.capabilities.userns
    assert "userns" not in backend.capabilities.notes
    bases = []
    for id in ("sb1-1", "sb2-1"):
        await backend.create(id, SPEC)
        inside, base, size = (await run(backend, "cat /proc/self/uid_map", id)).split()
        assert (await run(backend, "cat /proc/self/gid_map", id)).split() == [inside, base, size]
        assert (inside, size) == ("0", "65536")
        bases.append(int(base))
        task = asyncio.create_task(run(backend, "sleep 3", id))
        await asyncio.sleep(0.3)
        found = [ids_of(pid) for pid in await processes(backend, id)]
        daemon, user = {int(base)}, {int(base) + 1000}
        assert (daemon, daemon) in found
        assert (user, user) in found
        assert all(uids in (daemon, user) for uids, _ in found)
        task.cancel()
    first, second = bases
    assert first != second
    assert all(base >= BASE and base % SIZE == 0 for base in bases)


async def test_files_belong_to_the_sandbox_and_to_no_other(backend: OciBackend) -> None:
    for id in ("sb1-1", "sb2-1"):
        await backend.create(id, SPEC)
    await run(backend, "umask 077; echo secret > f; mkdir d; ls -ln f")
    assert await run(backend, "stat -c '%u %g' . f /usr /etc/passwd / /tmp /run/sandboxd") == (
        "1000 1000\n1000 1000\n0 0\n0 0\n0 0\n0 0\n65534 65534\n"
    )
    first, second = [int((await run(backend, "cat /proc/self/uid_map", id)).split()[1]) for id in ("sb1-1", "sb2-1")]
    workspace = Path(f"/run/agent-sandbox/{backend.instance}/box/sb1-1/workspace")
    state = (workspace / "f").stat()
    assert (state.st_uid, state.st_gid, state.st_mode & 0o777) == (first + 1000, first + 1000, 0o600)
    assert (workspace.parent.stat().st_uid, workspace.parent.stat().st_mode & 0o777) == (0, 0o710)

    def reads(uid: int, name: str, place: str) -> str:
        """What a process of the host with this id, already at ``place``, gets to read."""
        program = f"import os; os.setgroups([]); os.setgid({uid}); os.setuid({uid}); print(open({name!r}).read())"
        done = subprocess.run([sys.executable, "-c", program], cwd=place, capture_output=True, text=True, check=False)
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1].partition(":")[0]

    inside = str(workspace)
    assert reads(first + 1000, "f", inside) == "secret"
    for stranger in (second, second + 1000, 1000, first + 1001):
        assert reads(stranger, "f", inside) == "PermissionError"
    assert reads(second, str(workspace / "f"), "/") == "PermissionError"
    assert reads(1000, str(workspace / "f"), "/") == "PermissionError"


async def test_nothing_else_on_the_host_is_owned_by_them(backend: OciBackend, settings: Settings) -> None:
    await backend.create("sb1-1", SPEC)
    await run(backend, "touch f /tmp/f /dev/shm/f; python3 -c 'import socket; socket.socket(1).bind(\"s\")'")
    base = int((await run(backend, "cat /proc/self/uid_map")).split()[1])
    disk = f"/run/agent-sandbox/{backend.instance}/box/sb1-1"
    places = [
        str(settings.data_dir),
        "/run/agent-sandbox",
        "/var/lib/agent-sandbox-ids",
        "/dev",
        "/tmp",
        "/sys/fs/cgroup",
    ]
    tests = ["-uid", f"+{base - 1}", "-uid", f"-{base + SIZE}"]
    groups = ["-gid", f"+{base - 1}", "-gid", f"-{base + SIZE}"]
    command = ["find", *places, "-path", disk, "-prune", "-o", "(", *tests, "-o", *groups, ")", "-print"]
    found = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert found.stdout == ""
    own = await asyncio.to_thread(subprocess.run, ["find", disk, *tests], capture_output=True, text=True, check=False)
    assert {line.removeprefix(disk) for line in own.stdout.splitlines()} == {"/upper"} | {
        f"/workspace{name}" for name in ("", "/f", "/s")
    }
    keys = Path("/proc/key-users").read_text()
    assert f"{base + 1000}:" not in keys


async def test_limits_of_a_user_are_not_shared(backend: OciBackend) -> None:
    for id in ("sb1-1", "sb2-1"):
        await backend.create(id, SPEC)
    program = (
        "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "count = int(open('/proc/sys/fs/inotify/max_user_instances').read())\n"
        "got = [libc.inotify_init() for _ in range(count + 1)]\n"
        "print(got[0] >= 0, got[-1], ctypes.get_errno(), flush=True)\n"
        "import time; time.sleep(5)\n"
    )
    await backend.write_file("sb1-1", "/workspace/hoard.py", program.encode(), 0o644)
    hoard = asyncio.create_task(run(backend, "python3 hoard.py > out"))
    for _ in range(100):
        text = await run(backend, "cat out 2>/dev/null")
        if text:
            break
        await asyncio.sleep(0.05)
    assert text == "True -1 24\n"
    one = "import ctypes; print(ctypes.CDLL(None).inotify_init() >= 0)"
    assert await run(backend, f'python3 -c "{one}"', "sb2-1") == "True\n"
    assert await run(backend, f'python3 -c "{one}"', "sb1-1") == "False\n"
    hoard.cancel()


async def test_the_host_keeps_no_mount_of_the_root(backend: OciBackend, settings: Settings) -> None:
    await backend.create("sb1-1", SPEC)
    assert resources(settings.data_dir)["mounts"] == [f"/run/agent-sandbox/{backend.instance}/box/sb1-1"]
    assert resources(settings.data_dir)["id ranges"] == [(await run(backend, "cat /proc/self/uid_map")).split()[1]]


async def test_without_a_free_range_nothing_is_made(tmp_path: Path) -> None:
    backend = OciBackend(Settings(data_dir=tmp_path / "data", id_range_base=0x7FFD_0000))
    await backend.start()
    await backend.create("sb1-1", SPEC)
    assert (await run(backend, "cat /proc/self/uid_map")).split()[1] == str(0x7FFD_0000)
    with pytest.raises(LimitExceededError, match="AGENT_SANDBOX_ID_RANGE_BASE"):
        await backend.create("sb2-1", SPEC)
    assert await backend.list_ids() == ["sb1-1"]
    await backend.destroy("sb1-1")
    await wait_until_clean(tmp_path / "data")
    await backend.create("sb2-1", SPEC)
    await backend.destroy("sb2-1")
    await backend.close()
    await wait_until_clean(tmp_path / "data")


def test_no_process_lives_in_a_namespace_that_is_being_made() -> None:
    """A server that is killed in that moment would leave one with its connections, its port and its lock."""
    with idmap._ended_child(BASE) as pid:
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        assert list(Path(f"/proc/{pid}/fd").iterdir()) == []
        assert Path(f"/proc/{pid}/maps").read_text() == ""
    assert not Path(f"/proc/{pid}").exists()


def test_the_probe_really_tries(tmp_path: Path) -> None:
    assert idmap.why_not((Path("/usr"), tmp_path)) == ""
    assert idmap.why_not((Path("/usr"), Path("/proc"))).startswith("the file system of /proc cannot")
    assert idmap.why_not((tmp_path / "nothing",)) != ""
    namespace = idmap.make_namespace(BASE)
    target = os.readlink(f"/proc/self/fd/{namespace}")  # noqa: PTH115 - a name, no path
    os.close(namespace)
    assert target.startswith("user:[")
    assert target != os.readlink("/proc/self/ns/user")  # noqa: PTH115


async def test_where_the_host_cannot_it_says_so_and_works(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(idmap, "why_not", lambda sources: "this host lets no user namespace be made (no)")
        old = OciBackend(settings)
        await old.start()
    assert not old.capabilities.userns
    assert "no user namespace" in old.capabilities.notes["userns"]
    await old.create("sb1-1", SPEC)
    assert (await run(old, "cat /proc/self/uid_map")).split() == ["0", "0", "4294967295"]
    assert "id ranges" not in resources(settings.data_dir)
    assert await run(old, "touch /workspace/f; stat -c %u f") == "1000\n"
    await old.close()
    new = OciBackend(settings)
    await new.start()
    assert new.capabilities.userns
    assert await run(new, "stat -c %u f") == "1000\n"
    await new.create("sb2-1", SPEC)
    await new.stop_environment("sb1-1")
    await new.start_environment("sb1-1")
    assert (await run(new, "cat /proc/self/uid_map; stat -c %u f")).split() == ["0", "0", "4294967295", "1000"]
    assert (await run(new, "cat /proc/self/uid_map", "sb2-1")).split()[1] != "0"
    new.capabilities = dataclasses.replace(new.capabilities, userns=False, notes={"userns": "gone"})
    await new.stop_environment("sb2-1")
    with pytest.raises(UnsupportedError, match="gone"):
        await new.start_environment("sb2-1")
    for id in ("sb1-1", "sb2-1"):
        await new.destroy(id)
    await wait_until_clean(settings.data_dir)
    await new.close()


async def test_an_environment_of_an_older_release_runs_on_and_can_be_destroyed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk was mounted in its own directory, and its record knows no range."""
    with monkeypatch.context() as patch:
        patch.setattr(idmap, "why_not", lambda sources: "older")
        old = OciBackend(settings)
        await old.start()
    await old.create("sb1-1", SPEC)
    home = Path(os.path.realpath(settings.data_dir)) / "runc/env/sb1-1"
    (home / "mnt").mkdir()
    box = Path(f"/run/agent-sandbox/{old.instance}/box")
    subprocess.run(["mount", "--move", str(box / "sb1-1"), str(home / "mnt")], check=True)
    (box / "sb1-1").rmdir()
    record = (home / "spec.json").read_text()
    (home / "spec.json").write_text(record.replace(', "ids": null', "").replace(', "image_env": {}', ""))
    assert '"ids"' not in (home / "spec.json").read_text()
    await old.close()
    new = OciBackend(settings)
    await new.start()
    assert await run(new, "echo kept > f; cat f") == "kept\n"
    await new.stop_environment("sb1-1")
    await new.start_environment("sb1-1")
    assert await run(new, "cat f") == "kept\n"
    await new.destroy("sb1-1")
    await wait_until_clean(settings.data_dir)
    await new.close()


# -- the network's rules -----------------------------------------------------------------------


async def test_low_ports_and_pings_need_no_privilege(backend: OciBackend) -> None:
    await backend.create("sb1-1", SPEC)
    program = """
import socket
server = socket.create_server(("127.0.0.1", 80))
socket.create_connection(("127.0.0.1", 80)).sendall(b"x")
print(server.accept()[0].recv(1))
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
echo.connect(("127.0.0.1", 0)); echo.settimeout(5)
echo.send(b"\\x08\\0\\0\\0\\0\\0\\0\\1hello")
print(echo.recv(100)[8:])
"""
    assert await python(backend, program) == "b'x'\nb'hello'\n"
    await backend.create("sb2-1", dataclasses.replace(SPEC, uid=4321, gid=1234))
    assert await python(backend, program, "sb2-1") == "b'x'\nb'hello'\n"
    assert await run(backend, "cat /proc/sys/net/ipv4/ping_group_range", "sb2-1") == "1234\t1234\n"


# -- control groups ----------------------------------------------------------------------------


async def test_a_command_reads_its_own_limits(backend: OciBackend) -> None:
    await backend.create("sb1-1", SPEC)
    v2 = await run(backend, "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/cpu.max /sys/fs/cgroup/pids.max")
    v1 = await run(
        backend,
        "cd /sys/fs/cgroup; cat memory/memory.limit_in_bytes cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us pids/pids.max; "
        "grep oom_kill_disable memory/memory.oom_control",
    )
    assert (v2.split() == ["268435456", "50000", "100000", "64"]) != (
        v1.split() == ["268435456", "50000", "100000", "64", "oom_kill_disable", "0"]
    )


async def test_a_servers_umask_hides_no_control_group(backend: OciBackend) -> None:
    before = os.umask(0o077)
    try:
        await backend.create("sb1-1", SPEC)
    finally:
        os.umask(before)
    seen = await run(
        backend, "cd /sys/fs/cgroup; find . -maxdepth 1 ! -perm 0755; cat memory*/memory.oom_control memory.events"
    )
    assert "oom_kill 0" in seen.splitlines()
    assert "./" not in seen


async def test_control_groups_show_nothing_else_and_take_nothing(backend: OciBackend) -> None:
    for id in ("sb1-1", "sb2-1"):
        await backend.create(id, SPEC)
    mounts = [line.split() for line in (await run(backend, "cat /proc/self/mountinfo")).splitlines()]
    groups = [fields for fields in mounts if " - cgroup" in " ".join(fields)]
    assert groups
    for fields in groups:
        assert fields[3] == "/"
        assert {"ro", "nosuid", "nodev", "noexec"} <= set(fields[5].split(","))
    last = {fields[4]: fields for fields in mounts}
    for place in ("/sys", "/sys/fs", "/sys/fs/cgroup"):
        assert "ro" in last[place][5].split(",")
    assert await run(backend, "ls /sys/fs") == "cgroup\n"
    seen = await run(backend, "find /sys/fs/cgroup -mindepth 2 -type d; cat /proc/self/cgroup")
    assert "agent-sandbox" not in seen
    assert "sb2-1" not in seen
    assert [line for line in seen.splitlines() if line.startswith("/")] == []
    pids = (await run(backend, "cat /sys/fs/cgroup/cgroup.procs /sys/fs/cgroup/*/cgroup.procs 2>/dev/null")).split()
    assert pids
    assert all(int(pid) < 100 for pid in pids)
    written = await run(
        backend,
        "for f in $(find /sys/fs/cgroup -type f); do if echo 1 > $f; then echo wrote $f; fi; done 2>/dev/null; "
        "mkdir /sys/fs/cgroup/x /sys/fs/cgroup/memory/x 2>/dev/null; find /sys/fs/cgroup -name x",
    )
    assert written == ""


async def test_a_file_of_the_groups_is_no_file_to_write(backend: OciBackend) -> None:
    """Not even the daemon, which is root there, can."""
    await backend.create("sb1-1", SPEC)
    pid = int(str((await backend.inspect("sb1-1")).details["pid"]))
    place = f"/proc/{pid}/root/sys/fs/cgroup"
    program = f"""
import os
fds = [os.open(f'/proc/{pid}/ns/{{name}}', 0) for name in ('user', 'mnt')]
import ctypes; libc = ctypes.CDLL(None, use_errno=True)
for fd in fds: assert libc.setns(fd, 0) == 0, ctypes.get_errno()
os.setresgid(0, 0, 0); os.setresuid(0, 0, 0)
wrote = []
for base, _, names in os.walk('/sys/fs/cgroup'):
    try: os.mkdir(base + '/x'); wrote.append(base)
    except OSError: pass
    for name in names:
        try: os.close(os.open(base + '/' + name, os.O_WRONLY)); wrote.append(name)
        except OSError: pass
print(len(names) > 0, wrote)
"""
    assert Path(place).is_dir()
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True []\n", done.stderr


async def test_a_root_that_cannot_be_mapped_is_an_error_and_leaves_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = OciBackend(settings)
    await backend.start()

    def refuse(source: Path, target: Path, namespace: int) -> None:
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(idmap, "attach", refuse)
        with pytest.raises(BackendError):
            await backend.create("sb1-1", SPEC)
    assert resources(settings.data_dir) == {}
    await backend.create("sb1-1", SPEC)
    await backend.destroy("sb1-1")
    await backend.close()
    await wait_until_clean(settings.data_dir)


PROGRAM = """
import asyncio, sys
from pathlib import Path
from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.config import Settings
from agent_sandbox.types import SandboxSpec
async def main():
    spec = SandboxSpec(image="host", image_digest="", cpus=1, memory_mb=128, pids_limit=32, disk_mb=32, tmp_mb=16)
    backend = OciBackend(Settings(data_dir=Path(sys.argv[1])))
    await backend.start()
    print(backend.capabilities.userns, backend.capabilities.notes)
    await backend.create("sb1-1", spec)
    await backend.write_file("sb1-1", "/workspace/f", b"kept", 0o644)
    await backend.stop_environment("sb1-1")
    await backend.start_environment("sb1-1")
    print(await backend.read_file("sb1-1", "/workspace/f", 10))
    await backend.destroy("sb1-1")
    await backend.close()
asyncio.run(main())
"""


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
def test_the_privileges_of_the_service_are_enough(tmp_path: Path, umask: int) -> None:
    """What ``packaging/agent-sandbox.service`` leaves, and any umask."""
    unit = (Path(__file__).resolve().parents[2] / "packaging" / "agent-sandbox.service").read_text()
    dropped = {
        name for line in unit.splitlines() if line.startswith("CapabilityBoundingSet=~") for name in line[23:].split()
    }
    assert len(dropped) > 10
    drop = ",".join(f"-{name.removeprefix('CAP_').lower()}" for name in sorted(dropped))
    command = [
        "setpriv",
        "--no-new-privs",
        "--bounding-set",
        drop,
        sys.executable,
        "-c",
        PROGRAM,
        str(tmp_path / "data"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, umask=umask, timeout=60)
    assert done.stdout.splitlines()[1:] == ["b'kept'"], done.stderr
    assert done.stdout.startswith("True ")
    assert resources(tmp_path / "data") == {}
