"""The host image: what of a host gets into its skeleton, and what does not. The host here is made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox.errors import UnsupportedError
from agent_sandbox.images.host import HostImage, fingerprint, skeleton


@pytest.fixture
def host(tmp_path: Path) -> Path:
    root = tmp_path / "host"
    for name in (
        "usr/bin",
        "usr/lib",
        "usr/local/bin",
        "usr/src",
        "etc/ssl/certs",
        "etc/ssl/private",
        "etc/alternatives",
    ):
        (root / name).mkdir(parents=True)
    for name in ("root/.ssh", "home/me", "var/run", "opt/thing", "etc/python3.12"):
        (root / name).mkdir(parents=True)
    for name, target in {"bin": "usr/bin", "lib": "usr/lib"}.items():
        (root / name).symlink_to(target)
    files = {
        "etc/shadow": 0o640,
        "etc/passwd": 0o644,
        "etc/machine-id": 0o644,
        "etc/ssl/certs/all.crt": 0o644,
        "etc/ssl/certs/private.pem": 0o600,
        "etc/ssl/private/key.pem": 0o644,
        "etc/ld.so.cache": 0o644,
        "etc/services": 0o600,
        "etc/python3.12/sitecustomize.py": 0o644,
        "root/.ssh/id": 0o644,
    }
    for name, mode in files.items():
        (root / name).write_text(f"of the host: {name}")
        (root / name).chmod(mode)
    (root / "etc/alternatives/awk").symlink_to("/usr/bin/mawk")
    (root / "etc/localtime").symlink_to("/usr/share/zoneinfo/UTC")
    return root


def test_what_is_in_it(host: Path) -> None:
    entries = skeleton(host, 1234, 4321)
    assert entries["bin"].target == "usr/bin"
    assert "sbin" not in entries
    assert entries["etc/alternatives/awk"].target == "/usr/bin/mawk"
    assert entries["etc/ld.so.cache"].content == b"of the host: etc/ld.so.cache"
    assert entries["etc/ssl/certs/all.crt"].content == b"of the host: etc/ssl/certs/all.crt"
    assert entries["etc/python3.12/sitecustomize.py"].kind == "f"
    assert entries["etc/passwd"].content.splitlines()[-1] == b"sandbox:x:1234:4321:sandbox:/workspace:/bin/sh"
    assert entries["etc/group"].content.splitlines()[-1] == b"sandbox:x:4321:"
    assert entries["etc/resolv.conf"].content == b""
    assert entries["var/tmp"].target == "/tmp"


def test_what_is_not_in_it(host: Path) -> None:
    entries = skeleton(host, 1000, 1000)
    for path in ("etc/shadow", "etc/ssl/private", "etc/ssl/certs/private.pem", "etc/services"):
        assert path not in entries
    assert entries["etc/machine-id"].content == b""
    for directory in ("root", "home", "opt", "usr", "mnt", "var/lib"):
        assert entries[directory].kind == "d"
        assert not [path for path in entries if path.startswith(directory + "/")]
    leaked = [path for path, entry in entries.items() if b"etc/passwd" in entry.content or b"private" in entry.content]
    assert leaked == []


def test_it_is_built_once_and_never_changed(host: Path, tmp_path: Path) -> None:
    image = HostImage(tmp_path / "host-image", 1000, 1000, host)
    first = image.rootfs()
    assert (first / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert str((first / "lib").readlink()) == "usr/lib"
    assert HostImage(tmp_path / "host-image", 1000, 1000, host).rootfs() == first
    inode = first.stat().st_ino
    (host / "etc/ld.so.cache").write_text("after an upgrade")
    image.prepare(in_use={first})
    second = image.rootfs()
    assert second != first
    assert (first / "etc/ld.so.cache").read_text() == "of the host: etc/ld.so.cache"
    assert first.stat().st_ino == inode
    image.prepare(in_use=set())
    assert not first.exists()
    assert second.is_dir()


def test_what_is_shown_of_the_host(host: Path, tmp_path: Path) -> None:
    image = HostImage(tmp_path / "host-image", 1000, 1000, host)
    empty = image.rootfs() / "mnt"
    assert image.binds() == [(host / "usr", "/usr"), (empty, "/usr/local"), (empty, "/usr/src")]
    assert list(empty.iterdir()) == []
    (host / "usr/src").rmdir()
    (host / "usr/src").symlink_to("/elsewhere")
    assert image.binds() == [(host / "usr", "/usr"), (empty, "/usr/local")]


def test_a_host_without_merged_usr_is_refused(host: Path) -> None:
    (host / "sbin").mkdir()
    with pytest.raises(UnsupportedError, match="import an image"):
        skeleton(host, 1000, 1000)


def test_the_fingerprint_is_of_everything(host: Path) -> None:
    base = skeleton(host, 1000, 1000)
    seen = {fingerprint(base), fingerprint(skeleton(host, 1001, 1000)), fingerprint(skeleton(host, 1000, 1001))}
    (host / "etc/alternatives/awk").unlink()
    (host / "etc/alternatives/awk").symlink_to("/usr/bin/gawk")
    seen.add(fingerprint(skeleton(host, 1000, 1000)))
    assert len(seen) == 4
