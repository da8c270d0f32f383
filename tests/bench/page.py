"""``python -m tests.bench.page``: write ``docs/measurements.md`` from the times that ``make bench`` kept."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
from typing import Any

from tests.bench.contenders import BUILD, PEER, ROOT

HEAD = """# Measurements

Printed by a run on {date}, on {cores} cores, {system}; repeat it with:

```
make bench && .venv/bin/python -m tests.bench.page
```

Medians in milliseconds over a kept connection of a lean client, all columns in one run, alternating; n counts what was
measured of the first column. `ours` is the backend runc, `peer` is {peer} on Docker with the same image. A machine is
slower or faster from day to day: compare columns, not runs.
"""


def page(raw: dict[str, Any], date: datetime.date) -> str:
    """The page, from what ``bench.json`` holds: rows of seconds by contender, throughput, failures and facts."""
    text = HEAD.format(
        date=date,
        cores=os.cpu_count(),
        system=f"Linux {'.'.join(platform.release().split('.')[:2])}",
        peer=PEER.replace("[server]==", " "),
    )
    tables = [
        *_table(raw["rows"]),
        "",
        "MicroVMs on QEMU without KVM, beside QEMU started by hand, and memory on gVisor:",
        "",
    ]
    tables += _table(raw["machines"])
    facts = [
        f"- {rate:.0f} short commands a second over 32 connections and 8 sandboxes, {who}; {failed} failed."
        for who, (rate, failed) in raw["throughput"].items()
    ]
    facts += [f"- {fact}." for fact in raw["facts"]]
    facts += [
        f"- Memory of the server afterwards, {who}: {kib // 1024} MiB." for who, kib in raw["resident_kib"].items()
    ]
    facts += [f"- FAILED, {row}: {len(texts)} times, first: {texts[0]}" for row, texts in raw["failures"].items()]
    return "\n".join([text, *tables, "", *facts, ""])


def _table(rows: dict[str, dict[str, list[float]]]) -> list[str]:
    names = sorted({name for times in rows.values() for name in times}, key=_order)
    has_peer = "peer" in names
    head = ["operation", *names, "10–90 %", "n", *(["peer / ours"] if has_peer else [])]
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for row, times in rows.items():
        taken = {name: sorted(seconds) for name, seconds in times.items() if seconds}
        middles = {name: statistics.median(seconds) for name, seconds in taken.items()}
        first = next((taken[name] for name in names if name in taken), [0.0])
        spread = f"{_ms(first[len(first) // 10])}–{_ms(first[min(len(first) - 1, len(first) * 9 // 10)])}"
        ratio = f"{middles['peer'] / middles['ours']:.1f}×" if {"peer", "ours"} <= middles.keys() else ""
        cells = [_ms(middles[name]) if name in middles else "" for name in names]
        lines.append(_line([row, *cells, spread, str(len(first)), *([ratio] if has_peer else [])]))
    return lines


def _order(name: str) -> tuple[int, str]:
    first = ("ours", "docker", "gvisor", "qemu", "peer")
    return (first.index(name) if name in first else len(first), name)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.page", description=__doc__)
    parser.add_argument(
        "--json", type=pathlib.Path, default=BUILD / "bench.json", help="where make bench kept the times"
    )
    file = parser.parse_args().json
    date = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC).date()
    (ROOT / "docs/measurements.md").write_text(page(json.loads(file.read_text()), date))


if __name__ == "__main__":
    main()
