"""What the fields of the public shapes may hold: bounds and markers, see the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

from agent_sandbox.errors import InvalidRequestError

MAX_NAME_LENGTH = 128
"""Characters of a snapshot's name: a label for people, shown in tables."""

MAX_TAG_LENGTH = 256
"""Characters (and bytes in UTF-8) of a command's tag: it is kept inside the sandbox and listed with the command."""

MAX_METADATA_PAIRS, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 256
"""Labels of a sandbox, and the characters of each name and value: they are listed with it and searched one by one."""

MAX_TERMINAL_SIDE = 65_535
"""Rows or columns of a terminal (struct winsize has 16 bits for each)."""

MAX_INTEGER = 2**53 - 1
"""Largest integer that every JSON implementation reads exactly (RFC 8259, section 6)."""

_Schema = dict[str, Any]
_Handler = Callable[[Any], _Schema]

_EPOCH = datetime(1970, 1, 1)
_FIRST, _LAST = ((moment - _EPOCH) // timedelta(microseconds=1) for moment in (datetime.min, datetime.max))


def rfc3339(microseconds: int) -> str:
    """Write microseconds since the epoch as RFC 3339 in UTC; outside the years 1 to 9999 the nearest time within."""
    moment = _EPOCH + timedelta(microseconds=min(max(microseconds, _FIRST), _LAST))
    return moment.isoformat(timespec="microseconds") + "Z"


@dataclass(frozen=True)
class Number:
    """Bound an ``int`` or ``float`` field: finite, strictly of its type (an ``int`` passes as ``float``)."""

    ge: float | None = None
    gt: float | None = None
    le: int = MAX_INTEGER

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> _Schema:
        bounds = {name: value for name, value in (("ge", self.ge), ("gt", self.gt)) if value is not None}
        sane = {"allow_inf_nan": False} if source is float else {"le": self.le}
        return {**handler(source), **bounds, **sane, "strict": True}


@dataclass(frozen=True)
class Flag:
    """Take ``true`` and ``false`` only."""

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> _Schema:
        return {**handler(source), "strict": True}


@dataclass(frozen=True)
class Text:
    """Take a string of at most ``max_length`` characters, surrogate escapes included, without NUL."""

    max_length: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> _Schema:
        return _checked_by(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: _Handler) -> _Schema:
        return {"type": "string"} if self.max_length is None else {"type": "string", "maxLength": self.max_length}

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError("must be a string")  # noqa: TRY004 - the validator takes ValueError only
        if self.max_length is not None and len(value) > self.max_length:
            raise ValueError(f"must have at most {self.max_length} characters")
        return _without_nul(value)


@dataclass(frozen=True)
class Command:
    """Take a shell line (a string) or an argument vector (a list of strings)."""

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> _Schema:
        return _checked_by(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: _Handler) -> _Schema:
        return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}

    def check(self, value: Any) -> str | list[str]:
        if isinstance(value, str):
            return _without_nul(value)
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise ValueError("must be a string, or a list of strings")
        return [_without_nul(part) for part in value]


@dataclass(frozen=True)
class Mode:
    """Take permission bits as one to four octal digits in a string, such as ``"644"``."""

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> _Schema:
        return _checked_by(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: _Handler) -> _Schema:
        return {"type": "string", "pattern": "^[0-7]{1,4}$"}

    def check(self, value: Any) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= 4 or not set(value) <= set("01234567"):
            raise ValueError("must be a string of one to four octal digits, such as 644")
        return value


@dataclass(frozen=True)
class Signal:
    """Take a signal by its number (1 to 64) or its name, ``TERM`` or ``SIGTERM``."""

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> _Schema:
        return _checked_by(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: _Handler) -> _Schema:
        return {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1, "maximum": 64}]}

    def check(self, value: Any) -> str | int:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError("must be a signal's name or number")  # noqa: TRY004 - the validator takes ValueError only
        if isinstance(value, int) and not 1 <= value <= 64:
            raise ValueError("must be from 1 to 64")
        if isinstance(value, str) and not (value.isascii() and value.isprintable() and 1 <= len(value) <= 16):
            raise ValueError("must be a signal's name, such as TERM")
        return value


@dataclass(frozen=True)
class Labels:
    """Take a small object of strings."""

    def __get_pydantic_core_schema__(self, source: Any, handler: _Handler) -> _Schema:
        return _checked_by(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: _Handler) -> _Schema:
        value = {"type": "string", "maxLength": MAX_METADATA_VALUE}
        return {"type": "object", "additionalProperties": value, "maxProperties": MAX_METADATA_PAIRS}

    def check(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise ValueError("must be an object of strings")
        if len(value) > MAX_METADATA_PAIRS:
            raise ValueError(f"must have at most {MAX_METADATA_PAIRS} names")
        for name, text in value.items():
            if not 1 <= len(name) <= MAX_METADATA_KEY or "=" in name:
                raise ValueError(f"a name has 1 to {MAX_METADATA_KEY} characters and no '='")
            if len(text) > MAX_METADATA_VALUE:
                raise ValueError(f"a value has at most {MAX_METADATA_VALUE} characters")
            _without_nul(name + text)
        return value


@dataclass(frozen=True)
class Time:
    """Say in the schema that a string is an RFC 3339 time."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: _Handler) -> _Schema:
        return {**handler(schema), "format": "date-time"}


def _checked_by(check: Callable[[Any], Any]) -> _Schema:
    return {"type": "function-plain", "function": {"type": "no-info", "function": check}}


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise InvalidRequestError("a NUL character cannot be part of any string here; remove it")
    return value


Str = Annotated[str, Text()]
Bool = Annotated[bool, Flag()]
Timestamp = Annotated[str, Time()]
