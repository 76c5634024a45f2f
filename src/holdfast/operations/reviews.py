# Generated from reviews_async.py by scripts/unasync.py. Do not edit.
"""``client.reviews``: operations that need a person's decision.

An approval allows one more attempt, of the next run. A rejection refuses the operation until it is reset. Both close
the review; the answer stays on record.
"""

from __future__ import annotations

from typing import Literal

from holdfast.database.engine import Engine
from holdfast.errors import Conflict, PolicyDenied, Refused
from holdfast.governance.policies import Policies
from holdfast.keys import OperationKey, as_key
from holdfast.names import check_limit, check_max_bytes, check_said
from holdfast.operations.decide import POLICY_DENIES
from holdfast.operations.outcome import OperationRecord, policy_fields
from holdfast.operations.review_record import ReviewRecord

Records = list[ReviewRecord]
_STATUSES = ("open", "approved", "rejected", "reset", "done")


class Reviews:
    """``client.reviews``: list reviews, approve and reject them."""

    def __init__(self, engine: Engine, policies: Policies) -> None:
        self._engine, self._policies = engine, policies

    def list(
        self, *, status: str | None = "open", key: OperationKey | str | None = None, limit: int = 100,
        max_bytes: int | None = None,
    ) -> Records:  # fmt: skip
        """The oldest first. ``status``: open | approved | rejected | reset | done (the operation was done after the
        review was opened); None: all. ``key``: of one operation. ``max_bytes``: the list ends before the record whose
        texts would make it larger, unless that is its first one."""
        if status is not None and status not in _STATUSES:
            raise ValueError(f"status must be one of {', '.join(_STATUSES)}, not {status!r}")
        digest = None if key is None else as_key(key).digest
        parameters = {
            "status": status, "id": None, "key": digest, "limit": check_limit(limit),
            "max_bytes": check_max_bytes(max_bytes),
        }  # fmt: skip
        return [ReviewRecord._of(row) for row in self._engine.call("review_list", parameters)]

    def get(self, number: int) -> ReviewRecord | None:
        """The review with that number, whatever its status, or None."""
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"number must be the int of a review, not {type(number).__name__}")
        if not 0 < number < 2**63:  # the range of the column
            return None
        rows = self._engine.call("review_list", {"status": None, "id": number, "key": None, "limit": 1})
        return ReviewRecord._of(rows[0]) if rows else None

    def approve(self, number: int, *, actor: str, reason: str) -> None:
        """Allow one more attempt, of the next run. Governed: ``review.approve``."""
        self._decide(number, "approved", actor, reason)

    def reject(self, number: int, *, actor: str, reason: str) -> None:
        """Refuse the operation until it is reset. Governed: ``review.reject``."""
        self._decide(number, "rejected", actor, reason)

    def _decide(self, number: int, outcome: Literal["approved", "rejected"], actor: str, reason: str) -> None:
        """LookupError when there is no such review, PolicyDenied when the policy does not allow it, Conflict when it
        is not open. The same decision may be repeated."""
        check_said(actor, "actor")
        check_said(reason, "reason", 1000)
        record = self.get(number)
        if record is None:
            raise LookupError(f"there is no review {number}")
        self._policies._refresh()
        if (rules := self._policies._rules) is not None:
            rows = self._engine.call("operation_list", {"key": record.key, "limit": 1})
            subject = OperationRecord._of(rows[0]) if rows else record
            asked_by = record.asked_by if outcome == "approved" else None
            rules.permit("review", actor=actor, justification=reason, asked_by=asked_by, **policy_fields(subject))
        parameters = {"id": number, "outcome": outcome, "actor": actor, "answer": reason}
        try:
            [row] = self._engine.call("review_decide", parameters)
        except Refused as error:
            if error.sqlstate != POLICY_DENIES:
                raise
            raise PolicyDenied(str(error), review=number) from error
        if not row["decided"]:
            now = self.get(number)
            if now is None or (now.status, now.actor, now.answer) != (outcome, actor, reason):
                is_done = now is not None and now.status == "done"
                why = "its operation has been done" if is_done else "it has another answer"
                raise Conflict(f"review {number} is not open any more: {why}", current=None)
