"""The contract between the manager and an isolation technology.

A backend turns the manager's calls into operations on one technology. The manager owns public ids, quotas, TTLs,
locking, path validation and snapshot storage, so that a backend stays small.

The rules
---------
* All methods are coroutines on one event loop; :meth:`Backend.exec` is an asynchronous generator. Work that blocks
  goes to a thread.
* The id that a backend gets is an **environment id**, ``<sandbox>-<n>``: lower-case letters, digits and one hyphen, at
  most 40 characters, DNS-safe. The manager never uses one twice.
* The manager calls ``create`` once for an id, then any number of other methods, then ``destroy``. It never calls
  ``destroy`` and another lifecycle method of the same id at once, but it may call ``exec`` and the file methods
  while ``destroy`` runs; they then fail with a typed error. ``destroy`` may be called while ``create`` is being
  cancelled, and again after it.
* A method of an absent capability, or a limit that cannot be enforced, raises
  :class:`~agent_sandbox.errors.UnsupportedError` before any effect.
* Bytes from a guest are hostile. They are capped, never a path on the host, and never trusted as a count.
* Foreign exceptions do not escape: whatever is raised is a :class:`~agent_sandbox.errors.SandboxError`.
* Everything that outlives the process is found again by :meth:`list_ids` in the next one.

Paths are absolute, normalized, and ``str`` with surrogate escapes.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Literal, NoReturn, Protocol, Self

from agent_sandbox.errors import UnsupportedError
from agent_sandbox.types import (
    AttachEvent,
    Capabilities,
    ChangesLost,
    EnvironmentInfo,
    ExecEvent,
    ExecRequest,
    ExecStatus,
    ExportReport,
    FileChange,
    FileEntry,
    GuestStats,
    HeldWorkspace,
    ImagePull,
    PreparedWorkspace,
    ResolvedImage,
    SandboxSpec,
    TerminalSize,
)

ByteSink = Callable[[bytes], Awaitable[None]]
"""Takes the next piece of a byte stream; slow sinks hold the stream back."""

ByteSource = AsyncIterator[bytes]
"""Yields a byte stream piece by piece."""


class Tunnel(Protocol):
    """A connection to a server inside a sandbox. Each direction is used by one task at a time."""

    async def receive(self) -> bytes:
        """The next bytes as they come; empty once the other side has ended its direction, and from then on.

        Waits as long as the connection lives. Raises :class:`BackendError` when it broke.
        """

    async def send(self, data: bytes) -> None:
        """Send all of ``data``; waits while the server inside takes nothing.

        Raises :class:`ConflictError` after :meth:`send_eof` or once the server inside has closed the connection.
        """

    async def send_eof(self) -> None:
        """End this side's direction; what comes from the other side can still be received."""

    def close(self) -> None:
        """Close the connection at once, in both directions. May be called again."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None:
        """Close it."""


class Backend(abc.ABC):
    """One isolation technology. See the rules above; each method says what is particular to it.

    Methods from :meth:`open_exec` on belong to backends with the capability ``guest``; others inherit the refusal. They
    all raise :class:`NotFoundError` for an unknown environment and :class:`BackendError` where the guest fails.
    """

    name: str
    capabilities: Capabilities
    projection: Literal["overlay", "copy", "disk"] = "overlay"
    """How a workspace begins as a state, with the capability ``layered_workspace``: mounted over layers, copied into a
    directory of its own, or mounted over a read-only drive by a guest's own kernel. With ``disk`` the host never sees
    it: its changes come from the guest (:meth:`hold_changes`). It is known once the backend has started."""
    versions: Mapping[str, str] = MappingProxyType({})
    """The versions of what it runs on, by name, once it is started: the runtime, the engine."""
    known_failures: Mapping[str, str] = MappingProxyType({})
    """Checks of the conformance kit that it does not pass, ``test_name`` or ``test_name[parameter]``, each with why."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Prepare the backend: called once, before everything else, and cheap when nothing has to be done.

        Raises :class:`BackendError` when the technology is missing or unusable; the message says what to do about it.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of connections and threads. Sandboxes keep running; their commands too.

        Called once, also after a start that failed: what that made on the host and nothing uses goes.
        """

    @abc.abstractmethod
    async def ping(self) -> None:
        """Raise :class:`BackendError` when the runtime is unreachable; the message says what to do about it."""

    @abc.abstractmethod
    async def resolve_image(self, name: str) -> ResolvedImage:
        """Name the content behind an image, so that later environments get the same. :class:`NotFoundError` else."""

    def pulls(self) -> Sequence[ImagePull]:
        """The images that calls under way wait for at this moment, which may take minutes."""
        return ()

    @abc.abstractmethod
    async def create(self, id: str, spec: SandboxSpec) -> None:
        """Start an isolated environment with an empty, writable ``/workspace`` owned by the sandbox user.

        Every limit in ``spec`` is applied, or :class:`UnsupportedError` is raised before any effect. On failure or
        cancellation nothing is left behind. When it returns, ``exec`` works.
        """

    @abc.abstractmethod
    async def destroy(self, id: str) -> None:
        """End every process of the environment and remove its storage. Works from every state.

        Calling it twice, or for an unknown id, succeeds. When it returns, no process of the guest runs; what remains
        to be removed goes in the background, and ``list_ids`` shows the id until it is gone.
        """

    async def create_from(self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace) -> None:
        """As :meth:`create`, with a workspace that begins as ``workspace`` shows it. What changes is the sandbox's own.

        Which of its forms is used, :attr:`projection` says; a copy is on the environment's disk when this returns. Of
        backends with the capability ``layered_workspace``, as the two methods below. The layers stay in use until
        ``list_ids`` does not show the environment any more. :class:`BackendError` when a layer is not there,
        :class:`LimitExceededError` when a copy does not fit. With the projection ``disk`` :class:`UnsupportedError`,
        before any effect, for a state that a drive cannot show: then it is imported.
        """
        raise UnsupportedError("layered_workspace", self.name)

    def hold_workspace(self, id: str) -> AbstractAsyncContextManager[HeldWorkspace]:
        """Freeze every process of a running environment and give its workspace as a directory, to be read only.

        They go on when the block is left, however it is left, and after a crash when the next server starts.
        :class:`ConflictError` when it is stopped, or when its processes cannot be frozen within seconds.
        """
        raise UnsupportedError("layered_workspace", self.name)

    def hold_changes(self, id: str) -> AbstractAsyncContextManager[str | None]:
        """Freeze every process of a running environment, and give the state that its workspace differs from.

        None for one that has no layers. In the block the workspace is read by :meth:`export_changes` or
        :meth:`export_workspace`. Inside a block of :meth:`checkpoint` it is a part of that. Of the projection ``disk``,
        in place of :meth:`hold_workspace`, whose errors it has.
        """
        raise UnsupportedError("layered_workspace", self.name)

    async def export_changes(self, id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        """Write what differs from the state that :meth:`hold_changes` gave, in its block, as an OCI image layer.

        :class:`ConflictError`, before anything is written, for differences that a layer cannot express. Stops with
        :class:`PayloadTooLargeError` when the regular files in it hold more than ``max_bytes``.
        """
        raise UnsupportedError("layered_workspace", self.name)

    def checkpoint(self, id: str, dest: str) -> AbstractAsyncContextManager[HeldWorkspace | None]:
        """As :meth:`hold_workspace`, and keep what the processes have in memory; the caller commits it inside.

        Without the capability ``layered_workspace``, and with the projection ``disk``, it gives None: then the
        workspace is read inside the block by :meth:`export_workspace` or :meth:`hold_changes`, while no process but the
        daemon goes on. ``dest`` is an empty directory of the caller's, on this host. When the block is left without an
        error, memory and CPU state are written there and synced, together with what :meth:`restore` needs to know; then
        the processes go on. On failure ``dest`` holds nothing that counts, and they go on too.

        Of backends with the capability ``checkpoint``, as :meth:`restore`. :class:`ConflictError` for what cannot be
        kept, such as a file that is open and deleted; the message names it.
        """
        raise UnsupportedError("checkpoint", self.name)

    async def restore(self, id: str, spec: SandboxSpec, workspace: PreparedWorkspace, src: str) -> None:
        """As :meth:`create_from`, with processes that go on from the checkpoint in ``src``, which stays unchanged.

        ``workspace`` shows the state that was committed with it, and nothing else; where :meth:`checkpoint` gives None
        it is empty, and what was written to ``dest`` holds the workspace as well. Several
        environments may come from one checkpoint, at once too. :class:`ConflictError`, before any effect, for one of
        another runtime, version, machine or image; the message says which.
        """
        raise UnsupportedError("checkpoint", self.name)

    async def layers_in_use(self) -> set[str]:
        """The directories that environments, stopped ones included, have as layers: nobody may remove them."""
        raise UnsupportedError("layered_workspace", self.name)

    async def start_environment(self, id: str, workspace: PreparedWorkspace | None = None) -> None:
        """Start a stopped environment again: the same spec, image content and workspace, with an empty ``/tmp``.

        ``workspace`` shows what an environment of :meth:`create_from` began with: a backend with layers mounts these
        where they are not the same ones any more.
        Succeeds when it runs already. A failure leaves it stopped, the workspace kept. :class:`NotFoundError` for
        unknown ids, :class:`ConflictError` while another change of it is under way.
        """
        raise UnsupportedError("stop", self.name)

    async def stop_environment(self, id: str) -> None:
        """End every process of the environment and free what it holds of the host, but keep its workspace.

        Succeeds when it is stopped already. ``list_ids`` goes on showing it; commands and file operations fail with
        a typed error until :meth:`start_environment`. Errors as there.
        """
        raise UnsupportedError("stop", self.name)

    @abc.abstractmethod
    async def list_ids(self) -> list[str]:
        """Every environment id for which the backend still holds resources, stopped ones included."""

    @abc.abstractmethod
    async def is_running(self, id: str) -> bool:
        """Whether the environment exists and runs. ``False`` for unknown ids; never raises for them."""

    @abc.abstractmethod
    async def inspect(self, id: str) -> EnvironmentInfo:
        """What can be observed of the environment (limits, mounts, endpoint). :class:`NotFoundError` else."""

    @abc.abstractmethod
    def exec(
        self,
        id: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        workdir: str,
        timeout_seconds: float,
    ) -> AsyncGenerator[ExecEvent, None]:
        """Run a command as the sandbox user; yield :class:`ExecOutput` as it arrives, then one :class:`ExecExit`.

        ``env`` is the exec's own part: the backend puts it over the image's, ``HOME``, ``PATH`` and the spec's. On
        timeout every process that the command started is killed and ``timed_out`` is set. Closing the generator early
        kills the command's tree as well. A missing program is exit code 127 and one that cannot be executed 126, each
        with a message; a missing ``workdir`` raises :class:`InvalidRequestError` before the command starts.
        """

    @abc.abstractmethod
    async def read_file(self, id: str, path: str, max_bytes: int) -> bytes:
        """The bytes of a regular file; links are followed inside the sandbox.

        :class:`NotFoundError`; :class:`InvalidRequestError` for directories and special files;
        :class:`PayloadTooLargeError` above ``max_bytes``.
        """

    @abc.abstractmethod
    async def write_file(self, id: str, path: str, data: bytes, mode: int) -> FileEntry:
        """Create or replace a file beneath ``/workspace``, owned by the sandbox user; parents are created.

        A reader sees the old file or the new one. :class:`InvalidRequestError` when a link would lead out.
        """

    @abc.abstractmethod
    async def list_files(self, id: str, path: str) -> list[FileEntry]:
        """The direct children of a directory, dotfiles included, by name.

        :class:`NotFoundError`; :class:`InvalidRequestError` when it is no directory.
        """

    @abc.abstractmethod
    async def export_workspace(self, id: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        """Write ``/workspace`` as a tar stream, paths relative to it, modes kept.

        Stops with :class:`PayloadTooLargeError` when its regular files hold more than ``max_bytes``.
        """

    @abc.abstractmethod
    async def import_workspace(self, id: str, src: ByteSource, max_bytes: int) -> None:
        """Extract such a stream into the empty workspace of a freshly created environment."""

    # -- commands as objects ------------------------------------------------------------

    def open_exec(self, id: str, request: ExecRequest) -> AsyncGenerator[AttachEvent, None]:
        """Start a command that is kept under its id, as its one lossless reader.

        Yields :class:`ExecStarted`, output as it arrives, then one :class:`ExecExit`; a program that cannot be started
        gives only the exit, 127 or 126. A slow reader holds the command back. Closing the generator early ends the
        command's whole tree; a wire that breaks does not: the command goes on and :meth:`attach_exec` reads it.

        :class:`ConflictError` for an id that is taken, :class:`InvalidRequestError` for a missing ``workdir``,
        :class:`LimitExceededError` when the sandbox has no room for another command.
        """
        self._no_guest()

    async def start_exec(self, id: str, request: ExecRequest) -> int:
        """Start a command that nobody has to read, and return its pid once the program runs.

        It survives this process. One that cannot be started is an object too, whose pid is 0: it has ended with 127 or
        126 and a message. Its output goes to the ring, which keeps the newest 1 MiB. Errors as with :meth:`open_exec`.
        """
        self._no_guest()

    def attach_exec(
        self, id: str, exec_id: str, *, cursor: int = 0, follow: bool = True
    ) -> AsyncGenerator[AttachEvent, None]:
        """Read a command's output from the byte ``cursor`` on, then what comes, then its :class:`ExecExit`.

        :class:`ExecGap` stands for bytes that are no longer in the ring. Without ``follow`` it ends where the output
        ends now, with an exit only if the command has ended. A reader never holds the command back, and closing it
        changes nothing. Waits as long as the command does. :class:`NotFoundError` for an unknown ``exec_id``,
        :class:`InvalidRequestError` for a cursor ahead of the output.
        """
        self._no_guest()

    async def list_execs(self, id: str) -> list[ExecStatus]:
        """Every command that is kept, oldest first: those that run and the last 1,000 that ended.

        Works when the sandbox can start no process.
        """
        self._no_guest()

    async def exec_status(self, id: str, exec_id: str) -> ExecStatus:
        """One command. :class:`NotFoundError` when there is none of this id. Costs the same however many are kept."""
        self._no_guest()

    async def write_stdin(self, id: str, exec_id: str, src: ByteSource) -> int:
        """Send bytes to a command's standard input and return how many it took; the input stays open.

        Waits while the command does not read. One that ends when it has all that came by then took that, which may be
        less than ``src`` has. :class:`NotFoundError` when there is no such command, when it has ended, or when its
        standard input is closed or was never asked for.
        """
        self._no_guest()

    async def close_stdin(self, id: str, exec_id: str) -> None:
        """End a command's standard input behind what was sent before. Errors are those of :meth:`write_stdin`."""
        self._no_guest()

    async def signal_exec(self, id: str, exec_id: str, signal: int) -> int:
        """Send a signal (1 to 64) to every process of a command's tree; return how many that were.

        :class:`NotFoundError` when it has ended. Works when the sandbox can start no process.
        """
        self._no_guest()

    async def resize_exec(self, id: str, exec_id: str, size: TerminalSize) -> None:
        """Change the size of a command's terminal.

        :class:`InvalidRequestError` when it has none, :class:`NotFoundError` when it has ended.
        """
        self._no_guest()

    async def forget_exec(self, id: str, exec_id: str) -> None:
        """End a command with its whole tree if it runs, and forget it. :class:`NotFoundError` when there is none."""
        self._no_guest()

    # -- files in full -----------------------------------------------------------------

    async def stat_file(self, id: str, path: str, *, follow: bool = True) -> FileEntry:
        """One file's entry; links are followed inside the sandbox if ``follow``. :class:`NotFoundError` else."""
        self._no_guest()

    async def make_directory(self, id: str, path: str, mode: int, *, parents: bool = True) -> FileEntry:
        """Create a directory beneath ``/workspace``; with ``parents`` those too, and one that exists is fine.

        Without: :class:`ConflictError` for a name that is taken, :class:`NotFoundError` for a missing parent.
        """
        self._no_guest()

    async def move_file(self, id: str, source: str, target: str, *, replace: bool = True) -> FileEntry:
        """Give a file or directory beneath ``/workspace`` another name, as rename(2) does; return its new entry.

        :class:`ConflictError` where the target exists and ``replace`` is false, or is a directory that is not empty.
        """
        self._no_guest()

    async def remove_file(self, id: str, path: str, *, recursive: bool = False) -> int:
        """Remove a name beneath ``/workspace`` and return how many entries went; a link itself, not its target.

        :class:`ConflictError` for a directory that is not empty unless ``recursive``. The workspace itself stays.
        """
        self._no_guest()

    async def change_mode(self, id: str, path: str, mode: int) -> FileEntry:
        """Change the permission bits (at most 0o7777) of a file beneath ``/workspace``."""
        self._no_guest()

    def open_file(
        self, id: str, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Stream a regular file's bytes from ``offset`` on, at most ``length`` of them; nothing holds it whole.

        Errors are those of :meth:`read_file`, before the first byte; an offset behind the end gives no bytes.
        """
        self._no_guest()

    async def store_file(self, id: str, path: str, src: ByteSource, mode: int) -> FileEntry:
        """As :meth:`write_file`, from a stream that may be larger than memory.

        When ``src`` raises, nothing is written and the error passes through.
        """
        self._no_guest()

    async def export_directory(self, id: str, path: str, dest: ByteSink, max_bytes: int) -> ExportReport:
        """As :meth:`export_workspace`, for a directory beneath ``/workspace``; names are relative to it."""
        self._no_guest()

    async def import_directory(self, id: str, path: str, src: ByteSource, max_bytes: int) -> None:
        """Extract a tar stream into a directory beneath ``/workspace``, which is made where it is missing.

        Existing files are replaced. When ``src`` raises, the error passes through; what was extracted stays.
        """
        self._no_guest()

    def watch(
        self, id: str, path: str, *, recursive: bool = True, ready: asyncio.Event | None = None
    ) -> AsyncGenerator[FileChange | ChangesLost, None]:
        """Yield what changes beneath a directory of the sandbox, until the generator is closed.

        The first ``anext`` establishes the watch and waits for the first change; ``ready`` is set in between, when
        every later change will be seen. Nothing is yielded before. :class:`NotFoundError` and
        :class:`InvalidRequestError` for the path, :class:`LimitExceededError` above 16 watches or 8,192 directories.
        """
        self._no_guest()

    # -- ports and the daemon ------------------------------------------------------------

    async def dial(self, id: str, *, port: int | None = None, path: str | None = None) -> Tunnel:
        """Connect to a TCP port of the sandbox's loopback or to a unix socket inside; exactly one of both.

        Needs no network. :class:`NotFoundError` when nobody listens there.
        """
        self._no_guest()

    async def guest_stats(self, id: str) -> GuestStats:
        """What the daemon counts now."""
        self._no_guest()

    async def sync(self, id: str) -> None:
        """Return once everything written to the workspace's filesystem is on its storage."""
        self._no_guest()

    def _no_guest(self) -> NoReturn:
        raise UnsupportedError("guest", self.name)
