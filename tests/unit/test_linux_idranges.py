"""Ranges of host ids: one owner each, whoever asks, and none lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_sandbox.backends.linux.idranges import END, SIZE, IdRanges
from agent_sandbox.config import Settings
from agent_sandbox.errors import InvalidRequestError, LimitExceededError

FIRST = 2_013_265_920


@pytest.fixture
def ranges(tmp_path: Path) -> IdRanges:
    ranges = IdRanges(tmp_path / "ids", FIRST)
    ranges.prepare()
    ranges.prepare()
    return ranges


def owner(tmp_path: Path, number: int) -> Path:
    path = tmp_path / f"sb{number}-1"
    path.mkdir(exist_ok=True)
    return path


def test_the_lowest_free_range_is_taken(ranges: IdRanges, tmp_path: Path) -> None:
    assert [ranges.claim(owner(tmp_path, number)) for number in range(3)] == [
        2_013_265_920,
        2_013_331_456,
        2_013_396_992,
    ]
    ranges.release(owner(tmp_path, 1))
    ranges.release(owner(tmp_path, 1))
    assert ranges.claim(owner(tmp_path, 3)) == 2_013_331_456
    assert (tmp_path / "ids" / "2013331456").readlink() == owner(tmp_path, 3)


def test_a_range_is_found_by_its_owner(ranges: IdRanges, tmp_path: Path) -> None:
    assert ranges.find(owner(tmp_path, 0)) is None
    claimed = [ranges.claim(owner(tmp_path, number)) for number in range(2)]
    assert [ranges.find(owner(tmp_path, number)) for number in range(2)] == claimed
    ranges.release(owner(tmp_path, 1))
    assert ranges.find(owner(tmp_path, 1)) is None
    assert IdRanges(tmp_path / "none", FIRST).find(owner(tmp_path, 0)) is None


def test_two_servers_never_get_the_same(tmp_path: Path) -> None:
    servers = [IdRanges(tmp_path / "ids", FIRST) for _ in range(2)]
    servers[0].prepare()
    owners = [owner(tmp_path, number) for number in range(100)]
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda number: servers[number % 2].claim(owners[number]), range(100)))
    assert sorted(claims) == list(range(FIRST, FIRST + 100 * SIZE, SIZE))


def test_when_all_are_taken_the_claims_of_the_gone_are_free(tmp_path: Path) -> None:
    few = IdRanges(tmp_path / "ids", END - 2 * SIZE)
    few.prepare()
    first, second, third = (owner(tmp_path, number) for number in range(3))
    assert [few.claim(first), few.claim(second)] == [END - 2 * SIZE, END - SIZE]
    with pytest.raises(LimitExceededError, match="all 2 ranges"):
        few.claim(third)
    second.rmdir()
    assert few.claim(third) == END - SIZE


def test_a_record_keeps_its_range(ranges: IdRanges, tmp_path: Path) -> None:
    mine, other = owner(tmp_path, 1), owner(tmp_path, 2)
    base = ranges.claim(mine)
    assert ranges.keep(base, mine)
    assert not ranges.keep(base, other)
    assert ranges.keep(base + SIZE, other)
    assert ranges.claim(owner(tmp_path, 3)) == base + 2 * SIZE
    mine.rmdir()
    assert ranges.keep(base, other)
    ranges.release(other)
    assert sorted(path.name for path in (tmp_path / "ids").iterdir()) == [".lock", str(base + 2 * SIZE)]


def test_nothing_happens_where_there_is_no_directory(tmp_path: Path) -> None:
    IdRanges(tmp_path / "ids", FIRST).release(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("base", [0, -65_536, 65_535, 65_537, FIRST + 1, END, 1 << 40])
def test_a_base_that_cannot_be_is_refused(base: int) -> None:
    with pytest.raises(InvalidRequestError, match="AGENT_SANDBOX_ID_RANGE_BASE"):
        Settings(id_range_base=base)


def test_the_default_base_leaves_room_for_two_thousand() -> None:
    assert Settings().id_range_base == FIRST
    assert (END - FIRST) // SIZE == 2046
    assert Settings(id_range_base=END - SIZE).id_range_base == 0x7FFD_0000
