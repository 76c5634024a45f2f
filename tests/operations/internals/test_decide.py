"""What to do with an operation, from what the log says of it; and how results are kept."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import KeyReused, OperationFailed, walk_causes
from holdfast.keys import as_key
from holdfast.lineage.relay_terms import is_down
from holdfast.operations import result_codec
from holdfast.operations.decide import (
    NO_PRIOR,
    Decision,
    backoff_delay,
    decide,
    is_collision,
    is_transient,
    is_unanswered,
    refusal,
)
from holdfast.operations.log import Chain, encode_entry, hash_prefix, link_entries, parse_entries, verify_chain
from holdfast.operations.outcome import Outcome
from holdfast.operations.terms import Retry

SEEN = NO_PRIOR._replace(attempt=1, pointer="1:x", fingerprint="f", result="6a6e756c6c")


def act(
    on_partial: Any = "refuse", undoes: bool = False, fingerprint: str | None = "f", reuse: bool = True, **prior: Any
) -> Decision:
    return decide(
        SEEN._replace(**prior), fingerprint, attempts=3, on_partial=on_partial, undoes=undoes, reuse=reuse
    )  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        (Decision.EXECUTE, {"status": None, "fingerprint": None}),
        (Decision.REPLAY, {"status": "success"}),
        (Decision.EXECUTE, {"status": "success", "expired": True, "fingerprint": "another"}),
        (Decision.EXPIRED, {"status": "success", "expired": True, "reuse": False}),
        (Decision.REPLAY, {"status": "success", "reuse": False}),
        (Decision.EXPIRED, {"status": "success", "result": None}),
        (Decision.MISMATCH, {"status": "success", "expired": True, "reuse": False, "fingerprint": "another"}),
        (Decision.EXECUTE, {"status": "failure", "expired": True, "error": '{"reset": true}', "reuse": False}),
        (Decision.MISMATCH, {"status": "success", "fingerprint": "another"}),
        (Decision.MISMATCH, {"status": "partial", "fingerprint": None}),
        (Decision.RUNNING, {"status": "partial", "alive": True, "effect_started": True}),
        (Decision.EXECUTE, {"status": "partial"}),
        (Decision.REFUSE_PARTIAL, {"status": "partial", "effect_started": True}),
        (Decision.REFUSE_PARTIAL, {"status": "partial", "effect_started": True, "expired": True}),
        (Decision.ROLL_BACK, {"status": "partial", "effect_started": True, "on_partial": "rollback", "undoes": True}),
        (Decision.VERIFY, {"status": "partial", "effect_started": True, "on_partial": "verify"}),
        (Decision.EXECUTE, {"status": "failure", "failures": 2}),
        (Decision.EXECUTE, {"status": "undone", "failures": 2}),
        (Decision.EXHAUSTED, {"status": "undone", "failures": 3}),
        (Decision.MISMATCH, {"status": "undone", "fingerprint": "another"}),
        (Decision.EXECUTE, {"status": "failure", "failures": 1, "effect_started": True}),
        (Decision.ROLL_BACK, {"status": "failure", "failures": 1, "effect_started": True, "undoes": True}),
        (Decision.VERIFY, {"status": "failure", "failures": 1, "effect_started": True, "on_partial": "verify"}),
        (Decision.EXECUTE, {"status": "failure", "failures": 1, "on_partial": "verify"}),
        (Decision.EXHAUSTED, {"status": "failure", "failures": 3}),
        (Decision.EXHAUSTED, {"status": "partial", "failures": 2}),
        (Decision.REFUSE_FAILED, {"status": "failure", "failures": 1, "error": '{"remembered": true}'}),
        (Decision.EXECUTE, {"status": "failure", "failures": 9, "error": '{"reset": true}', "fingerprint": "another"}),
    ],
    ids=str,
)
def test_what_follows_from_what_the_log_says(expected: Decision, said: dict[str, Any]) -> None:
    assert act(**said) is expected


def test_refusals_say_what_to_do() -> None:
    key = as_key("charge:42")
    assert isinstance(refusal(Decision.MISMATCH, SEEN, key), KeyReused)
    half = refusal(Decision.REFUSE_PARTIAL, SEEN._replace(status="partial"), key)
    assert isinstance(half, OperationFailed)
    assert (half.status, half.label, half.key) == ("partial", "charge:42", key.digest)
    assert "Give rollback= or verify=, or complete or reset it" in str(half)
    failed = SEEN._replace(status="failure", attempt=8, failures=3, error='{"type": "E", "message": "no"}')
    assert "'charge:42' was tried 3 times, the last time with E: no" in str(refusal(Decision.EXHAUSTED, failed, key))


def test_what_says_nothing_about_the_operation() -> None:
    class OperationalError(Exception): ...

    for state in ("40001", "40P01", "08006", "57P01"):
        assert is_transient(Exception(), state)
    for error in (ConnectionResetError(), TimeoutError(), OperationalError("database is locked")):
        assert is_transient(error, None)
    wrong: list[tuple[Exception, str | None]] = [
        (ValueError("locked"), None), (Exception(), "23505"), (OperationalError("no such table"), None),
    ]  # fmt: skip
    for problem, said in wrong:
        assert not is_transient(problem, said)
    lost = type("OperationalError", (Exception,), {"__module__": "psycopg"})("SSL SYSCALL error: EOF detected")
    wrapped = OperationalError("(psycopg.OperationalError) SSL SYSCALL error: EOF detected")
    wrapped.orig = lost  # type: ignore[attr-defined]
    file = OperationalError("no such table: locks")
    for each, code in ((file, 1), (OperationalError("a locked door"), 1)):
        each.sqlite_errorcode = code  # type: ignore[attr-defined]
        assert not is_transient(each, None), "of SQLite the code is asked, not the words"
    for each in (lost, wrapped, type("InterfaceError", (Exception,), {})("network error")):
        assert is_transient(each, None), "whatever words it has"
    assert is_collision(Exception(), "40001")
    assert is_collision(OperationalError("database is locked"), None)
    assert not is_collision(TimeoutError(), None)
    assert not is_collision(Exception(), "08006")


RETRIES = st.builds(lambda first, more: Retry(first=first, longest=first + more), st.floats(0.001, 9), st.floats(0, 99))


@given(RETRIES, st.integers(0, 2000), st.floats(0, 60), st.floats(0, 1))
def test_a_pause_is_bounded_and_shrinks_towards_the_end_of_the_timeout(
    retry: Retry, pauses: int, waited: float, chance: float
) -> None:
    delay = backoff_delay(retry, pauses, chance, waited=waited, timeout=60.0)
    assert 0 <= delay <= chance * retry.longest
    assert backoff_delay(retry, pauses, chance, waited=0.0, timeout=60.0) >= delay
    assert backoff_delay(retry, pauses + 1, chance, waited=waited, timeout=60.0) >= delay
    limit = backoff_delay(retry, pauses, 1.0, waited=waited, timeout=60.0)
    assert limit > 0
    assert delay == pytest.approx(chance * limit), "full jitter: chance spreads callers that began together"


def test_a_pause_doubles_from_the_first_to_the_longest() -> None:
    retry = Retry(first=0.5, longest=3.0)
    assert [backoff_delay(retry, pauses, 1.0) for pauses in (0, 1, 2, 3, 9, 10_000)] == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert backoff_delay(retry, 0, 1.0, waited=30.0, timeout=60.0) == 0.25
    assert backoff_delay(retry, 0, 1.0, waited=90.0, timeout=60.0) == 0.025, "never nothing, or it would spin"
    assert backoff_delay(Retry(), 0, 1.0) == 0.05
    assert backoff_delay(Retry(), 99, 1.0) == 30.0


def test_the_result_of_what_was_skipped_or_failed_is_an_error() -> None:
    skipped: Outcome[int] = Outcome("skipped", False, 0)
    with pytest.raises(RuntimeError, match="skipped"):
        _ = skipped.result
    failed: Outcome[int] = Outcome("failed", False, 1, error=ValueError("why"))
    with pytest.raises(ValueError, match="why"):
        _ = failed.result


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome("success", False, 1, value=42), "Outcome(status='success', attempt=1, result=42)"),
        (Outcome("success", False, 1), "Outcome(status='success', attempt=1, result=None)"),
        (
            Outcome("success", True, 3, committed=False, value="x"),
            "Outcome(status='success', attempt=3, result='x', replayed=True, committed=False)",
        ),
        (Outcome("skipped", False, 0), "Outcome(status='skipped', attempt=0)"),
        (Outcome("expired", True, 2), "Outcome(status='expired', attempt=2, replayed=True)"),
        (
            Outcome("failed", False, 1, error=ValueError("no")),
            "Outcome(status='failed', attempt=1, error=ValueError('no'))",
        ),
    ],
)
def test_an_outcome_shows_what_is_unusual_of_it(outcome: Outcome[object], text: str) -> None:
    assert repr(outcome) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(JSON | st.binary())
def test_a_result_comes_back_as_it_was(value: Any) -> None:
    found = result_codec.decode(result_codec.encode(value))
    assert (found, type(found)) == (value, type(value))


def test_a_number_that_another_process_may_not_read_is_refused() -> None:
    """How many digits Python reads is for each process to say, and what one keeps others replay."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        for value in (10**4300, -(10**4300), [{"a": 10**4300}]):
            with pytest.raises(ValueError, match=r"^the result.* is an int of over 14000 bits"):
                result_codec.encode(value)
    finally:
        sys.set_int_max_str_digits(before)
    assert result_codec.decode(result_codec.encode(10**4200)) == 10**4200


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=6), st.text(min_size=1, max_size=9))
def test_chains_that_begin_with_the_same_phrases_are_the_same_as_one_by_one(texts: list[str], operation: str) -> None:
    notes: list[tuple[str, dict[str, Any] | None]] = [("claimed", {"name": text} if text else None) for text in texts]
    alone = Chain(operation, None)
    for kind, detail in notes:
        alone.entries.append((kind, 1, 7, 1.5, detail, None))
    phrases = [encode_entry(number, kind, 1, 7, 1.5, detail) for number, (kind, detail) in enumerate(notes, 1)]
    told = alone.pending()
    found, entries = link_entries(hash_prefix(operation), "", phrases)
    assert (f"{len(texts)}:{found}", entries) == (told.pointer, told.entries)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=6), st.integers(1, 3))
def test_a_chain_that_is_written_piece_by_piece_is_one_chain(texts: list[str], size: int) -> None:
    """Also when something is added while a piece is being written: that waits for the next."""
    chain, found = Chain("o", None), []
    chain.entries.append(("claimed", 1, 7, 1.0, None, None))
    for number, text in enumerate([*texts, "last"]):
        given = chain.pending()
        chain.entries.append(("checkpoint", 1, 7, 1.5, {"name": text}, None))
        if number % size == 0 or text == "last":
            found += parse_entries("o", given.entries)
            chain.confirm()
            assert chain.pending()[::2] == (given.pointer, found[-1].number + 1)
    found += parse_entries("o", chain.pending().entries)
    assert [each.number for each in found] == list(range(1, len(texts) + 3))
    assert verify_chain(found, pointer=chain.pending().pointer) == []


def test_causes_are_followed_to_where_they_lead_and_in_circles_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert list(walk_causes(first, lambda each: each.__cause__)) == [first, second]
    assert (is_unanswered(first), is_down(first)) == (False, False)
    second.__cause__ = TimeoutError()
    assert (is_unanswered(first), is_down(first)) == (True, True)
