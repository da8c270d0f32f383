"""``docs/backends.md``: what real runs of the kit printed, side by side.

The page is made from the runs' files alone, so it says nothing that no run has said. Pure: reads no clock, no machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agent_sandbox.conformance.checklist import ITEMS
from agent_sandbox.conformance.report import Report, Row, Verdict

SIGNS: dict[Verdict, str] = {
    "pass": "pass",
    "fail": "**FAIL**",
    "known failure": "known",
    "unsupported": "–",
    "not asked": "",
}
FLAGS = ("userns", "guest", "layered_workspace", "checkpoint", "pause", "resize", "fuse", "nested_containers")


def page(reports: Sequence[Report], generated: str) -> str:
    """The page for the runs, in their order. ``generated`` is the comment that says how to make it again."""
    parts = [
        "# Backends",
        "",
        generated,
        "What each backend is and does, as real runs of the [conformance kit](how-to/write-a-backend.md#run-the-kit) "
        "printed it. `make conformance` runs",
        "the kit on the backends that this machine has and makes this page again.",
        "",
        "## The runs",
        "",
        _table(
            ("configuration", "backend", "verdict", "checks", "date", "versions", "image"),
            [
                (
                    f"`{report.configuration}`",
                    f"`{report.backend}`",
                    "passed" if report.passed else "**FAILED**",
                    ", ".join(f"{count} {verdict}" for verdict, count in report.counts().items()),
                    report.started[:10],
                    ", ".join(f"{name} {version}" for name, version in report.versions.items()),
                    f"`{report.image}`",
                )
                for report in reports
            ],
        ),
        "## Capabilities as declared",
        "",
        _table(("", *(f"`{report.configuration}`" for report in reports)), list(_capabilities(reports))),
        "## Items",
        "",
        "`pass`: every check of the item passed, or is unsupported beside others that passed. `known`: one is a known",
        "failure, with its reason below. `–`: unsupported, with the declared reason below.",
        "",
        _table(("item", "required", *(f"`{report.configuration}`" for report in reports)), list(_items(reports))),
        "Shown elsewhere:",
        "",
        *(f"- {item.id}, {item.title}: {item.elsewhere}." for item in ITEMS if item.elsewhere),
        "",
    ]
    for report in reports:
        parts += _reasons(report)
    return "\n".join([*parts, ""]).replace("\n\n\n", "\n\n").rstrip("\n") + "\n"


def _capabilities(reports: Sequence[Report]) -> Iterator[tuple[str, ...]]:
    def each(name: str, show: Any) -> tuple[str, ...]:
        return (name, *(show(report.capabilities[name]) for report in reports))

    yield each("isolation", str)
    for name in ("enforces", "network"):
        yield each(name, lambda values: ", ".join(values) or "–")
    for name in FLAGS:
        yield each(name, lambda value: "yes" if value else "–")


def _items(reports: Sequence[Report]) -> Iterator[tuple[str, ...]]:
    found = [{row.item.id: row for row in report.rows()} for report in reports]
    for item in ITEMS:
        if not item.elsewhere:
            yield (item.id, item.title, *(_sign(rows.get(item.id)) for rows in found))


def _sign(row: Row | None) -> str:
    return SIGNS[row.verdict] if row is not None else ""


def _reasons(report: Report) -> list[str]:
    lines = [f"## {report.configuration}", ""]
    for verdict, title in (("fail", "Failed"), ("known failure", "Known failures"), ("unsupported", "Unsupported")):
        told: dict[str, list[str]] = {}
        for check in report.checks:
            if check.verdict == verdict:
                told.setdefault(check.reason, []).append(check.name)
        if told:
            lines += [f"{title}:", ""]
            lines += [f"- {_cell(reason)}: {_names(names)}" for reason, names in told.items()]
            lines += [""]
    if len(lines) == 2:
        lines += ["Every check passed.", ""]
    notes = report.capabilities["notes"]
    if notes:
        lines += ["Notes on its capabilities:", "", *(f"- {name}: {_cell(notes[name])}" for name in sorted(notes)), ""]
    return lines


def _names(names: Sequence[str]) -> str:
    """The checks; a suite that is left out as a whole would be a long line."""
    if len(names) > 4:
        suites = sorted({name.partition(".")[0] for name in names})
        return f"{len(names)} checks of {', '.join(f'`{suite}`' for suite in suites)}"
    return ", ".join(f"`{name}`" for name in names)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_line(head), _line(["---"] * len(head)), *(_line([_cell(cell) for cell in row]) for row in rows), ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Foreign text in a table: no new cell, no new line, no markup of its own."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
