"""What the multiplexer decides, one case after the other. Whatever happens in any order is in test_mux_model."""

from __future__ import annotations

import pytest

from holdfast.errors import Refused
from holdfast.lock.mux import LONG_ENOUGH, Mux
from holdfast.lock.tickets import Claim, Open, Send, Session, Settle, State, Ticket, Wait

ERROR = ConnectionError("the test says so")


def grants(mux: Mux, *tickets: Ticket) -> list[str]:
    return [ticket.state for ticket in tickets]


def ready(*, alone: bool = False) -> tuple[Mux, Session]:
    mux = Mux(turns=2, alone=alone)
    first = Ticket((b"9",), "9", "x", waits=True)
    [opening] = mux.ask(first)
    assert isinstance(opening, Open)
    session = opening.session
    mux.opened(session)
    mux.answered(session, [None])
    mux.answered(session, [True])
    mux.release(first)
    mux.answered(session, [True])
    assert first.state == "released"
    return mux, session


def test_what_comes_together_while_a_statement_is_under_way_goes_in_one() -> None:
    mux, session = ready()
    tickets = [Ticket((b"%d" % number,), str(number), number, waits=True) for number in range(6)]
    sends = [action for ticket in tickets for action in mux.ask(ticket) if isinstance(action, Send)]
    assert [len(each.ops) for each in sends] == [1]
    [settled, send] = mux.answered(session, [True])
    assert isinstance(settled, Settle)
    assert isinstance(send, Send)
    assert [op.claim.key for op in send.ops if op.claim] == [(b"1",), (b"2",), (b"3",), (b"4",), (b"5",)]
    mux.answered(session, [True, False, True, True, True])
    assert grants(mux, *tickets) == ["held", "held", "queued", "held", "held", "held"]


def test_waiters_here_are_served_in_order_and_a_bounded_number_of_times_in_a_row() -> None:
    mux, session = ready()
    tickets = [Ticket((b"1",), "1", number, waits=True) for number in range(5)]
    for ticket in tickets:
        mux.ask(ticket)
    mux.answered(session, [True])
    assert grants(mux, *tickets) == ["held", *["queued"] * 4]
    mux.release(tickets[0])
    mux.release(tickets[1])
    assert grants(mux, *tickets) == ["released", "released", "held", "queued", "queued"]
    [send] = mux.release(tickets[2])
    assert isinstance(send, Send)
    assert [op.verb for op in send.ops] == ["unlock"], "twice in a row was enough: others may want it"
    mux.answered(session, [True])
    mux.answered(session, [True])
    assert grants(mux, *tickets) == [*["released"] * 3, "held", "queued"]


def test_a_lock_that_is_being_unlocked_is_handed_to_nobody() -> None:
    """Not even when it is released a second time, and somebody waits by then."""
    mux, session = ready()
    first, second = (Ticket((b"1",), "1", number, waits=True) for number in range(2))
    mux.ask(first)
    mux.answered(session, [True])
    mux.release(first)
    mux.ask(second)
    mux.release(first)
    assert second.state == "queued"
    mux.answered(session, [True])
    mux.answered(session, [True])
    assert grants(mux, first, second) == ["released", "held"]


def test_what_was_tried_in_a_statement_that_failed_is_unlocked() -> None:
    mux, session = ready()
    ticket = Ticket((b"1",), "1", 1, waits=True)
    mux.ask(ticket)
    sends = [each for each in mux.refused(session, ERROR) if isinstance(each, Send)]
    assert [(op.verb, op.claim and op.claim.key) for send in sends for op in send.ops] == [("unlock", (b"1",))]
    assert ticket.state == "failed"
    mux.answered(session, [True])
    assert mux.claims == {}


def test_beyond_the_connection_limit_waiters_stand_in_line_for_a_session() -> None:
    mux = Mux(kept=1, extra=1)
    tickets = [Ticket((b"%d" % number,), str(number), number, waits=True) for number in range(3)]
    [opening] = mux.ask(tickets[0])
    assert isinstance(opening, Open)
    mux.opened(opening.session)
    mux.answered(opening.session, [None])
    mux.ask(tickets[1])
    mux.ask(tickets[2])
    [wait] = mux.answered(opening.session, [False])[:1]
    assert isinstance(wait, Open)
    assert wait.session.waits
    assert [action for action in mux.answered(opening.session, [False, False]) if isinstance(action, Open)] == []
    mux.opened(wait.session)
    mux.waited(wait.session, None)
    assert grants(mux, *tickets) == ["held", "queued", "queued"]
    mux.release(tickets[0])
    [_, stand] = mux.answered(wait.session, [True])
    assert isinstance(stand, Wait), "the next one has the session now"
    assert stand.session is wait.session


def test_beyond_the_cap_an_error_and_no_question() -> None:
    mux, session = ready()
    mux.sweep()
    session.pending.clear()
    mux.cap = 1
    one, two = (Ticket((b"%d" % number,), str(number), number, waits=True) for number in (1, 2))
    mux.ask(one)
    mux.answered(session, [True])
    assert [type(action) for action in mux.ask(two)] == [Settle]
    assert two.state == "full"
    [asks] = mux.sweep()
    assert isinstance(asks, Send)
    assert [op.verb for op in asks.ops] == ["room"], "there may be room by now"
    mux.answered(session, [10])
    again = Ticket((b"2",), "2", 2, waits=True)
    assert isinstance(mux.ask(again)[0], Send)


def test_a_cancel_that_came_before_what_it_was_to_end_is_said_again() -> None:
    """The server forgets a cancel of a session that has not begun yet; then it would wait for ever."""
    mux, hold = ready()
    ticket = Ticket((b"1",), "1", "x", waits=True)
    mux.ask(ticket)
    [opening] = mux.answered(hold, [False])
    assert isinstance(opening, Open)
    mux.opened(opening.session)
    mux.give_up(ticket)
    assert mux.answered(hold, [True]) == [], "nothing has ended"
    [again] = mux.sweep()
    assert isinstance(again, Send)
    assert [(op.verb, op.target) for op in again.ops] == [("cancel", opening.session)]
    assert mux.sweep() == [], "one at a time"
    mux.waited(opening.session, ERROR)
    [unlock] = mux.answered(hold, [True])
    assert isinstance(unlock, Send)
    mux.answered(opening.session, [False])
    assert mux.claims == {}


def test_a_wait_that_ends_with_an_error_is_unlocked_in_any_case() -> None:
    """Somebody else cancels it while the server grants it: whoever waits hears of the error, and nobody of the lock."""
    mux, session = ready()
    ticket = Ticket((b"1",), "1", 1, waits=True)
    mux.ask(ticket)
    [opening] = mux.answered(session, [False])
    assert isinstance(opening, Open)
    mux.opened(opening.session)
    settled, unlock = mux.waited(opening.session, ERROR)
    assert settled == Settle(ticket)
    assert (ticket.state, ticket.problem) == ("failed", ERROR)
    assert isinstance(unlock, Send)
    assert (unlock.session, unlock.ops[0].verb) == (opening.session, "unlock")


def test_a_wait_that_was_long_enough_is_unlocked_and_begun_anew() -> None:
    mux, session = ready()
    ticket = Ticket((b"1",), "1", 1, waits=True)
    mux.ask(ticket)
    [opening] = mux.answered(session, [False])
    assert isinstance(opening, Open)
    mux.opened(opening.session)
    [unlock] = mux.waited(opening.session, Refused("canceling statement due to lock timeout", LONG_ENOUGH))
    assert isinstance(unlock, Send)
    assert unlock.ops[0].verb == "unlock", "it may have been granted this very moment"
    assert mux.answered(opening.session, [True]) == [Wait(opening.session, (b"1",))]
    assert ticket.state == "queued"


def test_a_session_that_waits_is_not_used_before_its_cancel_was_answered() -> None:
    mux, session = ready()
    ticket = Ticket((b"1",), "1", 1, waits=True)
    mux.ask(ticket)
    [opening] = mux.answered(session, [False])
    assert isinstance(opening, Open)
    mux.opened(opening.session)
    [cancel] = mux.give_up(ticket)
    assert isinstance(cancel, Send)
    assert cancel.session is session
    assert mux.waited(opening.session, None) == [], "granted all the same: the phantom"
    [unlock] = mux.answered(session, [True])
    assert isinstance(unlock, Send)
    assert (unlock.session, unlock.ops[0].verb) == (opening.session, "unlock")


@pytest.mark.parametrize("granted", [True, False])
def test_what_was_interrupted_past_the_multiplexer_is_not_handed_on(granted: bool) -> None:
    """Whether it was granted nobody knows: it is unlocked, and whoever stands behind it asks."""
    mux, session = ready()
    ticket, heir = Ticket((b"1",), "1", 1, waits=True), Ticket((b"1",), "1", 2, waits=True)
    ticket.session = session
    mux.claims[b"1",] = session.held[b"1",] = ticket
    assert mux.ask(heir) == []
    [unlock] = mux.give_up(ticket)
    assert isinstance(unlock, Send)
    assert unlock.ops[0].verb == "unlock"
    [settled, again] = mux.answered(session, [granted])
    assert isinstance(settled, Settle)
    assert isinstance(again, Send)
    assert again.ops[0].verb == "try"
    mux.answered(session, [True])
    assert grants(mux, heir, ticket) == ["held", "released"]


def test_the_room_is_asked_for_again_before_all_of_it_is_spent() -> None:
    """Others were told of the same room."""
    mux, session = ready()
    mux._ask_room(session)
    mux.answered(session, [640])
    assert (mux.cap, mux.due) == (640, 10)
    tickets = [Ticket((b"%d" % number,), str(number), number, waits=True) for number in range(12)]
    for ticket in tickets[:10]:
        [asks] = mux.ask(ticket)
        assert isinstance(asks, Send)
        assert [op.verb for op in asks.ops] == ["try"]
        mux.answered(session, [True])
    [asks] = mux.ask(tickets[10])
    assert isinstance(asks, Send)
    assert [op.verb for op in asks.ops] == ["room"], "before anything more is tried"
    assert mux.ask(tickets[11]) == []
    [settled, tries] = mux.answered(session, [1])
    assert isinstance(settled, Settle)
    assert isinstance(tries, Send)
    assert [op.verb for op in tries.ops] == ["try"]
    mux.answered(session, [True])
    assert grants(mux, *tickets) == [*["held"] * 11, "full"]


def test_what_was_given_back_is_not_counted_on() -> None:
    mux, session = ready()
    mux._ask_room(session)
    mux.answered(session, [6400])
    tickets = [Ticket((b"%d" % number,), str(number), number, waits=True) for number in range(20)]
    for ticket in tickets:
        mux.ask(ticket)
        mux.answered(session, [True])
    assert mux.due == 32
    for ticket in tickets:
        mux.release(ticket)
        mux.answered(session, [True])
    mux.due = 500
    mux.sweep()
    assert mux.due == 32


def test_whoever_stands_in_line_for_a_session_is_tried_again_now_and_then() -> None:
    """The key may be free, although there is no session to wait in."""
    mux = Mux(kept=1, extra=1)
    tickets = [Ticket((b"%d" % number,), str(number), number, waits=True) for number in range(2)]
    [opening] = mux.ask(tickets[0])
    assert isinstance(opening, Open)
    hold = opening.session
    mux.opened(hold)
    mux.answered(hold, [None])
    mux.ask(tickets[1])
    [wait, _] = mux.answered(hold, [False])
    assert isinstance(wait, Open)
    mux.answered(hold, [False])
    mux.opened(wait.session)
    mux.waited(wait.session, None)
    assert grants(mux, *tickets) == ["held", "queued"]
    [again] = mux.sweep()
    assert isinstance(again, Send)
    assert [op.claim.key for op in again.ops if op.claim] == [(b"1",)]
    assert mux.answered(hold, [False]) == [], "somebody has it still"
    mux.sweep()
    mux.answered(hold, [True])
    assert grants(mux, *tickets) == ["held", "held"]


def test_an_unlock_that_is_refused_is_said_again_later_and_not_at_once() -> None:
    """Else we would ask, and be refused, as fast as the server can speak."""
    mux, session = ready()
    ticket = Ticket((b"1",), "1", 1, waits=True)
    mux.ask(ticket)
    mux.answered(session, [True])
    mux.release(ticket)
    assert mux.refused(session, ERROR) == []
    [again] = mux.sweep()
    assert isinstance(again, Send)
    assert [op.verb for op in again.ops] == ["unlock"]
    mux.answered(session, [True])
    assert (ticket.state, mux.claims) == ("released", {})


def test_what_was_interrupted_past_the_multiplexer_ends_with_its_session() -> None:
    """There is nobody left to unlock it, and nothing to be unlocked: whoever comes next asks."""
    mux, session = ready()
    ticket, heir = Ticket((b"1",), "1", 1, waits=True), Ticket((b"1",), "1", 2, waits=True)
    ticket.session = session
    mux.claims[b"1",] = session.held[b"1",] = ticket
    mux.lost(session, ERROR)
    mux.give_up(ticket)
    assert mux.claims == {}
    [opening] = mux.ask(heir)
    assert isinstance(opening, Open)


@pytest.mark.parametrize(
    ("alone", "state", "is_claim"),
    [(True, "held", True), (True, "queued", False), (True, "released", False), (False, "held", False)],
)
def test_what_is_taken_past_it_becomes_a_claim_where_nobody_can_be_unlocking_it(
    alone: bool, state: State, is_claim: bool
) -> None:
    """Elsewhere whoever comes is noted in the ticket, and served when the pump has said what became of that."""
    mux, session = ready(alone=alone)
    ticket, heir = Ticket((b"1",), "1", 1, waits=True), Ticket((b"1",), "1", 2, waits=True)
    ticket.session, ticket.state = session, state
    mux.claims[b"1",] = session.held[b"1",] = ticket
    mux.ask(heir)
    found = mux.claims[b"1",]
    assert isinstance(found, Claim) is is_claim
    claim = ticket.claim if is_claim else ticket.heirs
    assert claim is not None
    assert (claim.holder, list(claim.queue)) == (ticket, [heir])
    if is_claim:
        assert session.held[b"1",] is found is claim
        assert mux.hand_on(ticket) is heir
