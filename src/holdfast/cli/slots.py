"""holdfast slots: the pools of slots, and who holds which slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from holdfast.cli import settings
from holdfast.cli.app import listing_options, open_client, watch_options
from holdfast.cli.leases import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.cli.watch_mode import View

Pools = list[dict[str, Any]]
PREFIX = "@slot:"
"""Of the lease behind a slot: @slot:POOL:NUMBER."""
FIELDS = ("host", "pid", "fence", "acquired_at", "expires_at", "age", "remaining")


@click.command()
@click.argument("pool", required=False)
@watch_options
@listing_options
@click.pass_context
def slots(context: click.Context, /, pool: str | None, **options: Any) -> None:
    """List the pools of slots, and the owner of each slot in use.

    Shows the slots of POOL, or of all pools that are in use or configured. The capacity of a pool is stated by the
    programs that claim its slots: it is shown for the pools in HOLDFAST_POOLS, or in [gateway] of holdfast.toml.
    `waiting` is the number of processes that wait for a slot of the pool.

    \b
    Examples:
      holdfast slots
      holdfast slots gpu --watch
      holdfast slots --json | jq '.[] | {pool, in_use, capacity}'
    """
    from holdfast.cli.watch_mode import show

    with open_client(context) as client:
        capacities = settings.pools()
        show(view(lambda: pools_of([*map(describe, client.leases.list())], capacities, pool)), **options)


def pools_of(leases: list[dict[str, Any]], capacities: dict[str, int], only: str | None = None) -> Pools:
    """The pools whose slots are among the leases, or whose capacity is known."""
    in_use: dict[str, list[dict[str, Any]]] = {name: [] for name in capacities}
    for lease in leases:
        if lease["name"].startswith(PREFIX):
            name, _, number = lease["name"].removeprefix(PREFIX).rpartition(":")
            in_use.setdefault(name, []).append({"slot": int(number), **lease})
    return [
        {
            "pool": name,
            "capacity": capacities.get(name),
            "in_use": len(rows),
            "waiting": max((row["waiting"] for row in rows), default=0),
            "slots": [
                {"slot": row["slot"], "owner": row["holder"], **{field: row[field] for field in FIELDS}}
                for row in sorted(rows, key=lambda row: row["slot"])
            ],
        }
        for name, rows in sorted(in_use.items())
        if only in (None, name)
    ]


def view(fetch: Callable[[], Pools]) -> View:
    from holdfast.cli.output import Column
    from holdfast.cli.watch_mode import View

    columns = (
        Column("pool", 10), Column("slot"), Column("owner", 12), Column("age"), Column("left"), Column("in use"),
        Column("waiting"), Column("host", 20), Column("pid"), Column("fence"),
    )  # fmt: skip
    return View(fetch, columns, _rows, _identity, _count)


def _rows(pools: Pools) -> list[tuple[object, ...]]:
    from holdfast.cli.output import duration, state, waiting

    rows: list[tuple[object, ...]] = []
    for pool in pools:
        capacity, count = pool["capacity"], pool["in_use"]
        is_full = capacity is not None and count >= capacity
        in_use = state(count if capacity is None else f"{count} of {capacity}", "full" if is_full else "")
        rows += [
            (pool["pool"], slot["slot"], slot["owner"], duration(slot["age"]), duration(slot["remaining"]), in_use,
             waiting(pool["waiting"]), slot["host"], slot["pid"], slot["fence"])
            for slot in pool["slots"]
        ] or [(pool["pool"], None, None, None, None, in_use, waiting(0), None, None, None)]  # fmt: skip
    return rows


def _identity(pools: Pools) -> object:
    return [(pool["pool"], [(slot["slot"], slot["owner"], slot["fence"]) for slot in pool["slots"]]) for pool in pools]


def _count(pools: Pools) -> str:
    count = sum(pool["in_use"] for pool in pools)
    return "no slot is in use" if not count else f"{count} slot{'s' if count > 1 else ''} in use"
