"""MicroVMs on the real QEMU, or Firecracker (``tests/nested``): their jail, a monitor's death, what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.linux import mounts
from agent_sandbox.backends.microvm import MicrovmBackend
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, ConflictError, LimitExceededError, NotFoundError, SandboxError
from agent_sandbox.guest import limits
from agent_sandbox.types import ExecExit, ExecOutput, SandboxSpec
from tests import microvms
from tests.real.leaks import resources, wait_until_clean

pytestmark = pytest.mark.real

SPEC = SandboxSpec(image="host", image_digest="", cpus=1.0, memory_mb=256, pids_limit=64, disk_mb=64, tmp_mb=32)


@pytest.fixture
def settings(tmp_path: Path, machine_dir: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", machine_dir=str(machine_dir), allow_tcg=True)


@pytest_asyncio.fixture
async def backend(settings: Settings) -> AsyncIterator[MicrovmBackend]:
    backend = microvms.make_backend(settings)
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


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def test_a_command_that_is_not_kept_says_why_it_was_killed(backend: MicrovmBackend) -> None:
    await backend.create("sb1-1", SPEC)
    for argv, killed in ((["python3", "-c", "len(b'x' * 2**31)"], True), (["sh", "-c", "kill -9 $$"], False)):
        events = backend.exec("sb1-1", argv, env={}, workdir="/workspace", timeout_seconds=120)
        (end,) = [event async for event in events if isinstance(event, ExecExit)]
        assert (end.signal, end.oom_killed) == (signal.SIGKILL, killed)


async def test_threads_run_on_two_processors(backend: MicrovmBackend) -> None:
    program = (
        "import ctypes, os, threading; seen = set(); where = ctypes.CDLL(None).sched_getcpu\n"
        "def run(cpu): os.sched_setaffinity(0, {cpu}); sum(range(20000)); seen.add(where())\n"
        "threads = [threading.Thread(target=run, args=(n % 2,)) for n in range(8)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "print(os.cpu_count(), sorted(seen))"
    )
    await backend.create("sb1-1", replace(SPEC, cpus=1.5))
    assert await shell(backend, "sb1-1", f'python3 -c "{program}"') == "2 [0, 1]\n"


async def test_a_monitor_is_jailed_and_its_death_is_a_stop_that_keeps_the_workspace(
    backend: MicrovmBackend, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await backend.create("sb1-1", SPEC)
    assert await shell(backend, "sb1-1", "echo kept > f; sync; cat f; uname -n") == "kept\nsb1-1\n"
    details = (await backend.inspect("sb1-1")).details
    pid = int(str(details["pid"]))
    seen = status(pid)
    (user,) = set(seen["Uid"].split())
    (group,) = set(seen["Gid"].split())
    assert settings.id_range_base <= int(user) == int(group) < 0x7FFE_0000
    assert (seen["Groups"], seen["CapEff"], seen["NoNewPrivs"], seen["Seccomp"]) == ("", "0" * 16, "1", "2")
    for namespace in ("net", "ipc"):
        assert Path(f"/proc/{pid}/ns/{namespace}").readlink() != Path(f"/proc/self/ns/{namespace}").readlink()
    assert Path(f"/proc/{pid}/net/dev").read_text().count(":") == 1  # the loopback, which is down
    allowed = Path(f"/proc/{pid}/limits").read_text().splitlines()
    found = {line[:26].strip(): line[26:].split()[:2] for line in allowed}
    # Its drive; Firecracker itself writes what the guest has in memory, too.
    largest = {"qemu": 64, "firecracker": 256 + 96}[microvms.MONITOR]
    assert found["Max file size"] == [str(largest << 20)] * 2
    assert found["Max core file size"] == ["1", "1"]
    assert int(found["Max processes"][1]) < 1000
    limited = details["limits"]
    assert isinstance(limited, dict)
    assert (limited["cpus"], limited["memory_bytes"], limited["pids"]) == (1.0, 256 << 20, 64)
    endpoint = await backend.endpoint("sb1-1")
    endpoint.socket.close()
    for name in ("cmdline", "environ"):
        assert endpoint.key not in Path(f"/proc/{pid}/{name}").read_bytes()

    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxError):
        await shell(backend, "sb1-1", "true")
    async with asyncio.timeout(30):
        while await backend.is_running("sb1-1"):
            await asyncio.sleep(0.02)
    with pytest.raises(BackendError, match="start it again"):
        await shell(backend, "sb1-1", "true")
    assert await backend.list_ids() == ["sb1-1"]
    drive = settings.data_dir / microvms.MONITOR / "env/sb1-1/workspace.img"
    # As a kernel leaves it that met an error: valid, and with errors.
    subprocess.run(["/sbin/debugfs", "-w", "-R", "set_super_value state 3", drive], check=True, capture_output=True)
    await backend.start_environment("sb1-1")
    assert "sb1-1's workspace met errors" in caplog.text
    assert await shell(backend, "sb1-1", "cat f; echo more >> f; cat f") == "kept\nkept\nmore\n"

    pid = int(str((await backend.inspect("sb1-1")).details["pid"]))
    monkeypatch.setattr(limits, "PING_SECONDS", 1.0)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SandboxError, match="did not answer"):  # a guest that hangs is told, and nobody waits for ever
        await shell(backend, "sb1-1", "true")
    os.kill(pid, signal.SIGCONT)
    assert await shell(backend, "sb1-1", "cat f") == "kept\nmore\n"

    await backend.stop_environment("sb1-1")
    assert set(resources(settings.data_dir)) == {"environments", "id ranges"}
    with pytest.raises(ConflictError, match="start it"):
        await shell(backend, "sb1-1", "true")
    await backend.destroy("sb1-1")
    await wait_until_clean(settings.data_dir)


async def test_a_new_server_finds_what_goes_on_and_ends_what_nobody_knows(
    backend: MicrovmBackend, settings: Settings
) -> None:
    await asyncio.gather(*(backend.create(f"sb{name}-1", SPEC) for name in ("known", "lost", "stray")))
    await shell(backend, "sbknown-1", "echo kept > f; sleep 3000 & echo $! > pid")
    for name in ("lost", "stray"):  # as a server leaves them that was killed while it destroyed or created one
        for file in ("spec.json", "key", "config.img"):
            (settings.data_dir / backend.name / "env" / f"sb{name}-1" / file).unlink()
    (run,) = Path("/run/agent-sandbox").glob(f"{backend.instance}-{backend.name}")
    (run / "vm" / "sbstray-1" / "process.json").unlink()
    second = microvms.make_backend(settings)
    await second.start()
    assert await second.list_ids() == ["sbknown-1", "sblost-1", "sbstray-1"]
    assert [await second.is_running(id) for id in await second.list_ids()] == [True, False, False]
    await backend.drop_guest("sbknown-1")
    assert await shell(second, "sbknown-1", "cat f; kill -0 $(cat pid) && echo runs") == "kept\nruns\n"
    for name in ("lost", "stray", "known"):
        await second.destroy(f"sb{name}-1")
    await wait_until_clean(settings.data_dir)
    await second.close()


async def test_a_kernel_that_does_not_start_is_told_with_its_last_words(settings: Settings, tmp_path: Path) -> None:
    daemon = tmp_path / "daemon"
    daemon.write_bytes(Path("/bin/true").read_bytes())
    daemon.chmod(0o755)
    backend = microvms.make_backend(Settings(**{**vars(settings), "sandboxd": str(daemon)}))
    await backend.start()
    with pytest.raises(BackendError, match="panic"):
        await backend.create("sb1-1", SPEC)
    await wait_until_clean(settings.data_dir)
    await backend.close()


async def test_a_full_host_disk_is_told_and_nothing_stays(settings: Settings, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounts.mount("none", small, "tmpfs", 0, "size=96m")
    try:
        backend = microvms.make_backend(Settings(**{**vars(settings), "data_dir": small / "data"}))
        await backend.start()
        state = os.statvfs(small)
        (small / "filler").write_bytes(bytes(state.f_bavail * state.f_frsize - 4_096))
        with pytest.raises(LimitExceededError, match="disk is full"):
            await backend.create("sb1-1", SPEC)
        assert await backend.list_ids() == []
        await backend.close()
    finally:
        mounts.unmount(small)


async def test_what_a_checkpoint_could_not_let_go_on_goes_on_with_the_next_call(
    backend: MicrovmBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def deaf(*args: object) -> None:
        raise BackendError("QEMU did not answer")

    await backend.create("sb1-1", SPEC)
    (dest := tmp_path / "kept").mkdir()
    with monkeypatch.context() as patch:
        for call in ("save", "running"):
            patch.setattr(backend._monitor, call, deaf)
        with pytest.raises(BackendError, match="did not answer"):
            async with backend.checkpoint("sb1-1", str(dest)):
                pass
    assert list(dest.iterdir()) == []
    assert await shell(backend, "sb1-1", "echo on") == "on\n"


async def test_what_is_missing_is_told_with_its_remedy(settings: Settings, tmp_path: Path) -> None:
    def changed(**values: object) -> MicrovmBackend:
        return microvms.make_backend(Settings(**{**vars(settings), **values}))

    install, answers = {
        "qemu": ("apt-get install qemu", "does not answer as QEMU"),
        "firecracker": ("AGENT_SANDBOX_FIRECRACKER", "firecracker"),
    }[microvms.MONITOR]
    for program, remedy in ((str(tmp_path / "none"), install), ("/bin/true", answers)):
        with pytest.raises(BackendError, match=remedy):
            await changed(**{microvms.MONITOR: program}).start()
    backend = changed(machine_dir=str(tmp_path / "empty"))
    with pytest.raises(BackendError, match="agent-sandbox image kernel"):
        await backend.start()
    await backend.close()
    assert not list(Path("/run/agent-sandbox").glob(f"{backend.instance}-*"))
    with pytest.raises(NotFoundError):
        await changed().inspect("sbnever-1")
