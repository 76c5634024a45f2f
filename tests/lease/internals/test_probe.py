"""The judge of the lease contract: right answers pass, and a wrong one fails its own case."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.lease.probe import TOKENS, cases, judge

TOKEN = [f"token-{number}" for number in range(TOKENS)]
CASES = cases("probe", TOKEN)


def granted(status: str, fence: int) -> dict[str, Any]:
    return {"status": status, "fence": fence, "held_by": None}


def right() -> list[Any]:
    return [
        [granted("acquired", 1)],
        [{"status": "held", "fence": None, "held_by": "A"}],
        [granted("reentered", 2)],
        [{"done": False}],
        [{"done": False}],
        [{"done": True}],
        [{"done": False}],
        [],
        [granted("acquired", 3)],
        [],
        [granted("taken_over", 4)],
    ]


def test_there_is_an_answer_to_each_call() -> None:
    assert len(right()) == sum(len(case.calls) for case in CASES)


def test_right_answers_pass_all_seven() -> None:
    assert [verdict.ok for verdict in judge(CASES, right())] == [True] * 7


@pytest.mark.parametrize(
    ("answer", "wrong", "case"),
    [
        (0, [{"status": "busy", "fence": None, "held_by": None}], 1),
        (0, [], 1),
        (1, [granted("acquired", 9)], 2),
        (1, [{"status": "busy", "fence": None, "held_by": None}], 2),
        (2, [{"status": "held", "fence": None, "held_by": "A"}], 3),
        (2, [granted("reentered", 1)], 3),
        (3, [{"done": True}], 4),
        (4, [{"done": True}], 4),
        (5, [{"done": False}], 5),
        (6, [{"done": True}], 5),
        (7, [{"name": "probe"}], 5),
        (8, [granted("taken_over", 3)], 6),
        (8, [granted("acquired", 2)], 6),
        (10, [{"status": "held", "fence": None, "held_by": "B"}], 7),
        (10, [granted("taken_over", 3)], 7),
    ],
)
def test_a_wrong_answer_fails_its_case(answer: int, wrong: Any, case: int) -> None:
    answers = right()
    answers[answer] = wrong
    failed = [verdict.number for verdict in judge(CASES, answers) if not verdict.ok]
    assert failed[:1] == [case]


def test_an_error_fails_its_case_and_what_comes_after_was_not_asked() -> None:
    verdicts = judge(CASES, [*right()[:3], ValueError("no such function")])
    assert [verdict.ok for verdict in verdicts] == [True] * 3 + [False] * 4
    assert verdicts[3].found == "no such function"
    assert [verdict.found for verdict in verdicts[4:]] == ["not asked"] * 3
