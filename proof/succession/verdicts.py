"""The checks of a succession run, as verdicts with the number of things they counted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.testing.checker import linear
from holdfast.testing.checker.beliefs import overlaps
from holdfast.testing.checker.checks import CheckVerdict
from holdfast.testing.checker.models import LeaseModel, RegisterModel
from holdfast.testing.history import operations, read


class ExpectedState(NamedTuple):
    """The last state that the driver reported, when it removed backends, and when records were seen to be removed."""

    ready: dict[str, bool | None]
    lost: dict[str, float]
    removed: dict[str, float]
    grace: float

    def pruned_too_early(self) -> list[str]:
        """Records that were removed before their grace had ended. Their removal is seen late, never early, so a correct
        run has no violations."""
        return [
            f"{id} was removed {self.removed[id] - lost:.3f} s after its backend, and its grace is {self.grace:g} s"
            for id, lost in self.lost.items()
            if id in self.removed and self.removed[id] < lost + self.grace
        ]


def judge(folder: Path, expected: ExpectedState, remaining: set[str], changes: Sequence[Any]) -> list[CheckVerdict]:
    """``remaining``: ids of the records at the end; ``changes``: all changes of records, from the database."""
    events = read(folder)
    recorded = operations(events)
    terms = [each for each in recorded if each.op == "acquire"]
    # A refused compare-and-swap proves nothing about the note: the reconciler may have written the rest of the record.
    notes = [each for each in recorded if each.op == "read" or (each.op == "cas" and each.outcome != "fail")]
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
        CheckVerdict.of(
            "no record is lost", len(expected.ready), [f"{id} is lost" for id in expected.ready.keys() - remaining]
        ),
        CheckVerdict.of(
            "none is pruned wrongly",
            len(changes),
            [f"{id} was removed, and its backend was there" for id in removed if id not in expected.lost],
        ),
        CheckVerdict.of("none is pruned before its grace is over", len(expected.removed), expected.pruned_too_early()),
        CheckVerdict.of(
            "what is gone is removed once",
            len(changes),
            [f"{id} was removed {removed.count(id)} times" for id in expected.lost if removed.count(id) != 1],
        ),
    ]
