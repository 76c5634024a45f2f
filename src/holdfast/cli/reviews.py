"""holdfast reviews: operations that somebody has to look at, and what they say."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from holdfast.cli.app import connected
from holdfast.cli.ops_recover import govern, recorded

STATUSES = ("open", "approved", "rejected", "reset", "done")
TITLES = ("review", "operation", "dataset", "because of", "status", "opened (UTC)", "detail")


@click.group()
def reviews() -> None:
    """Look at operations that are up for review, and answer.

    An operation is up for review when the policy of its dataset says so, when somebody else had the lock of a sovereign
    one, or when it failed as often as it may.

    \b
    Examples:
      holdfast reviews ls
      holdfast reviews approve 7 --reason "the council agreed on Monday"
    """


@reviews.command()
@click.option("--status", type=click.Choice([*STATUSES, "all"]), default="open", show_default=True,
              help="Only those.")  # fmt: skip
@click.option("--most", type=click.IntRange(1, 10_000), default=100, show_default=True, metavar="N",
              help="Show at most so many.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def ls(context: click.Context, status: str, most: int, as_json: bool) -> None:
    """Show reviews, the oldest first.

    \b
    Examples:
      holdfast reviews ls
      holdfast reviews ls --status all --json
    """
    from holdfast.cli import output

    with connected(context) as client:
        found = client.reviews.list(status=None if status == "all" else status, most=most)
    if as_json:
        click.echo(output.for_programs([asdict(each) for each in found]))
    elif found:
        rows = [
            (each.id, each.label, each.dataset, each.reason, each.status, output.moment(each.opened_at), each.detail)
            for each in found
        ]
        console = output.console()
        output.show(console, output.listing(console, TITLES, rows))
    else:
        click.echo("nothing is up for review" if status == "open" else "there is no such review", err=True)


@reviews.command()
@click.argument("number", type=int)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def show(context: click.Context, number: int, as_json: bool) -> None:
    """Show one review. Exit code 1 when there is no such review.

    \b
    Example:
      holdfast reviews show 7
    """
    from holdfast.cli import output

    with connected(context) as client:
        record = client.reviews.get(number)
    if record is None:
        click.echo(f"holdfast: there is no review {number}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(output.for_programs(asdict(record)))
        return
    facts = [(name.replace("_", " "), value) for name, value in asdict(record).items() if value is not None]
    console = output.console()
    output.show(console, output.listing(console, ("what", "value"), facts))


@reviews.command()
@click.argument("number", type=int)
@recorded
@click.pass_context
def approve(context: click.Context, number: int, reason: str, actor: str) -> None:
    """Let the operation be tried once more, by whoever asks next.

    This is the governed command `holdfast do review.approve`. Exit code 1 when it is not open, or is not yours to
    answer.

    \b
    Example:
      holdfast reviews approve 7 --reason "the council agreed on Monday"
    """
    govern(context, "review.approve", {"number": number}, actor, reason)


@reviews.command()
@click.argument("number", type=int)
@recorded
@click.pass_context
def reject(context: click.Context, number: int, reason: str, actor: str) -> None:
    """Have the operation refused until it is reset.

    This is the governed command `holdfast do review.reject`. Exit code 1 when it is not open, or is not yours to
    answer.

    \b
    Example:
      holdfast reviews reject 7 --reason "the council did not agree"
    """
    govern(context, "review.reject", {"number": number}, actor, reason)
