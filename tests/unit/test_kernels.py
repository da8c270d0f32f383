"""Preparing the kernel of microVMs: what is taken, what is refused and why, and what a first root file system holds."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.errors import BackendError, InvalidRequestError, SandboxError
from agent_sandbox.images import tools
from agent_sandbox.images.machine import MachineImages, bzimage, cpio, modules, vmlinux
from tests.unit import kernel_harness as harness
from tests.unit.kernel_harness import ORDER, VERSION


@pytest.fixture
def machines(tmp_path: Path) -> MachineImages:
    return MachineImages(tmp_path / "machine")


@pytest.fixture
def sandboxd(tmp_path: Path) -> Path:
    path = tmp_path / "sandboxd"
    path.write_bytes(b"the daemon")
    return path


@pytest.fixture
def vmlinuz(tmp_path: Path) -> Path:
    path = tmp_path / "vmlinuz"
    path.write_bytes(harness.bzimage())
    return path


def left(machines_directory: Path) -> list[str]:
    """What is there besides prepared kernels."""
    return sorted(
        path.name for path in (machines_directory / "kernel").rglob("*") if path.name.startswith((".", "unpacked"))
    )


# -- the archive -----------------------------------------------------------------------


def test_an_archive_has_the_bytes_that_the_format_asks_for() -> None:
    entries = [cpio.directory("dev"), cpio.file("a", b"hi\n"), cpio.file("init", b"", 0o755)]
    rest = b"00000000" * 4
    assert cpio.pack(entries) == (
        b"070701" b"00000001" b"000041ED" b"00000000" b"00000000" b"00000002" b"00000000" b"00000000" + rest
        + b"00000004" b"00000000" b"dev\0\0\0"
        b"070701" b"00000002" b"000081A4" b"00000000" b"00000000" b"00000001" b"00000000" b"00000003" + rest
        + b"00000002" b"00000000" b"a\0hi\n\0"
        b"070701" b"00000003" b"000081ED" b"00000000" b"00000000" b"00000001" b"00000000" b"00000000" + rest
        + b"00000005" b"00000000" b"init\0\0"
        b"070701" b"00000000" b"00000000" b"00000000" b"00000000" b"00000001" b"00000000" b"00000000" + rest
        + b"0000000B" b"00000000" b"TRAILER!!!\0\0\0\0"
    )  # fmt: skip


@pytest.mark.parametrize("path", ["", "/init", "a\0b", "TRAILER!!!"])
def test_an_archive_takes_no_path_that_it_cannot_hold(path: str) -> None:
    with pytest.raises(ValueError, match="no entry"):
        cpio.pack([cpio.file(path, b"")])


# -- kernel images ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no bzImage"),
        (b"\x7fELF" + bytes(4096), "uncompressed kernel (ELF)"),
        (bytes(0x38) + b"ARM\x64" + bytes(4096), "arm64"),
        (gzip.compress(bytes(70_000)), "gzip"),
        (harness.bzimage(load=0x02), "32-bit"),
        (harness.bzimage(protocol=0x020B), "32-bit"),
        (harness.bzimage(cut=1), "cut off: 1087 bytes of 1088"),
        (harness.bzimage()[:0x210], "no bzImage"),
        (harness.bzimage(version="../../etc"), "does not tell its version"),
    ],
)
def test_what_is_no_kernel_for_amd64_is_refused_with_what_it_is(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "vmlinuz"
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=re.escape(why)) as caught:
        bzimage.read_version(path)
    assert "linux-image-cloud-amd64" in caught.value.message


def test_a_version_never_leads_out_of_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "vmlinuz"
    path.write_bytes(harness.bzimage(version="6.1/../../x"))
    assert bzimage.read_version(path) == "6.1"


@pytest.mark.parametrize(
    "pack",
    [
        lambda kernel: harness.sized(harness.lz4(kernel), kernel),
        lambda kernel: harness.sized(lzma.compress(kernel), kernel),
        gzip.compress,  # which has the size at its end
        lambda kernel: harness.sized(bz2.compress(kernel), kernel),
        lambda kernel: harness.sized(zstandard.ZstdCompressor().compress(kernel), kernel),
    ],
    ids=["lz4", "xz", "gzip", "bzip2", "zstd"],
)
def test_a_packed_kernel_is_unpacked_so_that_machines_boot_sooner(
    machines: MachineImages, sandboxd: Path, vmlinuz: Path, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    inner = harness.elf_kernel()
    vmlinuz.write_bytes(harness.bzimage(payload=pack(inner)))
    machines.prepare_kernel(vmlinuz, harness.write_modules(tmp_path / "modules"))
    kernel = machines.kernel(sandboxd)
    assert kernel.image == kernel.vmlinux
    assert kernel.image.read_bytes() == inner
    assert kernel.vmlinuz.read_bytes() == vmlinuz.read_bytes()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"packed by something new" * 9,
        harness.sized(harness.lz4(harness.elf_kernel(note=17)), harness.elf_kernel()),
        harness.sized(harness.lz4(harness.elf_kernel(machine=3)), harness.elf_kernel()),
        harness.sized(harness.lz4(b"no ELF file" * 1000), b"no ELF file" * 1000),
        harness.lz4(harness.elf_kernel())[:-1000],
        harness.sized(harness.lz4(harness.elf_kernel())[:-1000], harness.elf_kernel()),
        harness.sized(lzma.compress(harness.elf_kernel())[:-1000], harness.elf_kernel()),
        b"\x02\x21\x4c\x18" + (3).to_bytes(4, "little") + b"\x00\x09\x00" + (9).to_bytes(4, "little"),
        harness.sized(zstandard.ZstdCompressor().compress(harness.elf_kernel())[:-1000], harness.elf_kernel()),
    ],
    ids=["none", "unknown", "no entry", "32-bit", "no ELF", "no size", "lz4 cut", "xz cut", "lz4 odd", "zstd cut"],
)
def test_a_kernel_that_cannot_be_unpacked_is_booted_as_it_is(
    machines: MachineImages, sandboxd: Path, vmlinuz: Path, tmp_path: Path, payload: bytes
) -> None:
    vmlinuz.write_bytes(harness.bzimage(payload=payload))
    machines.prepare_kernel(vmlinuz, harness.write_modules(tmp_path / "modules"))
    kernel = machines.kernel(sandboxd)
    assert (kernel.vmlinux, kernel.image) == (None, kernel.vmlinuz)


@given(st.lists(st.tuples(st.binary(max_size=40), st.integers(1, 300)), max_size=12))
def test_lz4_gives_back_what_was_packed(pieces: list[tuple[bytes, int]]) -> None:
    content = b"".join(piece * times for piece, times in pieces)
    assert vmlinux.unpack_lz4(harness.lz4(content, 10_000) + bytes(4), len(content)) == content


@given(st.binary(max_size=300))
def test_lz4_of_anything_gives_bytes_or_an_error(content: bytes) -> None:
    with contextlib.suppress(ValueError, IndexError):
        found = vmlinux.unpack_lz4(b"\x02\x21\x4c\x18" + len(content).to_bytes(4, "little") + content, 1000)
        assert 1000 <= len(found) <= 1000 + (8 << 20)  # until it is enough, and a block of the format more at most


# -- modules ---------------------------------------------------------------------------


def test_modules_come_after_what_they_depend_on_and_what_is_built_in_not_at_all() -> None:
    parsed = {
        modules.plain(Path(name).stem): modules.parse_module(harness.module(*info))
        for name, info in harness.MODULES.items()
    }
    plan = modules.plan(modules.parse_builtin(harness.BUILTIN), parsed.get)
    assert (plan.order, plan.missing) == (ORDER, [])


def test_a_circle_of_modules_ends_and_what_is_only_wanted_may_be_missing() -> None:
    parsed = {
        "a": modules.Module(VERSION, ("b",), ("nothing",)),
        "b": modules.Module(VERSION, ("a",), ("crc",)),
        "crc_generic": modules.Module(VERSION),
    }
    plan = modules.plan(frozenset(), parsed.get, {"a": "CONFIG_A"})
    assert (plan.order, plan.missing) == (["crc_generic", "b", "a"], [])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x7fELF\x02\x01",
        harness.module(machine=183),
        harness.module()[:100],
        harness.module().replace(b".modinfo", b".modinfx"),
        harness.module()[:40] + b"\xff" * 8 + harness.module()[48:],
    ],
    ids=["empty", "short", "arm64", "cut off", "nothing said", "table far away"],
)
def test_what_is_no_module_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"ELF|module|section"):
        modules.parse_module(content)


def test_a_module_cut_anywhere_gives_no_other_error() -> None:
    whole = harness.module("virtio", "pre: crc32c")
    for cut in range(len(whole)):
        with pytest.raises(ValueError, match=r"ELF|module|section"):
            modules.parse_module(whole[:cut])


# -- fetching --------------------------------------------------------------------------

LISTED = "Package: linux-image-cloud-amd64\nDepends: linux-image-6.1.0-99-cloud-amd64 (= 6.1.200-1)\n"


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put scripts in the place of apt's two programs."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(tools, "PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    def write(cache: str, get: str) -> None:
        for name, script in (("apt-cache", cache), ("apt-get", get)):
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "bin" / name).chmod(0o755)

    return write


def test_the_newest_kernel_is_downloaded_by_apt(
    machines: MachineImages, apt: Callable[[str, str], None], tmp_path: Path
) -> None:
    harness.package(tmp_path / "linux-image-6.1.0-99-cloud-amd64_6.1.200-1_amd64.deb")
    apt(f'echo "$@" > {tmp_path}/asked; printf "{LISTED}"', f'echo "$@" >> {tmp_path}/asked; cp {tmp_path}/*.deb .')
    assert machines.prepare_kernel().source == "linux-image-6.1.0-99-cloud-amd64_6.1.200-1_amd64"
    assert (tmp_path / "asked").read_text() == (
        "show --no-all-versions linux-image-cloud-amd64\ndownload -q linux-image-6.1.0-99-cloud-amd64\n"
    )


@pytest.mark.parametrize(
    ("cache", "get", "why"),
    [
        ("echo 'E: No packages found' >&2; exit 100", "", "no package linux-image-cloud-amd64.*run apt-get update"),
        ("echo 'Package: odd'", "", "does not say which kernel"),
        ("echo 'Depends: linux-image-$(id) | linux-base, /etc'", "", "does not say which kernel"),
        (
            f'printf "{LISTED}"',
            "echo 'E: 404 Not Found' >&2; exit 100",
            "downloaded: E: 404 .*apt-get update",
        ),
        (f'printf "{LISTED}"', "exit 0", "left 0 packages"),
        (f'printf "{LISTED}"', "ln -s /etc/passwd a.deb", "left 0 packages"),
    ],
    ids=["unknown", "no dependency", "odd dependency", "gone", "nothing", "a link"],
)
def test_what_apt_cannot_give_is_told_with_what_to_do(
    machines: MachineImages, apt: Callable[[str, str], None], tmp_path: Path, cache: str, get: str, why: str
) -> None:
    apt(cache, get)
    with pytest.raises(BackendError, match=why):
        machines.prepare_kernel()
    assert left(tmp_path / "machine") == []


def test_without_apt_it_is_said_how_to_name_a_kernel(
    machines: MachineImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "PATH", str(tmp_path / "nothing"))
    with pytest.raises(BackendError, match=r"apt-cache is not installed; .*--kernel and --modules"):
        machines.prepare_kernel()


# -- preparing -------------------------------------------------------------------------


def test_without_a_prepared_kernel_it_is_said_what_to_run(machines: MachineImages, sandboxd: Path) -> None:
    with pytest.raises(BackendError, match="run: agent-sandbox image kernel"):
        machines.kernel(sandboxd)


def test_a_package_becomes_the_kernel_of_new_machines(machines: MachineImages, sandboxd: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    prepared = machines.prepare_kernel(
        harness.package(tmp_path / "linux-image_1_amd64.deb"), progress=lambda phase, done, total: seen.append(phase)
    )
    assert (prepared.version, prepared.source, prepared.checked_config) == (VERSION, "linux-image_1_amd64", True)
    assert set(seen) == {"unpack", "check"}
    kernel = machines.kernel(sandboxd)
    assert kernel.vmlinuz.read_bytes() == harness.bzimage()
    assert kernel.version == VERSION
    assert kernel.name.startswith(prepared.name + "-")
    assert kernel.modules == tuple(f"{name}.ko" for name in ORDER)
    content = {f"{name}.ko": harness.module(*info) for name, info in _by_name().items()}
    expected = [cpio.directory(name) for name in ("dev", "proc", "sys", "root", "modules")]
    expected += [cpio.file("init", b"the daemon", 0o755)]
    expected += [cpio.file("modules/order", "".join(f"{name}.ko\n" for name in ORDER).encode())]
    expected += [cpio.file(f"modules/{name}.ko", content[f"{name}.ko"]) for name in ORDER]
    assert kernel.initramfs.read_bytes() == cpio.pack(expected)
    assert left(tmp_path / "machine") == []
    assert (tmp_path / "machine").stat().st_mode & 0o777 == 0o700


def _by_name() -> dict[str, tuple[str, str]]:
    return {modules.plain(Path(name).stem): info for name, info in harness.MODULES.items()}


def test_a_package_and_its_files_are_the_same_kernel(machines: MachineImages, vmlinuz: Path, tmp_path: Path) -> None:
    tree = harness.write_modules(tmp_path / "modules")
    own = machines.prepare_kernel(vmlinuz, tree)
    assert (own.source, own.checked_config) == (str(vmlinuz), False)
    (tmp_path / f"config-{VERSION}").write_text(harness.CONFIG)
    assert machines.prepare_kernel(vmlinuz, tree).checked_config
    assert machines.prepare_kernel(harness.package(tmp_path / "k.deb")).name == own.name


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".xz", lzma.compress), (".gz", gzip.compress), (".zst", zstandard.ZstdCompressor().compress)],
)
def test_packed_modules_are_unpacked(
    machines: MachineImages, vmlinuz: Path, tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    tree = harness.write_modules(tmp_path / "modules")
    plain = machines.prepare_kernel(vmlinuz, tree)
    for path in [*tree.rglob("*.ko")]:
        path.with_name(path.name + suffix).write_bytes(pack(path.read_bytes()))
        path.unlink()
    assert machines.prepare_kernel(vmlinuz, tree) == plain


def test_a_new_daemon_gets_a_root_of_its_own_and_the_old_one_stays(
    machines: MachineImages, sandboxd: Path, tmp_path: Path
) -> None:
    machines.prepare_kernel(harness.package(tmp_path / "k.deb"))
    first = machines.kernel(sandboxd)
    sandboxd.write_bytes(b"another daemon")
    second = machines.kernel(sandboxd)
    assert first.name != second.name
    assert b"the daemon" in first.initramfs.read_bytes()
    assert b"another daemon" in second.initramfs.read_bytes()
    sandboxd.write_bytes(b"the daemon")
    os.utime(sandboxd, (1, 1))
    assert machines.kernel(sandboxd) == first
    assert MachineImages(tmp_path / "machine").kernel(sandboxd) == first


def test_old_first_roots_make_room_but_for_those_in_use(
    machines: MachineImages, sandboxd: Path, tmp_path: Path
) -> None:
    machines.prepare_kernel(harness.package(tmp_path / "k.deb"))
    used = machines.kernel(sandboxd).initramfs
    os.link(used, tmp_path / "mine")
    os.utime(used, (1, 1))
    made = []
    for number in range(10):
        sandboxd.write_bytes(b"daemon %d" % number)
        made.append(machines.kernel(sandboxd).initramfs)
        os.utime(made[-1], (2 + number, 2 + number))
    assert used.exists()
    assert [path for path in made if path.exists()] == made[-8:]


@pytest.mark.parametrize("name", ["virtio_mmio", "erofs", "overlay", "virtio-rng"])
def test_a_missing_driver_is_named_with_its_option(
    machines: MachineImages, vmlinuz: Path, tmp_path: Path, name: str
) -> None:
    plain = modules.plain(name)
    with pytest.raises(InvalidRequestError, match=f"lacks .*{plain}.*{modules.DRIVERS[plain]}") as caught:
        machines.prepare_kernel(vmlinuz, harness.write_modules(tmp_path / "modules", without=name))
    assert caught.value.details == {"missing": [plain]}
    assert left(tmp_path / "machine") == []


def test_what_a_driver_depends_on_is_named_with_the_driver(
    machines: MachineImages, vmlinuz: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=r"libcrc32c \(for erofs\)"):
        machines.prepare_kernel(vmlinuz, harness.write_modules(tmp_path / "modules", without="libcrc32c"))
    with pytest.raises(InvalidRequestError, match=r"lacks .*ext4.*CONFIG_EXT4_FS"):
        machines.prepare_kernel(vmlinuz, harness.write_modules(tmp_path / "others", builtin=""))


def damaged_packages() -> dict[str, tuple[Callable[[Path], object], str]]:
    boot, lib = f"./boot/vmlinuz-{VERSION}", f"./lib/modules/{VERSION}"
    whole: dict[str, bytes | str] = {boot: harness.bzimage()}

    def cut(path: Path) -> None:
        content = harness.package(path).read_bytes()
        path.write_bytes(content[: len(content) // 2])

    return {
        "no archive": (lambda path: path.write_bytes(b"\x7fELF" + bytes(500)), "no Debian package"),
        "no files": (lambda path: path.write_bytes(harness.ar({"debian-binary": b"2.0\n"})), "no files in it"),
        "odd size": (lambda path: path.write_bytes(b"!<arch>\n" + b"data.tar.xz".ljust(58) + b"`\n"), "no files in it"),
        "cut off": (cut, "not a whole tar archive"),
        "no kernel": (lambda path: harness.package(path, {"./etc/x": b"y"}), "holds no kernel"),
        "a link as kernel": (lambda path: harness.package(path, {boot: "/etc/passwd"}), "holds no kernel"),
        "leads out": (
            lambda path: harness.package(path, whole | {f"{lib}/../../../../evil.ko": b"x"}),
            "leads out of it",
        ),
        "a module of another kernel": (
            lambda path: harness.package(path, whole | {f"{lib}/virtio_mmio.ko": harness.module(version="5.10.0-1")}),
            "is of kernel 5.10.0-1, and the kernel is 6.1.0-99",
        ),
        "a damaged module": (
            lambda path: harness.package(path, whole | {f"{lib}/virtio_mmio.ko": b"x" * 100}),
            "cannot be used: no ELF file for amd64",
        ),
        "a damaged packed module": (
            lambda path: harness.package(path, whole | {f"{lib}/virtio_mmio.ko.xz": b"\xfd7zXZ\0broken"}),
            "is damaged",
        ),
        "built without": (
            lambda path: harness.package(path, whole | {f"./boot/config-{VERSION}": b"CONFIG_ACPI=y\n"}),
            "CONFIG_BLK_DEV_INITRD",
        ),
        "no modules": (lambda path: harness.package(path, whole), "virtio_mmio, virtio_blk, .*CONFIG_VIRTIO_MMIO"),
    }


@pytest.mark.parametrize("kind", damaged_packages())
def test_a_bad_package_is_refused_and_leaves_nothing(
    machines: MachineImages, sandboxd: Path, tmp_path: Path, kind: str
) -> None:
    machines.prepare_kernel(harness.package(tmp_path / "good.deb"))
    before = machines.kernel(sandboxd)
    write, why = damaged_packages()[kind]
    write(tmp_path / "bad.deb")
    with pytest.raises(InvalidRequestError, match=why):
        machines.prepare_kernel(tmp_path / "bad.deb")
    assert left(tmp_path / "machine") == []
    assert machines.kernel(sandboxd) == before
    assert not list(tmp_path.rglob("evil*"))


def test_what_does_not_go_together_is_refused(machines: MachineImages, vmlinuz: Path, tmp_path: Path) -> None:
    tree = harness.write_modules(tmp_path / "modules")
    wrong: list[tuple[Path | None, Path | None, str]] = [
        (None, tree, "--modules goes with --kernel"),
        (vmlinuz, None, "--modules is missing"),
        (vmlinuz, tmp_path / "nowhere", "no directory"),
        (tmp_path / "nowhere", tree, "is no file"),
        (harness.package(tmp_path / "k.deb"), tree, "leave --modules out"),
    ]
    for kernel, directory, why in wrong:
        with pytest.raises(InvalidRequestError, match=why):
            machines.prepare_kernel(kernel, directory)
    assert left(tmp_path / "machine") == []


@pytest.mark.parametrize("name", ["vmlinuz", "modules/erofs.ko", "kernel.json", "../current"])
def test_a_damaged_kernel_is_noticed_and_preparing_it_again_mends_it(
    machines: MachineImages, sandboxd: Path, tmp_path: Path, name: str
) -> None:
    package = harness.package(tmp_path / "k.deb")
    machines.prepare_kernel(package)
    kernel = machines.kernel(sandboxd)
    (kernel.vmlinuz.parent / name).write_bytes(b"..")
    with pytest.raises(BackendError, match="damaged; run: agent-sandbox image kernel"):
        machines.kernel(sandboxd)
    machines.prepare_kernel(package)
    assert machines.kernel(sandboxd) == kernel
    assert kernel.vmlinuz.read_bytes() == harness.bzimage()


def test_a_failure_of_the_progress_leaves_nothing(machines: MachineImages, tmp_path: Path) -> None:
    def interrupt(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machines.prepare_kernel(harness.package(tmp_path / "k.deb"), progress=interrupt)
    assert list((tmp_path / "machine/kernel").iterdir()) == []


def test_what_a_killed_preparation_left_is_cleared_by_the_next_server(tmp_path: Path) -> None:
    package = harness.package(tmp_path / "k.deb")
    pid = os.fork()
    if pid == 0:
        MachineImages(tmp_path / "machine").prepare_kernel(
            package, progress=lambda phase, done, total: os.kill(os.getpid(), signal.SIGKILL)
        )
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert left(tmp_path / "machine")
    MachineImages(tmp_path / "machine").prepare()
    assert left(tmp_path / "machine") == []


def test_kernels_prepared_by_several_processes_at_once_are_all_whole(sandboxd: Path, tmp_path: Path) -> None:
    package = harness.package(tmp_path / "k.deb")
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                machines = MachineImages(tmp_path / "machine")
                for _ in range(2):
                    machines.prepare_kernel(package)
                    assert machines.kernel(sandboxd).initramfs.read_bytes()[-4:] == bytes(4)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 3
    assert left(tmp_path / "machine") == []


def test_kernels_of_long_ago_make_room(machines: MachineImages, sandboxd: Path, tmp_path: Path) -> None:
    homes = []
    for number in range(6):
        (tmp_path / "vmlinuz").write_bytes(harness.bzimage() + b"%d" % number)
        machines.prepare_kernel(tmp_path / "vmlinuz", harness.write_modules(tmp_path / "modules"))
        homes.append(machines.kernel(sandboxd).vmlinuz.parent)
        os.utime(homes[-1], (number, number))
        if number == 0:
            os.link(homes[0] / "vmlinuz", tmp_path / "mine")
    assert [home.exists() for home in homes] == [True, False, True, True, True, True]


def test_every_refusal_is_an_error_of_ours(machines: MachineImages, tmp_path: Path) -> None:
    """A directory where a file is expected, and a file where the directory is to be."""
    (tmp_path / "machine").write_text("in the way")
    with pytest.raises(SandboxError, match="preparing the kernel failed"):
        machines.prepare_kernel(harness.package(tmp_path / "k.deb"))
