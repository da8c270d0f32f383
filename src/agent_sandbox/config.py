"""Every setting, once: its name, default, help and bounds.

A value comes from the first of: a command-line flag, the variable ``AGENT_SANDBOX_<NAME>``, the TOML file named by
``AGENT_SANDBOX_CONFIG`` (keys are the lower-case names), the default here. ``docs/reference/settings.md`` is generated
from this list. A bad value is an :class:`~agent_sandbox.errors.InvalidRequestError` that names the setting.

When adding a setting: give it help and bounds here, then run ``make docs``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_sandbox.errors import InvalidRequestError

PREFIX = "AGENT_SANDBOX_"
_OTHERS = ("CONFIG", "URL", "API_KEY", "STORE", "AUTHOR")
"""What variables with the prefix mean beside settings: where those are, and what clients and the command line read."""
MIN_KEY_LENGTH = 16
WORKSPACES = ("auto", "overlay", "copy")


def _setting(default: Any, help: str, *, low: float | None = None, high: float | None = None) -> Any:
    metadata = {"help": help, "low": low, "high": high}
    if isinstance(default, tuple):
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default_data_dir() -> Path:
    """Where state lives when nothing says otherwise: ``/var/lib`` for root, the user's data directory else."""
    if os.geteuid() == 0:
        return Path("/var/lib/agent-sandbox")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "agent-sandbox"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The server's settings. Sizes say their unit in their name; times are in seconds."""

    api_keys: tuple[str, ...] = dataclasses.field(
        default=(),
        repr=False,
        metadata={"help": "Comma-separated keys that clients present, each at least 16 characters."},
    )
    insecure_no_auth: bool = _setting(False, "Serve without keys. For experiments on a private machine only.")
    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8080, "Port to listen on.", low=1, high=65535)
    data_dir: Path = dataclasses.field(
        default_factory=default_data_dir, metadata={"help": "Directory of all state (mode 0700)."}
    )
    backends: tuple[str, ...] = _setting(("runc",), "Comma-separated backends to offer; the first is the default.")
    default_image: str = _setting("host", "Image of a sandbox that names none.")
    allowed_images: tuple[str, ...] = _setting(
        ("*",),
        "Comma-separated globs of images that may be used. A * is no /, but for one that is the whole last part; a "
        "registry has to be written out, as in registry.example/team/*. Beside a digest any tag has to be allowed.",
    )
    sandbox_user: str = _setting("1000:1000", "uid:gid of commands inside a sandbox; never 0.")
    id_range_base: int = _setting(
        0x7800_0000,
        "First of the host uids and gids that sandboxes get, 65,536 each; a multiple of 65536. Nobody else may use "
        "those from here to 2147352575.",
        low=65_536,
        high=0x7FFD_0000,
    )
    docker_host: str = _setting(
        "unix:///var/run/docker.sock", "Docker engine of the docker backend: unix:///path or tcp://host:port."
    )
    docker_runtime: str = _setting("", "OCI runtime of the docker backend, such as runsc; empty: the engine's own.")
    network_name: str = _setting(
        "asb-network", "Bridge network of the docker backend's sandboxes that have one; made where it is missing."
    )
    sandboxd: str = _setting("", "Path of the sandboxd binary; empty: the one of the agent-sandbox-engine package.")
    machine_dir: str = _setting(
        "",
        "Directory of the guest kernels and root disks of microVMs, which servers of one host may share; empty: "
        "machine in AGENT_SANDBOX_DATA_DIR.",
    )
    qemu: str = _setting("", "Path of the qemu backend's QEMU; empty: qemu-system-x86_64 as PATH has it.")
    firecracker: str = _setting("", "Path of the firecracker backend's Firecracker; empty: firecracker in PATH.")
    jailer: str = _setting("", "Path of Firecracker's jailer, of the same release; empty: jailer in PATH.")
    allow_network: bool = _setting(False, "Let sandboxes ask for a network.")
    allow_tcg: bool = _setting(
        False,
        "Run microVMs under software emulation (TCG) where KVM cannot be used, and count that, which is no security "
        "boundary, as isolation vm.",
    )
    allow_unenforced: bool = _setting(False, "Accept a limit that the backend cannot enforce; it is reported.")
    max_sandboxes: int = _setting(20, "Sandboxes alive at once.", low=1, high=100_000)
    min_free_mb: int = _setting(
        512,
        "Free space of the data directory's disk, MiB, below which no sandbox is created; 0: none. Those that run need "
        "it: their file systems turn read-only on a full disk.",
        low=0,
    )
    workspaces: str = _setting(
        "auto",
        "How a workspace begins as a state on the embedded backends: overlay (mounted over layers that are shared), "
        "copy (laid out for itself), or auto: overlay where this host's kernel and rights allow it.",
    )
    checkout_cache_mb: int = _setting(
        10_240, "Most that states laid out for rollback and fork take of the disk, MiB, where nobody uses them.", low=0
    )
    default_timeout_seconds: int = _setting(900, "Time to live of a sandbox that asks for none.", low=1)
    max_timeout_seconds: int = _setting(86400, "Longest time to live.", low=1)
    default_cpus: float = _setting(1.0, "Cores of a sandbox.", low=0.01)
    max_cpus: float = _setting(4.0, "Most cores of a sandbox.", low=0.01)
    default_memory_mb: int = _setting(512, "Memory of a sandbox, MiB, without swap.", low=16)
    max_memory_mb: int = _setting(4096, "Most memory of a sandbox, MiB.", low=16)
    default_pids_limit: int = _setting(
        256,
        "Processes and threads of a sandbox. Except in a microVM, seven threads of its daemon, a supervisor for each "
        "command and two that wait are among them.",
        low=16,
    )
    max_pids_limit: int = _setting(4096, "Most processes of a sandbox.", low=16)
    default_disk_mb: int = _setting(1024, "Disk of a sandbox, MiB: its workspace and what else it may write.", low=16)
    max_disk_mb: int = _setting(10240, "Most disk of a sandbox, MiB.", low=16)
    tmp_size_mb: int = _setting(256, "Size of /tmp, MiB; at most half of the memory, against which it counts.", low=1)
    default_exec_timeout_seconds: float = _setting(60.0, "Deadline of a command that asks for none.", low=0.001)
    max_exec_timeout_seconds: float = _setting(3600.0, "Longest deadline of a command.", low=0.001)
    max_exec_output_bytes: int = _setting(10_485_760, "Output that a plain exec keeps, both streams together.", low=1)
    max_file_bytes: int = _setting(52_428_800, "Largest file to read or write in one request.", low=1)
    max_snapshot_bytes: int = _setting(1_073_741_824, "Most bytes of regular files in a snapshot.", low=1)
    reap_interval_seconds: float = _setting(10.0, "How often expired sandboxes are looked for.", low=0.05)
    idle_exit_seconds: float = _setting(0.0, "Stop the server after this long without a sandbox; 0: never.", low=0)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, low, high = getattr(self, field.name), field.metadata.get("low"), field.metadata.get("high")
            if isinstance(value, float) and not math.isfinite(value):
                raise _bad(field.name, f"{value} is not a finite number")
            if (low is not None and value < low) or (high is not None and value > high):
                raise _bad(field.name, f"{value} is out of range ({low} to {high if high is not None else 'any'})")
        if any(len(key) < MIN_KEY_LENGTH for key in self.api_keys):
            raise _bad("api_keys", f"each key needs at least {MIN_KEY_LENGTH} characters")
        if not all(key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise _bad("api_keys", "a key is printable ASCII without spaces, or no header could carry it")
        try:
            os.fspath(self.data_dir).encode()
        except UnicodeEncodeError:
            raise _bad("data_dir", "the path is not UTF-8, and no runtime could be told of it") from None
        if not self.host:
            raise _bad("host", "is empty, which would mean every interface; name one")
        if self.workspaces not in WORKSPACES:
            raise _bad("workspaces", f"{self.workspaces!r} is none of {', '.join(WORKSPACES)}")
        if not self.backends:
            raise _bad("backends", "at least one backend is needed")
        for kind in ("timeout_seconds", "cpus", "memory_mb", "pids_limit", "disk_mb", "exec_timeout_seconds"):
            if getattr(self, f"default_{kind}") > getattr(self, f"max_{kind}"):
                raise _bad(f"default_{kind}", f"is above max_{kind}")
        if self.id_range_base % 65_536:
            raise _bad("id_range_base", f"{self.id_range_base} is no multiple of 65536")
        self.sandbox_ids()

    def machine_directory(self) -> Path:
        """Where guest kernels and root disks of microVMs are."""
        return Path(self.machine_dir).expanduser().absolute() if self.machine_dir else self.data_dir / "machine"

    def sandbox_ids(self) -> tuple[int, int]:
        """``sandbox_user`` as numbers."""
        uid, _, gid = self.sandbox_user.partition(":")
        if not (uid.isascii() and uid.isdigit() and gid.isascii() and gid.isdigit()):
            raise _bad("sandbox_user", f"{self.sandbox_user!r} is not uid:gid in numbers")
        if not (0 < int(uid) < 65536 and 0 < int(gid) < 65536):
            raise _bad("sandbox_user", "uid and gid are 1 to 65535; commands never run as root")
        return int(uid), int(gid)


def load_settings(overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings; ``overrides`` (from flags) win. Raises :class:`InvalidRequestError` that names the setting."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    config_file = environ.get(PREFIX + "CONFIG")
    if config_file:
        try:
            table = tomllib.loads(Path(config_file).read_text())
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"cannot read {PREFIX}CONFIG file {config_file}: {error}") from error
        unknown = sorted(set(table) - set(fields))
        if unknown:
            raise InvalidRequestError(f"unknown settings in {config_file}: {', '.join(unknown)}")
        values.update({name: _parse(name, value) for name, value in table.items()})
    for name in fields:
        raw = environ.get(PREFIX + name.upper())
        if raw is not None:
            values[name] = _parse(name, raw)
    for name, value in (overrides or {}).items():
        if value is not None:
            values[name] = _parse(name, value)
    return Settings(**values)


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that begin as ours do and mean nothing, each with the one spelt most like it, or ``""``."""
    known = [*(field.name.upper() for field in dataclasses.fields(Settings)), *_OTHERS]
    found = {}
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        if name != variable and name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.8)
            found[variable] = PREFIX + near[0] if near else ""
    return found


def describe() -> Iterator[tuple[str, str, str]]:
    """Yield (variable, default, help) of every setting, for the reference page and ``--help``."""
    for field in dataclasses.fields(Settings):
        default = field.default if field.default is not dataclasses.MISSING else None
        if default is None and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name == "data_dir":
            default = "/var/lib/agent-sandbox"
        text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        yield PREFIX + field.name.upper(), text, str(field.metadata["help"])


_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}
_KINDS = {field.name: str(field.type) for field in dataclasses.fields(Settings)}


def _parse(name: str, value: Any) -> Any:
    kind = _KINDS[name]
    try:
        if kind == "bool":
            if isinstance(value, bool):
                return value
            text = str(value).strip().lower()
            if text not in _TRUE | _FALSE:
                raise ValueError("not true or false")
            return text in _TRUE
        if kind == "Path":
            if not str(value):
                raise ValueError("a path is needed")
            return Path(value).expanduser().absolute()
        if kind.startswith("tuple"):
            if not isinstance(value, str | list | tuple):
                raise TypeError("not a list of texts")
            parts = value.split(",") if isinstance(value, str) else value
            return tuple(str(part).strip() for part in parts if str(part).strip())
        if isinstance(value, bool):
            raise TypeError("not a number" if kind in {"int", "float"} else "not a text")
        if kind == "int" and isinstance(value, float) and not value.is_integer():
            raise ValueError("not a whole number")
        return {"int": int, "float": float, "str": str}[kind](value)
    except (ValueError, TypeError, OverflowError) as error:
        shown = "" if name == "api_keys" else f" {value!r}"
        raise _bad(name, f"cannot use the value{shown}: {error}") from error


def _bad(name: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"setting {PREFIX}{name.upper()}: {problem}")
