"""A background sweep that blocks no hooks: it skips agents whose lock is held.

It commits inside each lock, so that no transaction stays open for the duration of the work. The next sweep retries the
skipped agents.
    python -m examples.locks.sweeper postgresql://…
"""

from __future__ import annotations

import sys
import time
from typing import Any

import psycopg

import holdfast

SILENT = 60.0


def sweep(client: holdfast.Client, connection: psycopg.Connection[Any], *, now: float) -> dict[str, list[int]]:
    """Mark agents that have been silent for a minute, then stop them. A marked agent whose lock is free was left by a
    sweep that died: it is stopped, too."""
    late = now - SILENT
    rows = connection.execute("select id from agent where status <> 'stopped' and last_seen < %s order by id", [late])
    agents = [agent for (agent,) in rows]
    connection.commit()
    done: dict[str, list[int]] = {"stopped": [], "skipped": [], "fine": []}
    for agent in agents:
        with client.lock(("agent", agent)).or_skip() as grant:
            if grant is None:
                done["skipped"].append(agent)
                continue
            marked = connection.execute(
                "update agent set status = 'stopping' where id = %s and status <> 'stopped' and last_seen < %s",
                [agent, late],
            )
            connection.commit()  # the lock is kept
            if not marked.rowcount:  # the agent was seen since the query above
                done["fine"].append(agent)
                continue
            stop(agent)
            grant.check()  # raises if the lock was lost meanwhile
            connection.execute("update agent set status = 'stopped' where id = %s", [agent])
            connection.commit()
            done["stopped"].append(agent)
    return done


def stop(agent: int) -> None:
    print(f"stopping agent {agent}", flush=True)


if __name__ == "__main__":
    with holdfast.Client(sys.argv[1]) as client, psycopg.connect(sys.argv[1]) as connection:
        print(sweep(client, connection, now=time.time()))
