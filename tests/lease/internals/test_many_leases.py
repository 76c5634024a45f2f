"""Thousands of leases that end at once: the server's lock table is not for them, nor is one statement without end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import holdfast
from holdfast.testing import Postgres
from tests.children import NONE, Child, eventually, query, rows
from tests.conftest import migrated

MANY = 6000


@pytest.fixture(scope="module")
def small_server() -> Iterator[Postgres]:
    """Whose lock table has room for far fewer."""
    with Postgres.create(settings={"max_connections": 20, "max_locks_per_transaction": 10}) as server:
        yield server


@pytest.fixture
def url(small_server: Postgres) -> str:
    return migrated(small_server.database())


def add_leases(url: str, like: str) -> None:
    """Many more on the beat of that one, as if the same process had acquired them."""
    query(
        url,
        "insert into holdfast.lease select 'lease-' || i, holder, beat, uuid_send(gen_random_uuid()), fence,"
        f" acquired_at, null, false, kind, role from holdfast.lease, generate_series(1, {MANY}) i where name = %s",
        like,
    )
    assert rows(url)["lease"] > MANY


def test_a_client_that_is_closed_gives_all_of_them_back(url: str) -> None:
    with holdfast.Client(url) as client:
        client.lease("a", ttl=3600).acquire()
        add_leases(url, "a")
    eventually(lambda: rows(url) == NONE, "nothing is left, long before the TTL")


def test_a_process_that_ends_gives_all_of_them_back(url: str) -> None:
    program = """
    import sys, holdfast, holdfast.database.background
    holdfast.database.background.EXIT_BUDGET = 60.0  # a busy machine needs longer
    client = holdfast.Client(sys.argv[1])
    grant = client.lease("a", ttl=3600).acquire()
    print("held")
    input()
    """
    with Child(program, url) as holder:
        holder.expect("held")
        add_leases(url, "a")
        holder.say("go")
        holder.wait()
        eventually(lambda: rows(url) == NONE, "nothing is left")


def test_a_wipe_takes_all_of_them_away_and_tells_their_holder(url: str) -> None:
    with holdfast.Client(url) as client, holdfast.Client(url) as operator:
        grant = client.lease("a", ttl=600, renew_every=0.2).acquire()
        add_leases(url, "a")
        guard = operator._guard_lease("guard", ttl=500).acquire()
        assert operator.leases.wipe(guard) == MANY + 1
        assert [each.name for each in operator.leases.list()] == ["guard"]
        eventually(lambda: grant.lost, "the holder learns of it with its next heartbeat")
        [past] = operator.leases.history("a")
        assert (past.outcome, past.actor) == ("forced", guard.holder)
