"""The heartbeat goes on: through ended sessions, restarts, blocked loops, a busy interpreter, another's silence."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg_pool
import pytest

import holdfast
from holdfast import telemetry
from holdfast.database.listener import Listener
from holdfast.database.url import parse
from holdfast.lease.keeper import Beat, Keeper, KeptLease, keeper_of
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import Owner
from holdfast.runtime.identity import new_token
from holdfast.testing import Postgres, Proxy
from holdfast.testing.server_user import server_user
from tests.children import NONE, PATIENCE, Child, backends, eventually, kept, last_queries, query, rows
from tests.conftest import migrated
from tests.pairs import EACH_ONCE, ONE_FLAVOUR
from tests.raw_session import Raw

LONG = 60.0
"""A TTL that no pause of the machine outlasts: that a lease is kept is seen in heartbeats, which move its trust."""
LOST_IN_SILENCE = (1.5, 8.0, 32.0)
"""TTLs of a lease that must be held when the silence begins. If the machine pauses for longer than one of them before
that, the next is tried."""


@pytest.fixture(scope="module")
def spare_server() -> Iterator[Postgres]:
    with Postgres.create() as server:
        yield server


@pytest.fixture
def own_server(spare_server: Postgres) -> Iterator[Postgres]:
    """A server that the test may break: the next one gets it in order again."""
    yield spare_server
    spare_server.resume()
    spare_server.start()


@ONE_FLAVOUR
def test_hundreds_of_leases_survive_the_end_of_every_session(connect: Callable[..., Any], postgres_url: str) -> None:
    """pg_terminate_backend on the keeper and on the calls session, again and again, while heartbeats are due."""
    client = connect(postgres_url)
    grants = [client.lease(f"lease-{number}", ttl=LONG, renew_every=0.05).acquire() for number in range(150)]
    for _ in range(3):
        assert client.leases.get("lease-149") is not None
        ended = backends(postgres_url)
        for pid in ended:
            query(postgres_url, "select pg_terminate_backend(%s)", pid)
        eventually(lambda ended=ended: not {*ended} & {*backends(postgres_url)}, "they are gone")  # type: ignore[misc]
        kept(grants[0], 0.15)
        assert ended
    assert not any(grant.lost for grant in grants)
    assert rows(postgres_url) == {"lease": 150, "beat": 1}
    client.close()
    eventually(lambda: rows(postgres_url) == NONE, "nothing is left")


def test_a_beat_that_was_lost_and_came_back_with_an_acquire_under_way_is_not_ended_with_the_lost(either: str) -> None:
    """Trust in it ended while the database was silent; an acquire on it was answered after that, and is held."""
    with holdfast.Client(either) as client:
        lost, late = client.lease("lost", ttl=60).acquire(), client.lease("late", ttl=60)
        keeper = keeper_of(client._database)
        under_way = keeper.reserve(60.0, None)
        assert under_way.exists
        token = new_token()
        row, _ = late._call(token, under_way, None, 10.0)
        keeper._lose(under_way, holdfast.OwnershipUnknown("silence"))
        holding = KeptLease("late", token, row["fence"], client._engine.owner, lambda _: None)
        keeper.keep(under_way.id, under_way.trust, 20.0, holding)
        assert lost.release()
        keeper.unreserve(under_way)
        done = threading.Event()
        keeper.background.call_later(0.0, done.set)  # the keeper has done what there was to do before
        assert done.wait(PATIENCE)
        assert [each.name for each in client.leases.list()] == ["late"]


def test_a_watch_that_goes_while_all_are_woken_keeps_nobody_from_being_woken() -> None:
    """As the garbage collector may have it, at any instant."""
    listener, woken = Listener(parse("sqlite:///app.db"), threading.RLock()), []
    listener.add("a", lambda: listener.remove("b", later))
    listener.add("b", later := lambda: woken.append("b"))
    listener.add("c", lambda: woken.append("c"))
    listener.session_lost()
    assert woken == ["c"]


@EACH_ONCE
def test_one_beat_a_ttl_whatever_the_number_of_leases(connect: Callable[..., Any], either: str) -> None:
    client = connect(either)
    for number in range(20):
        client.lease(f"short-{number}", ttl=LONG).acquire()
    assert rows(either) == {"lease": 20, "beat": 1}
    for number in range(20):
        client.lease(f"long-{number}", ttl=2 * LONG).acquire()
    assert rows(either) == {"lease": 40, "beat": 2}


def test_leases_that_are_asked_for_at_once_share_a_beat_from_the_first_on(either: str) -> None:
    """Before the first is granted nobody knows of a beat; with one for each, each would be renewed by itself."""

    async def main() -> None:
        async with holdfast.AsyncClient(either) as client, holdfast.AsyncClient(either) as other:
            asked = [each.lease(f"{number}-{id(each)}", ttl=LONG) for number in range(25) for each in (client, other)]
            grants = await asyncio.gather(*(lease.acquire() for lease in asked))
            assert rows(either) == {"lease": 50, "beat": 1}
            assert await asyncio.gather(*(grant.release() for grant in grants)) == [True] * 50

    asyncio.run(main())
    eventually(lambda: rows(either) == NONE, "nothing is left")


def test_heartbeats_do_not_grow_with_the_leases(postgres_url: str) -> None:
    """While a hundred leases are kept, each heartbeat updates one row, and that is none of theirs."""
    query(postgres_url, "create table updated (what text)")
    query(
        postgres_url,
        """create function note_update() returns trigger language plpgsql as
           $$ begin insert into public.updated values (tg_table_name); return null; end $$""",
    )
    for table in ("beat", "lease"):
        query(
            postgres_url,
            f"create trigger note after update on holdfast.{table} for each row execute function note_update()",
        )
    with holdfast.Client(postgres_url) as client:
        for number in range(100):
            client.lease(f"a-{number}", ttl=LONG, renew_every=0.05).acquire()
        beats: list[str] = []
        stop = telemetry.listen(lambda event, _: beats.append(event) if event == "keeper.beat" else None)
        try:
            query(postgres_url, "truncate updated")
            eventually(lambda: query(postgres_url, "select count(*) from updated")[0][0] >= 5, "some heartbeats")
            updated = [table for (table,) in query(postgres_url, "select what from updated")]
        finally:
            stop()
        assert rows(postgres_url) == {"lease": 100, "beat": 1}
        assert {*updated} == {"beat"}
        assert len(updated) <= len(beats) + 1, "one of them may not be told of yet"


def test_leases_survive_a_server_restart_shorter_than_the_ttl(own_server: Postgres) -> None:
    url = migrated(own_server.database())
    with holdfast.Client(url) as client:
        grant = client.lease("a", ttl=600, renew_every=0.1).acquire()
        kept(grant, 0.2)
        for end in (own_server.stop, own_server.kill):
            end()
            own_server.start()
            kept(grant, 0.3)
            record = client.leases.get("a")
            assert record is not None
            assert record.fence == grant.fence


def test_a_restore_that_keeps_the_beat_ends_what_it_lost_and_what_was_released(tmp_path: Path) -> None:
    """Without another life of the server, no heartbeat would ever ask for the leases."""
    with Postgres.create() as server, holdfast.Client(migrated(server.database("app"))) as client:
        kept_all_along = client.lease("kept", ttl=600, renew_every=0.1).acquire()
        released = client.lease("released", ttl=600, renew_every=0.1).acquire()
        server.stop()
        shutil.copytree(server.data, backup := tmp_path / "backup")
        server.start()
        released.release()
        lost = client.lease("lost", ttl=600, renew_every=0.1).acquire()
        server.stop()
        shutil.rmtree(server.data)
        shutil.copytree(backup, server.data)
        server_user().own(server.data)
        server.data.chmod(0o700)
        server.start()
        eventually(lambda: lost.lost, "the acquire was lost")
        with pytest.raises(holdfast.LeaseLost, match="set back to a state without it"):
            lost.check()
        eventually(lambda: [each.name for each in client.leases.list()] == ["kept"], "the release was lost")
        kept_all_along.check()


def test_a_lease_that_only_the_database_has_is_released_by_the_heartbeat(either: str) -> None:
    """By the secret of the beat, and the name and fence of the lease: its token is known to nobody."""
    dot = "_" if either.startswith("sqlite") else "."
    with holdfast.Client(either) as client, closing(Raw(either)) as raw:
        known = client.lease("known", ttl=600, renew_every=0.05).acquire()
        [beat] = keeper_of(client._database)._beats
        unknown = raw.acquire("unknown", ttl=600, beat=beat.id)
        for wrong in ({"beat": new_token()}, {"fence": unknown["fence"] + 1}, {"name": "known"}):
            asked = {"beat": beat.id, "name": "unknown", "fence": unknown["fence"]} | wrong
            assert raw.done("beat_release", **asked) is False
        query(either, f"update holdfast{dot}beat set generation = generation + 1")
        eventually(lambda: [each.name for each in client.leases.list()] == ["known"], "it is released")
        known.check()
        [ended] = client.leases.history()
        assert (ended.name, ended.fence, ended.outcome) == ("unknown", unknown["fence"], "released")


def test_a_server_away_for_longer_than_the_ttl_means_unknown_and_stays_so(own_server: Postgres) -> None:
    url = migrated(own_server.database())
    told: list[Any] = []
    with holdfast.Client(url) as client:
        for ttl in LOST_IN_SILENCE:
            own_server.start()
            told.clear()
            grant = client.lease(f"a-{ttl}", ttl=ttl, on_lost=told.append).acquire()
            own_server.stop()
            if not grant.lost:
                break
        eventually(lambda: told, "the loss is told")
        own_server.start()
        for _ in range(50):
            assert grant.lost
            with pytest.raises(holdfast.OwnershipUnknown):
                grant.check()
        assert told == [grant]
        with client.lease(grant.name, ttl=LONG, timeout=PATIENCE) as successor:
            assert successor.fence > grant.fence
            assert grant.lost


@ONE_FLAVOUR
def test_a_paused_server_ends_trust_before_the_ttl(connect: Callable[..., Any], own_server: Postgres) -> None:
    """The holder stops believing first; the database frees the lease later. In between nobody has it. The loss is told
    while the server is still silent."""
    url = migrated(own_server.database())
    told: list[Any] = []
    client = connect(url)
    for ttl in LOST_IN_SILENCE:
        own_server.resume()
        told.clear()
        grant = client.lease(f"a-{ttl}", ttl=ttl, renew_every=0.1, on_lost=told.append).acquire()
        own_server.pause()
        paused = now()
        if not grant.lost:
            break
    assert grant._trusted_until < paused + ttl, "the last heartbeat that was answered came before the pause"
    eventually(lambda: grant.lost, "trust ends")
    eventually(lambda: told, "and is told")
    assert grant._trusted_until < paused + ttl, "and nothing has extended it"
    own_server.resume()
    with pytest.raises(holdfast.OwnershipUnknown):
        grant.renew()
    for _ in range(20):
        assert grant.lost
        assert grant.remaining() == 0
        with pytest.raises(holdfast.OwnershipUnknown):
            grant.check()


@ONE_FLAVOUR
def test_trust_never_exceeds_the_ttl_when_the_servers_clock_steps(
    connect: Callable[..., Any], postgres_url: str
) -> None:
    """A clock that went back looks like a beat that expires in an hour."""
    client = connect(postgres_url)
    grant = client.lease("a", ttl=LONG).acquire()
    query(postgres_url, "update holdfast.beat set expires_at = expires_at + interval '1 hour'")
    assert grant.remaining() <= LONG
    grant.renew()
    assert grant.remaining() <= LONG
    query(postgres_url, "update holdfast.beat set expires_at = expires_at + interval '1 hour'")
    second = client.lease("b", ttl=LONG).acquire()
    assert second.remaining() <= LONG
    assert client.lease("a").adopt(grant.token).remaining() <= LONG


@ONE_FLAVOUR
def test_a_clock_that_went_ahead_is_learned_as_a_loss(connect: Callable[..., Any], postgres_url: str) -> None:
    client = connect(postgres_url)
    grant = client.lease("a", ttl=600, renew_every=0.1).acquire()
    query(postgres_url, "update holdfast.beat set expires_at = expires_at - interval '1 hour'")
    eventually(lambda: grant.lost, "the next heartbeat learns")
    with pytest.raises(holdfast.LeaseLost):
        grant.check()


def test_a_blocked_event_loop_does_not_lose_a_lease(either: str) -> None:
    async def run() -> None:
        async with holdfast.AsyncClient(either) as client, client.lease("a", ttl=LONG, renew_every=0.05) as grant:
            kept(grant, 0.2)  # which does not let the loop go on
            await grant.renew()

    asyncio.run(run())


def test_a_busy_interpreter_does_not_lose_a_lease(either: str) -> None:
    """Four threads that never wait for anything, in a process with the usual switch interval: heartbeats come through,
    and a renewal by hand."""
    program = """
    import sys, threading, time, holdfast
    over = threading.Event()
    def spin():
        while not over.is_set():
            sum(range(1000))
    with holdfast.Client(sys.argv[1]) as client, client.lease("a", ttl=60, renew_every=0.05) as grant:
        threads = [threading.Thread(target=spin) for _ in range(4)]
        for thread in threads: thread.start()
        seen = {grant._trusted_until}
        while len(seen) < 3:
            grant.check()
            seen.add(grant._trusted_until)
            time.sleep(0.01)
        grant.renew()
        over.set()
        print("kept")
    """
    with Child(program, either) as child:
        child.expect("kept")


def test_an_exhausted_application_pool_does_not_lose_a_lease(postgres_url: str) -> None:
    with (
        psycopg_pool.ConnectionPool(postgres_url, min_size=1, max_size=1, open=True) as pool,
        pool.connection(),
        holdfast.Client(postgres_url) as client,
        client.lease("a", ttl=LONG, renew_every=0.05) as grant,
    ):
        kept(grant, 0.2)
        with client.lease("b", ttl=LONG):
            pass


@EACH_ONCE
def test_a_database_that_never_answers_starves_no_other(connect: Callable[..., Any], either: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        dead = holdfast.Client(f"postgresql://postgres@127.0.0.1:{hole.getsockname()[1]}/app")
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                with pytest.raises(holdfast.EngineError):
                    dead.lease("a").acquire()

        thread = threading.Thread(target=ask)
        client = connect(either)
        with client.lease("a", ttl=LONG, renew_every=0.05) as grant:
            thread.start()
            hole.settimeout(PATIENCE)
            asking, _ = hole.accept()
            kept(grant, 0.2)
            grant.renew()
        over.set()
        asking.close()
        hole.close()
        thread.join(PATIENCE)
        dead.close()


def test_a_paused_other_server_starves_no_heartbeat(own_server: Postgres, postgres_url: str) -> None:
    """Both databases have leases of this process; one stops answering in the middle."""
    with holdfast.Client(migrated(own_server.database())) as gone, holdfast.Client(postgres_url) as client:
        lost = gone.lease("a", ttl=1).acquire()
        with client.lease("a", ttl=LONG, renew_every=0.05) as grant:
            own_server.pause()
            eventually(lambda: lost.lost, "the other one is lost")
            kept(grant, 0.2)
            grant.renew()
            own_server.resume()


@pytest.mark.parametrize("brittle", [{"failover": "session"}, {"strict": True}], ids=str)
def test_a_short_lease_does_not_make_those_impatient_that_one_heartbeat_can_end(
    postgres_url: str, brittle: dict[str, Any]
) -> None:
    """A silence of a second ends what was taken for a second, and nothing else."""
    with Proxy(postgres_url) as link, holdfast.Client(link.url) as client, holdfast.Client(postgres_url) as standby:
        long = client.lease("long", ttl=3600, renew_every=0.1, **brittle).acquire()
        for ttl in (1, 8, 32):  # a machine that stands still may lose the first before the silence begins
            short = client.lease(f"short-{ttl}", ttl=ttl).acquire()
            eventually(
                lambda short=short: short.lost or len(beating(postgres_url)) == 2,  # type: ignore[misc]
                "one session beats for each of them",
            )
            if not short.lost:
                break
        link.stall()
        eventually(lambda: short.lost, "its TTL has passed")
        link.heal()
        long.renew()
        long.check()
        assert standby.lease("long", ttl=3600).try_acquire() is None
        short.release()
        long.release()
        eventually(lambda: backends(postgres_url) == [], "neither session outlives what it was for")


def beating(url: str) -> list[str]:
    return [text for text in last_queries(url) if "beat_renew" in text]


@pytest.mark.parametrize("step", range(9))
def test_a_signal_handler_may_take_and_give_back_a_lease_while_one_is_given_back(step: int) -> None:
    """It runs in the thread that is there already, which no lock keeps out."""
    beat, owner = Beat.requested(30.0, None), Owner()
    one, other = (KeptLease(name, name, 1, owner, print) for name in ("one", "other"))
    steps = iter(range(step + 1))

    def interrupt(*_: object) -> Any:
        """Before each line, and those of whatever it calls."""
        if next(steps, None) == step:
            sys.settrace(None)
            beat.add(other)
            beat.remove(other.token)
        return interrupt

    beat.add(one)
    sys.settrace(interrupt)
    try:
        beat.remove(one.token)
    finally:
        sys.settrace(None)
    assert beat.leases_of(owner) == [] == list(beat.leases)


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
    asking.join(PATIENCE)
    assert not asking.is_alive(), "it waits for itself"
    assert len({*found, keeper_of(database)}) == 1
