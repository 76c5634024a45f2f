"""C7 and C9: implementations that leave a lock behind, or let two workers trust the same lock."""

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
from proof.bugs.testbed import Testbed

Key = tuple[int, int]
NAME = ("proof", 7)
LIMIT = 1.5
"""Seconds that B waits. The lock is granted in that time, but the answer comes later."""
_LOCKS = (
    "select classid::bigint, objid::bigint from pg_locks where locktype = 'advisory' and granted = %s"
    " and database = (select oid from pg_database where datname = current_database())"
)


class Locker(Holdfast):
    """The real implementation."""

    patience = 60.0
    """Seconds to wait for the lock to be released."""

    def time_out(self, url: str, key: Key, late: Callable[[], object]) -> None:
        """Wait for the lock until the timeout, then call ``late``, and keep running."""
        self._client = holdfast.Client(url)
        with suppress(holdfast.AcquireTimeout):
            self._client.lock(NAME, timeout=LIMIT).acquire()
        late()

    async def be_cancelled(self, url: str, key: Key, late: Callable[[], object]) -> None:
        """Wait for the lock, and be cancelled. The answer may come when ``late`` returns."""
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
        """Lock it, commit twice, and unlock it. ``other`` is called after the first commit."""
        client = holdfast.Client(url)
        self._open = [*getattr(self, "_open", []), client]
        with psycopg.connect(url) as application, client.lock(NAME):
            for after_commit in (other, lambda: None):
                application.execute("select 1")
                application.commit()
                after_commit()

    def close(self) -> None:
        for connection in (*getattr(self, "_open", []), getattr(self, "_client", None)):
            if connection is not None:
                connection.close()


class ForATransaction(Locker):
    """Locks in the application's transaction, which ends with its first commit."""

    def work(self, url: str, key: Key, other: Callable[[], object]) -> None:
        with psycopg.connect(url) as application:
            application.execute("select pg_advisory_xact_lock(%s::int, %s::int)", key)
            application.commit()
            other()
            application.execute("select 1")


class BoundToASession(Locker):
    """Locks in the application's session, which returns to the pool at the commit; the unlock uses another session."""

    def work(self, url: str, key: Key, other: Callable[[], object]) -> None:
        first, second = self._open = [psycopg.connect(url), psycopg.connect(url)]
        first.execute("select pg_advisory_lock(%s::int, %s::int)", key)
        first.commit()
        other()
        second.execute("select pg_advisory_unlock(%s::int, %s::int)", key)
        second.commit()


class Careless(Locker):
    """Locks in any session, and treats a statement that it gave up on as one that was never sent."""

    patience = 0.5
    """It never releases what it does not release at once."""

    def time_out(self, url: str, key: Key, late: Callable[[], object]) -> None:
        self._client = _send_lock(url, key)
        threading.Event().wait(LIMIT)
        late()

    async def be_cancelled(self, url: str, key: Key, late: Callable[[], object]) -> None:
        self._client = _send_lock(url, key)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), LIMIT)
        late()

    def try_lock(self, pooled: str, direct: str, key: Key) -> bool:
        connection = psycopg.connect(pooled, autocommit=True, prepare_threshold=None)
        self._open = [*getattr(self, "_open", []), connection]
        [(done,)] = connection.execute("select pg_try_advisory_lock(%s::int, %s::int)", key).fetchall()
        return bool(done)


def _send_lock(url: str, key: Key) -> Any:
    connection = psycopg.connect(url, autocommit=True)
    connection.pgconn.send_query(b"select pg_advisory_lock(%d, %d)" % key)
    return connection


def granted_too_late(testbed: Testbed) -> None:
    """The lock is granted before B's timeout, but the answer does not reach B."""
    _late(testbed, lambda locker, url, key, late: locker.time_out(url, key, late))


def granted_to_the_cancelled(testbed: Testbed) -> None:
    """The same, but B is cancelled."""
    _late(testbed, lambda locker, url, key, late: asyncio.run(locker.be_cancelled(url, key, late)))


def _late(testbed: Testbed, wait: Callable[[Locker, str, Key, Callable[[], object]], None]) -> None:
    locker = testbed.implementation
    assert isinstance(locker, Locker)
    with holdfast.Client(testbed.url) as holder, Proxy(testbed.url) as proxy:
        grant = holder.lock(NAME).acquire()
        key = _only_lock(testbed)

        def healed() -> None:
            proxy.heal()

        waiting = testbed.submit(lambda: wait(locker, proxy.url, key, healed))

        def is_queued() -> bool:
            nonlocal waiting
            if waiting.done():  # it timed out before it was seen in the queue
                waiting = testbed.submit(lambda: wait(locker, proxy.url, key, healed))
            return bool(_locks(testbed, granted=False))

        until(is_queued, what="B is in the queue")
        proxy.stall("to_client")
        grant.release()
        waiting.result(60)
        with suppress(TimeoutError):
            until(lambda: not _locks(testbed, granted=True), timeout=locker.patience, what="nothing is locked")
        with Recorder(testbed.folder, "operator") as record:
            record.info("leftover", what="locks", count=len(_locks(testbed, granted=True)))


def locked_through_a_pooler(testbed: Testbed) -> None:
    """A and B share one server session."""
    locker = testbed.implementation
    assert isinstance(locker, Locker)
    with holdfast.Client(testbed.url) as client, client.lock(NAME):
        key = _only_lock(testbed)
    with Pooler(testbed.url, size=1) as pooler, Recorder(testbed.folder, "a") as a, Recorder(testbed.folder, "b") as b:
        began = now()
        believers = [record for record in (a, b) if locker.try_lock(pooler.url, testbed.url, key)]
        for record in believers:
            record.info("believe", "proof", None, **{"from": began, "until": now()})


def committed_inside(testbed: Testbed) -> None:
    """A commits while it holds the lock. Then B tries the lock."""
    locker = testbed.implementation
    assert isinstance(locker, Locker)
    with (
        holdfast.Client(testbed.url) as b,
        Recorder(testbed.folder, "a") as record_a,
        Recorder(testbed.folder, "b") as record_b,
    ):
        with b.lock(NAME):
            key = _only_lock(testbed)

        def try_lock() -> None:
            with b.lock(NAME).or_skip() as grant:
                if grant is not None:
                    record_b.info("believe", "proof", None, **{"from": now(), "until": now() + 0.001})

        began = now()
        locker.work(testbed.url, key, try_lock)
        record_a.info("believe", "proof", None, **{"from": began, "until": now()})
        record_a.info("leftover", what="locks", count=len(_locks(testbed, granted=True)))


def _only_lock(testbed: Testbed) -> Key:
    """The lock that is held. A client tries session locks before its first one; that session may not have ended."""
    until(lambda: len(_locks(testbed, granted=True)) == 1, what="one lock is held")
    return _locks(testbed, granted=True)[0]


def _locks(testbed: Testbed, *, granted: bool) -> list[Key]:
    return testbed.admin.execute(_LOCKS, [granted]).fetchall()
