"""Asking, being refused, and waiting: an acquire never waits in the database, and a waiter outlives a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.rows import dict_row

import holdfast
from holdfast.lease.terms import Refusal
from holdfast.testing import Postgres
from holdfast.testing.lease_contract import refused_after_waiting
from tests.children import PATIENCE, eventually, query
from tests.conftest import migrated
from tests.pairs import ONE_FLAVOUR
from tests.raw_session import Raw

EXPIRE = """
update holdfast.beat set expires_at = clock_timestamp() where id = (select beat from holdfast.lease where name = 'a')
"""


@pytest.fixture(scope="module")
def spare_server() -> Iterator[Postgres]:
    with Postgres.create() as server:
        yield server


@pytest.fixture
def own_server(spare_server: Postgres) -> Iterator[Postgres]:
    """A server that the test may stop: the next one finds it running."""
    yield spare_server
    spare_server.start()


def asking(client: Any) -> list[str]:
    """The statements that this client sends from now on, as they are sent."""
    engine, sent = getattr(client, "_inner", client)._engine, list[str]()
    call = engine.call

    def recorded(name: str, *arguments: Any, **options: Any) -> Any:
        sent.append(name)
        return call(name, *arguments, **options)

    engine.call = recorded
    return sent


@pytest.fixture
def changing(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A lease 'a' whose holder is gone, but whose last protected transaction is still open: nobody can have it yet."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as connection:
        client.lease("a", ttl=60).acquire().protect(connection)
        query(postgres_url, EXPIRE)
        yield connection
        connection.rollback()


@pytest.mark.usefixtures("changing")
def test_busy_says_nothing_of_the_askers_own_heartbeat(postgres_url: str) -> None:
    """Who has it and until when is not known; what is left of the asker's own beat is not the answer."""
    with closing(Raw(postgres_url)) as raw:
        own = raw.acquire("own", beat=None, solo=False)
        for beat in (own["beat"], None):
            row = raw.acquire("a", beat=beat)
            assert (row["status"], row["held_by"], row["remaining"], row["fence"]) == ("busy", None, None, None)
            assert (row["token"], row["beat"]) == (None, None)


@ONE_FLAVOUR
@pytest.mark.usefixtures("changing")
def test_a_refusal_while_it_changes_hands_names_no_time(connect: Callable[..., Any], postgres_url: str) -> None:
    """Be there another lease of the same TTL in this process or not."""
    client = connect(postgres_url)
    client.lease("anchor", ttl=30).acquire()
    for ttl in (30, 29):
        with pytest.raises(holdfast.NotAcquired) as refused:
            client.lease("a", ttl=ttl).acquire()
        assert (refused.value.expires_at, refused.value.holder) == (None, None)
        assert "until" not in str(refused.value)


@ONE_FLAVOUR
def test_a_waiter_that_is_told_busy_asks_again_soon(
    connect: Callable[..., Any], postgres_url: str, changing: psycopg.Connection[Any]
) -> None:
    """And not only when it polls, which here is never, or when its time is up."""
    client = connect(postgres_url)
    inner = getattr(client, "_inner", client)
    inner._engine.poll = 1e6
    anchor = client.lease("anchor", ttl=3600).acquire()
    with ThreadPoolExecutor(1) as pool:
        sent = asking(client)
        waiting = pool.submit(lambda: client.lease("a", ttl=3600).acquire(timeout=600))
        eventually(lambda: len(sent) > 3, "it was told busy, and has asked again")
        assert not waiting.done()
        changing.rollback()
        assert waiting.result(PATIENCE).fence > anchor.fence


def test_a_waiter_asks_again_when_the_ttl_is_over_that_it_was_told_of(sqlite_url: str) -> None:
    """Or when it polls, which all waiters of the process do in turn; or soon, where nobody knows who has it."""
    with holdfast.Client(sqlite_url) as client:
        lease: Any = client.lease("a")
        client._engine.poll = 1e6
        assert 2.5 < lease._pause(Refusal("a", "other", 2.5), 1) <= 2.51
        assert lease._pause(Refusal("a", None, None), 1) <= 0.02
        client._engine.poll = 1.0
        assert 1.5 <= lease._pause(Refusal("a", "other", 600.0), 3) <= 4.5


ACQUIRE = "select status, held_by, remaining from holdfast.lease_acquire(%s, %s, 30)"


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_acquire_does_not_wait_for_one_that_is_not_committed(postgres_url: str, end: str) -> None:
    """Somebody in psql took it in a transaction, and went to lunch."""
    with (
        psycopg.connect(postgres_url, row_factory=dict_row) as psql,
        psycopg.connect(
            postgres_url, autocommit=True, options="-c statement_timeout=60s", row_factory=dict_row
        ) as other,
    ):
        taken = psql.execute(ACQUIRE, ["a", "psql"]).fetchone()
        assert taken is not None
        assert taken["status"] == "acquired"
        for _ in range(2):
            assert other.execute(ACQUIRE, ["a", "other"]).fetchone() == {
                "status": "busy", "held_by": None, "remaining": None,
            }  # fmt: skip
        getattr(psql, end)()
        after = other.execute(ACQUIRE, ["a", "other"]).fetchone()
        assert after is not None
        assert after["status"] == ("held" if end == "commit" else "acquired")


@ONE_FLAVOUR
def test_a_client_is_refused_at_once_by_an_acquire_that_is_not_committed_and_waits_for_its_end(
    connect: Callable[..., Any], postgres_url: str
) -> None:
    client = connect(postgres_url)
    with psycopg.connect(postgres_url) as psql, ThreadPoolExecutor(1) as pool:
        psql.execute(ACQUIRE, ["a", "psql"])
        assert client.lease("a").try_acquire() is None
        assert client.lease("unrelated").try_acquire() is not None
        sent = asking(client)
        waiting = pool.submit(lambda: client.lease("a").acquire(timeout=600))
        eventually(lambda: len(sent) > 3, "it was refused, and has asked again")
        assert not waiting.done()
        psql.rollback()
        assert waiting.result(PATIENCE) is not None


@ONE_FLAVOUR
def test_a_waiter_outlives_a_restart_of_the_server(connect: Callable[..., Any], own_server: Postgres) -> None:
    """As the holder does. Nobody watches over a standby that waits for ever."""
    url = migrated(own_server.database())
    client, waiter, got = connect(url), connect(url), []
    grant = client.lease("a", ttl=600).acquire()

    def wait() -> None:
        try:
            got.append(waiter.lease("a", ttl=600).acquire(timeout=600))
        except holdfast.HoldfastError as error:
            got.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: query(url, WATCHED) == [(1,)], "it waits")
    own_server.stop()
    sent = asking(waiter)
    eventually(lambda: len(sent) > 1, "it has asked while nobody answers, and again")
    assert got == []
    own_server.start()
    grant.release()
    thread.join(PATIENCE)
    [heir] = got
    assert heir.fence > grant.fence
    heir.release()


@ONE_FLAVOUR
def test_a_waiter_whose_server_stays_away_is_told_when_its_time_is_up(
    connect: Callable[..., Any], own_server: Postgres
) -> None:
    url = migrated(own_server.database())
    client, other = connect(url), connect(url)
    other.lease("a", ttl=3600).acquire()
    for timeout in (1.0, 8.0, 30.0):  # the server goes before the waiter's time is up, unless the machine stands still
        own_server.start()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.lease("a").acquire, timeout=timeout)
            eventually(lambda: waiting.done() or query(url, WATCHED) == [(1,)], "it waits")  # noqa: B023
            own_server.kill()
            problem = waiting.exception(2 * PATIENCE)
        assert problem is not None
        if isinstance(problem, holdfast.EngineError) or isinstance(problem.__cause__, holdfast.EngineError):
            break
    else:
        pytest.fail(f"the waiter is not told that the server is away: {problem!r}")
    with pytest.raises(holdfast.EngineError):
        client.lease("a").try_acquire()


WATCHED = """
select count(*) from pg_locks join pg_database d on d.oid = database and d.datname = current_database()
 where locktype = 'advisory' and classid = (hashtext('holdfast.free')::bigint & 4294967295)
"""


def test_a_role_without_any_grant_hears_no_name(postgres_url: str) -> None:
    """Every role may listen: of a lease, of the slots of a pool, and of what a wipe ends."""
    name = f"listener_{uuid4().hex[:12]}"
    query(postgres_url, f"create role {name} login")
    with (
        psycopg.connect(postgres_url.replace("//postgres@", f"//{name}@"), autocommit=True) as ear,
        holdfast.Client(postgres_url) as holder, holdfast.Client(postgres_url) as waiter,
        ThreadPoolExecutor(3) as pool,
    ):  # fmt: skip
        ear.execute('listen "holdfast.free"')
        guard = holder._guard_lease("system:guard", ttl=600).acquire()
        held = [
            holder.lease("secret-project", ttl=600).acquire(),
            holder.slots("secret-pool", 1, ttl=600).claim(owner="x"),
        ]
        wiped = holder.lease("secret-wiped", ttl=600).acquire()
        waits: list[Future[Any]] = [
            pool.submit(waiter.lease("secret-project", ttl=600, timeout=600).acquire),
            pool.submit(waiter.slots("secret-pool", 1, ttl=600).claim, owner="y", timeout=600),
            pool.submit(waiter.lease("secret-wiped", ttl=600, timeout=600).acquire),
        ]
        eventually(lambda: query(postgres_url, WATCHED) == [(3,)], "they wait")
        for grant in held:
            grant.release()
        holder.leases.wipe(guard, prefix=wiped.name)
        assert {wait.result(PATIENCE).fence > 0 for wait in waits} == {True}
        payloads = [notify.payload for notify in ear.notifies(timeout=PATIENCE, stop_after=3)]
        assert (len(payloads), "secret" in str(payloads)) == (3, False)


def test_beyond_the_names_a_session_watches_waiters_ask_by_themselves(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lock a session holds makes its transactions slower, so there is a limit; nobody waits in vain beyond it."""
    monkeypatch.setattr("holdfast.database.listener.MAX_NAMES", 2)
    names = [f"name-{number}" for number in range(5)]
    with holdfast.Client(postgres_url) as holder, holdfast.Client(postgres_url) as waiter:
        held = [holder.lease(name, ttl=600).acquire() for name in names]
        with ThreadPoolExecutor(5) as pool:
            asked = [pool.submit(waiter.lease(name, ttl=600, timeout=600).acquire) for name in names]
            eventually(lambda: query(postgres_url, WATCHED) == [(2,)], "two are watched")
            for grant in held:
                grant.release()
            assert [each.result(PATIENCE).name for each in asked] == names
        assert query(postgres_url, WATCHED) <= [(2,)]


COLLIDING = ("name-19780", "name-26854")
"""Two names with the same ``hashtext``."""


@ONE_FLAVOUR
def test_names_whose_hashes_collide_are_still_two_names(connect: Callable[..., Any], postgres_url: str) -> None:
    """Locks that show who waits, and who takes, are on hashes. A collision may wake in vain; it grants nothing."""
    one, other = COLLIDING
    assert query(postgres_url, "select hashtext(%s) = hashtext(%s)", one, other) == [(True,)]
    holder, waiter = connect(postgres_url), connect(postgres_url)
    first, second = holder.lease(one, ttl=600).acquire(), holder.lease(other, ttl=600).acquire()
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(waiter.lease(one, ttl=600, timeout=600).acquire()))
    thread.start()
    eventually(lambda: query(postgres_url, WATCHED) == [(1,)], "somebody waits for the first")
    assert second.release()
    assert refused_after_waiting(lambda: waiter.lease(one, ttl=60, timeout=0.2).acquire()).name == one
    assert holder.lease(other, ttl=60).acquire().fence > second.fence
    assert first.release()
    thread.join(PATIENCE)
    assert got[0].name == one
