"""Whoever is interrupted, wherever: their connection is theirs again, no lease stays, and a retry does what is left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dis import get_instructions
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.operations import attempt, own_transaction, own_transaction_async
from tests.children import eventually
from tests.interrupts import Interrupt, generated
from tests.operations.user_connections import key, logged, opened, work
from tests.user_connections import AUTOCOMMIT, Subject, ask

STRIDE = int(os.environ.get("HOLDFAST_INTERRUPT_STRIDE", "13"))
WIDE_STRIDE = STRIDE if STRIDE == 1 else 3 * STRIDE
"""For SQLite, where no unread answer can stay on a connection: few places show that."""


@cache
def _looked_at(code: CodeType) -> set[int]:
    """Where the interpreter has just looked for signals: after a call, and when a function begins."""
    found, before = set(), ""
    for each in get_instructions(code):
        if before in ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"):
            found.add(each.offset)
        before = each.opname
    return found


class Signal(Interrupt):
    """But for the moments in which a lease is nobody's: when it was acquired, and when it is being released."""

    def spares(self, code: CodeType, place: int) -> bool:
        return place not in _looked_at(code) or code.co_name in ("acquire", "_release")


PRIMITIVES = ("database/connections", "governance", "lease", "lock", "objects", "operations")


def wherever(
    act: Callable[[str], object], after: Callable[[str], None], *, first: int, stride: int,
    code: tuple[str, ...] = PRIMITIVES,
) -> None:  # fmt: skip
    """Interrupted in turn at every ``stride``-th place from ``first`` on, which differs between the tests of the same
    code; ``after`` looks at what is left then, and is not interrupted."""
    for place in count(first % stride, stride):
        name, signal = key(), Signal(place, *generated(*code))
        try:
            with signal:
                act(name)
        except (KeyboardInterrupt, ValueError):
            pass
        if not signal.raised:
            break
        assert (own_transaction._by_connection, attempt.entered_attempts()) == ({}, ()), signal.where
        try:
            after(name)
        except (AssertionError, holdfast.HoldfastError) as problem:
            raise AssertionError(f"interrupted at {signal.where}") from problem
    assert place > 100, "it was interrupted until it came to its end"


@pytest.mark.parametrize("kind", ["psycopg-autocommit", "sqlite3-manual", "psycopg", "sqlite3"])
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_transaction_that_is_interrupted_is_over_and_leaves_nothing(
    kind: str, joins: bool, fails: bool, tmp_path: Path
) -> None:
    """One that stayed open would be joined by the next operation, and not be committed; or be committed by the caller,
    with half of an effect."""
    async with opened(kind, tmp_path) as each:
        mine = each.connection

        def act(name: str) -> None:
            if joins:
                mine.execute("begin" if kind != "psycopg" else "select 1")
            error = ValueError("x") if fails else None
            each.client.operation(name, tx=mine).run(work(each, name, error=error))

        def after(name: str) -> None:
            if joins or kind in AUTOCOMMIT:  # else it may be open, and empty
                assert _in_transaction(mine) == joins
            mine.commit()  # as a caller may who has caught it
            done = logged(each.url, name) == [("success", 1)]
            assert _effects(each, name) == int(done)
            assert each.client.operations.verify(name).passed
            each.client.operation(name, tx=mine).run(work(each, name))
            mine.commit()
            assert _effects(each, name) == 1

        each.client.operation(key(), tx=mine).run(int)
        mine.commit()
        stride = WIDE_STRIDE if kind.startswith("sqlite3") else STRIDE
        wherever(act, after, first=4 * kind.startswith("sqlite3") + 2 * joins + fails, stride=stride)
        mine.rollback()


@pytest.mark.parametrize("way", ["run", "batch"])
@pytest.mark.parametrize("fails", [False, True])
def test_no_lease_stays_wherever_it_is_interrupted(way: str, fails: bool, sqlite_url: str) -> None:
    done: list[str] = []
    with holdfast.Client(sqlite_url) as client:

        def effect(name: str) -> None:
            done.append(name)
            if fails:
                raise ValueError("x")

        def act(name: str) -> None:
            if way == "run":
                client.operation(name).run(effect, name)
            else:
                client.operations.run_many([name], effect)

        def after(name: str) -> None:
            eventually(lambda: not client.leases.list(), "no lease is held")
            assert client.operations.verify(name).passed
            client.operation(name, verify=lambda: name in done, timeout=0).run(done.append, name)
            assert done.count(name) == 1

        client.operation("first").run(int)
        wherever(act, after, first=2 * (way == "batch") + fails, stride=WIDE_STRIDE, code=("operations",))


async def test_who_is_cancelled_while_a_failure_is_looked_at_has_the_connection_back(postgres_url: str) -> None:
    """That asks the server whether the function has ended the transaction, and so there is something to wait for."""
    ask(postgres_url, "create table work (what int)")
    async with (
        holdfast.AsyncClient(postgres_url) as client,
        await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as mine,
    ):

        async def effect() -> None:
            await mine.execute("insert into work values (1)")
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            raise ValueError("x")

        with pytest.raises(asyncio.CancelledError):
            await client.operation("it", tx=mine).run(effect)
        asyncio.current_task().uncancel()  # type: ignore[union-attr]
        assert (mine.info.transaction_status.name, own_transaction_async._by_connection) == ("IDLE", {})
        await mine.commit()
        async with client.operation("it", tx=mine):
            await mine.execute("insert into work values (2)")
    assert ask(postgres_url, "select what from work") == [(2,)]


def _in_transaction(connection: Any) -> bool:
    if isinstance(connection, psycopg.Connection):
        assert not connection._num_transactions
        return connection.info.transaction_status.name != "IDLE"
    return bool(connection.in_transaction)


def _effects(each: Subject, name: str) -> int:
    return each.rows().count(name)
