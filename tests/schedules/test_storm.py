"""Five processes run two schedules of a slot a second, and are killed, stopped and cut off at random.

With ``tx`` every slot has exactly one effect. Without, there is at most one live run, and a reason for each slot that
did not run. A few faults here; ``make schedules`` goes on for a minute. The clock of one process is an hour ahead, if
libfaketime is installed; on SQLite that clock would be the database's.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import holdfast
from holdfast.testing import Proxy
from holdfast.testing.faults import faketime
from tests.children import Child, eventually, pass_time, query

SECONDS = float(os.environ.get("HOLDFAST_SCHEDULE_SECONDS", "0"))
FAULTS = 5
"""At least so many, however long that takes."""
PROCESSES = 5
PROGRAM = """
    import logging, os, sqlite3, sys, time
    from urllib.parse import urlsplit
    import holdfast, holdfast.schedules.schedule

    logging.disable()
    holdfast.schedules.schedule.TTL = 2.0
    url = sys.argv[1]
    client = holdfast.Client(url)

    def connect():
        if url.startswith("sqlite"):
            return sqlite3.connect(urlsplit(url).path, timeout=60, isolation_level=None)
        import psycopg
        return psycopg.connect(url, autocommit=True)

    @client.every(1, name="bill", misfire="all", tx=connect)
    def bill(slot):
        slot.tx.cursor().execute(f"insert into effect (slot) values ('{slot.time.isoformat()}')")

    def record(slot, what):
        connection = connect()
        try:
            with slot.grant.transaction(connection):
                who = f"{slot.time.isoformat()} {slot.attempt} {os.getpid()}"
                connection.execute(f"insert into live (who, what) values ('{who}', '{what}')")
        finally:
            connection.close()

    @client.every(1, name="sweep")
    def sweep(slot):
        record(slot, "begin")
        time.sleep(0.1)
        record(slot, "end")

    print("up", flush=True)
    client.schedules.run([bill, sweep], concurrency=4)
"""


class Worker:
    """A process behind a proxy of its own, with the clock of the machine or one that is an hour ahead."""

    def __init__(self, url: str, *, wrong_clock: bool = False) -> None:
        self._proxy = None if url.startswith("sqlite") else Proxy(url)
        self._url = url if self._proxy is None else self._proxy.url
        library = faketime() if wrong_clock and self._proxy is not None else None
        self._environment = None if library is None else {"LD_PRELOAD": str(library), "FAKETIME": "+1h"}
        self._start()

    def _start(self) -> None:
        if self._environment is None:
            self._child: Any = Child(PROGRAM, self._url)
            self.pid = self._child.pid
        else:
            from textwrap import dedent

            command = [sys.executable, "-c", dedent(PROGRAM), self._url]
            self._child = subprocess.Popen(
                command, env={**os.environ, **self._environment}, stdout=subprocess.DEVNULL
            )  # fmt: skip
            self.pid = self._child.pid

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        if isinstance(self._child, Child):
            self._child.__exit__(None, None, None)

    def restart(self) -> None:
        self.kill()
        self._start()

    def pause(self, seconds: float) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        pass_time(seconds)
        os.kill(self.pid, signal.SIGCONT)

    def cut(self) -> None:
        if self._proxy is not None:
            self._proxy.cut()

    def close(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.kill()
        if self._proxy is not None:
            self._proxy.close()


def test_whatever_is_killed_stopped_and_cut_off_each_slot_has_one_effect_or_a_reason(either: str) -> None:
    is_sqlite = either.startswith("sqlite")
    number = "integer primary key autoincrement" if is_sqlite else "bigserial primary key"
    query(either, f"create table effect (place {number}, slot text)")
    query(either, f"create table live (place {number}, who text, what text)")
    chaos, faults = random.Random(620), Counter[str]()
    with holdfast.Client(either) as client, ExitStack() as stack:
        client.migrate()
        workers = [Worker(either, wrong_clock=index == 0) for index in range(PROCESSES)]
        for worker in workers:
            stack.callback(worker.close)
        eventually(lambda: query(either, "select 1 from effect") and query(either, "select 1 from live"), "they run")
        begun = time.monotonic()
        while time.monotonic() - begun < SECONDS or faults.total() < FAULTS or len(faults) < 3 - is_sqlite:
            worker, fault = chaos.choice(workers), chaos.choice(["kill", "pause", "cut"])
            if fault == "kill":
                worker.restart()
            elif fault == "pause":
                worker.pause(chaos.choice([0.3, 1.0, 3.0]))
            else:
                worker.cut()
            faults[fault] += 1
            pass_time(chaos.uniform(0.1, 1.0))
        until = max(record.next_slot for record in client.schedules.list() if record.next_slot) - timedelta(seconds=1)
        eventually(
            lambda: all(is_settled(client, name, until) for name in ("bill", "sweep")), "every slot is settled", 120.0
        )
        bills, sweeps = (client.schedules.runs(name, limit=10_000) for name in ("bill", "sweep"))

    runs = [run for run in bills if run.slot <= until]
    slots = sorted(run.slot for run in runs)
    assert slots == [slots[0] + timedelta(seconds=step) for step in range(len(slots))]
    assert Counter(run.status for run in runs) == {"success": len(runs)}
    effects = Counter(datetime.fromisoformat(slot) for (slot,) in query(either, "select slot from effect"))
    assert {slot: count for slot, count in effects.items() if count != 1} == {}, "exactly one effect"
    assert {slot for slot in effects if slot <= until} == set(slots)

    fates = sorted((run.slot, run.until, run.count, run.status, run.reason) for run in sweeps if run.slot <= until)
    for before, after in pairwise(fates):
        assert after[0] - before[1] == timedelta(seconds=1), "each slot has one fate"
    for slot, last, count, status, reason in fates:
        assert (last - slot).total_seconds() == count - 1
        assert status == "success" or reason, "and a reason if it did not run"
    assert sum(status == "success" for *_, status, _ in fates) > 0
    current = ""
    for who, what in query(either, "select who, what from live order by place"):
        if what == "begin":
            current = who
        else:
            assert who == current, "it ended while another one was live"
    outcomes = Counter[str]()
    for *_, count, status, reason in fates:
        outcomes[reason or status] += count
    sys.stdout.write(f"\n{dict(faults)}: {len(slots)} slots with tx; without: {dict(outcomes)}\n")


def is_settled(client: Any, name: str, until: datetime) -> bool:
    runs = client.schedules.runs(name, limit=10_000)
    return any(run.slot > until for run in runs) and not any(run.status == "open" for run in runs if run.slot <= until)
