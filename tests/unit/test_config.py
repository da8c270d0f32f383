"""The settings: where a value comes from, what is refused, and that a refusal names the setting and no secret."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.config import PREFIX, Settings, describe, load_settings, unknown_variables
from agent_sandbox.errors import InvalidRequestError

KEY = "k" * 16


def load(tmp_path: Path, toml: str | None = None, overrides: dict[str, Any] | None = None, **environ: str) -> Settings:
    names = {PREFIX + name.upper(): value for name, value in environ.items()}
    if toml is not None:
        (tmp_path / "settings.toml").write_text(toml)
        names[PREFIX + "CONFIG"] = str(tmp_path / "settings.toml")
    return load_settings(overrides, names)


def test_the_defaults_are_the_documented_ones(tmp_path: Path) -> None:
    settings = load(tmp_path)
    assert settings == Settings()
    expected = {
        "api_keys": (),
        "insecure_no_auth": False,
        "host": "127.0.0.1",
        "port": 8080,
        "allow_network": False,
        "sandbox_user": "1000:1000",
        "max_sandboxes": 20,
        "default_timeout_seconds": 900,
        "max_timeout_seconds": 86400,
        "default_cpus": 1.0,
        "max_cpus": 4.0,
        "default_memory_mb": 512,
        "max_memory_mb": 4096,
        "default_pids_limit": 256,
        "max_pids_limit": 4096,
        "tmp_size_mb": 256,
        "default_exec_timeout_seconds": 60.0,
        "max_exec_timeout_seconds": 3600.0,
        "max_exec_output_bytes": 10485760,
        "max_file_bytes": 52428800,
        "max_snapshot_bytes": 1073741824,
        "reap_interval_seconds": 10.0,
    }
    assert {name: getattr(settings, name) for name in expected} == expected


def test_flags_before_environment_before_file_before_default(tmp_path: Path) -> None:
    toml = "port = 1\nmax_sandboxes = 2\ntmp_size_mb = 3\n"
    settings = load(tmp_path, toml, {"port": 5, "max_sandboxes": None}, port="4", max_sandboxes="6")
    assert (settings.port, settings.max_sandboxes, settings.tmp_size_mb) == (5, 6, 3)
    assert settings.default_memory_mb == 512


def test_values_are_parsed_by_their_kind(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        api_keys=f" {KEY}a, {KEY}b ,,",
        allow_network="Yes",
        allow_unenforced="0",
        default_cpus="0.5",
        data_dir="~/somewhere",
        backends="runc,fake",
    )
    assert settings.api_keys == (KEY + "a", KEY + "b")
    assert (settings.allow_network, settings.allow_unenforced) == (True, False)
    assert settings.default_cpus == 0.5
    assert settings.data_dir == Path.home() / "somewhere"
    assert settings.backends == ("runc", "fake")


def test_a_file_has_lists_and_truth_values(tmp_path: Path) -> None:
    settings = load(tmp_path, f'api_keys = ["{KEY}"]\nallow_network = true\ndefault_cpus = 2\nmax_sandboxes = 3.0\n')
    assert (settings.api_keys, settings.allow_network, settings.default_cpus) == ((KEY,), True, 2.0)
    assert (settings.max_sandboxes, type(settings.max_sandboxes)) == (3, int)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "0"),
        ("port", "65536"),
        ("port", "80a"),
        ("port", ""),
        ("port", "8080.0"),
        ("max_sandboxes", "0"),
        ("max_sandboxes", "-1"),
        ("default_cpus", "nan"),
        ("max_cpus", "inf"),
        ("max_cpus", "1e999"),
        ("default_cpus", "0"),
        ("default_cpus", "5"),  # above max_cpus
        ("default_memory_mb", "8192"),
        ("default_timeout_seconds", "0"),
        ("default_timeout_seconds", "90000"),
        ("default_exec_timeout_seconds", "0"),
        ("reap_interval_seconds", "0"),
        ("idle_exit_seconds", "-1"),
        ("insecure_no_auth", "maybe"),
        ("backends", ""),
        ("backends", " , "),
        ("data_dir", ""),
        ("host", ""),
        ("sandbox_user", ""),
        ("sandbox_user", "1000"),
        ("sandbox_user", "1000:"),
        ("sandbox_user", "0:1000"),
        ("sandbox_user", "1000:0"),
        ("sandbox_user", "1000:65536"),
        ("sandbox_user", "-1:1000"),
        ("sandbox_user", "root:root"),
        ("sandbox_user", "١:١"),
        ("sandbox_user", "1:2:3"),
    ],
)
def test_bad_values_are_refused_and_named(name: str, value: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"setting {PREFIX}{name.upper()}: "):
        load_settings(environ={PREFIX + name.upper(): value})


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("max_sandboxes = 1.5", "MAX_SANDBOXES"),
        ("max_sandboxes = true", "MAX_SANDBOXES"),
        ("host = false", "HOST"),
        ("api_keys = 5", "API_KEYS"),
        ("api_keys = {a = 1}", "API_KEYS"),
        ("default_cpus = [1]", "DEFAULT_CPUS"),
        ("default_cpus = nan", "DEFAULT_CPUS"),
    ],
)
def test_bad_values_of_a_file(tmp_path: Path, line: str, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"setting {PREFIX}{name}: "):
        load(tmp_path, line)


def test_a_file_with_unknown_or_broken_content(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"unknown settings in .*: colour, prot"):
        load(tmp_path, "prot = 1\ncolour = 2\nport = 3\n")
    with pytest.raises(InvalidRequestError, match=f"cannot read {PREFIX}CONFIG"):
        load(tmp_path, "port = ")
    with pytest.raises(InvalidRequestError, match=f"cannot read {PREFIX}CONFIG"):
        load(tmp_path, config=str(tmp_path / "missing.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequestError, match=f"cannot read {PREFIX}CONFIG"):
        load(tmp_path, config=str(tmp_path / "bytes.toml"))


@pytest.mark.parametrize(
    "key", ["secret-is-short", "sécret-with-sixteen", "secret with spaces in it", "secret\ttab-and-more"]
)
def test_bad_keys_are_never_shown(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidRequestError, match="API_KEYS") as caught:
        load(tmp_path, api_keys=f"{KEY},{key}")
    assert "cret" not in str(caught.value)
    assert KEY not in str(caught.value)


def test_keys_are_not_in_the_repr() -> None:
    assert KEY not in repr(Settings(api_keys=(KEY,)))


def test_the_sandbox_user_as_numbers() -> None:
    assert Settings(sandbox_user="1234:65535").sandbox_ids() == (1234, 65535)


def test_where_state_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert Settings().data_dir == Path("/var/lib/agent-sandbox")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Settings().data_dir == tmp_path / "agent-sandbox"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Settings().data_dir == tmp_path / ".local/share/agent-sandbox"


def test_every_setting_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # the page must not depend on who generates it
    rows = {name: (default, text) for name, default, text in describe()}
    assert set(rows) == {PREFIX + field.name.upper() for field in dataclasses.fields(Settings)}
    assert all(text.endswith(".") for _, text in rows.values())
    assert rows[PREFIX + "DATA_DIR"][0] == "/var/lib/agent-sandbox"
    assert rows[PREFIX + "PORT"][0] == "8080"
    assert rows[PREFIX + "ALLOWED_IMAGES"][0] == "*"


def test_variables_that_are_no_settings_are_told_with_the_nearest() -> None:
    environ = {name: "" for name, _, _ in describe()} | {"AGENT_SANDBOX_URL": "", "AGENT_SANDBOX_STORE": "", "HOME": ""}
    assert unknown_variables(environ) == {}
    environ |= {"AGENT_SANDBOX_MAX_SANDBOXEN": "3", "AGENT_SANDBOX_QQ": ""}
    assert unknown_variables(environ) == {
        "AGENT_SANDBOX_MAX_SANDBOXEN": "AGENT_SANDBOX_MAX_SANDBOXES",
        "AGENT_SANDBOX_QQ": "",
    }


def test_a_data_directory_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="DATA_DIR: the path is not UTF-8"):
        load_settings(environ={"AGENT_SANDBOX_DATA_DIR": "/srv/\udcff"})
