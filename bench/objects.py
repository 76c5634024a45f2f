"""What objects and electors cost: single writes and reads, and how long nobody leads."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import holdfast
from bench.measure import Result, Run, compare
from bench.place import Place

PAYLOAD = {"phase": "Ready", "replicas": 3, "note": "x" * 200}
AIM = "1.3 times"
_COLUMNS = (
    "type text, id text, name text, body text, labels text, version bigint, created_at {time}, updated_at {time}, "
    "primary key (type, id)"
)
_PUT = (
    "update raw set body = {0}, version = version + 1, updated_at = {now} "
    "where type = {0} and id = {0} and version = {0} returning name, labels, version, {created}, {updated}"
)
_GET = "select name, body, labels, version, {created}, {updated} from raw where type = {0} and id = {0}"


def objects(place: Place) -> list[Result]:
    """put_if and get; 1.0 is an update and a select of one row through psycopg or sqlite3, and no log of changes."""
    found = []
    for label, server in (("fsync off", place.fast), ("fsync on", place.durable)):
        url = place.postgres_url(server)
        found += _compared(place, label, url, *_psycopg(place, url))
    url = place.sqlite_url("objects")
    return found + _compared(place, "SQLite", url, *_sqlite(place, url))


def _compared(place: Place, label: str, url: str, put: Run, get: Run) -> list[Result]:
    client = place.client(url)
    with asyncio.Runner() as loop:
        later = holdfast.AsyncClient(url)
        rounds, times = place.effort.rounds(), place.effort.times(200)
        puts: list[tuple[str, Run]] = [
            ("update", put), ("Client", _puts(client)), ("AsyncClient", _on(loop, _async_puts(later))),
        ]  # fmt: skip
        gets: list[tuple[str, Run]] = [
            ("select", get), ("Client", _gets(client)), ("AsyncClient", _on(loop, _async_gets(later))),
        ]  # fmt: skip
        found = compare(f"put_if, {label}", puts, rounds=rounds, times=times, aim=AIM)
        found += compare(f"get, {label}", gets, rounds=rounds, times=times, aim=AIM)
        loop.run(later.close())
    return found


def _psycopg(place: Place, url: str) -> tuple[Run, Run]:
    connection = place.psycopg(url)
    connection.execute(f"create table raw ({_COLUMNS.format(time='timestamptz')}) with (fillfactor = 70)")
    connection.execute("insert into raw values ('box', 'b-1', null, '{}', '{}', 1, now(), now())")
    seconds = {"created": "extract(epoch from created_at)::float8", "updated": "extract(epoch from updated_at)::float8"}
    put, get = _PUT.format("%s", now="clock_timestamp()", **seconds), _GET.format("%s", **seconds)
    return _raw(connection, put, get, begin=False)


def _sqlite(place: Place, url: str) -> tuple[Run, Run]:
    connection = place.sqlite(place.sqlite_url("raw objects"))
    connection.execute(f"create table raw ({_COLUMNS.format(time='real')})")
    connection.execute("insert into raw values ('box', 'b-1', null, '{}', '{}', 1, 0, 0)")
    now = "(julianday('now') - 2440587.5) * 86400.0"
    seconds = {"created": "created_at", "updated": "updated_at"}
    return _raw(connection, _PUT.format("?", now=now, **seconds), _GET.format("?", **seconds), begin=True)


def _raw(connection: Any, put: str, get: str, *, begin: bool) -> tuple[Run, Run]:
    known = [1]

    def puts(times: int) -> None:
        for _ in range(times):
            if begin:
                connection.execute("begin immediate")
            row = connection.execute(put, (json.dumps(PAYLOAD), "box", "b-1", known[0])).fetchone()
            if begin:
                connection.execute("commit")
            known[0] = row[2]

    def gets(times: int) -> None:
        for _ in range(times):
            json.loads(connection.execute(get, ("box", "b-1")).fetchone()[1])

    return puts, gets


def _puts(client: holdfast.Client) -> Run:
    known = [client.objects.put_if("box", "b-1", PAYLOAD, holdfast.Unconditional()).version]

    def run(times: int) -> None:
        for _ in range(times):
            known[0] = client.objects.put_if("box", "b-1", PAYLOAD, holdfast.MatchVersion(known[0])).version

    return run


def _gets(client: holdfast.Client) -> Run:
    def run(times: int) -> None:
        for _ in range(times):
            client.objects.get("box", "b-1")

    return run


def _on(loop: asyncio.Runner, each: Callable[[int], Any]) -> Run:
    def run(times: int) -> None:
        loop.run(each(times))

    return run


def _async_puts(client: holdfast.AsyncClient) -> Callable[[int], Any]:
    async def run(times: int) -> None:
        version = (await client.objects.put_if("box", "b-2", PAYLOAD, holdfast.Unconditional())).version
        for _ in range(times):
            version = (await client.objects.put_if("box", "b-2", PAYLOAD, holdfast.MatchVersion(version))).version

    return run


def _async_gets(client: holdfast.AsyncClient) -> Callable[[int], Any]:
    async def run(times: int) -> None:
        for _ in range(times):
            await client.objects.get("box", "b-2")

    return run


def elector(place: Place) -> list[Result]:
    """How long nobody leads: resign(), and kill -9, with failover="session" and with a TTL of 2 s (1.0)."""
    times = place.effort.rounds(7)
    variants = {
        "kill -9, ttl=2": (2.0, "ttl", signal.SIGKILL, "PostgreSQL"),
        'kill -9, failover="session"': (60.0, "session", signal.SIGKILL, "PostgreSQL"),
        "resign(), PostgreSQL": (60.0, "ttl", signal.SIGTERM, "PostgreSQL"),
        "kill -9, SQLite": (60.0, "ttl", signal.SIGKILL, "SQLite"),
        "resign(), SQLite": (60.0, "ttl", signal.SIGTERM, "SQLite"),
    }
    found: dict[str, list[float]] = {}
    urls = {"PostgreSQL": place.postgres_url(), "SQLite": place.sqlite_url("elector")}
    for label, (ttl, failover, ending, engine) in variants.items():
        name = label.replace(" ", "-")
        found[label] = [_gap(urls[engine], f"{name}-{number}", ttl, failover, ending) for number in range(times)]
    base = median(found["kill -9, ttl=2"])
    aims = {label: "10 ms" if label.startswith("resign") else "100 ms" for label in variants if "ttl=2" not in label}
    return [
        Result("elector", label, median(each), "s", median(each) / base, aims.get(label, ""))
        for label, each in found.items()
    ]


def _gap(url: str, name: str, ttl: float, failover: str, ending: signal.Signals) -> float:
    """From the signal to the leader until the other process has begun to work."""
    command = [sys.executable, "-m", "bench.objects", url, name, str(ttl), failover]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent) for _ in range(2)
    ]
    try:
        for each in running:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        leader = next(iter(_speaking(running)))
        other = next(each for each in running if each is not leader)
        assert leader.stdout is not None
        assert other.stdout is not None
        leader.stdout.readline()
        time.sleep(0.3)  # the other one stands by
        at = time.monotonic()
        leader.send_signal(ending)
        return float(other.stdout.readline()) - at
    finally:
        for each in running:
            with suppress(ProcessLookupError):
                each.kill()
            each.communicate()


def _speaking(running: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    pipes = [each.stdout for each in running if each.stdout is not None]
    readable, _, _ = select.select(pipes, [], [], 30)
    return [each for each in running if each.stdout in readable]


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
