"""The cost of objects and electors: single writes and reads, and the time without a leader."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import holdfast
from bench.measure import Result, Run, compare
from bench.place import Place

Later = Callable[[int], Coroutine[Any, Any, None]]
PAYLOAD = {"phase": "Ready", "replicas": 3, "note": "x" * 200}
_COLUMNS = (
    "type text, id text, name text, body text, labels {json}, version bigint, created_at {time}, updated_at {time}, "
    "primary key (type, id)"
)
_LOG = "create table raw_log (place {serial}, type text, id text, kind text, version bigint)"
_RECORD = "name, body, labels, version, created_at, updated_at"
_PUT = (
    "update raw set body = {0}, version = version + 1, updated_at = {now} "
    f"where type = {{0}} and id = {{0}} and version = {{0}} returning {_RECORD}"
)
_LOGGED = "insert into raw_log (type, id, kind, version) "
_GET = f"select {_RECORD} from raw where type = {{0}} and id = {{0}}"


class Raw(NamedTuple):
    """The same, written by hand with the engine's own database driver: one statement that compares, swaps and commits,
    as durable as ours, and a record whose payload, labels and times are parsed. Without a log of changes, with one
    (``logged``), and on asyncio with psycopg's AsyncConnection or sqlite3 in a thread (``later_``)."""

    put: Run
    logged: Run
    get: Run
    later_put: Later
    later_get: Later


def objects(place: Place) -> list[Result]:
    """put_if and get; 1.0 is an update and a select of one row through psycopg or sqlite3, without a log of changes."""
    results = []
    with asyncio.Runner() as loop:
        for label, server in (("fsync off", place.fast), ("fsync on", place.durable)):
            url = place.postgres_url(server)
            results += _compared(place, loop, label, url, _psycopg(place, loop, url))
        for label, folder in (("SQLite", place.folder), ("SQLite in memory", place.memory)):
            results += _compared(
                place, loop, label, f"sqlite:///{folder}/objects.db", _sqlite(place, f"{folder}/raw-objects.db")
            )
    return results


def _compared(place: Place, loop: asyncio.Runner, label: str, url: str, raw: Raw) -> list[Result]:
    client, later = place.client(url), holdfast.AsyncClient(url)
    rounds, times = place.effort.rounds(), place.effort.times(200)
    results: list[Result] = []
    for benchmark, variants in {
        f"put_if, {label}": [
            ("update", raw.put), ("update, and a line in a log", raw.logged), ("Client", _puts(client)),
        ],
        f"get, {label}": [("select", raw.get), ("Client", _gets(client))],
        f"put_if on asyncio, {label}": [
            ("update", _on(loop, raw.later_put)), ("AsyncClient", _on(loop, _async_puts(later))),
        ],
        f"get on asyncio, {label}": [
            ("select", _on(loop, raw.later_get)), ("AsyncClient", _on(loop, _async_gets(later))),
        ],
    }.items():  # fmt: skip
        results += compare(benchmark, variants, rounds=rounds, times=times)
    loop.run(later.close())
    return results


def _psycopg(place: Place, loop: asyncio.Runner, url: str) -> Raw:
    """psycopg itself parses labels and times."""
    import psycopg

    connection = place.psycopg(url)
    columns = _COLUMNS.format(time="timestamptz", json="jsonb")
    connection.execute(f"create table raw ({columns}) with (fillfactor = 70)")
    connection.execute("insert into raw values ('box', 'b-1', null, '{}', '{}', 1, now(), now())")
    connection.execute(_LOG.format(serial="bigserial primary key"))
    put, get = _PUT.format("%s", now="clock_timestamp()"), _GET.format("%s")
    logged = (
        f"with w as ({put.replace(' returning ', ' returning type, id, ')}), "
        f"l as ({_LOGGED} select type, id, 'updated', version from w) select {_RECORD} from w"
    )
    aside = loop.run(psycopg.AsyncConnection.connect(url, autocommit=True))
    place.at_end(lambda: asyncio.run(aside.close()))
    version = [1]

    def keep(row: Any) -> None:
        assert row is not None, "another process has written the row"
        version[0] = row[3]

    def puts(statement: str) -> Run:
        def run(times: int) -> None:
            for _ in range(times):
                keep(connection.execute(statement, (json.dumps(PAYLOAD), "box", "b-1", version[0])).fetchone())

        return run

    def gets(times: int) -> None:
        for _ in range(times):
            json.loads(connection.execute(get, ("box", "b-1")).fetchone()[1])

    async def later_puts(times: int) -> None:
        for _ in range(times):
            cursor = await aside.execute(put, (json.dumps(PAYLOAD), "box", "b-1", version[0]))
            keep(await cursor.fetchone())

    async def later_gets(times: int) -> None:
        for _ in range(times):
            row = await (await aside.execute(get, ("box", "b-1"))).fetchone()
            assert row is not None
            json.loads(row[1])

    return Raw(puts(put), puts(logged), gets, later_puts, later_gets)


def _sqlite(place: Place, file: str) -> Raw:
    connection = place.sqlite(f"sqlite:///{file}")
    connection.execute("pragma synchronous = full")
    connection.execute(f"create table raw ({_COLUMNS.format(time='real', json='text')})")
    connection.execute("insert into raw values ('box', 'b-1', null, '{}', '{}', 1, 0, 0)")
    connection.execute(_LOG.format(serial="integer primary key"))
    put = _PUT.format("?", now="(julianday('now') - 2440587.5) * 86400.0")
    get = _GET.format("?")
    version = [1]
    thread = ThreadPoolExecutor(1)
    place.at_end(thread.shutdown)

    def update() -> Any:
        row = connection.execute(put, (json.dumps(PAYLOAD), "box", "b-1", version[0])).fetchone()
        assert row is not None, "another process has written the row"
        return row

    def keep(row: Any) -> None:
        version[0] = row[3]
        read(row)

    def read(row: Any) -> Any:
        return json.loads(row[2]), datetime.fromtimestamp(row[4], UTC), datetime.fromtimestamp(row[5], UTC)

    def put_one() -> None:
        keep(update())

    def put_logged() -> None:
        connection.execute("begin immediate")
        row = update()
        connection.execute(_LOGGED + "values (?, ?, ?, ?)", ("box", "b-1", "updated", row[3]))
        connection.execute("commit")
        keep(row)

    def get_one() -> None:
        row = connection.execute(get, ("box", "b-1")).fetchone()
        json.loads(row[1])
        read(row)

    def repeated(once: Callable[[], None]) -> Run:
        def run(times: int) -> None:
            for _ in range(times):
                once()

        return run

    def aside(once: Callable[[], None]) -> Later:
        async def run(times: int) -> None:
            for _ in range(times):
                await asyncio.get_running_loop().run_in_executor(thread, once)

        return run

    return Raw(repeated(put_one), repeated(put_logged), repeated(get_one), aside(put_one), aside(get_one))


def _puts(client: holdfast.Client) -> Run:
    version = [client.objects.put_if("box", "b-1", PAYLOAD, holdfast.Unconditional()).version]

    def run(times: int) -> None:
        for _ in range(times):
            version[0] = client.objects.put_if("box", "b-1", PAYLOAD, holdfast.MatchVersion(version[0])).version

    return run


def _gets(client: holdfast.Client) -> Run:
    def run(times: int) -> None:
        for _ in range(times):
            client.objects.get("box", "b-1")

    return run


def _on(loop: asyncio.Runner, variant: Later) -> Run:
    def run(times: int) -> None:
        loop.run(variant(times))

    return run


def _async_puts(client: holdfast.AsyncClient) -> Later:
    async def run(times: int) -> None:
        version = (await client.objects.put_if("box", "b-2", PAYLOAD, holdfast.Unconditional())).version
        for _ in range(times):
            version = (await client.objects.put_if("box", "b-2", PAYLOAD, holdfast.MatchVersion(version))).version

    return run


def _async_gets(client: holdfast.AsyncClient) -> Later:
    async def run(times: int) -> None:
        for _ in range(times):
            await client.objects.get("box", "b-2")

    return run


def elector(place: Place) -> list[Result]:
    """The time without a leader: resign(), and kill -9, with failover="session" and with a TTL of 2 s (1.0)."""
    times = place.effort.rounds(7)
    variants = {
        "kill -9, ttl=2": (2.0, "ttl", signal.SIGKILL, "PostgreSQL"),
        'kill -9, failover="session"': (60.0, "session", signal.SIGKILL, "PostgreSQL"),
        "resign(), PostgreSQL": (60.0, "ttl", signal.SIGTERM, "PostgreSQL"),
        "kill -9, SQLite": (60.0, "ttl", signal.SIGKILL, "SQLite"),
        "resign(), SQLite": (60.0, "ttl", signal.SIGTERM, "SQLite"),
    }
    gaps: dict[str, list[float]] = {}
    urls = {"PostgreSQL": place.postgres_url(), "SQLite": place.sqlite_url("elector")}
    for label, (ttl, failover, ending, engine) in variants.items():
        name = label.replace(" ", "-")
        gaps[label] = [_gap(urls[engine], f"{name}-{number}", ttl, failover, ending) for number in range(times)]
    base = median(gaps["kill -9, ttl=2"])
    aims = {label: "10 ms" if label.startswith("resign") else "100 ms" for label in variants if "ttl=2" not in label}
    return [
        Result("elector", label, median(seconds), "s", median(seconds) / base, aims.get(label, ""))
        for label, seconds in gaps.items()
    ]


def _gap(url: str, name: str, ttl: float, failover: str, ending: signal.Signals) -> float:
    """Seconds from the signal to the leader until the other process starts its work."""
    command = [sys.executable, "-m", "bench.objects", url, name, str(ttl), failover]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, cwd=Path(__file__).parent.parent) for _ in range(2)
    ]  # unbuffered: select() does not see data in a buffer
    try:
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        leader = next(iter(_speaking(running)))
        other = next(process for process in running if process is not leader)
        assert leader.stdout is not None
        assert other.stdout is not None
        leader.stdout.readline()
        time.sleep(0.3)  # long enough for the other process to stand by
        at = time.monotonic()
        leader.send_signal(ending)
        return float(other.stdout.readline()) - at
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate()


def _speaking(running: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    pipes = [process.stdout for process in running if process.stdout is not None]
    readable, _, _ = select.select(pipes, [], [], 30)
    return [process for process in running if process.stdout in readable]


def _lead(url: str, name: str, ttl: float, failover: Any) -> None:
    def work(term: Any) -> None:
        print(time.monotonic(), flush=True)
        term.stopping.wait()

    with holdfast.Client(url) as client:
        client.leases.list()
        print("ready", flush=True)
        elector = client.elector(name, ttl=ttl, renew_every=ttl / 4, retry_every=min(ttl, 5.0), failover=failover)
        elector.run(work, signals=True)


if __name__ == "__main__":
    _lead(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
