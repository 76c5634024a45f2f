"""Checks of names, seconds and timeouts; and what a lease is asked for with, until that moves to ``lease``."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Literal, NamedTuple, Self

from holdfast.errors import AcquireTimeout, HoldfastError, NotAcquired

MIN_TTL, MAX_TTL = 0.05, 86400.0


class Unset(Enum):
    """An argument that was not given, where None means something."""

    UNSET = "unset"


Failover = Literal["ttl", "session"]
OnLost = Literal["flag", "cancel", "exit"] | Callable[[Any], object]
OnBeat = Callable[[HoldfastError | None, bool], object]

OWN = "@"
RESERVED = (OWN, "holdfast:")
"""What the names of holdfast's own leases begin with: slots, gates and operations; the runtime lease."""


def check_free_name(value: object, what: str = "name", most: int = 200) -> str:
    """A lease by this name is the user's to take, past no recipe."""
    name = check_name(value, what, most)
    if name.startswith(RESERVED):
        raise ValueError(
            f"{what} must not begin with {' or '.join(map(repr, RESERVED))}, as holdfast's own leases do (gates, "
            f"slots, operations, the runtime lease): choose another one than {name!r}"
        )
    return name


def check_name(value: object, what: str = "name", most: int = 200) -> str:
    """The text itself: a member of ``class Kind(str, Enum)`` is equal to it, and ``str()`` would write another."""
    if type(value) is str and 0 < len(value) <= most and value.isprintable():  # as nearly all are
        return value
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")
    if not 1 <= len(value) <= most:
        raise ValueError(f"{what} must have 1 to {most} characters, not {len(value)}: {value[:40]!r}")
    if not value.isprintable() and (bad := _control_character(value)):
        raise ValueError(f"{what} must not contain control characters, found {bad!r} in {value!r}")
    return str.__str__(value)


def check_said(value: object, what: str, most: int = 200) -> str:
    """Who, and why, for the record: a blank says neither."""
    text = check_name(value, what, most)
    if not text.strip():
        raise ValueError(f"{what} must not be blank: it is for the record")
    return text


def _control_character(text: str) -> str | None:
    import unicodedata  # only a strange name needs its tables

    return next((character for character in text if unicodedata.category(character) in ("Cc", "Cs")), None)


def check_seconds(value: object, what: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number of seconds, not {type(value).__name__}")
    if not least <= value <= most:  # as of NaN
        raise ValueError(f"{what} must be between {least:g} and {most:g} seconds, not {value!r}")
    return float(value)


def check_timeout(value: float | None) -> float:
    """How long to wait: None and infinity are for ever."""
    return math.inf if value is None else check_seconds(value, "timeout", 0, math.inf)


def check_sessions(kept: int, extra: int) -> tuple[int, int]:
    for number, least, what in ((kept, 1, "lock_sessions"), (extra, 0, "lock_overflow")):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{what} must be a whole number, not {type(number).__name__}")
        if number < least:
            raise ValueError(f"{what} must be {least} or more, not {number}")
    if kept + extra < 2:
        raise ValueError("lock_sessions and lock_overflow must be 2 or more together: one holds while another waits")
    return kept, extra


class LeaseTerms(NamedTuple):
    """The arguments of ``client.lease(…)``, checked."""

    name: str
    ttl: float
    holder: str | None
    at_least: float
    auto_renew: bool
    renew_every: float
    on_lost: OnLost
    failover: Failover
    reenter: bool
    on_beat: OnBeat | None = None
    """Called in the keeper's thread after each heartbeat, with what went wrong and whether the lease is lost with it.
    Whoever wants to be told has a heartbeat of its own."""
    on_recall: Callable[[], object] | None = None
    """Called there when an operator asks for the lease to be given back, once the work under it has stopped."""
    strict: bool = False
    """Lost with the first heartbeat that fails."""

    @property
    def apart(self) -> bool:
        """Whether it needs a heartbeat of its own, of which it is told."""
        return self.on_beat is not None or self.strict

    @property
    def brittle(self) -> bool:
        """Whether one heartbeat without an answer may be the end of it."""
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
        on_lost: OnLost = "flag",
        failover: Failover = "ttl",
        strict: bool = False,
    ) -> Self:
        ttl = check_seconds(ttl, "ttl", MIN_TTL, MAX_TTL)
        if on_lost not in ("flag", "cancel", "exit") and not callable(on_lost):
            raise ValueError(f"on_lost must be 'flag', 'cancel', 'exit' or a callable, not {on_lost!r}")
        if failover not in ("ttl", "session"):
            raise ValueError(f"failover must be 'ttl' or 'session', not {failover!r}")
        if not auto_renew and on_lost != "flag":
            raise ValueError("on_lost needs auto_renew=True: without a heartbeat nobody would notice the loss")
        if not auto_renew and strict:
            raise ValueError("strict=True needs auto_renew=True: there is no heartbeat that could fail")
        if not auto_renew and failover == "session":
            raise ValueError("failover='session' needs auto_renew=True: it lives with the heartbeat's session")
        if renew_every is not None and check_seconds(renew_every, "renew_every", 0.001, MAX_TTL) > ttl * 2 / 3:
            raise ValueError(
                f"renew_every must leave room to try again: at most two thirds of ttl={ttl:g}, not {renew_every!r}"
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
            reenter=holder is not None,
            strict=strict,
        )


class Held(NamedTuple):
    """An acquire was refused: who has the lease, and how long for at the most if nothing renews it."""

    name: str
    holder: str | None
    remaining: float | None
    session_watch: int | None = None

    def refusal(self, waited: float | None, at: datetime) -> NotAcquired:
        expires_at = None if self.remaining is None else at + timedelta(seconds=self.remaining)
        message = f"lease {self.name!r} is held by {self.holder or 'somebody who is just changing it'}"
        if expires_at is not None:
            until = expires_at.astimezone(UTC)
            message += f" until {until:%Y-%m-%d %H:%M:%S} UTC unless renewed ({self.remaining:.1f} s left)"
        if waited is None:
            return NotAcquired(message, name=self.name, holder=self.holder, expires_at=expires_at)
        message += f"; waited {waited:.1f} s"
        return AcquireTimeout(message, name=self.name, holder=self.holder, expires_at=expires_at)
