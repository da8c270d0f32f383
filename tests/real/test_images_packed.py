"""Packed images through skopeo and umoci: every kind gives the same image; hostile ones give an error and no more."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.errors import BackendError, InvalidRequestError, LimitExceededError, SandboxError
from agent_sandbox.images import ImageConfig, ImageStore, Source, find_source, tools
from agent_sandbox.images.digest import summarize
from agent_sandbox.images.image_config import image_digest
from tests.unit.images_harness import LayoutBuilder, archive, docker_archive, left_over, member, sha256, tagged, tar_of

pytestmark = pytest.mark.real

CONFIG = {"Env": ["PATH=/tools:/bin", "GREETING=hello"], "User": "web", "Cmd": ["/bin/sh"], "Volumes": {"/data": {}}}
KEPT = ImageConfig({"PATH": "/tools:/bin", "GREETING": "hello"}, "web", "", (), ("/bin/sh",), ("/data",))
LOWER = archive(
    [
        member("bin", tarfile.DIRTYPE, mode=0o755),
        member("bin/tool", data=b"first", mode=0o4755),
        member("bin/gone", data=b"x"),
        member("full", tarfile.DIRTYPE, mode=0o755),
        member("full/a", data=b"a"),
        member("full/b", data=b"b"),
        member("replaced", data=b"a file"),
    ]
)
UPPER = archive(
    [
        member("bin/.wh.gone"),
        member("full/.wh..wh..opq"),
        member("full/c", data=b"c"),
        member("bin/also", tarfile.LNKTYPE, link="bin/tool"),
        member("replaced", tarfile.DIRTYPE, mode=0o700),
        member("pipe", tarfile.FIFOTYPE),
        member("lib", tarfile.SYMTYPE, link="/bin"),
    ]
)
FILES = {
    "bin": "d755", "bin/tool": "f4755 first", "bin/also": "f4755 first", "full": "d755", "full/c": "f644 c",
    "replaced": "d700", "pipe": "p644", "lib": "l777 /bin",
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "data")


@pytest.fixture
def builder(tmp_path: Path) -> LayoutBuilder:
    return LayoutBuilder(tmp_path / "layout")


def built(builder: LayoutBuilder, pack: str = "gzip") -> Path:
    layers = [builder.layer(LOWER, pack), builder.layer(UPPER, pack)]
    return builder.finish(tagged(builder.manifest(layers, CONFIG), "1"))


def tree(root: Path) -> dict[str, str]:
    """What a root file system holds besides what every import adds."""
    added = {"proc", "sys", "dev", "tmp", "run", "workspace", "etc"}
    found = {}
    for path in sorted(root.rglob("*")):
        name, mode = str(path.relative_to(root)), path.lstat().st_mode
        if name.partition("/")[0] in added:
            continue
        kind = {stat.S_IFDIR: "d", stat.S_IFREG: "f", stat.S_IFLNK: "l", stat.S_IFIFO: "p"}[stat.S_IFMT(mode)]
        body = " " + path.read_text() if kind == "f" else f" {path.readlink()}" if kind == "l" else ""
        found[name] = f"{kind}{stat.S_IMODE(mode):o}{body}"
    return found


def test_every_kind_gives_the_same_image(store: ImageStore, tmp_path: Path) -> None:
    sources = {pack: built(LayoutBuilder(tmp_path / f"layout:{pack}"), pack) for pack in ("", "gzip", "zstd")}
    sources["tar"] = tar_of(sources["gzip"], tmp_path / "layout:1.tar")
    sources["docker"] = docker_archive(tmp_path / "saved:1.tar", [(["tools:1"], [LOWER, UPPER], CONFIG)])
    for name in ("tar", "docker"):
        sources[f"{name}.gz"] = sources[name].with_suffix(".gz")
        sources[f"{name}.gz"].write_bytes(gzip.compress(sources[name].read_bytes()))
    infos = {name: store.import_image(f"tools:{name or 'plain'}", path) for name, path in sources.items()}
    assert len({info.digest for info in infos.values()}) == 1
    root = store.open("", infos["tar"].digest)
    assert tree(root.rootfs) == FILES
    assert (root.rootfs / "bin/also").stat().st_ino == (root.rootfs / "bin/tool").stat().st_ino
    assert (root.rootfs / "bin/tool").stat().st_mtime == 1_700_000_000
    assert infos["tar"].config == KEPT
    assert root.env == store.resolve("tools:tar").env == KEPT.env
    manifests = {json.loads((sources[pack] / "index.json").read_text())["manifests"][0]["digest"] for pack in sources if
                 pack in ("", "gzip", "zstd")}  # fmt: skip
    assert set(store.inspect("tools:docker").manifests) == manifests
    assert {store.resolve(f"tools:tar@{digest}").digest for digest in manifests} == {infos["tar"].digest}
    assert left_over(tmp_path / "data") == []


def test_the_digest_is_that_of_the_same_files_and_config(
    store: ImageStore, builder: LayoutBuilder, tmp_path: Path
) -> None:
    layer = archive([member("./", tarfile.DIRTYPE, mode=0o755), member("./file", data=b"x")])
    (tmp_path / "root.tar").write_bytes(layer)
    plain = store.import_image("plain", tmp_path / "root.tar").digest
    silent = builder.finish(builder.manifest([builder.layer(layer)]))
    assert store.import_image("silent", silent).digest == plain
    said = LayoutBuilder(tmp_path / "said")
    told = store.import_image("said", said.finish(said.manifest([said.layer(layer)], {"User": "web"}))).digest
    assert told == image_digest(plain, ImageConfig(user="web")) != plain


def test_the_umask_does_not_count(store: ImageStore, builder: LayoutBuilder) -> None:
    path = builder.finish(builder.manifest([builder.layer([member("a/b/file", data=b"x")])]))
    digest = store.import_image("a", path).digest
    before = os.umask(0o077)
    try:
        assert store.import_image("b", path).digest == digest
    finally:
        os.umask(before)


def test_progress_is_told_in_bytes(store: ImageStore, builder: LayoutBuilder) -> None:
    layer = builder.layer([member("noise", data=os.urandom(30_000_000))])
    path = builder.finish(builder.manifest([layer]))
    seen: list[tuple[str, int, int]] = []
    info = store.import_image("a", path, lambda *args: seen.append(args))
    assert list(dict.fromkeys(phase for phase, _, _ in seen)) == ["copy", "unpack", "digest"]
    assert all(0 <= done <= total for _, done, total in seen)
    assert {total for phase, _, total in seen if phase != "digest"} == {layer[0]["size"]}
    assert seen[-1] == ("digest", info.file_bytes, info.file_bytes) == ("digest", 30_000_000, 30_000_000)


def test_one_of_several_images(store: ImageStore, tmp_path: Path) -> None:
    path = docker_archive(
        tmp_path / "saved.tar", [(["docker.io/library/a:1", "a:2"], [LOWER], {}), (["b:latest"], [LOWER, UPPER], {})]
    )
    for ref in ("a:1", "docker.io/library/a:1", "a:2", "b", "b:latest"):
        store.import_image("x", find_source(str(path), ref=ref))
        root = store.open("x", "").rootfs
        assert (root / "bin/gone").exists() == ref.startswith(("a", "docker"))
    with pytest.raises(InvalidRequestError, match=r"--ref: docker\.io/library/a:1, a:2, b:latest"):
        store.import_image("x", path)
    with pytest.raises(InvalidRequestError, match="no image 'c'"):
        store.import_image("x", find_source(str(path), ref="c"))


def test_an_image_for_another_machine_is_refused_before_it_is_unpacked(
    store: ImageStore, builder: LayoutBuilder, tmp_path: Path
) -> None:
    path = builder.finish(builder.manifest([builder.layer(LOWER)], architecture="vax"))
    seen: list[str] = []
    with pytest.raises(InvalidRequestError, match="linux/vax") as refused:
        store.import_image("a", path, lambda phase, done, total: seen.append(phase))
    assert refused.value.details["image_platform"] == "linux/vax"
    assert seen == []
    assert left_over(tmp_path / "data") == []


def with_attributes(name: str, value: str) -> list[tuple[tarfile.TarInfo, bytes]]:
    info, data = member("odd", data=b"x")
    info.pax_headers = {f"SCHILY.xattr.{name}": value}
    return [(info, data)]


def test_devices_and_attributes_are_left_out(store: ImageStore, builder: LayoutBuilder) -> None:
    character, block = member("null", tarfile.CHRTYPE), member("disk", tarfile.BLKTYPE)
    character[0].devmajor, character[0].devminor = 1, 3
    block[0].devmajor, block[0].devminor = 8, 0
    layers = [
        builder.layer([character, block, member("kept", data=b"x")]),
        builder.layer(with_attributes("user.a", "b")),
        builder.layer(with_attributes("trusted.overlay.redirect", "/etc")),
        builder.layer(with_attributes("trusted.overlay.metacopy", "y")),
    ]
    digest = store.import_image("a", builder.finish(builder.manifest(layers))).digest
    root = store.open("a", digest).rootfs
    assert tree(root) == {"kept": "f644 x", "odd": "f644 x"}
    assert os.listxattr(root / "odd") == []


def escape(*members: tuple[tarfile.TarInfo, bytes]) -> Callable[[LayoutBuilder, Path], Path]:
    return lambda builder, victim: builder.finish(builder.manifest([builder.layer(members)]))


def wrong_layer(builder: LayoutBuilder, victim: Path) -> Path:
    layer = builder.layer(LOWER)
    path = builder.blobs / layer[0]["digest"].removeprefix("sha256:")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return builder.finish(builder.manifest([layer]))


def wrong_contents(builder: LayoutBuilder, victim: Path) -> Path:
    return builder.finish(builder.manifest([(builder.layer(LOWER)[0], sha256(UPPER))]))


def cut_gzip(builder: LayoutBuilder, victim: Path) -> Path:
    layer = builder.put(gzip.compress(LOWER)[:-30], "application/vnd.oci.image.layer.v1.tar+gzip")
    return builder.finish(builder.manifest([(layer, sha256(LOWER))]))


def bad_zstd(builder: LayoutBuilder, victim: Path) -> Path:
    layer = builder.put(b"\x28\xb5\x2f\xfd" + b"x" * 100, "application/vnd.oci.image.layer.v1.tar+zstd")
    return builder.finish(builder.manifest([(layer, sha256(LOWER))]))


def missing_layer(builder: LayoutBuilder, victim: Path) -> Path:
    layer = builder.layer(LOWER)
    (builder.blobs / layer[0]["digest"].removeprefix("sha256:")).unlink()
    return builder.finish(builder.manifest([layer]))


def secret_as_a_layer(builder: LayoutBuilder, victim: Path) -> Path:
    content = (victim / "secret").read_bytes()
    layer = builder.put(content, "application/vnd.oci.image.layer.v1.tar")
    path = builder.blobs / layer["digest"].removeprefix("sha256:")
    path.unlink()
    path.symlink_to(victim / "secret")
    return builder.finish(builder.manifest([(layer, sha256(content))]))


def fewer_contents_than_layers(builder: LayoutBuilder, victim: Path) -> Path:
    layer = builder.layer(LOWER)
    found = builder.manifest([layer])
    manifest = json.loads((builder.blobs / found["digest"][7:]).read_text())
    manifest["layers"] = manifest["layers"] * 3
    return builder.finish(builder.put(json.dumps(manifest).encode(), found["mediaType"]))


def special_file_in_an_archive(builder: LayoutBuilder, victim: Path) -> Path:
    path = tar_of(built(builder), victim.parent / "layout.tar")
    with tarfile.open(path, "a") as tar:
        tar.addfile(member("blobs/sha256/x", tarfile.SYMTYPE, link=str(victim / "secret"))[0])
    return path


def traversing_archive(builder: LayoutBuilder, victim: Path) -> Path:
    path = tar_of(built(builder), victim.parent / "layout.tar")
    with tarfile.open(path, "a") as tar:
        info, data = member(f"blobs/../../../../../..{victim}/new", data=b"x")
        tar.addfile(info, io.BytesIO(data))
    return path


def saved(manifest: Any, *more: tuple[tarfile.TarInfo, bytes]) -> Callable[[LayoutBuilder, Path], Path]:
    def make(builder: LayoutBuilder, victim: Path) -> Path:
        text = json.loads(json.dumps(manifest).replace("VICTIM", str(victim)))
        return docker_archive(victim.parent / "saved.tar", [(["a:1"], [LOWER], {})], manifest=text, more=more)

    return make


UP = "../" * 20
HOSTILE: dict[str, Callable[[LayoutBuilder, Path], Path]] = {
    "a layer with a wrong byte": wrong_layer,
    "a layer with other contents": wrong_contents,
    "a cut layer": cut_gzip,
    "a layer that is no zstd": bad_zstd,
    "a missing layer": missing_layer,
    "a link to a secret as a layer": secret_as_a_layer,
    "more layers than contents": fewer_contents_than_layers,
    "no layers tar": lambda builder, victim: builder.finish(builder.manifest([builder.layer(b"not a tar" * 200)])),
    "too deep": escape(member("/".join("d" * 900), data=b"x")),
    "long name": escape(member("n" * 300, data=b"x")),
    "etc is a link": escape(member("etc", tarfile.SYMTYPE, link="/etc")),
    "hard link out": escape(member("a", tarfile.LNKTYPE, link=f"{UP}etc/hostname")),
    "removes its root": escape(member("bin/.wh...")),
    "removes what is above": escape(member(".wh...")),
    "removes itself": escape(member(".wh..")),
    "removes nothing": escape(member(".wh.")),
    "a link to itself": escape(member("loop", tarfile.SYMTYPE, link="loop"), member("loop/x")),
    "a link in an archive": special_file_in_an_archive,
    "a path out of an archive": traversing_archive,
    "saved: no list": saved({}),
    "saved: empty list": saved([]),
    "saved: no objects": saved([1]),
    "saved: config outside": saved([{"Config": f"{UP}VICTIM/secret", "RepoTags": ["a:1"], "Layers": []}]),
    "saved: absolute config": saved([{"Config": "VICTIM/secret", "RepoTags": ["a:1"], "Layers": []}]),
    "saved: config is a link out": saved(
        [{"Config": "c.json", "RepoTags": ["a:1"], "Layers": []}],
        member("c.json", tarfile.SYMTYPE, link="/etc/hostname"),
    ),
    "saved: config is a link to itself": saved(
        [{"Config": "c.json", "RepoTags": ["a:1"], "Layers": []}], member("c.json", tarfile.SYMTYPE, link="c.json")
    ),
    "saved: missing layer": saved([{"Config": "a.json", "RepoTags": ["a:1"], "Layers": ["no/layer.tar"]}]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_image_is_refused_and_leaves_nothing(
    store: ImageStore, builder: LayoutBuilder, tmp_path: Path, name: str
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "secret").write_bytes(b'{"secret": "of the host"}')
    source = HOSTILE[name](builder, victim)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(InvalidRequestError) as refused:
        store.import_image("bad", source)
    assert "of the host" not in refused.value.message
    assert left_over(tmp_path / "data") == []
    assert [path.name for path in (tmp_path / "data/images").iterdir()] == []
    assert {path: path.lstat().st_mtime_ns for path in before} == before
    assert {path.name for path in victim.iterdir()} == {"secret"}


def test_links_of_the_layers_end_inside(store: ImageStore, builder: LayoutBuilder, tmp_path: Path) -> None:
    """What umoci makes of paths that lead out: contained, not refused."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "passwd").write_text("untouched")
    layers = [
        builder.layer(
            [
                member(f"{UP}above", data=b"1"),
                member("out", tarfile.SYMTYPE, link=str(victim)),
                member("out/through", data=b"2"),
                member("up", tarfile.SYMTYPE, link=UP),
                member("up/more", data=b"3"),
            ]
        ),
        builder.layer(
            [
                member("out/later", data=b"4"),
                member("out/.wh.passwd"),
                member(f"{UP}{victim}/.wh.passwd"),
                member("tmp", tarfile.SYMTYPE, link=str(victim)),
            ]
        ),
    ]
    store.import_image("a", builder.finish(builder.manifest(layers)))
    root = store.open("a", "").rootfs
    assert (root / "above").read_bytes() == b"1"
    assert (root / "more").read_bytes() == b"3"
    emptied = [
        builder.layer([member("out", tarfile.SYMTYPE, link=str(victim)), member("out/through", data=b"2")]),
        builder.layer([member("out/.wh..wh..opq"), member(f".wh.x/{UP}{victim}")]),
    ]
    store.import_image("b", builder.finish(builder.manifest(emptied)))
    assert (victim / "passwd").read_text() == "untouched"
    assert [path.name for path in victim.iterdir()] == ["passwd"]
    assert not (root / "tmp").is_symlink()
    assert left_over(tmp_path / "data") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB and 1000 inodes."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=1000", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


BOMB = gzip.compress(archive([member("zeros", data=bytes(300_000_000))]), 1)


def gzip_bomb(builder: LayoutBuilder) -> Path:
    layer = builder.put(BOMB, "application/vnd.oci.image.layer.v1.tar+gzip")
    return builder.finish(builder.manifest([(layer, sha256(b""))]))


def zstd_bomb(builder: LayoutBuilder) -> Path:
    return builder.finish(builder.manifest([builder.layer([member("zeros", data=bytes(300_000_000))], "zstd")]))


def compressed_archive_bomb(builder: LayoutBuilder) -> Path:
    saved = docker_archive(builder.directory.parent / "saved.tar", [(["a:1"], [bytes(300_000_000)], {})])
    path = saved.with_suffix(".gz")
    path.write_bytes(gzip.compress(saved.read_bytes(), 1))
    saved.unlink()
    return path


def huge_layer(builder: LayoutBuilder) -> Path:
    return builder.finish(builder.manifest([builder.layer(os.urandom(70_000_000), "")]))


def many_files(builder: LayoutBuilder) -> Path:
    return builder.finish(builder.manifest([builder.layer([member(f"f{at}") for at in range(5000)])]))


def root_bomb(builder: LayoutBuilder) -> Path:
    path = builder.directory.parent / "root.tar"
    path.write_bytes(archive([member("bin/noise", data=os.urandom(70_000_000))]))
    return path


@pytest.mark.parametrize(
    "make", [gzip_bomb, zstd_bomb, compressed_archive_bomb, huge_layer, many_files, root_bomb], ids=lambda f: f.__name__
)
def test_an_image_that_does_not_fit(
    builder: LayoutBuilder, small_disk: Path, make: Callable[[LayoutBuilder], Path]
) -> None:
    source = make(builder)
    started = time.monotonic()
    with pytest.raises((LimitExceededError, BackendError)) as refused:
        ImageStore(small_disk).import_image("a", source)
    assert (
        "too large for the disk" in refused.value.message
        or "too many files" in refused.value.message
        or ("disk is full" in refused.value.message)
    ), refused.value.message
    assert time.monotonic() - started < 20
    assert left_over(small_disk) == []
    used = os.statvfs(small_disk)
    assert (used.f_blocks - used.f_bfree) * used.f_frsize < 1_000_000


def test_a_missing_tool_is_named(
    store: ImageStore, builder: LayoutBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = built(builder)
    only = tmp_path / "only"
    only.mkdir()
    for name in ("skopeo", "setpriv"):
        (only / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setattr(tools, "PATH", str(only))
    with pytest.raises(BackendError, match="umoci is not installed; install them with: apt-get install skopeo umoci"):
        store.import_image("a", source)
    (only / "skopeo").unlink()
    with pytest.raises(BackendError, match="skopeo is not installed"):
        store.import_image("a", source)
    assert left_over(tmp_path / "data") == []


def test_sockets_in_a_tree_are_removed(tmp_path: Path) -> None:
    """No layer can hold one, but the tree is looked at as if one had."""
    from agent_sandbox.images.packed import clean

    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    (root / "d/file").write_bytes(b"abc")
    os.setxattr(root / "d", "trusted.overlay.opaque", b"y")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "d/socket"))
    assert clean(root) == 3
    assert [path.name for path in (root / "d").iterdir()] == ["file"]
    assert os.listxattr(root / "d") == []
    assert summarize(root, lambda done: None).entries == 3


def test_a_kind_that_the_source_is_not(store: ImageStore, builder: LayoutBuilder, tmp_path: Path) -> None:
    layout = tar_of(built(builder), tmp_path / "layout.tar")
    root = tmp_path / "root.tar"
    root.write_bytes(LOWER)
    for source in (
        Source("docker-archive", str(layout)),
        Source("docker-archive", str(root)),
        Source("oci", str(root)),
        Source("oci", str(tmp_path)),
    ):
        with pytest.raises(SandboxError):
            store.import_image("a", source)
    assert left_over(tmp_path / "data") == []
