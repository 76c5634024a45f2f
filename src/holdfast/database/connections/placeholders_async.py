"""Our statements with the placeholders of each database driver, and the messages for its user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from holdfast.database.statements import statements
from holdfast.database.url import Database

ENDED = (
    "was ended inside its block, so what came after it is not protected. Leave the commit to the end of the block, and "
    "raise to roll back."
)
FAILED = (
    "has failed, so its COMMIT would roll it back. Let the error out of the block, or put what may fail into a "
    "savepoint."
)
AUTOCOMMIT = "this connection is in autocommit mode and no transaction is open: begin a transaction, or omit tx"


@lru_cache
def with_placeholders(database: Database, name: str, style: str) -> str:
    """The statement, with parameters in the driver's style, e.g. ``%({})s``."""
    statement = statements(database.dialect, database.schema)[name]
    sql = statement.sql
    for number, parameter in reversed(list(enumerate(statement.parameters, 1))):  # backwards: $1 is a part of $10
        sql = sql.replace(f"${number}", style.format(parameter))
    return sql


@contextmanager
def encodable() -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{error.object!r:.200} contains a character that this connection's encoding {error.encoding} lacks: "
            "SET client_encoding TO 'UTF8'"
        ) from error
