"""What a run of the kit found: checks with a verdict each, and the verdicts of the items that follow from them.

A check passes, fails, is unsupported (the backend declares that it lacks the ability) or is a known failure. An item
fails when one of its checks does; it is unsupported when all of its checks are. The file form carries its format number
first and is what ``docs/backends.md`` is made from.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from agent_sandbox.conformance.checklist import ITEMS, Item
from agent_sandbox.errors import InvalidRequestError

FORMAT = 1
MAX_REASONS = 3
"""Reasons shown for one item in a table; the file and the page have all."""

Verdict = Literal["pass", "fail", "unsupported", "known failure", "not asked"]
VERDICTS: tuple[Verdict, ...] = ("pass", "fail", "known failure", "unsupported", "not asked")


@dataclasses.dataclass(frozen=True)
class Check:
    """One check: ``reason`` says why it failed, is unsupported or known; ``evidence`` what was seen. Seconds."""

    name: str
    items: tuple[str, ...]
    verdict: Verdict
    reason: str = ""
    evidence: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One item of the list, as a table shows it."""

    item: Item
    verdict: Verdict
    evidence: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """A whole run. ``configuration`` tells runs of one backend apart; ``whole`` is false where checks were chosen."""

    configuration: str
    backend: str
    image: str
    started: str
    versions: Mapping[str, str]
    capabilities: Mapping[str, Any]
    whole: bool
    seconds: float
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed that is not known to."""
        return bool(self.checks) and not any(check.verdict == "fail" for check in self.checks)

    def counts(self) -> Mapping[Verdict, int]:
        """How many checks have each verdict."""
        found = Counter(check.verdict for check in self.checks)
        return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}

    def rows(self) -> Iterator[Row]:
        """Every item of the list that was asked, with what its checks say together."""
        for item in ITEMS:
            checks = [check for check in self.checks if item.id in check.items]
            if checks or self.whole:
                yield row(item, checks)


def row(item: Item, checks: Sequence[Check]) -> Row:
    """What the checks of one item say together."""
    seconds = sum(check.seconds for check in checks)
    if not checks:
        return Row(item, "not asked", item.elsewhere or "no check of this item was run", seconds)
    verdicts = {check.verdict for check in checks}
    verdict: Verdict = next(
        (known for known in ("fail", "known failure", "pass") if known in verdicts),
        "unsupported",
    )
    passed = sum(check.verdict == "pass" for check in checks)
    parts = [f"{passed} of {len(checks)} checks"] if passed else []
    parts += [check.evidence for check in checks if check.evidence]
    told = [f"{check.name}: {check.reason}" for check in checks if check.verdict == "fail"]
    told += unique(check.reason for check in checks if check.verdict == "known failure")
    told += unique(check.reason for check in checks if check.verdict == "unsupported")
    parts += told[:MAX_REASONS]
    if len(told) > MAX_REASONS:
        parts.append(f"and {len(told) - MAX_REASONS} more")
    return Row(item, verdict, "; ".join(parts), seconds)


def unique(texts: Iterator[str]) -> list[str]:
    """The texts in their order, each once."""
    return list(dict.fromkeys(texts))


def to_json(report: Report) -> str:
    """The file form."""
    return json.dumps({"format": FORMAT, **dataclasses.asdict(report)}, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> Report:
    """Read the file form; :class:`InvalidRequestError` for another format or what is no report."""
    try:
        value = json.loads(text)
        if value.pop("format") != FORMAT:
            raise InvalidRequestError(f"this is no report of format {FORMAT}; make it again with this version")
        checks = tuple(Check(**{**check, "items": tuple(check["items"])}) for check in value.pop("checks"))
        return Report(**value, checks=checks)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequestError(f"this is no report of the conformance kit: {error}") from error
