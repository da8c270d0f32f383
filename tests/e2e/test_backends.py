"""Several backends in one server, on the real ones: choice, what stays apart, and one that is down."""

from __future__ import annotations

import pathlib
import signal

import pytest

from agent_sandbox.errors import ConflictError, InvalidRequestError, SandboxError, UnsupportedError
from tests.e2e.serving import serving

pytestmark = pytest.mark.real


def test_three_backends_share_a_server(tmp_path: pathlib.Path, docker_host: str) -> None:
    names = ["runc", "gvisor", "docker"]
    with (
        serving(tmp_path / "data", ",".join(names), docker_host=docker_host) as server,
        server.client() as client,
    ):
        shown = {backend.name: backend for backend in client.backends()}
        assert list(shown) == names
        assert [backend.default for backend in shown.values()] == [True, False, False]
        assert all(backend.healthy and backend.versions for backend in shown.values())
        assert {name: backend.capabilities.isolation for name, backend in shown.items()} == {
            "runc": "container",
            "gvisor": "gvisor",
            "docker": "container",
        }
        with pytest.raises(UnsupportedError, match="min_isolation vm"):
            client.create(min_isolation="vm")
        with pytest.raises(InvalidRequestError, match="backend is one of runc, gvisor, docker"):
            client.create(backend="podman")
        boxes = {name: client.create(backend=name, memory_mb=128, timeout_seconds=3000) for name in names}
        strong = client.create(min_isolation="gvisor", memory_mb=128)
        assert strong.info.backend == "gvisor"
        jobs = {}
        for name, box in boxes.items():
            assert box.info.backend == name
            box.write_file("/workspace/from", name.encode())
            jobs[name] = box.start_exec("sleep 600")
        server.stop(signal.SIGKILL)
        server.start()
        assert {box.id for box in client.list_sandboxes()} == {strong.id, *(box.id for box in boxes.values())}
        for name, box in boxes.items():
            assert box.read_file("/workspace/from") == name.encode()
            assert jobs[name].refresh().info.status == "running"
        snapshots = {name: box.snapshot() for name, box in boxes.items()}
        for source, target in (("runc", "gvisor"), ("gvisor", "docker"), ("docker", "runc")):
            with client.fork(snapshots[source], backend=target) as fork:
                assert fork.info.backend == target
                assert fork.exec("cat from; echo more >> from; cat from").stdout == f"{source}{source}more\n"
        boxes["docker"].rollback(snapshots["gvisor"])
        assert (boxes["docker"].info.backend, boxes["docker"].read_file("/workspace/from")) == ("docker", b"gvisor")
        kept = boxes["gvisor"].snapshot(memory=True)
        for name in ("runc", "docker"):
            with pytest.raises(UnsupportedError, match="checkpoint"):
                boxes[name].snapshot(memory=True)
            with pytest.raises(ConflictError, match="memory: false"):
                client.fork(kept, backend=name)
            with pytest.raises(ConflictError, match="memory: false"):
                boxes[name].rollback(kept)
            assert boxes[name].rollback(kept, memory=False).exec("cat from").stdout == "gvisor"
        assert len(client.list_sandboxes()) == 4


def test_one_backend_that_is_down_stops_no_other(tmp_path: pathlib.Path) -> None:
    down = f"unix://{tmp_path}/no-engine.sock"
    with serving(tmp_path / "data", "docker,runc", docker_host=down) as server, server.client() as client:
        assert client.health()["backend"] == "runc"
        first, second = client.backends()
        assert (first.name, first.default, first.healthy) == ("docker", True, False)
        assert first.message
        assert (second.name, second.healthy) == ("runc", True)
        assert second.versions["runc"]
        with pytest.raises(SandboxError, match="docker"):
            client.create()
        with client.create(backend="runc") as sandbox:
            sandbox.write_file("/workspace/f", b"kept")
            with client.fork(sandbox.snapshot(), timeout_seconds=3600) as fork:
                assert fork.read_file("/workspace/f") == b"kept"
        with client.create(min_isolation="container") as sandbox:
            assert sandbox.info.backend == "runc"
