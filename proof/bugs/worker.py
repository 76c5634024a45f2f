"""A worker of a scenario."""

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import psycopg

from holdfast.testing.history import Pending, Recorder, now
from proof import protected_tables
from proof.bugs.implementation import Connection, Grant, Holdfast


class Worker:
    """Runs operations on its own session, and records their outcomes."""

    def __init__(self, folder: Path, name: str, implementation: Holdfast, connection: Connection) -> None:
        self.name, self.record = name, Recorder(folder, name)
        self._implementation, self.connection = implementation, connection

    def acquire(self, name: str, ttl: float = 30.0) -> Grant | None:
        with self.record.invoke("acquire", name) as call:
            grant = self._implementation.acquire(self.connection, name, self.name, ttl)
            call.ok(grant.fence) if grant else call.fail()
        return grant

    def renew(self, grant: Grant) -> bool:
        with self.record.invoke("renew", grant.name, grant.fence) as call:
            renewed = self._implementation.renew(self.connection, grant)
            call.ok() if renewed else call.fail()
        return renewed

    def release(self, grant: Grant) -> bool:
        with self.record.invoke("release", grant.name, grant.fence) as call:
            released = self._implementation.release(self.connection, grant)
            call.ok() if released else call.fail()
        return released

    def take_over(self, grant: Grant) -> None:
        """Run the first protected transaction of a grant, which counts the older writes that it sees."""
        statement = protected_tables.with_placeholder(protected_tables.TAKE_OVER, "%s").encode()
        with self.record.invoke("takeover", grant.name, grant.fence) as call:
            with self.connection.transaction():
                self._implementation.protect(self.connection, grant)
                [(older,)] = self.connection.execute(
                    statement, protected_tables.take_over_parameters(grant.name, grant.fence)
                ).fetchall()
            call.ok(older=older)

    def begin_write(self, grant: Grant, protect: Callable[[], None] | None = None) -> "OpenWrite":
        """Begin a transaction, protect it and write, without committing."""
        key = uuid4().hex
        call = self.record.invoke("write", grant.name, grant.fence, key=key)
        self.connection.execute("begin")
        writing = OpenWrite(self.connection, call)
        writing.attempt(protect or (lambda: self._implementation.protect(self.connection, grant)))
        writing.attempt(
            lambda: self.connection.execute(
                protected_tables.with_placeholder(protected_tables.WRITE, "%s").encode(), [grant.name, grant.fence, key]
            )
        )
        return writing

    def write(self, grant: Grant) -> None:
        self.begin_write(grant).commit()

    def believe(self, grant: Grant, since: float, until: float | None = None) -> None:
        """Record how long the grant was trusted: until now, or until its trust ended."""
        end = min(now(), grant.trusted_until if until is None else until)
        self.record.info("believe", grant.name, grant.fence, **{"from": since, "until": end})

    def close(self) -> None:
        self.connection.close()
        self.record.close()


class OpenWrite:
    """A transaction that is not committed yet. After the first step that the database refuses, it does nothing more."""

    def __init__(self, connection: Connection, call: Pending) -> None:
        self._connection, self._call, self.refused = connection, call, ""

    def attempt(self, step: Callable[[], object]) -> None:
        if not self.refused:
            try:
                step()
            except psycopg.Error as error:
                self.refused = str(error).splitlines()[0]

    def commit(self) -> None:
        self.attempt(lambda: self._connection.execute("commit"))
        if self.refused:
            self._connection.execute("rollback")
            self._call.fail(error=self.refused)
        else:
            self._call.ok()
