"""The backend in memory keeps the contract, so that what is tested on it holds elsewhere."""

import pathlib

from agent_sandbox.backends.base import Backend
from agent_sandbox.backends.fake import FakeBackend
from agent_sandbox.config import load_settings
from agent_sandbox.conformance import BackendSuite


class TestFake(BackendSuite):
    def make_backend(self, tmp_path: pathlib.Path) -> Backend:
        return FakeBackend(load_settings({"data_dir": tmp_path}, {}))
