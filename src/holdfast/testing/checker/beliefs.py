"""How long two workers trusted grants of the same lease at once."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from holdfast.testing.history import Event, span

Believer = tuple[str, int | None]
"""Worker and fence."""
Edge = tuple[float, int, Believer]
"""A time at which a believer begins (+1) or ends (-1) to trust its grant."""


class Overlap(NamedTuple):
    """Of one name: the seconds in which more than one grant was trusted, and the longest interval of them."""

    name: str
    total: float
    longest: float
    start: float
    end: float
    believers: frozenset[Believer]
    """Those of the longest interval."""

    def __str__(self) -> str:
        believers = " and ".join(f"{worker} (fence {fence})" for worker, fence in sorted(self.believers, key=str))
        return (
            f"{self.name!r} was believed in by {believers} at {span(self.start, self.end)}: "
            f"{self.longest:.6f} s, in all {self.total:.6f} s"
        )


def overlaps(beliefs: Iterable[Event]) -> list[Overlap]:
    """The names that two believers trusted at once.

    A worker with one grant is one believer, even if it reported several intervals, one for each renewal. The same grant
    in two workers is two believers.
    """
    edges: dict[str, list[Edge]] = defaultdict(list)
    for event in beliefs:
        start, end = event.data["from"], event.data["until"]
        if start < end:
            edges[event.name] += [(start, 1, (event.worker, event.fence)), (end, -1, (event.worker, event.fence))]
    candidates = (_sweep(name, sorted(edges[name], key=_order)) for name in sorted(edges))
    return [overlap for overlap in candidates if overlap is not None]


def _order(edge: Edge) -> tuple[float, int]:
    return edge[0], edge[1]  # at the same time, ends come before beginnings


def _sweep(name: str, edges: list[Edge]) -> Overlap | None:
    depth: dict[Believer, int] = defaultdict(int)
    intervals: list[tuple[float, float, frozenset[Believer]]] = []
    since, together = 0.0, frozenset[Believer]()
    for time, change, believer in edges:
        depth[believer] += change
        if not depth[believer]:
            del depth[believer]
        if len(depth) > 1:
            since, together = (since, together | depth.keys()) if together else (time, frozenset(depth))
        elif together:
            intervals.append((since, time, together))
            together = frozenset()
    intervals = [interval for interval in intervals if interval[0] < interval[1]]
    if not intervals:
        return None
    start, end, believers = max(intervals, key=lambda interval: interval[1] - interval[0])
    total = sum(interval[1] - interval[0] for interval in intervals)
    return Overlap(name, total, end - start, start, end, believers)
