# Generated from reviews_async.py by scripts/unasync.py. Do not edit.
"""Reviews: operations that somebody has to look at, and what they say.

An approval lets the operation be tried once more, by whoever asks for it next. A rejection has it refused until it is
reset. Both close the review; what was said stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from holdfast.database.engine import Engine
from holdfast.errors import Conflict
from holdfast.keys import OperationKey, as_key
from holdfast.names import check_limit, check_said
from holdfast.operations.outcome import OperationRecord, known
from holdfast.operations.review_record import ReviewRecord

if TYPE_CHECKING:
    from holdfast.governance.policy import Policy

Records = list[ReviewRecord]
_STATUSES = ("open", "approved", "rejected", "reset", "done")


class Reviews:
    """``client.reviews``: operations that wait for somebody's word, and those that have had it."""

    def __init__(self, engine: Engine, rules: Policy | None) -> None:
        self._engine, self._rules = engine, rules

    def list(self, *, status: str | None = "open", key: OperationKey | str | None = None, most: int = 100) -> Records:
        """The oldest first. ``status``: open | approved | rejected | reset | done (the operation was, since it was
        opened); None: all. ``key``: of one operation."""
        if status is not None and status not in _STATUSES:
            raise ValueError(f"status must be one of {', '.join(_STATUSES)}, not {status!r}")
        only = None if key is None else as_key(key).digest
        asked = {"status": status, "id": None, "key": only, "most": check_limit(most)}
        return [ReviewRecord.of(row) for row in self._engine.call("review_list", asked)]

    def get(self, number: int) -> ReviewRecord | None:
        """The review of that number, whatever was said of it, or None."""
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"number must be that of a review, an int, not {type(number).__name__}")
        if not 0 < number < 2**63:  # no table has more
            return None
        asked = {"status": None, "id": number, "key": None, "most": 1}
        rows = self._engine.call("review_list", asked)
        return ReviewRecord.of(rows[0]) if rows else None

    def approve(self, number: int, *, actor: str, reason: str) -> None:
        """Let the operation be tried once more, by whoever asks for it next. Governed: ``review.approve``."""
        self._decide(number, "approved", actor, reason)

    def reject(self, number: int, *, actor: str, reason: str) -> None:
        """Have the operation refused until it is reset. Governed: ``review.reject``."""
        self._decide(number, "rejected", actor, reason)

    def _decide(self, number: int, outcome: Literal["approved", "rejected"], actor: str, reason: str) -> None:
        check_said(actor, "actor")
        check_said(reason, "reason", 1000)
        record = self.get(number)
        if record is None:
            raise LookupError(f"there is no review {number}")
        if self._rules is not None:
            begun = self._engine.call("operation_list", {"key": record.key, "most": 1})
            subject = OperationRecord.of(begun[0]) if begun else record
            self._rules.permit("review", actor=actor, justification=reason, **known(subject))
        said = {"id": number, "outcome": outcome, "actor": actor, "answer": reason}
        [row] = self._engine.call("review_decide", said)
        if not row["decided"]:
            now = self.get(number)
            if now is None or (now.status, now.actor, now.answer) != (outcome, actor, reason):
                why = (
                    "its operation has been done"
                    if now and now.status == "done"
                    else "it was answered by somebody else"
                )
                raise Conflict(f"review {number} is not open any more: {why}", current=None)
