"""A holder that is stopped while its lease passes on cannot commit, wherever in its transaction it was stopped.

A real process, stopped with SIGSTOP, and woken with SIGCONT after its TTL has passed, or is said to have passed in the
row of its beat, and somebody else has taken over.
"""

from __future__ import annotations

import itertools
import json
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import holdfast
from tests.children import PATIENCE, Child, eventually
from tests.user_connections import ask, make_table, shared_postgres

TTLS = (0.7, 5.0, 25.0)
"""Of a lease whose transaction holds up the successor: the server ends one that idles for a TTL. If the machine stands
still for so long before the worker is where it is to be stopped, the next is longer."""
_LONG = itertools.count(600)
"""Each another one, and so with a beat of its own: that it is over is said in its row."""
EXPIRE = """
update holdfast.beat set expires_at = clock_timestamp() where id = (select beat from holdfast.lease where name = %s)
"""
POSITIONS = ["before protect", "before", "between", "after"]

WORKER = """
    import json, sys
    import psycopg, holdfast

    url = sys.argv[1]
    client = holdfast.Client(url)

    def here(position):
        if position == order["position"]:
            print("here", flush=True)
            sys.stdin.readline()

    def work():
        with psycopg.connect(url) as connection:
            connection.isolation_level = psycopg.IsolationLevel[order["isolation"]]
            connection.execute("select count(*) from holdfast.history")
            here("before protect")
            if order["at"]:
                grant.protect(connection, at=order["at"])
            here("before")
            connection.execute(f"insert into {order['table']} values ('first')")
            here("between")
            connection.execute(f"insert into {order['table']} values ('second')")
            here("after")
            connection.commit()

    for line in sys.stdin:
        order = json.loads(line)
        grant = client.lease(order["name"], ttl=order["ttl"]).acquire()
        print(grant.fence, flush=True)
        try:
            work()
            print("committed", flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)
        try:
            grant.release()
        except holdfast.HoldfastError:
            pass
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[Child]:
    with Child(WORKER, shared_postgres()) as child:
        yield child


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop(child: Child) -> None:
    child.signal(signal.SIGSTOP)
    eventually(lambda: is_stopped(child.pid), "the child is stopped")


def overtaken(worker: Child, isolation: str, at: str | None, position: str) -> tuple[str, list[str]]:
    """What the worker said of its transaction, and the rows that are there."""
    url = shared_postgres()
    table = make_table(url)
    locks = at == "start" and position != "before protect"
    order = {"isolation": isolation, "at": at, "position": position, "table": table}
    for ttl in TTLS if locks else [next(_LONG)]:
        name = f"lease-{secrets.token_hex(4)}"
        worker.say(json.dumps({**order, "name": name, "ttl": ttl}))
        fence = int(worker.line())
        if (answer := worker.line()) == "here":
            break
    assert answer == "here"
    stop(worker)
    if not locks:  # so that the TTL need not be waited for
        ask(url, EXPIRE, name)
    try:
        with holdfast.Client(url) as client, client.lease(name).acquire(timeout=PATIENCE) as successor:
            assert successor.fence > fence
            worker.signal(signal.SIGCONT)
            worker.say("go on")
            return worker.line(), [row[0] for row in ask(url, f"select what from {table} order by 1")]
    finally:
        worker.signal(signal.SIGCONT)


@pytest.mark.parametrize("isolation", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_stopped_holder_cannot_commit_what_it_protected_at_commit(
    worker: Child, isolation: str, position: str
) -> None:
    """Nobody had to wait for its transaction, and its own COMMIT is refused, however old its snapshot."""
    assert overtaken(worker, isolation, "commit", position) == ("FencedOut", [])


@pytest.mark.parametrize(
    ("position", "isolation"),
    [
        ("before protect", "READ_COMMITTED"),
        ("before protect", "REPEATABLE_READ"),
        ("before protect", "SERIALIZABLE"),
        ("before", "READ_COMMITTED"),
        ("between", "REPEATABLE_READ"),
        ("after", "SERIALIZABLE"),
    ],
)
def test_a_stopped_holder_cannot_commit_what_it_protected_at_start(
    worker: Child, isolation: str, position: str
) -> None:
    """Once protected, its successor waits until the server has ended the idle transaction: a TTL at most."""
    expected = "FencedOut" if position == "before protect" else "IdleInTransactionSessionTimeout"
    assert overtaken(worker, isolation, "start", position) == (expected, [])


@pytest.mark.parametrize("isolation", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
def test_a_stopped_holder_that_protects_nothing_does_commit(worker: Child, isolation: str) -> None:
    """Why the others can fail: no isolation level stops a stale write."""
    assert overtaken(worker, isolation, None, "between") == ("committed", ["first", "second"])


SQLITE_WORKER = """
    import sqlite3, sys
    import holdfast

    url, path, table, ttl = sys.argv[1:]
    grant = holdfast.Client(url).lease("job", ttl=float(ttl)).acquire()
    connection = sqlite3.connect(path, isolation_level=None)
    print(grant.fence, flush=True)
    def attempt(what, protect):
        connection.execute("begin")
        try:
            if protect:
                grant.protect(connection)
            connection.execute(f"insert into {table} values (?)", [what])
            print("open", flush=True)
            sys.stdin.readline()
            connection.execute("commit")
            print("committed", flush=True)
        except Exception as error:
            connection.execute("rollback")
            print(type(error).__name__, flush=True)
    for line in sys.stdin:
        attempt(line.strip(), "unprotected" not in line)
"""


@contextmanager
def sqlite_worker(url: str, ttl: float) -> Iterator[tuple[Child, str, int]]:
    with holdfast.Client(url) as client:
        client.leases.list()
    table = make_table(url)
    with Child(SQLITE_WORKER, url, url.removeprefix("sqlite:///"), table, ttl) as child:
        yield child, table, int(child.line())


def test_a_stopped_holder_is_refused_on_sqlite(sqlite_url: str) -> None:
    """Stopped before it protects, overtaken, refused; while an unprotected write of its does go through."""
    with (
        sqlite_worker(sqlite_url, 0.7) as (worker, table, fence),
        holdfast.Client(sqlite_url) as client,
    ):
        stop(worker)
        with client.lease("job").acquire(timeout=PATIENCE) as successor:
            assert successor.fence > fence
            worker.signal(signal.SIGCONT)
            worker.say("stale")
            worker.expect("FencedOut")
            assert ask(sqlite_url, f"select what from {table}") == []
            worker.say("unprotected")
            worker.expect("open")
            worker.say("commit")
            worker.expect("committed")
            assert ask(sqlite_url, f"select what from {table}") == [("unprotected",)]


def test_nobody_overtakes_a_holder_stopped_inside_its_transaction_on_sqlite(tmp_path: Path) -> None:
    """It is the only writer: its commit comes before the takeover, although its TTL is long over."""
    for ttl in TTLS:  # refused before it is stopped: the machine stood still for a TTL
        url = f"sqlite:///{tmp_path / f'{ttl}.db'}"
        with sqlite_worker(url, ttl) as (worker, table, fence):
            worker.say("mine")
            if worker.line() == "open":
                stop(worker)
                not_overtaken(url, worker, table, fence)
                return
    pytest.fail("the holder is refused")


def not_overtaken(url: str, worker: Child, table: str, fence: int) -> None:
    seen: list[Any] = []

    def take_over() -> None:
        with holdfast.Client(url) as client, client.lease("job").acquire(timeout=PATIENCE) as successor:
            seen.extend([successor.fence > fence, ask(url, f"select what from {table}")])

    thread = Thread(target=take_over)
    thread.start()
    eventually(lambda: expired(url), "the TTL is over")
    assert not seen
    worker.signal(signal.SIGCONT)
    worker.say("commit")
    worker.expect("committed")
    thread.join(PATIENCE)
    assert seen == [True, [("mine",)]]


def expired(url: str) -> bool:
    now = "(julianday('now') - 2440587.5) * 86400.0"
    return bool(ask(url, f"select 1 from holdfast_beat where expires_at < {now}"))
