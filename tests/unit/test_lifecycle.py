"""The lifecycle's table, cell by cell against what its drawing says."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import ConflictError, NotFoundError
from agent_sandbox.manager.lifecycle import EVENTS, STATES, Event, State, advance

MOVES: dict[tuple[State, Event], State] = {
    ("creating", "make"): "creating",
    ("creating", "ready"): "running",
    ("creating", "destroy"): "destroying",
    ("creating", "restart"): "destroying",
    ("running", "use"): "running",
    ("running", "rollback"): "rolling_back",
    ("running", "destroy"): "destroying",
    ("running", "restart"): "running",
    ("rolling_back", "use"): "rolling_back",
    ("rolling_back", "settled"): "running",
    ("rolling_back", "destroy"): "destroying",
    ("rolling_back", "restart"): "running",
    ("destroying", "settled"): "destroying",
    ("destroying", "destroy"): "destroying",
    ("destroying", "removed"): "gone",
    ("destroying", "restart"): "destroying",
}

CONFLICTS: set[tuple[State, Event]] = {
    ("creating", "use"),
    ("creating", "rollback"),
    ("rolling_back", "rollback"),
    ("destroying", "make"),
    ("destroying", "ready"),
    ("destroying", "use"),
    ("destroying", "rollback"),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_every_cell(state: State, event: Event) -> None:
    if (state, event) in MOVES:
        assert advance(state, event, "sbx") == MOVES[state, event]
    elif (state, event) in CONFLICTS:
        with pytest.raises(ConflictError, match=r"^sandbox sbx is "):
            advance(state, event, "sbx")
    elif state == "gone":
        with pytest.raises(NotFoundError, match="sandbox sbx does not exist"):
            advance(state, event, "sbx")
    else:
        with pytest.raises(AssertionError, match=f"{event} in state {state}"):
            advance(state, event, "sbx")


def test_destruction_is_possible_from_every_living_state_and_leads_out() -> None:
    for state in STATES:
        if state != "gone":
            assert advance(advance(state, "destroy", "sbx"), "removed", "sbx") == "gone"


def test_what_was_never_acknowledged_does_not_survive_a_restart() -> None:
    assert advance("creating", "restart", "sbx") == "destroying"
