"""Text differences, against ``patch`` and ``git apply``, which must make the new file of the old one."""

from __future__ import annotations

import random
import subprocess
from difflib import SequenceMatcher
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_sandbox.store import hunks as module
from agent_sandbox.store.diff import diff
from agent_sandbox.store.hunks import MAX_TEXT, WORK, hunks, opcodes, quoted
from tests.unit.store.memory import MemoryObjects
from tests.unit.store.states import DIRECTORY, Tree, build, file, symlink, tree


def text(old: Tree, new: Tree, context: int = 3) -> str:
    objects = MemoryObjects()
    found = diff(objects, build(objects, old), build(objects, new))
    return "".join(line for change in found for line in hunks(objects, change, context))


def test_a_changed_line_is_shown_as_diff_does() -> None:
    before = b"".join(b"line %d\n" % number for number in range(10))
    after = before.replace(b"line 5\n", b"changed\n")
    assert text(tree(a=file(before)), tree(a=file(after)), 1) == (
        "--- a/a\n+++ b/a\n@@ -5,3 +5,3 @@\n line 4\n-line 5\n+changed\n line 6\n"
    )


def test_added_and_removed_files_name_dev_null() -> None:
    assert text(tree(), tree(d__a=file(b"x\ny\n"))) == "--- /dev/null\n+++ b/d/a\n@@ -0,0 +1,2 @@\n+x\n+y\n"
    assert text(tree(a=file(b"x\n")), tree()) == "--- a/a\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"


def test_a_missing_newline_at_the_end_is_said() -> None:
    assert text(tree(a=file(b"x")), tree(a=file(b"x\n"))) == (
        "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\n\\ No newline at end of file\n+x\n"
    )


def test_a_symlink_shows_its_target_and_a_type_change_both_files() -> None:
    assert text(tree(a=symlink(b"x")), tree(a=file(b"y\n"))) == (
        "--- a/a\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\\ No newline at end of file\n"
        "--- /dev/null\n+++ b/a\n@@ -0,0 +1 @@\n+y\n"
    )


@pytest.mark.parametrize("data", [b"a\0b", b"\xff\xfe"])
def test_binary_files_are_said(data: bytes) -> None:
    assert text(tree(a=file(b"x")), tree(a=file(data))) == "Binary files a/a and b/a differ\n"


def test_too_large_files_are_said_and_not_read() -> None:
    objects = MemoryObjects()
    large = build(objects, tree(a=file(bytes(MAX_TEXT + 1), holes=True)))
    (change,) = diff(objects, build(objects, tree()), large)
    objects._at.clear()
    assert list(hunks(objects, change)) == ["Files larger than 1 MiB /dev/null and b/a differ\n"]


def test_only_metadata_and_directories_have_no_text() -> None:
    assert text(tree(a=file(b"x"), d=DIRECTORY), tree(a=file(b"x", mode=0o600), e=DIRECTORY)) == ""


def test_equal_text_with_other_holes_has_no_text() -> None:
    assert text(tree(a=file(b"x" * 9_000)), tree(a=file(b"x" * 9_000, holes=True))) == ""


# git: Documentation/config/core.txt, core.quotePath; printable non-ASCII stays, as with core.quotePath=false
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"a b", "a b"),
        ("ä".encode(), "ä"),
        (b'a"b', '"a\\"b"'),
        (b"a\\b", '"a\\\\b"'),
        (b"a\nb\t", '"a\\nb\\t"'),
        (b"\xff\x01", '"\\377\\001"'),
        ("\u202e".encode(), '"\\342\\200\\256"'),
    ],
)
def test_names_are_quoted_as_git_does(name: bytes, shown: str) -> None:
    assert quoted(name) == shown


_lines = st.lists(st.sampled_from(["a", "b", "}", "", "x\x0cy", "\r", "long line", "\u2028"]), max_size=25)
_texts = st.tuples(_lines, st.booleans()).map(lambda it: ("\n".join(it[0]) + "\n" * it[1]).encode())


@given(_texts, _texts, st.integers(0, 3))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_patch_makes_the_new_text_of_the_old(tmp_path: Path, before: bytes, after: bytes, context: int) -> None:
    found = text(tree(f=file(before)), tree(f=file(after)), context)
    assert (found == "") == (before == after)
    target = tmp_path / "f"
    target.write_bytes(before)
    if found:
        subprocess.run(
            ["git", "apply", "--unidiff-zero", "--whitespace=nowarn", "-"],
            input=found.encode(),
            cwd=tmp_path,
            check=True,
        )
    assert target.read_bytes() == after


def test_patch_takes_a_quoted_name(tmp_path: Path) -> None:
    found = text(tree({b"new\n\xff": file(b"x\n")}), tree({b"new\n\xff": file(b"y\n")}))
    (tmp_path / "new\n\udcff").write_bytes(b"x\n")
    subprocess.run(["git", "apply", "-"], input=found.encode(), cwd=tmp_path, check=True)
    assert (tmp_path / "new\n\udcff").read_bytes() == b"y\n"


_some_lines = st.lists(st.sampled_from("abcdefgh").map(lambda letter: letter + "\n"), max_size=40)


@given(_some_lines, _some_lines, st.sampled_from([0, 500, WORK]))
@settings(deadline=None)
def test_opcodes_cover_both_sides_in_order(before: list[str], after: list[str], work: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WORK", work)
        codes = opcodes(before, after)
    made: list[str] = []
    i = j = 0
    last = ""
    for tag, start, end, new_start, new_end in codes:
        assert (start, new_start) == (i, j)
        assert (tag == "equal") != (last == "equal") or not last
        assert tag != "equal" or before[start:end] == after[new_start:new_end]
        assert (tag == "insert") == (start == end)
        assert (tag == "delete") == (new_start == new_end)
        made += after[new_start:new_end]
        i, j, last = end, new_end, tag
    assert (i, j) == (len(before), len(after))
    assert made == after


def test_many_equal_lines_cost_little() -> None:
    """difflib alone takes minutes here; what counts is that the estimate of its work stays within the bound."""
    done: list[int] = []
    before = [f"{number % 110}\n" for number in range(10_000)]
    after = [line if number % 2 else f"x{number}\n" for number, line in enumerate(before)]

    class Matcher(SequenceMatcher[str]):
        def __init__(self, _: None, left: list[str], right: list[str], autojunk: bool) -> None:
            done.append(sum(right.count(line) for line in set(left)) * min(len(left), len(right)))
            super().__init__(None, left, right, autojunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SequenceMatcher", Matcher)
        codes = opcodes(before, after)
    assert sum(done) <= WORK
    assert codes


def test_unique_lines_stay_matched_however_many() -> None:
    before = [f"{number}\n" for number in range(20_000)]
    after = before.copy()
    changed = sorted(random.Random(1).sample(range(20_000), 5_000))
    for number in changed:
        after[number] = f"new {number}\n"
    codes = opcodes(before, after)
    assert sum(end - start for tag, start, end, *_ in codes if tag != "equal") == len(changed)
