"""Each fault happens, is seen by those it is meant for, and is over when it is healed."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

import holdfast
from holdfast.testing import Nemesis, Postgres, Proxy, child_watchdog, faults
from holdfast.testing.faults import Clock, Fault, Pair
from holdfast.testing.server import until
from tests.children import PATIENCE, Child, backends, eventually, query
from tests.conftest import migrated, server

_COUNTS = """
import time
number = 0
while True:
    print(number, flush=True)
    number += 1
    time.sleep(0.005)
"""

_HANDLES_SIGURG = """
import signal, sys
signal.signal(signal.SIGURG, lambda *_: print("forks", flush=True))
print("ready", flush=True)
sys.stdin.read()
"""

_numbers = itertools.count()
_RECOVERED = "database system was not properly shut down"


@pytest.fixture(scope="module")
def own() -> Iterator[Postgres]:
    """A server to break."""
    with Postgres.create() as own:
        yield own


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair.create() as pair:
        yield pair


def answers(postgres: Postgres, within: int = 60) -> bool:
    """A server that stands still takes connections, too."""
    try:
        with psycopg.connect(postgres.url, connect_timeout=within, autocommit=True) as connection:
            return connection.execute("select 1").fetchone() == (1,)
    except psycopg.OperationalError:
        return False


def writes(url: str) -> bool:
    try:
        query(url, "create temporary table written ()")
    except (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction):
        return False
    return True


def test_kill_ends_one_of_those_alive() -> None:
    with Child(_COUNTS) as child, Child(_COUNTS) as other:
        alive = {child.pid: child, other.pid: other}
        faults.kill(lambda: list(alive), seed=1).begin()
        eventually(lambda: [each for each in alive.values() if each.process.poll() is not None], "one is dead")
        [dead] = [each for each in alive.values() if each.process.poll() is not None]
        assert dead.wait() == -9
        faults.kill(list, seed=1).begin()  # nobody is left: nothing happens


def test_pause_makes_a_process_stand_still_until_it_is_healed() -> None:
    with Child(_COUNTS) as child:
        child.expect("0")
        fault = faults.pause(lambda: [child.pid])
        fault.begin()
        [state] = [state for pid, _, state in child_watchdog.list_processes() if pid == child.pid]
        assert state in "Tt"
        fault.heal()
        child.expect("1", "2")
        for _ in range(20):
            child.line()


def test_terminate_ends_the_sessions_that_were_meant(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url, application_name="user") as user:
        grant = client.lease("a", ttl=60).acquire()
        before = backends(postgres_url)
        assert before
        faults.terminate(postgres_url).begin()
        assert not set(before) & set(backends(postgres_url))
        assert user.execute("select 1").fetchone() == (1,)
        grant.renew()
        grant.check()
        faults.terminate(postgres_url, pids=[user.info.backend_pid]).begin()
        with pytest.raises(psycopg.OperationalError):
            user.execute("select 1")
        grant.renew()


def test_terminate_is_harmless_where_no_server_is(own: Postgres) -> None:
    own.stop()
    faults.terminate(lambda: own.url).begin()
    own.start()


@pytest.mark.parametrize("kind", ["restart", "crash", "freeze"])
def test_a_server_that_is_down_or_still_answers_again_when_healed(own: Postgres, kind: str) -> None:
    fault: Fault = getattr(faults, kind)(own)
    own.execute(f"create table during_{kind} as select 1")
    assert (fault.kind, fault.on) == (kind, own)
    recovered = own.log(10**6).count(_RECOVERED)
    fault.begin()
    assert not answers(own, within=2)
    fault.heal()
    assert answers(own)
    assert own.execute(f"select * from during_{kind}") == [(1,)]
    fault.heal()  # harmless
    assert own.log(10**6).count(_RECOVERED) - recovered == (kind == "crash")


def test_a_read_only_server_takes_no_writes_until_it_is_healed(own: Postgres) -> None:
    url = migrated(own.database())
    fault = faults.read_only(own)
    fault.begin()
    eventually(lambda: not writes(url), "the setting has reached new sessions")
    with (
        holdfast.Client(url) as client,
        pytest.raises(holdfast.EngineError, match="default_transaction_read_only is on"),
    ):
        client.lease("a").acquire()
    fault.heal()
    eventually(lambda: writes(url), "it takes writes again")
    with holdfast.Client(url) as client, client.lease("a"):
        pass


def test_an_impatient_server_ends_long_statements_but_not_those_of_a_client(own: Postgres) -> None:
    url = migrated(own.database())
    fault = faults.impatient(own)

    def is_ended() -> bool:
        with psycopg.connect(url, autocommit=True) as connection:
            [(limit,)] = connection.execute("show statement_timeout").fetchall()
            return str(limit) == "200ms"

    fault.begin()
    eventually(is_ended, "the setting has reached new sessions")
    with psycopg.connect(url, autocommit=True) as connection, pytest.raises(psycopg.errors.QueryCanceled):
        connection.execute("select pg_sleep(60)")
    with holdfast.Client(url) as client, client.lease("a", ttl=600):
        pass
    assert own.execute("select pg_sleep(0.5)"), "what heals it is not ended"
    fault.heal()
    eventually(lambda: not is_ended(), "it has limits no more")


def test_a_server_that_refuses_ends_connections_to_one_database_until_it_is_healed(own: Postgres) -> None:
    url, other = migrated(own.database()), own.database()
    fault = faults.refuse(own, url.rpartition("/")[2])
    with psycopg.connect(url) as connection:
        fault.begin()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    with holdfast.Client(url) as client, pytest.raises(holdfast.EngineError, match="not currently accepting"):
        client.lease("a").acquire()
    assert query(other, "select 1") == [(1,)]
    fault.heal()
    with holdfast.Client(url) as client, client.lease("a"):
        pass


@pytest.mark.parametrize("kind", ["restore_copy", "restore_dump", "restore_template"])
def test_a_restore_loses_what_was_committed_since_its_begin(own: Postgres, kind: str) -> None:
    name = f"restored_{next(_numbers)}"
    url = own.database(name)
    query(url, "create table written (what text)")
    query(url, "insert into written values ('before')")
    fault = faults.restore_copy(own) if kind == "restore_copy" else getattr(faults, kind)(own, name)
    for _ in range(2):  # it may be used again
        fault.begin()
        query(url, "insert into written values ('lost')")
        fault.heal()
        assert query(url, "select what from written") == [("before",)]
    query(url, "insert into written values ('after')")


def test_a_process_that_is_to_fork_gets_a_signal_that_others_ignore() -> None:
    with Child(_HANDLES_SIGURG) as child, Child(_COUNTS) as other:
        child.expect("ready")
        faults.fork(lambda: [child.pid]).begin()
        child.expect("forks")
        number = int(other.line())
        faults.fork(lambda: [other.pid]).begin()
        eventually(lambda: int(other.line()) > number + 1, "it goes on")


def test_a_failover_loses_nothing_and_both_come_to_be_primary_again(pair: Pair) -> None:
    url = migrated(pair.primary.database())
    with Proxy(url) as proxy, holdfast.Client(proxy.url) as client:
        fault = faults.failover(pair, moved=lambda primary: proxy.target(primary.url))
        kept = client.lease("kept", ttl=600).acquire()
        fences = [kept.fence]
        first = pair.primary
        for _ in range(2):
            fault.begin()
            until(lambda: bool(client_acquires(client, fences)), what="the client finds the new primary")
            kept.check()
            fault.heal()
            assert pair.primary.is_primary
            assert not pair.standby.is_primary
            [(state,)] = pair.primary.execute("select sync_state from pg_stat_replication")
            assert state == "sync"
        assert pair.primary is first
        assert fences == sorted(set(fences))


def test_an_old_primary_that_comes_back_answers_no_commit_and_is_undone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever still finds it there gets no lease, and a write in doubt; the new one goes on with the lease's names. An
    answer that does not come is waited for, here for less long."""
    url = migrated(pair.primary.database())
    table = f"holdfast_{url.rpartition('/')[2]}"
    query(url, f"create table {table} (what int)")
    database = url.rpartition("/")[2]
    fault = faults.old_primary(pair)
    fault.begin()
    old, new = pair.standby, pair.primary
    assert old.is_primary
    assert new.is_primary
    with (
        holdfast.Client(url) as left,
        holdfast.Client(f"{new.url.rpartition('/')[0]}/{database}") as moved,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(query, url, f"insert into {table} values (1) returning what")
        left.leases.list()  # connected: what is waited for below is an answer
        with monkeypatch.context() as patch:
            patch.setattr("holdfast.lease.handle.CALL_TIMEOUT", 1.0)
            with pytest.raises(holdfast.EngineError, match="did not answer"):
                left.lease("a", ttl=2).acquire()
        with moved.lease("a", ttl=60) as grant:
            assert grant.fence > 1
        assert not waiting.done()
        fault.heal()
        assert waiting.exception(PATIENCE) is not None
    assert not pair.standby.is_primary
    assert pair.primary.execute(f"select * from {table}", dbname=database) == []


def client_acquires(client: holdfast.Client, fences: list[int]) -> bool:
    """Each time under another name: of one whose answer got lost nobody knows whether it is held."""
    try:
        with client.lease(f"tried-{next(_numbers)}", ttl=600) as grant:
            fences.append(grant.fence)
        return True
    except holdfast.EngineError:
        return False


def test_commits_wait_for_a_standby_that_is_away(pair: Pair) -> None:
    fault = faults.standby_away(pair)
    url = pair.primary.database()
    query(url, "create table done (what int)")
    fault.begin()
    with ThreadPoolExecutor(1) as pool:
        commit = pool.submit(query, url, "insert into done values (1) returning what")
        waits = "select 1 from pg_stat_activity where wait_event = 'SyncRep'"
        eventually(lambda: query(url, waits) == [(1,)], "the commit waits")
        fault.heal()
        assert commit.result(PATIENCE) == [(1,)]


@pytest.mark.skipif(faults.faketime() is None, reason="libfaketime is not installed: apt-get install faketime")
def test_a_servers_clock_steps_and_drifts_while_it_runs() -> None:
    def ahead() -> float:
        [(seconds,)] = postgres.execute("select extract(epoch from clock_timestamp())::float8")
        return float(seconds) - time.time()

    with Clock() as clock, Postgres.create(environment=clock.environment) as postgres:
        assert abs(ahead()) < 100
        with psycopg.connect(postgres.url, autocommit=True) as session:
            step = faults.clock_step(clock, 1000)
            step.begin()
            [(seconds,)] = session.execute("select extract(epoch from clock_timestamp())::float8").fetchall()
            assert 900 < seconds - time.time() < 1100, "sessions that were there before see it"
        step.heal()
        assert abs(ahead()) < 100
        drift = faults.clock_drift(clock, -5000)
        drift.begin()
        eventually(lambda: ahead() < -1000, "it loses 5000 seconds a second")
        first = ahead()
        eventually(lambda: ahead() < first, "and goes on doing so")
        drift.heal()
        assert abs(ahead()) < 100
        assert clock.offset == 0


@pytest.mark.skipif(faults.faketime() is None, reason="libfaketime is not installed: apt-get install faketime")
def test_a_standby_lives_under_the_same_clock() -> None:
    with Clock() as clock, Pair.create(environment=clock.environment) as pair:
        clock.step(-1000)
        for one in (pair.primary, pair.standby):
            [(seconds,)] = one.execute("select extract(epoch from clock_timestamp())::float8")
            assert -1100 < seconds - time.time() < -900


@pytest.mark.skipif(faults.faketime() is None, reason="libfaketime is not installed: apt-get install faketime")
def test_a_clock_may_be_a_processs_too_and_nothing_of_it_stays_when_that_is_killed() -> None:
    """The library leaves shared memory behind, and later ends whoever is given the same pid."""
    program = "import os, sys, time\nprint(os.getpid())\nwhile input(): print(time.time(), time.monotonic())"
    with Clock() as clock:
        command = [sys.executable, "-u", "-c", program]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **clock.environment}
        ) as child:
            assert child.stdin
            assert child.stdout
            pid = child.stdout.readline().strip()
            clock.step(1000)
            child.stdin.write("now\n")
            child.stdin.flush()
            wall, monotonic = map(float, child.stdout.readline().split())
            assert 900 < wall - time.time() < 1100
            assert abs(monotonic - time.monotonic()) < 100
            child.kill()
    assert not list(Path("/dev/shm").glob(f"*faketime*_{pid}"))
    assert not list(Path("/dev/shm").glob(f"*holdfast-clock-{os.getpid()}-*"))


class _Thing:
    """Notes what is done to it, and that nobody does two things at once."""

    def __init__(self, notes: list[str]) -> None:
        self.notes, self.broken = notes, False

    def fault(self, kind: str) -> Fault:
        return Fault(kind, self, lambda: self.note(kind, broken=True), lambda: self.note(kind, broken=False))

    def note(self, kind: str, *, broken: bool) -> None:
        assert broken is not self.broken
        self.broken = broken
        self.notes.append(f"{kind} {broken}")


def _rampage(seed: int) -> tuple[list[str], list[str], list[_Thing]]:
    notes: list[str] = []
    told: list[str] = []
    things = [_Thing(notes) for _ in range(3)]
    choice = [thing.fault(f"{kind}{number}") for number, thing in enumerate(things) for kind in "ab"]
    nemesis = Nemesis(
        choice,
        seed,
        record=lambda kind, phase: told.append(f"{kind} {phase == 'begin'}"),
        every=(0.0, 0.002),
        lasting=(0.0, 0.01),
    )
    counts = nemesis.run(lambda: len(notes) >= 40)
    assert sum(counts.values()) == sum(note.endswith("True") for note in notes)
    return notes, told, things


def test_a_nemesis_does_the_same_for_the_same_seed_tells_all_and_heals_all() -> None:
    notes, told, things = _rampage(7)
    assert notes == told
    assert not any(thing.broken for thing in things)
    assert notes[:40] == _rampage(7)[0][:40]
    assert notes[:40] != _rampage(8)[0][:40]
    overlap = most = 0
    for note in notes:
        overlap += 1 if note.endswith("True") else -1
        most = max(most, overlap)
    assert (overlap, most) == (0, 2)


def test_a_nemesis_heals_the_rest_when_one_fault_fails() -> None:
    healed: list[str] = []
    bad = Fault("bad", "there", lambda: 1 / 0, lambda: healed.append("bad"))
    good = Fault("good", "here", lambda: None, lambda: healed.append("good"))
    nemesis = Nemesis([bad, good], 3, every=(0, 0.001), lasting=(60, 60))
    with pytest.raises(ZeroDivisionError):
        nemesis.run(60)
    assert sorted(healed) == sorted(nemesis.counts)
    with pytest.raises(ValueError, match="faults"):
        Nemesis([], 1)


def test_a_second_run_of_a_nemesis_is_no_quieter_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(seconds: float, over: Callable[[], bool]) -> bool:
        waits.append(seconds)
        return not over()

    monkeypatch.setattr("holdfast.testing.faults.nemesis._wait", wait)
    nemesis = Nemesis([Fault("a", "here", lambda: None)], 7, every=(1.0, 2.0), lasting=(0.1, 0.2))
    for many in (10, 20, 30):
        nemesis.run(lambda many=many: nemesis.counts["a"] >= many)  # type: ignore[misc]
    assert max(waits) <= 4.0, "the next one, and before it the one that the end of a run has cut off"


def test_a_client_under_everything_at_once_gets_its_lease_in_the_end(postgres_url: str) -> None:
    """The tools together: the way, the sessions and a process, by one seed."""
    with Proxy(postgres_url) as proxy, Child(_COUNTS) as child, holdfast.Client(proxy.url) as client:
        choice = [
            *faults.network(proxy, delay=0.02),
            faults.pause(lambda: [child.pid]),
            faults.terminate(postgres_url),
        ]
        nemesis = Nemesis(choice, seed=int(os.environ.get("SEED", "11")), every=(0, 0.1), lasting=(0, 0.1))
        assert nemesis.run(lambda: nemesis.counts.total() > 5).total() > 5
        with client.lease("a", ttl=60, timeout=PATIENCE) as grant:
            grant.check()
        assert server().is_primary
