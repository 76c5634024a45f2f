"""What is told of operations is what became of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import telemetry
from holdfast.operations.policy_checks import PolicyChecks
from holdfast.runtime import telemetry as _wire_telemetry
from holdfast.testing.operation_contract import leave_half_done, running
from tests.children import PATIENCE, eventually
from tests.telemetry.conftest import Told, pairs

Connect = Callable[..., Any]
KEY = holdfast.OperationKey(
    pipeline="etl", task="load", dataset="parcels", operation="upsert", version="3", checksum="c"
)
LABELS = {
    "pipeline": "etl", "task": "load", "dataset_id": "parcels", "operation_type": "upsert", "sovereignty_event": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _released_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that stands still, a lease that is not released in five seconds stays for its TTL."""
    for flavour in ("", "_async"):
        monkeypatch.setattr(f"holdfast.operations.leased_attempt{flavour}.RELEASE_TIMEOUT", PATIENCE)


class Interrupted(BaseException):
    pass


def interrupt() -> None:
    raise Interrupted


def one() -> int:
    return 1


def fail() -> None:
    raise ArithmeticError("no")


@pairs
def test_an_operation_is_told_from_its_start_to_its_end_under_what_its_key_says(
    connect: Connect, either: str, told: Told
) -> None:
    client, before = connect(either), time.monotonic()
    client.operation(KEY).run(one)
    client.operation(KEY).run(one)
    with client.operation(KEY) as op:
        assert op.replayed
    assert told.count("idem_cache_misses") == {(): 1}
    assert told.count("idem_cache_hits") == told.count("idempotent_replays") == {(): 2}
    assert told.count("operations") == {("success",): 1, ("replayed",): 2}
    operations = [(event, fields) for event, fields in told if event.startswith("operation.")]
    assert all(LABELS.items() <= fields.items() for _, fields in operations)
    assert {fields["key"] for fields in told.of("operation.ended")} == {KEY.digest}
    started, ended = told.of("operation.started"), told.of("operation.ended")
    assert [each["run"] for each in started] == [each["run"] for each in ended]
    [begun], [left] = told.of("operation.begun"), told.of("operation.left")
    assert begun["run"] == left["run"] == ended[0]["run"]
    assert 0 < left["held"] < time.monotonic() - before
    assert not told.count("retry_events")
    assert not told.count("lineage_rewrite_ops")


def test_a_plain_key_has_no_labels_and_a_sovereign_one_says_so(sqlite_url: str, told: Told) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.operation("plain").run(one)
        client.operation(KEY, options=holdfast.OperationOptions(sovereign=True)).run(one)
    plain, sovereign = told.of("operation.ended")
    [metric] = [each for each in telemetry.METRICS if each.name == "operations"]
    assert metric.labelled({**plain, "env": "test"}) == {
        "pipeline": "", "task": "", "dataset_id": "", "env": "test", "operation_type": "",
        "sovereignty_event": "false", "outcome": "success",
    }  # fmt: skip
    assert metric.labelled(sovereign)["sovereignty_event"] == "true"


@pairs
def test_failures_retries_and_what_is_done_anew_are_told_apart(connect: Connect, either: str, told: Told) -> None:
    client, tries = connect(either), iter([fail, fail, one])
    assert client.operation("a", retry=holdfast.Retry(in_this_run=2)).run(lambda: next(tries)()).result == 1
    assert told.count("retry_events") == {("failure",): 2}
    assert told.count("operations") == {("success",): 1}
    assert [each["attempt"] for each in told.of("operation.begun")] == [1, 2, 3]
    with pytest.raises(ArithmeticError):
        client.operation("b", retry=holdfast.Retry(remember=(ArithmeticError,))).run(fail)
    with pytest.raises(holdfast.OperationFailed):
        client.operation("b", retry=holdfast.Retry(remember=(ArithmeticError,))).run(one)
    with pytest.raises(holdfast.KeyReused):
        client.operation("a", payload=1).run(one)
    assert told.count("operations") == {("success",): 1, ("failed",): 1, ("refused",): 2}
    assert isinstance(told.of("operation.ended")[1]["error"], ArithmeticError)
    client.operations.reset("a", actor="op", reason="test")
    client.operation("a").run(one)
    assert told.count("lineage_rewrite_ops") == {("retry",): 2, ("reset",): 1, ("anew",): 1}
    assert told.count("retry_events") == {("failure",): 2}
    client.operations.register("undo", rollback=one)
    client.operation("c", rollback="undo").run(one)
    client.operations.rollback("c", actor="op", reason="test")
    client.operation("c").run(one)
    assert told.count("lineage_rewrite_ops") == {("retry",): 3, ("reset",): 1, ("anew",): 1, ("rollback",): 1}
    assert told.count("retry_events") == {("failure",): 2, ("undone",): 1}


def test_who_does_not_get_the_lock_is_told_why(sqlite_url: str, told: Told) -> None:
    with holdfast.Client(sqlite_url) as client, running(sqlite_url, "a"):
        assert client.operation("a", when_locked="skip").run(one).status == "skipped"
        for when, timeout in (("fail", 15.0), ("wait", 0.01), ("backoff", 0.01), ("escalate", 15.0)):
            with pytest.raises(holdfast.OperationInProgress):
                client.operation("a", when_locked=when, timeout=timeout).run(one)  # type: ignore[arg-type]
    assert told.count("lock_acquire_failures") == {("skipped",): 1, ("busy",): 1, ("timeout",): 2, ("review",): 1}
    outcomes = told.count("operations")
    assert (outcomes["skipped",], outcomes["locked",]) == (1, 4)
    with holdfast.Client(sqlite_url) as client, pytest.raises(holdfast.OperationInProgress):
        client.operation("x").run(lambda: client.operation("x").run(one))
    assert told.count("lock_acquire_failures")["reentered",] == 1
    assert told.count("operations")["failed",] == 1, "what was inside of it was locked, but it was begun itself"


@pairs
def test_what_a_dead_owner_left_is_told_with_what_becomes_of_it(connect: Connect, either: str, told: Told) -> None:
    client = connect(either)
    for key in ("refused", "undone", "verified"):
        leave_half_done(either, key)
    leave_half_done(either, "recovered", options=holdfast.OperationOptions(marks_effect=True))
    assert told.count("operations") == {("interrupted",): 4}
    with pytest.raises(holdfast.OperationFailed):
        client.operation("refused").run(one)
    client.operation("undone", rollback=one).run(one)
    client.operation("verified", verify=lambda op: op.done(7)).run(fail)
    assert told.count("stale_partials_met") == {("refuse",): 1, ("rollback",): 1, ("verify",): 1}
    assert told.count("idem_cache_hits") == {(): 3}
    client.operations.recover()
    met = told.count("stale_partials_met")
    assert (met["left",], met["recovered",]) == (1, 1), "of the one that was refused nobody knows how"


def test_one_that_was_approved_is_not_told_of_as_refused(sqlite_url: str, told: Told) -> None:
    leave_half_done(sqlite_url, "a")
    with holdfast.Client(sqlite_url) as client:
        with pytest.raises(holdfast.OperationFailed):
            client.operation("a").run(one)
        [review] = client.reviews.list()
        client.reviews.approve(review.id, actor="op", reason="test")
        assert told.count("stale_partials_met") == {("refuse",): 1}
        told.clear()
        client.operation("a").run(one)
    assert told.count("stale_partials_met") == {("execute",): 1}
    assert told.count("idem_cache_hits") == {(): 1}


def test_a_transaction_in_anothers_way_is_tried_again_and_told(postgres_url: str, told: Told) -> None:
    def collide() -> int:
        if not told.count("retry_events"):
            raise psycopg.errors.SerializationFailure("in the way")
        return 1

    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url, autocommit=True) as mine:
        assert client.operation("a", tx=mine).run(collide).result == 1
    assert told.count("retry_events") == {("collision",): 1}
    assert told.count("operations") == {("success",): 1}


@pairs
def test_a_batch_tells_of_each_when_its_end_is_written(connect: Connect, either: str, told: Told) -> None:
    client = connect(either)
    client.operation("b").run(one)
    with running(either, "c"):
        client.operations.run_many(["a", "b", "c", "d"], lambda item: fail() if item == "d" else 1, when_locked="skip")
    ended = {fields["key"]: fields["outcome"] for fields in told.of("operation.ended")[1:-1]}
    assert sorted(ended.values()) == ["failed", "replayed", "skipped", "success"]
    assert len(told.of("operation.left")) == len(told.of("operation.begun")) == 4
    assert told.count("idempotent_replays") == {(): 1}
    told.clear()

    def stop_at_f(item: str) -> int:
        if item == "f":
            raise Interrupted
        return 1

    with pytest.raises(Interrupted):
        client.operations.run_many(["e", "f", "g"], stop_at_f)
    assert told.count("operations") == {("success",): 1, ("interrupted",): 1}, "the last was never called"


def test_of_a_batch_each_that_is_skipped_counts_once(sqlite_url: str, told: Told) -> None:
    keys = [holdfast.OperationKey(pipeline="p", dataset="d", operation="o", task=each) for each in ("x", "y", "z")]
    with holdfast.Client(sqlite_url) as client:
        client.operation(keys[0]).run(one)
        with running(sqlite_url, holdfast.OperationKey(pipeline="p", dataset="d", operation="o", task="other")):
            told.clear()
            client.operations.run_many(keys, one, when_locked="skip")
            assert told.count("operations") == {("replayed",): 1, ("skipped",): 2}
            assert told.count("lock_acquire_failures") == {("skipped",): 2}
        with running(sqlite_url, "plain"):
            told.clear()
            client.operations.run_many(["plain"], one, when_locked="skip")
            assert told.count("lock_acquire_failures") == told.count("operations") == {("skipped",): 1}


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        ({"when_locked": "fail"}, "busy"),
        ({"timeout": 0.01}, "timeout"),
        ({"when_locked": "backoff", "timeout": 0.01}, "timeout"),
    ],
)
def test_of_a_batch_each_that_waits_in_vain_counts_once(
    either: str, told: Told, terms: dict[str, Any], reason: str
) -> None:
    with holdfast.Client(either) as client, running(either, "theirs"):
        told.clear()
        client.operations.run_many(["mine", "theirs"], str, **terms)
        assert told.count("operations") == {("success",): 1, ("locked",): 1}
        assert told.count("lock_acquire_failures") == {(reason,): 1}


def test_one_whose_result_is_kept_no_longer_is_a_hit_and_no_replay(sqlite_url: str, told: Told) -> None:
    def expired() -> bool:
        told.clear()
        return bool(client.operation("a", options=holdfast.OperationOptions(reuse=False)).run(one).status == "expired")

    with holdfast.Client(sqlite_url) as client:
        client.operation("a", keep=0.001, options=holdfast.OperationOptions(reuse=False)).run(one)
        eventually(expired, "it to expire")
    assert (told.count("operations"), told.count("idem_cache_hits")) == ({("expired",): 1}, {(): 1})
    assert not told.count("idempotent_replays")


def test_what_is_done_from_outside_says_whether_the_dataset_is_sovereign(either: str, told: Told) -> None:
    """As the policy says, or else the log; and what only some may roll back counts as left."""
    graves = holdfast.OperationKey(pipeline="p", task="t", dataset="graves", operation="o")
    policy = holdfast.governance.Policy({"graves": {"sovereign": True, "may_reset": ["elder"]}})
    with holdfast.Client(either, policy=policy) as client:
        client.operations.register("undo", rollback=one)
        client.operation(KEY, options=holdfast.OperationOptions(sovereign=True)).run(one)
        client.operation("plain").run(one)
        with pytest.raises(Interrupted):
            client.operation(graves, rollback="undo").run(interrupt)
        for key in (KEY, "plain"):
            client.operations.reset(key, actor="op", reason="test")
        client.operations.recover()
        client.operations.rollback(graves, actor="elder", reason="test")
    assert [each["sovereignty_event"] for each in told.of("operation.rewritten")] == [True, False, True]
    assert [(each["fate"], each["sovereignty_event"]) for each in told.of("operation.partial")] == [("left", True)]


def test_a_batch_that_cannot_ask_leaves_no_run_open(
    sqlite_url: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unanswered(*_: object) -> bool:
        raise holdfast.EngineError("no answer")

    with holdfast.Client(sqlite_url) as client:
        with pytest.raises(ArithmeticError):
            client.operation("a", retry=holdfast.Retry(remember=(ArithmeticError,))).run(fail)
        monkeypatch.setattr(PolicyChecks, "review_refusal", unanswered)
        with pytest.raises(holdfast.EngineError):
            client.operations.run_many(["a"], one)
    assert len(told.of("operation.started")) == len(told.of("operation.ended")) == 2


class Looks(tuple[Any, ...]):
    """Nobody listens, and whoever looks for somebody is counted."""

    __slots__ = ()

    def __bool__(self) -> bool:
        looked.append(self)
        return False


looked: list[Looks] = []


@pairs
def test_while_nobody_listens_a_replay_looks_once_for_somebody(
    connect: Connect, either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(either)
    client.operation("a").run(one)
    monkeypatch.setattr(_wire_telemetry, "listeners", Looks())
    looked.clear()
    assert client.operation("a").run(one).replayed
    assert len(looked) == 1
