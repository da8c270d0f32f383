"""QEMU's command line for one machine. A pure function: the same for a machine that boots and one that goes on.

The machine is ``microvm``: no PCI bus, virtio devices on memory-mapped slots, no network device. It gets every file and
socket as a descriptor of a fixed number, so that QEMU needs no right to any path. What was saved goes on only in a
machine with the same devices in the same order, so these come from here alone.

When changing devices or their order: count ``LAYOUT`` up; what an older release saved is then refused with a reason.
"""

from __future__ import annotations

import re
from enum import IntEnum

from agent_sandbox.backends.microvm.monitor import Facts, MachineSpec

LAYOUT = 2
TB_CACHE_MB = 64
"""Of translated code, per machine under TCG. QEMU's own default is up to 1 GiB of the host's memory."""
_TRANSLATES_SAFELY = (8, 1)
"""An older QEMU reads code to translate it before it watches the page for changes. With processors side by side one may
go on for ever with code that another has just replaced, as kernels and compilers in time do, and the guest hangs: there
they take turns."""
GUEST_PORT = "sandboxd"
_KERNEL_ARGUMENTS = ("console=ttyS0", "quiet", "reboot=t", "panic=-1", "random.trust_cpu=on", "cryptomgr.notests")
_TCG_ARGUMENTS = ("tsc=reliable", "no_timer_check", "nokaslr", "mitigations=off")
"""Calibration and checks that an emulated clock fails, and protection from a processor that is not there."""
_VERSION = re.compile(r"(\d{1,3})\.(\d{1,3})")
_BOGOMIPS = re.compile(r"^bogomips\s*:\s*(\d{1,6})\.(\d\d)\s*$", re.MULTILINE)


class Given(IntEnum):
    """Descriptors of the monitor's process."""

    QMP = 3
    GUEST = 4
    KERNEL = 5
    INITRD = 6
    ROOT = 7
    WORKSPACE = 8
    CONFIG = 9
    LAYERS = 10
    MEMORY = 11
    STATE = 12


def arguments(spec: MachineSpec, facts: Facts, *, goes_on: bool, tsc_khz: int | None) -> list[str]:
    """QEMU's arguments, without its own name. The processors are stopped at first.

    The guest's console is QEMU's standard output. With ``goes_on`` memory is mapped privately and device state is read
    from :attr:`Given.STATE`. ``tsc_khz`` is the rate of the host's time stamp counter, which a guest under TCG sees and
    would calibrate for seconds, or hang in it.
    """
    kernel_arguments = [*_KERNEL_ARGUMENTS]
    if not facts.accelerated:
        kernel_arguments += _TCG_ARGUMENTS
        if tsc_khz:
            kernel_arguments.append(f"tsc_early_khz={tsc_khz}")
    return [
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-S"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        *("-machine", "microvm,pit=off,pic=off,rtc=on,memory-backend=memory,suppress-vmdesc=on"),
        *("-accel", _accelerator(spec, facts), "-cpu", cpu_model(facts.accelerated), "-smp", str(spec.vcpus)),
        *("-m", f"{spec.memory_mb}M", "-object", _memory(spec.memory_mb, shared=not goes_on)),
        *("-kernel", _path(Given.KERNEL), "-initrd", _path(Given.INITRD), "-append", " ".join(kernel_arguments)),
        *("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"),
        *("-chardev", f"socket,id=qmp,fd={Given.QMP:d},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
        *_drive(Given.ROOT, "root", read_only=True),
        *_drive(Given.WORKSPACE, "workspace", read_only=False),
        *_drive(Given.CONFIG, "config", read_only=True),
        *_drive(Given.LAYERS, "layers", read_only=True),
        *("-device", "virtio-serial-device,max_ports=2"),
        *("-chardev", f"socket,id=guest,fd={Given.GUEST:d},server=on,wait=off"),
        *("-device", f"virtserialport,chardev=guest,name={GUEST_PORT}"),
        *("-device", "virtio-rng-device"),
        # Device state is saved without memory, by a command that writes no section of configuration.
        *("-global", "migration.send-configuration=off"),
        *(("-incoming", f"fd:{Given.STATE:d}") if goes_on else ()),
    ]


def cpu_model(accelerated: bool) -> str:
    """The processor that a guest sees: the host's own, or all that TCG can emulate."""
    return "host" if accelerated else "max"


def tsc_khz(cpuinfo: str) -> int | None:
    """The rate of the host's time stamp counter in kHz, from proc_cpuinfo(5); None where it cannot be told.

    Linux takes its delay loop's length, of which BogoMIPS are made, from that rate: 500 kHz for each.
    """
    found = _BOGOMIPS.search(cpuinfo)
    return (int(found[1]) * 100 + int(found[2])) * 5 if found else None


def _accelerator(spec: MachineSpec, facts: Facts) -> str:
    if facts.accelerated:
        return "kvm"
    found = _VERSION.match(facts.version)
    safe = found is not None and (int(found[1]), int(found[2])) >= _TRANSLATES_SAFELY
    return f"tcg,tb-size={TB_CACHE_MB}" + ("" if safe or spec.vcpus == 1 else ",thread=single")


def _memory(memory_mb: int, *, shared: bool) -> str:
    share = "on" if shared else "off"
    return f"memory-backend-file,id=memory,size={memory_mb}M,mem-path={_path(Given.MEMORY)},share={share}"


def _drive(given: Given, serial: str, *, read_only: bool) -> tuple[str, ...]:
    mode = "on" if read_only else "off"
    return (
        *("-add-fd", f"fd={given:d},set={given:d}"),
        *(
            "-blockdev",
            f"driver=file,node-name={serial},filename=/dev/fdset/{given:d},read-only={mode},locking=off"
            + (",discard=unmap" if not read_only else ""),
        ),
        # A full disk of the host's is the guest's error; by default it would stop the machine.
        *("-device", f"virtio-blk-device,drive={serial},serial={serial},rerror=report,werror=report"),
    )


def _path(given: Given) -> str:
    """A path by which QEMU opens again what it has open already."""
    return f"/proc/self/fd/{given:d}"
