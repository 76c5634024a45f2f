"""holdfast in a Flask application: one client per process, 503 for what is taken, and an endpoint that lists locks.

    holdfast = Holdfast()

    def create_app():
        app = Flask(__name__)                       # HOLDFAST_URL in app.config, else in the environment
        holdfast.init_app(app, locks_path="/locks")
        return app

    @app.post("/agents/<int:agent>/hooks")
    def hook(agent):
        with holdfast.client.lock(("agent", agent)):    # 503 with Retry-After when it stays taken
            ...

Servers fork their workers before or after they load the application: each process makes a client of its own when it
first uses it. The answer to a request never names the holder, which is a host and a pid.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from typing import Any

import holdfast
from holdfast.extras import missing_extra
from holdfast.integrations.unavailable import UNAVAILABLE, unavailable
from holdfast.problem_json import MEDIA_TYPE, Problem

try:
    from flask import Flask, Response, current_app
except ModuleNotFoundError as error:
    raise missing_extra(error, "flask") from None

_EXTENSION = "holdfast"


class Holdfast:
    """The extension. One object may serve several applications."""

    def __init__(self, app: Flask | None = None, **options: Any) -> None:
        if app is not None:
            self.init_app(app, **options)

    def init_app(self, app: Flask, *, locks_path: str | None = None, retry_after: int = 1, **options: Any) -> None:
        """``locks_path``: the path of a page that lists all locks with their holders and waiters, as JSON; by default
        there is none. ``retry_after``: seconds. ``options`` are those of ``holdfast.Client``.

        The URL and the schema are HOLDFAST_URL and HOLDFAST_SCHEMA in ``app.config``, else in the environment.
        ValueError if there is no URL.
        """
        url, schema = app.config.get("HOLDFAST_URL"), app.config.get("HOLDFAST_SCHEMA")
        clients = _Clients({"url": url, "schema": schema, **options})
        clients.get()  # it opens nothing yet, and raises ValueError now instead of in the first request
        app.extensions[_EXTENSION] = clients

        def refuse(error: Exception) -> Response:
            problem = error if isinstance(error, Problem) else unavailable(error, retry_after)
            assert problem is not None
            return Response(problem.body(), problem.status, problem.headers, content_type=MEDIA_TYPE)

        for kind in (Problem, *UNAVAILABLE):
            app.register_error_handler(kind, refuse)
        if locks_path is not None:
            app.add_url_rule(locks_path, "holdfast_locks", _list_locks)

    @property
    def client(self) -> holdfast.Client:
        """The client of the current application in this process. RuntimeError outside an application context."""
        return client_of(current_app)

    def close(self, app: Flask) -> None:
        """Close the client that this process has used, if any."""
        app.extensions[_EXTENSION].close()


def client_of(app: Flask) -> holdfast.Client:
    """The client of ``app`` in this process, for threads without an application context."""
    clients: _Clients = app.extensions[_EXTENSION]
    return clients.get()


class _Clients:
    """The client of each process. A forked child makes a new one, and does not touch that of its parent."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._by_pid: dict[int, holdfast.Client] = {}

    def get(self) -> holdfast.Client:
        """Of two threads that make one at once, both get the first: a client opens nothing before it is used."""
        pid = os.getpid()
        return self._by_pid.get(pid) or self._by_pid.setdefault(pid, holdfast.Client(**self._options))

    def close(self) -> None:
        client = self._by_pid.pop(os.getpid(), None)
        if client is not None:
            client.close()


def _list_locks() -> Response:
    rows = [lock.as_dict() for lock in client_of(current_app).locks.list()]
    return Response(json.dumps(rows, default=_as_json), content_type="application/json")


def _as_json(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
