"""holdfast check: does this database keep the lease contract?"""

from __future__ import annotations

import click

from holdfast.cli.app import connected


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
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

    with connected(context) as client:
        verdicts = client.leases.probe()
    passed, of = sum(each.ok for each in verdicts), len(verdicts)
    if as_json:
        cases = [{"number": each.number, "case": each.what, "ok": each.ok, "found": each.found} for each in verdicts]
        click.echo(output.for_programs({"ok": passed == of, "passed": passed, "of": of, "cases": cases}))
    else:
        console = output.console()
        for each in verdicts:
            mark = Text.assemble(f"{each.number}  ", ("ok    ", "green") if each.ok else ("FAIL  ", "bold red"))
            output.show(console, output.hanging(console, mark, each.what))
            if not each.ok:
                output.show(
                    console, output.hanging(console, Text("         "), f"answered: {output.clean(each.found)}")
                )
        last = "the lease contract holds" if passed == of else "do not trust leases in this database"
        output.show(console, output.hanging(console, Text(f"{passed}/{of}  ", "bold"), last))
    if passed < of:
        context.exit(1)
