"""The types of results, checked by mypy when it checks this file, and called once to show that they are true."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, assert_type

import holdfast
from holdfast import AsyncOp, Op, Outcome


def test_an_outcome_has_the_type_of_the_result(sqlite_url: str) -> None:
    def load(op: Op) -> int:
        return op.attempt

    with holdfast.Client(sqlite_url) as client:
        outcome = assert_type(client.operation("a").run(load), Outcome[int])
        assert assert_type(outcome.result, int) == 1
        assert_type(client.operation("b").run(lambda: "x"), Outcome[str])
        wider: Outcome[object] = outcome
        assert wider.result == 1

        @client.operation(lambda name, times=1: f"c-{name}")
        def repeat(name: Any, times: int = 1) -> str:
            return str(name) * times

        assert assert_type(repeat("x", times=2), Outcome[str]).result == "xx"
        many = client.operations.run_many(["d", "e"], len, timeout=None)
        assert [assert_type(each, Outcome[int]).result for each in many] == [1, 1]


async def test_an_outcome_has_the_type_that_is_awaited(sqlite_url: str) -> None:
    async def load(op: AsyncOp) -> int:
        return op.attempt

    async def size(item: str) -> int:
        return len(item)

    async with holdfast.AsyncClient(sqlite_url) as client:
        outcome = assert_type(await client.operation("a").run(load), Outcome[int])
        assert assert_type(outcome.result, int) == 1
        assert assert_type(await client.operation("b").run(lambda: "x"), Outcome[str]).result == "x"

        @client.operation("c")
        async def answer(times: int = 1) -> str:
            return "x" * times

        running = assert_type(answer(times=2), Awaitable[Outcome[str]])
        assert (await running).result == "xx"
        many = await client.operations.run_many(["d", "e"], size, timeout=None)
        assert [assert_type(each, Outcome[int]).result for each in many] == [1, 1]
        plain = await client.operations.run_many(["f"], len, retry=holdfast.Retry(attempts=1))
        assert [assert_type(each, Outcome[int]).result for each in plain] == [1]
