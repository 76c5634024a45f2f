# Generated from notes_async.py by scripts/unasync.py. Do not edit.
"""What is written of an attempt: that it begins, and how it ended in the user's own transaction."""

from __future__ import annotations

import json
from typing import Any

from holdfast.database.sessions import Row
from holdfast.operations.attempt import Attempt
from holdfast.operations.decide import Act, Prior, failed, told
from holdfast.operations.plan import Plan, as_told, kept, kept_for
from holdfast.operations.running import Running


def claim_noted(op: Running, plan: Plan) -> None:
    op.bury()
    for kind, detail in claimed(plan, plan.fingerprint, plan.key.version, plan.key.bucket):
        op.note(kind, detail)


def claimed(
    plan: Plan, fingerprint: str | None, version: str | None, bucket: str | None
) -> list[tuple[str, dict[str, Any] | None]]:
    """An attempt begins: who and why; and that it concerns a sovereign dataset, if it does. With what its key is made
    of and its row does not say: so whatever that does say can be proven."""
    terms, told = plan.terms, None
    if terms.actor or terms.justification or fingerprint or version or bucket:
        said = {
            "actor": terms.actor, "justification": terms.justification, "fingerprint": fingerprint, "version": version,
            "bucket": bucket,
        }  # fmt: skip
        told = {name: value for name, value in said.items() if value is not None}
    if any(plan.lineage):
        told = (told or {}) | plan.lineage.detail()
    if not terms.sovereign:
        return [("claimed", told)]
    return [("claimed", told), ("sovereignty", {"dataset": plan.key.dataset, "sovereignty_event": True})]


def success(attempt: Attempt, op: Running, value: Any, began: str | None) -> Row:
    """What is written with the effect. ``began``: the transaction that it has to be in."""
    result = kept(value)
    op.chain.mark()
    keep, late = attempt.plan.terms.keep, attempt.late or None
    op.note("success", kept_for(keep), payload_hash=result["result_hash"])
    op.released()
    known = attempt.plan.parameters(op, "success", keep=keep, began=began, late=late, **result)
    return {**known, "told": as_told(known)}


def left(attempt: Attempt, op: Running, error: BaseException) -> Row:
    """What is written of an attempt whose function has ended the transaction: what it wrote may be there."""
    op.chain.take_back()
    op.note("effect_started")
    op.released()
    said = json.dumps(told(error, where="commit"))
    return attempt.plan.parameters(op, "partial", error=said, failures=attempt.prior.failed)


def failure(attempt: Attempt, op: Running, error: Exception, **more: Any) -> Row:
    """What is written of an attempt that nothing came of."""
    said = told(error, remembered=attempt.remembers(error))
    op.began = False
    op.chain.take_back()  # a success that was not committed was none
    op.note("failure", failed(said))
    op.released()
    known = attempt.plan.parameters(op, "failure", error=json.dumps(said), failures=attempt.prior.failed + 1, **more)
    return {**known, "told": as_told(known)}


def unmended(plan: Plan, act: Act, prior: Prior, asked_at: float, error: Exception, **more: Any) -> Row:
    """What is written of one that could not be mended: that counts as an attempt."""
    op = Running(plan.key, prior, asked_at, attempt=prior.attempt)
    op.began = True
    op.note("lock_acquired", plan.locked())
    op.released()
    said = json.dumps(told(error, where=act.name.lower()))
    known = plan.parameters(op, "partial", error=said, failures=prior.failed, **more)
    return {**known, "told": as_told(known)}
