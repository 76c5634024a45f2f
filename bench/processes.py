"""The cost per process: heartbeats of many leases, hand-over, start-up, memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.measure import Result, Run, compare
from bench.place import Place
from holdfast.lease.keeper import keeper_of

MANY = 10_000
POLL = 0.1


def heartbeat(place: Place) -> list[Result]:
    """One heartbeat for 1 lease and for 10,000 in one process: in the server, and in the keeper's thread."""
    few, many = (_Beating(place, number) for number in (1, place.effort.times(MANY)))
    count = f"{len(many.grants):,} leases"
    rounds = place.effort.rounds(9)
    variants: list[tuple[str, Run]] = [("1 lease", few.in_server), (count, many.in_server)]
    results = compare("heartbeat, in the server", variants, rounds=rounds, times=50)
    variants = [("1 lease", few.in_keeper), (count, many.in_keeper)]
    return results + compare("heartbeat, in the keeper", variants, rounds=rounds, times=20)


class _Beating:
    """The leases of one process, on their own database, renewed a hundred times a second."""

    def __init__(self, place: Place, number: int) -> None:
        url = place.postgres_url()
        client = place.client(url)
        self.grants = [client.lease(f"lease-{each}", ttl=60, renew_every=0.01).acquire() for each in range(number)]
        self._connection = place.psycopg(url)
        keeper: Any = keeper_of(client._database)
        [self._beat] = [beat.id for beat in keeper._beats]
        self._taken: list[float] = []
        renew = keeper._renew

        def timed(beat: object) -> None:
            began = time.perf_counter()
            renew(beat)
            self._taken.append(time.perf_counter() - began)

        keeper._renew = timed

    def in_server(self, times: int) -> float:
        """As the server measures it."""
        total = 0.0
        for _ in range(times):
            [[plan]] = self._connection.execute(
                "explain (analyze, timing off, format json) select * from holdfast.beat_renew(%s)", [self._beat]
            ).fetchone()
            total += plan["Execution Time"] / 1000
        return total

    def in_keeper(self, times: int) -> float:
        """From the start of a renewal until the keeper has processed the result."""
        before = len(self._taken)
        while len(self._taken) < before + times:
            time.sleep(0.005)
        return median(self._taken[before:]) * times


def handover(place: Place) -> list[Result]:
    """From release() in one process until a waiting process has the lease; 1.0 is polling every 100 ms."""
    urls = {"PostgreSQL": place.postgres_url(), "SQLite": place.sqlite_url("handover")}
    waiters = [
        _Waiter(place, "try_acquire() every 100 ms", urls["PostgreSQL"], poll=POLL),
        *(_Waiter(place, f"acquire(timeout=60), {label}", url) for label, url in urls.items()),
    ]
    try:
        variants: list[tuple[str, Run]] = [(waiter.label, waiter.hand_over) for waiter in waiters]
        return compare("hand-over", variants, rounds=place.effort.rounds(), times=1 if place.effort.quick else 3)
    finally:
        for waiter in waiters:
            waiter.end()


class _Waiter:
    """Another process that waits for the lease, acquires it, reports the time, and releases it."""

    def __init__(self, place: Place, label: str, url: str, poll: float = 0.0) -> None:
        self.label, self._lease = label, place.client(url).lease(f"handover {poll}", ttl=30, timeout=30)
        command = [sys.executable, "-m", "bench.processes", url, str(poll)]
        here = Path(__file__).parent.parent
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=here)

    def hand_over(self, times: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        total = 0.0
        for _ in range(times):
            grant = self._lease.acquire()
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            self._process.stdout.readline()
            time.sleep(random.uniform(0.03, 0.03 + POLL))  # it waits now, at a random point between two polls
            released_at = time.monotonic()
            grant.release()
            total += json.loads(self._process.stdout.readline()) - released_at
        return total

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _wait_and_report(url: str, poll: float) -> None:
    import holdfast

    with holdfast.Client(url) as client:
        lease = client.lease(f"handover {poll}", ttl=30, timeout=60)
        for _ in sys.stdin:
            print("asking", flush=True)
            grant = None
            while poll and (grant := lease.try_acquire()) is None:
                time.sleep(poll)
            grant = grant or lease.acquire()
            at = time.monotonic()
            grant.release()
            print(at, flush=True)


def start(place: Place) -> list[Result]:
    """A new interpreter until it exits; 1.0 is `python -c pass`."""
    url = place.sqlite_url("start")
    texts = {
        "python -c pass": "pass",
        "import sqlite3": "import sqlite3",
        "import holdfast": "import holdfast",
        "Client(sqlite), one lease": f"import holdfast\nwith holdfast.Client({url!r}) as c:\n with c.lease('x'): pass",
        "import psycopg": "import psycopg",
        "Client(postgresql), one lease": (
            f"import holdfast\nwith holdfast.Client({place.postgres_url()!r}) as c:\n with c.lease('x'): pass"
        ),
    }

    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    running: list[subprocess.Popen[bytes]] = []

    def runner(*command: str) -> Run:
        def run(times: int) -> None:
            for _ in range(times):
                subprocess.run(command, check=True, env=compiled)

        return run

    def until_started(times: int) -> None:
        """The clock stops at the first output of the command, not when the process exits."""
        for _ in range(times):
            process = subprocess.Popen([*holdfast_run, "echo", "."], stdout=subprocess.PIPE, env=compiled)
            assert process.stdout is not None
            process.stdout.read(1)
            running.append(process)

    holdfast_run = [str(Path(sys.executable).with_name("holdfast")), "--url", url, "run", "--wait", "x", "--"]
    variants = [(label, runner(sys.executable, "-c", text)) for label, text in texts.items()]
    variants.append(("holdfast run on SQLite, until its command starts", until_started))
    variants.append(("holdfast run on SQLite, until all is over", runner(*holdfast_run, "true")))
    results = compare("start-up", variants, rounds=place.effort.rounds(9), times=1)
    for process in running:
        process.communicate()
    return results


def memory(place: Place) -> list[Result]:
    """Resident memory of a process per lease that it holds, and the size of its row on the server."""
    number = place.effort.times(MANY)
    url = place.postgres_url()
    code = (
        "import holdfast, os, sys; client = holdfast.Client(sys.argv[1])\n"
        "page = os.sysconf('SC_PAGE_SIZE')\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * page\n"
        "held = [client.lease(f'warm-{n}', ttl=60).acquire() for n in range(100)]\n"
        "before = resident()\n"
        "held += [client.lease(f'held-{n}', ttl=60).acquire() for n in range(int(sys.argv[2]))]\n"
        "print(resident() - before, flush=True); sys.stdin.read(); os._exit(0)"
    )
    if not Path("/proc/self/statm").exists():
        return []
    command = [sys.executable, "-c", code, url, str(number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        in_client = int(process.stdout.readline()) / number
        [size] = place.psycopg(url).execute("select pg_total_relation_size('holdfast.lease')").fetchone()
        process.kill()
    return [
        Result(f"memory, {number:,} leases", "client, a lease", in_client, "B"),
        Result(f"memory, {number:,} leases", "server's disk, a lease", size / (number + 100), "B"),
    ]


if __name__ == "__main__":
    _wait_and_report(sys.argv[1], float(sys.argv[2]))
