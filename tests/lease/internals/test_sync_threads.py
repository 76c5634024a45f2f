"""One client in many threads, and in signal handlers: nobody waits for longer than it has, or for itself."""

from __future__ import annotations

import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, NamedTuple

import pytest

import holdfast
from holdfast.testing import Proxy
from holdfast.testing.sync_facade import SyncFacade
from tests.children import NONE, PATIENCE, Child, eventually, rows
from tests.pairs import EACH_ONCE, ONE_FLAVOUR

_INTERRUPTED = """
import signal, sys, threading, time, holdfast
import holdfast.lease.grant, holdfast.database.background
holdfast.lease.grant.CLOSE_TIMEOUT = holdfast.lease.grant._RELEASE_PATIENCE = 600.0
holdfast.database.background.EXIT_BUDGET = 60.0
client = holdfast.Client(sys.argv[1])
grant = client.lease("a", ttl=3600).acquire()
def leave(*_):
    print("asked to end")
    try:
        {action}
    except holdfast.HoldfastError as error:
        print("told:", str(error).replace(chr(10), " "))
    else:
        print("done")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("held")
def look():
    while not client._engine._dispatcher.is_busy():
        time.sleep(0.001)
    print("in the call")
while True:
    sys.stdin.readline()
    threading.Thread(target=look, daemon=True).start()
    client.lease("b", ttl=3600).acquire().release()
"""


ACTIONS = ("client.close()", "grant.release(timeout=600)")
"""Each would wait for ten minutes if it waited."""


class Slow(NamedTuple):
    """A URL, what makes every call there last, and what ends that."""

    url: str
    stall: Callable[[], object]
    heal: Callable[[], object]


@pytest.fixture
def slow(either: str) -> Iterator[Slow]:
    if either.startswith("postgres"):
        with Proxy(either) as link:
            yield Slow(link.url, lambda: link.stall("to_client"), link.heal)
            link.heal()
    else:
        with holdfast.Client(either) as client:
            client.leases.list()
        with closing(sqlite3.connect(either.removeprefix("sqlite:///"), isolation_level=None)) as writer:
            yield Slow(either, lambda: writer.execute("begin immediate"), writer.rollback)
            writer.rollback()


def is_in_a_call(client: Any) -> bool:
    return bool(client._engine._dispatcher.is_busy())


@pytest.mark.parametrize("action", ACTIONS)
def test_a_signal_handler_in_the_middle_of_a_call_does_not_wait_for_that_call(slow: Slow, action: str) -> None:
    """It runs in the very thread that is in the call, which would go on only after the handler."""
    with Child(_INTERRUPTED.format(action=action), slow.url) as child:
        child.expect("held")
        slow.stall()
        child.say("go")
        child.expect("in the call")
        child.signal(signal.SIGTERM)
        child.expect("asked to end")
        assert child.line().startswith(("done", "told:"))


@pytest.mark.parametrize("action", ACTIONS)
def test_what_a_signal_handler_could_not_say_is_said_all_the_same(postgres_url: str, action: str) -> None:
    with Proxy(postgres_url) as link, Child(_INTERRUPTED.format(action=action), link.url) as child:
        child.expect("held")
        link.stall("to_client")
        child.say("go")
        child.expect("in the call")
        eventually(lambda: rows(postgres_url)["lease"] == 2, "the second one is granted, and not yet answered")
        child.signal(signal.SIGTERM)
        child.expect("asked to end")
        link.heal()
        assert child.wait() == 0
        eventually(lambda: rows(postgres_url) == NONE, "the lease is free, long before its TTL")


def test_a_slow_call_does_not_hold_up_another_thread_beyond_its_limit(slow: Slow, either: str) -> None:
    with holdfast.Client(slow.url) as client, ThreadPoolExecutor(2) as pool:
        client.leases.list()
        slow.stall()

        def ask(timeout: float) -> None:
            statement = ("purge", {}) if either.startswith("postgres") else ("beat_end", {"beat": None})
            client._engine.call(*statement, timeout=timeout)

        slow_one = pool.submit(ask, 600.0)
        eventually(lambda: is_in_a_call(client), "it is in the call")
        with pytest.raises(holdfast.EngineError):
            pool.submit(ask, 0.2).result(PATIENCE)
        assert not slow_one.done()
        slow.heal()
        with suppress(holdfast.EngineError):
            slow_one.result(PATIENCE)


def test_close_does_not_wait_for_a_slow_call_without_a_limit(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.lease.grant.CLOSE_TIMEOUT", 0.2)
    monkeypatch.setattr("holdfast.database.engine.CALL_TIMEOUT", 0.2)
    with Proxy(postgres_url) as link, ThreadPoolExecutor(1) as pool:
        client = holdfast.Client(link.url)
        client.lease("a", ttl=60).acquire()
        link.stall("to_client")
        slow_one = pool.submit(lambda: client._engine.call("lease_list", {"name": None}, timeout=600.0))
        eventually(lambda: is_in_a_call(client), "it is in the call")
        client.close()
        assert not slow_one.done()
        link.heal()
        slow_one.result(PATIENCE)
        eventually(lambda: rows(postgres_url) == NONE, "released later, by the keeper")


@EACH_ONCE
def test_a_renewal_of_a_long_lease_is_bounded_like_every_call(
    connect: Callable[..., Any], either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the TTL, which may be a day: every other thread of the client waits meanwhile."""
    client = connect(either)
    engine = (client._inner if isinstance(client, SyncFacade) else client)._engine
    limits, real = [], engine.call

    def call(name: str, parameters: Any, *, timeout: float = 10.0) -> Any:
        limits.append(timeout)
        return real(name, parameters, timeout=timeout)

    grant = client.lease("a", ttl=3600).acquire()
    monkeypatch.setattr(engine, "call", call)
    assert grant.renew() is True
    assert len(limits) == 1
    assert limits[0] <= 10.0


@ONE_FLAVOUR
def test_a_lease_granted_while_its_client_is_closed_is_given_back(
    connect: Callable[..., Any], postgres_url: str
) -> None:
    """The answer is on its way when another thread closes the client: nobody would ever release it."""
    got: list[Any] = []

    def acquire() -> None:
        try:
            got.append(client.lease("late", ttl=600).acquire())
        except holdfast.HoldfastError as error:
            got.append(error)

    with Proxy(postgres_url) as link, ThreadPoolExecutor(1) as pool:
        client = connect(link.url)
        client.lease("before", ttl=900).acquire().release()  # so that the statement is prepared
        link.stall("to_client")
        acquiring = threading.Thread(target=acquire)
        acquiring.start()
        eventually(lambda: rows(postgres_url)["lease"] == 1, "it is granted, and not yet answered")
        closing_it = pool.submit(client.close)
        engine = (client._inner if isinstance(client, SyncFacade) else client)._engine
        eventually(lambda: engine.closing, "the client is being closed")
        link.heal()
        closing_it.result(PATIENCE)
        acquiring.join(PATIENCE)
        eventually(lambda: rows(postgres_url) == NONE, "given back, and not renewed for ever")
        [answer] = got
        assert isinstance(answer, holdfast.HoldfastError) or answer.lost
