"""MicroVMs: ours on QEMU beside QEMU started by hand, and memory beside gVisor's. Emulated where there is no KVM.

By hand is the same kernel, first root file system and size, with the daemon as init: its console says when it has
booted (the daemon has no key then, and waits). It is saved and goes on as QEMU itself does it: the devices' state is
written to a file, that of the memory is copied, and a new QEMU maps it.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from agent_sandbox.backends.linux.requirements import find_sandboxd
from agent_sandbox.backends.microvm import MicrovmBackend
from agent_sandbox.backends.microvm.config_image import config_image, new_identity
from agent_sandbox.backends.microvm.layers import SIZE as LAYERS_BYTES
from agent_sandbox.config import Settings
from agent_sandbox.errors import BackendError
from agent_sandbox.images.machine import Kernel, MachineImages
from agent_sandbox.types import ExecExit, SandboxSpec
from tests.bench.contenders import BUILD, Contender

MACHINES = BUILD / "machines"
SECONDS = 120.0
MEMORY_MB = 256 + 96
"""As a sandbox of 256 MiB has it, its kernel's part included."""
SPEC = SandboxSpec("bench", "", cpus=1.0, memory_mb=256, pids_limit=64, disk_mb=64, tmp_mb=32)
INSIDE = """
import os, time
times = []
for _ in range(50):
    started = time.perf_counter()
    os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)
    times.append(time.perf_counter() - started)
print(sorted(times)[25])
"""
LOOP = "i=0; while [ $i -lt {} ]; do /bin/true; i=$((i+1)); done"
"""The guest's own forks and executions, by a shell: as small a process as a supervisor."""
LOOPS = 40
Times = dict[str, dict[str, list[float]]]


def kernel() -> Kernel:
    """The kernel of the machines, prepared once."""
    images, daemon = MachineImages(MACHINES), find_sandboxd("")
    with contextlib.suppress(BackendError):
        return images.kernel(daemon)
    images.prepare_kernel()
    return images.kernel(daemon)


class ByHand:
    """One QEMU in a directory of its own."""

    def __init__(self, kernel: Kernel, memory: pathlib.Path, *, goes_on: bool) -> None:
        self._place = pathlib.Path(tempfile.mkdtemp(prefix="by-hand-", dir=BUILD))
        self._memory = memory
        root, disk, config, layers = (self._place / name for name in ("root", "disk", "config", "layers"))
        subprocess.run(["truncate", "-s", "64M", disk], check=True)
        subprocess.run(["mkfs.ext4", "-q", disk], check=True)
        subprocess.run(["truncate", "-s", str(LAYERS_BYTES), layers], check=True)
        root.symlink_to(next((MACHINES / "root").glob("sha256-*.erofs")))
        config.write_bytes(config_image("by-hand", SPEC, None, new_identity()))
        bogomips = float(pathlib.Path("/proc/cpuinfo").read_text().split("bogomips\t:")[1].split()[0])
        share = "off" if goes_on else "on"
        argv = [
            *("qemu-system-x86_64", "-machine", "microvm,pit=off,pic=off,rtc=on,memory-backend=m,suppress-vmdesc=on"),
            *("-accel", "tcg,tb-size=64", "-cpu", "max", "-m", f"{MEMORY_MB}M", "-nodefaults", "-display", "none"),
            *("-object", f"memory-backend-file,id=m,size={MEMORY_MB}M,mem-path={memory},share={share}", "-no-reboot"),
            *("-kernel", str(kernel.vmlinuz), "-initrd", str(kernel.initramfs)),
            *("-append", "console=ttyS0 quiet reboot=t panic=-1 tsc=reliable no_timer_check nokaslr mitigations=off"),
            *("-serial", f"file:{self._place / 'console'}", "-qmp", f"unix:{self._place / 'qmp'},server=on,wait=off"),
            *(
                "-device",
                "virtio-serial-device",
                "-chardev",
                f"socket,id=g,path={self._place / 'g'},server=on,wait=off",
            ),
            *("-device", "virtserialport,chardev=g,name=sandboxd", "-device", "virtio-rng-device"),
            *("-global", "migration.send-configuration=off"),
        ]
        argv[argv.index("-append") + 1] += f" tsc_early_khz={bogomips * 500:.0f}"
        drives = (("root", root, "on"), ("workspace", disk, "off"), ("config", config, "on"), ("layers", layers, "on"))
        for name, path, mode in drives:
            argv += ["-drive", f"if=none,id={name},file={path},format=raw,readonly={mode},file.locking=off"]
            argv += ["-device", f"virtio-blk-device,drive={name},serial={name}"]
        self.started = time.perf_counter()
        self._process = subprocess.Popen([*argv, *(("-S", "-incoming", "defer") if goes_on else ())])
        self._connection = socket.socket(socket.AF_UNIX)
        self._until(lambda: self._connection.connect_ex(str(self._place / "qmp")) == 0)
        self._answers = self._connection.makefile("rb")
        self._answers.readline()
        self.say("qmp_capabilities")

    def say(self, command: str, **arguments: Any) -> Any:
        self._connection.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            answer = json.loads(self._answers.readline())
            if "error" in answer:
                raise RuntimeError(f"{command}: {answer}")
            if "return" in answer:
                return answer["return"]

    def booted(self) -> float:
        """Seconds from the start to the daemon's word that it waits."""
        self._until(lambda: b"sandboxd ready" in (self._place / "console").read_bytes())
        return time.perf_counter() - self.started

    def save(self, state: pathlib.Path) -> float:
        """Stop, write the devices' state, copy the file that is the memory, and go on; seconds."""
        started = time.perf_counter()
        self.say("stop")
        self.say("xen-save-devices-state", filename=str(state), live=False)
        subprocess.run(["cp", "--sparse=always", self._memory, f"{self._memory}.saved"], check=True)
        taken = time.perf_counter() - started
        self.say("cont")
        return taken

    def go_on(self, state: pathlib.Path) -> float:
        """Load the devices' state and run; seconds since the start."""
        self.say("migrate-incoming", uri=f"exec:cat {state}")
        self._until(lambda: self.say("query-status")["status"] == "paused")
        self.say("cont")
        return time.perf_counter() - self.started

    def end(self) -> None:
        self._answers.close()
        self._connection.close()
        self._process.kill()
        self._process.wait()
        subprocess.run(["rm", "-rf", self._place], check=True)

    def _until(self, done: Any) -> None:
        deadline = time.monotonic() + SECONDS
        while not done():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("QEMU by hand does not come up")
            time.sleep(0.002)


def by_hand(times: Times, rounds: int) -> None:
    """Boot, save and let go on, without a line of ours but the daemon."""
    found = kernel()
    with tempfile.TemporaryDirectory(dir=BUILD) as directory:
        memory, state = pathlib.Path(directory, "memory"), pathlib.Path(directory, "state")
        for _ in range(rounds):
            machine = ByHand(found, memory, goes_on=False)
            try:
                _note(times, "cold boot", "by hand", machine.booted())
                _note(times, "snapshot with memory", "by hand", machine.save(state))
            finally:
                machine.end()
            memory.with_name("memory.saved").replace(memory)
            again = ByHand(found, memory, goes_on=True)
            try:
                _note(times, "start from what was saved", "by hand", again.go_on(state))
            finally:
                again.end()
            memory.unlink()


def machines(times: Times, qemu: Contender, rounds: int) -> None:
    """Ours on QEMU: the first machine of a kind, those from its template, cold boots, commands."""
    body = {"image": qemu.image, "timeout_seconds": 3600, "memory_mb": SPEC.memory_mb, "disk_mb": SPEC.disk_mb}
    call = qemu.lean.call
    id = _timed(times, "first create of a kind", qemu, "POST", "/v1/sandboxes", body)["id"]
    for _ in range(rounds):
        made = _timed(times, "start from what was saved", qemu, "POST", "/v1/sandboxes", body)["id"]
        qemu.destroy(made)
    for _ in range(20):
        _timed(times, 'exec ["true"]', qemu, "POST", f"/v1/sandboxes/{id}/exec", {"command": ["true"]})
    inside = qemu.exec(id, ["python3", "-c", INSIDE])["stdout"]
    _note(times, 'exec ["true"]', "inside the guest", float(inside))
    for _ in range(max(2, rounds // 2)):
        call("POST", f"/v1/sandboxes/{id}/stop", {})
        _timed(times, "cold boot", qemu, "POST", f"/v1/sandboxes/{id}/start", {})
    qemu.destroy(id)


async def channel(times: Times, rounds: int) -> None:
    """What the channel adds to the guest's own fork and exec: no server is between, and both take turns."""
    with tempfile.TemporaryDirectory(dir=BUILD) as directory:
        settings = Settings(data_dir=pathlib.Path(directory, "data"), machine_dir=str(MACHINES), allow_tcg=True)
        backend = MicrovmBackend(settings)
        await backend.start()
        try:
            await backend.create("bench-1", replace(SPEC, image="host"))

            async def run(*command: str) -> float:
                started = time.perf_counter()
                events = backend.exec("bench-1", command, env={}, workdir="/workspace", timeout_seconds=SECONDS)
                ends = [event async for event in events if isinstance(event, ExecExit)]
                if [end.code for end in ends] != [0]:
                    raise RuntimeError(f"{command} failed: {ends}")
                return time.perf_counter() - started

            for _ in range(rounds):
                for _ in range(LOOPS):
                    _note(times, "/bin/true over the channel", "qemu", await run("/bin/true"))
                none, all_of_them = [await run("sh", "-c", LOOP.format(count)) for count in (0, LOOPS)]
                _note(times, "/bin/true over the channel", "inside the guest", (all_of_them - none) / LOOPS)
        finally:
            for id in await backend.list_ids():
                await backend.destroy(id)
            await backend.close()


def memory(times: Times, contender: Contender, rounds: int) -> None:
    """Snapshots with memory, and what goes on from them."""
    body = {"image": contender.image, "timeout_seconds": 3600, "memory_mb": SPEC.memory_mb, "disk_mb": SPEC.disk_mb}
    id = contender.lean.call("POST", "/v1/sandboxes", body)["id"]
    for _ in range(rounds):
        made = _timed(
            times, "snapshot with memory", contender, "POST", f"/v1/sandboxes/{id}/snapshots", {"memory": True}
        )
        back = {"snapshot_id": made["id"]}
        _timed(times, "rollback with memory", contender, "POST", f"/v1/sandboxes/{id}/rollback", back)
        fork = _timed(times, "fork with memory", contender, "POST", f"/v1/snapshots/{made['id']}/fork", {})
        contender.destroy(fork["id"])
        contender.lean.call("DELETE", f"/v1/snapshots/{made['id']}")
    contender.destroy(id)


def show(times: Times, console: Console) -> None:
    """Print the table: medians in milliseconds."""
    names = ("qemu", "by hand", "inside the guest", "gvisor")
    table = Table(title="microVMs: median, milliseconds (emulated where KVM does not work)")
    for column in ("operation", *names):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for row, taken in times.items():
        table.add_row(row, *(f"{statistics.median(taken[name]) * 1e3:.1f}" if name in taken else "–" for name in names))
    console.print(table)


def _timed(times: Times, row: str, contender: Contender, method: str, path: str, body: dict[str, Any]) -> Any:
    started = time.perf_counter()
    result = contender.lean.call(method, path, body)
    _note(times, row, contender.name, time.perf_counter() - started)
    return result


def _note(times: Times, row: str, who: str, seconds: float) -> None:
    times.setdefault(row, {}).setdefault(who, []).append(seconds)
