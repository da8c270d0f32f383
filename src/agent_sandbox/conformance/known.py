"""Known failures that belong to a technology and not to one backend, by isolation class; each with its reason.

They are strict: one that passes fails the run. A backend's own stand on it, in ``Backend.known_failures``.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent_sandbox.backends.base import Backend

_PROC = "gVisor has a /proc of its own without hidepid; nothing secret is in what it shows of the daemon, mem is closed"
_MEMORY = "beyond the memory limit the host's kernel ends the one that has the pages, gVisor's own: the sandbox stops"

_GROWS = "runsc's own memory grows by 0.45 MiB with each command that has run, and counts: 256 MiB last for some 700"

BY_ISOLATION: Mapping[str, Mapping[str, str]] = {
    "gvisor": {
        "test_identity_is_the_sandbox_user_without_a_capability": "gVisor's status shows neither CapAmb nor NoNewPrivs",
        "test_the_daemon_tells_nothing_of_itself": _PROC,
        "test_the_daemon_is_hidden": _PROC,
        "test_a_command_that_asks_to_be_traced_ends_when_it_ends": "gVisor refuses PTRACE_TRACEME below the daemon",
        "test_devices": "gVisor always has /dev/fuse, which the daemon closes to commands, and /dev/net/tun",
        "test_mounts_are_nosuid_and_nodev": "gVisor does not show these options; set-id bits do nothing there",
        "test_proc_and_sys_are_masked": "gVisor's /proc/cmdline and its like are its own and tell nothing of the host",
        "test_default_signals_mask_and_umask": "gVisor's status shows neither SigBlk nor SigIgn",
        "test_a_terminal_is_the_controlling_one_of_a_new_session": "gVisor sends no SIGWINCH at a resize",
        "test_f08_running_out_of_memory_is_said_and_survived": _MEMORY,
        "test_f08_why_a_command_was_killed_is_known_as_long_as_its_end": _MEMORY,
        "test_only_the_newest_thousand_that_ended_are_kept": _GROWS,
        "test_f31_everything_survives": "gVisor has no user.* attributes on files of the host",
        "test_f35_memory": _MEMORY,
        "test_f35_memory_by_many_processes": _MEMORY,
        "test_f35_socket_buffers": _MEMORY,
        "test_f35_pseudoterminals_are_left_for_others": "gVisor's terminals are its own, none of the host's",
    },
    "vm": {
        "test_f35_pseudoterminals_are_left_for_others": "a machine's terminals are its own, none of the host's",
        "test_b05_a_daemon_that_does_not_start_leaves_its_last_words": "a machine starts the daemon with no shell "
        "around, which this one is a script for; what a kernel and a daemon say last is in the error",
    },
}


def known_failures(backend: Backend) -> Mapping[str, str]:
    """Why each check, ``test_name`` or ``test_name[parameter]``, is known to fail on this backend."""
    return {**BY_ISOLATION.get(backend.capabilities.isolation, {}), **backend.known_failures}
