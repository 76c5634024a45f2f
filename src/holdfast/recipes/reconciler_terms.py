"""The decisions of a reconciler: what to do about one record, given its backend; checked arguments, delays, counts.

The same decision is made for an event and for a sweep. A record whose backend is missing is marked at first; it becomes
Deleted if the backend is still missing after the grace, and is removed if it is still missing at the next look after
that. A record that is Deleting has no grace. If the backend comes back before the removal, all of this is undone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.names import check_seconds
from holdfast.reconciler import Backend, Phase, phase_of

MAX_SECONDS = 86_400.0
DRIVER_TIMEOUT = 30.0
"""Seconds that ``driver.get`` and ``session_present`` may take. ``driver.list`` may take as long as the time between
two sweeps, if that is more."""


class Keep(NamedTuple):
    """The record is right."""


class Write(NamedTuple):
    payload: dict[str, Any]
    phase: Phase


class Remove(NamedTuple):
    """The backend is gone for good."""


Decision = Keep | Write | Remove


def decide(
    payload: Any, backend: Backend | None, *, session: bool, at: float, grace: float, slack: float = 0.0
) -> Decision:
    """What to do about a record. ``session``: what ``session_present`` returned. ValueError when the payload is not one
    of a reconciled record.

    ``at``: the time by the database's clock, which may be up to ``slack`` later. A backend is missing since the later
    one and its grace ends by the earlier one, so a grace is never too short."""
    before, status = phase_in(payload), _status(payload)
    if backend is not None:
        after = phase_of(backend, before=before, session=session)
        wanted = {"phase": after.value} | backend._stored()
    elif before is Phase.DELETED:
        return Remove()
    else:
        since = min(status.get("missing_since", at + slack), at + slack)
        gone = before is Phase.DELETING or ("missing_since" in status and at - since >= grace)
        after = Phase.DELETED if gone else before
        wanted = status | {"phase": after.value, "missing_since": since}
    return Keep() if wanted == status else Write(payload | {"status": wanted}, after)


def phase_in(payload: Any) -> Phase:
    """The phase of a record; Provisioning if it was never reconciled. ValueError for an unknown phase."""
    return Phase(_status(payload).get("phase", Phase.PROVISIONING))


def _status(payload: Any) -> dict[str, Any]:
    status = payload.get("status", {}) if isinstance(payload, dict) else None
    if not isinstance(status, dict):
        raise ValueError('the payload of a reconciled record must be a dict, and its "status", if there is one, too')
    return status


def retry_delay(failures: int, limit: float) -> float:
    """Seconds to leave a failing driver alone: 1, 2, 4 …, but at most ``limit`` and at most a minute."""
    return min(2.0 ** min(failures - 1, 10), 60.0, max(limit, 0.05))


def count_failures(failures: int, lasted: float, limit: float) -> int:
    """Failures in a row, with a watch that has just ended after ``lasted`` seconds. A watch that ends sooner than it
    would be left alone for is no recovery."""
    return 1 if lasted > retry_delay(failures + 1, limit) else failures + 1


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
        check_seconds(sweep_every, "sweep_every", 0.01, MAX_SECONDS)
        return cls(type, sweep_every, check_seconds(grace, "grace", 0.0, MAX_SECONDS), concurrency)


@dataclass(slots=True)
class ReconcilerStatus:
    """What a reconciler has done since it was created, for health endpoints and metrics."""

    sweeps: int = 0
    """Completed ones."""
    sweeps_abandoned: int = 0
    """Because the driver or the database failed."""
    events: int = 0
    untold: int = 0
    """Platform events that were dropped, because ``on_event`` did not return."""
    seen: int = 0
    """Records compared with the driver, in sweeps."""
    written: int = 0
    removed: int = 0
    left_alone: int = 0
    """Records that were updated after the sweep began."""
    conflicts: int = 0
    """Writes that lost a race: the record was read again and decided anew."""
    errors: int = 0
    """Records that could not be reconciled, counted each time."""
    driver_failures: int = 0
    """Calls of the driver that failed."""
    sweep_seconds: float | None = None
    """How long the last complete sweep took."""
    swept_ago: float | None = None
    """Seconds since it ended."""
    watching: bool = False
    last_error: str | None = None
