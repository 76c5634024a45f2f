"""Judge a history that is kept: which promises were broken, how much was looked at, and the figures for a report.

C1 one grant a fence · C2 fences rise a name · C3 no write with an older fence after a takeover · C4 what was
acknowledged is in the database, what failed is not · C5 every key has one effect and one result, where operations were
run · C6 acquire, renew and release are linearizable a name · C7 no two workers believe in the same lease at once, where
clocks are sane · C8 after the faults everything can be acquired again in time · C9 nothing is left over · C10 gauges
are what was held, where they were read.

A history is about one database: its fences are compared across names.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.testing.checker.beliefs import overlaps
from holdfast.testing.checker.checks import CHECKS, History, Verdict
from holdfast.testing.checker.effects import one_effect_a_key
from holdfast.testing.checker.gauges import gauges_are_true
from holdfast.testing.history import Database, Event, operations, read, read_database


class Report(NamedTuple):
    verdicts: list[Verdict]
    figures: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Every check had something to count, and found nothing wrong with it."""
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def violated(self) -> list[str]:
        return [verdict.check for verdict in self.verdicts if verdict.violations]

    @property
    def vacuous(self) -> list[str]:
        return [verdict.check for verdict in self.verdicts if verdict.vacuous]


def check(
    history: Path | str | Sequence[Event], database: Database | None = None, *, sane_clocks: bool | None = None
) -> Report:
    """Judge a folder, or events and what the database says. `sane_clocks`: unless told, as the database file says."""
    if isinstance(history, Path | str):
        database = read_database(history) if database is None else database
        history = read(history)
    database = database or Database()
    sane = database.sane_clocks if sane_clocks is None else sane_clocks
    whole = History(history, operations(history), database, sane)
    for each in whole.operations:
        if each.op == "write" and not isinstance(each.data.get("key"), str | int):
            raise ValueError(f"an event has no key in its data: {each}")
        if each.op == "run" and each.outcome == "ok" and "result" not in each.data:
            raise ValueError(f"an event has no result in its data: {each}")
    verdicts = [judge(whole) for judge in CHECKS]
    if database.effects or any(each.op == "run" for each in whole.operations):
        verdicts.append(one_effect_a_key(whole))
    if whole.told("gauge"):
        verdicts.append(gauges_are_true(whole))
    return Report(verdicts, _figures(whole))


def _figures(history: History) -> dict[str, Any]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in history.operations:
        counts[each.op][each.outcome] += 1
    begun = [event.data["fault"] for event in history.told("fault") if event.data["phase"] == "begin"]
    found = overlaps(history.told("believe"))
    events = history.events
    still = [event.data for event in history.told("standstill")]
    return {
        "seconds": round(events[-1].time - events[0].time, 3) if events else 0.0,
        "workers": len({event.worker for event in events}),
        "names": len({each.name for each in history.operations}),
        "operations": {op: dict(sorted(outcomes.items())) for op, outcomes in sorted(counts.items())},
        "faults": dict(sorted(Counter(begun).items())),
        "timelines": len(history.database.timelines),
        "overlap": {
            "total": round(sum(each.total for each in found), 6),
            "longest": round(max((each.longest for each in found), default=0.0), 6),
        },
        "standstill": still[-1] if still else {"total": 0.0, "longest": 0.0},
    }
