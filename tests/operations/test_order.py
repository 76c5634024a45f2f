"""The order in which the log is read: the same for everybody, whatever commits late, fails over or is restored."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import holdfast
from tests.children import query
from tests.conftest import MAJORS, NEWEST, migrated, server
from tests.operations.logs import change
from tests.pairs import EACH_ONCE


def fail() -> None:
    raise ValueError("broken")


def everything(client: Any, after: str | None = None, limit: int = 3) -> tuple[list[tuple[str, int]], str]:
    """All that can be read after a cursor, page by page: operation and number of each entry."""
    found: list[tuple[str, int]] = []
    while True:
        page = client.operations.read(after, limit=limit)
        found += [(entry.operation, entry.number) for entry in page.entries]
        after = page.cursor
        if not page.entries:
            return found, page.cursor


@EACH_ONCE
def test_the_log_is_read_in_an_order_that_stays(connect: Any, either: str) -> None:
    client = connect(either)
    for number in range(4):
        client.operation(f"n{number}").run(lambda: 1)
    first, cursor = everything(client)
    assert len(first) == client.operations.verify().entries
    client.operation("later").run(lambda: 1)
    more, _ = everything(client, cursor)
    assert {operation for operation, _ in more} == {client.operations.get("later").key}
    again, _ = everything(client, limit=500)
    assert again == first + more
    for wrong in ("x", "1/2", 7):
        with pytest.raises(ValueError, match="after must be the cursor"):
            client.operations.read(wrong)


def test_a_transaction_that_commits_late_is_not_overtaken(postgres_url: str) -> None:
    """Its entries have lower numbers than those that others have committed since: whoever followed the highest number
    would never see them. And of one operation, a later entry may be written by the older transaction."""
    with (
        holdfast.Client(postgres_url) as client,
        psycopg.connect(postgres_url) as old,
        psycopg.connect(postgres_url) as slow,
        psycopg.connect(postgres_url, autocommit=True) as quick,
    ):
        old.execute("select pg_current_xact_id()")  # it has its number now
        slow.execute("select pg_current_xact_id()")
        with pytest.raises(ValueError, match="broken"):
            client.operation("a", tx=quick).run(fail)
        client.operation("a", tx=old).run(lambda: "the older one")
        old.commit()
        client.operation("b").run(lambda: "quick")
        assert everything(client)[0] == [], "the slow one may come before all of it"
        client.operation("c", tx=slow).run(lambda: "slow")
        before, cursor = everything(client)
        slow.commit()
        found, _ = everything(client, cursor)
        labels = {client.operations.get(name).key: name for name in "abc"}  # type: ignore[union-attr]
        assert before == []
        told = [(labels[key], number) for key, number in found]
        assert [number for name, number in told if name == "a"] == list(range(1, 1 + sum(n == "a" for n, _ in told)))
        assert {name for name, _ in told} == {"a", "b", "c"}
        assert everything(client)[0] == found
        assert client.operations.verify().passed


def test_what_is_committed_can_be_read_at_once_also_where_nothing_else_happens(postgres_url: str) -> None:
    """A transaction may have its number long before it writes, and nobody may come after it."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url, autocommit=True) as mine:

        def work() -> None:
            mine.execute("select pg_current_xact_id()")
            query(postgres_url, "create table younger ()")

        client.operation("a", tx=mine).run(work)
        assert [number for _, number in everything(client)[0]] == [1, 2, 3, 4]


def test_a_rollback_finds_what_was_noted_whatever_else_is_under_way(postgres_url: str) -> None:
    """The order that stays leaves out what an old transaction might come before; a rollback must not."""

    def die(op: Any) -> None:
        op.checkpoint("draft", 42)
        raise KeyboardInterrupt

    noted: list[Any] = []
    with psycopg.connect(postgres_url) as old:
        old.execute("select pg_current_xact_id()")
        with holdfast.Client(postgres_url) as client, pytest.raises(KeyboardInterrupt):
            client.operation("a").run(die)
        with holdfast.Client(postgres_url) as client:
            client.operation("a", rollback=lambda op: noted.append(op.checkpoints)).run(lambda: 1)
    assert noted == [{"draft": 42}]


def test_after_a_restore_the_log_is_read_from_the_beginning_and_whole() -> None:
    """The numbers of transactions begin anew in another cluster: what was restored must not be hidden by them."""
    source, target = server(MAJORS[0]), server(NEWEST)
    if not (target.binaries.folder / "pg_dump").exists():
        pytest.skip("no pg_dump beside the server")
    url = migrated(source.database())
    with holdfast.Client(url) as client:
        client.operation("a").run(lambda: "before")
        change(url, "update {wal} set horizon = '1000000000'")  # an old cluster, with many transactions
        _, cursor = everything(client)
    dump = target.folder / "operations.sql"
    target.binaries.run("pg_dump", "--dbname", url, "--file", str(dump))
    restored = target.database()
    options = ("--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1")
    target.binaries.run("psql", *options, f"--dbname={restored}", f"--file={dump}")
    dump.unlink()
    with holdfast.Client(restored) as client:
        assert client.operation("a").run(fail).result == "before"
        client.operation("b").run(lambda: "after")
        with pytest.raises(holdfast.CursorExpired, match="from the beginning"):
            client.operations.read(cursor)
        found, _ = everything(client)
        assert len(found) == client.operations.verify().entries
        assert client.operations.verify().passed
