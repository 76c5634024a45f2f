"""How a lease and a register behave when operations come one after the other: models for `linear.check`."""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from holdfast.testing.history import RecordedOperation

UNKNOWN_FENCE = 0
"""The fence of a holder whose acquire was never answered. Real fences begin at 1."""


class LeaseState(NamedTuple):
    """The row of a lease."""

    fence: int | None = None
    """Of its holder; None when there is no row."""
    over: bool = False
    """Whether its holder was told that it is lost. It is never renewed again, but the row may still exist."""
    highest: int = 0
    """The highest fence so far."""

    def __str__(self) -> str:
        if self.fence is None:
            return f"free after fence {self.highest}" if self.highest else "free"
        holder = "a holder whose acquire was not answered" if self.fence == UNKNOWN_FENCE else f"fence {self.fence}"
        return f"{'expired' if self.over else 'held'} under {holder}"


class LeaseModel:
    """acquire, renew and release of a lease, without clocks: it may expire or be released by force at any time unseen.

    acquire: always possible, with a fence higher than all before. Refused only while a row exists.
    renew: succeeds only while the row has its fence and its holder was not told of a loss.
    release: succeeds once for a grant, expired or not, while the row has its fence.

    Leases with `at_least` do not fit: they are refused while no one holds them.
    """

    def initial(self) -> LeaseState:
        return LeaseState()

    def step(self, state: LeaseState, operation: RecordedOperation) -> Iterable[LeaseState]:
        match operation.op, operation.outcome:
            case "acquire", "ok":
                return self._acquired(state, operation.fence)
            case "acquire", "fail":
                return (state,) if state.fence is not None else ()
            case "acquire", _:
                return (LeaseState(UNKNOWN_FENCE, False, state.highest),)
            case "renew", "ok":
                return (state,) if state.fence == operation.fence and not state.over else ()
            case "renew", "fail":
                return (state._replace(over=True) if state.fence == operation.fence else state,)
            case "release", "ok":
                return (state._replace(fence=None, over=False),) if state.fence == operation.fence else ()
            case "renew", _:
                return (state,)
            case "release", _:  # failed: another holder has the row, or it had expired and was removed
                return (state._replace(fence=None, over=False) if state.fence == operation.fence else state,)
        raise ValueError(f"not an operation of a lease: {operation}")

    def is_needed(self, operation: RecordedOperation) -> bool:
        """Only acquires. The others change nothing or end a grant, and a grant may always end unseen."""
        return operation.op == "acquire" and operation.outcome != "fail"

    def kind_of(self, operation: RecordedOperation) -> Hashable | None:
        """An unknown renewal changes nothing, and no answer needs an unknown release: none needs a missing row."""
        return "acquire" if operation.op == "acquire" else None

    def _acquired(self, state: LeaseState, fence: int | None) -> Iterable[LeaseState]:
        if fence is None or fence < 1:
            raise ValueError(f"fence={fence!r}: an acquire that succeeded has a fence, from 1 on")
        return (LeaseState(fence, False, fence),) if fence > state.highest else ()


class RegisterModel:
    """A register with read, write and compare-and-swap ("cas"). Data has `value`, and `old` for a compare-and-swap.

    A compare-and-swap fails only if the value is not `old`.
    """

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def initial(self) -> Any:
        return self._value

    def step(self, state: Any, operation: RecordedOperation) -> Iterable[Any]:
        value = operation.data.get("value")
        match operation.op, operation.outcome:
            case "read", _:
                return (state,) if value == state else ()
            case "write", "fail":
                return (state,)
            case "write", _:
                return (value,)
            case "cas", "fail":
                return (state,) if state != operation.data["old"] else ()
            case "cas", _:
                return (value,) if state == operation.data["old"] else ()
        raise ValueError(f"not an operation of a register: {operation}")

    def is_needed(self, operation: RecordedOperation) -> bool:
        return operation.op != "read" and operation.outcome != "fail"

    def kind_of(self, operation: RecordedOperation) -> Hashable | None:
        return None if operation.op == "read" else (operation.op, operation.data.get("old"), operation.data["value"])
