"""Puts the multiplexer right after an event that was cut short anywhere, as by Ctrl-C.

Nothing is undone and nothing is guessed: whoever has been told that it holds goes on holding, whoever waits stands in
line, and where nobody can tell what the server has heard or answered the key is unlocked, and tried again. Putting
right may itself be cut short, and is then begun anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.lock.mux import Mux
from holdfast.lock.tickets import Action, Claim, Close, Open, Send, Session, Settle, Ticket, Wait


def mend(
    mux: Mux,
    sessions: Iterable[Session],
    idle: Collection[Session],
    waiting: Iterable[Ticket],
    leaving: Iterable[Ticket],
) -> list[Action]:
    """``sessions``: all there are, ``idle``: where nothing is under way with the server. ``waiting`` and ``leaving``:
    who waits to be let in, and who for the end of its release."""
    error = ConnectionError("interrupted when its session ended")
    mux._out = [each for each in mux._out if not isinstance(each, Open | Send | Wait)]  # told anew
    here = [each for each in (*mux.holds, *mux.waits) if not each.over]
    for session in here:
        session.pending = [op for op in session.pending if not any(op is said for said in session.flying)]
        if session in idle and session.flying:  # before anything else is said there
            _say_again(mux, session)
    for session in sessions:
        if session not in here:
            _finish_ending(mux, session, error)
    _find_waiting(mux, list(waiting))
    for claim in [each for each in mux.claims.values() if isinstance(each, Claim)]:
        _put_right(mux, claim, idle)
    mux._parked.extend(
        each
        for each in mux.claims.values()
        if isinstance(each, Claim) and each.stage == "parked" and each not in mux._parked
    )
    for session in here:
        _put_session_right(mux, session)
    for ticket in leaving:
        _let_out(mux, ticket)
    return mux._done()


def _finish_ending(mux: Mux, session: Session, error: Exception) -> None:
    mux._end(session)
    mux._out.append(Close(session))
    for held in list(session.held.values()):
        if isinstance(held, Ticket):
            mux._lose_past_us(held, error)
        elif held.session in (session, None):
            mux._lose(held, error, opened=True)
    session.held.clear()


def _find_waiting(mux: Mux, waiting: list[Ticket]) -> None:
    """In line again, in front if it was just being let in; and told, if it was just being told."""
    for ticket in waiting:
        if ticket.state not in ("new", "queued"):
            mux._out.append(Settle(ticket))
            continue
        claim, found = ticket.claim, mux.claims.get(ticket.key)
        if claim is not None and (found is claim or (isinstance(found, Ticket) and found.heirs is claim)):
            if ticket not in claim.queue:
                claim.queue.appendleft(ticket)
        else:
            ticket.claim = None
            mux._out = mux.ask(ticket)


def _say_again(mux: Mux, session: Session) -> None:
    """The answers went unheard, or the question was never put."""
    ops, session.flying = session.flying, []
    for op in ops:
        if op.claim is not None and op.claim.session is session:
            mux._unlock(op.claim)
        elif op.verb == "room":
            session.pending.insert(0, op)
    mux._flush(session)


def _put_right(mux: Mux, claim: Claim, idle: Collection[Session]) -> None:
    session = claim.session
    if claim.holder is not None and claim.holder.state != "held":
        claim.holder = None
    if session is not None and session.over:
        session = claim.session = None
    if session is None:
        if claim.stage == "parked" and claim.queue:
            return
        if claim.queue:
            mux._try(claim)
        else:
            mux._forget(claim)
        return
    session.held[claim.key] = claim
    if _under_way(claim, session):
        return
    if claim.holder is not None and claim.leaving is None:
        claim.stage = "held"
    elif (
        session.waits and session.claim in (claim, None) and not (session.ended or (session.opened and session in idle))
    ):
        session.claim = claim
        if not claim.queue and claim.stage == "waiting":
            mux._nobody_waits(claim)
    elif session.cancelling:
        session.ended = True
    else:
        claim.holder = None
        mux._unlock(claim)


def _under_way(claim: Claim, session: Session) -> bool:
    said = next((op for op in session.flying + session.pending if op.claim is claim), None)
    if said is not None:
        claim.stage = "asking" if said.verb == "try" else "freeing"
    return said is not None


def _put_session_right(mux: Mux, session: Session) -> None:
    for key, held in list(session.held.items()):
        if mux.claims.get(key) is not held or (isinstance(held, Claim) and held.session is not session):
            del session.held[key]
    if not session.opened:
        mux._out.append(Open(session))
    mux._flush(session)
    if not session.waits:
        return
    if session.claim is not None and session.claim.session is not session:
        session.claim = None
    if session.claim is None and session.opened and not session.flying and not session.pending:
        if session not in mux._free:
            mux._rest(session)
    elif session in mux._free:
        mux._free.remove(session)
    if session.cancelling and not any(op.target is session for each in mux.holds for op in each.flying + each.pending):
        mux._cancel(session)


def _let_out(mux: Mux, ticket: Ticket) -> None:
    found = mux.claims.get(ticket.key)
    if found is not ticket and not (isinstance(found, Claim) and ticket in (found.leaving, found.holder)):
        if ticket.state == "held":
            ticket.state = "released"
        mux._out.append(Settle(ticket))
