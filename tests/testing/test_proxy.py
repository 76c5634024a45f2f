"""The proxy: each fault does what its name says, to those who go through it alone, and is over when it is healed."""

from __future__ import annotations

import gc
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

import holdfast
from holdfast.testing import Proxy
from holdfast.testing.faults import network
from tests.children import PATIENCE, eventually, query
from tests.conftest import MAJORS, server

SOON = 0.3
"""Seconds in which an answer would have come, had there been one."""

Connect = Callable[[], "psycopg.Connection[Any]"]


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(server().database()) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy: Proxy) -> Iterator[Connect]:
    opened: list[psycopg.Connection[Any]] = []

    def one() -> psycopg.Connection[Any]:
        opened.append(
            psycopg.connect(proxy.url, autocommit=True, connect_timeout=int(PATIENCE), application_name="through")
        )
        return opened[-1]

    yield one
    for connection in opened:
        connection.close()


def works(connection: psycopg.Connection[Any]) -> bool:
    return connection.execute("select 1").fetchone() == (1,)


def silent(connection: psycopg.Connection[Any], statement: str = "select 1") -> bool:
    """Ask, and see that nothing comes; the question stays asked."""
    connection.pgconn.send_query(statement.encode())
    return silent_still(connection)


def silent_still(connection: psycopg.Connection[Any]) -> bool:
    with socket.socket(fileno=socket.dup(connection.pgconn.socket)) as ours:
        ours.settimeout(SOON)
        try:
            ours.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
    return False


def answer(connection: psycopg.Connection[Any]) -> bytes | None:
    """What comes in the end to a question that was asked before."""
    pgconn = connection.pgconn
    with socket.socket(fileno=socket.dup(pgconn.socket)) as ours:
        ours.settimeout(PATIENCE)
        ours.recv(1, socket.MSG_PEEK)
    result = pgconn.get_result()
    assert result is not None
    return result.get_value(0, 0)


def ended_by_reset(connection: psycopg.Connection[Any]) -> bool:
    with socket.socket(fileno=socket.dup(connection.pgconn.socket)) as ours:
        ours.settimeout(PATIENCE)
        try:
            ours.recv(1)
        except ConnectionResetError:
            return True
    return False


def lost_something(proxy: Proxy) -> int:
    """Connections of which a message got lost."""
    return sum(connection.has_lost_bytes for connection in proxy._open)


def refused(connect: Connect) -> bool:
    try:
        connect()
    except psycopg.errors.ConnectionTimeout:
        return False
    except psycopg.OperationalError:
        return True
    return False


def sessions(proxy: Proxy) -> int:
    """How many sessions the server has of those who came through."""
    direct = server()._url(urlsplit(proxy.url).path[1:])
    [(count,)] = query(direct, "select count(*) from pg_stat_activity where application_name = 'through'")
    return int(count)


def test_it_passes_on_everything_and_counts(proxy: Proxy, connect: Connect) -> None:
    first, second = connect(), connect()
    [(long,)] = first.execute("select repeat('x', 5000000)").fetchall()
    [(length,)] = second.execute("select length(%s)", ["y" * 5000000]).fetchall()
    assert (len(long), length, proxy.connections) == (5000000, 5000000, 2)
    assert proxy.messages > 5
    first.close()
    eventually(lambda: sessions(proxy) == 1, "the end of a client is passed on")


def test_cut_resets_both_sides_and_takes_new_ones(proxy: Proxy, connect: Connect) -> None:
    connection = connect()
    proxy.cut()
    assert ended_by_reset(connection)
    eventually(lambda: sessions(proxy) == 0, "the server learns it, too")
    assert works(connect())


def test_reset_ends_new_connections_too_until_it_is_healed(proxy: Proxy, connect: Connect) -> None:
    connection = connect()
    proxy.reset()
    assert ended_by_reset(connection)
    assert refused(connect)
    proxy.heal()
    assert works(connect())


def test_stall_holds_everything_up_and_loses_nothing(proxy: Proxy, connect: Connect) -> None:
    """Not even the end of a connection passes, as when a cable is pulled."""
    connection, leaver = connect(), connect()
    proxy.stall()
    assert silent(connection, "select 'late'")
    leaver.close()
    assert sessions(proxy) == 2
    with ThreadPoolExecutor(1) as pool:
        newcomer = pool.submit(connect)
        eventually(lambda: proxy.connections == 3, "the new one is taken")
        assert not newcomer.done()
        proxy.heal()
        assert works(newcomer.result())
    assert answer(connection) == b"late"
    eventually(lambda: sessions(proxy) == 2, "and the one that left has gone")


def test_stall_of_the_answers_lets_the_server_act(proxy: Proxy, connect: Connect) -> None:
    connection = connect()
    connection.execute("create table done (what text)")
    proxy.stall("to_client")
    assert silent(connection, "insert into done values ('written') returning what")
    direct = server()._url(urlsplit(proxy.url).path[1:])
    eventually(lambda: query(direct, "select what from done") == [("written",)], "the server has done it")
    assert silent_still(connection)
    proxy.heal()
    assert answer(connection) == b"written"


def test_drop_to_the_server_loses_what_was_asked_and_that_connection_never_goes_on(
    proxy: Proxy, connect: Connect
) -> None:
    connection, idle = connect(), connect()
    connection.execute("create table done (what text)")
    proxy.drop("to_server")
    assert silent(connection, "insert into done values ('lost') returning what")
    eventually(lambda: lost_something(proxy) == 1, "the question got lost")
    proxy.heal()
    assert ended_by_reset(connection)
    assert works(idle), "nothing of this one was lost"
    assert idle.execute("select count(*) from done").fetchone() == (0,)


def test_drop_to_the_client_loses_the_answer_but_not_what_was_asked(proxy: Proxy, connect: Connect) -> None:
    connection, idle = connect(), connect()
    connection.execute("create table done (what text)")
    proxy.drop("to_client")
    assert silent(connection, "insert into done values ('first') returning what")
    eventually(lambda: lost_something(proxy) == 1, "the answer got lost")
    proxy.heal()
    assert ended_by_reset(connection)
    assert works(idle)
    assert idle.execute("select what from done").fetchall() == [("first",)]


def test_drop_takes_new_connections_that_get_no_answer(proxy: Proxy, connect: Connect) -> None:
    with ThreadPoolExecutor(1) as pool:
        proxy.drop("to_server")
        newcomer = pool.submit(connect)
        eventually(lambda: proxy.connections == 1, "it is taken")
        assert not newcomer.done()
        proxy.heal()
        with pytest.raises(psycopg.OperationalError):
            newcomer.result()
    assert works(connect())


def test_half_open_ends_the_servers_side_and_tells_no_client(proxy: Proxy, connect: Connect) -> None:
    connection = connect()
    proxy.half_open()
    eventually(lambda: sessions(proxy) == 0, "the server is told")
    assert silent(connection)
    with ThreadPoolExecutor(1) as pool:
        newcomer = pool.submit(connect)
        eventually(lambda: proxy.connections == 2, "new ones are taken")
        assert not newcomer.done()
        assert sessions(proxy) == 0
        proxy.heal()
        with pytest.raises(psycopg.OperationalError):
            newcomer.result()
    assert ended_by_reset(connection)
    assert works(connect())


def test_delay_is_added_both_ways(proxy: Proxy, connect: Connect) -> None:
    connection = connect()
    proxy.delay(SOON)
    begun = time.monotonic()
    assert works(connection)
    assert time.monotonic() - begun >= 2 * SOON
    proxy.heal()
    assert works(connection)
    with pytest.raises(ValueError, match=r"seconds=-1"):
        proxy.delay(-1)


Line = tuple[Proxy, socket.socket, socket.socket]


@pytest.fixture
def line() -> Iterator[Line]:
    """The proxy between two sockets, for what no database would say."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(PATIENCE)
        proxy = stack.enter_context(Proxy(f"tcp://127.0.0.1:{listening.getsockname()[1]}"))
        place = ("127.0.0.1", urlsplit(proxy.url).port or 0)
        client = stack.enter_context(socket.create_connection(place, timeout=PATIENCE))
        behind = stack.enter_context(listening.accept()[0])
        behind.settimeout(PATIENCE)
        yield proxy, client, behind


def heard(by: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length and (more := by.recv(length - len(data))):
        data += more
    return data


def test_what_was_delayed_is_never_overtaken(line: Line) -> None:
    """Bytes in another order would be a fault that no network has."""
    proxy, client, behind = line
    proxy.delay(SOON)
    client.sendall(b"first,")
    eventually(lambda: proxy.messages == 1, "the first is under way")
    proxy.delay(0)
    client.sendall(b"second")
    assert heard(behind, 12) == b"first,second"


def test_a_direction_that_drops_leaves_the_other_alone(line: Line) -> None:
    proxy, client, behind = line
    proxy.drop("to_client")
    for number in (b"1", b"2"):
        behind.sendall(b"lost")
        client.sendall(number)
        assert heard(behind, 1) == number
    eventually(lambda: lost_something(proxy) == 1, "it got lost")
    proxy.heal()
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_an_end_that_got_lost_is_told_when_healed(line: Line) -> None:
    proxy, client, behind = line
    proxy.drop("to_server")
    client.close()
    eventually(lambda: lost_something(proxy) == 1, "the end got lost")
    behind.settimeout(SOON)
    with pytest.raises(TimeoutError):
        behind.recv(1)
    proxy.heal()
    behind.settimeout(PATIENCE)
    with pytest.raises(ConnectionResetError):
        behind.recv(1)


def test_a_stalled_newcomer_does_not_reach_the_server_before_it_is_healed() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        Proxy(f"tcp://127.0.0.1:{listening.getsockname()[1]}") as proxy,
    ):
        proxy.stall()
        with socket.create_connection(("127.0.0.1", urlsplit(proxy.url).port or 0), timeout=PATIENCE):
            listening.settimeout(SOON)
            with pytest.raises(TimeoutError):
                listening.accept()
            proxy.heal()
            listening.settimeout(PATIENCE)
            listening.accept()[0].close()


@pytest.mark.skipif(len(MAJORS) < 2, reason="needs two servers")
def test_it_can_be_led_to_another_server(proxy: Proxy, connect: Connect) -> None:
    other = server(MAJORS[0])
    other.execute(f"create database {urlsplit(proxy.url).path[1:]}")
    before = connect()
    proxy.target(other.url)
    after = connect()
    assert before.info.server_version // 10000 == MAJORS[-1]
    assert after.info.server_version // 10000 == MAJORS[0]
    proxy.cut()
    assert ended_by_reset(before)
    assert ended_by_reset(after)


def test_nobody_behind_it_is_as_good_as_refused(proxy: Proxy, connect: Connect) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy.target(f"postgresql://127.0.0.1:{unused.getsockname()[1]}/x")
        assert refused(connect)


@pytest.mark.parametrize("url", ["postgresql:///x", "postgresql://a:1,b:2/x", "postgresql://a,b/x", "x"])
def test_it_leads_to_one_server(url: str) -> None:
    with pytest.raises(ValueError, match="one server"):
        Proxy(url)


def test_a_client_goes_on_after_each_of_its_faults(postgres_url: str) -> None:
    with Proxy(postgres_url) as proxy, holdfast.Client(proxy.url) as client:
        for fault in network(proxy, delay=0.02):
            with client.lease(fault.kind, ttl=600) as grant:
                fault.begin()
                fault.heal()
                grant.renew()


def test_whoever_is_just_being_let_in_when_it_closes_is_closed_too() -> None:
    """Nothing is left to the garbage collector, which would tell whatever test is next."""
    forgotten: list[object] = []
    with pytest.MonkeyPatch.context() as patch, closing(socket.create_server(("127.0.0.1", 0))) as there:
        patch.setattr(sys, "unraisablehook", lambda error: forgotten.append(error.exc_value))
        for _ in range(10):
            proxy = Proxy(f"postgresql://u@127.0.0.1:{there.getsockname()[1]}/x")
            port = urlsplit(proxy.url).port
            assert port is not None
            knocking = threading.Thread(target=_knock, args=(port,))
            knocking.start()
            proxy.close()
            knocking.join()
        gc.collect()
    assert forgotten == []


def _knock(port: int) -> None:
    for _ in range(20):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            pass
