"""What people say of operations in reviews, and who may."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import psycopg
import pytest

import holdfast
from holdfast import PolicyDenied
from holdfast.governance import Allow, PolicyContext, Review
from holdfast.testing.operation_contract import leave_half_done, name, running
from tests.operations.policies import BY_ELDER, answer, every_way, fail, governed, key
from tests.user_connections import ask


@every_way
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
                attempt(client, roads, broken, retry=holdfast.Retry(in_this_run=2))
        [review] = client.reviews.list(key=roads)
        assert (review.id, review.reason, review.detail) == (told.value.review, "policy", "who has seen the plan?")
        answer(either, review.id, "approve")
        with pytest.raises(PolicyDenied, match="up for review"):
            attempt(client, roads, broken, retry=holdfast.Retry(in_this_run=2))
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


@every_way
def test_an_approval_is_there_for_the_next_one_when_somebody_else_had_the_lock(either: str, attempt: Any) -> None:
    dataset = name()
    with holdfast.Client(either) as client:
        with pytest.raises(ValueError, match="broken"):
            attempt(client, key(dataset), fail)
        with pytest.raises(holdfast.OperationFailed, match="up for review"):
            attempt(client, key(dataset), int, retry=holdfast.Retry(attempts=1))
        [review] = client.reviews.list(key=key(dataset))
        client.reviews.approve(review.id, actor="jane", reason="once more")
        with running(either, key(dataset, "other")):
            assert (
                attempt(client, key(dataset), int, retry=holdfast.Retry(attempts=1), when_locked="skip").status
                == "skipped"
            )
            with pytest.raises(holdfast.OperationInProgress):
                attempt(client, key(dataset), int, retry=holdfast.Retry(attempts=1), when_locked="fail")
        assert attempt(client, key(dataset), int, retry=holdfast.Retry(attempts=1)).attempt == 2
        assert client.reviews.get(review.id).spent_at is not None  # type: ignore[union-attr]


@every_way
def test_an_approval_is_there_for_the_next_one_when_the_policy_has_said_no(either: str, attempt: Any) -> None:
    burials = key(f"burials-{name()}")
    with governed(either, lambda context: Review("who?") if context.moment == "claim" else Allow()) as client:
        with pytest.raises(PolicyDenied, match="up for review") as told:
            attempt(client, burials, int, justification="the council agreed")
        answer(either, told.value.review, "approve")
        with pytest.raises(PolicyDenied, match="needs a justification"):
            attempt(client, burials, int)
        assert attempt(client, burials, int, justification="the council agreed").attempt == 1


def test_an_approval_is_there_for_the_next_one_when_the_database_could_not_be_asked(postgres_url: str) -> None:
    """A connection from a pool may be dead by the time that it is used: nothing was tried then."""
    unique = name()
    with governed(postgres_url, lambda context: Review("who?") if context.moment == "claim" else Allow()) as client:
        with pytest.raises(PolicyDenied, match="up for review") as told:
            client.operation(unique).run(int)
        answer(postgres_url, told.value.review, "approve")
        with psycopg.connect(postgres_url) as dead:
            ask(postgres_url, "select pg_terminate_backend(%s)", dead.info.backend_pid)
            with pytest.raises(psycopg.OperationalError):
                client.operation(unique, tx=dead).run(int)
        assert client.operation(unique).run(int).attempt == 1
        [review] = client.reviews.list(status="approved", key=unique)
        assert (review.id, review.spent_at is not None) == (told.value.review, True)


@every_way
def test_an_approval_holds_for_the_payload_the_actor_and_the_outputs_that_were_asked_for(
    either: str, attempt: Any
) -> None:
    asks = Review("who has seen the plan?")
    asked: dict[str, Any] = {
        "payload": {"delete": [7]}, "actor": "jane", "lineage": holdfast.lineage.Lineage(outputs=["maps", "roads"]),
    }  # fmt: skip
    with governed(either, lambda context: asks if context.moment in ("claim", "retry") else Allow()) as client:
        others: list[dict[str, Any]] = [
            {"payload": {"delete": "ALL"}}, {"actor": "joe"}, {"lineage": holdfast.lineage.Lineage(outputs=["maps"])},
            {},
        ]  # fmt: skip
        for other in others:
            roads = key(f"roads-{name()}")
            with pytest.raises(PolicyDenied, match="up for review") as told:
                attempt(client, roads, int, **asked)
            answer(either, told.value.review, "approve")
            if not other:
                assert attempt(client, roads, int, **asked).attempt == 1
                continue
            with pytest.raises(PolicyDenied, match="up for review") as refused:
                attempt(client, roads, lambda: pytest.fail("called"), **{**asked, **other})
            assert refused.value.review != told.value.review


def test_who_asked_for_a_review_of_sovereign_data_does_not_approve_it(either: str) -> None:
    """Also not with a client without the policy, nor by SQL."""
    graves, asks = f"graves-{name()}", Review("look")
    for declared, refuses in (({"sovereign": True}, True), ({"sovereign": True, "four_eyes": False}, False)):
        policy = holdfast.governance.Policy({"graves*": declared}, lambda _: asks)
        operation = key(graves, str(refuses))
        with holdfast.Client(either, policy=policy) as client, holdfast.Client(either) as plain:
            with pytest.raises(PolicyDenied, match="up for review") as told:
                client.operation(operation, actor="jane").run(int)
            number = told.value.review
            assert number is not None
            for each in (client, plain) if refuses else ():
                with pytest.raises(PolicyDenied, match="needs four eyes: 'jane' asked for"):
                    each.reviews.approve(number, actor="jane", reason="me too")
            if refuses:
                plain.reviews.approve(number, **BY_ELDER)
                assert client.operation(operation, actor="jane").run(int).result == 0
            else:
                plain.reviews.approve(number, actor="jane", reason="alone")


def test_only_who_took_an_approval_returns_it_and_only_before_the_attempt(either: str) -> None:
    unique, tokens = key(name()), [str(uuid4()), str(uuid4())]
    with holdfast.Client(either) as client:
        call = client._engine.call
        about = {"key": unique.digest, "label": "x", "reason": "attempts", "detail": "x", "dataset": None}
        [row] = call("review_open", {**about, "operation": None})
        client.reviews.approve(row["id"], **BY_ELDER)

        def take() -> Any:
            return call("review_take", {"key": unique.digest, "token": tokens[0]})[0]["id"]

        def give_back(token: str) -> bool:
            rows = call("review_return", {"id": row["id"], "token": token})
            return bool(rows and rows[0]["returned"])

        assert take() == row["id"]
        assert (give_back(tokens[1]), take()) == (False, None)
        assert (give_back(tokens[0]), take()) == (True, row["id"])
        client.operation(unique).run(int)
        assert (give_back(tokens[0]), take()) == (False, None), "it was used"


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


@every_way
def test_one_that_has_used_up_its_attempts_or_was_left_half_done_goes_on_when_that_is_approved(
    either: str, attempt: Any
) -> None:
    """With no policy at all."""
    exhausted, half_done, rejected = name(), name(), name()
    leave_half_done(either, half_done)
    with holdfast.Client(either) as client:
        for unique in (exhausted, rejected):
            with pytest.raises(ValueError, match="broken"):
                client.operation(unique, retry=holdfast.Retry(attempts=1)).run(fail)
        for unique in (exhausted, half_done, rejected):
            for _ in range(2):
                with pytest.raises(holdfast.OperationFailed, match="reset"):
                    attempt(client, unique, int, retry=holdfast.Retry(attempts=1))
            [review] = client.reviews.list(key=unique)
            assert review.reason == "attempts"
            decide = client.reviews.reject if unique == rejected else client.reviews.approve
            decide(review.id, **BY_ELDER)
        for unique in (exhausted, half_done):
            outcome = attempt(client, unique, lambda: "done", retry=holdfast.Retry(attempts=1))
            assert (outcome.result, outcome.attempt) == ("done", 2)
        for _ in range(2):
            with pytest.raises(PolicyDenied, match="was rejected by elder Mary"):
                attempt(client, rejected, int, retry=holdfast.Retry(attempts=1))
        client.operations.reset(rejected, **BY_ELDER)
        assert attempt(client, rejected, int, retry=holdfast.Retry(attempts=1)).result == 0
        assert client.operations.verify().passed


def test_whatever_an_error_or_a_rule_says_it_is_up_for_review(either: str) -> None:
    said = "at \0 and \ud800"

    def odd() -> None:
        raise ValueError(said)

    failed, asked = name(), name()
    with holdfast.Client(either) as client, holdfast.Client(either, policy=lambda _: Review(said)) as strict:
        with pytest.raises(ValueError, match="at"):
            client.operation(failed, retry=holdfast.Retry(attempts=1)).run(odd)
        with pytest.raises(holdfast.OperationFailed):
            client.operation(failed, retry=holdfast.Retry(attempts=1)).run(odd)
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
            with pytest.raises(PolicyDenied, match=r"reviewed by elder\*, not by 'joe'"):
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
