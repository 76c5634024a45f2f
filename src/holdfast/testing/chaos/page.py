"""The report as one HTML file: verdicts, figures, and the timeline of faults and grants as SVG. No script, and nothing
from elsewhere, so that it can be mailed and read in ten years."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from holdfast.testing.chaos.lane import Outcome
from holdfast.testing.history import Event, read

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a7d46; --bad: #c0392b; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem .9rem .15rem 0; vertical-align: top; }
td { border-top: 1px solid var(--line); } .number { text-align: right; font-variant-numeric: tabular-nums; }
.ok { color: var(--good); } .violated { color: var(--bad); font-weight: 600; }
.timeline { overflow-x: auto; border: 1px solid var(--line); } svg { display: block; font: 11px system-ui, sans-serif; }
svg text { fill: currentColor; } .row { stroke: var(--line); } .fault { fill: #d9822b; } rect:hover { opacity: .6; }
"""
_MEANING = {
    "C1": "one grant a fence",
    "C2": "fences rise a name, across timelines",
    "C3": "no write with an older fence after a takeover",
    "C4": "what was acknowledged is in the database, what failed is not",
    "C6": "acquire, renew and release are linearizable",
    "C7": "no two believe in one lease at once, where clocks are sane",
    "C8": "after the faults everything can be had again in time",
    "C9": "nothing is left over",
}
_LEFT, _HEIGHT, _BAR, _SCALE = 150, 18, 12, 24
"""Pixels: of the labels, of a row, of a bar in it, and of a second."""


class Bar(NamedTuple):
    row: str
    start: float
    end: float
    kind: str
    colour: str
    text: str


def as_html(title: str, outcomes: Sequence[Outcome], figures: Sequence[dict[str, Any]]) -> str:
    parts = [f"<h1>{escape(title)}</h1>"]
    for outcome, known in zip(outcomes, figures, strict=True):
        parts += [f"<h2>{escape(outcome.lane)}</h2>", _verdicts(outcome), _figures(known, outcome), _timeline(outcome)]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _verdicts(outcome: Outcome) -> str:
    rows = []
    for verdict in outcome.report.verdicts:
        word = "violated" if verdict.violations else "ok" if verdict.counted else "nothing to count"
        more = "".join(f"<br>{escape(each)}" for each in verdict.violations[:20])
        rows.append(
            f"<tr><td>{verdict.check}<td>{_MEANING.get(verdict.check, '')}{more}"
            f'<td class="number">{verdict.counted}<td class="{word.split(maxsplit=1)[0]}">{word}'
        )
    return f"<table><tr><th><th>promise<th>counted<th>verdict{''.join(rows)}</table>"


def _figures(known: dict[str, Any], outcome: Outcome) -> str:
    faults = ", ".join(f"{escape(kind)} {count}" for kind, count in sorted(outcome.faults.items()))
    return (
        f"<p>{known['seconds']:.0f} seconds, {outcome.processes} processes, {known['grants']} grants, "
        f"{known['takeovers']} of them taken over or lost, {known['failovers']} failovers; the longest time without a "
        f"write {known['gap']:.1f} s; two believed at once for {known['overlap']['total']:.3f} s in all.</p>"
        f"<p>{sum(outcome.faults.values())} faults: {faults}.</p>"
    )


def _timeline(outcome: Outcome) -> str:
    events = read(outcome.folder)
    began, ended = events[0].time, events[-1].time
    bars = [*_faults(events, ended), *_grants(events, ended)]
    rows = list(dict.fromkeys(bar.row for bar in sorted(bars, key=lambda bar: (bar.kind, bar.row))))
    width, height = _LEFT + int((ended - began) * _SCALE) + 20, (len(rows) + 2) * _HEIGHT
    drawn = [_row(number, row, width) for number, row in enumerate(rows)]
    drawn += [_drawn(bar, rows.index(bar.row), began) for bar in bars]
    drawn += [
        f'<text x="{_LEFT + second * _SCALE}" y="{height - 4}">{second} s</text>'
        for second in range(0, int(ended - began) + 1, 10)
    ]
    picture = f'<svg width="{width}" height="{height}" role="img">{"".join(drawn)}</svg>'
    return f'<div class="timeline">{picture}</div>'


def _row(number: int, label: str, width: int) -> str:
    y = (number + 1) * _HEIGHT
    return f'<text x="4" y="{y - 5}">{escape(label)}</text><line class="row" x1="0" x2="{width}" y1="{y}" y2="{y}"/>'


def _drawn(bar: Bar, row: int, began: float) -> str:
    x, width = _LEFT + (bar.start - began) * _SCALE, max(1.5, (bar.end - bar.start) * _SCALE)
    fill = f' fill="{bar.colour}"' if bar.colour else ""
    return (
        f'<rect class="{bar.kind}" x="{x:.1f}" y="{row * _HEIGHT + 3}" width="{width:.1f}" height="{_BAR}"{fill}>'
        f"<title>{escape(bar.text)}</title></rect>"
    )


def _faults(events: Iterable[Event], ended: float) -> list[Bar]:
    begun: dict[str, list[float]] = {}
    bars = []
    for event in events:
        if event.op != "fault":
            continue
        kind = event.data["fault"]
        if event.data["phase"] == "begin":
            begun.setdefault(kind, []).append(event.time)
        elif begun.get(kind):
            bars.append(_fault(kind, begun[kind].pop(0), event.time))
    return bars + [_fault(kind, start, ended) for kind, starts in begun.items() for start in starts]


def _fault(kind: str, start: float, end: float) -> Bar:
    return Bar(kind.split(maxsplit=1)[0], start, end, "fault", "", f"{kind}, {end - start:.2f} s")


def _grants(events: Iterable[Event], ended: float) -> list[Bar]:
    """From the acquire to the release, or to whoever has it next."""
    held: dict[str, Event] = {}
    bars = []
    for event in events:
        if event.kind != "ok" or event.op not in ("acquire", "release"):
            continue
        if (before := held.pop(event.name, None)) is not None:
            bars.append(_grant(before, event.time, "released" if event.op == "release" else "taken over"))
        if event.op == "acquire":
            held[event.name] = event
    return bars + [_grant(event, ended, "to the end") for event in held.values()]


def _grant(event: Event, end: float, how: str) -> Bar:
    colour = f"hsl({_hue(event.worker)} 55% 50%)"
    text = f"{event.name}: {event.worker}, fence {event.fence}, {end - event.time:.2f} s, {how}"
    return Bar(f"lease {event.name}", event.time, end, "grant", colour, text)


def _hue(worker: str) -> int:
    """A hue for each worker, the same in every report."""
    return sum(ord(character) * (number * 37 + 11) for number, character in enumerate(worker)) % 360
