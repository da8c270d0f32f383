"""QEMU's command line, and the rate of the host's counter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent_sandbox.backends.microvm.command import Given, arguments, tsc_khz
from agent_sandbox.backends.microvm.monitor import Facts, MachineSpec

EMULATED = Facts("qemu", "7.2", False, "emulated", "no KVM")
FAST = Facts("qemu", "7.2", True, "host x")
SPEC = MachineSpec(
    kernel=Path("/k/vmlinuz"),
    initrd=Path("/k/initrd"),
    root=Path("/e/root.erofs"),
    workspace=Path("/e/workspace.img"),
    config=Path("/e/config.img"),
    layers=Path("/e/layers.erofs"),
    memory_mb=352,
    vcpus=2,
    directory=Path("/run/x"),
    jail=Path("/data/jail"),
    uid=2_000_000,
    gid=2_000_000,
)


def after(argv: list[str], option: str) -> list[str]:
    return [argv[i + 1] for i, arg in enumerate(argv) if arg == option]


def test_a_machine_names_no_path_and_has_no_network() -> None:
    argv = arguments(SPEC, EMULATED, goes_on=False, tsc_khz=2_596_125)
    for path in ("/k/", "/e/", "/run/x"):
        assert not [arg for arg in argv if path in arg]
    assert not [arg for arg in argv if "net" in arg]
    assert "-nodefaults" in argv
    (sandbox,) = after(argv, "-sandbox")
    assert sandbox == "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
    assert after(argv, "-m") == ["352M"]
    assert after(argv, "-smp") == ["2"]
    assert "-S" in argv


def test_drives_are_found_by_serial_and_only_the_workspace_is_written() -> None:
    argv = arguments(SPEC, EMULATED, goes_on=False, tsc_khz=None)
    drives = {drive.split("node-name=")[1].split(",")[0]: drive for drive in after(argv, "-blockdev")}
    assert list(drives) == ["root", "workspace", "config", "layers"]
    assert [name for name, drive in drives.items() if "read-only=off" in drive] == ["workspace"]
    devices = [device for device in after(argv, "-device") if device.startswith("virtio-blk")]
    assert devices == [f"virtio-blk-device,drive={name},serial={name},rerror=report,werror=report" for name in drives]
    assert "virtserialport,chardev=guest,name=sandboxd" in after(argv, "-device")


def test_one_that_goes_on_differs_only_in_its_memory_and_where_it_comes_from() -> None:
    boots = arguments(SPEC, EMULATED, goes_on=False, tsc_khz=1)
    goes_on = arguments(SPEC, EMULATED, goes_on=True, tsc_khz=1)
    assert [f"fd:{Given.STATE:d}"] == after(goes_on, "-incoming")
    assert [one.replace("share=on", "share=off") for one in boots] == goes_on[: len(boots)]
    assert boots != goes_on[: len(boots)]


def test_the_guest_of_an_emulator_is_told_the_rate_of_its_clock() -> None:
    (append,) = after(arguments(SPEC, EMULATED, goes_on=False, tsc_khz=2_596_125), "-append")
    assert "tsc_early_khz=2596125" in append.split()
    (append,) = after(arguments(SPEC, EMULATED, goes_on=False, tsc_khz=None), "-append")
    assert "tsc_early_khz" not in append
    argv = arguments(replace(SPEC, vcpus=1), FAST, goes_on=False, tsc_khz=2_596_125)
    (append,) = after(argv, "-append")
    assert not {"tsc_early_khz=2596125", "mitigations=off", "nokaslr"} & set(append.split())
    assert (after(argv, "-accel"), after(argv, "-cpu")) == (["kvm"], ["host"])


@pytest.mark.parametrize(
    ("version", "vcpus", "words"),
    [
        # Until 8.1 QEMU read code to translate it without a lock on its page ("accel/tcg: Always lock pages before
        # translation", August 2023).
        ("7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3), layout 2", 2, ",thread=single"),
        ("8.0.5, layout 2", 2, ",thread=single"),
        ("7.2.22, layout 2", 1, ""),
        ("8.1.0, layout 2", 2, ""),
        ("10.0.2 (Debian 1:10.0.2+ds-2), layout 2", 4, ""),
        ("unheard of", 2, ",thread=single"),
    ],
)
def test_processors_that_an_old_emulator_would_let_run_stale_code_take_turns(
    version: str, vcpus: int, words: str
) -> None:
    facts = Facts("qemu", version, False, "emulated", "no KVM")
    argv = arguments(replace(SPEC, vcpus=vcpus), facts, goes_on=False, tsc_khz=None)
    assert after(argv, "-accel") == [f"tcg,tb-size=64{words}"]


@pytest.mark.parametrize(
    ("cpuinfo", "khz"),
    [
        # As a host whose kernel says "tsc: Detected 2596.125 MHz processor" shows it.
        ("processor\t: 0\nflags\t\t: fpu tsc\nbogomips\t: 5192.25\n", 2_596_125),
        ("bogomips\t: 4800.00\nprocessor\t: 1\nbogomips\t: 4800.01\n", 2_400_000),
        ("BogoMIPS\t: 50.00\n", None),
        ("bogomips\t: many\n", None),
        ("", None),
    ],
)
def test_the_counters_rate_comes_from_bogomips(cpuinfo: str, khz: int | None) -> None:
    assert tsc_khz(cpuinfo) == khz
