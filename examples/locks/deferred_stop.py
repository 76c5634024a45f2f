"""Stop an agent after a delay, unless it is used again before that.

The lock is acquired after the sleep, never held across it: otherwise it would block every hook. The state from before
the sleep is read again under the lock, because it may have changed.
"""

from __future__ import annotations

import asyncio

import psycopg

import holdfast


async def stop_later(client: holdfast.AsyncClient, url: str, agent: int, *, delay: float) -> str:
    """The outcome: "stopped", "used again" or "gone"."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        before = await _read(connection, agent)
        await asyncio.sleep(delay)
        async with client.lock(("agent", agent)):
            current = await _read(connection, agent)
            if current is None or current[0] != "running":
                return "gone"
            if current != before:
                return "used again"
            await connection.execute("update agent set status = 'stopping' where id = %s", [agent])
            await asyncio.sleep(0)  # here the agent's process would be ended
            await connection.execute("update agent set status = 'stopped' where id = %s", [agent])
            return "stopped"


async def _read(connection: psycopg.AsyncConnection, agent: int) -> tuple[str, float] | None:
    cursor = await connection.execute("select status, last_seen from agent where id = %s", [agent])
    return await cursor.fetchone()
