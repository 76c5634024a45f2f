# Generated from _async/primitives/operations/within.py by scripts/unasync.py. Do not edit.
"""An operation whose effect is what it writes in the user's own database: claim, effect, result and entries are one
transaction, so it happens exactly once.

While it runs, its transaction has the advisory lock of its dataset and operation (on SQLite, the file). Nothing is
there before the commit, so a process that dies leaves nothing, and whoever waits tries again by itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from holdfast._sync.primitives.connections import Connection, recognise
from holdfast._sync.primitives.connections.phrasing import ENDED
from holdfast._sync.primitives.connections.sqlalchemy import SqlAlchemy, subject_of
from holdfast._sync.primitives.connections.sqlite import Sqlite3
from holdfast._sync.primitives.operations.attempt import Attempt, around
from holdfast._sync.primitives.operations.notes import claim_noted, failure, left, success, unmended
from holdfast._sync.primitives.operations.plan import Plan
from holdfast._sync.primitives.operations.running import Done, Running
from holdfast._sync.primitives.operations.transactions import Undone, ended, noticed, owned, said_last
from holdfast._wire import Row, drivers
from holdfast._wire.clock import now
from holdfast._wire.waiting import here
from holdfast.core.errors import HoldfastError
from holdfast.core.operation import Act, Begun, Prior, collides, entries_in, in_progress
from holdfast.core.outcome import Outcome

PASSES = 10
"""How often a transaction is begun again because others got in its way."""


class Within(Attempt):
    """In a transaction that it begins and commits."""

    def __init__(self, plan: Plan, known: Connection, connection: Any) -> None:
        super().__init__(plan)
        self._known, self._transaction = known, owned(plan.engine.database, known, connection)
        self._connection, self._whose = id(subject_of(connection)), here()
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
                if found.home != self.plan.engine.home:
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
        return self._whose == here() or self in around()

    def elsewhere(self) -> RuntimeError:
        return RuntimeError(
            f"this connection is in the middle of operation {self.plan.key.label!r}, which somebody else runs: what is "
            "written here now would be committed with that, or go with it. Use a connection for each"
        )


_open: dict[int, Within] = {}
"""Those that are under way, by the connection that they have."""


class Joined(Attempt):
    """In a transaction that is open already, and that the caller commits. Of what fails there stays in it that it was
    tried: whoever goes on after the error commits that, and whoever rolls back takes it back with all the rest."""

    def __init__(self, plan: Plan, known: Connection) -> None:
        super().__init__(plan)
        self._known = known
        self._began: str | None = None
        self._unseen = False
        """What is known of it is what this transaction has written, and nobody else sees it yet."""
        self._blocks: list[AbstractContextManager[Any]] = []

    def _begin(self) -> Running | Outcome:
        started, asked = now(), 0
        while True:
            asked_at = now()
            found = Begun.of(self._known.write("operation_begin", claim(self.plan)))
            if found.home != self.plan.engine.home:
                at_home(self.plan, found.home)
            prior = found.prior
            act = self.decide(prior)
            self._unseen = act in (Act.REPLAY, Act.EXPIRED, Act.EXHAUSTED) and self._is_unseen(prior)
            if (outcome := self.settled(act, prior)) is not None:
                return replace(outcome, committed=not self._unseen)
            found.check_writable(self.plan.key)
            if found.free and act is not Act.RUNNING and undivided(self.plan, known=self._known):
                if self.in_its_own_way(same_key=True):
                    self.locked_out("reentered")
                    raise in_progress(self.plan.key, why="it is inside of itself")
                self.permit_locked(prior)
                self.prior, self._began = prior, found.began
                self.precede()
                self._enter()
                try:
                    return ready(self, act, prior, asked_at)
                except BaseException:
                    if self._undo() and self.unmended is not None:
                        self._record(self.unmended(began=self._began, late=True))
                    raise
            if found.fixed and self.plan.terms.when_locked in ("wait", "backoff"):
                self.escalate(prior)
                self.locked_out("snapshot")
                raise in_progress(
                    self.plan.key,
                    why="somebody else is at it, and this transaction would not see its result: roll back, then again",
                )
            if (outcome := self.locked(prior, asked, started)) is not None:
                return outcome
            asked += 1

    def _enter(self) -> None:
        """A savepoint; in a file two of them. The end of the inner one tells that the function has left them alone, and
        what is written then is taken back with the outer one, with the effect, if that is interrupted."""
        for _ in range(1 + self._is_file):
            self._blocks.append(self._known.nested())
            self._blocks[-1].__enter__()

    def succeed(self, op: Running, value: Any) -> Outcome:
        parameters = success(self, op, value, self._began)
        with noticed(op.key.label):
            self._known.flush()
        if self._is_file:
            self._keep(op)
        row = said_last(self._known, "operation_end", parameters)
        if row["state"] != "done":
            raise self._overtaken()
        self._keep(op)
        return Outcome("success", False, op.attempt, committed=False, value=value)

    def _keep(self, op: Running) -> None:
        """What it wrote is no more to be undone apart from the transaction."""
        with noticed(op.key.label):
            self._blocks.pop().__exit__(None, None, None)

    def _overtaken(self) -> HoldfastError:
        return in_progress(self.plan.key, why="somebody else was at it meanwhile: roll back, then again")

    @property
    def _is_file(self) -> bool:
        return self.plan.engine.database.dialect == "sqlite"

    def fail(self, op: Running, error: BaseException) -> bool:
        over = ended(error) or is_over(self._known, self._began, error)
        undone = self._undo()
        if over and not self._is_file:  # that may be the caller's still
            aside(self, left(self, op, error))
        elif undone and not over and isinstance(error, Exception) and not self.passes(error):
            self._record(failure(self, op, error, began=self._began, late=True))
        return False

    def _undo(self) -> bool:
        """Back to where it began; False when that cannot be, because the transaction is over or the connection is."""
        if not self._blocks:
            return False
        try:
            while self._blocks:
                self._blocks[-1].__exit__(Undone, Undone(), None)
                self._blocks.pop()
        except Exception:
            self._blocks.clear()
            return False
        return self._known.in_transaction()

    def drop(self) -> None:
        super().drop()
        self._undo()

    def _record(self, parameters: Row) -> None:
        """If that cannot be, it is raised instead: nobody must commit the transaction as if it had not been tried."""
        with self._known.nested() if self._is_file else nullcontext():  # there it takes several statements
            row = self._known.write("operation_end", parameters)
        if row["state"] != "done":
            raise self._overtaken()

    def _is_unseen(self, prior: Prior) -> bool:
        [row] = self.plan.engine.call("operation_get", {"key": self.plan.key.digest})
        return entries_in(row["pointer"]) < entries_in(prior.pointer)

    def told(self, statement: str, parameters: Row) -> Row:
        """A file has one writer at a time, and that is this transaction: there it is a part of it. So it is where
        nobody else sees yet what it is about."""
        return (self._known.write if self._is_file or self._unseen else super().told)(statement, parameters)

    def kin(self) -> Row:
        """What this very transaction has done is seen by nobody else; and what it sees may be old."""
        here = self._known.write("operation_kin", self.transformation())
        there = super().kin()
        return {name: here[name] or there[name] for name in there}


def within(plan: Plan, connection: Any) -> Within | Joined:
    known = recognise(plan.engine.database, connection, "the log of operations is")
    if (busy := _open.get(id(subject_of(connection)))) is not None and not busy.surrounds():
        raise busy.elsewhere()
    if known.in_transaction():
        return Joined(plan, known)
    return Within(plan, known, connection)


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


def at_home(plan: Plan, home: int | None) -> None:
    """ValueError unless the client finds these tables in its database, too: elsewhere nobody would look for what is
    done. It is asked anew before that is said, for they may have been made anew."""
    [row] = plan.engine.call("operation_begin", {"key": "", "lease": ""})
    plan.engine.home = Begun.of(row).home
    if plan.engine.home != home:
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
