"""The unit file has what sandboxes need to outlive the service, and nothing that would break them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[2] / "packaging" / "agent-sandbox.service"
PAGE = UNIT.parents[1] / "docs" / "how-to" / "run-under-systemd.md"

MOUNT_NAMESPACE = """
BindPaths BindReadOnlyPaths DynamicUser ExecPaths InaccessiblePaths MountAPIVFS MountFlags NoExecPaths PrivateDevices
PrivateMounts PrivateTmp PrivateUsers ProtectControlGroups ProtectHome ProtectKernelLogs ProtectKernelModules
ProtectKernelTunables ProtectProc ProcSubset ProtectSystem ReadOnlyPaths ReadWritePaths RootDirectory RootImage
TemporaryFileSystem
"""
HOLDS_IN_SANDBOXES = """
DeviceAllow DevicePolicy IPAddressDeny LockPersonality MemoryDenyWriteExecute PrivateNetwork ProtectClock
ProtectHostname RestrictFileSystems RestrictNamespaces RestrictSUIDSGID SystemCallArchitectures SystemCallFilter UMask
User
"""


def settings() -> dict[str, list[str]]:
    """The unit's settings by name; one may be given more than once."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KillMode", "process"),
        ("Delegate", "yes"),
        ("Restart", "on-failure"),
        ("EnvironmentFile", "/etc/agent-sandbox/server.env"),
        ("OOMPolicy", "continue"),
        ("TasksMax", "infinity"),
        ("NoNewPrivileges", "yes"),
        ("StateDirectoryMode", "0700"),
        ("WantedBy", "multi-user.target"),
    ],
)
def test_what_it_must_say(name: str, value: str) -> None:
    assert settings()[name] == [value]


def test_what_it_must_not_say() -> None:
    assert set(settings()) & set((MOUNT_NAMESPACE + HOLDS_IN_SANDBOXES).split()) == set()


def test_no_key_is_on_a_command_line() -> None:
    [command] = settings()["ExecStart"]
    assert command == "/opt/agent-sandbox/bin/agent-sandbox serve --data-dir /var/lib/agent-sandbox"
    assert not any(name.startswith("Environment") and name != "EnvironmentFile" for name in settings())


def test_the_page_names_what_the_unit_has() -> None:
    page = PAGE.read_text()
    for text in ("/opt/agent-sandbox", "/etc/agent-sandbox/server.env", "packaging/agent-sandbox.service"):
        assert text in page
        assert text in UNIT.read_text() or text.startswith("packaging")


def test_systemd_understands_it(tmp_path: Path) -> None:
    """Where there is a systemd to ask; the tests above stand for themselves elsewhere."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        assert not Path("/run/systemd/system").exists()
        return
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/agent-sandbox/bin/agent-sandbox", sys.executable))
    done = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False)
    ours = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, ours) == (0, [])
