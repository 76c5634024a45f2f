"""The table of metrics: which event each one counts, with which labels. The exporters are driven by it; dashboard and
alerts are checked against it.

Names of leases and keys are never labels: there may be millions. A pool of slots is one: a service has few. Most labels
of an operation come from the fields of its key, and the number of their combinations is bounded. Nothing here counts
or exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["counter", "histogram", "gauge"]


class Metric(NamedTuple):
    name: str
    kind: Kind
    about: str
    event: str = ""
    """The event that it follows; a gauge is read instead."""
    value: str = ""
    """The field that is added or recorded; without one, the events are counted."""
    labels: tuple[str, ...] = ()
    unit: str = "1"

    def amount(self, fields: dict[str, Any]) -> float:
        return float(fields[self.value]) if self.value else 1.0

    def samples(self, readings: Mapping[tuple[str, ...], float]) -> list[tuple[tuple[str, ...], float]]:
        """The values of a gauge, each with those of its labels. Without a source a count without labels is 0, and an
        age is missing: an age of 0 would look healthy."""
        values = [(labels, value) for (name, *labels), value in readings.items() if name == self.name]
        if not values and not self.labels and self.unit != "s":
            return [((), 0.0)]
        return [(tuple(labels), value) for labels, value in values]

    def labelled(self, fields: dict[str, Any]) -> dict[str, str]:
        """All labels, always: series that come and go cannot be summed."""
        return {label: _text(fields.get(label)) for label in self.labels}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
"""Seconds: from a hand-over inside a process to a lease that is held all day."""

OPERATION = ("pipeline", "task", "dataset_id", "env", "operation_type", "sovereignty_event")
"""The labels of an operation: the fields of its key, the ``env`` of the process, and whether its dataset is
sovereign."""

OWN = ("pipeline", "task", "dataset_id", "operation_type")
"""Labels whose values the users choose, so their number is unknown."""
OTHER = "(other)"


class Bound:
    """Passes at most ``limit`` combinations of user-chosen labels; all further ones are reported as "(other)"."""

    def __init__(self, limit: object) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit must be a whole number from 1 on, not {limit!r}")
        self._limit = limit
        self._combinations: set[tuple[Any, ...]] = set()

    def __call__(self, fields: dict[str, Any]) -> dict[str, Any]:
        mine = tuple([fields.get(name) for name in OWN])
        if mine in self._combinations:
            return fields
        if len(self._combinations) < self._limit:
            self._combinations.add(mine)
            return fields
        return {**fields, **{name: OTHER for name, value in zip(OWN, mine, strict=True) if value is not None}}


def exported_names(prefix: str, names: Mapping[str, str] | None) -> dict[str, str]:
    """What each metric is called by an exporter: as ``names`` says, else by its name after the prefix. ValueError for a
    metric that does not exist."""
    defaults = {metric.name: prefix + metric.name for metric in METRICS}
    if unknown := sorted(set(names or ()) - set(defaults)):
        raise ValueError(f"names: there is no metric {unknown[0]!r}; holdfast.telemetry.METRICS lists them")
    return defaults | dict(names or {})


def _counter(name: str, about: str, event: str, *labels: str, value: str = "") -> Metric:
    return Metric(name, "counter", about, event, value, labels)


def _seconds(name: str, about: str, event: str, value: str, *labels: str) -> Metric:
    return Metric(name, "histogram", about, event, value, labels, "s")


def _runs(name: str, event: str, about: str, *more: str) -> Metric:
    """A counter with the labels of an operation, and ``more``."""
    return Metric(name, "counter", about, event, labels=(*OPERATION, *more))


def _gauge(name: str, about: str, unit: str = "1", *labels: str) -> Metric:
    return Metric(name, "gauge", about, labels=labels, unit=unit)


METRICS: tuple[Metric, ...] = (
    _counter("lease_acquisitions", "Leases and slots acquired.", "lease.acquired", "kind"),
    _counter("lease_refusals", "Acquisitions refused because another holder has the lease.", "lease.refused", "kind"),
    _counter("lease_takeovers", "Acquisitions after the holder expired or died.", "lease.taken_over", "kind"),
    _counter("lease_losses", "Leases lost while held.", "lease.lost", "kind", "reason"),
    _seconds("lease_wait_seconds", "Time from the request to the grant.", "lease.acquired", "waited", "kind"),
    _seconds("lease_hold_seconds", "Time from the grant to release or loss.", "lease.ended", "held", "kind"),
    _gauge("leases_held", "Leases that this process holds and renews."),
    _gauge("lease_waiters", "Requests in this process that wait for a lease."),
    _counter("lock_acquisitions", "Locks acquired.", "lock.acquired"),
    _counter("lock_refusals", "Locks not acquired.", "lock.refused", "reason"),
    _counter("lock_losses", "Locks lost with their session while held.", "lock.lost"),
    _seconds("lock_wait_seconds", "Time from the request to the grant.", "lock.acquired", "waited"),
    _seconds("lock_hold_seconds", "Time from the grant to release or loss.", "lock.ended", "held"),
    _gauge("locks_held", "Locks that this process holds."),
    _gauge("lock_waiters", "Requests in this process that wait for a lock."),
    _counter("heartbeats", "Heartbeats sent; one renews all leases of the same TTL.", "keeper.beat", "outcome"),
    _seconds("heartbeat_seconds", "Time until the database answered a heartbeat.", "keeper.beat", "seconds"),
    _gauge("heartbeat_age_seconds", "Time since the last confirmed heartbeat, the oldest of this process.", "s"),
    _counter("elector_transitions", "Changes of this replica between leader and standby.", "elector.changed", "to"),
    _gauge("electors_leading", "Electors of this process that lead."),
    _counter("invariant_violation", "Differences between slots and sessions.", "slots.violation", "kind"),
    _gauge("slots_in_use", "Slots in use, by the last reconciliation.", "1", "pool"),
    _seconds("reconciler_sweep_seconds", "Duration of a complete sweep.", "reconciler.swept", "seconds"),
    _counter("reconciler_errors", "Sweeps, watches and records that failed; each is retried.", "reconciler.failed"),
    _counter("reconciler_records", "Records and events, by action.", "reconciler.counted", "what", value="count"),
    _gauge("reconciler_sweep_age_seconds", "Time since the last complete sweep of a reconciler in this process.", "s"),
    _counter("relay_published", "Events accepted by sinks.", "relay.published", value="events"),
    _counter("relay_parked", "Events parked because their sink refused them.", "relay.parked"),
    _counter("relay_failures", "Passes that failed; each is retried.", "relay.failed", "reason"),
    _gauge("relay_lag_seconds", "Time since a relay in this process had published everything.", "s"),
    _gauge("relay_lag_events", "Events read but not published by relays in this process; the log may have more."),
    _runs("idempotent_replays", "operation.replayed", "Runs that returned the recorded result."),
    _runs("lock_acquire_failures", "operation.locked_out", "Runs that did not acquire their lock.", "reason"),
    _runs(
        "retry_events", "operation.retried",
        "Attempts after an earlier one failed, was interrupted, or collided with another transaction.", "reason",
    ),
    _runs(
        "lineage_rewrite_ops", "operation.rewritten",
        "Operations whose published lineage changes: a new attempt, a rollback, a reset.", "reason",
    ),
    _runs("idem_cache_hits", "operation.found", "Lookups that found the operation in the log."),
    _runs("idem_cache_misses", "operation.new", "Lookups that found nothing: new, reset or expired."),
    _runs("operations", "operation.ended", "Runs that have ended.", "outcome"),
    _seconds("operation_seconds", "Duration of a run, with waits and all attempts.", "operation.ended", "seconds",
             "env", "operation_type", "outcome"),
    _seconds("operation_hold_seconds", "Time from the lock request to the end of an attempt.", "operation.left", "held",
             "env", "operation_type"),
    _counter("schedule_runs", "Slots of schedules, by what became of them.", "schedule.ended", "outcome", value="runs"),
    _seconds("schedule_lateness_seconds", "Time from a slot to the start of its run.", "schedule.started", "lateness"),
    _runs("stale_partials_met", "operation.partial", "Interrupted operations, each time one is found.", "fate"),
)  # fmt: skip

BY_EVENT: dict[str, tuple[Metric, ...]] = {
    event: tuple(each for each in METRICS if each.event == event) for event in {each.event for each in METRICS} - {""}
}
GAUGES = tuple(each for each in METRICS if each.kind == "gauge")
