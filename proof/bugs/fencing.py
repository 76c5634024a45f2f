"""Ways to let a holder that has been replaced commit: the guard around its transaction guards nothing. All are C3."""

from psycopg.errors import LockNotAvailable

from proof.bugs.implementation import Connection, Grant, Holdfast
from proof.bugs.stage import Stage
from proof.bugs.worker import Worker


class NoFence(Holdfast):
    """Looks whether it has the lease, and then believes it for the rest of the transaction."""

    def protect(self, connection: Connection, grant: Grant) -> None:
        held(connection, "select from holdfast.lease where name = %s and token = %s", grant)


class ForKeyShare(Holdfast):
    """The weakest row lock does not conflict with an update that leaves the key alone, as a takeover does."""

    def protect(self, connection: Connection, grant: Grant) -> None:
        held(connection, "select from holdfast.lease where name = %s and token = %s for key share", grant)


class InASavepoint(Holdfast):
    """Does not ask whether a savepoint is open, and so loses its row lock with it."""

    def protect(self, connection: Connection, grant: Grant) -> None:
        held(connection, "select from holdfast.lease where name = %s and token = %s for share", grant)


class AdvisoryGuard(Holdfast):
    """An advisory lock instead of the row's: it stops those who ask for it, and an operator's steal does not ask."""

    def protect(self, connection: Connection, grant: Grant) -> None:
        connection.execute("select pg_advisory_xact_lock_shared(hashtext(%s))", [grant.name])
        held(connection, "select from holdfast.lease where name = %s and token = %s", grant)


class AtCommit(Holdfast):
    """The real implementation in its other form, which asks inside COMMIT."""

    def protect(self, connection: Connection, grant: Grant) -> None:
        connection.execute("select holdfast.lease_protect_at_commit(%s, %s)", [grant.name, grant.token])


class PlainTrigger(Holdfast):
    """Asks inside COMMIT as well, but only looks; and a transaction that keeps its snapshot sees what was."""

    def prepare(self, connection: Connection) -> None:
        connection.execute("""
            create table guard (name text, token uuid);
            create function guard() returns trigger language plpgsql as $$ begin
                if not exists (select from holdfast.lease l where l.name = new.name and l.token = new.token) then
                    raise exception 'the lease has passed on';
                end if;
                return null;
            end $$;
            create constraint trigger guard after insert on guard deferrable initially deferred
                for each row execute function guard();
        """)

    def protect(self, connection: Connection, grant: Grant) -> None:
        connection.execute("insert into guard values (%s, %s)", [grant.name, grant.token])


def held(connection: Connection, statement: str, grant: Grant) -> None:
    if connection.execute(statement.encode(), [grant.name, grant.token]).fetchone() is None:
        raise LockNotAvailable("the lease has passed on")


def overtaken(stage: Stage) -> None:
    """A writes, and its time is over before it commits. B may take over only before the write is there, or after."""
    a, b, grant = _opening(stage)
    writing = a.begin_write(grant)
    stage.expire("job")
    successor = _take_over(b)
    writing.commit()
    _closing(b, successor)


def overtaken_after_savepoint(stage: Stage) -> None:
    """The same, but A protected its transaction inside a savepoint, and has rolled back to it."""
    a, b, grant = _opening(stage)

    def protect() -> None:
        a.connection.execute("savepoint work")
        stage.implementation.protect(a.connection, grant)
        a.connection.execute("rollback to work")

    writing = a.begin_write(grant, protect)
    stage.expire("job")
    successor = _take_over(b)
    writing.commit()
    _closing(b, successor)


def overtaken_by_force(stage: Stage) -> None:
    """The same, but A's time is not over: an operator takes the lease away."""
    a, b, grant = _opening(stage)
    writing = a.begin_write(grant)
    forced = _force(stage)
    successor = _take_over(b)
    writing.commit()
    if not forced:
        _force(stage)
    _closing(b, successor)


def overtaken_behind_a_snapshot(stage: Stage) -> None:
    """A reads before it writes, in a transaction that goes on seeing what it saw first."""
    a, b, grant = _opening(stage)
    a.connection.execute("set session characteristics as transaction isolation level repeatable read")
    writing = a.begin_write(grant)
    stage.expire("job")
    successor = _take_over(b)
    writing.commit()
    _closing(b, successor)


def _opening(stage: Stage) -> tuple[Worker, Worker, Grant]:
    a, b = stage.worker("a"), stage.worker("b")
    grant = a.acquire("job")
    assert grant is not None, "nobody else has it"
    a.take_over(grant)
    a.write(grant)
    return a, b, grant


def _take_over(b: Worker) -> Grant | None:
    successor = b.acquire("job")
    if successor is not None:
        b.take_over(successor)
    return successor


def _closing(b: Worker, successor: Grant | None) -> None:
    """Whoever had to wait can have it now; and works under it."""
    successor = successor or _take_over(b)
    assert successor is not None, "the transaction of A is over, and so is its lease"
    b.write(successor)
    b.release(successor)


def _force(stage: Stage) -> bool:
    try:
        stage.implementation.force(stage.director, "job")
    except LockNotAvailable:
        return False
    return True
