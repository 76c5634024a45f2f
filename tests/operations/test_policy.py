"""The policy as operations meet it: asked before the claim, under the lock and on every retry, in every way to run one;
and what people say in reviews."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import product
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import Allow, Deny, PolicyContext, PolicyDenied, Review
from holdfast.testing.operation_stage import leave_half_done, name, running

POLICY: dict[str, dict[str, Any]] = {
    "graves*": {"sovereign": True, "may_reset": ["elder*"]},
    "burials*": {"sensitive": True},
    "sites*": {"h3_resolution": 5},
    "flaky*": {"error_budget": 2},
    "busy*": {"when_locked": "fail"},
}
BY_ELDER: dict[str, Any] = {"actor": "elder Mary", "reason": "we agreed"}
POINT = {"type": "Point", "coordinates": [16.37, 48.21]}


def key(dataset: str, task: str = "load", **more: Any) -> holdfast.OperationKey:
    return holdfast.OperationKey(pipeline="etl", task=task, dataset=dataset, operation="upsert", **more)


def fail() -> None:
    raise ValueError("broken")


@contextmanager
def connected(url: str) -> Iterator[Any]:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as mine:
            yield mine
    else:
        with psycopg.connect(url, autocommit=True) as mine:
            yield mine


@pytest.fixture(params=["outside", "own", "joined"])
def attempt(request: pytest.FixtureRequest, either: str) -> Iterator[Callable[..., Any]]:
    """The three ways to run an operation: outside, in a transaction of its own, and in one that is open."""
    with connected(either) as mine:

        def run(client: holdfast.Client, key: Any, function: Any, /, **more: Any) -> Any:
            if request.param == "outside":
                return client.operation(key, **more).run(function)
            if request.param == "own":
                return client.operation(key, tx=mine, **more).run(function)
            mine.execute("begin")
            try:
                return client.operation(key, tx=mine, **more).run(function)
            finally:
                mine.execute("commit")  # also what it says of a review

        yield run


def governed(url: str, *rules: Callable[[PolicyContext], Any]) -> holdfast.Client:
    return holdfast.Client(url, policy=holdfast.Policy(POLICY, *rules))


def answer(url: str, number: int | None, how: str, **by: Any) -> None:
    assert number is not None
    with governed(url) as client:
        getattr(client.reviews, how)(number, **(by or BY_ELDER))


def test_the_matrix_through_a_client(either: str) -> None:
    """Class of dataset x lock outcome x attempt x justification; the rest of the matrix is pure, and asked as such."""
    classes: dict[str, dict[str, Any]] = {"open": {}, "graves": {"sovereign": True}, "burials": {"sensitive": True}}
    classes["both"] = {"sovereign": True, "sensitive": True}
    with holdfast.Client(either, policy=holdfast.Policy(classes)) as client:
        for number, (kind, busy, tried, said) in enumerate(
            product(classes, (False, True), (0, 1, 2), (None, "the council agreed"))
        ):
            subject = key(kind, f"task-{number}", checksum=f"input-{number}")
            for _ in range(tried):
                with pytest.raises(ValueError, match="broken"):
                    client.operation(subject, justification="the council agreed").run(fail)
            needs = kind in ("burials", "both") and said is None
            expected = PolicyDenied if needs else holdfast.OperationInProgress if busy else None
            with ExitStack() as stack:
                if busy:
                    stack.enter_context(running(either, key(kind, f"other-{number}")))
                if expected is not None:
                    stack.enter_context(pytest.raises(expected))
                outcome = client.operation(subject, justification=said, when_locked="fail").run(int)
                assert (expected, outcome.attempt) == (None, tried + 1)
            reviews = [each.reason for each in client.reviews.list(key=subject)]
            assert reviews == (["locked"] if busy and not needs and kind in ("graves", "both") else [])


def test_a_sensitive_dataset_needs_a_justification_on_every_try(either: str, attempt: Any) -> None:
    burials, calls = key(f"burials-{name()}", checksum="c"), []

    def flaky() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("broken")
        return "done"

    with governed(either) as client:
        for said in (None, " "):
            with pytest.raises(PolicyDenied, match="sensitive, and a change to it needs a justification"):
                attempt(client, burials, flaky, justification=said)
        assert calls == []
        with pytest.raises(ValueError, match="broken"):
            attempt(client, burials, flaky, justification="the council agreed")
        with pytest.raises(PolicyDenied, match="needs a justification"):
            attempt(client, burials, flaky, retries=2)
        assert attempt(client, burials, flaky, justification="the council agreed").result == "done"
        assert attempt(client, burials, flaky).replayed, "nothing is changed by reading what it came to"
        assert client.operations.verify().passed


def test_the_same_transformation_under_another_key_is_refused_where_that_is_sensitive(
    either: str, attempt: Any
) -> None:
    unique = name()
    why: dict[str, Any] = {"justification": "the council agreed"}
    with governed(either) as client:
        for dataset, checksum in ((f"burials-{unique}", "c"), (f"burials-{unique}", None)):
            first = key(dataset, checksum=checksum, params={"a": 1})
            with pytest.raises(ValueError, match="broken"):
                attempt(client, first, fail, **why)
            other = key(dataset, "again", checksum=checksum, params={"a": 1})
            assert attempt(client, other, int, **why).attempt == 1, "what failed has done nothing"
            with pytest.raises(PolicyDenied, match=f"the same was done to it under another key: {other.label} "):
                attempt(client, first, int, **why)
            for different in ({"checksum": f"not {checksum}"}, {"params": {"a": 2}}):
                parts = {"checksum": checksum, "params": {"a": 1}, **different}
                assert not attempt(client, key(dataset, "other", **parts), int, **why).replayed
            client.operations.reset(other, **BY_ELDER)
            assert attempt(client, first, int, **why).result == 0
        for task in ("one", "two"):
            attempt(client, key(f"roads-{unique}", task, checksum="c"), int)


def test_a_retry_sees_the_input_that_it_saw_first(either: str, attempt: Any) -> None:
    """Another payload under the same key; another checksum, which makes it another key, where the first has failed."""
    burials = f"burials-{name()}"
    why: dict[str, Any] = {"justification": "the council agreed"}
    with governed(either) as client:
        with pytest.raises(ValueError, match="broken"):
            client.operation(key(burials, checksum="c"), payload=1, **why).run(fail)
        with pytest.raises(holdfast.KeyReused, match="another payload"):
            attempt(client, key(burials, checksum="c"), int, payload=2, **why)
        filled = key(burials, checksum="d")
        with pytest.raises(PolicyDenied, match=r"etl/load: upsert burials.* had another one, and has come to nothing"):
            attempt(client, filled, int, **why)
        assert not attempt(client, key(burials, "another", checksum="d"), int, **why).replayed
        client.operations.reset(key(burials, "another", checksum="d"), **BY_ELDER)
        [review] = client.reviews.list(key=filled)
        client.reviews.reject(review.id, **BY_ELDER)
        assert attempt(client, key(burials, checksum="c"), int, payload=1, **why).result == 0
        client.operations.reset(filled, **BY_ELDER)
        assert attempt(client, filled, int, **why).attempt == 1, "what it would have been a retry of is done"


def test_what_one_open_transaction_has_done_counts_in_it(either: str) -> None:
    why: dict[str, Any] = {"justification": "the council agreed"}
    burials = f"burials-{name()}"
    with governed(either) as client, connected(either) as mine:
        mine.execute("begin")
        client.operation(key(burials, checksum="c"), tx=mine, **why).run(int)
        with pytest.raises(PolicyDenied, match="under another key"):
            client.operation(key(burials, "again", checksum="c"), tx=mine, **why).run(int)
        mine.execute("commit")


def test_what_is_committed_while_the_policy_is_asked_counts_as_well(postgres_url: str) -> None:
    """Somebody's transaction has done the same, and the lock; it commits when nobody would look any more."""
    burials = f"burials-{name()}"
    why: dict[str, Any] = {"justification": "the council agreed"}
    with psycopg.connect(postgres_url) as theirs, holdfast.Client(postgres_url) as other:
        theirs.execute("select 1")
        assert not other.operation(key(burials, checksum="c"), tx=theirs).run(int).committed

        def late(context: PolicyContext) -> Allow:
            if context.lock == "held":
                theirs.commit()
            return Allow()

        with governed(postgres_url, late) as client:
            same = key(burials, "same", checksum="c")
            with pytest.raises(PolicyDenied, match="the same was done to it under another key"):
                client.operation(same, **why).run(fail)
            record = client.operations.get(same)
            assert record is not None
            assert (record.status, record.effect_started) == ("failure", False), "it was ours, and is not any more"
            assert client.operations.verify().passed
            assert client.leases.list() == []


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
        with pytest.raises(PolicyDenied, match=r"'etl/load: upsert roads-.*': not a third time") as told:
            attempt(client, roads, broken, retries=5)
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
            mine.append(pool.submit(lambda: client.operation(unique, timeout=60).run(int)))
            assert waiting.wait(30)
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            other.operation(unique).run(theirs)
        with pytest.raises(PolicyDenied, match="no retries"):
            mine[0].result(30)


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


@pytest.mark.parametrize("how", ["policy", "argument"])
def test_a_sovereign_dataset_that_is_locked_is_up_for_review_and_not_tried_again(either: str, how: str) -> None:
    graves = f"graves-{name()}"
    more: dict[str, Any] = {"sovereign": True} if how == "argument" else {}
    make = holdfast.Client if how == "argument" else governed
    numbers: list[int] = []
    with make(either) as client:

        def elsewhere() -> None:
            with make(either) as other:
                for patient in ("wait", "backoff", "skip", "escalate"):
                    with pytest.raises(holdfast.HoldfastError, match=r"up for review as number \d+") as told:
                        other.operation(key(graves, "second"), when_locked=patient, **more).run(int)
                    expected = PolicyDenied if numbers else holdfast.OperationInProgress
                    assert type(told.value) is expected, "the first is told, and later ones have to wait for the answer"
                    numbers.append(next(each.id for each in other.reviews.list(key=key(graves, "second"))))

        def meanwhile() -> str:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(elsewhere).result(60)
            return "first"

        assert client.operation(key(graves), **more).run(meanwhile).result == "first"
        assert len(set(numbers)) == 1
        with pytest.raises(PolicyDenied, match="up for review") as told:
            client.operation(key(graves, "second"), **more).run(int)
        assert told.value.review == numbers[0]
        [review] = client.reviews.list(key=key(graves, "second"))
        assert (review.reason, review.dataset, review.status) == ("locked", graves, "open")
        with pytest.raises(ValueError, match="is sovereign and is locked whole"):
            client.operation(key(graves, shards=2), **more).run(int)
        answer(either, numbers[0], "approve")
        assert client.operation(key(graves, "second"), **more).run(lambda: "second").result == "second"
        kinds = [each.kind for each in client.operations.history(key(graves, "second"))]
        assert "sovereignty" in kinds
        [state] = client.operations.replay(key(graves, "second"))
        assert state.sovereignty


def test_what_is_written_beside_the_dataset_of_the_key_is_not_written_past_the_policy(either: str) -> None:
    """A plain key, or another dataset's, would lock nothing of it, and nobody would be asked."""
    unique = name()
    seen: list[PolicyContext] = []

    def note(context: PolicyContext) -> Allow:
        seen.append(context)
        return Allow()

    with governed(either, note) as client:
        for subject in (unique, key(f"roads-{unique}"), key(f"sites-{unique}", "load")):
            for output, why in ((f"graves-{unique}", "sovereign"), (f"burials-{unique}", "sensitive")):
                more: dict[str, Any] = {"outputs": ["fine", output], "justification": "the council agreed"}
                with pytest.raises(PolicyDenied, match=f"its outputs name dataset '{output}', which is {why}"):
                    client.operation(subject, payload=holdfast.mask_h3(POINT, 5), **more).run(fail)
                with pytest.raises(PolicyDenied, match=why):
                    client.operations.run_many([subject], fail, **more)
        with pytest.raises(PolicyDenied, match="which is masked"):
            client.operation(unique, outputs=[f"sites-{unique}"]).run(fail)
        with pytest.raises(ValueError, match=r"sovereign=True is of a dataset, .* names none"):
            client.operation(unique, sovereign=True).run(fail)
        assert client.operations.list() == []
        burials = key(f"burials-{unique}", checksum="c")
        also = [burials.dataset, f"burials-{unique}-index", "roads"]
        client.operation(burials, inputs=["raw"], outputs=also, justification="the council agreed").run(int)
        assert (seen[-1].inputs, seen[-1].outputs) == (("raw",), tuple(also)), "rules see what is read and written"


def test_what_only_some_may_roll_back_is_not_rolled_back_by_whoever_starts(either: str) -> None:
    unique, undone = name(), list[str]()
    graves, roads = key(f"graves-{unique}"), key(f"roads-{unique}")

    def die() -> None:
        raise KeyboardInterrupt

    with governed(either) as client:
        client.operations.register("undo", rollback=lambda op: undone.append(op.key.label))
        for subject in (graves, roads):
            with pytest.raises(KeyboardInterrupt):
                client.operation(subject, rollback="undo").run(die)
        assert client.operations.recover() == {roads.digest: "rolled back"}
        assert undone == [roads.label]
        client.operations.rollback(graves, **BY_ELDER)
        assert undone == [roads.label, graves.label]


def test_whatever_the_transaction_a_lock_failure_is_up_for_review(either: str, attempt: Any) -> None:
    graves = f"graves-{name()}"
    second = key(graves, "second")
    with governed(either) as client:
        with running(either, key(graves)):
            with pytest.raises(holdfast.OperationInProgress, match="up for review as number"):
                attempt(client, second, int)
            with pytest.raises(PolicyDenied, match="up for review as number"):
                attempt(client, second, int)
        [review] = client.reviews.list(key=second)
        assert (review.reason, "which is sovereign" in review.detail) == ("locked", True)
        client.reviews.approve(review.id, **BY_ELDER)
        assert attempt(client, second, int).attempt == 1


def test_a_sovereign_dataset_is_locked_whole_whatever_is_done_to_it(either: str, attempt: Any) -> None:
    """Another operation of it as well; another dataset is another's, and so is one that is not sovereign."""
    graves, roads = f"graves-{name()}", f"roads-{name()}"

    def other(dataset: str, operation: str = "delete") -> holdfast.OperationKey:
        return holdfast.OperationKey(pipeline="etl", task="clean", dataset=dataset, operation=operation)

    with governed(either) as client:
        client.operations.register("undo", rollback=lambda: None)
        client.operation(other(graves, "index"), rollback="undo").run(int)
        with running(either, key(graves), sovereign=True), running(either, key(roads)):
            with pytest.raises(holdfast.OperationInProgress, match="up for review as number"):
                attempt(client, other(graves), fail)
            assert attempt(client, other(f"{graves}-elsewhere"), int).result == 0
            assert attempt(client, other(roads), int).result == 0
            with pytest.raises(holdfast.OperationInProgress):
                client.operations.rollback(other(graves, "index"), **BY_ELDER)
        client.operations.rollback(other(graves, "index"), **BY_ELDER)
        [review] = client.reviews.list(key=other(graves))
        client.reviews.approve(review.id, **BY_ELDER)
        assert attempt(client, other(graves), int).result == 0
        assert client.leases.list() == []


def test_a_sovereign_dataset_that_a_transaction_is_at_is_locked_whole(postgres_url: str) -> None:
    graves = f"graves-{name()}"
    other = holdfast.OperationKey(pipeline="etl", task="clean", dataset=graves, operation="delete")
    with (
        governed(postgres_url) as client,
        psycopg.connect(postgres_url) as mine,
        psycopg.connect(postgres_url) as yours,
    ):
        with mine.transaction():
            client.operation(key(graves), tx=mine).run(int)
            with pytest.raises(holdfast.OperationInProgress, match="up for review as number"):
                client.operation(other).run(fail)
            with pytest.raises(PolicyDenied, match="up for review as number"):
                client.operation(other, tx=yours).run(fail)
            again = holdfast.OperationKey(pipeline="etl", task="clean", dataset=graves, operation="index")
            assert client.operation(again, tx=mine).run(int).result == 0, "it is in nobody's way but others'"
        assert client.leases.list() == []


def test_a_lock_that_somebody_else_has_is_refused_where_that_was_declared(either: str) -> None:
    busy = f"busy-{name()}"
    with governed(either) as client:

        def meanwhile() -> None:
            with governed(either) as other, pytest.raises(PolicyDenied, match="somebody else has the lock of dataset"):
                other.operation(key(busy, "second")).run(int)

        client.operation(key(busy)).run(meanwhile)
        assert client.reviews.list() == []
        assert client.operation(key(busy, "second")).run(int).result == 0


def test_an_approved_review_lets_it_be_tried_once_more_and_a_rejected_one_until_a_reset_never(
    either: str, attempt: Any
) -> None:
    calls: list[int] = []

    def large(context: PolicyContext) -> Allow | Review:
        return Review("who has seen the plan?") if context.moment in ("claim", "retry") else Allow()

    def broken() -> None:
        calls.append(1)
        raise ValueError("broken")

    roads = key(f"roads-{name()}")
    with governed(either, large) as client:
        for _ in range(2):
            with pytest.raises(PolicyDenied, match=r"up for review as number \d+") as told:
                attempt(client, roads, broken, retries=2)
        [review] = client.reviews.list(key=roads)
        assert (review.id, review.reason, review.detail) == (told.value.review, "policy", "who has seen the plan?")
        answer(either, review.id, "approve")
        with pytest.raises(PolicyDenied, match="up for review"):
            attempt(client, roads, broken, retries=2)
        assert len(calls) == 1, "once: a retry within the run is another try"
        with pytest.raises(PolicyDenied, match="up for review") as told:
            attempt(client, roads, broken)
        assert told.value.review != review.id
        answer(either, told.value.review, "reject", actor="joe", reason="nobody has")
        for _ in range(2):
            with pytest.raises(PolicyDenied, match=r"rejected by joe: nobody has\. It is refused until it is reset"):
                attempt(client, roads, broken)
        assert len(calls) == 1
        client.operations.reset(roads, **BY_ELDER)
        with pytest.raises(PolicyDenied, match="up for review") as told:
            attempt(client, roads, broken)
        answer(either, told.value.review, "approve")
        assert attempt(client, roads, int).result == 0
        told_all = [(each.status, each.actor) for each in client.reviews.list(status=None, key=roads)]
        assert told_all == [("approved", "elder Mary"), ("rejected", "joe"), ("approved", "elder Mary")]
        assert all(each.spent_at for each in client.reviews.list(status=None, key=roads))


def test_two_who_ask_do_not_share_an_approval(either: str) -> None:
    unique = name()

    def rule(context: PolicyContext) -> Any:
        return Review("look")

    with governed(either, rule) as client:
        with pytest.raises(PolicyDenied) as told:
            client.operation(unique).run(int)
        answer(either, told.value.review, "approve")

        def meanwhile() -> str:
            with governed(either, rule) as other, pytest.raises(holdfast.OperationInProgress, match="up for review"):
                other.operation(unique).run(int)
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            client.operation(unique).run(meanwhile)
        with pytest.raises(PolicyDenied, match="up for review"):
            client.operation(unique).run(int)


def test_one_that_has_used_up_its_attempts_or_was_left_half_done_goes_on_when_that_is_approved(
    either: str, attempt: Any
) -> None:
    """With no policy at all."""
    exhausted, half_done, rejected = name(), name(), name()
    leave_half_done(either, half_done)
    with holdfast.Client(either) as client:
        for unique in (exhausted, rejected):
            with pytest.raises(ValueError, match="broken"):
                client.operation(unique, max_attempts=1).run(fail)
        for unique in (exhausted, half_done, rejected):
            for _ in range(2):
                with pytest.raises(holdfast.OperationFailed, match="reset"):
                    attempt(client, unique, int, max_attempts=1)
            [review] = client.reviews.list(key=unique)
            assert review.reason == "attempts"
            decide = client.reviews.reject if unique == rejected else client.reviews.approve
            decide(review.id, **BY_ELDER)
        for unique in (exhausted, half_done):
            outcome = attempt(client, unique, lambda: "done", max_attempts=1)
            assert (outcome.result, outcome.attempt) == ("done", 2)
        for _ in range(2):
            with pytest.raises(PolicyDenied, match="was rejected by elder Mary"):
                attempt(client, rejected, int, max_attempts=1)
        client.operations.reset(rejected, **BY_ELDER)
        assert attempt(client, rejected, int, max_attempts=1).result == 0
        assert client.operations.verify().passed


def test_whatever_an_error_or_a_rule_says_it_is_up_for_review(either: str) -> None:
    said = "at \0 and \ud800"

    def odd() -> None:
        raise ValueError(said)

    failed, asked = name(), name()
    with holdfast.Client(either) as client, holdfast.Client(either, policy=lambda _: Review(said)) as strict:
        with pytest.raises(ValueError, match="at"):
            client.operation(failed, max_attempts=1).run(odd)
        with pytest.raises(holdfast.OperationFailed):
            client.operation(failed, max_attempts=1).run(odd)
        with pytest.raises(PolicyDenied):
            strict.operation(asked).run(int)
        assert all("at ? and ?" in each.detail for key in (failed, asked) for each in client.reviews.list(key=key))
        assert len(client.reviews.list()) == 2


def test_who_may_reset_and_answer(either: str) -> None:
    graves = key(f"graves-{name()}")
    by_joe: dict[str, Any] = {"actor": "joe", "reason": "why not"}
    with governed(either) as client, governed(either, lambda _: Review("look")) as strict:
        client.operations.register("undo", rollback=int)
        client.operation(graves, rollback="undo").run(int)
        for act in (client.operations.reset, client.operations.rollback):
            with pytest.raises(PolicyDenied, match=r"answered for by elder\*, not by 'joe'"):
                act(graves, **by_joe)
        assert client.operation(graves).run(fail).replayed
        client.operations.reset(graves, **BY_ELDER)
        with pytest.raises(PolicyDenied, match="look"):
            strict.operation(graves).run(int)
        [review] = client.reviews.list(key=graves)
        for decide in (client.reviews.approve, client.reviews.reject):
            with pytest.raises(PolicyDenied, match=r"not by 'joe'"):
                decide(review.id, **by_joe)
        client.reviews.reject(review.id, **BY_ELDER)
        client.reviews.reject(review.id, **BY_ELDER)  # whose answer was lost, says the same once more
        with pytest.raises(holdfast.Conflict, match="is not open any more"):
            client.reviews.approve(review.id, **BY_ELDER)
        never_begun = key(graves.dataset, "never")
        with pytest.raises(PolicyDenied):
            strict.operation(never_begun).run(int)
        [review] = client.reviews.list(key=never_begun)
        client.reviews.reject(review.id, **BY_ELDER)
        with pytest.raises(PolicyDenied, match="not by 'joe'"):
            client.operations.reset(never_begun, **by_joe)
        client.operations.reset(never_begun, **BY_ELDER)
        assert client.operation(never_begun).run(int).result == 0
        with pytest.raises(LookupError, match="there is no review 999999"):
            client.reviews.approve(999999, **BY_ELDER)
        with pytest.raises(LookupError, match="there is no operation"):
            client.operations.reset("nobody's", **BY_ELDER)


def test_geometry_has_to_be_masked_where_that_was_declared(either: str, attempt: Any) -> None:
    sites = key(f"sites-{name()}")
    masked, fine = holdfast.mask_h3(POINT, 5), holdfast.mask_h3(POINT, 6)
    with governed(either) as client:
        for payload in ({"payload": POINT}, {"payload": fine}, {"payload": {"lat": 48.2}}, {}):
            with pytest.raises(PolicyDenied, match="is written as H3 cells of resolution 5 or coarser"):
                attempt(client, sites, int, **payload)
        with pytest.raises(ValueError, match="broken"):
            attempt(client, sites, fail, payload=masked)
        with pytest.raises((PolicyDenied, holdfast.KeyReused), match=r"payload is a bare Point|another payload"):
            attempt(client, sites, int, payload=POINT)
        assert attempt(client, sites, int, payload=masked).result == 0

        @client.operation(key=lambda geojson: key(sites.dataset, "decorated", checksum=str(len(str(geojson)))))
        def write(geojson: Any) -> int:
            return len(geojson["features"])

        assert write(masked).result == 1
        with pytest.raises(PolicyDenied, match=r"payload\[0\]\[0\] is a bare Point"):
            write(POINT)
        outcomes = client.operations.run_many(
            [masked, POINT], lambda _: 1, key=lambda each: key(sites.dataset, each["type"]), payload=lambda each: each
        )
        assert [each.status for each in outcomes] == ["success", "failed"]


def test_an_error_budget_that_is_used_up_stops_retries_and_nothing_else(either: str, attempt: Any) -> None:
    flaky = f"flaky-{name()}"
    with governed(either) as client:
        for task in ("a", "b"):
            with pytest.raises(ValueError, match="broken"):
                client.operation(key(flaky, task)).run(fail)
        with pytest.raises(PolicyDenied, match="used up its error budget: 2 failed in the last hour, and 2 may"):
            attempt(client, key(flaky, "a"), int)
        assert attempt(client, key(flaky, "c"), int).result == 0
        client.operations.reset(key(flaky, "b"), **BY_ELDER)
        assert attempt(client, key(flaky, "a"), int).result == 0


def test_an_error_budget_is_used_up_by_one_that_is_tried_again_and_again(either: str, attempt: Any) -> None:
    flaky, calls = f"flaky-{name()}", list[int]()

    def broken() -> None:
        calls.append(1)
        raise ValueError("broken")

    spent = "used up its error budget: 2 failed in the last hour, and 2 may"
    with governed(either) as client, pytest.raises(PolicyDenied, match=spent):
        attempt(client, key(flaky), broken, retries=9, max_attempts=9)
    assert len(calls) == 2


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


def test_a_rule_that_raises_lets_nothing_through_and_keeps_no_lock(either: str, attempt: Any) -> None:
    def forgetful(context: PolicyContext) -> Any:
        return None if context.lock == "held" else Allow()

    roads = key(f"roads-{name()}")
    with governed(either, forgetful) as client, holdfast.Client(either) as other:
        with pytest.raises(TypeError, match="rule 'forgetful' must return"):
            attempt(client, roads, fail)
        assert client.leases.list() == []
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
