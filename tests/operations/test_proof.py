"""The log of operations, proven: whatever is done to the tables is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from tests.operations.logs import change, fill, problems

Connect = Callable[..., Any]


@pytest.fixture
def client(connect: Connect, either: str) -> Any:
    return fill(connect(either), either)


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


@pytest.mark.parametrize(("statement", "expected"), TAMPERED, ids=[statement[:60] for statement, _ in TAMPERED])
def test_whatever_is_done_to_the_tables_is_found(either: str, statement: str, expected: set[str]) -> None:
    with holdfast.Client(either) as client:
        fill(client, either)
        assert problems(client) == set()
        change(either, statement)
        assert expected <= problems(client), client.operations.verify().problems
        assert not client.operations.health().passed()


def test_a_row_that_says_otherwise_than_its_entries_is_found_whatever_it_says(client: Any, either: str) -> None:
    for name, statement in {
        "done": "fingerprint = null",
        "second try": 'error = \'{{"type": "x"}}\'',
        "failed": "effect_started = not effect_started",
        "half done": "error = '{{\"reset\": true}}'",  # it would be run as if nobody had begun it
    }.items():
        change(either, f"update {{log}} set {statement} where label = '{name}'")
        assert problems(client, key=name) == {"log"}, name
