"""The Flask extension: a client per process, 503 for what is taken or uncertain, and the list of locks."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import pytest
from flask import Flask

import holdfast
from holdfast.integrations.flask import Holdfast, client_of
from tests.children import PATIENCE, eventually

ERRORS = [
    holdfast.NotAcquired("lease 'x' is held by web-3:4711", name="x", holder="web-3:4711", expires_at=None),
    holdfast.LeaseLost("lease 'x' is lost: it expired"),
    holdfast.LockLost("lock 'x' is lost with its session"),
    holdfast.OwnershipUnknown("no answer"),
    holdfast.FencedOut("lease 'x' has passed on"),
    holdfast.Unreachable("no server at db1"),
]


def create_app(url: str, **options: Any) -> tuple[Flask, Holdfast]:
    app, extension = Flask(__name__), Holdfast()
    app.config["HOLDFAST_URL"] = url
    extension.init_app(app, locks_path="/locks", **options)

    @app.get("/agents/<int:agent>")
    def serve(agent: int) -> str:
        with extension.client.lock(("agent", agent), timeout=0):
            return "served"

    @app.get("/errors/<int:number>")
    def fail(number: int) -> str:
        raise ERRORS[number]

    return app, extension


def test_what_is_taken_is_503_with_retry_after_and_no_holder(either: str) -> None:
    app, extension = create_app(either, retry_after=7)
    with holdfast.Client(either) as other:
        with other.lock(("agent", 7)):
            busy, free = app.test_client().get("/agents/7"), app.test_client().get("/agents/8")
            assert (busy.status_code, busy.headers["Retry-After"]) == (503, "7")
            assert busy.content_type == "application/problem+json"
            assert json.loads(busy.data)["title"] == "Service Unavailable"
            assert str(os.getpid()) not in busy.text
            assert (free.status_code, free.text) == (200, "served")
        assert app.test_client().get("/agents/7").text == "served"
    extension.close(app)


@pytest.mark.parametrize("number", range(len(ERRORS)), ids=[type(error).__name__ for error in ERRORS])
def test_what_is_uncertain_is_503_as_well(sqlite_url: str, number: int) -> None:
    app, _ = create_app(sqlite_url)
    answer = app.test_client().get(f"/errors/{number}")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "x" not in json.loads(answer.data)["detail"].split()
    assert "4711" not in answer.text


def test_the_locks_are_listed_with_their_waiters(postgres_url: str) -> None:
    app, extension = create_app(postgres_url)
    with app.app_context(), extension.client.lock(("agent", 7)):
        waiting = threading.Thread(target=lambda: _wait(postgres_url))
        waiting.start()
        listed: list[dict[str, Any]] = []

        def lists_both() -> bool:
            listed[:] = app.test_client().get("/locks").json or []
            return sorted(row["granted"] for row in listed) == [False, True]

        eventually(lists_both, "the holder and the waiter are listed")
        assert {(row["namespace"], row["entity_id"]) for row in listed} == {("agent", 7)}
    waiting.join(PATIENCE)
    extension.close(app)


def _wait(url: str) -> None:
    with holdfast.Client(url) as client, client.lock(("agent", 7), timeout=PATIENCE):
        pass


def test_each_process_has_a_client_of_its_own_and_applications_do_not_share(either: str, sqlite_url: str) -> None:
    """A worker that was forked after the first request."""
    app, extension = create_app(either)
    other = Flask("other")
    other.config["HOLDFAST_URL"] = sqlite_url
    extension.init_app(other, prepared=False)
    with app.app_context():
        first = extension.client
        assert client_of(app) is first
    assert client_of(other) is not first
    clients = [client_of(app)]
    threads = [threading.Thread(target=lambda: clients.append(client_of(app))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert {id(client) for client in clients} == {id(first)}
    with first.lock(("agent", 7)):
        pid = os.fork()
        if pid == 0:
            try:
                is_own = client_of(app) is not first
                answers = [app.test_client().get(f"/agents/{number}").status_code for number in (7, 8)]
                os._exit(0 if is_own and answers == [503, 200] else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert app.test_client().get("/agents/8").text == "served"
    extension.close(app)
    extension.close(app)
    assert client_of(app) is not first


def test_without_a_database_the_application_does_not_start(monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> None:
    monkeypatch.delenv("HOLDFAST_URL", raising=False)
    with pytest.raises(ValueError, match="no database URL"):
        Holdfast(Flask("app"))
    monkeypatch.setenv("HOLDFAST_URL", sqlite_url)
    app = Flask("app")
    Holdfast(app)
    assert app.test_client().get("/locks").status_code == 404
    with pytest.raises(RuntimeError, match="application context"):
        _ = Holdfast().client
