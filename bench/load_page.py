"""Writes the generated block of docs/explanation/benchmarks.md: calls per second by 1, 8, 32 and 128 callers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.aims import Verdict
from bench.load_picture import RATE, VARIANT
from bench.measure import Result

PICTURE = "load.svg"
BEGIN, END = "<!-- written by python -m bench load --docs: begin -->", "<!-- end -->"
_BLOCK = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)


def write(
    folder: Path, results: Sequence[Result], verdicts: Iterable[Verdict], about: Mapping[str, object], picture: str
) -> None:
    """Replace the block of ``benchmarks.md`` in ``folder``, and the picture beside it. ValueError without a block."""
    page = folder / "benchmarks.md"
    text, count = _BLOCK.subn(lambda _: block(results, verdicts, about), page.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"{page} has {count} blocks between {BEGIN!r} and {END!r}, expected 1")
    page.write_text(text, encoding="utf-8")
    (folder / PICTURE).write_text(picture, encoding="utf-8")


def block(results: Iterable[Result], verdicts: Iterable[Verdict], about: Mapping[str, object]) -> str:
    tables: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    """By call and database: by variant, the rate of each number of callers, and the times of a single one."""
    for result in results:
        table, variant = RATE.fullmatch(result.benchmark), VARIANT.fullmatch(result.variant)
        if table and variant:
            tables.setdefault((table[1], table[2]), {}).setdefault(variant[1], {})[variant[3] or variant[2]] = (
                result.value
            )
    counts = sorted({int(key) for lines in tables.values() for line in lines.values() for key in line if key.isdigit()})
    parts = [
        BEGIN,
        "",
        ", ".join(f"{key}: {value}" for key, value in about.items()),
        "",
        f"![Calls per second]({PICTURE})",
        "",
    ]
    for call in dict.fromkeys(call for call, _ in tables):
        heads = [f"{call}, calls per second by", *(f"{count}" for count in counts), "p50 of one", "p99 of one"]
        parts += [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
        for (what, store), lines in tables.items():
            for name, line in lines.items() if what == call else ():
                cells = [f"{line[str(count)]:,.0f}" if str(count) in line else "" for count in counts]
                cells += [f"{line[key] * 1e3:.2f} ms" if key in line else "" for key in ("p50", "p99")]
                parts.append(f"| **{store}**: {name} | {' | '.join(cells)} |")
        parts.append("")
    parts += [f"- {verdict}" for verdict in verdicts]
    return "\n".join([*parts, "", END])
