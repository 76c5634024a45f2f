"""The ten checks C1 to C10, each a function from the evidence of a run to a verdict.

A verdict says what was violated and how much was counted. A check that had nothing to count is *vacuous*: it is not
violated, and it is not ok either.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any, NamedTuple

from holdfast.testing.checker import linear
from holdfast.testing.checker.beliefs import overlaps
from holdfast.testing.checker.models import LeaseModel
from holdfast.testing.history import DatabaseRows, Event, RecordedOperation, Row, require

LEASE_OPERATIONS = frozenset({"acquire", "renew", "release"})
_NUMBER = (int, float)
_INFO_COLUMNS: dict[str, dict[str, Any]] = {
    "believe": {"from": _NUMBER, "until": _NUMBER},
    "fault": {"fault": str, "phase": str},
    "gauge": {"since": _NUMBER, "until": _NUMBER, "workers": list, "value": _NUMBER},
    "leftover": {"what": str, "count": int},
    "reacquired": {"after": (*_NUMBER, NoneType), "bound": _NUMBER},
    "standstill": {"total": _NUMBER, "longest": _NUMBER},
}
"""The columns that the checks read from the data of an info event."""

Grant = tuple[str, int | None]
"""Name and fence."""


class CheckVerdict(NamedTuple):
    """The result of one check."""

    check: str
    ok: bool
    counted: int
    violations: list[str]

    @classmethod
    def of(cls, check: str, counted: int, violations: list[str]) -> "CheckVerdict":
        return cls(check, counted > 0 and not violations, counted, violations)

    @property
    def vacuous(self) -> bool:
        return self.counted == 0 and not self.violations

    def __str__(self) -> str:
        if self.violations:
            return f"{self.check} VIOLATED: {len(self.violations)} of {self.counted}"
        return f"{self.check} ok: {self.counted}" if self.counted else f"{self.check} says nothing: none to count"


class Evidence(NamedTuple):
    """Everything that is known of one run."""

    events: Sequence[Event]
    operations: Sequence[RecordedOperation]
    database: DatabaseRows
    sane_clocks: bool

    def with_outcome(self, op: str, outcome: str) -> Iterable[RecordedOperation]:
        return (each for each in self.operations if each.op == op and each.outcome == outcome)

    def infos(self, op: str) -> list[Event]:
        """The info events of this kind. Raises ValueError if the data of one is damaged."""
        events = [event for event in self.events if event.kind == "info" and event.op == op]
        for event in events:
            try:
                require(event.data, _INFO_COLUMNS.get(op, {}))
            except ValueError as error:
                raise ValueError(f"an event is damaged: {error} in the data of {event}") from error
        return events


def one_grant_a_fence(evidence: Evidence) -> CheckVerdict:
    """C1. In the answers to workers, in the takeovers, and in the database's own rows of grants that have ended."""
    acquired = list(evidence.with_outcome("acquire", "ok"))
    violations = []
    for fence, grants in _grouped(acquired, lambda each: each.fence).items():
        if len(grants) > 1:
            violations.append(f"fence {fence} was granted {len(grants)} times: {'; '.join(map(str, grants))}")
    name_of = {each.fence: each.name for each in acquired}
    tables = (("takeovers", evidence.database.takeovers), ("ended grants", evidence.database.grants))
    for table, all_rows in tables:
        for fence, rows in _grouped(all_rows, lambda row: row["fence"]).items():
            names = {row["name"] for row in rows} | {name_of.get(fence, rows[0]["name"])}
            if len(rows) > 1 or len(names) > 1:
                violations.append(f"fence {fence} belongs to {len(rows)} {table}, of {', '.join(sorted(names))}")
    return CheckVerdict.of("C1", len(acquired), violations)


def fences_rise(evidence: Evidence) -> CheckVerdict:
    """C2. An operation that starts after another has completed has no lower fence, and an acquire a higher one.

    If a grant works after one with a higher fence was given out, either fences went back or a stale holder was not
    stopped. After a restore it may be the holder of the restored lease: then only acquires are compared.
    """
    kinds = ("acquire",) if evidence.database.set_back else ("acquire", "takeover", "write")
    successes = [each for op in kinds for each in evidence.with_outcome(op, "ok")]
    violations = []
    for group in _grouped(successes, lambda each: each.name).values():
        by_completion = sorted(group, key=lambda each: each.completed)
        highest: RecordedOperation | None = None
        position = 0
        for operation in sorted(group, key=lambda each: each.invoked):
            while by_completion[position].completed < operation.invoked:
                if highest is None or _fence(by_completion[position]) > _fence(highest):
                    highest = by_completion[position]
                position += 1
            if highest is not None and _fence(operation) < _fence(highest) + (operation.op == "acquire"):
                violations.append(f"{operation} came after {highest}")
    return CheckVerdict.of("C2", len(successes), violations)


def takeovers_saw_everything_older(evidence: Evidence) -> CheckVerdict:
    """C3. Uses no clock. A write with an older fence that a takeover did not see was committed after it; a takeover
    that saw a newer one was itself too late."""
    writes = _grouped(evidence.database.writes, lambda row: row["name"])
    fences = {name: sorted(row["fence"] for row in rows) for name, rows in writes.items()}
    violations = []
    for row in evidence.database.takeovers:
        newest = row.get("newest")
        if newest is not None and newest >= row["fence"]:
            violations.append(f"the takeover of {row['name']!r} with fence {row['fence']} came after that of {newest}")
        older = fences.get(row["name"], [])
        older = older[: bisect_left(older, row["fence"])]
        if len(older) != row["older"]:
            last = f", the last with fence {older[-1]}" if older else ""
            violations.append(
                f"the takeover of {row['name']!r} with fence {row['fence']} saw {row['older']} older writes, "
                f"but there are {len(older)}{last}"
            )
    return CheckVerdict.of("C3", len(evidence.database.takeovers), violations)


def answers_are_true(evidence: Evidence) -> CheckVerdict:
    """C4. Writes and takeovers that were acknowledged are in the database, those that failed are not, none is there
    twice, and none is there that no worker made. If the database has all grants, acknowledged ones are among them."""
    rows = evidence.database
    writes = _compare(evidence, "write", rows.writes, lambda row: (row["name"], row["fence"], row["key"]))
    takeovers = _compare(evidence, "takeover", rows.takeovers, lambda row: (row["name"], row["fence"]))
    missing: list[str] = []
    if rows.all_grants:
        stored = {(row["name"], row["fence"]) for row in rows.grants}
        acquired = evidence.with_outcome("acquire", "ok")
        missing = [
            f"acknowledged, but unknown to the database: {each}" for each in acquired if _grant(each) not in stored
        ]
    return CheckVerdict.of("C4", writes[0] + takeovers[0], writes[1] + takeovers[1] + missing)


def _compare(
    evidence: Evidence, op: str, rows: Iterable[Row], key: Callable[[Row], tuple[Any, ...]]
) -> tuple[int, list[str]]:
    """How many operations of this kind have a known outcome, and the contradictions between them and ``rows``."""
    stored = Counter(map(key, rows))
    attempted = _grouped(
        (each for each in evidence.operations if each.op == op),
        lambda each: key({**each.data, "name": each.name, "fence": each.fence}),
    )
    violations = [f"{op} {row} is in the database {times} times" for row, times in stored.items() if times > 1]
    violations += [f"{op} {row} is in the database, but no worker made it" for row in stored if row not in attempted]
    for row, attempts in attempted.items():
        outcomes = {each.outcome for each in attempts}
        if "ok" in outcomes and row not in stored:
            violations.append(f"acknowledged, but not in the database: {row}, {'; '.join(map(str, attempts))}")
        if outcomes == {"fail"} and row in stored:
            violations.append(f"failed, but in the database: {row}, {'; '.join(map(str, attempts))}")
    return sum(each.outcome != "unknown" for attempts in attempted.values() for each in attempts), violations


def one_effect_a_key(evidence: Evidence) -> CheckVerdict:
    """C5. Every operation key has one effect and one result, and the result is of that effect. No run is refused as
    left by a dead owner (``dead`` in its data) while every owner lives.

    Workers report results, the table of effects shows what happened. A run without an answer may have had its effect,
    but two runs never have one each. An owner is dead when its run has no known outcome.
    """
    effects: dict[str, list[object]] = defaultdict(list)
    for row in evidence.database.effects:
        effects[row["name"]].append(row["value"])
    runs = _grouped((each for each in evidence.operations if each.op == "run"), lambda each: each.name)
    violations = [f"{name!r} has an effect, but no worker ran it" for name in effects if name not in runs]
    answered = 0
    for name, group in runs.items():
        succeeded, values = [each for each in group if each.outcome == "ok"], effects.get(name, [])
        results = {repr(each.data["result"]) for each in succeeded}
        answered += len(succeeded)
        if len(values) > 1:
            violations.append(f"{name!r} had {len(values)} effects: {', '.join(map(repr, values))}")
        if len(results) > 1:
            violations.append(f"{name!r} had {len(results)} results: {', '.join(sorted(results))}")
        if succeeded and not values:
            violations.append(f"{name!r} was acknowledged, but has no effect: {succeeded[0]}")
        if succeeded and len(values) == 1 and results != {repr(values[0])}:
            violations.append(f"{name!r} had the effect {values[0]!r}, and the result {', '.join(sorted(results))}")
        deaths = [each.invoked for each in group if each.outcome == "unknown"]
        violations += [
            f"{name!r} was refused as left by a dead owner, and none had died: {refused}"
            for refused in group
            if refused.data.get("dead") and refused.completed < min(deaths, default=math.inf)
        ]
    return CheckVerdict.of("C5", answered, violations)


def linearizable(evidence: Evidence) -> CheckVerdict:
    """C6. There is an order of acquires, renewals and releases of each name that explains every answer."""
    lease_operations = [each for each in evidence.operations if each.op in LEASE_OPERATIONS]
    acquires = _grouped((each for each in lease_operations if each.op == "acquire"), lambda each: each.name)
    judged = [each for each in lease_operations if not _proves_nothing(each, acquires[each.name])]
    judged += [hidden for each in lease_operations for hidden in _hidden_acquires(each)]
    return CheckVerdict.of("C6", len(judged), [str(each) for each in linear.check(judged, LeaseModel())])


def _proves_nothing(operation: RecordedOperation, acquires: Iterable[RecordedOperation]) -> bool:
    """Whether a failure says nothing about the state of the lease.

    An acquire that failed with an error was not answered by the lease, and certainly not granted. A refusal that names
    no holder means that another transaction is changing the row. It proves nothing if another acquire overlapped it;
    otherwise it is judged like any other refusal.
    """
    if operation.outcome != "fail":
        return False
    is_busy = operation.data.get("holder", "") is None
    return "error" in operation.data or (
        is_busy and any(_overlap(operation, other) for other in acquires if other is not operation)
    )


def _hidden_acquires(operation: RecordedOperation) -> list[RecordedOperation]:
    """One acquire of unknown outcome for each request that the client sent and gave up on before it sent another.

    Each may have been granted, and then released or left to expire, however the acquire itself ended. An acquire whose
    own outcome is unknown stands for one of them already.
    """
    times = operation.data.get("abandoned", 0) - (operation.outcome == "unknown")
    return [operation._replace(outcome="unknown", fence=None, completed=math.inf)] * times


def _overlap(one: RecordedOperation, other: RecordedOperation) -> bool:
    return one.invoked <= other.completed and other.invoked <= one.completed


def beliefs_do_not_overlap(evidence: Evidence) -> CheckVerdict:
    """C7. Counted in every run, but a violation only if no clock was changed."""
    beliefs = evidence.infos("believe")
    violations = [str(overlap) for overlap in overlaps(beliefs)] if evidence.sane_clocks else []
    return CheckVerdict.of("C7", len(beliefs), violations)


def acquired_again_in_time(evidence: Evidence) -> CheckVerdict:
    """C8. Time in which the machine stood still does not count."""
    events = evidence.infos("reacquired")
    violations = []
    for event in events:
        after, bound = event.data["after"], event.data["bound"]
        stood_still = event.data.get("standstill", 0.0)  # absent in histories of earlier versions
        remark = f", {stood_still:.3f} s of which the machine stood still" if stood_still else ""
        if after is None:
            violations.append(f"{event.name!r} could not be acquired any more within {bound:.3f} s ({event.worker})")
        elif after - stood_still > bound:
            violations.append(
                f"{event.name!r} was acquired after {after:.3f} s{remark}, not within {bound:.3f} ({event.worker})"
            )
    return CheckVerdict.of("C8", len(events), violations)


def nothing_left_over(evidence: Evidence) -> CheckVerdict:
    """C9. After the run no rows, locks, connections or processes remain."""
    events = evidence.infos("leftover")
    violations = [f"{event.data['count']} {event.data['what']} left over" for event in events if event.data["count"]]
    return CheckVerdict.of("C9", len(events), violations)


def gauges_are_true(evidence: Evidence) -> CheckVerdict:
    """C10. A reading of the gauge "leases held" lies between two bounds.

    The lower one counts the grants that were certainly held during the whole reading, the upper one those that may
    have been held at some time of it: from their acquire until their release or the report of their loss. Only leases
    that holdfast renews are counted, as the gauge does.
    """
    acquires: dict[str, list[RecordedOperation]] = defaultdict(list)
    for operation in evidence.operations:
        if operation.op == "acquire" and operation.data.get("kept"):
            acquires[operation.worker].append(operation)
    ended = {_grant(each): each.completed for each in evidence.operations if each.op == "release"}
    for event in evidence.infos("lost"):
        ended[event.name, event.fence] = min(event.time, ended.get((event.name, event.fence), event.time))
    beliefs: dict[Grant, list[Event]] = defaultdict(list)
    for event in evidence.infos("believe"):
        if event.data.get("sure"):
            beliefs[event.name, event.fence].append(event)
    readings, violations = evidence.infos("gauge"), []
    for reading in readings:
        start, end = reading.data["since"], reading.data["until"]
        minimum = maximum = 0
        for worker in reading.data["workers"]:
            for acquire in acquires[worker]:
                over = acquire.completed if acquire.outcome == "fail" else ended.get(_grant(acquire), math.inf)
                maximum += acquire.invoked <= end and over >= start
                spans = beliefs[_grant(acquire)] if acquire.outcome == "ok" else ()
                minimum += any(span.data["from"] <= start and end <= span.data["until"] for span in spans)
        if not minimum <= reading.data["value"] <= maximum:
            violations.append(
                f"{reading.worker} reported at {reading.time:.6f} that it holds {reading.data['value']}, but it held "
                f"{minimum if minimum == maximum else f'{minimum} to {maximum}'}"
            )
    return CheckVerdict.of("C10", len(readings), violations)


CHECKS: tuple[Callable[[Evidence], CheckVerdict], ...] = (
    one_grant_a_fence,
    fences_rise,
    takeovers_saw_everything_older,
    answers_are_true,
    linearizable,
    beliefs_do_not_overlap,
    acquired_again_in_time,
    nothing_left_over,
)
"""The checks of every run. C5 and C10 are added to runs that have operations or readings of gauges."""

LOST_BY_A_RESTORE = frozenset({answers_are_true, linearizable})
"""Those that a database cannot pass that was set back."""


def _grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _grant(operation: RecordedOperation) -> Grant:
    return operation.name, operation.fence


def _fence(operation: RecordedOperation) -> int:
    return -1 if operation.fence is None else operation.fence
