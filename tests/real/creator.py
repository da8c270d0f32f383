"""A server in small: creates sandboxes until it is killed. Started by a test as ``creator.py DATA_DIR``."""

import asyncio
import sys
from pathlib import Path

from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.config import Settings
from agent_sandbox.types import SandboxSpec

SPEC = SandboxSpec(image="host", image_digest="", cpus=1, memory_mb=128, pids_limit=32, disk_mb=32, tmp_mb=16)


async def main() -> None:
    """Create and destroy in turn, several at once, and say when the first is under way."""
    backend = OciBackend(Settings(data_dir=Path(sys.argv[1])))
    await backend.start()
    print("started", flush=True)

    async def turn(lane: int) -> None:
        for number in range(1000):
            id = f"lane{lane}-{number}"
            await backend.create(id, SPEC)
            if number % 2:
                await backend.destroy(id)

    await asyncio.gather(*(turn(lane) for lane in range(3)))


asyncio.run(main())
