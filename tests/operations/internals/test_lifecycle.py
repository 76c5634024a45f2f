"""One lifecycle, whichever way an operation is run: what comes after what, and for how long it is locked."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from threading import Event
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import telemetry
from holdfast.runtime.clock import now
from holdfast.testing.operation_contract import name
from tests.children import PATIENCE, query
from tests.operations.policies import connected, key, runs


@pytest.mark.parametrize("way", ["outside", "own"])
def test_everything_comes_in_its_order_and_is_told_when_the_lock_is_free(either: str, way: str) -> None:
    dataset, steps = name(), list[tuple[str, bool]]()
    with holdfast.Client(either) as client, holdfast.Client(either) as other, connected(either) as mine:

        def is_free() -> bool:
            if way == "own" and either.startswith("sqlite"):  # its lock is that of the file
                with closing(sqlite3.connect(either.removeprefix("sqlite:///"), timeout=0)) as file:
                    try:
                        return file.execute("begin immediate") is not None
                    except sqlite3.OperationalError:
                        return False
            return bool(other.operation(key(dataset, name()), when_locked="skip").run(int).status == "success")

        def at(step: str) -> Any:
            return lambda: steps.append((step, is_free()))

        def hear(event: str, fields: Any) -> None:
            if event == "operation.ended" and fields["key"] == subject.digest:
                at("told")()

        def work(op: Any) -> str:
            at("done")()
            if way == "outside" and either.startswith("postgres"):
                locks = "select * from pg_locks where locktype = 'advisory' and (classid::bigint << 32) >> 48 <> 7846"
                assert query(either, locks) == [], "nothing but a lease, and the key of its owner"
            op.checkpoint("half way")
            return "done"

        subject = key(dataset)
        given = client.operation(
            subject,
            tx=mine if way == "own" else None,
            checks=holdfast.Checks(before=[at("before")], after=[at("after")]),
        )
        stop, asked_at = telemetry.listen(hear), now()
        try:
            assert given.run(work).result == "done"
        finally:
            stop()
        took = now() - asked_at
        assert steps == [("before", False), ("done", False), ("after", False), ("told", True)]
        begun = ["effect_started"] if way == "outside" else []  # in a transaction that is for nobody to see
        entries = client.operations.history(subject)
        assert [each.kind for each in entries] == [
            "lock_acquired", "claimed", "precondition", *begun, "checkpoint", "postcondition", "success",
            "lock_released",
        ]  # fmt: skip
        held = json.loads(entries[-1].detail)["held"]
        assert (entries[-2].at - entries[0].at) / 1e6 <= held <= took, "from the lock to its release"
        assert [each.type for each in client.relays.events(subject)] == ["START", "COMPLETE"]


@contextmanager
def silent(url: str, seconds: float) -> Iterator[None]:
    """From the start of the block on, the database executes no statement on operations for so long."""
    is_silent = Event()

    def hold(connection: Any, statement: str) -> None:
        connection.execute("begin")
        connection.execute(statement)
        is_silent.set()
        time.sleep(seconds)
        connection.rollback()

    def silence() -> None:
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as other:
                hold(other, "delete from holdfast_lock_name where false")
        else:
            with psycopg.connect(url, autocommit=True) as other:
                hold(other, "lock table holdfast.idempotency_log in access exclusive mode")

    with ThreadPoolExecutor(1) as pool:
        silence_end = pool.submit(silence)
        assert is_silent.wait(PATIENCE)
        yield
        silence_end.result(PATIENCE)


@pytest.mark.parametrize("way", ["outside", "own", "joined", "batch"])
def test_nothing_is_dated_later_than_the_clock_of_the_database(either: str, way: str) -> None:
    """However long the database was silent before it answered the first statement. An entry of the future would be left
    by ``archive(before=now)``."""
    subject = key(name())
    with holdfast.Client(either) as client, connected(either) as mine:
        client.operations.list()
        with silent(either, 0.5):
            if way == "batch":
                client.operations.run_many([subject], lambda _: 1)
            else:
                runs(way, mine)(client, subject, int)
            after = time.time() * 1e6 if either.startswith("sqlite") else query(either, CLOCK)[0][0]
        assert max(entry.at for entry in client.operations.history(subject)) <= after


CLOCK = "select extract(epoch from clock_timestamp()) * 1e6"


def test_outside_of_a_transaction_it_is_two_statements(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay is one. After replays a new operation is looked up first."""
    calls: list[str] = []
    with holdfast.Client(either) as client:
        call = client._engine.call

        def counted(statement: str, *given: Any, **more: Any) -> Any:
            calls.append(statement)
            return call(statement, *given, **more)

        monkeypatch.setattr(client._engine, "call", counted)
        for subject, expected in (
            ("a", ["operation_claim", "operation_finish"]),
            ("b", ["operation_claim", "operation_finish"]),
            ("a", ["operation_claim"]),
            ("b", ["operation_get"]),
            ("c", ["operation_get", "operation_claim", "operation_finish"]),
            ("d", ["operation_claim", "operation_finish"]),
        ):
            calls.clear()
            client.operation(subject).run(int)
            assert calls == expected
        assert client.leases.list() == []
