"""The commands over reviews: somebody says whether an operation may be tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.commands.registry import CommandRefused, Parameter, Steps, command

if TYPE_CHECKING:
    from holdfast.commands.running import Window

_NUMBER = Parameter("the number of the review", int, least=1, most=2**63 - 1)


@command("review.approve", gate="reviews", subject="review {number}", destructive=False, atomic=True, number=_NUMBER)
def review_approve(window: Window, *, number: int) -> Steps:
    """Let an operation that is up for review be tried once more."""
    record = _open(window, number)
    yield [f"operation {record.label!r}, up for review because of {record.reason}, can be tried once more"]
    window.client.reviews.approve(number, actor=window.actor, reason=window.reason)


@command("review.reject", gate="reviews", subject="review {number}", destructive=True, atomic=True, number=_NUMBER)
def review_reject(window: Window, *, number: int) -> Steps:
    """Have an operation that is up for review refused until it is reset."""
    record = _open(window, number)
    yield [f"operation {record.label!r}, up for review because of {record.reason}, is refused until it is reset"]
    window.client.reviews.reject(number, actor=window.actor, reason=window.reason)


def _open(window: Window, number: int) -> Any:
    record = window.client.reviews.get(number)
    if record is None:
        raise CommandRefused(f"there is no review {number}")
    if record.status != "open":
        raise CommandRefused(f"review {number} is {record.status} already, by {record.actor}: {record.answer}")
    return record
