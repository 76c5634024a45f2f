"""Ways to have a lock that nobody knows of, or one that two believe in."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg

import holdfast
from holdfast.testing.history import Recorder, now
from holdfast.testing.pooler import Pooler
from holdfast.testing.proxy import Proxy
from holdfast.testing.server import until
from proof.bugs.implementation import Holdfast
from proof.bugs.stage import Stage

Key = tuple[int, int]
NAME = ("proof", 7)
LIMIT = 1.5
"""Seconds that whoever waits has. The lock is granted meanwhile, but the answer comes when they are over."""
_LOCKS = (
    "select classid::bigint, objid::bigint from pg_locks where locktype = 'advisory' and granted = %s"
    " and database = (select oid from pg_database where datname = current_database())"
)


class Locker(Holdfast):
    """The real implementation."""

    patience = 60.0
    """Seconds to wait for what is given back in the end."""

    def time_out(self, url: str, key: Key, late: Callable[[], object]) -> None:
        """Wait for the lock until the time is up, say that it is, and go on living."""
        self._client = holdfast.Client(url)
        with suppress(holdfast.AcquireTimeout):
            self._client.lock(NAME, timeout=LIMIT).acquire()
        late()

    async def be_cancelled(self, url: str, key: Key, late: Callable[[], object]) -> None:
        """The same, cancelled by somebody else; ``late`` returns when the answer may come."""
        async with holdfast.AsyncClient(url) as client:
            task = asyncio.create_task(client.lock(NAME, timeout=60).acquire())
            await asyncio.wait([task], timeout=LIMIT)
            task.cancel()
            late()
            await asyncio.wait([task])
            await asyncio.sleep(LIMIT)

    def try_lock(self, pooled: str, direct: str, key: Key) -> bool:
        client = holdfast.Client(pooled, lock_url=direct)
        self._open = [*getattr(self, "_open", []), client]
        return client.lock(NAME).try_acquire() is not None

    def work(self, url: str, key: Key, other: Callable[[], object]) -> None:
        """Lock it, commit twice, and leave the block; ``other`` comes by between the two."""
        client = holdfast.Client(url)
        self._open = [*getattr(self, "_open", []), client]
        with psycopg.connect(url) as application, client.lock(NAME):
            for come_by in (other, lambda: None):
                application.execute("select 1")
                application.commit()
                come_by()

    def close(self) -> None:
        for each in (*getattr(self, "_open", []), getattr(self, "_client", None)):
            if each is not None:
                each.close()


class ForATransaction(Locker):
    """Locks in the application's own transaction, which ends with its first commit."""

    def work(self, url: str, key: Key, other: Callable[[], object]) -> None:
        with psycopg.connect(url) as application:
            application.execute("select pg_advisory_xact_lock(%s::int, %s::int)", key)
            application.commit()
            other()
            application.execute("select 1")


class BoundToASession(Locker):
    """Locks in the application's own session, which goes back to its pool with a commit; the next one is another."""

    def work(self, url: str, key: Key, other: Callable[[], object]) -> None:
        first, second = self._open = [psycopg.connect(url), psycopg.connect(url)]
        first.execute("select pg_advisory_lock(%s::int, %s::int)", key)
        first.commit()
        other()
        second.execute("select pg_advisory_unlock(%s::int, %s::int)", key)
        second.commit()


class Careless(Locker):
    """Locks on any session, and takes a question that it no longer waits for to be one that was never asked."""

    patience = 0.5
    """What it does not give back at once it never does: there is nothing that could."""

    def time_out(self, url: str, key: Key, late: Callable[[], object]) -> None:
        self._client = _ask(url, key)
        threading.Event().wait(LIMIT)
        late()

    async def be_cancelled(self, url: str, key: Key, late: Callable[[], object]) -> None:
        self._client = _ask(url, key)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), LIMIT)
        late()

    def try_lock(self, pooled: str, direct: str, key: Key) -> bool:
        connection = psycopg.connect(pooled, autocommit=True, prepare_threshold=None)
        self._open = [*getattr(self, "_open", []), connection]
        [(done,)] = connection.execute("select pg_try_advisory_lock(%s::int, %s::int)", key).fetchall()
        return bool(done)


def _ask(url: str, key: Key) -> Any:
    connection = psycopg.connect(url, autocommit=True)
    connection.pgconn.send_query(b"select pg_advisory_lock(%d, %d)" % key)
    return connection


def granted_too_late(stage: Stage) -> None:
    """The lock is free before B's time is up, but B does not hear of it any more."""
    _late(stage, lambda user, url, key, late: user.time_out(url, key, late))


def granted_to_the_cancelled(stage: Stage) -> None:
    _late(stage, lambda user, url, key, late: asyncio.run(user.be_cancelled(url, key, late)))


def _late(stage: Stage, wait: Callable[[Locker, str, Key, Callable[[], object]], None]) -> None:
    user = stage.implementation
    assert isinstance(user, Locker)
    with holdfast.Client(stage.url) as holder, Proxy(stage.url) as way:
        grant = holder.lock(NAME).acquire()
        [key] = _locks(stage, granted=True)

        def healed() -> None:
            way.heal()

        waiting = stage.ask(lambda: wait(user, way.url, key, healed))

        def stands() -> bool:
            nonlocal waiting
            if waiting.done():  # its time was up before it stood there, or was seen there
                waiting = stage.ask(lambda: wait(user, way.url, key, healed))
            return bool(_locks(stage, granted=False))

        until(stands, what="B stands in line")
        way.stall("to_client")
        grant.release()
        waiting.result(60)
        with suppress(TimeoutError):
            until(lambda: not _locks(stage, granted=True), timeout=user.patience, what="nothing is locked")
        with Recorder(stage.folder, "operator") as record:
            record.info("leftover", what="locks", count=len(_locks(stage, granted=True)))


def locked_through_a_pooler(stage: Stage) -> None:
    """A and B share one session of the server, and do not know it."""
    user = stage.implementation
    assert isinstance(user, Locker)
    with holdfast.Client(stage.url) as client, client.lock(NAME):
        [key] = _locks(stage, granted=True)
    with Pooler(stage.url, size=1) as pooler, Recorder(stage.folder, "a") as a, Recorder(stage.folder, "b") as b:
        began = now()
        believers = [record for record in (a, b) if user.try_lock(pooler.url, stage.url, key)]
        for record in believers:
            record.info("believe", "proof", None, **{"from": began, "until": now()})


def committed_inside(stage: Stage) -> None:
    """A commits in the middle of what it locked, and goes on. B would rather not wait."""
    user = stage.implementation
    assert isinstance(user, Locker)
    with holdfast.Client(stage.url) as b, Recorder(stage.folder, "a") as ours, Recorder(stage.folder, "b") as theirs:
        with b.lock(NAME):
            [key] = _locks(stage, granted=True)

        def come_by() -> None:
            with b.lock(NAME).or_skip() as grant:
                if grant is not None:
                    theirs.info("believe", "proof", None, **{"from": now(), "until": now() + 0.001})

        began = now()
        user.work(stage.url, key, come_by)
        ours.info("believe", "proof", None, **{"from": began, "until": now()})
        ours.info("leftover", what="locks", count=len(_locks(stage, granted=True)))


def _locks(stage: Stage, *, granted: bool) -> list[Key]:
    return stage.director.execute(_LOCKS, [granted]).fetchall()
