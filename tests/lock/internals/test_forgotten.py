"""What nobody gives back: grants that are dropped, and blocks that the garbage collector ends, in whatever thread."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Generator
from contextlib import suppress
from types import CodeType
from typing import Any

import pytest

import holdfast
from holdfast.lock.executor_async import background
from tests.children import PATIENCE
from tests.interrupts import Interrupt


def test_a_grant_that_is_dropped_is_told_of_and_its_lock_stays(either: str) -> None:
    """The work may still go on: the garbage collector lets nobody else in. The client's end does."""
    with holdfast.Client(either) as other:
        with holdfast.Client(either) as client:
            client.lock("warm").acquire().release()
            with pytest.warns(ResourceWarning, match="lock 'a' was dropped without release"):
                client.lock("a").acquire()
            gc.collect()
            assert other.lock("a").try_acquire() is None
            assert client.lock("a").try_acquire() is None
        other.lock("a").acquire(timeout=PATIENCE).release()


async def forgets(client: holdfast.AsyncClient) -> None:
    await asyncio.create_task(client.lock("a").acquire())
    await asyncio.sleep(0)
    gc.collect()


async def test_a_grant_that_a_task_forgets_is_told_of(either: str) -> None:
    async with holdfast.AsyncClient(either) as client, holdfast.AsyncClient(either) as other:
        with pytest.warns(ResourceWarning, match="lock 'a'"):
            await forgets(client)
        assert await other.lock("a").try_acquire() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["lock", "skip", "lease"])
async def test_a_block_whose_task_the_garbage_collector_ends_in_another_thread_is_over(
    postgres_url: str, what: str
) -> None:
    """Nobody is at work in it any more; and there is no event loop in that thread."""

    def handle(client: holdfast.AsyncClient) -> Any:
        return client.lease("a", ttl=60) if what == "lease" else client.lock("a")

    async with holdfast.AsyncClient(postgres_url) as client, holdfast.AsyncClient(postgres_url) as other:
        ours, inside = handle(client), asyncio.Event()

        async def forgotten() -> None:
            async with ours.or_skip() if what == "skip" else ours:
                inside.set()
                await asyncio.Future()

        block = forgotten()
        task = asyncio.create_task(block)
        await inside.wait()
        with suppress(RuntimeError):
            await asyncio.to_thread(block.close)
        async with await handle(other).acquire(timeout=PATIENCE):
            task.cancel()


def test_a_block_that_the_garbage_collector_ends_in_the_pumps_own_thread_holds_up_nobody(either: str) -> None:
    """As it may in any thread: the pump would wait for itself, and everybody for the pump."""
    with holdfast.Client(either) as client, holdfast.Client(either) as other:

        def block() -> Generator[None, None, None]:
            with client.lock("a"):
                yield

        forgotten = block()
        next(forgotten)  # through the multiplexer, as all that come first
        background.loop().call_soon_threadsafe(forgotten.close)
        other.lock("a").acquire(timeout=PATIENCE).release()


class AtExit(Interrupt):
    """Before the first instruction of the end of a block."""

    def __init__(self) -> None:
        super().__init__(0, "/holdfast/lock/handle")

    def spares(self, code: CodeType, place: int) -> bool:
        return code.co_name not in ("__exit__", "__aexit__")


def test_a_block_that_is_interrupted_as_its_end_begins_is_released_with_its_grant(either: str, recwarn: Any) -> None:
    """As by Ctrl-C: nothing written in Python can catch it there."""
    with holdfast.Client(either) as client, holdfast.Client(either) as other:

        def block(interrupt: Interrupt) -> None:
            with client.lock("a"):
                interrupt.__enter__()

        interrupt = AtExit()
        try:
            block(interrupt)
        except KeyboardInterrupt:
            interrupt.__exit__()
            assert other.lock("a").try_acquire() is None, "the traceback still has it"
        assert interrupt.raised
        other.lock("a").acquire(timeout=PATIENCE).release()
        client.lock("a").acquire(timeout=PATIENCE).release()
    assert [str(each.message) for each in recwarn if each.category is ResourceWarning] == []


async def test_a_block_of_a_task_that_is_interrupted_as_its_end_begins_is_released_with_its_grant(either: str) -> None:
    async with holdfast.AsyncClient(either) as client, holdfast.AsyncClient(either) as other:

        async def block(interrupt: Interrupt) -> None:
            async with client.lock("a"):
                interrupt.__enter__()

        interrupt = AtExit()
        try:
            await block(interrupt)
        except KeyboardInterrupt:
            interrupt.__exit__()
            assert await other.lock("a").try_acquire() is None, "the traceback still has it"
        assert interrupt.raised
        await (await other.lock("a").acquire(timeout=PATIENCE)).release()
        await (await client.lock("a").acquire(timeout=PATIENCE)).release()


def test_what_is_over_or_listened_to_is_dropped_without_a_word(either: str, recwarn: Any) -> None:
    with holdfast.Client(either) as client:
        client.lock("released").acquire().release()
        with client.lock("in a block"), client.lock("skipped").or_skip():
            pass
        with pytest.raises(holdfast.LockReentered), client.lock("b"):
            client.lock("b").acquire()
        client.lock("whoever is called when it is lost has it", on_lost=print).acquire()
        closed = client.lock("closed").acquire()
    del closed
    gc.collect()
    assert [str(each.message) for each in recwarn if each.category is ResourceWarning] == []
