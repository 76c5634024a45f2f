"""How many connections holdfast has, and when: an application with many replicas pays for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import sha256
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.testing import Proxy
from tests.children import NONE, PATIENCE, Child, backends, eventually, last_queries, query, rows

MANY = 10

_HOLDERS = """
import os, sys
import psycopg, holdfast, holdfast.database.postgres, holdfast.client
from signal import pause
url, many = sys.argv[1], int(sys.argv[2])
for number in range(many):
    if os.fork() == 0:
        client = holdfast.Client(url)
        grant = client.lease(f"lease-{number}", ttl=600, renew_every=0.5).acquire()
        os.write(1, b"held\\n")
        sys.stdin.read()
        os._exit(0)
sys.stdin.read()
"""


def count(url: str) -> int:
    return len(backends(url))


def only_heartbeats(url: str, connections: int) -> bool:
    asked = last_queries(url)
    return len(asked) == connections and all("beat_renew" in text for text in asked)


def test_a_client_that_did_nothing_has_no_connection(connect: Callable[..., Any], postgres_url: str) -> None:
    eventually(lambda: count(postgres_url) == 0, "the server has noticed that whoever migrated has gone")
    connect(postgres_url)
    assert count(postgres_url) == 0


def test_one_lease_costs_one_connection_and_none_when_it_is_over(
    connect: Callable[..., Any], postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session for calls goes when it is idle, the keeper's when there is nothing to keep."""
    for module in ("call_dispatcher", "call_dispatcher_async"):
        monkeypatch.setattr(f"holdfast.database.{module}.IDLE", 0.1)
    client = connect(postgres_url)
    grant = client.lease("a", ttl=600, renew_every=0.1).acquire()
    eventually(lambda: only_heartbeats(postgres_url, 1), "the session for calls is closed when idle")
    for _ in range(20):
        assert count(postgres_url) == 1
    assert not grant.lost
    grant.release()
    eventually(lambda: count(postgres_url) == 0, "nothing is open when nothing is held")
    assert rows(postgres_url) == NONE
    with client.lease("a", ttl=600):
        assert count(postgres_url) >= 1


def test_a_closed_client_has_no_connection(connect: Callable[..., Any], postgres_url: str) -> None:
    client = connect(postgres_url)
    client.lease("a", ttl=30).acquire()
    client.close()
    assert rows(postgres_url) == NONE
    eventually(lambda: count(postgres_url) == 0, "nothing is open after close")


def test_processes_with_a_lease_each_have_at_most_one_connection_each(postgres_url: str) -> None:
    with Child(_HOLDERS, postgres_url, MANY) as family:
        family.expect(*["held"] * MANY)
        eventually(lambda: only_heartbeats(postgres_url, MANY), "one connection a process")
        for _ in range(20):
            assert count(postgres_url) <= MANY
        assert rows(postgres_url) == {"lease": MANY, "beat": MANY}


def test_waiters_share_the_session_of_the_keeper(postgres_url: str) -> None:
    """Fifty waiters are no fifty connections."""
    with holdfast.Client(postgres_url) as other, ExitStack() as stack:
        held = other.lease("a", ttl=600).acquire()
        waiter = stack.enter_context(
            Child(
                """
                import sys, threading, holdfast
                client = holdfast.Client(sys.argv[1])
                turns = []
                def take():
                    with client.lease("a", ttl=600, timeout=600) as grant:
                        turns.append(grant.fence)
                threads = [threading.Thread(target=take) for _ in range(50)]
                for thread in threads: thread.start()
                print("waiting")
                for thread in threads: thread.join()
                print(len(turns), turns == sorted(turns))
                """,
                postgres_url,
            )
        )
        waiter.expect("waiting")
        eventually(lambda: query(postgres_url, WAITING) != [], "somebody waits")
        for _ in range(20):
            assert count(postgres_url) <= 4  # two processes, each with one for calls and one for its keeper
        held.release()
        waiter.expect("50 True")


WAITING = """
select 1 from pg_locks join pg_database d on d.oid = database and d.datname = current_database()
 where locktype = 'advisory' and mode = 'ShareLock' and granted
"""


def test_a_waiting_client_is_woken_by_the_release_and_not_by_its_polling(postgres_url: str) -> None:
    """Hand-overs between two processes, of which the one that waits never polls."""
    with Child(_WAITER, postgres_url, 5, 1e6) as waiter, holdfast.Client(postgres_url) as client:
        for _ in range(5):
            grant = client.lease("a", ttl=3600).acquire(timeout=PATIENCE)
            waiter.say("wait")
            eventually(lambda: query(postgres_url, WAITING) != [], "the waiter shows itself")
            grant.release()
            waiter.expect("got it")
            eventually(lambda: rows(postgres_url)["lease"] == 0, "the waiter has let go")


_WAITER = """
import sys, holdfast
with holdfast.Client(sys.argv[1]) as client:
    if sys.argv[3:]:
        client._engine.poll = float(sys.argv[3])
    for _ in range(int(sys.argv[2])):
        input()
        with client.lease("a", ttl=600, timeout=600) as grant:
            print("got it")
"""


_KEEPER = """
import sys, holdfast
with holdfast.Client(sys.argv[1]) as client, client.lease("a", ttl=600, timeout=600):
    print("got it", flush=True)
    input()
"""
"""Waits for it, and keeps it: its own release would be heard together with the one that it waits for."""


def test_nobody_is_notified_when_nobody_waits(postgres_url: str) -> None:
    """NOTIFY on every release would halve the throughput of everybody."""
    with psycopg.connect(postgres_url, autocommit=True) as ear, holdfast.Client(postgres_url) as client:
        ear.execute('listen "holdfast.free"')
        for _ in range(5):
            client.lease("a", ttl=600).acquire().release()
        query(postgres_url, """notify "holdfast.free", 'so far'""")
        assert [heard.payload for heard in ear.notifies(timeout=PATIENCE, stop_after=1)] == ["so far"]
        held = client.lease("a", ttl=600).acquire()
        with Child(_KEEPER, postgres_url) as waiter:
            eventually(lambda: query(postgres_url, WAITING) != [], "the waiter shows itself")
            held.release()
            assert [heard.payload for heard in ear.notifies(timeout=PATIENCE, stop_after=1)] == [
                sha256(b"a").hexdigest()[:16]
            ]
            waiter.expect("got it")


def test_a_lease_that_went_without_a_notification_is_found_by_polling(postgres_url: str) -> None:
    with Child(_WAITER, postgres_url, 1) as waiter, holdfast.Client(postgres_url) as client:
        client.lease("a", ttl=600).acquire()
        waiter.say("wait")
        eventually(lambda: query(postgres_url, WAITING) != [], "the waiter shows itself")
        query(postgres_url, "delete from holdfast.lease")
        waiter.expect("got it")


def test_a_notification_missed_with_its_session_is_made_up_for(postgres_url: str) -> None:
    """The waiter's sessions are ended and the lease released while it is deaf."""
    with Child(_WAITER, postgres_url, 1) as waiter, holdfast.Client(postgres_url) as client:
        held = client.lease("a", ttl=600).acquire()
        mine = set(backends(postgres_url))
        waiter.say("wait")
        eventually(lambda: query(postgres_url, WAITING) != [], "the waiter shows itself")
        for pid in set(backends(postgres_url)) - mine:
            query(postgres_url, "select pg_terminate_backend(%s)", pid)
        held.release()
        waiter.expect("got it")


def test_eight_processes_of_waiters_all_get_their_turn(either: str) -> None:
    with ExitStack() as stack:
        with holdfast.Client(either) as client:
            held = client.lease("a", ttl=600).acquire()
            waiters = [stack.enter_context(Child(_WAITER, either, 3)) for _ in range(8)]
            for waiter in waiters:
                for _ in range(3):
                    waiter.say("wait")
            held.release()
        for waiter in waiters:
            waiter.expect("got it", "got it", "got it")


def test_tasks_that_ask_at_once_share_one_connection_from_the_first_on(postgres_url: str) -> None:
    """And so they do when it was lost. Counted where they pass, so that none is missed."""

    async def take(client: holdfast.AsyncClient, turn: int) -> None:
        grants = await asyncio.gather(*(client.lease(f"{turn}-{n}", ttl=60).acquire() for n in range(50)))
        assert len({grant.fence for grant in grants}) == 50

    async def main(url: str) -> None:
        async with holdfast.AsyncClient(url) as client:
            await take(client, 1)
            assert link.connections <= 2, "one for calls, one for the keeper"
            link.cut()
            await take(client, 2)
            assert link.connections <= 4

    with Proxy(postgres_url) as link:
        asyncio.run(main(link.url))
    assert rows(postgres_url) == NONE


def test_one_task_cancelled_while_it_connects_leaves_the_connection_to_the_others(postgres_url: str) -> None:
    async def main(url: str) -> None:
        async with holdfast.AsyncClient(url) as client:
            tasks = [asyncio.create_task(client.lease(f"a{n}", ttl=60).acquire()) for n in range(10)]
            await asyncio.sleep(0.03)
            tasks[0].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert [each for each in answers[1:] if isinstance(each, BaseException)] == []
            assert link.connections <= 3, "at most one more than ever"

    with Proxy(postgres_url, delay=0.02) as link:
        asyncio.run(main(link.url))


def test_an_event_loop_closed_without_close_leaves_no_connection(postgres_url: str) -> None:
    """The client lives on, as a global does, but nothing of it can be used again."""
    clients = []

    async def forget() -> None:
        clients.append(holdfast.AsyncClient(postgres_url))
        await clients[0].lease("a", ttl=600, renew_every=0.1).acquire()

    asyncio.run(forget())
    eventually(lambda: count(postgres_url) == 0, "both connections are closed")
    eventually(lambda: rows(postgres_url) == NONE, "nothing is left")
