"""What may be created: ranges, defaults, isolation, network, images, limits."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_sandbox.config import Settings
from agent_sandbox.errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    PayloadTooLargeError,
    UnsupportedError,
)
from agent_sandbox.manager import policy
from agent_sandbox.manager.policy import CreateOptions, ForkOptions
from agent_sandbox.types import Capabilities, IsolationClass, LimitName, ResolvedImage, SandboxSpec

CLASSES: tuple[IsolationClass, ...] = get_args(IsolationClass)
ALL_LIMITS: frozenset[LimitName] = frozenset(get_args(LimitName))
FULL = Capabilities(isolation="container", enforces=ALL_LIMITS, network=frozenset({"none", "full"}))
SETTINGS = Settings(data_dir=Path("/nonexistent"))


def asking(**fields: Any) -> CreateOptions:
    return CreateOptions(**fields)


def build(options: CreateOptions, capabilities: Capabilities = FULL, **settings: Any) -> SandboxSpec:
    return policy.build_spec(options, dataclasses.replace(SETTINGS, **settings), "b", capabilities)


def test_defaults_are_those_of_the_settings() -> None:
    assert build(CreateOptions()) == SandboxSpec(
        image="host",
        image_digest="",
        cpus=1.0,
        memory_mb=512,
        pids_limit=256,
        disk_mb=1024,
        tmp_mb=256,
        network="none",
        read_only_rootfs=True,
        uid=1000,
        gid=1000,
        env={},
    )


def test_what_is_asked_for_is_in_the_spec() -> None:
    options = CreateOptions(
        image="python", cpus=2, memory_mb=100, pids_limit=50, disk_mb=64, read_only_rootfs=False, env={"A": "1"}
    )
    spec = build(options)
    assert (spec.image, spec.cpus, spec.memory_mb, spec.pids_limit, spec.disk_mb) == ("python", 2.0, 100, 50, 64)
    assert not spec.read_only_rootfs
    assert spec.env == {"A": "1"}
    assert spec.tmp_mb == 50  # half of the memory, which is less than TMP_SIZE_MB


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [("cpus", 0.01, 4.0), ("memory_mb", 16, 4096), ("pids_limit", 16, 4096), ("disk_mb", 16, 10240)],
)
def test_ranges_are_named(field: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(build(asking(**{field: value})), field) == value
    step = 0.001 if field == "cpus" else 1
    for value in (low - step, high + step, 0, -1):
        with pytest.raises(InvalidRequestError, match=f"{field}.* {low} to {high}") as caught:
            build(asking(**{field: value}))
        assert caught.value.details == {"field": field}
    wrong: Any
    for wrong in (math.nan, math.inf, -math.inf, True, "1"):
        with pytest.raises(InvalidRequestError, match=field):
            build(asking(**{field: wrong}))


@pytest.mark.parametrize("field", ["memory_mb", "pids_limit", "disk_mb"])
def test_whole_numbers_only(field: str) -> None:
    with pytest.raises(InvalidRequestError, match="whole number"):
        build(asking(**{field: 100.5}))


@given(
    cpus=st.floats(),
    memory=st.integers(),
    pids=st.integers(),
    disk=st.integers(),
)
def test_no_accepted_spec_is_out_of_range(cpus: float, memory: int, pids: int, disk: int) -> None:
    try:
        spec = build(CreateOptions(cpus=cpus, memory_mb=memory, pids_limit=pids, disk_mb=disk))
    except InvalidRequestError:
        return
    assert 0 < spec.cpus <= 4
    assert 16 <= spec.memory_mb <= 4096
    assert 16 <= spec.pids_limit <= 4096
    assert 16 <= spec.disk_mb <= 10240
    assert 1 <= spec.tmp_mb <= spec.memory_mb // 2


def test_time_to_live() -> None:
    assert policy.time_to_live(None, SETTINGS) == 900
    assert policy.time_to_live(1, SETTINGS) == 1
    assert policy.time_to_live(86400, SETTINGS) == 86400
    for seconds in (0, -1, 86401, True, 1.5, math.nan):
        with pytest.raises(InvalidRequestError, match=r"timeout_seconds.* 1 to 86400"):
            policy.time_to_live(seconds, SETTINGS)  # type: ignore[arg-type]


def test_images_must_be_allowed() -> None:
    assert build(CreateOptions(image="team/py:3"), allowed_images=("host", "team/*")).image == "team/py:3"
    for image in ("other", "Team/py"):
        with pytest.raises(ForbiddenError, match="ALLOWED_IMAGES"):
            build(CreateOptions(image=image), allowed_images=("host", "team/*"))
    with pytest.raises(ForbiddenError):  # another registry's
        build(CreateOptions(image="python:5000/evil"), allowed_images=("python:*",))
    with pytest.raises(ForbiddenError):  # the default is no way around
        build(CreateOptions(), allowed_images=("team/*",))
    for image in ("", "a\0b"):
        with pytest.raises(InvalidRequestError, match="image"):
            build(CreateOptions(image=image))


def test_network_needs_the_operator_and_the_backend() -> None:
    with pytest.raises(ForbiddenError, match="ALLOW_NETWORK"):
        build(CreateOptions(network=True))
    lacks = dataclasses.replace(FULL, network=frozenset({"none"}), notes={"network": "comes later"})
    with pytest.raises(ForbiddenError):  # forbidden before unsupported: the operator's word is first
        build(CreateOptions(network=True), lacks)
    with pytest.raises(UnsupportedError, match="comes later"):
        build(CreateOptions(network=True), lacks, allow_network=True)
    assert build(CreateOptions(network=True), allow_network=True).network == "full"


@pytest.mark.parametrize(
    ("field", "limit", "value"),
    [("cpus", "cpus", 1.0), ("memory_mb", "memory", 64), ("pids_limit", "pids", 64), ("disk_mb", "disk", 64)],
)
def test_a_limit_asked_for_must_be_enforced(field: str, limit: LimitName, value: float) -> None:
    weak = dataclasses.replace(FULL, enforces=ALL_LIMITS - {limit}, notes={limit: "no controller"})
    with pytest.raises(UnsupportedError, match=f"{limit}.*no controller"):
        build(asking(**{field: value}), weak)
    assert getattr(build(asking(**{field: value}), weak, allow_unenforced=True), field) == value
    assert build(CreateOptions(), weak)  # a default that is not enforced is reported, not refused
    strong = dataclasses.replace(FULL, enforces=frozenset({limit}))
    assert getattr(build(asking(**{field: value}), strong), field) == value


@pytest.mark.parametrize("has", CLASSES)
@pytest.mark.parametrize("asks", CLASSES)
def test_isolation_order(has: IsolationClass, asks: IsolationClass) -> None:
    order = ["process", "container", "gvisor", "vm"]
    assert policy.satisfies(Capabilities(isolation=has), asks) == (order.index(has) >= order.index(asks))


def test_an_emulated_machine_is_no_boundary() -> None:
    emulated = Capabilities(isolation="vm", accelerated=False)
    assert [policy.satisfies(emulated, asked) for asked in CLASSES] == [True, False, False, False]
    assert [policy.satisfies(emulated, asked, allow_tcg=True) for asked in CLASSES] == [True] * 4
    wants = CreateOptions(min_isolation="vm")
    with pytest.raises(UnsupportedError):
        policy.choose_backend(wants, {"tcg": emulated})
    assert policy.choose_backend(wants, {"tcg": emulated}, allow_tcg=True) == "tcg"


def test_choice_of_backend() -> None:
    backends = {"runc": Capabilities(isolation="container"), "fc": Capabilities(isolation="vm")}
    choose = policy.choose_backend
    assert choose(CreateOptions(), backends) == "runc"
    assert choose(CreateOptions(min_isolation="container"), backends) == "runc"
    assert choose(CreateOptions(min_isolation="gvisor"), backends) == "fc"
    assert choose(CreateOptions(backend="fc"), backends) == "fc"
    assert choose(CreateOptions(backend="fc", min_isolation="process"), backends) == "fc"
    with pytest.raises(UnsupportedError, match=r"min_isolation vm.*weaker"):
        choose(CreateOptions(backend="runc", min_isolation="vm"), backends)
    with pytest.raises(UnsupportedError, match="no configured backend"):
        choose(CreateOptions(min_isolation="vm"), {"runc": backends["runc"]})
    with pytest.raises(InvalidRequestError, match="backend is one of runc, fc"):
        choose(CreateOptions(backend="docker"), backends)
    with pytest.raises(InvalidRequestError, match="min_isolation is one of process, container, gvisor, vm"):
        choose(CreateOptions(min_isolation="strong"), backends)  # type: ignore[arg-type]


def test_a_backend_that_is_down_is_passed_over_for_one_that_is_as_good_as_asked() -> None:
    backends = {
        "gvisor": Capabilities(isolation="gvisor"),
        "runc": Capabilities(isolation="container"),
        "fc": Capabilities(isolation="vm"),
    }

    def choose(asked: IsolationClass | None, *down: str, backend: str | None = None) -> str:
        options = CreateOptions(min_isolation=asked, backend=backend)
        return policy.choose_backend(options, backends, down=down)

    assert choose("gvisor") == "gvisor"
    assert choose("gvisor", "gvisor") == "fc"  # never the weaker one
    assert choose("container", "gvisor") == "runc"
    assert choose("vm", "fc") == "fc"  # which then says why it is down
    assert choose(None, "gvisor") == "gvisor"  # the default may not become another, weaker one unasked
    assert choose("container", "gvisor", backend="gvisor") == "gvisor"


def fork(spec: SandboxSpec, options: ForkOptions, **settings: Any) -> SandboxSpec:
    return policy.fork_spec(spec, options, dataclasses.replace(SETTINGS, **settings), "b", FULL)


def test_a_fork_is_the_snapshots_spec_with_changes() -> None:
    spec = dataclasses.replace(build(CreateOptions(env={"A": "1"}, cpus=2)), image_digest="sha256:1", uid=7)
    assert fork(spec, ForkOptions()) == spec
    changed = fork(spec, ForkOptions(cpus=3, memory_mb=100))
    assert changed == dataclasses.replace(spec, cpus=3.0, memory_mb=100, tmp_mb=50)
    assert fork(spec, ForkOptions(network=True), allow_network=True).network == "full"
    assert fork(dataclasses.replace(spec, network="full"), ForkOptions(network=False)).network == "none"


def test_a_fork_obeys_todays_settings() -> None:
    spec = build(CreateOptions(memory_mb=4096, network=True), allow_network=True)
    with pytest.raises(ForbiddenError, match="network"):
        fork(spec, ForkOptions())
    with pytest.raises(InvalidRequestError, match="memory_mb"):
        fork(spec, ForkOptions(), allow_network=True, max_memory_mb=1024)
    with pytest.raises(ForbiddenError, match="ALLOWED_IMAGES"):
        fork(spec, ForkOptions(), allow_network=True, allowed_images=("other",))


def test_an_image_is_pinned_and_stays_so() -> None:
    spec = build(CreateOptions())
    pinned = policy.pin(spec, ResolvedImage("host", "sha256:1", True))
    assert pinned.image_digest == "sha256:1"
    assert policy.pin(pinned, ResolvedImage("host", "sha256:1", True)) == pinned
    for other in (ResolvedImage("host", "sha256:2", True), ResolvedImage("host", "", False)):
        with pytest.raises(ConflictError, match="sha256:1"):
            policy.pin(pinned, other)
    assert policy.pin(spec, ResolvedImage("host", "", False)).image_digest == ""


def test_env() -> None:
    given = {"A": "1", "with space": "", "ä": "ö", "raw": "\udcff"}
    checked = policy.validate_env(given)
    assert checked == given
    assert checked is not given
    for bad in ({"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "x\0"}, {"A": "\ud800"}, {"A": 1}):
        with pytest.raises(InvalidRequestError, match="env"):
            policy.validate_env(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as caught:
        policy.validate_env({"TOKEN": "hunter2\0"})
    assert "hunter2" not in caught.value.message


def test_env_is_bounded() -> None:
    assert policy.validate_env({"A": "x" * 131_069})  # with "A=" MAX_ARG_STRLEN without its NUL
    with pytest.raises(InvalidRequestError, match="131071"):
        policy.validate_env({"A": "x" * 131_070})
    with pytest.raises(PayloadTooLargeError, match="262144"):
        policy.validate_env({f"A{number}": "x" * 100_000 for number in range(3)})
