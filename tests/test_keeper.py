"""The heartbeat goes on: through ended sessions, restarts, blocked loops, a busy interpreter, another's silence."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg_pool
import pytest

import holdfast
from holdfast._wire.database import parse
from holdfast._wire.identity import new_token
from holdfast._wire.waiting import Owner
from holdfast.keeper import Holding, Keeper, Pulse, keeper_of
from holdfast.keeper.ears import Ears
from holdfast.testing import Postgres, Proxy
from tests.children import NONE, Child, backends, eventually, kept, last_queries, pass_time, query, rows
from tests.conftest import migrated


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    """A server that the test may break."""
    with Postgres.create() as server:
        yield server


def updates(url: str) -> int:
    """Rows of the beat table ever updated on this database."""
    [(count,)] = query(url, "select n_tup_upd from pg_stat_user_tables where relid = 'holdfast.beat'::regclass")
    return int(count)


def test_a_thousand_leases_survive_the_end_of_every_session(connect: Callable[..., Any], postgres_url: str) -> None:
    """pg_terminate_backend on the keeper and on the calls session, again and again, while heartbeats are due."""
    client = connect(postgres_url)
    grants = [client.lease(f"lease-{number}", ttl=3, renew_every=0.2).acquire() for number in range(1000)]
    ended, over = 0, threading.Event()

    def end_sessions() -> None:
        nonlocal ended
        while not over.wait(0.09):
            for pid in backends(postgres_url):
                query(postgres_url, "select pg_terminate_backend(%s)", pid)
                ended += 1

    killer = threading.Thread(target=end_sessions)
    killer.start()
    try:
        kept(grants[0], 1.5)
    finally:
        over.set()
        killer.join()
    assert ended >= 3
    assert not any(grant.lost for grant in grants)
    assert rows(postgres_url) == {"lease": 1000, "beat": 1}
    assert client.leases.get("lease-999") is not None
    client.close()
    assert rows(postgres_url) == NONE


def test_a_beat_that_was_lost_and_came_back_with_an_acquire_under_way_is_not_ended_with_the_lost(either: str) -> None:
    """Trust in it ended while the database was silent; an acquire on it was answered after that, and is held."""
    with holdfast.Client(either) as client:
        lost, late = client.lease("lost", ttl=60).acquire(), client.lease("late", ttl=60)
        keeper = client._engine.keeper
        under_way = keeper.borrow(60.0, None)
        assert under_way.founded
        row, _ = late._ask(new_token(), under_way, None, 10.0)
        keeper._lose(under_way, holdfast.OwnershipUnknown("silence"))
        holding = Holding("late", row["token"], client._engine.owner, lambda _: None)
        keeper.keep(row["beat"], under_way.trust, 20.0, holding)
        assert lost.release()
        keeper.give_back(under_way)
        done = threading.Event()
        keeper.later(0.0, done.set)  # the keeper has done what there was to do before
        assert done.wait(30)
        assert [each.name for each in client.leases.list()] == ["late"]


def test_a_watch_that_goes_while_all_are_woken_keeps_nobody_from_being_woken() -> None:
    """As the garbage collector may have it, at any instant."""
    ears, woken = Ears(parse("sqlite:///app.db"), threading.RLock()), []
    ears.add("a", lambda: ears.remove("b", later))
    ears.add("b", later := lambda: woken.append("b"))
    ears.add("c", lambda: woken.append("c"))
    ears.deaf()
    assert woken == ["c"]


def test_one_beat_a_ttl_whatever_the_number_of_leases(connect: Callable[..., Any], either: str) -> None:
    client = connect(either)
    for number in range(20):
        client.lease(f"short-{number}", ttl=5).acquire()
    assert rows(either) == {"lease": 20, "beat": 1}
    for number in range(20):
        client.lease(f"long-{number}", ttl=6).acquire()
    assert rows(either) == {"lease": 40, "beat": 2}


def test_leases_that_are_asked_for_at_once_share_a_beat_from_the_first_on(either: str) -> None:
    """Before the first is granted nobody knows of a beat; with one for each, each would be renewed by itself."""

    async def main() -> None:
        async with holdfast.AsyncClient(either) as client, holdfast.AsyncClient(either) as other:
            asked = [each.lease(f"{number}-{id(each)}", ttl=5) for number in range(25) for each in (client, other)]
            grants = await asyncio.gather(*(lease.acquire() for lease in asked))
            assert rows(either) == {"lease": 50, "beat": 1}
            assert await asyncio.gather(*(grant.release() for grant in grants)) == [True] * 50

    asyncio.run(main())
    eventually(lambda: rows(either) == NONE, "nothing is left")


def test_heartbeats_do_not_grow_with_the_leases(postgres_url: str) -> None:
    """Updates of the beat row in the same time, while one lease is kept and while a hundred are."""
    query(postgres_url, "create sequence beaten")
    query(
        postgres_url,
        """create function count_beat() returns trigger language plpgsql as
           $$ begin perform nextval('public.beaten'); return null; end $$""",
    )
    query(
        postgres_url,
        "create trigger count_beat after update on holdfast.beat for each row execute function count_beat()",
    )
    counts = []
    with holdfast.Client(postgres_url) as client:
        for many in (1, 99):
            for number in range(many):
                client.lease(f"{many}-{number}", ttl=3, renew_every=0.1).acquire()
            eventually(lambda: not last_calls(postgres_url), "the session for calls is closed")
            [(before,)] = query(postgres_url, "select nextval('beaten')")
            pass_time(1.0)
            counts.append(query(postgres_url, "select nextval('beaten')")[0][0] - before)
    assert counts[0] > 3
    assert counts[1] < counts[0] * 3, f"updates in a second: {counts}"


def last_calls(url: str) -> list[tuple[Any, ...]]:
    return query(
        url,
        "select query from pg_stat_activity where application_name = 'holdfast' and datname = current_database()"
        " and query not like '%%beat_renew%%'",
    )


@pytest.mark.parametrize("crash", [False, True], ids=["restart", "crash"])
def test_leases_survive_a_server_restart_shorter_than_the_ttl(own_server: Postgres, crash: bool) -> None:
    url = migrated(own_server.database())
    with holdfast.Client(url) as client:
        grant = client.lease("a", ttl=4, renew_every=0.2).acquire()
        eventually(lambda: updates(url) > 0, "a heartbeat")
        if crash:
            own_server.kill()
        else:
            own_server.stop()
        own_server.start()
        kept(grant)
        record = client.leases.get("a")
        assert record is not None
        assert record.fence == grant.fence


def test_a_server_away_for_longer_than_the_ttl_means_unknown_and_stays_so(own_server: Postgres) -> None:
    url = migrated(own_server.database())
    told: list[Any] = []
    with holdfast.Client(url) as client:
        grant = client.lease("a", ttl=1.5, on_lost=told.append).acquire()
        own_server.stop()
        eventually(lambda: told, "the loss is told", timeout=5.0)
        own_server.start()
        for _ in range(50):
            assert grant.lost
            with pytest.raises(holdfast.OwnershipUnknown):
                grant.check()
        assert told == [grant]
        with client.lease("a", ttl=5, timeout=10) as successor:
            assert successor.fence > grant.fence
            assert grant.lost


def test_a_paused_server_ends_trust_before_the_ttl(connect: Callable[..., Any], own_server: Postgres) -> None:
    """The holder stops believing first; the database frees the lease later. In between nobody has it."""
    url = migrated(own_server.database())
    told: list[float] = []
    client = connect(url)
    grant = client.lease("a", ttl=2, renew_every=0.1, on_lost=lambda _: told.append(time.monotonic())).acquire()
    eventually(lambda: updates(url) > 0, "a heartbeat")
    own_server.pause()
    paused = time.monotonic()
    eventually(lambda: grant.lost, "trust ends")
    eventually(lambda: told, "and is told")
    assert told[0] < paused + 2, "the last heartbeat came before the pause, so its TTL was over by then"
    own_server.resume()
    for _ in range(20):
        assert grant.lost
        assert grant.remaining() == 0
        with pytest.raises(holdfast.OwnershipUnknown):
            grant.check()
        pass_time(0.02)


def test_trust_never_exceeds_the_ttl_when_the_servers_clock_steps(
    connect: Callable[..., Any], postgres_url: str
) -> None:
    """A clock that went back looks like a beat that expires in an hour."""
    client = connect(postgres_url)
    grant = client.lease("a", ttl=2).acquire()
    query(postgres_url, "update holdfast.beat set expires_at = expires_at + interval '1 hour'")
    assert grant.remaining() <= 2
    grant.renew()
    assert grant.remaining() <= 2
    query(postgres_url, "update holdfast.beat set expires_at = expires_at + interval '1 hour'")
    second = client.lease("b", ttl=2).acquire()
    assert second.remaining() <= 2
    assert client.lease("a").adopt(grant.token).remaining() <= 2


def test_a_clock_that_went_ahead_is_learned_as_a_loss(connect: Callable[..., Any], postgres_url: str) -> None:
    client = connect(postgres_url)
    grant = client.lease("a", ttl=2, renew_every=0.1).acquire()
    query(postgres_url, "update holdfast.beat set expires_at = expires_at - interval '1 hour'")
    eventually(lambda: grant.lost, "the next heartbeat learns", timeout=2.0)
    with pytest.raises(holdfast.LeaseLost):
        grant.check()


def test_a_blocked_event_loop_does_not_lose_a_lease(either: str) -> None:
    async def run() -> None:
        async with holdfast.AsyncClient(either) as client, client.lease("a", ttl=3, renew_every=0.2) as grant:
            kept(grant)  # which does not let the loop go on
            await grant.renew()

    asyncio.run(run())


def test_a_busy_interpreter_does_not_lose_a_lease(either: str) -> None:
    """Four threads that never wait for anything, in a process with the usual switch interval."""
    program = """
    import sys, threading, time, holdfast
    over = time.monotonic() + 4.5
    def spin():
        while time.monotonic() < over:
            sum(range(1000))
    with holdfast.Client(sys.argv[1]) as client, client.lease("a", ttl=3) as grant:
        threads = [threading.Thread(target=spin) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        grant.check()
        grant.renew()
        print("kept")
    """
    with Child(program, either) as child:
        child.expect("kept")


def test_an_exhausted_application_pool_does_not_lose_a_lease(postgres_url: str) -> None:
    with (
        psycopg_pool.ConnectionPool(postgres_url, min_size=1, max_size=1, open=True) as pool,
        pool.connection(),
        holdfast.Client(postgres_url) as client,
        client.lease("a", ttl=3, renew_every=0.2) as grant,
    ):
        kept(grant)
        with client.lease("b", ttl=3):
            pass


def test_a_database_that_never_answers_starves_no_other(connect: Callable[..., Any], either: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        dead = holdfast.Client(f"postgresql://postgres@127.0.0.1:{hole.getsockname()[1]}/app")

        def ask() -> None:
            with pytest.raises(holdfast.EngineError):
                dead.lease("a").acquire()

        thread = threading.Thread(target=ask)
        client = connect(either)
        with client.lease("a", ttl=3, renew_every=0.2) as grant:
            thread.start()
            kept(grant)
            assert thread.is_alive()
            grant.renew()
        hole.close()
        dead.close()
        thread.join(15)


def test_a_paused_other_server_starves_no_heartbeat(own_server: Postgres, postgres_url: str) -> None:
    """Both databases have leases of this process; one stops answering in the middle."""
    with holdfast.Client(migrated(own_server.database())) as gone, holdfast.Client(postgres_url) as client:
        lost = gone.lease("a", ttl=1).acquire()
        with client.lease("a", ttl=3, renew_every=0.2) as grant:
            own_server.pause()
            eventually(lambda: lost.lost, "the other one is lost")
            kept(grant)
            grant.renew()
            own_server.resume()


@pytest.mark.parametrize("brittle", [{"failover": "session"}, {"strict": True}], ids=str)
def test_a_short_lease_does_not_make_those_impatient_that_one_heartbeat_can_end(
    postgres_url: str, brittle: dict[str, Any]
) -> None:
    """A silence of two seconds ends what was taken for two seconds, and nothing else."""
    with Proxy(postgres_url) as link, holdfast.Client(link.url) as client, holdfast.Client(postgres_url) as standby:
        long = client.lease("long", ttl=3600, renew_every=0.1, **brittle).acquire()
        short = client.lease("short", ttl=2).acquire()
        eventually(lambda: len(beating(postgres_url)) == 2, "one session beats for each of them")
        link.stall()
        eventually(lambda: short.lost, "two seconds have passed")
        link.heal()
        long.renew()
        long.check()
        assert standby.lease("long", ttl=3600).try_acquire() is None
        short.release()
        long.release()
        eventually(lambda: backends(postgres_url) == [], "neither session outlives what it was for", timeout=15)


def beating(url: str) -> list[str]:
    return [text for text in last_queries(url) if "beat_renew" in text]


@pytest.mark.parametrize("step", range(9))
def test_a_signal_handler_may_take_and_give_back_a_lease_while_one_is_given_back(step: int) -> None:
    """It runs in the thread that is there already, which no lock keeps out."""
    pulse, owner = Pulse.to_be(30.0, None), Owner()
    one, other = (Holding(name, name, owner, print) for name in ("one", "other"))
    steps = iter(range(step + 1))

    def interrupt(*_: object) -> Any:
        """Before each line, and those of whatever it calls."""
        if next(steps, None) == step:
            sys.settrace(None)
            pulse.add(other)
            pulse.remove(other.token)
        return interrupt

    pulse.add(one)
    sys.settrace(interrupt)
    try:
        pulse.remove(one.token)
    finally:
        sys.settrace(None)
    assert pulse.of_owner(owner) == [] == list(pulse.holdings)


@pytest.mark.parametrize("step", range(12))
def test_a_signal_handler_may_ask_for_the_keeper_that_is_just_made(step: int, tmp_path: Path) -> None:
    """There is one all the same: what the handler acquires is renewed, and released at exit."""
    database, found = parse(f"sqlite:///{tmp_path}/a.db"), list[Keeper]()
    steps = iter(range(step + 1))

    def interrupt(*_: object) -> Any:
        if next(steps, None) == step:
            sys.settrace(None)
            found.append(keeper_of(database))
        return interrupt

    def ask() -> None:
        sys.settrace(interrupt)
        found.append(keeper_of(database))
        sys.settrace(None)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(10)
    assert not asking.is_alive(), "it waits for itself"
    assert len({*found, keeper_of(database)}) == 1
