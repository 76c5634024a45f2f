"""The promises of a lease as functions of a history, each with a verdict: what was broken, and how much was looked at.

A check that found nothing to look at is *vacuous*: not violated, and not ok either.
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
from holdfast.testing.history import Database, Event, Operation, Row, require

LEASE_OPERATIONS = frozenset({"acquire", "renew", "release"})
_NUMBER = (int, float)
_TOLD: dict[str, dict[str, Any]] = {
    "believe": {"from": _NUMBER, "until": _NUMBER},
    "fault": {"fault": str, "phase": str},
    "gauge": {"since": _NUMBER, "until": _NUMBER, "workers": list, "value": _NUMBER},
    "leftover": {"what": str, "count": int},
    "reacquired": {"after": (*_NUMBER, NoneType), "bound": _NUMBER},
    "standstill": {"total": _NUMBER, "longest": _NUMBER},
}
"""What the checker reads of an event that is no operation; of others it reads nothing."""


class Verdict(NamedTuple):
    """What one check says."""

    check: str
    ok: bool
    counted: int
    violations: list[str]

    @classmethod
    def of(cls, check: str, counted: int, violations: list[str]) -> "Verdict":
        return cls(check, counted > 0 and not violations, counted, violations)

    @property
    def vacuous(self) -> bool:
        return self.counted == 0 and not self.violations

    def __str__(self) -> str:
        if self.violations:
            return f"{self.check} VIOLATED: {len(self.violations)} of {self.counted}"
        return f"{self.check} ok: {self.counted}" if self.counted else f"{self.check} says nothing: none to count"


class History(NamedTuple):
    """All that there is to judge."""

    events: Sequence[Event]
    operations: Sequence[Operation]
    database: Database
    sane_clocks: bool

    def having(self, op: str, outcome: str) -> Iterable[Operation]:
        return (each for each in self.operations if each.op == op and each.outcome == outcome)

    def told(self, op: str) -> list[Event]:
        found = [event for event in self.events if event.kind == "info" and event.op == op]
        for event in found:
            try:
                require(event.data, _TOLD.get(op, {}))
            except ValueError as error:
                raise ValueError(f"an event is damaged: {error} in the data of {event}") from error
        return found


def one_grant_a_fence(history: History) -> Verdict:
    """C1. In the answers, in the takeovers, and in the database's own record of the grants that have ended."""
    acquired = list(history.having("acquire", "ok"))
    violations = []
    for fence, group in _grouped(acquired, lambda each: each.fence).items():
        if len(group) > 1:
            violations.append(f"fence {fence} was granted {len(group)} times: {'; '.join(map(str, group))}")
    owner = {each.fence: each.name for each in acquired}
    for what, rows in (("takeovers", history.database.takeovers), ("ended grants", history.database.grants)):
        for fence, found in _grouped(rows, lambda row: row["fence"]).items():
            names = {row["name"] for row in found} | {owner.get(fence, found[0]["name"])}
            if len(found) > 1 or len(names) > 1:
                violations.append(f"fence {fence} belongs to {len(found)} {what}, of {', '.join(sorted(names))}")
    return Verdict.of("C1", len(acquired), violations)


def fences_rise(history: History) -> Verdict:
    """C2. Whoever begins after another has ended has a higher fence. A grant that works, be it for the first time or
    not, after one with a higher fence was given out shows that the fences went back, or that it was not stopped."""
    proofs = [each for op in ("acquire", "takeover", "write") for each in history.having(op, "ok")]
    violations = []
    for group in _grouped(proofs, lambda each: each.name).values():
        ended = sorted(group, key=lambda each: each.completed)
        highest: Operation | None = None
        past = 0
        for each in sorted(group, key=lambda each: each.invoked):
            while ended[past].completed < each.invoked:
                if highest is None or _fence(ended[past]) > _fence(highest):
                    highest = ended[past]
                past += 1
            if highest is not None and _fence(each) < _fence(highest) + (each.op == "acquire"):
                violations.append(f"{each} came after {highest}")
    return Verdict.of("C2", len(proofs), violations)


def takeovers_saw_everything_older(history: History) -> Verdict:
    """C3. Exact, and without any clock: a write with an older fence that a takeover did not see came after it, and a
    takeover that saw a newer one came too late itself."""
    writes = _grouped(history.database.writes, lambda row: row["name"])
    fences = {name: sorted(row["fence"] for row in rows) for name, rows in writes.items()}
    violations = []
    for row in history.database.takeovers:
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
    return Verdict.of("C3", len(history.database.takeovers), violations)


def answers_are_true(history: History) -> Verdict:
    """C4. Writes and takeovers: what was acknowledged is there; what failed is not; nothing is there twice, and nothing
    that nobody made. Grants that were acknowledged are known to the database, if it was asked about all of them."""
    writes = _compared(history, "write", history.database.writes, lambda row: (row["name"], row["fence"], row["key"]))
    takeovers = _compared(history, "takeover", history.database.takeovers, lambda row: (row["name"], row["fence"]))
    lost: list[str] = []
    if history.database.all_grants:
        known = {(row["name"], row["fence"]) for row in history.database.grants}
        acquired = history.having("acquire", "ok")
        lost = [f"acknowledged, but unknown to the database: {each}" for each in acquired if _grant(each) not in known]
    return Verdict.of("C4", writes[0] + takeovers[0], writes[1] + takeovers[1] + lost)


def _compared(
    history: History, op: str, rows: Iterable[Row], key: Callable[[Row], tuple[Any, ...]]
) -> tuple[int, list[str]]:
    there = Counter(map(key, rows))
    made = _grouped(
        (each for each in history.operations if each.op == op),
        lambda each: key({**each.data, "name": each.name, "fence": each.fence}),
    )
    violations = [f"{op} {what} is in the database {times} times" for what, times in there.items() if times > 1]
    violations += [f"{op} {what} is in the database, but nobody made it" for what in there if what not in made]
    for what, attempts in made.items():
        outcomes = {each.outcome for each in attempts}
        if "ok" in outcomes and what not in there:
            violations.append(f"acknowledged, but not in the database: {what}, {'; '.join(map(str, attempts))}")
        if outcomes == {"fail"} and what in there:
            violations.append(f"failed, but in the database: {what}, {'; '.join(map(str, attempts))}")
    return sum(each.outcome != "unknown" for attempts in made.values() for each in attempts), violations


def linearizable(history: History) -> Verdict:
    """C6."""
    concerned = [each for each in history.operations if each.op in LEASE_OPERATIONS]
    asked = _grouped((each for each in concerned if each.op == "acquire"), lambda each: each.name)
    judged = [each for each in concerned if not _says_nothing(each, asked[each.name])]
    judged += [each for known in concerned for each in _hidden(known)]
    return Verdict.of("C6", len(judged), [str(each) for each in linear.check(judged, LeaseModel())])


def _says_nothing(operation: Operation, asked: Iterable[Operation]) -> bool:
    """What failed with an error of its own was never answered by the lease, and certainly not granted. And a refusal
    that names no holder says that somebody is just changing the lease: it may be anybody who asks for it at that time,
    whatever becomes of that. If nobody does, it needs a holder like any other."""
    if operation.outcome != "fail":
        return False
    busy = operation.data.get("holder", "") is None
    return "error" in operation.data or (
        busy and any(_overlap(operation, other) for other in asked if other is not operation)
    )


def _hidden(operation: Operation) -> list[Operation]:
    """An acquire asks again where it was not answered. Each time that it gave up on an answer it may have been granted
    what it then gave back, or what expired: acquires of unknown outcome, however it ended itself."""
    times = operation.data.get("abandoned", 0) - (operation.outcome == "unknown")
    return [operation._replace(outcome="unknown", fence=None, completed=math.inf)] * times


def _overlap(one: Operation, other: Operation) -> bool:
    return one.invoked <= other.completed and other.invoked <= one.completed


def beliefs_do_not_overlap(history: History) -> Verdict:
    """C7. Measured in every case; a violation only where clocks were sane."""
    told = history.told("believe")
    found = overlaps(told)
    return Verdict.of("C7", len(told), [str(each) for each in found] if history.sane_clocks else [])


def acquired_again_in_time(history: History) -> Verdict:
    """C8. What the machine stood still is not counted: nothing can be acquired meanwhile."""
    told = history.told("reacquired")
    violations = []
    for event in told:
        after, bound = event.data["after"], event.data["bound"]
        lost = event.data.get("standstill", 0.0)  # histories of earlier versions do not tell it
        still = f", {lost:.3f} s of which the machine stood still" if lost else ""
        if after is None:
            violations.append(f"{event.name!r} could not be acquired any more within {bound:.3f} s ({event.worker})")
        elif after - lost > bound:
            violations.append(
                f"{event.name!r} was acquired after {after:.3f} s{still}, not within {bound:.3f} ({event.worker})"
            )
    return Verdict.of("C8", len(told), violations)


def nothing_left_over(history: History) -> Verdict:
    """C9."""
    told = history.told("leftover")
    violations = [f"{each.data['count']} {each.data['what']} left over" for each in told if each.data["count"]]
    return Verdict.of("C9", len(told), violations)


CHECKS: tuple[Callable[[History], Verdict], ...] = (
    one_grant_a_fence,
    fences_rise,
    takeovers_saw_everything_older,
    answers_are_true,
    linearizable,
    beliefs_do_not_overlap,
    acquired_again_in_time,
    nothing_left_over,
)


def _grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _grant(operation: Operation) -> tuple[str, int | None]:
    return operation.name, operation.fence


def _fence(operation: Operation) -> int:
    return -1 if operation.fence is None else operation.fence
