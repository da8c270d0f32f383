"""The OpenAPI document as it is kept in ``spec/openapi.json``: ``python -m agent_sandbox.server.openapi`` prints it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from agent_sandbox.backends import make_backends
from agent_sandbox.config import Settings
from agent_sandbox.manager import Manager
from agent_sandbox.server.app import create_app


def openapi_document() -> str:
    """Write the document, always the same bytes for the same code: sorted keys, two spaces, a newline at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = Settings(data_dir=Path(scratch) / "data", backends=("fake",))
        app = create_app(Manager(settings, make_backends(settings)), settings)
        return json.dumps(app.openapi(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(openapi_document())
