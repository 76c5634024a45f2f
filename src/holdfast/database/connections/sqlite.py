# Generated from sqlite_async.py by scripts/unasync.py. Do not edit.
"""A connection of sqlite3, in any of its transaction modes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

from holdfast.database.connections.placeholders import ENDED
from holdfast.database.sessions import Row
from holdfast.database.sqlite_calls import find, with_hashes
from holdfast.database.statements import statements
from holdfast.database.url import Database
from holdfast.runtime.clock import jitter, now
from holdfast.runtime.concurrency import BLOCKS, sleep


def check_file(database: Database, listing: Sequence[Sequence[Any]], what: str) -> None:
    path = next((row[2] for row in listing if row[1] == "main"), None)
    if not path or not os.path.samefile(path, database.target):
        raise ValueError(
            f"the connection is to {path or 'a database in memory'} and {what} in {database}: "
            "only a transaction in the same file will do"
        )


class Sqlite3:
    def __init__(self, database: Database, connection: sqlite3.Connection, what: str) -> None:
        if database.dialect != "sqlite":
            raise ValueError(f"{what} in {database}: a transaction of SQLite cannot be used with it")
        self._connection = connection
        self._statements = statements("sqlite", database.schema)
        check_file(database, self._execute("pragma database_list", {})[0], what)

    def in_transaction(self) -> bool:
        return (
            self._connection.in_transaction and _autocommit(self._connection) is not False
        )  # with autocommit=False a transaction is always open

    def is_idle(self) -> bool:
        return not self._connection.in_transaction

    def begins_by_itself(self) -> bool:
        autocommit = _autocommit(self._connection)
        return self._connection.isolation_level is not None if autocommit is None else not autocommit

    def begin(self) -> SqliteTransaction:
        return SqliteTransaction(self._connection)

    @contextmanager
    def nested(self) -> Iterator[None]:
        self._execute("savepoint holdfast", {})
        try:
            yield
        except BaseException:
            self._execute("rollback to holdfast", {})
            raise
        finally:
            self._execute("release holdfast", {})

    def open(self) -> None:
        SqliteTransaction(self._connection).__enter__()

    def rollback(self) -> None:
        self._connection.rollback()

    def flush(self) -> None: ...

    def mark(self) -> None:
        """A savepoint ends with its transaction, however that ends: commit(), ``with conn``, executescript()."""
        self._execute("savepoint holdfast_block", {})

    def broken(self) -> str | None:
        try:
            self._execute("release holdfast_block", {})
        except sqlite3.OperationalError:
            return ENDED
        return None

    def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        rows, _ = self._execute(self._statements[statement].sql, with_hashes(parameters))
        return rows[0][0] if rows else None

    def write(self, statement: str, parameters: dict[str, Any]) -> Row:
        rows = find(statement, self._statements).perform(self._run, with_hashes(parameters))
        return rows[0] if rows else {}

    def _run(self, statement: str, /, **parameters: Any) -> list[Row]:
        rows, names = self._execute(self._statements[statement].sql, parameters)
        return [dict(zip(names, row, strict=True)) for row in rows] if rows else rows

    def _execute(self, sql: str, parameters: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
        """The rows and their column names, independent of the user's row and text factories."""
        cursor, texts = self._connection.cursor(), self._connection.text_factory
        cursor.row_factory = None
        self._connection.text_factory = str
        try:
            rows = cursor.execute(sql, parameters).fetchall()
        finally:
            self._connection.text_factory = texts
        return rows, [column[0] for column in cursor.description or ()]


def _autocommit(connection: sqlite3.Connection) -> bool | None:
    """None when isolation_level decides: before Python 3.12, and by default."""
    mode = getattr(connection, "autocommit", -1)
    return None if mode == -1 else bool(mode)


class SqliteTransaction:
    """BEGIN IMMEDIATE … COMMIT, in any of sqlite3's transaction modes."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        if self._connection.in_transaction:
            return
        if BLOCKS:
            self._connection.execute("begin immediate")
        else:
            self._begin()

    def _begin(self) -> None:
        """Wait for as long as SQLite itself would, without blocking the loop: the holder of the file may need it."""
        cursor = self._connection.cursor()
        cursor.row_factory = None
        [limit] = cursor.execute("pragma busy_timeout").fetchone()
        until, pause = now() + limit / 1000, 0.001
        cursor.execute("pragma busy_timeout = 0")
        try:
            while True:
                try:
                    cursor.execute("begin immediate")
                    return
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or now() + pause > until:
                        raise
                sleep(jitter(0.5 * pause, 1.5 * pause))
                pause = min(pause * 2, 0.02)
        finally:
            cursor.execute(f"pragma busy_timeout = {limit}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self._end("commit")
                return
            except BaseException:  # e.g. a deferred constraint: SQLite leaves the transaction open
                self._end("rollback")
                raise
        self._end("rollback")

    def _end(self, how: Literal["commit", "rollback"]) -> None:
        if _autocommit(self._connection):
            self._connection.execute(how)  # in autocommit mode the methods do nothing
        else:
            getattr(self._connection, how)()
