"""How the manager's records look as public JSON."""

from __future__ import annotations

from agent_sandbox import models
from agent_sandbox.manager import SandboxRecord, SnapshotRecord
from agent_sandbox.types import Capabilities, FileEntry


def sandbox(record: SandboxRecord) -> models.Sandbox:
    """Show a sandbox."""
    spec = record.spec
    return models.Sandbox(
        id=record.id,
        status="running" if record.running else "stopped",
        image=spec.image,
        cpus=spec.cpus,
        memory_mb=spec.memory_mb,
        pids_limit=spec.pids_limit,
        network=spec.network != "none",
        read_only_rootfs=spec.read_only_rootfs,
        created_at=_time(record.created_at),
        expires_at=_time(record.expires_at),
        source_snapshot_id=record.source_snapshot_id,
        backend=record.backend,
        disk_mb=spec.disk_mb,
        state=record.state,
    )


def snapshot(record: SnapshotRecord) -> models.Snapshot:
    """Show a snapshot."""
    return models.Snapshot(
        id=record.id,
        sandbox_id=record.sandbox_id,
        name=record.name,
        image=record.spec.image,
        size_bytes=record.size_bytes,
        created_at=_time(record.created_at),
        backend=record.backend,
        stored_bytes=record.stored_bytes,
        skipped_total=record.skipped_total,
    )


def file(entry: FileEntry) -> models.FileInfo:
    """Show a directory entry."""
    return models.FileInfo(
        name=entry.name,
        path=entry.path,
        type=entry.type,
        size=entry.size,
        modified_at=models.rfc3339(entry.mtime_ns // 1000),
    )


def capabilities(value: Capabilities) -> models.BackendCapabilities:
    """Show what a backend can do."""
    return models.BackendCapabilities(
        isolation=value.isolation,
        accelerated=value.accelerated,
        enforces=sorted(value.enforces),
        network=sorted(value.network),
        userns=value.userns,
        guest=value.guest,
        layered_workspace=value.layered_workspace,
        checkpoint=value.checkpoint,
        pause=value.pause,
        resize=value.resize,
        fuse=value.fuse,
        nested_containers=value.nested_containers,
        notes=dict(value.notes),
    )


def _time(seconds: float) -> str:
    return models.rfc3339(round(seconds * 1_000_000))
