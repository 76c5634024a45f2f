"""The cost of an operation, beside the bare transaction and, if it is installed, DBOS."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import holdfast
from bench import workflows
from bench.aims import ONCE, WITHIN
from bench.measure import Result, Run, compare
from bench.place import Place

INSERT = "insert into work (text) values ('x')"
TABLE = "create table work (id bigint generated always as identity primary key, text text)"
BATCH = 1000


def operation(place: Place) -> list[Result]:
    """One insert of the application that takes effect once; 1.0 is the bare transaction."""
    results = []
    for label, server in (("fsync off", place.fast), ("flush in 2 ms", place.slow), ("fsync on", place.durable)):
        if server is None:
            print(f"  {label} is skipped: a quick run, or no C compiler (cc) on PATH", file=sys.stderr)
            continue
        url = place.postgres_url(server)
        connection, client, keys = place.psycopg(url), place.client(url), map(str, itertools.count())
        connection.execute(TABLE)

        def insert(connection: Any = connection) -> None:
            connection.execute(INSERT)

        def bare(times: int, connection: Any = connection, insert: Callable[[], None] = insert) -> None:
            for _ in range(times):
                with connection.transaction():
                    insert()

        variants: list[tuple[str, Run]] = [
            ("transaction", bare),
            (WITHIN, runs(client, keys, insert, tx=connection)),
            ("operation(key).run(…), outside", runs(client, map("o{}".format, itertools.count()), insert)),
        ]
        rounds, times = place.effort.rounds(), place.effort.times(100)
        if server in (place.fast, place.slow):
            results += compare(f"operation, {label}", variants, rounds=rounds, times=times)
            continue
        with workflows.variants(url, workflows.transaction) as more:
            results += compare(f"operation, {label}", variants + more, rounds=rounds, times=times)
    return results + _sqlite(place)


def replayed(place: Place) -> list[Result]:
    """An operation that is already done; 1.0 is a select on a psycopg connection, which is one round trip."""
    url = place.postgres_url()
    client, connection = place.client(url), place.psycopg(url)
    client.operation("k").run(lambda: {"rows": 1})

    def select(times: int) -> None:
        for _ in range(times):
            connection.execute("select 1").fetchone()

    variants: list[tuple[str, Run]] = [
        ("select 1", select),
        (ONCE, runs(client, itertools.repeat("k"), int)),
        (WITHIN, runs(client, itertools.repeat("k"), int, tx=connection)),
    ]
    with workflows.variants(place.fast.database(), workflows.replayed) as more:
        rounds, times = place.effort.rounds(), place.effort.times(200)
        return compare("replayed", variants + more, rounds=rounds, times=times)


def operation_batch(place: Place) -> list[Result]:
    """run_many in batches of 1,000 empty operations, per operation; 1.0 is one at a time."""
    url = place.postgres_url()
    client, numbers = place.client(url), itertools.count()

    def many(times: int) -> float:
        return _seconds_of_many(client, [f"m{next(numbers)}" for _ in range(times)])[0]

    def claimed(times: int) -> float:
        return _seconds_of_many(client, [f"m{next(numbers)}" for _ in range(times)])[1]

    variants: list[tuple[str, Run]] = [
        ("one at a time", runs(client, map("s{}".format, itertools.count()), int)),
        ("run_many, until it is claimed", claimed),
        ("run_many, claimed and finished", many),
    ]
    rounds, times = place.effort.rounds(5), place.effort.times(2000)
    return compare("operation_batch", variants, rounds=rounds, times=times, aim="50 µs")


def runs(client: holdfast.Client, keys: Any, effect: Callable[[], object], tx: Any = None) -> Run:
    def run(times: int) -> None:
        for _ in range(times):
            client.operation(next(keys), tx=tx).run(effect)

    return run


def _seconds_of_many(client: holdfast.Client, keys: list[str]) -> tuple[float, float]:
    """Seconds for everything, and for claiming the keys: from the start of each batch to its first function call."""
    began = since = perf_counter()
    claiming, waits = 0.0, True

    def function(_: str) -> None:
        nonlocal claiming, waits
        if waits:
            claiming, waits = claiming + perf_counter() - since, False

    def progress(*_: int) -> None:
        nonlocal since, waits
        since, waits = perf_counter(), True

    client.operations.run_many(keys, function, batch=BATCH, progress=progress)
    return perf_counter() - began, claiming


def _sqlite(place: Place) -> list[Result]:
    url = place.sqlite_url("operation")
    client = place.client(url)
    client.leases.list()
    connection, keys = place.sqlite(url), map(str, itertools.count())
    connection.execute("create table work (id integer primary key, text text)")

    def insert() -> None:
        connection.execute(INSERT)

    def bare(times: int) -> None:
        for _ in range(times):
            connection.execute("begin immediate")
            insert()
            connection.execute("commit")

    variants: list[tuple[str, Run]] = [
        ("transaction", bare),
        (WITHIN, runs(client, keys, insert, tx=connection)),
    ]
    return compare("operation, SQLite", variants, rounds=place.effort.rounds(), times=place.effort.times(200))
