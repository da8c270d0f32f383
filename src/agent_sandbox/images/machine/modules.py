"""Which kernel modules the first root file system has to bring, and in which order they are loaded.

There is no modprobe in there, and Debian's packages have no ``modules.dep`` (depmod makes it at installation). What is
needed is in the modules themselves: their section ``.modinfo`` names what each depends on, what it wants before
it (``softdep``), and the kernel that it was made for. ``modules.builtin`` lists what needs no module.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agent_sandbox.errors import InvalidRequestError

DRIVERS: Mapping[str, str] = {
    "virtio_mmio": "CONFIG_VIRTIO_MMIO",
    "virtio_blk": "CONFIG_VIRTIO_BLK",
    "virtio_console": "CONFIG_VIRTIO_CONSOLE",
    "virtio_rng": "CONFIG_HW_RANDOM_VIRTIO",
    "erofs": "CONFIG_EROFS_FS",
    "ext4": "CONFIG_EXT4_FS",
    "overlay": "CONFIG_OVERLAY_FS",
    "vmw_vsock_virtio_transport": "CONFIG_VIRTIO_VSOCKETS",
}
"""What a microVM needs, by module, with the option that a kernel is built with: the bus, the drives, QEMU's channel,
entropy, the root, the workspace, layers of files, Firecracker's channel."""

OPTIONS = (
    *("ACPI", "BLK_DEV_INITRD", "DEVTMPFS", "PROC_FS", "SYSFS", "TMPFS", "UNIX"),
    *("MULTIUSER", "CGROUPS", "CGROUP_PIDS", "FAIR_GROUP_SCHED", "MEMCG", "SECCOMP_FILTER", "INOTIFY_USER", "EPOLL"),
)
"""Parts of the kernel that are never modules: how devices are found and shown, and what the daemon stands on."""
MAX_MODULE_BYTES = 64 << 20
"""Of one module; the largest of a distribution has 8 MiB."""
_MODINFO_BYTES = 1 << 20
_SECTIONS = 10_000
"""A module has under 100."""
_EM_X86_64 = 62


@dataclass(frozen=True, slots=True)
class Module:
    """What a module says about itself."""

    kernel: str
    depends: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()


@dataclass(slots=True)
class Plan:
    """What is to be loaded, in order, and what there is neither as a module nor built in."""

    order: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def plain(name: str) -> str:
    """A module's name as the kernel has it: file names have hyphens where it has underscores."""
    return name.replace("-", "_")


def parse_builtin(text: str) -> frozenset[str]:
    """The names in a ``modules.builtin``."""
    return frozenset(plain(line.strip().rpartition("/")[2].partition(".")[0]) for line in text.splitlines())


def parse_module(content: bytes) -> Module:
    """Read the section ``.modinfo`` of a module. :class:`ValueError` when this is no 64-bit module for x86.

    ELF-64 as in elf(5): the header names the table of sections, and one of them holds their names.
    """
    try:
        if content[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", content, 18)[0] != _EM_X86_64:
            raise ValueError("no ELF file for amd64")
        table = struct.unpack_from("<Q", content, 40)[0]
        entry_bytes, count, names_at = struct.unpack_from("<HHH", content, 58)
        if entry_bytes != 64 or count > _SECTIONS or table + 64 * count > len(content):
            raise ValueError("a damaged table of sections")
        sections = [struct.unpack_from("<I20xQQ", content, table + 64 * at) for at in range(count)]
        names = sections[names_at][1]
        for name, start, size in sections:
            if (
                content[names + name : names + name + 9] == b".modinfo\0"
                and size <= _MODINFO_BYTES
                and start + size <= len(content)
            ):
                return _modinfo(content[start : start + size])
    except (struct.error, IndexError, OverflowError):
        raise ValueError("a damaged ELF file") from None
    raise ValueError("no kernel module")


def _modinfo(section: bytes) -> Module:
    kernel, depends, wants = "", [], []
    for item in section.decode(errors="replace").split("\0"):
        key, _, value = item.partition("=")
        if key == "vermagic":
            kernel = value.partition(" ")[0]
        elif key == "depends":
            depends += [plain(name) for name in value.split(",") if name]
        elif key == "softdep":
            wants += [plain(name) for name in value.partition("pre:")[2].partition("post:")[0].split()]
    return Module(kernel, tuple(depends), tuple(wants))


def plan(builtin: frozenset[str], read: Callable[[str], Module | None], drivers: Mapping[str, str] = DRIVERS) -> Plan:
    """Say what has to be loaded so that all ``drivers`` are there, each after what it depends on.

    ``read`` gives the module of a name, or None. What is only wanted (an algorithm, by its name or as ``NAME_generic``)
    is taken where it is there.
    """
    found, seen = Plan(), set[str]()

    def visit(name: str, needed_by: str) -> bool:
        if name in builtin or name in seen:
            return True
        module = read(name)
        if module is None:
            return False
        seen.add(name)
        for want in module.wants:
            if not visit(f"{want}_generic", ""):
                visit(want, "")
        for other in module.depends:
            if not visit(other, name):
                found.missing.append(f"{other} (for {name})")
        found.order.append(name)
        return True

    for driver in drivers:
        if not visit(driver, ""):
            found.missing.append(driver)
    return found


def check(found: Plan, kernel: str) -> None:
    """Raise :class:`InvalidRequestError` when something is missing, with the options that would bring it."""
    if not found.missing:
        return
    options = [DRIVERS[name] for name in found.missing if name in DRIVERS]
    raise InvalidRequestError(
        f"kernel {kernel} lacks what a microVM needs: {', '.join(found.missing)}"
        + (f"; build it with {', '.join(options)} (=y or =m, then make modules_install)" if options else "")
        + "; or leave --kernel out for Debian's linux-image-cloud-amd64",
        details={"missing": list(found.missing)},
    )


def check_config(text: str, kernel: str) -> None:
    """Raise :class:`InvalidRequestError` when the configuration of a kernel lacks one of :data:`OPTIONS`."""
    on = {line.removesuffix("=y") for line in text.splitlines() if line.endswith("=y")}
    missing = [f"CONFIG_{name}" for name in OPTIONS if f"CONFIG_{name}" not in on]
    if missing:
        raise InvalidRequestError(
            f"kernel {kernel} was built without what a microVM needs: {', '.join(missing)}; "
            "leave --kernel out for Debian's linux-image-cloud-amd64",
            details={"missing": missing},
        )
