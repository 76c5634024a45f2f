"""What a hook does to an agent, as a function of values. No clock, no store: whoever calls it has the agent's lock.

    expected ──> idle ──prompt──> working <──> waiting
                   ^                 │ stop, and a while later
                   └─────────────────┘
    session-end leads to "ended" from everywhere, and only session-start leads out of it.

Only a prompt opens a command, and an agent has at most one that is open. Turns and commands are numbered without gaps.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict

Kind = Literal[
    "session-start", "session-end", "user-prompt-submit", "stop", "notification", "pre-tool-use", "post-tool-use",
    "permission-request",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
Outcome = Literal["complete", "interrupted", "timed_out"]
MOST_TEXT = 20_000


class Command(BaseModel):
    """What an agent was asked to do, from the prompt to its completion."""

    model_config = ConfigDict(frozen=True)
    agent: int
    number: int
    status: Literal["running"] | Outcome = "running"
    first_turn: int
    started_at: float
    ended_at: float | None = None
    ended_by: str | None = None


class Turn(BaseModel):
    """One thing that was said, by the user or by the agent."""

    model_config = ConfigDict(frozen=True)
    agent: int
    number: int
    command: int | None
    role: Literal["user", "agent"]
    kind: Literal["prompt", "answer", "notification", "permission"]
    text: str
    at: float
    source: Literal["hook", "transcript"] = "hook"


class Agent(BaseModel):
    model_config = ConfigDict(frozen=True)
    number: int
    state: Literal["expected", "idle", "working", "waiting", "ended"] = "expected"
    session_id: str | None = None
    cwd: str | None = None
    sandbox: str | None = None
    transcript_path: str | None = None
    created_at: float
    seen_at: float
    """When a hook last told of it; until then, when it was announced."""
    ended_at: float | None = None
    ended_why: str | None = None
    command: Command | None = None
    """The one that is open."""
    commands: int = 0
    turns: int = 0
    tools: int = 0
    tool: str | None = None
    stop_at: float | None = None
    """When the open command is complete, unless the agent goes on before."""
    inbox: tuple[str, ...] = ()
    """What it is told with the next answer that can carry it."""
    prompt_injected_at: float | None = None
    context_tokens: int | None = None
    polled_at: float = 0.0
    transcript_offset: int = 0
    transcript_turn: int = 0
    reconciled_at: float = 0.0

    def but(self, **changes: object) -> Agent:
        return self.model_copy(update=changes)


class Hook(BaseModel):
    """What of a hook's body matters here; each kind has its own part of it."""

    model_config = ConfigDict(frozen=True)
    cwd: str | None = None
    transcript_path: str | None = None
    prompt: str | None = None
    message: str | None = None
    last_assistant_message: str | None = None
    tool_name: str | None = None
    reason: str | None = None


class Step(NamedTuple):
    """The agent as it is then, and what is to be written with it."""

    agent: Agent
    writes: tuple[Command | Turn, ...] = ()
    context: str | None = None
    """What the agent is to be told."""


def apply(agent: Agent, kind: Kind, hook: Hook, *, now: float, delay: float) -> Step:
    """``delay``: seconds after which a stop is the end of the command. Late hooks of an ended agent change nothing."""
    if agent.state == "ended" and kind != "session-start":
        return Step(agent)
    known = {name: value for name in ("cwd", "transcript_path") if (value := getattr(hook, name)) is not None}
    agent = agent.but(seen_at=max(now, agent.seen_at), **known)
    if agent.state in ("expected", "ended"):
        agent = agent.but(state="idle", ended_at=None, ended_why=None)
    match kind:
        case "session-start":
            return _told(Step(agent))
        case "session-end":
            return end(agent, now, why=hook.reason or "session-end", by="session-end")
        case "user-prompt-submit":
            return _told(_prompted(agent, hook.prompt or "", now))
        case "stop":
            return _stopped(agent, hook.last_assistant_message or hook.message, now, delay)
        case "pre-tool-use":
            return Step(_going_on(agent).but(tool=hook.tool_name, tools=agent.tools + 1))
        case "post-tool-use":
            return Step((agent if agent.stop_at else _going_on(agent)).but(tool=None))
        case "permission-request":
            waiting = _going_on(agent, "waiting")
            return say(Step(waiting), "agent", "permission", hook.message or hook.tool_name or "", now)
        case "notification":
            waiting = agent if agent.stop_at else _going_on(agent, "waiting")
            return say(Step(waiting), "agent", "notification", hook.message or "", now)


def end(agent: Agent, now: float, *, why: str, by: str) -> Step:
    """The session is over. A command whose stop was only waited for is complete; one that was completed already is left
    as it is; any other was interrupted."""
    step = close(agent, now, "complete" if agent.stop_at else "interrupted", by=by)
    return step._replace(agent=step.agent.but(state="ended", ended_at=now, ended_why=why, tool=None))


def finish(agent: Agent, command: int, at: float, now: float) -> Step:
    """A stop that was put off until ``at``: nothing, when that command is over, or the agent went on meanwhile."""
    if agent.command is None or agent.command.number != command or agent.stop_at != at:
        return Step(agent)
    return close(agent, now, "complete", by="stop")


def close(agent: Agent, now: float, outcome: Outcome, *, by: str) -> Step:
    """The open command, if there is one, is over."""
    if agent.command is None:
        return Step(agent)
    over = agent.command.model_copy(update={"status": outcome, "ended_at": now, "ended_by": by})
    return Step(agent.but(state="idle", command=None, stop_at=None, tool=None), (over,))


def say(step: Step, role: str, kind: str, text: str, now: float, source: str = "hook") -> Step:
    """One turn more. What comes late still belongs to the last command."""
    agent = step.agent
    command = agent.command.number if agent.command else agent.commands or None
    told = {"agent": agent.number, "number": agent.turns + 1, "command": command, "role": role, "kind": kind}
    turn = Turn.model_validate({**told, "text": cut(text), "at": now, "source": source})
    return step._replace(agent=agent.but(turns=turn.number), writes=(*step.writes, turn))


def cut(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"


def _prompted(agent: Agent, prompt: str, now: float) -> Step:
    """Whoever speaks while a command is open adds to it; after a stop it is another command."""
    step = close(agent, now, "complete", by="user-prompt-submit") if agent.stop_at else Step(agent)
    agent = step.agent
    if agent.command is None:
        number = agent.commands + 1
        begun = Command(agent=agent.number, number=number, first_turn=agent.turns + 1, started_at=now)
        step = Step(agent.but(command=begun, commands=number), (*step.writes, begun))
    return say(step._replace(agent=_going_on(step.agent)), "user", "prompt", prompt, now)


def _stopped(agent: Agent, message: str | None, now: float, delay: float) -> Step:
    """Said twice, it is still the first time that counts."""
    if agent.command is None or agent.stop_at is not None:
        return Step(agent)
    step = Step(agent) if message is None else say(Step(agent), "agent", "answer", message, now)
    return step._replace(agent=step.agent.but(stop_at=now + delay, state="working"))


def _going_on(agent: Agent, state: str = "working") -> Agent:
    """Work on the open command, if any: a stop that was waited for was none."""
    return agent if agent.command is None else agent.but(state=state, stop_at=None)


def _told(step: Step) -> Step:
    """The answers to these two reach the agent's context."""
    inbox = step.agent.inbox
    return step._replace(agent=step.agent.but(inbox=()), context="\n\n".join(inbox)) if inbox else step
