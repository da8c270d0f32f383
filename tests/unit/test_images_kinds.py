"""What a source is taken for."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import pytest

from agent_sandbox.errors import InvalidRequestError
from agent_sandbox.images.kinds import KINDS, Source, find_source
from tests.unit.images_harness import LayoutBuilder, archive, docker_archive, member, tar_of

LAYER = archive([member("bin/tool", data=b"x")])


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    builder = LayoutBuilder(tmp_path / "layout")
    return builder.finish(builder.manifest([builder.layer(LAYER)]))


def kind(path: Path | str) -> str:
    return find_source(str(path)).kind


def test_directories(layout: Path, tmp_path: Path) -> None:
    assert kind(layout) == "oci"
    assert kind(tmp_path) == "dir"
    (layout / "index.json").unlink()
    assert kind(layout) == "dir"


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_archives(layout: Path, tmp_path: Path, pack: type[bytes]) -> None:
    def packed(path: Path) -> Path:
        path.write_bytes(pack(path.read_bytes()))
        return path

    saved = docker_archive(tmp_path / "saved.tar", [(["a:1"], [LAYER], {})])
    both = docker_archive(tmp_path / "both.tar", [(["a:1"], [LAYER], {})], more=[
        member("oci-layout", data=b"{}"), member("index.json", data=b"{}"), member("blobs", tarfile.DIRTYPE)
    ])  # fmt: skip
    root = tmp_path / "root.tar"
    root.write_bytes(archive([member("./", tarfile.DIRTYPE), member("./bin/x", data=b"x")]))
    assert kind(packed(saved)) == "docker-archive"
    assert kind(packed(both)) == "oci"
    assert kind(packed(tar_of(layout, tmp_path / "layout.tar"))) == "oci"
    assert kind(packed(root)) == "tar"


def test_a_root_file_system_may_hold_files_named_like_parts_of_an_image(tmp_path: Path) -> None:
    path = tmp_path / "root.tar"
    path.write_bytes(archive([member("manifest.json", data=b"[]"), member("index.json"), member("bin/x", data=b"x")]))
    assert kind(path) == "tar"
    path.write_bytes(archive([member("./", tarfile.DIRTYPE)]))
    assert kind(path) == "tar"


def test_registries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("docker://debian", "docker://ghcr.io/a/b:1", "ghcr.io/a/b", "localhost:5000/x@sha256:" + "0" * 64):
        assert find_source(text) == Source("registry", text)
    (tmp_path / "ghcr.io").mkdir()
    (tmp_path / "ghcr.io/a").mkdir()
    assert kind("ghcr.io/a") == "dir"


@pytest.mark.parametrize(
    "text", ["", "debian", "debian:12", "./no.such/file", "/no.such/file", "ghcr.io/A", "/dev/null"]
)
def test_what_is_nothing(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if text == "":
        text = str(tmp_path / "nowhere")
    with pytest.raises(InvalidRequestError):
        find_source(text)


def test_a_kind_can_be_forced(layout: Path, tmp_path: Path) -> None:
    assert find_source(str(layout), "dir").kind == "dir"
    assert find_source("debian", "registry").kind == "registry"
    tar = tar_of(layout, tmp_path / "layout.tar")
    assert find_source(str(tar), "tar").kind == "tar"
    for text, forced in ((str(layout), "tar"), (str(tar), "dir"), (str(layout), "docker-archive"), ("/no/such", "oci")):
        with pytest.raises(InvalidRequestError):
            find_source(text, forced)  # type: ignore[arg-type]
    assert KINDS == ("dir", "tar", "oci", "docker-archive", "registry")


def test_a_ref_chooses_among_packed_images_only(layout: Path, tmp_path: Path) -> None:
    assert find_source(str(layout), ref="a").ref == "a"
    for text in (str(tmp_path), "docker://debian"):
        with pytest.raises(InvalidRequestError, match="ref"):
            find_source(text, ref="a")
