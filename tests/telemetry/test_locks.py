"""What is told of locks, that gauges are what is so, and that whoever is not listened to pays nothing."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import telemetry
from tests.children import PATIENCE, eventually
from tests.telemetry.conftest import Told

Connect = Callable[..., Any]


def gauge(name: str) -> float:
    return telemetry.readings().get(name, 0.0)


def locks(told: Told) -> list[str]:
    return [event for event, _ in told if event.startswith("lock.")]


def test_locks_come_and_go_and_are_told_once_each(connect: Connect, either: str, told: Told) -> None:
    client, before = connect(either), gauge("locks_held")
    with client.lock("a"):
        assert gauge("locks_held") == before + 1
        assert client.lock("a").try_acquire() is None
        with pytest.raises(holdfast.NotAcquired):
            client.lock("a", timeout=0.0).acquire()
        with client.lock("b").or_skip() as grant:
            assert grant is not None
            assert gauge("locks_held") == before + 2
    grant = client.lock(("agent", 7)).acquire()
    assert grant.release()
    assert not grant.release()
    assert gauge("locks_held") == before
    assert told.count("lock_acquisitions") == {(): 3}
    [(reason, times)] = told.count("lock_refusals").items()  # the async one is asked by another task each time
    assert reason in (("reentered",), ("busy",))
    assert times == 2
    held = told.of("lock.ended")
    assert len(held) == 3
    assert all(each["held"] > 0 for each in held)


def test_who_waits_is_counted_and_for_how_long(connect: Connect, either: str, told: Told) -> None:
    client, other, before = connect(either), connect(either), gauge("lock_waiters")
    grant = client.lock("a").acquire()
    waiting = [threading.Thread(target=lambda c=c: c.lock("a").acquire().release()) for c in (client, other)]
    for each in waiting:
        each.start()
    eventually(lambda: gauge("lock_waiters") == before + 2, "two to wait, one behind the client and one elsewhere")
    with pytest.raises(holdfast.AcquireTimeout):
        other.lock("a", timeout=0.05).acquire()
    grant.release()
    for each in waiting:
        each.join()
    assert gauge("lock_waiters") == before
    assert told.count("lock_refusals") == {("timeout",): 1}
    assert max(each["waited"] for each in told.of("lock.acquired")) > 0.05


def test_a_loss_is_told_once_and_leaves_the_gauge(connect: Connect, postgres_url: str, told: Told) -> None:
    client, before, lost = connect(postgres_url), gauge("locks_held"), threading.Event()
    grants = [client.lock("a").acquire(), client.lock("b", on_lost=lambda _: lost.set()).acquire()]
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute("select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory'")
    eventually(lambda: len(told.of("lock.lost")) == 2, "both to be told")
    assert lost.wait(PATIENCE)
    assert gauge("locks_held") == before
    for grant in grants:
        assert not grant.release()
    assert locks(told).count("lock.ended") == 2


def test_a_grant_that_is_dropped_is_warned_of_all_the_same(sqlite_url: str, told: Told) -> None:
    client = holdfast.Client(sqlite_url)

    def drop() -> None:
        client.lock("a").acquire()
        gc.collect()

    with pytest.warns(ResourceWarning, match="dropped without release"):
        drop()
    client.close()


def test_a_lock_that_was_acquired_without_a_listener_is_not_measured(sqlite_url: str) -> None:
    events: list[str] = []
    with holdfast.Client(sqlite_url) as client:
        grant = client.lock("a").acquire()
        stop = telemetry.listen(lambda event, fields: events.append(event))
        assert grant.release() is True
        assert events == [], "nobody knows since when it was held"
        client.lock("a").acquire().release()
        assert events == ["lock.acquired", "lock.ended"]
        stop()
        client.lock("a").acquire().release()
        assert len(events) == 2


def test_a_fork_counts_its_own_locks_alone(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client, client.lock("a"):
        child = os.fork()
        if child == 0:
            with client.lock("b"):
                os._exit(int(gauge("locks_held")))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
