"""Re-entry: the same thread or task asks the same client again for what it holds."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import holdfast
from tests.children import PATIENCE, eventually
from tests.lock.looks import queued

AGENT = ("agent", 7)
LONG = PATIENCE


def test_reentry_raises_at_once_and_the_outer_lock_stays_held(either: str) -> None:
    with holdfast.Client(either) as client, holdfast.Client(either) as other:
        with client.lock(AGENT) as outer:
            for _ in range(2):
                with pytest.raises(holdfast.LockReentered, match="still held") as refused, client.lock(AGENT):
                    pass
                assert isinstance(refused.value, holdfast.NotAcquired)
                assert client.lock(AGENT).try_acquire() is None
                with client.lock(AGENT).or_skip() as inner:
                    assert inner is None
                outer.check()
                assert other.lock(AGENT).try_acquire() is None
        assert other.lock(AGENT).try_acquire() is not None


@pytest.mark.parametrize(("held", "wanted"), [(True, True), (True, False), (False, True)])
def test_a_shared_holder_cannot_take_it_twice_either(either: str, held: bool, wanted: bool) -> None:
    """As a writer it would wait for itself; as a reader it would wait behind a writer that waits for it."""
    with holdfast.Client(either) as client, holdfast.Client(either) as other:
        with client.lock(AGENT, shared=held) as outer:
            with pytest.raises(holdfast.LockReentered, match="still held"):
                client.lock(AGENT, shared=wanted, timeout=LONG).acquire()
            assert client.lock(AGENT, shared=wanted).try_acquire() is None
            outer.check()
            assert other.lock(AGENT).try_acquire() is None
        assert other.lock(AGENT).try_acquire() is not None


async def test_reentry_in_a_task_raises_at_once_and_the_outer_lock_stays_held(either: str) -> None:
    async with holdfast.AsyncClient(either) as client:
        async with client.lock(AGENT) as outer:
            with pytest.raises(holdfast.LockReentered):
                await client.lock(AGENT).acquire()
            async with client.lock(AGENT).or_skip() as inner:
                assert inner is None
            outer.check()
        async with client.lock(AGENT).or_skip() as grant:
            assert grant is not None


@pytest.mark.parametrize(
    "wrapped",
    [
        pytest.param(asyncio.create_task, id="task"),
        pytest.param(asyncio.gather, id="gather"),
        pytest.param(lambda asking: asyncio.wait_for(asking, LONG), id="wait_for"),
    ],
)
async def test_a_task_that_the_holder_awaits_is_another_one_and_its_timeout_ends_it(
    either: str, wrapped: Callable[..., Any]
) -> None:
    """The block cannot end before the task does. Only the timeout can end that, and the holder keeps the lock."""
    async with holdfast.AsyncClient(either) as client:

        async def ask() -> None:  # wait_for has no task of its own from Python 3.12 on
            await asyncio.create_task(client.lock("a", timeout=0.05).acquire())

        async with client.lock("a") as outer:
            with pytest.raises(holdfast.AcquireTimeout, match="is held"):
                await wrapped(ask())
            outer.check()
        assert await client.lock("a").try_acquire() is not None


async def test_a_task_that_is_awaited_by_whoever_has_passed_on_the_grant_is_somebody_else(either: str) -> None:
    """Without a block, anybody may have it to release."""
    async with holdfast.AsyncClient(either) as client:
        grant = await client.lock("a").acquire()

        async def give_back() -> bool:
            while not queued(client):  # noqa: ASYNC110
                await asyncio.sleep(0)
            return await grant.release()

        released, heir = await asyncio.gather(give_back(), client.lock("a", timeout=LONG).acquire())
        assert (released, await heir.release()) == (True, True)


@pytest.mark.parametrize("way", ["background", "shield", "wait"])
async def test_a_task_that_the_holder_goes_on_without_is_somebody_else(either: str, way: str) -> None:
    """It inherits the context of its maker, and still it waits its turn, and gets it."""
    async with holdfast.AsyncClient(either) as client:
        async with client.lock("a"):
            heir = asyncio.create_task(client.lock("a", timeout=LONG).acquire())
            if way == "shield":
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(heir), 0.05)
            else:
                await asyncio.wait([heir] if way == "wait" else [asyncio.create_task(asyncio.sleep(0))], timeout=0.05)
            assert not heir.done()
        assert await (await heir).release() is True


def test_a_thread_started_inside_the_block_is_somebody_else(either: str) -> None:
    with holdfast.Client(either) as client, ThreadPoolExecutor(1) as pool:
        with client.lock("a"):
            context = contextvars.copy_context()
            with pytest.raises(holdfast.LockReentered):
                context.run(client.lock("a", timeout=LONG).acquire)
            heir = pool.submit(context.run, client.lock("a", timeout=LONG).acquire)
            eventually(lambda: queued(client), "it waits")
        assert heir.result(LONG).release() is True


def test_a_thread_with_the_context_of_another_is_somebody_else(either: str) -> None:
    with holdfast.Client(either) as client:

        async def main() -> None:
            with client.lock("a"), pytest.raises(holdfast.AcquireTimeout):
                await asyncio.to_thread(lambda: client.lock("a").acquire(timeout=0.05))

        asyncio.run(main())


def test_another_client_is_somebody_else_even_in_the_same_thread(either: str) -> None:
    with holdfast.Client(either) as client, holdfast.Client(either) as other, client.lock("a"):
        other.lock("warm").acquire().release()
        with pytest.raises(holdfast.AcquireTimeout):
            other.lock("a").acquire(timeout=0.05)


def test_who_handed_the_grant_to_another_thread_may_wait_for_it(either: str) -> None:
    """Re-entry is about what is held; it is over when somebody else has released it."""
    with holdfast.Client(either) as client, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            grant = client.lock("a").acquire()
            assert pool.submit(grant.release).result(LONG) is True


async def test_tasks_that_share_a_context_are_not_one(either: str) -> None:
    """Neither is another's re-entry theirs, nor is their own lost when the other locks something else meanwhile."""
    context = contextvars.copy_context()
    async with holdfast.AsyncClient(either) as client:

        async def first() -> None:
            async with client.lock("a"):
                other = asyncio.create_task(second(), context=context)
                await asyncio.wait([other])
                other.result()
                with pytest.raises(holdfast.LockReentered):
                    await client.lock("a").acquire(timeout=LONG)
                assert await client.lock("a").try_acquire() is None

        async def second() -> None:
            async with client.lock("b"):
                with pytest.raises(holdfast.AcquireTimeout):
                    await client.lock("a").acquire(timeout=0.01)

        await asyncio.create_task(first(), context=context)


def test_threads_that_share_a_context_are_not_one(either: str) -> None:
    context = contextvars.copy_context()
    with holdfast.Client(either) as client, ThreadPoolExecutor(1) as pool:

        def elsewhere() -> None:
            with client.lock("b"), pytest.raises(holdfast.AcquireTimeout):
                client.lock("a").acquire(timeout=0.01)

        grant = context.run(client.lock("a").acquire)
        pool.submit(context.run, elsewhere).result(LONG)
        with pytest.raises(holdfast.LockReentered):
            context.run(client.lock("a").acquire, timeout=LONG)
        assert grant.release() is True
