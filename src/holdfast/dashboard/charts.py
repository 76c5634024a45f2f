"""Charts over time, as values: bars in units of their drawing, a scale, and a table, by pure functions.

Also the samples of who waited: the database keeps no record of a wait that is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from holdfast.dashboard.formats import format_clock, format_number, format_span
from holdfast.dashboard.stream import Panel
from holdfast.dashboard.timeline import DAY, WIDTH

HEIGHT = 120
SAMPLE_EVERY = 10.0
_TICKS = 6
_GAP = 0.15
"""Between two bars, of the width of a bucket."""
_SLOT = "@slot:"
_STANDBYS = ("elector", "relay")
"""The kinds of leases that standbys wait for as long as all is well."""


class ChartSpan(NamedTuple):
    """``buckets`` of ``step`` seconds from ``start`` on."""

    start: float
    step: float
    buckets: int


class ChartSeries(NamedTuple):
    name: str
    tone: str
    """The CSS class of its bars."""
    values: Mapping[int, float]
    """By bucket, from 0 on."""


def build_chart(
    title: str, series: Sequence[ChartSeries], span: ChartSpan, *, unit: Literal["number", "seconds"] = "number",
    total: Literal["sum", "most"] = "sum", empty: str, note: str, complete: float | None = None,
) -> Panel:  # fmt: skip
    """Stacked bars. ``total``: of the values of a series, for its key. ``complete``: since when all that is counted is
    known, if that is later than the start."""
    write = format_number if unit == "number" else _seconds
    sums = {
        bucket: sum(each.values.get(bucket, 0.0) for each in series)
        for bucket in sorted({bucket for each in series for bucket in each.values})
        if 0 <= bucket < span.buckets
    }
    top = _ceiling(max(sums.values(), default=0.0))
    width = WIDTH / span.buckets
    bars = []
    for bucket in sums:
        height = 0.0
        for each in series:
            if value := each.values.get(bucket, 0.0):
                part = HEIGHT * value / top
                height += part
                bars.append({
                    "x": round((bucket + _GAP / 2) * width, 1), "width": round((1 - _GAP) * width, 1),
                    "y": round(HEIGHT - height, 1), "height": round(part, 1), "tone": each.tone,
                    "title": f"{_clock(span, bucket)} UTC: {write(value)} {each.name}",
                })  # fmt: skip
    keys = [{"name": each.name, "tone": each.tone, "total": write(_total(each, span, total))} for each in series]
    return {
        "kind": "chart", "title": title, "keys": keys, "bars": bars, "scale": [write(top), write(top / 2), write(0)],
        "ticks": [span.start + span.step * span.buckets * index / _TICKS for index in range(_TICKS + 1)],
        "summary": _summary(title, keys, sums, span, write) if sums else "",
        "rows": [
            (span.start + bucket * span.step, [write(each.values.get(bucket, 0.0)) for each in series])
            for bucket in sums
        ],
        "empty": "" if sums else empty, "note": note,
        "since": complete if complete is not None and complete > span.start else None,
    }  # fmt: skip


def _total(series: ChartSeries, span: ChartSpan, total: str) -> float:
    values = [value for bucket, value in series.values.items() if 0 <= bucket < span.buckets]
    return sum(values) if total == "sum" else max(values, default=0.0)


def _summary(
    title: str, keys: Sequence[Mapping[str, str]], sums: Mapping[int, float], span: ChartSpan, write: Any
) -> str:
    """What a reader of the page hears instead of the drawing."""
    highest = max(sums, key=lambda bucket: sums[bucket])
    totals = ", ".join(f"{key['total']} {key['name']}" for key in keys)
    return f"{title}: {totals}; the most, {write(sums[highest])}, at {_clock(span, highest)} UTC"


def _clock(span: ChartSpan, bucket: int) -> str:
    return format_clock(span.start + bucket * span.step, "%H:%M")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if 0 < value < 10 else format_span(value)


def _ceiling(value: float) -> float:
    """The next of 2, 4, 6, 10, 20, 40 …: half of it is on the scale, too."""
    step = 1.0
    while True:
        for factor in (2, 4, 6, 10):
            if value <= factor * step:
                return factor * step
        step *= 10


class WaitSamples:
    """How many requests waited, as far as this process has seen; the last day of it."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=int(DAY / SAMPLE_EVERY))

    def add(self, at: float, leases: Iterable[Any], locks: Iterable[Any]) -> None:
        """Of the samples of ten seconds the one with the most is kept."""
        sample = at, _waiting_for_leases(leases), _waiting_for_locks(locks)
        if self._samples and 0 <= at - self._samples[-1][0] < SAMPLE_EVERY:
            last = self._samples[-1]
            self._samples[-1] = (last[0], *max(sample[1:], last[1:], key=sum))
        else:
            self._samples.append(sample)

    @property
    def since(self) -> float | None:
        return self._samples[0][0] if self._samples else None

    def series(self, span: ChartSpan) -> list[ChartSeries]:
        """The sample with the most waits of each bucket."""
        most: dict[int, tuple[int, int]] = {}
        for at, *waits in self._samples:
            bucket = int((at - span.start) // span.step)
            if 0 <= bucket < span.buckets and any(waits):
                most[bucket] = max(most.get(bucket, (0, 0)), (waits[0], waits[1]), key=sum)
        names = (("for leases", "moving"), ("for locks", "poor"))
        return [
            ChartSeries(name, tone, {bucket: waits[index] for bucket, waits in most.items()})
            for index, (name, tone) in enumerate(names)
        ]


def _waiting_for_leases(leases: Iterable[Any]) -> int:
    """Those who want a slot wait for any of its pool, and are counted with each of its leases."""
    waiting: dict[str, int] = {}
    for lease in leases:
        if lease.waiting and lease.kind not in _STANDBYS:
            name = lease.name.rpartition(":")[0] if lease.name.startswith(_SLOT) else lease.name
            waiting[name] = max(waiting.get(name, 0), lease.waiting)
    return sum(waiting.values())


def _waiting_for_locks(locks: Iterable[Any]) -> int:
    """All records of a lock have the same number."""
    return sum({lock.label: lock.waiting for lock in locks}.values())
