"""holdfast schedules: the schedules and their runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.app import fail, json_option, limit_option, listing_options, open_client, watch_options

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from holdfast.cli.output import Column
    from holdfast.cli.watch_mode import View
    from holdfast.records import ScheduleRecord, ScheduleRun

Schedules = list[dict[str, Any]]


@click.group(invoke_without_command=True)
@watch_options
@listing_options
@click.pass_context
def schedules(context: click.Context, /, **options: Any) -> None:
    """List the schedules and what became of their slots.

    A schedule is listed once a process has run it. `overdue` says that its next slot is past: no process runs it.
    `holdfast do schedule.pause`, `schedule.resume`, `schedule.run` and `schedule.skip` change what runs.

    \b
    Examples:
      holdfast schedules
      holdfast schedules show backup
      holdfast schedules --json | jq -r '.[] | select(.overdue > 60) | .name'
    """
    if context.invoked_subcommand is not None:
        return
    from holdfast.cli.watch_mode import show

    with open_client(context) as client:
        show(view(lambda: [*map(as_dict, client.schedules.list())]), **options)


@schedules.command("show")
@click.argument("name")
@limit_option(20)
@json_option
@click.pass_context
def show_runs(context: click.Context, /, name: str, limit: int, as_json: bool) -> None:
    """Show the last runs of a schedule, and the output of the latest one.

    \b
    Examples:
      holdfast schedules show backup
      holdfast schedules show backup --json --limit 1 | jq -r '.[0].note'
    """
    from holdfast.cli import output

    with open_client(context) as client:
        try:
            runs = client.schedules.runs(name, limit=limit)
        except LookupError as error:
            fail(str(error))
    if as_json:
        output.print_json([run_as_dict(run) for run in runs])
        return
    output.print_table(*runs_table(runs))
    noted = next((run for run in runs if run.note), None)
    if noted is not None and noted.note:
        click.echo(f"\nOutput of {_slot(noted.slot)}:")
        for line in noted.note.splitlines():
            click.echo(f"  {output.clean(line) if line else ''}")


def as_dict(record: ScheduleRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "every": record.every,
        "zone": record.zone,
        "paused": record.paused,
        "next": record.next_slot,
        "overdue": round(record.overdue, 3),
        "running": list(record.running),
        "last": None if record.last is None else run_as_dict(record.last),
    }


def run_as_dict(run: ScheduleRun) -> dict[str, Any]:
    names = ("slot", "status", "reason", "attempt", "owner", "started_at", "ended_at", "lateness", "until", "count")
    return {**{name: getattr(run, name) for name in names}, "note": run.note}


def view(fetch: Callable[[], Schedules]) -> View:
    """A listing of schedules, each as ``as_dict`` returns it."""
    from holdfast.cli.output import Column
    from holdfast.cli.watch_mode import View

    columns = (
        Column("schedule", 12), Column("every", 10), Column("zone", 8), Column("next (UTC)"), Column("state", 8),
        Column("last slot (UTC)"), Column("outcome", 10), Column("late"),
    )  # fmt: skip
    return View(fetch, columns, _rows, _identity, _count)


def _rows(schedules: Schedules) -> list[tuple[object, ...]]:
    from holdfast.cli.output import duration, format_time, state

    rows: list[tuple[object, ...]] = []
    for each in schedules:
        last = each["last"] or {"slot": None, "status": None, "reason": None, "lateness": None}
        word = "paused" if each["paused"] else "running" if each["running"] else ""
        if not word and each["overdue"] > 60:
            word = "overdue"
        if not word and last["status"] == "success" and not last["slot"].timestamp():
            word = "done"  # once ever
        rows.append(
            (each["name"], each["every"], each["zone"], each["next"] and format_time(each["next"]),
             state(word or "waits", "unknown" if word in ("paused", "overdue") else ""),
             last["slot"] and _slot(last["slot"]),
             state(last["reason"] if last["status"] == "skipped" else last["status"], last["status"]),
             duration(last["lateness"]))
        )  # fmt: skip
    return rows


def runs_table(runs: list[ScheduleRun]) -> tuple[list[Column], list[tuple[object, ...]]]:
    """The columns and rows of a schedule's runs."""
    from holdfast.cli.output import Column

    columns = [
        Column("slot (UTC)"), Column("status"), Column("late"), Column("took"), Column("attempt"), Column("owner", 12),
        Column("reason", 16),
    ]  # fmt: skip
    return columns, [_run_row(run) for run in runs]


def _run_row(run: ScheduleRun) -> tuple[object, ...]:
    from holdfast.cli.output import duration, state

    took = None
    if run.started_at is not None and run.ended_at is not None:
        took = (run.ended_at - run.started_at).total_seconds()
    return (
        _slot(run.slot), state(run.status if run.count == 1 else f"{run.status} {run.count}", run.status),
        duration(run.lateness), duration(took), run.attempt or None, run.owner, run.reason,
    )  # fmt: skip


def _slot(slot: datetime) -> str:
    """What runs once ever has the slot 0, which is no time to show."""
    from holdfast.cli.output import format_time

    return format_time(slot) if slot.timestamp() else "once"


def _identity(schedules: Schedules) -> object:
    return [
        (each["name"], each["paused"], each["running"], each["last"] and (each["last"]["slot"], each["last"]["status"]))
        for each in schedules
    ]


def _count(schedules: Schedules) -> str:
    return "there is no schedule" if not schedules else f"{len(schedules)} schedule{'s' if len(schedules) > 1 else ''}"
