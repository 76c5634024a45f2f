"""What to do about one record, given what the driver says: the same decision for an event and for a sweep.

A record without a backend is an orphan. It is only marked when that is seen first, is Deleted when it is still so after
the grace, and is removed when it is still so at the look after that. One that was to be deleted has no grace to wait
for. A backend that comes back at any point takes all of it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.names import check_seconds
from holdfast.reconciler import Backend, Phase, phase_of

LONGEST = 86_400.0
ANSWER = 30.0
"""Seconds that a driver, or ``session_present``, has for one record; and a driver for its list, unless there are more
between two sweeps."""


class Keep(NamedTuple):
    """It is true already."""


class Write(NamedTuple):
    payload: dict[str, Any]
    phase: Phase


class Remove(NamedTuple):
    """The record of something that is gone."""


Decision = Keep | Write | Remove


def decide(
    payload: Any, backend: Backend | None, *, session: bool, at: float, grace: float, slack: float = 0.0
) -> Decision:
    """``at``: now, on the database's clock, and ``slack`` more at the most: a grace is never cut short by not knowing
    better. ``session``: is the one that ``session_present`` asks for there?"""
    before, status = phase_in(payload), _status(payload)
    if backend is not None:
        after = phase_of(backend, before=before, session=session)
        wanted = {"phase": after.value} | backend.stored()
    elif before is Phase.DELETED:
        return Remove()
    else:
        since = min(status.get("missing_since", at + slack), at + slack)
        gone = before is Phase.DELETING or ("missing_since" in status and at - since >= grace)
        after = Phase.DELETED if gone else before
        wanted = status | {"phase": after.value, "missing_since": since}
    return Keep() if wanted == status else Write(payload | {"status": wanted}, after)


def phase_in(payload: Any) -> Phase:
    """The phase that a record has; one that nobody has looked at yet is being provisioned."""
    return Phase(_status(payload).get("phase", Phase.PROVISIONING))


def _status(payload: Any) -> dict[str, Any]:
    status = payload.get("status", {}) if isinstance(payload, dict) else None
    if not isinstance(status, dict):
        raise ValueError('the payload of a reconciled record must be a dict, and its "status", if there is one, too')
    return status


def pause_after(failures: int, most: float) -> float:
    """Seconds to leave a failing driver alone: 1, 2, 4 …, at the most as long as between two sweeps, or a minute."""
    return min(2.0 ** min(failures - 1, 10), 60.0, max(most, 0.05))


def failures_with(failures: int, lasted: float, most: float) -> int:
    """In a row, with a watch that has just ended: one that is cut as soon as it is heard has not got better."""
    return 1 if lasted > pause_after(failures + 1, most) else failures + 1


class ReconcilerTerms(NamedTuple):
    """The arguments of ``client.reconciler(…)``, checked."""

    type: str
    sweep_every: float
    grace: float
    concurrency: int

    @classmethod
    def check(cls, type: str, *, sweep_every: float, grace: float, concurrency: object) -> ReconcilerTerms:
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 1 <= concurrency <= 1000:
            raise ValueError(f"concurrency must be a whole number from 1 to 1000, not {concurrency!r}")
        check_seconds(sweep_every, "sweep_every", 0.01, LONGEST)
        return cls(type, sweep_every, check_seconds(grace, "grace", 0.0, LONGEST), concurrency)


@dataclass(slots=True)
class Counts:
    """What a reconciler has done since it was made, for health endpoints and metrics."""

    sweeps: int = 0
    """Completed ones."""
    sweeps_abandoned: int = 0
    """Because the driver or the database failed."""
    events: int = 0
    untold: int = 0
    """Platform events that ``on_event`` was never told, because it hung."""
    seen: int = 0
    """Records compared with the driver, in sweeps."""
    written: int = 0
    removed: int = 0
    left_alone: int = 0
    """Updated by somebody else since the sweep began."""
    conflicts: int = 0
    """Races lost: read again, and decided anew."""
    errors: int = 0
    """Records that could not be handled, each time."""
    driver_failures: int = 0
    """Calls of the driver that failed."""
    sweep_seconds: float | None = None
    """How long the last complete sweep took."""
    swept_ago: float | None = None
    """Seconds since it ended."""
    watching: bool = False
    last_error: str | None = None
