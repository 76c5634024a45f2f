"""The elector's table and timings, without a database."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lease.terms import Refusal
from holdfast.lease.trust import margin
from holdfast.recipes.elector_terms import (
    ElectorAction,
    ElectorEvent,
    ElectorState,
    ElectorTerms,
    replica_holder,
    transition,
)

events = st.lists(st.sampled_from(ElectorEvent), max_size=30)
RUNNING = {ElectorState.LEADING, ElectorState.YIELDING, ElectorState.LEAVING}


@given(events)
def test_the_lease_is_released_only_when_the_work_has_ended(history: list[ElectorEvent]) -> None:
    """And the work is started once per term, and made to stop at most once, after it was started."""
    state, working, stopping = ElectorState.STANDBY, False, False
    for event in history:
        if event is ElectorEvent.WORK_ENDED and not working:
            continue  # there is none
        before = state
        state, action = transition(state, event)
        assert (state in RUNNING) == (
            (working and action is not ElectorAction.RELEASE) or action is ElectorAction.START
        )
        if action is ElectorAction.START:
            assert before is ElectorState.STANDBY
            assert event is ElectorEvent.GRANTED
            working, stopping = True, False
        elif action is ElectorAction.CANCEL:
            assert working
            assert not stopping
            stopping = True
        elif action is ElectorAction.LET_EXPIRE:
            assert stopping
            assert event is ElectorEvent.GRACE_OVER
        elif action is ElectorAction.RELEASE:
            assert event is ElectorEvent.WORK_ENDED
            working = False


@given(events)
def test_stop_is_for_good(history: list[ElectorEvent]) -> None:
    state = ElectorState.STANDBY
    for event in [*history, ElectorEvent.STOP]:
        state, _ = transition(state, event)
    assert state in (ElectorState.LEAVING, ElectorState.ENDED)
    for event in [*history, ElectorEvent.WORK_ENDED]:
        state, action = transition(state, event)
        assert action is not ElectorAction.START
        assert state in (ElectorState.LEAVING, ElectorState.ENDED)
    assert state is ElectorState.ENDED


@given(events)
def test_a_loss_leads_back_to_standing_by(history: list[ElectorEvent]) -> None:
    state = ElectorState.STANDBY
    for event in [each for each in history if each is not ElectorEvent.STOP]:
        state, _ = transition(state, event)
    if state is ElectorState.LEADING:
        state, action = transition(state, ElectorEvent.LOST)
        assert (state, action) == (ElectorState.YIELDING, ElectorAction.CANCEL)
        assert transition(state, ElectorEvent.WORK_ENDED) == (ElectorState.STANDBY, ElectorAction.RELEASE)


def terms(**changed: Any) -> ElectorTerms:
    usual: dict[str, Any] = {
        "ttl": 30, "renew_every": 10, "retry_every": 5, "grace": None, "holder": None, "failover": "ttl",
        "overrun": "wait",
    }  # fmt: skip
    return ElectorTerms.check(changed.pop("name", "reconciler"), **usual | changed)


@given(st.floats(0.05, 86400), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_timings_that_are_taken_leave_room_for_a_renewal_and_for_the_work_to_stop(
    ttl: float, renew: float, retry: float, grace: float
) -> None:
    try:
        checked = terms(ttl=ttl, renew_every=ttl * renew, retry_every=ttl * retry, grace=ttl * grace)
    except ValueError:
        return
    assert checked.renew_every + checked.grace < checked.ttl - margin(checked.ttl)
    assert checked.renew_every <= checked.ttl * 2 / 3
    assert checked.retry_every <= checked.ttl


@given(
    st.floats(0.2, 86400), st.floats(0.1, 1.0), st.floats(0.0, 1.0), st.booleans(),
    st.lists(st.tuples(st.sampled_from(["held", "busy", "silent"]), st.floats(0.0, 1.0)), min_size=1, max_size=50),
)  # fmt: skip
def test_a_crashed_leader_is_succeeded_after_ttl_and_retry_at_the_most(
    ttl: float, retry: float, asked: float, local: bool, answers: list[tuple[str, float]]
) -> None:
    """The leader renewed and crashed. Whenever a standby has asked before, and whatever the answers are until the lease
    ends (held, being changed, none at all), it asks again soon enough after the end; and right after the end, unless
    the last call was not answered."""
    checked = terms(ttl=ttl, renew_every=ttl / 4, retry_every=ttl * retry, grace=0.0)
    at, number, answer = -checked.retry_every * asked, 0, ""
    while at < ttl and number < 5000:
        answer, chance = answers[number % len(answers)]
        number += 1
        remaining = None if answer == "busy" else ttl - max(at, 0.0)
        pause = checked.retry_delay(
            None if answer == "silent" else Refusal("a", "b", remaining), local=local, chance=chance
        )
        assert 0 < pause <= max(checked.retry_every, 0.02)
        at += pause
    assert at <= ttl + checked.retry_every
    if answer != "silent":
        assert at <= ttl + 0.02


def test_where_the_kernel_knows_a_standby_looks_often_but_not_when_nobody_answers() -> None:
    checked, refusal = terms(), Refusal("a", "b", 80_000.0)
    assert checked.retry_delay(refusal, local=True, chance=1.0) == 0.005
    assert (
        checked.retry_delay(refusal, local=False, chance=1.0)
        == checked.retry_delay(None, local=True, chance=1.0)
        == 5.0
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ttl": 10}, "renew_every must leave room"),
        ({"renew_every": 30}, "renew_every must leave room"),
        ({"renew_every": 0}, "renew_every must be between"),
        ({"retry_every": 31}, "retry_every must be at most ttl=30"),
        ({"retry_every": 0}, "retry_every must be between"),
        ({"retry_every": math.nan}, "retry_every must be between"),
        ({"grace": 19}, "ttl=30 is too short: renew_every=10 and grace=19"),
        ({"grace": -1}, "grace must be between"),
        ({"ttl": 0.01}, "ttl must be between"),
        ({"name": ""}, "name must have"),
        ({"holder": "x" * 181}, "holder must have 1 to 180"),
        ({"failover": "never"}, "failover must be"),
        ({"overrun": "kill"}, "overrun must be 'wait' or 'exit'"),
    ],
)
def test_timings_that_cannot_hold_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        terms(**changed)


def test_a_replica_is_named_by_its_environment() -> None:
    def holder(environment: dict[str, str], given: str | None = None) -> str:
        return replica_holder(given, environment, "c", 4711, "5f0c3a1b")

    assert holder({"HOLDFAST_REPLICA_ID": "a", "HOSTNAME": "b"}) == "a:4711:5f0c3a"
    assert holder({"HOSTNAME": "b"}) == "b:4711:5f0c3a"
    assert holder({"HOSTNAME": ""}) == "c:4711:5f0c3a"
    assert holder({"HOSTNAME": "x\n" * 200}) == f"{('x?' * 200)[:170]}:4711:5f0c3a"
    assert holder({"HOSTNAME": "b"}, "me") == "me:5f0c3a"
