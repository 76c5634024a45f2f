# Generated from within_async.py by scripts/unasync.py. Do not edit.
"""An operation whose effect is what it writes in the user's own database: claim, effect, result and entries are one
transaction, so it happens exactly once.

While it runs, its transaction has the advisory lock of its dataset and operation (on SQLite, the file). Nothing is
there before the commit, so a process that dies leaves nothing, and whoever waits tries again by itself.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from holdfast.database import driver_errors as drivers
from holdfast.database.connections.connection import Connection
from holdfast.database.connections.placeholders import ENDED
from holdfast.database.connections.sqlalchemy import SqlAlchemy, subject_of
from holdfast.database.connections.sqlite import Sqlite3
from holdfast.database.engine import Engine
from holdfast.database.sessions import Row
from holdfast.errors import HoldfastError
from holdfast.operations.attempt import Attempt, around
from holdfast.operations.decide import Act, Begun, Prior, collides
from holdfast.operations.notes import claim_noted, failure, left, success, unmended
from holdfast.operations.outcome import Outcome
from holdfast.operations.plan import Plan
from holdfast.operations.running import Done, Running
from holdfast.operations.transactions import ended, owned
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import current_id

PASSES = 10
"""How often a transaction is begun again because others got in its way."""


class Within(Attempt):
    """In a transaction that it begins and commits."""

    def __init__(self, plan: Plan, known: Connection, connection: Any) -> None:
        super().__init__(plan)
        self._known, self._transaction = known, owned(plan.engine.database, known, connection)
        self._connection, self._whose = id(subject_of(connection)), current_id()
        self._began: str | None = None
        self._ending = False
        """What goes wrong from here on is not the function's any more, but ours, or that of its COMMIT."""
        self._passes = 0

    def _begin(self) -> Running | Outcome:
        started, asked = now(), 0
        while True:
            asked_at = now()
            if _open.setdefault(self._connection, self) is not self:
                raise _open[self._connection].elsewhere()
            try:
                found = Begun.of(self._transaction.begin("operation_begin", claim(self.plan)))
                if found.home != self.plan.engine.state(LogLocation).oid:
                    at_home(self.plan, found.home)
                prior = found.prior
                act = self.decide(prior)
                if (outcome := self.settled(act, prior)) is not None:
                    self._leave()
                    return outcome
                found.check_writable(self.plan.key)
                if found.free and act is not Act.RUNNING and undivided(self.plan, known=self._known):
                    self.permit_locked(prior)
                    self.prior, self._began = prior, found.began
                    self.late = found.fixed or not self._transaction.ends_with_commit
                    return ready(self, act, prior, asked_at)
            except BaseException:
                self._undo()
                if self.unmended is not None:
                    aside(self, self.unmended())
                raise
            self._leave()
            if (outcome := self.locked(prior, asked, started)) is not None:
                return outcome
            asked += 1

    def succeed(self, op: Running, value: Any) -> Outcome:
        parameters = success(self, op, value, self._began)
        self._ending = True
        self._transaction.commit("operation_end", parameters)
        del _open[self._connection]
        return Outcome("success", False, op.attempt, value=value)

    def fail(self, op: Running, error: BaseException) -> bool:
        over = ended(error) or (not self._ending and is_over(self._known, self._began, error))
        self._ending = False
        self._undo()
        if over:
            aside(self, left(self, op, error))
        elif self.passes(error):
            self._passes += 1
            return collides(error, drivers.sqlstate(error)) and self._passes <= PASSES
        elif isinstance(error, Exception):
            aside(self, failure(self, op, error))
        return False

    def drop(self) -> None:
        super().drop()
        if _open.get(self._connection) is self:
            self._undo()

    def _undo(self) -> None:
        with suppress(Exception):  # the connection is gone, or the caller hears of it with what went wrong first
            self._transaction.rollback()
        _open.pop(self._connection, None)

    def _leave(self) -> None:
        self._transaction.rollback()
        del _open[self._connection]

    def surrounds(self) -> bool:
        """Whether whoever asks is inside of it."""
        return self._whose == current_id() or self in around()

    def elsewhere(self) -> RuntimeError:
        return RuntimeError(
            f"this connection is in the middle of operation {self.plan.key.label!r}, which somebody else runs: what is "
            "written here now would be committed with that, or go with it. Use a connection for each"
        )


_open: dict[int, Within] = {}
"""Those that are under way, by the connection that they have."""


def check_free(connection: Any) -> None:
    """RuntimeError when somebody else runs an operation on it."""
    if (busy := _open.get(id(subject_of(connection)))) is not None and not busy.surrounds():
        raise busy.elsewhere()


def is_over(known: Connection, began: str | None, error: BaseException) -> bool:
    """Whether the function has ended the transaction before it raised that, so that what it wrote may be there. One may
    well roll back before it raises, and leaves nothing: SQLAlchemy tells the two apart, sqlite3 does not. psycopg
    refuses commit() and rollback(), so it takes a statement; whether there was one cannot be told of a transaction that
    has failed."""
    if not isinstance(error, Exception) or isinstance(known, Sqlite3):
        return False
    if isinstance(known, SqlAlchemy):
        return known.committed()
    if known.broken() == ENDED:
        return True
    try:
        found = known.write("operation_begin", {"key": "", "lock": None, "lease": ""})
    except Exception:
        return False
    return Begun.of(found).began != began


def aside(attempt: Attempt, parameters: Row) -> None:
    """Write down what came of it, on a session of our own. The user's error is what counts."""
    try:
        attempt.plan.engine.call("operation_write", parameters)
    except HoldfastError as problem:
        attempt.unrecorded(problem)


class LogLocation:
    """Where the log of operations is that a client reads: the oid of its table, once it had to be known."""

    def __init__(self, engine: Engine) -> None:
        self.oid: int | None = None


def at_home(plan: Plan, home: int | None) -> None:
    """ValueError unless the client finds these tables in its database, too: elsewhere nobody would look for what is
    done. It is asked anew before that is said, for they may have been made anew."""
    [row] = plan.engine.call("operation_begin", {"key": "", "lease": ""})
    ours = plan.engine.state(LogLocation)
    ours.oid = Begun.of(row).home
    if ours.oid != home:
        raise ValueError(
            f"the connection is to another database than the client's, and the log of operations is in "
            f"{plan.engine.database}: only a transaction in that will do"
        )


def undivided(plan: Plan, *, known: Connection) -> bool:
    """Whether a sovereign dataset is ours as a whole, now that one operation of it is."""
    return plan.whole is None or Begun.of(known.write("operation_begin", plan.whole)).free


def claim(plan: Plan) -> Row:
    return {"key": plan.key.digest, "lock": plan.key.lock_key, "lease": plan.lease}


def ready(attempt: Attempt, act: Act, prior: Prior, asked_at: float) -> Running | Outcome:
    """It is ours: mend what a dead attempt left, and begin the next one."""
    plan = attempt.plan
    if attempt.approved:
        attempt.spend()
    op = Running(plan.key, prior, asked_at, attempt=prior.attempt + 1)
    if act in (Act.ROLL_BACK, Act.VERIFY):
        try:
            done = _mend(attempt, act, prior, asked_at)
        except Exception as error:
            if not attempt.passes(error):
                attempt.unmended = partial(unmended, plan, act, prior, asked_at, error)
            raise
        if done is not None:
            op.attempt = prior.attempt
            op.note("lock_acquired", plan.locked())
            return attempt.succeed(op, done.result)
    op.note("lock_acquired", plan.locked())
    if act is Act.ROLL_BACK:
        op.note("rollback", {"attempt": prior.attempt, "name": plan.handler})
    claim_noted(op, plan)
    op.began = True  # it is not known outside before it is whole
    return op


def _mend(attempt: Attempt, act: Act, prior: Prior, asked_at: float) -> Done | None:
    plan = attempt.plan
    if act is Act.ROLL_BACK and plan.rollback is not None:
        attempt.undo(plan.rollback, prior, asked_at)
    elif plan.verify is not None:
        return attempt.probe(plan.verify, prior, asked_at)
    return None
