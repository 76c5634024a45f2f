"""Governed commands over operations: they record actor and reason, and make no change that was not planned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import commands as operator
from holdfast.commands import execute
from holdfast.testing.operation_contract import leave_half_done
from tests.children import eventually
from tests.operations.logs import change

JANE: dict[str, Any] = {"actor": "jane", "reason": "the bank says no"}


@pytest.fixture
def client(either: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(either) as client:
        client.operation("charge:42").run(lambda: {"id": 7})
        yield client


def entries(client: holdfast.Client, action: str) -> list[tuple[str, str, str, str | None]]:
    records = [record for record in client.audit.list() if record.action == action]
    return [(record.subject, record.actor, record.reason, record.outcome) for record in records]


def test_a_reset_lets_it_be_tried_again_and_keeps_who_and_why(client: holdfast.Client) -> None:
    plan = operator.run(client, "operation.reset", {"key": "charge:42"}, **JANE, dry_run=True)
    assert plan.changes == ["operation 'charge:42', success in attempt 1, may run again"]
    assert client.operation("charge:42").run(lambda: 1).replayed
    operator.run(client, "operation.reset", {"key": "charge:42"}, **JANE)
    assert client.operation("charge:42").run(lambda: {"id": 8}).result == {"id": 8}
    assert entries(client, "operation.reset") == [("operation charge:42", "jane", "the bank says no", "done")]
    [reset] = [each for each in client.operations.history("charge:42") if each.kind == "reset"]
    assert json.loads(reset.detail) == {"actor": "jane", "reason": "the bank says no"}
    assert client.operations.verify().passed
    for key in ("nobody's", "f" * 64):
        with pytest.raises(operator.CommandRefused, match="there is no operation"):
            operator.run(client, "operation.reset", {"key": key}, **JANE)


@pytest.mark.parametrize("command", ["operation.reset", "operation.rollback", "operation.complete"])
def test_one_that_went_on_since_it_was_looked_at_is_left_alone(
    client: holdfast.Client, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    undone: list[Any] = []
    client.operations.register("undo", rollback=lambda: undone.append("again"))

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client.operation("retried", rollback="undo").run(fails)
    apply = execute._apply

    def apply_late(*arguments: Any) -> None:
        client.operation("retried", rollback="undo").run(lambda: 1)
        undone.clear()
        apply(*arguments)

    monkeypatch.setattr(execute, "_apply", apply_late)
    with pytest.raises(operator.CommandRefused, match="it is success now"):
        operator.run(client, command, {"key": "retried"}, **JANE)
    assert (undone, client.operation("retried").run(lambda: 2).result) == ([], 1)


@pytest.mark.parametrize("command", ["operation.reset", "operation.complete"])
def test_one_that_is_under_way_is_not_changed_under_its_owners_feet(
    either: str, client: holdfast.Client, command: str
) -> None:
    def work() -> None:
        with holdfast.Client(either) as other, pytest.raises(operator.CommandRefused, match="is running"):
            operator.run(other, command, {"key": "slow"}, **JANE)

    assert not client.operation("slow").run(work).replayed


def test_a_completion_records_the_result_and_who_found_it_out(either: str, client: holdfast.Client) -> None:
    leave_half_done(either, "charge:43")
    parameters = {"key": "charge:43", "result": '{\n  "id": 7,\n  "name": "é"\n}'}
    change = "operation 'charge:43', partial in attempt 1, is done with the result " + r'{"id":7,"name":"\u00e9"}'
    plan = operator.run(client, "operation.complete", parameters, **JANE, dry_run=True)
    assert (plan.changes, client.operations.find("charge:43").status) == ([change], "partial")
    assert operator.run(client, "operation.complete", parameters, **JANE).changes == [change]
    assert client.operation("charge:43").run(dict).result == {"id": 7, "name": "é"}
    assert entries(client, "operation.complete") == [("operation charge:43", "jane", "the bank says no", "done")]
    for dry_run in (True, False):
        for key, why in (("charge:43", "has succeeded already"), ("nobody's", "there is no operation")):
            with pytest.raises(operator.CommandRefused, match=why):
                operator.run(client, "operation.complete", {"key": key}, **JANE, dry_run=dry_run)


@pytest.mark.parametrize(
    "wrong", ["", "{'id': 7}", "NaN", "1e999", "[" * 100_000, '"\x00"', json.dumps("x" * 100_000)],
    ids=["empty", "Python", "NaN", "infinite", "deep", "control", "long"],
)  # fmt: skip
def test_a_result_that_is_no_json_is_refused_before_anything_is_written(
    either: str, client: holdfast.Client, wrong: str
) -> None:
    leave_half_done(either, "charge:43")
    with pytest.raises(ValueError, match="result must"):
        operator.run(client, "operation.complete", {"key": "charge:43", "result": wrong}, **JANE)
    assert entries(client, "operation.complete") == []
    assert client.operations.find("charge:43").status == "partial"


def test_a_rollback_undoes_it_with_what_is_registered_and_it_can_be_done_again(client: holdfast.Client) -> None:
    undone: list[Any] = []
    client.operations.register("unpublish", rollback=lambda op: undone.append(dict(op.checkpoints)))

    def publish(op: Any) -> str:
        op.checkpoint("draft", 42)
        return "published"

    client.operation("publish", rollback="unpublish").run(publish)
    outcome = operator.run(client, "operation.rollback", {"key": "publish"}, **JANE)
    assert outcome.changes == ["operation 'publish', success in attempt 1, is undone by unpublish"]
    for dry_run in (True, False):
        with pytest.raises(operator.CommandRefused, match="'publish' has nothing to undo: it is undone already"):
            operator.run(client, "operation.rollback", {"key": "publish"}, **JANE, dry_run=dry_run)
    assert undone == [{"draft": 42}]
    assert client.operations.verify().passed
    assert [each.status for each in client.operations.replay("publish")] == ["undone"]
    assert not client.operation("publish", rollback="unpublish").run(publish).replayed
    with pytest.raises(operator.CommandRefused, match="without a rollback function"):
        operator.run(client, "operation.rollback", {"key": "charge:42"}, **JANE)


def test_replay_and_verify_change_nothing_and_are_on_the_record(either: str, client: holdfast.Client) -> None:
    before = client.operations.replay()
    outcome = operator.run(client, "operation.replay", {"key": "charge:42"}, **JANE)
    assert "is success in attempt 1 after 5 entries, result " in outcome.changes[0]
    outcome = operator.run(client, "wal.verify", **JANE)
    assert outcome.changes == ["1 operations with 5 entries were verified"]
    assert client.operations.replay() == before
    change(either, "delete from {wal} where number = 1")
    with pytest.raises(operator.CommandRefused, match="problems in the log"):
        operator.run(client, "wal.verify", **JANE)
    outcomes = [outcome for *_, outcome in entries(client, "wal.verify")]
    assert outcomes[1] == "done"
    assert "problems in the log" in str(outcomes[0])


def test_old_entries_are_put_into_a_file_that_is_never_written_over(client: holdfast.Client, tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    parameters: dict[str, Any] = {"older": 0.0, "to": str(file)}
    operator.run(client, "wal.archive", {"older": 3600.0, "to": str(file)}, **JANE)
    assert not file.exists(), "there was nothing to put into it"

    def plan() -> str:
        return operator.run(client, "wal.archive", parameters, **JANE, dry_run=True).changes[0]

    eventually(lambda: "up to 1 operations that ended before" in plan(), "the operation is a moment old")
    assert not file.exists()
    operator.run(client, "wal.archive", parameters, **JANE)
    assert [json.loads(line)["label"] for line in file.read_text().splitlines()] == ["charge:42"]
    assert client.operations.verify(archives=file.read_text().splitlines()).entries == 6
    for wrong in (str(file), str(tmp_path / "nowhere" / "x")):
        with pytest.raises(operator.CommandRefused, match="already exists, or its folder does not"):
            operator.run(client, "wal.archive", {"older": 0.0, "to": wrong}, **JANE)
    with pytest.raises(ValueError, match="older must be a number from 0 to 3153600000, not -1"):
        operator.run(client, "wal.archive", {"older": -1.0, "to": str(tmp_path / "new")}, **JANE)
    client.operation("told").run(lambda op: op.emit("lineage", {}))
    parameters["to"] = str(tmp_path / "new")
    client.operation("plain").run(lambda: 1)
    eventually(lambda: "up to 3 operations" in plan(), "the operations are a moment old")
    with pytest.raises(holdfast.HoldfastError, match="1 operations were archived, 1 were not") as partly:
        operator.run(client, "wal.archive", parameters, **JANE)
    assert not isinstance(partly.value, operator.CommandRefused), "something was changed"
    assert str(entries(client, "wal.archive")[0][3]).startswith("failed: ")
    parameters["to"] = str(tmp_path / "newer")
    with pytest.raises(
        operator.CommandRefused, match=r"0 operations were archived, 1 were not: .*lineage is not published"
    ):
        operator.run(client, "wal.archive", parameters, **JANE)
