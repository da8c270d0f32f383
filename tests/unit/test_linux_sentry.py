"""How much of a host's memory a sandbox on gVisor may take, whoever runs it."""

from __future__ import annotations

import dataclasses

import pytest

from agent_sandbox.backends.docker import facts
from agent_sandbox.backends.linux import sentry
from agent_sandbox.backends.oci.requirements import gvisor_capabilities
from agent_sandbox.types import SandboxSpec

SPEC = SandboxSpec("host", "", cpus=1.0, memory_mb=256, pids_limit=32, disk_mb=64, tmp_mb=16)


def test_the_guests_own_kernel_has_memory_beside_the_guests() -> None:
    assert sentry.memory_mb(SPEC) == 256 + 64 + 32
    assert sentry.memory_mb(dataclasses.replace(SPEC, pids_limit=4096)) == 256 + 192


def test_every_backend_on_gvisor_tells_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentry, "MOST_KERNEL_MB", 77)
    on_docker = dataclasses.replace(facts.UNSTARTED, is_gvisor=True)
    for capabilities in (
        facts.capabilities(on_docker, no_layers="", no_network=""),
        gvisor_capabilities(frozenset({"memory"}), has_swap_limit=True, no_layers=""),
    ):
        assert "up to 77 MiB more" in capabilities.notes["memory"]
    assert sentry.memory_mb(SPEC) == 256 + 77
