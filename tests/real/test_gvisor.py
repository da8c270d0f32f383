"""The gvisor backend on the real runsc: what it shares with runc's, its limits, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.oci import GvisorBackend, OciBackend
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, ConflictError, NotFoundError, SandboxError
from agent_sandbox.types import ExecOutput, SandboxSpec
from tests.real.leaks import resources, wait_until_clean

pytestmark = pytest.mark.real

SPEC = SandboxSpec(image="host", image_digest="", cpus=1.0, memory_mb=256, pids_limit=64, disk_mb=64, tmp_mb=32)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data")


@pytest_asyncio.fixture
async def backend(settings: Settings) -> AsyncIterator[GvisorBackend]:
    backend = GvisorBackend(settings)
    await backend.start()
    yield backend
    for id in await backend.list_ids():
        await backend.destroy(id)
    await wait_until_clean(settings.data_dir, 30)
    await backend.close()


async def shell(backend: Backend, id: str, command: str) -> str:
    found = b""
    argv = ["sh", "-c", f"exec 2>&1; {command}"]
    async for event in backend.exec(id, argv, env={}, workdir="/workspace", timeout_seconds=120):
        found += event.data if isinstance(event, ExecOutput) else b""
    return found.decode(errors="surrogateescape")


async def test_stopped_started_and_taken_over_it_keeps_its_workspace(
    backend: GvisorBackend, settings: Settings
) -> None:
    await backend.create("sb1-1", SPEC)
    assert "Linux" in await shell(backend, "sb1-1", "uname; echo kept > f; echo gone > /tmp/f; sleep 3000 &")
    await backend.stop_environment("sb1-1")
    assert await backend.list_ids() == ["sb1-1"]
    assert not await backend.is_running("sb1-1")
    with pytest.raises(ConflictError):
        await shell(backend, "sb1-1", "true")
    assert set(resources(settings.data_dir)) == {"environments"}
    await backend.start_environment("sb1-1")
    assert await shell(backend, "sb1-1", "cat f /tmp/f") == "kept\ncat: /tmp/f: No such file or directory\n"
    # What a killed server leaves, the next one has.
    second = GvisorBackend(settings)
    await second.start()
    assert await second.is_running("sb1-1")
    assert await shell(second, "sb1-1", "cat f") == "kept\n"
    await second.close()


async def test_what_a_daemon_that_was_taken_over_can_write_on_the_host_is_little_and_goes(
    backend: GvisorBackend, settings: Settings
) -> None:
    await backend.create("sb1-1", SPEC)
    shared = settings.data_dir / "gvisor" / "env" / "sb1-1" / "daemon"
    with pytest.raises(OSError, match="No space left"):  # as the sandbox's root does: through the host's files
        (shared / "large").write_bytes(bytes(1 << 20))
    (shared / "large").unlink()
    with pytest.raises(OSError, match="No space left"):  # before it is deeper than what removes trees goes
        (shared / "/".join("d" * 500)).mkdir(parents=True)
    await backend.stop_environment("sb1-1")
    assert not shared.exists()
    await backend.start_environment("sb1-1")
    assert await shell(backend, "sb1-1", "echo goes on") == "goes on\n"


async def test_two_backends_of_one_server_leave_each_other_alone(settings: Settings) -> None:
    runc, gvisor = OciBackend(settings), GvisorBackend(settings)
    await runc.start()
    await gvisor.start()
    await asyncio.gather(runc.create("sb1-1", SPEC), gvisor.create("sb1-1", SPEC))
    await asyncio.gather(*(shell(each, "sb1-1", f"echo {each.name} > f") for each in (runc, gvisor)))
    assert (await runc.list_ids(), await gvisor.list_ids()) == (["sb1-1"], ["sb1-1"])
    kernels = [await shell(each, "sb1-1", "uname -v") for each in (runc, gvisor)]
    assert kernels[0] != kernels[1]
    for one, other in ((OciBackend, gvisor), (GvisorBackend, runc)):
        again = one(settings)  # starting clears what is nobody's
        await again.start()
        assert await shell(other, "sb1-1", "cat f; ls /usr/bin/env") == f"{other.name}\n/usr/bin/env\n"
        await again.close()
    await runc.destroy("sb1-1")
    async with asyncio.timeout(30):
        while await runc.list_ids():
            await asyncio.sleep(0.05)
    await runc.close()
    assert await shell(gvisor, "sb1-1", "cat f") == "gvisor\n"
    await gvisor.destroy("sb1-1")
    await wait_until_clean(settings.data_dir, 30)
    await gvisor.close()


async def test_what_the_known_differences_leave_is_still_out_of_reach(
    backend: GvisorBackend, settings: Settings
) -> None:
    await backend.create("sb1-1", SPEC)
    status = await shell(backend, "sb1-1", "cat /proc/self/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (fields["Uid"].split(), fields["Gid"].split()) == (["1000"] * 4, ["1000"] * 4)
    assert fields["Groups"].strip() == ""
    assert {int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd")} == {0}
    assert fields["Seccomp"].strip() == "2"
    key = (settings.data_dir / "gvisor" / "env" / "sb1-1" / "key").read_bytes()
    program = """
import os, sys
for name in ('environ', 'cmdline', 'auxv', 'maps'):
    sys.stdout.buffer.write(open(f'/proc/1/{name}', 'rb').read())
for path in ('/proc/1/mem', '/run/asb/config', '/dev/fuse', '/sys/fs/cgroup/pids/pids.max'):
    for mode in ('rb', 'r+b') if 'pids' not in path else ('r+b',):
        try: open(path, mode).read(1); print('OPENED', path, mode)
        except OSError: pass
for path in ('/proc/1/root', '/proc/1/cwd', '/proc/1/exe', *(f'/proc/1/fd/{n}' for n in range(64))):
    try: print('LINK', path, os.readlink(path), os.listdir(path))
    except OSError: pass
for number, call in enumerate((lambda: os.kill(1, 9), lambda: os.listdir('/run/asb'),
             lambda: os.mkdir('/sys/fs/cgroup/pids/x'), lambda: os.setuid(0), lambda: os.chroot('/tmp'),
             lambda: os.mknod('/tmp/fuse', 0o20666, os.makedev(10, 229)))):
    try: call(); print('DONE', number)
    except OSError: pass
print('end')
"""
    await backend.write_file("sb1-1", "/workspace/p.py", program.encode(), 0o644)
    said = await shell(backend, "sb1-1", "python3 p.py")
    assert said.endswith("end\n")
    assert [line for line in said.splitlines() if line.startswith(("OPENED", "DONE", "LINK"))] == []
    assert key.hex() not in said
    assert key not in said.encode(errors="surrogateescape")
    assert await shell(backend, "sb1-1", "cat /sys/fs/cgroup/pids/pids.max") == "64\n"


async def test_the_cpu_limit_holds_as_the_host_counts(backend: GvisorBackend) -> None:
    await backend.create("sb1-1", dataclasses.replace(SPEC, cpus=0.25))
    loop = asyncio.get_running_loop()

    async def used() -> float:
        usage = (await backend.inspect("sb1-1")).details["usage"]
        assert isinstance(usage, dict)
        return float(usage["cpu_seconds"])

    before, started = await used(), loop.time()
    await shell(backend, "sb1-1", "for n in 1 2 3; do timeout 3 sh -c 'while :; do :; done' & done; wait")
    assert await used() - before <= 0.25 * (loop.time() - started) * 1.2 + 0.1


async def test_beyond_its_memory_the_sandbox_stops_and_starts_again(backend: GvisorBackend) -> None:
    await asyncio.gather(backend.create("sb1-1", SPEC), backend.create("sb2-1", SPEC))
    await shell(backend, "sb1-1", "echo kept > f")
    with pytest.raises(SandboxError):
        await shell(backend, "sb1-1", "python3 -c 'x = bytearray(1 << 30); print(sum(x[::4096]) or bytes(x)[:1])'")
    async with asyncio.timeout(30):
        while await backend.is_running("sb1-1"):
            await asyncio.sleep(0.05)
    with pytest.raises((BackendError, ConflictError)):
        await shell(backend, "sb1-1", "true")
    assert await shell(backend, "sb2-1", "echo fine") == "fine\n"
    await backend.start_environment("sb1-1")
    assert await shell(backend, "sb1-1", "cat f") == "kept\n"


@pytest.mark.parametrize("milliseconds", [20, 120, 250])
async def test_a_creation_that_is_cancelled_leaves_nothing(
    backend: GvisorBackend, settings: Settings, milliseconds: int
) -> None:
    task = asyncio.create_task(backend.create("sb1-1", SPEC))
    await asyncio.sleep(milliseconds / 1000)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
        await backend.destroy("sb1-1")
    await wait_until_clean(settings.data_dir, 30)
    with pytest.raises(NotFoundError):
        await shell(backend, "sb1-1", "true")


async def test_an_old_or_missing_runsc_is_a_typed_error(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin" / "runsc"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho runsc version 0.0~20221219.0\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/sbin:/usr/bin:/sbin:/bin")
    with pytest.raises(BackendError, match="too old; install it with"):
        await GvisorBackend(settings).start()
    assert not settings.data_dir.exists()
