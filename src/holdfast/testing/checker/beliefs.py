"""How long two workers believed in the same lease at once."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from holdfast.testing.history import Event, span

Believer = tuple[str, int | None]


class Overlap(NamedTuple):
    """Of one name: the seconds in which more than one grant was believed in, and the longest stretch of them."""

    name: str
    total: float
    longest: float
    start: float
    end: float
    believers: frozenset[Believer]
    """Who they were in the longest stretch, as worker and fence."""

    def __str__(self) -> str:
        who = " and ".join(f"{worker} (fence {fence})" for worker, fence in sorted(self.believers, key=str))
        return (
            f"{self.name!r} was believed in by {who} at {span(self.start, self.end)}: "
            f"{self.longest:.6f} s, in all {self.total:.6f} s"
        )


def overlaps(beliefs: Iterable[Event]) -> list[Overlap]:
    """The names that were believed in by two at once. A grant that is believed in by one worker in many spans, each
    renewal telling its own, is one believer; the same grant in two workers is two."""
    edges: dict[str, list[tuple[float, int, Believer]]] = defaultdict(list)
    for event in beliefs:
        start, end = event.data["from"], event.data["until"]
        if start < end:
            edges[event.name] += [(start, 1, (event.worker, event.fence)), (end, -1, (event.worker, event.fence))]
    return [found for name, each in sorted(edges.items()) if (found := _swept(name, sorted(each, key=_order)))]


def _order(edge: tuple[float, int, Believer]) -> tuple[float, int]:
    return edge[0], edge[1]  # who ends at an instant has ended before somebody else begins


def _swept(name: str, edges: list[tuple[float, int, Believer]]) -> Overlap | None:
    depth: dict[Believer, int] = defaultdict(int)
    stretches: list[tuple[float, float, frozenset[Believer]]] = []
    since, together = 0.0, frozenset[Believer]()
    for time, change, believer in edges:
        depth[believer] += change
        if not depth[believer]:
            del depth[believer]
        if len(depth) > 1:
            since, together = (since, together | depth.keys()) if together else (time, frozenset(depth))
        elif together:
            stretches.append((since, time, together))
            together = frozenset()
    stretches = [each for each in stretches if each[0] < each[1]]
    if not stretches:
        return None
    start, end, who = max(stretches, key=lambda each: each[1] - each[0])
    return Overlap(name, sum(each[1] - each[0] for each in stretches), end - start, start, end, who)
