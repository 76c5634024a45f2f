"""The log of operations as it was read: chains beside what the log says of them, and put away and found again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.doctor import operations
from holdfast.operations import archive, log
from holdfast.operations.log import LogEntry, fold
from tests.operations.internals.test_wal import OPERATION, chain, lives


def rows(entries: list[LogEntry], **changed: Any) -> list[dict[str, Any]]:
    """As the statement gives them: what was written together in one row, with what the log says of the whole."""
    state = fold(entries)[OPERATION]
    success = state.status == "success"
    kind, _, message = (state.error or "").partition(": ")
    said = {"type": kind, "message": message, "reset": state.status == "reset", "remembered": state.remembered}
    known = {
        "key": OPERATION, "label": OPERATION, "status": "failure" if state.status == "reset" else state.status,
        "attempt": state.attempt, "pointer": entries[-1].pointer, "alive": False, "result_hash": state.result_hash,
        "result": b'"it"'.hex() if success else None, "fingerprint": state.fingerprint,
        "effect_started": state.effect_started, "error": json.dumps(said) if state.error else None,
        "failures": state.failures, "fence": entries[-1].fence, "owner": state.owner, "rollback": state.rollback,
        "keep": state.keep, **dict.fromkeys(("pipeline", "task", "dataset", "operation", "checksum", "params_hash")),
        **changed,
    }  # fmt: skip
    pieces = [entries[at : at + 3] for at in range(0, len(entries), 3)]
    return [{**known, "number": piece[0].number, "entries": log.dump_entries(piece)} for piece in pieces]


def read(found: list[dict[str, Any]], **more: Any) -> log.LoggedOperation:
    [one] = log.parse_operations(found, **more)
    return one


DONE = chain(("claimed", 1), ("lock_acquired", 1), ("success", 1), ("lock_released", 1))


@settings(max_examples=40)
@given(lives())
def test_nothing_is_wrong_where_both_agree_and_the_state_is_what_the_log_says(entries: list[LogEntry]) -> None:
    one = read(rows(entries))
    assert [each for each in log.verify_operation(one) if each.broken] == []
    assert one.state().result == (b'"it"' if one.status == "success" else None)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"status": "failure", "result_hash": None}, "log"), ({"attempt": 2}, "log"),
        ({"result_hash": "00" * 32}, "log"), ({"result": b'"other"'.hex()}, "payload"),
        ({"pointer": DONE[2].pointer}, "head"), ({"status": None}, "missing"), ({"result": None}, "payload"),
        ({"fingerprint": "00" * 32}, "log"), ({"error": '{"reset": true}'}, "log"), ({"error": "nonsense"}, "log"),
        ({"error": "[1]"}, "log"),
    ],
)  # fmt: skip
def test_what_the_log_says_otherwise_is_found(changed: dict[str, Any], what: str | None) -> None:
    assert [each.what for each in log.verify_operation(read(rows(DONE, **changed)))] == ([] if what is None else [what])


FAILED = chain(
    ("lock_acquired", 1), ("claimed", 1, {"fingerprint": "ab"}), ("effect_started", 1),
    ("failure", 1, {"error": "ValueError: no", "remembered": True}), ("lock_released", 1),
)  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"fingerprint": None}, {"effect_started": False}, {"error": None}, {"error": "{}"},
        {"error": '{"type": "ValueError", "message": "no"}'},
        {"error": '{"type": "ValueError", "message": "yes", "remembered": true}'},
        {"error": '{"type": "ValueError", "message": "no", "remembered": true, "reset": true}'},
    ],
)  # fmt: skip
def test_so_it_is_of_a_failure(changed: dict[str, Any]) -> None:
    assert log.verify_operation(read(rows(FAILED))) == []
    assert [each.what for each in log.verify_operation(read(rows(FAILED, **changed)))] == ["log"]


def test_an_operation_that_only_the_log_knows_or_whose_entries_are_no_entries_is_found() -> None:
    [alone] = [{**rows(DONE)[0], "entries": None, "number": None}]
    assert [(each.what, each.operation) for each in log.verify_operation(read([alone]))] == [("head", alone["key"])]
    damaged = {**rows(DONE)[0], "entries": "[[]]"}
    tally = log.LogVerifier()
    tally.add(read([damaged]))
    judged = tally.verification()
    assert [(each.what, each.broken) for each in judged.problems] == [("tampered", True)]
    assert (judged.operations, judged.passed) == (1, False)


@settings(max_examples=40)
@given(lives(), lives(), st.data())
def test_what_was_put_away_is_proven_with_what_stays(
    entries: list[LogEntry], others: list[LogEntry], data: Any
) -> None:
    note = archive.archived_entry(entries, at=7)
    away = archive.parse_archive([archive.archive_line("charge:42", entries)])
    stays = rows([note])
    assert [each for each in log.verify_operation(read(stays)) if each.broken] == []
    whole = read(stays, archived=away)
    assert [each for each in log.verify_operation(whole) if each.broken] == []
    assert len(whole.entries) == len(entries) + 1
    text = archive.archive_line("charge:42", entries)
    at = data.draw(st.integers(text.index("["), len(text) - 1))
    forged = text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]
    try:
        found = log.verify_operation(read(stays, archived=archive.parse_archive([forged])))
    except ValueError:
        return
    assert any(each.broken for each in found) or json.loads(forged)["log"] == json.loads(text)["log"]


@settings(max_examples=40)
@given(lives())
def test_what_was_written_down_twice_is_there_once(entries: list[LogEntry]) -> None:
    """It was not put away in the end, or whoever did died in between."""
    text = archive.archive_line("charge:42", entries)
    for lines in ([text], [text, text]):
        one = read(rows(entries), archived=archive.parse_archive(lines))
        assert [each for each in log.verify_operation(one) if each.broken] == []
        assert list(one.entries) == [replace(entry, payload=None) for entry in entries]


def test_a_line_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="line 2 of the archive is no chain"):
        archive.parse_archive([archive.archive_line("x", DONE), "{}"])


ABOUT: dict[str, Any] = {
    "operations": 7, "partial": 0, "orphaned": 0, "stale_partials": 0, "oldest": None, "failed": 0, "today": 7,
    "entries": 28, "bytes": 1 << 20, "expired": 0, "unpublished": 0, "lag": None, "reviews": 0, "stale": 3600.0,
    "relayed": True, "unrelayed": None, "unrelayed_for": None,
}  # fmt: skip
CHAINS: dict[str, Any] = {"operations": 7, "entries": 28, "broken": [], "unpaired": 0}


def verdicts(
    about: dict[str, Any], chains: dict[str, Any], missing: str | None = None, relays: Sequence[dict[str, Any]] = ()
) -> dict[str, tuple[str, str]]:
    indexes = [{"name": name} for name in operations.NEEDED if name != missing]
    facts: dict[str, Any] = {
        "operation_health": [ABOUT | about], "operation_indexes": indexes, "chains": [CHAINS | chains],
        "relays": list(relays),
    }  # fmt: skip
    return {each.check: (each.status, each.found) for each in operations.examine(facts)}


def test_a_log_that_is_well() -> None:
    assert {status for status, _ in verdicts({}, {}).values()} == {"ok"}
    assert verdicts({"partial": 3}, {})["claims"] == ("ok", "3 running, each with a living owner")


@pytest.mark.parametrize(
    ("check", "status", "about", "chains", "told"),
    [
        ("partials", "fail", {"stale_partials": 2, "oldest": 7200.0}, {}, "2 have been partial for longer than 1 h"),
        ("claims", "warn", {"partial": 3, "orphaned": 1}, {}, "1 of 3 unfinished have lost their owner"),
        ("failures", "warn", {"reviews": 1}, {}, "1 wait for a review"),
        ("failures", "ok", {"failed": 4}, {}, "4 have failed"),
        ("growth", "warn", {"today": 2_000_000}, {}, "2000000 of them since yesterday"),
        ("growth", "warn", {"bytes": 11 << 30}, {}, "11 GB"),
        ("growth", "warn", {"expired": 3}, {}, "3 results are kept although they have expired"),
        ("lineage", "warn", {"unpublished": 3, "lag": 7200.0}, {}, "the oldest for 2 h"),
        ("lineage", "ok", {"unpublished": 3, "lag": 2.0}, {}, "3 messages wait"),
        ("lineage", "ok", {"relayed": False, "unrelayed": 4, "unrelayed_for": 60.0}, {}, "no relay has ever run"),
        (
            "lineage",
            "warn",
            {"relayed": False, "unrelayed": 4, "unrelayed_for": 7200.0},
            {},
            "4 entries wait for a relay, the oldest for 2 h",
        ),
        ("lineage", "ok", {"relayed": False, "unrelayed": 0}, {}, "nothing waits"),
        ("chains", "fail", {}, {"broken": ["x entry 1: no"]}, "1 problems in 7 chains"),
        ("chains", "ok", {}, {"unpaired": 2}, "2 locks have no release"),
    ],
)
def test_what_is_not(check: str, status: str, about: Any, chains: Any, told: str) -> None:
    found = verdicts(about, chains)
    assert found[check][0] == status
    assert told in found[check][1]
    assert {name for name, verdict in found.items() if verdict[0] != "ok"} == ({check} if status != "ok" else set())


RELAY: dict[str, Any] = {"name": "catalogue", "parked": 0, "lag": 2.0, "entries": 4, "problem": None}


@pytest.mark.parametrize(
    ("relay", "status", "told"),
    [
        ({}, "ok", "nothing waits"),
        ({"parked": 2}, "warn", "relay 'catalogue' has parked 2 events"),
        (
            {"lag": 7200.0, "problem": "it is down"},
            "warn",
            "4 entries wait for relay 'catalogue', the oldest for 2 h: it",
        ),
    ],
)
def test_what_relays_have_not_told(relay: dict[str, Any], status: str, told: str) -> None:
    found = verdicts({}, {}, relays=[RELAY, RELAY | relay])["lineage"]
    assert found[0] == status
    assert told in found[1]


@pytest.mark.parametrize("name", sorted(operations.NEEDED))
def test_an_index_that_is_missing_fails(name: str) -> None:
    assert verdicts({}, {}, missing=name)["indexes"] == ("fail", f"missing or invalid: {name}")
