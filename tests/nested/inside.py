"""The first process of the outer machine: mount what there is, run one command, say how it ended, switch off.

Linux rewrites its own code when the first machine of KVM's begins and the last ends, and when the first control group
gets a quota and the last loses it. QEMU before 8.1 emulates processors side by side that may for ever run what was
replaced (it reads code to translate before it watches the page), and then nothing goes on or all ends. So one of each
stays from before the command to its end.
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ERRORS = "/dev/console"
MOUNTS = (
    ("tmpfs", "/run", "mode=0755"),
    ("tmpfs", "/tmp", "mode=1777"),
    ("cgroup2", "/sys/fs/cgroup", ""),
    ("devpts", "/dev/pts", "ptmxmode=0666"),
    ("tmpfs", "/dev/shm", "mode=1777"),
)


KVM_CREATE_VM, KVM_CREATE_IRQCHIP, KVM_CREATE_VCPU = 0xAE01, 0xAE60, 0xAE41
"""The kernel's <linux/kvm.h>."""


@contextlib.contextmanager
def steady() -> Iterator[None]:
    """Hold a control group with a quota, and a machine with a processor and its interrupts, that never runs."""
    group = Path("/sys/fs/cgroup/steady")
    group.mkdir()
    (group / "cpu.max").write_text("100000 100000")
    kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    machine = fcntl.ioctl(kvm, KVM_CREATE_VM, 0)
    fcntl.ioctl(machine, KVM_CREATE_IRQCHIP)
    processor = fcntl.ioctl(machine, KVM_CREATE_VCPU, 0)
    yield
    for descriptor in (processor, machine, kvm):
        os.close(descriptor)


def port(name: str) -> str:
    """The device of a virtio port."""
    for place in Path("/sys/class/virtio-ports").iterdir():
        if (place / "name").read_text().strip() == name:
            return f"/dev/{place.name}"
    raise FileNotFoundError(name)


def main() -> None:
    """Run the job that the drive of the project names."""
    for kind, place, options in MOUNTS:
        Path(place).mkdir(exist_ok=True)
        subprocess.run(["/bin/mount", "-t", kind, *(("-o", options) if options else ()), kind, place], check=True)
    # The controllers are there for what is below only when the root gives them.
    Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+cpu +memory +pids")
    for device, link in (("/proc/self/fd", "/dev/fd"), ("pts/ptmx", "/dev/ptmx")):
        Path(link).unlink(missing_ok=True)
        Path(link).symlink_to(device)
    Path("/etc/ld.so.conf.d/opt.conf").write_text("/opt/python/lib\n")
    subprocess.run(["/sbin/ldconfig"], check=True)
    subprocess.run(["/sbin/ip", "link", "set", "lo", "up"], check=True)
    job = json.loads(Path("/opt/job.json").read_text())
    with Path(port("output")).open("wb", buffering=0) as output, steady():
        ended = subprocess.run(
            job["argv"], cwd=job["cwd"], env=job["env"], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    Path(port("result")).write_text(f"{ended.returncode}\n")


if __name__ == "__main__":
    sys.stdout = sys.stderr = Path(ERRORS).open("w", buffering=1)  # noqa: SIM115 - until the machine ends
    try:
        main()
    finally:
        os.sync()
        Path("/proc/sysrq-trigger").write_text("o")
        time.sleep(60)
