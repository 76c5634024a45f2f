"""Throughput over callers: one process with 1, 8, 32 and 128 tasks or threads, beside other libraries.

Nothing is pinned: callers and server share the cores of the machine. Variants take turns, and a ratio compares rates of
one round.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol, Self

from bench import rivals
from bench.callers import TABLES, figures
from bench.gateway import Fleet, HttpClients
from bench.measure import Result, unpinned
from bench.place import Place
from holdfast.testing import Postgres

CALLERS = (1, 8, 32, 128)
CALLS = ("lease pairs", "external operations", "transaction operations", "put_if", "hooks")
SECONDS, SINGLE = 0.6, 1.5
"""Of one measurement. A single caller makes few calls, and p99 needs a hundred."""
ROUNDS = 3
ROOT = Path(__file__).parent.parent


class Figures(NamedTuple):
    rate: float
    p50: float
    p99: float


_Key = tuple[str, int]
"""A variant and a number of callers."""
_Rounds = list[dict[_Key, Figures]]


class Measured(Protocol):
    def run(self, what: str, callers: int, seconds: float) -> Figures | str:
        """Or why there are none."""


class Variant(NamedTuple):
    name: str
    calls: tuple[str, ...]
    measured: Measured


def load(place: Place) -> list[Result]:
    """Calls per second by 1, 8, 32 and 128 callers in one process; 1.0 is one task."""
    results: list[Result] = []
    with unpinned():
        for store, server in (("fsync on", place.durable), ("flush in 2 ms", place.slow), ("SQLite", None)):
            if store == "flush in 2 ms" and server is None:
                print(f"  {store} is skipped: a quick run, or no C compiler (cc) on PATH", file=sys.stderr)
                continue
            with ExitStack() as at_end:
                bench = _Bench(place, store, server, at_end)
                results += bench.results()
    return results


class _Bench:
    """All variants on one database server, or on SQLite."""

    def __init__(self, place: Place, store: str, server: Postgres | None, at_end: ExitStack) -> None:
        quick = place.effort.quick
        self._place, self._store, self._server, self._at_end = place, store, server, at_end
        self._is_whole = server is place.durable or not quick
        """A quick run measures rivals, gateway and another checkout on one server alone: many processes each."""
        self._callers: tuple[int, ...] = (1, 2) if quick else CALLERS
        self._rounds, self._seconds, self._single = (1, 0.05, 0.05) if quick else (ROUNDS, SECONDS, SINGLE)
        self._databases = 0
        self._variants = list(self._all())

    def results(self) -> Iterator[Result]:
        for what in CALLS:
            print(f"  {what}, {self._store}", file=sys.stderr, flush=True)
            variants = [each for each in self._variants if what in each.calls]
            if not variants:
                continue
            rounds = [self._round(what, variants, number) for number in range(self._rounds)]
            base = variants[0].name, 1

            def ratio(
                key: _Key, figure: Callable[[Figures], float], rounds: _Rounds = rounds, base: _Key = base
            ) -> float:
                return median(figure(each[key]) / figure(each[base]) for each in rounds)

            for name, callers in [key for key in rounds[0] if all(key in each for each in rounds)]:
                seen = [each[name, callers] for each in rounds]
                who = f"{name}, {callers} caller{'' if callers == 1 else 's'}"
                rate = median(each.rate for each in seen)
                table = f"load, {what}, {self._store}"
                yield Result(table, who, rate, "/s", ratio((name, callers), lambda each: each.rate))
                if callers == 1:
                    p50, p99 = median(each.p50 for each in seen), median(each.p99 for each in seen)
                    yield Result(table, f"{who}: p50", p50, "s", ratio((name, 1), lambda each: each.p50))
                    yield Result(table, f"{who}: p99", p99, "s", ratio((name, 1), lambda each: each.p99))

    def _round(self, what: str, variants: list[Variant], number: int) -> dict[_Key, Figures]:
        """Without those that have failed."""
        turn = number % len(variants)
        taken: dict[_Key, Figures] = {}
        for callers in self._callers:
            for each in variants[turn:] + variants[:turn]:
                figures = each.measured.run(what, callers, self._single if callers == 1 else self._seconds)
                if isinstance(figures, Figures):
                    taken[each.name, callers] = figures
                else:
                    print(f"  {each.name}, {callers} callers of {what}, {self._store}: {figures}", file=sys.stderr)
        keys = [(each.name, callers) for each in variants for callers in self._callers]
        return {key: taken[key] for key in keys if key in taken}

    def _all(self) -> Iterator[Variant]:
        place, ours = self._place, CALLS[:-1]
        sources = {"": ROOT} | ({", beside": place.beside} if place.beside is not None and self._is_whole else {})
        for kind in ("tasks", "threads"):
            # A connection of sqlite3 blocks the loop, so no task has a transaction on one.
            calls = tuple(each for each in ours if (each, kind, self._server) != (ours[2], "tasks", None))
            for label, source in sources.items():
                yield Variant(kind + label, calls, self._process(kind, self._database(source), source))
        if self._is_whole:
            for label, source in sources.items():
                yield Variant(f"replica{label}", CALLS[-1:], self._gateway(source))
        if self._server is None or not self._is_whole:
            return
        yield Variant("psycopg, pool of 8", ours, self._process("psycopg", self._database(None)))
        if importlib.util.find_spec("dbos") is None:
            print("  DBOS is skipped: pip install --group bench", file=sys.stderr)
        else:
            yield Variant("DBOS", ours[1:3], self._process("dbos", self._database(None)))
        if self._server is not place.durable:
            return
        if importlib.util.find_spec("redis") is None:
            print("  redis.asyncio is skipped: pip install --group bench", file=sys.stderr)
        elif (port := rivals.redis_port(place)) is None:
            print("  redis.asyncio is skipped: no redis-server on PATH", file=sys.stderr)
        else:
            yield Variant("redis.asyncio", ours[:1], self._process("redis", f"redis://127.0.0.1:{port}"))

    def _database(self, source: Path | None) -> str:
        """A new database with the application's tables and those of the checkout ``source``."""
        self._databases += 1
        if self._server is None:
            url = self._place.sqlite_url(f"load-{self._databases}")
            self._place.sqlite(url).execute("create table work (id integer primary key, text text)")
        else:
            url = self._server.database()
            connection = self._place.psycopg(url)
            for table in TABLES:
                connection.execute(table)
        if source is not None:
            command = [sys.executable, "-m", "holdfast", "--url", url, "migrate", "up"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self._place.folder, env=_code(source))
        return url

    def _process(self, kind: str, url: str, source: Path = ROOT) -> Measured:
        return self._at_end.enter_context(_Process(kind, url, source))

    def _gateway(self, source: Path) -> Measured:
        url = self._database(source)
        folder = self._place.folder / f"gateway-{self._store}-{self._databases}".replace(" ", "-")
        folder.mkdir()
        fleet = self._at_end.enter_context(Fleet(folder, url, _code(source)))
        fleet.grow(1)
        fleet.begin_agents(max(self._callers))
        return _Gateway(fleet, self._at_end.enter_context(HttpClients(self._seconds)))


def _code(source: Path) -> dict[str, str]:
    """The environment in which Python imports holdfast from that checkout."""
    return {**os.environ, "PYTHONPATH": str(source.resolve() / "src")}


class _Process:
    """``bench.callers`` with one library."""

    def __init__(self, kind: str, url: str, source: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.callers", kind, url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=_code(source),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, what: str, callers: int, seconds: float) -> Figures | str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"what": what, "callers": callers, "seconds": seconds}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line or '{"error": "the process has ended"}')
        return str(answer["error"]) if "error" in answer else Figures(**answer)


class _Gateway:
    """Clients of one replica, each of which reports for its own agent."""

    def __init__(self, fleet: Fleet, clients: HttpClients) -> None:
        self._fleet, self._clients = fleet, clients

    def run(self, what: str, callers: int, seconds: float) -> Figures:
        seen = self._clients.run([self._fleet.asked("hook write", number) for number in range(callers)])
        return Figures(**figures(seen.seconds, seen.taken))
