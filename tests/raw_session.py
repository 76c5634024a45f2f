"""SQL statements of holdfast on one session, without the client's heartbeats, retries and waiting."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg

from holdfast.database.sessions import open_session
from holdfast.database.url import parse
from tests.children import PATIENCE

Row = dict[str, Any]


def trials(number: int) -> int:
    """``number`` times the variable HOLDFAST_TRIALS."""
    return int(number * float(os.environ.get("HOLDFAST_TRIALS", "1")))


def acquisition(name: str, holder: str = "somebody", **others: Any) -> Row:
    """The parameters of an acquire: by default of a lease with its own beat."""
    return {
        "name": name,
        "holder": holder,
        "ttl": 30.0,
        "token": str(uuid4()),
        "beat": None,
        "reenter": None,
        "at_least": 0.0,
        "solo": others.get("beat") is None,
        "session_key": None,
        "process": {"label": holder, "host": "here", "pid": 1},
    } | others


@contextmanager
def locked(url: str) -> Iterator[psycopg.Connection[Any]]:
    """Lock the table of leases during the block: every acquire waits."""
    with psycopg.connect(url) as connection:
        connection.execute("lock table holdfast.lease in access exclusive mode")
        yield connection


def waiters(connection: psycopg.Connection[Any]) -> int:
    """Statements in this database that wait for a lock."""
    connection.execute("select pg_stat_clear_snapshot()")  # in a transaction the statistics are cached
    query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    [count] = connection.execute(query).fetchone() or (0,)
    return int(count)


class Raw:
    """One session."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url, self.database = url, parse(url, **options)
        self.session: Any = open_session(self.database, PATIENCE)
        self.sqlite = self.database.dialect == "sqlite"
        self.prefix = f"{self.database.schema}{'_' if self.sqlite else '.'}"
        self._reader: Any = None

    def call(self, statement: str, *, timeout: float = PATIENCE, **parameters: Any) -> list[Row]:
        rows: list[Row] = self.session.call(statement, parameters, timeout)
        return rows

    def acquire(self, name: str, holder: str = "somebody", **others: Any) -> Row:
        """The answer, with the token and the beat that it was asked for with, unless it was refused."""
        asked = acquisition(name, holder, **others)
        if asked["process"] is not None:
            asked["beat"] = asked["beat"] or str(uuid4())
        [row] = self.call("lease_acquire", **asked)
        return row | {secret: None if row["fence"] is None else asked[secret] for secret in ("token", "beat")}

    def done(self, statement: str, **parameters: Any) -> bool:
        return bool(self.call(statement, **parameters)[0]["done"])

    def renew(self, name: str, token: str) -> bool:
        return self.done("lease_renew", name=name, token=token)

    def release(self, name: str, token: str) -> bool:
        return self.done("lease_release", name=name, token=token)

    def force(self, name: str) -> bool:
        return self.done("lease_force_release", name=name, actor="operator", reason="test")

    def history(self, name: str | None = None) -> list[Row]:
        return self.call("lease_history", name=name, limit=10_000)

    def run(self, text: str) -> None:
        self.session.script(text.replace("holdfast.", self.prefix), PATIENCE)

    def pass_time(self, seconds: float) -> None:
        """Make all leases older by ``seconds``."""
        shift = f"- {seconds}" if self.sqlite else f"- interval '{seconds} seconds'"
        self.run(
            f"update holdfast.beat set expires_at = expires_at {shift};\n"
            f"update holdfast.lease set acquired_at = acquired_at {shift}, keep_until = keep_until {shift};\n"
        )

    def clear(self) -> None:
        self.run("delete from holdfast.lease;\ndelete from holdfast.beat;\ndelete from holdfast.history;\n")

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        """All rows of a table, read on another connection."""
        if self._reader is None and self.sqlite:
            self._reader = sqlite3.connect(self.database.target, isolation_level=None)
        elif self._reader is None:
            self._reader = psycopg.connect(self.url, autocommit=True)
        rows: list[tuple[Any, ...]] = self._reader.execute(f"select * from {self.prefix}{table} order by 1").fetchall()
        return rows

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self.session.close()
