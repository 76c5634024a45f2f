"""What to do about one record, without a database or a driver."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.recipes.reconciler_rules import ReconcilerRules
from holdfast.recipes.reconciler_terms import (
    Decision,
    Keep,
    ReconcilerTerms,
    Remove,
    Write,
    count_failures,
    retry_delay,
)
from holdfast.recipes.reconciler_terms import decide as decide_by
from holdfast.reconciler import Backend, BackendCondition, Phase

conditions = st.builds(
    BackendCondition, st.sampled_from(["Ready", "Completed", "Scheduled"]), st.sampled_from([True, False, None]),
    st.sampled_from(["", "Exited"]), st.just(""), st.booleans(),
)  # fmt: skip
backends = st.builds(Backend, st.just("b-1"), st.lists(conditions, max_size=3).map(tuple), st.booleans())
phases = st.sampled_from(Phase)
GRACE = 300.0
RULES = ReconcilerRules()


def decide(value: Any, backend: Backend | None, **terms: Any) -> Decision:
    return decide_by(value, backend, RULES, **terms)


def phase_in(value: Any) -> Phase:
    return Phase(RULES.status(value).get("phase", "Provisioning"))


def payload(phase: Phase | None, **status: Any) -> dict[str, Any]:
    return {"spec": {"argv": ["sleep"]}} | ({} if phase is None else {"status": {"phase": phase.value} | status})


def ready(status: bool | None, *, terminal: bool = False, deleting: bool = False) -> Backend:
    return Backend("b-1", (BackendCondition("Ready", status, "Because", terminal=terminal),), deleting, {"pid": 7})


def completed(status: bool | None) -> Backend:
    ended = ready(False, terminal=True).conditions
    return Backend("b-1", (*ended, BackendCondition("Completed", status)))


@pytest.mark.parametrize(
    ("before", "backend", "session", "after"),
    [
        (Phase.PROVISIONING, Backend("b-1"), True, Phase.PROVISIONING),
        (Phase.PROVISIONING, ready(None), True, Phase.PROVISIONING),
        (Phase.PROVISIONING, ready(True), True, Phase.READY),
        (Phase.PROVISIONING, ready(True), False, Phase.PROVISIONING),
        (Phase.PROVISIONING, ready(False), True, Phase.PROVISIONING),
        (Phase.PROVISIONING, ready(False, terminal=True), True, Phase.ERROR),
        (Phase.READY, ready(False, terminal=True), True, Phase.ERROR),
        (Phase.READY, completed(True), True, Phase.COMPLETED),
        (Phase.PROVISIONING, completed(True), False, Phase.COMPLETED),
        (Phase.PROVISIONING, completed(None), True, Phase.ERROR),
        (Phase.COMPLETED, ready(True), True, Phase.READY),
        (Phase.READY, ready(True), False, Phase.PROVISIONING),
        (Phase.ERROR, ready(True), True, Phase.READY),
        (Phase.READY, ready(True, deleting=True), True, Phase.DELETING),
        (Phase.DELETING, ready(True), True, Phase.DELETING),
        (Phase.DELETED, ready(True), True, Phase.READY),
    ],
)
def test_the_phase_follows_from_the_conditions_and_the_session(
    before: Phase, backend: Backend, session: bool, after: Phase
) -> None:
    assert RULES.phase(backend, before=before, session=session) is after


@given(backends, phases, st.booleans())
def test_what_was_written_is_kept_the_next_time(backend: Backend, before: Phase, session: bool) -> None:
    """So a sweep over records that are true writes nothing; and the rest of the payload is the user's."""
    decision = decide(payload(before), backend, session=session, at=1000.0, grace=GRACE)
    if isinstance(decision, Write):
        assert decision.value["spec"] == payload(None)["spec"]
        assert decision.value["status"]["phase"] == decision.phase
        assert len(decision.value["status"]["conditions"]) == len(backend.conditions)
        assert decide(decision.value, backend, session=session, at=2000.0, grace=GRACE) == Keep()
    else:
        assert decision == Keep()


def test_conditions_and_details_are_stored() -> None:
    decision = decide(payload(None), ready(True), session=True, at=0.0, grace=GRACE)
    assert isinstance(decision, Write)
    assert decision.value["status"] == {
        "phase": "Ready",
        "conditions": [{"type": "Ready", "status": True, "reason": "Because", "message": "", "terminal": False}],
        "details": {"pid": 7},
    }


@given(st.lists(st.tuples(st.floats(0, 400), st.one_of(st.none(), backends)), max_size=30), phases)
def test_an_orphan_is_deleted_only_when_it_was_missing_for_the_whole_grace(
    looks: list[tuple[float, Backend | None]], first: Phase
) -> None:
    """Whatever comes and goes: the backend was missing at every look of the last grace, and at two of them at least.
    And a record is removed by a later look than the one that called it Deleted."""
    record, at, was = payload(first), 0.0, first
    missing: list[float] = []
    for step, backend in looks:
        at += step
        missing = [*missing, at] if backend is None else []
        decision = decide(record, backend, session=True, at=at, grace=GRACE)
        if isinstance(decision, Remove):
            assert was is Phase.DELETED
            assert backend is None
            return
        if isinstance(decision, Write):
            record = decision.value
            if decision.phase == Phase.DELETED:
                assert was is Phase.DELETING or (len(missing) >= 2 and at - missing[0] >= GRACE)
        was = phase_in(record)
        if backend is not None:
            assert "missing_since" not in record["status"]


def test_the_steps_of_an_orphan() -> None:
    record: Any = payload(Phase.READY, conditions=[])
    seen = []
    for at in (1000.0, 1299.9, 1300.0, 1301.0):
        decision = decide(record, None, session=True, at=at, grace=GRACE)
        if isinstance(decision, Write):
            record = decision.value
        seen.append((type(decision).__name__, phase_in(record).value))
    assert seen == [("Write", "Ready"), ("Keep", "Ready"), ("Write", "Deleted"), ("Remove", "Deleted")]
    assert record["status"]["missing_since"] == 1000.0


def test_not_knowing_the_time_never_cuts_a_grace_short() -> None:
    """It is between ``at`` and ``slack`` later: missing since the later, over when the earlier says so."""
    marked = decide(payload(Phase.READY), None, session=True, at=1000.0, grace=GRACE, slack=7.0)
    assert isinstance(marked, Write)
    assert marked.value["status"]["missing_since"] == 1007.0
    for at, kind in ((1000.0 + GRACE, Keep), (1006.9 + GRACE, Keep), (1007.0 + GRACE, Write)):
        assert isinstance(decide(marked.value, None, session=True, at=at, grace=GRACE, slack=9.0), kind)


def test_a_record_that_was_to_be_deleted_waits_for_no_grace() -> None:
    decision = decide(payload(Phase.DELETING), None, session=True, at=5.0, grace=GRACE)
    assert isinstance(decision, Write)
    assert decision.phase == Phase.DELETED


def test_a_clock_that_was_set_back_begins_the_grace_anew() -> None:
    decision = decide(payload(Phase.READY, missing_since=5000.0), None, session=True, at=1000.0, grace=GRACE)
    assert isinstance(decision, Write)
    assert (decision.phase, decision.value["status"]["missing_since"]) == (Phase.READY, 1000.0)


@pytest.mark.parametrize("bad", [b"raw", [1], "text", {"status": 3}, {"status": {"phase": "Unheard"}}])
def test_a_payload_that_is_not_a_record_is_an_error(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"payload|Unheard"):
        decide(bad, None, session=True, at=0.0, grace=GRACE)


def test_a_rule_that_returns_no_phase_is_named() -> None:
    class Wrong(ReconcilerRules):
        def phase(self, backend: Backend, *, before: str, session: bool) -> Any:
            return None

    with pytest.raises(TypeError, match="phase of a record must be a str, not None"):
        decide_by({}, ready(True), Wrong(), session=True, at=0.0, grace=GRACE)


@pytest.mark.parametrize("what", ["codec", "rules"])
def test_an_object_without_the_methods_is_named(what: str) -> None:
    class Half:
        def decode(self, payload: Any) -> Any: ...
        async def encode(self, value: Any) -> Any: ...

    for wrong in (object(), Half(), ReconcilerRules):
        terms: dict[str, Any] = {"sweep_every": 60.0, "grace": 300.0, "concurrency": 32, what: wrong}
        with pytest.raises(TypeError, match=rf"^{what} must be an object with the plain methods .*has no \w+\(\)"):
            ReconcilerTerms.check("box", **terms)


@given(st.integers(1, 10_000), st.floats(0.01, 86_400))
def test_a_failing_driver_is_left_alone_for_longer_and_longer_but_not_for_ever(failures: int, limit: float) -> None:
    assert 0 < retry_delay(failures, limit) <= min(60.0, max(limit, 0.05))
    assert retry_delay(failures, limit) <= retry_delay(failures + 1, limit)


def test_a_watch_has_got_better_when_it_lasted_longer_than_it_would_be_left_alone() -> None:
    assert [count_failures(failures, 3.0, 60.0) for failures in (0, 1, 2, 6)] == [1, 1, 3, 7]
    assert count_failures(99, 61.0, 60.0) == 1


@pytest.mark.parametrize(
    "wrong", [{"sweep_every": 0}, {"grace": -1}, {"concurrency": 0}, {"concurrency": 1001}, {"concurrency": True}]
)
def test_wrong_terms_are_named(wrong: dict[str, Any]) -> None:
    terms: dict[str, Any] = {"sweep_every": 60.0, "grace": 300.0, "concurrency": 32} | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ReconcilerTerms.check("box", **terms)
