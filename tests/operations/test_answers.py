"""Reviews as they stand beside the log: what waits for somebody, and what does not any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from tests.children import pass_time
from tests.operations.logs import fail, fill, problems
from tests.pairs import EACH_ONCE

Connect = Callable[..., Any]


@pytest.fixture
def client(connect: Connect, either: str) -> Any:
    return fill(connect(either), either)


@EACH_ONCE
def test_what_waits_for_somebody_is_listed_and_a_reset_is_an_answer(client: Any) -> None:
    with pytest.raises(holdfast.OperationFailed, match="up for review"):
        client.operation("failed", retry=holdfast.Retry(attempts=1)).run(lambda: 1)
    [review] = client.reviews.list()
    assert (review.label, review.reason, review.key) == ("failed", "attempts", client.operations.get("failed").key)
    assert {each.check: each.status for each in client.operations.health().findings}["failures"] == "warn"
    client.operations.reset("failed", actor="jane", reason="mended")
    assert client.reviews.list() == []
    assert client.operation("failed", retry=holdfast.Retry(attempts=1)).run(lambda: 1).result == 1
    assert problems(client) == set()


@EACH_ONCE
def test_what_was_done_since_waits_for_nobody_and_what_somebody_undid_has_not_failed(client: Any) -> None:
    def failures() -> tuple[str, str]:
        [found] = [each for each in client.operations.health().findings if each.check == "failures"]
        return found.status, found.found

    with pytest.raises(holdfast.OperationFailed, match="up for review"):
        client.operation("failed", retry=holdfast.Retry(attempts=1)).run(lambda: 1)
    [review] = client.reviews.list()
    client.operations.register("undo", rollback=lambda op: None)
    assert client.operation("failed", rollback="undo").run(lambda: 1).attempt == 2
    assert client.reviews.list() == []
    assert [each.id for each in client.reviews.list(status="done")] == [review.id]
    assert failures() == ("ok", "none")
    with pytest.raises(holdfast.Conflict, match="its operation has been done"):
        client.reviews.approve(review.id, actor="jane", reason="fine")
    client.operations.reset("failed", actor="jane", reason="not wanted")
    client.operation("other", rollback="undo").run(lambda: 1)
    client.operations.rollback("other", actor="jane", reason="not wanted")
    assert failures() == ("ok", "none")
    with pytest.raises(ValueError, match="broken"):
        client.operation("another").run(fail)
    assert failures() == ("ok", "1 have failed and none waits for a review")
    assert problems(client) == set()


@EACH_ONCE
def test_what_is_to_be_decided_anew_is_asked_anew(client: Any) -> None:
    """The question of before stands no more, for the operation was done; and is done again, for its result expired."""
    mine, others = (
        holdfast.OperationKey(pipeline="p", task="t", dataset="parcels", operation="upsert", version=version)
        for version in ("1", "2")
    )
    numbers = []
    for result in ("first", "second"):
        with client.operation(others) as op:
            op.result = None
            with pytest.raises(holdfast.OperationInProgress, match="up for review"):
                client.operation(mine, when_locked="escalate").run(lambda: 0)
        numbers += [each.id for each in client.reviews.list(key=mine)]
        client.operations.reset(others, actor="jane", reason="once more")
        assert client.operation(mine, keep=0.001).run(lambda result=result: result).result == result
        assert client.reviews.list() == []
        pass_time(0.01)  # its result expires
    assert len(set(numbers)) == 2
    assert [each.id for each in client.reviews.list(status="done", key=mine)] == numbers
