"""A report as one HTML page that needs nothing beside itself: no script, no font, no image, no address.

What a backend or a sandbox said is foreign text and is escaped everywhere.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence

from agent_sandbox.conformance.report import Report

STYLE = """
:root { color-scheme: light dark; --line: #8884; --ok: #1a7f37; --bad: #cf222e; --known: #9a6700; --off: #6e7781; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.summary { margin-top: 0; opacity: .8; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem; text-align: left; vertical-align: top; }
th { position: sticky; top: 0; background: Canvas; }
td.time { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.verdict { white-space: nowrap; font-weight: 600; }
.pass { color: var(--ok); } .fail { color: var(--bad); } .known { color: var(--known); }
.unsupported, .not { color: var(--off); }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere; }
@media (max-width: 40rem) { td, th { display: block; border: 0; } tr { border-bottom: 1px solid var(--line); } }
"""


def page(report: Report) -> str:
    """The page of one run."""
    said = "passed" if report.passed else "FAILED"
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report.counts().items())
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(report.configuration)}: conformance</title><style>{STYLE}</style></head><body>",
        f"<h1>Conformance of {_text(report.configuration)}: {said}</h1>",
        f'<p class="summary">{_text(counts)} · image {_text(report.image)} · {_text(report.started)} · '
        f"{_text(versions)} · {report.seconds:.0f} s{'' if report.whole else ' · chosen checks only'}</p>",
        "<h2>Items</h2>",
        _table(
            ("item", "required", "verdict", "evidence", "time"),
            (
                (_text(row.item.id), _text(row.item.title), row.verdict, _text(row.evidence), _time(row.seconds))
                for row in report.rows()
            ),
        ),
        "<h2>Checks</h2>",
        _table(
            ("items", "check", "verdict", "evidence", "time"),
            (
                (
                    _text(" ".join(check.items)),
                    f"<code>{_text(check.name)}</code>",
                    check.verdict,
                    _text(check.reason or check.evidence),
                    _time(check.seconds),
                )
                for check in report.checks
            ),
        ),
        "<h2>Declared capabilities</h2>",
        f"<pre><code>{_text(json.dumps(report.capabilities, indent=2))}</code></pre>",
        "</body></html>",
    ]
    return "\n".join([*parts, ""])


def _text(value: object) -> str:
    return html.escape(str(value))


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<table><thead><tr>", *(f"<th>{name}</th>" for name in head), "</tr></thead><tbody>"]
    for first, second, verdict, evidence, time in rows:
        kind = verdict.split()[0]
        lines.append(
            f'<tr><td>{first}</td><td>{second}</td><td class="verdict {kind}">{verdict}</td>'
            f'<td>{evidence}</td><td class="time">{time}</td></tr>'
        )
    return "\n".join([*lines, "</tbody></table>"])
