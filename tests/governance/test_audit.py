"""``client.audit.list``, on every engine and in both flavours; on SQLite, acts and their entries."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

import holdfast
from tests.children import eventually
from tests.lineage.recording_sink import RecordingSink

Connect = Callable[..., Any]
JANE: dict[str, Any] = {"actor": "jane", "reason": "its machine is gone"}


def test_the_latest_of_one_action_or_actor_are_listed_however_many_others_came_later(
    connect: Connect, url: str
) -> None:
    client = connect(url)
    for action, actor in (("a.one", "jane"), ("a.two", "jane"), ("a.one", "bob"), ("a.two", "bob"), ("a.two", "bob")):
        client.audit.end(client.audit.begin(action, "it", actor=actor, reason="why"), "done")

    def listed(**options: Any) -> list[tuple[str, str]]:
        return [(entry.action, entry.actor) for entry in client.audit.list(**options)]

    assert listed(action="a.one") == [("a.one", "bob"), ("a.one", "jane")]
    assert listed(actor="jane", limit=1) == [("a.two", "jane")]
    assert listed(action="a.one", actor="jane") == [("a.one", "jane")]
    assert listed(action="a.three") == []
    assert len(listed()) == 5
    for options, argument in (({"action": ""}, "action"), ({"actor": "a\nb"}, "actor"), ({"limit": 0}, "limit")):
        with pytest.raises(ValueError, match=argument):
            listed(**options)


ACTS: dict[str, Callable[[Any, Any], object]] = {
    "lease_recall": lambda client, grant: client.leases.recall("held", fence=grant.fence, **JANE),
    "lease_force_release": lambda client, grant: client.leases.force_release("held", **JANE),
    "operation_reset": lambda client, grant: client.operations.reset("done", **JANE),
    "operation_complete": lambda client, grant: client.operations.complete("failed", 7, **JANE),
    "operation_rollback": lambda client, grant: client.operations.rollback("undone", **JANE),
    "review_decide": lambda client, grant: client.reviews.approve(client.reviews.list()[0].id, **JANE),
    "relay_remove": lambda client, grant: client.relays.remove("r", **JANE),
    "lease_wipe": lambda client, grant: client.leases.wipe(grant),
}


def is_expired(client: Any, given: dict[str, Any]) -> bool:
    return bool(client.operations.expire(**given) == 1)


def test_the_log_is_cut_and_fences_are_raised_for_the_record(connect: Connect, url: str) -> None:
    """With the actor and the reason that were given; a program that does it from a timer is named by its process."""
    client = connect(url)
    future = datetime.now(UTC) + timedelta(hours=1)
    for name, given in (("a", JANE), ("b", {})):
        client.operation(name, keep=0.001).run(lambda: 1)
        eventually(partial(is_expired, client, given), "its result has expired")
        assert client.operations.expire(**given) == 0
        assert client.operations.archive(future, lambda lines: None, **given).operations == 1
        assert client.operations.archive(future, lambda lines: None, **given).operations == 0
    above = client.leases.raise_fences(**JANE) + 1000
    assert client.leases.raise_fences(above=above, **JANE) >= above
    entries = [(each.action, each.subject, each.outcome) for each in reversed(client.audit.list())]
    assert entries == [
        ("operation_expire", "expired results", "done"), ("wal_archive", "a", "done"),
        ("operation_expire", "expired results", "done"), ("wal_archive", "b", "done"),
        ("fence.raise", "fences", "done"), ("fence.raise", "fences", "done"),
    ]  # fmt: skip
    named = {(each.actor, each.reason) for each in client.audit.list(actor="jane")}
    assert named == {tuple(JANE.values())}
    [archived] = [each for each in client.audit.list(action="wal_archive") if each.actor != "jane"]
    assert str(os.getpid()) in archived.actor
    assert archived.reason.startswith("archived: it ended before")
    acts: list[Callable[..., object]] = [
        lambda **said: client.operations.expire(**said),
        lambda **said: client.operations.archive(future, lambda lines: None, **said),
        lambda **said: client.leases.raise_fences(**{**JANE, **said}),
    ]
    for act in acts:
        for wrong in ({"actor": " "}, {"reason": ""}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                act(**wrong)
    assert len(client.audit.list()) == len(entries)


def test_fences_are_not_raised_without_an_entry_that_stays(either: str) -> None:
    """No rollback lowers them, so the entry is committed before."""
    with holdfast.Client(either) as client:
        fence = client.lease("a", ttl=600).acquire().fence
        ended = client.audit.begin("fence.raise", "fences", **JANE)
        client.audit.end(ended, "done")
        for entry in (ended, client.audit.begin("fence.raise", "others", **JANE), 0):
            with pytest.raises(holdfast.Refused, match="first begin an audit entry"):
                client.leases.raise_fences(**JANE, above=fence + 10**9, entry=entry)
        assert client.lease("b", ttl=600).acquire().fence < fence + 10**9


def fails() -> None:
    raise OSError("no answer")


def state(file: sqlite3.Connection) -> list[Any]:
    tables = [f"holdfast_{name}" for name in ("audit", "review", "relay", "idempotency_log")]
    queries = [f"select * from {table}" for table in tables]
    queries += ["select wanted from holdfast_beat b join holdfast_lease l on l.beat = b.id where name = 'held'"]
    return [file.execute(query).fetchall() for query in [*queries, "select * from holdfast_lease where name = 'held'"]]


@pytest.mark.parametrize("action", ACTS)
def test_an_act_and_its_entry_are_written_together_or_not_at_all(sqlite_url: str, action: str) -> None:
    """As on PostgreSQL, see tests/database/internals/test_roles.py."""
    path = sqlite_url.removeprefix("sqlite:///")
    with holdfast.Client(sqlite_url) as client, closing(sqlite3.connect(path, isolation_level=None)) as file:
        client.operations.register("undo", rollback=int)
        handle = client._guard_lease if action == "lease_wipe" else client.lease
        grant = handle("held", ttl=3600).acquire()
        client.relay("r", RecordingSink()).step()
        client.operation("done").run(lambda: 1)
        client.operation("undone", rollback="undo").run(lambda: 1)
        for error in (OSError, holdfast.OperationFailed):  # the second opens a review
            with pytest.raises(error, match="no answer"):
                client.operation("failed", retry=holdfast.Retry(attempts=1)).run(fails)
        file.execute("create trigger no_room before insert on holdfast_audit begin select raise(abort, 'no room'); end")
        before = state(file)
        with pytest.raises(holdfast.EngineError, match="no room"):
            ACTS[action](client, grant)
        assert state(file) == before
        file.execute("drop trigger no_room")
        ACTS[action](client, grant)
        assert sum(now != was for now, was in zip(state(file), before, strict=True)) > (action != "lease_wipe")
        [entry] = client.audit.list()
        assert (entry.action, entry.role, entry.outcome) == (action, None, "done")
        assert entry.reason == (JANE["reason"] if action != "lease_wipe" else "wiped under guard 'held'")
