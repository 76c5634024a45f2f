"""The report as one HTML file: verdicts, figures, and the timeline of faults and grants as SVG. It has no scripts and
no external resources, so that it can be mailed and archived."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from holdfast.testing.history import Event, read
from proof.chaos.scenario import Outcome

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a7d46; --bad: #c0392b; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem .9rem .15rem 0; vertical-align: top; }
td { border-top: 1px solid var(--line); } .number { text-align: right; font-variant-numeric: tabular-nums; }
.ok { color: var(--good); } .violated { color: var(--bad); font-weight: 600; }
.timeline { display: flex; border: 1px solid var(--line); } .moving { overflow-x: auto; flex: 1; }
svg { display: block; font: 11px system-ui, sans-serif; } pre { overflow-x: auto; }
svg text { fill: currentColor; } .row { stroke: var(--line); } .fault { fill: #d9822b; } rect:hover { opacity: .6; }
"""
_MEANING = {
    "C1": "one grant a fence",
    "C2": "fences rise a name, across failovers",
    "C3": "no write with an older fence after a takeover",
    "C4": "what was acknowledged is in the database, what failed is not",
    "C6": "acquire, renew and release are linearizable",
    "C7": "no two trust one lease at once, if no clock was changed",
    "C8": "after the faults everything can be acquired again in time",
    "C9": "nothing is left over",
    "C10": "gauges show what was held",
}
_LABELS, _ROW, _BAR = 130, 18, 12
"""Pixels: the width of the labels, the height of a row, and of a bar in it."""
_WIDEST, _CLOSEST = 6000, 24
"""Pixels: of a whole timeline, and of one second of a short one."""


class Bar(NamedTuple):
    row: str
    start: float
    end: float
    kind: str
    colour: str
    text: str


def document(title: str, chapters: Iterable[str]) -> str:
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"{head}<body><h1>{escape(title)}</h1>{''.join(chapters)}</body></html>\n"


def chapter(outcome: Outcome, paragraphs: Sequence[str]) -> str:
    parts = [f"<h2>{escape(outcome.lane)}</h2>", _verdicts(outcome)]
    parts += [f"<p>{escape(text)}.</p>" for text in paragraphs]
    parts += [f"<pre>{escape(outcome.error)}</pre>"] if outcome.error else []
    return "".join([*parts, _timeline(outcome)])


def _verdicts(outcome: Outcome) -> str:
    rows = []
    for verdict in outcome.report.verdicts if outcome.report else []:
        word = "violated" if verdict.violations else "ok" if verdict.counted else "nothing to count"
        more = "".join(f"<br>{escape(each)}" for each in verdict.violations[:20])
        rows.append(
            f"<tr><td>{verdict.check}<td>{_MEANING.get(verdict.check, '')}{more}"
            f'<td class="number">{verdict.counted}<td class="{word.partition(" ")[0]}">{word}'
        )
    return f"<table><tr><th><th>promise<th>counted<th>verdict{''.join(rows)}</table>"


def _timeline(outcome: Outcome) -> str:
    """The labels stay where they are while the rest moves."""
    events = read(outcome.folder)
    if not events:
        return ""
    began, ended = events[0].time, events[-1].time
    bars = [*_faults(events, ended), *_grants(events, ended)]
    rows = list(dict.fromkeys(bar.row for bar in sorted(bars, key=lambda bar: (bar.kind, bar.row))))
    scale = min(_CLOSEST, _WIDEST / max(1.0, ended - began))
    width, height = int((ended - began) * scale) + 40, (len(rows) + 2) * _ROW
    labels = [f'<text x="4" y="{(number + 1) * _ROW - 5}">{escape(row)}</text>' for number, row in enumerate(rows)]
    lines = [f'<line class="row" x1="0" x2="{width}" y1="{y}" y2="{y}"/>' for y in range(_ROW, height - _ROW, _ROW)]
    drawn = [_drawn(bar, rows.index(bar.row), began, scale) for bar in bars]
    every = 10 if scale > 10 else 60
    times = [
        f'<text x="{second * scale:.0f}" y="{height - 4}">{second} s</text>'
        for second in range(0, int(ended - began) + 1, every)
    ]
    about = f"faults and grants of lane {outcome.lane} over {ended - began:.0f} seconds"
    return (
        f'<div class="timeline"><svg width="{_LABELS}" height="{height}">{"".join(labels)}</svg><div class="moving">'
        f'<svg width="{width}" height="{height}" role="img" aria-label="{escape(about)}">'
        f"{''.join([*lines, *drawn, *times])}</svg></div></div>"
    )


def _drawn(bar: Bar, row: int, began: float, scale: float) -> str:
    x, width = (bar.start - began) * scale, max(1.5, (bar.end - bar.start) * scale)
    fill = f' fill="{bar.colour}"' if bar.colour else ""
    return (
        f'<rect class="{bar.kind}" x="{x:.1f}" y="{row * _ROW + 3}" width="{width:.1f}" height="{_BAR}"{fill}>'
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
    return Bar(kind, start, end, "fault", "", f"{kind}, {end - start:.2f} s")


def _grants(events: Iterable[Event], ended: float) -> list[Bar]:
    """From the acquire to the release, or to the next acquire."""
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
