"""One row of the application's own, for one worker at a time: over FOR UPDATE NOWAIT, in the caller's transaction."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol, overload

from holdfast.lock.row_key import RowKey

Table = str | tuple[str, ...]
Row = dict[str, Any]
_AWAITED = frozenset({"AsyncConnection", "AsyncSession", "async_scoped_session"})


class Rows(Protocol):
    def fetchone(self) -> Any: ...


class Executing(Protocol):
    """A connection whose statements are done when they return."""

    def execute(self, *arguments: Any, **options: Any) -> Rows: ...


class Awaiting(Protocol):
    """A connection whose statements are to be awaited."""

    def execute(self, *arguments: Any, **options: Any) -> Awaitable[Any]: ...


@overload
def row_lock(conn: Executing, table: Table, /, **key: Any) -> Row | None: ...
@overload
def row_lock(conn: Awaiting, table: Table, /, **key: Any) -> Awaitable[Row | None]: ...
def row_lock(conn: object, table: Table, /, **key: Any) -> Any:
    """Lock a row until the transaction on ``conn`` ends: the row as it is now, or None when another transaction has it.

    It never waits for another holder of the row, which keeps expensive work from being done twice: the second caller
    returns at once, and a later one finds the value that is there by then. (A table that is being altered, or locked
    whole, holds it up like every statement; ``lock_timeout`` bounds that, and the answer is None as well)::

        with conn.transaction():
            row = holdfast.row_lock(conn, "summary", document_id=7)
            if row is None:
                return "in progress"
            if row["text"] is None:
                row["text"] = expensive(document)
                conn.execute("update summary set text = %s where document_id = 7", [row["text"]])
            return row["text"]

    ``conn``: a connection of psycopg, a connection or session of SQLAlchemy, or a ``sqlite3.Connection``. With an async
    one the answer is to be awaited. A transaction must be open, or be begun by the first statement. ``table`` and the
    columns of the key are spelled as the database keeps them; ``"schema.table"`` and ``("schema", "table")`` name a
    schema. LookupError when there is no such row: insert it and commit first. ValueError when the key fits several.

    ROLLBACK TO a savepoint that was set before gives the lock back. SQLite has no locks on rows: there it makes the
    transaction the file's one writer, and None means that another connection is writing to the file.
    """
    row = RowKey.check(table, key)
    if any(ancestor.__name__ in _AWAITED for ancestor in type(conn).__mro__):
        from holdfast.lock.row_lock_async import row_lock as later

        return later(conn, row)
    from holdfast.lock.row_lock import row_lock as now

    return now(conn, row)
