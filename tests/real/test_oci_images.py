"""Images on a real kernel: what the host image hides and runs, and an imported root file system, read-only and not."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.config import Settings
from agent_sandbox.errors import NotFoundError
from agent_sandbox.images import ImageStore
from agent_sandbox.types import ExecExit, ExecOutput, SandboxSpec
from tests.real.leaks import resources, wait_until_clean
from tests.real.rootfs import build_rootfs
from tests.unit.images_harness import docker_archive

pytestmark = pytest.mark.real

SPEC = SandboxSpec(image="host", image_digest="", cpus=1, memory_mb=512, pids_limit=128, disk_mb=128, tmp_mb=64)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[OciBackend]:
    backend = OciBackend(Settings(data_dir=tmp_path / "data"))
    await backend.start()
    yield backend
    for id in await backend.list_ids():
        await backend.destroy(id)
    await backend.close()
    await wait_until_clean(tmp_path / "data")


async def run(backend: OciBackend, command: str, id: str = "sb1-1", **env: str) -> str:
    output, end = b"", None
    async for event in backend.exec(id, ["/bin/sh", "-c", command], env=env, workdir="/workspace", timeout_seconds=60):
        if isinstance(event, ExecOutput):
            output += event.data
        elif isinstance(event, ExecExit):
            end = event
    assert end is not None
    return output.decode() + ("" if end.code == 0 else f"[{end.code or end.signal}]")


async def test_the_host_is_hidden(backend: OciBackend, tmp_path: Path) -> None:
    await backend.create("sb1-1", SPEC)
    for directory in [
        "/root",
        "/home",
        "/opt",
        "/mnt",
        "/media",
        "/srv",
        "/var/lib",
        "/var/log",
        "/usr/local",
        "/usr/src",
    ]:
        assert await run(backend, f"ls -A {directory}") == "", directory
    secrets = "/etc/shadow /etc/ssl/private /etc/ssh /etc/sudoers /var/run/docker.sock /boot /lost+found"
    for path in (*secrets.split(), str(tmp_path), __file__, str(Path.home() / ".bashrc")):
        assert await run(backend, f"test -e '{path}'") == "[1]", path
    assert await run(backend, "cat /etc/machine-id") == "", "there and empty, as machine-id(5) says of images"
    assert await run(backend, "ls -A /run") == "sandboxd\n"
    assert await run(backend, "ls -A /tmp /var/tmp/ /workspace") == "/tmp:\n\n/var/tmp/:\n\n/workspace:\n"
    names = (await run(backend, "hostname; cat /etc/hostname; cat /etc/resolv.conf; cat /etc/hosts")).split()
    assert socket.gethostname() not in names
    accounts = (await run(backend, "cut -d: -f1 /etc/passwd; cut -d: -f1 /etc/group")).split()
    assert accounts == ["root", "nobody", "sandbox", "root", "tty", "nogroup", "sandbox"]
    backing = "cat /sys/block/*/loop/backing_file /sys/class/block/*/loop/backing_file 2>/dev/null; ls /sys/fs"
    assert str(tmp_path) not in await run(backend, backing)


async def test_nothing_of_the_host_can_be_written(backend: OciBackend) -> None:
    await backend.create("sb1-1", SPEC)
    for path in [
        "/",
        "/usr",
        "/usr/bin",
        "/usr/local",
        "/etc",
        "/root",
        "/var",
        "/run",
        "/dev",
        "/sys",
        "/proc/sys/kernel",
    ]:
        assert "[" in await run(backend, f"touch {path}/x 2>/dev/null"), path
    assert await run(backend, "touch /tmp/x /dev/shm/x /workspace/x") == ""


async def test_the_programs_of_the_host_run(backend: OciBackend) -> None:
    await backend.create("sb1-1", SPEC)
    expected = {
        "python3": ("python3 -c 'import ssl, sqlite3, ctypes, subprocess; print(6*7)'", "42\n"),
        "perl": ("perl -MPOSIX -e 'print 6*7, chr(10)'", "42\n"),
        "awk": ("awk 'BEGIN { print 6*7 }'", "42\n"),
        "bash": ("bash -c 'echo $((6*7))'", "42\n"),
        "git": (
            "git init -q . && git -c user.name=a -c user.email=b commit -qm x --allow-empty && git log --format=%s",
            "x\n",
        ),
        "gcc": ("echo 'int main(void) { return 42; }' > a.c && gcc a.c -o a && ./a", "[42]"),
        "node": ("node -e 'console.log(6*7)'", "42\n"),
        "gdb": ("gdb --batch -ex run -ex quit /usr/bin/true 2>&1 | grep -c 'exited normally'", "1\n"),
    }
    there = [name for name in expected if shutil.which(name, path="/usr/bin:/bin")]
    assert {"python3", "perl", "awk", "bash"} <= set(there)
    for name in there:
        command, output = expected[name]
        assert await run(backend, command) == output, name


async def test_threads_and_sockets_work(backend: OciBackend) -> None:
    await backend.create("sb1-1", SPEC)
    program = """
import asyncio, socket, threading, multiprocessing, tempfile, fcntl, os, signal
threads = [threading.Thread(target=lambda: None) for _ in range(20)]
[t.start() for t in threads]; [t.join() for t in threads]
server = socket.create_server(("127.0.0.1", 0)); client = socket.create_connection(server.getsockname()); client.close()
a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
with multiprocessing.Pool(2) as pool: assert pool.map(abs, [-1, -2]) == [1, 2]
assert asyncio.run(asyncio.to_thread(os.getuid)) == 1000
with tempfile.TemporaryFile() as f: fcntl.flock(f, fcntl.LOCK_EX)
signal.pidfd_send_signal(os.pidfd_open(os.getpid()), 0)
print("all well")
"""
    await backend.write_file("sb1-1", "/workspace/p.py", program.encode(), 0o644)
    assert await run(backend, "python3 p.py") == "all well\n"


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    return build_rootfs(tmp_path / "rootfs")


async def test_an_imported_image_runs(backend: OciBackend, rootfs: Path, tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "data")
    digest = store.import_image("small:1", rootfs).digest
    resolved = await backend.resolve_image("small:1")
    assert (resolved.digest, resolved.pinned) == (digest, True)
    await backend.create("sb1-1", dataclasses.replace(SPEC, image="small:1", image_digest=digest))
    assert await run(backend, "id -un; pwd; cat /etc/marker; ls /") == (
        "sandbox\n/workspace\nof the image\nbin\ndata\ndev\netc\nlib\nlib64\nproc\nrun\nsys\ntmp\nworkspace\n"
    )
    assert await run(backend, "touch /data/x 2>/dev/null") == "[1]"
    assert await run(backend, "ls /usr 2>/dev/null") == "[2]"
    info = await backend.inspect("sb1-1")
    assert info.details["image_digest"] == digest


async def test_the_images_environment_is_under_every_command(backend: OciBackend, rootfs: Path, tmp_path: Path) -> None:
    """Image, then HOME, then the sandbox's, then the command's; and so by another server that finds it again."""
    with tarfile.open(tmp_path / "layer.tar", "w") as tar:
        tar.add(rootfs, ".")
    config = {
        "Env": ["PATH=/opt/tools:/bin", "HOME=/root", "OF=image", "A=image", "B=image"],
        "User": "root",
        "Entrypoint": ["/bin/false"],
        "WorkingDir": "/data",
    }
    saved = docker_archive(tmp_path / "saved.tar", [(["tools:1"], [(tmp_path / "layer.tar").read_bytes()], config)])
    digest = ImageStore(tmp_path / "data").import_image("tools:1", saved).digest
    spec = dataclasses.replace(SPEC, image="tools:1", image_digest=digest, env={"A": "sandbox", "B": "sandbox"})
    await backend.create("sb1-1", spec)
    asked = "echo $PATH $HOME $OF $A $B; pwd; id -u"
    expected = "/opt/tools:/bin /workspace image sandbox exec\n/workspace\n1000\n"
    assert await run(backend, asked, B="exec") == expected
    again = OciBackend(Settings(data_dir=tmp_path / "data"))
    await again.start()
    assert await run(again, asked, B="exec") == expected
    await again.destroy("sb1-1")
    await again.close()


async def test_a_writable_root_is_the_sandboxs_own(backend: OciBackend, rootfs: Path, tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "data")
    digest = store.import_image("small", rootfs).digest
    spec = dataclasses.replace(SPEC, image="small", image_digest=digest, read_only_rootfs=False)
    await backend.create("sb1-1", spec)
    await backend.create("sb2-1", spec)
    written = await run(backend, "echo mine > /data/new; echo changed > /data/lower; cat /data/new /data/lower")
    assert written == "mine\nchanged\n"
    assert await run(backend, "ls /data; cat /data/lower", "sb2-1") == "lower\nlower\n"
    assert (store.open("small", digest).rootfs / "data/lower").read_text() == "lower\n"
    assert await run(backend, "touch /etc/x 2>/dev/null") == "[1]"
    full = await run(backend, "cat /dev/zero > /data/big 2>/dev/null")
    assert full == "[1]"
    assert await run(backend, "head -c 1000000 /dev/zero > /workspace/f 2>/dev/null") == "[1]"
    assert await run(backend, "echo x > /workspace/f; cat /workspace/f", "sb2-1") == "x\n"
    await backend.destroy("sb1-1")
    await backend.destroy("sb2-1")
    await wait_until_clean(tmp_path / "data")


async def test_an_image_that_went_is_not_found(backend: OciBackend, rootfs: Path, tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "data")
    digest = store.import_image("small", rootfs).digest
    store.remove("small")
    with pytest.raises(NotFoundError):
        await backend.resolve_image("small")
    with pytest.raises(NotFoundError, match="import it again"):
        await backend.create("sb1-1", dataclasses.replace(SPEC, image="small", image_digest=digest))
    assert resources(tmp_path / "data") == {}


async def test_the_skeleton_stays_under_a_running_sandbox(backend: OciBackend, tmp_path: Path) -> None:
    await backend.create("sb1-1", SPEC)
    [skeleton] = (tmp_path / "data/images/host").iterdir()
    other = tmp_path / "data/images/host/an-old-one/rootfs"
    other.mkdir(parents=True)
    second = OciBackend(Settings(data_dir=tmp_path / "data", sandbox_user="1001:1001"))
    await second.start()
    assert skeleton.is_dir()
    assert not other.exists()
    assert await run(backend, "cat /etc/hostname") == "sandbox\n"
    await second.create("sb2-1", dataclasses.replace(SPEC, uid=1001, gid=1001))
    found = await run(second, "id -u; id -un; ls -ld /workspace | cut -d' ' -f1,3", "sb2-1")
    assert found == "1001\nsandbox\ndrwxr-xr-x sandbox\n"
    await second.destroy("sb2-1")
    await second.close()
