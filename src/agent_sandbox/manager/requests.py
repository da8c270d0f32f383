"""What a caller may ask of a living sandbox: paths, commands, environments, deadlines. Pure.

Texts are ``str`` with surrogate escapes and become bytes as UTF-8; a lone surrogate that stands for no byte is
refused, as is NUL, which ends a C string. Limits and their reasons:

* a path: 4,095 bytes, Linux's PATH_MAX without its NUL;
* one argument, or one ``NAME=value``: 131,071 bytes, MAX_ARG_STRLEN of execve(2) without its NUL. A longer *script*
  still runs: see :func:`command_argv`;
* a sandbox's ``env``, and a command's: 256 KiB each;
* a tag: 256 bytes, because it is kept inside the sandbox and listed with its command; labels of a sandbox: 16, with
  names of 64 and values of 256 characters, because they are listed with it and searched one by one;
* a command: 4 MiB less these two and 64 KiB for the image's variables, because the wire carries all of it as one map
  of at most 4 MiB. Whether the kernel takes it is the kernel's word: execve(2) allows a quarter of the stack's limit,
  often 2 MiB.
"""

from __future__ import annotations

import math
import posixpath
import signal as signals
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent_sandbox.config import Settings
from agent_sandbox.errors import InvalidRequestError, PayloadTooLargeError
from agent_sandbox.types import WORKSPACE, ExecExit, ExecRequest, TerminalSize

MAX_PATH_BYTES = 4095
MAX_ARGUMENT_BYTES = 131_071
MAX_ENV_BYTES = 256 << 10
MAX_COMMAND_BYTES = (4 << 20) - 2 * MAX_ENV_BYTES - (64 << 10)
MAX_SNAPSHOT_NAME = 200
MAX_TAG_BYTES = 256
MAX_SIGNAL = 64
MAX_TERMINAL_SIDE = 65_535
MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_VALUE = 256

_SHELL = "/bin/sh"
_PER_ITEM = 16  # a pointer in execve's table, a length on the wire

# Joins its arguments, forgets them and its own variables, and runs the result as `sh -c` would: same `$0`, no `$1`. It
# never changes; the script travels as data. The names are ours, so that no variable of the caller's is lost.
_JOIN = (
    "__asb_script=; for __asb_piece do __asb_script=$__asb_script$__asb_piece; done; set --; "
    'eval "unset __asb_script __asb_piece; $__asb_script"'
)

TERMINAL = "xterm-256color"
"""``TERM`` of a command with a terminal that names none: what today's terminals understand."""


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """A command that is to be kept. ``None`` means the server's default; times are in seconds."""

    command: str | Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    workdir: str | None = None
    timeout_seconds: float | None = None
    stdin: bool = False
    tty: TerminalSize | None = None
    detach: bool = False
    tag: str = ""
    root: bool = False


def kept_command(options: CommandOptions, settings: Settings, id: str) -> ExecRequest:
    """Check what is asked and give what the backend needs. Errors as of the functions below."""
    env = validate_env(options.env)
    if options.tty is not None:
        terminal_size(options.tty)
        env = {"TERM": TERMINAL, **env}
    seconds = options.timeout_seconds
    if seconds is None and (options.detach or options.tty is not None):
        # Nobody waits for it, or somebody works in it: a minute would be an accident.
        seconds = settings.max_exec_timeout_seconds
    return ExecRequest(
        argv=tuple(command_argv(options.command)),
        env=env,
        workdir=WORKSPACE if options.workdir is None else normalize_path(options.workdir),
        timeout_seconds=exec_timeout(seconds, settings),
        id=id,
        tag=command_tag(options.tag),
        stdin=options.stdin,
        tty=options.tty,
    )


def command_tag(tag: str) -> str:
    """Check a command's tag: at most 256 bytes of printable text."""
    if len(encode_text(tag, "tag")) > MAX_TAG_BYTES or not (tag.isprintable()):
        raise InvalidRequestError(f"tag is at most {MAX_TAG_BYTES} bytes of printable text", details={"field": "tag"})
    return tag


def terminal_size(size: TerminalSize) -> TerminalSize:
    """Check the size of a terminal."""
    for name, value in (("rows", size.rows), ("cols", size.cols)):
        in_range(name, value, 1, MAX_TERMINAL_SIDE)
    return size


def signal_number(signal: str | int) -> int:
    """Give a signal's number: 1 to 64, or a name with or without ``SIG``."""
    if isinstance(signal, str):
        name = signal.upper()
        try:
            return int(signals.Signals[name if name.startswith("SIG") else "SIG" + name])
        except KeyError:
            raise InvalidRequestError(
                f"there is no signal {signal[:20]!r}; TERM, INT, KILL and HUP are some", details={"field": "signal"}
            ) from None
    return int(in_range("signal", signal, 1, MAX_SIGNAL))


def labels(metadata: Mapping[str, str]) -> dict[str, str]:
    """Check the labels of a sandbox and give a copy."""
    if len(metadata) > MAX_METADATA:
        raise InvalidRequestError(f"metadata has at most {MAX_METADATA} names", details={"field": "metadata"})
    for name, value in metadata.items():
        encode_text(value, f"metadata: the value of {name!r}")
        if not encode_text(name, "a name in metadata") or len(name) > MAX_METADATA_NAME or "=" in name:
            raise InvalidRequestError(
                f"a name in metadata has 1 to {MAX_METADATA_NAME} characters and no '='", details={"field": "metadata"}
            )
        if len(value) > MAX_METADATA_VALUE:
            raise InvalidRequestError(
                f"a value in metadata has at most {MAX_METADATA_VALUE} characters", details={"field": "metadata"}
            )
    return dict(metadata)


def normalize_path(path: str) -> str:
    """Give the absolute path that ``path`` names.

    Relative ones start at ``/workspace``; ``.``, ``..`` and ``//`` are resolved. ``..`` is resolved by name, before
    any link is followed, and stops at the root.
    """
    raw = encode_text(path, "path")
    if not raw:
        raise InvalidRequestError("path is empty")
    if len(raw) > MAX_PATH_BYTES:
        raise InvalidRequestError(f"path is longer than {MAX_PATH_BYTES} bytes")
    joined = posixpath.normpath(posixpath.join(WORKSPACE.encode(), raw))
    # POSIX lets two leading slashes mean something else, so normpath keeps them; Linux does not.
    full = b"/" + joined.lstrip(b"/")
    if len(full) > MAX_PATH_BYTES:
        raise InvalidRequestError(f"path is longer than {MAX_PATH_BYTES} bytes")
    return full.decode("utf-8", "surrogateescape")


def require_in_workspace(path: str) -> str:
    """Give :func:`normalize_path` of a path to write; it must lie strictly inside ``/workspace``."""
    full = normalize_path(path)
    if not full.startswith(WORKSPACE + "/"):
        raise InvalidRequestError(f"path must be inside {WORKSPACE}; files elsewhere are written by commands")
    return full


def directory_in_workspace(path: str) -> str:
    """Give :func:`normalize_path` of a directory for an archive: ``/workspace`` or one inside it."""
    full = normalize_path(path)
    return full if full == WORKSPACE else require_in_workspace(full)


def command_argv(command: str | Sequence[str]) -> list[str]:
    """Give the argument list of a command: a list as it is, a string for ``/bin/sh -c``.

    A script above MAX_ARGUMENT_BYTES is cut into arguments that a constant first script joins and evaluates; nothing of
    the caller's text is quoted or interpreted on the way. :class:`InvalidRequestError`; :class:`PayloadTooLargeError`.
    """
    if isinstance(command, str):
        script = encode_text(command, "command")
        if not script:
            raise InvalidRequestError("command is empty")
        _check_total(len(script))
        if len(script) <= MAX_ARGUMENT_BYTES:
            return [_SHELL, "-c", command]
        cuts = range(0, len(script), MAX_ARGUMENT_BYTES)
        pieces = [script[at : at + MAX_ARGUMENT_BYTES].decode("utf-8", "surrogateescape") for at in cuts]
        return [_SHELL, "-c", _JOIN, _SHELL, *pieces]
    argv = list(command)
    sizes = [len(encode_text(argument, "command")) for argument in argv]
    if not argv or not argv[0]:
        raise InvalidRequestError("command is empty")
    if max(sizes) > MAX_ARGUMENT_BYTES:
        raise InvalidRequestError(
            f"an argument is longer than {MAX_ARGUMENT_BYTES} bytes, Linux's limit; pass it in a file"
            " or give the command as a string"
        )
    _check_total(sum(sizes) + _PER_ITEM * len(sizes))
    return argv


def validate_env(env: Mapping[str, str]) -> dict[str, str]:
    """Check a sandbox's or a command's environment and give a copy. :class:`InvalidRequestError` names the variable."""
    size = 0
    for name, value in env.items():
        raw_name = encode_text(name, "the name of a variable in env")
        if not raw_name:
            raise InvalidRequestError("env has a variable with an empty name")
        if b"=" in raw_name:
            raise InvalidRequestError(f"env: the name {name!r} contains '='")
        length = len(raw_name) + 1 + len(encode_text(value, f"env: the value of {name!r}"))
        if length > MAX_ARGUMENT_BYTES:
            raise InvalidRequestError(f"env: {name!r} is longer than {MAX_ARGUMENT_BYTES} bytes, Linux's limit")
        size += length + 2 * _PER_ITEM
    if size > MAX_ENV_BYTES:
        raise PayloadTooLargeError(f"env is larger than {MAX_ENV_BYTES} bytes")
    return dict(env)


def exec_timeout(seconds: float | None, settings: Settings) -> float:
    """Give a command's deadline in seconds: the default when none is asked for, else what is asked for."""
    if seconds is None:
        return settings.default_exec_timeout_seconds
    return in_range("timeout_seconds", seconds, 0.001, settings.max_exec_timeout_seconds)


def exit_status(exit: ExecExit) -> int:
    """Give the one number that shells use: the code, 128 + signal, 137 on timeout; 255 where the guest said neither."""
    if exit.timed_out:
        return 137
    if exit.signal is not None and 0 < exit.signal < 128:
        return 128 + exit.signal
    if exit.code is not None and 0 <= exit.code <= 255:
        return exit.code
    return 255


def file_mode(mode: int) -> int:
    """Check permission bits."""
    if isinstance(mode, bool) or not 0 <= mode <= 0o7777:
        raise InvalidRequestError("mode is 0 to 7777, octal")
    return mode


def snapshot_name(name: str | None) -> str | None:
    """Check a snapshot's name: at most 200 printable characters, or none."""
    if name is None:
        return None
    if not name or len(name) > MAX_SNAPSHOT_NAME or not name.isprintable():
        raise InvalidRequestError(f"name is 1 to {MAX_SNAPSHOT_NAME} printable characters")
    return name


def in_range(field: str, value: float, low: float, high: float) -> float:
    """Give ``value`` or raise :class:`InvalidRequestError` that names the field and its range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{field} is a number from {low} to {high}", details={"field": field})
    if not low <= value <= high:
        raise InvalidRequestError(f"{field} is {value}, must be {low} to {high}", details={"field": field})
    return value


def encode_text(text: str, what: str) -> bytes:
    """Give the bytes of a text; :class:`InvalidRequestError` when it has a NUL or stands for no bytes."""
    if not isinstance(text, str):
        raise InvalidRequestError(f"{what} is not a text")
    if "\0" in text:
        raise InvalidRequestError(f"{what} contains a NUL character")
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{what} contains a lone surrogate, which stands for no byte") from error


def _check_total(size: int) -> None:
    if size > MAX_COMMAND_BYTES:
        raise PayloadTooLargeError(f"the command is larger than {MAX_COMMAND_BYTES} bytes; pass it in a file")
