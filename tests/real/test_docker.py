"""The Docker backend on a real engine: images of every kind, neighbours, networks, and engines that end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent_sandbox.backends.docker import DockerBackend
from agent_sandbox.config import load_settings
from agent_sandbox.conformance.box import Box
from agent_sandbox.errors import BackendError, ConflictError, NotFoundError, UnsupportedError
from agent_sandbox.types import PreparedWorkspace, SandboxSpec
from tests import dockerd
from tests.real.rootfs import build_rootfs
from tests.unit.images_harness import LayoutBuilder, member, serving, tagged

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SPEC = SandboxSpec("host", "", cpus=1.0, memory_mb=128, pids_limit=64, disk_mb=32, tmp_mb=16)


def docker(host: str, *arguments: str, data: bytes | None = None) -> str:
    """What a docker command prints; it must succeed."""
    done = subprocess.run(["docker", "--host", host, *arguments], input=data, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def new_id() -> str:
    return f"sbdk{secrets.token_hex(4)}-1"


class Maker:
    """Backends that end with the test, and leave nothing."""

    def __init__(self, tmp_path: Path, host: str) -> None:
        self._tmp_path, self.host = tmp_path, host
        self.made: list[DockerBackend] = []

    async def backend(self, data: str = "data", **settings: Any) -> DockerBackend:
        values = {"data_dir": self._tmp_path / data, "docker_host": self.host, **settings}
        backend = DockerBackend(load_settings(values, {}))
        try:
            await backend.start()
        except BackendError:
            await backend.close()
            raise
        self.made.append(backend)
        return backend

    async def close(self) -> None:
        for backend in self.made:
            await emptied(backend)
            await backend.close()


async def emptied(backend: DockerBackend) -> None:
    for id in await backend.list_ids():
        await backend.destroy(id)
    async with asyncio.timeout(60):
        while await backend.list_ids():
            await asyncio.sleep(0.1)


@pytest_asyncio.fixture
async def maker(tmp_path: Path, docker_host: str) -> AsyncIterator[Maker]:
    maker = Maker(tmp_path, docker_host)
    try:
        yield maker
    finally:
        await maker.close()


async def box(backend: DockerBackend, spec: SandboxSpec = SPEC, layers: tuple[str, ...] = ()) -> Box:
    id = new_id()
    if layers:
        await backend.create_from(id, spec, PreparedWorkspace(layers))
    else:
        await backend.create(id, spec)
    return Box(backend, id, spec)


def image(spec: SandboxSpec, name: str, digest: str = "") -> SandboxSpec:
    return dataclasses.replace(spec, image=name, image_digest=digest)


# -- neighbours ------------------------------------------------------------------------------


async def test_what_has_a_sandboxs_name_is_left_alone(maker: Maker) -> None:
    backend = await maker.backend()
    theirs = await box(backend)
    id = new_id()
    name = docker(maker.host, "inspect", "--format", "{{.Image}}", f"asb-{theirs.id}")
    foreign = docker(maker.host, "create", "--name", f"asb-{id}", name, "/none")
    try:
        with pytest.raises(ConflictError, match=f"asb-{id}"):
            await backend.create(id, SPEC)
        assert await backend.list_ids() == [theirs.id]
        await backend.destroy(id)
        assert docker(maker.host, "inspect", "--format", "{{.Id}}", f"asb-{id}") == foreign
    finally:
        docker(maker.host, "rm", "-f", foreign)


async def test_an_image_that_has_a_sandboxs_labels_makes_no_container_one(maker: Maker) -> None:
    """Whoever keeps a sandbox as an image keeps its labels, and has them on each container of that image."""
    backend = await maker.backend()
    mine = await box(backend)
    name = f"kept-{secrets.token_hex(4)}:1"
    with forgotten(maker.host, name):
        docker(maker.host, "commit", "--pause=false", f"asb-{mine.id}", name)
        labels = docker(maker.host, "inspect", "--format", "{{json .Config.Labels}}", name)
        assert json.loads(labels)["io.agent-sandbox.id"] == mine.id
        foreign = docker(maker.host, "create", name, "/none")
        try:
            await backend.destroy(mine.id)
            await emptied(backend)
            assert docker(maker.host, "inspect", "--format", "{{.Id}}", foreign) == foreign
        finally:
            docker(maker.host, "rm", "-f", foreign)


async def test_a_sandbox_that_was_renamed_is_removed_all_the_same(maker: Maker) -> None:
    backend = await maker.backend()
    mine = await box(backend)
    cid = docker(maker.host, "inspect", "--format", "{{.Id}}", f"asb-{mine.id}")
    docker(maker.host, "rename", cid, f"renamed-{mine.id}")
    again = await maker.backend()  # which has it from the record alone
    await again.destroy(mine.id)
    await emptied(again)
    assert docker(maker.host, "ps", "-aq", "--no-trunc", "--filter", f"id={cid}") == ""


async def test_two_servers_on_one_engine_know_only_their_own(maker: Maker) -> None:
    one, two = await maker.backend("one"), await maker.backend("two")
    mine, theirs = await box(one), await box(two)
    assert (await one.list_ids(), await two.list_ids()) == ([mine.id], [theirs.id])
    with pytest.raises(NotFoundError):
        await one.inspect(theirs.id)
    await one.destroy(theirs.id)
    assert await theirs.shell("echo alive") == "alive\n"
    with pytest.raises(ConflictError):
        await one.create(theirs.id, SPEC)
    assert await theirs.shell("echo alive") == "alive\n"


async def test_nothing_secret_is_told_to_the_engine(maker: Maker) -> None:
    secret = f"secret-{secrets.token_hex(8)}"
    backend = await maker.backend()
    made = await box(backend, dataclasses.replace(SPEC, env={"TOKEN": secret}))
    endpoint = await backend.endpoint(made.id)
    endpoint.socket.close()
    seen = docker(maker.host, "inspect", f"asb-{made.id}") + docker(maker.host, "logs", f"asb-{made.id}")
    assert await made.shell("echo $TOKEN") == f"{secret}\n"
    for word in (secret, endpoint.key.hex()):
        assert word not in seen
    labels = json.loads(docker(maker.host, "inspect", "--format", "{{json .Config.Labels}}", f"asb-{made.id}"))
    assert labels["io.agent-sandbox.instance"] == backend.instance
    assert labels["io.agent-sandbox.id"] == made.id


# -- images ----------------------------------------------------------------------------------


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """``own`` wants an entrypoint, a user and volumes of its own, ``bare`` has no shell, ``other`` another machine.

    ``within`` has a volume in the workspace.
    """
    builder = LayoutBuilder(tmp_path / "layout")
    root = build_rootfs(tmp_path / "root")
    full = builder.layer(_packed(root, tmp_path / "root.tar"))
    config = {
        "Entrypoint": ["/bin/false"],
        "Cmd": ["never"],
        "User": "4242:4242",
        "Env": ["FROM_IMAGE=yes", "PATH=/bin"],
        "Volumes": {"/data": {}, "/workspace": {}, "/tmp/cache": {}, "/run/tool": {}},
        "WorkingDir": "/nowhere",
        "Labels": {"traefik.enable": "true", "io.agent-sandbox.id": "another"},
        "Healthcheck": {"Test": ["CMD", "/bin/false"], "Interval": 1_000_000_000},
    }
    daemon = Path(_daemon()).read_bytes()
    bare = builder.layer([member("tool", data=daemon, mode=0o755)])
    return builder.finish(
        tagged(builder.manifest([full], config), "own"),
        tagged(builder.manifest([bare]), "bare"),
        tagged(builder.manifest([bare], {"Volumes": {"/workspace/sub": {}}}), "within"),
        tagged(builder.manifest([bare], architecture="s390x"), "other"),
    )


def _packed(root: Path, tar: Path) -> bytes:
    subprocess.run(["tar", "-C", str(root), "-cf", str(tar), "."], check=True)
    return tar.read_bytes()


def _daemon() -> str:
    import agent_sandbox_engine

    return str(agent_sandbox_engine.sandboxd_path())


@contextlib.contextmanager
def forgotten(host: str, *names: str) -> Iterator[None]:
    """Images that the engine has no longer afterwards."""
    try:
        yield
    finally:
        subprocess.run(["docker", "--host", host, "rmi", "-f", *names], capture_output=True, check=False)


async def test_an_image_is_pulled_pinned_and_its_own_wishes_are_not_obeyed(maker: Maker, layout: Path) -> None:
    backend = await maker.backend()
    with serving(layout) as registry, forgotten(maker.host, f"{registry.host}/tools:own"):
        name = f"{registry.host}/tools:own"
        resolved = await backend.resolve_image(name)
        assert resolved.pinned
        assert resolved.digest == docker(maker.host, "inspect", "--format", "{{.Id}}", name)
        assert resolved.env["FROM_IMAGE"] == "yes"
        with pytest.raises(NotFoundError):
            await backend.resolve_image(f"{registry.host}/tools:none")
        made = await box(backend, image(SPEC, name, resolved.digest))
        assert await made.shell("id -u; echo $FROM_IMAGE; pwd; cat /data/lower") == "1000\nyes\n/workspace\nlower\n"
        assert (await made.run("echo x > /data/lower")).status != 0  # its volume has no limit, so it is read-only
        assert (await made.run("echo x > /new")).status != 0
        labels = json.loads(docker(maker.host, "inspect", "--format", "{{json .Config.Labels}}", f"asb-{made.id}"))
        assert (labels["traefik.enable"], labels["io.agent-sandbox.id"]) == ("", made.id)
        mounted = [
            line.split() for line in (await made.shell("echo x > /tmp/cache/x; cat /proc/self/mounts")).splitlines()
        ]
        assert {place: kind for _, place, kind, *_ in mounted if place in ("/tmp/cache", "/run/tool")} == {
            "/tmp/cache": "tmpfs",
            "/run/tool": "tmpfs",
        }
        await emptied(backend)
        left = docker(
            maker.host, "volume", "ls", "-q", "--filter", f"label=io.agent-sandbox.instance={backend.instance}"
        )
        assert left == ""


async def test_an_image_whose_volume_would_be_in_the_workspace_is_refused(maker: Maker, layout: Path) -> None:
    backend = await maker.backend()
    with serving(layout) as registry, forgotten(maker.host, f"{registry.host}/tools:within"):
        resolved = await backend.resolve_image(f"{registry.host}/tools:within")
        with pytest.raises(UnsupportedError, match="/workspace/sub"):
            await box(backend, image(SPEC, resolved.name, resolved.digest))
        assert await backend.list_ids() == []


async def test_an_image_without_a_shell_runs_what_it_has(maker: Maker, layout: Path) -> None:
    backend = await maker.backend()
    with serving(layout) as registry, forgotten(maker.host, f"{registry.host}/tools:bare"):
        resolved = await backend.resolve_image(f"{registry.host}/tools:bare")
        made = await box(backend, image(SPEC, resolved.name, resolved.digest))
        assert (await made.run(["/tool", "--version"])).text.startswith("sandboxd ")
        missing = await made.run("true")
        assert (missing.exit.code, "/bin/sh" in missing.exit.message) == (127, True)
        await made.put("f", b"1")
        assert await made.get("f") == b"1"


async def test_an_image_for_another_architecture_is_refused(maker: Maker, layout: Path) -> None:
    backend = await maker.backend()
    with serving(layout) as registry, forgotten(maker.host, f"{registry.host}/tools:other"):
        name = f"{registry.host}/tools:other"
        with pytest.raises((UnsupportedError, NotFoundError), match=r"s390x|architecture"):
            await backend.resolve_image(name)
        subprocess.run(["docker", "--host", maker.host, "pull", "--platform", "linux/s390x", name], check=True)
        with pytest.raises(UnsupportedError, match="s390x"):
            await backend.resolve_image(name)
        with pytest.raises(UnsupportedError, match="s390x"):
            await backend.create(new_id(), image(SPEC, name))
    assert await backend.list_ids() == []


async def test_an_image_that_vanished_is_told_and_leaves_nothing(maker: Maker, tmp_path: Path) -> None:
    backend = await maker.backend()
    name = f"asb-test-vanishing:{secrets.token_hex(4)}"
    docker(maker.host, "import", "-", name, data=_packed(build_rootfs(tmp_path / "root"), tmp_path / "root.tar"))
    resolved = await backend.resolve_image(name)
    docker(maker.host, "rmi", name)
    with pytest.raises(NotFoundError, match="image"):
        await backend.create(new_id(), image(SPEC, name, resolved.digest))
    assert await backend.list_ids() == []


async def test_a_writable_root_is_had_where_no_limit_is_accepted(maker: Maker, tmp_path: Path) -> None:
    name = f"asb-test-writable:{secrets.token_hex(4)}"
    docker(maker.host, "import", "-", name, data=_packed(build_rootfs(tmp_path / "root"), tmp_path / "root.tar"))
    with forgotten(maker.host, name):
        strict = await maker.backend("strict")
        spec = dataclasses.replace(image(SPEC, name), read_only_rootfs=False)
        with pytest.raises(UnsupportedError, match="ALLOW_UNENFORCED"):
            await strict.create(new_id(), spec)
        loose = await maker.backend("loose", allow_unenforced="true")
        made = await box(loose, spec)
        assert await made.shell("echo changed > /data/lower; cat /data/lower") == "changed\n"
        await emptied(loose)


# -- what becomes of a sandbox whose container or engine ends ----------------------------------


async def test_a_container_that_ended_is_a_stopped_sandbox_and_starts_again(maker: Maker, tmp_path: Path) -> None:
    backend = await maker.backend()
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    (tmp_path / "layer").mkdir()
    (tmp_path / "layer" / "below").write_text("below\n")
    os.chown(tmp_path / "layer", SPEC.uid, SPEC.gid)
    plain, layered = await box(backend), await box(backend, layers=(str(tmp_path / "layer"),))
    for made, how in ((plain, "kill"), (layered, "rm")):
        await made.shell("echo kept > f; sync")
        docker(maker.host, how, *(["-f"] if how == "rm" else []), f"asb-{made.id}")
        assert not await backend.is_running(made.id)
        assert made.id in await backend.list_ids()
        with pytest.raises((BackendError, ConflictError)):
            await made.run(["true"])
        await backend.start_environment(made.id)
        assert await made.shell("cat f") == "kept\n"
    assert await layered.shell("cat below") == "below\n"


async def test_an_engine_that_dies_and_comes_back(tmp_path: Path) -> None:
    """Killed, its containers go on; ended in order, they end too. Nothing is lost, and what is said is true."""
    with dockerd.private_engine("--iptables=false") as engine:
        maker = Maker(tmp_path, engine.host)
        backend = await maker.backend()
        first, second = await box(backend), await box(backend)
        await first.shell("echo kept > f")
        engine.end(signal.SIGKILL)
        with pytest.raises(BackendError, match="no Docker engine answers"):
            await backend.ping()
        with pytest.raises(BackendError):
            await backend.list_ids()
        assert await first.shell("cat f") == "kept\n"  # nothing of the engine is on this way
        with pytest.raises(BackendError):
            await backend.create(new_id(), SPEC)
        with contextlib.suppress(BackendError):
            await backend.destroy(second.id)
        await asyncio.to_thread(engine.start)
        await backend.ping()
        assert first.id in await backend.list_ids()
        await asyncio.to_thread(engine.end)
        await asyncio.to_thread(engine.start)
        successor = await maker.backend()
        assert not await successor.is_running(first.id)
        await successor.start_environment(first.id)
        assert await Box(successor, first.id, SPEC).shell("cat f") == "kept\n"
        await maker.close()
        assert docker(engine.host, "ps", "-aq") == ""
        assert docker(engine.host, "volume", "ls", "-q") == ""


def theirs(layer: Path) -> None:
    """Give a layer to the sandbox user, as a manager lays it out."""
    for path in (layer, *layer.rglob("*")):
        os.chown(path, SPEC.uid, SPEC.gid)


async def test_one_that_is_stopped_starts_over_layers_that_were_laid_out_again(maker: Maker, tmp_path: Path) -> None:
    """Somebody removed them: the same state comes back as other files, in another place and in another number."""
    backend = await maker.backend()
    low, high = tmp_path / "low", tmp_path / "high"
    for layer, name in ((low, "one"), (high, "two")):
        (layer / "d").mkdir(parents=True)
        (layer / "d" / name).write_text(f"{name}\n")
        theirs(layer)
    made = await box(backend, layers=(str(high), str(low)))
    await made.shell("echo more >> d/one; mv d e; echo new > f")

    async def again(*layers: Path) -> None:
        await backend.stop_environment(made.id)
        for gone in (low, high):
            shutil.rmtree(gone, ignore_errors=True)
        await backend.start_environment(made.id, PreparedWorkspace(tuple(map(str, layers))))
        assert await made.shell("cat e/one e/two f; ls") == "one\nmore\ntwo\nnew\ne\nf\n"
        assert await backend.layers_in_use() == set(map(str, layers))

    copies = tmp_path / "copy", tmp_path / "again"
    for copy in copies:
        shutil.copytree(low, copy)
        shutil.copytree(high, copy, dirs_exist_ok=True)
        theirs(copy)
    await again(copies[0])
    await backend.stop_environment(made.id)
    shutil.rmtree(copies[0])
    copies[1].rename(copies[0])
    await again(copies[0])  # the same name, and other files


async def test_a_workspace_whose_root_is_closed_begins_so(maker: Maker, tmp_path: Path) -> None:
    backend = await maker.backend()
    layer = tmp_path / "layer"
    layer.mkdir()
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    (layer / "f").write_text("f\n")
    os.utime(layer, ns=(0, 987_654_321_123_456_789))
    layer.chmod(0o555)
    made = await box(backend, layers=(str(layer),))
    assert await made.shell("stat -c '%a %u %Y' .; ls -A; touch x 2>/dev/null || echo closed") == (
        "555 0 987654321\nf\nclosed\n"
    )


# -- the network -----------------------------------------------------------------------------

TRY = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.rsplit(':', 1)
    try:
        socket.create_connection((host, int(port)), 2); print('reached', address)
    except OSError as error:
        print('not')
"""


async def test_a_network_reaches_neither_the_host_nor_neighbours_nor_link_local(maker: Maker) -> None:
    name = f"asb-test-{secrets.token_hex(4)}"
    backend = await maker.backend(network_name=name)
    if "full" not in backend.capabilities.network:
        pytest.fail(backend.capabilities.notes["network"])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    spec = dataclasses.replace(SPEC, network="full")
    try:
        one, two = await box(backend, spec), await box(backend, spec)
        addresses = {}
        for made in (one, two):
            found = docker(maker.host, "inspect", "--format", "{{json .NetworkSettings.Networks}}", f"asb-{made.id}")
            (addresses[made.id],) = json.loads(found).values()
        assert "eth0" in await one.shell("cat /proc/net/dev")
        assert "eth0" not in (await one.run("cat /proc/net/if_inet6")).text  # the rules are for IPv4 alone
        gateway, neighbour = addresses[one.id]["Gateway"], addresses[two.id]["IPAddress"]
        server = await asyncio.start_server(answer, "0.0.0.0", 0)
        port = server.sockets[0].getsockname()[1]
        listening = asyncio.create_task(two.run(["python3", "-m", "http.server", "8000"], timeout=60))
        for _ in range(100):
            with contextlib.suppress(ConflictError, BackendError, NotFoundError):
                (await backend.dial(two.id, port=8000)).close()
                break
            await asyncio.sleep(0.1)
        async with server:
            tried = [f"{gateway}:{port}", f"{neighbour}:8000", "169.254.169.254:80"]
            result = await one.run(["python3", "-c", TRY, *tried], timeout=30)
            itself = await two.run(["python3", "-c", TRY, f"{neighbour}:8000"], timeout=30)
        assert result.text == "not\nnot\nnot\n"
        assert itself.text == f"reached {neighbour}:8000\n"
        listening.cancel()
        await asyncio.wait([listening])
    finally:
        await emptied(backend)
        subprocess.run(["docker", "--host", maker.host, "network", "rm", name], capture_output=True, check=False)
        for rule in _rules(name):
            subprocess.run(["iptables", "-w", "10", "-D", *rule], capture_output=True, check=False)


def _rules(name: str) -> list[tuple[str, ...]]:
    from agent_sandbox.backends.docker.engine import Engine
    from agent_sandbox.backends.docker.networks import Network, rules

    return rules(Network(Engine("unix:///nobody"), name).bridge)


async def test_a_network_of_somebody_else_is_not_used(maker: Maker) -> None:
    name = f"asb-test-{secrets.token_hex(4)}"
    docker(maker.host, "network", "create", name)
    try:
        backend = await maker.backend(network_name=name)
        assert backend.capabilities.network == {"none"}
        with pytest.raises(UnsupportedError, match=name):
            await backend.create(new_id(), dataclasses.replace(SPEC, network="full"))
    finally:
        docker(maker.host, "network", "rm", name)


async def test_a_runtime_that_the_engine_has_not_is_told(maker: Maker) -> None:
    with pytest.raises(BackendError, match="AGENT_SANDBOX_DOCKER_RUNTIME"):
        await maker.backend(docker_runtime="no-such-runtime")


async def test_no_mount_and_no_directory_is_left(maker: Maker, tmp_path: Path) -> None:
    backend = await maker.backend()
    made = await box(backend)
    await backend.stop_environment(made.id)
    assert str(backend._places.box / made.id) not in Path("/proc/self/mountinfo").read_text()
    await emptied(backend)
    await backend.close()
    maker.made.remove(backend)
    assert not backend._places.run.exists()
    assert str(backend._places.run) not in Path("/proc/self/mountinfo").read_text()
    assert list(backend._places.environments.iterdir()) == []
