"""Removing images that sandboxes and snapshots stand on, by the command line beside a running server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.config import Settings
from agent_sandbox.errors import NotFoundError
from agent_sandbox.images import ImageStore
from agent_sandbox.manager.manager import Manager
from agent_sandbox.manager.policy import CreateOptions, ForkOptions
from tests.real.leaks import wait_until_clean
from tests.real.rootfs import build_rootfs
from tests.unit.images_harness import left_over

pytestmark = pytest.mark.real


def remove(data: Path, *names: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "agent_sandbox.cli", "image", "rm", *names],
        env={**os.environ, "AGENT_SANDBOX_DATA_DIR": str(data)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


async def test_an_image_stays_under_sandboxes_and_snapshots(tmp_path: Path) -> None:
    rootfs = build_rootfs(tmp_path / "rootfs")
    data = tmp_path / "data"
    settings = Settings(data_dir=data, default_image="tiny:1")
    store = ImageStore(data)
    digest = store.import_image("tiny:1", rootfs).digest
    store.import_image("tiny:also", rootfs)
    manager = Manager(settings, {"runc": OciBackend(settings)})
    await manager.start()
    try:
        box = await manager.create(CreateOptions())
        assert remove(data, "tiny:also") == (0, "")
        code, said = remove(data, "tiny:1", digest)
        assert code == 69
        assert said.count("is in use") == 2
        done = await manager.exec(box.id, "echo here")
        assert (done.exit.code, done.stdout) == (0, b"here\n")
        snapshot = await manager.snapshot(box.id)
        await manager.destroy(box.id)
        assert remove(data, "tiny:1")[0] == 69
        store.remove("tiny:1")
        with pytest.raises(NotFoundError, match="'tiny:1'"):
            await manager.fork(snapshot.id, ForkOptions())
        assert store.import_image("tiny:1", rootfs).digest == digest
        again = await manager.fork(snapshot.id, ForkOptions())
        await manager.destroy(again.id)
        await manager.delete_snapshot(snapshot.id)
        assert remove(data, "tiny:1") == (0, "")
    finally:
        await manager.close()
    assert left_over(data) == []
    await wait_until_clean(data)
