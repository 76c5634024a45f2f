"""The blocking PostgreSQL session: bounded in time, honest about what it does not know, indifferent to its settings."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import timeout_from_conninfo

import holdfast
from holdfast.database import postgres
from holdfast.database.sessions import open_session
from holdfast.database.url import parse
from holdfast.errors import Refused, Unanswered, Unreachable
from holdfast.runtime.clock import now
from holdfast.testing import Postgres
from holdfast.testing.server import until
from tests.children import Child
from tests.conftest import migrated, server
from tests.raw_session import Raw, acquisition, locked, waiters

LONG = 60.0
"""Far more than any of this may take: a call that is not bounded would run into it."""


@pytest.fixture
def raw(postgres_url: str) -> Iterator[Raw]:
    made = Raw(postgres_url)
    yield made
    made.close()


def ask(raw: Raw, query: str) -> str:
    result = raw.session.pgconn.exec_(query.encode())
    return (result.get_value(0, 0) or b"").decode()


def test_a_call_ends_in_time_although_the_server_is_frozen() -> None:
    with Postgres.create() as postgres:
        url = migrated(postgres.database())
        raw = Raw(url)
        postgres.pause()
        with pytest.raises(Unanswered, match="did not answer in time"):
            raw.call("lease_list", name=None, timeout=0.3)
        with pytest.raises(Unreachable, match=r"no answer (within|in time)"):
            open_session(parse(url), 0.3)
        postgres.resume()
        with pytest.raises(Unanswered):  # half read: this session never answers a question with another's answer
            raw.call("lease_list", name=None)
        again = Raw(url)
        assert again.call("lease_list", name=None) == []
        again.close()


def test_a_call_ends_in_time_although_a_lock_is_held(raw: Raw, postgres_url: str) -> None:
    with locked(postgres_url), pytest.raises(Unanswered, match="did not answer in time"):
        raw.call("lease_list", name=None, timeout=0.2)


def test_ctrl_c_is_heard_at_once_in_a_long_call(postgres_url: str) -> None:
    program = """
    import sys
    from tests.raw_session import Raw
    raw = Raw(sys.argv[1])
    try:
        raw.call("lease_list", name=None, timeout=600)
    except KeyboardInterrupt:
        print("heard")
    """
    with locked(postgres_url) as connection, Child(program, postgres_url) as child:
        until(lambda: waiters(connection) == 1, what="the child waits")
        child.signal(signal.SIGINT)
        child.expect("heard")


def test_without_prepared_statements_everything_works_and_none_is_left(postgres_url: str) -> None:
    raw = Raw(postgres_url, prepared=False)
    row = raw.acquire("x")
    assert raw.renew("x", row["token"])
    assert raw.call("lease_list", name="x")[0]["fence"] == row["fence"]
    assert raw.release("x", row["token"])
    assert ask(raw, "select count(*) from pg_prepared_statements") == "0"
    raw.close()


def test_prepared_statements_that_vanish_cost_nothing_but_themselves(raw: Raw) -> None:
    """What a pooler does that gives us another server session behind our back."""
    first = raw.acquire("x")
    assert ask(raw, "select count(*) > 0 from pg_prepared_statements") == "t"
    ask(raw, "deallocate all")
    assert raw.acquire("x", token=first["token"])["fence"] == first["fence"]
    assert raw.release("x", first["token"])
    assert ask(raw, "select count(*) from pg_prepared_statements") == "0"


@pytest.mark.parametrize("first", ["dead", "black hole"])
def test_the_primary_is_found_behind_a_host_that_is_gone(
    postgres_url: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first may take half of the time; here it is given a moment of it, and the one that answers all it needs."""
    shares: list[float] = []
    connect = postgres._connect_host

    def hurried(conninfo: str, deadline: float) -> Any:
        if threading.current_thread() is not threading.main_thread():  # a client of another test connects
            return connect(conninfo, deadline)
        shares.append(deadline - now())
        return connect(conninfo, now() + (0.2 if len(shares) == 1 else LONG))

    monkeypatch.setattr(postgres, "_connect_host", hurried)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if first == "black hole":
            other.listen()
        port = other.getsockname()[1]
        url = postgres_url.replace("127.0.0.1:", f"127.0.0.1:{port},127.0.0.1:")
        session = open_session(parse(url), 200.0)
        assert session.call("lease_list", {"name": None}, LONG) == []
        session.close()
    assert shares[0] <= 100 < shares[1]


def test_no_host_gets_more_time_than_connect_timeout_says(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As psycopg reads it, a hundred times as fast: it waits for 2 s at least. And only for the host that is silent."""
    asked: list[float] = []

    def hurried(given: Any) -> float:
        if threading.current_thread() is not threading.main_thread():  # a client of another test connects
            return float(timeout_from_conninfo(given))
        asked.append(timeout_from_conninfo(given))
        return asked[-1] / 100 if len(asked) == 1 else LONG

    monkeypatch.setattr(postgres, "timeout_from_conninfo", hurried)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = postgres_url.replace("127.0.0.1:", f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:")
        begun = time.monotonic()
        open_session(parse(f"{url}?connect_timeout=20"), 1000.0).close()  # of which half would be for the first
        assert time.monotonic() - begun >= 0.2
    assert asked == [20, 20]
    with pytest.raises(Unreachable, match="bad value for connect_timeout: 'soon'"):
        open_session(parse(f"{postgres_url}?connect_timeout=soon"), LONG)


async def acquire_async(standby_url: str, both: str) -> None:
    async with holdfast.AsyncClient(standby_url) as client:
        with pytest.raises(holdfast.EngineError, match="Leases need the primary"):
            await client.lease("import").acquire()
    async with holdfast.AsyncClient(both) as client:
        assert await client.lease("import").try_acquire() is not None


def test_a_standby_is_refused_and_the_primary_beside_it_is_found() -> None:
    """A standby would answer a refused acquire from stale data."""
    with Postgres.create() as primary:
        url = migrated(primary.database("app"))
        standby = primary.standby()
        standby_url = url.replace(f":{primary.port}/", f":{standby.port}/")
        with pytest.raises(Unreachable, match="Leases need the primary"):
            open_session(parse(standby_url), LONG)
        with pytest.raises(Unreachable, match="Leases need the primary"):
            open_session(parse(standby_url + "?target_session_attrs=any"), LONG)
        with (
            holdfast.Client(standby_url) as client,
            pytest.raises(holdfast.EngineError, match="Leases need the primary"),
        ):
            client.lease("import").acquire()
        both = url.replace(f":{primary.port}/", f":{standby.port},127.0.0.1:{primary.port}/")
        asyncio.run(acquire_async(standby_url, both))
        raw = Raw(both)
        assert ask(raw, "select inet_server_port()") == str(primary.port)
        raw.close()


def test_a_dead_peer_is_noticed_in_seconds_on_both_sides(raw: Raw) -> None:
    shown = {
        name: ask(raw, f"show {name}")
        for name in ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
    }
    assert list(shown.values()) == ["1", "1", "2", "3000"]
    with socket.socket(fileno=socket.dup(raw.session.pgconn.socket)) as ours:
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 1
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 2
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000


def test_a_grant_and_a_heartbeat_wait_for_the_disk_in_whatever_session(postgres_url: str) -> None:
    """Behind a pooler no session is set up by us, and neither is one of psql's: a crash of the server would give the
    same fence to two, and forget a renewal that its holder trusts in."""
    with psycopg.connect(postgres_url) as connection:
        connection.execute("set synchronous_commit = off")
        acquire = "select token, beat from holdfast.lease_acquire('job', 'me', 30)"
        token, beat = connection.execute(acquire).fetchall()[0]
        for renewal in (
            "select 1",
            "select holdfast.lease_renew('job', %(token)s)",
            "select holdfast.beat_renew(%(beat)s)",
        ):
            connection.execute(renewal.encode(), {"token": token, "beat": beat})
            assert connection.execute("show synchronous_commit").fetchone() == ("on",), renewal
            connection.commit()
            assert connection.execute("show synchronous_commit").fetchone() == ("off",)
            connection.commit()


def test_settings_of_the_database_cannot_spoil_a_session(postgres_url: str) -> None:
    name = postgres_url.rpartition("/")[2]
    for setting in (
        "default_transaction_isolation = 'serializable'",
        "synchronous_commit = off",
        "idle_session_timeout = '1s'",
        "statement_timeout = '5s'",
    ):
        server().execute(f'alter database "{name}" set {setting}')
    raw = Raw(postgres_url)
    assert ask(raw, "show default_transaction_isolation") == "read committed"
    assert ask(raw, "show synchronous_commit") == "on"
    assert ask(raw, "show idle_session_timeout") == "0"
    assert ask(raw, "show statement_timeout") == "30s"
    raw.close()
    server().execute(f'alter database "{name}" set default_transaction_read_only = on')
    with pytest.raises(Unreachable, match=r"default_transaction_read_only is on\. .* ALTER ROLE"):
        Raw(postgres_url)


def test_a_warning_at_commit_makes_the_answer_unknown(raw: Raw) -> None:
    """01000 is how a commit says that it did not wait for its synchronous standby."""
    with pytest.raises(Unanswered, match="the commit may be lost"):
        raw.run("do $$ begin raise warning 'canceling wait for synchronous replication'; end $$")
    raw.run("do $$ begin raise notice 'harmless'; end $$")
    assert raw.call("lease_list", name=None) == []


def test_an_error_is_told_and_leaves_the_session_usable(raw: Raw) -> None:
    with pytest.raises(Refused, match="ttl_seconds must be between") as caught:
        raw.acquire("x", ttl=0)
    assert caught.value.sqlstate == "22023"
    assert raw.acquire("x")["status"] == "acquired"


def test_a_terminated_session_is_unknown_not_refused(raw: Raw) -> None:
    server().execute(f"select pg_terminate_backend({raw.session.pgconn.backend_pid})")
    with pytest.raises(Unanswered):
        raw.call("lease_list", name=None)


@pytest.mark.parametrize("prepared", [True, False])
def test_nulls_unicode_and_large_values_arrive_whole(postgres_url: str, prepared: bool) -> None:
    raw = Raw(postgres_url, prepared=prepared)
    name, reason = "Grüße 漢字 '\"\\ %s $1 :name", "𝄞" * 1000
    large = '{"label": "x", "unused": "' + "y" * 12_000_000 + '"}'
    [row] = raw.call("lease_acquire", **acquisition(name, "ü" * 200, process=large, ttl=600.0))
    assert row["held_by"] is None
    assert [each["name"] for each in raw.call("lease_list", name=None)] == [name]
    assert raw.done("lease_force_release", name=name, actor="é", reason=reason)
    [told] = raw.history(name)
    assert (told["holder"], told["reason"], told["host"], told["pid"]) == ("ü" * 200, reason, None, None)
    raw.close()


def test_a_name_is_the_same_whatever_encoding_the_environment_asks_for(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent is UTF-8: read as anything else it would be another name, and two would hold the same lease."""
    with holdfast.Client(postgres_url) as one, one.lease("é"):
        monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
        for url in (postgres_url, f"{postgres_url}?client_encoding=latin1"):
            with holdfast.Client(url) as two:
                assert two.lease("é").try_acquire() is None
                assert [each.name for each in two.leases.list()] == ["é"]
