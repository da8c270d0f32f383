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
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence

from agent_sandbox.types import (
    Capabilities,
    EnvironmentInfo,
    ExecEvent,
    ExportReport,
    FileEntry,
    ResolvedImage,
    SandboxSpec,
)

ByteSink = Callable[[bytes], Awaitable[None]]
"""Takes the next piece of a byte stream; slow sinks hold the stream back."""

ByteSource = AsyncIterator[bytes]
"""Yields a byte stream piece by piece."""


class Backend(abc.ABC):
    """One isolation technology. See the rules above; each method says what is particular to it."""

    name: str
    capabilities: Capabilities

    @abc.abstractmethod
    async def start(self) -> None:
        """Prepare the backend: called once, before everything else, and cheap when nothing has to be done.

        Raises :class:`BackendError` when the technology is missing or unusable; the message says what to do about it.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of connections and threads. Sandboxes keep running; their commands too."""

    @abc.abstractmethod
    async def ping(self) -> None:
        """Raise :class:`BackendError` when the runtime is unreachable; the message says what to do about it."""

    @abc.abstractmethod
    async def resolve_image(self, name: str) -> ResolvedImage:
        """Name the content behind an image, so that later environments get the same. :class:`NotFoundError` else."""

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
