"""Shared by the examples in this folder: a table of agents, and the connections to it.

Each example reads, computes and writes in separate transactions. Between two of them only the lock excludes others,
so it must not end with a commit.
"""

from __future__ import annotations

import psycopg

TABLE = """
create table if not exists agent (
    id        int primary key,
    status    text not null default 'running',
    last_seen double precision not null default 0,
    events    text[] not null default '{}'
)
"""


def create_table(url: str, *agents: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(TABLE)
        for agent in agents:
            connection.execute("insert into agent (id) values (%s) on conflict do nothing", [agent])
