"""``make bench-store``: the versioned store beside tar, git, restic and borg, on the same trees, alternating.

Every tool runs as its users run it, as a process of its own, and what it wrote is synced before the clock stops.
``grew`` is what its repository grew by on disk (lengths of files); ``peak`` the most memory of its process. git keeps
neither times nor attributes and tar keeps every byte again: they are marks at the side, restic and borg are the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

SEED = 4


@dataclass
class Run:
    """One process: seconds with the sync behind it, peak memory in bytes, growth of the repository in bytes."""

    seconds: float
    peak: int
    grew: int


@dataclass
class Row:
    """All runs of one operation by tool."""

    name: str
    runs: dict[str, list[Run]] = field(default_factory=dict)


def run(argv: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> tuple[float, int]:
    """Run a process to its end; seconds with a sync of what it wrote, and its peak memory in bytes."""
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        peak = 0
        while process.poll() is None:  # ru_maxrss would begin at this process's own size: getrusage(2), fork, execve
            peak = max(peak, _high_water(process.pid))
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}: {output.read()[-2_000:].decode()}")
    return seconds, peak


def _high_water(pid: int) -> int:
    """The most memory that a process has had resident, in bytes (proc_pid_status(5))."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def size_of(path: Path) -> int:
    """The lengths of all files below."""
    return sum(entry.stat().st_size for entry in _files(path)) if path.exists() else 0


def _files(path: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            else:
                yield entry


def sync_tree(path: Path) -> float:
    """Sync every file and directory below (a tool that does not by itself is charged for it); seconds."""
    started = time.perf_counter()
    for root, _, files in os.walk(path):
        for name in [*files, ""]:
            descriptor = os.open(Path(root) / name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return time.perf_counter() - started


class Tool:
    """One contender: how it takes a first state, a later one, and gives it back."""

    name = ""

    def __init__(self, place: Path) -> None:
        self.repository = place / self.name
        self.place = place
        self.env = dict(os.environ, HOME=str(place), LC_ALL="C.UTF-8")

    def prepare(self) -> None:
        """Make an empty repository."""

    def save(self, tree: Path) -> list[str]:
        """The command that takes the state of ``tree``."""
        raise NotImplementedError

    def restore(self, target: Path) -> list[str]:
        """The command that gives the last state back."""
        raise NotImplementedError

    syncs = True
    """Whether what it wrote is on disk when it ends."""


class Ours(Tool):
    name = "agent-sandbox"

    def prepare(self) -> None:
        run([*self._store(), "init", "bench"], env=self.env)

    def _store(self) -> list[str]:
        return [str(Path(sys.executable).parent / "agent-sandbox"), "store", "--store", str(self.repository)]

    def save(self, tree: Path) -> list[str]:
        return [*self._store(), "commit", "bench", str(tree), "--quiet"]

    def restore(self, target: Path) -> list[str]:
        return [*self._store(), "checkout", "bench", str(target), "--quiet"]


class Tar(Tool):
    name = "tar"
    syncs = False

    def prepare(self) -> None:
        self.repository.mkdir()
        self.count = 0

    def save(self, tree: Path) -> list[str]:
        self.count += 1
        return ["tar", "-cf", str(self.repository / f"{self.count}.tar"), "-C", str(tree), "."]

    def restore(self, target: Path) -> list[str]:
        target.mkdir()
        return ["tar", "-xf", str(self.repository / f"{self.count}.tar"), "-C", str(target)]


class Git(Tool):
    name = "git"
    syncs = False

    def prepare(self) -> None:
        run(["git", "init", "--quiet", "--bare", str(self.repository)], env=self.env)
        for key, value in (("gc.auto", "0"), ("user.name", "bench"), ("user.email", "bench@example.org")):
            run(["git", "-C", str(self.repository), "config", key, value], env=self.env)

    def save(self, tree: Path) -> list[str]:
        git = 'git --git-dir="$0" --work-tree="$1"'
        return [
            "sh",
            "-ec",
            f"{git} add -A && {git} commit --quiet --allow-empty -m x",
            str(self.repository),
            str(tree),
        ]

    def restore(self, target: Path) -> list[str]:
        target.mkdir()
        return [
            "git",
            f"--git-dir={self.repository}",
            f"--work-tree={target}",
            "checkout",
            "--force",
            "HEAD",
            "--",
            ".",
        ]


class Restic(Tool):
    name = "restic"

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.env |= {"RESTIC_PASSWORD": "bench", "RESTIC_CACHE_DIR": str(place / "restic-cache")}

    def _restic(self) -> list[str]:
        return ["restic", "--quiet", "--repo", str(self.repository)]

    def prepare(self) -> None:
        run([*self._restic(), "init"], env=self.env)

    def save(self, tree: Path) -> list[str]:
        return [*self._restic(), "backup", str(tree)]

    def restore(self, target: Path) -> list[str]:
        return [*self._restic(), "restore", "latest", "--target", str(target)]


class Borg(Tool):
    name = "borg"

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.env |= {"BORG_BASE_DIR": str(place / "borg-base"), "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}

    def prepare(self) -> None:
        self.count = 0
        run(["borg", "init", "--encryption", "none", str(self.repository)], env=self.env)

    def save(self, tree: Path) -> list[str]:
        self.count += 1
        return ["borg", "create", f"{self.repository}::{self.count}", str(tree)]

    def restore(self, target: Path) -> list[str]:
        target.mkdir()
        return ["sh", "-ec", 'cd "$0" && borg extract "$1"', str(target), f"{self.repository}::{self.count}"]


TOOLS: tuple[type[Tool], ...] = (Ours, Tar, Git, Restic, Borg)


# ---- trees ---------------------------------------------------------------------------------------------------------


def text(rng: random.Random, length: int) -> bytes:
    """Bytes that compress about as source text does."""
    words = [bytes(rng.choices(b"etaoinshrdlu_", k=rng.randint(2, 9))) for _ in range(400)]
    out = bytearray()
    while len(out) < length:
        out += rng.choice(words) + (b" " if rng.random() < 0.85 else b"\n")
    return bytes(out[:length])


def make_small(tree: Path, count: int, size: int, data: int) -> None:
    """``count`` files of about ``size`` bytes in directories of 100, and ``data`` random bytes in one file."""
    rng = random.Random(SEED)
    body = text(rng, 1 << 20)
    for number in range(count):
        if number % 100 == 0:
            (tree / f"d{number // 100:04}").mkdir(parents=True)
        start = rng.randrange(len(body) - 2 * size)
        length = rng.randint(size // 2, size * 3 // 2)
        (tree / f"d{number // 100:04}" / f"f{number:06}.txt").write_bytes(
            b"%d\n" % number + body[start : start + length]
        )
    if data:
        (tree / "data.bin").write_bytes(rng.randbytes(data))


def edit_files(tree: Path, count: int) -> None:
    """A line put into ``count`` files."""
    rng = random.Random(SEED + 1)
    files = sorted(Path(entry.path) for entry in _files(tree) if entry.name != "data.bin")
    for path in rng.sample(files, min(count, len(files))):
        body = path.read_bytes()
        at = rng.randrange(len(body) + 1)
        path.write_bytes(body[:at] + b"\nchanged = %d\n" % rng.randrange(10**6) + body[at:])


def make_source(tree: Path) -> None:
    """The sources of a real project that every machine of this kind has: Python's standard library."""
    shutil.copytree(
        Path(os.__file__).parent,
        tree,
        ignore=shutil.ignore_patterns("__pycache__", "site-packages", "*.pyc"),
        symlinks=True,
    )


def edit_source(tree: Path) -> None:
    """50 edits as people make them: a word renamed in a file, lines put in, lines taken out, a file added."""
    rng = random.Random(SEED + 2)
    files = sorted(
        Path(entry.path) for entry in _files(tree) if entry.name.endswith(".py") and entry.stat().st_size > 2_000
    )
    for number, path in enumerate(rng.sample(files, 50)):
        lines = path.read_bytes().splitlines(keepends=True)
        at = rng.randrange(len(lines))
        match number % 4:
            case 0:
                path.write_bytes(b"".join(lines).replace(b"self", b"this"))
            case 1:
                path.write_bytes(b"".join([*lines[:at], b"    # a remark\n", b"    pass\n", *lines[at:]]))
            case 2:
                path.write_bytes(b"".join(lines[:at] + lines[at + 5 :]))
            case 3:
                path.with_suffix(".copy.py").write_bytes(b"".join(lines))


@dataclass(frozen=True)
class Tree:
    """A tree to save, and the change made to it before it is saved again."""

    name: str
    make: Callable[[Path], None]
    edit: Callable[[Path], None]
    edit_name: str


def trees(scale: float) -> list[Tree]:
    """The trees of the promises, their counts multiplied by ``scale``."""
    small, many = int(10_000 * scale), int(100_000 * scale)
    return [
        Tree(
            f"{small:,} files of 1 KB + 30 MB",
            lambda t: make_small(t, small, 1_000, 30 << 20),
            lambda t: edit_files(t, 10),
            "10 files changed",
        ),
        Tree(
            f"{many:,} files, {many * 5 // 1000:,} MB",
            lambda t: make_small(t, many, 5_000, 0),
            lambda t: edit_files(t, 10),
            "10 files changed",
        ),
        Tree("a real source tree", make_source, edit_source, "50 edits"),
    ]


def measure(tool: Tool, row: Row, argv: list[str]) -> None:
    """Run one operation of one tool into its row."""
    before = size_of(tool.repository)
    seconds, peak = run(argv, env=tool.env)
    if not tool.syncs:
        seconds += sync_tree(tool.repository)
    row.runs.setdefault(tool.name, []).append(Run(seconds, peak, size_of(tool.repository) - before))


def compare(tree: Tree, rounds: int, place: Path, console: Console) -> list[Row]:
    """Save, change, save again, restore: every tool in turn, ``rounds`` times."""
    rows = [Row(f"{tree.name}: first"), Row(f"{tree.name}: {tree.edit_name}"), Row(f"{tree.name}: restored")]
    for number in range(rounds):
        work = place / f"round-{number}"
        (work / "tree").parent.mkdir(parents=True)
        tree.make(work / "tree")
        os.sync()
        tools = [tool(work) for tool in TOOLS if shutil.which(tool.name) or tool is Ours]
        random.Random(number).shuffle(tools)
        for tool in tools:
            console.print(f"  {tree.name}: {tool.name}, round {number + 1}", highlight=False)
            tool.prepare()
            measure(tool, rows[0], tool.save(work / "tree"))
        tree.edit(work / "tree")
        time.sleep(0.1)
        for tool in tools:
            measure(tool, rows[1], tool.save(work / "tree"))
        for tool in tools:
            target = work / f"restored-{tool.name}"
            rows[2].runs.setdefault(tool.name, [])
            seconds, peak = run(tool.restore(target), env=tool.env)
            rows[2].runs[tool.name].append(Run(seconds, peak, 0))
            shutil.rmtree(target)
        shutil.rmtree(work)
    return rows


def storage(place: Path) -> list[tuple[str, str, str]]:
    """The storage lines of the promises: growth of our store by the cases that were published for LayerFS."""
    work = place / "storage"
    tree = work / "tree"
    tree.mkdir(parents=True)
    rng = random.Random(SEED + 3)
    data = bytearray(rng.randbytes(32 << 20))
    (tree / "file").write_bytes(data)
    tool = Ours(work)
    tool.prepare()

    def save() -> int:
        time.sleep(0.1)
        run(tool.save(tree), env=tool.env)
        return size_of(tool.repository)

    first = save()
    for _ in range(16):
        at = rng.randrange(len(data) - 10)
        data[at : at + 10] = rng.randbytes(10)
        (tree / "file").write_bytes(data)
        edited = save()
    (tree / "file").write_bytes(rng.randbytes(10) + data)
    front = save()
    shutil.rmtree(work)
    mib = 1 << 20
    return [
        ("32 MiB random, first commit: the store", f"{first / mib:.2f} MiB", "under 32.6 MiB (LayerFS 39.06)"),
        (
            "16 edits of 10 bytes, a commit each: growth",
            f"{(edited - first) / mib:.3f} MiB",
            "under 0.10 MiB (LayerFS 0.225)",
        ),
        ("10 bytes put in front: growth", f"{front - edited:,} bytes", "under 24,000 bytes (LayerFS 26,805)"),
    ]


def large_import(place: Path, gigabytes: float) -> tuple[str, str, str]:
    """Peak memory while a large tree is imported."""
    work = place / "large"
    tree = work / "tree"
    tree.mkdir(parents=True)
    rng = random.Random(SEED + 5)
    block = rng.randbytes(1 << 20)
    for number in range(int(gigabytes * 16)):
        with (tree / f"f{number:04}").open("wb") as file:
            for part in range(64):
                file.write(b"%d %d" % (number, part) + block[: 1 << 20])
    tool = Ours(work)
    tool.prepare()
    seconds, peak = run(tool.save(tree), env=tool.env)
    shutil.rmtree(work)
    return (f"import of {gigabytes:g} GB: peak memory", f"{peak / 1e6:.0f} MB ({seconds:.1f} s)", "under 200 MB")


def show(rows: list[Row], console: Console) -> None:
    """Print medians, spread, growth and peak memory by tool, and how much longer each takes than ours."""
    table = Table("operation", "tool", "median s", "10–90 %", "ours is", "grew MB", "peak MB", "runs")
    for row in rows:
        ours = statistics.median(run.seconds for run in row.runs[Ours.name])
        for name, runs in row.runs.items():
            times = sorted(run.seconds for run in runs)
            low, high = times[len(times) // 10], times[-1 - len(times) // 10]
            median = statistics.median(times)
            table.add_row(
                row.name if name == next(iter(row.runs)) else "",
                name,
                f"{median:.2f}",
                f"{low:.2f}–{high:.2f}",
                "" if name == Ours.name else f"{median / ours:.1f}× as fast",
                f"{statistics.median(run.grew for run in runs) / 1e6:.2f}",
                f"{statistics.median(run.peak for run in runs) / 1e6:.0f}",
                str(len(runs)),
            )
        table.add_section()
    console.print(table)


def main() -> None:
    """Measure and print; ``--json FILE`` keeps every run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the counts of files (1: as promised)")
    parser.add_argument(
        "--large", type=float, default=5.0, help="gigabytes of the import whose memory is measured; 0: none"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=150)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="asb-bench-store-") as name:
        place = Path(name)
        for tree in trees(options.scale):
            rows += compare(tree, options.rounds, place, console)
        lines = storage(place)
        if options.large:
            lines.append(large_import(place, options.large))
    show(rows, console)
    table = Table("case", "measured", "promise")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    if options.json:
        options.json.write_text(
            json.dumps(
                {row.name: {tool: [vars(run) for run in runs] for tool, runs in row.runs.items()} for row in rows},
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
