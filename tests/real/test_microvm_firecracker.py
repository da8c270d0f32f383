"""The tests of microVMs on a real Firecracker, a few of them: ``make test-firecracker`` runs all.

Its KVM is an emulated machine's, which starts for this once.
"""

import pytest

from tests.nested import outer

SECONDS = 900
"""Everything is emulated twice, beside other tests."""
TRIES = 3
"""An emulated machine that dies is no word on what ran in it."""


@pytest.mark.real
@pytest.mark.timeout(TRIES * SECONDS + 600)
def test_machines_go_on_in_forks_are_jailed_and_are_found_again_on_a_real_firecracker() -> None:
    tests = (
        "tests/e2e/test_microvm_checkpoints.py::test_a_counter_goes_on_after_a_rollback_and_in_three_forks",
        "tests/real/test_microvm.py::test_a_monitor_is_jailed_and_its_death_is_a_stop_that_keeps_the_workspace",
        "tests/real/test_microvm.py::test_a_new_server_finds_what_goes_on_and_ends_what_nobody_knows",
    )
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        print(line)  # what a machine that ends too soon had come to

    command = ["python3", "-m", "pytest", "-p", "no:cacheprovider", "-o", f"timeout={SECONDS}", *tests]
    for left in reversed(range(TRIES)):
        said.clear()
        try:
            code = outer.run(command, seconds=SECONDS, say=say)
            break
        except outer.MachineDiedError as died:
            print(died)
            if not left:
                raise
    assert code == 0, "\n".join(said)
    assert f"{len(tests)} passed" in said[-1]
