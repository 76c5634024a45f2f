"""Keys whose digest is given: two operations may have the same one, and a row belongs to the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.operations.log import encode_entry, hash_prefix, link_entries
from holdfast.testing.operation_contract import interrupted, leave_half_done
from tests.children import query
from tests.operations.logs import table
from tests.operations.policies import connected, runs

DIGEST = sha256(b"of another system").hexdigest()
PARTS: dict[str, Any] = {"pipeline": "etl", "task": "load", "dataset": "parcels", "operation": "upsert"}
OTHERS: list[dict[str, Any]] = [
    {"pipeline": "other"}, {"task": "other"}, {"dataset": "other"}, {"operation": "other"}, {"checksum": "9f2c"},
    {"params": {"srid": 4326}},
]  # fmt: skip
JANE = {"actor": "jane", "reason": "it was loaded by hand"}


def given(**parts: Any) -> holdfast.OperationKey:
    return holdfast.OperationKey(**PARTS | parts, digest=DIGEST)


def fail() -> None:
    raise ValueError("no such file")


def test_a_given_digest_takes_the_place_of_that_of_the_parts() -> None:
    key, derived = given(version="3", bucket="monday"), holdfast.OperationKey(**PARTS, version="3", bucket="monday")
    assert (key.digest, key.label, key.lock_key) == (DIGEST, derived.label, derived.lock_key)
    assert key == given() != derived
    assert replace(key, bucket="tuesday") == replace(derived, bucket="tuesday"), "it is of the parts it was given with"
    assert holdfast.OperationKey(**PARTS, digest=holdfast.OperationKey(**PARTS).digest) == holdfast.OperationKey(
        **PARTS
    )
    for wrong, error in ((DIGEST.upper(), ValueError), ("0" * 63, ValueError), ("", ValueError), (b"0", TypeError)):
        with pytest.raises(error, match="digest must be"):
            holdfast.OperationKey(**PARTS, digest=wrong)  # type: ignore[arg-type]


def succeeded(client: holdfast.Client, url: str) -> None:
    client.operation(given()).run(lambda: 1)


def failed(client: holdfast.Client, url: str) -> None:
    with pytest.raises(ValueError, match="no such file"):
        client.operation(given()).run(fail)


def half_done(client: holdfast.Client, url: str) -> None:
    leave_half_done(url, given())


def was_reset(client: holdfast.Client, url: str) -> None:
    failed(client, url)
    client.operations.reset(given(), **JANE)


@pytest.mark.parametrize("way", ["outside", "own", "joined"])
@pytest.mark.parametrize("state", [succeeded, failed, half_done, was_reset])
def test_its_row_belongs_to_the_operation_that_claimed_it_first(
    either: str, way: str, state: Callable[[holdfast.Client, str], None]
) -> None:
    with holdfast.Client(either) as client, connected(either) as mine:
        state(client, either)
        before = client.operations.get(given())
        run = runs(way, mine)
        for parts in OTHERS:
            with pytest.raises(holdfast.KeyReused, match="belongs to another operation"):
                run(client, given(**parts), fail)
        with pytest.raises(holdfast.KeyReused, match="belongs to another operation"):
            run(client, DIGEST, fail)
        assert client.operations.get(given()) == before
        if state is not half_done:
            assert run(client, given(version="4"), lambda: 1) is not None
        else:
            client.operations.complete(given(), result=1, **JANE)
        record = client.operations.get(DIGEST)
        assert record is not None
        assert (record.status, record.dataset, record.key) == ("success", "parcels", DIGEST)
        assert client.operations.verify().passed


def test_a_batch_refuses_those_that_belong_to_another_operation(either: str) -> None:
    with holdfast.Client(either) as client:
        succeeded(client, either)
        keys = {"a": given(), "b": given(task="other"), "c": holdfast.OperationKey(**PARTS)}
        for name, status in (("b", "failed"), ("a", "success")):
            outcomes = client.operations.run_many([name, "c"], lambda each: each, key=keys.__getitem__)
            assert [each.status for each in outcomes] == [status, "success"]
        assert client.operations.verify().passed


def test_a_row_with_a_given_digest_is_proven_by_its_chain(either: str) -> None:
    with holdfast.Client(either) as client:
        client.operation(given(version="3")).run(int)
        assert client.operations.verify().passed
        query(either, f"update {table(either, 'idempotency_log')} set dataset_id = 'other'")
        [problem] = client.operations.verify().broken
        assert "do not belong to its key" in problem.told


def test_what_a_dead_owner_left_under_a_given_digest_is_recovered(either: str) -> None:
    with holdfast.Client(either) as client:
        client.operations.register("unload", rollback=lambda op: None)
        with pytest.raises(KeyboardInterrupt):
            client.operation(given(), rollback="unload").run(interrupted)
        [recovered] = client.operations.recover()
        assert (recovered.key, recovered.status) == (DIGEST, "undone")
        assert client.operation(given()).run(lambda: 7).result == 7
        assert client.operations.verify().passed


def columns(key: holdfast.OperationKey) -> list[str | None]:
    return [key.pipeline, key.task, key.dataset, key.operation, key.checksum, key.params_hash]


WRITE = """select holdfast.operation_write(%s, %s, %s, 3, %s, %s, %s, 1, null, null, null, %s, %s, true, %s, null, %s,
    %s, null, null, 'x', %s, %s, %s, %s, %s, %s)"""


@pytest.mark.parametrize("parts", OTHERS)
def test_sql_names_no_other_dataset_than_the_claim_did(postgres_url: str, parts: dict[str, Any]) -> None:
    """In a claim, a later write, an end in a transaction or under a lease."""
    other = columns(given(**parts))
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url, autocommit=True) as mine:
        failed(client, postgres_url)
        record = client.operations.get(given())
        assert record is not None
        told: list[str | None] = [DIGEST, "1", "claimed\x1e{}", None, "true", None, "x", *other]
        claim = "select holdfast.operation_claim(%s, '@op:x', 'me', 60, gen_random_uuid(), null, 0, false, null, null)"
        parameters: list[Any] = ["\x1f".join(each or "" for each in told)]
        attempts = [(claim, parameters)]
        for pointer in (record.pointer, None, "1:else"):
            write: list[Any] = [DIGEST, pointer, "2:f", "[]", "success", 2, None, None, 0, None, None, *other]
            attempts.append((WRITE, write))
            told = [
                "BEGAN", "x", DIGEST, pointer, "2:f", "3", "[]", "success", "2", "0", None, None, None, None, None,
                "true", "0", None, None, *other, "late",
            ]  # fmt: skip
            end = (
                "select holdfast.operation_end(replace(%s, 'BEGAN', extract(epoch from transaction_timestamp())::text))"
            )
            attempts.append((end, ["\x1f".join(each or "" for each in told)]))
        for statement, values in attempts:
            with pytest.raises(psycopg.Error, match="belongs to another operation") as raised:
                mine.execute(statement.encode(), values)
            assert raised.value.sqlstate == "HF007"
        assert client.operations.get(given()) == record
        assert client.leases.get("@op:x") is None


def entry(key: str, previous: str, number: int, kind: str, attempt: int) -> tuple[str, str]:
    """The end of the chain and the text of one more entry."""
    digest, text = link_entries(hash_prefix(key), previous, [encode_entry(number, kind, attempt, 0, 1.8e9)])
    return f"{number}:{digest}", text


def test_sql_sets_no_count_of_failures_back(postgres_url: str) -> None:
    """It falls with a success, and with the reset that is audited."""
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url, autocommit=True) as mine:
        for _ in range(2):
            failed(client, postgres_url)
        record = client.operations.get(given())
        assert record is not None
        assert record.failures == 2

        def write(status: str, attempt: int, failures: int | None, error: str | None = None, keep: Any = None) -> None:
            parameters = [DIGEST, record.pointer, "9:f", "[]", status, attempt, error, keep, failures, None, None]
            mine.execute(WRITE.encode(), [*parameters, *columns(given())])

        for status, counts in {"failure": (0, 2, 4, None), "partial": (0, 1, 3), "undone": (0, 1, 4)}.items():
            for failures in counts:
                with pytest.raises(psycopg.errors.InsufficientPrivilege, match="failed attempts after this write"):
                    write(status, 3, failures)
        for error in ('{"reset": true}', '{"a": "b", "\\u0072eset" : 1}', '{"type": "x", "r\\u0065set":true}'):
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="operation_correct alone"):
                write("failure", 3, 3, error)
        assert client.operations.get(given()) == record
        write("failure", 3, 3, '{"type": "Error", "message": "\\u0000 \\"reset\\": true"}', keep=0.001)
        after = client.operations.get(given())
        assert after is not None
        assert (after.failures, after.expires_at) == (3, None), "what failed does not expire"


@pytest.mark.parametrize("statement", ["operation_write", "operation_end", "operation_finish_many"])
def test_sql_counts_no_failures_that_were_none(postgres_url: str, statement: str) -> None:
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url, autocommit=True) as mine:
        lease = client.lease("mine", ttl=3600).acquire()
        pointer, text = entry(DIGEST, "", 1, "claimed", 1)
        calls: dict[str, tuple[str, list[Any]]] = {
            "operation_write": (
                WRITE, [DIGEST, None, pointer, text, "failure", 1, None, None, 9, None, None, *columns(given())]
            ),
            "operation_end": (
                "select holdfast.operation_end(extract(epoch from transaction_timestamp())::text || %s)",
                ["\x1f".join(
                    each or "" for each in (
                        "", "x", DIGEST, None, pointer, "1", text, "success", "1", "0", None, None, None, None, None,
                        "true", "9", None, None, *columns(given()), None,
                    )
                )],
            ),
            "operation_finish_many": (
                """select holdfast.operation_finish_many(%s, %s, %s, '2', '[]', 'failure', '', '', '', '9', 'true', '',
                    null, %s, %s)""",
                [DIGEST, pointer, "2:f", lease.name, lease.token],
            ),
        }  # fmt: skip
        if statement == "operation_finish_many":
            mine.execute(
                """select holdfast.operation_claim_many(%s, %s, %s, 'x', '', 'etl', 'load', 'parcels', 'upsert', '',
                    %s, %s, null, %s, %s, null)""",
                [DIGEST, pointer, text, given().params_hash, lease.fence, lease.name, lease.token],
            )
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="failed attempts after this write, not 9"):
            mine.execute(calls[statement][0].encode(), calls[statement][1])
