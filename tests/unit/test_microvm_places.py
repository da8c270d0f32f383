"""What a microVM's environment keeps on the host: its record, its key, its drives, and which process it is."""

import os
import stat
import subprocess
from pathlib import Path

import msgspec
import pytest

from agent_sandbox.backends.linux.process import Process, processes_of
from agent_sandbox.backends.microvm.config_image import SIZE, Identity, config_image, new_identity
from agent_sandbox.backends.microvm.places import Environment, Places, Record
from agent_sandbox.errors import BackendError, NotFoundError
from agent_sandbox.types import SandboxSpec

SPEC = SandboxSpec(
    image="host",
    image_digest="",
    cpus=1.5,
    memory_mb=256,
    pids_limit=64,
    disk_mb=64,
    tmp_mb=32,
    env={"NAME": "\N{SNOWMAN}"},
)
RECORD = Record("sbone-1", SPEC, 0x7800_0000, {"PATH": "/bin"})


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    made = Environment(tmp_path / "sbone-1", tmp_path / "run")
    made.reserve()
    made.make(RECORD)
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_record_is_read_back_and_open_to_nobody(environment: Environment) -> None:
    assert environment.record() == RECORD
    assert len(environment.key()) == 32
    files = [path for path in environment.directory.iterdir() if path.is_file()]
    assert {path.name for path in files} == {"spec.json", "key"}
    assert {mode(path) for path in files} == {0o600}
    assert mode(environment.directory) == 0o700


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "id": "sbone-1"}', '{"version": 1, "id": "other-1"}']
)
def test_a_damaged_record_is_said_and_none_is_no_environment(environment: Environment, text: str) -> None:
    (environment.directory / "spec.json").write_text(text)
    assert environment.is_known()
    with pytest.raises(BackendError, match="destroy it"):
        environment.record()
    environment.forget()
    with pytest.raises(NotFoundError):
        environment.record()
    with pytest.raises(NotFoundError):
        environment.key()


def test_a_record_of_root_as_the_monitors_user_is_refused(environment: Environment) -> None:
    path = environment.directory / "spec.json"
    path.write_text(path.read_text().replace(str(0x7800_0000), "0"))
    with pytest.raises(BackendError, match="damaged"):
        environment.record()


def test_the_configuration_is_a_length_and_a_map_in_a_drive_of_8_kib() -> None:
    identity = Identity(bytes(range(16)), "0123456789abcdef" * 2, bytes(range(64)))
    drive = config_image("sbone-1", SPEC, b"k" * 32, identity)
    assert len(drive) == SIZE == 8192
    length = int.from_bytes(drive[:4], "big")
    assert not any(drive[4 + length :])
    assert msgspec.msgpack.decode(drive[4 : 4 + length]) == {
        "key": b"k" * 32,
        "uid": 1000,
        "gid": 1000,
        "memory_bytes": 268_435_456,
        "pids_limit": 64,
        "instance": bytes(range(16)),
        "hostname": "sbone-1",
        "machine_id": "0123456789abcdef0123456789abcdef",
        "entropy": bytes(range(64)),
        "tmp_bytes": 33_554_432,
        "layered": 0,
    }


def test_a_templates_configuration_has_no_key() -> None:
    drive = config_image("template", SPEC, None, new_identity())
    told = msgspec.msgpack.decode(drive[4 : 4 + int.from_bytes(drive[:4], "big")])
    assert "key" not in told
    assert told["hostname"] == "template"


def test_each_start_has_another_identity_with_the_same_key(environment: Environment) -> None:
    drives = []
    for _ in range(2):
        environment.write_config(RECORD)
        assert mode(environment.config) == 0o600
        drives.append(environment.config.read_bytes())
    told = [msgspec.msgpack.decode(drive[4 : 4 + int.from_bytes(drive[:4], "big")]) for drive in drives]
    assert told[0]["key"] == told[1]["key"] == environment.key()
    for name in ("instance", "machine_id", "entropy"):
        assert told[0][name] != told[1][name]


def test_the_images_content_stays_when_its_first_name_goes(environment: Environment, tmp_path: Path) -> None:
    content = tmp_path / "content.erofs"
    content.write_bytes(b"root")
    assert not environment.has_root()
    environment.link_root(content, "sha256-content")
    content.unlink()
    assert environment.has_root()
    assert environment.root.read_bytes() == b"root"
    assert environment.root_key() == "sha256-content"


def test_the_process_is_known_by_its_start_and_gone_after_a_stop(environment: Environment) -> None:
    assert environment.process() is None
    environment.make_run()
    assert mode(environment.run) == 0o700
    environment.write_process(os.getpid())
    found = environment.process()
    assert found == Process.of(os.getpid())
    assert found is not None
    assert found.alive()
    assert not Process(found.pid, found.start - 1).alive()
    environment.clear()
    assert environment.process() is None


def test_processes_are_found_by_their_user() -> None:
    assert Process.of(os.getpid()) in processes_of(os.getuid())
    assert Process.of(2**22 + 1) is None


def test_a_process_that_has_ended_is_not_kept(environment: Environment) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    environment.make_run()
    with pytest.raises(ProcessLookupError):
        environment.write_process(ended.pid)


def test_a_sockets_path_is_short_whatever_the_data_directorys(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 200) / ("e" * 200)
    longest = Places(deep, 0x7800_0000, "firecracker").environment("a" * 40)
    assert len(os.fsencode(longest.run / "guest.sock")) <= 107
    assert Places(deep, 0x7800_0000, "qemu").run != Places(tmp_path, 0x7800_0000, "qemu").run


def test_a_kernel_stays_while_its_server_runs_whatever_becomes_of_its_place(tmp_path: Path) -> None:
    places = Places(tmp_path / "data", 0x7800_0000, "qemu")
    places.home.mkdir(parents=True)
    files = [tmp_path / "vmlinuz", tmp_path / "initramfs"]
    for name in ("old", "new"):
        for file in files:
            file.unlink(missing_ok=True)
            file.write_text(f"{name} {file.name}")
        kept = places.keep_kernel(name, *files)
        kept[0].chmod(0o600)  # as a server leaves it that is killed while it copies to another disk
        assert places.keep_kernel(name, *files) == kept
        assert kept[0].stat().st_mode & 0o777 == 0o644
    for file in files:
        file.unlink()
    assert [path.read_text() for path in kept] == ["new vmlinuz", "new initramfs"]
    assert sorted(kept[0].parent.iterdir()) == sorted(kept)
