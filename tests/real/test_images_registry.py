"""Pulling from a registry on loopback: by tag and digest, with credentials, and from registries that lie or hang."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.errors import BackendError, ForbiddenError, InvalidRequestError, LimitExceededError, NotFoundError
from agent_sandbox.images import ImageStore, Source, tools
from agent_sandbox.images.layout import this_platform
from tests.unit.images_harness import LayoutBuilder, Registry, left_over, member, on, serving, sha256, tagged

pytestmark = pytest.mark.real

SECRET = "the-password-of-the-registry"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "data")


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """Images for this machine (``1``, ``all``), for others (``other``, ``none``), and what is none (``chart``)."""
    builder = LayoutBuilder(tmp_path / "layout")
    layer = builder.layer([member("bin/tool", data=b"x" * 100_000)])
    mine = builder.manifest([layer], {"Env": ["A=1"]})
    other = builder.manifest([layer], architecture="vax")
    return builder.finish(
        tagged(mine, "1"),
        tagged(builder.index(on(other, "linux/vax"), on(mine, this_platform())), "all"),
        tagged(builder.index(on(other, "linux/vax")), "none"),
        tagged(other, "other"),
        tagged(builder.manifest([layer], config_type="application/vnd.cncf.helm.config.v1+json"), "chart"),
    )


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    builder = LayoutBuilder(tmp_path / "slow")
    return builder.finish(tagged(builder.manifest([builder.layer([member("x", data=os.urandom(200_000))])]), "1"))


def tags(layout: Path) -> dict[str, str]:
    entries = json.loads((layout / "index.json").read_text())["manifests"]
    return {entry["annotations"]["org.opencontainers.image.ref.name"]: entry["digest"] for entry in entries}


def pull(store: ImageStore, registry: Registry, what: str, **more: Any) -> Any:
    return store.import_image("x", Source("registry", f"docker://{registry.host}/tools{what}", **more))


def test_by_tag_and_by_digest(store: ImageStore, layout: Path) -> None:
    digests = tags(layout)
    with serving(layout) as registry:
        info = pull(store, registry, ":1")
        assert (info.manifests, dict(info.config.env)) == ((digests["1"],), {"A": "1"})
        assert (store.open("x", "").rootfs / "bin/tool").read_bytes() == b"x" * 100_000
        whole = pull(store, registry, ":all")
        assert whole.digest == info.digest
        assert whole.manifests == (digests["all"], digests["1"])
        for tag in ("1", "all"):
            assert pull(store, registry, f"@{digests[tag]}").digest == info.digest
            assert store.resolve(f"x@{digests[tag]}").digest == info.digest
        assert pull(store, registry, f":other@{digests['1']}").digest == info.digest


def test_what_is_asked_for_is_what_was_checked(store: ImageStore, layout: Path) -> None:
    """The tag is looked up once: a registry cannot show one image and give another."""
    with serving(layout) as registry:
        pull(store, registry, ":all")
        asked = [path for path in registry.asked if "/manifests/" in path]
    assert [path for path in asked if not path.rpartition("/")[2].startswith("sha256:")] == ["/v2/tools/manifests/all"]


def test_refusals(store: ImageStore, layout: Path, tmp_path: Path) -> None:
    with serving(layout) as registry:
        for what, kind, said in (
            (":gone", NotFoundError, "manifest unknown"),
            ("/more:1", NotFoundError, "name unknown"),
            (f"@{sha256(b'')}", NotFoundError, "manifest unknown"),
            (":none", InvalidRequestError, "only for linux/vax"),
            (":other", InvalidRequestError, "the image is for 'linux/vax'"),
            (":chart", InvalidRequestError, "no container image"),
        ):
            with pytest.raises(kind, match=said):
                pull(store, registry, what)
    with pytest.raises(BackendError, match="refused"):
        pull(store, registry, ":1")
    assert left_over(tmp_path / "data") == []
    assert [info.name for info in store.list()] == ["host"]


def test_an_image_for_another_machine_is_not_downloaded(store: ImageStore, layout: Path) -> None:
    with serving(layout) as registry:
        with pytest.raises(InvalidRequestError):
            pull(store, registry, ":none")
        assert [path for path in registry.asked if "/blobs/" in path] == []


def test_a_registry_that_gives_other_bytes(store: ImageStore, layout: Path, tmp_path: Path) -> None:
    digest = tags(layout)["1"]
    manifest = json.loads((layout / "blobs/sha256" / digest[7:]).read_text())
    layer, config = manifest["layers"][0]["digest"], manifest["config"]["digest"]
    for replaced, content in (
        (digest, json.dumps({**manifest, "annotations": {"a": "b"}}).encode()),
        (layer, (layout / "blobs/sha256" / layer[7:]).read_bytes()[:-1] + b"x"),
        (config, (layout / "blobs/sha256" / config[7:]).read_bytes().replace(b"A=1", b"A=2")),
    ):
        with serving(layout) as registry:
            registry.replaced[replaced] = content
            with pytest.raises(InvalidRequestError):
                pull(store, registry, f"@{digest}")
    assert left_over(tmp_path / "data") == []
    assert [info.name for info in store.list()] == ["host"]


def test_a_manifest_without_end(store: ImageStore, layout: Path, tmp_path: Path) -> None:
    manifest = json.dumps({"mediaType": "application/vnd.oci.image.manifest.v1+json", "x": "y" * 5_000_000}).encode()
    with serving(layout) as registry:
        registry.replaced[tags(layout)["1"]] = manifest
        with pytest.raises((InvalidRequestError, LimitExceededError, BackendError)):
            pull(store, registry, ":1")
    assert left_over(tmp_path / "data") == []


def test_credentials_come_by_file_and_are_seen_nowhere(store: ImageStore, slow: Path, tmp_path: Path) -> None:
    seen: list[bytes] = []

    def look(phase: str, done: int, total: int) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            for name in ("cmdline", "environ"):
                try:
                    seen.append((process / name).read_bytes())
                except OSError:
                    continue

    authfile = tmp_path / "auth.json"
    with serving(slow, password=SECRET, slow=True) as registry:
        with pytest.raises(ForbiddenError, match="--authfile") as refused:
            pull(store, registry, ":1")
        assert SECRET not in refused.value.message
        for password, fits in (("wrong", False), (SECRET, True)):
            pair = base64.b64encode(f"user:{password}".encode()).decode()
            authfile.write_text(json.dumps({"auths": {registry.host: {"auth": pair}}}))
            source = Source("registry", f"{registry.host}/tools:1", authfile=authfile)
            if fits:
                store.import_image("x", source, look)
            else:
                with pytest.raises(ForbiddenError):
                    store.import_image("x", source)
    assert any(b"skopeo" in one and str(authfile).encode() in one for one in seen)
    secret = base64.b64encode(f"user:{SECRET}".encode())
    assert not any(SECRET.encode() in one or secret in one for one in seen)


def test_a_registry_that_hangs(store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_STALL_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(BackendError, match="skopeo made no progress"):
            store.import_image("x", Source("registry", f"127.0.0.1:{port}/tools:1"))
    assert left_over(tmp_path / "data") == []


def command(data: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "agent_sandbox.cli", "image", *arguments],
        env={**os.environ, "AGENT_SANDBOX_DATA_DIR": str(data)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def skopeos(data: Path) -> list[str]:
    """Tools at work below a data directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(process.joinpath("cwd").readlink()).startswith(str(data)):
                found.append(process.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_pull_that_is_ended_half_way(slow: Path, tmp_path: Path, number: signal.Signals) -> None:
    data = tmp_path / "data"
    with serving(slow, slow=True) as registry:
        process = command(data, "pull", f"{registry.host}/tools:1")
        deadline = time.monotonic() + 30
        while not any("/blobs/" in path for path in registry.asked):
            assert time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        assert skopeos(data)
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
        assert output == b""
        assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
        while skopeos(data):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    if number == signal.SIGKILL:
        ImageStore(data).prepare(in_use=set())
    assert left_over(data) == []
    assert [info.name for info in ImageStore(data).list()] == ["host"]


def test_the_command_line(layout: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"

    def run(*arguments: str, code: int = 0) -> Any:
        process = command(data, *arguments)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == code, errors.decode()
        return json.loads(output) if "--json" in arguments else (output + errors).decode()

    with serving(layout) as registry:
        pulled = run("pull", f"{registry.host}/tools:1", "--json")
        assert pulled["name"] == f"{registry.host}/tools:1"
        assert pulled["env"] == {"A": "1"}
        assert pulled["manifests"] == [tags(layout)["1"]]
        assert run("pull", f"{registry.host}/tools:all", "--name", "tools:2", "--json")["digest"] == pulled["digest"]
        run("import", "tools:3", f"{registry.host}/tools:1")
        assert "manifest unknown" in run("pull", f"{registry.host}/tools:gone", code=68)
    run("import", "tools:4", str(layout), "--ref", "1")
    assert "choose one with --ref" in run("import", "tools:5", str(layout), code=64)
    assert "is not of the kind tar" in run("import", "tools:5", str(layout), "--kind", "tar", code=64)
    assert {image["digest"] for image in run("ls", "--json") if image["name"] != "host"} == {pulled["digest"]}
    shown = run("inspect", "tools:2")
    assert "A=1" in shown
    assert tags(layout)["all"] in shown
    assert run("inspect", f"tools:2@{tags(layout)['all']}", "--json")["digest"] == pulled["digest"]
    assert run("rm", "tools:2", "tools:none", "tools:3", "--json", code=68) == {"removed": ["tools:2", "tools:3"]}
    run("rm", pulled["digest"])
    assert [image["name"] for image in run("ls", "--json")] == ["host"]
    assert left_over(data) == []
