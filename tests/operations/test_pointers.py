"""A rollback that is found by a pointer into the log: it undoes what whoever noted the pointer has seen, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import holdfast
from holdfast.testing.operation_contract import name

BY_JANE = {"actor": "jane", "reason": "wrong prices"}


@pytest.fixture
def client(either: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(either) as made:
        yield made


def test_a_pointer_is_good_for_a_rollback_while_its_attempt_stands(client: holdfast.Client, either: str) -> None:
    key, undone, seen, archived = name(), list[Any](), list[str](), list[str]()
    operations = client.operations
    operations.register("unpublish", rollback=lambda op: undone.append(dict(op.checkpoints)))

    def publish(op: Any) -> str:
        op.checkpoint("draft", len(seen))
        seen.append(operations.find(key).pointer)
        return "published"

    def refused(pointer: str, why: str) -> None:
        before = len(undone)
        with pytest.raises(LookupError, match=why):
            operations.rollback(pointer, **BY_JANE)
        assert len(undone) == before

    def run() -> str:
        assert not client.operation(key, rollback="unpublish").run(publish).replayed
        return operations.find(key).pointer

    first = run()
    assert operations.find(first) == operations.find(seen[0]) == operations.get(key)
    with (
        holdfast.Client(either) as other,
        pytest.raises(holdfast.OperationFailed, match="'unpublish' is not registered"),
    ):
        other.operations.rollback(first, **BY_JANE)
    operations.rollback(seen[0], **BY_JANE)
    assert undone == [{"draft": 0}]
    refused(first, f"pointer {first} is of operation '{key}' in attempt 1, which is not the latest any more")
    refused(operations.find(key).pointer, "lock_released, leaves nothing to undo: it is undone")
    second = run()
    refused(first, "it is success in attempt 2 now; give its current pointer, or its key")
    refused(f"5:{'0' * 64}", "no entry of the log has the pointer 5:0")
    operations.archive(datetime.now(UTC) + timedelta(hours=1), archived.extend)
    refused(second, f"of operation '{key}', and that entry was archived: give the key")
    operations.rollback(operations.find(key).pointer, **BY_JANE)
    assert undone == [{"draft": 0}, {"draft": 1}], "the entry that stays in an archive's place names it as well"
    assert operations.verify(key).problems == ()


def test_what_is_done_anew_between_the_look_and_the_rollback_is_not_undone(
    client: holdfast.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, undone = name(), list[int]()
    client.operations.register("undo", rollback=lambda: undone.append(1))
    client.operation(key, rollback="undo").run(int)
    pointer = client.operations.find(key).pointer
    found = client.operations.find

    def slow(asked: str) -> Any:
        record = found(asked)
        client.operations.reset(key, actor="joe", reason="again")
        client.operation(key, rollback="undo").run(int)
        return record

    monkeypatch.setattr(client.operations, "find", slow)
    with pytest.raises(holdfast.OperationInProgress, match="another process has run it meanwhile"):
        client.operations.rollback(pointer, **BY_JANE)
    assert undone == []


def test_a_rollback_that_is_registered_is_known_by_its_name_also_when_it_is_a_method(either: str) -> None:
    """Python makes a method anew whenever it is asked for: it is equal to the one before, and not the same."""

    class Api:
        undone = 0

        def unpublish(self) -> None:
            self.undone += 1

    def die() -> None:
        raise KeyboardInterrupt

    api, key = Api(), name()
    with holdfast.Client(either) as client:
        client.operations.register("unpublish", rollback=api.unpublish)
        with pytest.raises(KeyboardInterrupt):
            client.operation(key, rollback=api.unpublish).run(die)
        record = client.operations.get(key)
        assert record is not None
        assert [(each.key, each.status) for each in client.operations.recover()] == [(record.key, "undone")]
        assert api.undone == 1
