"""Injects a prompt and skills into an agent, once: the next answer that reaches its context contains them.

The record is read again under the lock before ``prompt_injected_at`` is checked: two requests may both have read it
before they waited for the lock.
"""

from __future__ import annotations

import time

from holdfast.gateway.agents import records
from holdfast.gateway.agents.lifecycle import AgentStep, cut
from holdfast.gateway.context import Gateway


async def inject(gateway: Gateway, number: int, prompt: str, skills: list[str]) -> tuple[bool, float]:
    """Whether this call injected it, and when it was injected. Raises Problem 404 without waiting for the lock."""
    await records.read_or_404(gateway.client, number)
    async with records.locked(gateway.client, number):
        before = await records.read_or_404(gateway.client, number)
        agent = before.agent
        if agent.prompt_injected_at is not None:
            return False, agent.prompt_injected_at
        now = time.time()
        text = cut("\n".join([prompt, *(f"Use the skill {skill}." for skill in skills)]))
        injected = agent.but(inbox=(*agent.inbox, text), prompt_injected_at=now)
        await records.commit(gateway, before, AgentStep(injected))
        return True, now
