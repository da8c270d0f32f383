"""What holds for every test, and fixtures that several folders of tests use.

Hypothesis draws the same examples in every run, so that no run fails by chance. ``HYPOTHESIS_PROFILE=explore``
(``make explore``) draws others each time: for looking for what the usual ones miss. What it finds becomes an
``@example`` or a test of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from agent_sandbox.errors import BackendError
from agent_sandbox.images.machine import MachineImages
from tests import dockerd, microvms

settings.register_profile("steady", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("explore", derandomize=False, deadline=None, database=None, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "steady")
settings.load_profile(PROFILE)
if PROFILE == "steady":
    # It also tries constants that it finds in whatever modules are loaded: other ones when a file runs alone, and after
    # any edit anywhere.
    providers._get_local_constants = Constants


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    """The address of a Docker engine that runs for these tests, as ``AGENT_SANDBOX_DOCKER_HOST`` takes it."""
    with dockerd.engine() as host:
        yield host


@pytest.fixture(scope="session")
def machine_dir() -> Path:
    """A directory for ``AGENT_SANDBOX_MACHINE_DIR`` with a kernel in it, which all tests and their processes share.

    Debian's package is fetched once and kept in ``build``; ``make clean`` removes it.
    """
    directory = microvms.machine_dir(Path(__file__).resolve().parents[1] / "build" / "test-machine")
    machines = MachineImages(directory)
    try:
        machines.kernel(Path("/bin/true"))
    except BackendError:
        machines.prepare_kernel()
    return directory
