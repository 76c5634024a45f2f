"""Blocks and decorators: what was entered is left, wherever that happens, and what cannot be held is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest

import holdfast
from tests.children import PATIENCE


async def test_a_block_entered_in_one_task_is_left_in_another(either: str) -> None:
    """As a fixture does, whose beginning and end are run in two tasks."""
    async with holdfast.AsyncClient(either) as client:
        stack = AsyncExitStack()
        grant = await asyncio.create_task(stack.enter_async_context(client.lease("a")))
        grant.check()
        await asyncio.create_task(stack.aclose())
        assert await client.leases.list() == []
        assert grant.lost


def test_a_block_entered_in_one_thread_is_left_in_another(either: str) -> None:
    """As a dependency of a web framework does, whose beginning and end are run in two threads of a pool."""
    with holdfast.Client(either) as client, ThreadPoolExecutor(1) as pool:
        stack = ExitStack()
        grant = pool.submit(stack.enter_context, client.lease("a")).result(PATIENCE)
        grant.check()
        stack.close()
        assert client.leases.list() == []
        assert grant.lost


async def test_two_blocks_of_one_handle_in_two_tasks_are_left_by_those_who_entered_them(either: str) -> None:
    """The same explicit holder may enter again; each task ends its own, in whatever order."""
    async with holdfast.AsyncClient(either) as client:
        handle = client.lease("a", holder="service")
        entered, leave = asyncio.Event(), asyncio.Event()
        fences = []

        async def first() -> None:
            async with handle as grant:
                fences.append(grant.fence)
                entered.set()
                await leave.wait()
                assert grant.fence == fences[0]

        task = asyncio.create_task(first())
        await entered.wait()
        async with handle as grant:
            leave.set()
            await task
            grant.check()
            assert [each.fence for each in await client.leases.list()] == [grant.fence]
        assert await client.leases.list() == []


def test_a_block_left_where_it_was_not_entered_is_told_when_there_is_a_choice(either: str) -> None:
    with holdfast.Client(either) as client, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        handle = client.lease("a", holder="service")
        for pool in (one, two):
            pool.submit(handle.__enter__).result(PATIENCE)
        with pytest.raises(RuntimeError, match="'a'"):
            handle.__exit__(None, None, None)
        for pool in (two, one):
            pool.submit(handle.__exit__, None, None, None).result(PATIENCE)
        assert client.leases.list() == []


def test_the_decorator_refuses_what_only_begins_when_it_is_called(either: str) -> None:
    """The lease would be released before the first line of its body runs."""

    async def coroutine() -> None: ...

    def generator() -> Iterator[None]:
        yield

    async def stream() -> AsyncIterator[None]:
        yield

    with holdfast.Client(either) as client:
        for function in (coroutine, generator, stream):
            with pytest.raises(TypeError, match=function.__name__):
                client.lease("a")(function)


async def test_the_decorator_of_the_async_client_refuses_plain_functions_and_generators(either: str) -> None:
    def plain() -> None: ...

    async def stream() -> AsyncIterator[None]:
        yield

    refused: Any
    async with holdfast.AsyncClient(either) as client:
        for refused in (plain, stream):
            with pytest.raises(TypeError, match=refused.__name__):
                client.lease("a")(refused)

        @client.lease("a")
        async def works() -> str:
            return (await client.leases.list())[0].name

        assert await works() == "a"
