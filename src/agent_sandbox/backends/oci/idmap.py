"""User namespaces with a range of host ids, and mounts that show the host's files in it.

A file of the host's root appears owned by the range's first id, which is the sandbox's root, and so on; nothing is
copied or changed. runc 1.1 cannot make such mounts, so they are made here, before it runs, and it binds from them.

The namespace is made here as well, and runc joins it. The kernel counts what a namespace's users hold (watches, queued
signals, locked memory, …) against the limits of the user who made it as well: were that root, all sandboxes would share
those limits after all. So the maker is the range's own first id.

Somebody has to be in a new namespace while its ids are written: a child that has ended and was not waited for yet. Such
a one still has its namespace and nothing else. One that lived would have the server's connections, port and lock, and
would keep them if the server were killed in that moment. It is no fork (a server of some size would pay for its page
tables) and no program (10 ms against 0.2): it shares this process's memory, runs one function of the C library on a
stack of its own, with every signal blocked, and never comes back to Python. Around its making the calling thread, and
only that one, has the range's id; libc's own ``seteuid`` would change every thread.

Everything here blocks, for under a millisecond. :class:`OSError` is what is raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from agent_sandbox.backends.linux.idranges import SIZE
from agent_sandbox.backends.linux.mounts import system_call

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
"""The same numbers on every architecture."""
_OPEN_TREE_CLONE, _AT_EMPTY_PATH, _AT_FDCWD, _MOVE_MOUNT_F_EMPTY_PATH = 1, 0x1000, -100, 4
_RDONLY, _NOSUID, _NODEV, _IDMAP = 1, 2, 4, 0x100000
_MS_PRIVATE = 1 << 18
_CLONE_VM, _CLONE_NEWUSER = 0x100, 0x1000_0000
_SETRESUID = {"x86_64": 117, "aarch64": 147}
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_STACK_BYTES = 64 * 1024
_PROBE_BASE = 0x7000_0000
"""Any range will do for trying: nothing is ever owned by it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
_DO_NOTHING = ctypes.cast(_libc.abs, ctypes.c_void_p)
_one_child = threading.Lock()
"""Children are there for a fraction of a millisecond; one at a time keeps their number out of anybody's limit."""


class _MountAttributes(ctypes.Structure):
    """``struct mount_attr`` (linux/mount.h)."""

    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("namespace", ctypes.c_uint64),
    )


def make_namespace(base: int) -> int:
    """Make a user namespace in which the ids 0 to 65,535 are the host's from ``base`` on; return its descriptor."""
    with _one_child, _ended_child(base) as pid:
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text(f"0 {base} {SIZE}\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def attach(source: Path, target: Path, namespace: int) -> None:
    """Show ``source`` on ``target`` with the ids of ``namespace``: read-only, without set-id bits and devices.

    Mounts below ``source`` are not shown.
    """
    tree = _mapped(source, namespace)
    try:
        system_call(_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)


def why_not(sources: Iterable[Path]) -> str:
    """Why ``sources`` cannot be shown with other ids on this host; empty when they can, which is tried."""
    try:
        namespace = make_namespace(_PROBE_BASE)
    except OSError as error:
        return f"this host lets no user namespace be made ({error.strerror})"
    try:
        for source in sources:
            try:
                os.close(_mapped(source, namespace))
            except OSError as error:
                return f"the file system of {source} cannot be mounted with other ids ({error.strerror})"
    finally:
        os.close(namespace)
    return ""


def _mapped(source: Path, namespace: int) -> int:
    """A descriptor of a mount of ``source`` that is not attached anywhere."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    tree = system_call(_OPEN_TREE, _AT_FDCWD, os.fsencode(source), flags)
    attributes = _MountAttributes(_IDMAP | _RDONLY | _NOSUID | _NODEV, 0, _MS_PRIVATE, namespace)
    try:
        system_call(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.addressof(attributes), ctypes.sizeof(attributes))
    except OSError:
        os.close(tree)
        raise
    return tree


@contextlib.contextmanager
def _ended_child(maker: int) -> Iterator[int]:
    """The pid of a child that has ended in a new user namespace of ``maker``'s; it is reaped with the block."""
    stack = ctypes.create_string_buffer(_STACK_BYTES)
    top = (ctypes.addressof(stack) + _STACK_BYTES) & ~0xF
    with _signals_blocked(), _thread_as(maker):
        pid = _libc.clone(_DO_NOTHING, top, _CLONE_VM | _CLONE_NEWUSER | signal.SIGCHLD, None)
        number = ctypes.get_errno()
    if pid < 0:
        raise OSError(number, os.strerror(number))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        yield pid
    finally:
        os.waitpid(pid, 0)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _thread_as(uid: int) -> Iterator[None]:
    """Give the calling thread an effective user; it is root again after the block."""
    set_users = _SETRESUID[platform.machine()]
    dumpable = _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    system_call(set_users, -1, uid, -1)
    try:
        yield
    finally:
        system_call(set_users, -1, 0, -1)
        _libc.prctl(_PR_SET_DUMPABLE, dumpable, 0, 0, 0)  # a change of users takes it from the whole process
