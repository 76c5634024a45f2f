"""What has to be so when all is over, as verdicts that say how much they looked at."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.testing.checker import linear
from holdfast.testing.checker.beliefs import overlaps
from holdfast.testing.checker.checks import CheckVerdict
from holdfast.testing.checker.models import LeaseModel, RegisterModel
from holdfast.testing.history import operations, read


class Truth(NamedTuple):
    """What the driver said last, what it lost on purpose and when, and when each record was seen to be removed."""

    ready: dict[str, bool | None]
    lost: dict[str, float]
    removed: dict[str, float]
    grace: float

    def hasty(self) -> list[str]:
        """An orphan has its grace: whoever sees it go sees it afterwards, so nobody is blamed for what is not so."""
        return [
            f"{id} was removed {self.removed[id] - lost:.3f} s after its backend, and its grace is {self.grace:g} s"
            for id, lost in self.lost.items()
            if id in self.removed and self.removed[id] < lost + self.grace
        ]


def judge(folder: Path, truth: Truth, there: set[str], changes: Sequence[Any]) -> list[CheckVerdict]:
    """``there``: the records at the end; ``changes``: all that was ever written, as the database tells it."""
    events = read(folder)
    done = operations(events)
    terms = [each for each in done if each.op == "acquire"]
    # A note that was refused says nothing of the note: the reconciler may have written the rest of the record.
    notes = [each for each in done if each.op == "read" or (each.op == "cas" and each.outcome != "fail")]
    beliefs = [event for event in events if event.op == "believe"]
    removed = [each.id for each in changes if each.kind == "deleted"]
    return [
        CheckVerdict.of(
            "terms have rising fences", len(terms), [str(each) for each in linear.check(terms, LeaseModel())]
        ),
        CheckVerdict.of("no two lead at once", len(beliefs), [str(each) for each in overlaps(beliefs)]),
        CheckVerdict.of(
            "notes are linearizable", len(notes), [str(each) for each in linear.check(notes, RegisterModel())]
        ),
        CheckVerdict.of("no record is lost", len(truth.ready), [f"{id} is lost" for id in truth.ready.keys() - there]),
        CheckVerdict.of(
            "none is pruned wrongly",
            len(changes),
            [f"{id} was removed, and its backend was there" for id in removed if id not in truth.lost],
        ),
        CheckVerdict.of("none is pruned before its grace is over", len(truth.removed), truth.hasty()),
        CheckVerdict.of(
            "what is gone is removed once",
            len(changes),
            [f"{id} was removed {removed.count(id)} times" for id in truth.lost if removed.count(id) != 1],
        ),
    ]
