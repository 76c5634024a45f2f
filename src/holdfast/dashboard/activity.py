"""The page of charts: acquisitions, losses, waits, operations by outcome and lateness of schedules, over time.

The database groups the rows that it has by time: nothing is stored for the charts. Only waits are sampled, by this
process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.dashboard.charts import ChartSeries, ChartSpan, build_chart
from holdfast.dashboard.snapshot import database_time, without_standbys
from holdfast.dashboard.source import PageSource
from holdfast.dashboard.stream import PageView

SHAPES = {"hour": (60.0, 60), "day": (1800.0, 48)}
"""Seconds of a bucket and how many there are, by window."""
MAX_OPERATIONS = 50_000
"""Operations that are counted, the latest ones."""
_OUTCOMES = (
    ("success", "success", "good"), ("failure", "failure", "poor"), ("undone", "undone", "gone"),
    ("partial", "running or interrupted", "bad"),
)  # fmt: skip
_LOSSES = (("expired", "expired", "bad"), ("session_lost", "session lost", "faint"), ("forced", "forced", "poor"))
Rows = Sequence[Mapping[str, Any]]


async def sample_waits(source: PageSource) -> None:
    leases, locks = await asyncio.gather(source.call(source.client.leases.list), source.rows(source.client.locks.list))
    source.waits.add(database_time(leases), leases, without_standbys(locks))


async def charts_page(source: PageSource, query: Mapping[str, str]) -> PageView:
    window = query.get("window", "")
    window = window if window in SHAPES else "hour"
    step, buckets = SHAPES[window]
    read = source.client._activity
    leases, operations, schedules, _ = await asyncio.gather(
        source.rows(read, "lease", step, buckets),
        source.rows(read, "operation", step, buckets, max_rows=MAX_OPERATIONS),
        source.rows(read, "schedule", step, buckets),
        sample_waits(source),
    )
    here = ChartSpan((time.time() // step + 1 - buckets) * step, step, buckets)
    spans = [_span(rows, here) for rows in (leases, operations, schedules)]
    since = source.waits.since
    windows = [(name, f"last {name}", name == window) for name in SHAPES]
    losses = [ChartSeries(name, tone, _values(leases, kind)) for kind, name, tone in _LOSSES]
    outcomes = [ChartSeries(name, tone, _values(operations, kind)) for kind, name, tone in _OUTCOMES]
    panels = {
        "window": {"kind": "windows", "rows": windows, "href": "/charts"},
        "acquisitions": build_chart(
            "Acquisitions of leases", [ChartSeries("acquired", "good", _values(leases, "acquired"))], spans[0],
            empty="No lease was acquired.", note="Each grant of a lease, of a slot and of a leader.",
            complete=_complete(leases),
        ),
        "losses": build_chart(
            "Losses of leases", losses, spans[0], empty="No lease was lost.",
            note="Forced: an operator took it away.", complete=_complete(leases),
        ),
        "waits": build_chart(
            "Waits", source.waits.series(spans[0]), spans[0], total="most", empty="No request has waited.",
            note="The most requests that waited at a time, without standbys. Sampled by this process.", complete=since,
        ),
        "outcomes": build_chart(
            "Operations by outcome", outcomes, spans[1], empty="No operation has run.",
            note="Each operation once, when it changed last.", complete=_complete(operations),
        ),
        "lateness": build_chart(
            "Lateness of schedules", [ChartSeries("the latest", "moving", _values(schedules, "late"))], spans[2],
            unit="seconds", total="most", empty="No slot of a schedule has begun.",
            note="From the slot to its first start; of each schedule about the last 1000 slots are kept.",
        ),
    }  # fmt: skip
    return PageView("Charts", time.time(), panels)


def _span(rows: Rows, default: ChartSpan) -> ChartSpan:
    """The start as the database's clock has it."""
    return next((default._replace(start=row["value"]) for row in rows if row["kind"] == "start"), default)


def _values(rows: Rows, kind: str) -> dict[int, float]:
    return {row["bucket"]: max(0.0, row["value"]) for row in rows if row["kind"] == kind and row["bucket"] is not None}


def _complete(rows: Rows) -> float | None:
    return next((row["value"] for row in rows if row["kind"] == "complete"), None)
