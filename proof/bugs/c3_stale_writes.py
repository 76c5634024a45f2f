"""C3: implementations whose ``protect`` lets a holder commit after it was replaced."""

from psycopg.errors import LockNotAvailable

from proof.bugs.implementation import Connection, Grant, Holdfast
from proof.bugs.testbed import Testbed
from proof.bugs.worker import Worker


class NoFence(Holdfast):
    """Reads the lease without a lock, and trusts it for the rest of the transaction."""

    def protect(self, connection: Connection, grant: Grant) -> None:
        check_held(connection, grant)


class ForKeyShare(Holdfast):
    """The weakest row lock does not conflict with an update that keeps the key, as that of a takeover does."""

    def protect(self, connection: Connection, grant: Grant) -> None:
        check_held(connection, grant, "for key share")


class InASavepoint(Holdfast):
    """Does not refuse an open savepoint, and loses its row lock when that is rolled back."""

    def protect(self, connection: Connection, grant: Grant) -> None:
        check_held(connection, grant, "for share")


class AdvisoryGuard(Holdfast):
    """An advisory lock instead of a row lock: a forced release does not take it."""

    def protect(self, connection: Connection, grant: Grant) -> None:
        connection.execute("select pg_advisory_xact_lock_shared(hashtext(%s))", [grant.name])
        check_held(connection, grant)


class AtCommit(Holdfast):
    """The real implementation in its other form, which checks inside COMMIT."""

    def protect(self, connection: Connection, grant: Grant) -> None:
        connection.execute("select holdfast.lease_protect_at_commit(%s, %s)", [grant.name, grant.token])


class PlainTrigger(Holdfast):
    """Checks inside COMMIT as well, but reads without a lock: under REPEATABLE READ it reads the old snapshot."""

    def prepare(self, connection: Connection) -> None:
        connection.execute("""
            create table guard (name text, token uuid);
            create function guard() returns trigger language plpgsql as $$ begin
                if not exists (
                    select from holdfast.lease l where l.name = new.name and l.token = sha256(uuid_send(new.token))
                ) then
                    raise exception 'the lease has passed on';
                end if;
                return null;
            end $$;
            create constraint trigger guard after insert on guard deferrable initially deferred
                for each row execute function guard();
        """)

    def protect(self, connection: Connection, grant: Grant) -> None:
        connection.execute("insert into guard values (%s, %s)", [grant.name, grant.token])


def check_held(connection: Connection, grant: Grant, lock: str = "") -> None:
    statement = f"select from holdfast.lease where name = %s and token = sha256(uuid_send(%s)) {lock}"
    if connection.execute(statement.encode(), [grant.name, grant.token]).fetchone() is None:
        raise LockNotAvailable("the lease has passed on")


def overtaken(testbed: Testbed) -> None:
    """A's lease expires between its write and its commit. B must not take over in between."""
    a, b, grant = _acquire_and_write(testbed)
    writing = a.begin_write(grant)
    testbed.expire("job")
    successor = _take_over(b)
    writing.commit()
    _finish(b, successor)


def overtaken_after_savepoint(testbed: Testbed) -> None:
    """The same, but A protects its transaction inside a savepoint and rolls that back."""
    a, b, grant = _acquire_and_write(testbed)

    def protect() -> None:
        a.connection.execute("savepoint work")
        testbed.implementation.protect(a.connection, grant)
        a.connection.execute("rollback to work")

    writing = a.begin_write(grant, protect)
    testbed.expire("job")
    successor = _take_over(b)
    writing.commit()
    _finish(b, successor)


def overtaken_by_force(testbed: Testbed) -> None:
    """The same, but the lease is released by force instead of expiring."""
    a, b, grant = _acquire_and_write(testbed)
    writing = a.begin_write(grant)
    forced = _force(testbed)
    successor = _take_over(b)
    writing.commit()
    if not forced:
        _force(testbed)
    _finish(b, successor)


def overtaken_behind_a_snapshot(testbed: Testbed) -> None:
    """The same, but A's transaction is REPEATABLE READ."""
    a, b, grant = _acquire_and_write(testbed)
    a.connection.execute("set session characteristics as transaction isolation level repeatable read")
    writing = a.begin_write(grant)
    testbed.expire("job")
    successor = _take_over(b)
    writing.commit()
    _finish(b, successor)


def _acquire_and_write(testbed: Testbed) -> tuple[Worker, Worker, Grant]:
    a, b = testbed.worker("a"), testbed.worker("b")
    grant = a.acquire("job")
    assert grant is not None, "it is free"
    a.take_over(grant)
    a.write(grant)
    return a, b, grant


def _take_over(b: Worker) -> Grant | None:
    successor = b.acquire("job")
    if successor is not None:
        b.take_over(successor)
    return successor


def _finish(b: Worker, successor: Grant | None) -> None:
    """B acquires it now at the latest, and writes."""
    successor = successor or _take_over(b)
    assert successor is not None, "the transaction and the lease of A have ended"
    b.write(successor)
    b.release(successor)


def _force(testbed: Testbed) -> bool:
    try:
        testbed.implementation.force(testbed.admin, "job")
    except LockNotAvailable:
        return False
    return True
