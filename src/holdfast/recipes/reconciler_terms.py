"""The decisions of a reconciler: what to do about one record, given its backend and the rules; checked arguments,
delays, counts.

The same decision is made for an event and for a sweep. A record whose backend is missing is marked at first; it becomes
Deleted if the backend is still missing after the grace, and is removed if it is still missing at the next look after
that. A record that is Deleting has no grace. If the backend comes back before the removal, all of this is undone.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.names import check_seconds
from holdfast.recipes.reconciler_rules import Codec, ReconcilerRules
from holdfast.reconciler import Backend, Phase

MAX_SECONDS = 86_400.0
DRIVER_TIMEOUT = 30.0
"""Seconds that ``driver.get`` and ``session_present`` may take. ``driver.list`` may take as long as the time between
two sweeps, if that is more."""


class Keep(NamedTuple):
    """The record is right."""


class Write(NamedTuple):
    value: Any
    """Not encoded yet."""
    phase: str


class Remove(NamedTuple):
    """The backend is gone for good."""


Decision = Keep | Write | Remove


def decide(
    value: Any,
    backend: Backend | None,
    rules: ReconcilerRules,
    *,
    session: bool,
    at: float,
    grace: float,
    slack: float = 0.0,
) -> Decision:
    """What to do about a record with this decoded value. ``session``: what ``session_present`` returned. Raises what
    the rules raise.

    ``at``: the time by the database's clock, which may be up to ``slack`` later. A backend is missing since the later
    one and its grace ends by the earlier one, so a grace is never too short."""
    status = rules.status(value)
    before = status.get("phase", Phase.PROVISIONING)
    if backend is not None:
        phase: str | None = rules.phase(backend, before=before, session=session)
        wanted = {"phase": _plain(phase)} | backend._stored()
    else:
        since = min(status.get("missing_since", at + slack), at + slack)
        missing = at - since if "missing_since" in status else None
        phase = rules.orphan(before=before, missing=missing, grace=grace)
        if phase is None:
            return Remove()
        wanted = {**status, "phase": _plain(phase), "missing_since": since}
    return Keep() if wanted == status else Write(rules.merge(value, wanted), wanted["phase"])


def _plain(phase: object) -> str:
    """The phase as a plain str, as it is stored."""
    if not isinstance(phase, str):
        raise TypeError(f"the phase of a record must be a str, not {phase!r:.80}")
    return str(phase)


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
    codec: Codec | None
    rules: ReconcilerRules

    @classmethod
    def check(
        cls,
        type: str,
        *,
        sweep_every: float,
        grace: float,
        concurrency: object,
        codec: Codec | None = None,
        rules: ReconcilerRules | None = None,
    ) -> ReconcilerTerms:
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 1 <= concurrency <= 1000:
            raise ValueError(f"concurrency must be a whole number from 1 to 1000, not {concurrency!r}")
        check_seconds(sweep_every, "sweep_every", 0.01, MAX_SECONDS)
        check_seconds(grace, "grace", 0.0, MAX_SECONDS)
        if codec is not None:
            _check_methods(codec, "codec", ("decode", "encode"))
        if rules is not None:
            _check_methods(rules, "rules", ("status", "merge", "phase", "orphan"))
        return cls(type, sweep_every, grace, concurrency, codec, rules or ReconcilerRules())


def _check_methods(given: object, what: str, names: tuple[str, ...]) -> None:
    """TypeError unless all are methods that return a value: a class or a coroutine function would return another."""
    for name in names:
        method = getattr(given, name, None)
        if isinstance(given, type) or not callable(method) or inspect.iscoroutinefunction(method):
            expected = ", ".join(f"{each}()" for each in names)
            raise TypeError(
                f"{what} must be an object with the plain methods {expected}: {given!r:.80} has no {name}()"
            )


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
