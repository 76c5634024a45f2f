"""What is refused is a read: it writes no WAL, waits for no disk, and an acquire waits for nobody who writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import holdfast
from holdfast import MatchVersion, MustCreate
from holdfast.testing import Postgres
from tests.conftest import migrated
from tests.raw_session import Raw, acquisition


def test_what_is_refused_writes_no_wal() -> None:
    """The server's own housekeeping may write a record meanwhile, but not in every round, as an acquire would."""
    with Postgres.create(settings={"autovacuum": "off"}) as postgres:
        url = migrated(postgres.database())
        holder, loser = Raw(url), Raw(url)
        holder.acquire("x", "holder")
        with holdfast.Client(url) as client:
            client.objects.put_if("box", "b-1", 1, MustCreate())
            old = MatchVersion(1)
            refused: dict[str, Callable[[], object]] = {
                "an acquire": lambda: loser.acquire("x", "loser"),
                "a creation": lambda: client.objects.put_if("box", "b-1", 2, MustCreate()),
                "a write": lambda: client.objects.put_if("box", "b-1", 2, old),
                "one of labels": lambda: client.objects.put_if("box", "b-1", 2, old, labels={}),
                "a deletion": lambda: client.objects.delete_if("box", "b-1", 1),
            }
            for what, ask in refused.items():
                written: list[int] = []
                while 0 not in written:
                    assert len(written) < 8, f"bytes of WAL by {what}: {written}"
                    written.append(_written(postgres, ask))
        holder.close()
        loser.close()


def _written(postgres: Postgres, ask: Callable[[], object]) -> int:
    [(before,)] = postgres.execute("select pg_current_wal_insert_lsn()")
    for _ in range(50):
        with suppress(holdfast.Conflict, holdfast.AlreadyExists):
            ask()  # what is not refused writes
    [(difference,)] = postgres.execute("select pg_current_wal_insert_lsn() - %s::pg_lsn", before)
    return int(difference)


def test_a_refused_acquire_leaves_the_file_and_its_log_as_they_are(sqlite_url: str) -> None:
    holder, loser = Raw(migrated(sqlite_url)), Raw(sqlite_url)
    holder.acquire("x", "holder")
    files = [Path(holder.database.target + suffix) for suffix in ("", "-wal")]
    before = [file.read_bytes() for file in files]
    for _ in range(20):
        assert loser.acquire("x", "loser")["status"] == "held"
    assert [file.read_bytes() for file in files] == before
    holder.close()
    loser.close()


def test_a_refused_acquire_waits_for_no_writer(sqlite_url: str) -> None:
    holder, loser = Raw(migrated(sqlite_url)), Raw(sqlite_url)
    holder.acquire("x", "holder")
    with closing(sqlite3.connect(holder.database.target, isolation_level=None)) as users:
        users.execute("begin immediate")
        assert loser.call("lease_acquire", timeout=20.0, **acquisition("x"))[0]["status"] == "held"
        users.execute("rollback")
    holder.close()
    loser.close()
