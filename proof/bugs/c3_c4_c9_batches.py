"""C3, C4 and C9: clients whose callers share a transaction, answer for each other, or write a row one after another."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import holdfast
from holdfast.database.call_queue import Again, CallQueue, QueuedCall
from holdfast.database.engine_async import AsyncEngine
from holdfast.database.postgres import PostgresConnection
from holdfast.lease.handle_async import AsyncHandle
from holdfast.testing.history import Recorder
from holdfast.testing.proxy import Proxy
from holdfast.testing.server import until
from proof.bugs.implementation import Connection, Holdfast
from proof.bugs.testbed import Testbed

LIMIT = 60.0
FIRST, REFUSED = "first", "refused"
_TRIGGERS = """
create table proof_gate (name text);
create function proof_pass() returns trigger language plpgsql as $$ begin
    while exists (select from public.proof_gate g where g.name = to_jsonb(new) ->> tg_argv[0]) loop
        perform pg_sleep(0.01);
    end loop;
    return null;
end $$;
create constraint trigger pass after insert or update on holdfast.object deferrable initially deferred
    for each row execute function proof_pass('id');
create constraint trigger pass after insert or update on holdfast.lease deferrable initially deferred
    for each row execute function proof_pass('name');
create function proof_record() returns trigger language plpgsql as $$ begin
    if new.id = 'refused' then
        raise exception 'refused';
    end if;
    if new.body = '"take over"' then
        insert into public.proof_takeover (name, fence, older)
            values (new.id, 2, (select count(*) from public.proof_write w where w.name = new.id));
    else
        insert into public.proof_write (name, fence, key) values (new.id, 1, new.body);
    end if;
    return null;
end $$;
create trigger record after insert or update on holdfast.object for each row execute function proof_record();
"""
"""A commit of a row waits as long as its name is at the gate. Every write of an object is recorded; one that takes the
object over, with the number of writes before it."""
_SESSIONS = "select pid from pg_stat_activity where application_name like 'holdfast%' and datname = current_database()"


class Batches(Holdfast):
    """The real implementation: an AsyncClient. A wrong one replaces one function of it."""

    patience = LIMIT
    """Seconds to wait until what a cancelled caller was granted is released."""

    def prepare(self, connection: Connection) -> None:
        connection.execute(_TRIGGERS)

    def open(self, url: str) -> None:
        self._replaced = ExitStack()
        for owner, name, function in self.wrong():
            self._replaced.enter_context(patch.object(owner, name, function))

    def close(self) -> None:
        self._replaced.close()

    def wrong(self) -> Sequence[tuple[type, str, Callable[..., Any]]]:
        return ()


class RefusalLost(Batches):
    """Believes the answers before a refusal, although that has rolled their calls back."""

    def wrong(self) -> Sequence[tuple[type, str, Callable[..., Any]]]:
        real = PostgresConnection._pipeline_answers

        def answers(connection: PostgresConnection, names: list[str], results: list[Any]) -> list[Any]:
            found = real(connection, names, results)
            before = found.index(Again.ALONE) if Again.ALONE in found else 0
            return [connection._rows(result) for result in results[1 : before + 1]] + found[before:]

        return [(PostgresConnection, "_pipeline_answers", answers)]


class SentTwice(Batches):
    """Sends a batch again whose answer was lost, as if it had been rolled back."""

    def wrong(self) -> Sequence[tuple[type, str, Callable[..., Any]]]:
        def fail(queue: CallQueue, batch: Sequence[QueuedCall], error: BaseException) -> list[QueuedCall]:
            queue.put_back(batch)
            return []

        return [(CallQueue, "fail", fail)]


class GrantKept(Batches):
    """Forgets the acquire of a caller that is cancelled."""

    patience = 0.5

    def wrong(self) -> Sequence[tuple[type, str, Callable[..., Any]]]:
        return [(AsyncHandle, "_undo", lambda *_: None)]


class NotEnded(Batches):
    """Repeats a call while the session of its first sending still exists."""

    def wrong(self) -> Sequence[tuple[type, str, Callable[..., Any]]]:
        async def end(engine: AsyncEngine, deadline: float) -> None:
            while engine._dispatcher.lost:
                engine._dispatcher.lost.pop().has_ended = True

        return [(AsyncEngine, "_end_lost_sessions", end)]


class Overtaking(Batches):
    """Writes a row while an earlier write of it, whose caller was cancelled, is under way on another session."""

    def wrong(self) -> Sequence[tuple[type, str, Callable[..., Any]]]:
        return [(CallQueue, "is_held_up", lambda *_: False)]


class _Callers:
    """Callers of one client, the first of which waits at the gate while the others queue, to be sent as one batch."""

    def __init__(
        self, testbed: Testbed, proxy: Proxy, inner: Proxy, client: holdfast.AsyncClient, names: Sequence[str]
    ) -> None:
        """``proxy`` leads to the server by way of ``inner``."""
        self.proxy, self.inner, self.client, self.names = proxy, inner, client, names
        self._testbed, self._records = testbed, {name: Recorder(testbed.folder, name) for name in (FIRST, *names)}

    async def begin(self, call: Callable[[str], Coroutine[Any, Any, None]], gate: str) -> list[asyncio.Task[None]]:
        """All calls; the batch waits at the gate if ``gate`` is one of its names."""
        self.query("insert into proof_gate values (%s), (%s)", FIRST, gate)
        first = asyncio.create_task(self.put(FIRST))
        await self.until(self._is_waiting, "the first call waits at the gate")
        tasks = [first, *(asyncio.create_task(call(name)) for name in self.names)]
        await asyncio.sleep(0)  # they are in the queue
        self.query("delete from proof_gate where name = %s", FIRST)
        await asyncio.wait([first])
        if gate in self.names:
            await self.until(self._is_waiting, "the batch waits at the gate")
        return tasks

    async def open_gate(self) -> None:
        self.query("delete from proof_gate")

    async def put(self, name: str) -> None:
        with self._records[name].invoke("write", name, 1, key=f'"{name}"') as call:
            try:
                await self.client.objects.put_if("box", name, name, holdfast.Unconditional())
                call.ok()
            except holdfast.EngineError as error:
                call.fail() if error.certain else call.unknown()
            except asyncio.CancelledError:
                call.unknown()

    async def take_over(self, name: str) -> None:
        with self._records[name].invoke("takeover", name, 2) as call:
            await self.client.objects.put_if("box", name, "take over", holdfast.Unconditional())
            call.ok()

    async def acquire(self, name: str) -> None:
        with self._records[name].invoke("acquire", name) as call:
            try:
                grant = await self.client.lease(name, ttl=600).acquire()
            except asyncio.CancelledError:
                call.unknown()
                return
            call.ok(grant.fence)
        with self._records[name].invoke("release", name, grant.fence) as call:
            await grant.release()
            call.ok()

    async def until(self, condition: Callable[[], bool], what: str, timeout: float = LIMIT) -> None:
        await asyncio.to_thread(until, condition, what=what, timeout=timeout)

    def count(self, table: str) -> int:
        [(count,)] = self.query(f"select count(*) from {table}")
        return int(count)

    def leftover(self, what: str, count: int) -> None:
        self._records[FIRST].info("leftover", what=what, count=count)

    def close(self) -> None:
        for record in self._records.values():
            record.close()

    def _is_waiting(self) -> bool:
        sleepers = "select pid from pg_stat_activity where wait_event = 'PgSleep' and datname = current_database()"
        return bool(self.query(sleepers))

    def query(self, statement: str, *parameters: str) -> list[Any]:
        cursor = self._testbed.admin.execute(statement.encode(), parameters or None)
        return cursor.fetchall() if cursor.description else []


def refused_among_others(testbed: Testbed) -> None:
    """Three writes share a transaction, and the second one is refused."""

    async def play(callers: _Callers) -> None:
        await asyncio.wait(await callers.begin(callers.put, gate=FIRST))

    _play(testbed, play, "a", REFUSED, "z")


def lost_after_the_commit(testbed: Testbed) -> None:
    """Two writes share a transaction, and the connection breaks between its commit and their answers."""

    async def play(callers: _Callers) -> None:
        tasks = await callers.begin(callers.put, gate="a")
        await asyncio.to_thread(callers.proxy.stall, "to_client")
        await callers.open_gate()
        await callers.until(lambda: callers.count("proof_write") == len(tasks), "the batch is committed")
        await asyncio.to_thread(callers.proxy.cut)
        await asyncio.to_thread(callers.proxy.heal)
        await asyncio.wait(tasks)

    _play(testbed, play, "a", "z")


def cancelled_among_others(testbed: Testbed) -> None:
    """Three acquires share a transaction, and one of their callers is cancelled before its commit."""

    async def play(callers: _Callers) -> None:
        tasks = await callers.begin(callers.acquire, gate="a")
        tasks[2].cancel()
        await callers.open_gate()
        await asyncio.wait(tasks)
        patience = getattr(testbed.implementation, "patience", LIMIT)
        with suppress(TimeoutError):
            await callers.until(lambda: not callers.count("holdfast.lease"), "nothing is held", patience)
        callers.leftover("leases", callers.count("holdfast.lease"))

    _play(testbed, play, "a", "b", "c")


def executed_late(testbed: Testbed) -> None:
    """A write is held back, its connection is cut, and it is repeated. Then the first sending reaches the server."""

    async def play(callers: _Callers) -> None:
        await callers.put(FIRST)  # its statement is prepared
        [(old,)] = callers.query(_SESSIONS)
        await asyncio.to_thread(callers.inner.stall, "to_server")
        before = callers.inner.messages
        writing = asyncio.create_task(callers.put("a"))
        await callers.until(lambda: callers.inner.messages > before, "the write is on its way")
        callers.proxy.target(testbed.url)
        await asyncio.to_thread(callers.proxy.cut)
        await writing
        await asyncio.to_thread(callers.inner.heal)
        await callers.until(lambda: (old,) not in callers.query(_SESSIONS), "the old session has ended")

    _play(testbed, play, "a")


def overtaken(testbed: Testbed) -> None:
    """A write is held back, and its caller is cancelled. Then the same object is taken over. A write of another object
    shows that a second session is free."""

    async def play(callers: _Callers) -> None:
        await callers.put(FIRST)  # its statement is prepared
        await asyncio.to_thread(callers.inner.stall, "to_server")
        before = callers.inner.messages
        writing = asyncio.create_task(callers.put("a"))
        await callers.until(lambda: callers.inner.messages > before, "the write is on its way")
        callers.proxy.target(testbed.url)
        writing.cancel()
        await asyncio.wait([writing])
        taking_over = asyncio.create_task(callers.take_over("a"))
        await callers.put("z")
        await asyncio.to_thread(callers.inner.heal)
        await taking_over
        await callers.until(lambda: callers.count("proof_write") == 3, "the held write is executed")

    _play(testbed, play, "a", "z", sessions=2)


def _play(testbed: Testbed, play: Callable[[_Callers], Awaitable[None]], *names: str, sessions: int = 1) -> None:
    async def run(proxy: Proxy, inner: Proxy) -> None:
        async with holdfast.AsyncClient(proxy.url, sessions=sessions) as client:
            callers = _Callers(testbed, proxy, inner, client, names)
            try:
                async with asyncio.timeout(LIMIT):
                    await play(callers)
            finally:
                callers.close()

    with Proxy(testbed.url) as inner, Proxy(inner.url) as proxy:
        asyncio.run(run(proxy, inner))
