"""What came of a run: its figures, as text, as JSON, and as a page."""

import json
from itertools import pairwise
from typing import Any, NamedTuple

from holdfast.testing.chaos import page
from holdfast.testing.chaos.lane import Outcome
from holdfast.testing.history import read


class Run(NamedTuple):
    seed: int
    minutes: float
    commit: str
    outcomes: list[Outcome]


def as_text(run: Run) -> str:
    lines = [f"seed {run.seed}, {run.minutes:g} minutes, commit {run.commit}"]
    for outcome in run.outcomes:
        figures = figures_of(outcome)
        lines.append(
            f"\n{outcome.lane}: {'ok' if outcome.report.ok else 'NOT OK'}   {sum(outcome.faults.values())} faults, "
            f"{outcome.processes} processes, {figures['grants']} grants, {figures['takeovers']} takeovers, "
            f"{figures['failovers']} failovers, longest gap {figures['gap']:.1f} s, "
            f"overlap of belief {figures['overlap']['total']:.3f} s"
        )
        lines += [f"  {verdict}" for verdict in outcome.report.verdicts]
        lines += [f"    {each}" for verdict in outcome.report.verdicts for each in verdict.violations[:10]]
        lines.append("  " + ", ".join(f"{kind} {count}" for kind, count in sorted(outcome.faults.items())))
    return "\n".join(lines) + "\n"


def as_json(run: Run) -> str:
    lanes = [
        {
            "lane": outcome.lane,
            "ok": outcome.report.ok,
            "folder": str(outcome.folder),
            "processes": outcome.processes,
            "faults": dict(sorted(outcome.faults.items())),
            "verdicts": [verdict._asdict() for verdict in outcome.report.verdicts],
            "figures": figures_of(outcome),
        }
        for outcome in run.outcomes
    ]
    return json.dumps({"seed": run.seed, "minutes": run.minutes, "commit": run.commit, "lanes": lanes}, indent=2) + "\n"


def figures_of(outcome: Outcome) -> dict[str, Any]:
    figures = dict(outcome.report.figures)
    events = read(outcome.folder)
    done = [event.time for event in events if event.kind == "ok" and event.op == "write"]
    figures["grants"] = sum(event.kind == "ok" and event.op == "acquire" for event in events)
    figures["takeovers"] = figures["grants"] - sum(event.kind == "ok" and event.op == "release" for event in events)
    figures["failovers"] = outcome.faults["failover"]
    figures["gap"] = max((after - before for before, after in pairwise(done)), default=0.0)
    return figures


def as_html(run: Run) -> str:
    title = f"holdfast under fire: {run.minutes:g} minutes, seed {run.seed}, commit {run.commit}"
    return page.as_html(title, run.outcomes, [figures_of(outcome) for outcome in run.outcomes])
