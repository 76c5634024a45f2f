"""A session that ends tells every grant on it; those who wait go on waiting, elsewhere."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import uvloop

import holdfast
from holdfast.database.sessions import is_readable
from holdfast.database.url import parse
from holdfast.errors import Unanswered
from holdfast.lock import executor_async
from holdfast.lock.executor_async import LoopExecutor
from holdfast.lock.pool import LockSession, Pool
from holdfast.testing import Postgres, Proxy
from tests.children import PATIENCE, Child, eventually, query
from tests.conftest import migrated
from tests.lock.looks import advisory, core, is_idle, queued, waiters
from tests.reset_connection import BrokenOff

Connect = Callable[..., Any]


def terminate(url: str, *, granted: bool = True) -> None:
    pids = {pid for *_, held, pid in advisory(url) if held is granted}
    assert pids
    for pid in pids:
        query(url, "select pg_terminate_backend(%s)", pid)


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The names in the log, one a WARNING."""
    return sorted(each.lock for each in caplog.records if getattr(each, "event", "") == "lock.lost")  # type: ignore[attr-defined]


def test_a_session_that_ends_tells_every_grant_on_it(
    connect: Connect, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, told = connect(postgres_url), list[Any]()

    def tell(grant: Any) -> None:
        told.append(grant.name)

    grants = [client.lock(("agent", number), on_lost=tell).acquire() for number in (1, 2)]
    grants.append(client.lock("a").acquire())
    assert [grant.lost for grant in grants] == [False] * 3
    terminate(postgres_url)
    eventually(lambda: all(grant.lost for grant in grants), "every grant has learned of it")
    for grant in grants:
        with pytest.raises(holdfast.LockLost, match="session"):
            grant.check()
        assert grant.release() is False
    eventually(lambda: sorted(told) == [("agent", 1), ("agent", 2)], "and so have their owners")
    eventually(lambda: losses(caplog) == ["('agent', 1)", "('agent', 2)", "a"], "one WARNING each")
    with client.lock("a") as again:
        again.check()


def test_an_interrupted_event_gives_all_locks_up_and_reports_each(
    connect: Connect, either: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing in the pool can be trusted then. Who waits goes on in the new one."""
    client, other, reports = connect(either), connect(either), list[Any]()
    names: list[Any] = ["a", "b", ("agent", 7)]
    grants = [client.lock(name, on_lost=lambda grant: reports.append(grant.name)).acquire() for name in names]
    held = other.lock("x").acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: client.lock("x", timeout=PATIENCE).acquire().release())
        eventually(lambda: core(client).pool.counts().waiting, "it stands in line")
        core(client).pool.writer = object()
        client.lock("the next event").acquire(timeout=PATIENCE).release()
        assert [grant.lost for grant in grants] == [True] * 3
        for grant in grants:
            with pytest.raises(holdfast.LockLost, match="interrupt"):
                grant.check()
            assert grant.release() is False
        eventually(lambda: sorted(reports, key=str) == sorted(names, key=str), "their owners are told")
        assert losses(caplog) == ["('agent', 7)", "a", "b"]
        for name in names:
            other.lock(name).acquire(timeout=PATIENCE).release()
        assert held.release() is True
        assert waiting.result(PATIENCE) is True
    if either.startswith("postgres"):
        eventually(lambda: advisory(either) == [], "nothing is left")


def test_whoever_gives_back_what_is_lost_already_is_told_all_the_same(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw the loss before its ``on_lost`` was called."""
    told, released = list[Any](), threading.Event()
    with holdfast.Client(postgres_url) as client:
        grant = client.lock("a", on_lost=told.append).acquire()
        report = core(client)._report

        def later(*args: Any) -> None:
            assert released.wait(PATIENCE)
            report(*args)

        monkeypatch.setattr(core(client), "_report", later)
        terminate(postgres_url)
        eventually(lambda: grant.lost, "it is seen")
        assert grant.release() is False
        released.set()
        eventually(lambda: told == [grant], "it is told")


def test_the_end_of_a_session_is_told_at_once(
    connect: Connect, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its socket, and not by the look that comes now and then: there is none here. Nor by the next use."""
    monkeypatch.setattr(executor_async, "SWEEP", 600.0)
    client = connect(postgres_url)
    client.lock("warm").acquire().release()
    grant = client.lock("a").acquire()
    terminate(postgres_url)
    eventually(lambda: grant.lost, "it is told")


def test_the_end_of_a_session_is_told_where_the_system_cannot_tell_it_from_an_answer(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without epoll it is looked for now and then."""
    monkeypatch.setattr("holdfast.lock.executor_async._HANG_UP", 0)
    with holdfast.Client(postgres_url) as client:
        grants = [client.lock(("agent", number)).acquire() for number in range(2)]
        terminate(postgres_url)
        eventually(lambda: all(grant.lost for grant in grants), "both have learned of it")
        client.lock(("agent", 1), timeout=PATIENCE).acquire().check()


def test_a_loss_that_cannot_be_told_holds_up_nobody(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no thread to be had to call ``on_lost`` in. Whoever waits for the lock gets it all the same."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "holdfast-on-lost":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with holdfast.Client(postgres_url) as client, ThreadPoolExecutor(1) as pool:
        grant = client.lock("a", on_lost=print).acquire()
        waiting = pool.submit(lambda: client.lock("a", timeout=PATIENCE).acquire().release())
        eventually(lambda: queued(client), "it stands in line")
        terminate(postgres_url)
        assert waiting.result(PATIENCE) is True
        assert grant.lost


def test_a_connection_that_breaks_tells_every_grant(connect: Connect, postgres_url: str) -> None:
    with Proxy(postgres_url) as link:
        client = connect(link.url)
        grant = client.lock("a").acquire()
        link.cut()
        eventually(lambda: grant.lost, "it is told")
        client.lock("a").acquire(timeout=PATIENCE).check()


class LastWords(BrokenOff):
    """As a session for locks."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptor, self.close = self.ours.fileno(), self.ours.close

    def receive(self) -> None:
        try:
            self.read()
        except OSError as error:
            raise Unanswered(str(error)) from error


@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_connection_that_fails_with_something_left_to_read_is_lost_on_every_loop(make: Any) -> None:
    """uvloop tells of both at once, and never again."""
    session = LockSession(waits=False)
    session.wire, session.opened = LastWords(), True

    async def hear() -> None:
        nowhere = parse("postgresql://nowhere/at-all")
        executor = LoopExecutor(nowhere, Pool(), asyncio.get_running_loop(), print, shared=False)
        executor._sessions.add(session)
        executor._watch(session)
        async with asyncio.timeout(PATIENCE):
            while not session.over:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(hear())


def test_a_lock_won_by_waiting_is_lost_with_its_own_session(connect: Connect, postgres_url: str) -> None:
    holder, client = connect(postgres_url), connect(postgres_url)
    held, mine = holder.lock("a").acquire(), client.lock("b").acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: client.lock("a").acquire(timeout=PATIENCE))
        eventually(lambda: waiters(postgres_url), "it stands in line")
        [winner] = waiters(postgres_url)
        held.release()
        grant = waiting.result(PATIENCE)
    query(postgres_url, "select pg_terminate_backend(%s)", winner)
    eventually(lambda: grant.lost, "it is told")
    assert not mine.lost, "another session"


def test_whoever_waits_outlives_the_end_of_its_session(connect: Connect, postgres_url: str) -> None:
    holder, client = connect(postgres_url), connect(postgres_url)
    held = holder.lock("a").acquire()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(lambda: client.lock("a").acquire(timeout=PATIENCE).release()) for _ in range(2)]
        eventually(lambda: waiters(postgres_url), "one stands in line for both")
        [first] = waiters(postgres_url)
        terminate(postgres_url, granted=False)
        eventually(lambda: waiters(postgres_url) not in ([], [first]), "in line again")
        held.check()
        assert held.release() is True
        assert [each.result(PATIENCE) for each in waiting] == [True, True]


def test_a_waiter_outlives_a_restart_of_the_server(connect: Connect) -> None:
    with Postgres.create() as server:
        url = migrated(server.database())
        holder, client = connect(url), connect(url)
        held = holder.lock("a").acquire()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: client.lock("a").acquire(timeout=2 * PATIENCE).release())
            eventually(lambda: waiters(url), "it stands in line")
            server.restart("immediate")
            eventually(lambda: held.lost, "the holder knows")
            assert waiting.result(2 * PATIENCE) is True
        holder.close()
        client.close()


def test_a_holder_whose_session_was_ended_believes_until_the_news_has_come_and_no_longer(
    connect: Connect, postgres_url: str
) -> None:
    """The server lets the next one in at once; what is on its way to the old one cannot be there yet. Two believe for
    as long as the way is, which is what fences are for: and then the old one knows."""
    with Proxy(postgres_url) as link:
        client, other = connect(link.url), connect(postgres_url)
        grant = client.lock("a").acquire()
        link.stall("to_client")
        terminate(postgres_url)
        next_one = other.lock("a").acquire(timeout=PATIENCE)
        assert not grant.lost, "nobody can know"
        link.heal()
        eventually(lambda: grant.lost, "it is told")
        assert grant.release() is False
        next_one.check()


def test_two_of_one_client_never_believe_at_once_and_of_two_clients_the_old_one_is_told(postgres_url: str) -> None:
    """Sessions are ended under their holders all the time. Inside one client the end of the old one comes first; across
    clients the news of it is on its way, and until it has come a lock may even be handed on in a session that ended."""
    inside: dict[str, tuple[Any, Any]] = {}
    over = threading.Event()

    def look(name: str, grant: Any, client: holdfast.Client) -> None:
        before, holder = inside.get(name, (grant, client))
        if before is not grant and not before.lost and not grant.lost:
            assert holder is not client
            eventually(
                lambda: (session := before._request.entry.session) is None or session.over,
                "the session of the old one had been ended",
            )

    def work(client: holdfast.Client) -> None:
        while not over.is_set():
            for name in ("a", "b"):
                with suppress(holdfast.HoldfastError), client.lock(name, timeout=1) as grant:
                    look(name, grant, client)
                    inside[name] = grant, client
                    time.sleep(0.001)
                    if inside.get(name) == (grant, client):
                        del inside[name]

    with holdfast.Client(postgres_url) as one, holdfast.Client(postgres_url) as two, ThreadPoolExecutor(8) as pool:
        working = [pool.submit(work, client) for client in (one, two) * 4]
        for _ in range(60):
            query(postgres_url, "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' limit 1")
            over.wait(0.02)
        over.set()
        for each in working:
            each.result(PATIENCE)


async def test_on_lost_cancel_ends_the_block_and_raises(postgres_url: str) -> None:
    async def block(scope: Any) -> None:
        async with scope:
            await asyncio.to_thread(terminate, postgres_url)
            await asyncio.sleep(600)

    async with holdfast.AsyncClient(postgres_url) as client:
        with pytest.raises(holdfast.LockLost, match="session"):
            await block(client.lock("a", on_lost="cancel"))
        with pytest.raises(holdfast.LockLost):
            await block(client.lock("a", on_lost="cancel").or_skip())


async def test_an_outer_cancellation_stays_what_it_is(postgres_url: str) -> None:
    async with holdfast.AsyncClient(postgres_url) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), client.lock("a", on_lost="cancel"):
                await asyncio.sleep(600)
        async with client.lock("a").or_skip() as grant:
            assert grant is not None


def test_threads_cannot_be_cancelled(either: str) -> None:
    with holdfast.Client(either) as client, pytest.raises(ValueError, match="asyncio"):
        client.lock("a", on_lost="cancel")


def test_on_lost_exit_ends_the_process(postgres_url: str) -> None:
    program = """
    import sys, holdfast
    grant = holdfast.Client(sys.argv[1]).lock("a", on_lost="exit").acquire()
    print("held")
    sys.stdin.read()
    """
    with Child(program, postgres_url) as child:
        child.expect("held")
        terminate(postgres_url)
        assert child.wait() == 70


def test_a_server_that_does_not_answer_is_a_timeout(connect: Connect, postgres_url: str) -> None:
    """And nothing of it stays when it answers again."""
    with Proxy(postgres_url) as link:
        client = connect(link.url)
        client.lock("warm").acquire().release()
        link.stall("to_client")
        with pytest.raises(holdfast.AcquireTimeout, match="has not answered"):
            client.lock("a").acquire(timeout=0.2)
        link.heal()
        eventually(lambda: advisory(postgres_url) == [], "what was granted is given back")
        client.lock("a").acquire(timeout=PATIENCE).check()


def test_a_session_that_answers_nobody_is_given_up(
    connect: Connect, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks in it may wait for as long as it takes: somebody else looks at how long that is."""
    with Proxy(postgres_url) as link:
        client = connect(link.url)
        client.lock("warm").acquire().release()
        grant, other = client.lock("a").acquire(), client.lock("b").acquire()
        with monkeypatch.context() as hurried:
            hurried.setattr(executor_async, "SWEEP", 0.02)
            hurried.setattr(executor_async, "CALL_TIMEOUT", 0.1)
            link.stall("to_client")
            assert grant.release() is False
            assert other.lost
        link.heal()
        client.lock("a").acquire(timeout=PATIENCE).check()


def test_a_handler_that_keeps_a_thread_from_its_answer_costs_no_session(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Semaphore(0)
    look = LoopExecutor._end_stuck

    def end_stuck(executor: LoopExecutor) -> None:
        look(executor)
        looked.release()

    with Proxy(postgres_url) as link, holdfast.Client(link.url) as client, ThreadPoolExecutor(1) as pool:
        client.lock("warm").acquire().release()
        grant, other = client.lock("a").acquire(), client.lock("b").acquire()
        eventually(lambda: is_idle(client), "there is a session to use")
        request: Any = grant._request
        session = request.entry.session

        def interrupt() -> None:
            eventually(lambda: session.sender is grant._request, "the thread waits for an answer")
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        def stay(*signalled: object) -> None:
            link.heal()
            eventually(lambda: is_readable(session.wire.descriptor), "the answer has come")
            monkeypatch.setattr(executor_async, "SWEEP", 0.02)
            monkeypatch.setattr(executor_async, "CALL_TIMEOUT", 0.1)
            monkeypatch.setattr(LoopExecutor, "_end_stuck", end_stuck)
            assert all(looked.acquire(timeout=PATIENCE) for _ in range(20))

        before = signal.signal(signal.SIGUSR1, stay)
        link.stall("to_client")
        sent = pool.submit(interrupt)
        try:
            assert grant.release() is True
        finally:
            signal.signal(signal.SIGUSR1, before)
        sent.result(PATIENCE)
        other.check()


def test_the_first_use_of_a_namespace_is_part_of_the_time_there_is(
    connect: Connect, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(postgres_url) as link:
        client = connect(link.url)
        client.leases.list()
        link.stall("to_client")
        for flavour in ("", "_async"):  # nothing else ends the call
            monkeypatch.setattr(f"holdfast.lock.handle{flavour}.CALL_TIMEOUT", 600.0)
        with pytest.raises(holdfast.AcquireTimeout, match="has not answered"):
            client.lock(("never used before", 7)).acquire(timeout=0.3)


def test_our_side_of_a_lock_session_notices_a_dead_peer(connect: Connect, postgres_url: str) -> None:
    """Keepalives for an idle connection, the user timeout for one that sends. The server's side is in session_tune."""
    client = connect(postgres_url)
    client.lock("a").acquire()
    [session] = core(client).pool.holds
    assert session.wire._session.socket_options() == {"keepalive": True, "user_timeout": 3000}
