"""Compile sandboxd and put it into the wheel.

The wheel holds one executable and no Python extension, so its tag is ``py3-none-<platform>``: one wheel for every
interpreter. The executable is linked statically and runs in any image of the same architecture.
"""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BINARY = "agent_sandbox_engine/_bin/sandboxd"


class SandboxdBuildHook(BuildHookInterface[Any]):
    """Run ``scripts/build-sandboxd`` and include the path that it prints."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Fill ``build_data``; raises :class:`RuntimeError` when the crate is not there or does not compile."""
        script = Path(self.root).parent.parent / "scripts" / "build-sandboxd"
        if not script.is_file():
            raise RuntimeError("agent-sandbox-engine is built inside the repository: run `make setup` there")
        built = subprocess.run([str(script)], stdout=subprocess.PIPE, text=True, check=False)
        if built.returncode != 0:
            raise RuntimeError(f"sandboxd did not compile: {script} ended with {built.returncode}; see above")
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["force_include"][built.stdout.strip()] = BINARY
