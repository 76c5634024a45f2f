"""Servers without session locks, and with such that exclude nobody: what needs them is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.database import session_locks
from holdfast.database.postgres import PostgresSession
from holdfast.lock import pooler
from holdfast.testing.lease_contract import LONG, waiting
from tests.children import eventually
from tests.lock.looks import advisory
from tests.pairs import ONE_FLAVOUR
from tests.poor_postgres import LIMIT, TIMEOUTS, stub_postgres
from tests.raw_session import Raw

Connect = Callable[..., Any]
REFUSED = (
    "permission denied for function pg_try_advisory_lock.*GRANT EXECUTE ON FUNCTION pg_catalog.pg_try_advisory_lock"
)
EMPTY = "do not exclude: two sessions got the same lock.*CockroachDB"
EACH = pytest.mark.parametrize(
    ("database", "cause"), [("poor_url", REFUSED), ("stub_url", EMPTY)], ids=["refused", "empty"]
)


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of a server is remembered in the process: here every test begins without."""
    monkeypatch.setattr(pooler, "_stay", set())
    monkeypatch.setattr(session_locks, "_exclude", set())


@pytest.fixture
def stub_url() -> str:
    return stub_postgres()


@EACH
def test_locks_are_refused_by_name(request: pytest.FixtureRequest, connect: Connect, database: str, cause: str) -> None:
    client = connect(request.getfixturevalue(database))
    for attempt in (client.lock("a").acquire, client.lock("a").try_acquire, client.lock(("agent", 7)).acquire):
        with pytest.raises(holdfast.SessionUnsafe, match=cause):
            attempt()


@ONE_FLAVOUR
@EACH
def test_a_lease_that_ends_with_its_session_is_refused_and_others_work(
    request: pytest.FixtureRequest, connect: Connect, database: str, cause: str
) -> None:
    """Where every lock is free, a standby would find every holder's session ended, and take its lease."""
    url = request.getfixturevalue(database)
    client, other = connect(url), connect(f"{url}?application_name=other")
    name = f"import-{database}"
    for _ in range(2):
        with pytest.raises(holdfast.SessionUnsafe, match=cause):
            client.lease(name, ttl=LONG, failover="session").acquire()
    grant = client.lease(name, ttl=LONG).acquire()
    assert other.lease(name, ttl=LONG).try_acquire() is None
    with waiting(lambda: other.lease(name, ttl=LONG).acquire(timeout=10 * LONG)) as won:
        assert grant.release() is True
    assert won[0].fence > grant.fence


@ONE_FLAVOUR
def test_locks_that_exclude_leave_nothing_of_the_probe(connect: Connect, postgres_url: str) -> None:
    client = connect(postgres_url)
    with client.lock("a"), client.lease("import", failover="session"):
        eventually(lambda: len(advisory(postgres_url)) == 2, "only the lock and the session's key are held")


def test_a_waiter_asks_once_whether_it_may_listen(monkeypatch: pytest.MonkeyPatch, poor_url: str) -> None:
    """A refused statement would be refused again: from then on the waiter polls."""
    calls: list[str] = []
    call = PostgresSession.call

    def counted(self: Any, name: str, *more: Any) -> Any:
        calls.append(name)
        return call(self, name, *more)

    monkeypatch.setattr(PostgresSession, "call", counted)
    with holdfast.Client(poor_url) as client, holdfast.Client(f"{poor_url}?application_name=waits") as waiter:
        waiter._engine.poll = 0.3
        grant = client.lease("import", ttl=LONG).acquire()
        with waiting(lambda: waiter.lease("import", ttl=LONG).acquire(timeout=10 * LONG)):
            eventually(lambda: "listen" in calls, "it has asked")
            polls = calls.count("lease_acquire") + 6
            eventually(lambda: calls.count("lease_acquire") >= polls, "it polls")
            assert grant.release() is True
    assert calls.count("listen") == 1


def test_the_timeouts_of_the_role_do_not_apply_to_sessions_of_holdfast(poor_url: str) -> None:
    raw = Raw(poor_url)
    try:
        settings = {row["name"]: row for row in raw.call("examine_settings")}
        ours = {name: settings[name]["setting"] for name in TIMEOUTS if name in settings}
        theirs = {name: settings[name]["reset_val"] for name in TIMEOUTS if name in settings}
        assert set(theirs.values()) == {LIMIT.replace("s", "000")}
        assert ours.pop("statement_timeout") == "30000"
        assert ours.pop("idle_in_transaction_session_timeout") == theirs["idle_in_transaction_session_timeout"]
        assert set(ours.values()) == {"0"}
    finally:
        raw.close()
