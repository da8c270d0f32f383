"""The drive that tells a machine's daemon in private who it is: a raw file of 8 KiB, read-only in the guest.

A length of 4 bytes, big-endian, then one MessagePack map, then zeros. The map holds what every daemon's private
configuration has (see ``crates/sandboxd/src/config.rs``) and what makes one machine of many equal ones: ``instance``,
host name, machine id and entropy. A template's has no ``key``: its daemon answers nobody.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec

from agent_sandbox.types import SandboxSpec

SIZE = 8192
"""Of the drive: room for the map many times over, in whole blocks of 4 KiB, since it is read past the page cache."""
INSTANCE_BYTES, ENTROPY_BYTES = 16, 64
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """What one machine has that no other has. Made anew at each start, restore and fork."""

    instance: bytes
    machine_id: str
    entropy: bytes


def new_identity() -> Identity:
    """Draw an identity from the host's entropy."""
    return Identity(secrets.token_bytes(INSTANCE_BYTES), secrets.token_hex(16), secrets.token_bytes(ENTROPY_BYTES))


def config_image(id: str, spec: SandboxSpec, key: bytes | None, identity: Identity, *, layered: bool = False) -> bytes:
    """The drive's content for environment ``id``, :data:`SIZE` bytes; ``key`` is None for a template.

    ``layered``: its workspace is mounted over the drive of layers.
    """
    told = {
        "uid": spec.uid,
        "gid": spec.gid,
        "memory_bytes": spec.memory_mb * MIB,
        "pids_limit": spec.pids_limit,
        "instance": identity.instance,
        "hostname": id,
        "machine_id": identity.machine_id,
        "entropy": identity.entropy,
        "tmp_bytes": spec.tmp_mb * MIB,
        "layered": int(layered),
        **({} if key is None else {"key": key}),
    }
    text = msgspec.msgpack.encode(told)
    return (len(text).to_bytes(4, "big") + text).ljust(SIZE, b"\0")
