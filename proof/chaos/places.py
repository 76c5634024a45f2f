"""Where a lane is played: a database, how contenders reach it, what can go wrong there, and how to look at it directly.

A place is a context manager. Its clocks are sane or they are not: two who believe in one lease at once are a violation
only where they are.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import holdfast
from holdfast.testing.faults import (
    Clock,
    Fault,
    Pair,
    clock_drift,
    clock_step,
    crash,
    failover,
    faketime,
    freeze,
    network,
    old_primary,
    read_only,
    restart,
    standby_away,
    terminate,
)  # fmt: skip
from holdfast.testing.pooler import Pooler
from holdfast.testing.pooler import find as find_pooler
from holdfast.testing.postgres import Postgres
from holdfast.testing.proxy import Proxy
from proof import ledger

Rows = list[tuple[Any, ...]]
STEP = 3.0
"""Seconds by which a clock that is tampered with jumps."""
_ALL_GRANTS = "create table proof_grant (name text not null, fence bigint not null, outcome text not null)"
"""History keeps the last few; this keeps all that ended."""
_KEEP_POSTGRES = """
create function proof_keep() returns trigger language plpgsql security definer as $$ begin
    insert into public.proof_grant values (new.name, new.fence, new.outcome); return null; end $$;
create trigger proof_keep after insert on holdfast.history for each row execute function proof_keep()
"""
_KEEP_SQLITE = """
create trigger proof_keep after insert on holdfast_history begin
    insert into proof_grant values (new.name, new.fence, new.outcome); end
"""


class Place(NamedTuple):
    urls: Sequence[str]
    """What contenders are given, in turn."""
    faults: Sequence[Fault]
    direct: Callable[[], str]
    """The database itself, without anything in between."""
    query: Callable[[str], Rows]
    sane_clocks: bool = True
    retire: Callable[[], object] = lambda: None
    """End what keeps connections open for others."""


@contextmanager
def postgres() -> Iterator[Place]:
    """A primary and its synchronous standby, each behind a proxy of its own; whichever is primary is found."""
    with ExitStack() as stack:
        pair = stack.enter_context(Pair.create())
        name = _prepared(pair.primary.database("chaos")).rpartition("/")[2]
        ways = [stack.enter_context(Proxy(server.url)) for server in (pair.primary, pair.standby)]
        hosts = ",".join(way.url.partition("@")[2].partition("/")[0] for way in ways)

        def direct() -> str:
            return f"{pair.primary.url.rpartition('/')[0]}/{name}"

        faults = [
            *(fault for way in ways for fault in network(way)),
            *(
                make(pair)
                for make in (restart, crash, freeze, read_only, failover, failover, old_primary, standby_away)
            ),
            *(terminate(direct, application_name=each, on=pair) for each in ("holdfast", "contender")),
        ]
        yield Place([f"postgresql://postgres@{hosts}/{name}"], faults, direct, lambda text: _rows(direct(), text))


@contextmanager
def clocks() -> Iterator[Place]:
    """One server whose clock jumps and drifts. Every other contender comes through a pooler, where there is one."""
    with ExitStack() as stack:
        clock = stack.enter_context(Clock())
        server = stack.enter_context(Postgres.create(environment=clock.environment))
        url = _prepared(server.database("chaos"))
        way = stack.enter_context(Proxy(url))
        urls, poolers = [way.url], ExitStack()
        stack.enter_context(poolers)
        if find_pooler() is not None:
            urls.append(poolers.enter_context(Pooler(url, size=6)).url)
        faults = [
            *network(way),
            *(clock_step(clock, seconds) for seconds in (STEP, -STEP, 0.5, -0.5)),
            *(clock_drift(clock, rate) for rate in (0.2, -0.2)),
            *(make(server) for make in (restart, crash, read_only)),
            terminate(url, on=server),
        ]
        yield Place(urls, faults, lambda: url, lambda text: _rows(url, text), sane_clocks=False, retire=poolers.close)


@contextmanager
def sqlite() -> Iterator[Place]:
    """One file; what can go wrong there is somebody who keeps its one writer's place."""
    with TemporaryDirectory(prefix="holdfast-chaos-") as folder:
        file = f"{folder}/chaos.db"
        url = f"sqlite:///{file}"
        with holdfast.Client(url) as client:
            client.migrate()

        def query(text: str) -> Rows:
            with closing(sqlite3.connect(file, timeout=60)) as connection, connection:
                return connection.execute(text).fetchall()

        for text in (*ledger.TABLES, _ALL_GRANTS, _KEEP_SQLITE):
            query(text)
        yield Place([url], [_writer(file)], lambda: url, query)


LANES = {"postgres": postgres, "sqlite": sqlite, "clocks": clocks}


def playable() -> list[str]:
    """The lanes that this machine has everything for."""
    return [lane for lane in LANES if lane != "clocks" or faketime() is not None]


def _prepared(url: str) -> str:
    with holdfast.Client(url) as client:
        client.migrate()
    for text in (*ledger.TABLES, _ALL_GRANTS, _KEEP_POSTGRES):
        _rows(url, text)
    return url


def _rows(url: str, text: str) -> Rows:
    import psycopg

    with psycopg.connect(url, autocommit=True, connect_timeout=60) as connection:
        cursor = connection.execute(text.encode())
        return cursor.fetchall() if cursor.description else []


def force(place: Place, name: str) -> Fault:
    """An operator takes a lease away, if it is there to be taken."""

    def begin() -> None:
        with suppress(holdfast.HoldfastError), holdfast.Client(place.direct()) as operator:
            operator.leases.force_release(name, actor="nemesis", reason="chaos")

    return Fault("force", name, begin)


def _writer(file: str) -> Fault:
    """Somebody begins to write and does not come to an end: nobody else can."""
    done = threading.Event()
    busy: list[threading.Thread] = []

    def write(begun: threading.Event) -> None:
        with closing(sqlite3.connect(file, timeout=0.5, isolation_level=None)) as connection:
            try:
                connection.execute("begin immediate")
            except sqlite3.OperationalError:
                return  # somebody was stopped in the middle of a write, which is as bad
            finally:
                begun.set()
            done.wait()
            connection.execute("rollback")

    def begin() -> None:
        done.clear()
        begun = threading.Event()
        busy.append(threading.Thread(target=write, args=(begun,), daemon=True))
        busy[-1].start()
        begun.wait()

    def heal() -> None:
        done.set()
        busy.pop().join()

    return Fault("writer", file, begin, heal)
