"""The chain of an operation's entries, without a database: whatever is done to it is found."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.operations import log
from holdfast.operations.log import Kind, LogEntry

OPERATION = "ab" * 32


def chain(*events: tuple[Kind, int] | tuple[Kind, int, dict[str, Any]], operation: str = OPERATION) -> list[LogEntry]:
    entries: list[LogEntry] = []
    for kind, attempt, *more in events:
        detail = json.dumps(more[0] if more else {})
        payload = b'"it"' if kind == "success" else None
        entries.append(
            log.next_entry(
                entries[-1] if entries else None, operation, kind, attempt=attempt, fence=attempt * 10,
                at=1_000_000 + len(entries), detail=detail, payload=payload,
            )
        )  # fmt: skip
    return entries


@st.composite
def lives(draw: st.DrawFn, operation: str = OPERATION) -> list[LogEntry]:
    """A life as the lifecycle writes it: attempts that fail, crash, are rolled back, succeed, are reset."""
    events: list[Any] = []
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        events += [("lock_acquired", attempt), ("claimed", attempt)]
        if draw(st.booleans()):
            events.append(("precondition", attempt, {"name": "fresh", "held": True}))
        if draw(st.booleans()):
            events.append(("sovereignty", attempt))
        if draw(st.booleans()):
            events.append(("effect_started", attempt))
        for number in range(draw(st.integers(0, 2))):
            events.append(("checkpoint", attempt, {"name": f"c{number}", "value": attempt}))
        end = draw(st.sampled_from(["success", "failure", "crash", "reset"]))
        if end == "crash":
            if draw(st.booleans()):
                events.append(("rollback", attempt))
            continue
        events.append(("postcondition", attempt, {"name": "rows", "held": end != "failure"}))
        events.append(
            ("success" if end == "reset" else end, attempt, {} if end != "failure" else {"error": "ValueError: no"})
        )
        events.append(("lock_released", attempt))
        if end == "success":
            break
        if end == "reset":
            events.append(("reset", attempt, {"actor": "jane", "reason": "why"}))
    return chain(*events, operation=operation)


def broken(entries: list[LogEntry], **options: Any) -> list[str]:
    return [each.what for each in log.verify_chain(entries, **options) if each.broken]


@settings(max_examples=50)
@given(lives())
def test_nothing_is_wrong_with_what_the_lifecycle_writes(entries: list[LogEntry]) -> None:
    assert broken(entries, pointer=entries[-1].pointer) == []


CHANGES: dict[str, Any] = {
    "kind": "checkpoint", "attempt": 77, "fence": 77, "at": 77, "detail": '{"other": 1}', "payload_hash": "00",
    "previous": "00" * 32, "hash": "00" * 32, "number": 77, "operation": "cd" * 32, "payload": b"other",
}  # fmt: skip


@settings(max_examples=50)
@given(lives(), st.data())
def test_an_entry_that_was_changed_is_found(entries: list[LogEntry], data: Any) -> None:
    at, name = data.draw(st.integers(0, len(entries) - 1)), data.draw(st.sampled_from(sorted(CHANGES)))
    changed = replace(entries[at], **{name: CHANGES[name]})
    if changed == entries[at]:
        return
    assert broken([*entries[:at], changed, *entries[at + 1 :]]), name


@settings(max_examples=50)
@given(lives(), st.data())
def test_an_entry_that_was_changed_and_hashed_anew_is_found(entries: list[LogEntry], data: Any) -> None:
    at = data.draw(st.integers(0, len(entries) - 1))
    old = entries[at]
    forged = replace(old, detail='{"forged": 1}')
    forged = replace(
        forged,
        hash=log.hash_entry(old.operation, old.number, old.kind, old.attempt, old.fence, old.at, forged.detail,
                      old.payload_hash, old.previous),
    )  # fmt: skip
    assert broken([*entries[:at], forged, *entries[at + 1 :]], pointer=entries[-1].pointer)


@settings(max_examples=50)
@given(lives(), st.data())
def test_entries_that_are_missing_are_found(entries: list[LogEntry], data: Any) -> None:
    gone = data.draw(st.sets(st.integers(0, len(entries) - 1), min_size=1))
    assert broken([each for at, each in enumerate(entries) if at not in gone], pointer=entries[-1].pointer)


@settings(max_examples=50)
@given(lives(), st.data())
def test_entries_that_were_moved_or_doubled_are_found(entries: list[LogEntry], data: Any) -> None:
    order = data.draw(st.permutations(entries))
    assert bool(broken(order, pointer=entries[-1].pointer)) == (order != entries)
    at = data.draw(st.integers(0, len(entries) - 1))
    assert broken([*entries[: at + 1], *entries[at:]])


@settings(max_examples=50)
@given(lives(), lives(operation="cd" * 32), st.data())
def test_an_entry_of_another_operation_is_found(entries: list[LogEntry], others: list[LogEntry], data: Any) -> None:
    at = data.draw(st.integers(1, len(entries)))
    assert "foreign" in broken([*entries[:at], data.draw(st.sampled_from(others)), *entries[at:]])


def test_what_is_hashed_cannot_be_read_in_two_ways() -> None:
    expected = sha256(b"2:ab,1:1,7:claimed,1:1,2:10,3:100,2:{},-,0:,").hexdigest()
    assert log.hash_entry("ab", 1, "claimed", 1, 10, 100, "{}", None, "") == expected
    assert log.hash_entry("ab", 1, "claimed", 1, 10, 100, "{}", "", "") != expected, "missing is not empty"
    in_bytes = sha256('2:ab,1:1,7:claimed,1:1,2:10,3:100,7:"é€",-,0:,'.encode()).hexdigest()
    assert log.hash_entry("ab", 1, "claimed", 1, 10, 100, '"é€"', None, "") == in_bytes, "a length is of bytes"
    assert log.hash_entry("ab", 11, "claimed", 1, 10, 100, "{}", None, "") != log.hash_entry(
        "ab", 1, "claimed", 11, 10, 100, "{}", None, ""
    )


@pytest.mark.parametrize(
    ("events", "running", "expected"),
    [
        ([("claimed", 1), ("lock_acquired", 1), ("success", 1), ("lock_released", 1)], False, []),
        ([("claimed", 1), ("lock_acquired", 1)], True, []),
        ([("claimed", 1), ("lock_acquired", 1)], False, [2]),
        (
            [("claimed", 1), ("lock_acquired", 1), ("claimed", 2), ("lock_acquired", 2), ("lock_released", 2)],
            False,
            [2],
        ),
        ([("claimed", 1), ("lock_released", 1)], False, [2]),
        ([("claimed", 1), ("lock_acquired", 1), ("lock_released", 1), ("lock_released", 1)], False, [4]),
    ],
)
def test_a_lock_entry_without_its_other_half_is_reported(events: Any, running: bool, expected: list[int]) -> None:
    found = log.verify_chain(chain(*events), running=running)
    assert [(each.what, each.number) for each in found] == [("unpaired", number) for number in expected]
    assert not any(each.broken for each in found)


@pytest.mark.parametrize(
    "events",
    [
        [("success", 1)], [("claimed", 1), ("success", 2)], [("claimed", 1), ("success", 1), ("success", 1)],
        [("claimed", 2), ("claimed", 1)], [("claimed", 1), ("failure", 1), ("checkpoint", 1)],
        [("claimed", 1), ("reset", 1), ("effect_started", 1)],
    ],
)  # fmt: skip
def test_an_order_that_no_lifecycle_writes_is_found_although_the_chain_is_sound(events: Any) -> None:
    assert broken(chain(*events)) == ["impossible"]


def test_what_a_chain_may_begin_with() -> None:
    whole = chain(("claimed", 1), ("success", 1), ("archived", 1), ("reset", 1), ("claimed", 2))
    assert broken(whole) == broken(whole[2:]) == []
    assert broken(whole[1:]) == ["missing", "impossible"]
    assert "missing" in broken([*whole[:1], *whole[2:]])
    assert broken([], pointer="2:00") == ["head"]
    assert log.verify_chain([]) == []


@settings(max_examples=50)
@given(lives(), st.data())
def test_what_was_written_together_comes_back(entries: list[LogEntry], data: Any) -> None:
    cut = data.draw(st.integers(1, len(entries)))
    pieces = [piece for piece in (entries[:cut], entries[cut:]) if piece]
    read = [entry for piece in pieces for entry in log.parse_entries(OPERATION, log.dump_entries(piece))]
    assert read == [replace(entry, payload=None) for entry in entries]
    for wrong in (
        "",
        "{}x",
        "[[1]]",
        '["",[1],""]',
        "7",
        '["",["1","claimed",1,1,1,"{}",null],""]',
        '["",[1,"claimed",1,1,1,{},null],""]',
        '["",[1,"claimed",1,1,1,"{}",null],7]',
    ):
        with pytest.raises(ValueError, match="the log of operation abababababab… holds a"):
            log.parse_entries(OPERATION, wrong)


@settings(max_examples=50)
@given(lives(), lives(operation="cd" * 32), st.data())
def test_folding_piece_by_piece_or_mixed_is_the_same(one: list[LogEntry], two: list[LogEntry], data: Any) -> None:
    mixed: list[LogEntry] = []
    left = [list(one), list(two)]
    while any(left):
        mixed.append(data.draw(st.sampled_from([each for each in left if each])).pop(0))
    cut = data.draw(st.integers(0, len(mixed)))
    whole = log.fold(mixed)
    assert log.fold(mixed[cut:], log.fold(mixed[:cut])) == whole == log.fold(one) | log.fold(two)


@settings(max_examples=50)
@given(lives(), st.data())
def test_what_is_archived_folds_to_the_same(entries: list[LogEntry], data: Any) -> None:
    cut = data.draw(st.integers(1, len(entries)))
    [state] = log.fold(entries[:cut]).values()
    note = log.next_entry(
        entries[cut - 1], OPERATION, "archived", attempt=state.attempt, fence=state.fence, at=5,
        detail=json.dumps({"state": log.archived_fields(state)}),
    )  # fmt: skip
    [short], [whole] = (log.fold(each).values() for each in ([note], [*entries[:cut], note]))
    assert replace(short, result=None) == replace(whole, result=None)


def test_a_life_is_folded_into_its_state_and_result() -> None:
    entries = chain(
        ("claimed", 1), ("effect_started", 1), ("checkpoint", 1, {"name": "rows", "value": 7}), ("rollback", 1),
        ("claimed", 2), ("failure", 2, {"error": "ValueError: no"}), ("claimed", 3), ("effect_started", 3),
        ("success", 3), ("reset", 3), ("sovereignty", 3),
    )  # fmt: skip
    states = [log.fold(entries[: count + 1])[OPERATION] for count in range(len(entries))]
    assert [each.status for each in states] == [
        "partial", "partial", "partial", "undone", "partial", "failure", "partial", "partial", "success", "reset",
        "reset",
    ]  # fmt: skip
    assert [each.effect_started for each in states[:5]] == [False, True, True, False, False]
    assert states[2].checkpoints == {"rows": 7}
    assert states[4].checkpoints == {}
    assert states[5].error == "ValueError: no"
    done = states[8]
    assert (done.result, done.result_hash, done.attempt, done.fence) == (b'"it"', sha256(b'"it"').hexdigest(), 3, 30)
    assert (states[9].result_hash, states[9].resets, states[10].sovereignty) == (None, 1, True)
