"""How the manager's records look as public JSON."""

from __future__ import annotations

import os
from typing import Any

from agent_sandbox import models
from agent_sandbox.manager import Differences, Merge, PastState, SandboxRecord, SandboxStats, SnapshotRecord
from agent_sandbox.manager.projects import LayerRecord, ProjectRecord, Published
from agent_sandbox.types import WORKSPACE, Capabilities, ExecExit, ExecStatus, FileEntry


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
        state="stopped" if record.state == "running" and not record.running else record.state,
        metadata=dict(record.metadata),
        project=record.project,
        source=record.source,
    )


def project(record: ProjectRecord) -> models.Project:
    """Show a project."""
    return models.Project(
        name=record.name,
        created_at=_time(record.created_at),
        layer_count=record.count,
        layers=[_layer(layer) for layer in record.layers],
    )


def layer_added(done: Published) -> models.LayerAdded:
    """Show how publishing ended."""
    return models.LayerAdded(outcome=done.outcome, layer=_layer(done.layer))


def _layer(layer: LayerRecord) -> models.Layer:
    return models.Layer(number=layer.number, commit=layer.commit, created_at=_time(layer.created_at))


def stats(value: SandboxStats) -> models.SandboxStats:
    """Show what a sandbox uses."""
    return models.SandboxStats(
        memory_bytes=value.memory_bytes,
        cpu_seconds=value.cpu_seconds,
        processes=value.guest.processes,
        execs=value.guest.execs,
        output_bytes=value.guest.ring_bytes,
        daemon_memory_bytes=value.guest.memory_bytes,
    )


def command(status: ExecStatus) -> models.Exec:
    """Show a command."""
    end = status.exit
    return models.Exec(
        id=status.id,
        tag=status.tag,
        command=list(status.argv),
        pid=status.pid,
        status="running" if status.running else "exited",
        started_at=_time(status.started_at),
        exit_code=None if end is None else end.code,
        signal=None if end is None else end.signal,
        timed_out=end is not None and end.timed_out,
        tty=status.tty,
        cursor=status.cursor,
        first_cursor=status.first,
        usage=None if end is None else _usage(end),
        oom_killed=None if end is None else end.oom_killed,
        message="" if end is None else end.message,
    )


def exit_fields(end: ExecExit) -> dict[str, Any]:
    """Show how a command ended, as the last line of its output does."""
    return {
        "exit_code": end.code,
        "signal": end.signal,
        "timed_out": end.timed_out,
        "oom_killed": end.oom_killed,
        "message": end.message,
        "usage": _usage(end),
        "duration_ms": round(end.wall_seconds * 1000),
    }


def _usage(end: ExecExit) -> models.ExecUsage:
    return models.ExecUsage(
        user_seconds=end.user_seconds,
        system_seconds=end.system_seconds,
        max_rss_kb=end.max_rss_kb,
        wall_seconds=end.wall_seconds,
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
        memory=record.memory_bytes is not None,
        memory_bytes=record.memory_bytes or 0,
        auto=record.auto,
    )


def differences(found: Differences) -> models.ChangeList:
    """Show what differs between two states."""
    changes = [
        models.Change(
            path=change.path,
            kind=change.kind,
            old_type=change.old_type,
            new_type=change.new_type,
            old_size=change.old_size,
            new_size=change.new_size,
            text=change.text,
        )
        for change in found.changes
    ]
    return models.ChangeList(changes=changes, truncated=found.truncated, text_truncated=found.text_truncated)


def past(state: PastState) -> models.PastState:
    """Show a state of a log."""
    return models.PastState(
        commit=state.commit,
        parents=list(state.parents),
        created_at=_time(state.created_at),
        kept=state.kept,
        snapshot_ids=list(state.snapshots),
    )


def merge(done: Merge) -> models.MergeResult:
    """Show how a merge ended."""
    conflicts = [
        models.MergeConflict(
            path=WORKSPACE + ("/" + os.fsdecode(conflict.path) if conflict.path else ""),
            kinds=[kind.value for kind in conflict.kinds],
        )
        for conflict in done.conflicts
    ]
    return models.MergeResult(
        outcome=done.outcome,
        sandbox=sandbox(done.record),
        snapshot_id=done.after,
        before_snapshot_id=done.before,
        conflicts=conflicts,
        conflict_count=done.conflict_count,
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


def stat(entry: FileEntry) -> models.FileStat:
    """Show a file in full."""
    return models.FileStat(
        name=entry.name,
        path=entry.path,
        type=entry.type,
        size=entry.size,
        modified_at=models.rfc3339(entry.mtime_ns // 1000),
        mode=f"{entry.mode:03o}",
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
