"""Draws throughput over callers: a row for each database, a column for each call, both axes logarithmic."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, log10

from bench.measure import Result

WIDTH, HEIGHT, LEFT, TOP, GAP = 190, 150, 150, 44, 18
STYLE = """
  text { font-family: system-ui, sans-serif; fill: #1a2733 }
  .name { font-size: 13px; font-weight: 600 }
  .about { font-size: 10.5px; fill: #4a5a68 }
  .box { fill: #fff; stroke: #2c5d8f; stroke-width: .8 }
  .grid { stroke: #1a2733; stroke-opacity: .12 }
  .line { fill: none; stroke-width: 2 }
"""
LINES = {
    "tasks": ("#2c5d8f", ""),
    "threads": ("#2c5d8f", "5 3"),
    "replica": ("#2c5d8f", ""),
    "psycopg, pool of 8": ("#4f8a3c", ""),
    "redis.asyncio": ("#b23a48", ""),
    "DBOS": ("#d08320", ""),
}
"""Of each variant that is drawn: its colour and its dashes."""
RATE = re.compile(r"load, (.+), (fsync on|flush in 2 ms|SQLite)")
VARIANT = re.compile(r"(.+), (\d+) callers?(?:: (p50|p99))?")
"""Names in a Result: the call and the database; the variant, the number of callers, and the time of a single one."""

Points = dict[tuple[str, str, str], list[tuple[int, float]]]
"""By database, call and variant: callers and calls per second."""


def draw(results: Iterable[Result], calls: Sequence[str]) -> str:
    points = _points(results)
    stores = list(dict.fromkeys(store for store, _, _ in points))
    rates = [rate for line in points.values() for _, rate in line]
    low, high = floor(log10(min(rates))), ceil(log10(max(rates)))
    about = "Calls per second over the number of callers in one process"
    size = f"0 0 {LEFT + len(calls) * (WIDTH + GAP)} {TOP + len(stores) * (HEIGHT + 2 * GAP) + 24}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="{about}">',
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="#f7f9fb"/>',
        *(_text(LEFT + column * (WIDTH + GAP), TOP - 12, call, "name") for column, call in enumerate(calls)),
    ]
    for row, store in enumerate(stores):
        top = TOP + row * (HEIGHT + 2 * GAP)
        parts.append(_text(12, top + 12, store, "name"))
        for column, call in enumerate(calls):
            lines = {variant: line for (at, what, variant), line in points.items() if (at, what) == (store, call)}
            parts += _panel(LEFT + column * (WIDTH + GAP), top, lines, low, high, labelled=column == 0)
    parts += _legend(TOP + len(stores) * (HEIGHT + 2 * GAP) + 6, {variant for _, _, variant in points})
    return "\n".join([*parts, "</svg>\n"])


def _points(results: Iterable[Result]) -> Points:
    points: Points = {}
    for result in results:
        table, variant = RATE.fullmatch(result.benchmark), VARIANT.fullmatch(result.variant)
        if table and variant and variant[1] in LINES and variant[3] is None:
            points.setdefault((table[2], table[1], variant[1]), []).append((int(variant[2]), result.value))
    return points


def _panel(
    left: float, top: float, lines: dict[str, list[tuple[int, float]]], low: int, high: int, *, labelled: bool
) -> list[str]:
    def height(rate: float) -> float:
        return top + HEIGHT - (log10(rate) - low) / (high - low) * HEIGHT

    counts = sorted({callers for line in lines.values() for callers, _ in line})
    step = (WIDTH - 24) / max(1, len(counts) - 1)
    place = {callers: left + 12 + number * step for number, callers in enumerate(counts)}
    parts = [f'<rect class="box" x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}"/>']
    for power in range(low, high + 1):
        at = height(10**power)
        parts.append(f'<path class="grid" d="M{left} {at:.1f} h{WIDTH}"/>')
        if labelled and power > low:
            parts.append(_text(left - 6, at + 4, f"{10**power:,}", "about", anchor="end"))
    parts += [_text(x, top + HEIGHT + 12, str(callers), "about", anchor="middle") for callers, x in place.items()]
    for variant, line in reversed(lines.items()):  # ours on top
        colour, dashes = LINES[variant]
        path = " L".join(f"{place[callers]:.1f} {height(rate):.1f}" for callers, rate in line)
        parts.append(f'<path class="line" stroke="{colour}" stroke-dasharray="{dashes}" d="M{path}"/>')
        parts += [
            f'<circle cx="{place[callers]:.1f}" cy="{height(rate):.1f}" r="2.6" fill="{colour}">'
            f"<title>{escape(variant)}, {callers}: {rate:,.0f}/s</title></circle>"
            for callers, rate in line
        ]
    return parts


def _legend(y: float, drawn: set[str]) -> list[str]:
    names = {
        "tasks": "holdfast, tasks",
        "threads": "holdfast, threads",
        "psycopg, pool of 8": "by hand with psycopg, pool of 8",
        "redis.asyncio": "redis.asyncio (not durable)",
        "DBOS": "DBOS",
    }
    parts, x = [_text(12, y + 4, "calls/s over callers", "about")], float(LEFT)
    for variant, name in names.items():
        if variant in drawn:
            colour, dashes = LINES[variant]
            parts.append(f'<path class="line" stroke="{colour}" stroke-dasharray="{dashes}" d="M{x:.0f} {y} h26"/>')
            parts.append(_text(x + 32, y + 4, name, "about"))
            x += 62 + 6 * len(name)
    return parts


def _text(x: float, y: float, text: str, kind: str, *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
