"""Memory snapshots: processes that go on from a checkpoint, in the sandbox itself and in any number of others.

Strategy
--------
Most is asked of one file (``diary.py``). A process inside writes a diary, line by line: the number of the line, which
it has in memory alone, and random bytes from the kernel. Whoever goes on from a checkpoint writes on:

* numbers that follow each other: the process went on with its memory, and the workspace is of the same moment. An older
  workspace leaves a gap, a newer one a line twice;
* two diaries part where the memory was saved, since the random bytes are drawn anew. They part at the line that the
  committed workspace ends with, or at the one that was being written: else something ran between workspace and memory,
  or the two share their entropy.

Nothing is asked about time: a slow machine writes a shorter diary. Values come from ``backends/base.py``. The form of a
checkpoint is the backend's own; it is damaged here by cutting off its files, and made another version's where one of
them is a JSON object with a ``version``, as the project's conventions have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import pathlib
import secrets
import shutil
import tarfile
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import ClassVar

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.guest_backend import GuestBackend
from agent_sandbox.conformance.box import Box, new_id
from agent_sandbox.conformance.diary import (
    DAMAGED_BYTES,
    DIARY,
    HOLDER,
    appears,
    cut_off,
    directory,
    facts_of,
    goes_on,
    in_common,
    lines_of,
    link_all,
    names,
    none_but,
    own,
    written,
)
from agent_sandbox.conformance.execs import ended, request
from agent_sandbox.conformance.suite import SuiteBase
from agent_sandbox.errors import BackendError, ConflictError, NotFoundError, SandboxError, UnsupportedError
from agent_sandbox.guest import Guest
from agent_sandbox.types import HeldWorkspace, PreparedWorkspace

STILL_SECONDS = 0.5
"""Some twenty lines of a diary: who does not stand still while it is held writes one."""
BETWEEN_SECONDS = 3.0
"""Between a checkpoint and its restore, where the clock is asked: one that stood still is so far behind."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """A checkpoint, what the caller committed with it, and the diary there."""

    memory: pathlib.Path
    workspace: PreparedWorkspace
    lines: tuple[str, ...]


class CheckpointSuite(SuiteBase):
    """For backends with the capability ``checkpoint``. Needs ``date``, ``od``, ``uname`` and python3 of the guest."""

    diary: ClassVar[Sequence[str]] = ("python3", "-I", "-S", "-c", DIARY)
    """The program that writes the diary; and one that holds a file that has no name any more."""
    holder: ClassVar[Sequence[str]] = ("python3", "-I", "-S", "-c", HOLDER)

    async def test_a_process_goes_on_in_three_forks_each_on_its_own(
        self, backend: Backend, tmp_path: pathlib.Path
    ) -> None:
        box = await self.writing(backend, tmp_path)
        kept = await self.keep(box, tmp_path / "kept")
        facts = facts_of(kept.memory)
        forks = await self.restored(backend, kept, 3)
        assert sorted(await backend.list_ids()) == sorted([box.id, *(fork.id for fork in forks)])
        for fork in forks:
            await goes_on(fork, len(kept.lines))
            assert (await backend.exec_status(fork.id, "diary")).running
        first, second, third = forks
        await backend.signal_exec(first.id, "diary", 9)
        await ended(first, "diary")
        stopped = await written(first)
        await second.put("mine", b"")
        await backend.destroy(second.id)
        for other in (third, box):
            await goes_on(other, len(await written(other)) + 2)
            assert "mine" not in await names(other), "a fork sees what another one wrote"
        assert await written(first) == stopped, "a fork goes on writing what another one wrote"
        assert facts_of(kept.memory) == facts, "a restore changed the checkpoint"
        again = await self.keep(third, tmp_path / "again")
        (grandchild,) = await self.restored(backend, again, 1)
        await goes_on(grandchild, len(again.lines))

    async def test_memory_and_workspace_are_of_one_moment_and_entropy_is_not_shared(
        self, backend: Backend, tmp_path: pathlib.Path
    ) -> None:
        box = await self.writing(backend, tmp_path)
        kept = await self.keep(box, tmp_path / "kept")
        forks = await self.restored(backend, kept, 2)
        diaries = [await goes_on(each, len(kept.lines) + 3) for each in (box, *forks)]
        for one, other in itertools.combinations(diaries, 2):
            common = in_common(one, other)
            assert common >= len(kept.lines), "the committed workspace is of a later moment than the memory"
            assert common <= len(kept.lines) + 1, "the memory is of a later moment, or what goes on shares its entropy"
        drawn = [await each.shell("od -An -N16 -tx1 /dev/urandom") for each in (box, *forks)]
        assert len(set(drawn)) == len(drawn), "what goes on from one memory draws the same random bytes"

    async def test_the_sandbox_itself_was_held_for_a_moment_and_goes_on_unharmed(
        self, backend: Backend, tmp_path: pathlib.Path
    ) -> None:
        box = await self.writing(backend, tmp_path)
        await backend.start_exec(box.id, request(["cat"], "waits", stdin=True, timeout_seconds=3000.0))
        await box.shell("echo in memory > /tmp/kept")
        for name in ("first", "second"):
            kept = await self.keep(box, tmp_path / name)
            await goes_on(box, len(kept.lines))
        assert {status.id for status in await backend.list_execs(box.id) if status.running} == {"diary", "waits"}
        await backend.close_stdin(box.id, "waits")
        assert (await ended(box, "waits")).code == 0
        assert await box.shell("cat /tmp/kept") == "in memory\n"

    async def test_the_clock_is_right_where_it_goes_on(self, backend: Backend, tmp_path: pathlib.Path) -> None:
        box = await self.sandbox(backend, tmp_path)
        kept = await self.keep(box, tmp_path / "kept")
        await asyncio.sleep(BETWEEN_SECONDS)
        (fork,) = await self.restored(backend, kept, 1)
        for each in (fork, box):
            before = time.time()
            shown = float(await each.shell("date +%s.%N"))
            assert before - 1 < shown < time.time() + 1, "the clock stood still with the processes"

    async def test_names_and_machine_ids_are_renewed(self, backend: Backend, tmp_path: pathlib.Path) -> None:
        box = await self.sandbox(backend, tmp_path)
        kept = await self.keep(box, tmp_path / "kept")
        told = [
            (await each.shell("uname -n; cat /etc/machine-id")).split()
            for each in (box, *await self.restored(backend, kept, 2))
        ]
        for values in zip(*told, strict=True):
            assert len(set(values)) == len(told), "what goes on from one memory has one name or machine id"

    async def test_the_old_key_opens_no_restored_one(self, backend: Backend, tmp_path: pathlib.Path) -> None:
        if not isinstance(backend, GuestBackend):
            pytest.skip("unsupported: guest: no daemon, no key")
        box = await self.sandbox(backend, tmp_path)
        kept = await self.keep(box, tmp_path / "kept")
        (fork,) = await self.restored(backend, kept, 1)
        keys = []
        for each in (box, fork):
            await backend.drop_guest(each.id)  # a machine's port takes one peer at a time
            endpoint = await backend.endpoint(each.id)
            endpoint.socket.close()
            keys.append(endpoint.key)
        assert keys[0] != keys[1], "the key of the sandbox that was kept is that of the restored one"
        await backend.drop_guest(fork.id)
        endpoint = await backend.endpoint(fork.id)
        with pytest.raises(BackendError, match="refused"):
            await Guest.connect(endpoint.socket, keys[0], carrier=endpoint.carrier)
        assert await fork.shell("echo still here") == "still here\n"

    async def test_what_a_checkpoint_does_not_belong_to_is_refused_before_any_effect(
        self, backend: Backend, tmp_path: pathlib.Path
    ) -> None:
        box = await self.writing(backend, tmp_path)
        kept = await self.keep(box, tmp_path / "kept")
        nothing = tmp_path / "nothing"
        nothing.mkdir()
        smaller = dataclasses.replace(self.spec, memory_mb=self.spec.memory_mb - 1)
        attempts = [(kept.memory, new_id(), smaller), (nothing, new_id(), self.spec), (kept.memory, box.id, self.spec)]
        foreign = self.of_another_version(kept.memory, tmp_path / "foreign")
        if foreign is not None:
            attempts.append((foreign, new_id(), self.spec))
        for place, id, spec in attempts:
            with pytest.raises(ConflictError):
                await backend.restore(id, spec, kept.workspace, str(place))
            assert await backend.list_ids() == [box.id], "something is left of a restore that was refused"
        await goes_on(box, len(kept.lines))
        (fork,) = await self.restored(backend, kept, 1)
        await goes_on(fork, len(kept.lines))

    async def test_a_damaged_checkpoint_is_a_typed_error_and_nothing_stays(
        self, backend: Backend, tmp_path: pathlib.Path
    ) -> None:
        box = await self.writing(backend, tmp_path)
        kept = await self.keep(box, tmp_path / "kept")
        for name in sorted(path.name for path in kept.memory.iterdir()):
            damaged = cut_off(kept.memory, name, tmp_path / f"damaged-{name}")
            with pytest.raises(SandboxError):
                await backend.restore(new_id(), self.spec, kept.workspace, str(damaged))
            await none_but(backend, [box.id])
        await goes_on(box, len(kept.lines))

    async def test_a_checkpoint_that_is_broken_off_leaves_nothing_and_the_sandbox_goes_on(
        self, backend: Backend, tmp_path: pathlib.Path
    ) -> None:
        box = await self.writing(backend, tmp_path)
        has_layers = backend.capabilities.layered_workspace
        empty = self.committed(directory(tmp_path / "nothing", 0o755)) if has_layers else PreparedWorkspace()

        async def make(place: pathlib.Path, inside: Callable[[], None], seconds: float = 0.0) -> None:
            async with backend.checkpoint(box.id, str(place)):
                inside()
                await asyncio.sleep(seconds)

        async def counts_for_nothing(place: pathlib.Path) -> None:
            with pytest.raises(SandboxError):
                await backend.restore(new_id(), self.spec, empty, str(place))
            await none_but(backend, [box.id])
            await goes_on(box, len(await written(box)) + 1)

        def fail() -> None:
            raise ZeroDivisionError

        raised = directory(tmp_path / "raised")
        with pytest.raises(ZeroDivisionError):
            await make(raised, fail)
        await counts_for_nothing(raised)
        for name, seconds, later in (("held", 3000.0, 0.0), ("leaving", 0.0, 0.005), ("writing", 0.0, 0.03)):
            place, entered = directory(tmp_path / name), asyncio.Event()
            making = asyncio.create_task(make(place, entered.set, seconds))
            waiting = asyncio.ensure_future(entered.wait())
            await asyncio.wait([making, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            await asyncio.sleep(later)
            making.cancel()
            await asyncio.wait([making])
            if making.cancelled():
                await counts_for_nothing(place)
            else:
                making.result()  # it was done before
        kept = await self.keep(box, tmp_path / "kept")
        await goes_on(box, len(kept.lines))

    async def test_a_restore_that_is_broken_off_leaves_nothing(self, backend: Backend, tmp_path: pathlib.Path) -> None:
        box = await self.writing(backend, tmp_path)
        kept = await self.keep(box, tmp_path / "kept")
        for seconds in (0.0, 0.02, 0.1, 0.3):
            id = new_id()
            restoring = asyncio.create_task(backend.restore(id, self.spec, kept.workspace, str(kept.memory)))
            await asyncio.sleep(seconds)
            restoring.cancel()
            await asyncio.wait([restoring])
            if not restoring.cancelled():
                restoring.result()
                await backend.destroy(id)
            await none_but(backend, [box.id])
        (fork,) = await self.restored(backend, kept, 1)
        await goes_on(fork, len(kept.lines))

    async def test_a_server_that_ends_meanwhile_leaves_both_to_the_next(
        self, backend: Backend, tmp_path: pathlib.Path
    ) -> None:
        box = await self.writing(backend, tmp_path)
        kept = await self.keep(box, tmp_path / "kept")
        (fork,) = await self.restored(backend, kept, 1)
        half = directory(tmp_path / "half")
        holding = backend.checkpoint(box.id, str(half))
        await holding.__aenter__()
        successor = await self.reopened(backend, tmp_path)
        try:
            assert sorted(await successor.list_ids()) == sorted([box.id, fork.id])
            again = [Box(successor, each.id, each.spec) for each in (box, fork)]
            for each in again:
                await goes_on(each, len(await written(each)) + 1)
            (late,) = await self.restored(successor, kept, 1)
            await goes_on(late, len(kept.lines))
            with pytest.raises(SandboxError):
                await successor.restore(new_id(), self.spec, kept.workspace, str(half))
        finally:
            with contextlib.suppress(SandboxError, RuntimeError):  # the old process has no threads any more
                await holding.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)

    async def test_a_checkpoint_outlives_its_sandbox(self, backend: Backend, tmp_path: pathlib.Path) -> None:
        box = await self.writing(backend, tmp_path)
        kept = await self.keep(box, tmp_path / "kept")
        await backend.destroy(box.id)
        await none_but(backend, [])
        await backend.restore(box.id, self.spec, kept.workspace, str(kept.memory))
        assert await backend.list_ids() == [box.id]
        assert await backend.is_running(box.id)
        await goes_on(box, len(kept.lines))
        await backend.destroy(box.id)
        await none_but(backend, [])
        with pytest.raises(NotFoundError):
            async with backend.checkpoint(box.id, str(directory(tmp_path / "unknown"))):
                pass

    async def test_a_file_that_is_open_and_deleted_goes_on_or_is_named(
        self, backend: Backend, tmp_path: pathlib.Path
    ) -> None:
        box = await self.writing(backend, tmp_path)
        await backend.start_exec(box.id, request(list(self.holder), "holder", timeout_seconds=3000.0))
        await appears(box, "ready")
        place = tmp_path / "kept"
        refusal = ""
        try:
            kept = await self.keep(box, place)
        except ConflictError as conflict:
            refusal = conflict.message
        if refusal:
            assert "gone" in refusal, "the message does not name the file"
            assert list((place / "memory").iterdir()) == [], "something is left of a checkpoint that was refused"
            await goes_on(box, len(await written(box)) + 1)
            await box.put("go", b"")
            await ended(box, "holder")
            kept = await self.keep(box, tmp_path / "later")
        (fork,) = await self.restored(backend, kept, 1)
        await fork.put("go", b"")
        await appears(fork, "found")
        assert await fork.get("found") == b"still here"

    # -- how it is asked -----------------------------------------------------------------

    async def sandbox(self, backend: Backend, tmp_path: pathlib.Path) -> Box:
        """A new environment, as a manager makes one that it will keep."""
        id = new_id()
        if backend.capabilities.layered_workspace:
            for place in (tmp_path, *tmp_path.parents[:2]):
                place.chmod(0o755)
            await backend.create_from(id, self.spec, self.committed(directory(tmp_path / "empty", 0o755)))
        else:
            await backend.create(id, self.spec)
        return Box(backend, id, self.spec)

    async def writing(self, backend: Backend, tmp_path: pathlib.Path) -> Box:
        """One with a process that writes its diary."""
        box = await self.sandbox(backend, tmp_path)
        await backend.start_exec(box.id, request(list(self.diary), "diary", timeout_seconds=3000.0))
        await appears(box, "diary")
        await goes_on(box, 3)
        return box

    async def keep(self, box: Box, place: pathlib.Path) -> Kept:
        """Make a checkpoint, and commit the workspace of the same moment as a manager does."""
        memory = directory(directory(place, 0o755) / "memory")
        async with box.backend.checkpoint(box.id, str(memory)) as held:
            workspace, lines = await self.read(box, held, place / "state")
            if lines:
                await asyncio.sleep(STILL_SECONDS)
                _, later = await self.read(box, held, place / "later")
                assert later == lines, "a process goes on while its workspace is read"
        return Kept(memory, workspace, tuple(lines))

    async def read(
        self, box: Box, held: HeldWorkspace | None, state: pathlib.Path
    ) -> tuple[PreparedWorkspace, list[str]]:
        """The workspace inside a checkpoint's block, as the state that a restore begins with, and the diary in it."""
        if held is not None:
            await asyncio.to_thread(shutil.copytree, held.path, state, symlinks=True)
            found = state / "diary"
            return self.committed(state), lines_of(found.read_bytes()) if found.exists() else []
        with tarfile.open(fileobj=BytesIO(await box.export())) as tar:
            for info in tar:
                if info.name.removeprefix("./") == "diary" and (file := tar.extractfile(info)) is not None:
                    return PreparedWorkspace(), lines_of(file.read())
        return PreparedWorkspace(), []

    def committed(self, state: pathlib.Path) -> PreparedWorkspace:
        """A directory of this host as a state that an environment begins with: its files are the sandbox user's."""
        own(state, self.spec.uid, self.spec.gid)

        def fill(target: int, owner: tuple[int, int], unwanted: Callable[[], bool]) -> None:
            place = pathlib.Path(f"/proc/self/fd/{target}")
            shutil.copytree(state, place, symlinks=True, dirs_exist_ok=True)
            own(place, *owner)

        return PreparedWorkspace((str(state),), fill, secrets.token_hex(32))

    async def restored(self, backend: Backend, kept: Kept, count: int) -> list[Box]:
        """So many environments that go on from a checkpoint, made at once."""
        boxes = [Box(backend, new_id(), self.spec) for _ in range(count)]
        await asyncio.gather(*(backend.restore(box.id, self.spec, kept.workspace, str(kept.memory)) for box in boxes))
        return boxes

    def of_another_version(self, memory: pathlib.Path, target: pathlib.Path) -> pathlib.Path | None:
        """A copy of a checkpoint as another version would have written it; ``None`` where it cannot be told here."""
        for path in memory.iterdir():
            try:
                value = json.loads(path.read_bytes()) if path.stat().st_size <= DAMAGED_BYTES else None
            except ValueError:
                continue
            if isinstance(value, dict) and "version" in value:
                link_all(memory, path.name, target)
                value["version"] = 99 if isinstance(value["version"], int) else "99"
                (target / path.name).write_text(json.dumps(value))
                return target
        return None


class NoCheckpointSuite(SuiteBase):
    """For backends without it: a typed refusal before any effect."""

    async def test_checkpoints_are_refused(self, backend: Backend, box: Box, tmp_path: pathlib.Path) -> None:
        assert not backend.capabilities.checkpoint
        place = directory(tmp_path / "kept")
        with pytest.raises(UnsupportedError):
            async with backend.checkpoint(box.id, str(place)):
                pass
        with pytest.raises(UnsupportedError):
            await backend.restore(new_id(), self.spec, PreparedWorkspace(), str(place))
        assert list(place.iterdir()) == []
        assert await backend.list_ids() == [box.id]
        assert await box.shell("echo still here") == "still here\n"
