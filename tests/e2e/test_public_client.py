"""The public client of this API, unchanged and in an environment of its own, against our server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.public_client import LIMITS, run_flow
from tests.e2e.serving import KEY, serving

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.mark.parametrize("backend", ["fake", "runc"])
def test_the_public_client_works_unchanged(backend: str, tmp_path: Path) -> None:
    with serving(tmp_path / "data", backend, **LIMITS) as server:
        assert run_flow(server.url, KEY, backend).endswith("done\n")
