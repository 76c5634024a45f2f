"""Races aimed at the instant that decides them.

Requests of two or three sessions are sent without waiting, microseconds apart and in every order; their answers must
never contradict each other. HOLDFAST_TRIALS multiplies the trials.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from holdfast.errors import Refused
from holdfast.runtime.clock import now
from holdfast.testing.server import until
from tests.children import PATIENCE, eventually, query
from tests.conftest import migrated
from tests.lease.arena import Arena
from tests.raw_session import Raw, acquisition, trials, waiters


@pytest.fixture
def arena(either: str) -> Iterator[Arena]:
    made = Arena(migrated(either))
    yield made
    for raw in made.raws:
        raw.close()


def rounds(arena: Arena, number: int, complete: Callable[[], bool] = lambda: True) -> Iterator[str]:
    """Names, one a trial. The blocking engine gets fewer: there the writers queue anyway. More than ``number`` only
    until the trials are ``complete``: on a busy machine one outcome may not come up for long."""
    enough = trials(number // 4 if arena.setup.sqlite else number)
    for trial in range(20 * enough):
        if trial >= enough and complete():
            return
        if trial % 50 == 0:
            arena.setup.clear()
        yield f"trial {trial}"


@pytest.mark.parametrize("form", ["lease_renew", "beat_renew"])
def test_never_both_renewed_and_taken_over_at_the_instant_of_expiry(arena: Arena, form: str) -> None:
    """Promise 1. Both outcomes must come up, or the race was not aimed well."""
    seen: Counter[str] = Counter()
    for name in rounds(arena, 100, lambda: seen["renewed"] > 0 and seen["taken"] > 0):
        old = arena.setup.acquire(name, solo=form == "lease_renew")
        asked = {"name": name, "token": old["token"]} if form == "lease_renew" else {"beat": old["beat"]}
        thief = acquisition(name, "thief")
        arena.expire_soon()
        renewal, [attempt] = arena.at_once((form, asked), ("lease_acquire", thief))
        renewed = bool(renewal and renewal[0].get("done", True))
        taken = attempt["fence"] is not None
        assert not (renewed and taken), f"two holders of {name}: {attempt}"
        assert arena.setup.call("lease_status", name=name, token=thief["token"]) != [] or not taken
        assert arena.ends(old, name) == (["expired"] if taken else [])
        seen["renewed" if renewed else "taken" if taken else "neither"] += 1
        arena.learn(renewed)
        arena.setup.force(name)
    assert seen["renewed"] > 0, seen
    assert seen["taken"] > 0, seen


def test_a_renewed_lease_is_never_purged(arena: Arena) -> None:
    seen: Counter[bool] = Counter()
    for name in rounds(arena, 80, lambda: len(seen) == 2):
        old = arena.setup.acquire(name, solo=False)
        arena.expire_soon()
        renewal, _ = arena.at_once(("beat_renew", {"beat": old["beat"]}), ("purge", {}))
        kept = bool(arena.setup.call("lease_status", name=name, token=old["token"]))
        assert kept or not renewal, "renewed, and purged all the same"
        seen[kept] += 1
        arena.learn(kept)
        arena.setup.force(name)
    assert len(seen) == 2, seen


def test_of_two_thieves_exactly_one_wins(arena: Arena) -> None:
    for name in rounds(arena, 80):
        old = arena.setup.acquire(name)
        arena.setup.pass_time(31)
        thieves = [acquisition(name, f"thief {number}") for number in range(3)]
        rows = [row for [row] in arena.at_once(*(("lease_acquire", thief) for thief in thieves))]
        won = [row for row in rows if row["fence"] is not None]
        assert len(won) == 1, rows
        assert won[0]["fence"] > old["fence"]
        assert arena.ends(old, name) == ["expired"]


def test_of_several_clients_on_a_free_name_exactly_one_wins(arena: Arena) -> None:
    for name in rounds(arena, 80):
        asks = [acquisition(name, f"client {number}") for number in range(3)]
        rows = [row for [row] in arena.at_once(*(("lease_acquire", ask) for ask in asks))]
        assert sorted(row["status"] == "acquired" for row in rows) == [False, False, True], rows


def refused_a_busy_row(answer: object) -> bool:
    """What does not wait says so when the row is just being changed. Any other error fails the test."""
    if not isinstance(answer, Refused):
        return False
    assert answer.sqlstate == "55P03", answer
    return True


def test_a_lease_released_and_taken_over_at_once_ends_once(arena: Arena) -> None:
    for name in rounds(arena, 80):
        old = arena.setup.acquire(name)
        arena.setup.pass_time(31)
        release = ("lease_release", {"name": name, "token": old["token"]})
        released, [row] = arena.at_once(release, ("lease_acquire", acquisition(name, "thief")))
        done = not refused_a_busy_row(released) and released[0]["done"]
        assert not (done and row["status"] == "taken_over"), "both had the row"
        assert done or row["status"] == "taken_over", (released, row)
        assert arena.ends(old, name) == ["released" if done else "expired"]


def test_a_takeover_is_never_purged_although_its_old_beat_was_dead(arena: Arena) -> None:
    """A crashed process had many leases; one is taken over while the purge is at work on the others."""
    for _ in range(trials(3)):
        arena.setup.clear()
        first = arena.setup.acquire("a", solo=False)
        for number in range(150):
            arena.setup.acquire(f"m{number}", beat=first["beat"])
        for name in ("y", "z"):
            arena.setup.acquire(name, beat=first["beat"])
        arena.setup.pass_time(31)
        assert arena.setup.acquire("a", "thief")["status"] == "taken_over"
        asks = [acquisition(name, "thief") for name in ("y", "z")]
        _, *rows = arena.at_once(("purge", {}), *(("lease_acquire", ask) for ask in asks))
        for ask, [row] in zip(asks, rows, strict=True):
            held = arena.setup.call("lease_status", name=ask["name"], token=ask["token"])
            assert bool(held) is (row["fence"] is not None), f"{row} and then nothing"


FORCE_AND_WAIT = "select holdfast.lease_force_release($1, $2, $3) as done"


@pytest.mark.parametrize("force", ["lease_force_release", FORCE_AND_WAIT], ids=["at once", "waiting"])
def test_forced_release_renewal_and_acquire_never_deadlock(arena: Arena, force: str) -> None:
    """Lock order: a deadlock would come out as an error of one of the three, SQLSTATE 40P01."""
    if arena.setup.sqlite and force == FORCE_AND_WAIT:
        force = "lease_force_release"  # one writer at a time: there is no other form
    for name in rounds(arena, 60):
        old = arena.setup.acquire(name, "same", solo=arena.random.random() < 0.5, reenter="secret")
        if arena.random.random() < 0.3:
            arena.expire_soon()
        [renewed], forced, [row] = arena.at_once(
            ("lease_renew", {"name": name, "token": old["token"]}),
            (force, {"name": name, "actor": "operator", "reason": "test"}),
            ("lease_acquire", acquisition(name, "same", reenter="secret")),
        )
        assert force != FORCE_AND_WAIT or not isinstance(forced, Refused), forced
        gone = (not refused_a_busy_row(forced) and forced[0]["done"]) or row["fence"] is not None
        if gone:
            assert not arena.setup.renew(name, old["token"]), "the old token is worth nothing after either of the two"
            assert len(arena.ends(old, name)) == 1
        else:
            assert row["status"] == "busy", (renewed, forced, row)
            assert isinstance(forced, Refused)
        arena.setup.force(name)


@pytest.mark.parametrize("solo", [True, False])
def test_renewal_that_waited_for_a_forced_reacquire_is_refused(postgres_url: str, solo: bool) -> None:
    """The secret must be in the row that is locked: looked up elsewhere, the stale holder would be told True."""
    raw = Raw(postgres_url)
    old = raw.acquire("x", "old", solo=solo)
    answers: list[bool] = []
    stale = threading.Thread(target=lambda: answers.append(raw.renew("x", old["token"])))
    with psycopg.connect(postgres_url) as connection:
        connection.execute("select holdfast.lease_force_release('x', 'operator', 'test')")
        connection.execute("select holdfast.lease_acquire('x', 'new', 30)")
        stale.start()
        until(lambda: waiters(connection) == 1, what="the stale renewal waits")
    stale.join()
    assert answers == [False]
    raw.close()


HAMMER = """
create table grants (id bigint generated always as identity (cache 1), fence bigint, client int);
create procedure hammer(client int, seconds float) language plpgsql as $$
declare
    finish timestamptz := clock_timestamp() + make_interval(secs => seconds);
    got record;
begin
    while clock_timestamp() < finish or (select last_value from grants_id_seq) <= 200 loop
        select * into got from holdfast.lease_acquire('one name', 'client ' || client, 30);
        commit;
        if got.fence is not null then
            insert into grants (fence, client) values (got.fence, client);
            commit;
            perform holdfast.lease_release('one name', null, got.token);
            commit;
        end if;
    end loop;
end $$;
"""


def test_with_16_clients_on_one_name_fences_never_go_back(postgres_url: str) -> None:
    """A number drawn before the row is owned can be older than that of a grant that came and went meanwhile."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(HAMMER)
        clients = [Raw(postgres_url) for _ in range(16)]
        for number, client in enumerate(clients):
            client.session.pgconn.send_query(f"call hammer({number}, {trials(1) - 1})".encode())
            client.session.pgconn.flush()
        for client in clients:
            client.session._rows(client.session._answer(now() + 2 * PATIENCE))
            client.close()
        fences = [row[0] for row in connection.execute("select fence from grants order by id")]
    assert len(fences) > 200
    back = [(one, two) for one, two in itertools.pairwise(fences) if two <= one]
    assert not back, f"{len(back)} of {len(fences)} grants got a fence below that of the grant before"


def test_a_fence_drawn_before_the_row_was_ours_is_drawn_again(postgres_url: str) -> None:
    """Whoever had the row until then may have drawn a later one."""
    with (
        psycopg.connect(postgres_url) as before,
        psycopg.connect(postgres_url, autocommit=True) as after,
        ThreadPoolExecutor(1) as pool,
    ):
        before.execute(
            "insert into holdfast.lease (name, holder, beat, token, fence, acquired_at, kind, role)"
            " values ('a', 'b', '', '', 0, clock_timestamp(), 'plain', 'b')"
        )
        acquire = "select fence from holdfast.lease_acquire('a', 'c', 30)"
        acquiring = pool.submit(lambda: after.execute(acquire).fetchall())
        waits = f"select 1 from pg_stat_activity where pid = {after.info.backend_pid} and wait_event_type = 'Lock'"
        eventually(lambda: query(postgres_url, waits), "it has drawn, and waits for the row")
        [[earlier]] = before.execute("select holdfast.draw('holdfast.fence')").fetchall()
        before.execute("delete from holdfast.lease where name = 'a'")
        before.commit()
        [[fence]] = acquiring.result(PATIENCE)
        assert fence > earlier
