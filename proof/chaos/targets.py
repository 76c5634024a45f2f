"""Targets of scenarios: a database, the URLs of its contenders, its faults, and direct access for queries.

Each is a context manager. If a target changes clocks (``sane_clocks=False``), two workers that trust the same lease at
once are no violation.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
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
    impatient,
    network,
    old_primary,
    read_only,
    refuse,
    restart,
    restore_copy,
    restore_dump,
    restore_template,
    standby_away,
    terminate,
)  # fmt: skip
from holdfast.testing.pooler import Pooler
from holdfast.testing.pooler import find as find_pooler
from holdfast.testing.postgres import Postgres
from holdfast.testing.proxy import Proxy
from proof import protected_tables

Rows = list[tuple[Any, ...]]
STEP = 3.0
"""Seconds by which a clock is stepped."""
_ALL_GRANTS = "create table proof_grant (name text not null, fence bigint not null, outcome text not null)"
"""All grants that ended; holdfast's own history keeps only the last few."""
_KEEP_POSTGRES = """
create function proof_keep() returns trigger language plpgsql security definer as $$ begin
    insert into public.proof_grant values (new.name, new.fence, new.outcome); return null; end $$;
create trigger proof_keep after insert on holdfast.history for each row execute function proof_keep()
"""
_KEEP_SQLITE = """
create trigger proof_keep after insert on holdfast_history begin
    insert into proof_grant values (new.name, new.fence, new.outcome); end
"""


class Target(NamedTuple):
    urls: Sequence[str]
    """For contenders, in turn."""
    faults: Sequence[Fault]
    direct: Callable[[], str]
    """The URL of the database without proxy or pooler."""
    query: Callable[[str], Rows]
    sane_clocks: bool = True
    retire: Callable[[], object] = lambda: None
    """Close poolers, which keep connections open."""
    set_back: bool = False
    """Whether its faults restore backups. Then two workers may trust the same lease for a TTL, too."""


def _prepare(url: str) -> str:
    with holdfast.Client(url) as client:
        client.migrate()
    for text in (*protected_tables.TABLES, _ALL_GRANTS, _KEEP_POSTGRES):
        _rows(url, text)
    return url


def _rows(url: str, text: str) -> Rows:
    import psycopg

    with psycopg.connect(url, autocommit=True, connect_timeout=60) as connection:
        cursor = connection.execute(text.encode())
        return cursor.fetchall() if cursor.description else []


@contextmanager
def postgres(prepare: Callable[[str], str] = _prepare) -> Iterator[Target]:
    """A primary and its synchronous standby, each behind its own proxy. Clients find the primary. ``prepare`` is given
    the URL of the empty database."""
    with ExitStack() as stack:
        pair = stack.enter_context(Pair.create())
        name = prepare(pair.primary.database("chaos")).rpartition("/")[2]
        proxies = [stack.enter_context(Proxy(server.url)) for server in (pair.primary, pair.standby)]
        hosts = ",".join(proxy.url.partition("@")[2].partition("/")[0] for proxy in proxies)

        def direct() -> str:
            return f"{pair.primary.url.rpartition('/')[0]}/{name}"

        faults = [
            *(fault for proxy in proxies for fault in network(proxy)),
            *(
                make(pair)
                for make in (
                    restart,
                    crash,
                    freeze,
                    read_only,
                    impatient,
                    failover,
                    failover,
                    old_primary,
                    standby_away,
                )
            ),
            refuse(pair, name),
            *(terminate(direct, application_name=name, on=pair) for name in ("holdfast", "contender")),
        ]
        yield Target([f"postgresql://postgres@{hosts}/{name}"], faults, direct, lambda text: _rows(direct(), text))


@contextmanager
def clocks() -> Iterator[Target]:
    """One server whose clock steps and drifts. Every other contender uses a pooler, if it is installed. It is never
    made impatient: with timeouts that expire on a clock that steps, the server itself has crashed."""
    with ExitStack() as stack:
        clock = stack.enter_context(Clock())
        server = stack.enter_context(Postgres.create(environment=clock.environment))
        url = _prepare(server.database("chaos"))
        proxy = stack.enter_context(Proxy(url))
        urls, poolers = [proxy.url], ExitStack()
        stack.enter_context(poolers)
        if find_pooler() is not None:
            urls.append(poolers.enter_context(Pooler(url, size=6)).url)
        faults = [
            *network(proxy),
            *(clock_step(clock, seconds) for seconds in (STEP, -STEP, 0.5, -0.5)),
            *(clock_drift(clock, rate) for rate in (0.2, -0.2)),
            *(make(server) for make in (restart, crash, read_only)),
            refuse(server, "chaos"),
            terminate(url, on=server),
        ]
        yield Target(urls, faults, lambda: url, lambda text: _rows(url, text), sane_clocks=False, retire=poolers.close)


@contextmanager
def restores() -> Iterator[Target]:
    """One server that is restored from backups, with the loss of what was committed since."""
    with Postgres.create() as server:
        url = _prepare(server.database("chaos"))
        faults = [
            *(restore_copy(server), restore_dump(server, "chaos"), restore_template(server, "chaos")) * 2,
            *(make(server) for make in (restart, crash)),
            terminate(url, on=server),
        ]
        yield Target([url], faults, lambda: url, lambda text: _rows(url, text), sane_clocks=False, set_back=True)


@contextmanager
def sqlite() -> Iterator[Target]:
    """One file. Its fault is a connection that holds the write lock."""
    with TemporaryDirectory(prefix="holdfast-chaos-") as folder:
        file = f"{folder}/chaos.db"
        url = f"sqlite:///{file}"
        with holdfast.Client(url) as client:
            client.migrate()

        def query(text: str) -> Rows:
            with closing(sqlite3.connect(file, timeout=60)) as connection, connection:
                return connection.execute(text).fetchall()

        for text in (*protected_tables.TABLES, _ALL_GRANTS, _KEEP_SQLITE):
            query(text)
        yield Target([url], [_blocking_writer(file)], lambda: url, query)


TARGETS: dict[str, Callable[[], AbstractContextManager[Target]]] = {
    "postgres": postgres,
    "sqlite": sqlite,
    "clocks": clocks,
    "restores": restores,
}


def available_targets() -> list[str]:
    """The names of the targets that can run on this machine."""
    return [name for name in TARGETS if name != "clocks" or faketime() is not None]


def force(target: Target, name: str) -> Fault:
    """An operator releases a lease by force, if it is held."""

    def begin() -> None:
        with suppress(holdfast.HoldfastError), holdfast.Client(target.direct()) as operator:
            operator.leases.force_release(name, actor="nemesis", reason="chaos")

    return Fault("force", name, begin)


def _blocking_writer(file: str) -> Fault:
    """A transaction that holds the write lock until it is healed."""
    healed = threading.Event()
    writers: list[threading.Thread] = []

    def write(begun: threading.Event) -> None:
        with closing(sqlite3.connect(file, timeout=0.5, isolation_level=None)) as connection:
            try:
                connection.execute("begin immediate")
            except sqlite3.OperationalError:
                return  # a paused contender holds the write lock, which has the same effect
            finally:
                begun.set()
            healed.wait()
            connection.execute("rollback")

    def begin() -> None:
        healed.clear()
        begun = threading.Event()
        writers.append(threading.Thread(target=write, args=(begun,), daemon=True))
        writers[-1].start()
        begun.wait()

    def heal() -> None:
        healed.set()
        writers.pop().join()

    return Fault("writer", file, begin, heal)
