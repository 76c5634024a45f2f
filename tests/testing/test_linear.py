"""The search for an order: it accepts what a lease can do, and nothing else."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.testing.checker.linear import check
from holdfast.testing.checker.models import LeaseModel, RegisterModel
from holdfast.testing.history import RecordedOperation, operations
from tests.testing.simulated_history import World, operation

LEASE = ("acquire", "renew", "release")
some = settings(max_examples=30, deadline=None, derandomize=True, database=None)
randoms = st.integers(0, 2**32).map(random.Random)


def simulated(source: random.Random, steps: int = 400, **options: Any) -> list[RecordedOperation]:
    return [each for each in operations(World(source, **options).run(steps).events) if each.op in LEASE]


def explained(*operations: RecordedOperation) -> bool:
    return not check(operations, LeaseModel())


@some
@given(randoms, st.integers(2, 8), st.sampled_from([0.0, 0.05, 0.3]))
def test_whatever_a_simulated_lease_answers_is_accepted(source: random.Random, workers: int, unknown: float) -> None:
    """With operations that overlap, whose answers are lost, and leases that end unseen."""
    assert check(simulated(source, workers=workers, unknown=unknown), LeaseModel()) == []


@some
@given(randoms)
def test_two_fences_exchanged_are_noticed(source: random.Random) -> None:
    history = simulated(source)
    pairs = [(one, two) for one, two in _acquired(history) if one.completed < two.invoked]
    assume(pairs)
    one, two = source.choice(pairs)
    swapped = {one.id: one._replace(fence=two.fence), two.id: two._replace(fence=one.fence)}
    [unexplained] = check([swapped.get(each.id, each) for each in history], LeaseModel())
    assert unexplained.name == one.name


@some
@given(randoms)
def test_a_renewal_after_the_next_acquire_is_noticed(source: random.Random) -> None:
    history = simulated(source)
    late = [
        (each, two)
        for each in history
        if (each.op, each.outcome) == ("renew", "ok")
        for one, two in _acquired(history)
        if each.name == one.name and each.fence == one.fence
    ]
    assume(late)
    renewal, successor = source.choice(late)
    moved = renewal._replace(invoked=successor.completed + 0.0001, completed=successor.completed + 0.0002)
    assert check([moved if each is renewal else each for each in history], LeaseModel())


@some
@given(randoms)
def test_a_release_answered_true_twice_is_noticed(source: random.Random) -> None:
    history = simulated(source)
    released = [each for each in history if (each.op, each.outcome) == ("release", "ok")]
    assume(released)
    again = source.choice(released)._replace(id="again", invoked=10_000.0, completed=10_001.0)
    [unexplained] = check([*history, again], LeaseModel())
    assert unexplained.operation.fence == again.fence


def _acquired(history: list[RecordedOperation]) -> list[tuple[RecordedOperation, RecordedOperation]]:
    """Acquires that succeeded, each with the next one of the same name."""
    by_name: dict[str, list[RecordedOperation]] = {}
    for each in history:
        if (each.op, each.outcome) == ("acquire", "ok"):
            by_name.setdefault(each.name, []).append(each)
    ordered = [sorted(group, key=lambda each: each.fence or 0) for group in by_name.values()]
    return [pair for group in ordered for pair in pairwise(group)]


def by_hand(history: list[RecordedOperation], model: Any) -> bool:
    """Try every order that time allows, with every choice of unknown operations that never happened."""

    def possible(state: Any, left: list[RecordedOperation]) -> bool:
        if all(each.outcome == "unknown" for each in left):
            return True
        return any(
            possible(after, [other for other in left if other is not each])
            for each in left
            if not any(other.completed < each.invoked for other in left if other is not each)
            for after in model.step(state, each)
        )

    return possible(model.initial(), history)


def some_lease(source: random.Random, **when: Any) -> RecordedOperation:
    return operation(source.choice(["acquire", *LEASE]), when.pop("outcome"), source.randrange(1, 4), **when)


def some_register(source: random.Random, **when: Any) -> RecordedOperation:
    op, data = source.choice(["read", "write", "cas"]), {"old": source.randrange(2), "value": source.randrange(2)}
    return operation(op, when.pop("outcome"), None, **when, **data)


@pytest.mark.parametrize(("make", "model"), [(some_lease, LeaseModel()), (some_register, RegisterModel(0))])
def test_of_any_history_it_says_what_trying_every_order_says(
    make: Callable[..., RecordedOperation], model: Any
) -> None:
    """Small ones, right or wrong, with much at once: whatever the search leaves out may be left out."""
    source, verdicts = random.Random(11), Counter[bool]()
    for _ in range(1000):
        history = []
        for number in range(source.randrange(2, 7)):
            outcome, start = source.choice(["ok", "ok", "fail", "unknown"]), source.randrange(10)
            end = math.inf if outcome == "unknown" else start + source.randrange(1, 9)
            history.append(make(source, outcome=outcome, start=start, end=end, worker=str(number)))
        possible = by_hand(history, model)
        assert (check(history, model) == []) is possible, history
        verdicts[possible] += 1
    assert min(verdicts.values()) > 125


def test_operations_that_overlap_may_have_happened_in_either_order() -> None:
    assert explained(operation("acquire", "ok", 2, 0, 10), operation("acquire", "ok", 1, 5, 15, worker="x"))
    assert not explained(operation("acquire", "ok", 2, 0, 4), operation("acquire", "ok", 1, 5, 15, worker="x"))


def test_a_refusal_needs_somebody_who_has_it() -> None:
    refused = operation("acquire", "fail", None, 10, 11, worker="x")
    assert not explained(refused)
    assert not explained(operation("acquire", "ok", 1, 0, 1), operation("release", "ok", 1, 2, 3), refused)
    assert explained(operation("acquire", "ok", 1, 0, 1), refused)
    assert explained(operation("acquire", "ok", 1, 0, 1), operation("release", "ok", 1, 2, 10.5), refused)


def test_an_unknown_acquire_explains_a_refusal_any_time_later_but_not_before() -> None:
    refused = operation("acquire", "fail", None, 10, 11, worker="x")
    assert explained(operation("acquire", "unknown", None, 0), refused)
    assert not explained(operation("acquire", "unknown", None, 12), refused)


def test_an_unknown_acquire_explains_one_stay_and_not_two() -> None:
    held = [operation("acquire", "ok", 1, 20, 21, worker="y"), operation("release", "ok", 1, 22, 23, worker="y")]
    refusals = [operation("acquire", "fail", None, at, at + 1, worker="x") for at in (10, 30)]
    assert explained(operation("acquire", "unknown", None, 0), refusals[0], *held)
    assert not explained(operation("acquire", "unknown", None, 0), *refusals, *held)
    both = [operation("acquire", "unknown", None, 0), operation("acquire", "unknown", None, 1, worker="z")]
    assert explained(*both, *refusals, *held)


def test_a_lease_told_lost_is_never_renewed_again_but_may_be_released() -> None:
    lost = [operation("acquire", "ok", 1, 0, 1), operation("renew", "fail", 1, 2, 3)]
    assert explained(*lost, operation("release", "ok", 1, 4, 5))
    assert not explained(*lost, operation("renew", "ok", 1, 4, 5))


def test_what_cannot_be_explained_is_told_with_all_that_was_going_on() -> None:
    [unexplained] = check(
        [
            operation("acquire", "ok", 1, 0, 1),
            operation("acquire", "ok", 2, 2, 3, worker="x"),
            operation("release", "fail", 1, 3.5, 9, worker="z"),
            operation("renew", "ok", 1, 4, 5),
        ],
        LeaseModel(),
    )
    assert str(unexplained) == (
        "renew 'job' ok fence 1 by w at 4.000000 to 5.000000 cannot be explained: it was held under fence 2; "
        "meanwhile: release 'job' fail fence 1 by z at 3.500000 to 9.000000"
    )


def test_names_are_judged_apart() -> None:
    bad = operation("renew", "ok", 9, 0, 1, name="bad")
    assert [each.name for each in check([operation("acquire", "ok", 1, 0, 1), bad], LeaseModel())] == ["bad"]


def register(*operations: tuple[str, str, Any, float, float]) -> list[RecordedOperation]:
    """op, outcome, value (or old and new), from, to."""
    return [
        operation(op, outcome, None, start, end, worker=str(number), old=(value if op == "cas" else [None])[0],
                  value=value[1] if op == "cas" else value)
        for number, (op, outcome, value, start, end) in enumerate(operations)
    ]  # fmt: skip


ONE_TWO_ONE = (("read", "ok", 1, 5, 6), ("write", "ok", 2, 7, 8), ("read", "ok", 1, 9, 10))
"""With two lost answers: it matters which of the two made the first 1, because only a write can make the second."""


@pytest.mark.parametrize(
    ("history", "possible"),
    [
        (register(("write", "ok", 1, 0, 1), ("read", "ok", 1, 2, 3)), True),
        (register(("write", "ok", 1, 0, 1), ("read", "ok", None, 2, 3)), False),
        (register(("write", "ok", 1, 0, 9), ("read", "ok", 1, 1, 2), ("read", "ok", None, 3, 4)), False),
        (register(("write", "ok", 1, 0, 9), ("read", "ok", None, 1, 2), ("read", "ok", 1, 3, 4)), True),
        (register(("cas", "ok", (None, 1), 0, 9), ("cas", "ok", (None, 2), 0, 9)), False),
        (register(("cas", "ok", (None, 1), 0, 9), ("cas", "ok", (1, 2), 0, 9), ("read", "ok", 2, 10, 11)), True),
        (register(("cas", "fail", (None, 1), 0, 1)), False),
        (register(("write", "unknown", 7, 0, 9), ("read", "ok", None, 5, 6), ("read", "ok", 7, 100, 101)), True),
        (register(("write", "unknown", 7, 0, 9), ("read", "ok", 7, 5, 6), ("read", "ok", None, 7, 8)), False),
        (register(("write", "unknown", 1, 0, 9), ("cas", "unknown", (None, 1), 1, 9), *ONE_TWO_ONE), True),
        (register(("cas", "unknown", (None, 1), 0, 9), ("write", "unknown", 1, 1, 9), *ONE_TWO_ONE), True),
        (register(("cas", "unknown", (None, 1), 0, 9), ("cas", "unknown", (None, 1), 1, 9), *ONE_TWO_ONE), False),
    ],
)
def test_it_judges_a_register_as_well(history: list[RecordedOperation], possible: bool) -> None:
    assert (check(history, RegisterModel()) == []) is possible


def test_tens_of_thousands_of_operations_with_lost_answers_are_judged() -> None:
    """Twelve workers at three names. A search that kept every order, or every lost answer, would never end."""
    source = random.Random(7)
    history = simulated(source, 50_000, names=3, workers=12, unknown=0.01)
    assert len(history) > 10_000
    assert check(history, LeaseModel()) == []
    wrong = max((each for each in history if (each.op, each.outcome) == ("renew", "ok")), key=lambda each: each.invoked)
    assert check([each._replace(fence=1) if each is wrong else each for each in history], LeaseModel())
