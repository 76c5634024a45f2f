"""The report of a run as text, as JSON and as HTML."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from holdfast.testing.history import read, read_database
from proof.chaos import html_report
from proof.chaos.scenario import Outcome


class Run(NamedTuple):
    seed: int
    minutes: float
    commit: str
    outcomes: list[Outcome]


def status(outcomes: Sequence[Outcome]) -> int:
    """The exit status: 0 every check is ok, 1 one was violated, 3 a scenario failed or a check had nothing to count."""
    if any(outcome.report and outcome.report.violated for outcome in outcomes):
        return 1
    return 0 if all(outcome.ok for outcome in outcomes) else 3


def as_text(run: Run) -> str:
    lines = [f"seed {run.seed}, {run.minutes:g} minutes, commit {run.commit}"]
    for outcome in run.outcomes:
        lines.append(f"\n{outcome.lane}: {'ok' if outcome.ok else 'NOT OK'}   {summary(outcome)}")
        if outcome.report is not None:
            lines += [f"  {verdict}" for verdict in outcome.report.verdicts]
            lines += [f"    {each}" for verdict in outcome.report.verdicts for each in verdict.violations[:10]]
        lines += [f"  {name}: {listed(counts)}" for name, counts in _counts(outcome).items() if counts]
        lines += [f"  {line}" for line in outcome.error.splitlines()]
    return "\n".join(lines) + "\n"


def summary(outcome: Outcome) -> str:
    if outcome.report is None:
        return "could not run to its end"
    figures = figures_of(outcome)
    standstill = figures["standstill"]
    return (
        f"{figures['seconds']:.0f} s, {sum(outcome.faults.values())} faults, {outcome.processes} processes, "
        f"{figures['grants']} grants, {figures['takeovers']} taken over, {figures['failovers']} failovers, longest "
        f"time without a write {figures['gap']:.1f} s, two believed at once for {figures['overlap']['total']:.3f} s, "
        f"the machine stood still for {standstill['total']:.1f} s, {standstill['longest']:.1f} s at the longest"
    )


def as_json(run: Run) -> str:
    lanes = [
        {
            "lane": outcome.lane,
            "ok": outcome.ok,
            "error": outcome.error,
            "folder": str(outcome.folder),
            "processes": outcome.processes,
            "faults": dict(sorted(outcome.faults.items())),
            "failpoints": dict(sorted(outcome.failpoints.items())),
            "verdicts": [each._asdict() | {"vacuous": each.vacuous} for each in outcome.report.verdicts],
            "figures": figures_of(outcome),
        }
        if outcome.report is not None
        else {"lane": outcome.lane, "ok": False, "error": outcome.error, "folder": str(outcome.folder)}
        for outcome in run.outcomes
    ]
    return json.dumps({"seed": run.seed, "minutes": run.minutes, "commit": run.commit, "lanes": lanes}, indent=2) + "\n"


def as_html(run: Run) -> str:
    title = f"holdfast under fire: {run.minutes:g} minutes, seed {run.seed}, commit {run.commit}"
    chapters = [
        html_report.chapter(
            outcome,
            [summary(outcome), *(f"{name}: {listed(counts)}" for name, counts in _counts(outcome).items() if counts)],
        )
        for outcome in run.outcomes
    ]
    return html_report.document(title, chapters)


def figures_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.report is not None
    figures = dict(outcome.report.figures)
    written = [event.time for event in read(outcome.folder) if event.kind == "ok" and event.op == "write"]
    ended = Counter(row["outcome"] for row in read_database(outcome.folder).grants)
    figures["grants"] = figures["operations"].get("acquire", {}).get("ok", 0)
    figures["ended"] = dict(sorted(ended.items()))
    figures["takeovers"] = ended["expired"] + ended["session_lost"]
    figures["failovers"] = outcome.faults["failover"] + outcome.faults["old_primary"]
    figures["gap"] = round(max((after - before for before, after in pairwise(written)), default=0.0), 3)
    return figures


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))


def _counts(outcome: Outcome) -> dict[str, Counter[str]]:
    return {"faults": outcome.faults, "contenders started with a failpoint": outcome.failpoints}
