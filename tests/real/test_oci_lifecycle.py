"""The runc backend on a real kernel: nothing is left behind, whatever fails, and limits are what was asked for."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from agent_sandbox.backends.linux import mounts
from agent_sandbox.backends.linux.requirements import find_sandboxd
from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.backends.oci import backend as oci_backend
from agent_sandbox.config import Settings
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    SandboxError,
    UnsupportedError,
)
from agent_sandbox.types import ExecExit, ExecOutput, SandboxSpec
from tests.real.leaks import descriptors, resources, wait_until_clean

pytestmark = pytest.mark.real

SPEC = SandboxSpec(
    image="host",
    image_digest="",
    cpus=0.5,
    memory_mb=256,
    pids_limit=64,
    disk_mb=64,
    tmp_mb=32,
    env={"TOKEN": "hush-1234"},
)
STEPS = ["image", "record", "disk", "start", "hello", "ready"]


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
    assert not Path(f"/run/agent-sandbox/{backend.instance}").exists()


class AtStep(logging.Handler):
    """Does something when creation logs that it comes to a step."""

    def __init__(self, step: str, action: Callable[[], None]) -> None:
        super().__init__()
        self._step, self._action = step, action

    def emit(self, record: logging.LogRecord) -> None:
        if record.args and record.args[1] == self._step:  # type: ignore[index]
            self._action()


@pytest.fixture
def at_step() -> Iterator[Callable[[str, Callable[[], None]], None]]:
    logger, handlers = logging.getLogger(oci_backend.__name__), []
    level = logger.level
    logger.setLevel(logging.DEBUG)

    def add(step: str, action: Callable[[], None]) -> None:
        handlers.append(AtStep(step, action))
        logger.addHandler(handlers[-1])

    yield add
    for handler in handlers:
        logger.removeHandler(handler)
    logger.setLevel(level)


async def run(backend: OciBackend, id: str, command: str) -> tuple[str, int | None]:
    output, code = b"", None
    async for event in backend.exec(id, ["/bin/sh", "-c", command], env={}, workdir="/workspace", timeout_seconds=120):
        if isinstance(event, ExecOutput):
            output += event.data
        elif isinstance(event, ExecExit):
            code = event.code
    return output.decode(), code


async def test_supervisors_are_no_processes_of_the_sandbox(backend: OciBackend) -> None:
    """Whether they have a command, wait for one, or are about to end because enough others wait."""
    await backend.create("sb1-1", SPEC)
    counts = []
    for number in range(60):
        await asyncio.gather(*(run(backend, "sb1-1", "true") for _ in range(2 + number % 5)))
        counts.append((await backend.guest_stats("sb1-1")).processes)
    assert counts == [0] * 60


async def test_create_run_destroy_leaves_nothing(backend: OciBackend, settings: Settings) -> None:
    before = descriptors()
    for number in range(1, 4):
        id = f"sb{number}-1"
        await backend.create(id, SPEC)
        assert await backend.list_ids() == [id]
        assert await backend.is_running(id)
        assert await run(backend, id, "id -u; pwd; hostname; echo $TOKEN") == (
            "1000\n/workspace\nsandbox\nhush-1234\n",
            0,
        )
        held = resources(settings.data_dir)
        assert {"processes", "control groups", "mounts", "loop devices", "runtime state", "environments"} <= set(held)
        await backend.destroy(id)
        assert "processes" not in resources(settings.data_dir)
        assert not await backend.is_running(id)
        await wait_until_clean(settings.data_dir)
        assert await backend.list_ids() == []
    assert descriptors() == before


async def test_an_environment_is_found_by_the_next_server(settings: Settings) -> None:
    first = OciBackend(settings)
    await first.start()
    await first.create("sb1-1", SPEC)
    assert (await run(first, "sb1-1", "echo here > f"))[1] == 0
    await first.close()
    second = OciBackend(settings)
    await second.start()
    try:
        assert await second.list_ids() == ["sb1-1"]
        assert await second.is_running("sb1-1")
        assert await run(second, "sb1-1", "cat f; echo $TOKEN") == ("here\nhush-1234\n", 0)
        await second.destroy("sb1-1")
        await wait_until_clean(settings.data_dir)
    finally:
        await second.close()


@pytest.mark.parametrize("step", STEPS)
async def test_failure_at_each_step(
    backend: OciBackend, settings: Settings, at_step: Callable[[str, Callable[[], None]], None], step: str
) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    before = descriptors()
    at_step(step, fail)
    with pytest.raises(LimitExceededError, match="disk is full"):
        await backend.create("sb1-1", SPEC)
    assert resources(settings.data_dir) == {}
    assert await backend.list_ids() == []
    assert descriptors() == before


@pytest.mark.parametrize("step", STEPS)
async def test_cancellation_at_each_step(
    backend: OciBackend, settings: Settings, at_step: Callable[[str, Callable[[], None]], None], step: str
) -> None:
    task = asyncio.create_task(backend.create("sb1-1", SPEC))

    def cancel_now_and_again() -> None:
        task.cancel()
        asyncio.get_running_loop().call_later(0.004, task.cancel)

    at_step(step, cancel_now_and_again)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert resources(settings.data_dir) == {}
    await backend.create("sb1-2", SPEC)
    assert await run(backend, "sb1-2", "echo fine") == ("fine\n", 0)


@pytest.mark.parametrize("milliseconds", [0, 1, 3, 5, 8, 12, 16, 20, 25, 30, 40])
async def test_cancellation_at_any_time(backend: OciBackend, settings: Settings, milliseconds: int) -> None:
    task = asyncio.create_task(backend.create("sb1-1", SPEC))
    await asyncio.sleep(milliseconds / 1000)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        assert task.exception() is None
        await backend.destroy("sb1-1")
        await wait_until_clean(settings.data_dir)
    assert resources(settings.data_dir) == {}


@pytest.mark.parametrize("milliseconds", [0, 2, 6, 15, 30])
async def test_destroy_during_create(backend: OciBackend, settings: Settings, milliseconds: int) -> None:
    task = asyncio.create_task(backend.create("sb1-1", SPEC))
    await asyncio.sleep(milliseconds / 1000)
    await backend.destroy("sb1-1")
    await asyncio.wait([task])
    assert task.exception() is None or isinstance(task.exception(), ConflictError)
    await backend.destroy("sb1-1")
    await wait_until_clean(settings.data_dir)


async def test_ten_at_once_and_destroyed_at_once(backend: OciBackend, settings: Settings) -> None:
    ids = [f"sb{number}-1" for number in range(10)]
    await asyncio.gather(*(backend.create(id, SPEC) for id in ids))
    assert await backend.list_ids() == sorted(ids)
    outputs = await asyncio.gather(*(run(backend, id, f"echo {id} > f; cat f") for id in ids))
    assert outputs == [(f"{id}\n", 0) for id in ids]
    await asyncio.gather(*(backend.destroy(id) for id in ids), *(backend.destroy(id) for id in ids))
    assert "processes" not in resources(settings.data_dir)
    await wait_until_clean(settings.data_dir)


async def test_an_id_is_taken_once(backend: OciBackend) -> None:
    results = await asyncio.gather(backend.create("sb1-1", SPEC), backend.create("sb1-1", SPEC), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), ConflictError]
    with pytest.raises(ConflictError):
        await backend.create("sb1-1", SPEC)
    assert await run(backend, "sb1-1", "echo alive") == ("alive\n", 0)


@pytest.mark.parametrize(
    "loss", ["state", "record", "nested", "kinds", "directory", "mount", "daemon", "bundle", "groups"]
)
async def test_destroy_with_any_part_lost(backend: OciBackend, settings: Settings, loss: str) -> None:
    await backend.create("sb1-1", SPEC)
    home = settings.data_dir / "runc" / "env" / "sb1-1"
    state = Path(f"/run/agent-sandbox/{backend.instance}/runc/asb-sb1-1")
    pid = (await backend.inspect("sb1-1")).details["pid"]
    assert isinstance(pid, int)
    match loss:
        case "state":
            shutil.rmtree(state)
        case "record":
            (home / "spec.json").write_bytes(b"{")
            (state / "state.json").write_bytes(b'{"init_process_pid": ')
        case "nested":
            (home / "spec.json").write_bytes(b"[" * 200_000)
        case "kinds":
            for name in ("spec.json", "key"):
                (home / name).unlink()
                (home / name).mkdir()
        case "directory":
            for name in ("spec.json", "key", "sock", "config.json"):
                (home / name).unlink()
        case "mount":
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(_unmount, Path(f"/run/agent-sandbox/{backend.instance}/box/sb1-1"))
        case "daemon":
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.1)
            assert not await backend.is_running("sb1-1")
        case "bundle":
            (home / "config.json").write_bytes(b"")
        case "groups":
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.1)
            for group in resources(settings.data_dir)["control groups"]:
                Path(group).rmdir()
    second = OciBackend(settings)
    await second.start()
    assert await second.list_ids() == ["sb1-1"]
    await second.destroy("sb1-1")
    assert "processes" not in resources(settings.data_dir)
    await wait_until_clean(settings.data_dir)
    await second.close()
    await backend.start()


def _unmount(path: Path) -> None:
    for _ in range(100):
        if os.system(f"umount '{path}' 2>/dev/null") == 0:
            return


async def test_the_unknown(backend: OciBackend) -> None:
    for id in ("nobody-1", "../../etc", "", "x" * 50):
        await backend.destroy(id)
        assert not await backend.is_running(id)
        with pytest.raises(NotFoundError):
            await backend.inspect(id)
        with pytest.raises(NotFoundError):
            await backend.read_file(id, "/etc/passwd", 100)
    with pytest.raises(InvalidRequestError):
        await backend.create("../x", SPEC)


async def test_a_dead_daemon_is_a_typed_error(backend: OciBackend) -> None:
    await backend.create("sb1-1", SPEC)
    await backend.kill_guest("sb1-1")
    assert not await backend.is_running("sb1-1")
    with pytest.raises(BackendError, match=r"not running|broke|closed|lost"):
        await run(backend, "sb1-1", "echo alive")
    assert (await backend.inspect("sb1-1")).running is False


async def test_limits_are_read_back(backend: OciBackend) -> None:
    await backend.create("sb1-1", SPEC)
    details = (await backend.inspect("sb1-1")).details
    limits = details["limits"]
    assert isinstance(limits, dict)
    assert limits["cpus"] == 0.5
    assert limits["memory_bytes"] == 256 << 20
    assert limits["pids"] == 64
    assert limits["memory_swap_bytes"] in (256 << 20, None)
    assert details["capabilities_effective"] == details["capabilities_bounding"] == "00000000000001eb"
    assert details["no_new_privs"] == "1"
    assert details["seccomp_mode"] == "2"
    mounts = {mount["target"]: mount for mount in cast("list[dict[str, str]]", details["mounts"])}
    assert mounts["/"]["options"].startswith("ro")
    for target in ("/usr", "/usr/local", "/run/sandboxd"):
        assert {"ro", "nosuid", "nodev"} <= set(mounts[target]["options"].split(","))
    assert mounts["/workspace"]["type"] == "ext4"
    assert {"rw", "nosuid", "nodev"} <= set(mounts["/workspace"]["options"].split(","))
    size, _ = await run(backend, "sb1-1", "df -k --output=size /tmp /dev/shm | tail -n +2")
    assert size.split() == [str(32 << 10), str(64 << 10)]


async def test_the_disk_is_the_limit(backend: OciBackend) -> None:
    await backend.create("sb1-1", SPEC)
    output, code = await run(
        backend, "sb1-1", "head -c 80000000 /dev/zero > big 2>/dev/null; echo $?; stat -c %s big; ls -A"
    )
    status, size, names = output.splitlines()[-3:]
    assert (code, status, names) == (0, "1", "big")
    assert 40_000_000 < int(size) < 64 << 20
    assert await run(backend, "sb1-1", "rm big; echo again > f; cat f") == ("again\n", 0)


async def test_what_is_not_offered_is_refused_before_any_effect(backend: OciBackend, settings: Settings) -> None:
    for change in ({"network": "full"}, {"read_only_rootfs": False}):
        with pytest.raises(UnsupportedError):
            await backend.create("sb1-1", dataclasses.replace(SPEC, **change))
    with pytest.raises(NotFoundError):
        await backend.create("sb1-1", dataclasses.replace(SPEC, image="nowhere"))
    assert resources(settings.data_dir) == {}


async def test_a_daemon_that_does_not_answer_is_an_error_with_its_words(tmp_path: Path) -> None:
    program = tmp_path / "bad"
    program.write_text("#!/bin/sh\necho the reason it gave\nexit 3\n")
    program.chmod(0o755)
    backend = OciBackend(Settings(data_dir=tmp_path / "data", sandboxd=str(program)))
    await backend.start()
    with pytest.raises(BackendError, match="the reason it gave"):
        await backend.create("sb1-1", SPEC)
    assert resources(tmp_path / "data") == {}
    await backend.close()


async def test_the_daemon_is_a_copy_that_an_upgrade_does_not_touch(tmp_path: Path) -> None:
    program = tmp_path / "installed"
    shutil.copyfile(find_sandboxd(""), program)
    program.chmod(0o755)
    backend = OciBackend(Settings(data_dir=tmp_path / "data", sandboxd=str(program)))
    await backend.start()
    program.unlink()  # as an upgrade does in between
    try:
        await backend.create("sb1-1", SPEC)
        assert await run(backend, "sb1-1", "echo fine") == ("fine\n", 0)
        await backend.stop_environment("sb1-1")
        program.write_text("half a file")
        await backend.start_environment("sb1-1")
        assert await run(backend, "sb1-1", "echo fine") == ("fine\n", 0)
    finally:
        await backend.destroy("sb1-1")
        await wait_until_clean(tmp_path / "data")
        await backend.close()


async def test_what_a_killed_server_left_below_run_goes_with_the_next(settings: Settings) -> None:
    killed = OciBackend(settings)
    await killed.start()
    run_directory = Path("/run/agent-sandbox") / killed.instance
    merged = run_directory / "overlay-probe-0a1b2c3d" / "merged"  # it was killed while it tried whether overlays work
    merged.mkdir(parents=True)
    mounts.mount("none", merged, "tmpfs", 0, "size=64k")
    successor = OciBackend(settings)
    await successor.start()
    assert not merged.parent.exists()
    await successor.close()
    assert not run_directory.exists()
    await killed.close()


async def test_what_a_vanished_data_directory_left_below_run_goes_with_any_next_server(
    backend: OciBackend, tmp_path: Path
) -> None:
    vanished = OciBackend(Settings(data_dir=tmp_path / "vanished"))
    await vanished.start()
    run_directory = Path("/run/agent-sandbox") / vanished.instance
    vanished._places.run_directory._let_go()  # as the kernel does for one that is killed
    shutil.rmtree(tmp_path / "vanished")
    disk = run_directory / "box" / "sb1-1"
    disk.mkdir()
    mounts.mount("none", disk, "tmpfs", 0, "size=64k")
    (disk / "socket-of-somebody").symlink_to("nowhere")
    try:
        await backend.start()
        assert (disk / "socket-of-somebody").is_symlink()
    finally:
        mounts.unmount(disk)
    await backend.start()
    assert not run_directory.exists()
    assert (Path("/run/agent-sandbox") / backend.instance / "box").is_dir()
    await vanished.close()


async def test_no_secret_outside_private_files(backend: OciBackend, settings: Settings) -> None:
    await backend.create("sb1-1", SPEC)
    home = settings.data_dir / "runc" / "env" / "sb1-1"
    key = (home / "key").read_bytes()
    assert len(key) == 32
    state = Path(f"/run/agent-sandbox/{backend.instance}/runc/asb-sb1-1/state.json").read_bytes()
    pid = (await backend.inspect("sb1-1")).details["pid"]
    for secret in (b"hush-1234", key, key.hex().encode()):
        assert secret not in (home / "config.json").read_bytes()
        assert secret not in state
        assert secret not in Path(f"/proc/{pid}/environ").read_bytes()
        assert secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert secret not in repr(await backend.inspect("sb1-1")).encode()
    modes = {name: (home / name).stat().st_mode & 0o777 for name in ("", "key", "spec.json")}
    assert modes == {"": 0o700, "key": 0o600, "spec.json": 0o600}
    assert settings.data_dir.stat().st_mode & 0o777 == 0o700


async def test_a_long_data_directory(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*(["a-directory-with-a-long-name, and: odd characters"] * 4))
    backend = OciBackend(Settings(data_dir=deep))
    await backend.start()
    try:
        await backend.create("sb1-1", SPEC)
        assert await run(backend, "sb1-1", "echo fine") == ("fine\n", 0)
        await backend.destroy("sb1-1")
        await wait_until_clean(deep)
    finally:
        await backend.close()


async def test_a_full_host_disk_is_typed_and_leaves_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    assert os.system(f"mount -t tmpfs -o size=8m none {small}") == 0
    try:
        backend = OciBackend(Settings(data_dir=small / "data"))
        await backend.start()
        try:
            (small / "filler").write_bytes(bytes(_free(small) - 70_000))
            with pytest.raises(SandboxError) as caught:
                await backend.create("sb1-1", SPEC)
            assert caught.value.code == "limit_exceeded"
            assert resources(small / "data") == {}
            assert await backend.list_ids() == []
            assert not list((small / "data" / "runc" / "templates").glob(".new-*"))
        finally:
            await backend.close()
    finally:
        assert os.system(f"umount {small}") == 0


def _free(path: Path) -> int:
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


async def test_a_data_directory_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    backend = OciBackend(Settings(data_dir=tmp_path / "link" / "data"))
    await backend.start()
    try:
        await backend.create("sb1-1", SPEC)
        assert await run(backend, "sb1-1", "echo fine") == ("fine\n", 0)
        assert "mounts" in resources(tmp_path / "link" / "data")
        await backend.destroy("sb1-1")
        await wait_until_clean(tmp_path / "link" / "data")
    finally:
        await backend.close()


async def test_a_missing_daemon_is_told_with_the_remedy(tmp_path: Path) -> None:
    backend = OciBackend(Settings(data_dir=tmp_path / "data", sandboxd=str(tmp_path / "nothing")))
    with pytest.raises(BackendError, match="AGENT_SANDBOX_SANDBOXD"):
        await backend.start()
    assert not (tmp_path / "data").exists()
    await backend.close()


async def test_destroying_ends_a_fork_storm(backend: OciBackend, settings: Settings) -> None:
    await backend.create("sb1-1", SPEC)
    program = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    storm = asyncio.create_task(run(backend, "sb1-1", f"exec python3 -c '{program}'"))
    await asyncio.sleep(0.5)
    started = asyncio.get_running_loop().time()
    await backend.destroy("sb1-1")
    assert asyncio.get_running_loop().time() - started < 5
    assert "processes" not in resources(settings.data_dir)
    with pytest.raises(SandboxError):
        await storm


@pytest.mark.parametrize("milliseconds", [0, 10, 25, 40, 55, 70, 110, 250])
async def test_a_server_killed_at_any_time_leaves_what_the_next_one_can_remove(
    settings: Settings, milliseconds: int
) -> None:
    command = [sys.executable, "-m", "tests.real.creator", str(settings.data_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert await asyncio.to_thread(server.stdout.readline) == b"started\n"
        await asyncio.sleep(milliseconds / 1000)
        server.kill()
    second = OciBackend(settings)
    await second.start()
    for id in await second.list_ids():
        if await second.is_running(id):
            assert await run(second, id, "echo alive") == ("alive\n", 0)
        await second.destroy(id)
    await wait_until_clean(settings.data_dir)
    assert await second.list_ids() == []
    await second.close()
