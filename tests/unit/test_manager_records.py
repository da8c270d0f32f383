"""The stored records: every version ever written must decode for ever, and damage is noticed, whatever it is."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.manager.records import (
    SandboxRecord,
    SnapshotRecord,
    UnreadableRecordError,
    decode_sandbox,
    decode_snapshot,
    encode_sandbox,
    encode_snapshot,
)
from agent_sandbox.types import SandboxSpec

SPEC = SandboxSpec(
    image="python",
    image_digest="sha256:0f",
    cpus=1.5,
    memory_mb=512,
    pids_limit=256,
    disk_mb=1024,
    tmp_mb=256,
    network="full",
    read_only_rootfs=False,
    uid=1001,
    gid=1002,
    env={"A": "ä", "RAW": "\udcff"},
)
SANDBOX = SandboxRecord(
    id="sb0123456789abcdef",
    env_id="sb0123456789abcdef-3",
    backend="runc",
    spec=SPEC,
    state="running",
    running=False,
    created_at=1_700_000_000.25,
    expires_at=1_700_000_900.0,
    source_snapshot_id="snap0123456789abcdef",
    latest_at=1_700_086_400.5,
    metadata={"team": "ä"},
)
SNAPSHOT = SnapshotRecord(
    id="snap0123456789abcdef",
    sandbox_id="sb0123456789abcdef",
    name="before",
    backend="runc",
    spec=SPEC,
    size_bytes=10,
    stored_bytes=200,
    created_at=1_700_000_001.0,
    skipped=(("run.sock", "socket"), ("\udcfe", "vanished")),
    skipped_total=7,
    digest="ab" * 32,
)
COMMITTED = dataclasses.replace(SNAPSHOT, digest="", commit="cd" * 32)

# Version 1, as the first server wrote it. Never edit; add the next version below.
SPEC_V1 = (
    '{"image":"python","image_digest":"sha256:0f","cpus":1.5,"memory_mb":512,"pids_limit":256,"disk_mb":1024,'
    '"tmp_mb":256,"network":"full","read_only_rootfs":false,"uid":1001,"gid":1002,'
    '"env":{"A":"\\u00e4","RAW":"\\udcff"}}'
)
SANDBOX_V1 = (
    '{"version":1,"id":"sb0123456789abcdef","env_id":"sb0123456789abcdef-3","backend":"runc","state":"running",'
    '"created_at":1700000000.25,"expires_at":1700000900.0,"source_snapshot_id":"snap0123456789abcdef",'
    f'"spec":{SPEC_V1}}}'
)
SNAPSHOT_V1 = (
    '{"version":1,"id":"snap0123456789abcdef","sandbox_id":"sb0123456789abcdef","name":"before","backend":"runc",'
    f'"spec":{SPEC_V1},"size_bytes":10,"stored_bytes":200,"created_at":1700000001.0,'
    '"skipped":[["run.sock","socket"],["\\udcfe","vanished"]],"skipped_total":7,'
    f'"digest":"{"ab" * 32}"}}'
)
# Version 2 of a sandbox's record.
SANDBOX_V2 = (
    '{"version":2,"id":"sb0123456789abcdef","env_id":"sb0123456789abcdef-3","backend":"runc","state":"running",'
    '"created_at":1700000000.25,"expires_at":1700000900.0,"latest_at":1700086400.5,"metadata":{"team":"\\u00e4"},'
    f'"source_snapshot_id":"snap0123456789abcdef","spec":{SPEC_V1}}}'
)
# Version 3 of a sandbox's record.
SANDBOX_V3 = SANDBOX_V2.replace('"version":2', '"version":3').replace(
    '"metadata":{"team":"\\u00e4"},', '"metadata":{"team":"\\u00e4"},"project":"site","source":"site@2",'
)
SANDBOX_V3 = SANDBOX_V3.replace(
    '"spec":', f'"commit":"{"cd" * 32}","commit_bytes":123456,"parked":"sb0123456789abcdef-2","spec":'
)
# Version 2 of a snapshot's record.
SNAPSHOT_V2 = SNAPSHOT_V1.replace('"version":1', '"version":2').replace(
    f'"digest":"{"ab" * 32}"', f'"digest":"","commit":"{"cd" * 32}"'
)
# Version 3 of a snapshot's record.
SNAPSHOT_V3 = SNAPSHOT_V2.replace('"version":2', '"version":3')[:-1] + ',"auto":true,"memory_bytes":4096}'


def test_version_1_decodes_and_commands_do_not_keep_such_a_sandbox() -> None:
    assert decode_sandbox(SANDBOX_V1) == dataclasses.replace(SANDBOX, latest_at=SANDBOX.expires_at, metadata={})
    assert decode_snapshot(SNAPSHOT_V1) == SNAPSHOT


def test_version_2_decodes() -> None:
    assert decode_sandbox(SANDBOX_V2) == SANDBOX
    assert decode_snapshot(SNAPSHOT_V2) == COMMITTED


def test_this_version_is_written() -> None:
    latest = dataclasses.replace(
        SANDBOX, project="site", source="site@2", commit="cd" * 32, commit_bytes=123_456, parked=f"{SANDBOX.id}-2"
    )
    assert encode_sandbox(latest) == SANDBOX_V3
    assert decode_sandbox(SANDBOX_V3) == latest
    assert decode_sandbox(encode_sandbox(SANDBOX)) == SANDBOX
    automatic = dataclasses.replace(COMMITTED, auto=True, memory_bytes=4096)
    assert encode_snapshot(automatic) == SNAPSHOT_V3
    assert decode_snapshot(SNAPSHOT_V3) == automatic
    assert decode_snapshot(encode_snapshot(SNAPSHOT)) == SNAPSHOT


def test_running_is_not_stored() -> None:
    assert encode_sandbox(dataclasses.replace(SANDBOX, running=True)) == encode_sandbox(SANDBOX)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\udc80\udcff"))


@given(TEXTS, st.none() | TEXTS, st.dictionaries(TEXTS, TEXTS), st.floats(allow_nan=False, allow_infinity=False))
def test_any_values_survive(image: str, source: str | None, env: dict[str, str], time: float) -> None:
    spec = dataclasses.replace(SPEC, image=image, env=env)
    record = dataclasses.replace(SANDBOX, spec=spec, source_snapshot_id=source, expires_at=time)
    text = encode_sandbox(record)
    assert text.isascii()
    assert decode_sandbox(text) == record


def changed(text: str, *path: str, to: Any = ...) -> str:
    table = json.loads(text)
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    if to is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return json.dumps(table)


SANDBOX_FIELDS = [(name,) for name in json.loads(SANDBOX_V3)] + [("spec", name) for name in json.loads(SPEC_V1)]


@pytest.mark.parametrize("path", SANDBOX_FIELDS)
def test_a_missing_or_wrong_field_is_noticed(path: tuple[str, ...]) -> None:
    for damaged in (changed(SANDBOX_V3, *path), changed(SANDBOX_V3, *path, to=[1])):
        with pytest.raises(UnreadableRecordError):
            decode_sandbox(damaged)


@pytest.mark.parametrize("name", list(json.loads(SNAPSHOT_V3)))
def test_a_missing_or_wrong_field_of_a_snapshot_is_noticed(name: str) -> None:
    for damaged in (changed(SNAPSHOT_V3, name), changed(SNAPSHOT_V3, name, to=[1])):
        with pytest.raises(UnreadableRecordError):
            decode_snapshot(damaged)


@pytest.mark.parametrize(
    "text",
    [
        None,
        b"",
        b"{}",
        7,
        "",
        "[]",
        "{}",
        "null",
        SANDBOX_V2[:-1],
        SANDBOX_V2[: len(SANDBOX_V2) // 2],
        changed(SANDBOX_V2, "version", to=4),
        changed(SANDBOX_V2, "version", to=0),
        changed(SANDBOX_V2, "version", to=True),
        changed(SANDBOX_V2, "version", to="1"),
        changed(SANDBOX_V2, "state", to="paused"),
        changed(SANDBOX_V2, "latest_at", to=math.inf),
        changed(SANDBOX_V2, "metadata", to={"A": 1}),
        changed(SANDBOX_V1, "version", to=2),
        changed(SANDBOX_V2, "spec", "network", to="some"),
        changed(SANDBOX_V2, "spec", "env", to={"A": 1}),
        changed(SANDBOX_V2, "created_at", to=math.nan),
        changed(SANDBOX_V2, "expires_at", to=math.inf),
        changed(SANDBOX_V2, "spec", "cpus", to=-math.inf),
        SANDBOX_V2.replace('"created_at":', '"created_at":1e999,"x":'),
        "[" * 100_000,
    ],
)
def test_unreadable(text: object) -> None:
    with pytest.raises(UnreadableRecordError):
        decode_sandbox(text)


@given(st.integers(0, len(SANDBOX_V2) - 1), st.characters())
def test_any_damage_gives_a_record_or_the_typed_error(at: int, character: str) -> None:
    try:
        decode_sandbox(SANDBOX_V2[:at] + character + SANDBOX_V2[at + 1 :])
    except UnreadableRecordError:
        pass
