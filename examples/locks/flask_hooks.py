"""Hooks of one agent run one after another, those of different agents concurrently. Flask, threads.

flask --app examples.locks.flask_hooks run --with-threads        with HOLDFAST_URL=postgresql://…
"""

from __future__ import annotations

import os

from flask import Flask, abort
from flask.typing import ResponseReturnValue
from psycopg_pool import ConnectionPool

import holdfast


def create_app(url: str | None = None, *, patience: float = 15.0) -> Flask:
    """One client and one pool per process. With a server that forks, create the app after the fork."""
    where = url or os.environ["HOLDFAST_URL"]
    app = Flask(__name__)
    client = holdfast.Client(where)
    pool = ConnectionPool(where, min_size=1, open=True)
    app.extensions.update(holdfast=client, pool=pool)

    @app.post("/agents/<int(min=1, max=2147483647):agent>/hooks/<event>")
    def hook(agent: int, event: str) -> ResponseReturnValue:
        try:
            with client.lock(("agent", agent), timeout=patience):
                return {"events": record(pool, agent, event)}
        except holdfast.AcquireTimeout:
            return {"error": f"agent {agent} is busy"}, 503, {"Retry-After": "1"}

    return app


def close(app: Flask) -> None:
    app.extensions["holdfast"].close()
    app.extensions["pool"].close()


def record(pool: ConnectionPool, agent: int, event: str) -> int:
    """Two transactions, on connections of the application's own pool: the lock is on neither, and outlives both."""
    with pool.connection() as connection:
        row = connection.execute("select events from agent where id = %s", [agent]).fetchone()
    if row is None:
        abort(404, f"there is no agent {agent}")
    events = [*row[0], event]
    with pool.connection() as connection:
        connection.execute("update agent set events = %s where id = %s", [events, agent])
    return len(events)
