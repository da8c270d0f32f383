"""The upper directory of a real overlay, captured alone, is the state of the merged view (needs root).

The options are those that workspaces are mounted with. What the kernel leaves in an upper directory is its own affair
(Documentation/filesystems/overlayfs.rst), so the merged view, captured by the same engine, is the measure.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings

from agent_sandbox.store import Created, Store, Upper, UpToDate
from agent_sandbox.store.native import NativeEngine
from agent_sandbox.store.objects import Entry
from agent_sandbox.store.ports import Captured, Options, OverlayRefusedError
from agent_sandbox.store.reference import ReferenceEngine
from agent_sandbox.store.stats import data_bytes, data_bytes_after
from tests.unit.store.engines import capture, checkout, opened, state
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.test_overlay import Watched, mounted
from tests.unit.store.trees import Edit, Link, apply, build, edits, scratch, trees

pytestmark = pytest.mark.real

OPTIONS = "redirect_dir=on,index=on,metacopy=off,xino=on,volatile"
ENGINE = NativeEngine()


@dataclass
class Overlay:
    """A state in a store, its checkout, and an empty upper directory over it."""

    place: Path
    store: MemoryObjects
    base: Entry

    @contextmanager
    def merged(self) -> Iterator[Path]:
        """Mount it. ``volatile`` leaves out the syncs, and a mark against mounting it again."""
        place = self.place
        shutil.rmtree(place / "work" / "work" / "incompat", ignore_errors=True)
        options = f"lowerdir={place / 'lower'},upperdir={place / 'upper'},workdir={place / 'work'},{OPTIONS}"
        with mounted(options, place / "merged") as merged:
            yield merged
        (place / "merged").rmdir()

    def upper(self, *, cache: Path | None = None, base: Entry | None = None, owners: bool = False) -> Captured:
        with opened(self.place / "upper") as fd:
            captured = ENGINE.capture(
                fd,
                self.store,
                self.store,
                base=base or self.base,
                cache=cache,
                overlay=True,
                options=Options(owners=owners),
            )
        self.store.seal()
        return captured

    def agrees(self) -> bool:
        """Whether the upper directory told the state; the merged view has the last word."""
        with self.merged() as merged:
            seen = capture(ENGINE, merged, self.store).root
            try:
                mounted = self.upper().root
            except OverlayRefusedError:
                return False
            assert mounted == seen
        assert self.upper().root == seen
        return True


@contextmanager
def overlay(make: Callable[[Path], None]) -> Iterator[Overlay]:
    with scratch() as place:
        make(place / "tree")
        (place / "packs").mkdir()
        store = Watched(place / "packs")
        base = capture(ENGINE, place / "tree", store).root
        checkout(ENGINE, base, place / "lower", store)
        (place / "upper").mkdir()
        shutil.copystat(place / "lower", place / "upper")
        (place / "work").mkdir()
        yield Overlay(place, store, base)


def change(directory: Path, changes: list[Edit]) -> None:
    """Apply edits; a rename whose redirect would be too long for the kernel (256 bytes) changes nothing."""
    for edit in changes:
        try:
            apply(directory, [edit])
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=trees(), first=edits(), second=edits())
def test_an_upper_directory_tells_the_merged_state(tree: list[Edit], first: list[Edit], second: list[Edit]) -> None:
    with overlay(lambda at: build(at, tree)) as over:
        for changes in (first, second):
            with over.merged() as merged:
                change(merged, changes)
            event("told" if over.agrees() else "refused")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=trees(), changes=edits())
def test_the_bytes_of_the_merged_state_are_counted_from_those_below(tree: list[Edit], changes: list[Edit]) -> None:
    with overlay(lambda at: build(at, tree)) as over:
        with over.merged() as merged:
            change(merged, changes)
            report = capture(ENGINE, merged, over.store).report
        with suppress(OverlayRefusedError):
            root = over.upper().root
            counted = data_bytes_after(over.store, over.base, data_bytes(over.store, over.base), root)
            assert counted == report.bytes == data_bytes(over.store, root)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=trees(), first=edits(), second=edits())
def test_a_state_without_links_is_never_refused(tree: list[Edit], first: list[Edit], second: list[Edit]) -> None:
    unlinked = [edit for edit in tree if not isinstance(edit, Link)]
    with overlay(lambda at: build(at, unlinked)) as over:
        cache = over.place / "cache"
        for changes in (first, second):
            with over.merged() as merged:
                change(merged, [edit for edit in changes if not isinstance(edit, Link)])
            assert over.agrees()
            assert over.upper(cache=cache).root == over.upper(cache=cache).root == over.upper().root


def directories(at: Path) -> None:
    for name in ("a", "a/b", "a/b/c", "d", "d/e", "f", "same", "same/below"):
        (at / name).mkdir(parents=True)
        for number in range(3):
            (at / name / f"file{number}").write_text(f"{name} {number}")
    for number in range(700):
        (at / "f" / f"many{number}").write_text(str(number))


def move(*pairs: tuple[str, str]) -> Callable[[Path], None]:
    def step(at: Path) -> None:
        for old, new in pairs:
            (at / old).rename(at / new)

    return step


def run(*commands: str) -> Callable[[Path], None]:
    def step(at: Path) -> None:
        for command in commands:
            subprocess.run(command, shell=True, check=True, cwd=at)

    return step


def attribute(path: str) -> Callable[[Path], None]:
    return lambda at: os.setxattr(at / path, "user.new", b"1")


CHANGES = {
    "nothing": [run()],
    "renamed beside": [move(("a", "z"))],
    "moved elsewhere": [move(("a/b", "d/new"))],
    "moved inside of what moved": [move(("a", "d/a"), ("d/a/b", "d/a/bb"))],
    "moved again later": [move(("a/b", "d/b")), move(("d/b", "b")), move(("d", "dd"), ("b", "dd/x"))],
    "moved and back": [move(("a", "z"), ("z", "a"))],
    "moved over an empty one": [run("mkdir empty; mv -T a empty")],
    "swapped": [move(("a", "x"), ("d", "a"), ("x", "d"))],
    "replaced by a new one": [run("rm -r a; mkdir a; echo new >a/file0"), run("mkdir a/b; echo x >a/b/file0")],
    "replaced by a file": [run("rm -r a; echo x >a")],
    "replaced by a device": [run("rm -r a; mknod a c 1 3; rm d/e/file1; mkfifo d/e/file1")],
    "replaced by a socket": [
        run("rm f/file1; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"f/file1\")'")
    ],
    "a file became a directory": [run("rm f/file1; mkdir f/file1; echo x >f/file1/y")],
    "removed": [run("rm -r a/b f/many1* same/below/file1")],
    "removed and made again": [run("rm f/file1"), run("echo again >f/file1")],
    "metadata alone": [run("chmod 700 a/b; chmod 600 a/b/file1; touch -d @5 f d/e/file2"), attribute("d")],
    "moved, then changed inside": [move(("f", "a/f")), run("echo x >a/f/file1; rm a/f/many5; echo x >a/f/many9999")],
    "into a new one": [run("mkdir n; mv a n; mv d n/a/b/c")],
    "a lower file got another name": [run("ln f/file1 f/other")],
    "attributes of the root": [run("chmod 711 .; touch -d @7 ."), attribute(".")],
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=list(CHANGES))
def test_each_way_of_the_kernel(changes: list[Callable[[Path], None]]) -> None:
    with overlay(directories) as over:
        for step in changes:
            with over.merged() as merged:
                step(merged)
            assert over.agrees()


def linked(at: Path) -> None:
    directories(at)
    os.link(at / "a" / "b" / "file1", at / "d" / "linked")


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (run("echo x >f/file1"), True),
        (run("rm a/b/file2"), True),
        (run("ln f/file1 f/file9"), True),
        (run("mkdir z; mv f same z"), True),
        (run("echo x >d/linked"), False),
        (run("chmod 600 a/b/file1"), False),
        (run("rm d/linked"), False),
        (run("mv d/linked z"), False),
        (run("ln d/linked z"), False),
        (run("rm -r d"), False),
        (run("rm -r a; mkdir a"), False),
        (move(("a", "z")), False),
        (move(("a/b", "f/b")), False),
    ],
)
def test_changed_names_of_linked_files_are_refused(step: Callable[[Path], None], told: bool) -> None:
    with overlay(linked) as over:
        with over.merged() as merged:
            step(merged)
        assert over.agrees() is told


def test_what_was_not_touched_is_not_looked_at() -> None:
    with overlay(directories) as over:
        assert isinstance(over.store, Watched)
        trees_of = {
            name: capture(ENGINE, over.place / "tree" / name, over.store).root.content
            for name in ("a", "a/b", "a/b/c", "d", "d/e", "f", "same", "same/below")
        }
        with over.merged() as merged:
            run("echo x >f/file1; rm -r d/e; mv same/below b2")(merged)
        over.store.asked.clear()
        report = over.upper().report
        asked = {name for name, tree in trees_of.items() if tree in over.store.asked}
        assert asked == {"d", "d/e", "f", "same", "same/below"}
        assert (report.files, report.directories) == (1, 4)


def test_a_cache_saves_reading() -> None:
    with overlay(directories) as over:
        with over.merged() as merged:
            run("echo changed >f/file1; touch -d @5 a/b/file1")(merged)
        cache = over.place / "cache"
        subprocess.run(["sleep", "0.1"], check=True)
        first = over.upper(cache=cache)
        again = over.upper(cache=cache)
        assert (first.root, first.report.read > 0) == (again.root, True)
        assert (again.report.read, again.report.stored) == (0, 0)


def test_what_is_below_must_be_known() -> None:
    with overlay(directories) as over:
        with pytest.raises(OverlayRefusedError, match="does not have the state"):
            over.upper(base=Entry(b"", over.base.type, 0o755, 0, content=b"x" * 32))
        with pytest.raises(OverlayRefusedError, match="owners"):
            over.upper(owners=True)
        with opened(over.place / "upper") as fd, pytest.raises(OverlayRefusedError):
            ENGINE.capture(fd, over.store, over.store, overlay=True)
        with opened(over.place / "upper") as fd, pytest.raises(OverlayRefusedError):
            ReferenceEngine().capture(fd, over.store, over.store, base=over.base, overlay=True)


def test_another_state_below_is_refused_where_it_shows() -> None:
    with overlay(directories) as over:
        with over.merged() as merged:
            move(("a", "z"))(merged)
        with pytest.raises(OverlayRefusedError, match="leads nowhere"):
            over.upper(base=state(over.store, []))


@pytest.mark.parametrize(
    ("name", "value"), [("opaque", b"x"), ("opaque", b"yes"), ("redirect", b"/"), ("redirect", b"")]
)
def test_unknown_marks_are_refused(name: str, value: bytes) -> None:
    with overlay(directories) as over:
        (over.place / "upper" / "a").mkdir()
        os.setxattr(over.place / "upper" / "a", f"trusted.overlay.{name}", value)
        with pytest.raises(OverlayRefusedError):
            over.upper()


def test_damage_below_is_refused() -> None:
    with overlay(directories) as over:
        with over.merged() as merged:
            run("echo x >f/file1")(merged)
        pack = over.place / "packs" / f"{1:010d}.pack"
        content = capture(ENGINE, over.place / "tree" / "f", over.store).root.content
        assert content is not None
        (where,) = over.store.locate([content])
        assert where is not None
        data = bytearray(pack.read_bytes())
        data[where.offset + where.length - 1] ^= 1
        pack.write_bytes(data)
        with pytest.raises(OverlayRefusedError, match="cannot be read"):
            over.upper()


@contextmanager
def committed(make: Callable[[Path], None]) -> Iterator[tuple[Store, Overlay, Upper]]:
    """A store with a state, and an overlay over its checkout."""
    with overlay(make) as over, Store.create(over.place / "store", engine=ENGINE) as store:
        made = store.init("p", over.place / "tree")
        yield store, over, Upper(over.place / "upper", made.commit)


def test_a_commit_reads_the_upper_directory() -> None:
    with committed(directories) as (store, over, upper), over.merged() as merged:
        assert isinstance(store.commit("p", merged, upper=upper), UpToDate)
        for step in (run("echo 1 >f/file1"), move(("a", "d/a")), run("rm d/a/b/file1")):
            step(merged)
            made = store.commit("p", merged, upper=upper)
            assert isinstance(made, Created)
            assert (made.report.files, made.report.whole) == (1, False)
            # What the layers show is no longer the head: the merged view is the measure.
            again = store.commit("p", merged, fresh=True)
            assert isinstance(again, UpToDate)
            assert (again.commit, again.report.whole) == (made.commit, True)
            counted = store.data_bytes("p", (upper.below.hex(), store.data_bytes(upper.below.hex())))
            assert again.report.bytes == counted == store.data_bytes("p")
        assert store.check().clean


@pytest.mark.parametrize("why", ["links", "another commit"])
def test_a_commit_reads_the_merged_view_otherwise(why: str) -> None:
    with committed(linked) as (store, over, upper), over.merged() as merged:
        run("echo x >d/linked" if why == "links" else "echo x >f/file1")(merged)
        below = upper.below if why == "links" else bytes(32)
        made = store.commit("p", merged, upper=Upper(upper.directory, below))
        assert isinstance(made, Created)
        assert made.report.files > 700
        assert made.report.whole
        assert isinstance(store.commit("p", merged), UpToDate)
        assert store.check().clean
