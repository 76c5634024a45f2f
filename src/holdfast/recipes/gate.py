# Generated from gate_async.py by scripts/unasync.py. Do not edit.
"""Gates: closed at rest, and open only while the lease behind them is alive.

A window opens a gate for a block of code; an operator may hold one for a stated time. Either way nobody else opens it
meanwhile, nobody closes it underneath, and a crash closes it by expiry.
"""

from __future__ import annotations

import os
from types import TracebackType

from holdfast.database.engine import Engine
from holdfast.errors import EngineError, PolicyDenied
from holdfast.governance.audit import Audit
from holdfast.lease.admin import Leases, Records
from holdfast.lease.grant import LeaseGrant
from holdfast.lease.handle import PATIENT, Lease
from holdfast.lease.keeper import keeper_of
from holdfast.lease.terms import LeaseTerms
from holdfast.names import check_said, check_seconds
from holdfast.recipes.gate_terms import GATE, gate_lease, gate_terms, runtime_terms
from holdfast.records import LeaseRecord
from holdfast.runtime.concurrency import current_id
from holdfast.runtime.log import logger

log = logger("holdfast.gate")


class GateLease(Lease):
    """One whose operator was killed is just being cleared away, and nobody's."""

    _busy_patience = PATIENT


class GateWindow:
    """``with client.gate(name, actor=…, reason=…) as grant``: open in the block, for the record."""

    def __init__(self, engine: Engine, name: str, terms: LeaseTerms, timeout: float | None, reason: str) -> None:
        self._name, self._terms, self._reason = name, terms, check_said(reason, "reason", most=1000)
        self._lease, self._audit = GateLease(engine, terms, timeout), Audit(engine)
        self._open: list[tuple[int, int, int, LeaseGrant]] = []

    def __enter__(self) -> LeaseGrant:
        assert self._terms.holder is not None
        entry = self._audit.begin("gate.window", self._name, actor=self._terms.holder, reason=self._reason)
        try:
            grant = self._lease.acquire()
        except Exception as error:
            _tell(self._audit, self._name, entry, _not_opened(error))
            raise
        try:
            self._audit.note(entry, fence=grant.fence)
            self._open.append((current_id(), os.getpid(), entry, grant))
            return grant
        except BaseException:
            grant.abandon()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Two may be open here, once the first was lost: each leaves its own.
        mine = [each for each in self._open if each[0] == current_id()] or self._open
        self._open.remove(opened := mine[-1])
        _, pid, entry, grant = opened
        if pid != os.getpid():  # a fork of it: how the window ends is not for us to tell
            return
        lost = grant.lost
        outcome = "closed" if error is None else f"closed after {type(error).__name__}: {error}"
        try:
            grant.release()
        except EngineError as problem:
            grant.abandon()
            outcome = f"not closed yet, at the latest when its lease expires: {problem}"
            log.warning(
                "gate %r is %s",
                self._name,
                outcome,
                extra={"event": "gate.ended", "gate": self._name, "outcome": outcome},
            )
        finally:
            _tell(self._audit, self._name, entry, "lost while it was open" if lost else outcome)
        if lost and kind is None:
            grant.check()


class Gates:
    """Which gates are open, and until when."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._leases, self._audit = engine, Leases(engine), Audit(engine)

    def require(self, name: str) -> LeaseRecord:
        """PolicyDenied unless the gate is open; who has opened it, as its lease says."""
        record = self._leases.get(gate_lease(name))
        if record is None:
            self._clear(name)
            raise PolicyDenied(
                f"gate {name!r} is closed: open it with client.gate({name!r}, actor=…, reason=…), or for a while with "
                f"'holdfast do gate.open'"
            )
        return record

    def list(self) -> Records:
        """The leases of all gates that are open."""
        return [each for each in self._leases.list() if each.name.startswith(GATE)]

    def runtime(self, *, ttl: float = 30.0, timeout: float | None = 0.0) -> Lease:
        """The lease that every governed command runs inside, so that there is one at a time."""
        return Lease(self._engine, runtime_terms(ttl), timeout)

    def open(self, name: str, *, seconds: float, actor: str, reason: str, entry: int | None = None) -> LeaseGrant:
        """Open it for so long, whatever becomes of this process; ``close`` closes it earlier. NotAcquired when it is
        open already. ``entry``: of the audit, where this is told already."""
        terms = gate_terms(name, actor=actor, ttl=check_seconds(seconds, "seconds", 1.0, 86400.0), auto_renew=False)
        told = entry if entry is not None else self._begin("gate.open", name, actor, reason)
        try:
            grant = GateLease(self._engine, terms, 0.0, {"for": seconds, "reason": reason[:500]}).acquire()
        except Exception as error:
            if entry is None:
                _tell(self._audit, name, told, _not_opened(error))
            raise
        try:
            self._audit.note(told, fence=grant.fence)
            if entry is None:
                _tell(self._audit, name, told, f"open for {seconds:g} s")
        except BaseException:
            grant.abandon()  # nobody is told that it is open
            raise
        grant.detach()  # it outlives this client
        keeper_of(self._engine.database).purge(after=seconds)
        return grant

    def close(self, name: str, *, actor: str, reason: str, entry: int | None = None) -> bool:
        """Close one that was opened for a time; False when it is closed. PolicyDenied for a window, which only whoever
        opened it closes."""
        record = self._leases.get(gate_lease(name))
        if record is not None and "for" not in record.info:
            raise PolicyDenied(f"gate {name!r} is a window that {record.holder} has open, and closes with its work")
        told = entry if entry is not None else self._begin("gate.close", name, actor, reason)
        try:
            done = record is not None and self._leases.force_release(
                record.name, actor=actor, reason=reason, fence=record.fence
            )
        except EngineError as error:
            if entry is None:
                _tell(self._audit, name, told, f"{'refused' if error.certain else 'unknown'}: {error}")
            raise
        if entry is None:
            _tell(self._audit, name, told, "closed" if done else "refused: it is closed")
        return done

    def _clear(self, name: str) -> None:
        """One that was open for a time leaves nothing, once somebody has asked for it."""
        if not self._engine.read_only:
            try:
                self._engine.call("lease_clear", {"name": gate_lease(name)})
            except EngineError as problem:
                log.debug("gate %r is closed, and its row is left for others to purge: %s", name, problem)

    def _begin(self, action: str, name: str, actor: str, reason: str) -> int:
        return self._audit.begin(action, name, actor=actor, reason=reason)


def _not_opened(error: Exception) -> str:
    """What was asked for and not answered may have been granted; it is given back."""
    return f"{'unknown' if isinstance(error, EngineError) and not error.certain else 'refused'}: {error}"


def _tell(audit: Audit, name: str, entry: int, outcome: str) -> None:
    """It has happened, whether that can be told or not."""
    try:
        audit.end(entry, outcome)
    except EngineError as problem:
        log.warning(
            "gate %r: its audit entry %d has no outcome: %s; it was: %s",
            name,
            entry,
            problem,
            outcome,
            extra={"event": "gate.unrecorded", "gate": name, "outcome": outcome},
        )
