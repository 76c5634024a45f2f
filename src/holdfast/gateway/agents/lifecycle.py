"""What a hook does to an agent, as pure functions. The caller has the agent's lock, reads the clock and stores.

    expected ──> idle ──prompt──> working <──> waiting
                   ^                 │ stop, and the delay has passed
                   └─────────────────┘
    session-end leads to "ended" from every state, and only session-start leads out of it.

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
MAX_TEXT = 20_000


class AgentCommand(BaseModel):
    """What a prompt asked the agent to do, until it is complete."""

    model_config = ConfigDict(frozen=True)
    agent: int
    number: int
    status: Literal["running"] | Outcome = "running"
    first_turn: int
    started_at: float
    ended_at: float | None = None
    ended_by: str | None = None


class Turn(BaseModel):
    """One message, of the user or of the agent."""

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
    """When its last hook came; before the first one, when it was announced."""
    ended_at: float | None = None
    ended_why: str | None = None
    command: AgentCommand | None = None
    """The one that is open."""
    commands: int = 0
    turns: int = 0
    tools: int = 0
    tool: str | None = None
    stop_at: float | None = None
    """When the open command is complete, unless the agent goes on before."""
    inbox: tuple[str, ...] = ()
    """Texts for its context, sent with the next answer that reaches it."""
    prompt_injected_at: float | None = None
    context_tokens: int | None = None
    polled_at: float = 0.0
    transcript_offset: int = 0
    transcript_turn: int = 0
    reconciled_at: float = 0.0

    def but(self, **changes: object) -> Agent:
        return self.model_copy(update=changes)


class Hook(BaseModel):
    """The members of a hook's body that are used; each kind of hook has some of them."""

    model_config = ConfigDict(frozen=True)
    cwd: str | None = None
    transcript_path: str | None = None
    prompt: str | None = None
    message: str | None = None
    last_assistant_message: str | None = None
    tool_name: str | None = None
    reason: str | None = None


class AgentStep(NamedTuple):
    """The agent after a hook, and the commands and turns to write with it."""

    agent: Agent
    writes: tuple[AgentCommand | Turn, ...] = ()
    context: str | None = None
    """The text for the agent's context."""


def apply(agent: Agent, kind: Kind, hook: Hook, *, now: float, delay: float) -> AgentStep:
    """What the hook makes of ``agent``. ``delay``: seconds after a stop until the command is complete.

    A late hook of an ended agent changes nothing.
    """
    if agent.state == "ended" and kind != "session-start":
        return AgentStep(agent)
    paths = {name: value for name in ("cwd", "transcript_path") if (value := getattr(hook, name)) is not None}
    agent = agent.but(seen_at=max(now, agent.seen_at), **paths)
    if agent.state in ("expected", "ended"):
        agent = agent.but(state="idle", ended_at=None, ended_why=None)
    match kind:
        case "session-start":
            return _with_inbox(AgentStep(agent))
        case "session-end":
            return end(agent, now, why=hook.reason or "session-end", by="session-end")
        case "user-prompt-submit":
            return _with_inbox(_begin_or_continue(agent, hook.prompt or "", now))
        case "stop":
            return _stop(agent, hook.last_assistant_message or hook.message, now, delay)
        case "pre-tool-use":
            return AgentStep(_continue(agent).but(tool=hook.tool_name, tools=agent.tools + 1))
        case "post-tool-use":
            return AgentStep((agent if agent.stop_at else _continue(agent)).but(tool=None))
        case "permission-request":
            waiting = _continue(agent, "waiting")
            return add_turn(AgentStep(waiting), "agent", "permission", hook.message or hook.tool_name or "", now)
        case "notification":
            waiting = agent if agent.stop_at else _continue(agent, "waiting")
            return add_turn(AgentStep(waiting), "agent", "notification", hook.message or "", now)


def end(agent: Agent, now: float, *, why: str, by: str) -> AgentStep:
    """The session is over. An open command is complete if its stop was pending, else it was interrupted."""
    step = close(agent, now, "complete" if agent.stop_at else "interrupted", by=by)
    return step._replace(agent=step.agent.but(state="ended", ended_at=now, ended_why=why, tool=None))


def finish(agent: Agent, command: int, at: float, now: float) -> AgentStep:
    """Complete a command whose stop was due ``at``. No change when it is over, or the agent continued meanwhile."""
    if agent.command is None or agent.command.number != command or agent.stop_at != at:
        return AgentStep(agent)
    return close(agent, now, "complete", by="stop")


def close(agent: Agent, now: float, outcome: Outcome, *, by: str) -> AgentStep:
    """End the open command, if there is one."""
    if agent.command is None:
        return AgentStep(agent)
    command = agent.command.model_copy(update={"status": outcome, "ended_at": now, "ended_by": by})
    return AgentStep(agent.but(state="idle", command=None, stop_at=None, tool=None), (command,))


def add_turn(step: AgentStep, role: str, kind: str, text: str, now: float, source: str = "hook") -> AgentStep:
    """Add a turn to the open command; a late turn belongs to the last one."""
    agent = step.agent
    command = agent.command.number if agent.command else agent.commands or None
    turn = Turn.model_validate({
        "agent": agent.number, "number": agent.turns + 1, "command": command, "role": role, "kind": kind,
        "text": cut(text), "at": now, "source": source,
    })  # fmt: skip
    return step._replace(agent=agent.but(turns=turn.number), writes=(*step.writes, turn))


def cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def _begin_or_continue(agent: Agent, prompt: str, now: float) -> AgentStep:
    """A prompt continues the open command; after a stop it begins another one."""
    step = close(agent, now, "complete", by="user-prompt-submit") if agent.stop_at else AgentStep(agent)
    agent = step.agent
    if agent.command is None:
        number = agent.commands + 1
        command = AgentCommand(agent=agent.number, number=number, first_turn=agent.turns + 1, started_at=now)
        step = AgentStep(agent.but(command=command, commands=number), (*step.writes, command))
    return add_turn(step._replace(agent=_continue(step.agent)), "user", "prompt", prompt, now)


def _stop(agent: Agent, message: str | None, now: float, delay: float) -> AgentStep:
    """Schedule the completion of the open command. A second stop changes nothing."""
    if agent.command is None or agent.stop_at is not None:
        return AgentStep(agent)
    step = AgentStep(agent) if message is None else add_turn(AgentStep(agent), "agent", "answer", message, now)
    return step._replace(agent=step.agent.but(stop_at=now + delay, state="working"))


def _continue(agent: Agent, state: str = "working") -> Agent:
    """Cancel a pending stop of the open command: the agent still works on it."""
    return agent if agent.command is None else agent.but(state=state, stop_at=None)


def _with_inbox(step: AgentStep) -> AgentStep:
    """Empty the inbox into the answer. Only answers to session-start and user-prompt-submit reach the context."""
    inbox = step.agent.inbox
    return step._replace(agent=step.agent.but(inbox=()), context="\n\n".join(inbox)) if inbox else step
