"""The start of a guard: nothing in the block runs before the lease is proven to be held, in any failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.lease.handle import Lease
from holdfast.recipes.gate import GateLease
from holdfast.recipes.guard import _GuardLease
from holdfast.runtime.clock import now
from tests.children import NONE, PATIENCE, Child, eventually, query, rows
from tests.cli.runs import Run
from tests.conftest import server
from tests.raw_session import trials
from tests.recipes.guard.instances import ASYNC, GUARDED, LONG, PAIRS, Instance

BOTH = pytest.mark.parametrize("program", [GUARDED, ASYNC], ids=["sync", "async"])


@pytest.fixture(params=PAIRS, ids=["sqlite-sync", "postgres-async"])
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The URL of a database, and a guarded program."""
    engine, program = request.param
    return request.getfixturevalue(f"{engine}_url"), program


def failing(points: str, program: str) -> str:
    """With failpoints, in that process alone."""
    return f"import os; os.environ['HOLDFAST_FAILPOINTS'] = {points!r}\n{program}"


TWINS = """
import os, sys, holdfast, logging
url, rounds, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
logging.disable()
import psycopg, holdfast.client, holdfast.recipes.guard, holdfast.database.postgres, holdfast.database.sqlite

def instance(go, over):
    os.read(go, 1)
    work = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with holdfast.Client(url) as client, client.guard("system:orchestrator:guard_lock", ttl=600, renew_every=100):
        os.write(work, b"x")
        os.read(over, 1)  # until the other has ended

for _ in range(rounds):
    go, start = os.pipe()
    over, end = os.pipe()
    pids = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(start), os.close(end)
                instance(go, over)
                code = 0
            except SystemExit as exit:
                code = exit.code
            finally:
                os._exit(code)
        pids.append(pid)
    os.write(start, b"ab")
    _, first = os.waitpid(-1, 0)
    os.close(end)
    _, second = os.waitpid(-1, 0)
    for each in (go, start, over):
        os.close(each)
    print(os.waitstatus_to_exitcode(first), os.waitstatus_to_exitcode(second), os.path.getsize(file), flush=True)
"""


@pytest.mark.timeout(900)
def test_of_two_instances_started_together_exactly_one_runs(either: str, tmp_path: Path) -> None:
    """The other ends with the code that says so, while the first still runs, and has done nothing."""
    number = 80 if trials(1) > 1 else 3
    with holdfast.Client(either) as client:
        client.leases.list()  # the file is there
    with Child(TWINS, either, number, tmp_path / "work") as twins:
        for done in range(1, number + 1):
            assert twins.line() == f"75 0 {done}"
    assert rows(either) == NONE


def test_a_guard_that_is_held_is_refused_at_once_and_said_why(pair: tuple[str, str], tmp_path: Path) -> None:
    url, program = pair
    with (
        holdfast.Client(url) as client,
        client.lease("key", holder="the other one"),
        Instance(url, "key", tmp_path, program=program) as late,
    ):
        assert late.wait() == 75
        assert "guard 'key'" in (output := late.said())
        assert "held by the other one" in output
        assert "code 75" in output
        assert late.work() == b""


@BOTH
def test_a_store_that_errs_or_cannot_be_reached_ends_it_with_another_code(tmp_path: Path, program: str) -> None:
    bare = server().database()
    for number, (url, why) in enumerate(
        [("postgresql://127.0.0.1:1/none", "connect"), (bare, "migrate up"), (f"sqlite:///{tmp_path}/no/a.db", "open")]
    ):
        with Instance(url, f"key {number}", tmp_path, program=program) as instance:
            assert instance.wait() == 69
            assert why in (output := instance.said())
            assert "code 69" in output
            assert instance.work() == b""


def test_an_answer_in_doubt_ends_it_and_what_may_have_been_granted_is_given_back(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    """The database has granted it, and the answers to both attempts were lost."""
    url, program = pair
    with Instance(url, "key", tmp_path, program=failing("after:guard_acquire=error", program)) as instance:
        assert instance.wait() == 69
        assert "code 69" in instance.said()
        assert instance.work() == b""
    eventually(lambda: rows(url) == NONE, "it is given back, or expires")


@pytest.fixture
def clearing(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    """The lease 'key' and the gate 'door' of a dead predecessor, whose rows are just being deleted."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as broom:
        client.lease("key", ttl=60, auto_renew=False).acquire()
        client.gates.open("door", seconds=60, actor="jane", reason="why")
        query(postgres_url, "update holdfast.beat set expires_at = clock_timestamp()")
        broom.execute("delete from holdfast.lease")
        yield broom


def hindered(client: Any, broom: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the row be gone when it was asked for so long that a lease would have given up; when it was asked for."""
    for patient in (_GuardLease, GateLease):
        assert patient._busy_patience > 20 * Lease._busy_patience
        monkeypatch.setattr(patient, "_busy_patience", PATIENCE)
    asked: list[float] = []
    call = client._engine.call

    def timed(name: str, *given: Any, **others: Any) -> Any:
        if name in ("guard_acquire", "gate_acquire"):
            asked.append(now())
            if asked[-1] > asked[0] + 2 * Lease._busy_patience:
                broom.commit()
        return call(name, *given, **others)

    client._engine.call = timed
    return asked


@pytest.mark.parametrize("what", ["guard", "gate"])
def test_a_row_that_is_just_being_cleared_away_is_nobodys_lease(
    postgres_url: str, clearing: psycopg.Connection[Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.Client(postgres_url) as client:
        entered = client.guard("key", **LONG) if what == "guard" else client.gate("door", actor="joe", reason="why")
        asked = hindered(client, clearing, monkeypatch)
        with entered as grant:
            grant.check()
        assert asked[-1] > asked[0] + 2 * Lease._busy_patience


def test_one_that_stays_in_doubt_is_not_told_as_somebodys(
    postgres_url: str, clearing: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_GuardLease, "_busy_patience", 0.2)
    with holdfast.Client(postgres_url) as client, pytest.raises(SystemExit) as ended, client.guard("key", **LONG):
        pytest.fail("nothing runs")
    assert ended.value.code == 69
    assert not clearing.closed


def test_nor_is_it_for_a_command_that_is_run(
    postgres_url: str, clearing: psycopg.Connection[Any], tmp_path: Path
) -> None:
    patient = f"import importlib; importlib.import_module('holdfast.cli.run')._UNSETTLED_TIMEOUT = {PATIENCE}"
    asked = "select query_start from pg_stat_activity where datname = current_database() and query ~ 'guard_acquire'"
    moments: set[datetime] = set()

    def asks_for_long() -> bool:
        moments.update(
            moment for (moment,) in query(postgres_url, f"{asked} and application_name ~ '^holdfast:[^:]*:[0-9]+$'")
        )
        return bool(moments) and max(moments) - min(moments) > timedelta(seconds=10 * Lease._busy_patience)

    command = ("touch", str(tmp_path / "ran"))
    with Run(postgres_url, "--guard", name="key", command=command, before=patient) as run:
        eventually(asks_for_long, "it asks for longer than a lease would")
        clearing.commit()
        assert run.wait() == 0
    assert (tmp_path / "ran").exists()


def test_paused_between_the_grant_and_the_gate_it_does_nothing_when_it_goes_on(either: str, tmp_path: Path) -> None:
    """The timer is not armed yet: what counts is when the question was asked."""
    program = failing("after:guard_acquire=stop@1", GUARDED)
    with (
        holdfast.Client(either) as client,
        Instance(either, "key", tmp_path, program=program, ttl=0.5, renew_every=0.2) as instance,
    ):
        client.leases.list()  # the file is there
        eventually(lambda: rows(either)["lease"] == 1, "it is granted")
        with client.lease("key", timeout=PATIENCE):
            instance.signal(signal.SIGCONT)
            assert instance.wait() in (69, -signal.SIGKILL)
            assert instance.work() == b""


def test_a_client_that_fails_in_ways_nobody_thought_of_ends_it_too(either: str) -> None:
    client = holdfast.Client(either)
    client.close()
    with pytest.raises(SystemExit) as ended, client.guard("key", **LONG):
        pytest.fail("nothing runs")
    assert ended.value.code == 69


def test_the_owner_is_this_very_instance_and_the_key_is_as_given(connect: Any, either: str) -> None:
    client = connect(either)
    before = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGTERM)
    guard = client.guard("system:orchestrator:guard_lock", **LONG)
    with guard as grant:
        assert [each.name for each in client.leases.list()] == ["system:orchestrator:guard_lock"]
        host, pid, nonce = grant.holder.split(":")
        assert (host, pid) == (os.uname().nodename, str(os.getpid()))
        assert int(nonce, 16) >= 0
        with pytest.raises(SystemExit) as ended, client.guard("system:orchestrator:guard_lock", **LONG):
            pytest.fail("not even for ourselves")
        assert ended.value.code == 75
    assert client.leases.list() == []
    assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGTERM)) == before
    with guard as again:
        assert again.fence > grant.fence


@pytest.mark.parametrize(("ttl", "renew_every"), [(5, 5), (6, 5), (9.9, 5), (5, 10), (15, 0), (0, 0), (15, "5")])
def test_an_interval_above_half_of_the_ttl_is_refused(connect: Any, tmp_path: Path, ttl: Any, renew_every: Any) -> None:
    client = connect(f"sqlite:///{tmp_path / 'app.db'}")
    with pytest.raises((ValueError, TypeError), match=r"ttl|renew_every"):
        client.guard("key", ttl=ttl, renew_every=renew_every)
    assert list(tmp_path.iterdir()) == []


def test_a_wipe_on_start_happens_under_the_guard_and_not_without_it(either: str) -> None:
    with holdfast.Client(either) as client, holdfast.Client(either) as other:
        other.lease("left over", ttl=600, auto_renew=False).acquire()
        with other.guard("key", **LONG):
            with pytest.raises(SystemExit), client.guard("key", wipe_on_start=True, **LONG):
                pytest.fail("refused")
            assert [each.name for each in client.leases.list()] == ["key", "left over"]
        with client.guard("key", wipe_on_start=True, **LONG):
            assert [each.name for each in client.leases.list()] == ["key"]


def test_a_wipe_on_start_that_fails_is_the_end_and_the_guard_is_free(postgres_url: str, tmp_path: Path) -> None:
    program = GUARDED.replace('strict="strict" in flags', "wipe_on_start=True")
    query(postgres_url, "drop function holdfast.lease_wipe(text, uuid, text)")
    with Instance(postgres_url, "key", tmp_path, program=program) as instance:
        assert instance.wait() == 69
        assert instance.work() == b""
    assert rows(postgres_url)["lease"] == 0


WAITING = """
import sys, holdfast
with holdfast.Client(sys.argv[1]) as client:
    with client.guard("only", ttl=600, renew_every=100, timeout=float(sys.argv[2])) as grant:
        print("runs", grant.fence, flush=True)
        input()
"""
WAITING_ASYNC = """
import asyncio, sys, holdfast
async def main():
    async with holdfast.AsyncClient(sys.argv[1]) as client:
        async with client.guard("only", ttl=600, renew_every=100, timeout=float(sys.argv[2])) as grant:
            print("runs", grant.fence, flush=True)
            input()
asyncio.run(main())
"""
EITHER_FLAVOUR = pytest.mark.parametrize(
    ("engine", "program"), [("sqlite", WAITING), ("postgres", WAITING), ("postgres", WAITING_ASYNC)]
)


@EITHER_FLAVOUR
def test_with_a_timeout_it_waits_for_a_crashed_predecessor_to_expire(
    request: pytest.FixtureRequest, engine: str, program: str
) -> None:
    url = request.getfixturevalue(f"{engine}_url")
    with holdfast.Client(url) as client:
        crashed = client.lease("only", ttl=600, auto_renew=False).acquire()
        with Child(program, url, PATIENCE) as child:
            eventually(lambda: client.leases.list()[0].waiting == 1, "it waits")
            table = "holdfast_beat set expires_at = 0" if engine == "sqlite" else "holdfast.beat set expires_at = now()"
            query(url, f"update {table}")
            name, fence = child.line().split()
            assert (name, int(fence) > crashed.fence) == ("runs", True)
            child.say("end")
            child.expect("<end>")
            assert child.wait() == 0


@EITHER_FLAVOUR
def test_a_predecessor_that_lives_longer_than_the_timeout_refuses_it(
    request: pytest.FixtureRequest, engine: str, program: str
) -> None:
    url = request.getfixturevalue(f"{engine}_url")
    with holdfast.Client(url) as client, client.lease("only", ttl=600):
        with Child(program, url, 0.2) as child:
            child.expect("<end>")
            assert child.wait() == 75
        with Child(program, url, 600) as child:
            eventually(lambda: client.leases.list()[0].waiting == 1, "it waits")
            child.signal(signal.SIGTERM)
            child.expect("<end>")
            assert child.wait() == 128 + signal.SIGTERM


def test_a_wrong_timeout_is_refused(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client, pytest.raises(ValueError, match="timeout"):
        client.guard("only", timeout=-1)
