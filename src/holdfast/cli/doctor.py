"""holdfast doctor: what could keep leases from working well, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.app import Seconds, json_option, open_client

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "unseen": "dim"}


@click.command()
@click.option("--strict", is_flag=True, help="Exit with 1 also on a warning.")
@click.option("--timeout", type=Seconds(0, 3600, min_open=True), default=10.0, show_default=True, metavar="S",
              help="Maximum time for all checks, in seconds.")  # fmt: skip
@json_option
@click.pass_context
def doctor(context: click.Context, strict: bool, timeout: float, as_json: bool) -> None:
    """Check the database and the connection to it.

    Each check reports ok, warn (it works, with a risk), fail (it does not work) or unseen (this role lacks the
    privilege), with the finding and a remedy. Nothing is written.

    Exit code 1 when a check fails; with --strict, also when one warns.

    \b
    Examples:
      holdfast doctor
      holdfast --url postgresql://app@db/app doctor --strict
      holdfast doctor --json | jq '.findings[] | select(.status != "ok")'
    """
    with open_client(context, creates=True) as client:
        examination = client.doctor(timeout=timeout)
    report(context, examination, strict=strict, as_json=as_json)


def report(context: click.Context, examination: Any, *, strict: bool, as_json: bool) -> None:
    """Print the findings, and exit with 1 if one has failed."""
    from holdfast.cli import output

    passed = examination.passed(strict=strict)
    if as_json:
        output.print_json({"passed": passed, "strict": strict, **asdict(examination)})
    else:
        console = output.make_console()
        output.print_lines(console, _render(console, examination))
    context.exit(0 if passed else 1)


def _render(console: Console, examination: Any) -> list[Text]:
    from rich.text import Text

    from holdfast.cli.output import clean, wrap

    lines = []
    findings = examination.findings
    label_width = max(len(finding.check) for finding in findings)
    for finding in findings:
        head = Text.assemble((f"{finding.status:<6}", _STYLES[finding.status]), f"  {finding.check:<{label_width}}  ")
        lines += wrap(console, head, clean(finding.found))
        if finding.remedy is not None:
            lines += wrap(console, Text(" " * head.cell_len), f"-> {clean(finding.remedy)}")
    counts = ((examination.count(status), status) for status in _STYLES)
    summary = ", ".join(f"{count} {status}" for count, status in counts if count)
    return [*lines, *wrap(console, Text(""), f"{examination.database}: {summary}")]
