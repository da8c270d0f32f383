"""Waiting for an image's root file system: it is made once, and nobody's waiting or leaving disturbs another."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sandbox.backends.microvm.roots import Roots
from agent_sandbox.errors import BackendError, InvalidRequestError
from agent_sandbox.images import ImageRoot, tools
from agent_sandbox.images.machine import MachineImages

pytestmark = pytest.mark.real

DIGEST = f"sha256:{'0' * 64}"


@pytest.fixture
def image(tmp_path: Path) -> ImageRoot:
    (tmp_path / "rootfs/bin").mkdir(parents=True)
    (tmp_path / "rootfs/bin/tool").write_text("tool")
    return ImageRoot(tmp_path / "rootfs", file_bytes=4)


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots(MachineImages(tmp_path / "machine"))


@pytest.fixture
def mkfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a script in the place of mkfs.erofs, which notes each of its runs in ``runs`` first."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(tools, "PATH", f"{tmp_path}/bin:{tools.PATH}")

    def write(script: str) -> None:
        program = tmp_path / "bin/mkfs.erofs"
        program.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\n{script}\n")
        program.chmod(0o755)

    return write


def gated(tmp_path: Path) -> str:
    """A script that waits until there is a file ``go``."""
    real = shutil.which("mkfs.erofs", path="/usr/sbin:/usr/bin:/sbin:/bin")
    assert real is not None
    return f'while ! [ -e {tmp_path}/go ]; do sleep 0.02; done\nexec {real} "$@"'


async def begun(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        while not (tmp_path / "runs").exists():
            await asyncio.sleep(0.01)


async def test_however_many_wait_it_is_made_once(
    roots: Roots, image: ImageRoot, mkfs: Callable[[str], None], tmp_path: Path
) -> None:
    mkfs(gated(tmp_path))
    waiting = [asyncio.create_task(roots.get("tools", image, DIGEST)) for _ in range(40)]
    await begun(tmp_path)
    assert await asyncio.to_thread(lambda: "a thread is free") == "a thread is free"
    assert [(pull.image, pull.total_bytes) for pull in roots.told()] in ([("tools", 0)], [("tools", 4)])
    waiting.pop().cancel()
    (tmp_path / "go").touch()
    found = await asyncio.gather(*waiting)
    assert {root.key for root in found} == {DIGEST.replace(":", "-")}
    assert await roots.get("tools", image, DIGEST) == found[0]
    assert (tmp_path / "runs").read_text() == "run\n"
    assert roots.told() == []


async def test_who_stops_waiting_leaves_it_to_the_next(
    roots: Roots, image: ImageRoot, mkfs: Callable[[str], None], tmp_path: Path
) -> None:
    mkfs(gated(tmp_path))
    waiting = asyncio.create_task(roots.get("tools", image, DIGEST))
    await begun(tmp_path)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (tmp_path / "go").touch()
    assert (await roots.get("tools", image, DIGEST)).path.exists()
    assert (tmp_path / "runs").read_text() == "run\n"


async def test_a_failure_is_told_to_all_and_the_next_tries_again(
    roots: Roots, image: ImageRoot, mkfs: Callable[[str], None], tmp_path: Path
) -> None:
    mkfs(f"while ! [ -e {tmp_path}/go ]; do sleep 0.02; done\necho odd >&2; exit 1")
    waiting = [asyncio.create_task(roots.get("tools", image, DIGEST)) for _ in range(3)]
    await begun(tmp_path)
    (tmp_path / "go").touch()
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, InvalidRequestError)
        assert error.message.endswith("odd")
    mkfs(gated(tmp_path))
    assert (await roots.get("tools", image, DIGEST)).path.exists()


async def test_closing_ends_what_is_being_made(
    roots: Roots, image: ImageRoot, mkfs: Callable[[str], None], tmp_path: Path
) -> None:
    mkfs("while :; do echo something; sleep 0.05; done")
    waiting = asyncio.create_task(roots.get("tools", image, DIGEST))
    await begun(tmp_path)
    async with asyncio.timeout(60):
        await roots.close()
    with pytest.raises(BackendError, match="the server ended"):
        await waiting
    assert list((tmp_path / "machine/root").iterdir()) == []
    with pytest.raises(BackendError, match="the server ended"):
        await roots.get("tools", image, DIGEST)
