"""The answer to a request that cannot go on now: 503 with Retry-After. It never names the holder, a host and a pid."""

from __future__ import annotations

import holdfast
from holdfast.problem_json import Problem

UNCERTAIN = (holdfast.GrantLost, holdfast.OwnershipUnknown, holdfast.FencedOut, holdfast.Unreachable)
UNAVAILABLE = (holdfast.NotAcquired, *UNCERTAIN)
"""Errors that a request may meet without a mistake of the application."""


def unavailable(error: Exception, retry_after: int) -> Problem | None:
    """The problem for one of UNAVAILABLE; None for any other error."""
    headers = {"retry-after": str(retry_after)}
    if isinstance(error, holdfast.NotAcquired):
        return Problem(503, "Another request or process is using it. Send the request again.", headers=headers)
    if isinstance(error, UNCERTAIN):
        detail = "It could not be confirmed that this request may go on. Send it again."
        return Problem(503, detail, headers=headers)
    return None
