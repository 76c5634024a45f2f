# Generated from gate_async.py by scripts/unasync.py. Do not edit.
"""Gates: closed at rest, and open only while the lease behind them is held.

A window opens a gate for a block of code; an operator may open one for a stated time. While a gate is open, nothing
else can open it, a window is closed only by its own block, and a crash closes it by expiry. The audit has an entry for
each attempt: of a window begun before it, with its outcome afterwards; of ``open`` and ``close`` in their transaction,
as the same calls from SQL leave it.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, NamedTuple

from holdfast.database.engine import LOCKED, Engine
from holdfast.errors import EngineError, PolicyDenied, Refused
from holdfast.governance.audit import Audit
from holdfast.lease.admin import Leases, Records
from holdfast.lease.grant import LeaseGrant
from holdfast.lease.handle import PATIENT, Lease
from holdfast.lease.keeper import Beat, keeper_of, keepers_of
from holdfast.lease.records import LeaseRecord
from holdfast.lease.terms import LeaseTerms
from holdfast.names import GATE, check_said, check_seconds
from holdfast.recipes.gate_terms import gate_lease, gate_terms, runtime_terms
from holdfast.runtime.clock import now
from holdfast.runtime.concurrency import current_id
from holdfast.runtime.log import WARNING, logger

log = logger("holdfast.gate")

_PATIENCE = 5.0
"""Seconds that ``close`` waits for transactions that keep the gate open."""


class GateLease(Lease):
    """Not refused while the expired row of an operator who was killed is being purged."""

    _busy_patience = PATIENT


class TimedGateLease(GateLease):
    """The lease of a gate that is opened for a time: the statement that takes it writes the audit, too."""

    def __init__(self, engine: Engine, terms: LeaseTerms, gate: str, reason: str) -> None:
        super().__init__(engine, terms, 0.0)
        self._gate, self._reason = gate, reason

    def _call(
        self, token: str, beat: Beat | None, session_key: int | None, timeout: float
    ) -> tuple[dict[str, Any], float]:
        asked_at = now()
        parameters = {
            "name": self._gate, "seconds": self._terms.ttl, "actor": self._holder, "reason": self._reason,
            "token": token, "process": self._process,
        }  # fmt: skip
        [row] = self._engine.call(
            "gate_open", parameters, timeout=timeout, on_repeat=lambda: self._repeated.append(token)
        )
        return row, asked_at


class OpenWindow(NamedTuple):
    task: int
    """The task or thread that opened it."""
    pid: int
    entry: int
    """Of the audit."""
    grant: LeaseGrant


class GateWindow:
    """``with client.gate(name, actor=…, reason=…) as grant``: the gate is open in the block. The audit records
    it."""

    def __init__(self, engine: Engine, name: str, terms: LeaseTerms, timeout: float | None, reason: str) -> None:
        self._name, self._terms, self._reason = name, terms, check_said(reason, "reason", limit=1000)
        self._lease, self._audit = GateLease(engine, terms, timeout), Audit(engine)
        self._open: list[OpenWindow] = []

    def __enter__(self) -> LeaseGrant:
        """NotAcquired when the gate is open already."""
        assert self._terms.holder is not None
        entry = self._audit.begin("gate.window", self._name, actor=self._terms.holder, reason=self._reason)
        try:
            grant = self._lease.acquire()
        except Exception as error:
            _record_outcome(self._audit, self._name, entry, _error_outcome(error))
            raise
        try:
            self._audit.note(entry, fence=grant.fence)
            self._open.append(OpenWindow(current_id(), os.getpid(), entry, grant))
            return grant
        except BaseException:
            grant._abandon()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """LeaseLost, or OwnershipUnknown, when the gate did not stay open until the end of the block."""
        # After the first window was lost a second one may be open on this object: each task closes its own.
        window = ([window for window in self._open if window.task == current_id()] or self._open)[-1]
        self._open.remove(window)
        if window.pid != os.getpid():  # in a fork: the parent closes the window and records its end
            return
        grant = window.grant
        lost = grant.lost
        outcome = "closed" if error is None else f"closed after {type(error).__name__}: {error}"
        try:
            grant.release()
        except EngineError as problem:
            grant._abandon()
            outcome = f"not closed yet, at the latest when its lease expires: {problem}"
            log.event("gate.ended", WARNING, "gate %(gate)r is %(outcome)s", gate=self._name, outcome=outcome)
        finally:
            _record_outcome(self._audit, self._name, window.entry, "lost while it was open" if lost else outcome)
        if lost and kind is None:
            grant.check()


class Gates:
    """Which gates are open, and until when."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._leases = engine, Leases(engine)

    def require(self, name: str) -> LeaseRecord:
        """The lease of an open gate, whose holder has opened it. PolicyDenied when the gate is closed."""
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

    def open(self, name: str, *, seconds: float, actor: str, reason: str) -> LeaseGrant:
        """Open a gate for ``seconds``, even if this process ends, and record it; ``close`` closes it earlier.
        NotAcquired when it is open already, which is recorded, too."""
        seconds = check_seconds(seconds, "seconds", 1.0, 86400.0)
        terms = gate_terms(name, actor=check_said(actor, "actor"), ttl=seconds, auto_renew=False)
        grant = TimedGateLease(self._engine, terms, name, check_said(reason, "reason", limit=1000)).acquire()
        grant.detach()  # it outlives this client
        keeper_of(self._engine.database).purge(after=seconds)
        return grant

    def close(self, name: str, *, actor: str, reason: str) -> bool:
        """Close a gate that was opened for a time, and record it; False when it is closed already. PolicyDenied for a
        window, which only its own block closes. What is refused is recorded, too."""
        lease = gate_lease(name)
        parameters = {
            "name": name, "actor": check_said(actor, "actor"), "reason": check_said(reason, "reason", limit=1000),
        }  # fmt: skip
        try:
            # again=None: a repeated call would find the gate closed, and record that as refused.
            [row] = self._engine.call_when_free("gate_close", parameters, patience=_PATIENCE, again=None)
        except Refused as error:
            if error.sqlstate != LOCKED:
                raise
            raise Refused(
                f"gate {name!r} cannot be closed while a transaction is open that has passed it or that its lease "
                "protects: try again",
                LOCKED,
            ) from error
        if row["answer"] == "window":
            record = self._leases.get(lease)
            holder = "its opener" if record is None else record.holder
            raise PolicyDenied(
                f"gate {name!r} is a window that {holder} has open: it closes with the block that opened it"
            )
        for keeper in keepers_of(self._engine.database):
            keeper.background.listener.wake(lease)
        return bool(row["answer"] == "closed")

    def _clear(self, name: str) -> None:
        """Delete the expired row of a gate that was opened for a time, unless this client only reads."""
        if not self._engine.read_only:
            try:
                self._engine.call("lease_clear", {"name": gate_lease(name)})
            except EngineError as error:
                log.debug("gate %r is closed, and its row is left for others to purge: %s", name, error)


def _error_outcome(error: Exception) -> str:
    """What the audit records. An acquire without an answer may have been granted, and is undone."""
    return f"{'unknown' if isinstance(error, EngineError) and not error.certain else 'refused'}: {error}"


def _record_outcome(audit: Audit, name: str, entry: int, outcome: str) -> None:
    """End the audit entry. An error is only logged: what the entry describes has happened."""
    try:
        audit.end(entry, outcome)
    except EngineError as error:
        log.event(
            "gate.unrecorded", WARNING,
            "gate %(gate)r: its audit entry %(entry)d has no outcome: %(error)s; it was: %(outcome)s",
            gate=name, entry=entry, error=str(error), outcome=outcome,
        )  # fmt: skip
