"""The policy as operations meet it: asked before the claim, under the lock, on every retry, in every way to run one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest

import holdfast
from holdfast import PolicyDenied
from holdfast.governance import Allow, Deny, PolicyContext, Review
from holdfast.testing.operation_contract import LONG, name, running
from tests.children import eventually
from tests.operations.policies import BY_ELDER, answer, every_way, fail, governed, key


def test_the_matrix_through_a_client(either: str) -> None:
    """Class of dataset x lock outcome x attempt x justification; the rest of the matrix is pure, and asked as such."""
    classes: dict[str, dict[str, Any]] = {"open": {}, "graves": {"sovereign": True}, "burials": {"sensitive": True}}
    classes["both"] = {"sovereign": True, "sensitive": True}
    with holdfast.Client(either, policy=holdfast.governance.Policy(classes)) as client:
        for kind, busy in product(classes, (False, True)):
            cases = list(product((0, 1, 2), (None, "the council agreed")))
            subjects = [key(kind, f"{busy}-{number}", checksum=f"{busy}-{number}") for number in range(len(cases))]
            for subject, (tried, _) in zip(subjects, cases, strict=True):
                for _ in range(tried):
                    with pytest.raises(ValueError, match="broken"):
                        client.operation(subject, justification="the council agreed").run(fail)
            with running(either, key(kind, "other")) if busy else nullcontext():
                for subject, (tried, said) in zip(subjects, cases, strict=True):
                    needs = kind in ("burials", "both") and said is None
                    expected = PolicyDenied if needs else holdfast.OperationInProgress if busy else None
                    with nullcontext() if expected is None else pytest.raises(expected):
                        outcome = client.operation(subject, justification=said, when_locked="fail").run(int)
                        assert (expected, outcome.attempt) == (None, tried + 1)
                    reviews = [each.reason for each in client.reviews.list(key=subject)]
                    assert reviews == (["locked"] if busy and not needs and kind in ("graves", "both") else [])


@every_way
def test_every_moment_is_asked_about_and_a_retry_never_bypasses_it(either: str, attempt: Any) -> None:
    asked: list[tuple[str, int, str | None]] = []
    roads, calls = key(f"roads-{name()}"), []

    def rule(context: PolicyContext) -> Allow | Deny:
        asked.append((context.moment, context.attempt, context.lock))
        return Deny("not a third time") if context.moment == "retry" and context.attempt > 2 else Allow()

    def broken() -> None:
        calls.append(1)
        raise ValueError("broken")

    with governed(either, rule) as client:
        with pytest.raises(PolicyDenied, match=r"'etl/load roads-.* upsert': not a third time") as told:
            attempt(client, roads, broken, retry=holdfast.Retry(in_this_run=5))
        assert str(told.value.__cause__) == "broken", "what it would have been a retry of"
        first = [("claim", 1, None), ("claim", 1, None), ("locked", 1, "held")]
        second = [("retry", 2, None), ("retry", 2, None), ("locked", 2, "held")]
        assert (asked, len(calls)) == ([*first, *second, ("retry", 3, None)], 2)
        asked.clear()
        client.operation("plain").run(int)
        assert asked == first
        asked.clear()
        client.operation("plain").run(int)
        client.operations.replay("plain")
        client.operations.reset("plain", **BY_ELDER)
        assert asked == [("replay", 1, None), ("replay", 1, None), ("reset", 1, None)]
        asked.clear()
        client.operation("plain").run(int)
        assert asked == [(moment, 2, lock) for moment, _, lock in first], "a reset lets it be run as if it were new"


def test_a_rule_knows_which_operation_it_is_asked_about_whatever_the_moment(either: str) -> None:
    """One that is about a pipeline, a task or sovereign data would be passed by where these are not said."""
    graves = key(f"graves-{name()}")
    seen: dict[str, set[tuple[Any, ...]]] = {}

    def rule(context: PolicyContext) -> Allow | Review:
        known = (context.pipeline, context.task, context.dataset, context.operation, context.sovereign)
        seen.setdefault(context.moment, set()).add(known)
        return Review("look") if context.moment == "retry" else Allow()

    with governed(either, rule) as client:
        with pytest.raises(ValueError, match="broken"):
            client.operation(graves).run(fail)
        with pytest.raises(PolicyDenied) as told:
            client.operation(graves).run(int)
        assert told.value.review is not None
        client.reviews.approve(told.value.review, **BY_ELDER)
        client.operation(graves).run(int)
        client.operations.replay(graves)
        client.operations.reset(graves, **BY_ELDER)
    everything = {("etl", "load", graves.dataset, "upsert", True)}
    assert seen == dict.fromkeys(("claim", "retry", "locked", "replay", "reset", "review"), everything)


def test_what_becomes_a_retry_while_it_is_waited_for_is_asked_about_as_one(either: str) -> None:
    """Somebody else's first attempt was under way when it was asked for, and has failed since."""
    unique, waiting, mine = name(), threading.Event(), []

    def rule(context: PolicyContext) -> Allow | Deny:
        if context.lock == "busy":
            waiting.set()
        return Deny("no retries") if context.moment == "retry" else Allow()

    with governed(either, rule) as client, holdfast.Client(either) as other, ThreadPoolExecutor(1) as pool:

        def theirs() -> None:
            mine.append(pool.submit(lambda: client.operation(unique, timeout=LONG).run(int)))
            assert waiting.wait(LONG)
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            other.operation(unique).run(theirs)
        with pytest.raises(PolicyDenied, match="no retries"):
            mine[0].result(LONG)


@every_way
def test_a_replay_is_denied_where_the_policy_says_so(either: str, attempt: Any) -> None:
    unseen = lambda context: Deny("not to be read") if context.moment == "replay" else Allow()  # noqa: E731
    roads = key(f"roads-{name()}")
    with governed(either, unseen) as client, holdfast.Client(either) as other:
        assert attempt(client, roads, lambda: 7).result == 7
        for replay in (
            lambda: attempt(client, roads, int),
            lambda: client.operations.replay(roads),
            lambda: client.operations.replay(),
        ):
            with pytest.raises(PolicyDenied, match="not to be read"):
                replay()
        assert client.operations.verify().passed, "which tells nothing of what it came to"
        assert attempt(other, roads, int).result == 7


def test_a_batch_obeys(either: str) -> None:
    burials = f"burials-{name()}"
    seen: list[Any] = []
    items = ["a", "b", "c"]
    make: dict[str, Any] = {"key": lambda item: key(burials, item, checksum=item)}
    with governed(either) as client:
        refused = client.operations.run_many(items, int, **make)
        assert [type(each.error) for each in refused] == [PolicyDenied] * 3
        why: dict[str, Any] = {"actor": "jane", "justification": "the council agreed"}
        done = client.operations.run_many(items, ord, **make, **why, progress=lambda *how: seen.append(how))
        assert [each.result for each in done] == [97, 98, 99]
        assert seen == [(1, 3), (2, 3), (3, 3)]
        assert all(each.replayed for each in client.operations.run_many(items, ord, **make))
        again = client.operations.run_many(["a"], ord, key=lambda item: key(burials, "again", checksum=item), **why)
        assert "under another key" in str(again[0].error)


@every_way
def test_a_rule_that_raises_lets_nothing_through_and_keeps_no_lock(either: str, attempt: Any) -> None:
    def forgetful(context: PolicyContext) -> Any:
        return None if context.lock == "held" else Allow()

    roads = key(f"roads-{name()}")
    with governed(either, forgetful) as client, holdfast.Client(either) as other:
        with pytest.raises(TypeError, match="rule 'forgetful' must return"):
            attempt(client, roads, fail)
        eventually(lambda: client.leases.list() == [], "no lease is held")
        assert attempt(other, roads, int, when_locked="fail").attempt == 1


async def test_the_same_is_so_for_functions_that_are_awaited(either: str) -> None:
    async def work() -> str:
        return "done"

    burials = key(f"burials-{name()}")
    async with holdfast.AsyncClient(either, policy=lambda context: Review(f"{context.moment}?")) as client:
        with pytest.raises(PolicyDenied, match=r"claim\?") as told:
            await client.operation(burials).run(work)
        assert told.value.review is not None
        answer(either, told.value.review, "approve")
        outcome = await client.operation(burials).run(work)
        assert (outcome.result, await client.reviews.list()) == ("done", [])
    for wrong in ("deny", 3):
        with pytest.raises(TypeError, match="a rule must be a function"):
            holdfast.AsyncClient(either, policy=wrong)  # type: ignore[arg-type]
