"""The store's one face: everything that is done with states, by name.

The rules
---------
* Outcomes that the caller must handle are values (``outcomes.py``); errors say what was asked wrongly, or what broke.
* What moves a branch reads its head, works, and moves it in one index transaction that checks that the head is still
  there (``branches.py``). So of two commits at once one is ``HeadMoved`` and has no effect.
* While an operation runs, gc waits. What is handed out piece by piece (differences, logs, contents) holds gc off for
  each step only: where a state is removed meanwhile, the next step is a :class:`NotFoundError`.
* Reading and making directories is the engine's work (``ports.py``): the one that was given, or the compiled one.

More than 400 lines: it is the interface, and each method is short and says what it promises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Self, TypeVar

from blake3 import blake3

from agent_sandbox.errors import (
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    StoreDamagedError,
    StoreError,
)
from agent_sandbox.store import branches, chunks, history, layers, refs, tarin, tarout, walk
from agent_sandbox.store.branches import Note, Take
from agent_sandbox.store.catalog import Layer, Pin, Project, Ref, RefKind
from agent_sandbox.store.check import CheckReport, check
from agent_sandbox.store.checkouts import Checkouts
from agent_sandbox.store.diff import Change, diff
from agent_sandbox.store.gc import GcReport, collect
from agent_sandbox.store.history import LogEntry
from agent_sandbox.store.hunks import hunks
from agent_sandbox.store.landing import landing, opened
from agent_sandbox.store.objectdb import ObjectDatabase
from agent_sandbox.store.objects import Entry, Type
from agent_sandbox.store.outcomes import Conflicts, Created, HeadMoved, UpToDate
from agent_sandbox.store.ports import Captured, Engine, Options, OverlayRefusedError, Progress, Upper, Writer
from agent_sandbox.store.stats import Stats, stats
from agent_sandbox.store.tarin import Cut
from agent_sandbox.store.tarinput import Limits
from agent_sandbox.store.tarout import Sink
from agent_sandbox.store.tarread import Stream

MAX_CACHES = 64
"""Stat caches that are kept: one for each directory that was committed, those used last."""

T = TypeVar("T")


def _compiled() -> ModuleType:
    try:
        from agent_sandbox.store import native
    except ImportError as error:
        raise StoreError(f"the compiled engine is not there ({error}); install agent-sandbox[server]") from error
    return native


class Store:
    """A versioned store. Safe for threads, and several processes may use one store. A context manager.

    Every method can raise :class:`StoreBusyError` (gc holds the store for longer than ``wait_seconds``),
    :class:`StoreDamagedError`, :class:`StoreFullError` and :class:`StoreError`; each says what else. References are
    explained in ``refs.py``; one that leads nowhere is a :class:`NotFoundError`, one that cannot be right an
    :class:`InvalidRequestError`.
    """

    def __init__(self, database: ObjectDatabase, engine: Engine | None = None) -> None:
        """Use :meth:`create` or :meth:`open`. The store closes ``database``."""
        self._database = database
        self._given = engine

    @classmethod
    def create(cls, path: Path, *, engine: Engine | None = None) -> Self:
        """Make a store in ``path``, which does not exist or is empty, and open it.

        :class:`ConflictError` when there is a store, :class:`InvalidRequestError` when there is something else.
        """
        return cls(ObjectDatabase.create(path), engine)

    @classmethod
    def open(cls, path: Path, *, wait_seconds: float = 10.0, engine: Engine | None = None) -> Self:
        """Open the store in ``path``; ``wait_seconds`` is how long an operation waits for gc or another writer.

        :class:`NotFoundError` when there is none, :class:`StoreVersionError` for a newer one: nothing was touched.
        """
        return cls(ObjectDatabase.open(path, wait_seconds=wait_seconds), engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the store; nothing else may be called afterwards."""
        self._database.close()

    # ---- making states ---------------------------------------------------------------------------------------------

    def init(
        self,
        project: str,
        directory: Path | None = None,
        *,
        owners: bool = False,
        author: str = "",
        message: str = "",
        progress: Progress | None = None,
    ) -> Created:
        """Make a project: its layer 0 is empty or what is in ``directory``, its branch ``main`` stands on that.

        ``owners``: record uid and gid of every entry, for good. :class:`ConflictError` when the name is taken or the
        directory changes while it is read.
        """
        take = None if directory is None else self._capture(directory, progress)
        return branches.begin(self._database, project, take, owners=owners, note=Note(author, message))

    def init_tar(
        self,
        project: str,
        file: Stream,
        *,
        author: str = "",
        message: str = "",
        max_bytes: int | None = None,
        limits: Limits | None = None,
        progress: Progress | None = None,
    ) -> Created:
        """As :meth:`init`, with what is in an archive; errors as of :meth:`import_tar`, and nothing is made then.

        :class:`PayloadTooLargeError` when its files hold more than ``max_bytes``, as a capture counts them.
        """
        unpacked = self._unpacked(file, limits, progress)

        def take(writer: Writer, base: Entry | None, owners: bool) -> Captured:
            captured = unpacked(writer, base, owners)
            if max_bytes is not None and captured.report.bytes > max_bytes:
                raise PayloadTooLargeError(f"the files of the archive hold more than {max_bytes} bytes")
            return captured

        return branches.begin(self._database, project, take, owners=False, note=Note(author, message))

    def commit(
        self,
        ref: str,
        directory: Path,
        *,
        author: str = "",
        message: str = "",
        expected: bytes | None = None,
        fresh: bool = False,
        upper: Upper | None = None,
        progress: Progress | None = None,
    ) -> Created | UpToDate | HeadMoved:
        """Make what is in ``directory`` the new head of a branch. When it returns, the commit is on disk.

        ``expected``: the head that the caller worked on; ``HeadMoved`` without reading anything when the branch is
        elsewhere. ``UpToDate``, and nothing is written, when the state is the head's. ``fresh``: believe no times of
        files, read everything and remember nothing (somebody may have written through a shared map, which changes bytes
        alone). ``upper``: ``directory`` is the merged view of an overlay, and this its upper directory, which is read
        in its place where it tells the state; the report is then not ``whole``. :class:`ConflictError` when
        the directory changes while it is read.
        """
        take = self._capture(directory, progress, fresh=fresh, upper=upper)
        return branches.advance(self._database, ref, take, note=Note(author, message), expected=expected)

    def import_tar(
        self,
        ref: str,
        file: Stream,
        *,
        author: str = "",
        message: str = "",
        expected: bytes | None = None,
        limits: Limits | None = None,
        progress: Progress | None = None,
    ) -> Created | UpToDate | HeadMoved:
        """Make what is in the archive ``file`` (tar, plain or compressed) the new head of a branch; see :meth:`commit`.

        Raises what :func:`agent_sandbox.store.tarin.read_tar` does for a hostile or too large archive.
        """

        take = self._unpacked(file, limits, progress)
        return branches.advance(self._database, ref, take, note=Note(author, message), expected=expected)

    def import_layer(
        self,
        ref: str,
        file: Stream,
        *,
        author: str = "",
        message: str = "",
        expected: bytes | None = None,
        limits: Limits | None = None,
        progress: Progress | None = None,
        under: str | None = None,
    ) -> Created | UpToDate | HeadMoved:
        """Apply an OCI layer to the state ``under``, or to the branch's own head; else as :meth:`import_tar`.

        The report counts what the layer changes, and is not ``whole``. :class:`NotFoundError` when ``under`` is gone.
        """

        def take(writer: Writer, base: Entry | None, owners: bool) -> Captured:
            captured = layers.read_layer(
                file,
                self._database,
                writer,
                base if under is None else self._state(under)[1],
                options=Options(owners=owners),
                limits=limits,
                cut=self._cut,
                progress=progress,
            )
            return replace(captured, report=replace(captured.report, whole=False))

        return branches.advance(self._database, ref, take, note=Note(author, message), expected=expected)

    def merge(
        self, target: str, source: str, *, author: str = "", message: str = ""
    ) -> Created | UpToDate | HeadMoved | Conflicts:
        """Merge a state into the branch ``target``, by entry (``merge.py``), against their best common ancestor.

        ``UpToDate`` when the branch has the source in its history already. When the branch is in the source's, it moves
        there and ``Created`` names the source's commit; nothing new is made. ``Conflicts``: nothing was changed. Of
        several best common ancestors (merges that crossed) the newest is taken. :class:`ConflictError` when there is
        none, or when its state was forgotten: an older one could silently undo what one side took back.
        """
        return branches.merge_into(self._database, target, source, note=Note(author, message))

    # ---- names -----------------------------------------------------------------------------------------------------

    def fork(self, source: str, target: str) -> Ref:
        """Make the branch ``target`` (``PROJECT:NAME``) at any state; no content is copied.

        :class:`ConflictError` when the name is taken.
        """
        project, name = refs.named(target)
        return branches.name(self._database, source, project, name, RefKind.BRANCH)

    def tag(self, ref: str, name: str) -> Ref:
        """Give a state a name that stays there: ``NAME`` in the project of ``ref``, or ``PROJECT:NAME``.

        :class:`ConflictError` when the name is taken.
        """
        if ":" in name:
            project, name = refs.named(name)
        else:
            reference = refs.parse(ref)
            if reference.digits:
                raise InvalidRequestError(f"a commit is in no project; tag it as PROJECT:{refs.check_name(name)}")
            project = reference.project
        return branches.name(self._database, ref, project, refs.check_name(name), RefKind.TAG)

    def add(self, ref: str) -> Created | UpToDate | HeadMoved:
        """Publish the head of a branch as the project's next layer.

        ``UpToDate`` when it is the last layer. ``HeadMoved`` with the last layer's commit when the branch does not have
        that in its history: merge it first.
        """
        return branches.publish(self._database, ref)

    def extend(self, project: str, state: str) -> Created | UpToDate | HeadMoved:
        """As :meth:`add`, for any state; ``main`` goes along where it is at the last layer.

        ``UpToDate`` when it is a layer of the project already, be it the last one or not.
        """
        return branches.extend(self._database, project, state)

    def reset(self, branch: str, state: str) -> Ref:
        """Move a branch to any state, as a rollback does. What only it led to goes with the next gc."""
        return branches.reset(self._database, branch, state)

    def delete(self, ref: str) -> None:
        """Remove a branch or tag, said as ``PROJECT:NAME``. What nothing else leads to goes with the next gc."""
        project, name = refs.named(ref)
        with self._database.transaction() as change:
            refs.find(change, project, name)
            change.remove_ref(project, name)

    def delete_project(self, project: str) -> None:
        """Remove a project with its branches, tags and layers. What nothing else leads to goes with the next gc."""
        with self._database.transaction() as change:
            refs.project(change, project)
            change.remove_project(project)

    def pin(self, name: str, ref: str) -> None:
        """Keep a state whatever happens to branches and tags; a pin of the name that was there moves."""
        refs.check_name(name, "pin")
        with self._database.reading():
            commit = self.resolve(ref)
            with self._database.transaction() as change:
                change.set_pin(name, commit)

    def unpin(self, name: str) -> None:
        """Remove a pin; :class:`NotFoundError` when there is none of the name."""
        with self._database.transaction() as change:
            if not change.remove_pin(name):
                raise NotFoundError(f"no pin {refs.check_name(name, 'pin')!r}")

    def forget(self, ref: str) -> None:
        """Let gc take the state of a commit that only later commits lead to; its note stays in the log.

        As long as a branch, tag, layer or pin is at the commit, nothing happens to it.
        """
        with self._database.reading():
            commit = self.resolve(ref)
            with self._database.transaction() as change:
                change.forget(commit)

    def projects(self) -> Iterator[Project]:
        """Yield the projects by name."""
        return self._database.index.projects()

    def refs(self, project: str) -> Iterator[Ref]:
        """Yield the branches and tags of a project by name."""
        return self._database.index.refs(refs.project(self._database.index, project).name)

    def layers(self, project: str) -> Iterator[Layer]:
        """Yield the layers of a project, oldest first."""
        return self._database.index.layers(refs.project(self._database.index, project).name)

    def pins(self) -> Iterator[Pin]:
        """Yield the pins by name."""
        return self._database.index.pins()

    def pinned(self, name: str) -> bytes | None:
        """Return the commit that a pin keeps, or None."""
        pin = self._database.index.pin(name)
        return None if pin is None else pin.commit

    # ---- reading states --------------------------------------------------------------------------------------------

    def resolve(self, ref: str) -> bytes:
        """Return the id of the commit that a reference leads to."""
        return refs.resolve(self._database, ref).commit

    def has(self, commit: str) -> bool:
        """Whether the state of a commit, named by its 64 hexadecimal digits, is there."""
        return self._database.index.has_state(bytes.fromhex(commit))

    def checkout(self, ref: str, directory: Path, *, progress: Progress | None = None) -> None:
        """Make a state appear at ``directory``, which does not exist or is empty.

        A new directory is built beside its place and renamed when it is whole; on failure nothing is left. Recorded
        owners are given to the files where the caller is root. :class:`ConflictError` when something is there.
        """
        with self._database.reading():
            _, root = self._state(ref)
            options = Options(owners=root.owner is not None and os.geteuid() == 0)
            with landing(directory) as fd:
                self._engine.checkout(root, fd, self._database, options=options, progress=progress)

    def lay_out(self, ref: str, directory: int, *, owner: tuple[int, int], progress: Progress | None = None) -> None:
        """Lay a state out in an open, empty directory, everything in it owned by ``owner`` (uid, gid). Needs root.

        What a failure leaves is the caller's to remove. :class:`StoreFullError` when the directory's disk is full.
        """
        with self._database.reading():
            _, root = self._state(ref)
            self._engine.checkout(root, directory, self._database, options=Options(owner=owner), progress=progress)

    def diff(self, a: str, b: str) -> Iterator[Change]:
        """Yield what changed from ``a`` to ``b``, by path, reading only what differs; see ``diff.py``."""
        (old, before), (new, after) = self._state(a), self._state(b)
        return self._steps(diff(self._database, before, after), old, new)

    def hunks(self, change: Change, context: int = 3) -> Iterator[str]:
        """Yield the lines of a unified difference of one change of :meth:`diff`; see ``hunks.py``."""
        return hunks(self._database, change, context)

    def log(self, ref: str, limit: int | None = None) -> Iterator[LogEntry]:
        """Yield the commit and its ancestors, newest first; at most ``limit``."""
        if limit is not None and limit < 0:
            raise InvalidRequestError(f"a log cannot have {limit} entries")
        head = self.resolve(ref)
        return self._steps(islice(self._entries(head), limit), head)

    def read(self, ref: str, path: bytes) -> Iterator[bytes]:
        """Yield the content of a file in pieces of at most 1 MiB, holes as zeros.

        :class:`NotFoundError` when there is no such path, :class:`InvalidRequestError` when it is no file.
        """
        commit, root = self._state(ref)
        entry = walk.resolve(self._database, root, path)
        if entry.type is not Type.FILE:
            raise InvalidRequestError(f"this path is a {entry.type.name.lower()}, not a file")
        return self._steps(walk.data(self._database, entry), commit)

    def entries(self, ref: str, path: bytes = b"") -> Iterator[Entry]:
        """Yield the entries of a directory by name; errors as for :meth:`read`."""
        commit, root = self._state(ref)
        entry = walk.resolve(self._database, root, path)
        if entry.type is not Type.DIRECTORY:
            raise InvalidRequestError(f"this path is a {entry.type.name.lower()}, not a directory")
        return self._steps(walk.entries(self._database, entry), commit)

    def data_bytes(self, ref: str, known: tuple[str, int] | None = None) -> int:
        """Count the bytes of data in a state's files as a capture's report does: no holes, each file once.

        ``known``: another state with its count, from which only what differs is counted.
        """
        with self._database.reading():
            _, root = self._state(ref)
            before = None if known is None else (self._state(known[0])[1], known[1])
            return self._engine.data_bytes(root, self._database, known=before)

    def export_tar(
        self, ref: str, out: Sink, *, owner: tuple[int, int] = (0, 0), progress: Progress | None = None
    ) -> None:
        """Write a state to ``out`` as a tar archive; see :func:`agent_sandbox.store.tarout.write_tar`."""
        with self._database.reading():
            _, root = self._state(ref)
            tarout.write_tar(self._database, root, out, owner=owner, progress=progress)

    def export_layer(
        self,
        ref: str,
        base: str | None,
        out: Sink,
        *,
        owner: tuple[int, int] = (0, 0),
        progress: Progress | None = None,
    ) -> None:
        """Write the OCI layer that makes ``ref`` of ``base`` (None: of nothing); see
        :func:`agent_sandbox.store.layers.write_layer`."""
        with self._database.reading():
            old = None if base is None else self._state(base)[1]
            _, new = self._state(ref)
            layers.write_layer(self._database, old, new, out, owner=owner, progress=progress)

    def checkouts(self, directory: Path, *, max_bytes: int, in_use: Callable[[], set[str]]) -> Checkouts:
        """Give the cache of checkouts in ``directory`` (see ``checkouts.py``), not yet started."""
        database = self._database
        return Checkouts(
            directory, database, self._engine, reading=database.reading, max_bytes=max_bytes, in_use=in_use
        )

    # ---- care ------------------------------------------------------------------------------------------------------

    def check(self, progress: Progress | None = None) -> CheckReport:
        """Verify everything that a name leads to, byte by byte."""
        return check(self._database, progress=progress)

    def gc(self, wait_seconds: float = 10.0) -> GcReport:
        """Remove what no name leads to; :class:`StoreBusyError` when others use the store for longer than that."""
        return collect(self._database, wait_seconds=wait_seconds)

    def stats(self) -> Stats:
        """Count what is in the store."""
        return stats(self._database)

    # ---- within ----------------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine:
        return self._given or _compiled().NativeEngine()

    @property
    def _cut(self) -> Cut:
        return chunks.cut if self._given else _compiled().cut

    def _state(self, ref: str) -> tuple[bytes, Entry]:
        """The commit that a reference leads to, and the root of its state."""
        commit = self.resolve(ref)
        return commit, branches.state(self._database, commit)

    def _capture(
        self, directory: Path, progress: Progress | None, *, fresh: bool = False, upper: Upper | None = None
    ) -> Take:
        def take_upper(writer: Writer, upper: Upper, owners: bool) -> Captured | None:
            if not self._database.index.has_state(upper.below):
                return None
            with opened(upper.directory) as fd, suppress(OverlayRefusedError):
                captured = self._engine.capture(
                    fd,
                    self._database,
                    writer,
                    base=walk.commit(self._database, upper.below).root,
                    cache=None if fresh else self._stat_cache(upper.directory),
                    overlay=True,
                    options=Options(owners=owners),
                    progress=progress,
                )
                return replace(captured, report=replace(captured.report, whole=False))
            return None

        def take(writer: Writer, base: Entry | None, owners: bool) -> Captured:
            with opened(directory) as fd:
                if self._database.path.resolve().is_relative_to(directory.resolve()):
                    raise InvalidRequestError(f"{directory} holds the store itself")
                cache = self._stat_cache(directory)
                if fresh:
                    cache.unlink(missing_ok=True)
                    if upper is not None:
                        self._stat_cache(upper.directory).unlink(missing_ok=True)
                if upper is not None and (captured := take_upper(writer, upper, owners)) is not None:
                    return captured
                return self._engine.capture(
                    fd,
                    self._database,
                    writer,
                    base=base,
                    cache=None if fresh else cache,
                    options=Options(owners=owners),
                    progress=progress,
                )

        return take

    def _unpacked(self, file: Stream, limits: Limits | None, progress: Progress | None) -> Take:
        def take(writer: Writer, base: Entry | None, owners: bool) -> Captured:
            return tarin.read_tar(
                file,
                self._database,
                writer,
                base=base,
                options=Options(owners=owners),
                limits=limits,
                cut=self._cut,
                progress=progress,
            )

        return take

    def _stat_cache(self, directory: Path) -> Path:
        """Where the stat cache of a directory is; those that were used longest ago go when they are many."""
        caches = self._database.path / "cache"
        caches.mkdir(mode=0o700, exist_ok=True)
        old: list[tuple[float, Path]] = []
        for path in caches.glob("stat-*"):
            with suppress(FileNotFoundError):
                old.append((path.stat().st_mtime, path))
        for _, path in sorted(old)[:-MAX_CACHES]:
            path.unlink(missing_ok=True)
        return caches / f"stat-{blake3(os.fsencode(directory.resolve())).hexdigest()[:32]}"

    def _entries(self, head: bytes) -> Iterator[LogEntry]:
        for id, commit in history.ancestors(self._database, head):
            yield LogEntry(id, commit, not self._database.index.has_state(id))

    def _steps(self, items: Iterator[T], *commits: bytes) -> Iterator[T]:
        """Hand out what is read from these commits' states; they may be removed meanwhile."""
        try:
            yield from items
        except StoreDamagedError:
            for commit in commits:
                branches.state(self._database, commit)
            raise
