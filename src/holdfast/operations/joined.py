# Generated from joined_async.py by scripts/unasync.py. Do not edit.
"""An operation in a transaction that is open already: a part of it, as all else that is written there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from holdfast.database.connections.connection import Connection, recognise
from holdfast.database.sessions import Row
from holdfast.errors import HoldfastError
from holdfast.operations.attempt import Attempt
from holdfast.operations.decide import Act, Begun, Prior, entries_in, in_progress
from holdfast.operations.notes import failure, left, success
from holdfast.operations.outcome import Outcome
from holdfast.operations.plan import Plan
from holdfast.operations.running import Running
from holdfast.operations.transactions import Undone, ended, noticed, said_last
from holdfast.operations.within import (
    LogLocation,
    Within,
    aside,
    at_home,
    check_free,
    claim,
    is_over,
    ready,
    undivided,
)
from holdfast.runtime.clock import now


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
            if found.home != self.plan.engine.state(LogLocation).oid:
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
    check_free(connection)
    if known.in_transaction():
        return Joined(plan, known)
    return Within(plan, known, connection)
