"""Stopped sandboxes on a real kernel: the workspace outlives a stop, a crash, a reboot, and whatever cuts one off."""

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

import pytest

from agent_sandbox.backends.linux import disk
from agent_sandbox.backends.linux.idranges import IdRanges
from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.backends.oci import backend as oci_backend
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError, ConflictError, LimitExceededError, NotFoundError, SandboxError
from agent_sandbox.types import ExecOutput, SandboxSpec
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
ID = "sb1-1"
STEPS = ["halt", "disk", "start", "hello", "ready"]
FILL = (
    "head -c 3000000 /dev/urandom > f; mkdir -p d; ln -s f d/link; chmod 640 f; setfattr -n user.a -v b f 2>/dev/null; "
)
LOOK = "sha256sum f; stat -c '%a %u %g %Y %N' f d d/link; ls -A"


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


async def run(backend: OciBackend, command: str) -> str:
    output = b""
    argv = ["/bin/sh", "-c", command]
    async for event in backend.exec(ID, argv, env={}, workdir="/workspace", timeout_seconds=120):
        if isinstance(event, ExecOutput):
            output += event.data
    return output.decode()


async def filled(backend: OciBackend) -> str:
    """Make the environment with something in it; return how it looks."""
    await backend.create(ID, SPEC)
    await run(backend, FILL)
    return await run(backend, LOOK)


def home(settings: Settings) -> Path:
    return settings.data_dir / "runc" / "env" / ID


async def test_stopped_and_started_it_is_the_same(backend: OciBackend, settings: Settings) -> None:
    look = await filled(backend)
    before = dict((await backend.inspect(ID)).details)
    files = {name: (home(settings) / name).read_bytes() for name in ("spec.json", "key")}
    ids = await run(backend, "cat /proc/self/uid_map; echo x > /tmp/x")
    open_before = descriptors()
    for _ in range(3):
        await backend.stop_environment(ID)
        assert set(resources(settings.data_dir)) == {"environments", "id ranges"}
        assert await backend.list_ids() == [ID]
        assert not await backend.is_running(ID)
        assert (await backend.inspect(ID)).running is False
        with pytest.raises(ConflictError, match="start"):
            await run(backend, "true")
        with pytest.raises(ConflictError, match="start"):
            await backend.read_file(ID, "/workspace/f", 10)
        await backend.stop_environment(ID)
        await backend.start_environment(ID)
        assert await backend.is_running(ID)
        await backend.start_environment(ID)
        assert await run(backend, LOOK) == look
        assert await run(backend, "cat /proc/self/uid_map; ls -A /tmp /dev/shm; echo $TOKEN; touch /tmp/y") == (
            f"{ids}/dev/shm:\n\n/tmp:\nhush-1234\n"
        )
    assert {name: (home(settings) / name).read_bytes() for name in files} == files
    after = dict((await backend.inspect(ID)).details)
    changing = {"pid", "mounts", "usage"}
    assert {key: after[key] for key in after if key not in changing} == {
        key: before[key] for key in before if key not in changing
    }
    assert descriptors() == open_before
    await backend.stop_environment(ID)
    await backend.destroy(ID)
    await wait_until_clean(settings.data_dir)


async def test_another_server_starts_what_one_stopped(backend: OciBackend, settings: Settings) -> None:
    look = await filled(backend)
    await backend.stop_environment(ID)
    second = OciBackend(settings)
    await second.start()
    assert await second.list_ids() == [ID]
    with pytest.raises(ConflictError, match="start"):
        await run(second, "true")
    await second.start_environment(ID)
    assert await run(second, LOOK) == look
    await second.close()
    assert await run(backend, LOOK) == look


async def test_the_unknown_and_the_removed(backend: OciBackend) -> None:
    for id in ("nobody-1", "../../etc", ""):
        with pytest.raises(NotFoundError):
            await backend.start_environment(id)
        with pytest.raises(NotFoundError):
            await backend.stop_environment(id)
    await backend.create(ID, SPEC)
    await backend.destroy(ID)
    with pytest.raises(NotFoundError):
        await backend.start_environment(ID)


async def rebooted(settings: Settings) -> tuple[OciBackend, str]:
    """A server after a reboot of its host, as far as this host can without one, and how the workspace looked before."""
    backend = OciBackend(settings)
    await backend.start()
    look = await filled(backend)
    pid = (await backend.inspect(ID)).details["pid"]
    await backend.close()
    os.kill(int(str(pid)), signal.SIGKILL)
    await asyncio.sleep(0.2)
    run_directory = Path(f"/run/agent-sandbox/{backend.instance}")
    state = ["runc", "--root", str(run_directory / "runc"), "delete", "--force", f"asb-{ID}"]
    await asyncio.to_thread(subprocess.run, state, check=True)
    await asyncio.to_thread(subprocess.run, ["umount", str(run_directory / "box" / ID)], check=True)
    shutil.rmtree(run_directory)
    assert set(resources(settings.data_dir)) == {"environments", "id ranges"}
    second = OciBackend(settings)
    await second.start()
    return second, look


async def test_after_a_reboot(settings: Settings) -> None:
    second, look = await rebooted(settings)
    assert await second.list_ids() == [ID]
    assert not await second.is_running(ID)
    with pytest.raises(SandboxError, match="start"):
        await run(second, "true")
    await second.start_environment(ID)
    assert await run(second, LOOK) == look
    assert (await second.inspect(ID)).details["limits"] == {
        "cpus": 0.5,
        "memory_bytes": 256 << 20,
        "memory_swap_bytes": 256 << 20,
        "pids": 64,
    }
    await second.destroy(ID)
    await wait_until_clean(settings.data_dir)
    await second.close()


async def test_after_a_reboot_it_can_be_destroyed(settings: Settings) -> None:
    second, _ = await rebooted(settings)
    await second.destroy(ID)
    await wait_until_clean(settings.data_dir)
    await second.close()


async def test_a_removal_that_is_cut_off_anywhere_is_still_listed(
    backend: OciBackend, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[list[str]] = []
    release = IdRanges.release

    def released(ranges: IdRanges, owner: Path) -> None:
        release(ranges, owner)
        listed.append([path.name for path in owner.parent.iterdir()])

    monkeypatch.setattr(IdRanges, "release", released)
    await backend.create(ID, SPEC)
    await backend.destroy(ID)
    await wait_until_clean(settings.data_dir)
    assert listed == [[ID]]


async def test_a_range_is_kept_for_a_stopped_environment(backend: OciBackend, tmp_path: Path) -> None:
    await backend.create(ID, SPEC)
    base = (await run(backend, "cat /proc/self/uid_map")).split()[1]
    await backend.stop_environment(ID)
    other = OciBackend(Settings(data_dir=tmp_path / "other"))
    await other.start()
    await other.create("sb2-1", SPEC)
    assert Path(f"/var/lib/agent-sandbox-ids/{base}").readlink().name == ID
    Path(f"/var/lib/agent-sandbox-ids/{base}").unlink()
    await other.create("sb3-1", SPEC)
    assert Path(f"/var/lib/agent-sandbox-ids/{base}").readlink().name == "sb3-1"
    with pytest.raises(ConflictError, match="host ids"):
        await backend.start_environment(ID)
    for id in ("sb2-1", "sb3-1"):
        await other.destroy(id)
    await wait_until_clean(tmp_path / "other")
    await other.close()
    await backend.start_environment(ID)
    assert (await run(backend, "cat /proc/self/uid_map")).split()[1] == base


async def test_a_dead_daemon_is_started_again(backend: OciBackend) -> None:
    look = await filled(backend)
    await backend.kill_guest(ID)
    with pytest.raises(BackendError):
        await run(backend, "true")
    await backend.start_environment(ID)
    assert await run(backend, LOOK) == look


async def test_a_disk_that_lost_its_kernel_is_mended(
    backend: OciBackend, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = await filled(backend)
    await run(backend, "sync; touch later")
    image = home(settings) / "disk.img"
    await asyncio.to_thread(subprocess.run, ["cp", "--sparse=always", str(image), str(image) + ".crash"], check=True)
    await backend.stop_environment(ID)
    Path(f"{image}.crash").rename(image)
    mended: list[Path] = []
    mend = disk._mend

    def counted(path: Path) -> None:
        mended.append(path)
        mend(path)

    monkeypatch.setattr(disk, "_mend", counted)
    await backend.start_environment(ID)
    assert len(mended) == 1
    assert (await run(backend, LOOK)).startswith(look.removesuffix("d\nf\n"))
    assert "remount-ro" not in await run(backend, "touch works && rm works; cat /proc/self/mountinfo | grep workspace")
    await backend.stop_environment(ID)
    await backend.start_environment(ID)
    assert len(mended) == 1


async def test_a_damaged_disk_is_a_typed_error_and_left_alone(backend: OciBackend, settings: Settings) -> None:
    await filled(backend)
    await backend.stop_environment(ID)
    image = home(settings) / "disk.img"
    with image.open("r+b") as file:
        file.seek(1024)
        file.write(bytes(200_000))
    damaged = image.read_bytes()
    with pytest.raises(BackendError, match="damaged") as caught:
        await backend.start_environment(ID)
    assert str(settings.data_dir) not in caught.value.message
    assert image.read_bytes() == damaged
    assert set(resources(settings.data_dir)) == {"environments", "id ranges"}
    await backend.destroy(ID)


async def test_a_lost_disk_is_a_typed_error(backend: OciBackend, settings: Settings) -> None:
    await filled(backend)
    await backend.stop_environment(ID)
    (home(settings) / "disk.img").unlink()
    with pytest.raises(BackendError):
        await backend.start_environment(ID)
    assert set(resources(settings.data_dir)) == {"environments", "id ranges"}


async def test_a_disk_in_use_is_never_mounted_twice(
    backend: OciBackend, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = await filled(backend)
    await backend.stop_environment(ID)
    image = str(home(settings) / "disk.img")
    command = ["losetup", "--find", "--show", image]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    monkeypatch.setattr(disk, "_FREE_SECONDS", 0.2)
    try:
        with pytest.raises(BackendError, match="in use"):
            await backend.start_environment(ID)
    finally:
        await asyncio.to_thread(subprocess.run, ["losetup", "--detach", done.stdout.strip()], check=True)
    await backend.start_environment(ID)
    assert await run(backend, LOOK) == look


async def test_a_stop_ends_what_runs(backend: OciBackend, settings: Settings) -> None:
    await backend.create(ID, SPEC)
    program = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    storm = asyncio.create_task(run(backend, f"exec python3 -c '{program}'"))
    await asyncio.sleep(0.5)
    started = asyncio.get_running_loop().time()
    await backend.stop_environment(ID)
    assert asyncio.get_running_loop().time() - started < 12
    assert "processes" not in resources(settings.data_dir)
    with pytest.raises(SandboxError):
        await storm
    await backend.start_environment(ID)
    assert await run(backend, "echo alive") == "alive\n"


async def test_what_was_written_last_is_there(backend: OciBackend) -> None:
    await backend.create(ID, SPEC)
    writer = asyncio.create_task(run(backend, "n=0; while :; do n=$((n+1)); echo $n > g; mv g last; echo $n; done"))
    await asyncio.sleep(0.5)
    seen = int((await backend.read_file(ID, "/workspace/last", 100)).decode())
    await backend.stop_environment(ID)
    with pytest.raises(SandboxError):
        await writer
    await backend.start_environment(ID)
    assert int((await backend.read_file(ID, "/workspace/last", 100)).decode()) >= seen > 0


# -- cut off -------------------------------------------------------------------------------------


class AtStep(logging.Handler):
    """Does something when a start logs that it comes to a step."""

    def __init__(self, step: str, action: Callable[[], None]) -> None:
        super().__init__()
        self._step, self._action = step, action

    def emit(self, record: logging.LogRecord) -> None:
        if record.args and record.args[:2] == (f"start {ID}", self._step):  # type: ignore[index]
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


@pytest.mark.parametrize("step", STEPS)
async def test_a_start_that_fails_leaves_it_stopped(
    backend: OciBackend, settings: Settings, at_step: Callable[[str, Callable[[], None]], None], step: str
) -> None:
    left = 1

    def fail_once() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(28, "No space left on device")

    look = await filled(backend)
    await backend.stop_environment(ID)
    before = descriptors()
    at_step(step, fail_once)
    with pytest.raises(LimitExceededError, match="disk is full"):
        await backend.start_environment(ID)
    assert set(resources(settings.data_dir)) == {"environments", "id ranges"}
    assert descriptors() == before
    await backend.start_environment(ID)
    assert await run(backend, LOOK) == look


@pytest.mark.parametrize("step", STEPS)
async def test_a_start_that_is_cancelled_leaves_it_stopped(
    backend: OciBackend, settings: Settings, at_step: Callable[[str, Callable[[], None]], None], step: str
) -> None:
    look = await filled(backend)
    await backend.stop_environment(ID)
    task = asyncio.create_task(backend.start_environment(ID))

    def cancel() -> None:
        task.cancel()

    at_step(step, cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    if step != "ready":
        assert set(resources(settings.data_dir)) == {"environments", "id ranges"}
    await backend.start_environment(ID)
    assert await run(backend, LOOK) == look


@pytest.mark.parametrize("milliseconds", [0, 2, 5, 10, 20, 30, 45])
async def test_a_stop_that_is_cancelled_is_mended_by_the_next_start(backend: OciBackend, milliseconds: int) -> None:
    look = await filled(backend)
    task = asyncio.create_task(backend.stop_environment(ID))
    await asyncio.sleep(milliseconds / 1000)
    task.cancel()
    await asyncio.wait([task])
    await backend.start_environment(ID)
    assert await run(backend, LOOK) == look


async def test_changes_of_one_environment_exclude_each_other(backend: OciBackend) -> None:
    look = await filled(backend)
    results = await asyncio.gather(
        backend.stop_environment(ID),
        backend.stop_environment(ID),
        backend.start_environment(ID),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [type(None), ConflictError, ConflictError]
    await backend.start_environment(ID)
    assert await run(backend, LOOK) == look


@pytest.mark.parametrize("milliseconds", [0, 5, 20, 40])
async def test_destroy_during_a_start(backend: OciBackend, settings: Settings, milliseconds: int) -> None:
    await filled(backend)
    await backend.stop_environment(ID)
    task = asyncio.create_task(backend.start_environment(ID))
    await asyncio.sleep(milliseconds / 1000)
    await backend.destroy(ID)
    await asyncio.wait([task])
    assert task.exception() is None or isinstance(task.exception(), ConflictError)
    await backend.destroy(ID)
    await wait_until_clean(settings.data_dir)


@pytest.mark.parametrize("milliseconds", [0, 10, 25, 45, 60, 80, 110, 150])
async def test_a_server_killed_at_any_time_costs_no_workspace(settings: Settings, milliseconds: int) -> None:
    first = OciBackend(settings)
    await first.start()
    look = await filled(first)
    await first.close()
    command = [sys.executable, "-m", "tests.real.stopper", str(settings.data_dir), ID]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert await asyncio.to_thread(server.stdout.readline) == b"started\n"
        await asyncio.sleep(milliseconds / 1000)
        server.kill()
    second = OciBackend(settings)
    await second.start()
    assert await second.list_ids() == [ID]
    await second.start_environment(ID)
    assert await run(second, LOOK) == look
    await second.destroy(ID)
    await wait_until_clean(settings.data_dir)
    await second.close()


async def test_limits_hold_after_a_start(backend: OciBackend) -> None:
    spec = dataclasses.replace(SPEC, disk_mb=32, tmp_mb=16)
    await backend.create(ID, spec)
    await backend.stop_environment(ID)
    await backend.start_environment(ID)
    output = await run(
        backend, "head -c 80000000 /dev/zero > big 2>/dev/null; echo $?; df -k --output=size /tmp | tail -1"
    )
    assert output.split() == ["1", "16384"]
