"""holdfast doctor: what could keep leases from working well, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.app import connected

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "unseen": "dim"}


@click.command()
@click.option("--strict", is_flag=True, help="A warning is reason enough for exit code 1.")
@click.option("--timeout", type=click.FloatRange(0, 3600, min_open=True), default=10.0, show_default=True, metavar="S",
              help="Spend at most about so many seconds.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def doctor(context: click.Context, strict: bool, timeout: float, as_json: bool) -> None:
    """Look the database over, and the way to it.

    Each check says ok, warn (it works, and may hurt), fail (it does not work) or unseen (this role may not look), what
    was found and, unless all is well, what to do. Nothing is written. Exit code 1 when a check fails.

    \b
    Examples:
      holdfast doctor
      holdfast --url postgresql://app@db/app doctor --strict     # in a deploy: refuse what only works so-so
      holdfast doctor --json | jq '.findings[] | select(.status != "ok")'
    """
    with connected(context) as client:
        examination = client.examine(timeout=timeout)
    report(context, examination, strict=strict, as_json=as_json)


def report(context: click.Context, examination: Any, *, strict: bool, as_json: bool) -> None:
    """Tell what was found, and end with the exit code that goes with it."""
    from holdfast.cli.output import console, for_programs, show

    passed = examination.passed(strict=strict)
    if as_json:
        click.echo(for_programs({"passed": passed, "strict": strict, **asdict(examination)}))
    else:
        where = console()
        show(where, _lines(where, examination))
    context.exit(0 if passed else 1)


def _lines(where: Console, examination: Any) -> list[Text]:
    from rich.text import Text

    from holdfast.cli.output import clean, hanging

    lines = []
    findings = examination.findings
    label = max(len(finding.check) for finding in findings)
    for finding in findings:
        head = Text.assemble((f"{finding.status:<6}", _STYLES[finding.status]), f"  {finding.check:<{label}}  ")
        lines += hanging(where, head, clean(finding.found))
        if finding.remedy is not None:
            lines += hanging(where, Text(" " * head.cell_len), f"-> {clean(finding.remedy)}")
    counts = ((examination.count(status), status) for status in _STYLES)
    summary = ", ".join(f"{count} {status}" for count, status in counts if count)
    return [*lines, *hanging(where, Text(""), f"{examination.database}: {summary}")]
