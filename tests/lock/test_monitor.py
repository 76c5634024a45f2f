"""``client.locks``: who holds a lock, since when, and who waits for it, on both engines and in both flavours."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.lock import executor_async
from tests.children import PATIENCE, eventually, query
from tests.cli.command import at, invoke
from tests.lock.looks import core

Connect = Callable[..., Any]
SWEEP, YOUNG = executor_async.SWEEP, executor_async.YOUNG


@pytest.fixture(autouse=True)
def soon_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks are noted for others at once, where a second would do, and soon again if a file has no tables yet."""
    for name, seconds in (("SWEEP", 0.05), ("YOUNG", 0.02), ("NOTE_PAUSE", 0.1)):
        monkeypatch.setattr(executor_async, name, seconds)


def record(client: Any, name: str) -> holdfast.LockRecord | None:
    return next((each for each in client.locks.list() if each.name == name and each.granted), None)


def has_age(client: Any, name: str, asked: float, since: float) -> bool:
    """Whether the listed age is that of a lock which was granted after ``asked`` and before ``since``."""
    least = time.monotonic() - since
    listed = record(client, name)
    most = time.monotonic() - asked
    if listed is None or listed.duration is None or listed.held_since is None:
        return False
    age = time.time() - listed.held_since.timestamp()
    return least - 0.2 <= listed.duration <= most + 0.2 and least - 0.2 <= age <= time.monotonic() - asked + 0.2


def test_a_lock_has_its_age_while_others_of_the_same_client_come_and_go(
    connect: Connect, either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_async, "YOUNG", 0.5)  # so that the age that is noted is not near zero
    client, onlooker = connect(either), connect(either)
    over = threading.Event()

    def come_and_go(number: int) -> None:
        while not over.is_set():
            with client.lock(f"short {number}", timeout=PATIENCE):
                pass

    with ThreadPoolExecutor(10) as threads, ExitStack() as at_end:
        at_end.callback(over.set)
        asked = time.monotonic()
        held = client.lock("long").acquire()
        since = time.monotonic()
        for number in range(10):
            threads.submit(come_and_go, number)
        eventually(lambda: time.monotonic() - since > 0.7, "it is held for longer than the others")
        eventually(lambda: getattr(record(onlooker, "long"), "duration", None), "it is noted")
    # After the others: while they are busy, a list takes long, and then it proves little.
    eventually(lambda: has_age(onlooker, "long", asked, since), "its age is listed")
    held.check()


def test_a_lock_that_is_handed_over_has_the_age_of_its_new_holder(connect: Connect, either: str) -> None:
    client = connect(either)
    asked = time.monotonic()
    first = client.lock("a").acquire()
    since = time.monotonic()
    eventually(lambda: has_age(client, "a", asked, since), "the first holder's age is listed")
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(client.lock("a", timeout=PATIENCE).acquire)
        eventually(lambda: getattr(record(client, "a"), "waiting", 0) == 1, "it is waited for")
        eventually(lambda: time.monotonic() - since > 0.7, "the first holder has held it for a while")
        asked = time.monotonic()
        first.release()
        grant = second.result(PATIENCE)
        since = time.monotonic()
        eventually(lambda: has_age(client, "a", asked, since), "the second holder's age is listed")
        grant.release()


def test_those_who_wait_are_counted_also_inside_a_process(connect: Connect, either: str) -> None:
    clients = [connect(either) for _ in range(2)]
    with ThreadPoolExecutor(5) as threads:
        held = clients[0].lock("a").acquire()
        waits = [threads.submit(clients[number % 2].lock("a", timeout=PATIENCE).acquire) for number in range(5)]
        eventually(lambda: getattr(record(clients[0], "a"), "waiting", 0) == 5, "all five are counted")
        held.release()
        while waits:
            eventually(lambda: any(each.done() for each in waits), "one has it")
            done = next(each for each in waits if each.done())
            waits.remove(done)
            done.result().release()
    eventually(lambda: all(each.waiting == 0 for each in clients[0].locks.list()), "nobody waits")


def test_a_holder_is_a_host_and_a_process(connect: Connect, either: str) -> None:
    name = "" if either.startswith("sqlite") else "?application_name=importer"
    client = connect(either + name)
    client.lock("a").acquire()
    expected = f"{os.uname().nodename}:{os.getpid()}{name and ':importer'}"
    eventually(lambda: getattr(record(client, "a"), "holder", None) == expected, "the holder is listed")
    listed = record(client, "a")
    assert listed is not None
    assert listed.application_name == f"holdfast:{expected}"
    plain = listed.as_dict()
    assert (plain["label"], plain["holder"], plain["blocked_by"]) == ("a", expected, [])


def test_a_timeout_names_the_holder_and_since_when(connect: Connect, either: str) -> None:
    client, other = connect(either), connect(either)
    held = client.lock("a").acquire()
    holder = f"{os.uname().nodename}:{os.getpid()}"
    expected = rf"lock 'a' is held by {holder} since \d+.* \(\d+\.\d s\); waited"

    def named(client: Any) -> bool:
        """The lookup of the holder has a short limit, so it may fail on a busy machine."""
        with pytest.raises(holdfast.AcquireTimeout) as caught:
            client.lock("a").acquire(timeout=0.2)
        return caught.value.holder == holder and re.match(expected, str(caught.value)) is not None

    eventually(lambda: named(other), "the holder is named")
    with pytest.raises(holdfast.NotAcquired, match="held by another holder"):
        other.lock("a").acquire(timeout=0)
    held.release()


def test_requests_that_time_out_together_all_name_the_holder(connect: Connect, either: str) -> None:
    client, other = connect(either), connect(either)
    held = client.lock("a").acquire()
    assert other.lock("a").try_acquire() is None, "connecting takes time, too"

    def refused(_: int) -> str | None:
        with pytest.raises(holdfast.AcquireTimeout) as caught:
            other.lock("a").acquire(timeout=0.2)
        return caught.value.holder

    def named() -> bool:
        """The lookup of the holder has a short limit, so it may fail on a busy machine."""
        with ThreadPoolExecutor(20) as threads:
            return set(threads.map(refused, range(20))) == {f"{os.uname().nodename}:{os.getpid()}"}

    eventually(named, "all twenty name the holder")
    held.release()


def test_a_lock_that_is_handed_over_quickly_shows_its_waiters(connect: Connect, either: str) -> None:
    client = connect(either)
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            with client.lock("a", timeout=PATIENCE):
                over.wait(0.02)

    with ThreadPoolExecutor(10) as threads, ExitStack() as at_end:
        at_end.callback(over.set)
        for _ in range(10):
            threads.submit(work)
        eventually(lambda: getattr(record(client, "a"), "waiting", 0) >= 5, "its waiters are counted")


def test_a_note_that_cannot_be_written_is_repeated(
    connect: Connect, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_async, "SWEEP", SWEEP)  # a session that is idle for a few sweeps is closed
    client = connect(postgres_url)
    held = client.lock("a").acquire()
    rows = "select count(*) from holdfast.lock_hold where since is not null"
    eventually(lambda: query(postgres_url, rows) == [(1,)], "it is noted")
    with psycopg.connect(postgres_url) as admin:
        admin.execute("lock table holdfast.lock_hold in share mode")
        held.release()
        failed = core(client)._failed_notes
        eventually(lambda: failed, "that it is gone could not be written")
        admin.rollback()
    eventually(lambda: query(postgres_url, rows) == [(0,)], "it is written later")


def test_rows_of_clients_that_were_closed_do_not_count(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as onlooker:
        for _ in range(3):
            with holdfast.Client(sqlite_url) as client:
                asked = time.monotonic()
                grant = client.lock("a").acquire()
                given = asked, time.monotonic()
                eventually(lambda given=given: has_age(onlooker, "a", *given), "its age is listed")  # type: ignore[misc]
                grant.release()
        eventually(lambda: query(sqlite_url, "select count(*) from holdfast_lock_hold") == [(0,)], "no row is left")


def test_readers_are_not_bounded_where_no_writer_waits(connect: Connect, either: str) -> None:
    client = connect(either)
    inside, over = threading.Semaphore(0), threading.Event()

    def read() -> None:
        with client.lock("a", shared=True, timeout=PATIENCE):
            inside.release()
            over.wait(PATIENCE)

    with ThreadPoolExecutor(60) as threads, ExitStack() as at_end:
        at_end.callback(over.set)
        for _ in range(60):
            threads.submit(read)
        assert all(inside.acquire(timeout=PATIENCE) for _ in range(60)), "all read at once"


def test_shared_holders_are_listed_as_shared(connect: Connect, either: str) -> None:
    clients = [connect(either) for _ in range(2)]
    for client in clients:
        client.lock("a", shared=True).acquire()
    eventually(lambda: {each.mode for each in clients[0].locks.list()} == {"shared"}, "both are listed")


def test_locks_of_holdfast_itself_have_readable_names(connect: Connect, postgres_url: str) -> None:
    client, other = connect(postgres_url), connect(postgres_url)
    held = client.lease("nightly", ttl=600).acquire()
    with ThreadPoolExecutor(1) as thread:
        wait = thread.submit(other.lease("nightly", ttl=600).acquire, timeout=PATIENCE)
        eventually(
            lambda: "waiter of lease nightly" in {each.label for each in client.locks.list()}, "the waiter is named"
        )
        held.release()
        wait.result(PATIENCE).release()


def test_namespaces_of_holdfast_are_refused(connect: Connect, either: str) -> None:
    with pytest.raises(ValueError, match="reserved for holdfast's own locks"):
        connect(either).lock(("holdfast:agent", 7))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("hashtext('holdfast.take'), hashtext('x')", "acquire of a lease or a slot"),
        ("hashtext('holdfast.free'), hashtext('x')", "waiter of a lease or a slot"),
        ("hashtext('holdfast.migrate')", "migration"),
        ("7847::bigint << 48 | 5", "operation in a transaction"),
        ("7845::bigint << 48 | 5", "session without a lease"),
        ("7846::bigint << 48 | 5", "owner of operations"),
    ],
)
def test_every_key_of_holdfast_itself_has_a_readable_name(postgres_url: str, key: str, name: str) -> None:
    with psycopg.connect(postgres_url) as connection, holdfast.Client(postgres_url) as client:
        connection.execute(f"select pg_advisory_xact_lock({key})".encode())
        assert [each.name for each in client.locks.list()] == [name]


def test_an_owner_of_operations_is_called_so_with_and_without_one(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client:
        during = client.operation("a").run(lambda: [each.name for each in client.locks.list()]).result
        assert during == [each.name for each in client.locks.list()] == ["owner of operations"]


def test_a_lock_is_noted_within_a_second() -> None:
    assert YOUNG + SWEEP < 1.0


def test_a_transaction_that_keeps_a_lease_is_listed_limited_and_can_be_ended(
    connect: Connect, postgres_url: str
) -> None:
    """Nobody can take the lease over while it is open, and the server does not say who holds a lock on a row."""
    client = connect(postgres_url)
    client.lease("nightly").acquire().release()
    grant = client.lease("import", ttl=300, auto_renew=False).acquire()
    expired = client.lease("expired", ttl=300, auto_renew=False).acquire()
    with ExitStack() as sessions:
        owner, thief, other = (sessions.enter_context(closing(psycopg.connect(postgres_url))) for _ in range(3))
        owner.execute("select holdfast.lease_protect('import', %s)", [grant.token])
        thief.execute("select holdfast.lease_acquire('nightly', 'me', 60)")
        query(
            postgres_url,
            f"update holdfast.beat set expires_at = started where id = (select beat from holdfast.lease"
            f" where fence = {expired.fence})",
        )
        other.execute("select holdfast.lease_acquire('expired', 'me', 0.05)")
        wanted = {
            "transaction under lease import": (owner, "50min"),
            "acquire of lease nightly": (thief, "1min"),
            "acquire of lease expired": (other, "10s"),
        }
        for name, (session, limit) in wanted.items():
            [listed] = [each for each in client.locks.list() if each.name == name]
            assert (listed.pid, listed.role) == (session.info.backend_pid, "postgres")
            assert listed.held_since is not None
            if session.info.server_version >= 170000:
                [(shown,)] = session.execute("show transaction_timeout").fetchall()
                assert shown == limit
        eventually(
            lambda: all(name in invoke(*at(postgres_url, "ls")).stderr for name in wanted),
            "ls names them after a second",
        )
        assert client.lease("nightly").try_acquire() is None
        for session, _ in wanted.values():
            client.locks.end_session(session.info.backend_pid, actor="jane", reason="it went to lunch")
        assert client.lease("nightly").acquire(timeout=PATIENCE).fence > grant.fence
    assert not [each for each in client.locks.list() if each.name in wanted]
