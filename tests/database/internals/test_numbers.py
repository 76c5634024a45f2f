"""The rule by which fences, versions and places are drawn: when the sequences are raised, and by whom."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import commands
from tests.children import PATIENCE, eventually, query
from tests.conftest import server

DRAW = "select holdfast.draw('holdfast.fence')"
CLOCK = "select holdfast.clock_number()"
LOCKS = """select count(*) from pg_locks where locktype = 'advisory'
    and database = (select oid from pg_database where datname = current_database())"""
MINUTE = 60_000_000


def number(connection: psycopg.Connection[Any], statement: str = DRAW) -> int:
    [value] = connection.execute(statement.encode()).fetchone() or (0,)
    return int(value)


@pytest.fixture
def session(postgres_url: str) -> Any:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


def restart(session: psycopg.Connection[Any]) -> None:
    """As far as the rule knows, this is another life of the server."""
    session.execute("select setval('holdfast.raised_for', 7)")


def test_a_life_of_the_server_begins_a_minute_ahead_of_the_clock_and_then_counts(session: Any) -> None:
    clock = number(session, CLOCK)
    first = number(session)
    assert first > clock + MINUTE
    assert number(session) == first + 1
    for other in ("version", "place"):
        assert number(session, f"select last_value from holdfast.{other}") > clock + MINUTE, (
            "all three are raised at once"
        )
    restart(session)
    assert number(session) > first + 1


def test_a_sequence_behind_the_clock_is_set_to_it_and_one_ahead_is_left_alone(session: Any) -> None:
    number(session)
    clock = number(session, CLOCK)
    session.execute("select setval('holdfast.fence', 5)")
    assert clock < number(session) < clock + MINUTE
    session.execute("select setval('holdfast.fence', %s)", [ahead := clock + 100 * MINUTE])
    assert number(session) == ahead + 1


def test_in_a_restore_under_a_clock_that_was_set_back_numbers_rise_by_a_minute(session: Any) -> None:
    number(session)
    session.execute("select setval('holdfast.fence', %s)", [ahead := number(session, CLOCK) + 100 * MINUTE])
    restart(session)
    assert number(session) > ahead + MINUTE


def test_numbers_rise_however_many_raise_them(postgres_url: str) -> None:
    drawn: list[list[int]] = [[] for _ in range(6)]
    done = threading.Event()

    def draw(numbers: list[int]) -> None:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            numbers += (number(connection) for _ in range(150))

    def interrupt() -> None:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            while not done.is_set():
                restart(connection)

    with ThreadPoolExecutor(7) as pool:
        interrupting = pool.submit(interrupt)
        try:
            for drawing in [pool.submit(draw, numbers) for numbers in drawn]:
                drawing.result(2 * PATIENCE)
        finally:
            done.set()
        interrupting.result(PATIENCE)
    assert all(numbers == sorted(numbers) for numbers in drawn)
    assert len({value for numbers in drawn for value in numbers}) == 6 * 150, "none twice"


def test_no_number_from_before_a_raise_is_returned_after_it(postgres_url: str, session: Any) -> None:
    """It may be one that a restore has lost, although it is ahead of the clock."""
    session.execute("select setval('holdfast.fence', holdfast.clock_number() + 30000000)")
    restart(session)
    with psycopg.connect(postgres_url) as other, ThreadPoolExecutor(1) as pool:
        other.execute("lock table holdfast.meta")
        drawing = pool.submit(number, session)
        waits = f"select 1 from pg_stat_activity where pid = {session.info.backend_pid} and wait_event_type = 'Lock'"
        eventually(lambda: query(postgres_url, waits), "it waits for the check of raised_for")
        raised = number(other, "select holdfast.raise_number('holdfast.fence')")
        other.commit()
        assert drawing.result(PATIENCE) > raised


def test_no_session_draws_while_another_one_raises(postgres_url: str, session: Any) -> None:
    """It would draw numbers that the other one is about to set the sequence below."""
    number(session)
    for name in ("version", "place"):
        session.execute(f"select setval('holdfast.{name}', 5)")
    with (
        psycopg.connect(postgres_url) as blocker,
        psycopg.connect(postgres_url, autocommit=True) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        blocker.execute("alter sequence holdfast.place cache 1")
        raising = pool.submit(number, session, "select holdfast.draw('holdfast.version')")
        waits = "select 1 from pg_stat_activity where pid = {} and wait_event = '{}'"
        eventually(lambda: query(postgres_url, waits.format(session.info.backend_pid, "relation")), "it raises")
        drawing = pool.submit(number, other)
        eventually(lambda: query(postgres_url, waits.format(other.info.backend_pid, "advisory")), "it waits")
        blocker.rollback()
        assert raising.result(PATIENCE) > number(session, CLOCK) - MINUTE
        assert drawing.result(PATIENCE) == number(session) - 1


def test_a_raise_leaves_room_for_the_numbers_that_are_being_drawn(session: Any) -> None:
    """One by less than they are would let setval lower the sequence."""
    now = number(session, CLOCK)
    session.execute(f"create or replace function holdfast.clock_number() returns bigint language sql return {now}")
    entry = number(session, "select holdfast.audit_begin('fence.raise', 'fences', 'jane', 'why')")
    for call in ("holdfast.raise_number('holdfast.fence')", f"holdfast.fence_raise({now + MINUTE}, {entry})"):
        number(session)
        session.execute("select setval('holdfast.fence', %s)", [now + MINUTE - 2])
        restart(session)
        assert number(session, f"select {call}") > now + MINUTE + 10_000


def test_a_transaction_that_raised_them_stops_nobody_and_its_rollback_undoes_nothing(
    postgres_url: str, session: Any
) -> None:
    with psycopg.connect(postgres_url) as open_transaction:
        open_transaction.execute("savepoint s")
        first = number(open_transaction)
        session.execute("set lock_timeout = '1s'")
        assert number(session) == first + 1
        open_transaction.execute("rollback to s")
        assert number(open_transaction) == first + 2
        open_transaction.rollback()
    assert number(session) == first + 3
    assert query(postgres_url, LOCKS) == [(0,)]


def test_a_raise_that_is_cancelled_leaves_no_lock(postgres_url: str, session: Any) -> None:
    with psycopg.connect(postgres_url) as blocker, ThreadPoolExecutor(1) as pool:
        blocker.execute("alter sequence holdfast.place cache 1")
        raising = pool.submit(number, session)
        waits = f"select 1 from pg_stat_activity where pid = {session.info.backend_pid} and wait_event_type = 'Lock'"
        eventually(lambda: query(postgres_url, waits), "it waits inside, with the lock")
        assert query(postgres_url, LOCKS) == [(1,)]
        query(postgres_url, f"select pg_cancel_backend({session.info.backend_pid})")
        with pytest.raises(psycopg.errors.QueryCanceled):
            raising.result(PATIENCE)
        assert query(postgres_url, LOCKS) == [(0,)]
    assert number(session) > number(session, CLOCK)


def test_a_free_lease_is_not_refused_because_another_session_raises(postgres_url: str, session: Any) -> None:
    with psycopg.connect(postgres_url) as raising, ThreadPoolExecutor(1) as pool:
        raising.execute("select pg_advisory_xact_lock(hashtext('holdfast.raise'), 0)")
        acquiring = pool.submit(session.execute, "select status from holdfast.lease_acquire('a', 'b', 600)")
        waits = f"select 1 from pg_stat_activity where pid = {session.info.backend_pid} and wait_event = 'advisory'"
        eventually(lambda: query(postgres_url, waits), "it waits")
        raising.rollback()
        assert acquiring.result(PATIENCE).fetchone() == ("acquired",)


def test_no_function_of_the_wal_is_needed(postgres_url: str) -> None:
    """Servers for rent refuse them, and their administrators are no superusers."""
    role, name = "tenant_of_numbers", postgres_url.rpartition("/")[2]
    if not server().execute(f"select from pg_roles where rolname = '{role}'"):
        server().execute(f"create role {role} login")
    server().execute("drop schema holdfast cascade", dbname=name)
    server().execute(f"grant create on database {name} to {role}", dbname=name)
    for function in (
        "pg_current_wal_lsn()",
        "pg_walfile_name(pg_lsn)",
        "pg_control_system()",
        "pg_control_checkpoint()",
    ):
        server().execute(f"revoke execute on function {function} from public", dbname=name)
    with holdfast.Client(postgres_url.replace("//postgres@", f"//{role}@")) as client:
        client.migrate()
        assert client.lease("a").acquire().release()
        record = client.objects.put_if("box", "a", 1, holdfast.MustCreate())
        client.objects.put_if("box", "a", 2, holdfast.MatchVersion(record.version))
        assert client.operation("a").run(lambda: 1).result == 1
        assert client.operations.read().cursor
        with client.lock("a"):
            assert client.doctor().count("fail") == 0


def test_an_operator_raises_them_above_what_a_receiver_has_seen(either: str) -> None:
    with holdfast.Client(either) as client:
        above = client.lease("a", ttl=600).acquire().fence + 500 * MINUTE
        version = client.objects.put_if("box", "a", 1, holdfast.MustCreate()).version
        assert {each.check: each.status for each in client.doctor().findings}["fences"] == "ok"
        commands.run(client, "fence.raise", {"above": above}, actor="jane", reason="restored under a wrong clock")
        assert client.lease("b", ttl=600).acquire().fence > above
        assert client.objects.put_if("box", "b", 1, holdfast.MustCreate()).version > version
        [finding] = [each for each in client.doctor().findings if each.check == "fences"]
        assert (finding.status, "ahead of the clock" in finding.found) == ("warn", True)
        for wrong in (-1, 1 << 60, 1.5, True):
            with pytest.raises(ValueError, match="above must be"):
                client.leases.raise_fences(actor="jane", reason="why", above=wrong)  # type: ignore[arg-type]
