"""Which monitor the tests of microVMs are about: QEMU, emulated here, or Firecracker in an outer machine with KVM.

The same tests run on both (``tests/nested``), told by the environment.
"""

import os
from pathlib import Path

from agent_sandbox.backends.microvm import FirecrackerBackend, MicrovmBackend
from agent_sandbox.config import Settings

MONITOR = os.environ.get("MICROVM_MONITOR", "qemu")
MACHINE_DIR = os.environ.get("MICROVM_MACHINE_DIR", "")
PROCESSOR = {"qemu": "emulated", "firecracker": "host "}[MONITOR]
"""How a saved machine's manifest begins to name the processor."""


def make_backend(settings: Settings) -> MicrovmBackend:
    """The backend on the monitor in question."""
    return {"qemu": MicrovmBackend, "firecracker": FirecrackerBackend}[MONITOR](settings)


def machine_dir(default: Path) -> Path:
    """The directory with the kernel."""
    return Path(MACHINE_DIR) if MACHINE_DIR else default
