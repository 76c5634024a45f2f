"""Checks of names, seconds, timeouts and limits, before anything is written."""

import math
from collections.abc import Callable
from enum import Enum
from typing import Literal, TypeVar

MIN_TTL, MAX_TTL = 0.05, 86400.0
MAX_LIMIT = 10_000


class Unset(Enum):
    """The default of an argument for which None has a meaning."""

    UNSET = "unset"


G = TypeVar("G")
OnLost = Literal["flag", "cancel", "exit"] | Callable[[G], object]
"""What happens when a grant of type G is lost."""

Kind = Literal["plain", "guard", "elector", "gate", "slot", "operation", "relay"]
"""Of a lease: which function of the database took it."""
RESERVED = ("@", "holdfast:")
"""Prefixes of holdfast's own leases."""
GATE, SLOT, OPERATION, RELAY = "@gate:", "@slot:", "@op:", "@relay:"
RUNTIME = "holdfast:runtime"
"""The lease that every governed command runs inside: one operator at a time."""
_OWN_NAMES: dict[Kind, tuple[str, ...]] = {
    "gate": (GATE, RUNTIME), "slot": (SLOT,), "operation": (OPERATION,), "relay": (RELAY,)
}  # fmt: skip


def check_free_name(value: object, what: str = "name", limit: int = 200) -> str:
    """A name that is not reserved for holdfast's own leases."""
    name = check_name(value, what, limit)
    if problem := kind_error("plain", name, what):
        raise ValueError(problem)
    return name


def kind_error(kind: Kind, name: str, what: str = "name") -> str | None:
    """Why a lease of this kind cannot have this name, or None. On PostgreSQL the function check_kind says the same."""
    if (prefixes := _OWN_NAMES.get(kind)) is not None:
        return None if name.startswith(prefixes) else f"a lease of kind {kind} cannot have the {what} {name!r}"
    if not name.startswith(RESERVED):
        return None
    return (
        f"{what} must not begin with {' or '.join(map(repr, RESERVED))}, which are reserved for holdfast's own leases "
        f"(gates, slots, operations, relays, the runtime lease): {name!r}"
    )


def check_name(value: object, what: str = "name", limit: int = 200) -> str:
    """``value`` as a plain str: of a ``class Kind(str, Enum)`` its text, where ``str()`` would give ``Kind.NAME``."""
    if type(value) is str and 0 < len(value) <= limit and value.isprintable():  # hot: nearly every name ends here
        return value
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")
    if not 1 <= len(value) <= limit:
        raise ValueError(f"{what} must have 1 to {limit} characters, not {len(value)}: {value[:40]!r}")
    if not value.isprintable() and (bad := _control_character(value)):
        raise ValueError(f"{what} must not contain control characters, found {bad!r} in {value!r}")
    return str.__str__(value)


def check_said(value: object, what: str, limit: int = 200) -> str:
    """An actor or a reason for the record, which must not be blank."""
    text = check_name(value, what, limit)
    if not text.strip():
        raise ValueError(f"{what} must not be blank: it is for the record")
    return text


def _control_character(text: str) -> str | None:
    import unicodedata  # here: only an unusual name needs its tables

    return next((character for character in text if unicodedata.category(character) in ("Cc", "Cs")), None)


def check_seconds(value: object, what: str, minimum: float, maximum: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number of seconds, not {type(value).__name__}")
    if not minimum <= value <= maximum:  # also true of NaN
        raise ValueError(f"{what} must be between {minimum:g} and {maximum:g} seconds, not {value!r}")
    return float(value)


def check_timeout(value: float | None) -> float:
    """How long to wait. None and infinity mean for ever."""
    return math.inf if value is None else check_seconds(value, "timeout", 0, math.inf)


def check_count(number: int, least: int, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{what} must be a whole number, not {type(number).__name__}")
    if number < least:
        raise ValueError(f"{what} must be {least} or more, not {number}")
    return number


def check_max_bytes(number: int | None) -> int | None:
    return None if number is None else check_count(number, 1, "max_bytes")


def check_lock_sessions(kept: int, extra: int) -> tuple[int, int]:
    check_count(kept, 1, "lock_sessions")
    check_count(extra, 0, "lock_overflow")
    if kept + extra < 2:
        raise ValueError("lock_sessions and lock_overflow must be 2 or more together: one holds while another waits")
    return kept, extra


def check_limit(limit: object, what: str = "limit") -> int:
    """How many rows a listing may return."""
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"{what} must be an int, not {type(limit).__name__}")
    if not 1 <= limit <= MAX_LIMIT:
        raise ValueError(f"{what} must be a whole number from 1 to {MAX_LIMIT}, not {limit}")
    return limit
