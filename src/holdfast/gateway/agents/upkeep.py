"""What the workers find wrong with an agent, and what is done about it, as functions of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast.gateway.agents.lifecycle import Agent, Step, Turn, close, cut, end, say
from holdfast.gateway.agents.transcript import Entry

GRACE = 5.0
"""Seconds that a stop may be late: its replica has died by then. Clocks of replicas must not differ by more."""
SETTLE = 5.0
"""Seconds without a hook before a transcript is compared: what it says may still be on its way to us."""
KEEP = 7 * 86400.0
"""Seconds that an ended agent is kept."""


def watch(agent: Agent, now: float, limit: float) -> Step:
    """A stop whose replica has died is the end of the command; so is a silence of ``limit`` seconds."""
    if agent.stop_at is not None and now > agent.stop_at + GRACE:
        return close(agent, now, "complete", by="watchdog")
    return close(agent, now, "timed_out", by="watchdog") if now - agent.seen_at > limit else Step(agent)


def reap(agent: Agent, now: float, silence: float, *, homeless: bool) -> Step:
    """An agent whose sandbox is no more, or that was not heard of for ``silence`` seconds, has ended."""
    if agent.state == "ended":
        return Step(agent)
    if homeless:
        return end(agent, now, why=f"its sandbox {agent.sandbox} is gone", by="reaper")
    if now - agent.seen_at > silence:
        return end(agent, now, why=f"not heard of for {silence:g} s", by="reaper")
    return Step(agent)


def is_forgotten(agent: Agent, now: float) -> bool:
    return agent.ended_at is not None and now - agent.ended_at > KEEP


def is_settled(agent: Agent, now: float) -> bool:
    quiet = now - agent.seen_at > SETTLE
    return agent.transcript_path is not None and quiet and agent.reconciled_at < agent.seen_at + SETTLE


def reconcile(
    agent: Agent, entries: Sequence[Entry], turns: Sequence[Turn], now: float, *, offset: int, whole: bool
) -> Step:
    """What the transcript says and no hook has told since we last looked: each is a turn. ``offset``: how far it was
    read; ``whole``: to its end."""
    known = Counter((turn.role, turn.text) for turn in turns if turn.kind in ("prompt", "answer"))
    step = Step(agent)
    for entry in entries:
        if known[entry.role, cut(entry.text)] > 0:
            known[entry.role, cut(entry.text)] -= 1
        else:
            kind = "prompt" if entry.role == "user" else "answer"
            step = say(step, entry.role, kind, entry.text, now, "transcript")
    at = now if whole else agent.reconciled_at
    seen = step.agent.but(transcript_offset=offset, transcript_turn=step.agent.turns, reconciled_at=at)
    return step._replace(agent=seen)


def is_unpolled(agent: Agent) -> bool:
    return agent.transcript_path is not None and agent.state != "ended" and agent.polled_at < agent.seen_at


def poll(agent: Agent, tokens: int | None, now: float) -> Step:
    return Step(agent.but(context_tokens=agent.context_tokens if tokens is None else tokens, polled_at=now))
