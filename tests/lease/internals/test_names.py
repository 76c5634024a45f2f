"""What a lease is, as values: arguments are checked, refusals say who and until when."""

from __future__ import annotations

import math
import unicodedata
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import AcquireTimeout, NotAcquired
from holdfast.lease.records import LeaseRecord
from holdfast.lease.terms import LeaseTerms, Refusal
from holdfast.names import MAX_TTL, MIN_TTL, check_name, check_timeout

AT = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


def terms(name: Any = "x", **changes: Any) -> LeaseTerms:
    given: dict[str, Any] = {
        "ttl": 30.0,
        "holder": None,
        "at_least": 0.0,
        "auto_renew": True,
        "renew_every": None,
        "on_lost": "flag",
        "failover": "ttl",
    }
    return LeaseTerms.check(name, **given | changes)


@given(st.text(max_size=220))
def test_a_name_is_taken_exactly_when_it_is_short_and_printable(name: str) -> None:
    good = 1 <= len(name) <= 200 and not any(unicodedata.category(each) in ("Cc", "Cs") for each in name)
    if good:
        assert check_name(name) == name
    else:
        with pytest.raises(ValueError, match="name must"):
            check_name(name)


@given(st.floats() | st.integers(-(10**6), 10**6))
def test_a_ttl_is_taken_exactly_when_it_is_in_range(ttl: float) -> None:
    if MIN_TTL <= ttl <= MAX_TTL:
        assert terms(ttl=ttl).ttl == ttl
        assert terms(ttl=ttl).renew_every == pytest.approx(ttl / 3)
    else:
        with pytest.raises(ValueError, match=r"ttl must be between 0\.05 and 86400 seconds"):
            terms(ttl=ttl)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": ""}, "1 to 200 characters, not 0"),
        ({"name": "x" * 300}, "1 to 200 characters, not 300"),
        ({"name": "a\nb"}, "control characters"),
        ({"name": "a\x00b"}, "control characters"),
        ({"holder": ""}, "holder must have"),
        ({"holder": "a\tb"}, "holder must not contain"),
        ({"at_least": -1}, "at_least must be between"),
        ({"on_lost": "panic"}, "'flag', 'cancel', 'exit'"),
        ({"failover": "never"}, "'ttl' or 'session'"),
        ({"auto_renew": False, "on_lost": "exit"}, "needs auto_renew=True"),
        ({"auto_renew": False, "failover": "session"}, "needs auto_renew=True"),
        ({"renew_every": 29.0}, "two thirds"),
        ({"renew_every": 0}, "renew_every must be between"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        terms(**change)


@pytest.mark.parametrize("change", [{"name": 7}, {"name": None}, {"ttl": "30"}, {"ttl": True}, {"holder": b"x"}])
def test_a_wrong_type_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be a"):
        terms(**change)


def test_a_timeout_of_none_is_for_ever() -> None:
    assert check_timeout(None) == math.inf
    assert check_timeout(math.inf) == math.inf
    assert check_timeout(0) == 0
    for wrong in (-1, math.nan):
        with pytest.raises(ValueError, match="timeout"):
            check_timeout(wrong)


def test_a_refusal_says_who_and_until_when() -> None:
    error = Refusal("nightly", "host:1", 12.34).as_error(None, AT)
    assert type(error) is NotAcquired
    assert str(error) == "lease 'nightly' is held by host:1 until 2026-11-15 12:00:12 UTC unless renewed (12.3 s left)"
    assert (error.name, error.holder, error.expires_at) == ("nightly", "host:1", AT + timedelta(seconds=12.34))


def test_a_refusal_after_waiting_is_a_timeout_too() -> None:
    error = Refusal("nightly", None, None).as_error(1.5, AT)
    assert isinstance(error, AcquireTimeout)
    assert isinstance(error, TimeoutError)
    assert str(error) == "lease 'nightly' is held by another process that is changing it now; waited 1.5 s"
    assert error.expires_at is None


def test_a_record_has_aware_times_and_no_token() -> None:
    row = {"name": "x", "kind": "plain", "holder": "h", "fence": 1, "acquired_at": 0.5, "expires_at": 60.0}
    record = LeaseRecord._of(row | {"host": None, "pid": 3, "info": '{"a": 1}', "remaining": 1.0, "waiting": 0})
    assert record.acquired_at == datetime(1970, 1, 1, 0, 0, 0, 500000, tzinfo=UTC)
    assert record.info == {"a": 1}
    assert not hasattr(record, "token")
