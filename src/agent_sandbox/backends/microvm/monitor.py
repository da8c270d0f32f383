"""What a backend of microVMs asks of the program that runs one: the monitor.

States of one machine, and the calls that lead between them::

    (none) ──start──▶ running ◀──resume── paused ──save──▶ paused
    (none) ──start_from──▶ running ──pause──▶ paused
    running, paused ──it ends, or its process is killed──▶ (none)

The rules
---------
* A machine outlives the server. What the next server needs to know of it is a :class:`Machine`, which its backend
  keeps; the monitor keeps nothing.
* The monitor's process is the guest's if the guest breaks out of its machine. It runs as the user that the spec names,
  is handed its files as open descriptors, needs no other, and has no network. What it says is capped and never a path.
* Each method raises :class:`~agent_sandbox.errors.BackendError` where the monitor fails or does not answer in time, and
  nothing else but what it says.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent_sandbox.backends.linux.process import Process
from agent_sandbox.guest import Carrier

MEMORY_FILE, STATE_FILE = "memory", "state"
"""What :meth:`Monitor.save` writes."""

Adopt = Callable[[int], None]
"""Takes the pid of a monitor before its guest runs, to put it into its control group. May block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """One machine: what it boots, its drives and its size.

    ``kernel`` and ``initrd`` must be readable by everybody, the drives need not; the directories above them may be
    closed. ``root`` (read-only), ``workspace``, ``config`` (read-only) and ``layers`` (read-only) are raw images, which
    the guest finds by these names as serial numbers, or by their order. ``memory_mb`` is all of its memory in MiB.
    ``directory`` is the server's own and there already: it gets the monitor's sockets, or a link to where they are.
    ``jail`` is not there yet: a directory beside the drives that is the monitor's root, where it has one of its own.
    The monitor runs as ``uid`` and ``gid``.
    """

    kernel: Path
    initrd: Path
    root: Path
    workspace: Path
    config: Path
    layers: Path
    memory_mb: int
    vcpus: int
    directory: Path
    jail: Path
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine that was started: where its sockets are, and its monitor's process."""

    directory: Path
    process: Process


@dataclass(frozen=True, slots=True)
class Facts:
    """A monitor on this host, in words that a saved machine is compared by.

    ``cpu`` names what the guest sees as its processor. ``why`` says why nothing accelerates it, where nothing does.
    ``emulates``: it can run machines all the same.
    """

    name: str
    version: str
    accelerated: bool
    cpu: str
    why: str = ""
    emulates: bool = True


class Monitor(Protocol):
    """A program that runs machines."""

    overhead_mb: int
    """What its process takes of the host's memory beside the guest's, in MiB, at most."""

    carrier: Carrier
    """What a connection to its machines' daemons goes over."""
    guest_socket: str
    """Where that begins, below the directory of a machine."""

    @property
    def facts(self) -> Facts:
        """What :meth:`find` found."""

    async def find(self) -> Facts:
        """Look for the program, once, and whether it can be accelerated, by trying.

        :class:`BackendError` with the remedy when it is not there or not what it should be.
        """

    async def start(self, spec: MachineSpec, adopt: Adopt | None = None) -> Machine:
        """Boot a machine. It runs when this returns; on failure or cancellation nothing is left of it.

        A directory whose path is too long for a socket is an error of the operator's, with the remedy.
        """

    async def start_from(self, spec: MachineSpec, saved: Path, adopt: Adopt | None = None) -> Machine:
        """Let a machine go on that :meth:`save` wrote to ``saved``, as :meth:`start` otherwise.

        ``spec`` has the sizes, kernel and root that it was started with, and a copy of its workspace of that moment.
        Any number may go on from one: each maps its memory in private, and ``saved`` stays unchanged.
        :class:`ConflictError` when what was saved is not there whole, or of another size.
        """

    async def pause(self, machine: Machine) -> None:
        """Stop its processors; what its drives were told to write is in their files when this returns."""

    async def resume(self, machine: Machine) -> None:
        """Let a paused machine go on. Nothing happens to one that runs."""

    async def running(self, machine: Machine) -> bool:
        """Whether it runs, and is not paused."""

    async def save(self, machine: Machine, memory_mb: int, dest: Path) -> None:
        """Write memory and device state of a paused machine into the directory ``dest``, as private files.

        ``memory_mb`` is that of its spec. The drives are the caller's to copy, before the machine goes on; and so is
        syncing, which can come after.
        :class:`LimitExceededError` when the disk is full; then some of it may be there.
        """

    async def connect(self, machine: Machine, seconds: float) -> socket.socket:
        """Connect to what leads to the machine's daemon, who may come to listen within so many seconds.

        :class:`OSError` as connect(2) gives it.
        """

    async def console(self, machine: Machine) -> str:
        """The first 64 KiB that the guest's console said, as text whose control characters are replaced.

        Of a machine that was started here it can still be read when it has just ended.
        """

    async def close(self) -> None:
        """Let go of what is held for machines of the future. Those that run go on."""
