"""Projects, lines of published states: as :mod:`agent_sandbox.client.projects`, with coroutines."""

from __future__ import annotations

from agent_sandbox import models
from agent_sandbox.client import project_requests
from agent_sandbox.client.http import AsyncHttp
from agent_sandbox.client.local_files import Source, reading_off_the_loop


class AsyncClientProjects:
    """The part of :class:`~agent_sandbox.client.AsyncSandboxClient` that is about projects."""

    _http: AsyncHttp

    async def list_projects(self) -> list[models.Project]:
        """List the projects, each with its newest layer."""
        return await self._http.send(project_requests.list_projects())

    async def create_project(self, name: str, archive: Source | None = None) -> models.Project:
        """Make a project whose layer 0 is what is in a tar (a path, an open binary file, or pieces of bytes), plain or
        compressed; without one it is empty. :class:`ConflictError` when there is one of the name."""
        if archive is None:
            return await self._http.send(project_requests.create(name))
        async with reading_off_the_loop(archive, gather=True) as pieces:
            return await self._http.send(project_requests.create(name), pieces)

    async def get_project(self, name: str, limit: int | None = None) -> models.Project:
        """Look at a project with its newest layers; ``limit`` is 100 when left out, at most 1,000."""
        return await self._http.send(project_requests.get(name, limit))

    async def delete_project(self, name: str) -> None:
        """Delete a project with its layers. Sandboxes that started from it live on."""
        await self._http.send(project_requests.delete(name))

    async def add_layer(
        self, name: str, state: models.Snapshot | str, *, idempotency_key: str | None = None
    ) -> models.LayerAdded:
        """Publish a state as the next layer of a project: a sandbox's or snapshot's id, or a reference.

        It must come from the newest layer: :class:`ConflictError` when the line has moved meanwhile. Doing it again
        changes nothing.
        """
        return await self._http.send(project_requests.add(name, state, idempotency_key))
