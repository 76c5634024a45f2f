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
from holdfast.database.connections.connection_async import AsyncConnection
from holdfast.database.connections.placeholders_async import ENDED
from holdfast.database.connections.sqlalchemy_async import AsyncSqlAlchemy, subject_of
from holdfast.database.connections.sqlite_async import AsyncSqlite3
from holdfast.database.engine_async import AsyncEngine
from holdfast.database.sessions import Row
from holdfast.errors import HoldfastError
from holdfast.operations.attempt_async import AsyncAttempt, around
from holdfast.operations.decide import Act, Begun, Prior, collides
from holdfast.operations.notes_async import claim_noted, failure, left, success, unmended
from holdfast.operations.outcome import Outcome
from holdfast.operations.plan_async import AsyncPlan
from holdfast.operations.running_async import AsyncRunning, Done
from holdfast.operations.transactions_async import ended, owned
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency_async import current_id

PASSES = 10
"""How often a transaction is begun again because others got in its way."""


class AsyncWithin(AsyncAttempt):
    """In a transaction that it begins and commits."""

    def __init__(self, plan: AsyncPlan, known: AsyncConnection, connection: Any) -> None:
        super().__init__(plan)
        self._known, self._transaction = known, owned(plan.engine.database, known, connection)
        self._connection, self._whose = id(subject_of(connection)), current_id()
        self._began: str | None = None
        self._ending = False
        """What goes wrong from here on is not the function's any more, but ours, or that of its COMMIT."""
        self._passes = 0

    async def _begin(self) -> AsyncRunning | Outcome:
        started, asked = now(), 0
        while True:
            asked_at = now()
            if _open.setdefault(self._connection, self) is not self:
                raise _open[self._connection].elsewhere()
            try:
                found = Begun.of(await self._transaction.begin("operation_begin", claim(self.plan)))
                if found.home != self.plan.engine.state(LogLocation).oid:
                    await at_home(self.plan, found.home)
                prior = found.prior
                act = self.decide(prior)
                if (outcome := self.settled(act, prior)) is not None:
                    await self._leave()
                    return outcome
                found.check_writable(self.plan.key)
                if found.free and act is not Act.RUNNING and await undivided(self.plan, known=self._known):
                    await self.permit_locked(prior)
                    self.prior, self._began = prior, found.began
                    self.late = found.fixed or not self._transaction.ends_with_commit
                    return await ready(self, act, prior, asked_at)
            except BaseException:
                await self._undo()
                if self.unmended is not None:
                    await aside(self, self.unmended())
                raise
            await self._leave()
            if (outcome := await self.locked(prior, asked, started)) is not None:
                return outcome
            asked += 1

    async def succeed(self, op: AsyncRunning, value: Any) -> Outcome:
        parameters = success(self, op, value, self._began)
        self._ending = True
        await self._transaction.commit("operation_end", parameters)
        del _open[self._connection]
        return Outcome("success", False, op.attempt, value=value)

    async def fail(self, op: AsyncRunning, error: BaseException) -> bool:
        over = ended(error) or (not self._ending and await is_over(self._known, self._began, error))
        self._ending = False
        await self._undo()
        if over:
            await aside(self, left(self, op, error))
        elif self.passes(error):
            self._passes += 1
            return collides(error, drivers.sqlstate(error)) and self._passes <= PASSES
        elif isinstance(error, Exception):
            await aside(self, failure(self, op, error))
        return False

    async def drop(self) -> None:
        await super().drop()
        if _open.get(self._connection) is self:
            await self._undo()

    async def _undo(self) -> None:
        with suppress(Exception):  # the connection is gone, or the caller hears of it with what went wrong first
            await self._transaction.rollback()
        _open.pop(self._connection, None)

    async def _leave(self) -> None:
        await self._transaction.rollback()
        del _open[self._connection]

    def surrounds(self) -> bool:
        """Whether whoever asks is inside of it."""
        return self._whose == current_id() or self in around()

    def elsewhere(self) -> RuntimeError:
        return RuntimeError(
            f"this connection is in the middle of operation {self.plan.key.label!r}, which somebody else runs: what is "
            "written here now would be committed with that, or go with it. Use a connection for each"
        )


_open: dict[int, AsyncWithin] = {}
"""Those that are under way, by the connection that they have."""


def check_free(connection: Any) -> None:
    """RuntimeError when somebody else runs an operation on it."""
    if (busy := _open.get(id(subject_of(connection)))) is not None and not busy.surrounds():
        raise busy.elsewhere()


async def is_over(known: AsyncConnection, began: str | None, error: BaseException) -> bool:
    """Whether the function has ended the transaction before it raised that, so that what it wrote may be there. One may
    well roll back before it raises, and leaves nothing: SQLAlchemy tells the two apart, sqlite3 does not. psycopg
    refuses commit() and rollback(), so it takes a statement; whether there was one cannot be told of a transaction that
    has failed."""
    if not isinstance(error, Exception) or isinstance(known, AsyncSqlite3):
        return False
    if isinstance(known, AsyncSqlAlchemy):
        return known.committed()
    if known.broken() == ENDED:
        return True
    try:
        found = await known.write("operation_begin", {"key": "", "lock": None, "lease": ""})
    except Exception:
        return False
    return Begun.of(found).began != began


async def aside(attempt: AsyncAttempt, parameters: Row) -> None:
    """Write down what came of it, on a session of our own. The user's error is what counts."""
    try:
        await attempt.plan.engine.call("operation_write", parameters)
    except HoldfastError as problem:
        attempt.unrecorded(problem)


class LogLocation:
    """Where the log of operations is that a client reads: the oid of its table, once it had to be known."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.oid: int | None = None


async def at_home(plan: AsyncPlan, home: int | None) -> None:
    """ValueError unless the client finds these tables in its database, too: elsewhere nobody would look for what is
    done. It is asked anew before that is said, for they may have been made anew."""
    [row] = await plan.engine.call("operation_begin", {"key": "", "lease": ""})
    ours = plan.engine.state(LogLocation)
    ours.oid = Begun.of(row).home
    if ours.oid != home:
        raise ValueError(
            f"the connection is to another database than the client's, and the log of operations is in "
            f"{plan.engine.database}: only a transaction in that will do"
        )


async def undivided(plan: AsyncPlan, *, known: AsyncConnection) -> bool:
    """Whether a sovereign dataset is ours as a whole, now that one operation of it is."""
    return plan.whole is None or Begun.of(await known.write("operation_begin", plan.whole)).free


def claim(plan: AsyncPlan) -> Row:
    return {"key": plan.key.digest, "lock": plan.key.lock_key, "lease": plan.lease}


async def ready(attempt: AsyncAttempt, act: Act, prior: Prior, asked_at: float) -> AsyncRunning | Outcome:
    """It is ours: mend what a dead attempt left, and begin the next one."""
    plan = attempt.plan
    if attempt.approved:
        attempt.spend()
    op = AsyncRunning(plan.key, prior, asked_at, attempt=prior.attempt + 1)
    if act in (Act.ROLL_BACK, Act.VERIFY):
        try:
            done = await _mend(attempt, act, prior, asked_at)
        except Exception as error:
            if not attempt.passes(error):
                attempt.unmended = partial(unmended, plan, act, prior, asked_at, error)
            raise
        if done is not None:
            op.attempt = prior.attempt
            op.note("lock_acquired", plan.locked())
            return await attempt.succeed(op, done.result)
    op.note("lock_acquired", plan.locked())
    if act is Act.ROLL_BACK:
        op.note("rollback", {"attempt": prior.attempt, "name": plan.handler})
    claim_noted(op, plan)
    op.began = True  # it is not known outside before it is whole
    return op


async def _mend(attempt: AsyncAttempt, act: Act, prior: Prior, asked_at: float) -> Done | None:
    plan = attempt.plan
    if act is Act.ROLL_BACK and plan.rollback is not None:
        await attempt.undo(plan.rollback, prior, asked_at)
    elif plan.verify is not None:
        return await attempt.probe(plan.verify, prior, asked_at)
    return None
