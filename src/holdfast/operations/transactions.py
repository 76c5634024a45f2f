# Generated from transactions_async.py by scripts/unasync.py. Do not edit.
"""A transaction on the user's connection that an operation begins and ends itself, in as few round trips as it takes.

The claim travels with BEGIN and the end of the operation with COMMIT where the driver lets them: with psycopg. What the
end says may not be heard before the COMMIT then, so it is an error when it must not be committed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from holdfast.database import driver_errors as drivers
from holdfast.database.connections.connection import Connection
from holdfast.database.connections.psycopg import Psycopg, reject_unreplicated_commit
from holdfast.database.sessions import Row
from holdfast.database.statements import statements
from holdfast.database.url import Database
from holdfast.errors import Refused
from holdfast.operations.decide import worded

CHANGED, OVER = "40001", "HF003"
_CLOSED = ("InvalidRequestError", "ResourceClosedError")
"""As SQLAlchemy calls it."""


class Owned(Protocol):
    ends_with_commit: bool
    """Whether the end of the operation and COMMIT are one message."""

    def begin(self, statement: str, parameters: Row) -> Row:
        """BEGIN, and a statement that answers with one row. Roll back if it fails."""

    def commit(self, statement: str, parameters: Row) -> None:
        """A statement, and COMMIT if it is done. Roll back if it fails."""

    def rollback(self) -> None: ...


def owned(database: Database, known: Connection, connection: Any) -> Owned:
    if isinstance(known, Psycopg) and not connection.pgconn.pipeline_status:
        return OwnedPsycopg(database, connection)
    return OwnedBlock(known, marks=database.dialect == "sqlite")


class Undone(Exception):
    """Leaves a block that is not to be committed. The user's own error may be one that is not true, and psycopg commits
    then."""


class OwnedBlock:
    """Whatever the driver, one statement after the other. ``marks``: with a savepoint, by which the end can tell that
    it is in the same transaction still; elsewhere the database knows when it began."""

    ends_with_commit = False

    def __init__(self, known: Connection, *, marks: bool) -> None:
        self._known, self._marks = known, marks
        self._block: AbstractContextManager[Any] | None = None
        self._mark: AbstractContextManager[Any] | None = None

    def begin(self, statement: str, parameters: Row) -> Row:
        self._block = self._known.begin()
        self._block.__enter__()
        row = self._known.write(statement, parameters)
        if self._marks:
            self._mark = self._known.nested()
            self._mark.__enter__()
        return row

    def commit(self, statement: str, parameters: Row) -> None:
        if not self._known.in_transaction() and not self._known.begins_by_itself():
            raise over(parameters["label"])
        if self._mark is not None:
            with noticed(parameters["label"]):
                self._mark.__exit__(None, None, None)
        self._mark = None
        row = said_last(self._known, statement, parameters)
        if row["state"] != "done":
            raise Refused(f"operation {parameters['label']!r} was changed by somebody else meanwhile", CHANGED)
        if self._block is not None:
            self._block.__exit__(None, None, None)
        self._block = None

    def rollback(self) -> None:
        """Once more, if it is interrupted."""
        if self._mark is not None:
            with suppress(Exception):  # it went with the transaction, or does so now
                self._mark.__exit__(Undone, Undone(), None)
        self._mark = None
        if self._block is not None:
            with suppress(Undone):
                self._block.__exit__(Undone, Undone(), None)
        self._block = None


def said_last(known: Connection, statement: str, parameters: Row) -> Row:
    """The end of an operation, in the transaction that it began in."""
    with noticed(parameters["label"]):
        return known.write(statement, parameters)


@contextmanager
def noticed(label: str) -> Iterator[None]:
    """What a driver says of a transaction, or a savepoint, that the function has ended; anything else is its own."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ in _CLOSED or "no such savepoint" in worded(error):
            raise over(label) from error
        raise


class Ended(RuntimeError):
    """The function has committed or rolled back what was not its own to end."""


def over(label: str) -> Ended:
    return Ended(
        f"operation {label!r}: its function has ended the transaction that it runs in, so what it wrote and that it "
        "did are not one any more. Leave commit and rollback to run()"
    )


def ended(error: BaseException) -> bool:
    """Whether it says so, or the database does."""
    return isinstance(error, Ended) or drivers.sqlstate(error) == OVER


class OwnedPsycopg:
    """Past the cursors: BEGIN and the claim are one message to the server, and so are the end and COMMIT."""

    ends_with_commit = True

    def __init__(self, database: Database, connection: Any) -> None:
        self._database, self._connection = database, connection
        self._outside: int | None = getattr(connection, "_num_transactions", None)

    def begin(self, statement: str, parameters: Row) -> Row:
        from holdfast.database.pgconn import decode_rows

        results = self._send(self._begin() + b"; " + self._filled(statement, parameters))
        self._guard(1)
        [row] = decode_rows(results[-1])
        return row

    def commit(self, statement: str, parameters: Row) -> None:
        with reject_unreplicated_commit(self._connection):
            self._send(self._filled(statement, parameters) + b"; commit")
        self._guard(0)

    def rollback(self) -> None:
        """Once more, if it is interrupted."""
        from psycopg.pq import TransactionStatus

        status = self._connection.pgconn.transaction_status
        self._guard(0)
        if status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            self._send(b"rollback")

    def _guard(self, blocks: int) -> None:
        """As in ``connection.transaction()``: commit() and rollback() are refused, and what nests is a savepoint."""
        if self._outside is not None:
            self._connection._num_transactions = self._outside + blocks

    def _begin(self) -> bytes:
        connection, words = self._connection, ["begin"]
        if connection.isolation_level is not None:
            words.append("isolation level " + connection.isolation_level.name.replace("_", " "))
        if connection.read_only is not None:
            words.append("read only" if connection.read_only else "read write")
        if connection.deferrable is not None:
            words.append("deferrable" if connection.deferrable else "not deferrable")
        return " ".join(words).encode()

    def _filled(self, statement: str, parameters: Row) -> bytes:
        texts, names = _pieces(self._database.schema, statement)
        found = [texts[0]]
        for text, name in zip(texts[1:], names, strict=True):
            value = parameters.get(name)
            if value is None:
                found.append(b"null")
            elif isinstance(value, str):
                plain = value.isascii() and value.isalnum()  # as most are, and then there is nothing to escape
                found.append(b"'%s'" % value.encode() if plain else self._escaped(value.encode("ascii")))
            else:
                found.append(str(value).encode())  # true, false, and numbers
            found.append(text)
        return b"".join(found)

    def _escaped(self, value: bytes) -> bytes:
        return bytes(_driver().escaping(self._connection.pgconn).escape_literal(value))

    def _send(self, text: bytes) -> list[Any]:
        driver, connection = _driver(), self._connection
        with connection.lock:
            try:
                connection.pgconn.send_query(text)
                results: list[Any] = connection.wait(driver.execute(connection.pgconn))
            except BaseException:  # before the answer was heard, it would be busy for ever
                if connection.pgconn.transaction_status == driver.active:
                    connection.wait(driver.execute(connection.pgconn))
                raise
        if results[-1].status == driver.failed:  # it ends with what goes wrong
            raise driver.error_from_result(results[-1], encoding=connection.info.encoding)
        return results


class _Driver(NamedTuple):
    """What is used of psycopg, looked up once."""

    execute: Any
    error_from_result: Any
    escaping: Any
    failed: Any
    active: Any


@lru_cache
def _driver() -> _Driver:
    from psycopg import errors, generators
    from psycopg.pq import Escaping, ExecStatus, TransactionStatus

    failed, active = ExecStatus.FATAL_ERROR, TransactionStatus.ACTIVE
    return _Driver(generators.execute, errors.error_from_result, Escaping, failed, active)


@lru_cache
def _pieces(schema: str, statement: str) -> tuple[list[bytes], list[str]]:
    """The text between the parameters, and their names in this order."""
    found = statements("postgres", schema)[statement]
    pieces = re.split(r"\$(\d+)", found.steps[0].sql)
    return [text.encode() for text in pieces[::2]], [found.parameters[int(number) - 1] for number in pieces[1::2]]
