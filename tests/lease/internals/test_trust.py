"""Trust: how long a holder may believe in its lease, whatever the database answers and however slowly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import LeaseLost, OwnershipUnknown
from holdfast.lease.loss import SILENCE, loss_by_expiry, loss_by_silence
from holdfast.lease.trust import BeatAnswer, BeatStep, Trust, after, backoff, budget, margin
from holdfast.names import MAX_TTL, MIN_TTL

ttls = st.floats(MIN_TTL, MAX_TTL)
moments = st.floats(0, 10**7)
spans = st.floats(0, 2 * MAX_TTL)
answers = st.sampled_from(BeatAnswer)
conversations = st.lists(st.tuples(answers, spans, spans), max_size=30)


@given(ttls, moments, spans)
def test_trust_is_counted_from_before_the_question_and_ends_before_the_ttl(ttl: float, asked: float, t: float) -> None:
    trust = Trust.granted(ttl, asked)
    assert trust.until < asked + ttl
    assert trust.left(asked + t) <= max(0.0, ttl - t) + 1e-6
    assert trust.left(asked + ttl) == 0


@given(ttls, moments, st.floats(-MAX_TTL, 2 * MAX_TTL))
def test_less_left_in_the_database_is_less_trust_and_more_is_not_more(ttl: float, asked: float, left: float) -> None:
    trust = Trust.granted(ttl, asked, left)
    assert trust.until <= Trust.granted(ttl, asked).until
    assert trust.until <= asked + left - margin(ttl) + 1e-6
    if left <= 0:
        assert trust.left(asked) == 0


@given(ttls)
def test_margin_leaves_most_of_the_ttl(ttl: float) -> None:
    assert 0 < margin(ttl) < ttl / 9.99
    assert margin(ttl) <= 1


@given(ttls, moments, conversations)
def test_only_a_renewal_extends_trust(
    ttl: float, start: float, conversation: list[tuple[BeatAnswer, float, float]]
) -> None:
    now, trust = start, Trust.granted(ttl, start)
    for answer, pause, wait in conversation:
        asked_at, now = now + pause, now + pause + wait
        step, extended = after(answer, trust, asked_at, now)
        if answer is not BeatAnswer.RENEWED:
            assert extended == trust
        assert extended.until in (trust.until, Trust.granted(ttl, asked_at).until)
        if step in (BeatStep.LOST, BeatStep.UNKNOWN):
            assert extended == trust
            return
        trust = extended


@given(ttls, moments, answers, spans, spans)
def test_once_untrusted_never_trusted_again(
    ttl: float, start: float, answer: BeatAnswer, late: float, wait: float
) -> None:
    """Somebody may have looked in between and stopped: a renewal that is heard of later must not undo that."""
    trust = Trust.granted(ttl, start)
    now = trust.until + late
    step, extended = after(answer, trust, now - wait, now)
    assert extended == trust
    assert extended.left(now) == 0
    assert step is (BeatStep.LOST if answer is BeatAnswer.LOST else BeatStep.UNKNOWN)


@given(ttls, moments, st.floats(-MAX_TTL, 0))
def test_a_renewal_that_took_its_time_does_not_shorten_the_trust_of_a_later_one(
    ttl: float, asked: float, before: float
) -> None:
    """By hand, say, through a connection that hung, while heartbeats went on."""
    trust = Trust.granted(ttl, asked)
    assert after(BeatAnswer.RENEWED, trust, asked + before, asked) == (BeatStep.KEEP, trust)


@given(ttls, moments, spans)
def test_a_renewal_never_shortens_trust_when_asked_later(ttl: float, start: float, pause: float) -> None:
    trust = Trust.granted(ttl, start)
    _, extended = after(BeatAnswer.RENEWED, trust, start + pause, start + pause)
    assert extended.until >= trust.until


@given(ttls, moments)
def test_every_answer_in_time_has_its_step(ttl: float, start: float) -> None:
    trust = Trust.granted(ttl, start)
    steps = {answer: after(answer, trust, start, start)[0] for answer in BeatAnswer}
    assert steps == {
        BeatAnswer.RENEWED: BeatStep.KEEP,
        BeatAnswer.LOST: BeatStep.LOST,
        BeatAnswer.UNKNOWN: BeatStep.RETRY,
    }


@given(ttls)
def test_attempts_that_all_time_out_leave_room_for_a_third(ttl: float) -> None:
    """From the first beat on, due after a third of the TTL. The shortest TTLs have fewer: an attempt takes 20 ms."""
    left, attempts = ttl - margin(ttl) - ttl / 3, 0
    while left > 0 and attempts < 3:
        left -= budget(left)
        attempts += 1
        if left > 0:
            left -= backoff(attempts, left)
    assert attempts == 3 or ttl < 0.12


@given(st.floats(0, MAX_TTL), st.integers(1, 10**6))
def test_pauses_and_attempts_are_bounded_by_the_trust_left(left: float, failures: int) -> None:
    assert 0.02 <= budget(left) <= max(0.02, left / 3)
    assert budget(left) <= 5
    assert 0 <= backoff(failures, left) <= min(1.0, left / 4)
    assert backoff(failures, left) <= backoff(failures + 1, left)


@given(ttls, spans)
def test_a_keeper_that_is_late_by_more_than_a_margin_was_paused(ttl: float, late: float) -> None:
    trust = Trust.granted(ttl, 0.0)
    error, expired = loss_by_silence(trust, late, trust.over + late), loss_by_expiry(trust, late)
    paused = f"it expired while this process was paused for {late:.1f} s or more"
    assert (str(error) == paused) == (str(expired) == paused) == (late > margin(ttl))
    assert (type(error), type(expired)) == (OwnershipUnknown, LeaseLost)
    assert str(loss_by_silence(trust, late, trust.until)) in (SILENCE, paused.replace("it", "our trust in it", 1))
