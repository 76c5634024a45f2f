"""The owner of an external operation is killed: that is known at once, long before its lease expires. And an owner that
loses its sessions, but lives, is never taken for dead."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.database.background import Background
from holdfast.lease.keeper import keeper_of
from holdfast.operations.terms import OperationTerms
from holdfast.testing.operation_contract import name, running
from holdfast.testing.proxy import Proxy
from tests.children import PATIENCE, Child, eventually, query
from tests.poor_postgres import poor_postgres

LONG = 600.0
"""The TTL: to wait for it instead takes ten minutes."""
HELD = (
    "holdfast.beat b join pg_locks l on l.classid::bigint << 32 | l.objid::bigint = b.session_key where l.objsubid = 1"
)
OWNER = """
import sys, time, holdfast
from concurrent.futures import ThreadPoolExecutor
url, dataset, *tasks = sys.argv[1:]
with holdfast.Client(url) as client:
    client.operations.register("undo", rollback=int)
    def own(number, task):
        def work():
            sys.stdout.write(f"begun {task}\\n")  # in one piece: print writes two
            sys.stdout.flush()
            time.sleep(600)
        key = holdfast.OperationKey(pipeline="etl", task=task, dataset=f"{dataset}-{task}", operation="load")
        options = holdfast.OperationOptions(sovereign=task == "sovereign")
        client.operation(key, rollback="undo", options=options, ttl=600 + number).run(work)  # each has its own beat
    with ThreadPoolExecutor(len(tasks)) as pool:
        list(pool.map(own, range(len(tasks)), tasks))
"""


def key(task: str, dataset: str, lock: str | None = None) -> Any:
    """``lock``: the task with which it shares a lock."""
    return holdfast.OperationKey(pipeline="etl", task=task, dataset=f"{dataset}-{lock or task}", operation="load")


def killed(url: str, dataset: str, *tasks: str) -> None:
    """Begin these operations in a process, and kill that. Its session has ended on return."""
    with Child(OWNER, url, dataset, *tasks) as owner:
        assert {owner.line() for _ in tasks} == {f"begun {task}" for task in tasks}
        owner.kill()
    if url.startswith("postgres"):
        eventually(lambda: not query(url, f"select 1 from {HELD} and b.pid = %s", owner.pid), "the server noticed it")


def connected(url: str) -> Any:
    if url.startswith("postgres"):
        return psycopg.connect(url, autocommit=True)
    return closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None))


@pytest.mark.parametrize("patient", ["wait", "backoff"])
def test_a_retry_goes_on_at_once_and_rolls_back_once(either: str, patient: Any) -> None:
    dataset, undone = name(), list[int]()
    with holdfast.Client(either) as client:
        client.operations.list()  # SQLite makes its tables
        for number in range(2):
            killed(either, dataset, str(number))
            operation = client.operation(
                key(str(number), dataset), rollback=lambda: undone.append(1), when_locked=patient, ttl=LONG
            )
            outcome = operation.run(lambda: 7)
            assert (outcome.result, outcome.attempt, len(undone)) == (7, 2, number + 1)


def test_whoever_asks_once_after_the_kill_finds_the_owner_gone(either: str) -> None:
    """Each task has a beat of its own, so each of these finds it out by itself."""
    dataset = name()
    tasks = ["get", "match", "skip", "fail", "transaction", "batch", "joined", "other lock", "reset", "sovereign"]
    is_postgres = either.startswith("postgres")
    with holdfast.Client(either) as client, client.read_only() as reader:
        client.operations.list()
        client.operations.register("undo", rollback=int)
        killed(either, dataset, *tasks, "a", "b")
        assert reader.operations.find(key("get", dataset)).status == "running"
        assert client.operations.find(key("get", dataset)).status == "partial"
        assert reader.operations.find(key("get", dataset)).status == "partial", "it has been recorded"
        [record] = client.operations.match(key("match", dataset).digest)
        assert record.status == "partial"
        for impatient in ("skip", "fail"):
            operation = client.operation(key(impatient, dataset), rollback=int, when_locked=impatient, ttl=LONG)
            assert operation.run(lambda: 7).result == 7
        operation = client.operation(key("mine", dataset, "other lock"), when_locked="skip", ttl=LONG)
        assert operation.run(lambda: 7).result == 7
        with connected(either) as mine:
            operation = client.operation(key("mine", dataset, "transaction"), tx=mine, when_locked="fail")
            assert operation.run(lambda: 7).result == 7
            operation = client.operation(key("mine", dataset, "joined"), tx=mine, when_locked="skip")

            def join() -> str:
                mine.execute("begin isolation level repeatable read" if is_postgres else "begin immediate")
                status = operation.run(lambda: 7).status
                mine.execute("commit")
                return status

            assert join() == "skipped", "its snapshot would not show it"
            eventually(lambda: join() == "success", "it is known to the next transaction")
        whole = holdfast.OperationOptions(sovereign=True)
        operation = client.operation(key("mine", dataset, "sovereign"), options=whole, ttl=LONG)
        assert operation.run(lambda: 7).result == 7, "it is not up for review"
        client.operations.reset(key("reset", dataset), actor="ops", reason="its process was killed")
        [outcome] = client.operations.run_many([key("batch", dataset)], lambda _: 7, rollback=int, when_locked="skip")
        assert outcome.result == 7
        killed(either, dataset, "c", "d")
        recovered = {(each.label, each.status) for each in client.operations.recover()}
        assert recovered >= {(key(task, dataset).label, "undone") for task in "abcd"}


def test_an_owner_is_declared_dead_only_if_its_key_is_free_twice(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client, running(postgres_url, unique := name(), ttl=LONG) as finish:
        [(beat, session_key)] = query(postgres_url, "select id, session_key from holdfast.beat")
        look = "select holdfast.beat_look(%s)"
        assert query(postgres_url, look, beat) == [(None,)], "the key is held"
        other = session_key ^ 1  # one that is free: as if the owner had lost its session at this moment
        query(postgres_url, "update holdfast.beat set session_key = %s", other)
        assert query(postgres_url, look, beat) == [(0.5,)]
        assert 0 < query(postgres_url, look, beat)[0][0] <= 0.5, "not at once"
        [secret] = [each.id for each in keeper_of(client._database)._beats]
        query(postgres_url, "select generation from holdfast.beat_renew(%s)", secret)
        assert query(postgres_url, look, beat) == [(0.5,)], "a heartbeat came between"
        past = "update holdfast.beat set unseen_at = unseen_at - interval '1 s', session_key = %s"
        query(postgres_url, past, session_key)
        assert query(postgres_url, look, beat) == [(None,)], "taken again, and the heartbeat is on its way"
        query(postgres_url, past, other)
        assert query(postgres_url, look, beat) == [(0.5,)], "it was held in between"
        query(postgres_url, past, other)
        with psycopg.connect(postgres_url) as another_look:
            another_look.execute("select pg_advisory_lock(%s)", [other])
            assert query(postgres_url, look, beat) == [(0.01,)], "not the owner has it"
        query(postgres_url, "update holdfast.beat set server_started = now() - interval '1 day'")
        assert query(postgres_url, look, beat) == [(None,)], "a restart of the server frees all keys"
        assert client.operations.get(unique).status == "running"  # type: ignore[union-attr]
        query(postgres_url, "update holdfast.beat set server_started = pg_postmaster_start_time()")
        assert query(postgres_url, look, beat) == [(0.0,)]
        assert query(postgres_url, look, beat) == [(None,)], "it is dead already"
        assert client.operations.get(unique).status == "partial"  # type: ignore[union-attr]
        with pytest.raises(holdfast.FencedOut):
            finish().result(PATIENCE)


def test_a_living_owner_takes_its_key_again(postgres_url: str) -> None:
    with Proxy(postgres_url) as proxy, holdfast.Client(proxy.url) as client:
        began, go_on = threading.Event(), threading.Event()
        background = keeper_of(client._engine.database).background

        def work(op: Any) -> str:
            began.set()
            while not go_on.wait(0.01):
                op.check()
            return "mine"

        def is_held() -> bool:
            held = f"select 1 from {HELD} and b.unseen_at is null and l.pid <> all(%s)"
            return query(postgres_url, held, lost) != []

        lost: list[int] = []
        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(lambda: client.operation("a", ttl=LONG).run(work))
            assert began.wait(PATIENCE)
            try:
                for _ in range(5):
                    lost += [pid for (pid,) in query(postgres_url, f"select l.pid from {HELD}")]
                    proxy.cut()
                    eventually(is_held, "the key is held by another session, long before the next heartbeat")
                eventually(lambda: background.has_owner_key, "the answer has arrived, too")
            finally:
                go_on.set()
            assert outcome.result(PATIENCE).attempt == 1


def test_a_key_that_cannot_be_locked_at_once_is_tried_again(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, failures = Background._lock_owner_key, [holdfast.Unreachable("at this moment"), holdfast.EngineError("again")]

    def fail_first(background: Background, session: Any) -> None:
        if failures:
            raise failures.pop()
        lock(background, session)

    monkeypatch.setattr(Background, "_lock_owner_key", fail_first)
    with holdfast.Client(postgres_url) as client, running(postgres_url, name()):
        background = keeper_of(client._engine.database).background
        assert query(postgres_url, "select session_key from holdfast.beat") == [(background.owner_key,)]


def test_the_key_stays_locked_while_a_claim_is_in_flight(postgres_url: str) -> None:
    """Others see the claim when it commits, maybe long before its answer arrives."""
    held = (
        "from pg_locks where locktype = 'advisory' and classid::bigint >> 16 = 7846 and granted"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    claiming = "select 1 from pg_stat_activity where query ~ 'operation_claim' and wait_event_type = 'Lock'"
    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url) as busy,
        ThreadPoolExecutor(1) as pool,
    ):
        busy.execute("lock table holdfast.lease in access exclusive mode")
        claim = pool.submit(client.operation("a", ttl=LONG).run, int)
        eventually(lambda: query(postgres_url, claiming), "the claim waits")
        assert keeper_of(client._engine.database).needs_session(), "it is not closed as idle"
        [(pid,)] = query(postgres_url, f"select pid {held}")
        query(postgres_url, "select pg_terminate_backend(%s)", pid)
        eventually(lambda: query(postgres_url, f"select 1 {held} and pid <> %s", pid), "another session has taken it")
        busy.rollback()
        claim.exception(PATIENCE)


def test_without_sessions_the_ttl_decides_and_the_default_timeout_outlasts_it() -> None:
    url = poor_postgres()
    with holdfast.Client(url) as client, running(url, unique := name()):
        owner = "select owner from holdfast.idempotency_log where label = %s"
        beat = f"select beat from holdfast.lease where name = ({owner})"
        assert query(url, f"select session_key from holdfast.beat where id = ({beat})", unique) == [(None,)]
        assert client.operations.get(unique).status == "running"  # type: ignore[union-attr]
    for ttl in (0.05, 30.0, 86400.0):
        for tx in (None, object()):  # a transaction waits for an owner without one as well
            terms: Any = client.operation("a", ttl=ttl, tx=tx)._spec().terms
            assert isinstance(terms, OperationTerms)
            assert terms.timeout > ttl
