"""The SDK for code that blocks: :class:`SandboxClient` for a server, :class:`Sandbox` for one sandbox of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from agent_sandbox import models
from agent_sandbox.client import history_requests, requests
from agent_sandbox.client.execution import SandboxCommands
from agent_sandbox.client.files import SandboxFiles
from agent_sandbox.client.history import ClientHistory, SandboxHistory
from agent_sandbox.client.http import Http
from agent_sandbox.client.projects import ClientProjects
from agent_sandbox.errors import NotFoundError
from agent_sandbox.types import IsolationClass


class Sandbox(SandboxCommands, SandboxFiles, SandboxHistory):
    """One sandbox on a server; as a context manager it is destroyed at the end.

    ``data`` is the server's last word on it, ``info`` the same as a typed shape.
    """

    def __init__(self, client: SandboxClient, data: dict[str, Any], *, owns_client: bool = False) -> None:
        self._client = client
        self._http = client._http
        self._owns_client = owns_client
        self._update(data)

    @classmethod
    def create(cls, image: str | None = None, **options: Any) -> Sandbox:
        """Create a sandbox on the server that the environment names; takes what :meth:`SandboxClient.create` takes.

        Its connection is closed when it is destroyed.
        """
        client = SandboxClient()
        try:
            sandbox = client.create(image, **options)
        except BaseException:
            client.close()
            raise
        sandbox._owns_client = True
        return sandbox

    def _update(self, data: dict[str, Any]) -> None:
        self.info = models.Sandbox.from_json(data)
        self.data = data

    @property
    def id(self) -> str:
        """The id, such as ``sb4f1c…``."""
        return self.info.id

    @property
    def status(self) -> str:
        """``running`` or ``stopped``, as of the last reply."""
        return self.info.status

    @property
    def image(self) -> str:
        """The image it was made from."""
        return self.info.image

    @property
    def expires_at(self) -> str:
        """When it will be destroyed (RFC 3339), as of the last reply."""
        return self.info.expires_at

    def __repr__(self) -> str:
        return f"Sandbox(id={self.id!r}, image={self.image!r}, status={self.status!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.destroy()
        except NotFoundError:
            pass

    def refresh(self) -> Self:
        """Ask the server for its present state."""
        self._update(self._http.send(requests.get(self.id)))
        return self

    def snapshot(
        self, name: str | None = None, *, memory: bool = False, idempotency_key: str | None = None
    ) -> models.Snapshot:
        """Keep the state of the workspace; it outlives the sandbox.

        With ``memory`` what its processes have in memory is kept as well, where the backend can; they go on meanwhile.
        """
        call = requests.snapshot(self.id, name, memory=memory, idempotency_key=idempotency_key)
        return self._http.send(call)

    def rollback(self, snapshot: models.Snapshot | str, *, memory: bool | None = None) -> Self:
        """Go back to a snapshot: every process ends, the id stays.

        Where the snapshot has memory, its processes go on from where they were, unless ``memory`` is false.
        """
        self._update(self._http.send(requests.rollback(self.id, snapshot, memory=memory)))
        return self

    def merge(self, snapshot: models.Snapshot | str) -> models.MergeResult:
        """Bring in what a snapshot, such as one of a fork, changed since both had a common state; processes end.

        A layer of a project, ``NAME@N``, will do as well. The result's ``outcome`` says whether it was done: conflicts
        change nothing.
        """
        done = self._http.send(history_requests.merge(self.id, snapshot))
        result = models.MergeResult.from_json(done)
        self._update(done["sandbox"])
        return result

    def stop(self) -> Self:
        """End every process and keep the workspace; nothing happens to a stopped one."""
        self._update(self._http.send(requests.stop(self.id)))
        return self

    def start(self) -> Self:
        """Start a stopped sandbox again, with its workspace and an empty ``/tmp``; nothing happens to a running one."""
        self._update(self._http.send(requests.start(self.id)))
        return self

    def stats(self) -> models.SandboxStats:
        """Ask what it uses now."""
        return self._http.send(requests.stats(self.id))

    def set_timeout(self, timeout_seconds: int) -> Self:
        """Set the time to live in seconds, counted from now."""
        self._update(self._http.send(requests.set_timeout(self.id, timeout_seconds)))
        return self

    def destroy(self) -> None:
        """End every process and remove the sandbox. Its snapshots remain."""
        try:
            self._http.send(requests.destroy(self.id))
        finally:
            if self._owns_client:
                self._client.close()


class SandboxClient(ClientHistory, ClientProjects):
    """A connection to a server, as a context manager closed at the end.

    ``base_url`` (``http(s)://HOST:PORT`` or ``unix:///PATH``) and ``api_key`` default to ``AGENT_SANDBOX_URL`` and
    ``AGENT_SANDBOX_API_KEY``; ``uds`` is the path of a unix socket. ``timeout`` in seconds holds for every call but
    commands, which are waited for as long as they may run. Every method raises the server's errors as the classes of
    :mod:`agent_sandbox.errors`, and :class:`ServerUnreachableError` or :class:`ReplyLostError`.

    What creates something sends an ``Idempotency-Key`` (``idempotency_key``, or one made up for the call) and is sent
    again under it when the connection breaks, so that it is created once. Nothing else is ever sent twice.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 300.0,
        uds: str | os.PathLike[str] | None = None,
        http_client: httpx.Client | None = None,
    ) -> None:
        self._http = Http(base_url, api_key, timeout=timeout, uds=uds, http_client=http_client)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection. Sandboxes live on."""
        self._http.close()

    def health(self) -> dict[str, Any]:
        """Ask whether the server and its default backend answer. Needs no key."""
        return self._http.send(requests.health())

    def backends(self) -> list[models.Backend]:
        """List what the server can isolate with, and how well."""
        return self._http.send(requests.backends())

    def create(
        self,
        image: str | None = None,
        *,
        cpus: float | None = None,
        memory_mb: int | None = None,
        pids_limit: int | None = None,
        disk_mb: int | None = None,
        network: bool = False,
        read_only_rootfs: bool = True,
        timeout_seconds: int | None = None,
        env: Mapping[str, str] | None = None,
        backend: str | None = None,
        min_isolation: IsolationClass | None = None,
        metadata: Mapping[str, str] | None = None,
        from_: models.Snapshot | str | None = None,
        project: str | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Create and start a sandbox. What is ``None`` is the server's default; ``metadata`` are labels of your own.

        ``from_`` is what the workspace begins as: a snapshot, ``NAME`` (the newest layer of a project), ``NAME@N``,
        ``NAME:BRANCH`` or a commit's id. ``project="NAME"`` alone is the same as ``from_="NAME"``; beside it ``from_``
        may be a layer's number or a branch's name. Everything else is as said here, not as in the snapshot's sandbox.
        """
        call = requests.create(
            image,
            network=network,
            read_only_rootfs=read_only_rootfs,
            env=env,
            cpus=cpus,
            memory_mb=memory_mb,
            pids_limit=pids_limit,
            disk_mb=disk_mb,
            timeout_seconds=timeout_seconds,
            backend=backend,
            min_isolation=min_isolation,
            metadata=metadata,
            source=from_,
            project=project,
            idempotency_key=idempotency_key,
        )
        return Sandbox(self, self._http.send(call))

    def get(self, sandbox_id: str) -> Sandbox:
        """Find a sandbox by its id."""
        return Sandbox(self, self._http.send(requests.get(sandbox_id)))

    def list_sandboxes(self, metadata: Mapping[str, str] | None = None) -> list[Sandbox]:
        """List the sandboxes that are alive, of all or of those that have every one of these labels."""
        return [Sandbox(self, data) for data in self._http.send(requests.list_sandboxes(metadata))]

    def list_snapshots(self, sandbox_id: str | None = None, *, auto: bool = False) -> list[models.Snapshot]:
        """List snapshots, of one sandbox or of all; with ``auto`` those too that rollbacks made: undo by them."""
        return self._http.send(requests.list_snapshots(sandbox_id, auto))

    def get_snapshot(self, snapshot_id: str) -> models.Snapshot:
        """Find a snapshot by its id."""
        return self._http.send(requests.get_snapshot(snapshot_id))

    def delete_snapshot(self, snapshot: models.Snapshot | str) -> None:
        """Delete a snapshot."""
        self._http.send(requests.delete_snapshot(snapshot))

    def fork(
        self,
        snapshot: models.Snapshot | str,
        *,
        timeout_seconds: int | None = None,
        network: bool | None = None,
        cpus: float | None = None,
        memory_mb: int | None = None,
        backend: str | None = None,
        memory: bool | None = None,
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Create a sandbox whose workspace begins as a snapshot. What is ``None`` is the snapshot's.

        Where the snapshot has memory, its processes go on in the new sandbox as well, unless ``memory`` is false.
        """
        call = requests.fork(
            snapshot,
            timeout_seconds=timeout_seconds,
            network=network,
            cpus=cpus,
            memory_mb=memory_mb,
            backend=backend,
            memory=memory,
            metadata=metadata,
            idempotency_key=idempotency_key,
        )
        return Sandbox(self, self._http.send(call))
