"""The log of operations: replayed, read and listed."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import holdfast
from tests.operations.logs import LATER, change, fail, fill, problems
from tests.pairs import EACH_ONCE

Connect = Callable[..., Any]


@pytest.fixture
def client(connect: Connect, either: str) -> Any:
    return fill(connect(either), either)


@EACH_ONCE
def test_replay_folds_the_log_into_states_and_results_and_calls_nobody(client: Any) -> None:
    known = {name: client.operations.get(name) for name in ("done", "second try", "failed", "half done")}
    states = {each.operation: each for each in client.operations.replay()}
    assert {record.key for record in known.values()} == states.keys()
    for record in known.values():
        state = states[record.key]
        assert (state.status, state.attempt, state.result_hash) == (record.status, record.attempt, record.result_hash)
    [done] = client.operations.replay("done")
    assert (done.value, done.kept, done.effect_started) == ({"rows": 7}, True, True)
    assert client.operations.replay("second try")[0].value == b"\x00"
    [half] = client.operations.replay("half done")
    assert (half.status, half.checkpoints, half.kept) == ("partial", {"draft": 42}, False)
    with pytest.raises(LookupError, match="no result"):
        _ = half.value
    assert client.operations.replay("failed")[0].error == "ValueError: broken"
    assert client.operations.replay("nobody's") == []
    assert client.operations.replay(since=datetime.now(UTC) + LATER) == []
    assert len(client.operations.replay(since=datetime.now(UTC) - LATER)) == 4


@EACH_ONCE
def test_what_is_taken_up_to_be_undone_is_partial_and_may_turn_out_to_be_done(client: Any) -> None:
    """Whoever undoes a failed attempt may fail at that, or die; then it is asked whether the effect is there."""

    def undo(op: Any) -> None:
        raise OSError("not now")

    with pytest.raises(OSError, match="not now"):
        client.operation("failed", rollback=undo).run(lambda: 1)
    assert client.operations.replay("failed")[0].status == client.operations.get("failed").status == "partial"
    assert problems(client) == set()
    assert client.operation("failed", verify=lambda op: op.done(7)).run(lambda: 1).result == 7
    assert problems(client) == set()


def test_chains_are_read_page_by_page(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.operations import operations

    monkeypatch.setattr(operations, "PAGE", 3)
    with holdfast.Client(either) as client:
        for number in range(10):
            client.operation(f"n{number}").run(lambda: 1)
        assert len(client.operations.replay()) == client.operations.verify().operations == 10
        lines: list[list[str]] = []
        archived = client.operations.archive(datetime.now(UTC) + LATER, lambda page: lines.append(list(page)))
        assert (archived.operations, [len(page) for page in lines]) == (10, [3, 3, 3, 1])


@EACH_ONCE
def test_the_latest_is_listed_first_although_a_clock_says_the_same_of_two(client: Any, either: str) -> None:
    """That of SQLite has milliseconds, and an operation takes less."""
    before = [each.label for each in client.operations.list()]
    if either.startswith("sqlite"):
        change(either, "update {log} set updated_at = 1.5")
    assert [each.label for each in client.operations.list()] == before == ["half done", "failed", "second try", "done"]


@pytest.mark.parametrize("wrong", [7, datetime(2026, 1, 1), "now"])  # noqa: DTZ001
def test_a_wrong_moment_is_named(sqlite_url: str, wrong: Any) -> None:
    with holdfast.Client(sqlite_url) as client:
        for call in (
            lambda: client.operations.replay(since=wrong),
            lambda: client.operations.verify(since=wrong),
            lambda: client.operations.archive(wrong, print),
        ):
            with pytest.raises((TypeError, ValueError), match=r"^(since|before) must"):
                call()
        with pytest.raises(TypeError, match="before must be a datetime, not NoneType"):
            client.operations.archive(None, print)  # type: ignore[arg-type]


@EACH_ONCE
def test_a_sovereign_dataset_is_locked_whole_and_marked(client: Any) -> None:
    parts: dict[str, Any] = {"pipeline": "etl", "task": "load", "dataset": "graves", "operation": "upsert"}
    with pytest.raises(ValueError, match="dataset 'graves' is sovereign and is locked as a whole"):
        client.operation(
            holdfast.OperationKey(**parts, shards=4), options=holdfast.OperationOptions(sovereign=True)
        ).run(fail)
    key = holdfast.OperationKey(**parts)
    client.operation(
        key, options=holdfast.OperationOptions(sovereign=True), actor="jane", justification="the council agreed"
    ).run(lambda: 1)
    [state] = client.operations.replay(key)
    assert (state.sovereignty, client.operations.replay("done")[0].sovereignty) == (True, False)
    marks = {each.kind: json.loads(each.detail) for each in client.operations.history(key)}
    assert marks["sovereignty"] == {"dataset": "graves", "sovereignty_event": True}
    assert marks["claimed"] == {"actor": "jane", "justification": "the council agreed"}
    assert problems(client) == set()
