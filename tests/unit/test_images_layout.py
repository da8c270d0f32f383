"""Which image of a layout is meant, what its config says, and what damaged and hostile layouts do not achieve."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.errors import InvalidRequestError, LimitExceededError
from agent_sandbox.images.image_config import ImageConfig, image_digest, parse_config
from agent_sandbox.images.layout import MAX_DOCUMENT_BYTES, Layout, check_platform, parse_manifest, this_platform
from tests.unit.images_harness import LayoutBuilder, member, on, sha256, tagged


@pytest.fixture
def builder(tmp_path: Path) -> LayoutBuilder:
    return LayoutBuilder(tmp_path / "layout")


def image(builder: LayoutBuilder, text: str = "x", **more: Any) -> dict[str, Any]:
    return builder.manifest([builder.layer([member("file", data=text.encode())])], **more)


def choose(path: Path, ref: str = "") -> list[str]:
    return [one.digest for one in Layout(path).choose(ref)]


def test_a_layout_with_one_image(builder: LayoutBuilder) -> None:
    found = image(builder, config={"Env": ["A=1"], "User": "web"})
    layout = Layout(builder.finish(found))
    [chosen] = layout.choose()
    manifest = layout.manifest(chosen)
    assert chosen.digest == found["digest"]
    assert parse_config(layout.config(manifest)) == ImageConfig({"A": "1"}, "web")
    assert manifest.layer_bytes == sum(path.stat().st_size for path in builder.blobs.iterdir()) - found["size"] - (
        manifest.config.size
    )
    layout.check_blobs(manifest)


def test_one_of_several_is_chosen_by_its_tag(builder: LayoutBuilder) -> None:
    one, two = image(builder, "1"), image(builder, "2")
    path = builder.finish(tagged(one, "a"), tagged(two, "b"), tagged(one, "c"))
    assert choose(path, "b") == [two["digest"]]
    assert choose(path, "c") == [one["digest"]]
    with pytest.raises(InvalidRequestError, match="--ref: a, b, c"):
        choose(path)
    with pytest.raises(InvalidRequestError, match="no image 'd' in the layout: a, b, c"):
        choose(path, "d")


def test_two_tags_of_one_image_need_no_choice(builder: LayoutBuilder) -> None:
    one = image(builder)
    assert choose(builder.finish(tagged(one, "a"), tagged(one, "b"))) == [one["digest"]]


def test_the_image_for_this_machine_is_chosen(builder: LayoutBuilder) -> None:
    mine, other, proof = (image(builder, text) for text in ("mine", "other", "proof"))
    entries = (on(other, "linux/vax"), on(proof, "unknown/unknown"), on(mine, this_platform()))
    index = builder.index(*entries)
    assert choose(builder.finish(tagged(index, "a")), "a") == [index["digest"], mine["digest"]]
    assert choose(builder.finish(*entries)) == [mine["digest"]]
    with pytest.raises(InvalidRequestError, match="linux/vax") as refused:
        choose(builder.finish(builder.index(on(other, "linux/vax"))))
    assert refused.value.details == {"image_platforms": ["linux/vax"], "platform": this_platform()}


def test_the_config_says_for_which_machine() -> None:
    os_, _, architecture = this_platform().partition("/")
    check_platform({"os": os_, "architecture": architecture})
    check_platform({})
    for config in ({"os": "linux", "architecture": "vax"}, {"os": "windows", "architecture": architecture}):
        with pytest.raises(InvalidRequestError, match="this machine"):
            check_platform(config)


def test_indexes_nested_without_end_are_refused(builder: LayoutBuilder) -> None:
    entry = image(builder)
    for _ in range(4):
        entry = builder.index(entry)
    assert len(choose(builder.finish(entry))) == 5
    with pytest.raises(InvalidRequestError, match="nested"):
        choose(builder.finish(builder.index(entry)))


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"manifests": {}}',
        b'{"manifests": []}',
        b'{"manifests": [1]}',
        b'{"manifests": [{"mediaType": "x", "digest": "sha256:00", "size": 1}]}',
        b'{"manifests": [{"mediaType": "x", "digest": "sha256:' + b"0" * 64 + b'", "size": -1}]}',
        b'{"manifests": [{"mediaType": "x", "digest": "sha256:' + b"0" * 64 + b'", "size": true}]}',
        b'{"manifests": [{"mediaType": "x", "digest": "sha512:' + b"0" * 128 + b'", "size": 1}]}',
        b'{"manifests": [{"mediaType": "x", "digest": "../../../etc/passwd", "size": 1}]}',
        b" " * (MAX_DOCUMENT_BYTES + 1),
    ],
    ids=lambda value: f"{value[:70]!r}",
)
def test_an_index_that_is_none(builder: LayoutBuilder, index: bytes) -> None:
    builder.finish()
    (builder.directory / "index.json").write_bytes(index)
    with pytest.raises(InvalidRequestError):
        Layout(builder.directory).choose()


def test_documents_have_their_digests(builder: LayoutBuilder) -> None:
    found = image(builder)
    layout = Layout(builder.finish(found))
    [chosen] = layout.choose()
    path = layout.blob(found["digest"])
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(InvalidRequestError, match="digest"):
        layout.manifest(chosen)
    path.unlink()
    with pytest.raises(InvalidRequestError, match="not complete"):
        layout.manifest(chosen)


def test_blobs_are_files(builder: LayoutBuilder, tmp_path: Path) -> None:
    """A FIFO would hang a reader, and a link would lead it anywhere."""
    found = image(builder)
    layout = Layout(builder.finish(found))
    [chosen] = layout.choose()
    manifest = layout.manifest(chosen)
    for digest, look in (
        (found["digest"], lambda: layout.manifest(chosen)),
        (manifest.layers[0].digest, lambda: layout.check_blobs(manifest)),
    ):
        path = layout.blob(digest)
        content = path.read_bytes()
        (tmp_path / "elsewhere").write_bytes(content)
        for replace in (os.mkfifo, lambda at: at.symlink_to(tmp_path / "elsewhere"), Path.mkdir):
            path.unlink()
            replace(path)
            with pytest.raises(InvalidRequestError):
                look()
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            path.write_bytes(content)
        look()


def test_a_layer_that_is_missing_or_cut(builder: LayoutBuilder) -> None:
    layout = Layout(builder.finish(image(builder)))
    manifest = layout.manifest(layout.choose()[0])
    path = layout.blob(manifest.layers[0].digest)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidRequestError, match="no file of its size"):
        layout.check_blobs(manifest)
    path.unlink()
    with pytest.raises(InvalidRequestError, match="is missing"):
        layout.check_blobs(manifest)


def test_what_is_no_container_image(builder: LayoutBuilder) -> None:
    layout = Layout(builder.finish(image(builder, config_type="application/vnd.cncf.helm.config.v1+json")))
    with pytest.raises(InvalidRequestError, match=r"helm\.config"):
        layout.config(layout.manifest(layout.choose()[0]))
    with pytest.raises(InvalidRequestError, match="first schema"):
        parse_manifest(b'{"schemaVersion": 1, "fsLayers": []}')
    descriptor = {"mediaType": "x", "digest": sha256(b""), "size": 0}
    with pytest.raises(InvalidRequestError, match="1000 layers"):
        parse_manifest(json.dumps({"config": descriptor, "layers": [descriptor] * 1001}).encode())


def test_what_is_kept_of_a_config() -> None:
    config = parse_config(
        {
            "config": {
                "Env": ["PATH=/a:/b", "EMPTY=", "EQUALS=a=b", "PATH=/c"],
                "User": "1000:1000",
                "WorkingDir": "/srv",
                "Entrypoint": ["/init", "-x"],
                "Cmd": None,
                "Volumes": {"/data": {}, "/cache": {}},
                "Labels": {"a": "b"},
            }
        }
    )
    assert config == ImageConfig(
        {"PATH": "/c", "EMPTY": "", "EQUALS": "a=b"}, "1000:1000", "/srv", ("/init", "-x"), (), ("/cache", "/data")
    )
    assert ImageConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert parse_config({}) == parse_config({"config": None}) == ImageConfig()


@pytest.mark.parametrize(
    "config",
    [
        [],
        "x",
        {"Env": "A=1"},
        {"Env": ["A"]},
        {"Env": ["=x"]},
        {"Env": [1]},
        {"Env": ["A=\0"]},
        {"Env": ["A=\ud800"]},
        {"User": 0},
        {"Volumes": ["/data"]},
        {"Cmd": "sh"},
    ],
    ids=repr,
)
def test_a_damaged_config(config: Any) -> None:
    with pytest.raises(InvalidRequestError):
        parse_config({"config": config})


def test_a_config_that_is_too_large() -> None:
    assert len(parse_config({"config": {"Env": ["A=" + "x" * (65_536 - 17)]}}).env["A"]) == 65_519
    for config in (
        {"Env": ["A=" + "x" * 40_000, "B=" + "x" * 40_000]},
        {"Env": [f"A{at}=" for at in range(1001)]},
        {"User": "x" * 65_537},
    ):
        with pytest.raises(LimitExceededError):
            parse_config({"config": config})


def test_the_digest_of_an_image_covers_its_config() -> None:
    tree = "sha256:" + "ab" * 32
    assert image_digest(tree, ImageConfig()) == tree
    kept = b'{"command":[],"entrypoint":[],"env":{"A":"\\u00e4","B":""},"user":"","volumes":["/data"],"working_dir":""}'
    config = ImageConfig({"B": "", "A": "ä"}, volumes=("/data",))
    assert image_digest(tree, config) == sha256(b"agent-sandbox image 1\n" + tree.encode() + b"\n" + kept)
    assert image_digest(tree, ImageConfig(user="web")) != image_digest(tree, ImageConfig(working_dir="web"))
