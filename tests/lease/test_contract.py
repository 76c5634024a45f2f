"""The lease contract on every engine, in both flavours; and what only our own engines can show."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from holdfast.testing.lease_contract import LONG, LeaseContract, waiting
from holdfast.testing.server import until
from holdfast.testing.sync_facade import SyncFacade
from tests.pairs import CONTRACT, ONE_FLAVOUR
from tests.raw_session import Raw

TABLES = ("lease", "beat", "history")


@pytest.fixture
def url(emptied: str) -> str:
    return emptied


def stored(url: str) -> dict[str, list[Any]]:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            return {table: connection.execute(f"select * from holdfast_{table}").fetchall() for table in TABLES}
    with psycopg.connect(url, autocommit=True) as database:
        return {table: database.execute(f"select * from holdfast.{table}".encode()).fetchall() for table in TABLES}


@CONTRACT
class TestLease(LeaseContract):
    def rows(self, url: str, client: Any) -> dict[str, list[Any]]:
        return stored(url)


def never_polls(client: Any) -> Any:
    """A client whose waiters ask again only when they are woken, or when their time is up."""
    inner = client._inner if isinstance(client, SyncFacade) else client
    inner._engine.poll = 1e6
    return client


def until_somebody_listens(url: str) -> None:
    listening = """
    select 1 from pg_locks join pg_database d on d.oid = database and d.datname = current_database()
     where locktype = 'advisory' and mode = 'ShareLock' and granted
    """
    with psycopg.connect(url, autocommit=True) as database:
        until(lambda: database.execute(listening).fetchone() is not None, what="the waiter listens")


@ONE_FLAVOUR
def test_a_release_in_another_process_wakes_the_waiter(connect: Callable[..., Any], postgres_url: str) -> None:
    """The clients have different URLs, so different keepers: the only way from one to the other is the database."""
    holder = connect(f"{postgres_url}?application_name=elsewhere")
    waiter = never_polls(connect(postgres_url))
    grant = holder.lease("import", ttl=86400).acquire()
    with waiting(lambda: waiter.lease("import", ttl=LONG).acquire(timeout=10 * LONG)) as won:
        until_somebody_listens(postgres_url)
        assert grant.release() is True
    assert won[0].fence > grant.fence


@ONE_FLAVOUR
def test_a_forced_release_wakes_the_waiter(connect: Callable[..., Any], postgres_url: str) -> None:
    operator = connect(f"{postgres_url}?application_name=elsewhere")
    waiter = never_polls(connect(postgres_url))
    operator.lease("import", ttl=86400).acquire()
    with waiting(lambda: waiter.lease("import", ttl=LONG).acquire(timeout=10 * LONG)):
        until_somebody_listens(postgres_url)
        operator.leases.force_release("import", actor="operator", reason="stuck")


@CONTRACT
def test_a_token_of_another_lease_releases_nothing(connect: Callable[..., Any], url: str) -> None:
    """Release is guarded by the name and the token together, in the database itself."""
    client = connect(url)
    with closing(Raw(url)) as raw:
        grant, other = client.lease("import", ttl=LONG).acquire(), client.lease("export", ttl=LONG).acquire()
        before = stored(url)
        for token in (other.token, str(uuid4())):
            assert raw.done("lease_release", name="import", token=token) is False
            assert raw.done("lease_renew", name="import", token=token) is False
        assert stored(url) == before
        assert raw.done("lease_release", name="import", token=grant.token) is True
