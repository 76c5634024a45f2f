"""What every engine promises of operations, as tests: an engine is done when they are green.

Used as ``LeaseContract`` is, with the same two fixtures: ``url`` and ``connect``. Effects are counted in a list, as
something outside of the database; how they are one with a transaction depends on the driver, and is tested elsewhere.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast.testing.operation_mending import MendingContract
from holdfast.testing.operation_stage import (
    LONG,
    RESULTS,
    Connect,
    Effects,
    gives_up,
    leave_half_done,
    name,
    running,
)


class OperationContract(MendingContract):
    """Operations, seen from outside."""

    def test_a_result_is_replayed_exactly_and_the_function_is_not_called(self, connect: Connect, url: str) -> None:
        client, other, effects = connect(url), connect(url), Effects()
        for result in RESULTS:
            key = name()
            first = client.operation(key).run(effects.do(result))
            assert (first.result, first.replayed, first.attempt, first.status) == (result, False, 1, "success")
            again = other.operation(key).run(effects.do("another"))
            assert (again.result, type(again.result), again.replayed) == (result, type(result), True)
        assert effects == RESULTS

    def test_keys_of_parts_are_told_apart(self, connect: Connect, url: str) -> None:
        client, effects, unique = connect(url), Effects(), name()
        parts: Any = {"pipeline": "etl", "task": "load", "dataset": unique, "operation": "upsert"}
        for params in ({}, {"a": 1}, {"a": "1"}):
            assert not client.operation(holdfast.OperationKey(**parts, params=params)).run(effects.do()).replayed
        assert client.operation(holdfast.OperationKey(**parts, params={"a": 1})).run(effects.do()).replayed
        assert len(effects) == 3
        record = client.operations.get(holdfast.OperationKey(**parts))
        assert (record.status, record.dataset, record.operation, record.attempt) == ("success", unique, "upsert", 1)
        assert {each.dataset for each in client.operations.list(dataset=unique)} == {unique}

    def test_the_same_key_with_another_payload_is_refused(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        client.operation(key, payload={"to": "a", "amount": 1}).run(effects.do(1))
        assert client.operation(key, payload={"amount": 1, "to": "a"}).run(effects.do(2)).result == 1
        for other in ({"to": "b", "amount": 1}, None, {"to": "a", "amount": 1.0}):
            with pytest.raises(holdfast.KeyReused, match="another payload"):
                client.operation(key, payload=other).run(effects.do(2))
        with pytest.raises(holdfast.KeyReused):
            client.operation(key).run(effects.do(2))
        assert effects == [1]

    def test_a_failure_is_told_and_tried_again_until_it_is_up_for_review(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        for attempt in (1, 2):
            with pytest.raises(ValueError, match="broken"):
                client.operation(key, max_attempts=2).run(effects.do(attempt, ValueError("broken")))
            record = client.operations.get(key)
            assert (record.status, record.attempt, record.error["message"]) == ("failure", attempt, "broken")
        with pytest.raises(holdfast.OperationFailed, match=r"tried 2 times, the last time with ValueError: broken"):
            client.operation(key, max_attempts=2).run(effects.do(3))
        assert effects == [1, 2]
        assert client.operation(key, max_attempts=3).run(effects.do(3)).attempt == 3

    def test_retries_within_a_run(self, connect: Connect, url: str) -> None:
        client, key, calls = connect(url), name(), [ValueError(1), ValueError(2)]

        def work() -> str:
            if calls:
                raise calls.pop()
            return "done"

        outcome = client.operation(key, retries=2).run(work)
        assert (outcome.result, outcome.attempt, outcome.replayed) == ("done", 3, False)

    def test_a_remembered_error_is_for_good_and_a_passing_one_never_is(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        with pytest.raises(LookupError):
            client.operation(key, remember_errors=[LookupError]).run(effects.do(1, KeyError("no such customer")))
        with pytest.raises(holdfast.OperationFailed, match="remembered: KeyError: 'no such customer'") as refused:
            client.operation(key).run(effects.do(2))
        assert (refused.value.error or {})["type"] == "KeyError"
        passing = name()
        with pytest.raises(ConnectionError):
            client.operation(passing, remember_errors=[Exception]).run(effects.do(3, ConnectionResetError("gone")))
        assert client.operation(passing, remember_errors=[Exception]).run(effects.do(4)).result == 4
        assert effects == [1, 3, 4]

    def test_while_somebody_else_is_at_it(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        with running(url, key) as finish:
            assert client.operations.get(key).status == "running"
            skipped = client.operation(key, when_locked="skip").run(effects.do())
            assert (skipped.status, skipped.replayed) == ("skipped", False)
            with pytest.raises(RuntimeError, match="skipped"):
                _ = skipped.result
            with pytest.raises(holdfast.OperationInProgress, match=key):
                client.operation(key, when_locked="fail").run(effects.do())
            with pytest.raises(holdfast.OperationInProgress, match="up for review as number"):
                client.operation(key, when_locked="escalate").run(effects.do())
            for patient in ("wait", "backoff"):
                waiter = client.operation(key, when_locked=patient, timeout=0.1)
                gives_up(partial(waiter.run, effects.do()), after=0.1)
            assert finish().result(LONG).result == "theirs"
        assert effects == []
        assert client.operation(key).run(effects.do()).result == "theirs"

    @pytest.mark.parametrize("patient", ["wait", "backoff"])
    def test_whoever_waits_has_the_result_of_the_other(self, connect: Connect, url: str, patient: str) -> None:
        key, effects, waits = name(), Effects(), threading.Event()

        def rule(context: holdfast.PolicyContext) -> holdfast.Allow:
            if context.lock == "busy":
                waits.set()
            return holdfast.Allow()

        client = connect(url, policy=rule)
        with running(url, key) as finish, ThreadPoolExecutor(1) as pool:
            mine = pool.submit(lambda: client.operation(key, when_locked=patient, timeout=LONG).run(effects.do()))
            assert waits.wait(LONG)
            finish()
            outcome = mine.result(LONG)
        assert (outcome.result, outcome.replayed, effects) == ("theirs", True, [])

    def test_one_dataset_and_operation_is_one_lock_and_shards_are_several(self, connect: Connect, url: str) -> None:
        client, unique = connect(url), name()

        def key(task: str, shards: int = 1) -> holdfast.OperationKey:
            return holdfast.OperationKey(
                pipeline="etl", task=task, dataset=unique, operation="load", version=str(shards), shards=shards
            )

        with running(url, key("first")):
            assert client.operation(key("second"), when_locked="skip").run(int).status == "skipped"
        with running(url, key("first", 64)):
            done = [client.operation(key(f"task {n}", 64), when_locked="skip").run(int).status for n in range(4)]
            assert "success" in done

    def test_a_batch_is_split_into_what_is_to_be_done_and_what_was(self, connect: Connect, url: str) -> None:
        client, prefix, effects, steps = connect(url), name(), Effects(), []
        for number in (0, 3):
            client.operation(f"{prefix}-{number}", payload=number).run(lambda number=number: -number)
        client.operation(f"{prefix}-4", payload="another").run(int)
        with pytest.raises(ValueError, match="once"):
            client.operation(f"{prefix}-5", payload=5).run(effects.do(5, ValueError("once")))
        leave_half_done(url, f"{prefix}-6", payload=6)

        def work(number: int) -> int:
            effects.append(number)
            if number == 8:
                raise ValueError("eight")
            return number * 10

        def many() -> list[Any]:
            found = client.operations.run_many(
                range(10), work, key=lambda number: f"{prefix}-{number}", payload=lambda number: number, batch=4,
                progress=lambda done, total: steps.append((done, total)),
            )  # fmt: skip
            assert isinstance(found, list)
            return found

        with running(url, f"{prefix}-7", payload=7):
            found = many()
        assert [each.status for each in found] == [
            "success", "success", "success", "success", "failed", "success", "failed", "skipped", "failed", "success",
        ]  # fmt: skip
        assert effects == [5, 1, 2, 8, 9, 5]
        assert steps == [(4, 10), (8, 10), (10, 10)]
        assert [found[n].result for n in (0, 1, 2, 3, 5, 9)] == [0, 10, 20, -3, 50, 90]
        assert [found[n].replayed for n in (0, 1, 3)] == [True, False, True]
        assert [type(found[n].error) for n in (4, 6, 8)] == [holdfast.KeyReused, holdfast.OperationFailed, ValueError]
        again = many()
        assert [again[n].result for n in (0, 1, 2, 3, 5, 7, 9)] == [0, 10, 20, -3, 50, "theirs", 90]
        assert effects == [5, 1, 2, 8, 9, 5, 8]
        assert client.operations.verify(since=None).broken == ()

    def test_a_batch_of_keys_of_parts_has_their_lock(self, connect: Connect, url: str) -> None:
        client, unique = connect(url), name()

        def key(task: int, dataset: str = unique) -> Any:
            return holdfast.OperationKey(pipeline="etl", task=str(task), dataset=dataset, operation="load")

        assert client.operations.run_many([], int) == []
        with running(url, key(99)), pytest.raises(holdfast.OperationInProgress):
            client.operations.run_many(range(3), lambda _: 1, key=key, when_locked="fail")
        assert [each.result for each in client.operations.run_many(range(3), lambda n: n, key=key)] == [0, 1, 2]
        for wrong in ([key(1), "plain"], [key(1), key(1, "other")], ["a", "a"]):
            with pytest.raises(ValueError, match="a batch"):
                client.operations.run_many(wrong, int)
        with pytest.raises(ValueError, match="batch must be"):
            client.operations.run_many(["a"], int, batch=0)

    def test_conditions_are_asked_and_what_does_not_hold_is_recorded(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()

        def has_rows() -> bool:
            return False

        def is_fresh() -> None:
            raise ValueError("an hour old")

        with pytest.raises(holdfast.OperationFailed, match="precondition 'has_rows' does not hold"):
            client.operation(key, preconditions=[has_rows]).run(effects.do(1))
        assert effects == []
        with pytest.raises(holdfast.OperationFailed, match="'is_fresh' does not hold: ValueError: an hour old"):
            client.operation(key, postconditions=[is_fresh]).run(effects.do(2))
        outcome = client.operation(key, preconditions=[lambda: None], postconditions=[lambda: True]).run(effects.do(3))
        assert (outcome.attempt, effects) == (3, [2, 3])
        conditions = [each for each in client.operations.history(key) if each.kind.endswith("condition")]
        told = [json.loads(each.detail) for each in conditions]
        assert [(each.kind, said["name"], said["ok"]) for each, said in zip(conditions, told, strict=True)] == [
            ("precondition", "has_rows", False), ("postcondition", "is_fresh", False),
            ("precondition", "<lambda>", True), ("postcondition", "<lambda>", True),
        ]  # fmt: skip
        assert told[1]["error"] == "ValueError: an hour old"

    def test_a_result_that_is_too_big_is_refused(self, connect: Connect, url: str) -> None:
        with pytest.raises(ValueError, match="at most 1048576 bytes, not 1048577: return a reference"):
            connect(url).operation(name()).run(lambda: b"x" * (1048576 + 1))

    def test_a_key_may_be_used_anew_after_its_time(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        with pytest.raises(ValueError, match="broken"):
            client.operation(key).run(effects.do(0, ValueError("broken")))
        client.operation(key, keep=0.001).run(effects.do(1))
        threading.Event().wait(0.01)
        with pytest.raises(ValueError, match="broken"):
            client.operation(key).run(effects.do(0, ValueError("broken")))
        outcome = client.operation(key, keep=3600, max_attempts=2).run(effects.do(2))
        assert (outcome.result, outcome.replayed, outcome.attempt) == (2, False, 4), "it has failed once since"
        assert client.operation(key).run(effects.do(3)).result == 2

    def test_a_key_that_is_not_used_anew_says_that_it_was_done(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        client.operation(key, keep=0.001, payload=1).run(effects.do(1))
        threading.Event().wait(0.01)
        for _ in range(2):
            outcome = client.operation(key, reuse=False, payload=1).run(effects.do(2))
            assert (outcome.status, outcome.replayed, effects) == ("expired", True, [1])
            with pytest.raises(RuntimeError, match="not kept any more"):
                _ = outcome.result
            with pytest.raises(holdfast.KeyReused):
                client.operation(key, reuse=False, payload=2).run(effects.do(2))
            client.operations.expire()

    def test_of_many_at_once_one_does_it_and_all_have_its_result(self, connect: Connect, url: str) -> None:
        clients, key, effects = [connect(url) for _ in range(4)], name(), Effects()
        barrier = threading.Barrier(4)

        def run(number: int) -> Any:
            barrier.wait(LONG)
            return clients[number].operation(key, timeout=LONG).run(effects.do(number)).result

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(run, range(4)))
        assert len(effects) == 1
        assert found == effects * 4

    def test_nested_operations_do_not_mix(self, connect: Connect, url: str) -> None:
        outer, inner, effects = name(), name(), Effects()
        with holdfast.Client(url) as client:

            def work() -> list[Any]:
                return [client.operation(inner).run(effects.do(n)).result for n in (1, 2)]

            assert client.operation(outer).run(work).result == [1, 1]
            assert client.operation(outer).run(effects.do(3)).result == [1, 1]
            assert client.operation(inner).run(effects.do(3)).result == 1
        assert effects == [1]

    def test_a_decorated_function_is_told_apart_by_its_arguments(self, connect: Connect, url: str) -> None:
        client, prefix, effects = connect(url), name(), Effects()

        @client.operation(key=lambda path, **_: f"{prefix}-{path}")  # type: ignore[untyped-decorator]
        def load(path: str, rows: int = 1) -> str:
            effects.append(path)
            return path.upper()

        for path in ("a", "b", "a"):
            assert load(path).result == path.upper()
        assert load(path="b").replayed, "however they are passed"
        assert effects == ["a", "b"]
        with pytest.raises(holdfast.KeyReused):
            load("a", rows=2)
        with pytest.raises(TypeError, match="unexpected keyword argument 'row'"):
            load("c", row=2)
        assert client.operations.get(f"{prefix}-c") is None, "nothing was begun"
