"""What microVMs boot and run on, with the real tools: Debian's kernel by apt, root file systems by mkfs.erofs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_sandbox.backends.linux import mounts
from agent_sandbox.cli import exit_codes
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    SandboxError,
)
from agent_sandbox.images import ImageRoot, ImageStore, tools
from agent_sandbox.images.machine import MachineImages
from tests.unit import kernel_harness
from tests.unit.images_harness import archive, member

pytestmark = pytest.mark.real

MEMBERS = [
    member("./", tarfile.DIRTYPE, mode=0o755),
    member("./bin", tarfile.DIRTYPE, mode=0o755),
    member("./bin/tool", data=b"\x7fELF tool" * 1000, mode=0o4755),
    member("./bin/other", tarfile.LNKTYPE, link="./bin/tool"),
    member("./lib", tarfile.SYMTYPE, link="usr/lib"),
    member("./pipe", tarfile.FIFOTYPE, mode=0o600),
    member("./empty", data=bytes(300_000)),
    member("./deep", tarfile.DIRTYPE, mode=0o1777),
    member("./deep/\xff\udcff name", data=b"x", mode=0o640),
]


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    store = ImageStore(tmp_path / "data")
    (tmp_path / "root.tar").write_bytes(archive(MEMBERS))
    store.import_image("tools", tmp_path / "root.tar")
    return store


@pytest.fixture
def image(store: ImageStore) -> tuple[ImageRoot, str]:
    digest = store.resolve("tools").digest
    return store.open("tools", digest), digest


@pytest.fixture
def machines(tmp_path: Path) -> MachineImages:
    return MachineImages(tmp_path / "data/machine")


@pytest.fixture
def host(tmp_path: Path) -> ImageRoot:
    """A host with a few programs, shown as the image of a real one is."""
    usr = tmp_path / "usr"
    for name in ("bin", "lib/python3", "local/bin"):
        (usr / name).mkdir(parents=True)
    (usr / "bin/program").write_text("first")
    (usr / "local/bin/private").write_text("private")
    skeleton = tmp_path / "skeleton/rootfs"
    for name in ("usr", "mnt", "etc"):
        (skeleton / name).mkdir(parents=True)
    (skeleton / "bin").symlink_to("usr/bin")
    return ImageRoot(skeleton, ((usr, "/usr"), (skeleton / "mnt", "/usr/local")))


def roots(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "root").iterdir())


def extracted(root: Path, target: Path) -> dict[str, tuple[str, int, int, int, int, bytes]]:
    """What a file system holds, as the tool that checks it unpacks it: type and mode, owner, time, content."""
    subprocess.run(["fsck.erofs", f"--extract={target}", "--preserve", root], check=True, capture_output=True)
    return content(target)


def content(tree: Path) -> dict[str, tuple[str, int, int, int, int, bytes]]:
    found = {}
    for path in sorted(tree.rglob("*")):
        state = path.lstat()
        body = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        mode = stat.filemode(state.st_mode)
        links = state.st_nlink if path.is_file() else 0
        found[str(path.relative_to(tree))] = (mode, state.st_uid, state.st_gid, int(state.st_mtime), links, body)
    return found


def mode_of(root: Path, path: str) -> int:
    """The mode in the inode itself, of which the tools show no set-id bits: fs/erofs/erofs_fs.h of the kernel."""
    shown = subprocess.run(["dump.erofs", f"--path={path}", root], check=True, capture_output=True, text=True).stdout
    nid = re.search(r"NID: (\d+)", shown)
    assert nid is not None
    content = root.read_bytes()
    metadata = struct.unpack_from("<I", content, 1024 + 40)[0] * 4096
    return int(struct.unpack_from("<H", content, metadata + 32 * int(nid[1]) + 4)[0])


@contextmanager
def building(directory: Path) -> Iterator[None]:
    """Hold the builders' lock, as a server does that makes a root file system."""
    (directory / "root").mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(directory / "root", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def when_waiting(directory: Path, act: Callable[[], object], build: Callable[[Callable[..., None]], object]) -> None:
    """Let ``build`` wait for another builder, do ``act``, and let it go on."""
    waits = threading.Event()

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "wait":
            waits.set()

    problem: list[SandboxError] = []

    def run() -> None:
        try:
            build(progress)
        except SandboxError as error:
            problem.append(error)

    thread = threading.Thread(target=run)
    with building(directory):
        thread.start()
        assert waits.wait(60)
        act()
    thread.join(60)
    if problem:
        raise problem[0]


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An mkfs.erofs that writes something and never ends; its pid is in the file."""
    bin, pid = tmp_path / "bin", tmp_path / "pid"
    bin.mkdir()
    program = bin / "mkfs.erofs"
    program.write_text(
        f'#!/bin/sh\necho $$ > {pid}\nshift $(($# - 2))\nhead -c 1000000 /dev/zero > "$1"\nexec sleep 100000\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(tools, "PATH", f"{bin}:{tools.PATH}")
    return pid


def gone(pid: int) -> bool:
    """Whether a process has ended, waiting for it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


# -- the kernel ------------------------------------------------------------------------


def test_debians_kernel_has_what_a_machine_needs(machine_dir: Path) -> None:
    kernel = MachineImages(machine_dir).kernel(Path("/bin/true"))
    assert kernel.version.endswith("-cloud-amd64")
    assert kernel.source.startswith(f"linux-image-{kernel.version}_")
    assert kernel.image == kernel.vmlinux, "it is unpacked"
    order = [name.removesuffix(".ko") for name in kernel.modules]
    for before, after in (("virtio_ring", "virtio"), ("virtio", "virtio_mmio"), ("virtio_mmio", "virtio_blk")):
        assert order.index(before) < order.index(after)
    assert {"virtio_console", "virtio_rng", "erofs", "overlay", "vmw_vsock_virtio_transport"} <= set(order)
    content = kernel.initramfs.read_bytes()
    assert all(f"modules/{name}\0".encode() in content for name in kernel.modules)
    assert Path("/bin/true").read_bytes() in content


# -- root file systems -----------------------------------------------------------------


def test_an_image_becomes_a_file_system_with_all_that_it_has(
    machines: MachineImages, image: tuple[ImageRoot, str], tmp_path: Path
) -> None:
    made = machines.rootfs(*image)
    assert made.key == image[1].replace(":", "-")
    assert made.path.name == f"{made.key}.erofs"
    found, expected = extracted(made.path, tmp_path / "out"), content(image[0].rootfs)
    assert found.keys() == expected.keys()
    for name, (mode, uid, gid, mtime, _, body) in expected.items():
        assert found[name][:3] == (mode.replace("s", "x"), uid, gid), name  # unpacked, set-id bits are lost
        assert found[name][5] == body
        if mode.startswith("-"):
            assert found[name][3] == mtime, name
    assert found["deep"][0] == "drwxrwxrwt"
    assert (found["etc/machine-id"][0], found["etc/machine-id"][5]) == ("-r--r--r--", b"")
    assert mode_of(made.path, "/bin/tool") == stat.S_IFREG | 0o4755
    assert machines.rootfs(*image) == made
    assert roots(tmp_path / "data/machine") == [made.path.name]


def test_the_same_image_gives_the_same_bytes(image: tuple[ImageRoot, str], tmp_path: Path) -> None:
    one = MachineImages(tmp_path / "a").rootfs(*image).path.read_bytes()
    time.sleep(1.1)  # the tool takes the time in seconds
    assert MachineImages(tmp_path / "b").rootfs(*image).path.read_bytes() == one


@pytest.mark.parametrize("damage", ["cut off", "another's", "empty", "longer"])
def test_a_damaged_file_is_made_again(
    machines: MachineImages, image: tuple[ImageRoot, str], store: ImageStore, tmp_path: Path, damage: str
) -> None:
    path = machines.rootfs(*image).path
    whole = path.read_bytes()
    (tmp_path / "other.tar").write_bytes(archive(MEMBERS[:3]))
    other = store.import_image("other", tmp_path / "other.tar").digest
    contents = {"cut off": whole[:-4096], "empty": b"", "longer": whole + bytes(4096)}
    another = machines.rootfs(store.open("other", other), other).path.read_bytes()
    path.write_bytes(contents.get(damage, another))
    assert machines.rootfs(*image).path.read_bytes() == whole


def test_it_goes_with_its_image_but_not_from_whom_runs_on_it(
    machines: MachineImages, image: tuple[ImageRoot, str], store: ImageStore, tmp_path: Path
) -> None:
    made = machines.rootfs(*image)
    os.link(made.path, tmp_path / "mine")
    with pytest.raises(ConflictError):
        store.remove("tools", lambda: [image[1]])
    assert made.path.exists()
    store.remove("tools")
    assert roots(tmp_path / "data/machine") == []
    assert (tmp_path / "mine").stat().st_size > 300_000


def test_an_image_that_is_removed_meanwhile_leaves_nothing(
    machines: MachineImages, image: tuple[ImageRoot, str], store: ImageStore, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match="was removed"):
        when_waiting(
            tmp_path / "data/machine",
            lambda: store.remove("tools"),
            lambda progress: machines.rootfs(*image, progress),
        )
    assert roots(tmp_path / "data/machine") == []


def test_servers_that_want_the_same_at_once_make_it_once(
    image: tuple[ImageRoot, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    program, real = tmp_path / "bin/mkfs.erofs", shutil.which("mkfs.erofs", path=tools.PATH)
    program.write_text(f'#!/bin/sh\necho run >> {tmp_path}/runs\nexec {real} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(tools, "PATH", f"{tmp_path}/bin:{tools.PATH}")
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                MachineImages(tmp_path / "data/machine").rootfs(*image)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert (tmp_path / "runs").read_text() == "run\n"


def test_without_the_tool_it_is_said_what_to_install(
    machines: MachineImages, image: tuple[ImageRoot, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tools, "PATH", str(tmp_path / "nothing"))
        with pytest.raises(BackendError, match="apt-get install erofs-utils"):
            machines.rootfs(*image)
    made = machines.rootfs(*image)
    monkeypatch.setattr(tools, "PATH", str(tmp_path / "nothing"))
    assert machines.rootfs(*image) == made, "what is there takes no tool"


def test_what_the_tool_refuses_is_told_and_leaves_nothing(
    machines: MachineImages, image: tuple[ImageRoot, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/mkfs.erofs"
    for script, kind, why in (
        ("echo 'odd name' >&2; exit 1", InvalidRequestError, "cannot be packed for a microVM: odd name"),
        ("exit 0", BackendError, "no whole file system"),
        ("echo '<E> write: No space left on device' >&2; exit 1", LimitExceededError, "disk is full"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(tools, "PATH", f"{tmp_path}/bin:/usr/bin:/bin")
        with pytest.raises(kind, match=why):
            machines.rootfs(*image)
        assert roots(tmp_path / "data/machine") == []


def test_a_full_disk_ends_it_and_keeps_nothing(image: tuple[ImageRoot, str], tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    big = tmp_path / "big"
    shutil.copytree(image[0].rootfs, big, symlinks=True, ignore=shutil.ignore_patterns("pipe"))
    (big / "random").write_bytes(os.urandom(24 << 20))
    mounts.mount("none", small, "tmpfs", 0, "size=16m")
    try:
        with pytest.raises(LimitExceededError, match=r"disk"):
            MachineImages(small / "machine").rootfs(ImageRoot(big), image[1])
        assert roots(small / "machine") == []
        MachineImages(small / "machine").prepare_kernel(kernel_harness.package(tmp_path / "k.deb"))
        kernels = sorted((small / "machine/kernel").iterdir())
        state = os.statvfs(small)
        (small / "filler").write_bytes(bytes((state.f_bavail - 8) * state.f_frsize))
        with pytest.raises(LimitExceededError, match=r"disk"):
            MachineImages(small / "machine").prepare_kernel(kernel_harness.package(tmp_path / "other.deb"))
        with pytest.raises(LimitExceededError, match=r"disk"):
            MachineImages(small / "machine").kernel(big / "random")
        assert sorted((small / "machine/kernel").iterdir()) == kernels
        assert [path.name for path in kernels[0].glob("[.i]*")] == []
    finally:
        mounts.unmount(small)


def test_an_interrupt_ends_the_tool_and_leaves_nothing(
    machines: MachineImages, image: tuple[ImageRoot, str], endless: Path, tmp_path: Path
) -> None:
    def interrupt(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machines.rootfs(*image, interrupt)
    assert gone(int(endless.read_text()))
    assert roots(tmp_path / "data/machine") == []


def test_a_killed_builder_takes_the_tool_along_and_the_next_server_clears_up(
    machines: MachineImages, image: tuple[ImageRoot, str], endless: Path, tmp_path: Path
) -> None:
    pid = os.fork()
    if pid == 0:
        machines.rootfs(*image, lambda phase, done, total: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert gone(int(endless.read_text()))
    assert roots(tmp_path / "data/machine") != []
    machines.prepare()
    assert roots(tmp_path / "data/machine") == []


def test_images_that_were_not_used_for_longest_make_room(
    machines: MachineImages, image: tuple[ImageRoot, str], tmp_path: Path
) -> None:
    directory = tmp_path / "data/machine/root"
    directory.mkdir(mode=0o700, parents=True)
    others = [directory / f"sha256-{number:064x}.erofs" for number in range(103)]
    for number, path in enumerate(others):
        path.touch()
        os.utime(path, (number, number))
    os.link(others[1], tmp_path / "mine")
    made = machines.rootfs(*image).path
    assert [path for path in others if not path.exists()] == [others[0], *others[2:4]]
    os.utime(made, (1, 1))
    assert machines.rootfs(*image).path.stat().st_mtime > 1_000_000_000, "it counts as used"


# -- the host's programs ---------------------------------------------------------------


def test_the_hosts_programs_are_packed_within_the_skeleton_and_nothing_private(
    machines: MachineImages, host: ImageRoot, tmp_path: Path
) -> None:
    made = machines.rootfs(host, "")
    found = extracted(made.path, tmp_path / "out")
    assert found["usr/bin/program"][5] == b"first"
    assert found["bin"][5] == b"usr/bin"
    assert "usr/local" in found
    assert not [name for name in found if name.startswith("usr/local/")]
    assert list((host.rootfs / "usr").iterdir()) == [], "nobody else saw it there"
    assert mounts.mounted_below(host.rootfs) == []


def test_it_is_made_again_when_programs_were_installed_or_changed(
    machines: MachineImages, host: ImageRoot, tmp_path: Path
) -> None:
    usr = host.binds[0][0]
    first = machines.rootfs(host, "")
    assert machines.rootfs(host, "") == first
    (usr / "local/bin/more").write_text("nobody's business")
    (usr / "bin/another").write_text("x")
    second = machines.rootfs(host, "")
    assert second.key != first.key
    (usr / "bin/program").write_text("another")
    assert MachineImages(tmp_path / "data/machine").rootfs(host, "").key not in (first.key, second.key)


def test_old_states_of_the_host_make_room_but_for_those_in_use(
    machines: MachineImages, host: ImageRoot, tmp_path: Path
) -> None:
    made = []
    for number in range(5):
        (host.binds[0][0] / f"bin/{number}").write_text("x")
        made.append(machines.rootfs(host, "").path)
        os.utime(made[-1], (number, number))
        if number == 0:
            os.link(made[0], tmp_path / "mine")
    assert [path.exists() for path in made] == [True, False, False, True, True]


def test_a_host_that_changes_meanwhile_is_told(machines: MachineImages, host: ImageRoot, tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="changed while"):
        when_waiting(
            tmp_path / "data/machine",
            lambda: (host.binds[0][0] / "bin/program").write_text("upgraded"),
            lambda progress: machines.rootfs(host, "", progress),
        )
    assert roots(tmp_path / "data/machine") == []


# -- the commands ----------------------------------------------------------------------


def test_the_commands(store: ImageStore, tmp_path: Path) -> None:
    environ = {**os.environ, "AGENT_SANDBOX_DATA_DIR": str(tmp_path / "data")}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        argv = (sys.executable, "-m", "agent_sandbox.cli", "image", *argv)
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=120, check=False)

    package = kernel_harness.package(tmp_path / "linux-image-x.deb")
    done = run("kernel", "--kernel", str(package), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["version"], told["source"]) == (kernel_harness.VERSION, "linux-image-x")
    assert MachineImages(tmp_path / "data/machine").kernel(Path("/bin/true")).name.startswith(told["name"])
    refused = run("kernel", "--kernel", "/bin/true", "--modules", "/")
    assert (refused.returncode, refused.stdout) == (exit_codes.of(InvalidRequestError("")), "")
    assert "uncompressed kernel" in refused.stderr
    done = run("root", "tools")
    assert done.returncode == 0
    assert roots(tmp_path / "data/machine")[0] in done.stdout
    assert run("rm", "tools").returncode == 0
    assert roots(tmp_path / "data/machine") == []
