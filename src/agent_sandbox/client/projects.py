"""Projects, lines of published states: the part of the SDK for code that blocks."""

from __future__ import annotations

from agent_sandbox import models
from agent_sandbox.client import project_requests
from agent_sandbox.client.http import Http
from agent_sandbox.client.local_files import Source, reading


class ClientProjects:
    """The part of :class:`~agent_sandbox.client.SandboxClient` that is about projects."""

    _http: Http

    def list_projects(self) -> list[models.Project]:
        """List the projects, each with its newest layer."""
        return self._http.send(project_requests.list_projects())

    def create_project(self, name: str, archive: Source | None = None) -> models.Project:
        """Make a project whose layer 0 is what is in a tar (a path, an open binary file, or pieces of bytes), plain or
        compressed; without one it is empty. :class:`ConflictError` when there is one of the name."""
        if archive is None:
            return self._http.send(project_requests.create(name))
        with reading(archive, gather=True) as pieces:
            return self._http.send(project_requests.create(name), pieces)

    def get_project(self, name: str, limit: int | None = None) -> models.Project:
        """Look at a project with its newest layers; ``limit`` is 100 when left out, at most 1,000."""
        return self._http.send(project_requests.get(name, limit))

    def delete_project(self, name: str) -> None:
        """Delete a project with its layers. Sandboxes that started from it live on."""
        self._http.send(project_requests.delete(name))

    def add_layer(
        self, name: str, state: models.Snapshot | str, *, idempotency_key: str | None = None
    ) -> models.LayerAdded:
        """Publish a state as the next layer of a project: a sandbox's or snapshot's id, or a reference.

        It must come from the newest layer: :class:`ConflictError` when the line has moved meanwhile. Doing it again
        changes nothing.
        """
        return self._http.send(project_requests.add(name, state, idempotency_key))
