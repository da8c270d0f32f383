"""Firecracker as a monitor: what is refused before anything runs, and what it is asked for."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.backends.microvm import firecracker_probe as probe
from agent_sandbox.backends.microvm import firecracker_requests as asking
from agent_sandbox.backends.microvm import memory
from agent_sandbox.backends.microvm.firecracker import FirecrackerMonitor
from agent_sandbox.backends.microvm.monitor import MEMORY_FILE, STATE_FILE, Facts, MachineSpec
from agent_sandbox.backends.microvm.requirements import require_accelerated
from agent_sandbox.errors import BackendError, ConflictError

MIB = 1 << 20
REMEDY = "AGENT_SANDBOX_FIRECRACKER and AGENT_SANDBOX_JAILER"


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def jailer(directory: Path, version: str = "1.12.1") -> str:
    return program(directory / "jailer", f"echo 'Jailer v{version}'")


def spec(directory: Path) -> MachineSpec:
    """A machine of this user's, whose kernel is unpacked."""
    files = {name: directory / name for name in ("kernel", "initrd", "root", "workspace", "config", "layers")}
    for name, path in files.items():
        path.write_bytes(b"\x7fELF" if name == "kernel" else b"")
    (run := directory / "run").mkdir()
    jail = directory / "jail"
    return MachineSpec(**files, memory_mb=16, vcpus=1, directory=run, jail=jail, uid=os.getuid(), gid=os.getgid())


# -- finding ---------------------------------------------------------------------------------


async def test_a_program_that_is_not_there_is_named_with_where_it_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=f"absent is not installed.*{REMEDY}"):
        await FirecrackerMonitor(str(tmp_path / "absent")).find()
    there = program(tmp_path / "firecracker", "echo 'Firecracker v1.12.1'")
    with pytest.raises(BackendError, match=f"no-jailer is not installed.*{REMEDY}"):
        await FirecrackerMonitor(there, str(tmp_path / "no-jailer")).find()


@pytest.mark.parametrize("script", ["echo 'ls (GNU coreutils) 9.1'", "exit 3", "echo 'Firecracker v1.12.1'; exit 1"])
async def test_a_program_that_is_no_firecracker_is_refused(tmp_path: Path, script: str) -> None:
    other = program(tmp_path / "firecracker", script)
    with pytest.raises(BackendError, match=f"{other} does not answer as Firecracker: .*{REMEDY}"):
        await FirecrackerMonitor(other, jailer(tmp_path)).find()


async def test_a_jailer_of_another_release_is_refused_with_both_versions(tmp_path: Path) -> None:
    there = program(tmp_path / "firecracker", "echo 'Firecracker v1.12.1'")
    with pytest.raises(BackendError, match=rf"is of version 1\.12\.1 and .* of 1\.11\.0; .*{REMEDY}"):
        await FirecrackerMonitor(there, jailer(tmp_path, "1.11.0")).find()
    with pytest.raises(BackendError, match="does not answer as Firecracker's jailer"):
        await FirecrackerMonitor(there, there).find()


async def test_a_name_that_the_jailer_does_not_take_is_refused(tmp_path: Path) -> None:
    there = program(tmp_path / "monitor", "echo 'Firecracker v1.12.1'")
    with pytest.raises(BackendError, match=r"takes no program without firecracker in its name.*rename it"):
        await FirecrackerMonitor(there, jailer(tmp_path)).find()


# -- KVM -------------------------------------------------------------------------------------


def test_a_device_that_is_not_there_or_not_a_processors_own_is_told(tmp_path: Path) -> None:
    device, modules = tmp_path / "kvm", tmp_path / "module"
    modules.mkdir()
    assert "load kvm_intel or kvm_amd" in probe.why_not(device, modules)
    device.mkdir()
    assert probe.why_not(device, modules) == f"{device} cannot be opened: Is a directory"
    device.rmdir()
    device.touch()
    (modules / "kvm_pvm").mkdir()
    assert "not driven by kvm_intel or kvm_amd but by kvm_pvm" in probe.why_not(device, modules)
    (modules / "kvm_amd").mkdir()
    assert probe.why_not(device, modules) == ""


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("printf '2026-01-01T00:00:00 [x:main] Run\\006ning\\n'", ""),
        ("echo '2026-01-01T00:00:00 [x:main] Vmm is stopping.'", "Vmm is stopping."),
        (
            "echo '1 [x:fc_vcpu 0] Received KVM_EXIT_INTERNAL_ERROR signal'; echo '1 [x:main] Vmm is stopping.'",
            "Received KVM_EXIT_INTERNAL_ERROR signal",
        ),
        (
            "echo '1 [x:main] Error: Cannot create VM: Permission denied'; exit 1",
            "Error: Cannot create VM: Permission denied",
        ),
        ("exit 4", "Firecracker ended with code 4"),
    ],
)
async def test_kvm_is_tried_by_a_guest_that_says_so(tmp_path: Path, script: str, why: str) -> None:
    said = await probe.why_not_run(program(tmp_path / "firecracker", script), "")
    assert said == (why and f"a guest does not run on it: {why}")


async def test_the_guest_of_the_trial_is_a_program_for_64_bit_machines(tmp_path: Path) -> None:
    kept = tmp_path / "guest"
    await probe.why_not_run(program(tmp_path / "firecracker", f"cat /proc/self/fd/4 > {kept}"), "")
    guest = kept.read_bytes()
    # elf(5): the identification, then type, machine, version, entry; one segment, which is the rest of the file.
    assert guest[:7] == b"\x7fELF\x02\x01\x01"
    assert struct.unpack_from("<2HIQ", guest, 16) == (2, 62, 1, 0x100000)
    kind, _, offset, _, address, size, _, _ = struct.unpack_from("<2I6Q", guest, 64)
    assert (kind, address, offset + size) == (1, 0x100000, len(guest))
    # The keyboard controller's port gets the command to restart, behind a byte on the first serial port.
    assert guest.endswith(b"\xb0\xfe\x66\xba\x64\x00\xee\xf4\xeb\xfd")
    assert guest[offset:].startswith(b"\x66\xba\xf8\x03\xb0\x06\xee")


@pytest.mark.parametrize("allow_tcg", [False, True])
def test_firecracker_emulates_nothing_whatever_is_allowed(allow_tcg: bool) -> None:
    facts = Facts("firecracker", "1.12.1, layout 1", False, "host x", "there is no /dev/kvm", emulates=False)
    with pytest.raises(BackendError, match=r"firecracker needs KVM.*there is no /dev/kvm.*use the qemu backend"):
        require_accelerated(facts, allow_tcg)
    require_accelerated(replace(facts, accelerated=True, why=""), allow_tcg)


# -- starting --------------------------------------------------------------------------------


async def test_a_packed_kernel_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    machine = spec(tmp_path)
    machine.kernel.write_bytes(b"MZ" + bytes(510) + b"HdrS")
    with pytest.raises(BackendError, match=r"is packed.*agent-sandbox image kernel"):
        await FirecrackerMonitor().start(machine)
    assert not machine.jail.exists()
    assert not list(machine.directory.iterdir())


@pytest.mark.parametrize("size", [None, 0, 16 * MIB - 4096, 17 * MIB])
async def test_saved_memory_of_another_size_is_refused_and_nothing_is_left(tmp_path: Path, size: int | None) -> None:
    machine = spec(tmp_path)
    (saved := tmp_path / "saved").mkdir()
    (saved / STATE_FILE).write_bytes(b"state")
    if size is not None:
        with (saved / MEMORY_FILE).open("wb") as file:
            file.truncate(size)
    with pytest.raises(ConflictError, match="is not there" if size is None else "16 MiB is asked for"):
        await FirecrackerMonitor().start_from(machine, saved)
    assert not machine.jail.exists()
    assert not list(machine.directory.iterdir())
    assert all(path.lstat().st_nlink == 1 for path in tmp_path.iterdir() if path.is_file())


def test_a_machine_is_asked_for_by_names_in_its_own_root(tmp_path: Path) -> None:
    machine = spec(tmp_path)
    asked = {target: body for _, target, body in asking.boots(machine)}
    assert str(tmp_path) not in repr([asked, list(asking.goes_on()), asking.saves(True)])
    assert asked["/machine-config"] == {"vcpu_count": 1, "mem_size_mib": 16, "track_dirty_pages": True}
    drives = [body for target, body in asked.items() if target.startswith("/drives/")]
    assert [drive["drive_id"] for drive in drives] == list(asking.DRIVES)
    assert [drive["drive_id"] for drive in drives if not drive["is_read_only"]] == ["workspace"]
    assert not any(target.startswith("/network-interfaces") for target in asked)
    words = str(asked["/boot-source"]["boot_args"]).split()
    assert f"sandboxd_drives={','.join(asking.DRIVES)}" in words
    assert "sandboxd_channel=vsock" in words


# -- memory ----------------------------------------------------------------------------------


def test_what_changed_is_put_over_what_was_there_zeros_as_well(tmp_path: Path) -> None:
    page, size = 4096, 4 * MIB

    def made(name: str, pages: dict[int, bytes]) -> int:
        file = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.ftruncate(file, size)
        for number, fill in pages.items():
            os.pwrite(file, fill * page, number * page)
        return file

    base, changed, target = (
        made("base", {0: b"a", 1: b"b", 200: b"c"}),
        made("new", {1: b"\0", 300: b"d"}),
        made("t", {}),
    )
    memory.copy_data(base, target, size)
    memory.copy_data(changed, target, size)
    told = {number: os.pread(target, page, number * page)[:1] for number in (0, 1, 200, 300, 301)}
    assert told == {0: b"a", 1: b"\0", 200: b"c", 300: b"d", 301: b"\0"}
    assert os.fstat(target).st_blocks * 512 < size // 4
    for file in (base, changed, target):
        os.close(file)


def test_whether_holes_are_told_is_asked_of_the_file_system(tmp_path: Path) -> None:
    with (tmp_path / "asked").open("wb+") as file:
        assert memory.tells_holes(file.fileno())
        assert os.fstat(file.fileno()).st_size == 0
