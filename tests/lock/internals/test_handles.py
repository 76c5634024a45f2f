"""One handle in many hands: whoever leaves a block frees what it held, and never what somebody else holds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

import holdfast
from holdfast.lock.pool import LockRequest
from holdfast.testing import Postgres, Proxy
from holdfast.testing.sync_facade import EventLoopThread, SyncFacade
from tests.children import PATIENCE, eventually, query
from tests.conftest import migrated
from tests.lock.looks import advisory, core, is_idle, queued, waiters


def terminate(url: str) -> None:
    for pid in {pid for *_, pid in advisory(url)}:
        query(url, "select pg_terminate_backend(%s, 60000)", pid)


def test_a_thread_that_skipped_leaves_the_holder_alone(either: str) -> None:
    with holdfast.Client(either) as client, holdfast.Client(either) as other, ThreadPoolExecutor(1) as pool:
        skip, held = client.lock("a").or_skip(), other.lock("a").acquire()
        skipped, entered = threading.Event(), threading.Event()

        def skips() -> None:
            with skip as nothing:
                assert nothing is None
                skipped.set()
                assert entered.wait(PATIENCE)

        skipping = pool.submit(skips)
        assert skipped.wait(PATIENCE)
        held.release()
        with skip as grant:
            assert grant is not None
            entered.set()
            skipping.result(PATIENCE)
            grant.check()
            assert other.lock("a").try_acquire() is None
        assert other.lock("a").try_acquire() is not None


async def test_a_task_that_skipped_leaves_the_holder_alone(either: str) -> None:
    async with holdfast.AsyncClient(either) as client, holdfast.AsyncClient(either) as other:
        skip, held = client.lock("a").or_skip(), await other.lock("a").acquire()
        skipped, entered = asyncio.Event(), asyncio.Event()

        async def skips() -> None:
            async with skip as nothing:
                assert nothing is None
                skipped.set()
                await entered.wait()

        skipping = asyncio.create_task(skips())
        await skipped.wait()
        await held.release()
        async with skip as grant:
            assert grant is not None
            entered.set()
            await skipping
            grant.check()
            assert await other.lock("a").try_acquire() is None
        assert await other.lock("a").try_acquire() is not None


def test_a_skip_that_raises_leaves_the_other_blocks_alone(either: str) -> None:
    """An interrupt in one thread's exit must not free what the others hold."""
    with holdfast.Client(either) as client, holdfast.Client(either) as other, ThreadPoolExecutor(1) as pool:
        skip = client.lock("a").or_skip()

        def skips_and_is_interrupted() -> None:
            with skip as nothing:
                assert nothing is None
                raise KeyboardInterrupt

        with skip as grant:
            assert grant is not None
            with pytest.raises(KeyboardInterrupt):
                pool.submit(skips_and_is_interrupted).result(PATIENCE)
            grant.check()
            assert other.lock("a").try_acquire() is None


def test_blocks_left_in_other_threads_than_they_were_entered_in_free_the_lock(postgres_url: str) -> None:
    """Frameworks enter and leave in whatever thread is free. Nobody can tell whose block ends: the lock that is held is
    freed by the last who leaves, not under whoever works in it."""

    def elsewhere(call: Callable[..., Any], *args: object) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call, *args).result(PATIENCE)

    with holdfast.Client(postgres_url) as client, holdfast.Client(postgres_url) as other:
        lock = client.lock("a")
        elsewhere(lock.__enter__)
        terminate(postgres_url)
        elsewhere(lock.__enter__)
        elsewhere(lock.__exit__, None, None, None)
        assert other.lock("a").try_acquire() is None, "somebody may still work in the second block"
        elsewhere(lock.__exit__, None, None, None)
        assert other.lock("a").try_acquire() is not None


def test_leaving_what_was_not_entered(either: str) -> None:
    with holdfast.Client(either) as client, pytest.raises(RuntimeError, match="not entered"):
        client.lock("a").__exit__(None, None, None)


def test_a_block_does_not_begin_with_a_grant_that_is_gone(either: str) -> None:
    with holdfast.Client(either) as client:
        grant = client.lock("a").acquire()
        with grant:
            assert client.lock("a").try_acquire() is None
        with pytest.raises(holdfast.LockLost, match="'a' was released"), grant:
            pytest.fail("it runs unlocked")


def test_a_closed_client_acquires_nothing_more() -> None:
    """Not even a thread that was waiting for the database to come back."""
    with Postgres.create() as server:
        url = migrated(server.database())
        holder, client = holdfast.Client(url), holdfast.Client(url)
        holder.lock("a").acquire()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: client.lock("a").acquire(timeout=600))
            eventually(lambda: waiters(url), "it stands in line")
            server.stop("immediate")
            eventually(lambda: not core(client).pool.entries, "it has been told, and asks again later")
            client.close()
            server.start()
            with pytest.raises(holdfast.EngineError, match="closed"):
                waiting.result(PATIENCE)
        assert advisory(url) == []
        holder.close()


@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_an_acquire_that_is_overtaken_by_close_opens_nothing(either: str, flavour: str) -> None:
    """It has passed the check at the door, and comes to the sessions when they are closed."""

    async def main() -> None:
        async with holdfast.AsyncClient(either) as client:
            await (await client.lock("a").acquire()).release()
            executor: Any = client._locks.executor  # type: ignore[union-attr]
            pool = executor.pool
        with pytest.raises(holdfast.EngineError, match="closed"):
            executor._start(asyncio.get_running_loop())
        refused(pool)

    def refused(pool: Any) -> None:
        request = LockRequest((b"1",), "a", waits=True, shared=False)
        assert pool.acquire(request) is None
        assert (request.state, pool.holds) == ("failed", [])

    if flavour == "asyncio":
        asyncio.run(main())
        return
    with holdfast.Client(either) as client:
        client.lock("a").acquire().release()
        executor: Any = client._locks.executor  # type: ignore[union-attr]
        pool = executor.pool
    with pytest.raises(holdfast.EngineError, match="closed"):
        executor._start()
    refused(pool)


async def test_whoever_is_let_in_while_the_client_is_closed_is_told_of_the_close(either: str) -> None:
    """And not that somebody else has it: it had it, and lost it before it could look."""
    client = holdfast.AsyncClient(either)
    held = await client.lock("a").acquire()
    heir = asyncio.create_task(client.lock("a").acquire())
    await asyncio.sleep(0)
    assert queued(client) == 1, "it stands in line"
    await held.release()
    await client.close()
    with pytest.raises(holdfast.EngineError, match="closed"):
        await heir


@pytest.mark.parametrize("how", ["failed", "timed out"])
def test_a_call_that_is_over_is_no_call_that_a_signal_interrupted(postgres_url: str, how: str) -> None:
    """Whoever comes next in the same thread, before the background thread has cleared it away, is let through."""
    with Proxy(postgres_url) as link, holdfast.Client(link.url) as client:
        client.lock("warm").acquire().release()
        grant = client.lock("a").acquire()
        eventually(lambda: is_idle(client), "there is a session to use")
        begun, slow = threading.Event(), threading.Event()

        def stand_still() -> None:
            begun.set()
            slow.wait(PATIENCE)

        core(client).post(stand_still)
        assert begun.wait(PATIENCE)
        if how == "failed":
            terminate(postgres_url)
            threading.Timer(0.05, slow.set).start()
            assert grant.release() is False
        else:
            link.stall("to_client")
            with pytest.raises(holdfast.AcquireTimeout):
                client.lock("b").acquire(timeout=0.05)
            link.heal()
            threading.Timer(0.05, slow.set).start()
        assert client.lock("c", timeout=PATIENCE).acquire().release() is True


def test_a_grant_that_is_lost_before_it_was_handed_out_is_asked_for_again(postgres_url: str) -> None:
    """Its session ends between the answer and the return: nobody has had it, so nobody needs to be told."""
    told: list[Any] = []
    with holdfast.Client(postgres_url) as client:
        client.lock("warm").acquire()
        executor: Any = client._locks.executor  # type: ignore[union-attr]
        acquire = executor.acquire

        def overtaken(request: Any, timeout: float) -> Any:
            executor.acquire = acquire
            assert acquire(request, timeout) == "held"
            terminate(postgres_url)
            eventually(lambda: request.state == "lost", "its session is gone")
            return request.state

        for take in ("try_acquire", "acquire"):
            executor.acquire = overtaken
            grant = getattr(client.lock("a", on_lost=told.append), take)()
            grant.check()
            assert grant.release() is True
    assert told == []


def test_of_two_threads_that_release_at_once_one_does(either: str) -> None:
    """A second unlock would free what the next holder has by then."""
    both = threading.Barrier(2)
    slot: Any = LockRequest.__dict__["state"]

    class Seen(LockRequest):
        """Both look at it before either goes on."""

        __slots__ = ()

        @property
        def state(self) -> Any:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            return slot.__get__(self)

        @state.setter
        def state(self, value: Any) -> None:
            slot.__set__(self, value)

    with holdfast.Client(either) as client, ThreadPoolExecutor(2) as pool:
        grant = client.lock("a").acquire()
        executor: Any = client._locks.executor  # type: ignore[union-attr]
        release, released = executor.release, []

        def counted(request: LockRequest) -> Any:
            released.append(request)
            return release(request)

        executor.release = counted
        grant._request.__class__ = Seen
        assert sorted(each.result(PATIENCE) for each in [pool.submit(grant.release) for _ in "12"]) == [False, True]
        assert len(released) == 1


def test_a_session_that_is_given_up_under_a_thread_grants_nothing(either: str) -> None:
    """The answer comes when the session has just been given up: nobody had it then, and nobody could be told."""
    with holdfast.Client(either) as client, holdfast.Client(either) as other:
        client.lock("warm").acquire().release()
        eventually(lambda: is_idle(client), "there is a session to use")
        [session] = core(client).pool.holds
        run = session.wire.run

        def overtaken(*args: Any) -> Any:
            answer, given_up = run(*args), threading.Event()
            core(client).post(core(client).lose, session, holdfast.EngineError("it seemed stuck"))
            core(client).post(given_up.set)
            assert given_up.wait(PATIENCE)
            return answer

        session.wire.run = overtaken
        with client.lock("a") as grant:
            entry: Any = grant._request.entry
            assert entry.session is not session
            assert other.lock("a").try_acquire() is None
        assert other.lock("a").try_acquire() is not None


def test_a_grant_of_one_event_loop_is_released_from_another(either: str) -> None:
    """By whoever has it, in whatever thread: the sessions belong to the loop that has opened them."""
    loop_thread = EventLoopThread()
    client = SyncFacade(loop_thread, holdfast.AsyncClient(either))
    with holdfast.Client(either) as other:
        for name in ("first", "second"):  # as the session is opened, and when it is open
            grant = client.lock(name).acquire()._inner
            assert asyncio.run(grant.release()) is True
            assert asyncio.run(grant.release()) is False
            assert other.lock(name).try_acquire() is not None
    client.close()
    loop_thread.close()


def test_a_grant_of_an_event_loop_that_does_not_run_is_released_when_it_does(postgres_url: str) -> None:
    loop, client = asyncio.new_event_loop(), holdfast.AsyncClient(postgres_url)
    with holdfast.Client(postgres_url) as other:
        grant = loop.run_until_complete(client.lock("a").acquire())
        with pytest.raises(RuntimeError, match="is not running"):
            asyncio.run(grant.release())
        assert other.lock("a").try_acquire() is None
        loop.run_until_complete(asyncio.sleep(0.01))
        other.lock("a").acquire(timeout=PATIENCE)
        grant = loop.run_until_complete(client.lock("b").acquire())
        loop.close()
        assert asyncio.run(grant.release()) is False
        other.lock("b").acquire(timeout=PATIENCE)
