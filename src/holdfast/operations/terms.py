"""The arguments of an operation, checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from holdfast.names import MAX_TTL, MIN_TTL, check_name, check_seconds, check_timeout

Function = Callable[..., Any]
WhenLocked = Literal["wait", "backoff", "skip", "fail", "escalate"]
OnPartial = Literal["rollback", "verify", "refuse"]
_WHEN_LOCKED = ("wait", "backoff", "skip", "fail", "escalate")


class OperationTerms(NamedTuple):
    """The arguments of ``client.operation(…)``, checked."""

    when_locked: WhenLocked
    timeout: float
    ttl: float
    max_attempts: int
    retries: int
    on_partial: OnPartial
    remember_errors: tuple[type[BaseException], ...]
    keep: float | None
    reuse: bool
    marks_effect: bool
    sovereign: bool
    actor: str | None
    justification: str | None

    @classmethod
    def check(
        cls,
        *,
        when_locked: WhenLocked,
        timeout: float | None,
        ttl: float,
        max_attempts: int,
        retries: int,
        on_partial: OnPartial | None,
        remember_errors: Sequence[type[BaseException]],
        keep: float | None,
        reuse: bool,
        marks_effect: bool,
        sovereign: bool,
        actor: str | None,
        justification: str | None,
        undoes: bool,
        probes: bool,
    ) -> OperationTerms:
        """``undoes``, ``probes``: whether there is a rollback and a verify function. ValueError or TypeError when an
        argument is wrong."""
        if when_locked not in _WHEN_LOCKED:
            raise ValueError(f"when_locked must be one of {', '.join(_WHEN_LOCKED)}, not {when_locked!r}")
        chosen = on_partial or ("rollback" if undoes else "verify" if probes else "refuse")
        if chosen not in ("rollback", "verify", "refuse"):
            raise ValueError(f"on_partial must be 'rollback', 'verify' or 'refuse', not {on_partial!r}")
        if (chosen == "rollback" and not undoes) or (chosen == "verify" and not probes):
            raise ValueError(f"on_partial={chosen!r} needs {chosen}=, a function")
        _check_count(max_attempts, "max_attempts", 1)
        _check_count(retries, "retries", 0)
        kinds: tuple[Any, ...] = (None,) if isinstance(remember_errors, type) else tuple(remember_errors)
        if not all(isinstance(each, type) and issubclass(each, BaseException) for each in kinds):
            raise TypeError(f"remember_errors must be a list of exception classes, not {remember_errors!r}")
        return cls(
            when_locked, check_timeout(timeout), check_seconds(ttl, "ttl", MIN_TTL, MAX_TTL), max_attempts, retries,
            chosen, kinds, None if keep is None else check_seconds(keep, "keep", 0.001, 10 * 365 * 86400.0),
            reuse, marks_effect, sovereign, None if actor is None else check_name(actor, "actor"),
            None if justification is None else check_name(justification, "justification", 1000),
        )  # fmt: skip


def _check_count(value: object, what: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")
    if value < least:
        raise ValueError(f"{what} must be {least} or more, not {value}")
