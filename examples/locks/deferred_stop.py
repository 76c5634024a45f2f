"""Stop an agent a while from now, unless it is used again before that.

The lock is taken after the sleep, never across it: whoever held it through the sleep would keep every hook out. And
what was true before the sleep is read anew inside the lock, because anything may have happened meanwhile.
"""

from __future__ import annotations

import asyncio

import psycopg

import holdfast


async def stop_later(client: holdfast.AsyncClient, url: str, agent: int, *, delay: float) -> str:
    """What became of it: "stopped", "used again" or "gone"."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        asked = await _read(connection, agent)
        await asyncio.sleep(delay)
        async with client.lock(("agent", agent)):
            found = await _read(connection, agent)
            if found is None or found[0] != "running":
                return "gone"
            if found != asked:
                return "used again"
            await connection.execute("update agent set status = 'stopping' where id = %s", [agent])
            await asyncio.sleep(0)  # here the agent's process is ended
            await connection.execute("update agent set status = 'stopped' where id = %s", [agent])
            return "stopped"


async def _read(connection: psycopg.AsyncConnection, agent: int) -> tuple[str, float] | None:
    found = await connection.execute("select status, last_seen from agent where id = %s", [agent])
    return await found.fetchone()
