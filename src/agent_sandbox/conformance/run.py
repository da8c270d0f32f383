"""Run the suites against a backend and gather what they say.

The checks are pytest's, and pytest runs them: the kit is an extra of the package (``conformance``) that production does
not need. Its own configuration, plugins and directories are used, never those of the caller's project. What a check
leaves on the disk is removed at the end, unless something is still mounted there, which is said instead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import fnmatch
import os
import pathlib
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agent_sandbox import __version__
from agent_sandbox.config import load_settings
from agent_sandbox.conformance import SuiteBase, cases
from agent_sandbox.conformance.checklist import items_of
from agent_sandbox.conformance.known import known_failures
from agent_sandbox.conformance.report import Check, Report, Verdict
from agent_sandbox.conformance.suite import start, suite_of
from agent_sandbox.errors import BackendError, InvalidRequestError
from agent_sandbox.types import Capabilities, ResolvedImage

MAX_TEXT = 400
"""Characters of a reason that are kept: the first line of a failed assertion may hold a whole output."""
CONFIGURATION = """[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
xfail_strict = true
tmp_path_retention_policy = all
"""
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout")
Watcher = Callable[[int, int, Check | None], None]
"""Told how many checks are done, how many there are, and the one that has just ended."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is asked: the backend's name, its image (empty: the settings' default), and which checks (empty: all)."""

    backend: str
    image: str = ""
    only: tuple[str, ...] = ()
    configuration: str = ""
    timeout_seconds: float = 300.0


@dataclasses.dataclass(frozen=True)
class _Facts:
    capabilities: Capabilities
    versions: dict[str, str]
    known: dict[str, str]
    image: ResolvedImage


def run(subject: Subject, watch: Watcher, interrupted: Callable[[], bool] = lambda: False) -> Report:
    """Run everything that is asked.

    Raises :class:`SandboxError` when the backend cannot even start, and ``KeyboardInterrupt``, with everything removed,
    when it was interrupted or ``interrupted`` says so between two checks.
    """
    started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="agent-sandbox-conformance-"))
    try:
        facts = asyncio.run(_look(subject, directory / "first"))
        collector = _Collector(subject, watch, interrupted)
        _set_up_cases(subject, facts)
        code = _pytest(subject, directory, collector)
    except Exception as error:
        if interrupted():  # pytest's own fixtures fail when a check is cut off before it has a result
            raise KeyboardInterrupt from error
        raise
    finally:
        _remove(directory)
    if code == pytest.ExitCode.INTERRUPTED or interrupted():
        raise KeyboardInterrupt
    if collector.broken or code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise BackendError(f"the checks could not be run: {collector.broken or code}")
    checks = collector.checks
    if not subject.only:
        checks += _stale(facts.known, collector.names)
    return Report(
        configuration=subject.configuration or subject.backend,
        backend=subject.backend,
        image=facts.image.name,
        started=started.isoformat(timespec="seconds"),
        versions=facts.versions,
        capabilities=plain(facts.capabilities),
        whole=not subject.only,
        seconds=round(time.monotonic() - clock, 1),
        checks=tuple(checks),
    )


async def _look(subject: Subject, directory: pathlib.Path) -> _Facts:
    backend = cases.made(subject.backend, directory)
    await start(backend)
    try:
        await backend.ping()
        image = await backend.resolve_image(subject.image or load_settings().default_image)
        versions = {
            "agent-sandbox": __version__,
            "kernel": platform.release(),
            "machine": platform.machine(),
            **backend.versions,
        }
        return _Facts(backend.capabilities, versions, dict(known_failures(backend)), image)
    finally:
        await backend.close()


def _set_up_cases(subject: Subject, facts: _Facts) -> None:
    uid, gid = load_settings().sandbox_ids()
    cases.FromSettings.backend_name = subject.backend
    cases.FromSettings.spec = dataclasses.replace(
        SuiteBase.spec, image=facts.image.name, image_digest=facts.image.digest, uid=uid, gid=gid
    )


def _pytest(subject: Subject, directory: pathlib.Path, collector: _Collector) -> int:
    ini = directory / "pytest.ini"
    ini.write_text(CONFIGURATION)
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-c", str(ini), "--rootdir", str(directory), "--basetemp", str(directory / "run")]
    options += ["--timeout", str(subject.timeout_seconds), "-p", "no:cacheprovider", "-p", "no:terminal"]
    for plugin in PLUGINS:
        options += ["-p", plugin]
    return pytest.main([*options, str(cases.__file__)], plugins=[collector])


class _Collector:
    """The plugin that hears what every check said."""

    def __init__(self, subject: Subject, watch: Watcher, interrupted: Callable[[], bool]) -> None:
        self._subject, self._watch, self._interrupted = subject, watch, interrupted
        self._total = 0
        self._open: dict[str, Check] = {}
        self.checks: list[Check] = []
        self.names: set[str] = set()
        self.broken = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            self.names |= {item.name, _plain_name(item)}
        if self._subject.only:
            items[:] = [item for item in items if _chosen(item, self._subject.only)]
            if not items:
                raise InvalidRequestError(f"no check is called {' or '.join(self._subject.only)}")
        self._total = len(items)
        self._watch(0, self._total, None)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken = str(report.longrepr)

    def pytest_internalerror(self, excrepr: object, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.broken = str(excinfo.value)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report: pytest.TestReport = yield
        if self._interrupted():
            item.session.shouldstop = "interrupted"
        name = _full_name(item)
        before = self._open.get(name, Check(name, items_of(name.partition("[")[0]), "pass"))
        verdict, reason = _told(report)
        if before.verdict == "fail" or (verdict == "pass" and before.verdict != "pass"):
            verdict, reason = before.verdict, before.reason
        evidence = "; ".join(str(value) for key, value in report.user_properties if key == "evidence")
        self._open[name] = Check(
            name, before.items, verdict, reason, evidence, round(before.seconds + report.duration, 2)
        )
        return report

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        for check in self._open.values():
            self.checks.append(check)
            self._watch(len(self.checks), self._total, check)
        self._open.clear()


def _plain_name(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", None) or item.name)


def _full_name(item: pytest.Item) -> str:
    kind = getattr(item, "cls", None)
    return f"{suite_of(kind, _plain_name(item))}.{item.name}" if kind else item.name


def _chosen(item: pytest.Item, only: Sequence[str]) -> bool:
    name = _full_name(item).partition("[")[0]
    return any(wanted in items_of(name) or fnmatch.fnmatchcase(name, wanted) for wanted in only)


def _told(report: pytest.TestReport) -> tuple[Verdict, str]:
    """What pytest's report of one phase means here."""
    if hasattr(report, "wasxfail"):
        return ("known failure", _short(report.wasxfail)) if report.skipped else ("pass", "")
    if report.skipped:
        text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return "unsupported", _short(text.removeprefix("Skipped: ").removeprefix("unsupported: "))
    if report.failed:
        text = str(report.longrepr)
        if text.startswith("[XPASS(strict)] "):
            return "fail", f"passes, but is declared a known failure: {_short(text.removeprefix('[XPASS(strict)] '))}"
        return "fail", _where(report.longrepr) or _short(text)
    return "pass", ""


def _where(failure: Any) -> str:
    """The message of a failure with its line: the suites are imported before pytest could explain their assertions."""
    crash = getattr(failure, "reprcrash", None)
    if crash is None:
        return ""
    told = _short(str(crash.message))
    entries = getattr(getattr(failure, "reprtraceback", None), "reprentries", [])
    place = getattr(entries[0], "reprfileloc", None) if entries else None
    if place is None:
        return told
    source = [line[1:].strip() for line in entries[0].lines if line[:1] == ">"]
    return f"{told} at {pathlib.PurePath(place.path).name}:{place.lineno}{''.join(f': {line}' for line in source)}"


def _short(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = " ".join(lines[:3])
    return told if len(told) <= MAX_TEXT else f"{told[:MAX_TEXT]}…"


def _stale(known: dict[str, str], names: set[str]) -> list[Check]:
    """Known failures of checks that do not exist: they would hide what they were meant for."""
    return [
        Check(f"known failure {name}", ("M",), "fail", "no check has this name") for name in known if name not in names
    ]


def plain(value: Any) -> Any:
    """Dataclasses, sets and mappings as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, frozenset | set):
        return sorted(plain(part) for part in value)
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if hasattr(value, "items"):
        return {str(key): plain(part) for key, part in value.items()}
    return value


def _remove(directory: pathlib.Path) -> None:
    """Remove the run's directory, but never through a mount: what is mounted there may be the host's."""
    beneath = f"{directory.resolve()}/"
    mounts = pathlib.Path("/proc/self/mountinfo").read_text() if pathlib.Path("/proc/self/mountinfo").exists() else ""
    if any(line.split()[4].startswith(beneath) for line in mounts.splitlines()):
        raise BackendError(f"something is still mounted beneath {directory}; unmount it, then remove the directory")
    shutil.rmtree(directory, ignore_errors=True)
