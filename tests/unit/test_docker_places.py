"""What a server of the Docker backend keeps on its host."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import pytest

from agent_sandbox.backends.docker.places import Places, Record
from agent_sandbox.errors import BackendError
from agent_sandbox.types import SandboxSpec

SPEC = SandboxSpec("host", "", cpus=1.0, memory_mb=128, pids_limit=64, disk_mb=32, tmp_mb=16)


def test_hosts_with_data_directories_of_one_name_are_told_apart_on_an_engine(tmp_path: Path) -> None:
    data = tmp_path / "data"
    one = Places(data)
    one.prepare(shares_files=False)
    assert Places(data).instance == one.instance, "it is kept"
    data.rename(tmp_path / "other")
    another = Places(data)
    assert another.instance != one.instance
    assert another.run == one.run


def test_environments_from_before_keep_what_they_are_known_by(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "docker" / "env" / "sb1-1").mkdir(parents=True)
    places = Places(data)
    assert places.instance == hashlib.sha256(os.fsencode(data)).hexdigest()[:12]
    places.prepare(shares_files=False)
    (data / "docker" / "env" / "sb1-1").rmdir()
    assert Places(data).instance == places.instance


def test_a_record_from_before_labels_were_kept_is_read(tmp_path: Path) -> None:
    places = Places(tmp_path / "data")
    places.prepare(shares_files=False)
    record = Record("sb1-1", SPEC, "sha256:1", True, volumes=("/data",), layers=("/l",), image_labels=("a", "b"))
    environment = places.environment("sb1-1")
    environment.reserve(record)
    assert environment.record() == record
    file = environment.directory / "spec.json"
    older = json.loads(file.read_text())
    del older["image_labels"]
    file.write_text(json.dumps(older))
    assert environment.record() == dataclasses.replace(record, image_labels=())


def test_a_damaged_name_is_told_and_nothing_is_taken_for_somebody_elses(tmp_path: Path) -> None:
    places = Places(tmp_path / "data")
    places.prepare(shares_files=False)
    for damaged in ("", "0123456789a", "../../../etc", "0123456789ab\n"):
        (tmp_path / "data" / "docker" / "instance").write_text(damaged)
        with pytest.raises(BackendError, match="instance is damaged"):
            Places(tmp_path / "data").prepare(shares_files=False)
