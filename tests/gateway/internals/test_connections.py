"""Which connections are closed when there are too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.gateway.connections import MAX_UNSENT, ConnectionLimits

TOTAL = 6


def test_the_client_that_has_not_read_for_longest_is_closed_first_and_never_all() -> None:
    limits, share = ConnectionLimits(TOTAL), MAX_UNSENT // 4
    assert [limits.set_unsent(number, share) for number in range(4)] == [[]] * 4
    assert limits.set_unsent(0, 0) == []
    assert limits.set_unsent(4, share) == []
    assert limits.set_unsent(5, 2 * share) == [1, 2]
    assert limits.set_unsent(6, 9 * share) == [3, 4, 5]
    limits.remove(6)
    assert limits.set_unsent(7, share) == []


def test_many_that_come_at_once_close_as_many_others() -> None:
    """What is closed is removed a moment later: the event loop reports all new connections first."""
    limits = ConnectionLimits(TOTAL)
    assert [limits.add(number, "here") for number in range(TOTAL)] == [None] * (TOTAL // 2) + [0, 1, 2]
    assert limits.add(TOTAL, "there") == 3


steps = st.lists(st.tuples(st.sampled_from(["open", "busy", "idle", "close"]), st.integers(0, 11)), max_size=60)


@given(steps)
def test_the_bounds_hold_and_only_the_oldest_idle_connection_is_closed(steps: list[tuple[str, int]]) -> None:
    """Of its own address if that has too many, else of all. A new one is idle, and goes only if all others are busy."""
    limits = ConnectionLimits(TOTAL)
    since: dict[int, int | None] = {}
    """Of the open connections: since which step they are idle; None while they are busy."""
    for at, (step, number) in enumerate(steps):
        address = number % 3
        if step == "open" and number not in since:
            since[number] = at
            same = [other for other in since if other % 3 == address]
            crowd = same if len(same) > TOTAL // 2 else [*since] if len(since) > TOTAL else []
            idle = [other for other in crowd if since[other] is not None]
            expected = min(idle, key=lambda other: since[other] or 0, default=None)
            surplus = limits.add(number, str(address))
            assert surplus == expected
            if surplus is not None:
                limits.remove(surplus)
                del since[number if surplus == number else int(str(surplus))]
        elif number in since and step == "busy":
            limits.set_busy(number)
            since[number] = None
        elif number in since and step == "idle":
            limits.set_idle(number)
            since[number] = at if since[number] is None else since[number]
        elif number in since and step == "close":
            limits.remove(number)
            del since[number]
        assert len(limits) == len(since) <= TOTAL
        assert max([sum(other % 3 == each for other in since) for each in range(3)]) <= TOTAL // 2
