"""Our statements, in the words of each driver; and what its user is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from holdfast.database.statements import statements
from holdfast.database.url import Database

ENDED = (
    "was ended inside its block, and nothing protects what came after. Leave commit to the end of the block, and raise "
    "to roll back."
)
FAILED = (
    "has failed, and the database would answer its COMMIT by rolling it back. Let the error out of the block, or put "
    "what may fail into a savepoint."
)
AUTOCOMMIT = "this connection is in autocommit mode, and no transaction is open on it: begin one, or leave tx away"


def phrased(database: Database, name: str, style: str) -> str:
    """The statement with its parameters as the driver writes them."""
    return script(database, name, style)[0]


@lru_cache
def script(database: Database, name: str, style: str) -> list[str]:
    """The same of one that takes several steps, of which the first that answers has done it."""
    statement = statements(database.dialect, database.schema)[name]
    found = [step.sql for step in statement.steps]
    for number, parameter in reversed(list(enumerate(statement.parameters, 1))):  # or $1 would be found in $10
        found = [sql.replace(f"${number}", style.format(parameter)) for sql in found]
    return found


@contextmanager
def encodable() -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{error.object!r:.200} has a letter that the encoding of this connection, {error.encoding}, lacks: "
            "SET client_encoding TO 'UTF8'"
        ) from error
