"""The command that acknowledges a problem of the dashboard. It changes nothing but the audit: its entry is the
acknowledgement, and the dashboard reads the entries of this action."""

from __future__ import annotations

import re

from holdfast.commands.registry import CommandRefused, Parameter, Steps, Window, command

ACKNOWLEDGE = "problem.acknowledge"
_FINGERPRINTS = re.compile(r"[0-9a-f]{16}(,[0-9a-f]{16})*")


@command(
    ACKNOWLEDGE, gate="problems", subject="{problem}", destructive=False, atomic=True,
    problem=Parameter("title of the problem, for the audit"),
    fingerprints=Parameter("what it says, as the dashboard names it", option="fingerprints", maximum=1700),
)  # fmt: skip
def problem_acknowledge(window: Window, *, problem: str, fingerprints: str) -> Steps:
    """Fold a problem of the dashboard away until it changes."""
    if not _FINGERPRINTS.fullmatch(fingerprints):
        raise CommandRefused(
            f"fingerprints must be those of the dashboard's command, 16 hexadecimal digits each, not {fingerprints!r}"
        )
    yield [f"problem {problem!r} is acknowledged until it changes"]
