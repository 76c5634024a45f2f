"""`python -m holdfast.testing.checker FOLDER`: check a recorded history.

Exit status: 0 when every check is ok, 1 when one is violated, 2 when a check had nothing to count or the history
cannot be read.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.testing.checker import Report, check


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m holdfast.testing.checker", description="Check a recorded history.")
    parser.add_argument("folder", type=Path, help="where the workers' *.jsonl and database.json are")
    parser.add_argument("--json", action="store_true", help="print verdicts and figures as JSON")
    parser.add_argument("--sane-clocks", action="store_true", default=None, help="no clock was tampered with")
    options = parser.parse_args(arguments)
    try:
        report = check(options.folder, sane_clocks=options.sane_clocks)
        sys.stdout.write(_as_json(report) if options.json else _as_text(report))
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 1 if report.violated else 2 if report.vacuous else 0


def _as_json(report: Report) -> str:
    verdicts = [verdict._asdict() | {"vacuous": verdict.vacuous} for verdict in report.verdicts]
    return json.dumps({"ok": report.ok, "verdicts": verdicts, "figures": report.figures}, indent=2) + "\n"


def _as_text(report: Report, limit: int = 10) -> str:
    lines = []
    for verdict in report.verdicts:
        lines.append(str(verdict))
        lines += [f"    {violation}" for violation in verdict.violations[:limit]]
        if len(verdict.violations) > limit:
            lines.append(f"    and {len(verdict.violations) - limit} more")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
