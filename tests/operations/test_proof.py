"""The log of operations, proven: whatever is done to the tables is found."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import holdfast
from tests.children import query
from tests.operations.logs import LATER, change, fail, fill, problems, table
from tests.pairs import EACH_ONCE

Connect = Callable[..., Any]


@pytest.fixture
def client(connect: Connect, either: str) -> Any:
    return fill(connect(either), either)


@EACH_ONCE
def test_verify_proves_what_nobody_has_touched_and_tells_of_locks_that_a_crash_left(client: Any) -> None:
    found = client.operations.verify()
    assert (found.operations, found.passed, found.broken) == (4, True, ())
    assert found.entries == sum(
        len(client.operations.history(name)) for name in ("done", "second try", "failed", "half done")
    )
    left = client.operations.get("half done").key
    assert [(each.what, each.operation) for each in found.problems] == [("unpaired", left)]
    assert client.operations.verify("done").operations == 1


OTHER = "(select {} from {{log}} where label = 'second try')"


TAMPERED = [
    ("update {wal} set entries = replace(entries, '\"success\"', '\"failure\"')", {"tampered"}),
    ("update {wal} set entries = replace(entries, 'broken', 'well')", {"tampered"}),
    ("update {wal} set entries = '[]' where number = 1", {"missing"}),
    ("update {wal} set entries = 'nonsense' where number = 1", {"tampered"}),
    ("delete from {wal} where number = 1", {"missing"}),
    ("delete from {wal} where number > 1", {"head"}),
    ("update {wal} set number = number + 100 where number = 1", {"reordered"}),
    ("delete from {log} where label = 'done'", {"missing"}),
    ("delete from {wal}", {"head"}),
    ("update {log} set status = 'failure' where label = 'done'", {"log"}),
    ("update {log} set attempt = 9 where label = 'failed'", {"log"}),
    ("update {log} set wal_pointer = '1:' || substr(wal_pointer, 3) where label = 'done'", {"head"}),
    (f"update {{log}} set result = {OTHER.format('result')} where label = 'done'", {"payload"}),
    (f"update {{log}} set result_hash = {OTHER.format('result_hash')} where label = 'done'", {"log"}),
]


def test_whatever_is_done_to_the_tables_is_found(either: str) -> None:
    tables = [table(either, "wal_more"), table(either, "idempotency_log")]
    with holdfast.Client(either) as client:
        fill(client, either)
        for number, name in enumerate(tables):
            query(either, f"create table kept_{number} as select * from {name}")
        for statement, expected in TAMPERED:
            assert problems(client) == set()
            change(either, statement)
            assert expected <= problems(client), (statement, client.operations.verify().problems)
            assert not client.operations.health().passed(), statement
            for number, name in enumerate(tables):
                query(either, f"delete from {name}")
                query(either, f"insert into {name} select * from kept_{number}")


@EACH_ONCE
def test_a_row_that_says_otherwise_than_its_entries_is_found_whatever_it_says(client: Any, either: str) -> None:
    for name, statement in {
        "done": "fingerprint = null",
        "second try": 'error = \'{{"type": "x"}}\'',
        "failed": "effect_started = not effect_started",
        "half done": "error = '{{\"reset\": true}}'",  # it would be run as if nobody had begun it
    }.items():
        change(either, f"update {{log}} set {statement} where label = '{name}'")
        assert problems(client, key=name) == {"log"}, name


CHANGED = {
    "status": "case status when 'success' then 'failure' else 'success' end", "attempt": "attempt + 1",
    "effect_started": "not effect_started", "failures": "failures + 1", "fence": "fence + 1", "result": "null",
    "idem_key": "'ab' || substr(idem_key, 3)",
}  # fmt: skip
SPEAKS = {
    "sqlite": ("expires_at - 1e3", "select name from pragma_table_info(%s)"),
    "postgresql": (
        "expires_at - interval '1000 s'",
        "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0",
    ),
}
UNPROVEN = {"created_at", "updated_at", "horizon", "place"}
"""As the documentation says."""


def test_no_column_of_a_row_is_changed_unnoticed_but_for_when_it_was_written(either: str) -> None:
    """Whatever columns there are: one that is added has to be proven, too, or is named here and to its readers."""
    parts: dict[str, Any] = {"pipeline": "etl", "task": "load", "dataset": "parcels", "operation": "upsert"}
    key = holdfast.OperationKey(**parts, version="3", checksum="c", bucket="b")
    log = table(either, "idempotency_log")
    with holdfast.Client(either) as client:
        client.operations.register("unpublish", rollback=int)
        client.operation(key, rollback="unpublish", keep=3600).run(lambda: 1)
        client.operations.run_many(
            ["bucket"], lambda _: 1, key=lambda name: holdfast.OperationKey(**parts, bucket=name)
        )
        with pytest.raises(ValueError, match="broken"):
            client.operation("failed", rollback="unpublish").run(fail)
        query(either, f"create table kept as select * from {log}")
        moved, columns = SPEAKS[either.partition(":")[0]]
        for name in {name for (name,) in query(either, columns, log)} - UNPROVEN:
            other = moved if name == "expires_at" else CHANGED.get(name, "'other'")
            assert problems(client) == set()
            query(either, f"update {log} set {name} = {other}")
            assert problems(client), name
            query(either, f"delete from {log}")
            query(either, f"insert into {log} select * from kept")
        lines: list[str] = []
        client.operations.archive(datetime.now(UTC) + LATER, lines.extend)
        assert problems(client) == problems(client, archives=lines) == set()
        query(either, f"update {log} set failures = 7, rollback = null")
        assert problems(client) == {"log"}, "what is put away proves it still"
        query(either, "drop table kept")
