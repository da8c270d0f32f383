"""Files and archives on a backend with a real filesystem. Numbers are the fault list's."""

from __future__ import annotations

import asyncio
import io
import tarfile

import pytest

from agent_sandbox.backends.base import Backend
from agent_sandbox.conformance.box import Box
from agent_sandbox.conformance.suite import SuiteBase
from agent_sandbox.errors import InvalidRequestError, LimitExceededError, NotFoundError, SandboxError
from agent_sandbox.types import WORKSPACE

TREE = """
import os, stat
for top in ('/workspace',):
    for folder, names, files in sorted(os.walk(top)):
        names.sort()
        for name in sorted(names + files) + ['.']:
            path = os.path.join(folder, name)
            s = os.lstat(path)
            kind = stat.S_IFMT(s.st_mode)
            extra = os.readlink(path) if kind == stat.S_IFLNK else ''
            data = hash_of(path) if kind == stat.S_IFREG else ''
            links = s.st_nlink if kind == stat.S_IFREG else 0
            attributes = sorted((a, os.getxattr(path, a)) for a in os.listxattr(path, follow_symlinks=False)) \
                if kind in (stat.S_IFREG, stat.S_IFDIR) else []
            print(repr((path, oct(s.st_mode), s.st_uid, s.st_mtime_ns, extra, data, links, attributes)))
"""
HASH = """
import hashlib
def hash_of(path):
    try:
        with open(path, 'rb') as f:
            size = os.fstat(f.fileno()).st_size
            h = hashlib.sha256()
            left = min(size, 1 << 20)
            h.update(f.read(left)); f.seek(max(0, size - (1 << 20))); h.update(f.read())
            return (size, h.hexdigest())
    except PermissionError:
        return 'unreadable'
"""
DUMP = "import os, stat\n" + HASH + TREE
BUILD = r"""
import os, socket, time
os.chdir('/workspace')
os.makedirs('deep/' + '/'.join(['d'] * 50)); os.mkdir('empty'); os.mkdir('closed')
open('plain', 'w').write('hello'); open('run', 'w').write('#!/bin/sh\n'); os.chmod('run', 0o4755)
open(b'\xff\xfe name\n', 'w').write('odd'); open('x' * 200, 'w').write('long')
os.link('plain', 'deep/hard'); os.symlink('plain', 'soft'); os.symlink('/etc/passwd', 'absolute')
os.symlink('nowhere', 'dangling'); os.symlink('y' * 300, 'longlink'); os.mkfifo('pipe', 0o600)
open('closed/secret', 'w').write('s'); os.chmod('closed/secret', 0); os.chmod('closed', 0o500)
open('attributes', 'w').write('x'); os.setxattr('attributes', 'user.colour', b'r\x00d')
with open('sparse', 'wb') as f:
    f.truncate(10 * 1024 ** 3); f.seek(5 * 1024 ** 3); f.write(b'middle')
os.utime('plain', ns=(1, 1234567890123456789)); os.utime('soft', ns=(1, 987654321), follow_symlinks=False)
os.mkdir('sticky'); os.chmod('sticky', 0o1777); os.utime('sticky', ns=(1, 1111111111111111111))
s = socket.socket(socket.AF_UNIX); s.bind('sock')
os.utime('.', ns=(1, 1500000000000000001))
"""


def hostile_tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """A tar of exactly these members, whatever their names."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    """One member's header."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o777
    return info


class FileSuite(SuiteBase):
    """Faults 17 to 21."""

    async def test_f18_uploads_belong_to_the_command_user_and_are_seen_at_once(self, box: Box) -> None:
        await box.put("new/f.sh", b"#!/bin/sh\necho ran\n", 0o755)
        assert await box.shell("./new/f.sh") == "ran\n"
        uid, gid = box.spec.uid, box.spec.gid
        assert await box.shell("stat -c '%u:%g %a' new new/f.sh") == f"{uid}:{gid} 755\n{uid}:{gid} 755\n"
        await box.shell("echo more >> new/f.sh; rm -r new")

    async def test_f19_two_uploads_into_one_new_directory(self, box: Box) -> None:
        await asyncio.gather(*(box.put(f"a/b/c/{n}", b"%d" % n) for n in range(16)))
        assert [await box.get(f"a/b/c/{n}") for n in range(16)] == [b"%d" % n for n in range(16)]

    async def test_f19_a_reader_never_sees_half_a_file(self, box: Box) -> None:
        size = 300_000
        await box.put("f", b"0" * size)

        async def write() -> None:
            for n in range(1, 25):
                await box.put("f", b"%d" % (n % 10) * size)

        writer = asyncio.create_task(write())
        while not writer.done():
            data = await box.get("f")
            assert len(data) == size
            assert len(set(data)) == 1
        await writer
        assert await box.shell("ls -A") == "f\n"

    @pytest.mark.parametrize("target", ["/etc", "/tmp", "../tmp", "/proc/self/root/tmp", "/workspace/../tmp", "/"])
    async def test_f20_a_link_out_never_lets_a_write_land_outside(self, box: Box, target: str) -> None:
        await box.shell(f"ln -s {target} x; ln -s {target}/planted y")
        for name in ("x/planted", "y", "x/new/planted"):
            with pytest.raises(SandboxError) as caught:
                await box.put(name, b"bad")
            assert isinstance(caught.value, InvalidRequestError)
        found = await box.run("ls -d /tmp/planted /etc/planted /planted /tmp/new 2>/dev/null")
        assert found.stdout == b""

    async def test_f20_a_link_inside_is_followed(self, box: Box) -> None:
        await box.shell("mkdir real; ln -s real rel; ln -s /workspace/real abs; ln -s real/made up; ln -s rel two")
        for name in ("rel/a", "abs/b", "two/c", "up"):
            await box.put(name, name.encode())
        assert await box.shell("ls real; test -L up") == "a\nb\nc\nmade\n"
        await box.shell("ln -s loop loop")
        with pytest.raises(InvalidRequestError):
            await box.put("loop/x", b"")

    async def test_f20_a_racing_link_never_lets_a_write_land_outside(self, box: Box) -> None:
        race = (
            "import os\nos.makedirs('/tmp/out', exist_ok=True)\nos.makedirs('real', exist_ok=True)\nopen('go','w')\n"
            "while True:\n"
            " try:\n  os.rename('real','aside'); os.symlink('/tmp/out','real'); os.unlink('real'); os.rename('aside','real')\n"
            " except OSError: pass\n"
        )
        racer = asyncio.create_task(box.python(race, timeout=4))
        await asyncio.sleep(0.5)
        while not racer.done():
            try:
                await box.put("real/planted", b"x")
            except SandboxError:
                pass
        assert await box.shell("ls -A /tmp/out") == ""

    async def test_f21_tmp_is_readable(self, box: Box) -> None:
        await box.shell("echo from tmp > /tmp/f; chmod 600 /tmp/f; ln -s /tmp/f link")
        assert await box.get("/tmp/f") == b"from tmp\n"
        assert await box.get("link") == b"from tmp\n"

    async def test_f21_special_files_are_errors_not_hangs(self, box: Box) -> None:
        await box.shell("mkfifo pipe; ln -s pipe link; ln -s /proc/self/environ env")
        paths = [
            "pipe",
            "link",
            "/dev/null",
            "/dev/zero",
            "/dev/urandom",
            "/proc/self/environ",
            "/proc/1/environ",
            "env",
        ]
        for path in paths:
            async with asyncio.timeout(5):
                with pytest.raises(SandboxError):
                    await box.get(path)

    async def test_what_only_root_may_read_stays_so(self, box: Box) -> None:
        for path in ("/etc/shadow", "/etc/gshadow", "/.sandboxd.key", "/run/sandboxd/config"):
            with pytest.raises(SandboxError):
                await box.get(path)


class SnapshotSuite(SuiteBase):
    """Faults 30, 31 and 34: the archive that a workspace leaves by and returns in."""

    async def test_f31_everything_survives(self, backend: Backend, box: Box) -> None:
        built = await box.python(BUILD)
        assert built.status == 0, built.stderr
        before = (await box.python(DUMP)).text
        archive = await box.export()
        assert len(archive) < 1_000_000
        other = await self.new_box(backend)
        await other.load(archive)
        after = await other.python(DUMP)
        expected = [line for line in before.splitlines() if "/workspace/sock'" not in line]
        assert after.text.splitlines() == expected
        assert await other.shell("du -k sparse | cut -f1") != "10485760\n"
        assert (await other.shell("stat -c %i plain deep/hard | uniq | wc -l")).strip() == "1"
        again = await other.export()
        third = await self.new_box(backend)
        await third.load(again)
        assert (await third.python(DUMP)).text == after.text

    async def test_f31_sockets_are_reported(self, box: Box) -> None:
        await box.python("import socket; socket.socket(socket.AF_UNIX).bind('sock')")

        async def drop(data: bytes) -> None:
            pass

        report = await box.backend.export_workspace(box.id, drop, 1_000_000)
        assert report.skipped_total == 1
        assert report.skipped[0][0].endswith("sock")

    async def test_f34_a_hostile_tar_lands_nothing_outside(self, backend: Backend) -> None:
        link = member("out", tarfile.SYMTYPE, "/tmp")
        for members in (
            [(member("/tmp/absolute"), b"x")],
            [(member("../tmp/dotdot"), b"x")],
            [(member("a/../../tmp/dotdot"), b"x")],
            [(link, b""), (member("out/through"), b"x")],
            [(member("up", tarfile.SYMTYPE, ".."), b""), (member("up/tmp/through"), b"x")],
            [(member("hard", tarfile.LNKTYPE, "/etc/passwd"), b"")],
            [(member("hard", tarfile.LNKTYPE, "../etc/passwd"), b"")],
            [(member("out2", tarfile.SYMTYPE, "/etc"), b""), (member("hard", tarfile.LNKTYPE, "out2/passwd"), b"")],
            [(member("out", tarfile.SYMTYPE, "/tmp/over"), b""), (member("out"), b"x")],
        ):
            box = await self.new_box(backend)
            try:
                await box.load(hostile_tar(*members))
            except InvalidRequestError:
                pass
            left = await box.run("find /tmp -mindepth 1; cat hard out2/passwd 2>/dev/null | head -1; ls /tmp/over")
            assert b"/tmp/" not in left.stdout
            assert (await box.run(["test", "-e", "hard"])).status == 1
            await backend.destroy(box.id)

    async def test_f34_devices_are_left_out(self, backend: Backend, box: Box) -> None:
        await box.load(hostile_tar((member("null", tarfile.CHRTYPE), b""), (member("f"), b"kept")))
        assert await box.get("f") == b"kept"
        with pytest.raises(NotFoundError):
            await box.get("null")

    async def test_f34_broken_archives_are_refused(self, backend: Backend) -> None:
        good = hostile_tar((member("f"), b"x" * 5_000))
        huge = bytearray(hostile_tar((member("f"), b"")))
        huge[124:136] = b"77777777777\0"
        header = bytes(huge[:148]) + b"        " + bytes(huge[156:512])
        huge[148:156] = b"%06o\0 " % sum(header)
        for archive in (good[:3_000], b"not a tar" * 1_000, bytes(huge), good[:512] + good[:512]):
            box = await self.new_box(backend)
            async with asyncio.timeout(20):
                with pytest.raises(SandboxError):
                    await box.load(archive)
            assert await box.shell("echo alive") == "alive\n"
            await backend.destroy(box.id)

    async def test_f34_ordinary_tars_are_welcome(self, backend: Backend) -> None:
        formats = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
        for form in formats:
            buffer = io.BytesIO()
            name = "folder/" * (20 if form == tarfile.USTAR_FORMAT else 40) + "f"
            with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
                info = member(name)
                info.size, info.mtime = 5, 1_700_000_000
                tar.addfile(info, io.BytesIO(b"hello"))
            box = await self.new_box(backend)
            await box.load(buffer.getvalue())
            assert await box.get(name) == b"hello"
            await backend.destroy(box.id)

    async def test_what_filled_a_disk_fits_on_another_as_often_as_one_likes(self, backend: Backend) -> None:
        box = await self.new_box(backend, disk_mb=32)
        fill = "import os\nn = 0\ntry:\n while True:\n  open(f'{n:05}', 'wb').write(os.urandom(n * 37 % 9000)); n += 1\nexcept OSError as e: print(e.errno)"
        assert (await box.python(fill, timeout=60)).text == "28\n"
        await box.run("head -c 9000000 /dev/zero > rest")
        for _ in range(3):
            archive = await box.export()
            other = await self.new_box(backend, disk_mb=32)
            await other.load(archive)
            assert await other.shell("find . -type f | sort | xargs sha256sum") == await box.shell(
                "find . -type f | sort | xargs sha256sum"
            )
            await backend.destroy(box.id)
            box = other
        assert (await box.run("head -c 9000000 /dev/zero > more")).status != 0

    async def test_a_full_disk_refuses_the_import(self, backend: Backend) -> None:
        box = await self.new_box(backend, disk_mb=16)
        with pytest.raises(LimitExceededError):
            await box.load(hostile_tar((member("big"), bytes(32 * 1024 * 1024))))
        assert (await box.run(["true"], workdir=WORKSPACE)).status == 0
