"""holdfast check: does this database keep the lease contract?"""

from __future__ import annotations

import click

from holdfast.cli.app import json_option, open_client


@click.command()
@json_option
@click.pass_context
def check(context: click.Context, as_json: bool) -> None:
    """Ask the database whether it keeps the lease contract.

    Seven questions about a lease with a name of its own, in one transaction that is rolled back, so that nothing stays;
    on PostgreSQL a few fences are skipped. It needs no more rights than holding a lease.

    Exit code 1 when an answer is wrong, or the database cannot be asked.

    \b
    Example:
      holdfast --url postgresql://db1/app check
    """
    from rich.text import Text

    from holdfast.cli import output

    with open_client(context) as client:
        cases = client.leases.probe()
    passed, of = sum(case.ok for case in cases), len(cases)
    if as_json:
        rows = [{"number": case.number, "case": case.what, "ok": case.ok, "found": case.found} for case in cases]
        output.print_json({"ok": passed == of, "passed": passed, "of": of, "cases": rows})
    else:
        console = output.make_console()
        for case in cases:
            mark = Text.assemble(f"{case.number}  ", ("ok    ", "green") if case.ok else ("FAIL  ", "bold red"))
            output.print_lines(console, output.wrap(console, mark, case.what))
            if not case.ok:
                answer = f"answered: {output.clean(case.found)}"
                output.print_lines(console, output.wrap(console, Text("         "), answer))
        verdict = "the lease contract holds" if passed == of else "do not trust leases in this database"
        output.print_lines(console, output.wrap(console, Text(f"{passed}/{of}  ", "bold"), verdict))
    if passed < of:
        context.exit(1)
