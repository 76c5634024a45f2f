"""What a lease and a register do when they are asked one by one: models for `linear.check`."""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from holdfast.testing.history import Operation

SOMEBODY = 0
"""The holder whose acquire was never answered, and of whose fence nothing is known. Real fences begin at 1."""


class Lease(NamedTuple):
    """The row of a lease."""

    fence: int | None = None
    """Of whom it names; None when there is no row."""
    over: bool = False
    """Somebody was told that it is lost: it is never renewed again, but the row may still be there."""
    highest: int = 0

    def __str__(self) -> str:
        if self.fence is None:
            return f"free after fence {self.highest}" if self.highest else "free"
        who = "somebody whose acquire was not answered" if self.fence == SOMEBODY else f"fence {self.fence}"
        return f"{'expired' if self.over else 'held'} under {who}"


class LeaseModel:
    """acquire, renew and release of a lease, without clocks: it may expire, or be taken away, at any time unseen.

    So an acquire is always possible, but its fence must be higher than all before; a renewal only while nobody else has
    it and nobody was told of its end; a release is true once a grant, be it expired, until somebody else has it. A
    refusal needs somebody who has it, or whose row is still there. Leases with `at_least` do not fit: they refuse when
    nobody has them.
    """

    def initial(self) -> Lease:
        return Lease()

    def step(self, state: Lease, operation: Operation) -> Iterable[Lease]:
        match operation.op, operation.outcome:
            case "acquire", "ok":
                return self._acquired(state, operation.fence)
            case "acquire", "fail":
                return (state,) if state.fence is not None else ()
            case "acquire", _:
                return (Lease(SOMEBODY, False, state.highest),)
            case "renew", "ok":
                return (state,) if state.fence == operation.fence and not state.over else ()
            case "renew", "fail":
                return (state._replace(over=True) if state.fence == operation.fence else state,)
            case "release", "ok":
                return (state._replace(fence=None, over=False),) if state.fence == operation.fence else ()
            case "renew", _:
                return (state,)
            case "release", _:  # if it failed: somebody else has it, or it had expired and the row was removed
                return (state._replace(fence=None, over=False) if state.fence == operation.fence else state,)
        raise ValueError(f"a lease knows no such operation: {operation}")

    def is_needed(self, operation: Operation) -> bool:
        """All else looks, or ends a grant; and an end is never needed, because it may always come unseen."""
        return operation.op == "acquire" and operation.outcome != "fail"

    def alike(self, operation: Operation) -> Hashable | None:
        """An unknown renewal changes nothing, and no answer needs an unknown release: nothing needs a free row."""
        return "acquire" if operation.op == "acquire" else None

    def _acquired(self, state: Lease, fence: int | None) -> Iterable[Lease]:
        if fence is None or fence < 1:
            raise ValueError(f"fence={fence!r}: an acquire that succeeded has a fence, from 1 on")
        return (Lease(fence, False, fence),) if fence > state.highest else ()


class RegisterModel:
    """A register with read, write and compare-and-swap; data has `value`, and `old` for a compare-and-swap.

    A compare-and-swap that failed found another value than `old`.
    """

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def initial(self) -> Any:
        return self._value

    def step(self, state: Any, operation: Operation) -> Iterable[Any]:
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
        raise ValueError(f"a register knows no such operation: {operation}")

    def is_needed(self, operation: Operation) -> bool:
        return operation.op != "read" and operation.outcome != "fail"

    def alike(self, operation: Operation) -> Hashable | None:
        return None if operation.op == "read" else (operation.op, operation.data.get("old"), operation.data["value"])
