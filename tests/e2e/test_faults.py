"""The known faults that need the whole server, on the embedded backend. Numbers are the fault list's."""

import base64
import concurrent.futures
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from agent_sandbox.client import Sandbox, SandboxClient, SnapshotInfo
from agent_sandbox.errors import ConflictError, InvalidRequestError, LimitExceededError, NotFoundError, SandboxError
from tests.e2e.serving import KEY, Served, serving

pytestmark = pytest.mark.real


BACKENDS = ["runc", "gvisor"]


@pytest.fixture(scope="module", params=BACKENDS)
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("e2e") / "data", request.param) as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[SandboxClient]:
    with server.client() as client:
        yield client


@pytest.fixture
def sandbox(client: SandboxClient) -> Iterator[Sandbox]:
    with client.create(disk_mb=64, memory_mb=256) as sandbox:
        yield sandbox


def tree(sandbox: Sandbox) -> str:
    """Everything in the workspace, entry by entry."""
    program = (
        "import os, hashlib\n"
        "for folder, names, files in sorted(os.walk('/workspace')):\n"
        "    for name in sorted(names + files) + ['.']:\n"
        "        path = os.path.join(folder, name); s = os.lstat(path)\n"
        "        data = open(path,'rb').read() if os.path.isfile(path) and not os.path.islink(path) else b''\n"
        "        link = os.readlink(path) if os.path.islink(path) else ''\n"
        "        print(repr((path, oct(s.st_mode), s.st_mtime_ns, hashlib.sha256(data).hexdigest(), link)))\n"
    )
    result = sandbox.exec(["python3", "-c", program])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_f11_a_script_of_a_mebibyte(sandbox: Sandbox) -> None:
    line = "n=$((n+1)) # é " + "x" * 80 + "\n"
    script = "n=0\n" + line * (1_048_576 // len(line.encode()) + 1) + 'echo "$n $# $0"; exit 5\n'
    result = sandbox.exec(script)
    count = script.count("n=$((")
    assert (result.stdout, result.exit_code) == (f"{count} 0 /bin/sh\n", 5)


def test_f11_an_argument_list_of_a_mebibyte(sandbox: Sandbox) -> None:
    words = ["y" * 1_000] * 1_049
    result = sandbox.exec(["sh", "-c", 'echo "$#"', "sh", *words])
    assert result.stdout == "1049\n"


@pytest.mark.parametrize(
    "options",
    [
        {"workdir": "/no/such"},
        {"workdir": "relative\0nul"},
        {"env": {"A=B": "1"}},
        {"env": {"": "1"}},
        {"env": {"A\0": "1"}},
        {"env": {"A": "1\0"}},
        {"timeout_seconds": 0},
        {"timeout_seconds": -1},
        {"timeout_seconds": 1e9},
    ],
    ids=repr,
)
def test_f15_what_cannot_be_right_is_a_400_before_anything_starts(sandbox: Sandbox, options: dict[str, object]) -> None:
    with pytest.raises(SandboxError) as caught:
        sandbox.exec("touch started", **options)  # type: ignore[arg-type]
    assert caught.value.code in {"invalid_request", "validation_error"}
    assert sandbox.list_files() == []


def test_f15_an_empty_command(sandbox: Sandbox) -> None:
    for command in ("", [], [""], "a\0b", ["a\0b"]):
        with pytest.raises(SandboxError) as caught:
            sandbox.exec(command)
        assert caught.value.code in {"invalid_request", "validation_error"}


def test_f27_a_rollback_that_fails_halfway_leaves_the_sandbox_as_it_was(server: Served, sandbox: Sandbox) -> None:
    sandbox.write_file("/workspace/f", b"before")
    snapshot = sandbox.snapshot()
    sandbox.exec("echo after > f; sleep 300 > /dev/null 2>&1 & echo $! > pid")
    before, environments = tree(sandbox), server.environments()
    (stored,) = (server.data / "store" / "packs").iterdir()
    good = stored.read_bytes()
    for damage in (good[: len(good) // 2], b"", bytes(len(good)), good[:60] + bytes(len(good) - 60)):
        stored.write_bytes(damage)
        with pytest.raises(SandboxError):
            sandbox.rollback(snapshot)
        assert tree(sandbox) == before
        assert sandbox.exec("kill -0 $(cat pid)").exit_code == 0
        assert sandbox.refresh().status == "running"
    stored.write_bytes(good)
    sandbox.rollback(snapshot)
    assert sandbox.read_file("/workspace/f") == b"before"
    wait_for(lambda: len(server.environments()) == len(environments))


def wait_for(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


def test_f28_delete_twice_and_at_once(client: SandboxClient) -> None:
    sandbox = client.create()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        outcomes = [pool.submit(sandbox.destroy) for _ in range(8)]
    for outcome in outcomes:
        assert outcome.exception() is None or isinstance(outcome.exception(), NotFoundError)
    with pytest.raises(NotFoundError):
        sandbox.destroy()
    with pytest.raises(NotFoundError):
        client.get(sandbox.id)


def test_f28_delete_while_it_is_being_made(client: SandboxClient, server: Served) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        making = [pool.submit(client.create) for _ in range(4)]
        end = time.monotonic() + 30
        while not all(future.done() for future in making) and time.monotonic() < end:
            for sandbox in client.list_sandboxes():
                try:
                    sandbox.destroy()
                except (NotFoundError, ConflictError):
                    continue
    for future in making:
        if future.exception() is None:
            try:
                future.result().destroy()
            except NotFoundError:
                continue
        else:
            assert isinstance(future.exception(), (NotFoundError, ConflictError))
    assert client.list_sandboxes() == []


def perform(operation: str, sandbox: Sandbox, snapshot: SnapshotInfo) -> object:
    if operation == "exec":
        return sandbox.exec("sleep 300")
    if operation == "stream":
        return list(sandbox.exec_stream("sleep 300"))
    return sandbox.snapshot() if operation == "snapshot" else sandbox.rollback(snapshot)


def test_f28_delete_during_everything(client: SandboxClient) -> None:
    for operation in ("exec", "snapshot", "rollback", "stream"):
        sandbox = client.create()
        sandbox.write_file("/workspace/f", b"x" * 2_000_000)
        snapshot = sandbox.snapshot()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            call = pool.submit(perform, operation, sandbox, snapshot)
            time.sleep(0.1)
            sandbox.destroy()
            error = call.exception(timeout=60)
        assert error is None or isinstance(error, SandboxError), error
        assert operation not in ("exec", "stream") or error is not None
        with pytest.raises(NotFoundError):
            client.get(sandbox.id)
        client.delete_snapshot(snapshot.id)


def test_f30_write_snapshot_change_restore_five_times(sandbox: Sandbox) -> None:
    sandbox.exec("mkdir -p a/b; echo 0 > a/b/f; ln -s a/b/f link; echo gone > deleted")
    for round in range(5):
        sandbox.exec(f"echo {round} > a/b/f; rm -f deleted; echo new > new{round}; chmod 60{round % 4 + 4} a/b/f")
        before = tree(sandbox)
        snapshot = sandbox.snapshot(f"round {round}")
        sandbox.exec("rm -rf a; echo later > later; echo back > deleted; mkdir link2; echo x > /tmp/left")
        assert tree(sandbox) != before
        sandbox.rollback(snapshot)
        assert tree(sandbox) == before
        assert sandbox.exec("ls /tmp").stdout == ""
        assert sandbox.refresh().data["source_snapshot_id"] == snapshot.id


def test_a_fork_is_the_snapshot_and_goes_its_own_way(client: SandboxClient, sandbox: Sandbox) -> None:
    sandbox.write_file("/workspace/d/f", b"parent")
    snapshot, before = sandbox.snapshot(), tree(sandbox)
    forks = [client.fork(snapshot, memory_mb=128 + n) for n in range(3)]
    for number, fork in enumerate(forks):
        assert tree(fork) == before
        assert fork.data["memory_mb"] == 128 + number
        fork.write_file("/workspace/d/f", b"fork %d" % number)
    assert [fork.read_file("/workspace/d/f") for fork in forks] == [b"fork 0", b"fork 1", b"fork 2"]
    assert sandbox.read_file("/workspace/d/f") == b"parent"
    for fork in forks:
        fork.destroy()


def test_f35_a_full_sandbox_can_still_be_snapshotted_and_rolled_back(sandbox: Sandbox) -> None:
    empty = sandbox.snapshot()
    assert sandbox.exec("head -c 200000000 /dev/zero > fill").exit_code != 0
    with pytest.raises(LimitExceededError):
        sandbox.write_file("/workspace/more", b"x" * 1_000_000)
    full = sandbox.snapshot()
    assert full.size_bytes > 30_000_000
    sandbox.rollback(empty)
    assert sandbox.list_files() == []
    sandbox.rollback(full)
    assert sandbox.exec("stat -c %s fill").stdout == f"{full.size_bytes}\n"


def test_f37_keys_are_never_to_be_seen(server: Served, client: SandboxClient, sandbox: Sandbox) -> None:
    sandbox.exec("true", env={"SECRET": "exec-secret-value"})
    with client.create(env={"TOKEN": "sandbox-secret-value"}) as other:
        assert other.exec("echo $TOKEN").stdout == "sandbox-secret-value\n"
        with pytest.raises(SandboxError), SandboxClient(server.url, "wrong-key-0123456789") as stranger:
            stranger.list_sandboxes()
        with pytest.raises(InvalidRequestError):
            other.exec("true", workdir="/nope", env={"T": "exec-secret-value"})
        keys = [place.read_bytes() for place in (server.data / server.backend / "env").glob("*/key")]
        assert len(keys) == 2
        secrets = [KEY.encode(), b"wrong-key-0123456789", b"sandbox-secret-value", b"exec-secret-value"]
        for key in keys:
            secrets += [key, key.hex().encode(), base64.b64encode(key)]
        places: dict[str, bytes] = {"log": server.log.read_bytes()}
        places["ps"] = subprocess.run(["ps", "auxww"], capture_output=True, check=True).stdout
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                places[f"{process}/cmdline"] = (process / "cmdline").read_bytes()
                if int(process.name) not in (server.pid, os.getpid()):
                    places[f"{process}/environ"] = (process / "environ").read_bytes()
            except OSError:
                continue
        for config in pathlib.Path("/").glob(f"{server.data}/{server.backend}/env/*/**/config.json"[1:]):
            places[str(config)] = config.read_bytes()
        assert any(place.endswith("config.json") for place in places)
        for pattern in ("agent-sandbox/*/runc/*/state.json", "agent-sandbox/*/runsc/*.state"):
            places |= {str(state): state.read_bytes() for state in pathlib.Path("/run").glob(pattern)}
        for private in (server.data / server.backend / "env").rglob("*"):
            if private.is_file() and not private.is_symlink() and private.name not in ("key", "disk.img"):
                assert private.stat().st_mode & 0o077 == 0 or private.name != "spec.json"
        assert server.data.stat().st_mode & 0o777 == 0o700
        for name, content in places.items():
            for secret in secrets:
                assert secret not in content, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_server_finds_its_sandboxes_again(tmp_path: pathlib.Path, backend: str) -> None:
    with serving(tmp_path / "data", backend) as server, server.client() as client:
        sandbox = client.create(timeout_seconds=600, env={"KEPT": "yes"})
        sandbox.write_file("/workspace/f", b"kept")
        snapshot = sandbox.snapshot("kept")
        sandbox.exec("(while :; do sleep 0.1; echo x >> ticks; done) > /dev/null 2>&1 &")
        expires = sandbox.data["expires_at"]
        server.stop(signal.SIGKILL)
        server.start()
        again = client.get(sandbox.id)
        assert (again.status, again.data["expires_at"]) == ("running", expires)
        assert again.read_file("/workspace/f") == b"kept"
        assert again.exec("echo $KEPT").stdout == "yes\n"
        first = len(again.read_file("/workspace/ticks"))
        wait_for(lambda: len(again.read_file("/workspace/ticks")) > first)
        assert [s.id for s in client.list_snapshots()] == [snapshot.id]
        again.rollback(snapshot)
        assert again.exec("ls").stdout == "f\n"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_killed_while_making_sandboxes_leaks_none(tmp_path: pathlib.Path, backend: str) -> None:
    with serving(tmp_path / "data", backend) as server, server.client() as client:
        for delay in (0.02, 0.06, 0.12):
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                futures = [pool.submit(client.create) for _ in range(3)]
                time.sleep(delay)
                server.stop(signal.SIGKILL)
                server.start()  # while the clients still try
            made = [f.result().id for f in futures if f.exception() is None]
            known = {s.id for s in client.list_sandboxes()}
            assert set(made) <= known
            wait_for(lambda k=known: {e.rpartition("-")[0] for e in server.environments()} <= k)


def test_expiry_ends_a_sandbox_and_its_processes(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path / "data", reap_interval_seconds="0.2") as server, server.client() as client:
        sandbox = client.create(timeout_seconds=600)
        snapshot = sandbox.snapshot()
        sandbox.exec("sleep 909090 > /dev/null 2>&1 &")
        sandbox.set_timeout(1)
        time.sleep(1.1)
        with pytest.raises(NotFoundError):
            sandbox.exec("true")
        with pytest.raises(NotFoundError):
            sandbox.set_timeout(100)
        wait_for(lambda: not server.environments())
        assert subprocess.run(["pgrep", "-f", "sleep 909090"], capture_output=True, check=False).returncode == 1
        client.fork(snapshot).destroy()
