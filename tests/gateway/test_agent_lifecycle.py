"""What hooks do to an agent, without a store: any hooks, in any order, twice, and after the end."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.gateway.agents import worker_rules
from holdfast.gateway.agents.lifecycle import KINDS, Agent, AgentCommand, AgentStep, Hook, Kind, Turn, apply, finish
from holdfast.gateway.agents.transcript import CHUNK, TranscriptEntry, entries, tokens, whole_lines

FRESH = Agent(number=7, created_at=0.0, seen_at=0.0)
DELAY = 5.0
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""How fast the machine makes examples says nothing about them."""
SPOKEN = Hook(prompt="do it", message="done", tool_name="Bash")

events = st.one_of(
    st.tuples(st.sampled_from(KINDS), st.floats(0, 20)),
    st.tuples(st.sampled_from(["finish", "watchdog", "reaper"]), st.floats(0, 20)),
)


def run(*kinds: Kind, agent: Agent = FRESH, now: float = 1.0) -> Agent:
    for kind in kinds:
        agent = apply(agent, kind, SPOKEN, now=now, delay=DELAY).agent
    return agent


def step_of(agent: Agent, event: str, now: float) -> AgentStep:
    match event:
        case "finish":  # of any command, at any time: late ones, and such as were withdrawn
            number = agent.command.number if agent.command else agent.commands
            return finish(agent, number, agent.stop_at or 0.0, now)
        case "watchdog":
            return worker_rules.watch(agent, now, 30.0)
        case "reaper":
            return worker_rules.reap(agent, now, 60.0, sandbox_gone=False)
    kind = next(each for each in KINDS if each == event)
    return apply(agent, kind, SPOKEN, now=now, delay=DELAY)


@UNHURRIED
@given(st.lists(events, max_size=40))
def test_whatever_happens_in_whatever_order_the_agent_makes_sense(happened: list[tuple[str, float]]) -> None:
    agent, now = FRESH, 0.0
    begun: list[int] = []
    over: list[int] = []
    turns: list[int] = []
    for event, later in happened:
        now += later
        was, step = agent, step_of(agent, event, now)
        agent = step.agent
        begun += [each.number for each in step.writes if isinstance(each, AgentCommand) and each.status == "running"]
        over += [each.number for each in step.writes if isinstance(each, AgentCommand) and each.status != "running"]
        turns += [each.number for each in step.writes if isinstance(each, Turn)]
        assert (agent.state in ("working", "waiting")) == (agent.command is not None)
        assert agent.stop_at is None or agent.command is not None
        assert (agent.state == "ended") == (agent.ended_at is not None) == (agent.ended_why is not None)
        assert agent.seen_at >= was.seen_at
        if was.state == "ended" and event != "session-start":
            assert (step.agent, step.writes) == (was, ())
    assert turns == list(range(1, agent.turns + 1)), "no gap, and none twice"
    assert begun == list(range(1, agent.commands + 1))
    still_open = [agent.command.number] if agent.command else []
    assert over + still_open == begun, "each is over once, in its order, but for the one that is open"


@pytest.mark.parametrize("kind", ["session-start", "session-end", "stop", "pre-tool-use", "post-tool-use"])
@pytest.mark.parametrize("before", [(), ("user-prompt-submit",), ("user-prompt-submit", "stop"), ("session-end",)])
def test_the_same_hook_twice_is_as_good_as_once(kind: Kind, before: tuple[Kind, ...]) -> None:
    once = run(*before, kind)
    twice = apply(once, kind, SPOKEN, now=1.0, delay=DELAY)
    assert twice.writes == ()
    assert twice.agent.but(tools=once.tools) == once


def test_a_second_prompt_adds_to_the_open_command_and_after_a_stop_it_is_another_one() -> None:
    agent = run("user-prompt-submit", "user-prompt-submit")
    assert (agent.commands, agent.turns, agent.state) == (1, 2, "working")
    agent = run("stop", agent=agent)
    step = apply(agent, "user-prompt-submit", SPOKEN, now=2.0, delay=DELAY)
    assert [(each.number, each.status) for each in step.writes if isinstance(each, AgentCommand)] == [
        (1, "complete"),
        (2, "running"),
    ]


def test_a_deferred_stop_completes_once_and_not_when_the_agent_went_on() -> None:
    agent = run("user-prompt-submit", "stop")
    assert (agent.stop_at, agent.state) == (1.0 + DELAY, "working")
    done = finish(agent, 1, 6.0, 6.0)
    assert [(each.status, each.ended_by) for each in done.writes if isinstance(each, AgentCommand)] == [
        ("complete", "stop")
    ]
    assert finish(done.agent, 1, 6.0, 6.0) == AgentStep(done.agent), "it is complete already"
    assert finish(agent, 2, 6.0, 6.0) == AgentStep(agent), "it was another command's"
    went_on = run("pre-tool-use", agent=agent)
    assert finish(went_on, 1, 6.0, 6.0) == AgentStep(went_on)
    stopped_again = run("stop", agent=went_on, now=3.0)
    assert finish(stopped_again, 1, 6.0, 6.0) == AgentStep(stopped_again), (
        "the first stop was withdrawn, the second is not due"
    )


@pytest.mark.parametrize(
    ("before", "found"),
    [
        (("user-prompt-submit",), ["interrupted"]),
        (("user-prompt-submit", "stop"), ["complete"]),
        ((), []),
    ],
)
def test_the_end_of_a_session_ends_its_command(before: tuple[Kind, ...], found: list[str]) -> None:
    step = apply(run(*before), "session-end", SPOKEN, now=2.0, delay=DELAY)
    assert [each.status for each in step.writes if isinstance(each, AgentCommand)] == found
    stopped = finish(run("user-prompt-submit", "stop"), 1, 6.0, 6.0).agent
    assert apply(stopped, "session-end", SPOKEN, now=7.0, delay=DELAY).writes == (), "it finds it completed"


def test_what_is_injected_is_told_once_by_an_answer_that_reaches_the_agent() -> None:
    agent = FRESH.but(inbox=("be brief", "use skill x"))
    untold = apply(agent, "pre-tool-use", SPOKEN, now=1.0, delay=DELAY)
    assert (untold.context, untold.agent.inbox) == (None, agent.inbox)
    told = apply(untold.agent, "user-prompt-submit", SPOKEN, now=1.0, delay=DELAY)
    assert (told.context, told.agent.inbox) == ("be brief\n\nuse skill x", ())


def test_what_the_transcript_says_and_no_hook_told_becomes_a_turn() -> None:
    agent = run("user-prompt-submit", "stop")
    prompted = apply(FRESH, "user-prompt-submit", SPOKEN, now=1.0, delay=0)
    turns = [each for each in prompted.writes if isinstance(each, Turn)]
    said = [TranscriptEntry("user", "do it"), TranscriptEntry("agent", "looking"), TranscriptEntry("user", "do it")]
    step = worker_rules.reconcile(agent, said, turns, 9.0, offset=120, is_end=True)
    added = [(each.number, each.role, each.text, each.source) for each in step.writes if isinstance(each, Turn)]
    assert added == [(3, "agent", "looking", "transcript"), (4, "user", "do it", "transcript")]
    assert (step.agent.transcript_offset, step.agent.transcript_turn, step.agent.reconciled_at) == (120, 4, 9.0)
    assert worker_rules.reconcile(agent, [], [], 9.0, offset=1, is_end=False).agent.reconciled_at == 0.0, (
        "there is more"
    )


def test_a_transcript_read_in_portions_adds_nothing_that_a_hook_reported() -> None:
    """The hooks of a long transcript have all reported before its first portion is compared."""
    prompted = apply(FRESH, "user-prompt-submit", SPOKEN, now=1.0, delay=0)
    [first] = [each for each in prompted.writes if isinstance(each, Turn)]
    turns = [first, first.model_copy(update={"number": 2}), first.model_copy(update={"number": 3})]
    agent, portion = prompted.agent.but(turns=3), [TranscriptEntry("user", first.text)]
    unseen = TranscriptEntry("agent", "looking")
    step = worker_rules.reconcile(agent, [*portion, unseen], turns, 9.0, offset=50, is_end=False)
    assert [each.text for each in step.writes if isinstance(each, Turn)] == ["looking"]
    added = [each for each in step.writes if isinstance(each, Turn)]
    rest = [each for each in [*turns, *added] if each.number > step.agent.transcript_turn]
    last = worker_rules.reconcile(step.agent, portion * 2, rest, 9.0, offset=90, is_end=True)
    assert last.writes == ()
    assert (last.agent.transcript_offset, last.agent.transcript_turn, last.agent.reconciled_at) == (90, 4, 9.0)


@UNHURRIED
@given(st.binary(max_size=200))
def test_no_transcript_is_too_strange_to_be_read(data: bytes) -> None:
    assert entries(data) == [] or all(each.text for each in entries(data))
    assert data.startswith(whole_lines(data))
    tokens(data)


def test_a_transcript_is_read_up_to_its_last_whole_line() -> None:
    user = b'{"type": "user", "message": {"content": "hello"}}\n'
    tool = b'{"type": "user", "message": {"content": [{"type": "tool_result", "content": "x"}]}}\n'
    spoken = b'{"type": "assistant", "message": {"content": [{"type": "text", "text": "hi"}],'
    usage = b' "usage": {"input_tokens": 10, "cache_read_input_tokens": 200, "output_tokens": 5}}}\n'
    data = user + tool + b'[1]\n{"type": 1, "message": {}}\n' + spoken + usage
    assert entries(data) == [TranscriptEntry("user", "hello"), TranscriptEntry("agent", "hi")]
    assert tokens(data) == 215
    assert whole_lines(data + b'{"type"') == data
    assert len(whole_lines(b"x" * CHUNK)) == CHUNK, "what is no line is given up"
