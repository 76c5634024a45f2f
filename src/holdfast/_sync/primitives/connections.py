# Generated from _async/primitives/connections.py by scripts/unasync.py. Do not edit.
"""The user's own connection, whatever driver it belongs to: the little that protecting a transaction, or writing in it,
needs of it.

Drivers are recognised by name, so that none is imported that the user has not imported already.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any, Protocol

from holdfast._wire import Row, drivers
from holdfast._wire.clock import jitter, now
from holdfast._wire.database import Database
from holdfast._wire.waiting import BLOCKS, sleep
from holdfast.core.errors import Unanswered
from holdfast.sql import statements

AUTOCOMMIT = "this connection is in autocommit mode, and no transaction is open on it: begin one, or leave tx away"

_IDLE, _ACTIVE, _IN_TRANSACTION = 0, 1, (2, 3)
"""As libpq numbers them: in no transaction; busy; in a transaction that is sound, or has failed."""


class Connection(Protocol):
    def in_transaction(self) -> bool: ...

    def begins_by_itself(self) -> bool:
        """Does the next statement open a transaction, if none is open?"""

    def begin(self) -> AbstractContextManager[Any]:
        """A transaction around a block, committed at its end."""

    def nested(self) -> AbstractContextManager[Any]:
        """A savepoint around a block, in the transaction that is open: what fails in it leaves nothing there."""

    def mark(self) -> None:
        """From here on the transaction must stay the one it is."""

    def unbroken(self) -> bool:
        """Whether it has, as far as can be known without asking the server."""

    def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        """Run a protecting statement in the open transaction; None when it found nothing to protect."""

    def write(self, statement: str, parameters: dict[str, Any]) -> Row:
        """Run a statement that writes and answers with one row, in the open transaction."""


def recognise(database: Database, connection: Any, what: str = "the lease is") -> Connection:
    """``what`` is in the database, for the message when the connection is to another one."""
    kind: Any = type(connection)
    found: Connection = _adapter(kind)(database, connection, what)
    return found


@lru_cache
def _adapter(kind: type) -> Any:
    for ancestor in kind.__mro__:
        adapter = _ADAPTERS.get((ancestor.__module__.partition(".")[0], ancestor.__name__))
        if adapter is not None:
            return adapter
    raise TypeError(
        f"cannot use the transaction of a {kind.__module__}.{kind.__qualname__}: give a Connection of psycopg, "
        "a Connection or Session of SQLAlchemy, or a sqlite3.Connection"
    )


def _sql(database: Database, name: str, style: str) -> str:
    """The statement with its parameters as the driver writes them."""
    return _scripts(database, name, style)[0]


@lru_cache
def _scripts(database: Database, name: str, style: str) -> list[str]:
    """The same of one that takes several steps, of which the first that answers has done it."""
    statement = statements(database.dialect, database.schema)[name]
    found = [step.sql for step in statement.steps]
    for number, parameter in reversed(list(enumerate(statement.parameters, 1))):  # or $1 would be found in $10
        found = [sql.replace(f"${number}", style.format(parameter)) for sql in found]
    return found


@contextmanager
def commit_known(connection: Any) -> Iterator[None]:
    """A commit whose wait for the synchronous standby was cancelled is answered as a success, with a warning."""
    doubts: list[str] = []

    def hear(notice: Any) -> None:
        if notice.source_function == "SyncRepWaitForLSN":
            doubts.append(notice.message_primary)

    connection.add_notice_handler(hear)
    try:
        yield
    finally:
        connection.remove_notice_handler(hear)
    if doubts:
        raise Unanswered(f"the transaction was committed here alone, and may be lost with this server: {doubts[0]}")


@contextmanager
def _encodable() -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{error.object!r:.200} has a letter that the encoding of this connection, {error.encoding}, lacks: "
            "SET client_encoding TO 'UTF8'"
        ) from error


class Psycopg:
    def __init__(self, database: Database, connection: Any, what: str) -> None:
        if database.dialect != "postgres":
            raise ValueError(f"{what} in {database}: a transaction of PostgreSQL cannot be used with it")
        self._database, self._connection = database, connection

    def in_transaction(self) -> bool:
        status: int = self._connection.pgconn.transaction_status
        if status != _ACTIVE:
            return status in _IN_TRANSACTION
        # In a pipeline it lags behind: what is under way may be a statement that commits itself, outside of a block.
        return not self._connection.autocommit or getattr(self._connection, "_num_transactions", 0) > 0

    def begins_by_itself(self) -> bool:
        return not self._connection.autocommit

    @contextmanager
    def begin(self) -> Iterator[None]:
        with commit_known(self._connection):
            with self._connection.transaction():
                yield

    def nested(self) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = self._connection.transaction()
        return block

    def mark(self) -> None: ...

    def unbroken(self) -> bool:
        """psycopg refuses commit() and rollback(), but knows nothing of a COMMIT that is executed as a statement."""
        status: int = self._connection.pgconn.transaction_status
        return status != _IDLE

    def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        from psycopg import Cursor
        from psycopg.rows import scalar_row

        drivers.teach_psycopg()
        with Cursor(self._connection, row_factory=scalar_row) as cursor:  # whatever the user's factory makes
            with _encodable():
                cursor.execute(_sql(self._database, statement, "%({})s"), parameters)
            found: int | None = cursor.fetchone()
            return found

    def write(self, statement: str, parameters: dict[str, Any]) -> Row:
        from psycopg import Cursor
        from psycopg.rows import dict_row

        with Cursor(self._connection, row_factory=dict_row) as cursor:
            with _encodable():
                cursor.execute(_sql(self._database, statement, "%({})s"), parameters)
            return cursor.fetchone() or {}


class SqlAlchemy:
    def __init__(self, database: Database, connection: Any, what: str) -> None:
        self._database, self._what = database, what
        self._connection = connection.registry() if hasattr(connection, "registry") else connection  # a scoped session

    def in_transaction(self) -> bool:
        return bool(self._connection.in_transaction())

    def begins_by_itself(self) -> bool:
        return True

    def begin(self) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = self._connection.begin()
        return block

    def nested(self) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = self._connection.begin_nested()
        return block

    def mark(self) -> None: ...

    def unbroken(self) -> bool:
        """SQLAlchemy executes nothing in a block whose transaction was ended."""
        return True

    def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        from sqlalchemy import String, bindparam, text

        connection = self._checked()
        drivers.teach_sqlalchemy(connection)
        protecting = text(_sql(self._database, statement, ":{}")).bindparams(bindparam("token", type_=String()))
        secret = parameters | {"token": drivers.Secret(parameters["token"])}
        with _encodable():
            result = connection.execute(protecting, secret)
        found: int | None = result.scalar()
        if found is not None and drivers.autocommits(connection):
            raise ValueError("this connection is in autocommit mode: there is no transaction that could be protected")
        return found

    def write(self, statement: str, parameters: dict[str, Any]) -> Row:
        from sqlalchemy import text

        connection = self._checked()
        if drivers.would_autocommit(connection):
            raise ValueError(AUTOCOMMIT)
        for sql in _scripts(self._database, statement, ":{}"):
            with _encodable():
                result = connection.execute(text(sql), parameters)
            row = result.mappings().first() if result.returns_rows else None
            if row is not None:
                return dict(row)
        return {}

    def _checked(self) -> Any:
        """The connection, which is one to our database."""
        from sqlalchemy import text

        connection = self._connection
        if hasattr(connection, "get_bind"):  # a session
            connection = connection.connection()
        if not (dialect := drivers.speaks(connection)).startswith(self._database.dialect):
            raise ValueError(f"{self._what} in {self._database}: a transaction of {dialect} cannot be used with it")
        if dialect == "sqlite":
            listing = (connection.execute(text("pragma database_list"))).fetchall()
            _check_file(self._database, listing, self._what)
        return connection


def _check_file(database: Database, listing: Sequence[Sequence[Any]], what: str) -> None:
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
        self._database, self._connection = database, connection
        _check_file(database, self._ask("pragma database_list", {}).fetchall(), what)

    def in_transaction(self) -> bool:
        return self._connection.in_transaction and _autocommit(self._connection) is not False  # else one always is

    def begins_by_itself(self) -> bool:
        autocommit = _autocommit(self._connection)
        return self._connection.isolation_level is not None if autocommit is None else not autocommit

    def begin(self) -> SqliteTransaction:
        return SqliteTransaction(self._connection)

    @contextmanager
    def nested(self) -> Iterator[None]:
        self._ask("savepoint holdfast", {})
        try:
            yield
        except BaseException:
            self._ask("rollback to holdfast", {})
            raise
        finally:
            self._ask("release holdfast", {})

    def mark(self) -> None:
        """A savepoint goes with its transaction, whatever ends that: commit(), ``with conn``, executescript()."""
        self._ask("savepoint holdfast_block", {})

    def unbroken(self) -> bool:
        try:
            self._ask("release holdfast_block", {})
        except sqlite3.OperationalError:
            return False
        return True

    def fence(self, statement: str, parameters: dict[str, str]) -> int | None:
        rows = self._ask(_sql(self._database, statement, ":{}"), parameters).fetchall()
        return rows[0][0] if rows else None

    def write(self, statement: str, parameters: dict[str, Any]) -> Row:
        for sql in _scripts(self._database, statement, ":{}"):
            answer = self._ask(sql, parameters)
            if rows := answer.fetchall():
                return dict(zip((column[0] for column in answer.description), rows[0], strict=True))
        return {}

    def _ask(self, sql: str, parameters: dict[str, Any]) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = None  # whatever the user's makes
        return cursor.execute(sql, parameters)


def _autocommit(connection: sqlite3.Connection) -> bool | None:
    """None when isolation_level decides: before Python 3.12, and by default."""
    mode = getattr(connection, "autocommit", -1)
    return None if mode == -1 else bool(mode)


class SqliteTransaction:
    """BEGIN IMMEDIATE … COMMIT, whichever of sqlite3's transaction modes the connection is in."""

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
        """As long as SQLite itself would wait; but that would keep the loop from whoever has the file."""
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
        if _autocommit(self._connection):
            self._connection.execute("commit" if kind is None else "rollback")  # the methods do nothing then
        elif kind is None:
            self._connection.commit()
        else:
            self._connection.rollback()


_ADAPTERS: dict[tuple[str, str], Any] = {
    ("psycopg", "Connection"): Psycopg,
    ("sqlite3", "Connection"): Sqlite3,
    ("sqlalchemy", "Connection"): SqlAlchemy,
    ("sqlalchemy", "Session"): SqlAlchemy,
    ("sqlalchemy", "scoped_session"): SqlAlchemy,
}
"""By the package and the name of the class, or of one that it comes from."""
