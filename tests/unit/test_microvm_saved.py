"""Saved machines: what they can go on as, and the templates that creating one goes on from."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.backends.microvm import checkpoints, templates
from agent_sandbox.backends.microvm.checkpoints import Made
from agent_sandbox.backends.microvm.monitor import MEMORY_FILE, STATE_FILE
from agent_sandbox.backends.microvm.templates import Templates
from agent_sandbox.errors import BackendError, ConflictError, SandboxError

MADE = Made(
    monitor="qemu 7.2",
    cpu="emulated",
    kernel="6.1.0",
    root="sha256-1",
    vcpus=1,
    memory_mb=352,
    disk_mb=64,
    user="1000:1000",
    guest_mb=256,
    pids_limit=64,
    tmp_mb=32,
)


def changed(**facts: Any) -> Made:
    return replace(MADE, **facts)


def fill(directory: Path) -> None:
    for name, size in ((MEMORY_FILE, MADE.memory_mb << 20), (STATE_FILE, 100), (checkpoints.DISK, MADE.disk_mb << 20)):
        with (directory / name).open("xb") as file:
            file.truncate(size)


def test_what_keeps_the_layers_must_be_there_and_whole(tmp_path: Path) -> None:
    fill(tmp_path)
    checkpoints.seal(tmp_path, changed(layers="0-1-2"))
    with pytest.raises(ConflictError, match="no layers"):
        checkpoints.read(tmp_path)
    for wrong in ("", "0-1-", "0-1-3", "0-1-22"):
        (tmp_path / checkpoints.LAYERS).write_text(wrong)
        with pytest.raises(ConflictError, match="damaged"):
            checkpoints.read(tmp_path)
    (tmp_path / checkpoints.LAYERS).write_text("0-1-2")
    assert checkpoints.read(tmp_path).layers == "0-1-2"


@pytest.mark.parametrize("fact", [field.name for field in fields(Made) if field.name != "layers"])
def test_a_machine_goes_on_only_as_what_it_was_and_the_reason_names_both(fact: str) -> None:
    checkpoints.require(MADE, changed(layers="0" * 64))  # they go on as well
    value = getattr(MADE, fact)
    other = changed(**{fact: value + 1 if isinstance(value, int) else value + "-other"})
    with pytest.raises(ConflictError, match="another") as caught:
        checkpoints.require(other, MADE)
    assert repr(value) in caught.value.message
    assert repr(getattr(other, fact)) in caught.value.message


def test_what_is_sealed_is_read_and_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(ConflictError, match=r"no manifest\.json"):
        checkpoints.read(tmp_path)
    checkpoints.seal(tmp_path, MADE)
    assert checkpoints.read(tmp_path) == MADE
    manifest = tmp_path / checkpoints.MANIFEST
    assert manifest.stat().st_mode & 0o777 == 0o600
    text = manifest.read_bytes()
    for wrong, reason in (
        (text.replace(b'"version":2', b'"version":3'), "format 3"),
        (text[:-5], "damaged"),
        (b"[]", "damaged"),
        (text.replace(b'"vcpus":1', b'"vcpus":"1"'), "damaged"),
    ):
        assert wrong != text
        manifest.write_bytes(wrong)
        with pytest.raises(ConflictError, match=reason):
            checkpoints.read(tmp_path)
    manifest.write_bytes(text)
    for name, kept in ((MEMORY_FILE, (MADE.memory_mb << 20) - 1), (checkpoints.DISK, 0), (STATE_FILE, 0)):
        size = (tmp_path / name).stat().st_size
        os.truncate(tmp_path / name, kept)
        with pytest.raises(ConflictError, match=f"damaged: its {name} has {kept} bytes"):
            checkpoints.read(tmp_path)
        os.truncate(tmp_path / name, size)
    assert checkpoints.read(tmp_path) == MADE
    (tmp_path / MEMORY_FILE).unlink()
    with pytest.raises(ConflictError, match="no memory"):
        checkpoints.read(tmp_path)
    checkpoints.discard(tmp_path)
    assert list(tmp_path.iterdir()) == []
    checkpoints.discard(tmp_path / "none")


def test_a_template_is_of_a_kernel_and_a_size_and_of_no_sandbox() -> None:
    template = checkpoints.template_of(MADE, "6.1.0-abc")
    assert template.kernel == "6.1.0-abc"
    assert template == checkpoints.template_of(
        replace(MADE, user="1:1", guest_mb=1, pids_limit=1, tmp_mb=1), "6.1.0-abc"
    )
    for fact, other in (("memory_mb", 353), ("vcpus", 2), ("disk_mb", 65), ("root", "sha256-2"), ("monitor", "qemu 8")):
        assert checkpoints.template_of(changed(**{fact: other}), "6.1.0-abc") != template


async def test_many_who_want_a_template_wait_for_the_one_who_makes_it(tmp_path: Path) -> None:
    kept, made = Templates(tmp_path / "t"), []

    async def make(place: Path) -> None:
        made.append(place)
        await asyncio.sleep(0.01)
        fill(place)

    async def use(number: int) -> Path:
        async with kept.use(replace(MADE, vcpus=number % 2), make) as place:
            assert checkpoints.read(place).vcpus == number % 2
            return place

    assert len(set(await asyncio.gather(*(use(number) for number in range(10))))) == 2
    assert len(made) == 2
    assert len(list((tmp_path / "t").iterdir())) == 2


async def test_a_failure_is_told_and_leaves_nothing_and_the_next_one_tries_again(tmp_path: Path) -> None:
    kept = Templates(tmp_path / "t")

    async def fail(place: Path) -> None:
        (place / MEMORY_FILE).write_bytes(b"half")
        raise BackendError("no kernel")

    with pytest.raises(BackendError, match="no kernel"):
        async with kept.use(MADE, fail):
            pass
    assert list((tmp_path / "t").iterdir()) == []

    async def make(place: Path) -> None:
        fill(place)

    async with kept.use(MADE, make) as place:
        (place / checkpoints.MANIFEST).write_bytes(b"damaged")
    async with kept.use(MADE, make) as place:
        assert checkpoints.read(place) == MADE


async def test_what_is_in_use_is_not_removed_and_the_oldest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "KEPT", 2)
    kept, others = Templates(tmp_path / "t"), Templates(tmp_path / "t")

    async def make(place: Path) -> None:
        fill(place)

    async with kept.use(MADE, make) as oldest:
        os.utime(oldest, (1, 1))
        for number in range(2, 6):
            async with others.use(replace(MADE, vcpus=number), make) as place:
                os.utime(place, (number, number))
        assert (oldest / MEMORY_FILE).exists()
        assert len(list((tmp_path / "t").iterdir())) == 3
    async with others.use(replace(MADE, vcpus=9), make):
        pass
    assert not oldest.exists()
    half = tmp_path / "t" / ".new-killed"
    half.mkdir()
    fill(half)
    kept.clear()
    assert not half.exists()
    shutil.rmtree(tmp_path / "t")
    kept.clear()


@pytest.mark.parametrize("error", [BackendError("QEMU ended"), ConflictError("damaged")])
async def test_one_that_did_not_go_on_is_made_anew_for_the_next(tmp_path: Path, error: SandboxError) -> None:
    made: list[Path] = []

    async def make(directory: Path) -> None:
        fill(directory)
        made.append(directory)

    kept = Templates(tmp_path / "template")
    with pytest.raises(type(error)):
        async with kept.use(MADE, make) as path:
            raise error
    assert list((tmp_path / "template").iterdir()) == []
    with pytest.raises(OSError, match="disk full"):
        async with kept.use(MADE, make) as path:
            raise OSError("disk full")
    async with kept.use(MADE, make) as path:
        assert list((tmp_path / "template").iterdir()) == [path]
    assert len(made) == 2


async def test_another_servers_tidying_takes_no_place_that_is_about_to_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = templates._lock, list[Path]()

    def late(path: Path, how: int) -> int:
        if path.name.startswith(".new-") and not taken:
            taken.append(path)
            path.rmdir()
        return lock(path, how)

    async def make(directory: Path) -> None:
        fill(directory)

    monkeypatch.setattr(templates, "_lock", late)
    async with Templates(tmp_path / "template").use(MADE, make) as path:
        assert path.is_dir()
    assert len(taken) == 1
