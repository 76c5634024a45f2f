"""C10, the promise of gauges: what a process says that it holds is what its history says."""

from collections import defaultdict

from holdfast.testing.checker.checks import History, Verdict
from holdfast.testing.history import Event, Operation

Grant = tuple[str, int | None]


def gauges_are_true(history: History) -> Verdict:
    """A reading lies between what was certainly held all the while and what may have been held at some time of it:
    from when it was asked for, until it was given back or its loss was told. Of leases that are renewed by themselves:
    the others nobody counts."""
    asked: dict[str, list[Operation]] = defaultdict(list)
    for each in history.operations:
        if each.op == "acquire" and each.data.get("kept"):
            asked[each.worker].append(each)
    ended = {_grant(each): each.completed for each in history.operations if each.op == "release"}
    for event in history.told("lost"):
        ended[event.name, event.fence] = min(event.time, ended.get((event.name, event.fence), event.time))
    believed: dict[Grant, list[Event]] = defaultdict(list)
    for event in history.told("believe"):
        if event.data.get("sure"):
            believed[event.name, event.fence].append(event)
    readings, violations = history.told("gauge"), []
    for reading in readings:
        start, end = reading.data["since"], reading.data["until"]
        least = most = 0
        for worker in reading.data["workers"]:
            for each in asked[worker]:
                over = each.completed if each.outcome == "fail" else ended.get(_grant(each), float("inf"))
                most += each.invoked <= end and over >= start
                spans = believed[_grant(each)] if each.outcome == "ok" else ()
                least += any(span.data["from"] <= start and end <= span.data["until"] for span in spans)
        if not least <= reading.data["value"] <= most:
            violations.append(
                f"{reading.worker} said at {reading.time:.6f} that it held {reading.data['value']}, and held "
                f"{least if least == most else f'{least} to {most}'}"
            )
    return Verdict.of("C10", len(readings), violations)


def _grant(operation: Operation) -> Grant:
    return operation.name, operation.fence
