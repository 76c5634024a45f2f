# Generated from governing_async.py by scripts/unasync.py. Do not edit.
"""What the policy says of an operation, and people: asked by every way to run one, before and under its lock.

An operation that nothing was declared of pays nothing for it. What is written here is written on a session of our own,
never while the user's transaction has SQLite's file: so it is asked before that begins, and reviews are opened after it
was rolled back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.database.sessions import Row
from holdfast.errors import OperationFailed, PolicyDenied
from holdfast.operations import decide as operation
from holdfast.operations.decide import Act, Prior
from holdfast.runtime import telemetry

if TYPE_CHECKING:
    from holdfast.governance.policy import PolicyContext
    from holdfast.operations.measured import Measured
    from holdfast.operations.plan import Plan

LATELY = 3600.0
"""Seconds: the failures that an error budget counts."""
_AHEAD = (Act.EXECUTE, Act.ROLL_BACK, Act.VERIFY, Act.RUNNING)
"""What leads to a new attempt, now or when somebody else's is over."""


class NeedsReview(Exception):
    """The policy says that somebody has to decide; what is open is rolled back before that is written down."""


class Governance:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tried = 0
        """How often it was tried in this run already."""
        self.approved = False
        """Somebody has approved a review of it: once, whatever it was about."""
        self._approval: int | None = None
        """The number of that review."""
        self.measured: Measured | None = None
        """The run that it is part of, if anybody listens."""

    def decide(self, prior: Prior) -> Act:
        terms = self.plan.terms
        return operation.decide(
            prior, self.plan.fingerprint, max_attempts=terms.max_attempts, on_partial=terms.on_partial,
            undoes=self.plan.rollback is not None, approved=self.approved, reuse=terms.reuse,
        )  # fmt: skip

    def permit(self) -> None:
        """Before it is claimed, and before anything is locked."""
        plan = self.plan
        if plan.governed is None and plan.terms.when_locked != "escalate":
            return
        [row] = plan.engine.call("operation_get", {"key": plan.key.digest})
        prior = Prior.of(row)
        act = self.decide(prior)
        if act in _AHEAD:
            if not self.approved:
                self.stand()
            if act is not Act.RUNNING:
                self._ask(prior)

    def permit_locked(self, prior: Prior) -> None:
        """Under the lock, once more, because it may have become another attempt while it was waited for."""
        if self.plan.governed is not None:
            self._ask(prior)
            self.permit_held(prior)

    def permit_held(self, prior: Prior) -> None:
        """That the lock is ours, with what others have done to the same data."""
        kin = self.kin() if self.is_sensitive else {}
        found = {"same_as": kin.get("same"), "retry_of": kin.get("retry_of")}
        self._heed(self._context("locked", prior, lock="held", **found))

    @property
    def is_sensitive(self) -> bool:
        governed = self.plan.governed
        return governed is not None and governed.demands.sensitive and self.plan.key.dataset is not None

    def permit_replay(self, prior: Prior) -> None:
        """Before the recorded result is given again."""
        if self.plan.governed is not None:
            self._heed(self._context("replay", prior, attempt=prior.attempt))

    def escalate(self, prior: Prior) -> None:
        """Somebody else has the lock: return when it may be waited for, or whatever the operation says."""
        plan = self.plan
        why = f"{plan.key.label} is locked by somebody else" if plan.terms.when_locked == "escalate" else None
        if plan.governed is not None:
            from holdfast.governance.policy import Deny, Review

            context = self._context("locked", prior, lock="busy")
            match plan.governed.policy(context):
                case Deny(reason):
                    self.locked_out("denied")
                    raise _denied(context, reason)
                case Review(reason):
                    why = reason
        if why is not None:
            self.locked_out("review")
            number = self.review("locked", why)
            told = f"somebody else is at it, and it is up for review as number {number}"
            raise operation.in_progress(plan.key, why=told)

    def locked_out(self, reason: str) -> None:
        """It does not get its lock, and this is what becomes of it."""
        if telemetry.listeners:
            from holdfast.operations.measured import labels

            about = labels(self.plan.key, sovereign=self.plan.terms.sovereign)
            telemetry.tell("operation.locked_out", **about, reason=reason)

    def stand(self) -> bool:
        """Whether somebody has approved that it is tried once more, which is used up by that. PolicyDenied when it was
        rejected, or is still to be decided."""
        key = self.plan.key
        said = self.told("review_take", {"key": key.digest})
        if said.get("id") is None or (said["outcome"] == "open" and self.plan.governed is None):
            return False
        if said["outcome"] == "rejected":
            raise PolicyDenied(
                f"operation {key.label!r} was rejected by {said['actor']}: {said['answer']}. It is refused until it is "
                "reset",
                review=said["id"],
            )
        if said["outcome"] == "open":
            raise _up_for_review(key.label, "", said["id"])
        self.approved, self._approval = True, said["id"]
        return True

    def spend(self) -> None:
        """It is tried: what was approved is used up."""
        self._approval = None

    def not_begun(self) -> None:
        """Somebody else had its lock, or it was refused, or the database could not be asked: what was approved is there
        for the next one who asks."""
        if self._approval is not None:
            self.told("review_return", {"id": self._approval})
            self.approved, self._approval = False, None

    def refused(self, error: OperationFailed) -> bool:
        """One that is never tried again by itself goes to the people who look; True when they have said that it may be
        tried once more."""
        if error.error is not None and error.error.get("remembered"):
            return False
        if self.stand():
            return True
        self.review("attempts", str(error))
        return False

    def reviewed(self, need: NeedsReview) -> None:
        """As the policy wants it: return when somebody has approved it, else PolicyDenied."""
        if not self.stand():
            raise _up_for_review(self.plan.key.label, f": {need}", self.review("policy", str(need)))

    def review(self, reason: str, detail: str) -> int:
        key = self.plan.key
        asked = {"key": key.digest, "label": key.label, "dataset": key.dataset, "operation": key.operation}
        row = self.told("review_open", {**asked, "reason": reason, "detail": operation.writable(detail)})
        number: int = row["id"]
        return number

    def kin(self) -> Row:
        """Other operations that it has to do with: that did the same, or that it may be a retry of."""
        [row] = self.plan.engine.call("operation_kin", self.transformation())
        return row

    def transformation(self) -> Row:
        names = ("pipeline", "task", "dataset", "operation", "checksum", "params_hash")
        return {"key": self.plan.key.digest, **{name: getattr(self.plan.key, name) for name in names}}

    def told(self, statement: str, parameters: Row) -> Row:
        rows = self.plan.engine.call(statement, parameters)
        return rows[0] if rows else {}

    def _ask(self, prior: Prior) -> None:
        governed = self.plan.governed
        if governed is None:
            return
        retry, failed = not prior.fresh or self.tried > 0, None
        if retry and governed.demands.budget:
            asked = {"dataset": self.plan.key.dataset, "seconds": LATELY}
            [row] = self.plan.engine.call("operation_failed", asked)
            failed = row["failed"] + max(0, self.tried - prior.failures)  # those that no log knows of yet
        self._heed(self._context("retry" if retry else "claim", prior, failed_lately=failed))

    def _heed(self, context: PolicyContext) -> None:
        from holdfast.governance.policy import Deny, Review

        assert self.plan.governed is not None
        match self.plan.governed.policy(context):
            case Deny(reason):
                raise _denied(context, reason)
            case Review(reason) if not self.approved:
                raise NeedsReview(reason)

    def _context(self, moment: Any, prior: Prior, **more: Any) -> PolicyContext:
        from holdfast.governance.policy import PolicyContext

        key, terms, governed = self.plan.key, self.plan.terms, self.plan.governed
        assert governed is not None
        return PolicyContext(**{
            "moment": moment, "key": key.digest, "label": key.label, "dataset": key.dataset,
            "operation": key.operation, "pipeline": key.pipeline, "task": key.task, "checksum": key.checksum,
            "params_hash": key.params_hash, "attempt": max(prior.attempt, self.tried) + 1, "failures": prior.failures,
            "sovereign": terms.sovereign, "actor": terms.actor, "justification": terms.justification,
            "exposed": governed.exposed, "inputs": self.plan.lineage.inputs, "outputs": self.plan.lineage.outputs,
            **more,
        })  # fmt: skip


def _denied(context: PolicyContext, reason: str) -> PolicyDenied:
    return PolicyDenied(f"operation {context.label!r}: {reason}")


def _up_for_review(label: str, why: str, number: int) -> PolicyDenied:
    return PolicyDenied(
        f"operation {label!r} is up for review as number {number}{why}. Approve that, and run it again", review=number
    )
