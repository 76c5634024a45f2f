"""The report of a cluster run: as text, as JSON, and as a picture of how long writes paused."""

import json
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from holdfast.testing.checker.checks import CheckVerdict
from proof.cluster.run import KINDS, FaultRecord

_LABELS, _WIDTH, _ROW, _TOP = 170, 560, 44, 64
"""Pixels: the width of the labels and of the scale, the height of a row, and of the title."""
_STYLE = """
  text { font-family: system-ui, sans-serif; font-size: 13px; fill: #1a2733 }
  .title { font-size: 15px; font-weight: 600 }
  .about { font-size: 11px; fill: #4a5a68 }
  .line { stroke: #c9d3dc }
  .leader { fill: none; stroke: #b36b00; stroke-opacity: .7 }
  .pause { fill: #2c5d8f; fill-opacity: .55 }
  .median { stroke: #1a2733; stroke-width: 2 }
"""


class ClusterReport(NamedTuple):
    seed: int
    commit: str
    seconds: float
    faults: Sequence[FaultRecord]
    verdicts: Sequence[CheckVerdict]
    standstill: dict[str, Any]
    expired: int
    """How often a watch was told that its cursor has expired, and listed the objects."""
    skipped: Sequence[str]
    """Why some kinds of faults were not caused."""

    @property
    def status(self) -> int:
        """The exit status: 0 every check is ok, 1 one was violated, 3 a check had nothing to count."""
        if any(verdict.violations for verdict in self.verdicts):
            return 1
        return 0 if all(verdict.ok for verdict in self.verdicts) else 3


def as_text(report: ClusterReport) -> str:
    lines = [
        f"seed {report.seed}, commit {report.commit}: {len(report.faults)} faults in {report.seconds:.0f} s",
        "the machine stood still for {total:.1f} s, {longest:.1f} s at the longest".format(**report.standstill),
        f"{report.expired} cursors of watches expired",
        *report.skipped,
        "",
        *_table(report.faults),
        "",
    ]
    for verdict in report.verdicts:
        lines.append(str(verdict))
        lines += [f"    {each}" for each in verdict.violations[:10]]
    return "\n".join(lines) + "\n"


def as_json(report: ClusterReport) -> str:
    document = {
        "seed": report.seed,
        "commit": report.commit,
        "seconds": round(report.seconds, 1),
        "standstill": report.standstill,
        "expired": report.expired,
        "skipped": list(report.skipped),
        "summary": {kind: summary(kind, report.faults) for kind in _kinds(report.faults)},
        "verdicts": [verdict._asdict() for verdict in report.verdicts],
        "faults": [fault._asdict() for fault in report.faults],
    }
    return json.dumps(document, indent=2) + "\n"


def summary(kind: str, faults: Sequence[FaultRecord]) -> dict[str, Any]:
    """Count, and median and maximum of both times; None where no other node ever led."""
    chosen = [fault for fault in faults if fault.kind == kind]
    leaders = [fault.new_leader for fault in chosen if fault.new_leader is not None]
    return {
        "faults": len(chosen),
        "new_leader": _median_and_longest(leaders),
        "pause": _median_and_longest([fault.pause for fault in chosen]),
    }


def as_svg(report: ClusterReport) -> str:
    """Each fault a dot: how long no write was acknowledged, and when another node led."""
    kinds = _kinds(report.faults)
    longest = max((max(fault.pause, fault.new_leader or 0.0) for fault in report.faults), default=0.0)
    every = next((step for step in (1, 2, 5, 10, 20, 60) if longest / step <= 8), 120)
    most = every * (int(longest / every) + 1)
    height = _TOP + len(kinds) * _ROW + 40

    def x(seconds: float) -> float:
        return _LABELS + seconds / most * _WIDTH

    title = f"{len(report.faults)} faults of the leader"
    about = f"{title}: seconds without an acknowledged write, by kind of fault"
    box = f"0 0 {_LABELS + _WIDTH + 30} {height}"
    key = "filled: longest time without an acknowledged write; line: its median; ring: time until another node led"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" aria-label="{escape(about)}">',
        f'<style>{_STYLE}</style>\n<rect width="100%" height="100%" fill="#f7f9fb"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        f'<text class="about" x="16" y="44">{key}</text>',
    ]
    for seconds in range(0, most + 1, every):
        parts.append(f'<line class="line" x1="{x(seconds):.0f}" x2="{x(seconds):.0f}" y1="{_TOP}" y2="{height - 32}"/>')
        parts.append(
            f'<text class="about" x="{x(seconds):.0f}" y="{height - 14}" text-anchor="middle">{seconds} s</text>'
        )
    for row, kind in enumerate(kinds):
        parts += _row(kind, [fault for fault in report.faults if fault.kind == kind], _TOP + row * _ROW + _ROW // 2, x)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(kind: str, faults: Sequence[FaultRecord], middle: int, x: Any) -> list[str]:
    parts = [f'<text x="16" y="{middle + 5}">{kind} ({len(faults)})</text>']
    for number, fault in enumerate(faults):
        y = middle + (number * 7) % 19 - 9  # spread, so that equal times stay visible
        about = escape(f"{fault.kind}, {fault.detail}: writes paused {fault.pause:.1f} s")
        if fault.new_leader is not None:
            parts.append(f'<circle class="leader" cx="{x(fault.new_leader):.1f}" cy="{y}" r="4"/>')
        parts.append(f'<circle class="pause" cx="{x(fault.pause):.1f}" cy="{y}" r="4"><title>{about}</title></circle>')
    median = x(statistics.median(fault.pause for fault in faults))
    parts.append(f'<line class="median" x1="{median:.1f}" x2="{median:.1f}" y1="{middle - 15}" y2="{middle + 15}"/>')
    return parts


def _table(faults: Sequence[FaultRecord]) -> list[str]:
    lines = [
        f"{'fault':<12}{'times':>6}   {'new leader, s':>15}   {'no write, s':>15}",
        f"{'':<12}{'':>6}   {'p50':>7}{'max':>8}   {'p50':>7}{'max':>8}",
    ]
    for kind in _kinds(faults):
        row = summary(kind, faults)
        leader, pause = row["new_leader"] or ("-", "-"), row["pause"]
        lines.append(f"{kind:<12}{row['faults']:>6}   {leader[0]:>7}{leader[1]:>8}   {pause[0]:>7}{pause[1]:>8}")
    return lines


def _kinds(faults: Sequence[FaultRecord]) -> list[str]:
    return [kind for kind in KINDS if any(fault.kind == kind for fault in faults)]


def _median_and_longest(times: Sequence[float]) -> tuple[float, float] | None:
    return (round(statistics.median(times), 1), round(max(times), 1)) if times else None
