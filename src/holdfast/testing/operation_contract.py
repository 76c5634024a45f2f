"""What every engine promises of operations, as tests. An engine is complete when they pass.

Use it as you use ``LeaseContract``: subclass it, and give the same two fixtures, ``url`` and ``connect``. Effects are
counted in a list, as something outside of the database. How an effect commits with a transaction depends on the
database driver, and is tested elsewhere.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast import Checks, OperationOptions, Retry

Connect = Callable[..., Any]

LONG = 60.0
RESULTS: list[Any] = [
    None, {}, [], 0, 0.0, False, True, "", "text", b"", b"\x00\xff", -1, 2**100, 0.1, "é \u0000 \ud800 \U0001f600",
    [1, [None, "a"], 1.0], {"b": 1, "a": {"": [1.0, 1]}}, bytes(range(256)) * 1000, "x" * 1_000_000,
]  # fmt: skip
WRONG: list[Any] = [object(), (1, 2), {1: 2}, {"a": {1, 2}}, float("nan"), [float("inf")], bytearray(b"x")]


def name() -> str:
    """A new operation key."""
    return f"op-{secrets.token_hex(6)}"


class Effects(list[Any]):
    """The effects that happened, in order."""

    def do(self, result: Any = None, error: Exception | None = None) -> Callable[[], Any]:
        """A function that appends ``result`` to the effects, and then returns it or raises ``error``."""

        def function() -> Any:
            self.append(result)
            if error is not None:
                raise error
            return result

        return function


@contextmanager
def running(url: str, key: Any, **options: Any) -> Iterator[Callable[[], Future[Any]]]:
    """Another client runs the operation until the block ends, or until it calls the function that it gets.

    That function returns the future of the other client's outcome.
    """
    begun, go_on = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert go_on.wait(10 * LONG)
        return "theirs"

    with holdfast.Client(url) as other, ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: other.operation(key, **options).run(work))
        try:
            assert begun.wait(LONG), result.result()

            def finish() -> Future[Any]:
                go_on.set()
                return result

            yield finish
        finally:
            go_on.set()


def gives_up(run: Callable[[], Any], *, after: float) -> None:
    """Assert that ``run`` waits ``after`` seconds for the lock and then raises OperationInProgress.

    A wait of less than a second gives the database one second to answer. On a paused machine it ends with an
    EngineError, which says nothing about the lock: then ``run`` is called again.
    """
    deadline = time.monotonic() + LONG
    while True:
        try:
            with pytest.raises(holdfast.OperationInProgress, match=r"waited \d+\.\d s") as refused:
                run()
        except holdfast.EngineError:
            assert time.monotonic() < deadline, "the database never answers"
        else:
            waited = re.findall(r"waited (\d+\.\d) s", str(refused.value))
            assert float(waited[0]) >= after, refused.value
            return


def leave_half_done(url: str, key: Any, note: Any = None, **options: Any) -> None:
    """Leave an operation as a process that dies does: without an outcome, and without its lease."""

    def work(op: Any) -> None:
        if note is not None:
            op.checkpoint("noted", note)
        raise KeyboardInterrupt

    with holdfast.Client(url) as dies, pytest.raises(KeyboardInterrupt):
        dies.operation(key, **options).run(work)


def interrupted() -> None:
    raise KeyboardInterrupt


class OperationContract:
    """Operations, through public names."""

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
                client.operation(key, retry=Retry(attempts=2)).run(effects.do(attempt, ValueError("broken")))
            record = client.operations.get(key)
            assert (record.status, record.attempt, record.error["message"]) == ("failure", attempt, "broken")
        with pytest.raises(holdfast.OperationFailed, match=r"tried 2 times, the last time with ValueError: broken"):
            client.operation(key, retry=Retry(attempts=2)).run(effects.do(3))
        assert effects == [1, 2]
        assert client.operation(key, retry=Retry(attempts=3)).run(effects.do(3)).attempt == 3

    def test_retries_within_a_run(self, connect: Connect, url: str) -> None:
        client, key, calls = connect(url), name(), [ValueError(1), ValueError(2)]

        def work() -> str:
            if calls:
                raise calls.pop()
            return "done"

        outcome = client.operation(key, retry=Retry(in_this_run=2)).run(work)
        assert (outcome.result, outcome.attempt, outcome.replayed) == ("done", 3, False)

    def test_a_remembered_error_is_for_good_and_a_passing_one_never_is(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        with pytest.raises(LookupError):
            client.operation(key, retry=Retry(remember=[LookupError])).run(effects.do(1, KeyError("no such customer")))
        with pytest.raises(holdfast.OperationFailed, match="remembered: KeyError: 'no such customer'") as refused:
            client.operation(key).run(effects.do(2))
        assert (refused.value.error or {})["type"] == "KeyError"
        passing, remembers = name(), Retry(remember=[Exception])
        with pytest.raises(ConnectionError):
            client.operation(passing, retry=remembers).run(effects.do(3, ConnectionResetError("gone")))
        assert client.operation(passing, retry=remembers).run(effects.do(4)).result == 4
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
    def test_whoever_waits_is_woken_by_the_end_of_the_other(self, connect: Connect, url: str, patient: str) -> None:
        """Also with pauses of hours, whether the other one has the same key or the same lock."""
        unique, effects, waits = name(), Effects(), threading.Event()
        retry = holdfast.Retry(first=86400.0, longest=86400.0)

        def rule(context: holdfast.governance.PolicyContext) -> holdfast.governance.Allow:
            if context.lock == "busy":
                waits.set()
            return holdfast.governance.Allow()

        def key(task: str) -> Any:
            return holdfast.OperationKey(pipeline="etl", task=task, dataset=unique, operation="load")

        client, running_key = connect(url, policy=rule), key("one")
        for task, result in (("one", "theirs"), ("another", 7)):
            waits.clear()
            with running(url, running_key) as finish, ThreadPoolExecutor(1) as pool:
                waiter = client.operation(key(task), when_locked=patient, timeout=10 * LONG, retry=retry)
                mine = pool.submit(waiter.run, effects.do(7))
                assert waits.wait(LONG)
                finish()
                assert mine.result(LONG).result == result
            running_key = key("two")
        assert effects == [7]

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
            outcomes = client.operations.run_many(
                range(10), work, key=lambda number: f"{prefix}-{number}", payload=lambda number: number, batch=4,
                when_locked="skip", progress=lambda done, total: steps.append((done, total)),
            )  # fmt: skip
            assert isinstance(outcomes, list)
            return outcomes

        with running(url, f"{prefix}-7", payload=7):
            outcomes = many()
        assert [each.status for each in outcomes] == [
            "success", "success", "success", "success", "failed", "success", "failed", "skipped", "failed", "success",
        ]  # fmt: skip
        assert effects == [5, 1, 2, 8, 9, 5]
        assert steps == [(4, 10), (8, 10), (10, 10)]
        assert [outcomes[n].result for n in (0, 1, 2, 3, 5, 9)] == [0, 10, 20, -3, 50, 90]
        assert [outcomes[n].replayed for n in (0, 1, 3)] == [True, False, True]
        assert [type(outcomes[n].error) for n in (4, 6, 8)] == [
            holdfast.KeyReused,
            holdfast.OperationFailed,
            ValueError,
        ]
        again = many()
        assert [again[n].result for n in (0, 1, 2, 3, 5, 7, 9)] == [0, 10, 20, -3, 50, "theirs", 90]
        assert effects == [5, 1, 2, 8, 9, 5, 8]
        assert client.operations.verify(since=None).broken == ()

    @pytest.mark.parametrize("patient", ["wait", "backoff"])
    def test_a_batch_waits_for_the_result_of_another_owner(self, connect: Connect, url: str, patient: str) -> None:
        """``Retry`` alone would pause for hours: the release wakes it."""
        client, key, begun = connect(url), name(), threading.Event()
        retry = holdfast.Retry(first=86400.0, longest=86400.0)

        def begin(_: str) -> int:
            begun.set()
            return 1

        with running(url, key) as finish:
            [refused] = client.operations.run_many([key], lambda _: 1, when_locked="fail")
            assert (refused.status, type(refused.error)) == ("failed", holdfast.OperationInProgress)
            [late] = client.operations.run_many([key], lambda _: 1, when_locked=patient, timeout=0.0)
            assert (late.status, type(late.error)) == ("failed", holdfast.OperationInProgress)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(
                    lambda: client.operations.run_many(
                        [f"{key}-own", key], begin, when_locked=patient, timeout=None, retry=retry
                    )
                )
                assert begun.wait(LONG)
                finish()
                outcomes = waiting.result(LONG)
        assert [(each.result, each.replayed) for each in outcomes] == [(1, False), ("theirs", True)]

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
            client.operation(key, checks=Checks(before=[has_rows])).run(effects.do(1))
        assert effects == []
        with pytest.raises(holdfast.OperationFailed, match="'is_fresh' does not hold: ValueError: an hour old"):
            client.operation(key, checks=Checks(after=[is_fresh])).run(effects.do(2))
        outcome = client.operation(key, checks=Checks(before=[lambda: None], after=[lambda: True])).run(effects.do(3))
        assert (outcome.attempt, effects) == (3, [2, 3])
        conditions = [each for each in client.operations.history(key) if each.kind.endswith("condition")]
        details = [json.loads(each.detail) for each in conditions]
        kinds = [each.kind for each in conditions]
        assert [(kind, detail["name"], detail["ok"]) for kind, detail in zip(kinds, details, strict=True)] == [
            ("precondition", "has_rows", False), ("postcondition", "is_fresh", False),
            ("precondition", "<lambda>", True), ("postcondition", "<lambda>", True),
        ]  # fmt: skip
        assert details[1]["error"] == "ValueError: an hour old"

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
        outcome = client.operation(key, keep=3600, retry=Retry(attempts=2)).run(effects.do(2))
        assert (outcome.result, outcome.replayed, outcome.attempt) == (2, False, 4), "it has failed once since"
        assert client.operation(key).run(effects.do(3)).result == 2

    def test_a_key_that_is_not_used_anew_says_that_it_was_done(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        client.operation(key, keep=0.001, payload=1).run(effects.do(1))
        threading.Event().wait(0.01)
        for _ in range(2):
            outcome = client.operation(key, options=OperationOptions(reuse=False), payload=1).run(effects.do(2))
            assert (outcome.status, outcome.replayed, effects) == ("expired", True, [1])
            with pytest.raises(RuntimeError, match="not kept any more"):
                _ = outcome.result
            with pytest.raises(holdfast.KeyReused):
                client.operation(key, options=OperationOptions(reuse=False), payload=2).run(effects.do(2))
            client.operations.expire()

    def test_of_many_at_once_one_does_it_and_all_have_its_result(self, connect: Connect, url: str) -> None:
        clients, key, effects = [connect(url) for _ in range(4)], name(), Effects()
        barrier = threading.Barrier(4)

        def run(number: int) -> Any:
            barrier.wait(LONG)
            return clients[number].operation(key, timeout=LONG).run(effects.do(number)).result

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(run, range(4)))
        assert len(effects) == 1
        assert results == effects * 4

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
        assert load(path="b").replayed, "by position or by keyword"
        assert effects == ["a", "b"]
        with pytest.raises(holdfast.KeyReused):
            load("a", rows=2)
        with pytest.raises(TypeError, match="unexpected keyword argument 'row'"):
            load("c", row=2)
        assert client.operations.get(f"{prefix}-c") is None, "nothing was begun"

    def test_what_a_dead_owner_left_is_refused_without_a_word_of_what_to_do(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        leave_half_done(url, key)
        assert client.operations.get(key).status == "partial"
        assert key in [each.label for each in client.operations.list(status="partial")]
        with pytest.raises(holdfast.OperationFailed, match="left half done in attempt 1") as refused:
            client.operation(key).run(effects.do())
        assert refused.value.status == "partial"
        assert effects == []

    def test_it_is_rolled_back_first(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        leave_half_done(url, key, {"file": 7})

        def undo(op: Any) -> None:
            effects.append(("undone", op.attempt, dict(op.checkpoints)))

        outcome = client.operation(key, rollback=undo).run(effects.do("done"))
        assert effects == [("undone", 1, {"noted": {"file": 7}}), "done"]
        assert (outcome.result, outcome.attempt, outcome.replayed) == ("done", 2, False)

    def test_a_rollback_that_fails_leaves_it_as_it_was(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        leave_half_done(url, key)
        with pytest.raises(OSError, match="cannot undo"):
            client.operation(key, rollback=effects.do("undo", OSError("cannot undo"))).run(effects.do("done"))
        assert client.operations.get(key).status == "partial"
        assert client.operation(key, rollback=effects.do("undo")).run(effects.do("done")).result == "done"
        assert effects == ["undo", "undo", "done"]

    def test_or_a_probe_says_whether_it_is_done(self, connect: Connect, url: str) -> None:
        client, effects = connect(url), Effects()
        for probe, called in ((lambda: True, []), (lambda op: op.done(7), []), (lambda: False, ["done"])):
            key, before = name(), len(effects)
            leave_half_done(url, key)
            outcome = client.operation(key, verify=probe, on_partial="verify").run(effects.do("done"))
            assert effects[before:] == called
            assert outcome.status == "success"
            again = client.operation(key).run(effects.do("no"))
            assert (again.result, again.replayed) == (outcome.result, True)

    def test_a_probe_that_says_neither_yes_nor_no_has_nothing_done_again(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        leave_half_done(url, key)
        for unclear in (1, [7], "t"):
            operation = client.operation(key, verify=lambda answer=unclear: answer, retry=Retry(attempts=9))
            with pytest.raises(TypeError, match=r"verify must return True, op.done\(result\), False or None"):
                operation.run(effects.do("again"))
        assert (effects, client.operations.get(key).status) == ([], "partial")

    def test_a_failure_with_a_rollback_is_undone_before_it_is_tried_again(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        with pytest.raises(ValueError, match="half way"):
            client.operation(key, rollback=effects.do("undo")).run(effects.do(1, ValueError("half way")))
        assert client.operation(key, rollback=effects.do("undo")).run(effects.do(2)).result == 2
        assert effects == [1, "undo", 2]

    def test_what_says_itself_when_the_effect_begins_may_die_before(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        with holdfast.Client(url) as dies, pytest.raises(KeyboardInterrupt):
            dies.operation(key, options=OperationOptions(marks_effect=True)).run(interrupted)
        assert client.operation(key).run(effects.do("done")).attempt == 2
        other = name()

        def begun(op: Any) -> None:
            op.effect_started()
            raise KeyboardInterrupt

        with holdfast.Client(url) as dies, pytest.raises(KeyboardInterrupt):
            dies.operation(other, options=OperationOptions(marks_effect=True)).run(begun)
        with pytest.raises(holdfast.OperationFailed, match="half done"):
            client.operation(other).run(effects.do("again"))
        assert effects == ["done"]

    def test_crashes_count_as_attempts(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        for _ in range(2):
            leave_half_done(url, key, rollback=effects.do("undo"))
        with pytest.raises(holdfast.OperationFailed, match="tried 2 times"):
            client.operation(key, rollback=effects.do("undo"), retry=Retry(attempts=2)).run(effects.do("done"))
        assert effects == ["undo"]

    def test_recover_mends_what_it_knows_how_to_without_a_caller(self, connect: Connect, url: str) -> None:
        client, effects, prefix = connect(url), Effects(), name()
        keys = {each: name() for each in ("undone", "done", "in part", "absent", "unknown", "fails", "not begun")}
        leave_half_done(url, unnamed := name())
        with holdfast.Client(url) as dies:
            for handler, key in keys.items():
                dies.operations.register(f"{prefix} {handler}", rollback=int)
                options = OperationOptions(marks_effect=handler == "not begun")
                operation = dies.operation(key, rollback=f"{prefix} {handler}", options=options, payload=1)
                with pytest.raises(KeyboardInterrupt):
                    operation.run(interrupted)
        client.operations.register(f"{prefix} undone", rollback=effects.do("undo"))
        client.operations.register(f"{prefix} done", rollback=effects.do("no"), verify=lambda op: op.done([7]))
        client.operations.register(f"{prefix} in part", rollback=effects.do("undo the half"), verify=lambda: False)
        client.operations.register(f"{prefix} absent", verify=lambda: False)
        client.operations.register(f"{prefix} fails", rollback=effects.do("tried", OSError("cannot undo")))
        recovered = {each.label: each for each in client.operations.recover()}
        assert {handler: (recovered[key].status, recovered[key].reason) for handler, key in keys.items()} == {
            "undone": ("undone", f"its rollback '{prefix} undone' was called"),
            "done": ("success", "its verify function found the effect"),
            "in part": ("undone", f"its rollback '{prefix} in part' was called"),
            "absent": ("undone", "its verify function found no effect"),
            "unknown": ("partial", f"its rollback '{prefix} unknown' is not registered here"),
            "fails": ("partial", "it failed: OSError: cannot undo"),
            "not begun": ("undone", "its effect had not started"),
        }
        assert recovered[unnamed].status == "partial"
        assert "it was run without the name of a rollback" in recovered[unnamed].reason
        assert all(client.operations.get(label).key == each.key for label, each in recovered.items())
        assert sorted(effects) == ["tried", "undo", "undo the half"]
        statuses = {handler: client.operations.get(each).status for handler, each in keys.items()}
        assert statuses == {
            "undone": "undone", "done": "success", "in part": "undone", "unknown": "partial", "fails": "partial",
            "absent": "undone", "not begun": "undone",
        }  # fmt: skip
        assert client.operation(keys["done"], payload=1).run(effects.do("no")).result == [7]
        assert client.operation(keys["undone"], payload=1).run(effects.do("again")).attempt == 2

    def test_recover_leaves_what_it_cannot_lock_and_what_is_running(self, connect: Connect, url: str) -> None:
        client, dataset = connect(url), name()
        parts: dict[str, Any] = {"pipeline": "etl", "task": "load", "dataset": dataset, "operation": "upsert"}
        first, second = (holdfast.OperationKey(**parts, bucket=bucket) for bucket in ("monday", "tuesday"))
        leave_half_done(url, first, options=OperationOptions(marks_effect=True))
        with running(url, second):
            recovered = {each.key: (each.status, each.reason) for each in client.operations.recover()}
            assert recovered[first.digest] == ("partial", "another process has its lock: recover it later")
            assert second.digest not in recovered
        [record] = [each for each in client.operations.recover() if each.key == first.digest]
        assert (record.label, record.status) == (f"etl/load {dataset} upsert monday", "undone")

    def test_recover_does_not_report_an_operation_that_runs_again_meanwhile(self, connect: Connect, url: str) -> None:
        client, first, second = connect(url), name(), name()
        leave_half_done(url, second, options=OperationOptions(marks_effect=True))
        with ExitStack() as stack:
            with holdfast.Client(url) as dies:
                dies.operations.register(f"undo {first}", rollback=int)
                with pytest.raises(KeyboardInterrupt):
                    dies.operation(first, rollback=f"undo {first}").run(interrupted)
            run_again = partial(stack.enter_context, running(url, second))
            client.operations.register(f"undo {first}", rollback=run_again)
            recovered = {each.label: each.status for each in client.operations.recover()}
            assert (recovered[first], second in recovered) == ("undone", False), "the latest is recovered first"
            assert client.operations.get(second).status == "running"

    def test_a_reset_key_is_as_if_it_were_new_and_its_history_stays(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        with pytest.raises(LookupError, match=key):
            client.operations.reset(key, actor="jane", reason="wrong file")
        client.operation(key, payload=1).run(effects.do(1))
        client.operations.reset(key, actor="jane", reason="wrong file")
        assert client.operations.get(key).error["reason"] == "wrong file"
        outcome = client.operation(key, payload=2, retry=Retry(attempts=1)).run(effects.do(2))
        assert (outcome.result, outcome.replayed, outcome.attempt) == (2, False, 2)
        with running(url, other := name()), pytest.raises(holdfast.OperationInProgress):
            client.operations.reset(other, actor="jane", reason="impatient")
        for argument in ("actor", "reason"):
            with pytest.raises(ValueError, match=argument):
                client.operations.reset(key, **{"actor": "jane", "reason": "why", argument: ""})

    def test_what_is_done_can_be_undone_by_what_is_registered(self, connect: Connect, url: str) -> None:
        client, key, effects = connect(url), name(), Effects()
        client.operations.register(f"undo {key}", rollback=lambda op: effects.append(dict(op.checkpoints)))

        def work(op: Any) -> int:
            return 1

        client.operation(key, rollback=f"undo {key}").run(work)
        client.operations.rollback(key, actor="jane", reason="wrong file")
        assert client.operations.get(key).status == "undone"
        assert key in [each.label for each in client.operations.list(status="undone")]
        assert [each.status for each in client.operations.replay(key)] == ["undone"]
        with pytest.raises(LookupError, match="leaves nothing to undo: it is undone"):
            client.operations.rollback(key, actor="jane", reason="a retry")
        assert effects == [{}]
        assert client.operation(key, retry=Retry(attempts=1)).run(effects.do(2)).attempt == 2, "nothing has failed"
        with pytest.raises(holdfast.OperationFailed, match="nothing is registered"):
            client.operations.rollback(key, actor="jane", reason="again")
        with pytest.raises(ValueError, match="no rollback is registered as 'missing'"):
            client.operation(key, rollback="missing")

    def test_operations_are_found_by_the_first_digits_of_their_digest(self, connect: Connect, url: str) -> None:
        client, effects = connect(url), Effects()
        digests = ["abcd" + secrets.token_hex(30) for _ in range(3)]
        for digest in digests:
            client.operation(digest).run(effects.do(1))
        assert [each.key for each in client.operations.match(digests[0])] == [digests[0]]
        assert client.operations.match(digests[0][:20]) == [client.operations.get(digests[0])]
        matches = [each.key for each in client.operations.match("abcd", limit=10_000)]
        assert {*digests} <= {*matches}
        assert matches == sorted(matches)
        assert all(each.startswith("abcd") for each in matches)
        assert len(client.operations.match("abcd", limit=2)) == 2
        assert client.operations.match("abcd" + secrets.token_hex(10)) == []
        for wrong in ("", "abc", "ABCD", "abcg", "a" * 65, "abcd%", 7):
            with pytest.raises(ValueError, match="prefix must be 4 to 64 hexadecimal digits"):
                client.operations.match(wrong)

    def test_an_operator_can_record_that_an_interrupted_one_did_happen(self, connect: Connect, url: str) -> None:
        client, effects = connect(url), Effects()
        for result in (None, {"id": 7}, b"\x00\xff"):
            leave_half_done(url, key := name(), payload=1)
            client.operations.complete(key, result, actor="jane", reason="the bank has booked it")
            outcome = client.operation(key, payload=1).run(effects.do("again"))
            assert (outcome.result, outcome.replayed, outcome.attempt) == (result, True, 1)
            record = client.operations.get(key)
            assert (record.status, record.failures, record.error) == ("success", 0, None)
            [state] = client.operations.replay(key)
            assert (state.status, state.value, state.result_hash) == ("success", result, record.result_hash)
            [entry] = [each for each in client.operations.history(key) if each.kind == "success"]
            assert entry.fields == {"actor": "jane", "reason": "the bank has booked it"}
            assert client.operations.verify(key).broken == ()
            with pytest.raises(holdfast.KeyReused):
                client.operation(key, payload=2).run(effects.do("again"))
        failed = name()
        with pytest.raises(TimeoutError):
            client.operation(failed).run(effects.do("sent", TimeoutError("no answer")))
        client.operations.complete(failed, 8, actor="jane", reason="the bank has booked it")
        assert client.operation(failed).run(effects.do("again")).result == 8
        assert client.operations.verify(failed).broken == ()
        assert effects == ["sent"]

    def test_a_completion_closes_the_review_of_the_operation(self, connect: Connect, url: str) -> None:
        client, effects = connect(url), Effects()
        for answered in (False, True):
            leave_half_done(url, key := name())
            with pytest.raises(holdfast.OperationFailed, match="half done"):
                client.operation(key).run(effects.do("again"))
            [review] = client.reviews.list(key=key)
            if answered:
                client.reviews.reject(review.id, actor="joe", reason="ask the bank")
            client.operations.complete(key, 7, actor="jane", reason="the bank has booked it")
            [review] = client.reviews.list(status=None, key=key)
            closed = ("rejected", "joe", "ask the bank") if answered else ("done", "jane", "the bank has booked it")
            assert (review.status, review.actor, review.answer) == closed
            assert review.spent_at is not None, "it applies to no later attempt"
            assert client.operation(key).run(effects.do("again")).result == 7
        assert effects == []

    def test_a_completion_is_refused_when_there_is_nothing_to_complete(self, connect: Connect, url: str) -> None:
        client, effects = connect(url), Effects()
        by_jane = {"actor": "jane", "reason": "the bank has booked it"}
        with running(url, live := name()), pytest.raises(holdfast.OperationInProgress):
            client.operations.complete(live, **by_jane)
        done, undone, reset = name(), name(), name()
        client.operations.register(f"undo {undone}", rollback=effects.do("undo"))
        for key in (done, undone, reset):
            client.operation(key, rollback=f"undo {undone}").run(effects.do(1))
        client.operations.rollback(undone, **by_jane)
        client.operations.reset(reset, **by_jane)
        for key, why in (
            (name(), "there is no operation"), (done, "has succeeded already"),
            (undone, "is undone and left no effect"), (reset, "is failure and left no effect"),
        ):  # fmt: skip
            with pytest.raises(LookupError, match=why):
                client.operations.complete(key, 2, **by_jane)
        assert client.operation(done).run(effects.do("again")).result == 1
        leave_half_done(url, key := name())
        for wrong in WRONG:
            with pytest.raises(ValueError, match=r"^the result"):
                client.operations.complete(key, wrong, **by_jane)
        for argument in by_jane:
            with pytest.raises(ValueError, match=argument):
                client.operations.complete(key, **{**by_jane, argument: " "})
        assert client.operations.get(key).status == "partial"

    def test_a_result_that_cannot_be_kept_is_refused_and_never_forgotten(self, connect: Connect, url: str) -> None:
        """The effect has happened by then, and must not happen a second time."""
        client, effects = connect(url), Effects()
        for wrong in WRONG:
            key = name()
            with pytest.raises(ValueError, match=r"^the result.* cannot be kept as it is"):
                client.operation(key).run(effects.do(wrong))
            with pytest.raises(holdfast.OperationFailed, match="half done"):
                client.operation(key).run(effects.do(1))
        assert len(effects) == len(WRONG)
