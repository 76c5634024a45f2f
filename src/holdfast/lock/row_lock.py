# Generated from row_lock_async.py by scripts/unasync.py. Do not edit.
"""A row of the user's own, locked in the user's own transaction, at once or not at all.

Runs on whatever connection it is given, never commits and never opens one. On PostgreSQL it is FOR UPDATE NOWAIT in a
savepoint, because the refusal would otherwise take the user's transaction with it. SQLite has one writer a file: there
another writer has the whole file, from its first write to its commit.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from holdfast.database import driver_errors as drivers
from holdfast.database.connections.connection import adapter_for
from holdfast.database.connections.sqlalchemy import subject_of
from holdfast.lock.row_key import RowKey, quoted

_TAKEN = "55P03"
_SAVEPOINT = "holdfast_row_lock"
_BUSY, _STALE = 5, 517
Row = dict[str, Any]


def row_lock(connection: Any, row: RowKey) -> Row | None:
    kind: Any = type(connection)
    lock = adapter_for(kind, _ADAPTERS)
    if lock is None:
        raise TypeError(
            f"cannot lock a row with a {kind.__module__}.{kind.__qualname__}: give a connection of psycopg, a "
            "connection or session of SQLAlchemy, or a sqlite3.Connection"
        )
    locked: Row | None = lock(connection, row)
    return locked


def _psycopg(connection: Any, row: RowKey) -> Row | None:
    from psycopg import Cursor, sql
    from psycopg.rows import dict_row

    if connection.autocommit and connection.info.transaction_status.name == "IDLE":
        raise _no_transaction("with conn.transaction()")
    if connection.pgconn.pipeline_status != 0:
        raise ValueError("a row cannot be locked in pipeline mode, where one refusal ends all that comes after it")
    table, *columns = (
        sql.Identifier(*(name.replace("%", "%%") for name in names))  # else it reads as a place for a value
        for names in (row.table, *((column,) for column in row.columns))
    )
    where = sql.SQL(" and ").join(sql.SQL("{} = %s").format(column) for column in columns)
    query = sql.SQL("select * from {} where {} limit 2 for update nowait").format(table, where)
    with Cursor(connection, row_factory=dict_row) as cursor:  # whatever the user's factory makes
        cursor.execute(f"savepoint {_SAVEPOINT}")
        try:
            cursor.execute(query, row.values, prepare=False)  # else it fails when the table gets another column
            locked = row.only(cursor.fetchall())
        except Exception as error:
            if not connection.closed:
                cursor.execute(f"rollback to savepoint {_SAVEPOINT}")
                cursor.execute(f"release savepoint {_SAVEPOINT}")
            if drivers.sqlstate(error) != _TAKEN:
                raise
            return None
        cursor.execute(f"release savepoint {_SAVEPOINT}")
        return locked


def _sqlalchemy(connection: Any, row: RowKey) -> Row | None:
    from sqlalchemy import column, literal_column, select, table
    from sqlalchemy.sql import quoted_name

    connection = subject_of(connection)
    if hasattr(connection, "get_bind"):
        connection = connection.connection()
    if drivers.dialect_of(connection) == "sqlite":
        return _in_file(_SqlAlchemyFile(connection), row)
    if drivers.autocommits(connection):
        raise _no_transaction("an isolation level other than AUTOCOMMIT")
    *schema, name = (quoted_name(part, quote=True) for part in row.table)
    query: Any = select(literal_column("*")).select_from(table(name, schema=schema[0] if schema else None))
    for key, value in zip(row.columns, row.values, strict=True):
        query = query.where(column(quoted_name(key, quote=True)) == value)
    try:
        with connection.begin_nested():
            result = connection.execute(query.limit(2).with_for_update(nowait=True))
            return row.only([dict(each) for each in result.mappings()])
    except Exception as error:
        if drivers.sqlstate(error) != _TAKEN:
            raise
        return None


def _sqlite3(connection: sqlite3.Connection, row: RowKey) -> Row | None:
    return _in_file(_SqliteFile(connection), row)


def _in_file(file: Any, row: RowKey) -> Row | None:
    """Become the writer, without waiting for another one; then the row is read as it is now. A column is named with its
    table, for SQLite takes a name in quotes that it does not know for a text."""
    name = quoted(*row.table)
    where = " and ".join(f"{quoted(*row.table, each)} = ?" for each in row.columns)
    [(patience,)] = (file.ask("pragma busy_timeout"))[1]
    file.ask("pragma busy_timeout = 0")
    begins = not file.in_transaction()
    try:
        if begins:
            file.ask("begin immediate")
        else:
            file.ask(f"delete from {name} where false")  # a write that writes nothing
    except Exception as error:
        if not _somebody_writes(error):
            raise
        return None
    finally:
        file.ask(f"pragma busy_timeout = {int(patience)}")
    try:
        columns, rows = file.ask(f"select * from {name} where {where} limit 2", row.values)
        return row.only([dict(zip(columns, each, strict=True)) for each in rows])
    except Exception:
        if begins:  # its caller does not know of the transaction
            file.ask("rollback")
        raise


class _SqliteFile:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        autocommit = getattr(connection, "autocommit", -1)  # from Python 3.12 on; -1: isolation_level decides
        begins = connection.isolation_level is not None if autocommit == -1 else not autocommit
        if not connection.in_transaction and not begins:
            raise _no_transaction("conn.execute('begin')")

    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def ask(self, sql: str, values: tuple[Any, ...] = ()) -> tuple[list[str], list[Any]]:
        cursor = self._connection.cursor()
        cursor.row_factory = None  # whatever the user's makes
        cursor.execute(sql, values)
        return [each[0] for each in cursor.description or ()], cursor.fetchall()


class _SqlAlchemyFile:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def in_transaction(self) -> bool:
        return not drivers.autocommits(self._connection)

    def ask(self, sql: str, values: tuple[Any, ...] = ()) -> tuple[list[str], list[Any]]:
        result = self._connection.exec_driver_sql(sql, values)
        return (list(result.keys()), list(result.fetchall())) if result.returns_rows else ([], [])


def _somebody_writes(error: BaseException) -> bool:
    """Not when they have committed since our transaction first read: that one can never write, and must begin anew."""
    code = getattr(getattr(error, "orig", error), "sqlite_errorcode", None)
    return code is not None and code & 0xFF == _BUSY and code != _STALE


def _no_transaction(remedy: str) -> ValueError:
    return ValueError(
        f"no transaction is open on this connection, so there is nothing the lock could live in: use {remedy}"
    )


_ADAPTERS: dict[tuple[str, str], Any] = {
    ("psycopg", "Connection"): _psycopg,
    ("sqlite3", "Connection"): _sqlite3,
    ("sqlalchemy", "Connection"): _sqlalchemy,
    ("sqlalchemy", "Session"): _sqlalchemy,
    ("sqlalchemy", "scoped_session"): _sqlalchemy,
}
