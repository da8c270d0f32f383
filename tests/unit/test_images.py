"""Importing, naming and removing images; what an import adds; what hostile sources do not achieve."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import lzma
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from agent_sandbox.backends.oci import OciBackend
from agent_sandbox.config import Settings
from agent_sandbox.errors import (
    BackendError,
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    SandboxError,
)
from agent_sandbox.images import ImageInfo, ImageStore
from agent_sandbox.images.digest import summarize
from agent_sandbox.images.references import Reference, parse_reference
from tests.unit.images_harness import Member, archive, left_over, member

ORDINARY = [
    member("./", tarfile.DIRTYPE, mode=0o755),
    member("./bin", tarfile.DIRTYPE, mode=0o755),
    member("./bin/tool", data=b"\x7fELF tool", mode=0o4755),
    member("./bin/other", tarfile.LNKTYPE, link="./bin/tool"),
    member("./etc", tarfile.DIRTYPE, mode=0o755),
    member("./etc/passwd", data=b"root:x:0:0:root:/root:/bin/sh"),
    member("./etc/hosts", tarfile.SYMTYPE, link="/nowhere/at/all"),
    member("./lib", tarfile.SYMTYPE, link="usr/lib"),
    member("./dev/null", tarfile.CHRTYPE),
    member("./pipe", tarfile.FIFOTYPE, mode=0o600),
    member("./empty", data=bytes(300_000)),
]


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "data")


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    def write(content: bytes | list[Member], name: str = "root.tar") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else archive(content))
        return path

    return write


def outside(tmp_path: Path) -> set[str]:
    """Everything below the test's directory but the store itself."""
    left_over(tmp_path / "data")
    return {str(path) for path in tmp_path.rglob("*") if tmp_path / "data" not in (path, *path.parents)}


def nothing_new(tmp_path: Path) -> bool:
    """No image and nothing half-made."""
    images = tmp_path / "data" / "images"
    kept = [*images.glob("sha256-*"), *images.glob("index.json")]
    return kept == [] and left_over(tmp_path / "data") == []


def test_a_tar_becomes_an_image(store: ImageStore, put: Callable[..., Path]) -> None:
    seen: list[tuple[str, int, int]] = []
    info = store.import_image("tools:1", put(ORDINARY), lambda *args: seen.append(args))
    resolved = store.resolve("tools:1")
    assert (resolved.name, resolved.digest, resolved.pinned) == ("tools:1", info.digest, True)
    root = store.open("tools:1", info.digest).rootfs
    assert (root / "bin/tool").read_bytes() == b"\x7fELF tool"
    assert (root / "bin/tool").stat().st_mode & 0o7777 == 0o4755
    assert (root / "bin/other").stat().st_ino == (root / "bin/tool").stat().st_ino
    assert (root / "bin/tool").stat().st_mtime == 1_700_000_000
    assert str((root / "lib").readlink()) == "usr/lib"
    assert stat.S_ISFIFO((root / "pipe").lstat().st_mode)
    assert (root / "empty").read_bytes() == bytes(300_000)
    assert not (root / "dev/null").exists()
    assert {phase for phase, _, _ in seen} == {"read", "digest"}
    assert info.file_bytes == 9 * 2 + 29 + 300_000


async def test_an_allowed_name_leads_to_no_content_of_one_that_is_not(tmp_path: Path, put: Callable[..., Path]) -> None:
    """A digest is content whatever name stands before it, and names are what is allowed."""
    backend = OciBackend(Settings(data_dir=tmp_path / "data", allowed_images=("team/*",)))
    images = ImageStore(tmp_path / "data")
    old = images.import_image("team/tools:1", put(ORDINARY)).digest
    other = images.import_image("secret/tools:1", put(ORDINARY[:2], "other.tar")).digest
    for name in ("team/tools", "team/any:1"):
        assert (await backend.resolve_image(f"{name}@{old}")).digest == old
        with pytest.raises(ForbiddenError, match="ALLOWED_IMAGES"):
            await backend.resolve_image(f"{name}@{other}")
    images.import_image("team/tools:1", put(ORDINARY[:1], "new.tar"))
    assert (await backend.resolve_image(f"team/tools:1@{old}")).digest == old, "what lost its name stays pinned"
    assert (await backend.resolve_image(other)).digest == other, "as a snapshot asks for what it was made from"
    await backend.close()


def test_an_import_adds_what_a_sandbox_needs(store: ImageStore, put: Callable[..., Path], tmp_path: Path) -> None:
    digest = store.import_image("tools", put(ORDINARY)).digest
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("data", "data/images")] == [0o700, 0o700]
    root = store.open("tools", digest).rootfs
    modes = {name: (root / name).stat().st_mode & 0o7777 for name in ("proc", "sys", "dev", "tmp", "run", "workspace")}
    assert modes == {"proc": 0o555, "sys": 0o555, "dev": 0o755, "tmp": 0o1777, "run": 0o755, "workspace": 0o755}
    assert (root / "etc/passwd").read_text() == (
        "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000:sandbox:/workspace:/bin/sh\n"
    )
    assert (root / "etc/group").read_text() == "sandbox:x:1000:\n"
    assert (root / "etc/hostname").read_text() == "sandbox\n"
    assert (root / "etc/resolv.conf").read_bytes() == b""
    assert not (root / "etc/hosts").is_symlink()
    assert "127.0.0.1\tlocalhost" in (root / "etc/hosts").read_text()


def test_a_user_of_the_image_keeps_its_entry(store: ImageStore, put: Callable[..., Path]) -> None:
    theirs = b"root:x:0:0::/root:/bin/sh\nubuntu:x:1000:1000::/home/ubuntu:/bin/bash\n"
    members = [member("etc", tarfile.DIRTYPE, mode=0o755), member("etc/passwd", data=theirs)]
    root = store.open("u", store.import_image("u", put(members)).digest).rootfs
    assert (root / "etc/passwd").read_bytes() == theirs


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress, zstandard.ZstdCompressor().compress])
def test_the_same_content_has_the_same_digest(
    store: ImageStore, put: Callable[..., Path], pack: Callable[[bytes], bytes]
) -> None:
    plain = store.import_image("plain", put(ORDINARY))
    packed = store.import_image("packed", put(pack(archive(ORDINARY)), "packed"))
    reordered = [ORDINARY[0], *(one for one in ORDINARY[:0:-1] if not one[0].islnk()), ORDINARY[3]]
    assert plain.digest == packed.digest == store.import_image("reordered", put(reordered, "r.tar")).digest
    names = [(info.name, info.digest) for info in store.list()]
    assert names == [("host", ""), *((name, plain.digest) for name in ("packed", "plain", "reordered"))]


def test_renames_elsewhere_do_not_count(store: ImageStore, put: Callable[..., Path], tmp_path: Path) -> None:
    """The kernel asks to retry a path with ``..`` in it whenever anything at all is renamed meanwhile."""
    pid = os.fork()
    if pid == 0:
        names = (tmp_path / "here", tmp_path / "there")
        names[0].touch()
        while True:
            names[0].rename(names[1])
            names[1].rename(names[0])
    try:
        up = member("up", tarfile.SYMTYPE, link="../" * 30 + "inside")
        members = [member("inside", tarfile.DIRTYPE, mode=0o755), up]
        members += [member(f"up/{at % 2}/{at}", data=b"x") for at in range(500)]
        root = store.open("x", store.import_image("x", put(members)).digest).rootfs
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert len(list((root / "inside").rglob("*"))) == 502


def test_the_umask_does_not_count(store: ImageStore, put: Callable[..., Path]) -> None:
    path = put([member("a/b/file", data=b"x")])
    digest = store.import_image("a", path).digest
    before = os.umask(0o077)
    try:
        assert store.import_image("b", path).digest == digest
    finally:
        os.umask(before)


def test_a_directory_and_its_tar_have_the_same_digest(
    store: ImageStore, put: Callable[..., Path], tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/file").write_bytes(b"content")
    (tree / "etc/also").hardlink_to(tree / "etc/file")
    (tree / "link").symlink_to("/etc/shadow")
    (tree / "linked-directory").symlink_to("/usr")
    os.mkfifo(tree / "pipe")
    tar = tmp_path / "tree.tar"
    with tarfile.open(tar, "w") as written:
        written.add(tree, ".")
    one, other = store.import_image("one", tree), store.import_image("other", tar)
    assert one.digest == other.digest
    root = store.open("one", one.digest).rootfs
    assert str((root / "link").readlink()) == "/etc/shadow"
    assert str((root / "linked-directory").readlink()) == "/usr"
    assert (root / "etc/also").stat().st_ino == (root / "etc/file").stat().st_ino


def test_the_digest_is_what_its_page_says(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "d/f").write_bytes(b"abc")
    (tree / "l").symlink_to("d/f")
    for path, mode in ((tree, 0o755), (tree / "d", 0o700), (tree / "d/f", 0o640)):
        path.chmod(mode)
    own = f"{os.getuid()} {os.getgid()}".encode()
    content = bytes.fromhex("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    expected = hashlib.sha256(
        b"agent-sandbox tree 1\n"
        + (b"d 755 " + own + b" 0 0\n")
        + (b"l 777 " + own + b" 1 3\nld/f")
        + (b"d 700 " + own + b" 1 0\nd")
        + (b"f 640 " + own + b" 3 32\nd/f" + content)
    ).hexdigest()
    summary = summarize(tree, lambda done: None)
    assert (summary.digest, summary.file_bytes, summary.entries) == (f"sha256:{expected}", 3, 4)


def test_any_difference_changes_the_digest(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "f").write_bytes(b"a")
    seen = [summarize(tree, lambda done: None).digest]
    for change in (
        lambda: (tree / "f").write_bytes(b"b"),
        lambda: (tree / "f").chmod(0o600),
        lambda: (tree / "f").rename(tree / "g"),
        lambda: (tree / "l").symlink_to("g"),
        lambda: (tree / "l").rename(tree / "m"),
        lambda: (tree / "d").mkdir(),
        lambda: tree.chmod(0o700),
    ):
        change()
        seen.append(summarize(tree, lambda done: None).digest)
    assert len(set(seen)) == len(seen)


HOSTILE: dict[str, list[Member]] = {
    "dot-dot": [member("../escaped", data=b"x")],
    "dot-dot inside": [member("a/../../escaped", data=b"x")],
    "link then through it": [member("a", tarfile.SYMTYPE, link="/"), member("a/../escaped", data=b"x")],
    "through a link out": [member("a", tarfile.SYMTYPE, link="/tmp"), member("a/escaped", data=b"x")],
    "directory through a link out": [member("a", tarfile.SYMTYPE, link="/usr"), member("a/b/c", tarfile.DIRTYPE)],
    "hard link out": [member("a", tarfile.LNKTYPE, link="../../../../etc/passwd")],
    "hard link to nothing": [member("a", tarfile.LNKTYPE, link="etc/shadow")],
    "file as a directory": [member("a", data=b"x"), member("a/b", data=b"x")],
    "file over a full directory": [member("a/b", data=b"x"), member("a", data=b"x")],
    "etc is a file": [member("etc", data=b"x")],
    "too deep": [member("/".join("d" * 300), data=b"x")],
    "long component": [member("n" * 300, data=b"x")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tar_is_refused_and_leaves_nothing(
    store: ImageStore, put: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    source = put(HOSTILE[name])
    before = outside(tmp_path)
    with pytest.raises(InvalidRequestError):
        store.import_image("bad", source)
    assert outside(tmp_path) == before
    assert nothing_new(tmp_path)


def test_links_of_the_image_end_inside_it(store: ImageStore, put: Callable[..., Path], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "passwd").write_text("untouched")
    up = "../" * 30
    members = [
        member("inside", tarfile.DIRTYPE, mode=0o755),
        member("absolute", tarfile.SYMTYPE, link="/inside"),
        member("absolute/one", data=b"1"),
        member("upwards", tarfile.SYMTYPE, link=f"{up}inside"),
        member("upwards/two", data=b"2"),
        member("replaced", tarfile.SYMTYPE, link=f"{victim}/passwd"),
        member("replaced", data=b"3"),
        member("/rooted", data=b"4"),
        member("tmp", tarfile.SYMTYPE, link=str(victim)),
        member("proc", tarfile.SYMTYPE, link=str(victim)),
        member("etc/passwd", tarfile.SYMTYPE, link=f"{victim}/passwd"),
        member("etc/resolv.conf", tarfile.SYMTYPE, link=f"{victim}/passwd"),
        member("stolen", tarfile.LNKTYPE, link="rooted"),
    ]
    before = outside(tmp_path) | {str(tmp_path / "root.tar")}
    root = store.open("x", store.import_image("x", put(members)).digest).rootfs
    assert outside(tmp_path) == before
    assert (victim / "passwd").read_text() == "untouched"
    assert (root / "inside/one").read_bytes() == b"1"
    assert (root / "inside/two").read_bytes() == b"2"
    assert (root / "replaced").read_bytes() == b"3"
    assert (root / "rooted").read_bytes() == b"4"
    assert (root / "tmp").is_dir()
    assert not (root / "tmp").is_symlink()
    assert "untouched" not in (root / "etc/passwd").read_text()
    assert (root / "etc/resolv.conf").read_bytes() == b""


def test_an_etc_that_is_a_link_is_refused(store: ImageStore, put: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    with pytest.raises(InvalidRequestError, match="/etc"):
        store.import_image("x", put([member("etc", tarfile.SYMTYPE, link=str(tmp_path / "victim"))]))
    assert list((tmp_path / "victim").iterdir()) == []
    assert nothing_new(tmp_path)


def huge_header() -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 33
    return info.tobuf() + bytes(10240)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a tar at all" * 100,
        archive(ORDINARY)[:1024],
        archive(ORDINARY)[:-20_000],
        gzip.compress(archive(ORDINARY))[:-20],
        lzma.compress(archive(ORDINARY))[:-20],
        zstandard.ZstdCompressor().compress(archive(ORDINARY))[:40] + b"damaged" * 20,
        huge_header(),
    ],
    ids=["empty", "noise", "cut header", "cut file", "cut gzip", "cut xz", "bad zstd", "huge header"],
)
def test_a_damaged_tar_is_refused(store: ImageStore, put: Callable[..., Path], tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not a whole tar"):
        store.import_image("bad", put(content))
    assert nothing_new(tmp_path)


def test_sources_that_are_not_there(store: ImageStore, tmp_path: Path) -> None:
    for source in (tmp_path / "nowhere", Path("/dev/null")):
        with pytest.raises(InvalidRequestError):
            store.import_image("bad", source)


def test_removing(store: ImageStore, put: Callable[..., Path], tmp_path: Path) -> None:
    digest = store.import_image("a:1", put(ORDINARY)).digest
    store.import_image("a:2", put(ORDINARY))
    store.remove("a:1", lambda: {digest})
    with pytest.raises(NotFoundError, match="image import"):
        store.resolve("a:1")
    with pytest.raises(ConflictError):
        store.remove("a:2", lambda: {digest})
    assert store.resolve("a:2").digest == digest
    assert store.resolve(f"a:2@{digest}").digest == digest
    store.remove(digest)
    for gone in ("a:2", digest):
        with pytest.raises(NotFoundError):
            store.resolve(gone)
        with pytest.raises(NotFoundError):
            store.remove(gone)
    with pytest.raises(NotFoundError):
        store.open("a:2", digest)
    assert [info.name for info in store.list()] == ["host"]
    assert not list((tmp_path / "data/images").glob("*sha256*"))
    with pytest.raises(InvalidRequestError):
        store.remove("host")


def test_a_name_moves_to_its_newest_content(store: ImageStore, put: Callable[..., Path]) -> None:
    old = store.import_image("a", put(ORDINARY)).digest
    new = store.import_image("a", put([*ORDINARY, member("more", data=b"x")])).digest
    assert store.resolve("a").digest == new != old
    assert store.resolve(old).digest == old
    assert [(info.name, info.digest) for info in store.list()] == [("host", ""), ("a", new), ("", old)]


def test_a_damaged_index_is_not_taken_for_an_empty_one(
    store: ImageStore, put: Callable[..., Path], tmp_path: Path
) -> None:
    store.import_image("a", put(ORDINARY))
    index = tmp_path / "data/images/index.json"
    index.write_text(index.read_text()[:-10])
    with pytest.raises(BackendError):
        store.import_image("b", put(ORDINARY))
    with pytest.raises(BackendError):
        store.resolve("a")


def test_what_a_crash_left_is_cleared(store: ImageStore, tmp_path: Path) -> None:
    for name in (".new-0123456789abcdef", ".gone-0123456789abcdef"):
        (tmp_path / "data/images" / name / "rootfs/bin").mkdir(parents=True)
    store.prepare(in_use=set())
    assert left_over(tmp_path / "data") == []


def test_an_import_under_way_is_no_leftover(store: ImageStore, put: Callable[..., Path], tmp_path: Path) -> None:
    def meanwhile(phase: str, done: int, total: int) -> None:
        ImageStore(tmp_path / "data").prepare(in_use=set())

    digest = store.import_image("a", put(ORDINARY), meanwhile).digest
    assert (store.open("a", digest).rootfs / "bin/tool").read_bytes() == b"\x7fELF tool"


def test_an_interrupted_import_leaves_nothing(store: ImageStore, put: Callable[..., Path], tmp_path: Path) -> None:
    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "digest":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.import_image("a", put(ORDINARY), interrupt)
    assert nothing_new(tmp_path)


def test_a_very_deep_tree_is_removed(store: ImageStore, tmp_path: Path) -> None:
    where = Path.cwd()
    deep = tmp_path / "data/images/.new-deep"
    deep.mkdir(parents=True)
    try:
        os.chdir(deep)
        for _ in range(3000):
            Path("d").mkdir()
            os.chdir("d")
    finally:
        os.chdir(where)
    store.prepare(in_use=set())
    assert left_over(tmp_path / "data") == []


def test_an_image_that_comes_into_use_meanwhile_stays(
    store: ImageStore, put: Callable[..., Path], tmp_path: Path
) -> None:
    """A sandbox is recorded, then the image opened: seen not at first, but when it is asked again."""
    digest = store.import_image("a", put(ORDINARY)).digest
    opened: list[bool] = []

    def in_use() -> set[str]:
        opened.append(store.open("a", digest).rootfs.is_dir() if not opened else False)
        return set() if len(opened) == 1 else {digest}

    with pytest.raises(ConflictError, match="in use"):
        store.remove("a", in_use)
    assert opened == [True, False]
    assert store.resolve("a").digest == digest
    assert (store.open("a", digest).rootfs / "bin/tool").is_file()
    assert left_over(tmp_path / "data") == []


def test_what_is_in_use_cannot_be_said(store: ImageStore, put: Callable[..., Path]) -> None:
    digest = store.import_image("a", put(ORDINARY)).digest
    calls: list[int] = []

    def fails() -> set[str]:
        calls.append(1)
        if len(calls) == 2:
            raise BackendError("the records cannot be read")
        return set()

    with pytest.raises(BackendError):
        store.remove("a", fails)
    assert store.resolve("a").digest == digest


def test_many_at_once(put: Callable[..., Path], tmp_path: Path) -> None:
    """Imports of the same content and removals of it, in processes of their own: each name leads to whole content."""
    one, other = put(ORDINARY, "1.tar"), put([*ORDINARY, member("more", data=b"x")], "2.tar")
    digests = {ImageStore(tmp_path / "data").import_image("first", path).digest for path in (one, other)}

    def work(number: int) -> None:
        store = ImageStore(tmp_path / "data")
        for turn in range(8):
            store.import_image(f"n{number}", (one, other)[(number + turn) % 2])
            for name in ("first", f"n{number}", f"n{(number + 1) % 4}")[: turn % 4]:
                with contextlib.suppress(NotFoundError):
                    store.remove(name)

    children = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(number)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0, 0]
    store = ImageStore(tmp_path / "data")
    for info in store.list():
        if info.digest:
            assert info.digest in digests
            assert tool_of(store.open(info.name, info.digest).rootfs) == b"\x7fELF tool"
    assert left_over(tmp_path / "data") == []


def tool_of(root: Path) -> bytes:
    return (root / "bin/other").read_bytes()


def test_version_1_of_an_image_is_read(store: ImageStore, put: Callable[..., Path], tmp_path: Path) -> None:
    digest = store.import_image("a", put(ORDINARY)).digest
    path = tmp_path / "data/images" / digest.replace(":", "-") / "image.json"
    path.write_text(f"""{{
 "version": 1,
 "name": "",
 "digest": "{digest}",
 "file_bytes": 300047,
 "entries": 11,
 "created_at": 1750000000.5
}}""")
    assert store.inspect("a") == ImageInfo("a", digest, 300_047, 11, 1_750_000_000.5)
    assert store.open("a", digest).env == {}
    path.write_text(path.read_text().replace('"version": 1', '"version": 3'))
    with pytest.raises(BackendError, match="another version"):
        store.inspect("a")


def test_the_environment_and_the_manifests_of_an_image(
    store: ImageStore, put: Callable[..., Path], tmp_path: Path
) -> None:
    digest = store.import_image("a", put(ORDINARY)).digest
    other = store.import_image("b", put([*ORDINARY, member("more", data=b"x")])).digest
    path = tmp_path / "data/images" / digest.replace(":", "-") / "image.json"
    manifest = "sha256:" + "0a" * 32
    value = json.loads(path.read_text()) | {"manifests": [manifest]}
    value["config"]["env"] = {"PATH": "/x"}
    path.write_text(json.dumps(value))
    assert store.resolve("a").env == store.open("a", digest).env == store.open("", digest).env == {"PATH": "/x"}
    assert store.resolve("b").env == {}
    for reference in (manifest, f"a@{manifest}", f"gone@{manifest}"):
        assert store.resolve(reference).digest == digest
    assert store.resolve(f"a@{other}").digest == other
    with pytest.raises(NotFoundError):
        store.resolve("a@sha256:" + "0b" * 32)
    store.remove(f"a@{manifest}")
    assert [info.name for info in store.list()] == ["host", "b"]


@pytest.mark.parametrize(
    "text",
    ["", "A", "-a", "a//b", "a..b", "a b", "a:", "a:b:c", "a@sha256:12", "sha256:xyz", "a" * 129, "ä", "../a", "a\n"],
)
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_reference(text)


def test_names() -> None:
    digest = "sha256:" + "0a" * 32
    assert parse_reference("debian:12-slim") == Reference("debian:12-slim", "")
    assert parse_reference("team/tools.x_y:V1") == Reference("team/tools.x_y:V1", "")
    assert parse_reference(f"a@{digest}") == Reference("a", digest)
    assert parse_reference(digest) == Reference("", digest)


def test_the_name_host_is_taken(store: ImageStore, put: Callable[..., Path]) -> None:
    with pytest.raises(InvalidRequestError):
        store.import_image("host", put(ORDINARY))
    resolved = store.resolve("host")
    assert (resolved.digest, resolved.pinned) == ("", False)
    with pytest.raises(SandboxError):
        store.resolve("host@sha256:" + "0" * 64)
