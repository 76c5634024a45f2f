"""Who held which leases when: bars of a timeline, from live leases and ended grants, by a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.dashboard.stream import Panel

HOUR, DAY = 3600.0, 86400.0
WINDOWS = {"hour": HOUR, "day": DAY}
WIDTH = 1000
"""Of a row, in units of its drawing."""
MAX_TIMELINES = 12
LOST = ("expired", "session_lost", "forced")
_TICKS = 6
_SHORTEST = 3.0
"""A bar is drawn at least this wide, or a short grant could not be seen."""


def build_timeline(
    names: Sequence[str], leases: Iterable[Any], ended: Iterable[Any], at: float, window: float, *, is_cut: bool = False
) -> Panel:
    """The rows of ``names``, from ``window`` seconds ago until now. ``is_cut``: older grants exist that are not in
    ``ended``.

    The right edge moves by 1/120 of the window at a time, so the timeline stays equal in between.
    """
    step = window / 120
    end = (at // step + 1) * step
    start = end - window
    held = {lease.name: lease for lease in leases}
    by_name: dict[str, list[Any]] = {name: [] for name in names}
    oldest = end
    for grant in ended:
        oldest = min(oldest, grant.ended_at.timestamp())
        if grant.name in by_name and grant.ended_at.timestamp() > start:
            by_name[grant.name].append(grant)
    rows = []
    for name in names:
        bars = [_bar(grant, grant.ended_at.timestamp(), grant.outcome, start, end) for grant in reversed(by_name[name])]
        if name in held:
            bars.append(_bar(held[name], end, "held", start, end))
        for index, bar in enumerate(bars):
            bar["is_odd"] = index % 2 == 1
        summary = _summary(bars) if bars else ""
        bars.sort(key=lambda bar: bar["outcome"] in LOST)  # drawn last, a loss is not covered by the next grant
        if bars:
            rows.append({"name": name, "bars": bars, "summary": summary})
    ticks = [{"x": WIDTH * index / _TICKS, "at": start + window * index / _TICKS} for index in range(_TICKS + 1)]
    return {
        "rows": rows[:MAX_TIMELINES],
        "more": len(rows[MAX_TIMELINES:]),
        "ticks": ticks,
        "window": next((name for name, seconds in WINDOWS.items() if seconds == window), ""),
        "since": oldest if is_cut and oldest > start else None,
    }


def _bar(grant: Any, until: float, outcome: str, start: float, end: float) -> Panel:
    began = grant.acquired_at.timestamp()
    left = WIDTH * (max(began, start) - start) / (end - start)
    right = WIDTH * (min(until, end) - start) / (end - start)
    width = max(right - left, _SHORTEST)
    return {
        "x": round(min(left, WIDTH - width), 1), "width": round(width, 1), "outcome": outcome, "holder": grant.holder,
        "fence": grant.fence, "began": began, "ended": None if outcome == "held" else until,
        "by": f"{grant.actor}: {grant.reason}" if getattr(grant, "actor", None) else "",
    }  # fmt: skip


def _summary(bars: Sequence[Panel]) -> str:
    """What a reader of the page hears instead of the drawing."""
    lost = [bar["outcome"].replace("_", " ") for bar in bars if bar["outcome"] in LOST]
    ends = f"; ended as {', '.join(dict.fromkeys(lost))}" if lost else ""
    holders = list(dict.fromkeys(bar["holder"] for bar in bars))
    return f"{len(bars)} {'grant' if len(bars) == 1 else 'grants'}, {len(holders)} holders, last {holders[-1]}{ends}"
