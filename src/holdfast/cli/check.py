"""holdfast check: whether leases on this database behave as documented."""

from __future__ import annotations

import click

from holdfast.cli.app import json_option, open_client


@click.command()
@json_option
@click.pass_context
def check(context: click.Context, as_json: bool) -> None:
    """Check that leases on this database behave as documented.

    Runs seven cases on a lease that no other process uses, in one transaction that is rolled back. Only a few fence
    numbers are used up. Every role that may hold a lease may run it.

    Exit code 1 when a case fails, or when the database cannot be reached.

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
