"""What the pool decides: one case after the other, and against a model of the server whatever happens in any order."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from holdfast import lock
from holdfast.errors import Refused
from holdfast.lock.pool import (
    MAX_LOSSES,
    PER_SESSION,
    TURNS,
    WAITED_LONG,
    Action,
    Close,
    LockRequest,
    LockSession,
    Lose,
    Note,
    Open,
    Pool,
    Send,
    Wait,
)
from tests.interrupts import Interrupt
from tests.lock.internals.pool_world import World

EXAMPLES = int(os.environ.get("HOLDFAST_POOL_EXAMPLES", "50"))
ERROR = ConnectionError("the connection was lost")

TestPool = World.TestCase
TestPool.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)


def wish(number: int, owner: object = None, *, waits: bool = True, shared: bool = False) -> LockRequest:
    """A request whose caller waits."""
    request = LockRequest((b"%d" % number,), str(number), waits, shared)
    request.owner = object() if owner is None else owner
    request.waker = True
    return request


def ask(pool: Pool, *requests: LockRequest) -> list[LockSession | None]:
    return [pool.acquire(request) for request in requests]


def done(pool: Pool) -> list[Action]:
    """What is to be done since the last time."""
    actions = list(pool.actions)
    pool.actions.clear()
    return actions


def woken(pool: Pool) -> list[LockRequest]:
    requests = list(pool.wakes)
    pool.wakes.clear()
    return requests


def states(*requests: LockRequest) -> list[str]:
    return [request.state for request in requests]


def verbs(session: LockSession) -> list[str]:
    return [op.verb for op in session.under_way]


def keys(session: LockSession) -> list[int]:
    return [int(op.entry.key[0]) for op in session.under_way if op.entry is not None]


def answer(pool: Pool, session: LockSession, *answers: object) -> list[Action]:
    give(pool, session, *answers)
    return done(pool)


def give(pool: Pool, session: LockSession, *answers: object) -> None:
    if session.sender is None:
        pool.answered(session, answers, "test")
    else:
        pool.sender_answered(session, bool(*answers), "test")


def opened(pool: Pool, *, room: int | None = None) -> LockSession:
    """The session that is being opened; a hold session has asked for room."""
    [opening] = done(pool)
    assert isinstance(opening, Open)
    pool.opened(opening.session, "test")
    if not opening.session.waits:
        assert done(pool) == [Send(opening.session)]
        assert verbs(opening.session) == ["room"]
        pool.answered(opening.session, [room], "test")
    return opening.session


def ready(
    *, kept: int = 15, extra: int = 10, per_session: int = PER_SESSION, turns: int = 2
) -> tuple[Pool, LockSession]:
    """With one hold session, in which nothing is locked."""
    pool = Pool(kept=kept, extra=extra, per_session=per_session, turns=turns)
    first = wish(9)
    ask(pool, first)
    session = opened(pool)
    assert done(pool) == [Send(session)]
    answer(pool, session, True)
    assert pool.release(first, "test") is session
    answer(pool, session, True)
    assert first.state == "released"
    assert woken(pool) == [first, first]
    return pool, session


def contended(pool: Pool, session: LockSession, *requests: LockRequest) -> LockSession:
    """The wait session of requests for one key that another client holds."""
    ask(pool, *requests)
    pool.sender_answered(session, False, "test")
    waiting = opened(pool)
    assert waiting.waits
    return waiting


def held(pool: Pool, session: LockSession, *requests: LockRequest) -> None:
    for request in requests:
        assert pool.acquire(request) is session
        answer(pool, session, True)
        assert request.state == "held"
    woken(pool)


def test_the_caller_sends_where_the_session_is_free() -> None:
    pool, session = ready()
    request = wish(1)
    assert pool.acquire(request) is session
    assert (verbs(session), session.sender, done(pool)) == (["try"], request, [])
    answer(pool, session, True)
    assert (request.state, request.entry and request.entry.session) == ("held", session)
    assert pool.release(request, "test") is session
    assert (verbs(session), session.sender, done(pool)) == (["unlock"], request, [])
    answer(pool, session, True)
    assert (request.state, pool.entries, session.held) == ("released", {}, {})


def test_a_caller_that_does_not_wait_is_not_woken() -> None:
    pool, session = ready()
    request = wish(1)
    request.waker = None
    held(pool, session, request)
    assert request.state == "held"
    assert woken(pool) == []


def test_what_comes_together_while_a_statement_is_under_way_is_sent_in_one() -> None:
    pool, session = ready()
    requests = [wish(number) for number in range(6)]
    assert ask(pool, *requests) == [session, *[None] * 5]
    assert keys(session) == [0]
    assert answer(pool, session, True) == [Send(session)]
    assert woken(pool) == requests[:1]
    assert keys(session) == [1, 2, 3, 4, 5]
    pool.answered(session, [True, False, True, True, True], "test")
    assert states(*requests) == ["held", "held", "queued", "held", "held", "held"]
    assert woken(pool) == [requests[1], *requests[3:]]


def test_requests_of_one_client_are_served_in_order_and_a_bounded_number_of_times_in_a_row() -> None:
    pool, session = ready()
    requests = [wish(1) for _ in range(5)]
    ask(pool, *requests)
    answer(pool, session, True)
    assert states(*requests) == ["held", *["queued"] * 4]
    woken(pool)
    assert pool.release(requests[0], "test") is pool.release(requests[1], "test") is None
    assert states(*requests) == ["released", "released", "held", "queued", "queued"]
    assert woken(pool) == requests[1:3]
    assert pool.release(requests[2], "test") is session
    assert verbs(session) == ["unlock"], "twice in a row was enough: other clients may want it"
    assert answer(pool, session, True) == [Send(session)]
    answer(pool, session, True)
    assert states(*requests) == [*["released"] * 3, "held", "queued"]
    assert pool.release(requests[3], "test") is None
    assert requests[4].state == "held", "it is counted anew"


def test_the_defaults() -> None:
    pool = Pool()
    assert (pool.kept, pool.limit, pool.per_session, pool.turns) == (15, 25, 300, 50) == (15, 25, PER_SESSION, TURNS)


def test_a_lock_that_is_being_unlocked_is_handed_to_nobody() -> None:
    """Not even when it is released a second time, with a request in the queue."""
    pool, session = ready()
    first, second = wish(1), wish(1)
    held(pool, session, first)
    pool.release(first, "test")
    ask(pool, second)
    assert pool.release(first, "test") is None
    pool.give_up(first, "test")
    assert states(first, second) == ["held", "queued"]
    answer(pool, session, True)
    answer(pool, session, True)
    assert states(first, second) == ["released", "held"]


def test_what_was_tried_in_a_statement_that_failed_is_unlocked() -> None:
    pool, session = ready()
    request = wish(1)
    ask(pool, request)
    pool.refused(session, ERROR, "test")
    assert done(pool) == [Send(session)]
    assert (verbs(session), keys(session)) == (["unlock"], [1])
    assert (request.state, request.error, woken(pool)) == ("failed", ERROR, [request])
    answer(pool, session, True)
    assert pool.entries == {}


def test_beyond_the_limit_of_sessions_contended_keys_are_parked() -> None:
    pool, session = ready(kept=1, extra=1)
    requests = [wish(number) for number in range(3)]
    ask(pool, *requests)
    [waiting, sends] = answer(pool, session, False)
    assert isinstance(waiting, Open)
    assert waiting.session.waits
    assert sends == Send(session)
    assert answer(pool, session, False, False) == []
    pool.opened(waiting.session, "test")
    assert done(pool) == [Wait(waiting.session)]
    pool.waited(waiting.session, None, "test")
    assert states(*requests) == ["held", "queued", "queued"]
    assert pool.release(requests[0], "test") is None
    assert done(pool) == [Send(waiting.session)]
    assert answer(pool, waiting.session, True) == [Wait(waiting.session)], "for the next key"
    assert waiting.session.entry is requests[1].entry


def test_one_session_is_kept_for_keys_that_are_free() -> None:
    pool, session = ready(kept=1, extra=1)
    contended(pool, session, wish(1))
    parked = wish(2)
    ask(pool, parked)
    answer(pool, session, False)
    pool.lost(session, ERROR, "test")
    assert done(pool) == [Close(session)], "and no session to wait in"
    ask(pool, wish(3))
    assert (len(pool.holds), len(pool.waits), parked.state) == (1, 1, "queued")


def test_one_session_is_kept_where_the_server_has_no_queue() -> None:
    pool = Pool(kept=1, extra=1, server_queues=False)
    first, parked, tries, waits = wish(1), wish(2), wish(1, waits=False), wish(1)
    ask(pool, first)
    hold = opened(pool)
    done(pool)
    give(pool, hold, False)
    waiting = opened(pool)
    pool.waited(waiting, None, "test")
    ask(pool, parked)
    answer(pool, hold, False)
    pool.lost(hold, ERROR, "test")
    pool.release(first, "test")
    ask(pool, tries, waits)
    done(pool)
    assert answer(pool, waiting, True) == [Wait(waiting)], "for the parked key, and no session is opened"
    assert waiting.entry is parked.entry
    assert states(first, parked, tries, waits) == ["released", "queued", "busy", "queued"]


def test_a_session_that_is_lost_makes_room_for_a_parked_key() -> None:
    pool, session = ready(kept=1, extra=1)
    contended(pool, session, wish(1))
    parked = wish(2)
    ask(pool, parked)
    answer(pool, session, False)
    assert parked.entry is not None
    assert parked.entry.stage == "parked"
    [waiting] = pool.waits
    pool.lost(waiting, ERROR, "test")
    [closing, sends, opening] = done(pool)
    assert (closing, sends) == (Close(waiting), Send(session))
    assert isinstance(opening, Open)
    assert opening.session.entry is parked.entry


def test_at_the_limit_a_session_is_opened_when_the_server_has_closed_another() -> None:
    pool, session = ready(kept=1, extra=1)
    holder, waiter = wish(1), wish(2)
    first = contended(pool, session, holder)
    pool.waited(first, None, "test")
    pool.release(holder, "test")
    done(pool)
    assert answer(pool, first, True) == [Close(first)]
    ask(pool, waiter)
    assert answer(pool, session, False) == [], "the server may still have the first"
    pool.closed(first, "test")
    [opening] = done(pool)
    assert isinstance(opening, Open)
    assert opening.session.entry is waiter.entry


def test_a_request_that_was_given_up_after_an_interrupt_is_not_handed_on() -> None:
    """Its caller may be on the way to release it."""
    pool, session = ready()
    holder, waiter = wish(1), wish(1)
    held(pool, session, holder)
    ask(pool, waiter)
    holder.state, waiter.state = "lost", "failed"
    assert pool.release(holder, "test") is None
    assert (states(holder, waiter), done(pool), woken(pool)) == (["lost", "failed"], [], [])


def test_a_wait_session_that_is_opened_for_nobody_serves_the_next() -> None:
    """Its request gave up meanwhile."""
    pool, session = ready(kept=1, extra=1)
    first, parked = wish(1), wish(2)
    ask(pool, first, parked)
    give(pool, session, False)
    answer_later = done(pool)
    give(pool, session, False)
    pool.give_up(first, "test")
    [opening] = [action for action in answer_later if isinstance(action, Open)]
    pool.opened(opening.session, "test")
    assert done(pool) == [Wait(opening.session)]
    assert opening.session.entry is parked.entry


def test_a_request_that_does_not_wait_is_not_put_into_the_servers_queue() -> None:
    """It came while a wait session unlocked the key."""
    pool, session = ready()
    first, tries = wish(1), wish(1, waits=False)
    waiting = contended(pool, session, first)
    done(pool)
    pool.waited(waiting, None, "test")
    pool.release(first, "test")
    ask(pool, tries)
    done(pool)
    assert answer(pool, waiting, True) == [Send(session)]
    assert verbs(session) == ["try"]
    answer(pool, session, False)
    assert tries.state == "busy"
    assert woken(pool)[-1] is tries


def test_a_lost_session_takes_those_that_it_was_to_cancel_with_it() -> None:
    """Whether the cancel arrived is unknown, and a late one would hit the next statement."""
    pool, session = ready()
    request = wish(1)
    waiting = contended(pool, session, request)
    pool.give_up(request, "test")
    done(pool)
    pool.lost(session, ERROR, "test")
    assert done(pool) == [Close(session), Close(waiting)]
    assert (pool.sessions, pool.entries) == ([], {})


def test_what_nobody_wants_any_more_is_unlocked_when_it_is_granted() -> None:
    pool, session = ready()
    request = wish(1)
    ask(pool, request)
    pool.give_up(request, "test")
    assert answer(pool, session, True) == [Send(session)]
    assert (verbs(session), request.state) == (["unlock"], "gone")
    answer(pool, session, True)
    assert pool.entries == {}


def test_a_session_holds_a_bounded_number_of_locks() -> None:
    pool, session = ready(kept=2, extra=0, per_session=2)
    held(pool, session, wish(1), wish(2))
    ask(pool, wish(3))
    second = opened(pool)
    assert done(pool) == [Send(second)]
    answer(pool, second, True)
    held(pool, second, wish(4))
    fifth = wish(5)
    assert pool.acquire(fifth) is session, "there may be no third"


def test_beyond_the_cap_a_request_is_refused_and_nothing_is_sent() -> None:
    pool, session = ready()
    pool.cap = 1
    pool._set_due(1)
    first, second = wish(1), wish(2)
    held(pool, session, first)
    assert ask(pool, second) == [None]
    assert (second.state, done(pool)) == ("full", [])
    pool.sweep("test")
    assert done(pool) == [Send(session)]
    assert verbs(session) == ["room"], "there may be room by now"
    answer(pool, session, 10)
    again = wish(2)
    ask(pool, again)
    assert verbs(session) == ["room"], "ten are few, and other clients were told of the same ten"
    answer(pool, session, 10)
    answer(pool, session, True)
    assert again.state == "held"


def test_a_cancel_that_arrived_before_its_wait_is_sent_again() -> None:
    """The server forgets a cancel of a session that runs no statement."""
    pool, hold = ready()
    request = wish(1)
    waiting = contended(pool, hold, request)
    assert done(pool) == [Wait(waiting)]
    pool.give_up(request, "test")
    assert request.state == "gone"
    assert done(pool) == [Send(hold)]
    assert answer(pool, hold, True) == [], "the wait has not ended"
    pool.sweep("test")
    assert done(pool) == [Send(hold)]
    assert [(op.verb, op.target) for op in hold.flight] == [("cancel", waiting)]
    pool.sweep("test")
    assert done(pool) == [], "one at a time"
    pool.waited(waiting, ERROR, "test")
    assert answer(pool, hold, True) == [Send(waiting)]
    assert verbs(waiting) == ["unlock"]
    answer(pool, waiting, False)
    assert pool.entries == {}


def test_a_wait_that_ends_with_an_error_is_unlocked_in_any_case() -> None:
    """Another session cancels it while the server grants it."""
    pool, session = ready()
    request = wish(1)
    waiting = contended(pool, session, request)
    done(pool)
    pool.waited(waiting, ERROR, "test")
    assert (request.state, request.error, woken(pool)) == ("failed", ERROR, [request])
    assert done(pool) == [Send(waiting)]
    assert verbs(waiting) == ["unlock"]


def test_a_wait_that_timed_out_on_the_server_is_unlocked_and_begun_anew() -> None:
    pool, session = ready()
    request = wish(1)
    waiting = contended(pool, session, request)
    done(pool)
    pool.waited(waiting, Refused("canceling statement due to lock timeout", WAITED_LONG), "test")
    assert done(pool) == [Send(waiting)]
    assert verbs(waiting) == ["unlock"], "it may have been granted in the same moment"
    assert answer(pool, waiting, True) == [Wait(waiting)]
    assert request.state == "queued"


def test_a_wait_session_is_not_used_before_its_cancel_is_answered() -> None:
    pool, session = ready()
    request = wish(1)
    waiting = contended(pool, session, request)
    done(pool)
    pool.give_up(request, "test")
    assert done(pool) == [Send(session)]
    pool.waited(waiting, None, "test")
    assert done(pool) == [], "it was granted all the same, and a late cancel would hit the unlock"
    assert answer(pool, session, True) == [Send(waiting)]
    assert verbs(waiting) == ["unlock"]


def test_a_wait_that_nobody_can_cancel_ends_with_its_session() -> None:
    pool, session = ready()
    request = wish(1)
    waiting = contended(pool, session, request)
    pool.lost(session, ERROR, "test")
    done(pool)
    pool.give_up(request, "test")
    assert done(pool) == [Close(waiting)]
    assert pool.entries == {}


def test_a_cancel_that_fails_ends_the_session_that_waits() -> None:
    pool, session = ready()
    request, late = wish(1), wish(1)
    waiting = contended(pool, session, request)
    done(pool)
    pool.give_up(request, "test")
    ask(pool, late)
    done(pool)
    pool.refused(session, ERROR, "test")
    assert done(pool) == [Close(waiting), Send(session)]
    assert (verbs(session), late.state) == (["try"], "queued")


@pytest.mark.parametrize("granted", [True, False])
def test_a_try_whose_caller_was_interrupted_is_unlocked(granted: bool) -> None:
    """Whether it was granted is unknown. The next in the queue is tried for."""
    pool, session = ready()
    request, heir = wish(1), wish(1)
    assert ask(pool, request, heir) == [session, None]
    pool.give_up(request, "test")
    pool.unanswered(session, "test")
    assert done(pool) == [Send(session)]
    assert verbs(session) == ["unlock"]
    assert answer(pool, session, granted) == [Send(session)]
    assert verbs(session) == ["try"]
    answer(pool, session, True)
    assert states(request, heir) == ["gone", "held"]


def test_an_unlock_whose_caller_was_interrupted_is_sent_again() -> None:
    pool, session = ready()
    request = wish(1)
    held(pool, session, request)
    assert pool.release(request, "test") is session
    pool.give_up(request, "test")
    pool.unanswered(session, "test")
    assert done(pool) == [Send(session)]
    assert verbs(session) == ["unlock"]
    answer(pool, session, False)
    assert (request.state, pool.entries) == ("released", {})


def test_the_room_is_asked_for_again_before_all_of_it_is_spent() -> None:
    """Other clients were told of the same room."""
    pool, session = ready()
    pool._ask_room(session)
    answer(pool, session, 640)
    assert (pool.cap, pool._due) == (640, 10)
    done(pool)
    requests = [wish(number) for number in range(12)]
    held(pool, session, *requests[:10])
    assert ask(pool, *requests[10:]) == [None, None]
    assert done(pool) == [Send(session)]
    assert verbs(session) == ["room"], "before anything more is tried"
    assert answer(pool, session, 1) == [Send(session)]
    assert (verbs(session), woken(pool)) == (["try"], [requests[11]])
    answer(pool, session, True)
    assert states(*requests) == [*["held"] * 11, "full"]


def test_the_room_of_locks_that_were_released_is_not_counted_on() -> None:
    pool, session = ready()
    pool._ask_room(session)
    answer(pool, session, 6400)
    requests = [wish(number) for number in range(20)]
    held(pool, session, *requests)
    assert pool._due == 32
    for request in requests:
        pool.release(request, "test")
        answer(pool, session, True)
    pool._due = 500
    pool.sweep("test")
    assert pool._due == 32


def test_a_parked_key_is_tried_again_now_and_then() -> None:
    """It may be free, although there is no session to wait in."""
    pool, hold = ready(kept=1, extra=1)
    first, second = wish(1), wish(2)
    waiting = contended(pool, hold, first)
    pool.waited(waiting, None, "test")
    assert ask(pool, second) == [hold]
    done(pool)
    answer(pool, hold, False)
    assert states(first, second) == ["held", "queued"]
    pool.sweep("test")
    assert done(pool) == [Send(hold)]
    assert keys(hold) == [2]
    assert answer(pool, hold, False) == [], "another client still has it"
    pool.sweep("test")
    answer(pool, hold, True)
    assert states(first, second) == ["held", "held"]


def test_a_parked_request_that_gives_up_leaves_nothing() -> None:
    pool, hold = ready(kept=1, extra=1)
    contended(pool, hold, wish(1))
    second = wish(2)
    ask(pool, second)
    answer(pool, hold, False)
    pool.give_up(second, "test")
    assert (second.state, list(pool.entries), len(pool._parked)) == ("gone", [(b"1",)], 0)


def test_an_unlock_that_is_refused_is_sent_again_later_and_not_at_once() -> None:
    """Otherwise it would be sent, and refused, as fast as the server can answer."""
    pool, session = ready()
    request = wish(1)
    held(pool, session, request)
    pool.release(request, "test")
    pool.refused(session, ERROR, "test")
    assert (done(pool), request.state) == ([], "held")
    pool.sweep("test")
    assert done(pool) == [Send(session)]
    assert verbs(session) == ["unlock"]
    answer(pool, session, True)
    assert (request.state, pool.entries, woken(pool)) == ("released", {}, [request])


def test_an_unlock_that_was_refused_together_with_others_is_sent_again_alone() -> None:
    pool, session = ready()
    first, second, third = wish(1), wish(2), wish(3)
    held(pool, session, first, second)
    ask(pool, third)
    pool.release(first, "test")
    pool.release(second, "test")
    answer(pool, session, True)
    assert verbs(session) == ["unlock", "unlock"]
    pool.refused(session, ERROR, "test")
    for request in (first, second):
        assert done(pool) == [Send(session)]
        assert (verbs(session), keys(session)) == (["unlock"], [int(request.key[0])])
        give(pool, session, True)
    assert states(first, second) == ["released", "released"]


def test_a_lost_session_is_reported_to_its_holders_and_its_queues_go_on_elsewhere() -> None:
    pool, session = ready()
    first, heir, leaving, tried = wish(1), wish(1), wish(2), wish(3)
    held(pool, session, first, leaving)
    assert ask(pool, heir) == [None]
    assert pool.release(leaving, "test") is session
    ask(pool, tried)
    done(pool)
    pool.lost(session, ERROR, "test")
    assert states(first, heir, leaving, tried) == ["lost", "queued", "lost", "queued"]
    [closing, *others] = done(pool)
    assert closing == Close(session)
    assert Lose(first, ERROR) in others
    assert woken(pool) == [leaving]
    answer(pool, session, True)
    assert leaving.state == "lost", "the answer comes too late"
    [second] = [action.session for action in others if isinstance(action, Open)]
    pool.opened(second, "test")
    answer(pool, second, None)
    assert sorted(keys(second)) == [1, 3]
    answer(pool, second, True, True)
    assert states(heir, tried) == ["held", "held"]


def test_a_key_is_not_asked_for_again_for_ever() -> None:
    pool, session = ready()
    request = wish(1)
    ask(pool, request)
    for _ in range(MAX_LOSSES - 1):
        pool.lost(session, ERROR, "test")
        assert request.state == "queued"
        pool.actions.popleft()
        session = opened(pool)
        done(pool)
    pool.lost(session, ERROR, "test")
    assert (request.state, request.error, pool.entries) == ("failed", ERROR, {})
    assert woken(pool) == [request]


def test_requests_fail_if_no_session_can_be_opened() -> None:
    pool = Pool()
    request = wish(1)
    ask(pool, request)
    [opening] = done(pool)
    assert isinstance(opening, Open)
    pool.lost(opening.session, ERROR, "test")
    assert (request.state, request.error, pool.entries, pool.sessions) == ("failed", ERROR, {}, [])


def test_what_is_closed_ends() -> None:
    pool, session = ready()
    first, second, third = wish(1), wish(1), wish(2)
    held(pool, session, first)
    waiting = contended(pool, session, third)
    ask(pool, second)
    done(pool)
    pool.close(ERROR, "test")
    assert done(pool) == [Close(session), Close(waiting)]
    assert states(first, second, third) == ["released", "failed", "failed"]
    assert set(woken(pool)) == {second, third}
    late = wish(1)
    assert ask(pool, late) == [None]
    assert (late.state, late.error) == ("failed", ERROR)


def test_a_session_that_is_opened_too_late_is_closed() -> None:
    pool = Pool()
    ask(pool, wish(1))
    [opening] = done(pool)
    assert isinstance(opening, Open)
    pool.close(ERROR, "test")
    assert done(pool) == []
    pool.opened(opening.session, "test")
    assert done(pool) == [Close(opening.session)]


def test_a_session_that_was_not_used_between_two_sweeps_is_closed() -> None:
    pool, session = ready()
    request = wish(1)
    held(pool, session, request)
    for _ in range(3):
        pool.sweep("test")
    assert done(pool) == []
    pool.release(request, "test")
    answer(pool, session, True)
    pool.sweep("test")
    assert done(pool) == []
    pool.sweep("test")
    assert done(pool) == [Close(session)]
    assert pool.sessions == []


def test_a_wait_session_beyond_those_that_are_kept_is_closed_at_once() -> None:
    pool, session = ready(kept=2, extra=1)
    waits = []
    for number in (1, 2):
        request = wish(number)
        waits.append(contended(pool, session, request))
        done(pool)
        pool.waited(waits[-1], None, "test")
    pool.release(request, "test")
    assert done(pool) == [Send(waits[1])]
    assert answer(pool, waits[1], True) == [Close(waits[1])]


def test_a_caller_that_holds_the_lock_is_refused_and_one_that_does_not_wait_as_well() -> None:
    pool, session = ready()
    first = wish(1, "owner")
    held(pool, session, first)
    again, other = wish(1, "owner"), wish(1, waits=False)
    assert ask(pool, again, other) == [None, None]
    assert states(first, again, other) == ["held", "reentered", "busy"]
    assert (other.contended, woken(pool)) == (True, [])


def test_a_request_that_does_not_wait_is_refused_when_another_client_has_the_key() -> None:
    pool, session = ready()
    request = wish(1, waits=False)
    ask(pool, request)
    assert answer(pool, session, False) == []
    assert (request.state, pool.entries, session.held) == ("busy", {}, {})


# Shared mode


def test_what_was_tried_for_a_reader_is_not_given_to_a_writer() -> None:
    pool, session = ready()
    reader, writer = wish(1, shared=True), wish(1)
    ask(pool, reader, writer)
    pool.give_up(reader, "test")
    for verb in ("try", "unlock", "try"):
        assert (verbs(session), writer.state) == ([verb], "queued")
        answer(pool, session, True)
    assert writer.state == "held"


def test_readers_hold_a_lock_together() -> None:
    pool, session = ready()
    first, second, third = (wish(1, shared=True) for _ in range(3))
    assert ask(pool, first, second) == [session, None]
    answer(pool, session, True)
    assert woken(pool) == [first, second]
    assert ask(pool, third) == [None]
    assert states(first, second, third) == ["held"] * 3
    assert pool.release(first, "test") is pool.release(third, "test") is None
    assert states(first, second, third) == ["released", "held", "released"]
    assert pool.release(second, "test") is session
    answer(pool, session, True)
    assert pool.entries == {}


def test_a_reader_does_not_pass_a_writer_that_waits() -> None:
    pool, session = ready(turns=10)
    first, writer, second = wish(1, shared=True), wish(1), wish(1, shared=True)
    held(pool, session, first)
    tries = wish(1, shared=True, waits=False)
    ask(pool, writer, second, tries)
    assert states(first, writer, second, tries) == ["held", "queued", "queued", "busy"]
    assert pool.release(first, "test") is session
    assert answer(pool, session, True) == [Send(session)], "the mode is another one"
    assert session.under_way[0].entry is writer.entry
    answer(pool, session, True)
    assert states(writer, second) == ["held", "queued"]
    pool.release(writer, "test")
    answer(pool, session, True)
    answer(pool, session, True)
    assert states(writer, second) == ["released", "held"]


def test_readers_behind_a_writer_that_gives_up_join_those_that_hold_it() -> None:
    pool, session = ready(turns=1)
    first, writer, second, third = wish(1, shared=True), wish(1), wish(1, shared=True), wish(1, shared=True)
    held(pool, session, first)
    ask(pool, writer, second, third)
    pool.give_up(writer, "test")
    assert states(first, writer, second, third) == ["held", "gone", "held", "queued"], "one may join"
    assert woken(pool) == [second]


def test_a_bounded_number_of_readers_join() -> None:
    """A writer of another client waits in the server's queue."""
    pool, session = ready()
    readers = [wish(1, shared=True) for _ in range(5)]
    held(pool, session, readers[0])
    late = wish(1, shared=True, waits=False)
    ask(pool, *readers[1:], late)
    answer(pool, session, True)
    assert states(*readers, late) == [*["held"] * 3, *["queued"] * 2, "busy"]
    for reader in readers[:2]:
        assert pool.release(reader, "test") is None
    assert pool.release(readers[2], "test") is session
    assert answer(pool, session, True) == [Send(session)]
    answer(pool, session, True)
    assert states(*readers) == [*["released"] * 3, *["held"] * 2]


def test_more_readers_join_if_no_other_client_waits() -> None:
    pool, session = ready(turns=2)
    readers = [wish(1, shared=True) for _ in range(3)]
    held(pool, session, readers[0])
    ask(pool, *readers[1:])
    late, hasty = wish(1, shared=True), wish(1, shared=True, waits=False)
    ask(pool, late, hasty)
    assert states(*readers, late, hasty) == ["held", "held", "held", "queued", "queued"]
    assert (done(pool), verbs(session)) == ([Send(session)], ["rivals"])
    answer(pool, session, False)
    assert states(late, hasty) == ["held", "held"]
    last, refused = wish(1, shared=True), wish(1, shared=True, waits=False)
    ask(pool, last, refused)
    answer(pool, session, True)
    assert states(last, refused) == ["queued", "busy"], "a writer waits in the server's queue"
    pool.sweep("test")
    assert verbs(session) == ["rivals"], "it is asked again now and then"
    answer(pool, session, False)
    assert last.state == "held"


def test_a_note_is_not_sent_in_a_session_that_waits() -> None:
    pool, hold = ready(turns=0)
    first, second = wish(1), wish(1)
    waiting = contended(pool, hold, first, second)
    assert done(pool) == [Wait(waiting)]
    assert not pool.can_note(waiting)
    pool.waited(waiting, None, "test")
    assert pool.can_note(waiting)
    pool.release(first, "test")
    pool.note(waiting, Note(False, [], [], []), "test")
    done(pool)
    assert answer(pool, waiting, True) == [Wait(waiting)], "it waits for the next request, and notes nothing"
    assert (waiting.flight, waiting.pending, waiting.noted) == ([], [], None)


def test_requests_that_queue_while_a_key_is_asked_for_are_contended_once_it_is_granted() -> None:
    pool, session = ready()
    first, second = wish(1), wish(1)
    ask(pool, first, second)
    assert not second.contended
    answer(pool, session, True)
    assert (first.contended, second.contended) == (False, True)


def test_a_reader_does_not_wait_in_the_place_of_a_writer_that_gave_up() -> None:
    """Another client reads: it lets readers in, and no writer."""
    pool, session = ready()
    writer, reader = wish(1), wish(1, shared=True)
    waiting = contended(pool, session, writer, reader)
    done(pool)
    pool.give_up(writer, "test")
    assert done(pool) == [Send(session)]
    assert [(op.verb, op.target) for op in session.flight] == [("cancel", waiting)]
    pool.waited(waiting, ERROR, "test")
    assert answer(pool, session, True) == [Send(waiting)]
    assert answer(pool, waiting, False) == [Wait(waiting)]
    assert reader.entry is not None
    assert (reader.state, reader.entry.shared) == ("queued", True)


def test_a_wait_that_is_not_sent_yet_is_sent_for_the_first_in_the_queue() -> None:
    pool, session = ready()
    writer, reader = wish(1), wish(1, shared=True)
    ask(pool, writer, reader)
    give(pool, session, False)
    pool.give_up(writer, "test")
    waiting = opened(pool)
    assert done(pool) == [Wait(waiting)]
    assert waiting.entry is not None
    assert (waiting.entry.shared, reader.state) == (True, "queued")


def test_a_reader_is_not_refused_because_a_writer_was() -> None:
    pool, session = ready()
    writer, reader = wish(1), wish(1, shared=True, waits=False)
    ask(pool, writer)
    pool.give_up(writer, "test")
    ask(pool, reader)
    assert answer(pool, session, False) == [Send(session)]
    answer(pool, session, True)
    assert states(writer, reader) == ["gone", "held"]


# Interrupts


EVENTS: dict[str, Callable[[Pool, LockSession], object]] = {
    "acquire": lambda pool, _: pool.acquire(wish(3)),
    "release": lambda pool, _: pool.release(pool.entries[b"1",].holders[0], "test"),
    "give_up": lambda pool, _: pool.give_up(pool.entries[b"2",].queue[0], "test"),
    "sender answered": lambda pool, session: pool.sender_answered(session, True, "test"),
    "batch answered": lambda pool, session: pool.answered(session, [True], "test"),
    "waited": lambda pool, _: pool.waited(pool.waits[0], None, "test"),
    "opened": lambda pool, _: pool.opened(pool.waits[-1], "test"),
    "note": lambda pool, session: pool.note(session, Note(True, [], [], []), "test"),
    "refused": lambda pool, session: pool.refused(session, ERROR, "test"),
    "unanswered": lambda pool, session: pool.unanswered(session, "test"),
    "lost": lambda pool, session: pool.lost(session, ERROR, "test"),
    "sweep": lambda pool, _: pool.sweep("test"),
    "close": lambda pool, _: pool.close(ERROR, "test"),
}


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_that_is_interrupted_is_noticed(name: str) -> None:
    """``writer`` stays set, or the pool is as it was before the event, or as it is after it."""

    def prepare() -> tuple[Pool, LockSession]:
        pool, session = ready()
        held(pool, session, wish(1))
        contended(pool, session, wish(2))
        if name.endswith(("answered", "refused")):
            ask(pool, wish(4))
        if name == "batch answered":
            ask(pool, wish(5))
            give(pool, session, True)
        if name == "opened":
            ask(pool, wish(6))
            give(pool, session, False)
        return pool, session

    pool, session = prepare()
    before = _picture(pool)
    EVENTS[name](pool, session)
    after = _picture(pool)
    at, interrupt = 0, Interrupt(0)
    while interrupt.raised or at == 0:
        pool, session = prepare()
        interrupt = Interrupt(at, "/holdfast/lock/pool.py")
        with suppress(KeyboardInterrupt), interrupt:
            EVENTS[name](pool, session)
        assert pool.writer is not None or _picture(pool) in (before, after), interrupt.where
        at += 1
    assert at > 20


def _picture(pool: Pool) -> list[object]:
    return [
        [
            (key, entry.stage, entry.shared, entry.handed, len(entry.holders), len(entry.queue), entry.leaving is None)
            for key, entry in pool.entries.items()
        ],
        [(verbs(each), len(each.pending), each.over, list(each.held), each.sender is None) for each in pool.sessions],
        [type(each) for each in pool.actions],
        len(pool.wakes),
    ]  # fmt: skip


def test_no_module_of_locks_uses_a_private_name_of_another_project() -> None:
    """Of what it imports; names that objects have are listed in ``tests/test_private_names.py``."""
    for path in Path(lock.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        foreign = {
            (each.asname or each.name).partition(".")[0]
            for node in imports
            if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast"))
            for each in node.names
        }
        private = [
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in foreign
            if node.attr.startswith("_") and not node.attr.endswith("__")
        ]
        assert set(private) <= {"os._exit"}, path.name  # which is documented
        assert not [name for name in foreign if name.startswith("_")], path.name
