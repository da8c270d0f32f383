"""What Firecracker is asked for, in order. Pure functions: the same for a machine that boots and one that goes on.

Every path is one in the monitor's root, so it is the same in all machines: what was saved finds its drives by the names
that they had. What was saved goes on only with the same devices in the same order, so these come from here alone.

When changing devices or their order: count ``LAYOUT`` up; what an older release saved is then refused with a reason.

The API is in Firecracker's own ``src/firecracker/swagger/firecracker.yaml``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent_sandbox.backends.microvm.monitor import MEMORY_FILE, STATE_FILE, MachineSpec

LAYOUT = 2
DRIVES = ("root", "workspace", "config", "layers")
"""In the order in which the guest finds them."""
API_SOCKET, GUEST_SOCKET = "api.sock", "guest.sock"
SAVED_MEMORY, SAVED_STATE = f"{MEMORY_FILE}.new", f"{STATE_FILE}.new"
_GUEST_CID = 3
"""Of any number above 2: each machine has a device, and so an address space, of its own."""
_ARGUMENTS = (
    *("console=ttyS0", "quiet", "reboot=k", "panic=-1", "random.trust_cpu=on", "cryptomgr.notests"),
    # There is no keyboard: its controller is what a restart goes by, and looking for more takes a second.
    *("i8042.noaux", "i8042.nomux", "i8042.dumbkbd"),
    *("sandboxd_channel=vsock", f"sandboxd_drives={','.join(DRIVES)}"),
)

Request = tuple[str, str, Mapping[str, object]]
"""The method, the target and the body."""

START: Request = ("PUT", "/actions", {"action_type": "InstanceStart"})
PAUSE: Request = ("PATCH", "/vm", {"state": "Paused"})
RESUME: Request = ("PATCH", "/vm", {"state": "Resumed"})


def boots(spec: MachineSpec) -> Iterator[Request]:
    """What makes a machine that is to boot, all but its :data:`START`."""
    size = {"vcpu_count": spec.vcpus, "mem_size_mib": spec.memory_mb, "track_dirty_pages": True}
    yield "PUT", "/machine-config", size
    source = {"kernel_image_path": "kernel", "initrd_path": "initrd", "boot_args": " ".join(_ARGUMENTS)}
    yield "PUT", "/boot-source", source
    for name in DRIVES:
        drive = {"drive_id": name, "path_on_host": name, "is_root_device": False, "is_read_only": name != "workspace"}
        # What the guest has synced is on the host's disk; by default Firecracker leaves that out.
        yield "PUT", f"/drives/{name}", {**drive, "cache_type": "Writeback"}
    yield "PUT", "/vsock", {"guest_cid": _GUEST_CID, "uds_path": GUEST_SOCKET}
    yield "PUT", "/entropy", {}


def goes_on() -> Iterator[Request]:
    """What makes one of what was saved, paused: its devices are those that it was saved with, by the same names."""
    memory = {"backend_type": "File", "backend_path": MEMORY_FILE}
    settings = {"snapshot_path": STATE_FILE, "mem_backend": memory, "enable_diff_snapshots": True, "resume_vm": False}
    yield "PUT", "/snapshot/load", settings


def saves(only_changes: bool) -> Request:
    """What saves a paused machine; of its memory ``only_changes`` since that was saved last, or since it began."""
    paths = {"snapshot_path": SAVED_STATE, "mem_file_path": SAVED_MEMORY}
    return "PUT", "/snapshot/create", {"snapshot_type": "Diff" if only_changes else "Full", **paths}
