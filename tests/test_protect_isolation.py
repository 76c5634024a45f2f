"""Protection at every isolation level: snapshots that hide the takeover, and conflicts that are none of the lease's."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import EngineError, FencedOut
from tests.subjects import ask, make_table, shared_postgres

FORMS = pytest.mark.parametrize("at", ["start", "commit"])


@pytest.fixture
def url() -> str:
    return shared_postgres()


@pytest.fixture
def name() -> str:
    return f"lease-{secrets.token_hex(4)}"


@pytest.fixture
def client(url: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(url) as made:
        yield made


@FORMS
@pytest.mark.parametrize("isolation", psycopg.IsolationLevel)
def test_after_a_forced_release_the_old_holder_cannot_commit(
    url: str, client: holdfast.Client, name: str, at: Any, isolation: psycopg.IsolationLevel
) -> None:
    """Its beat is alive, and its snapshot shows the lease as it was: only the row itself can tell."""
    table = make_table(url)
    grant = client.lease(name).acquire()

    def commit() -> None:
        grant.protect(connection, at=at)
        connection.execute(f"insert into {table} values ('stale')".encode())
        connection.commit()

    with psycopg.connect(url) as connection:
        connection.isolation_level = isolation
        connection.execute("select 1")
        assert client.leases.force_release(name, actor="test", reason="stuck")
        with pytest.raises(FencedOut):
            commit()
        connection.rollback()
    assert ask(url, f"select what from {table}") == []


@FORMS
def test_serializable_transactions_that_protect_different_leases_do_not_conflict(
    url: str, client: holdfast.Client, name: str, at: Any
) -> None:
    """They have nothing in common but holdfast's own tables; which are vacuumed, as they will be: plans change then."""
    grants = [client.lease(f"{name}-{number}").acquire() for number in range(2)]
    ask(url, "vacuum analyze holdfast.commit_check, holdfast.lease, holdfast.beat")
    with psycopg.connect(url) as one, psycopg.connect(url) as two:
        one.isolation_level = two.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        grants[0].protect(one, at=at)
        grants[1].protect(two, at=at)
        one.commit()
        two.commit()


@FORMS
def test_a_conflict_of_the_users_own_serializable_transactions_is_not_told_as_a_lost_lease(
    url: str, client: holdfast.Client, name: str, at: Any
) -> None:
    """Trying again helps there. Each of the two has read what the other writes; the second hears of it when it
    protects, or inside its COMMIT from the check of the lease."""
    table = make_table(url)
    grant = client.lease(name).acquire()
    with psycopg.connect(url) as one, psycopg.connect(url) as two:
        for each in (one, two):
            each.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
            if at == "commit":
                grant.protect(each, at=at)
            each.execute(f"select count(*) from {table}".encode())
        for each in (one, two):
            each.execute(f"insert into {table} values ('skewed')".encode())
        one.commit()
        with pytest.raises((EngineError, psycopg.errors.SerializationFailure), match="read/write dependencies") as told:
            two.commit() if at == "commit" else grant.protect(two)
        assert not isinstance(told.value, FencedOut)
        two.rollback()
    assert len(ask(url, f"select * from {table}")) == 1
