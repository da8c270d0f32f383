"""The kit's own truth: every item has a check, every verdict follows from what was seen, known failures are strict."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_sandbox import conformance
from agent_sandbox.backends.fake import FakeBackend
from agent_sandbox.cli.conformance import read_probe
from agent_sandbox.config import load_settings
from agent_sandbox.conformance import matrix
from agent_sandbox.conformance.checklist import ABILITIES, ITEMS, NEEDS, items_of, unsupported
from agent_sandbox.conformance.page import page
from agent_sandbox.conformance.report import Check, Report, from_json, to_json
from agent_sandbox.conformance.run import plain
from agent_sandbox.conformance.suite import SuiteBase, start
from agent_sandbox.errors import BackendError, InvalidRequestError
from agent_sandbox.types import Capabilities

SUITES = [
    value
    for name in conformance.__all__
    if isinstance(value := getattr(conformance, name), type) and issubclass(value, SuiteBase)
]
CHECKS = sorted(f"{suite.__name__}.{name}" for suite in SUITES for name in vars(suite) if name.startswith("test_"))


def report(*checks: Check, whole: bool = True) -> Report:
    return Report("mine", "mine", "host", "2026-01-01T00:00:00+00:00", {"kernel": "6"}, {}, whole, 1.0, checks)


def test_the_list_is_whole_and_in_order() -> None:
    wanted = [f"B{n}" for n in range(1, 18)] + ["M"] + [f"F{n}" for n in range(1, 38)] + [f"R{n}" for n in range(1, 9)]
    assert [item.id for item in ITEMS] == wanted


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.id)
def test_every_item_has_a_check_or_says_where_it_is_shown(item: conformance.checklist.Item) -> None:
    asked = [check for check in CHECKS if item.id in items_of(check)]
    assert bool(asked) != bool(item.elsewhere)
    for pattern in item.checks:
        if not pattern.startswith("*.test_f"):
            assert fnmatch.filter(CHECKS, pattern), f"{pattern} fits no check"


async def test_a_backend_that_cannot_start_is_closed(tmp_path: Path) -> None:
    seen: list[str] = []

    class Broken(FakeBackend):
        async def start(self) -> None:
            raise BackendError("it cannot be")

        async def close(self) -> None:
            seen.append("closed")

    class Mine(SuiteBase):
        def make_backend(self, tmp_path: Path) -> Broken:
            return Broken(load_settings({"data_dir": tmp_path}, {}))

    mine = Mine()
    fine = FakeBackend(load_settings({"data_dir": tmp_path / "fine"}, {}))
    await fine.start()
    with pytest.raises(BackendError, match="it cannot be"):
        await mine.reopened(fine, tmp_path)
    with pytest.raises(BackendError, match="it cannot be"):
        await start(mine.make_backend(tmp_path))
    assert seen == ["closed", "closed"]


def test_every_need_fits_a_check_and_is_an_ability() -> None:
    assert len(CHECKS) > 150
    assert {need for needs in NEEDS.values() for need in needs} == set(ABILITIES)
    assert [pattern for pattern in NEEDS if not fnmatch.filter(CHECKS, pattern)] == []


def test_a_check_belongs_to_its_fault_to_its_rows_and_else_to_the_methods() -> None:
    assert items_of("CommandSuite.test_f01_a_waiting_shell_returns_at_the_deadline") == ("F1",)
    assert items_of("CommandSuite.test_f07_what_cannot_start_says_why") == ("B9", "F7")
    assert items_of("EscapeSuite.test_devices") == ("B4", "R3")
    assert items_of("FileOperationSuite.test_stat") == ("M",)


def test_unsupported_is_what_the_backend_declares_with_its_reason() -> None:
    nothing = Capabilities(isolation="process", notes={"pids": "no control groups"})
    assert unsupported("LimitSuite.test_f35_processes", nothing) == "pids: no control groups"
    assert unsupported("ExecObjectSuite.test_signals", nothing) == "guest: declared absent"
    assert unsupported("EscapeSuite.test_devices", nothing) is None
    everything = Capabilities(isolation="vm", enforces=frozenset({"pids"}), guest=True, layered_workspace=True)
    assert unsupported("LimitSuite.test_f35_processes", everything) is None
    assert unsupported("NoLayerSuite.test_layers_are_refused", everything)


def test_an_item_fails_with_one_check_and_is_unsupported_only_with_all() -> None:
    checks = (
        Check("S.test_a", ("B14", "F35"), "pass", evidence="32 MiB", seconds=1),
        Check("S.test_b", ("B14",), "unsupported", "cpus: none"),
        Check("S.test_c", ("B15",), "unsupported", "network: none"),
        Check("S.test_d", ("M",), "fail", "it broke"),
        Check("S.test_e", ("M",), "known failure", "upstream"),
        Check("S.test_f", ("R3",), "known failure", "upstream"),
    )
    rows = {row.item.id: row for row in report(*checks).rows()}
    assert (rows["B14"].verdict, rows["B14"].evidence) == ("pass", "1 of 2 checks; 32 MiB; cpus: none")
    assert rows["B15"].verdict == "unsupported"
    assert (rows["M"].verdict, rows["M"].evidence) == ("fail", "S.test_d: it broke; upstream")
    assert rows["R3"].verdict == "known failure"
    assert (rows["F23"].verdict, rows["F1"].verdict) == ("not asked", "not asked")
    assert not report(*checks).passed
    assert report(*checks[:3], *checks[4:]).passed
    assert not report().passed
    assert [row.item.id for row in report(checks[0], whole=False).rows()] == ["B14", "F35"]


def test_the_file_form_comes_back_and_others_are_refused() -> None:
    whole = report(Check("S.test_a", ("M",), "pass", "", "é", 0.5))
    assert from_json(to_json(whole)) == whole
    assert json.loads(to_json(whole))["format"] == 1
    for text in ("", "[]", "{}", '{"format": 2}', to_json(whole).replace('"checks"', '"chucks"')):
        with pytest.raises(InvalidRequestError):
            from_json(text)


def test_the_page_is_one_file_and_what_a_sandbox_said_stays_text() -> None:
    hostile = report(Check("S.test_<b>", ("M",), "fail", "<script>alert(1)</script>"))
    text = page(dataclasses.replace(hostile, configuration="<i>"))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<i>" not in text
    assert not [word for word in ("src=", "href=", "http", "@import", "url(") if word in text]


def test_the_matrix_says_what_the_runs_said_and_its_reasons_stay_text() -> None:
    first = report(Check("S.test_a", ("B14",), "pass"), Check("S.test_b", ("R3",), "known failure", "a | b\n<i>"))
    second = report(
        Check("S.test_a", ("B14",), "unsupported", "cpus: none"), Check("S.test_c", ("M",), "fail", "broke")
    )
    capabilities = {**plain(Capabilities(isolation="gvisor", guest=True)), "enforces": ["pids"]}
    runs = [dataclasses.replace(run, capabilities=capabilities) for run in (first, second)]
    text = matrix.page([runs[0], dataclasses.replace(runs[1], configuration="other")], "<!-- made -->\n")
    lines = text.splitlines()
    assert "| B14 | limits: each is hit from inside and holds | pass | – |" in lines
    assert "| M | the method contract of backends/base.py |  | **FAIL** |" in lines
    assert "| isolation | gvisor | gvisor |" in lines
    assert "- a \\| b &lt;i>: `S.test_b`" in lines
    assert "- cpus: none: `S.test_a`" in lines
    assert next(line for line in lines if line.startswith("| `other`")).split("|")[3].strip() == "**FAILED**"


KEPT = sorted((Path(__file__).resolve().parents[2] / "docs" / "conformance").glob("[!.]*.json"))


def test_runs_of_every_built_in_configuration_are_kept() -> None:
    assert {path.stem for path in KEPT} >= {"runc", "gvisor", "docker", "docker-runsc", "bubblewrap"}


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_what_is_kept_of_runs_is_whole_and_has_no_unexplained_failure(path: Path) -> None:
    told = from_json(path.read_text())
    assert told.configuration == path.stem
    assert told.whole
    assert [check for check in told.checks if check.verdict == "fail"] == []
    assert all(check.reason for check in told.checks if check.verdict in ("known failure", "unsupported"))


def kit(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agent_sandbox.cli", "conformance", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_the_command_passes_a_backend_and_writes_its_files(tmp_path: Path) -> None:
    done = kit("--backend", "fake", "--only", "B16", "--json", f"{tmp_path}/r.json", "--html", f"{tmp_path}/r.html")
    assert done.returncode == 0, done.stdout + done.stderr
    told = from_json((tmp_path / "r.json").read_text())
    assert (told.backend, told.whole, set(told.counts())) == ("fake", False, {"pass", "unsupported"})
    assert told.versions.keys() >= {"kernel", "machine", "agent-sandbox"}
    assert "Conformance of fake: passed" in (tmp_path / "r.html").read_text()
    assert done.stdout.splitlines()[1].split()[:2] == ["B16", "pass"]


def test_the_command_fails_with_a_check_and_says_where(tmp_path: Path) -> None:
    done = kit("--backend", "fake", "--only", "EscapeSuite.test_identity_*")
    assert done.returncode == 1
    assert "FAIL  EscapeSuite.test_identity_is_the_sandbox_user_without_a_capability (B4 B7 R6):" in done.stdout
    assert "isolation.py:" in done.stdout


KNOWN = """
import sys
from agent_sandbox.backends.fake import FakeBackend
from agent_sandbox.conformance.report import to_json
from agent_sandbox.conformance.run import Subject, run
FakeBackend.known_failures = {
    "test_names_and_places": "has no host name",
    "test_ping_and_capabilities": "is said to fail",
    "test_ids_that_cannot_be[A]": "one of several",
}
only = ("EscapeSuite.test_names_and_places", "BackendSuite.test_ping_*", "ExecObjectSuite.test_ids_*")
print(to_json(run(Subject("fake", only=only), lambda *_: None)))
"""


def test_known_failures_are_strict() -> None:
    done = subprocess.run([sys.executable, "-c", KNOWN], capture_output=True, text=True, timeout=100)
    told = from_json(done.stdout)
    found = {check.name: (check.verdict, check.reason) for check in told.checks}
    assert found["EscapeSuite.test_names_and_places"] == ("known failure", "has no host name")
    why = "passes, but is declared a known failure: is said to fail"
    assert found["BackendSuite.test_ping_and_capabilities"] == ("fail", why)
    assert found["ExecObjectSuite.test_ids_that_cannot_be[A]"][0] == "fail"
    assert found["ExecObjectSuite.test_ids_that_cannot_be[a b]"][0] == "pass"
    assert not told.passed


def test_what_cannot_be_asked() -> None:
    nobody = kit("--backend", "nobody")
    assert (nobody.returncode, "there is no backend 'nobody'" in nobody.stderr) == (64, True)
    nothing = kit("--backend", "fake", "--only", "B99")
    assert nothing.returncode != 0
    assert "no check is called B99" in nothing.stderr
    assert kit().returncode == 2


def test_an_interrupt_removes_what_the_checks_made(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agent_sandbox.cli", "conformance", "--backend", "fake"]
    with subprocess.Popen(
        [*command, "--only", "ExecTreeSuite.test_processes_used_up_still_lists_*"],  # which it waits for in vain
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        while not list(tmp_path.glob("agent-sandbox-conformance-*/run/test_*")) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, "interrupted" in said) == (130, True)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_is_none_is_refused(tmp_path: Path) -> None:
    good = {"format": 1, "platform": {}, "checks": [{"item": "B4", "check": "x", "verdict": "yes", "detail": ""}]}
    file = tmp_path / "probe.json"
    file.write_text(json.dumps(good))
    assert read_probe(file)["checks"] == good["checks"]
    wrong = [b"", b"[]", b"{}", json.dumps({**good, "format": 2}).encode(), b" " * (1024 * 1024 + 1)]
    wrong += [json.dumps({**good, "checks": [{**good["checks"][0], "verdict": "maybe"}]}).encode()]  # type: ignore[index]
    for data in wrong:
        file.write_bytes(data)
        with pytest.raises(InvalidRequestError):
            read_probe(file)
