# Generated from policy_checks_async.py by scripts/unasync.py. Do not edit.
"""The checks of a policy, and reviews, for one attempt at an operation.

    before the claim     check_claim       claim | retry
    under the lock       check_locked      claim | retry, then "held": what others did to the same data
    lock is taken        check_busy        "busy"
    before a replay      check_replay      replay

A rule denies (PolicyDenied), asks for a review (NeedsReview), or allows. An approved review allows one attempt.

An operation without a policy is checked only if ``when_locked="escalate"`` may have opened a review of it.

On SQLite reviews are written by a session of our own, which waits while the user's transaction writes: so checks that
write run before that begins or after it was rolled back.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from holdfast.database.connections.connection import Connection
from holdfast.database.sessions import Row
from holdfast.errors import OperationFailed, PolicyDenied
from holdfast.operations.decide import Decision, Prior, storable_text
from holdfast.runtime.identity import new_token

if TYPE_CHECKING:
    from holdfast.governance.policy import PolicyContext
    from holdfast.operations.spec import OperationSpec

BUDGET_SECONDS = 3600.0
"""An error budget counts the failures of this time."""
_LEADS_TO_ATTEMPT = (Decision.EXECUTE, Decision.ROLL_BACK, Decision.VERIFY, Decision.RUNNING)


class PolicyChanged(PolicyDenied):
    """The attempt was not checked under the stored policy that is in force. Caught by the attempt, which reads that and
    begins again."""


class NeedsReview(Exception):
    """A rule asks for a review. Caught by the attempt, which ends its transaction before it opens the review."""


class PolicyChecks:
    """``tries``: how often this run has tried before. ``connection``: the caller's open transaction, if the attempt is
    part of it."""

    is_approved = False
    """A review allows one attempt."""
    is_uncommitted = False
    """The row of the operation was written by the caller's transaction: no other session sees it yet."""
    approval: int | None = None
    """The number of that review."""
    _review: int | None = None
    """The same, until it is spent."""

    def __init__(self, spec: OperationSpec, tries: int, connection: Connection | None = None) -> None:
        self._spec, self._tries, self._connection = spec, tries, connection
        self._token = new_token()
        """Only who took an approval returns it."""

    @property
    def is_sensitive(self) -> bool:
        """Whether operations that did the same to the data matter to the policy."""
        governed = self._spec.governed
        return governed is not None and governed.demands.sensitive and self._spec.key.dataset is not None

    def check_claim(self, decision: Decision, prior: Prior) -> None:
        """Before the claim, without any lock: take an approval if there is one, and ask the policy. While another
        attempt runs (RUNNING) the policy is asked later, under the lock, when it is known how that attempt ended."""
        if decision in _LEADS_TO_ATTEMPT:
            if not self.is_approved:
                self.take_approval()
            if decision is not Decision.RUNNING:
                self._check_attempt(prior)

    def check_locked(self, prior: Prior) -> None:
        """Under the lock, once more: the wait for it may have made this another attempt."""
        self._check_attempt(prior)
        self.check_held(prior)

    def check_held(self, prior: Prior) -> None:
        """The lock is ours: check with what others have done to the same data."""
        related = self._fetch_related() if self.is_sensitive else {}
        fields = {"same_as": related.get("same"), "retry_of": related.get("retry_of")}
        self._enforce(self._context("locked", prior, lock="held", **fields))

    def check_busy(self, prior: Prior) -> str | None:
        """Another owner has the lock. Returns the reason of a review that the policy asks for; None: it may be waited
        for, as the terms say. PolicyDenied when the policy forbids it."""
        from holdfast.governance.policy import Deny, Review

        assert self._spec.governed is not None
        context = self._context("locked", prior, lock="busy")
        match self._spec.governed.policy(context):
            case Deny(reason):
                raise _denied(context, reason)
            case Review(reason):
                return reason
        return None

    def check_replay(self, prior: Prior) -> None:
        """Before a recorded result is returned."""
        self._enforce(self._context("replay", prior, attempt=prior.attempt))

    def _check_attempt(self, prior: Prior) -> None:
        governed = self._spec.governed
        if governed is None:
            return
        is_retry, failed = not prior.is_new or self._tries > 0, None
        if is_retry and governed.demands.budget:
            parameters = {"dataset": self._spec.key.dataset, "seconds": BUDGET_SECONDS}
            [row] = self._spec.engine.call("operation_failed", parameters)
            failed = row["failed"] + max(0, self._tries - prior.failures)  # those of this run are not in the log yet
        self._enforce(self._context("retry" if is_retry else "claim", prior, failed_lately=failed))

    def _enforce(self, context: PolicyContext) -> None:
        from holdfast.governance.policy import Deny, Review

        assert self._spec.governed is not None
        match self._spec.governed.policy(context):
            case Deny(reason):
                raise _denied(context, reason)
            case Review(reason) if not self.is_approved:
                raise NeedsReview(reason)

    def _context(self, moment: Any, prior: Prior, **more: Any) -> PolicyContext:
        from holdfast.governance.policy import PolicyContext

        key, terms, governed = self._spec.key, self._spec.terms, self._spec.governed
        assert governed is not None
        return PolicyContext(**{
            "moment": moment, "key": key.digest, "label": key.label, "dataset": key.dataset,
            "operation": key.operation, "pipeline": key.pipeline, "task": key.task, "checksum": key.checksum,
            "params_hash": key.params_hash, "bucket": key.bucket, "version": key.version,
            "attempt": max(prior.attempt, self._tries) + 1, "failures": prior.failures,
            "sovereign": self._spec.sovereign, "actor": terms.actor, "justification": terms.justification,
            "exposed": governed.exposed, "inputs": self._spec.lineage.inputs, "outputs": self._spec.lineage.outputs,
            **more,
        })  # fmt: skip

    # Reviews

    def take_approval(self) -> bool:
        """Take the approval of a review, which allows one attempt; False when there is none. PolicyDenied when the
        review was rejected, or is still open."""
        key = self._spec.key
        review = self._fetch_row("review_take", {"key": key.digest, "token": self._token, **self._asked()})
        if review.get("id") is None or (review["outcome"] == "open" and self._spec.governed is None):
            return False
        if review["outcome"] == "rejected":
            raise PolicyDenied(
                f"operation {key.label!r} was rejected by {review['actor']}: {review['answer']}. It is refused until "
                "it is reset",
                review=review["id"],
            )
        if review["outcome"] == "open":
            raise _under_review(key.label, "", review["id"])
        self.is_approved, self._review, self.approval = True, review["id"], review["id"]
        return True

    def spend_approval(self) -> None:
        """The attempt begins: its approval is used up."""
        self._review = None

    def return_approval(self) -> None:
        """The attempt did not begin: its approval is there for the next one."""
        if self._review is not None:
            self._fetch_row("review_return", {"id": self._review, "token": self._token})
            self.is_approved, self._review, self.approval = False, None, None

    def review_refusal(self, error: OperationFailed) -> bool:
        """Open a review for an operation that is not tried again by itself; True when one was approved already."""
        if error.error is not None and error.error.get("remembered"):
            return False
        if self.take_approval():
            return True
        self.open_review("attempts", str(error))
        return False

    def review_need(self, need: NeedsReview) -> None:
        """Return if a review was approved already; else open one and raise PolicyDenied."""
        if not self.take_approval():
            raise _under_review(self._spec.key.label, f": {need}", self.open_review("policy", str(need)))

    def open_review(self, reason: str, detail: str) -> int:
        """The number of the review, a new one or the one that is open."""
        key = self._spec.key
        parameters = {"key": key.digest, "label": key.label, "dataset": key.dataset, "operation": key.operation}
        why = {"reason": reason, "detail": storable_text(detail)}
        governed = self._spec.governed
        four_eyes = governed is not None and governed.demands.four_eyes
        row = self._fetch_row("review_open", {**parameters, **why, **self._asked(), "four_eyes": four_eyes})
        number: int = row["id"]
        return number

    def _asked(self) -> Row:
        """What an approval holds for, beside the key."""
        spec, outputs = self._spec, sorted(set(self._spec.lineage.outputs))
        return {"fingerprint": spec.fingerprint, "asked_by": spec.terms.actor, "outputs": json.dumps(outputs)}

    def _fetch_row(self, statement: str, parameters: Row) -> Row:
        """In the caller's transaction if only that can do it: on SQLite it is the only writer, and a row that it has
        not committed is visible to no other session."""
        connection = self._connection
        if connection is not None and (self.is_uncommitted or self._spec.engine.database.dialect == "sqlite"):
            return connection.write(statement, parameters)
        rows = self._spec.engine.call(statement, parameters)
        return rows[0] if rows else {}

    def _fetch_related(self) -> Row:
        """Other operations that did the same, or that this may be a retry of. The caller's transaction is asked, too:
        it sees its own writes, and may not see the latest of others. Without a checksum, another bucket of time is
        another input."""
        key = self._spec.key
        names = ("pipeline", "task", "dataset", "operation", "checksum", "params_hash")
        parameters = {"key": key.digest, **{name: getattr(key, name) for name in names}}
        own = None if self._connection is None else self._connection.write("operation_kin", parameters)
        [row] = self._spec.engine.call("operation_kin", parameters)
        related = row if own is None else {name: own[name] or row[name] for name in row}
        return {**related, "same": None} if key.checksum is None and key.bucket is not None else related


def _denied(context: PolicyContext, reason: str) -> PolicyDenied:
    return PolicyDenied(f"operation {context.label!r}: {reason}")


def _under_review(label: str, why: str, number: int) -> PolicyDenied:
    return PolicyDenied(
        f"operation {label!r} is up for review as number {number}{why}. Approve that, and run it again", review=number
    )
