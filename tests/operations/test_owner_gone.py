"""The owner of an external operation is killed: that is known at once, long before its lease expires. And an owner that
loses its sessions, but lives, is never taken for dead."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

import holdfast
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
url, task, dataset = sys.argv[1:]
with holdfast.Client(url) as client:
    def work():
        print("begun", flush=True)
        time.sleep(600)
    key = holdfast.OperationKey(pipeline="etl", task=task, dataset=dataset, operation="load")
    client.operation(key, rollback=int, ttl=600).run(work)
"""


def key(task: str, dataset: str) -> Any:
    return holdfast.OperationKey(pipeline="etl", task=task, dataset=dataset, operation="load")


@pytest.mark.parametrize("patient", ["wait", "backoff"])
def test_a_retry_goes_on_at_once_and_rolls_back_once(either: str, patient: Any) -> None:
    dataset, undone = name(), list[int]()
    with holdfast.Client(either) as client:
        client.operations.list()  # SQLite makes its tables
        for number in range(3):
            with Child(OWNER, either, str(number), dataset) as owner:
                owner.expect("begun")
                record = client.operations.get(key(str(number), dataset))
                assert record is not None
                assert record.status == "running"
                owner.kill()
            operation = client.operation(
                key(str(number), dataset), rollback=lambda: undone.append(1), when_locked=patient, ttl=LONG
            )
            outcome = operation.run(lambda: 7)
            assert (outcome.result, outcome.attempt, len(undone)) == (7, 2, number + 1)


def test_its_status_is_partial_as_soon_as_that_is_known(either: str) -> None:
    dataset = name()
    with holdfast.Client(either) as client, client.read_only() as reader:
        client.operations.list()
        with Child(OWNER, either, "a", dataset) as owner:
            owner.expect("begun")
            assert reader.operations.find(key("a", dataset)).status == "running"
            owner.kill()
        eventually(lambda: client.operations.get(key("a", dataset)).status == "partial", "it is known")  # type: ignore[union-attr]
        [record] = client.operations.list(status="partial")
        assert record.label == key("a", dataset).label
        assert reader.operations.find(key("a", dataset)).status == "partial", "it has been recorded"


@pytest.mark.parametrize("way", ["lease", "transaction"])
def test_another_operation_with_its_lock_goes_on_at_once(either: str, way: str) -> None:
    dataset = name()
    with holdfast.Client(either) as client:
        client.operations.list()
        with Child(OWNER, either, "a", dataset) as owner:
            owner.expect("begun")
            owner.kill()
        if way == "lease":
            assert client.operation(key("b", dataset), ttl=LONG).run(lambda: 7).result == 7
        elif either.startswith("postgres"):
            with psycopg.connect(either, autocommit=True) as mine:
                assert client.operation(key("b", dataset), tx=mine, timeout=LONG).run(lambda: 7).result == 7


def test_an_owner_is_declared_dead_only_if_its_key_is_free_twice(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client, running(postgres_url, unique := name(), ttl=LONG) as finish:
        [(beat, session_key)] = query(postgres_url, "select id, session_key from holdfast.beat")
        look = "select holdfast.beat_look(%s)"
        assert query(postgres_url, look, beat) == [(None,)], "the key is held"
        other = session_key ^ 1  # one that is free: as if the owner had lost its session at this moment
        query(postgres_url, "update holdfast.beat set session_key = %s", other)
        assert query(postgres_url, look, beat) == [(0.5,)]
        assert 0 < query(postgres_url, look, beat)[0][0] <= 0.5, "not at once"
        query(postgres_url, "select generation from holdfast.beat_renew(%s)", beat)
        assert query(postgres_url, look, beat) == [(0.5,)], "a heartbeat came between"
        past = "update holdfast.beat set unseen_at = unseen_at - interval '1 s', session_key = %s"
        query(postgres_url, past, session_key)
        assert query(postgres_url, look, beat) == [(None,)], "taken again, and the heartbeat is on its way"
        query(postgres_url, past, other)
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
            held = f"select 1 from {HELD}"
            return query(postgres_url, f"{held} and b.unseen_at is null and l.pid <> %s", lost) != []

        lost = 0
        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(lambda: client.operation("a", ttl=LONG).run(work))
            assert began.wait(PATIENCE)
            for _ in range(5):
                [(lost,)] = query(postgres_url, f"select l.pid from {HELD}")
                proxy.cut()
                eventually(is_held, "the key is held by another session, long before the next heartbeat")
            assert background.has_owner_key
            go_on.set()
            assert outcome.result(PATIENCE).attempt == 1


@pytest.mark.realtime
def test_two_hundred_resets_of_a_living_owner_let_nobody_in(postgres_url: str) -> None:
    undone: list[int] = []
    with (
        Proxy(postgres_url) as proxy,
        holdfast.Client(proxy.url) as client,
        holdfast.Client(postgres_url) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        began, go_on = threading.Event(), threading.Event()

        def work() -> str:
            began.set()
            assert go_on.wait(LONG)
            return "mine"

        first = pool.submit(lambda: client.operation("a").run(work))
        assert began.wait(PATIENCE)
        second = pool.submit(lambda: other.operation("a", rollback=lambda: undone.append(1), timeout=LONG).run(str))
        for number in range(200):
            proxy.cut()
            go_on.wait(0.02 * (number % 7))
        assert not second.done()
        go_on.set()
        assert (first.result(PATIENCE).attempt, second.result(PATIENCE).result, undone) == (1, "mine", [])


def test_without_sessions_the_ttl_decides_and_the_default_timeout_outlasts_it() -> None:
    url = poor_postgres()
    with holdfast.Client(url) as client, running(url, unique := name()):
        owner = "select owner from holdfast.idempotency_log where label = %s"
        beat = f"select beat from holdfast.lease where name = ({owner})"
        assert query(url, f"select session_key from holdfast.beat where id = ({beat})", unique) == [(None,)]
        assert client.operations.get(unique).status == "running"  # type: ignore[union-attr]
    for ttl in (0.05, 30.0, 86400.0):
        terms: Any = client.operation("a", ttl=ttl)._spec().terms
        assert isinstance(terms, OperationTerms)
        assert terms.timeout > ttl
