"""Why a lease was lost, in words, for the error and the log. It never asks the database."""

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.errors import HoldfastError, LeaseLost, OwnershipUnknown
from holdfast.lease.trust import Trust, margin

HISTORY_LIMIT = 10_000
"""As many ended grants as the history keeps."""
SILENCE = "the database did not answer before our trust in it ended"


def loss_by_silence(trust: Trust, late: float, now: float) -> HoldfastError:
    """Trust ended without a heartbeat. ``late``: how much later than planned the keeper came to it.

    A keeper that runs asks several times before trust ends. If it is late, the process or the machine was paused, at
    least for as long.
    """
    if late <= margin(trust.ttl):
        return OwnershipUnknown(SILENCE)
    what = "it" if now >= trust.over else "our trust in it"
    return OwnershipUnknown(f"{what} expired while this process was paused for {late:.1f} s or more")


def loss_by_expiry(trust: Trust, late: float) -> HoldfastError:
    """The database answered a heartbeat that the lease has expired."""
    if late <= margin(trust.ttl):
        return LeaseLost("it expired in the database before a heartbeat reached it")
    return LeaseLost(f"it expired while this process was paused for {late:.1f} s or more")


def loss_by_others(history: Iterable[Mapping[str, Any]], name: str, fence: int, otherwise: str) -> HoldfastError:
    """The lease is held by another token, or by none. ``otherwise``: what is said if the history does not have it."""
    ended = next((row for row in history if row["fence"] == fence and row["name"] == name), None)
    if ended is None:
        return LeaseLost(otherwise)
    return LeaseLost(_ENDS[ended["outcome"]].format(**ended))


_ENDS = {
    "forced": "it was taken away by force by {actor}: {reason}",
    "reentered": "another process of the same holder took it over",
    "expired": "it expired",
    "session_lost": "the session that held it was lost",
    "released": "it was released with its token, by another grant",
}
