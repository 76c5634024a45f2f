"""A prompt and skills for an agent, once: it is told with the next answer that reaches its context.

Whoever asks may have looked at the agent before it waited for the lock. So the record is read anew under it, before
``prompt_injected_at`` is looked at.
"""

from __future__ import annotations

import time

from holdfast.gateway.agents import records
from holdfast.gateway.agents.lifecycle import Step, cut
from holdfast.gateway.context import Gateway


async def inject(here: Gateway, number: int, prompt: str, skills: list[str]) -> tuple[bool, float]:
    """Whether it was us, and when it was done."""
    await records.must_read(here.client, number)  # before we wait: whether there is one
    async with records.locked(here.client, number):
        before = await records.must_read(here.client, number)
        agent = before.agent
        if agent.prompt_injected_at is not None:
            return False, agent.prompt_injected_at
        now = time.time()
        text = cut("\n".join([prompt, *(f"Use the skill {skill}." for skill in skills)]))
        injected = agent.but(inbox=(*agent.inbox, text), prompt_injected_at=now)
        await records.commit(here, before, Step(injected))
        return True, now
