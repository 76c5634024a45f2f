"""The checks of a workload, as verdicts with the number of things they counted."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

from holdfast.testing.checker import check, linear
from holdfast.testing.checker.beliefs import overlaps
from holdfast.testing.checker.checks import CheckVerdict
from holdfast.testing.checker.models import RegisterModel
from holdfast.testing.history import Event, operations, read

_MEANING = {
    "C1": "one grant a fence",
    "C2": "fences rise",
    "C3": "no superseded holder commits",
    "C4": "no acknowledged write is lost",
    "C5": "one effect and one result an operation",
    "C6": "leases are linearizable",
    "C8": "leases can be acquired again",
    "C9": "no process is left over",
}
"""Names for the checks of ``holdfast.testing.checker``. C7 is replaced by a check that knows when clocks were wrong."""
T = TypeVar("T")
Write = tuple[str, int]
"""The id of a note, and its version."""


class FinalState(NamedTuple):
    """What the database had after the run."""

    changes: Collection[Write]
    """All changes of notes that were committed, as a trigger stored them."""
    events: Sequence[str]
    """The ids of all events of the log, in order."""
    parked: int
    """Events that the relay has given up on."""
    disagreeing: Sequence[str]
    """Sandboxes whose record does not agree with the driver."""
    pruned: Sequence[str]
    """Sandboxes whose record was removed, although their backend was there all the time."""
    crashed: Sequence[str]
    killed: Collection[str] = ()
    """Workers that were killed: their watches have not returned everything."""


def judge(folder: Path, state: FinalState, ttl: float) -> list[CheckVerdict]:
    events = read(folder)
    recorded = operations(events)
    report = check(folder, sane_clocks=False)
    # A refused compare-and-swap proves nothing: what it expected may have been read from a superseded leader.
    notes = [each for each in recorded if each.op == "read" or (each.op == "cas" and each.outcome != "fail")]
    acknowledged = [(each.name, each.data["version"]) for each in notes if each.op == "cas" and each.outcome == "ok"]
    beliefs = list(_with_right_clocks(events, ttl))
    relayed = [id for event in events if event.op == "relayed" for id in event.data["ids"]]
    return [
        *(each._replace(check=_MEANING[each.check]) for each in report.verdicts if each.check in _MEANING),
        CheckVerdict.of("no two trust one lease at once", len(beliefs), [str(each) for each in overlaps(beliefs)]),
        CheckVerdict.of(
            "objects are linearizable", len(notes), [str(each) for each in linear.check(notes, RegisterModel())]
        ),
        CheckVerdict.of(
            "no acknowledged change is lost",
            len(acknowledged),
            [f"{id} version {version} is not there" for id, version in set(acknowledged) - set(state.changes)],
        ),
        CheckVerdict.of(
            "watches skip nothing",
            sum(event.op == "watched" for event in events),
            list(_watch_violations(events, state)),
        ),
        CheckVerdict.of("relays skip nothing", len(set(relayed)), list(_relay_violations(relayed, state))),
        CheckVerdict.of(
            "the reconciler keeps records true",
            sum(event.op == "fault" for event in events),
            [f"{id} does not agree with the driver" for id in state.disagreeing]
            + [f"{id} was pruned, and its backend was there" for id in state.pruned],
        ),
        CheckVerdict.of("no worker crashes", len({event.worker for event in events}), list(state.crashed)),
    ]


def _with_right_clocks(events: Sequence[Event], ttl: float) -> Iterator[Event]:
    """The beliefs outside of clock faults. After a fault, grants of the wrong clock are trusted for up to a TTL."""
    faults = [event for event in events if event.op == "fault" and event.data["fault"] == "clock"]
    begins = [event.time for event in faults if event.data["phase"] == "begin"]
    ends = [event.time + ttl for event in faults if event.data["phase"] == "end"]
    spans = list(zip(begins, [*ends, *[float("inf")] * (len(begins) - len(ends))], strict=True))
    for event in events:
        if event.op == "believe" and not any(
            event.data["from"] < end and event.data["until"] > begin for begin, end in spans
        ):
            yield event


def _watched(events: Sequence[Event]) -> dict[str, list[Write]]:
    """What each watch returned, in order."""
    returned: dict[str, list[Write]] = {}
    for event in events:
        if event.op == "watched":
            returned.setdefault(event.worker, []).append((event.name, event.data["version"]))
    return returned


def _watch_violations(events: Sequence[Event], state: FinalState) -> Iterator[str]:
    """A watch that was told that its cursor has expired has listed the notes then. What it missed is in that list, or
    was replaced by what is."""
    for worker, returned in _watched(events).items():
        yield from (f"{worker} got {write} {times} times" for write, times in Counter(returned).items() if times > 1)
        yield from (f"{worker} got {write}, which was never committed" for write in set(returned) - set(state.changes))
        newest: dict[str, int] = {}
        for id, version in returned:
            if version < newest.get(id, 0):
                yield f"{worker} got {(id, version)} after version {newest[id]}"
            newest[id] = version
        if worker.removesuffix("-watch") in state.killed:
            continue
        listed: Counter[str] = Counter()
        for event in events:
            if event.worker == worker and event.op == "listed":
                listed |= Counter(event.data["versions"])
        missing = set(state.changes) - set(returned)
        yield from (f"{worker} did not get {write}" for write in sorted(missing) if write[1] > listed[write[0]])


def _missing(expected: Sequence[T], seen: Iterable[T]) -> list[T]:
    returned = set(seen)
    return [each for each in expected if each not in returned]


def _disorder(what: str, seen: Sequence[object], expected: Sequence[object]) -> Iterable[str]:
    """The first pair that is not in the order of ``expected``."""
    place = {each: number for number, each in enumerate(expected)}
    ordered = [each for each in seen if each in place]
    for before, after in pairwise(ordered):
        if place[before] > place[after]:
            return [f"{what} got {after} after {before}, against the order of the log"]
    return []


def _relay_violations(relayed: Sequence[str], state: FinalState) -> Iterator[str]:
    if state.parked:
        yield f"{state.parked} events are parked"
    yield from (f"event {id} was not relayed" for id in _missing(state.events, relayed))
    yield from (f"event {id} was relayed, and the log does not have it" for id in set(relayed) - set(state.events))
    yield from _disorder("the sink", list(dict.fromkeys(relayed)), state.events)
