"""An operation in the user's own transaction: effect, result and entries are one, whatever the driver."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.testing.operation_contract import RESULTS
from tests.conftest import migrated, server
from tests.operations.user_connections import FEW, key, logged, opened, work
from tests.user_connections import AUTOCOMMIT, settled, subject


@pytest.mark.parametrize("kind", AUTOCOMMIT)
async def test_effect_and_result_are_one_transaction(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as each:
        name = key()

        def run(what: str, **options: Any) -> Any:
            operation = each.client.operation(name, tx=each.connection)
            return settled(operation.run(work(each, what, **options)))

        with pytest.raises(ValueError, match="broken"):
            await run("failed", error=ValueError("broken"))
        assert each.rows() == []
        assert logged(each.url, name) == [("failure", 1)]
        outcome = await run("done", result={"rows": 1})
        assert (outcome.result, outcome.replayed, outcome.attempt, outcome.committed) == ({"rows": 1}, False, 2, True)
        assert each.rows() == ["done"]
        again = await run("again")
        assert (again.result, again.replayed) == ({"rows": 1}, True)
        assert each.rows() == ["done"]
        await each.begin()
        await each.write("mine")  # the connection is as usable as before
        await each.commit()
        assert each.rows() == ["done", "mine"]


@pytest.mark.parametrize("kind", FEW)
async def test_a_result_that_cannot_be_kept_undoes_the_effect(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as each:
        for wrong in (object(), b"x" * (2 << 20)):
            with pytest.raises(ValueError, match=r"^the result"):
                await settled(each.client.operation(key(), tx=each.connection).run(work(each, "half", result=wrong)))
        assert each.rows() == []


@pytest.mark.parametrize("kind", ["psycopg", "sqlite3"])
async def test_results_are_replayed_exactly(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as each:
        for result in RESULTS:
            name = key()
            for replayed in (False, True):
                operation = each.client.operation(name, tx=each.connection)
                outcome = await settled(operation.run(work(each, "x", result=result)))
                assert (outcome.result, type(outcome.result), outcome.replayed) == (result, type(result), replayed)


async def test_a_connection_to_another_database_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """It has tables like ours, and nobody would look there for what is done; a transaction that is open there is not
    joined either."""
    other, refused = migrated(server().database()), r"the connection is to another database than the client's"
    for kind in ("psycopg-autocommit", "psycopg", "connection-asyncpg-async"):
        async with opened(kind, tmp_path) as each, subject(kind, other) as stranger:
            name = key()
            for _ in range(2):
                with pytest.raises(ValueError, match=refused):
                    await settled(each.client.operation(name, tx=stranger.connection).run(work(stranger, name)))
                await stranger.begin()
                await stranger.write("before")
            await stranger.rollback()
            outcome = await settled(each.client.operation(name, tx=each.connection).run(work(each, name, 7)))
            if not outcome.committed:
                await each.commit()
            assert (outcome.result, outcome.replayed, stranger.rows(), each.rows()) == (7, False, [], [name])
            assert logged(other, name) == []
            grant = await settled(each.client.lease(name).acquire())
            with pytest.raises(holdfast.FencedOut, match="wrong database" if "psycopg" in kind else "has passed on"):
                await stranger.write_within(grant, "start", name)
            assert stranger.rows() == []


@pytest.mark.parametrize("kind", ["psycopg-autocommit", "connection-psycopg-async"])
async def test_a_connection_whose_encoding_lacks_a_letter_will_do(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as each:
        await each.run("set client_encoding to 'LATIN1'")
        if each.in_transaction():
            await each.commit()
        name = f"Ж-{key()}"
        for replayed in (False, True):
            outcome = await settled(each.client.operation(name, tx=each.connection).run(work(each, "x", "Ж")))
            assert (outcome.result, outcome.replayed) == ("Ж", replayed)
            if not outcome.committed:
                await each.commit()
        assert (each.rows(), logged(each.url, name)) == (["x"], [("success", 1)])
        grant = await settled(each.client.lease(name).acquire())
        with pytest.raises(ValueError, match=r"this connection's encoding.*lacks: SET client_encoding TO 'UTF8'"):
            await each.write_within(grant, "start", "y")
        await each.rollback()
        assert each.rows() == ["x"]


@pytest.mark.parametrize("kind", ["psycopg", "connection-asyncpg-async"])
async def test_a_transaction_that_can_write_nothing_is_refused_before_the_function_is_called(
    kind: str, tmp_path: Path
) -> None:
    """All that it did elsewhere would be done in vain, and that it was tried on record. A result can be had in it."""
    async with opened(kind, tmp_path) as each:
        name, done = key(), key()
        await settled(each.client.operation(done, tx=each.connection).run(work(each, "x", result=7)))
        await each.run("set session characteristics as transaction read only")
        await each.commit()
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{name}.*this transaction is read-only"):
                await settled(each.client.operation(name, tx=each.connection).run(lambda: pytest.fail("called")))
            assert (await settled(each.client.operation(done, tx=each.connection).run(work(each, "x")))).result == 7
            await each.run("select 1")  # and in one that is open already
        await each.rollback()
        assert logged(each.url, name) == []


def test_a_file_whose_commit_is_refused_is_left_without_a_transaction(sqlite_url: str) -> None:
    """SQLite keeps it open, with the effect and that it was done: whoever commits next would commit both."""
    with holdfast.Client(sqlite_url) as client:
        client.operations.list()
        path = sqlite_url.removeprefix("sqlite:///")
        with closing(sqlite3.connect(path, isolation_level=None)) as mine:
            mine.text_factory = bytes
            mine.executescript(
                "pragma foreign_keys = on; create table one (id integer primary key);"
                "create table other (one integer references one deferrable initially deferred)"
            )
            with pytest.raises(sqlite3.IntegrityError):
                client.operation("a", tx=mine).run(lambda: mine.execute("insert into other values (1)").close())
            assert not mine.in_transaction
            mine.commit()
            assert mine.execute("select count(*) from other").fetchone() == (0,)
    assert logged(sqlite_url, "a") == [("failure", 1)]
