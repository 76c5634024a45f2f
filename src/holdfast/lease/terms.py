"""What a lease is asked for with, checked; and what the answer is when it is refused."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, Self

from holdfast.errors import AcquireTimeout, HoldfastError, NotAcquired
from holdfast.names import MAX_TTL, MIN_TTL, Kind, OnLost, check_name, check_seconds

Failover = Literal["ttl", "session"]
"""Within the package also "owner": by the TTL, or as soon as the owner key of the process is found free twice."""
OnBeat = Callable[[HoldfastError | None, bool], object]
MayRenew = Callable[[Callable[[], object]], bool]


class LeaseTerms(NamedTuple):
    """The arguments of ``client.lease(…)``, checked."""

    name: str
    ttl: float
    holder: str | None
    at_least: float
    auto_renew: bool
    renew_every: float
    on_lost: OnLost[Any]
    failover: Failover | Literal["owner"]
    reenter: str | None = None
    """The secret with which the same holder and role take it over while it is held."""
    on_beat: OnBeat | None = None
    """Called in the background thread after each heartbeat: its error, and whether the lease is lost by it."""
    on_recall: Callable[[], object] | None = None
    """Called in the background thread when an operator asks for the lease back."""
    strict: bool = False
    """Lost with the first heartbeat that fails."""
    kind: Kind = "plain"
    may_renew: MayRenew | None = None
    """Asked in the background thread before each heartbeat. False: not now, but when it calls its argument."""

    @property
    def statement(self) -> str:
        """The statement that acquires it."""
        return {"plain": "lease_acquire", "slot": "slot_claim"}.get(self.kind, f"{self.kind}_acquire")

    @property
    def has_own_beat(self) -> bool:
        """Whether it shares no heartbeat with other leases, because it is told of each one."""
        return self.on_beat is not None or self.strict or self.may_renew is not None

    @property
    def brittle(self) -> bool:
        """Whether one heartbeat without an answer may end it."""
        return self.strict or self.failover == "session"

    @classmethod
    def check(
        cls,
        name: str,
        *,
        ttl: float,
        holder: str | None = None,
        at_least: float = 0.0,
        auto_renew: bool = True,
        renew_every: float | None = None,
        on_lost: OnLost[Any] = "flag",
        failover: Failover = "ttl",
        strict: bool = False,
        kind: Kind = "plain",
        reenter: str | None = None,
    ) -> Self:
        ttl = check_seconds(ttl, "ttl", MIN_TTL, MAX_TTL)
        check_on_lost(on_lost)
        if failover not in ("ttl", "session"):
            raise ValueError(f"failover must be 'ttl' or 'session', not {failover!r}")
        if not auto_renew and on_lost != "flag":
            raise ValueError("on_lost needs auto_renew=True: without a heartbeat the loss is not noticed")
        if not auto_renew and strict:
            raise ValueError("strict=True needs auto_renew=True: there is no heartbeat that could fail")
        if not auto_renew and failover == "session":
            raise ValueError("failover='session' needs auto_renew=True: it lives with the heartbeat's session")
        if renew_every is not None and check_seconds(renew_every, "renew_every", 0.001, MAX_TTL) > ttl * 2 / 3:
            raise ValueError(
                f"renew_every must leave room for a retry: at most two thirds of ttl={ttl:g}, not {renew_every!r}"
            )
        return cls(
            check_name(name),
            ttl,
            None if holder is None else check_name(holder, "holder"),
            check_seconds(at_least, "at_least", 0, MAX_TTL),
            auto_renew,
            ttl / 3 if renew_every is None else renew_every,
            on_lost,
            failover,
            reenter=reenter,
            strict=strict,
            kind=kind,
        )


def check_on_lost(on_lost: OnLost[Any]) -> None:
    if on_lost not in ("flag", "cancel", "exit") and not callable(on_lost):
        raise ValueError(f"on_lost must be 'flag', 'cancel', 'exit' or a callable, not {on_lost!r}")


class Refusal(NamedTuple):
    """The answer to a refused acquire: who holds the lease, and for how long if it is not renewed.

    ``remaining`` is None when the row is being changed at this moment: asking again soon may succeed.
    """

    name: str
    holder: str | None
    remaining: float | None
    session_key: int | None = None
    """Of the holder's session, where its end frees the lease."""

    def as_error(self, waited: float | None, at: datetime) -> NotAcquired:
        """AcquireTimeout if ``waited`` is given."""
        expires_at = None if self.remaining is None else at + timedelta(seconds=self.remaining)
        message = f"lease {self.name!r} is held by {self.holder or 'another process that is changing it now'}"
        if expires_at is not None:
            until = expires_at.astimezone(UTC)
            message += f" until {until:%Y-%m-%d %H:%M:%S} UTC unless renewed ({self.remaining:.1f} s left)"
        if waited is None:
            return NotAcquired(message, name=self.name, holder=self.holder, expires_at=expires_at)
        message += f"; waited {waited:.1f} s"
        return AcquireTimeout(message, name=self.name, holder=self.holder, expires_at=expires_at)
