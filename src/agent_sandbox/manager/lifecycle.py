"""What a sandbox may do in which state: a table, without clock, lock or backend.

::

                 ready                     rollback
    creating ──────────────► running ◄──────────────► rolling_back
        │                     │   ▲ settled (swapped, or given up)
        │ destroy             │   │                         │
        │ restart     destroy │   └── restart ──────────────┤
        ▼                     ▼                             │ destroy
    destroying ◄────────────────────────────────────────────┘
        │ removed
        ▼
      (gone)

``restart`` is a new server that finds the record. What was ``creating`` was never acknowledged, so it is destroyed. A
rollback that was under way left exactly one environment mapped, so the sandbox runs on as that one. Destruction goes
on.

A sandbox that expires takes the edge ``destroy``. One that is being created cannot expire: its time counts from being
ready. ``use`` is everything that changes no state: commands, files, snapshots, renewal, and ``stop`` and ``start``:
whether the processes of a ``running`` sandbox really run is the backend's knowledge (``SandboxRecord.running``), not a
state here, because they may also end by themselves.

When adding a state: every event needs a cell, and records of older servers must keep their meaning.
"""

from __future__ import annotations

from typing import Literal, get_args

from agent_sandbox.errors import ConflictError, NotFoundError, SandboxError

SandboxState = Literal["creating", "running", "rolling_back", "destroying"]
State = Literal["creating", "running", "rolling_back", "destroying", "gone"]
Event = Literal["make", "ready", "use", "rollback", "settled", "destroy", "removed", "restart"]

STORED_STATES: tuple[SandboxState, ...] = get_args(SandboxState)
STATES: tuple[State, ...] = get_args(State)
EVENTS: tuple[Event, ...] = get_args(Event)

_CREATING = (ConflictError, "is still being created; wait for the reply of its creation")
_ROLLING = (ConflictError, "is being rolled back")
_DESTROYING = (ConflictError, "is being destroyed")
_GONE = (NotFoundError, "does not exist, or no longer does")

_Cell = State | tuple[type[SandboxError], str] | None

# None marks what the manager never does: reaching it is a defect here, not a caller's mistake.
_TABLE: dict[State, dict[Event, _Cell]] = {
    "creating": {
        "make": "creating",
        "ready": "running",
        "use": _CREATING,
        "rollback": _CREATING,
        "settled": None,
        "destroy": "destroying",
        "removed": None,
        "restart": "destroying",
    },
    "running": {
        "make": None,
        "ready": None,
        "use": "running",
        "rollback": "rolling_back",
        "settled": None,
        "destroy": "destroying",
        "removed": None,
        "restart": "running",
    },
    "rolling_back": {
        "make": None,
        "ready": None,
        "use": "rolling_back",
        "rollback": _ROLLING,
        "settled": "running",
        "destroy": "destroying",
        "removed": None,
        "restart": "running",
    },
    "destroying": {
        "make": _DESTROYING,
        "ready": _DESTROYING,
        "use": _DESTROYING,
        "rollback": _DESTROYING,
        "settled": "destroying",
        "destroy": "destroying",
        "removed": "gone",
        "restart": "destroying",
    },
    "gone": dict.fromkeys(EVENTS, _GONE),
}


def advance(state: State, event: Event, id: str) -> State:
    """Give the state after ``event``; raise :class:`ConflictError` or :class:`NotFoundError` where it is not allowed.

    ``id`` is for the message. An event that the manager never sends in this state raises :class:`AssertionError`.
    """
    cell = _TABLE[state][event]
    if cell is None:
        raise AssertionError(f"{event} in state {state}")
    if isinstance(cell, tuple):
        error, text = cell
        raise error(f"sandbox {id} {text}")
    return cell
