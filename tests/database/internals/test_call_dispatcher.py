"""Calls of one client that wait for each other: what they share, and what stays each caller's own."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.database.call_dispatcher_async import SHARE
from holdfast.database.call_queue import MAX_CALLS
from holdfast.testing import Proxy
from tests.children import NONE, PATIENCE, eventually, query, rows
from tests.pairs import EACH_ONCE
from tests.raw_session import locked, trials, waiters

Connect = Callable[..., Any]
MANY = 16


@contextmanager
def occupied(client: Any, url: str) -> Iterator[None]:
    """The client's only session waits for a lock until the end of the block."""
    with ThreadPoolExecutor(1) as pool:
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as writer:
                writer.execute("begin immediate")
                first = pool.submit(client.lease("first", ttl=600).acquire)
                eventually(lambda: client._engine._dispatcher.is_busy(), "the first one is being sent")
                yield
        else:
            with locked(url) as connection:
                first = pool.submit(client.lease("first", ttl=600).acquire)
                eventually(lambda: waiters(connection) == 1, "the first one waits in the server")
                yield
        first.result(PATIENCE)


def leases(url: str) -> set[str]:
    return {name for (name,) in query(url, "select name from holdfast.lease")}


def queued(client: Any) -> int:
    return len(client._engine._dispatcher._queue.waiting)


def test_what_queued_while_one_was_sent_shares_a_transaction(connect: Connect, postgres_url: str) -> None:
    client = connect(postgres_url, sessions=1)
    client.lease("anchor", ttl=600).acquire()
    with ThreadPoolExecutor(MANY) as pool:
        with occupied(client, postgres_url):
            asked = [pool.submit(client.lease(f"a{i}", ttl=600).acquire) for i in range(MANY)]
            eventually(lambda: queued(client) == MANY, "all others wait")
        fences = {asking.result(PATIENCE).fence for asking in asked}
    assert len(fences) == MANY
    transactions = "select count(distinct xmin::text) from holdfast.lease where name <> 'anchor' and name <> 'first'"
    assert query(postgres_url, transactions) == [(1,)]


def test_a_commit_that_waited_too_long_for_a_lock_is_repeated_as_one(connect: Connect, postgres_url: str) -> None:
    """NOTIFY takes a lock of the whole server at the commit: no call of the batch is to blame."""
    client = connect(postgres_url, sessions=1)
    client.lease("anchor", ttl=600).acquire()
    query(
        postgres_url,
        """create sequence commits;
           create function wait() returns trigger language plpgsql as $$ begin
               if nextval('public.commits') = 1 then raise exception 'too long' using errcode = '55P03'; end if;
               return null;
           end $$;
           create constraint trigger wait after insert on holdfast.lease deferrable initially deferred
               for each row when (new.name like 'a%') execute function wait()""",
    )
    with ThreadPoolExecutor(MANY) as pool:
        with occupied(client, postgres_url):
            asked = [pool.submit(client.lease(f"a{i}", ttl=600).acquire) for i in range(MANY)]
            eventually(lambda: queued(client) == MANY, "all others wait")
        for asking in asked:
            asking.result(PATIENCE).check()
    transactions = "select count(distinct xmin::text) from holdfast.lease where name ~ '^a[0-9]'"
    assert query(postgres_url, transactions) == [(1,)]


def test_leases_slots_and_operations_share_a_transaction(connect: Connect, postgres_url: str) -> None:
    client = connect(postgres_url, sessions=1)
    client.lease("anchor", ttl=600).acquire()
    may_end = threading.Event()

    async def wait() -> None:
        await asyncio.to_thread(may_end.wait, PATIENCE)

    effect = (lambda: may_end.wait(PATIENCE)) if isinstance(client, holdfast.Client) else wait
    with ThreadPoolExecutor(3) as pool:
        with occupied(client, postgres_url):
            operation = pool.submit(client.operation("key", ttl=600).run, effect)
            asked = [
                pool.submit(client.lease("a", ttl=600).acquire),
                pool.submit(client.slots("pool", capacity=2, ttl=600).claim, owner="o"),
            ]
            eventually(lambda: queued(client) == 3, "all others wait")
        for asking in asked:
            asking.result(PATIENCE).check()
        transactions = "select count(*), count(distinct xmin::text) from holdfast.lease where name !~ 'anchor|first'"
        eventually(lambda: query(postgres_url, transactions) == [(3, 1)], "all three are written, in one transaction")
        may_end.set()
        operation.result(PATIENCE)


def test_behind_a_pooler_each_call_is_sent_alone(connect: Connect, postgres_url: str) -> None:
    """There the isolation level may be any, and a setting of one transaction may meet another server session."""
    client = connect(postgres_url, sessions=1)
    client.lease("anchor", ttl=600).acquire()
    client._engine._dispatcher.sessions[0].shares = False  # as it is with a session that is pooled
    with ThreadPoolExecutor(MANY) as pool:
        with occupied(client, postgres_url):
            asked = [pool.submit(client.lease(f"a{i}", ttl=600).acquire) for i in range(MANY)]
            eventually(lambda: queued(client) == MANY, "all others wait")
        for asking in asked:
            asking.result(PATIENCE).check()
    transactions = "select count(distinct xmin::text) from holdfast.lease where name <> 'anchor' and name <> 'first'"
    assert query(postgres_url, transactions) == [(MANY,)]


@EACH_ONCE
def test_a_refused_call_takes_nobody_with_it(connect: Connect, either: str) -> None:
    """Whatever the reason, the others are granted, once each."""
    client = connect(either, sessions=1)
    client.lease("anchor", ttl=600).acquire()
    if either.startswith("sqlite"):
        query(
            either,
            "create trigger refuse before insert on holdfast_lease when new.name like 'bad%' "
            "begin select raise(abort, 'not this one'); end",
        )
    else:
        query(
            either,
            """create function refuse() returns trigger language plpgsql as
               $$ begin raise exception 'not this one'; end $$""",
        )
        query(
            either,
            """create trigger refuse before insert on holdfast.lease
               for each row when (new.name like 'bad%') execute function refuse()""",
        )
    with ThreadPoolExecutor(2 * MANY) as pool:
        with occupied(client, either):
            names = [f"{'bad' if i % 5 == 3 else 'good'} {i}" for i in range(MANY)]
            asked = {name: pool.submit(client.lease(name, ttl=600).acquire) for name in names}
            eventually(lambda: queued(client) == MANY, "all others wait")
        for name, asking in asked.items():
            if name.startswith("good"):
                asking.result(PATIENCE).check()
            else:
                with pytest.raises(holdfast.EngineError, match="not this one"):
                    asking.result(PATIENCE)
    held = {record.name for record in client.leases.list()}
    assert held == {"anchor", "first", *(name for name in names if name.startswith("good"))}


@EACH_ONCE
def test_deadlines_are_each_callers_own(connect: Connect, either: str) -> None:
    client = connect(either, sessions=1)
    client.leases.list()

    def ask(timeout: float) -> Any:
        return client._engine.call("lease_history", {"name": None, "limit": 1}, timeout=timeout)

    with ThreadPoolExecutor(3) as pool:
        with occupied(client, either):
            patient = pool.submit(ask, 600.0)
            with pytest.raises(holdfast.EngineError, match=r"in progress|in time"):
                pool.submit(ask, 0.1).result(PATIENCE)
            assert not patient.done()
        assert patient.result(PATIENCE) is not None


async def test_a_cancelled_call_leaves_the_batch_to_its_neighbours(postgres_url: str) -> None:
    async with holdfast.AsyncClient(postgres_url, sessions=1) as client:
        anchor = await client.lease("anchor", ttl=600).acquire()
        with psycopg.connect(postgres_url) as connection:
            connection.execute("lock table holdfast.lease in access exclusive mode")
            tasks = [asyncio.create_task(client.lease(f"a{i}", ttl=600).acquire()) for i in range(MANY)]
            await asyncio.sleep(0)
            dispatcher: Any = client._engine._dispatcher
            assert len(dispatcher._channels[0].batch) + len(dispatcher._queue.waiting) == MANY
            for task in tasks[::3]:
                task.cancel()
            outcomes = await asyncio.gather(*tasks[::3], return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
        kept = [task for task in tasks if task not in tasks[::3]]
        names = {(await task).name for task in kept}
        eventually(lambda: leases(postgres_url) == {"anchor", *names}, "the cancelled ones are given back")
        anchor.check()


async def test_a_call_that_was_cancelled_while_it_waited_is_not_sent(postgres_url: str) -> None:
    async with holdfast.AsyncClient(postgres_url, sessions=1) as client:
        await client.leases.list()
        with psycopg.connect(postgres_url) as connection:
            connection.execute("lock table holdfast.lease in access exclusive mode")
            tasks: list[asyncio.Task[Any]] = [asyncio.create_task(client.leases.list())]
            await asyncio.sleep(0)
            tasks += [asyncio.create_task(client.objects.put_if("t", id, 1, holdfast.MustCreate())) for id in "ab"]
            await asyncio.sleep(0)
            assert queued(client) == 2
            tasks[1].cancel()
            await asyncio.wait(tasks[1:2])
            assert queued(client) == 1
        await tasks[2]
        assert await client.objects.get("t", "a") is None
        await tasks[0]


async def many_puts(client: holdfast.AsyncClient) -> None:
    written = [client.objects.put_if("t", str(i), i, holdfast.Unconditional()) for i in range(4 * SHARE)]
    assert len({record.version for record in await asyncio.gather(*written)}) == 4 * SHARE


async def test_many_tasks_are_served_by_two_sessions_at_once(postgres_url: str) -> None:
    async with holdfast.AsyncClient(postgres_url) as client:
        await client.leases.list()
        dispatcher: Any = client._engine._dispatcher
        assert len(dispatcher.sessions) == 1
        await many_puts(client)
        await asyncio.to_thread(eventually, lambda: len(dispatcher.sessions) == 2, "the second session is open")
        with psycopg.connect(postgres_url) as connection:
            connection.execute("lock table holdfast.object in access exclusive mode")
            written = asyncio.create_task(many_puts(client))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [len(channel.batch) for channel in dispatcher._channels] == [1, SHARE, 0]
        await written
    assert query(postgres_url, "select count(*) from holdfast.object") == [(4 * SHARE,)]


async def test_a_call_that_has_waited_and_a_load_to_share_open_one_session(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are reasons to open the second, and come at once while the first is stuck."""
    monkeypatch.setattr("holdfast.database.call_dispatcher_async.PATIENCE", 0.0)
    async with holdfast.AsyncClient(postgres_url, sessions=2) as client:
        await client.leases.list()
        engine: Any = client._engine
        opened: list[Any] = []
        original = engine.open

        async def open_one(timeout: float) -> Any:
            opened.append(await original(timeout))
            return opened[-1]

        monkeypatch.setattr(engine, "open", open_one)
        with psycopg.connect(postgres_url) as connection:
            connection.execute("lock table holdfast.lease in access exclusive mode")
            stuck = asyncio.create_task(engine.call("lease_list", {}, timeout=600.0))
            await asyncio.sleep(0)
            await many_puts(client)
            assert len(opened) == 1
            assert opened[0] in engine._dispatcher.sessions
        await stuck


async def test_no_call_depends_on_the_session_that_is_opened_ahead(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that takes no further connection."""
    monkeypatch.setattr("holdfast.database.call_dispatcher_async.PATIENCE", 600.0)
    async with holdfast.AsyncClient(postgres_url) as client:
        await client.leases.list()
        engine: Any = client._engine
        refused = asyncio.Event()

        async def refuse(timeout: float) -> Any:
            refused.set()
            raise holdfast.Unreachable("too many clients already")

        monkeypatch.setattr(engine, "open", refuse)
        await many_puts(client)
        await asyncio.wait_for(refused.wait(), PATIENCE)
        await many_puts(client)
        assert len(engine._dispatcher.sessions) == 1


async def test_each_of_many_tasks_hears_of_its_own_deadline(postgres_url: str) -> None:
    """In the order of their deadlines, whatever the order in which they came."""
    async with holdfast.AsyncClient(postgres_url, sessions=1) as client:
        await client.leases.list()
        late: list[int] = []

        async def ask(place: int) -> None:
            with pytest.raises(holdfast.EngineError, match=r"in progress|in time"):
                await client._engine.call("lease_list", {}, timeout=0.1 + 0.2 * place)
            late.append(place)

        with psycopg.connect(postgres_url) as connection:
            connection.execute("lock table holdfast.lease in access exclusive mode")
            patient = asyncio.create_task(client._engine.call("lease_list", {}, timeout=600.0))
            await asyncio.sleep(0)
            await asyncio.gather(*(ask(place) for place in (3, 1, 4, 0, 2)))
            assert late == [0, 1, 2, 3, 4]
            assert not patient.done()
        await patient


@pytest.mark.parametrize("size", [MAX_CALLS, 3])
def test_no_thread_waits_for_a_wake_up_that_was_lost(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """It would look again after half a second, and here after an hour. ``size``: of the largest batch."""
    for module in ("call_queue", "call_dispatcher"):
        monkeypatch.setattr(f"holdfast.database.{module}.MAX_CALLS", size)
    for wait in ("NAP", "PATIENCE", "IDLE"):
        monkeypatch.setattr(f"holdfast.database.call_dispatcher.{wait}", 3600.0)
    with holdfast.Client(postgres_url) as client, ThreadPoolExecutor(MANY) as pool:

        def work(number: int) -> None:
            for _ in range(trials(12)):
                client._engine.call("object_get", {"type": "t", "id": str(number)}, timeout=3600.0)
                client._engine.call("lease_history", {"name": None, "limit": 1}, timeout=3600.0)

        for working in [pool.submit(work, number) for number in range(MANY)]:
            working.result(PATIENCE)


def test_no_thread_waits_for_others_that_call_again_and_again(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is sent after the message under way and the batch of older calls, although it goes alone, and as many
    threads as there are callers can have seen an empty queue just before it came."""
    monkeypatch.setattr("holdfast.database.call_dispatcher.IDLE", 3600.0)
    with holdfast.Client(postgres_url, sessions=1) as client, ThreadPoolExecutor(4) as pool:
        client.leases.list()
        queue, [session] = client._engine._dispatcher._queue, client._engine._dispatcher.sessions
        stopping, messages, queued, waits = threading.Event(), list[str](), list[int](), list[int]()

        def spied(function: Callable[..., Any], name: Callable[[Any], str]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                messages.append(name(args[0]))
                if messages[-1] == "lease_history" and queued:
                    waits.append(len(messages) - queued.pop())
                return function(*args)

            return call

        def add(call: Any, add: Callable[[Any], None] = queue.add) -> None:
            if call.name == "lease_history":
                queued.append(len(messages))
            add(call)

        def call_again_and_again(number: int) -> None:
            while not stopping.is_set():
                client._engine.call("object_get", {"type": "t", "id": str(number)})

        monkeypatch.setattr(session, "call", spied(session.call, str))
        monkeypatch.setattr(session, "call_together", spied(session.call_together, lambda calls: "together"))
        monkeypatch.setattr(queue, "add", add)
        busy = [pool.submit(call_again_and_again, number) for number in range(3)]
        try:
            for _ in range(50):
                client._engine.call("lease_history", {"name": None, "limit": 1})
        finally:
            stopping.set()
        for caller in busy:
            caller.result(PATIENCE)
    assert waits
    assert max(waits) <= len(busy) + 2, f"{max(waits)} messages were sent before a call that waited"


@EACH_ONCE
def test_one_that_waits_long_costs_the_others_a_second_session_which_is_closed_when_idle(
    connect: Connect, either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("call_dispatcher", "call_dispatcher_async"):
        monkeypatch.setattr(f"holdfast.database.{module}.IDLE", 0.1)
    client = connect(either)
    with client.lease("anchor", ttl=600):
        client.objects.put_if("t", "a", 1, holdfast.MustCreate())
        assert len(client._engine._dispatcher.sessions) == 1
        with ThreadPoolExecutor(1) as pool:
            if either.startswith("sqlite"):
                with closing(sqlite3.connect(either.removeprefix("sqlite:///"), isolation_level=None)) as writer:
                    writer.execute("begin immediate")
                    stuck = pool.submit(client.lease("b", ttl=600).acquire)
                    eventually(lambda: client._engine._dispatcher.is_busy(), "it is being sent")
                    assert client.objects.get("t", "a").payload == 1
            else:
                with locked(either) as connection:
                    stuck = pool.submit(client.lease("b", ttl=600).acquire)
                    eventually(lambda: waiters(connection) == 1, "it waits in the server")
                    assert client.objects.get("t", "a").payload == 1
            assert len(client._engine._dispatcher.sessions) == 2
            stuck.result(PATIENCE).release()
        eventually(lambda: client._engine._dispatcher.sessions == [], "both are closed")


@EACH_ONCE
def test_stuck_writes_delay_no_read(connect: Connect, either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many: the last session is for reads."""
    client = connect(either)
    client.objects.put_if("t", "a", 1, holdfast.MustCreate())
    with ExitStack() as at_end:
        pool = at_end.enter_context(ThreadPoolExecutor(3))
        if either.startswith("sqlite"):
            writer = sqlite3.connect(either.removeprefix("sqlite:///"), isolation_level=None)
            at_end.enter_context(closing(writer)).execute("begin immediate")
        else:
            at_end.enter_context(locked(either))
        channels = client._engine._dispatcher._channels
        stuck = []
        for number in range(2):
            stuck.append(pool.submit(client.lease(f"b-{number}", ttl=600).acquire))
            eventually(lambda: sum(bool(channel.batch) for channel in channels) > number, "it is being sent")  # noqa: B023
        stuck.append(pool.submit(client.lease("b-2", ttl=600).acquire))
        eventually(lambda: client._engine._dispatcher._queue.waiting, "a third one waits")
        assert client.objects.get("t", "a").payload == 1
        assert not any(call.done() for call in stuck)


def test_a_client_with_one_session_opens_no_second(connect: Connect, postgres_url: str) -> None:
    client = connect(postgres_url, sessions=1)
    client.leases.list()
    with occupied(client, postgres_url), pytest.raises(holdfast.EngineError, match=r"in progress|in time"):
        client._engine.call("lease_history", {"name": None, "limit": 1}, timeout=0.2)
    assert len(client._engine._dispatcher.sessions) == 1


@pytest.mark.parametrize(("sessions", "error"), [(0, ValueError), (True, TypeError), (1.5, TypeError)])
def test_sessions_are_counted_in_whole_numbers(connect: Connect, sessions: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="sessions must be"):
        connect("postgresql://127.0.0.1:1/none", sessions=sessions)


def test_many_threads_with_random_faults_lose_nothing(postgres_url: str) -> None:
    """Connections are cut all the time. Whatever a caller was told, in the end only what is held is there."""
    with Proxy(postgres_url) as link, holdfast.Client(link.url) as client:
        stopping = threading.Event()

        def work(number: int) -> Any:
            kept = None
            while not stopping.is_set():
                with suppress(holdfast.EngineError, holdfast.NotAcquired, holdfast.GrantLost):
                    grant = client.lease(f"a{number}", ttl=600).acquire()
                    if kept is None:
                        kept, number = grant, number + MANY
                    else:
                        grant.release()
            return kept

        with ThreadPoolExecutor(MANY) as pool:
            working = [pool.submit(work, number) for number in range(MANY)]
            for _ in range(10):
                eventually(lambda: rows(postgres_url)["lease"] > 0, "they are at work")
                stopping.wait(0.1)
                link.cut()
                link.heal()
            stopping.set()
            kept = [asking.result(PATIENCE) for asking in working]
        held = {grant.name for grant in kept if grant is not None}  # a thread may have had no answer
        eventually(lambda: leases(postgres_url) == held, "no other is held")
        for grant in kept:
            grant.check()
            assert grant.release() is True
    eventually(lambda: rows(postgres_url) == NONE, "nothing is left")


class Interrupt:
    """Ctrl-C at the given moment: Python looks for signals when a function begins, and after one that is built in."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def __call__(self, frame: Any, event: str, _: object) -> None:
        if event in ("call", "c_return") and "holdfast/database/" in frame.f_code.co_filename:
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def test_ctrl_c_at_any_moment_of_a_call_leaves_the_client_usable(either: str) -> None:
    """For other threads, too. A call that was sent with an interrupted one, twice in a row, has no answer."""
    with holdfast.Client(either, sessions=1) as client, ThreadPoolExecutor(3) as pool:
        anchor = client.lease("anchor", ttl=600).acquire()
        stopping, problems = threading.Event(), list[str]()

        def others(number: int) -> int:
            count = 0
            while not stopping.is_set():
                try:
                    client._engine.call("object_get", {"type": "t", "id": str(number)}, timeout=PATIENCE)
                    count += 1
                except holdfast.EngineError as error:
                    problems.append(str(error))
            return count

        working = [pool.submit(others, number) for number in range(3)]
        moment, interrupted = 0, True
        try:
            while interrupted:
                moment += 1
                interrupt, interrupted = Interrupt(moment), False
                try:
                    sys.setprofile(interrupt)
                    client._engine.call("object_get", {"type": "t", "id": "x"}, timeout=PATIENCE)
                except KeyboardInterrupt:
                    interrupted = True
                finally:
                    sys.setprofile(None)
                assert client._engine.call("object_get", {"type": "t", "id": "x"}, timeout=PATIENCE) == []
        finally:
            stopping.set()
        assert moment > 20
        assert all(asking.result(PATIENCE) > 0 for asking in working)
        assert set(problems) <= {"the thread that sent this call with its own was interrupted"}
        anchor.check()
