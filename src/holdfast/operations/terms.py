"""The arguments of an operation, checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from holdfast.lease.terms import check_on_lost
from holdfast.names import MAX_TTL, MIN_TTL, OnLost, Unset, check_name, check_seconds, check_timeout

Function = Callable[..., Any]
WhenLocked = Literal["wait", "backoff", "skip", "fail", "escalate"]
OnPartial = Literal["rollback", "verify", "refuse"]
G = TypeVar("G")

MAX_PAUSE = 86400.0
_WHEN_LOCKED = ("wait", "backoff", "skip", "fail", "escalate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often an operation is attempted, how long it pauses before it tries again, and which errors are final.

    ``attempts``: failed attempts in all runs together, after which it is refused and put up for review.
    ``in_this_run``: further attempts in this run when one fails. ``first``, ``longest``: seconds of the first and the
    longest pause, between attempts of this run and with ``when_locked="backoff"``, where a release ends a pause. The
    limit of a pause doubles from ``first`` to ``longest``, and the pause is a random part of it. ``remember``: classes
    of errors after which the operation is not attempted again. TypeError or ValueError when an argument is wrong.
    """

    attempts: int = 3
    in_this_run: int = 0
    first: float = 0.05
    longest: float = 30.0
    remember: Sequence[type[BaseException]] = ()

    def __post_init__(self) -> None:
        _check_count(self.attempts, "attempts", 1)
        _check_count(self.in_this_run, "in_this_run", 0)
        object.__setattr__(self, "first", check_seconds(self.first, "first", 0.001, MAX_PAUSE))
        object.__setattr__(self, "longest", check_seconds(self.longest, "longest", 0.001, MAX_PAUSE))
        if self.longest < self.first:
            raise ValueError(f"longest must be at least first={self.first:g} seconds, not {self.longest:g}")
        object.__setattr__(self, "remember", _check_list(self.remember, "remember", "exception classes", _is_error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Conditions of an operation: functions that raise, or return something false other than None, when they do not
    hold. They get ``op`` if they have a parameter of that name.

    ``before``: called under the lock, before there is an effect. ``after``: called when the function has returned. An
    attempt fails when one does not hold. TypeError when an argument is not a list of functions.
    """

    before: Sequence[Function] = ()
    after: Sequence[Function] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", _check_list(self.before, "before", "functions", callable))
        object.__setattr__(self, "after", _check_list(self.after, "after", "functions", callable))


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationOptions:
    """Options of an operation that few need. TypeError when one is not a bool.

    ``reuse=False``: the key is not used again after ``keep`` seconds; the outcome is "expired". ``marks_effect=True``:
    the function calls ``op.effect_started()`` itself, instead of holdfast before the call. ``sovereign=True``: its
    dataset is sovereign. It is locked as a whole and marked in the log, and a lock of another attempt opens a review.
    """

    reuse: bool = True
    marks_effect: bool = False
    sovereign: bool = False

    def __post_init__(self) -> None:
        for name in ("reuse", "marks_effect", "sovereign"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {value!r:.80}")


class OperationTerms(NamedTuple):
    """The arguments of ``client.operation(…)``, checked."""

    when_locked: WhenLocked
    timeout: float
    ttl: float
    keep: float | None
    on_partial: OnPartial
    join: bool | None
    on_lost: OnLost[Any]
    actor: str | None
    justification: str | None
    retry: Retry
    options: OperationOptions

    @classmethod
    def check(
        cls,
        *,
        when_locked: WhenLocked,
        timeout: float | Unset | None,
        ttl: float,
        keep: float | None,
        on_partial: OnPartial | None,
        actor: str | None,
        justification: str | None,
        retry: Retry | None,
        options: OperationOptions | None,
        undoes: bool,
        probes: bool,
        has_tx: bool = False,
        join: bool | None = None,
        on_lost: OnLost[Any] = "flag",
    ) -> OperationTerms:
        """``undoes``, ``probes``, ``has_tx``: whether there is a rollback function, a verify function and a connection.
        ValueError or TypeError when an argument is wrong."""
        if when_locked not in _WHEN_LOCKED:
            raise ValueError(f"when_locked must be one of {', '.join(_WHEN_LOCKED)}, not {when_locked!r}")
        chosen = on_partial or ("rollback" if undoes else "verify" if probes else "refuse")
        if chosen not in ("rollback", "verify", "refuse"):
            raise ValueError(f"on_partial must be 'rollback', 'verify' or 'refuse', not {on_partial!r}")
        if (chosen == "rollback" and not undoes) or (chosen == "verify" and not probes):
            raise ValueError(f"on_partial={chosen!r} needs {chosen}=, a function")
        if join is not None and not isinstance(join, bool):
            raise TypeError(f"join must be True, False or None, not {join!r:.80}")
        if join is not None and not has_tx:
            raise ValueError(f"join={join} needs tx=, a connection: without one there is no transaction to join")
        seconds = check_seconds(ttl, "ttl", MIN_TTL, MAX_TTL)
        if isinstance(timeout, Unset):  # longer than the lease of a dead owner
            timeout = seconds + 5.0
        check_on_lost(on_lost)
        if on_lost != "flag" and has_tx:
            raise ValueError(
                f"on_lost={on_lost!r:.80} is for an operation under a lease, and one with tx= has none: omit on_lost"
            )
        return cls(
            when_locked, check_timeout(timeout), seconds,
            None if keep is None else check_seconds(keep, "keep", 0.001, 10 * 365 * 86400.0),
            chosen, join, on_lost, None if actor is None else check_name(actor, "actor"),
            None if justification is None else check_name(justification, "justification", 1000),
            check_group(retry, DEFAULT_RETRY, "retry"), check_group(options, DEFAULT_OPTIONS, "options"),
        )  # fmt: skip


def check_group(value: G | None, default: G, what: str, module: str = "holdfast") -> G:
    """The value, or the default in place of None. TypeError when it has another class than the default."""
    if value is None:
        return default
    if not isinstance(value, type(default)):
        raise TypeError(f"{what} must be a {module}.{type(default).__name__}, not {value!r:.80}")
    return value


def _check_count(value: object, what: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {value!r:.80}")
    if value < least:
        raise ValueError(f"{what} must be {least} or more, not {value}")


def _check_list(values: object, what: str, items: str, accepts: Callable[[Any], bool]) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not all(map(accepts, values)):
        raise TypeError(f"{what} must be a list of {items}, not {values!r:.80}")
    return tuple(values)


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


DEFAULT_RETRY, NO_CHECKS, DEFAULT_OPTIONS = Retry(), Checks(), OperationOptions()
