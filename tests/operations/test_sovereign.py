"""Sovereign datasets: locked whole, up for review when they are, and undone by those who may alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import PolicyDenied
from holdfast.governance import Allow, PolicyContext
from holdfast.lineage import Lineage
from holdfast.testing.operation_contract import interrupted, name, running
from tests.children import eventually
from tests.lineage.sample_operations import FAR
from tests.operations.logs import change
from tests.operations.policies import BY_ELDER, POINT, answer, every_way, fail, governed, key


@pytest.mark.parametrize("how", ["policy", "argument"])
def test_a_sovereign_dataset_that_is_locked_is_up_for_review_and_not_tried_again(either: str, how: str) -> None:
    graves = f"graves-{name()}"
    more: dict[str, Any] = {"options": holdfast.OperationOptions(sovereign=True)} if how == "argument" else {}
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
        with pytest.raises(ValueError, match="is sovereign and is locked as a whole"):
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
                more: dict[str, Any] = {
                    "lineage": Lineage(outputs=["fine", output]), "justification": "the council agreed",
                }  # fmt: skip
                with pytest.raises(PolicyDenied, match=f"its outputs name dataset '{output}', which is {why}"):
                    client.operation(subject, payload=holdfast.geo.mask_h3(POINT, 5), **more).run(fail)
                with pytest.raises(PolicyDenied, match=why):
                    client.operations.run_many([subject], fail, **more)
        with pytest.raises(PolicyDenied, match="which is masked"):
            client.operation(unique, lineage=Lineage(outputs=[f"sites-{unique}"])).run(fail)
        with pytest.raises(ValueError, match=r"sovereign=True locks a dataset as a whole, .* names none"):
            client.operation(unique, options=holdfast.OperationOptions(sovereign=True)).run(fail)
        assert client.operations.list() == []
        burials = key(f"burials-{unique}", checksum="c")
        also = [burials.dataset, f"burials-{unique}-index", "roads"]
        lineage = Lineage(inputs=["raw"], outputs=also)
        client.operation(burials, lineage=lineage, justification="the council agreed").run(int)
        assert (seen[-1].inputs, seen[-1].outputs) == (("raw",), tuple(also)), "rules see what is read and written"


@pytest.mark.parametrize("probe", [None, lambda: False], ids=["", "a probe says that it is not done"])
def test_what_only_some_may_roll_back_is_not_rolled_back_by_whoever_starts(either: str, probe: Any) -> None:
    unique, undone = name(), list[str]()
    graves, roads = key(f"graves-{unique}"), key(f"roads-{unique}")

    def die() -> None:
        raise KeyboardInterrupt

    with governed(either) as client:
        client.operations.register("undo", rollback=lambda op: undone.append(op.key.label), verify=probe)
        for subject in (graves, roads):
            with pytest.raises(KeyboardInterrupt):
                client.operation(subject, rollback="undo").run(die)
        recovered = {each.key: (each.status, each.reason) for each in client.operations.recover()}
        assert recovered[roads.digest][0] == "undone"
        assert recovered[graves.digest][0] == "partial"
        assert "completed and reviewed by elder*, not by None" in recovered[graves.digest][1]
        assert undone == [roads.label]
        client.operations.rollback(graves, **BY_ELDER)
        assert undone == [roads.label, graves.label]


@every_way
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


@every_way
def test_a_sovereign_dataset_is_locked_whole_whatever_is_done_to_it(either: str, attempt: Any) -> None:
    """Another operation of it as well; another dataset is another's, and so is one that is not sovereign."""
    graves, roads = f"graves-{name()}", f"roads-{name()}"

    def other(dataset: str, operation: str = "delete") -> holdfast.OperationKey:
        return holdfast.OperationKey(pipeline="etl", task="clean", dataset=dataset, operation=operation)

    with governed(either) as client:
        client.operations.register("undo", rollback=lambda: None)
        client.operation(other(graves, "index"), rollback="undo").run(int)
        with (
            running(either, key(graves), options=holdfast.OperationOptions(sovereign=True)),
            running(either, key(roads)),
        ):
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
        eventually(lambda: client.leases.list() == [], "no lease is held")


def test_what_was_run_as_sovereign_is_mended_as_that_by_a_client_without_a_policy(either: str) -> None:
    """Also when its entries were put away."""
    graves = name()
    undone: list[str] = []
    with holdfast.Client(either) as client:
        client.operations.register("undo", rollback=lambda op: undone.append(op.key.label))
        for task in ("first", "second"):
            client.operation(key(graves, task), rollback="undo", options=holdfast.OperationOptions(sovereign=True)).run(
                int
            )
            client.operations.archive(FAR, lambda lines: None)
        other = holdfast.OperationKey(pipeline="etl", task="clean", dataset=graves, operation="delete")
        with running(either, other, options=holdfast.OperationOptions(sovereign=True)):
            with pytest.raises(holdfast.OperationInProgress):
                client.operations.rollback(key(graves, "first"), **BY_ELDER)
            with pytest.raises(holdfast.OperationInProgress):
                client.operations.reset(key(graves, "second"), **BY_ELDER)
        assert not undone
        client.operations.rollback(key(graves, "first"), **BY_ELDER)
        assert undone == [key(graves, "first").label]
        change(either, f"update {{wal}} set entries = 'nonsense' where idem_key = '{key(graves, 'second').digest}'")
        client.operations.reset(key(graves, "second"), **BY_ELDER)  # whatever has become of its log


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
        eventually(lambda: client.leases.list() == [], "no lease is held")


def test_wherever_it_is_interrupted_no_lease_stays(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two of them, and one that stays is renewed for as long as the process lives."""

    class Interruption(BaseException):
        pass

    def all_of_it(client: holdfast.Client, subject: holdfast.OperationKey) -> None:
        with suppress(KeyboardInterrupt):
            client.operation(subject, rollback="undo").run(interrupted)
        client.operations.recover()
        client.operation(subject, rollback="undo").run(int)
        client.operations.rollback(subject, **BY_ELDER)
        client.operations.reset(subject, **BY_ELDER)

    with holdfast.Client(sqlite_url, policy=holdfast.governance.Policy({"graves*": {"sovereign": True}})) as client:
        client.operations.register("undo", rollback=int)
        call, calls, last = client._engine.call, 0, 0

        def counted(*given: Any, **more: Any) -> Any:
            nonlocal calls
            answer, calls = call(*given, **more), calls + 1
            if calls == last:
                raise Interruption
            return answer

        monkeypatch.setattr(client._engine, "call", counted)
        for last in count(1):  # noqa: B007
            calls = 0
            try:
                all_of_it(client, key(f"graves-{name()}"))
            except Interruption:
                continue
            break
        assert last > 20, "it has been interrupted everywhere"
        monkeypatch.undo()
        eventually(lambda: not client.leases.list(), "no lease is held")
