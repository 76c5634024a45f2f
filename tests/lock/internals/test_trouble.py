"""What goes wrong beside the locks stays beside them: tables that are locked, threads that cannot be had, sessions that
are all in use, and event loops that are closed."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

import holdfast
from holdfast.database.statements import statements
from holdfast.database.url import parse
from holdfast.lock import executor_async, file_locks
from holdfast.lock.executor_async import LoopExecutor, LoopThread, open_wire
from holdfast.lock.pool import Entry, LockRequest
from holdfast.lock.terms import _Targets
from holdfast.runtime.clock import now
from holdfast.testing import Postgres, Proxy
from holdfast.testing.lease_contract import waiting
from tests.children import PATIENCE, eventually, query, until
from tests.conftest import migrated
from tests.lock.looks import advisory, core

Connect = Callable[..., Any]


@contextmanager
def no_threads() -> Iterator[None]:
    """As when the process has as many as it may have."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


def named(url: str, name: str) -> bool:
    return bool(query(url, "select 1 from holdfast.lock_name where name = %s", name))


def test_a_name_that_cannot_be_written_down_holds_up_nobody(postgres_url: str) -> None:
    """Somebody has locked the table of names. The session that holds locks does not wait for it."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as admin:
        held = client.lock(("agent", 1)).acquire()
        admin.execute("lock table holdfast.lock_name in share mode")
        client.lock("a new name").acquire()
        is_noting = "select 1 from pg_stat_activity where query like '%%lock_note%%' and wait_event_type = 'Lock'"
        eventually(lambda: bool(query(postgres_url, is_noting)), "it is being written down")
        client.lock("another", timeout=PATIENCE).acquire().release()
        held.check()
        eventually(lambda: not any(session.flight for session in core(client).pool.holds), "and was given up")
        admin.rollback()
        held.check()


def test_a_name_does_not_wait_for_a_standby() -> None:
    with Postgres.create() as server:
        url = migrated(server.database())
        with holdfast.Client(url) as client:
            held = client.lock(("agent", 1)).acquire()
            server.alter("synchronous_standby_names", "nobody")
            eventually(lambda: query(url, "show synchronous_standby_names") == [("nobody",)], "it is set")
            client.lock("a new name").acquire()
            eventually(lambda: named(url, "a new name"), "it is written")
            held.check()
            server.alter("synchronous_standby_names", "")


def test_a_name_waits_for_the_first_session(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far away, connecting takes longer than the first look at what is to be written down."""
    for name, seconds in (("SWEEP", 0.02), ("YOUNG", 0.02), ("NOTE_PAUSE", 0.1)):
        monkeypatch.setattr(executor_async, name, seconds)
    with Proxy(postgres_url, delay=0.02) as link, holdfast.Client(link.url) as client:
        client.lock("far away", timeout=PATIENCE).acquire()
        eventually(lambda: named(postgres_url, "far away"), "it is written")


def test_no_thread_to_connect_in_is_an_error_and_not_for_ever(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as other, holdfast.Client(postgres_url) as client:
        other.lock("the background thread runs").acquire()
        with no_threads(), pytest.raises(holdfast.EngineError, match="thread"):
            client.lock("a", timeout=PATIENCE).acquire()
        assert client.lock("a", timeout=PATIENCE).acquire().release() is True


def test_a_session_that_never_comes_about_is_given_up(
    connect: Connect, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever became of the thread that connects: whoever waits for it is told, and the next one has another."""
    client = connect(postgres_url)
    with monkeypatch.context() as patch:
        patch.setattr(executor_async, "SWEEP", 0.02)
        patch.setattr(executor_async, "CALL_TIMEOUT", 0.1)
        patch.setattr(executor_async, "open_in_thread", lambda *_: None)
        with pytest.raises(holdfast.EngineError, match="did not answer in time"):
            client.lock("a", timeout=60).acquire()
    assert client.lock("a", timeout=PATIENCE).acquire().release() is True


def test_no_thread_to_write_a_name_in_loses_no_lock(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SWEEP", 0.05), ("YOUNG", 0.02), ("NOTE_PAUSE", 0.1)):
        monkeypatch.setattr(executor_async, name, seconds)
    with holdfast.Client(sqlite_url) as client:
        client.leases.list()  # creates the tables
        held = client.lock("a").acquire()
        names = "select name from holdfast_lock_name order by name"
        eventually(lambda: query(sqlite_url, names) == [("a",)], "the first name is written")
        with no_threads():
            client.lock("b").acquire()
            sweeps = core(client)._stuck
            eventually(lambda: core(client)._stuck is not sweeps, "a sweep has begun")
            sweeps = core(client)._stuck
            eventually(lambda: core(client)._stuck is not sweeps, "and another one")
            assert query(sqlite_url, names) == [("a",)]
        assert client.lock("c", timeout=PATIENCE).acquire().release() is True
        eventually(lambda: query(sqlite_url, names) == [("a",), ("b",)], "the second is written later")
        held.check()


def test_a_note_that_waits_for_the_database_leaves_no_row_of_a_closed_session(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session is closed before the note is repeated that its lock was released. A row that stayed would be that of
    a holder: another process that waits for the lock names it."""
    for name, seconds in (("SWEEP", 0.05), ("YOUNG", 600), ("NOTE_PAUSE", 600)):
        monkeypatch.setattr(executor_async, name, seconds)
    with holdfast.Client(sqlite_url) as client:
        client.leases.list()  # creates the tables
        held = client.lock(("agent", 7)).acquire()
        wire = core(client).pool.holds[0].wire
        with closing(sqlite3.connect(urlsplit(sqlite_url).path, isolation_level=None)) as other:
            other.execute("begin immediate")
            monkeypatch.setattr(executor_async, "YOUNG", 0)
            eventually(lambda: wire._has_rows, "the note that it is held waits for the database")
            writer = wire._writer
            assert held.release() is True
            eventually(lambda: not core(client).pool.sessions, "the session is closed")
            assert writer.is_alive()
        writer.join(PATIENCE)
        eventually(lambda: query(sqlite_url, "select * from holdfast_lock_hold") == [], "no row is left")


def test_a_lock_file_that_may_not_be_written_is_no_lock_that_somebody_has(
    connect: Connect, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To lock a byte and to open the file are refused with the same error, as when another user has made it."""
    opened = os.open

    def denied(path: Any, *arguments: Any) -> int:
        if str(path).endswith("-locks"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *arguments)

    client = connect(sqlite_url)
    client.lock(("agent", 7)).acquire()
    monkeypatch.setattr(os, "open", denied)
    for _ in range(2):
        with pytest.raises(holdfast.EngineError, match=r"-locks: Permission denied\. May this user"):
            client.lock("a").try_acquire()
        with pytest.raises(holdfast.EngineError, match="Permission denied"):
            client.lock("a", timeout=PATIENCE).acquire()
    monkeypatch.undo()
    client.lock("a").acquire(timeout=0)


def test_whoever_may_write_to_the_database_may_lock_whoever_came_first(sqlite_url: str) -> None:
    """As with the files that SQLite makes beside it; root may come first, to look."""
    path = Path(urlsplit(sqlite_url).path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("create table mine (id int)")
    path.chmod(0o660)
    if os.geteuid() == 0:
        os.chown(path, 12345, 23456)
    about = path.stat()
    expected = [(about.st_uid, about.st_gid, about.st_mode)] * 5

    def permissions() -> list[tuple[int, int, int]]:
        beside = [each.stat() for each in path.parent.glob("*.holdfast-*")]
        return [(each.st_uid, each.st_gid, each.st_mode) for each in beside]

    with holdfast.Client(sqlite_url) as client, holdfast.Client(sqlite_url) as other:
        held = client.lock("a").acquire()
        with client.lock(("agent", 7)), waiting(lambda: other.lock("a", timeout=PATIENCE).acquire().release()):
            eventually(lambda: permissions() == expected, "all five have the permissions of the database")
            held.release()


def test_two_names_for_one_byte_wait_for_each_other(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are fewer bytes than names. Locked twice and unlocked once, it would be free under whoever has it still."""
    digests = {b"a": 5, b"b": 2**63 + 6}

    def colliding(data: bytes) -> Any:
        number = digests[data.partition(b"\n")[2]]
        return SimpleNamespace(digest=lambda: number.to_bytes(8, "big"))

    monkeypatch.setattr("holdfast.lock.terms.sha256", colliding)
    monkeypatch.setattr("holdfast.lock.handle.targets", _Targets)
    with holdfast.Client(sqlite_url) as client, holdfast.Client(sqlite_url) as other:
        with client.lock("a"):
            assert [each.lock("b").try_acquire() for each in (client, other)] == [None, None]
        with client.lock("b"):
            assert other.lock("a").try_acquire() is None


@pytest.mark.parametrize(("name", "end"), [("a", ""), (("agent", 7), ".away")], ids=["removed", "moved"])
def test_whose_lock_file_is_removed_is_told_and_whoever_comes_next_shares_the_new_one(
    connect: Connect, sqlite_url: str, name: Any, end: str
) -> None:
    """Processes that go on with different files would never exclude each other again."""
    holder, waiter, newcomer = (connect(sqlite_url) for _ in range(3))
    held = holder.lock(name).acquire()
    with waiting(lambda: waiter.lock(name, timeout=PATIENCE).acquire()) as won:
        file = Path(f"{urlsplit(sqlite_url).path}.holdfast-{'locks' if name == 'a' else 'pairs'}")
        file.rename(f"{file}{end}") if end else file.unlink()
    eventually(lambda: held.lost, "it is told")
    with pytest.raises(holdfast.LockLost, match="was removed"):
        held.check()
    assert [each.lock(name).try_acquire() for each in (holder, newcomer)] == [None, None]
    assert won[0].release() is True
    assert newcomer.lock(name).try_acquire() is not None
    assert holder.lock(name).try_acquire() is None


def test_whoever_waited_has_the_lock_in_the_file_that_all_others_have(connect: Connect, sqlite_url: str) -> None:
    """Free in the file that was removed, it was won there, and free for everybody else in the new one."""
    holder, waiter, newcomer = (connect(sqlite_url) for _ in range(3))
    held = holder.lock("a").acquire()
    with waiting(lambda: waiter.lock("a", timeout=PATIENCE).acquire()) as won:
        beside = Path(urlsplit(sqlite_url).path + ".holdfast-locks")
        eventually(beside.with_suffix(".holdfast-line").exists, "it stands in line")
        beside.unlink()
        assert held.release() is True
    assert newcomer.lock("a").try_acquire() is None
    assert won[0].release() is True


def test_readers_of_other_processes_do_not_pass_a_writer_that_waits(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would let them in beside the reader that holds it, one after the other."""
    monkeypatch.setattr(file_locks, "PAUSED", 600)
    holder, writer, reader = wires = [open_wire(parse(sqlite_url), 1.0) for _ in range(3)]
    key = (b"7",)
    entry = Entry(key, LockRequest(key, "", waits=True, shared=True))
    assert holder.run(entry, False, 0.0)
    writer.wait(key, False)
    assert writer.receive() is None
    reader.wait(key, True)
    for _ in range(100):
        assert (writer.receive(), reader.receive()) == (None, None)
    newcomer = open_wire(parse(sqlite_url), 1.0)
    assert not newcomer.run(entry, False, 0.0)
    newcomer.close()
    holder.run(entry, True, 0.0)
    assert (reader.receive(), writer.receive()) == (None, [True])
    for each in wires:
        each.close()


def test_whoever_takes_a_lock_of_the_kernel_again_and_again_lets_in_who_waits(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between processes: the kernel has no line, and whoever asks again at once is always quicker."""
    monkeypatch.setattr(file_locks, "PAUSED", 600)
    greedy, first, second = wires = [open_wire(parse(sqlite_url), 1.0) for _ in range(3)]
    entry = Entry((b"7",), LockRequest((b"7",), "", waits=True, shared=False))

    def takes(wire: Any) -> Any:
        return wire.run(entry, False, 0.0)

    def waits(wire: Any) -> bool:
        return wire.receive() is None

    assert takes(greedy)
    for each in (first, second):
        each.wait(entry.key, False)
        assert waits(each)
    greedy.problem()
    greedy.run(entry, True, 0.0)
    assert not takes(greedy), "it is somebody else's turn"
    assert takes(greedy), "but not at every turn"
    assert waits(first)
    greedy.run(entry, True, 0.0)
    assert waits(second), "it is not the first"
    with monkeypatch.context() as patch:
        patch.setattr(file_locks, "PAUSED", -1)
        assert second.receive() == [True], "the first does not poll, as if it were stopped"
    second.run(entry, True, 0.0)
    second.wait(entry.key, False)
    assert waits(second)
    assert first.receive() == [True]
    first.run(entry, True, 0.0)
    greedy.problem()
    assert takes(greedy), "nobody has marked it yet"
    assert waits(second)
    second.close()
    greedy.problem()
    greedy.run(entry, True, 0.0)
    assert takes(greedy), "nobody waits any more"
    for each in wires:
        each.close()


def test_a_wait_that_the_server_ends_now_and_then_goes_on(
    connect: Connect, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as a statement waits, vacuum removes nothing that has died since: so it is begun anew, unnoticed."""
    known = statements("postgres", "holdfast")
    shorter = known["lock_tune"]._replace(sql=known["lock_tune"].sql.replace("10min", "20ms"))
    assert shorter != known["lock_tune"]
    monkeypatch.setitem(known._parsed, "lock_tune", shorter)
    begun = "select waitstart from pg_locks where locktype = 'advisory' and not granted"
    seen: set[Any] = set()

    def begins() -> bool:
        seen.update(query(postgres_url, begun))
        return len(seen) > 3

    holder, waiter = connect(postgres_url), connect(postgres_url)
    held = holder.lock("a").acquire()
    with waiting(lambda: waiter.lock("a").acquire(timeout=PATIENCE)) as won:
        eventually(begins, "it has been begun anew")
        held.release()
    won[0].check()
    assert len(advisory(postgres_url)) == 1


def test_a_key_that_is_free_is_had_although_all_sessions_are_in_use(postgres_url: str) -> None:
    """One lock won by waiting keeps the only session to wait in; a second one need not wait for that."""
    with (
        holdfast.Client(postgres_url) as other,
        holdfast.Client(postgres_url, lock_sessions=1, lock_overflow=1) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        held = [other.lock(name).acquire() for name in ("a", "b")]
        waiting = pool.submit(lambda: client.lock("a", timeout=PATIENCE).acquire())
        eventually(lambda: len(advisory(postgres_url)) == 3, "it stands in the server's line")
        held[0].release()
        waiting.result(PATIENCE)
        second = pool.submit(lambda: client.lock("b", timeout=PATIENCE).acquire().release())
        eventually(lambda: core(client).pool._parked, "there is no session for it")
        held[1].release()
        assert second.result(PATIENCE) is True


async def test_a_timer_that_was_interrupted_before_its_first_step_is_missed(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C in a program that goes on: nothing else would end the wait, nor close what is idle."""
    monkeypatch.setattr(executor_async, "SWEEP", 0.1)
    loop: Any = asyncio.get_running_loop()
    async with holdfast.AsyncClient(either) as client, holdfast.AsyncClient(either) as other:
        held = await other.lock("a").acquire()
        await (await client.lock("warm").acquire()).release()
        waiting = asyncio.create_task(client.lock("a").acquire(timeout=600))
        executor: Any = client._locks.executor  # type: ignore[union-attr]
        pool = executor.pool
        await until(lambda: any(each.opened for each in pool.waits), "it stands in line")
        [request] = executor._waiting
        executor._waiting[request] = now() + 0.1
        executor._set_alarm()
        ours = (executor._ring, executor._core._readable)
        timers = [each for each in loop._scheduled if each._callback in ours and not each.cancelled()]
        assert executor._ring in [each._callback for each in timers]
        for timer in timers:
            timer.cancel()
        with pytest.raises(holdfast.AcquireTimeout):
            await asyncio.wait_for(waiting, PATIENCE)
        await held.release()
        await until(lambda: not pool.sessions, "what is idle is closed")


async def test_many_waits_have_one_timer(postgres_url: str) -> None:
    """A loop with many timers takes longer for each of its rounds. The sweep has another one."""
    loop: Any = asyncio.get_running_loop()
    async with holdfast.AsyncClient(postgres_url) as client, holdfast.AsyncClient(postgres_url) as other:
        await other.lock("a").acquire()
        await (await client.lock("warm").acquire()).release()
        executor: Any = client._locks.executor  # type: ignore[union-attr]
        waiting = [asyncio.create_task(client.lock("a").acquire(timeout=600 + number)) for number in range(20)]
        await until(lambda: len(executor._waiting) == 20, "they wait")
        ours = [
            each for each in loop._scheduled if getattr(each._callback, "__self__", None) in (executor, core(client))
        ]
        assert len([each for each in ours if not each.cancelled()]) <= 2
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)


@pytest.mark.parametrize("past", [True, False])
def test_the_grants_of_an_event_loop_that_was_closed_are_lost(postgres_url: str, past: bool) -> None:
    async def main() -> Any:
        client = holdfast.AsyncClient(postgres_url)
        if past:
            await (await client.lock("warm").acquire()).release()
        return client, await client.lock("a").acquire()

    _client, grant = asyncio.run(main())
    with holdfast.Client(postgres_url) as other:
        other.lock("a").acquire(timeout=PATIENCE)
        assert grant.lost
        with pytest.raises(holdfast.LockLost, match="loop"):
            grant.check()


def test_a_signal_handler_that_locks_during_the_very_first_acquire(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Client(postgres_url) as client:

        class Interrupted(LoopExecutor):
            def __init__(self, *args: Any, **options: Any) -> None:
                monkeypatch.undo()
                assert executor._starting.acquire(timeout=PATIENCE), "it would wait for itself"
                executor._starting.release()
                grants.append(client.lock("handler", timeout=PATIENCE).acquire())  # what the handler does
                super().__init__(*args, **options)

        monkeypatch.setattr("holdfast.lock.executor.LoopExecutor", Interrupted)
        executor: Any = client.lock("a")._space.executor
        grants: list[Any] = []
        grants.append(client.lock("main", timeout=PATIENCE).acquire())
        assert {grant._request.entry.session for grant in grants} == set(executor.pool.holds), "one pool for both"
        assert [grant.release() for grant in grants] == [True, True]


def test_two_threads_that_start_the_background_thread_at_once_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a signal handler and the thread that it has interrupted."""
    background, real = LoopThread(), asyncio.SelectorEventLoop
    loops: list[asyncio.AbstractEventLoop] = []

    def create() -> asyncio.AbstractEventLoop:
        loops.append(loop := real())
        if len(loops) == 1:
            background.loop()
        return loop

    monkeypatch.setattr(asyncio, "SelectorEventLoop", create)
    assert background.loop() is background.loop() is loops[1]
    assert [loop.is_closed() for loop in loops] == [True, False]
    background._stop()
    assert loops[1].is_closed()
