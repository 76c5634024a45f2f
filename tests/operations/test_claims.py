"""Who may begin: locks that a transaction has, files that somebody writes, snapshots that are too old, connections that
are none of the usual."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

import holdfast
from holdfast.testing.operation_contract import LONG, gives_up, running
from tests.conftest import server
from tests.user_connections import ask


def key(task: str, **more: Any) -> holdfast.OperationKey:
    return holdfast.OperationKey(pipeline="etl", task=task, dataset="parcels", operation="load", **more)


def test_the_first_thing_that_a_client_does_may_be_a_transaction(tmp_path: Path) -> None:
    """The tables are made where that is ours to do, and else it is said how to: whatever connection it is on."""
    path = tmp_path / "new.db"
    with holdfast.Client(f"sqlite:///{path}") as client, closing(sqlite3.connect(path)) as mine:
        assert client.operation("k", tx=mine).run(lambda: 7).result == 7
    with holdfast.Client(empty := server().database()) as client, psycopg.connect(empty) as mine:
        for begun in (False, True):
            with pytest.raises(holdfast.SchemaMismatch, match="holdfast migrate"):
                client.operation("k", tx=mine).run(int)
            assert mine.info.transaction_status == (TransactionStatus.INTRANS if begun else TransactionStatus.IDLE)
            mine.execute("select 1")


def test_nobody_waits_in_the_server_for_a_lock_that_a_transaction_has(postgres_url: str) -> None:
    """Not even those who wait: they ask again, and keep no session from doing something else."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as holds, holds.transaction():
        client.operation(key("first"), tx=holds).run(int)
        limited = f"{postgres_url}?options=-c%20lock_timeout%3D60s"  # to wait in the server is an error then
        with holdfast.Client(limited) as other, psycopg.connect(limited) as mine:
            for tx in (None, mine, mine):
                assert other.operation(key("second"), tx=tx, when_locked="skip").run(int).status == "skipped"
                waiter = other.operation(key("second"), tx=tx, timeout=0.1)
                gives_up(partial(waiter.run, int), after=0.1)
                mine.execute("select 1")  # the third time, the transaction is joined
            with pytest.raises(
                holdfast.OperationInProgress, match="it is already running, or another operation has its lock"
            ):
                other.operations.run_many([key("third")], int, when_locked="fail")


def test_a_pipeline_of_a_connection_that_commits_by_itself_is_no_different(postgres_url: str) -> None:
    ask(postgres_url, "create table work (what int)")
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url, autocommit=True) as mine:

        def work() -> str:
            mine.execute("insert into work values (1)")
            return "done"

        with mine.pipeline():
            for replayed in (False, True):
                outcome = client.operation("own", tx=mine).run(work)
                assert (outcome.replayed, outcome.committed) == (replayed, True)
            with mine.transaction() as block:
                assert not client.operation("joined", tx=mine).run(work).committed, "that is for the block to do"
                raise psycopg.Rollback(block)
        assert [each.label for each in client.operations.list()] == ["own"]
    assert ask(postgres_url, "select what from work") == [(1,)]


def test_a_transaction_that_would_not_see_the_result_does_not_wait_for_it(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as mine, running(postgres_url, "k"):
        mine.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        mine.execute("select 1")
        with pytest.raises(holdfast.OperationInProgress, match="would not show its result: roll back and try again"):
            client.operation("k", tx=mine, timeout=LONG).run(int)


def test_a_key_whose_shards_were_changed_is_the_same_key(postgres_url: str) -> None:
    """It has another lock then, and the log alone tells the two apart."""
    ask(postgres_url, "create table work (what text)")
    old, new = key("load"), key("load", shards=16)
    assert (old, old.lock_key == new.lock_key) == (new, False)
    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url, autocommit=True) as mine,
        psycopg.connect(postgres_url, autocommit=True) as theirs,
    ):

        def work(connection: Any, what: str) -> str:
            connection.execute("insert into work values (%s)", [what])
            return what

        def slow() -> str:
            client.operation(new, tx=theirs).run(work, theirs, "new")
            return work(mine, "old")

        assert client.operation(old, tx=mine).run(slow).result == "new"
        assert ask(postgres_url, "select what from work") == [("new",)]
        client.operations.reset(old, actor="jane", reason="again")
        with running(postgres_url, old) as finish:
            assert client.operation(new, when_locked="skip").run(int).status == "skipped"
            finish()
        assert client.operation(new).run(str).result == "theirs"
        assert client.operations.verify().problems == ()


def test_a_file_that_somebody_else_writes_is_no_place_to_begin(sqlite_url: str, tmp_path: Path) -> None:
    """Found out at the claim, and not when the function has done its work for nothing."""
    called: list[int] = []
    with holdfast.Client(sqlite_url) as client, closing(sqlite3.connect(tmp_path / "app.db")) as theirs:
        client.operations.list()
        theirs.execute("begin immediate")
        with closing(sqlite3.connect(tmp_path / "app.db", timeout=0)) as mine:
            mine.execute("begin")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                client.operation("k", tx=mine).run(lambda: called.append(1))
        assert called == []
