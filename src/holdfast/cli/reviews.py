"""holdfast reviews: operations that need a decision before they are tried again, and the decision."""

from __future__ import annotations

from dataclasses import asdict

import click

from holdfast.cli import completion
from holdfast.cli.app import actor_option, fail, json_option, limit_option, listing_options, open_client, reason_option
from holdfast.cli.ops_recover import run_and_report

STATUSES = ("open", "approved", "rejected", "reset", "done")


@click.group()
def reviews() -> None:
    """Approve or reject operations that need a decision.

    An operation needs a decision when the policy of its dataset says so, when another process has the lock of a
    sovereign dataset, or when it has no attempts left.

    \b
    Examples:
      holdfast reviews ls
      holdfast reviews approve 7 --reason "the council agreed on Monday"
    """


@reviews.command()
@click.option("--status", type=click.Choice([*STATUSES, "all"]), default="open", show_default=True,
              help="Only reviews with this status.")  # fmt: skip
@limit_option(100)
@listing_options
@click.pass_context
def ls(context: click.Context, status: str, limit: int, as_json: bool, wide: bool) -> None:
    """List reviews, the oldest first.

    \b
    Examples:
      holdfast reviews ls
      holdfast reviews ls --status all --json
    """
    from holdfast.cli import output

    with open_client(context) as client:
        records = client.reviews.list(status=None if status == "all" else status, limit=limit)
    if as_json:
        output.print_json([asdict(review) for review in records])
    elif records:
        columns = (
            output.Column("review"), output.Column("operation", 16), output.Column("status"),
            output.Column("cause"), output.Column("opened (UTC)"), output.Column("detail", 24),
            output.Column("dataset", 8),
        )  # fmt: skip
        rows = [
            (review.id, review.label, output.state(review.status), review.reason, output.format_time(review.opened_at),
             review.detail, review.dataset)
            for review in records
        ]  # fmt: skip
        output.print_table(columns, rows, wide=wide)
    else:
        click.echo("there are no open reviews" if status == "open" else "there are no such reviews", err=True)


@reviews.command()
@click.argument("number", type=int, shell_complete=completion.reviews)
@json_option
@click.pass_context
def show(context: click.Context, number: int, as_json: bool) -> None:
    """Show one review.

    Exit code 1 when there is no such review.

    \b
    Example:
      holdfast reviews show 7
    """
    from holdfast.cli import output

    with open_client(context) as client:
        review = client.reviews.get(number)
    if review is None:
        fail(f"there is no review {number}")
    if as_json:
        output.print_json(asdict(review))
        return
    fields = {**asdict(review), "status": output.state(review.status)}
    output.print_fields((name.replace("_", " "), value) for name, value in fields.items() if value is not None)


@reviews.command()
@click.argument("number", type=int, shell_complete=completion.open_reviews)
@reason_option
@actor_option
@click.pass_context
def approve(context: click.Context, number: int, reason: str, actor: str) -> None:
    """Allow one more attempt, by the next caller.

    This is the audited command `holdfast do review.approve`. Exit code 1 when the review is not open, or when the
    policy does not let you decide it.

    \b
    Example:
      holdfast reviews approve 7 --reason "the council agreed on Monday"
    """
    run_and_report(context, "review.approve", {"number": number}, actor, reason)


@reviews.command()
@click.argument("number", type=int, shell_complete=completion.open_reviews)
@reason_option
@actor_option
@click.pass_context
def reject(context: click.Context, number: int, reason: str, actor: str) -> None:
    """Refuse the operation until it is reset.

    This is the audited command `holdfast do review.reject`. Exit code 1 when the review is not open, or when the policy
    does not let you decide it.

    \b
    Example:
      holdfast reviews reject 7 --reason "the council did not agree"
    """
    run_and_report(context, "review.reject", {"number": number}, actor, reason)
