"""What is declared of a dataset: that it is sensitive, that its geometry is masked, that it has an error budget, or
that nobody waits for it."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import holdfast
from holdfast import PolicyDenied
from holdfast.governance import Allow, PolicyContext
from holdfast.testing.operation_contract import interrupted, name
from tests.children import eventually
from tests.operations.policies import BY_ELDER, POINT, connected, every_way, fail, governed, key


@every_way
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
            attempt(client, burials, flaky, retry=holdfast.Retry(in_this_run=2))
        assert attempt(client, burials, flaky, justification="the council agreed").result == "done"
        assert attempt(client, burials, flaky).replayed, "nothing is changed by reading what it came to"
        assert client.operations.verify().passed


@every_way
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


@every_way
def test_the_daily_load_of_a_sensitive_dataset_needs_a_bucket_or_a_checksum(either: str, attempt: Any) -> None:
    dataset, why = f"burials-{name()}", {"justification": "the council agreed"}
    with governed(either) as client:
        for day in ("monday", "tuesday"):
            assert not attempt(client, key(dataset, bucket=day), int, **why).replayed
        assert attempt(client, key(dataset, bucket="monday"), int, **why).replayed
        with pytest.raises(PolicyDenied, match="give the key the checksum of its input, or the bucket that it is for"):
            attempt(client, key(dataset, version="2"), int, **why)


@every_way
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
        with pytest.raises(PolicyDenied, match=r"etl/load burials.* upsert .*had another one and has not succeeded"):
            attempt(client, filled, int, **why)
        assert not attempt(client, key(burials, "another", checksum="d"), int, **why).replayed
        client.operations.reset(key(burials, "another", checksum="d"), **BY_ELDER)
        [review] = client.reviews.list(key=filled)
        client.reviews.reject(review.id, **BY_ELDER)
        assert attempt(client, key(burials, checksum="c"), int, payload=1, **why).result == 0
        client.operations.reset(filled, **BY_ELDER)
        assert attempt(client, filled, int, **why).attempt == 1, "what it would have been a retry of is done"


def test_an_undone_operation_counts_as_one_that_failed(either: str) -> None:
    """Its effect is gone, so the same may be done under another key; its failed attempts stay."""
    burials, flaky = f"burials-{name()}", f"flaky-{name()}"
    why: dict[str, Any] = {"justification": "the council agreed"}
    with governed(either) as client:
        client.operations.register("undo", rollback=int)
        client.operation(key(burials, checksum="c"), rollback="undo", **why).run(int)
        client.operations.rollback(key(burials, checksum="c"), **BY_ELDER)
        assert client.operation(key(burials, "again", checksum="c"), **why).run(int).attempt == 1
        died = [key(burials, "died", checksum="c2"), key(flaky, "a"), key(flaky, "b")]
        for each in died:
            with pytest.raises(KeyboardInterrupt):
                client.operation(each, rollback="undo", **why).run(interrupted)
        client.operations.recover()
        assert {client.operations.find(each).status for each in died} == {"undone"}
        with pytest.raises(PolicyDenied, match="had another one and has not succeeded"):
            client.operation(key(burials, "died", checksum="d"), **why).run(int)
        with pytest.raises(PolicyDenied, match="used up its error budget: 2 failed in the last hour"):
            client.operation(key(flaky, "a"), rollback="undo").run(int)


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
            eventually(lambda: client.leases.list() == [], "no lease is held")


def test_a_lock_that_somebody_else_has_is_refused_where_that_was_declared(either: str) -> None:
    busy = f"busy-{name()}"
    with governed(either) as client:

        def meanwhile() -> None:
            with governed(either) as other, pytest.raises(PolicyDenied, match="is locked by another operation"):
                other.operation(key(busy, "second")).run(int)

        client.operation(key(busy)).run(meanwhile)
        assert client.reviews.list() == []
        assert client.operation(key(busy, "second")).run(int).result == 0


@every_way
def test_geometry_has_to_be_masked_where_that_was_declared(either: str, attempt: Any) -> None:
    sites = key(f"sites-{name()}")
    masked, fine = holdfast.geo.mask_h3(POINT, 5), holdfast.geo.mask_h3(POINT, 6)
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


@every_way
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


@every_way
def test_an_error_budget_is_used_up_by_one_that_is_tried_again_and_again(either: str, attempt: Any) -> None:
    flaky, calls = f"flaky-{name()}", list[int]()

    def broken() -> None:
        calls.append(1)
        raise ValueError("broken")

    spent = "used up its error budget: 2 failed in the last hour, and 2 may"
    with governed(either) as client, pytest.raises(PolicyDenied, match=spent):
        attempt(client, key(flaky), broken, retry=holdfast.Retry(attempts=9, in_this_run=9))
    assert len(calls) == 2
