"""What bounds a guest: how long it may be silent, how much it may make this process hold. Times are in seconds."""

HELLO_SECONDS = 10.0
STALL_SECONDS = 30.0
"""Without progress of an operation that has work to do."""
LONG_SECONDS = 300.0
"""Without progress where one answer stands for much work: removing a tree, syncing a disk."""
EXEC_GRACE_SECONDS = 10.0
"""The daemon has 5 s to end a tree; twice that, and the host ends the sandbox's processes itself."""
MACHINE_GRACE_SECONDS = 35.0
"""In a machine the daemon has 25 s: the kernel kills the tree at once, but an emulated processor takes its time."""
PING_SECONDS = 15.0
PINGS_MISSED = 2
"""A daemon that leaves a PING unanswered for so many periods is dead; nothing waits on one that idles for longer."""
AFTER_DEADLINE_BYTES = 4 * 1024 * 1024
"""What may still come after a deadline: two pipes of at most 1 MiB, and a window."""
MAX_BACKLOG = 8 * 1024 * 1024
"""Unsent bytes beyond which a peer that does not read is dropped; uploads wait long before."""
MAX_LISTING_ENTRIES = 100_000
MAX_LISTING_BYTES = 32 * 1024 * 1024
MAX_EXECS = 2_024
"""Commands of one sandbox: 1,024 that run, and the last 1,000 that ended."""
MAX_REPLAY_BYTES = 4 * 1024 * 1024
"""Of one attachment that does not follow: a ring of 1 MiB, and what came into it meanwhile."""
MAX_PATH = 4_095
MAX_TAG = 256
"""In bytes: a tag is kept and listed with each status."""
