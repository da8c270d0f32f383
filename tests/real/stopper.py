"""A server in small: stops and starts an environment until it is killed. Started as ``stopper.py DATA_DIR ID``."""

import asyncio
import sys
from pathlib import Path

from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.config import Settings


async def main() -> None:
    """Say when the first stop is under way, and go on."""
    backend = OciBackend(Settings(data_dir=Path(sys.argv[1])))
    await backend.start()
    print("started", flush=True)
    while True:
        await backend.stop_environment(sys.argv[2])
        await backend.start_environment(sys.argv[2])


asyncio.run(main())
