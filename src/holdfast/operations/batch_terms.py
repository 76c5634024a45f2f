"""The arguments of ``run_many``, and what it refuses of those of an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from holdfast.keys import OperationKey
from holdfast.operations.lineage_terms import Lineage
from holdfast.operations.terms import (
    Checks,
    Function,
    OnPartial,
    OperationOptions,
    OperationTerms,
    Retry,
    WhenLocked,
)

Progress = Callable[[int, int], object]


class BatchArguments(TypedDict, total=False):
    """The keyword arguments of ``run_many``, for its overloads."""

    key: Callable[[Any], OperationKey | str] | None
    payload: Callable[[Any], Any] | None
    rollback: Function | str | None
    verify: Function | None
    on_partial: OnPartial | None
    when_locked: WhenLocked
    timeout: float | None
    ttl: float
    keep: float | None
    actor: str | None
    justification: str | None
    retry: Retry | None
    checks: Checks | None
    lineage: Lineage | None
    options: OperationOptions | None
    batch: int
    progress: Progress | None


def check_batch(terms: OperationTerms, checks: Checks) -> None:
    """ValueError for what ``run_many`` cannot do."""
    if terms.retry.in_this_run:
        raise ValueError(
            f"in_this_run must be 0 for run_many, not {terms.retry.in_this_run}: it calls the function once for each "
            "item. Run it again with the items that failed"
        )
    if checks.before:
        raise ValueError(
            f"before must be empty for run_many, not {checks.before!r:.80}: a batch is claimed before the first "
            "function is called. Check in the function, or use client.operation"
        )
    if terms.options.marks_effect:
        raise ValueError(
            "marks_effect must be False for run_many, not True: the claim of a batch records that its effects may "
            "start. Use client.operation"
        )
