"""Kernels, modules and packages made by hand: as small as what is read of them, and each part may be wrong."""

from __future__ import annotations

import io
import lzma
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path

VERSION = "6.1.0-99-cloud-amd64"
BUILTIN = "kernel/fs/ext4/ext4.ko\nkernel/crypto/crc32c_generic.ko\n"
OPTIONS = (
    *("ACPI", "BLK_DEV_INITRD", "DEVTMPFS", "PROC_FS", "SYSFS", "TMPFS", "UNIX", "MULTIUSER", "CGROUPS"),
    *("CGROUP_PIDS", "FAIR_GROUP_SCHED", "MEMCG", "SECCOMP_FILTER", "INOTIFY_USER", "EPOLL"),
)
CONFIG = "# Linux\n" + "".join(f"CONFIG_{name}=y\n" for name in OPTIONS) + "CONFIG_EROFS_FS=m\n"
MODULES: Mapping[str, tuple[str, str]] = {
    "drivers/virtio/virtio.ko": ("virtio_ring", ""),
    "drivers/virtio/virtio_ring.ko": ("", ""),
    "drivers/virtio/virtio_mmio.ko": ("virtio,virtio_ring", ""),
    "drivers/block/virtio_blk.ko": ("virtio,virtio_ring", ""),
    "drivers/char/virtio_console.ko": ("virtio_ring,virtio", ""),
    "drivers/char/hw_random/virtio-rng.ko": ("virtio", ""),
    "lib/libcrc32c.ko": ("", "pre: crc32c"),
    "fs/erofs/erofs.ko": ("libcrc32c", ""),
    "fs/overlayfs/overlay.ko": ("", ""),
    "net/vmw_vsock/vsock.ko": ("", ""),
    "net/vmw_vsock/vmw_vsock_virtio_transport_common.ko": ("vsock", ""),
    "net/vmw_vsock/vmw_vsock_virtio_transport.ko": ("vmw_vsock_virtio_transport_common,vsock,virtio", ""),
    "net/unrelated.ko": ("", ""),
}
"""Files of a kernel's modules: what each depends on, and its softdep."""
ORDER = [
    *("virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio_console", "virtio_rng"),
    *("libcrc32c", "erofs", "overlay", "vsock", "vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport"),
]


def bzimage(
    version: str = VERSION, *, protocol: int = 0x20F, load: int = 0x7F, cut: int = 0, payload: bytes = b""
) -> bytes:
    """A kernel image of 1 setup sector and 64 bytes of code, then the packed kernel."""
    image = bytearray(512 * 2 + 64) + payload + bytes(-len(payload) % 16)
    image[0x1F1] = 1
    struct.pack_into("<I", image, 0x1F4, (len(image) - 1024) // 16)
    struct.pack_into("<II", image, 0x248, 64, len(payload))
    image[0x1FE:0x200] = b"\x55\xaa"
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", image, 0x206, protocol)
    struct.pack_into("<H", image, 0x20E, 0x100)
    struct.pack_into("<H", image, 0x236, load)
    text = f"{version} (somebody@somewhere) #1 SMP".encode() + b"\0"
    image[0x300 : 0x300 + len(text)] = text
    return bytes(image[: len(image) - cut])


def module(depends: str = "", softdep: str = "", *, version: str = VERSION, machine: int = 62) -> bytes:
    """A module: an ELF file with the sections ``.modinfo`` and that of the names."""
    info = f"license=GPL\0depends={depends}\0" + (f"softdep={softdep}\0" if softdep else "")
    modinfo = (info + f"vermagic={version} SMP mod_unload \0").encode()
    names = b"\0.modinfo\0.shstrtab\0"
    start = 64
    table = start + len(modinfo) + len(names)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 1, machine, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2)
    sections = bytes(64)
    for name, at, size in ((1, start, len(modinfo)), (10, start + len(modinfo), len(names))):
        sections += struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, at, size, 0, 0, 1, 0)
    return header + modinfo + names + sections


def write_modules(tree: Path, without: str = "", builtin: str = BUILTIN) -> Path:
    """A ``/lib/modules/VERSION``."""
    for name, (depends, softdep) in MODULES.items():
        if without and Path(name).stem == without:
            continue
        path = tree / "kernel" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(module(depends, softdep))
    (tree / "modules.builtin").write_text(builtin)
    return tree


def package(path: Path, members: Mapping[str, bytes | str] | None = None) -> Path:
    """A package of Debian's; a text among ``members`` is the target of a link. The whole kernel where None."""
    if members is None:
        members = {f"./boot/vmlinuz-{VERSION}": bzimage(), f"./boot/config-{VERSION}": CONFIG.encode()}
        members |= {f"./lib/modules/{VERSION}/kernel/{name}": module(*info) for name, info in MODULES.items()}
        members |= {f"./lib/modules/{VERSION}/modules.builtin": BUILTIN.encode(), "./usr/share/doc/x": b"left out"}
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o644
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    path.write_bytes(
        ar({"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": lzma.compress(data.getvalue())})
    )
    return path


def ar(members: Mapping[str, bytes]) -> bytes:
    """An archive of ``ar``."""
    packed = b"!<arch>\n"
    for name, content in members.items():
        packed += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        packed += b"\n" * (len(content) % 2)
    return packed


def elf_kernel(*, note: int = 18, machine: int = 62, size: int = 200_000) -> bytes:
    """An ELF file with a note of the 32-bit entry, and content that packs."""
    notes = struct.pack("<III", 4, 8, note) + b"Xen\0" + bytes(8)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0x1000000, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(notes), len(notes), 4)
    body = b"".join(b"line %d of the kernel\n" % (number * number % 9973) for number in range(size // 20))
    return header + segment + notes + body


def sized(packed: bytes, kernel: bytes) -> bytes:
    """A packed kernel with its size, as the kernel's build makes it."""
    return packed + len(kernel).to_bytes(4, "little")


def lz4(content: bytes, block: int = 1 << 20) -> bytes:
    """Packed as ``lz4 -l`` would: greedy, every match that a table of four bytes finds."""
    packed = b"\x02\x21\x4c\x18"
    for start in range(0, len(content), block):
        piece = _lz4_block(content[start : start + block])
        packed += struct.pack("<I", len(piece)) + piece
    return packed


def _lz4_block(content: bytes) -> bytes:
    packed, seen, at, pending = bytearray(), dict[bytes, int](), 0, 0
    while at < len(content) - 12:
        key = content[at : at + 4]
        before, seen[key] = seen.get(key, -1), at
        if before < 0 or at - before > 0xFFFF:
            at += 1
            continue
        length = 4
        while at + length < len(content) - 5 and content[before + length] == content[at + length]:
            length += 1
        _sequence(packed, content[pending:at], at - before, length)
        at += length
        pending = at
    _sequence(packed, content[pending:], 0, 0)
    return bytes(packed)


def _sequence(packed: bytearray, literals: bytes, distance: int, length: int) -> None:
    token = min(len(literals), 15) << 4 | (min(length - 4, 15) if distance else 0)
    packed.append(token)
    packed += _more(len(literals)) + literals
    if distance:
        packed += struct.pack("<H", distance) + _more(length - 4)


def _more(length: int) -> bytes:
    if length < 15:
        return b""
    return b"\xff" * ((length - 15) // 255) + bytes([(length - 15) % 255])
