"""The real implementation that scenarios run with. A wrong one overrides a few methods."""

from typing import Any, NamedTuple

import psycopg

from holdfast.testing.history import now

Connection = psycopg.Connection[Any]
MARGIN = 0.1
"""The part of a TTL by which a worker stops early to trust its grant, as holdfast does."""


class Grant(NamedTuple):
    name: str
    fence: int
    token: str
    trusted_until: float


class Holdfast:
    """The real implementation as other languages call it: the SQL functions."""

    def prepare(self, connection: Connection) -> None:
        """Create what a wrong implementation needs in the database."""

    def open(self, url: str) -> None:
        """Open what it needs outside of the database."""

    def close(self) -> None:
        """Does nothing if it was never opened."""

    def acquire(self, connection: Connection, name: str, holder: str, ttl: float) -> Grant | None:
        requested_at = now()
        statement = "select fence, token from holdfast.lease_acquire(%s, %s, %s)"
        [(fence, token)] = connection.execute(statement, [name, holder, ttl]).fetchall()
        return None if fence is None else Grant(name, fence, str(token), requested_at + ttl * (1 - MARGIN))

    def renew(self, connection: Connection, grant: Grant) -> bool:
        return fetch_bool(connection, "select holdfast.lease_renew(%s, %s)", grant.name, grant.token)

    def release(self, connection: Connection, grant: Grant) -> bool:
        return fetch_bool(connection, "select holdfast.lease_release(%s, null, %s)", grant.name, grant.token)

    def protect(self, connection: Connection, grant: Grant) -> None:
        connection.execute("select holdfast.lease_protect(%s, %s)", [grant.name, grant.token])

    def force(self, connection: Connection, name: str) -> None:
        """Force a release, as an operator. Raises LockNotAvailable while a transaction is protected."""
        connection.execute("select holdfast.lease_force_release(%s, 'operator', 'stuck', false)", [name])


def fetch_bool(connection: Connection, statement: str, *parameters: object) -> bool:
    """The first column of the first row; False if there is no row."""
    row = connection.execute(statement.encode(), parameters).fetchone()
    return row is not None and bool(row[0])
