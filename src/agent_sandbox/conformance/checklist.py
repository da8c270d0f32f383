"""What the kit asks, item by item, and which checks answer each item.

Items are B1 to B17 (what a daemon-driven backend must offer), M (the method contract in ``backends/base.py``), F1 to
F37 (known faults of this field) and R1 to R8 (what a command must not be able to do). A check is a test of one of the
suites, ``Suite.test_name``; a pattern may stand for several. The number in ``test_f07_…`` is its fault; the table adds
the rest. A check that no row names belongs to M. An item that no backend can show by itself says where it is shown.

When adding a check: name it after its fault, or give it a row here. ``NEEDS`` says which declared ability it is about:
on a backend without it the verdict is "unsupported", with the reason that the backend declares.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping

from agent_sandbox.types import Capabilities


@dataclasses.dataclass(frozen=True)
class Item:
    """One line of the list: its id, what is required, the checks that show it, or why none here can."""

    id: str
    title: str
    checks: tuple[str, ...] = ()
    elsewhere: str = ""


def _b(number: int, title: str, *checks: str) -> Item:
    return Item(f"B{number}", title, checks)


def _f(number: int, title: str, *checks: str, elsewhere: str = "") -> Item:
    return Item(f"F{number}", title, (f"*.test_f{number:02}_*", *checks), elsewhere)


_SERVER = "the server's, and shown by its own tests on every backend alike"

ITEMS: tuple[Item, ...] = (
    _b(1, "identity: pinned content, one full id, nothing adopted by name", "ChecklistSuite.test_b01_*"),
    _b(
        2,
        "shared storage: several sandboxes over one volume on one kernel",
        "ChecklistSuite.test_b02_*",
        "LayerSuite.test_its_changes_are_its_own",
        "LayerSuite.test_what_an_overlay_does_otherwise_by_default",
    ),
    _b(
        3,
        "upload: daemon and private configuration in place before start",
        "FileSuite.test_what_only_root_may_read_stays_so",
        "EscapeSuite.test_no_secret_is_to_be_found",
    ),
    _b(
        4,
        "privilege split: commands are another user without capabilities, orphans are reaped",
        "EscapeSuite.test_identity_*",
        "EscapeSuite.test_forbidden_calls",
        "EscapeSuite.test_no_namespace_by_tools",
        "EscapeSuite.test_no_setuid_program_helps",
        "EscapeSuite.test_devices",
        "*.test_f12_*_leave_nothing",
    ),
    _b(5, "start-up log: a failed start shows the tail of the daemon's log", "ChecklistSuite.test_b05_*"),
    _b(
        6,
        "endpoint: private, and closed to a peer without the key",
        "EscapeSuite.test_a_peer_without_the_key_is_refused",
        "NetworkSuite.test_f36_no_socket_of_the_host_and_no_vsock",
    ),
    _b(
        7,
        "exec: argv, env, absolute cwd, own user, descriptors 0 to 2",
        "BackendSuite.test_environment_is_put_together_in_order",
        "BackendSuite.test_working_directory",
        "CommandSuite.test_only_three_descriptors",
        "CommandSuite.test_default_signals_mask_and_umask",
        "CommandSuite.test_f11_*",
        "EscapeSuite.test_identity_*",
        "EscapeSuite.test_names_and_places",
    ),
    _b(
        8,
        "streams: separate, byte-exact, back-pressure, half-close, no cap",
        "BackendSuite.test_output_*",
        "CommandSuite.test_f13_*",
        "CommandSuite.test_f14_*",
        "*.test_f10_*",
        "ExecObjectSuite.test_standard_input_reaches_the_command_and_ends",
        "TunnelSuite.test_much_goes_both_ways_at_once",
        "ExecObjectSuite.test_the_starter_gets_everything",
    ),
    _b(
        9,
        "exit and signals: kept apart, never a made-up 0, whole command",
        "BackendSuite.test_a_signal_is_not_an_exit_code",
        "BackendSuite.test_a_missing_program_*",
        "*.test_f07_*",
        "ExecObjectSuite.test_signals",
        "ExecTreeSuite.test_a_signal_reaches_the_whole_tree",
    ),
    _b(
        10,
        "inspection: state and limits can be observed and match",
        "BackendSuite.test_inspect_tells_what_was_asked",
        "ChecklistSuite.test_b10_*",
        "FileOperationSuite.test_stats_count",
    ),
    _b(
        11,
        "stop: bounded teardown of daemon and commands",
        "BackendSuite.test_destroy_under_a_running_command",
        "ChecklistSuite.test_b11_*",
        "EscapeSuite.test_nothing_outlives_the_sandbox",
        "TunnelSuite.test_a_sandbox_that_goes_ends_its_tunnels",
        "LayerSuite.test_one_that_is_stopped_keeps_its_changes_and_starts_over_its_layers",
    ),
    _b(
        12,
        "delete: exact id, nothing left, borrowed volumes untouched",
        "BackendSuite.test_destroy_twice_and_the_unknown",
        "BackendSuite.test_environments_do_not_share",
        "LayerSuite.test_its_changes_are_its_own",
    ),
    _b(
        13,
        "reconcile: found again after a restart of the server, commands intact",
        "ChecklistSuite.test_b13_*",
        "ExecObjectSuite.test_a_detached_command_outlives_the_server",
        "LayerSuite.test_another_process_of_the_server_finds_it_and_what_was_held_goes_on",
        "CheckpointSuite.test_a_server_that_ends_meanwhile_leaves_both_to_the_next",
    ),
    _b(
        14,
        "limits: each is hit from inside and holds",
        "LimitSuite.*",
        "LayerSuite.test_the_disk_limit_holds_there",
        "SnapshotSuite.test_a_full_disk_refuses_the_import",
    ),
    _b(
        15,
        "network: nothing in but the endpoint; the egress policy holds",
        "NetworkSuite.*",
        "TunnelSuite.test_a_port_is_reached_without_a_network",
    ),
    _b(
        16,
        "failure typing: refused before any effect, or what was attempted is said",
        "BackendSuite.test_an_absent_capability_is_refused_before_any_effect",
        "BackendSuite.test_what_cannot_be_*",
        "ChecklistSuite.test_b16_*",
        "NoLayerSuite.test_layers_are_refused",
        "NoCheckpointSuite.test_checkpoints_are_refused",
        "CheckpointSuite.test_what_a_checkpoint_does_not_belong_to_is_refused_before_any_effect",
        "CheckpointSuite.test_a_damaged_checkpoint_is_a_typed_error_and_nothing_stays",
        "LayerSuite.test_what_cannot_be",
        "FileOperationSuite.test_an_unknown_environment",
        "ExecObjectSuite.test_ids_that_cannot_be",
    ),
    _b(
        17,
        "secrecy: keys in no environment, argument, label or error",
        "EscapeSuite.test_no_secret_is_to_be_found",
        "ChecklistSuite.test_b17_*",
        "CheckpointSuite.test_the_old_key_opens_no_restored_one",
    ),
    Item("M", "the method contract of backends/base.py", ("BackendSuite.*",)),
    _f(1, "a waiting shell returns at its deadline"),
    _f(2, "setsid and double forks do not outlive their command's deadline"),
    _f(3, "a background child goes on and the call returns"),
    _f(4, "emptying /tmp and /workspace disarms nothing"),
    _f(5, "leaving a stream ends the tree, a lost wire does not"),
    _f(6, "a timeout keeps the output and says so", "BackendSuite.test_a_timeout_keeps_the_output_and_says_so"),
    _f(7, "missing command 127, not executable 126, each with a message"),
    _f(8, "running out of memory is said"),
    _f(9, "a broken sandbox gives a typed error, never a false success", "ChecklistSuite.test_f09_*"),
    _f(10, "standard input not given is empty"),
    _f(11, "1 MiB of arguments"),
    _f(12, "many commands leave no zombie, many at once do not hang"),
    _f(13, "bytes arrive as written"),
    _f(14, "much output is whole, slow readers cost no memory"),
    _f(15, "what cannot be asked for is refused before the start", "BackendSuite.test_working_directory"),
    _f(16, "long commands stall nobody else", "BackendSuite.test_many_commands_at_once"),
    _f(17, "names are bytes", "BackendSuite.test_names_are_bytes"),
    _f(18, "uploads belong to the user of commands"),
    _f(19, "uploads at once, never half a file"),
    _f(20, "no link lets a write land outside"),
    _f(21, "/tmp is readable, special files are errors"),
    _f(22, "transfers above memory size stream"),
    Item("F23", "renewal at the moment of expiry", (), _SERVER),
    _f(
        24,
        "a killed server loses no sandbox and no command",
        "ChecklistSuite.test_b13_*",
        "ExecObjectSuite.test_a_detached_command_outlives_the_server",
    ),
    Item("F25", "a half-written record deletes no workspace", (), "each backend's own format, in its own tests"),
    _f(
        26,
        "a stopped sandbox keeps its workspace",
        "ChecklistSuite.test_b11_*",
        "LayerSuite.test_one_that_is_stopped_keeps_its_changes_and_starts_over_its_layers",
    ),
    Item("F27", "a rollback that fails halfway changes nothing", (), _SERVER),
    _f(28, "delete works from every state and twice", "BackendSuite.test_destroy_*", "ChecklistSuite.test_f28_*"),
    Item("F29", "a running command counts as activity", (), _SERVER),
    _f(30, "snapshot and restore give equal trees", "BackendSuite.test_export_and_import_give_the_same_tree"),
    _f(31, "links, holes, attributes, times and modes survive"),
    Item("F32", "the tenth snapshot is as fast as the first", (), "a figure: make bench"),
    _f(
        33,
        "changes through a shared map are seen, links and renames stay",
        "LayerSuite.test_a_shared_writable_map_is_told",
        "LayerSuite.test_what_an_overlay_does_otherwise_by_default",
    ),
    _f(34, "a hostile archive lands nothing outside"),
    _f(35, "memory, CPU, processes and disk: the limit holds, others are not hurt"),
    _f(36, "no network means loopback only"),
    _f(37, "the key shows nowhere", "EscapeSuite.test_no_secret_is_to_be_found", "ChecklistSuite.test_b17_*"),
    Item(
        "R1",
        "read the daemon's files, memory, environment or descriptors",
        (
            "EscapeSuite.test_the_daemon_is_out_of_reach",
            "EscapeSuite.test_the_daemon_tells_nothing_of_itself",
            "EscapeSuite.test_the_daemon_is_hidden",
            "FileSuite.test_what_only_root_may_read_stays_so",
            "EscapeSuite.test_no_secret_is_to_be_found",
        ),
    ),
    Item(
        "R2",
        "signal or trace the daemon",
        (
            "EscapeSuite.test_the_daemon_is_out_of_reach",
            "EscapeSuite.test_kill_everything_only_kills_the_own",
            "EscapeSuite.test_no_process_is_traced_that_did_not_ask_for_it",
            "EscapeSuite.test_a_command_that_asks_to_be_traced_ends_when_it_ends",
            "EscapeSuite.test_exit_stops_do_not_outlive_the_deadline",
        ),
    ),
    Item("R3", "open /dev/fuse, or any other device", ("EscapeSuite.test_devices",)),
    Item(
        "R4",
        "unmount or cover /workspace, write to the root",
        (
            "EscapeSuite.test_the_workspace_cannot_be_unmounted_or_covered",
            "EscapeSuite.test_the_root_is_read_only",
            "EscapeSuite.test_mounts_are_nosuid_and_nodev",
        ),
    ),
    Item(
        "R5",
        "create a user or mount namespace",
        ("EscapeSuite.test_forbidden_calls", "EscapeSuite.test_no_namespace_by_tools"),
    ),
    Item("R6", "gain a capability", ("EscapeSuite.test_identity_*", "EscapeSuite.test_no_setuid_program_helps")),
    Item(
        "R7",
        "see the host, or another sandbox's processes, files or network",
        (
            "EscapeSuite.test_no_other_sandbox_is_to_be_seen",
            "EscapeSuite.test_nothing_of_the_host_is_to_be_seen",
            "EscapeSuite.test_proc_and_sys_are_masked",
            "EscapeSuite.test_a_crash_starts_nothing_on_the_host",
            "BackendSuite.test_environments_do_not_share",
            "NetworkSuite.*",
        ),
    ),
    Item("R8", "outlive its sandbox", ("EscapeSuite.test_nothing_outlives_the_sandbox",)),
)

BY_ID: Mapping[str, Item] = {item.id: item for item in ITEMS}
_FAULT = re.compile(r"\.test_f(\d\d)_")

Need = Callable[[Capabilities], bool]
ABILITIES: Mapping[str, Need] = {
    "guest": lambda has: has.guest,
    "layered_workspace": lambda has: has.layered_workspace,
    "a plain workspace": lambda has: not has.layered_workspace,
    "checkpoint": lambda has: has.checkpoint,
    "no checkpoint": lambda has: not has.checkpoint,
    "names": lambda has: has.isolation == "vm",
    "cpus": lambda has: "cpus" in has.enforces,
    "memory": lambda has: "memory" in has.enforces,
    "pids": lambda has: "pids" in has.enforces,
    "disk": lambda has: "disk" in has.enforces,
    "network": lambda has: "network" in has.enforces,
}

NEEDS: Mapping[str, tuple[str, ...]] = {
    "ExecObjectSuite.test_f08_*": ("guest", "memory"),
    "ExecObjectSuite.*": ("guest",),
    "ExecTreeSuite.test_processes_used_up_*": ("guest", "pids"),
    "ExecTreeSuite.*": ("guest",),
    "FileOperationSuite.*": ("guest",),
    "LargeFileSuite.*": ("guest",),
    "TunnelSuite.*": ("guest",),
    "LayerSuite.test_the_disk_limit_holds_there": ("layered_workspace", "disk"),
    "LayerSuite.*": ("layered_workspace",),
    "NoLayerSuite.*": ("a plain workspace",),
    "CheckpointSuite.test_names_and_machine_ids_are_renewed": ("checkpoint", "names"),
    "CheckpointSuite.*": ("checkpoint", "guest"),
    "NoCheckpointSuite.*": ("no checkpoint",),
    "NetworkSuite.*": ("network",),
    "CommandSuite.test_f08_*": ("memory",),
    "CommandSuite.test_a_fork_storm_*": ("pids",),
    "LimitSuite.test_f35_cpu": ("cpus",),
    "LimitSuite.test_f35_disk": ("disk",),
    "LimitSuite.test_f35_inodes": ("disk",),
    "LimitSuite.test_f35_processes*": ("pids",),
    "LimitSuite.*": ("memory",),
    "SnapshotSuite.test_what_filled_a_disk_*": ("disk",),
    "SnapshotSuite.test_a_full_disk_refuses_the_import": ("disk",),
    "ChecklistSuite.test_b02_*": ("layered_workspace",),
}  # the first that fits


_INSTEAD: Mapping[str, str] = {
    "a plain workspace": "it has layered_workspace, which is checked instead",
    "no checkpoint": "it has checkpoint, which is checked instead",
    "names": "names: its sandboxes have one name alike, and no machine id",
}


def items_of(check: str) -> tuple[str, ...]:
    """The ids of the items that a check, ``Suite.test_name``, belongs to, in the order of the list."""
    found = tuple(item.id for item in ITEMS if any(fnmatch.fnmatchcase(check, pattern) for pattern in item.checks))
    if not found and (fault := _FAULT.search(check)):
        found = (f"F{int(fault[1])}",)
    return found or ("M",)


def unsupported(check: str, capabilities: Capabilities) -> str | None:
    """Why a check does not apply to a backend with these capabilities; ``None`` where it does."""
    needs = next((needs for pattern, needs in NEEDS.items() if fnmatch.fnmatchcase(check, pattern)), ())
    for need in needs:
        if not ABILITIES[need](capabilities):
            if need in _INSTEAD:
                return _INSTEAD[need]
            return f"{need}: {capabilities.notes.get(need) or 'declared absent'}"
    return None
