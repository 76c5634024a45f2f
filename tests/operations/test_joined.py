"""Operations in a transaction that is open already: they belong to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing.operation_contract import leave_half_done
from tests.operations.user_connections import FEW, JOINED, KINDS, key, logged, opened, work
from tests.user_connections import AUTOCOMMIT, ask, entered, settled


@pytest.mark.parametrize("kind", KINDS)
async def test_one_that_is_open_is_joined_and_its_commit_is_the_callers(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as each:
        name = key()

        def run(what: str, **options: Any) -> Any:
            return settled(each.client.operation(name, tx=each.connection).run(work(each, what, **options)))

        for end in (each.rollback, each.commit):
            await each.begin()
            await each.write("mine")
            outcome = await run("done", result=7)
            assert (outcome.result, outcome.replayed, outcome.committed) == (7, False, False)
            again = await run("again")
            assert (again.result, again.replayed, again.committed) == (7, True, False), "it sees what it has written"
            assert logged(each.url, name) == []
            await end()
        assert each.rows() == ["done", "mine"]
        assert logged(each.url, name) == [("success", 1)]
        await each.begin()
        await each.write("more")
        assert (await run("again")).committed, "what was done before is committed, whatever becomes of this one"
        await each.rollback()


@pytest.mark.parametrize("kind", JOINED)
async def test_the_first_statement_of_a_transaction_is_joined_too(kind: str, tmp_path: Path) -> None:
    """Nothing that the caller does after it is undone without it, and nothing is committed that the caller did not."""
    async with opened(kind, tmp_path) as each:
        name = key()

        def run(what: str, **options: Any) -> Any:
            return settled(each.client.operation(name, tx=each.connection).run(work(each, what, **options)))

        for end in (each.rollback, each.commit):
            with pytest.raises(ValueError, match="broken"):
                await run("failed", error=ValueError("broken"))
            assert (await run("done", result=7)).committed is False
            await each.write("mine")
            assert (each.rows(), logged(each.url, name)) == ([], [])
            await end()
        assert (each.rows(), logged(each.url, name)) == (["done", "mine"], [("success", 2)])
        again = await run("again")
        assert (again.result, again.replayed, again.committed) == (7, True, True)
        if kind != "sqlite3-autocommit-off":
            assert not each.in_transaction(), "a replay leaves nothing to commit"


@pytest.mark.parametrize("kind", KINDS)
async def test_join_says_whose_the_commit_is(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as each:
        own, joined = key(), key()

        def run(name: str, join: bool | None, what: str) -> Any:
            return settled(each.client.operation(name, tx=each.connection, join=join).run(work(each, what, result=7)))

        if kind in AUTOCOMMIT:
            with pytest.raises(ValueError, match=f"^operation '{joined}': join=True, and tx is in autocommit mode "):
                await run(joined, True, "refused")
            outcome = await run(own, False, "own")
            assert (outcome.result, outcome.committed) == (7, True)
        else:
            with pytest.raises(ValueError, match=f"^operation '{joined}': join=False, and a transaction is open on tx"):
                await run(joined, False, "refused")
        await each.begin()
        await each.write("mine")
        with pytest.raises(ValueError, match=f"^operation '{joined}': join=False, and a transaction is open on tx"):
            await run(joined, False, "refused")
        outcome = await run(joined, True, "joined")
        assert (outcome.result, outcome.committed) == (7, False)
        assert logged(each.url, joined) == []
        await each.commit()
        assert logged(each.url, joined) == [("success", 1)]
        async with entered(each.client.operation(key(), tx=each.connection, join=kind not in AUTOCOMMIT)):
            pass


@pytest.mark.parametrize("kind", FEW)
async def test_of_what_fails_in_a_joined_transaction_stays_that_it_was_tried(kind: str, tmp_path: Path) -> None:
    """Nothing of its effect, or whoever goes on after the error would commit one that nobody knows of. It belongs to
    that transaction: what that takes back was never begun."""
    async with opened(kind, tmp_path) as each:
        name = key()

        def run(what: str, **options: Any) -> Any:
            operation = each.client.operation(name, tx=each.connection, retry=holdfast.Retry(attempts=2))
            return settled(operation.run(work(each, what, **options)))

        def told() -> list[tuple[str, int]]:
            return [(event.type, event.attempt) for event in each.other.relays.events(name)]

        for end in (each.rollback, each.commit):
            await each.begin()
            await each.write("mine")
            with pytest.raises(ValueError, match="broken"):
                await run("half", error=ValueError("broken"))
            with pytest.raises(ValueError, match="cannot be kept"):
                await run("half", result=object())
            with pytest.raises(holdfast.OperationFailed, match="was tried 2 times, the last time with ValueError"):
                await run("more")
            assert (logged(each.url, name), each.other.reviews.list(key=name), told()) == ([], [], [])
            await end()
        assert each.rows() == ["mine"]
        assert logged(each.url, name) == [("failure", 2)]
        assert told() == [("START", 1), ("FAIL", 1), ("START", 2), ("FAIL", 2)]
        assert each.other.operations.verify(name).problems == ()
        [review] = each.other.reviews.list(key=name)
        each.other.reviews.approve(review.id, actor="jane", reason="once more")
        await each.begin()
        await each.write("yours")
        assert (await run("done", result=3)).attempt == 3
        await each.commit()
        assert each.rows() == ["done", "mine", "yours"]
        assert told()[4:] == [("START", 3), ("COMPLETE", 3)]


@pytest.mark.parametrize("kind", FEW)
async def test_an_error_that_is_not_true_undoes_what_it_ends_as_any_other(kind: str, tmp_path: Path) -> None:
    """As one is that has a length, and nothing in it: psycopg commits a block that ends with it."""

    class Problems(Exception):
        def __len__(self) -> int:
            return 0

    async with opened(kind, tmp_path) as each:
        name = key()
        for joins in (False, True):
            if joins:
                await each.begin()
                await each.write("mine")
            with pytest.raises(Problems):
                await settled(each.client.operation(name, tx=each.connection).run(work(each, "half", error=Problems())))
            if each.in_transaction():
                await each.commit()
        assert (each.rows(), logged(each.url, name)) == (["mine"], [("failure", 2)])


@pytest.mark.parametrize("level", ["READ_COMMITTED", "REPEATABLE_READ", "SERIALIZABLE"])
def test_in_a_joined_transaction_it_is_tried_again_and_remembered_at_every_isolation_level(
    postgres_url: str, level: str
) -> None:
    ask(postgres_url, "create table work (what int)")
    ask(postgres_url, "insert into work values (0)")
    calls: list[int] = []
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:
        mine.isolation_level = psycopg.IsolationLevel[level]
        mine.execute("select * from work")

        def third() -> int:
            mine.execute("insert into work values (%s)", [len(calls)])
            calls.append(1)
            if len(calls) < 3:
                raise ValueError("not yet")
            return len(calls)

        outcome = client.operation("a", tx=mine, retry=holdfast.Retry(in_this_run=2)).run(third)
        assert (outcome.attempt, outcome.result, outcome.committed) == (3, 3, False)
        operation = client.operation("b", tx=mine, retry=holdfast.Retry(remember=[ValueError]))
        for error in (ValueError, holdfast.OperationFailed):
            with pytest.raises(error, match="for good"):
                operation.run(lambda: (_ for _ in ()).throw(ValueError("for good")))
        mine.commit()
        with pytest.raises(holdfast.OperationFailed, match="for good"):
            operation.run(third)

        def collide() -> None:
            mine.execute("update work set what = 9 where what = 0")

        def end() -> None:
            mine.execute("select pg_terminate_backend(pg_backend_pid())")

        if level != "READ_COMMITTED":
            mine.execute("select * from work")
            ask(postgres_url, "update work set what = what")
            with pytest.raises(psycopg.errors.SerializationFailure):
                client.operation("c", tx=mine, retry=holdfast.Retry(remember=[Exception])).run(collide)
            mine.execute("insert into work values (4)")
            mine.commit()
        mine.execute("insert into work values (5)")
        with pytest.raises(psycopg.errors.AdminShutdown):
            client.operation("c", tx=mine, retry=holdfast.Retry(remember=[Exception])).run(end)
        events = [(each.label, each.type) for each in client.relays.events()]
        assert events == [
            *[("a", type) for type in ("START", "FAIL", "START", "FAIL", "START", "COMPLETE")],
            ("b", "START"), ("b", "FAIL"),
        ]  # fmt: skip
        assert client.operations.verify().problems == ()


def test_a_rollback_that_fails_leaves_a_joined_transaction_usable(postgres_url: str) -> None:
    def cannot() -> None:
        mine.execute("insert into work values (1)")
        raise RuntimeError("cannot")

    ask(postgres_url, "create table work (what int)")
    leave_half_done(postgres_url, "k")
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine:
        mine.execute("insert into work values (2)")
        with pytest.raises(RuntimeError, match="cannot") as told:
            client.operation("k", tx=mine, rollback=cannot).run(lambda: 1)
        mine.commit()
        assert told.value is not None
    assert ask(postgres_url, "select what from work") == [(2,)]
