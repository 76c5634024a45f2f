"""What counts as an attempt, whichever way an operation is run; and that the log says of it what its entries say."""

from __future__ import annotations

import random
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import product
from select import select
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing.operation_contract import LONG, interrupted
from tests.operations.logs import LATER, fail, problems
from tests.operations.policies import WAYS, connected, every_way, runs


@pytest.mark.parametrize("how", ["rollback", "verify"])
@every_way
def test_a_rollback_or_a_probe_that_fails_uses_up_an_attempt(either: str, attempt: Any, how: str) -> None:
    """Else it would be called for ever, and nobody would be told."""
    calls: list[int] = []

    def fails(op: Any) -> None:
        calls.append(op.attempt)
        raise OSError("not now")

    with holdfast.Client(either) as client:
        client.operations.register("it", **{how: fails})
        with holdfast.Client(either) as dies:
            dies.operations.register("it", rollback=int)
            with pytest.raises(KeyboardInterrupt):
                dies.operation("a", rollback="it").run(interrupted)
        [left] = client.operations.recover()
        assert (left.status, left.reason) == ("partial", "it failed: OSError: not now")
        assert calls == [1], "nobody asks for it there, so none is used up"
        for error in (OSError, OSError, holdfast.OperationFailed):
            with pytest.raises(error, match="not now"):
                attempt(client, "a", lambda: pytest.fail("called"), **{how: fails})
            assert problems(client) == set()
        assert (calls, len(client.reviews.list(key="a"))) == ([1, 1, 1], 1)


def test_what_always_takes_too_long_is_not_tried_for_ever(postgres_url: str) -> None:
    """Nor is it remembered as if it could never be done."""

    def slow(mine: Any) -> None:
        mine.execute("set local statement_timeout = 10")
        mine.execute("select pg_sleep(60)")

    def idle(mine: Any) -> None:
        mine.execute("set local idle_in_transaction_session_timeout = 10")
        select([mine], [], [], LONG)  # until the server has had enough
        with suppress(psycopg.OperationalError):
            mine.pgconn.consume_input()  # the reason, which a reset of the connection would discard
        if mine.closed:  # the end of the connection has arrived, too: then psycopg does not say the reason any more
            raise psycopg.errors.IdleInTransactionSessionTimeout
        mine.execute("select 1")

    with holdfast.Client(postgres_url) as client:

        def tried(function: Any, joins: bool, *errors: type[Exception]) -> None:
            for error in errors:
                with psycopg.connect(postgres_url, autocommit=True) as mine:
                    if joins:
                        mine.execute("begin")
                    operation = client.operation(name, tx=mine, retry=holdfast.Retry(attempts=2, remember=[Exception]))
                    with pytest.raises(error):
                        operation.run(function, mine)

        slept, waited = psycopg.errors.QueryCanceled, psycopg.errors.IdleInTransactionSessionTimeout
        cases: list[tuple[Any, ...]] = [(slow, False, slept), (slow, True, slept), (idle, False, waited)]
        for function, joins, error in cases:
            name = f"{function.__name__}-{joins}"
            tried(function, joins, error, error, holdfast.OperationFailed)
            record = client.operations.get(name)
            assert record is not None
            assert (record.status, record.failures) == ("failure", 2)


def test_the_log_says_of_a_life_what_its_entries_say(either: str) -> None:
    """Whatever happens to an operation, and in whichever order: done, failed, left half done, mended or not, put away,
    rolled back or reset by hand."""
    chance = random.Random(7)

    def refuse() -> None:
        raise OSError("not now")

    with holdfast.Client(either) as client, connected(either) as mine:
        client.operations.register("works", rollback=int)
        client.operations.register("fails", rollback=refuse)
        key = holdfast.OperationKey(pipeline="p", task="t", dataset="d", operation="o", version="3", bucket="b")
        mends: list[dict[str, Any]] = [
            {"verify": lambda: False}, {"verify": lambda: True}, {"verify": refuse}, {"rollback": "works"},
            {"rollback": "fails"}, {"keep": 0.001},
            {"options": holdfast.OperationOptions(marks_effect=True)}, {},
        ]  # fmt: skip

        def run(way: str, function: Any, how: dict[str, Any]) -> None:
            runs(way, mine)(client, key, function, retry=holdfast.Retry(attempts=99), **how)

        def many(how: dict[str, Any]) -> None:
            client.operations.run_many(
                [key], fail, keep=0.001, retry=holdfast.Retry(attempts=99), rollback=how.get("rollback")
            )

        by = {"actor": "jane", "reason": "why"}
        steps: list[Any] = [
            *(partial(run, *each) for each in product(WAYS, (int, fail, interrupted))), many,
            lambda _: client.operations.recover(), lambda _: client.operations.expire(),
            lambda _: client.operations.reset(key, **by), lambda _: client.operations.rollback(key, **by),
            lambda _: client.operations.archive(datetime.now(UTC) + LATER, list),
        ]  # fmt: skip
        failing = [partial(run, way, fail) for way in WAYS]
        told = [(step, how) for how in mends for step in (*failing, steps[2], *failing)]
        told += [(chance.choice(steps), chance.choice(mends)) for _ in range(50)]
        seen: set[tuple[str, bool]] = set()
        for step, how in told:
            with suppress(OSError, ValueError, KeyboardInterrupt, LookupError, holdfast.HoldfastError):
                step(how)
            assert problems(client) == set(), (client.operations.get(key), client.operations.verify().broken)
            seen.update((each.status, each.failures > 2) for each in client.operations.list())
        assert seen >= {("partial", True), ("failure", True), ("success", False)}
