"""``sandboxd probe``: on this machine, and uploaded into a sandbox as onto an unknown platform."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from agent_sandbox_engine import sandboxd_path

from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.cli.conformance import read_probe
from agent_sandbox.config import load_settings
from agent_sandbox.conformance.box import Box, new_id
from agent_sandbox.conformance.suite import SuiteBase


def verdicts(report: dict[str, Any]) -> dict[tuple[str, str], tuple[str, str]]:
    """Verdict and detail by item and check."""
    return {(check["item"], check["check"]): (check["verdict"], check["detail"]) for check in report["checks"]}


def test_it_looks_at_this_machine_and_the_command_shows_it(tmp_path: pathlib.Path) -> None:
    done = subprocess.run([sandboxd_path(), "probe", "--json"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    file = tmp_path / "probe.json"
    file.write_text(done.stdout)
    report = read_probe(file)
    assert {check["item"] for check in report["checks"]} == {f"B{n}" for n in range(1, 18)}
    assert report["platform"]["kernel"] == pathlib.Path("/proc/sys/kernel/osrelease").read_text().strip()
    found = verdicts(report)
    assert found["B4", "no new privileges"] == ("yes", "can be done")
    assert found["B6", "unix socket"] == ("yes", "can be done")
    shown = subprocess.run(
        [sys.executable, "-m", "agent_sandbox.cli", "conformance", "--probe", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout.splitlines()) == len(report["checks"]) + 4
    assert "of what a daemon-driven backend could use is not here" in shown.stdout


def test_it_takes_no_other_words() -> None:
    done = subprocess.run([sandboxd_path(), "probe", "--jsn"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "sandboxd probe [--json]" in done.stderr


@pytest.mark.real
async def test_uploaded_into_a_sandbox_it_sees_what_a_command_may_not_do(tmp_path: pathlib.Path) -> None:
    backend = OciBackend(load_settings({"data_dir": tmp_path / "data"}, {}))
    await backend.start()
    try:
        box = Box(backend, new_id(), SuiteBase.spec)
        await backend.create(box.id, box.spec)
        try:
            await box.put("probe", sandboxd_path().read_bytes(), 0o755)
            before = await box.shell("ls -A; cat /proc/self/mountinfo; ls -A /tmp")
            report = json.loads(await box.shell("./probe probe --json", timeout=60))
            assert await box.shell("ls -A; cat /proc/self/mountinfo; ls -A /tmp") == before
        finally:
            await backend.destroy(box.id)
    finally:
        await backend.close()
    found = verdicts(report)
    assert found["B4", "root inside"][0] == "no"
    assert found["B4", "capabilities of the daemon"][0] == "no"
    refused = "Operation not permitted (os error 1)"
    assert found["B4", "become another user without groups"] == ("no", refused)
    for check in ("user namespace by an ordinary user", "mount and unmount in a namespace"):
        assert found["B4", check] == ("look", refused)
    assert found["B6", "vsock"] == ("look", refused)
    assert found["B6", "loopback port"] == ("yes", "can be done")
    assert found["B10", "/proc"] == ("yes", "hidepid=invisible")
    assert found["B15", "network interfaces"] == ("look", "lo; no default route")
