"""Judges a recorded history: which promises were broken, how much was counted, and figures for a report.

C1   one grant a fence
C2   the fences of a name rise
C3   no write with an older fence after a takeover
C4   what was acknowledged is in the database, what failed is not
C5   every operation key has one effect and one result, and no living owner is called dead (if operations were run)
C6   acquire, renew and release of a name are linearizable
C7   no two workers trust grants of the same lease at once (if no clock was changed)
C8   after the faults everything can be acquired again in time
C9   nothing is left over
C10  gauges show what was held (if gauges were read)

A history is about one database: its fences are compared across names. Of one that was set back by a restore, C4 and C6
are not judged: it has lost what was acknowledged.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.testing.checker.beliefs import overlaps
from holdfast.testing.checker.checks import (
    CHECKS,
    LOST_BY_A_RESTORE,
    CheckVerdict,
    Evidence,
    gauges_are_true,
    one_effect_a_key,
)
from holdfast.testing.history import DatabaseRows, Event, operations, read, read_database


class Report(NamedTuple):
    verdicts: list[CheckVerdict]
    figures: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether every check had something to count and no violation."""
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def violated(self) -> list[str]:
        return [verdict.check for verdict in self.verdicts if verdict.violations]

    @property
    def vacuous(self) -> list[str]:
        return [verdict.check for verdict in self.verdicts if verdict.vacuous]


def check(
    history: Path | str | Sequence[Event], database: DatabaseRows | None = None, *, sane_clocks: bool | None = None
) -> Report:
    """Judge a folder, or events and the rows of the database. Raises ValueError if they are damaged.

    ``sane_clocks`` says that no clock was changed; by default it is read from the history's file of database rows.
    """
    if isinstance(history, Path | str):
        database = read_database(history) if database is None else database
        history = read(history)
    database = database or DatabaseRows()
    sane = database.sane_clocks if sane_clocks is None else sane_clocks
    evidence = Evidence(history, operations(history), database, sane)
    for operation in evidence.operations:
        if operation.op == "write" and not isinstance(operation.data.get("key"), str | int):
            raise ValueError(f"an event has no key in its data: {operation}")
        if operation.op == "run" and operation.outcome == "ok" and "result" not in operation.data:
            raise ValueError(f"an event has no result in its data: {operation}")
    checks = [each for each in CHECKS if not (database.set_back and each in LOST_BY_A_RESTORE)]
    verdicts = [judge(evidence) for judge in checks]
    if database.effects or any(operation.op == "run" for operation in evidence.operations):
        verdicts.append(one_effect_a_key(evidence))
    if evidence.infos("gauge"):
        verdicts.append(gauges_are_true(evidence))
    return Report(verdicts, _figures(evidence))


def _figures(evidence: Evidence) -> dict[str, Any]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for operation in evidence.operations:
        counts[operation.op][operation.outcome] += 1
    faults = [event.data["fault"] for event in evidence.infos("fault") if event.data["phase"] == "begin"]
    believed = overlaps(evidence.infos("believe"))
    events = evidence.events
    standstills = [event.data for event in evidence.infos("standstill")]
    return {
        "seconds": round(events[-1].time - events[0].time, 3) if events else 0.0,
        "workers": len({event.worker for event in events}),
        "names": len({operation.name for operation in evidence.operations}),
        "operations": {op: dict(sorted(outcomes.items())) for op, outcomes in sorted(counts.items())},
        "faults": dict(sorted(Counter(faults).items())),
        "timelines": len(evidence.database.timelines),
        "overlap": {
            "total": round(sum(overlap.total for overlap in believed), 6),
            "longest": round(max((overlap.longest for overlap in believed), default=0.0), 6),
        },
        "standstill": standstills[-1] if standstills else {"total": 0.0, "longest": 0.0},
    }
