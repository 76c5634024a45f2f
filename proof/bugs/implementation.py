"""What a scene is played with: the real implementation, of which a wrong one changes a few lines."""

from typing import Any, NamedTuple

import psycopg

from holdfast.testing.history import now

Connection = psycopg.Connection[Any]
MARGIN = 0.1
"""The part of a TTL that a worker here gives away, as holdfast does."""


class Grant(NamedTuple):
    name: str
    fence: int
    token: str
    trusted_until: float


class Holdfast:
    """The real implementation, called as any language calls it: the functions in the database."""

    def prepare(self, connection: Connection) -> None:
        """What a wrong implementation adds to the database."""

    def open(self, url: str) -> None:
        """What it needs outside of it."""

    def close(self) -> None:
        """Harmless when it was never opened."""

    def acquire(self, connection: Connection, name: str, holder: str, ttl: float) -> Grant | None:
        asked_at = now()
        statement = "select fence, token from holdfast.lease_acquire(%s, %s, %s, reenter => false)"
        [(fence, token)] = connection.execute(statement, [name, holder, ttl]).fetchall()
        return None if fence is None else Grant(name, fence, str(token), asked_at + ttl * (1 - MARGIN))

    def renew(self, connection: Connection, grant: Grant) -> bool:
        return answer(connection, "select holdfast.lease_renew(%s, %s)", grant.name, grant.token)

    def release(self, connection: Connection, grant: Grant) -> bool:
        return answer(connection, "select holdfast.lease_release(%s, %s)", grant.name, grant.token)

    def protect(self, connection: Connection, grant: Grant) -> None:
        connection.execute("select holdfast.lease_protect(%s, %s)", [grant.name, grant.token])

    def force(self, connection: Connection, name: str) -> None:
        """What an operator does. LockNotAvailable while a transaction is protected."""
        connection.execute("select holdfast.lease_force_release(%s, 'operator', 'stuck', false)", [name])


def answer(connection: Connection, statement: str, *parameters: object) -> bool:
    row = connection.execute(statement.encode(), parameters).fetchone()
    return row is not None and bool(row[0])
