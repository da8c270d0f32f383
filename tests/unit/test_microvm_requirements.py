"""What the qemu backend says of the host that it is on."""

import pytest

from agent_sandbox.backends.microvm.monitor import Facts
from agent_sandbox.backends.microvm.requirements import capabilities, require_accelerated
from agent_sandbox.errors import BackendError
from agent_sandbox.manager.policy import satisfies

EMULATED = Facts("qemu", "7.2.22", accelerated=False, cpu="qemu64", why="/dev/kvm is not there")
ACCELERATED = Facts("qemu", "7.2.22", accelerated=True, cpu="host")


def test_without_kvm_the_operator_is_asked_and_told_why() -> None:
    with pytest.raises(BackendError, match=r"/dev/kvm is not there.*AGENT_SANDBOX_ALLOW_TCG=true"):
        require_accelerated(EMULATED, allow_tcg=False)
    require_accelerated(EMULATED, allow_tcg=True)
    require_accelerated(ACCELERATED, allow_tcg=False)


def test_an_emulated_machine_is_no_boundary() -> None:
    offered = capabilities(EMULATED, has_cpu_limit=True)
    assert (offered.isolation, offered.accelerated) == ("vm", False)
    assert "no security boundary: /dev/kvm is not there" in offered.notes["accelerated"]
    assert not satisfies(offered, "container")
    assert satisfies(offered, "vm", allow_tcg=True)
    assert satisfies(capabilities(ACCELERATED, has_cpu_limit=True), "vm")


def test_a_limit_that_the_kernel_lacks_is_said() -> None:
    assert capabilities(ACCELERATED, has_cpu_limit=True).enforces == {"cpus", "memory", "pids", "disk", "network"}
    lacking = capabilities(ACCELERATED, has_cpu_limit=False)
    assert lacking.enforces == {"memory", "pids", "disk", "network"}
    assert "control group" in lacking.notes["cpus"]
