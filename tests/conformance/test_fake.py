"""The backend in memory keeps the contract, so that what is tested on it holds elsewhere."""

import pathlib
from collections.abc import Sequence

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.fake import FakeBackend
from agent_sandbox.config import load_settings
from agent_sandbox.conformance import (
    BackendSuite,
    ChecklistSuite,
    ExecObjectSuite,
    FileOperationSuite,
    NoCheckpointSuite,
    NoLayerSuite,
    TunnelSuite,
)


class TestFake(
    BackendSuite, ChecklistSuite, ExecObjectSuite, FileOperationSuite, NoCheckpointSuite, NoLayerSuite, TunnelSuite
):
    def make_backend(self, tmp_path: pathlib.Path) -> Backend:
        return FakeBackend(load_settings({"data_dir": tmp_path}, {}))

    def echo_server(self, where: str) -> Sequence[str]:
        return ["echo-server", where]

    def out_of_memory(self) -> Sequence[str]:
        return ["hog"]

    async def reopened(self, backend: Backend, tmp_path: pathlib.Path) -> Backend:
        await backend.close()  # its environments live in the object
        return backend
