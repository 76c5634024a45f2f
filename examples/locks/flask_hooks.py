"""Hooks of one agent run one after another, those of different agents concurrently. Flask, threads, SQLAlchemy.

flask --app examples.locks.flask_hooks run --with-threads        with HOLDFAST_URL=postgresql://…
"""

from __future__ import annotations

import os

from flask import Flask, abort
from flask.typing import ResponseReturnValue
from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, create_engine, make_url, select, update
from sqlalchemy.dialects.postgresql import ARRAY

from holdfast.integrations.flask import Holdfast

holdfast = Holdfast()
AGENT = Table("agent", MetaData(), Column("id", Integer, primary_key=True), Column("events", ARRAY(Text)))


def create_app(url: str | None = None, *, patience: float = 15.0) -> Flask:
    """One client and one pool of connections per process. Where the server forks after this, each worker has its own
    client and empties its copy of the pool."""
    where = url or os.environ["HOLDFAST_URL"]
    app = Flask(__name__)
    app.config["HOLDFAST_URL"] = where
    holdfast.init_app(app, locks_path="/locks")
    engine = create_engine(make_url(where).set(drivername="postgresql+psycopg"))
    os.register_at_fork(after_in_child=lambda: engine.dispose(close=False))
    app.extensions["engine"] = engine

    @app.post("/agents/<int(min=1, max=2147483647):agent>/hooks/<event>")
    def hook(agent: int, event: str) -> ResponseReturnValue:
        with holdfast.client.lock(("agent", agent), timeout=patience):  # 503 with Retry-After after ``patience``
            return {"events": record(engine, agent, event)}

    return app


def close(app: Flask) -> None:
    holdfast.close(app)
    app.extensions["engine"].dispose()


def record(engine: Engine, agent: int, event: str) -> int:
    """Two transactions, on connections of the application's own pool: the lock is on neither, and outlives both."""
    with engine.begin() as connection:
        events = connection.scalar(select(AGENT.c.events).where(AGENT.c.id == agent))
    if events is None:
        abort(404, f"there is no agent {agent}")
    events = [*events, event]
    with engine.begin() as connection:
        connection.execute(update(AGENT).where(AGENT.c.id == agent).values(events=events))
    return len(events)
