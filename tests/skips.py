"""A pytest plugin that says in one line, at the end, which tests were skipped for what this machine lacks.

A test that needs a program skips with the reason ``PROGRAM is not installed: COMMAND``, where the command installs it.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

REASON = re.compile(r"(?:Skipped: )?(?P<program>.+) is not installed: (?P<command>.+)")


def summary(reasons: list[str]) -> str | None:
    """One line about skipped tests, given the reason of each; None when no test was skipped."""
    if not reasons:
        return None
    matches = [match for match in map(REASON.fullmatch, reasons) if match is not None]
    programs = Counter(match["program"] for match in matches)
    parts = [f"{number} without {program}" for program, number in programs.most_common()]
    if others := len(reasons) - len(matches):
        parts.append(f"{others} for a reason listed above")
    line = f"Skipped tests: {', '.join(parts)}."
    return f"{line} To run them: {_commands({match['command'] for match in matches})}" if matches else line


def _commands(commands: set[str]) -> str:
    """All of them, with the packages of one installer behind one command."""
    packages: dict[str, list[str]] = {}
    for command in sorted(commands):
        installer, _, package = command.rpartition(" ")
        packages.setdefault(installer, []).append(package)
    return " && ".join(f"{installer} {' '.join(names)}" for installer, names in packages.items())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    if line := summary([report.longrepr[2] for report in reports]):
        terminalreporter.write_line(line, yellow=True)
