"""What the workers repair in an agent, as pure functions. See workers.py for what each worker is for."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from holdfast.gateway.agents.lifecycle import Agent, AgentStep, Turn, add_turn, close, cut, end
from holdfast.gateway.agents.transcript import TranscriptEntry

GRACE = 5.0
"""Seconds that a stop may be late before its replica is taken for dead. Clocks of replicas must not differ by more."""
SETTLE = 5.0
"""Seconds without a hook before a transcript is compared: its last messages may still come by hook."""
KEEP = 7 * 86400.0
"""Seconds that an ended agent is kept."""


def watch(agent: Agent, now: float, limit: float) -> AgentStep:
    """Complete a command whose stop is overdue; time it out after ``limit`` seconds without a hook."""
    if agent.stop_at is not None and now > agent.stop_at + GRACE:
        return close(agent, now, "complete", by="watchdog")
    return close(agent, now, "timed_out", by="watchdog") if now - agent.seen_at > limit else AgentStep(agent)


def reap(agent: Agent, now: float, silence: float, *, sandbox_gone: bool) -> AgentStep:
    """End an agent whose sandbox is gone, or that has sent no hook for ``silence`` seconds."""
    if agent.state == "ended":
        return AgentStep(agent)
    if sandbox_gone:
        return end(agent, now, why=f"its sandbox {agent.sandbox} is gone", by="reaper")
    if now - agent.seen_at > silence:
        return end(agent, now, why=f"no hook for {silence:g} s", by="reaper")
    return AgentStep(agent)


def is_expired(agent: Agent, now: float) -> bool:
    return agent.ended_at is not None and now - agent.ended_at > KEEP


def needs_reconciling(agent: Agent, now: float) -> bool:
    is_quiet = now - agent.seen_at > SETTLE
    return agent.transcript_path is not None and is_quiet and agent.reconciled_at < agent.seen_at + SETTLE


def reconcile(
    agent: Agent, entries: Sequence[TranscriptEntry], turns: Sequence[Turn], now: float, *, offset: int, is_end: bool
) -> AgentStep:
    """Add the entries of the transcript that no hook reported, as turns.

    ``turns``: those since the last comparison. ``offset``: how far the file was read. ``is_end``: whether that is its
    end. If it is not, the next comparison gets the entries that follow, and the turns after the last one matched here:
    hooks have reported those, too.
    """
    reported: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
    for turn in turns:
        if turn.source == "hook" and turn.kind in ("prompt", "answer"):
            reported[turn.role, turn.text].append(turn.number)
    step, last_matched = AgentStep(agent), agent.transcript_turn
    for entry in entries:
        if numbers := reported[entry.role, cut(entry.text)]:
            last_matched = max(last_matched, numbers.popleft())
        else:
            kind = "prompt" if entry.role == "user" else "answer"
            step = add_turn(step, entry.role, kind, entry.text, now, "transcript")
    progress = (
        {"transcript_turn": step.agent.turns, "reconciled_at": now} if is_end else {"transcript_turn": last_matched}
    )
    return step._replace(agent=step.agent.but(transcript_offset=offset, **progress))


def needs_polling(agent: Agent) -> bool:
    return agent.transcript_path is not None and agent.state != "ended" and agent.polled_at < agent.seen_at


def poll(agent: Agent, tokens: int | None, now: float) -> AgentStep:
    return AgentStep(agent.but(context_tokens=agent.context_tokens if tokens is None else tokens, polled_at=now))
