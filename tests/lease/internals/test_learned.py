"""A loss is told whoever learns of it first, and nobody waits for a database that is silent."""

from __future__ import annotations

import gc
import sqlite3
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.database import engine as _sync_engine
from holdfast.database import engine_async as _async_engine
from holdfast.database.background import PendingStatement
from holdfast.lease import grant as _sync_grant
from holdfast.lease import grant_async as _async_grant
from holdfast.lease.keeper import keeper_of
from holdfast.testing import Proxy
from tests.children import PATIENCE, Child, eventually, query, rows
from tests.pairs import EACH_ONCE, ONE_FLAVOUR

Connect = Callable[..., Any]
WHY: dict[str, Any] = {"actor": "operator", "reason": "test"}


def open_connection(url: str) -> Any:
    path = url.removeprefix("sqlite:///")
    return psycopg.connect(url) if path == url else sqlite3.connect(path)


@EACH_ONCE
def test_a_renewal_that_learns_of_the_loss_tells_it_once(connect: Connect, either: str) -> None:
    client, told = connect(either), list[Any]()
    grant = client.lease("import", ttl=600, on_lost=told.append).acquire()
    client.leases.force_release("import", **WHY)
    for _ in range(2):
        with pytest.raises(holdfast.LeaseLost, match="'import'"):
            grant.renew()
    eventually(lambda: told, "on_lost is called long before the next heartbeat")
    assert grant.release() is False
    assert len(told) == 1


def test_a_transaction_that_is_refused_is_a_loss_and_told(either: str) -> None:
    told: list[Any] = []
    with holdfast.Client(either) as client, closing(open_connection(either)) as connection:
        for at in ("start", "commit"):
            grant = client.lease("import", ttl=600, on_lost=told.append).acquire()
            client.leases.force_release("import", **WHY)
            with pytest.raises(holdfast.FencedOut), grant.transaction(connection, at=at):
                pass
            with pytest.raises(holdfast.LeaseLost, match="taken away by force by operator: test"):
                grant.check()
        grant = client.lease("import", ttl=600, on_lost=told.append).acquire()
        client.leases.force_release("import", **WHY)
        with pytest.raises(holdfast.FencedOut):
            grant.protect(connection)
        assert grant.remaining() == 0
        eventually(lambda: len(told) == 3, "each is told")


@EACH_ONCE
def test_an_adopted_lease_takes_no_on_lost_that_it_could_not_keep(connect: Connect, either: str) -> None:
    client = connect(either)
    token = client.lease("import").acquire().token
    with pytest.raises(ValueError, match=r"on_lost='exit'.*grant\.check\(\)"):
        client.lease("import", on_lost="exit").adopt(token)
    assert client.lease("import").adopt(token).token == token


AN_HOUR = 3600.0


@pytest.fixture
def calls_that_may_take_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are given a limit that is shorter."""
    for grant, flavour in ((_sync_grant.LeaseGrant, ""), (_async_grant.AsyncLeaseGrant, "_async")):
        monkeypatch.setitem(grant.release.__kwdefaults__ or {}, "timeout", AN_HOUR)
        for module in ("lease.grant", "lease.handle", "recipes.shards"):
            monkeypatch.setattr(f"holdfast.{module}{flavour}.CALL_TIMEOUT", AN_HOUR)
    for engine in (_sync_engine.Engine, _async_engine.AsyncEngine):
        for function in (engine.call, engine.call_when_free):
            monkeypatch.setitem(function.__kwdefaults__ or {}, "timeout", AN_HOUR)


@ONE_FLAVOUR
@pytest.mark.usefixtures("calls_that_may_take_an_hour")
def test_in_a_silence_nobody_waits_for_longer_than_the_lease_is_trusted(connect: Connect, postgres_url: str) -> None:
    """To leave a block whose lease is lost by then; one that is left at once; the work of an elector; and shards."""
    begun, silent, terms = threading.Barrier(4), threading.Event(), list[Any]()

    def leave(block: Any) -> None:
        with block:
            begun.wait(PATIENCE)
            silent.wait()

    def lead(term: Any) -> None:
        terms.append(term)
        if len(terms) == 1:  # if the machine pauses, a term may be lost and another begin
            begun.wait(PATIENCE)
        term.stopping.wait()

    with Proxy(postgres_url) as way:
        client, elsewhere, third = connect(way.url), holdfast.Client(way.url), holdfast.Client(way.url)
        elector = elsewhere.elector("work", ttl=1.5, renew_every=0.3, retry_every=0.3)
        others = [
            threading.Thread(target=leave, args=(elsewhere.lease("block", ttl=1.5),)),
            threading.Thread(target=leave, args=(third.shards("sweep", 3, ttl=1.5),)),
            threading.Thread(target=elector.run, args=(lead,)),
        ]
        for each in others:
            each.start()
        with client.lease("import", ttl=1.5) as grant:
            begun.wait(PATIENCE)
            way.stall()
            silent.set()
            elector.stop()
            eventually(lambda: grant.lost, "its trust is over")
        for each in others:
            each.join(PATIENCE)
        waiting = [each for each in others if each.is_alive()]
        way.heal()
        assert waiting == [], "until somebody answers"
        eventually(lambda: rows(postgres_url)["lease"] == 0, "all are released when somebody answers")
        elsewhere.close()
        third.close()


def test_housekeeping_that_has_to_wait_costs_no_lease_that_lives_with_its_session(postgres_url: str) -> None:
    with holdfast.Client(postgres_url) as client, psycopg.connect(postgres_url) as other:
        grant = client.lease("import", ttl=600, failover="session").acquire()
        other.execute("lock table holdfast.history in exclusive mode")
        keeper_of(client._database).purge()
        tried = threading.Event()
        client._engine.background.call_later(0.0, tried.set)
        assert tried.wait(PATIENCE)
        grant.check()


def test_what_cannot_be_released_at_exit_keeps_nothing_else(postgres_url: str) -> None:
    program = """
    import sys, holdfast, holdfast.database.background, holdfast.lease.grant, psycopg
    holdfast.lease.grant._RELEASE_PATIENCE = 0.2
    holdfast.database.background.EXIT_BUDGET = 30.0  # a busy machine needs longer
    client, connection = holdfast.Client(sys.argv[1]), psycopg.connect(sys.argv[1])
    other = client.lease("other", ttl=600).acquire()
    with client.lease("protected", ttl=60) as grant:
        grant.protect(connection)
    print("left")
    """
    with Child(program, postgres_url) as child:
        child.expect("left")
        child.wait()
    with holdfast.Client(postgres_url) as client:
        assert "other" not in [each.name for each in client.leases.list()]


@pytest.mark.parametrize("holder", [None, "cron"])
def test_history_is_bounded_where_nobody_purges(either: str, holder: str | None) -> None:
    """Whether what ends is released, or always taken over by the same holder."""
    dot, instant = ("_", "0.0") if either.startswith("sqlite") else (".", "now()")
    with holdfast.Client(either) as client:
        client.lease("import", auto_renew=False).acquire().release()
        query(
            either,
            "with recursive n(i) as (select 1 union all select i + 1 from n where i < 10500)"
            f" insert into holdfast{dot}history (name, holder, fence, acquired_at, ended_at, outcome)"
            f" select 'old', 'old', i, {instant}, {instant}, 'released' from n",
        )
        for _ in range(101):
            grant = client.lease("import", auto_renew=False, holder=holder).acquire()
            if holder is None:
                grant.release()
        [(kept,)] = query(either, f"select count(*) from holdfast{dot}history")
        assert kept < 10_101


def test_history_is_left_to_others_by_whoever_keeps_a_snapshot(postgres_url: str) -> None:
    """What somebody else has trimmed since would be the end of the transaction."""
    with holdfast.Client(postgres_url) as client:
        client.lease("old").acquire().release()
    with psycopg.connect(postgres_url) as mine:
        mine.execute("set transaction isolation level repeatable read")
        token = mine.execute("select token from holdfast.lease_acquire('import', 'cron', 30)").fetchone()
        query(postgres_url, "delete from holdfast.history")
        query(postgres_url, "select setval(pg_get_serial_sequence('holdfast.history', 'id'), 20099)")
        assert mine.execute("select holdfast.lease_release('import', null, %s)", token).fetchone() == (True,)
        assert mine.execute("select max(id) from holdfast.history").fetchone() == (20100,)


def test_a_refusal_is_gone_when_it_has_been_dealt_with(either: str) -> None:
    """It has the connection in its traceback: in a cycle it would keep that open until garbage is collected."""
    with holdfast.Client(either) as client, closing(open_connection(either)) as connection:
        grant = client.lease("import").acquire()
        client.leases.force_release("import", **WHY)
        gc.disable()
        try:
            try:
                grant.protect(connection)
            except holdfast.FencedOut as error:
                refusal = weakref.ref(error)
            assert refusal() is None
        finally:
            gc.enable()


def test_what_makes_progress_is_not_postpone() -> None:
    chore = PendingStatement("purge", {}, 0.0, 60.0, until=False)
    for _ in range(5):
        chore.postpone(True, 0.0)
        assert chore.due < 0.1
    for _ in range(5):
        chore.postpone(None, 0.0)
    assert chore.due > 10
