"""The elector on real databases: a leader resigns, is cut off or deposed, and what is logged and reported."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

import holdfast
from holdfast.runtime.clock import now
from holdfast.testing import Proxy
from tests.children import PATIENCE, eventually, query, until
from tests.raw_session import waiters
from tests.recipes.electors import (
    QUICK,
    SLOW,
    STEADY,
    Replica,
    expire_unless_renewed,
    logged,
    replicas,
    replicas_beside,
)

Connect = Callable[..., Any]


def test_one_leads_and_resigning_hands_over_at_once(either: str) -> None:
    """The timings are so long that only the release itself can have woken the other one."""
    with replicas(either, 2, **SLOW) as (one, other):
        eventually(lambda: other.elector.status().leader == one.elector.holder, "the standby has seen who leads")
        assert not other.leads
        assert one.elector.resign() is True
        eventually(lambda: other.leads, "the other one leads")
        assert one.log == ["begin", "end"]
        assert other.terms[0].fence > one.terms[0].fence
        assert one.elector.resign() is False, "it does not lead any more"


def test_the_lease_is_held_until_the_work_has_ended(either: str) -> None:
    """It is renewed until then, however long that takes, and the successor begins after the end."""
    with replicas(either, 2, **STEADY | {"grace": 300.0}) as (one, other):
        one.hold.set()
        one.elector.resign()
        eventually(one.terms[0].stopping.is_set, "told to stop")
        [record] = other.client.leases.list()
        eventually(lambda: other.client.leases.list()[0].expires_at > record.expires_at, "it is renewed all the same")
        assert not other.leads
        one.hold.clear()
        eventually(lambda: other.leads, "the other one leads")
        assert one.log == ["begin", "end"]


def test_work_that_does_not_stop_loses_its_lease_with_the_ttl_and_is_waited_for(postgres_url: str) -> None:
    """The lease of work that cannot be stopped is neither released nor renewed any more, so another replica leads."""
    elsewhere = f"{postgres_url}?application_name=other"
    with logged(logging.ERROR) as records, replicas_beside(postgres_url, **QUICK, hold=True) as one:
        eventually(lambda: one.leads, "it leads")
        one.elector.resign()  # or, on a machine that has stood still, it has lost the lease and is told to stop
        eventually(lambda: records, "its work has not stopped in time")
        with replicas_beside(elsewhere, **STEADY) as other:
            eventually(lambda: other.leads, "the other one leads")
            assert "has not stopped" in records[0].getMessage()
            assert one.log == ["begin"]
            assert one.terms[0].lost, "it could have known"
            assert query(postgres_url, "select outcome from holdfast.history") == [("expired",)]
            other.elector.stop()
            eventually(lambda: other.log[-1] == "end", "the other one stops")
            assert one.log == ["begin"], "no second term beside the first"
            one.hold.clear()
            eventually(lambda: one.log[:3] == ["begin", "end", "begin"], "it stands by again")


def test_a_file_that_cannot_be_opened_is_asked_for_again_at_leisure(tmp_path: Path) -> None:
    """It may be mounted later. Without an answer there is no reason to poll every few milliseconds."""
    elector, pauses = holdfast.Client(f"sqlite:///{tmp_path}").elector("work", **SLOW), []

    def wait(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            elector.stop()

    elector._run.wakeup.wait = wait  # type: ignore[method-assign, assignment]
    elector.run(lambda term: None)
    assert len(pauses) == 3
    assert min(pauses) >= 0.75 * SLOW["retry_every"]


def test_a_leader_that_is_cut_off_stops_before_its_lease_is_another_ones(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins to stop when as much is left as it may need to stop, not when all is over: here five minutes of ten,
    which pass at once by the clock of its grant."""
    terms, pauses = STEADY | {"grace": 300.0}, []
    with Proxy(postgres_url) as proxy, replicas_beside(proxy.url, **terms) as one:
        bell = one.elector._run.wakeup
        wait = bell.wait

        def nap(seconds: float) -> None:
            pauses.append(seconds)
            wait(min(seconds, 0.05))

        monkeypatch.setattr(bell, "wait", nap)
        bell.set()  # it may be waiting already
        eventually(lambda: one.leads, "it leads")
        with replicas_beside(postgres_url, **STEADY) as other:
            proxy.stall()
            with monkeypatch.context() as later:
                later.setattr("holdfast.lease.grant.now", lambda: now() + 300.0)
                eventually(lambda: one.log == ["begin", "end"], "its work is told to stop")
                assert one.terms[0].remaining() > 0, "while it could still be trusted"
            assert max(pauses) <= STEADY["ttl"] - 300.0, "it would have woken by itself"
            assert other.client.leases.get("work").holder == one.elector.holder  # type: ignore[union-attr]
            assert not other.leads
            expire_unless_renewed(postgres_url, lambda: other.leads, "the other one leads")
            proxy.heal()
            other.elector.stop()  # for good: one that resigns asks again itself, and may well be the first
            eventually(lambda: one.log[:3] == ["begin", "end", "begin"], "it is one of them again")


def test_a_deposed_leader_cannot_commit(postgres_url: str) -> None:
    with replicas(postgres_url, 1, **SLOW) as [one], psycopg.connect(postgres_url, autocommit=True) as mine:
        mine.execute("create table work (fence bigint)")
        with one.terms[0].transaction(mine):
            mine.execute("insert into work values (1)")
        one.client.leases.force_release("work", actor="operator", reason="test")
        with pytest.raises(holdfast.FencedOut), one.terms[0].transaction(mine):
            mine.execute("insert into work values (2)")
        assert query(postgres_url, "select fence from work") == [(1,)]


def test_lost_while_a_write_is_in_flight_exactly_one_write_succeeds(postgres_url: str) -> None:
    """The write of the old leader is in the server, and waits there while the lease passes on and the new one writes,
    too, what it has read: whichever comes first, the version decides."""
    with (
        replicas(postgres_url, 2, **SLOW) as (one, other),
        psycopg.connect(postgres_url) as blocking,
        psycopg.connect(postgres_url, autocommit=True) as onlooker,
        ThreadPoolExecutor(2) as pool,
    ):
        read = one.client.objects.put_if("box", "b-1", "new", holdfast.MustCreate())
        blocking.execute("select from holdfast.object for update")

        for replica in (one, other):
            replica.wait_patiently()

        def write(replica: Replica) -> Any:
            match = holdfast.MatchVersion(read.version)
            return pool.submit(replica.client.objects.put_if, "box", "b-1", replica.elector.holder, match)

        writes = [write(one)]
        eventually(lambda: waiters(onlooker) == 1, "its write is in flight")
        assert other.client.leases.force_release("work", actor="operator", reason="test")
        eventually(lambda: other.leads, "the other one leads")
        writes.append(write(other))
        eventually(lambda: waiters(onlooker) == 2, "both are in flight")
        blocking.rollback()
        outcomes = [each.exception(PATIENCE) for each in writes]
        assert [type(each) for each in outcomes].count(holdfast.Conflict) == 1
        [won] = [each.result() for each in writes if each.exception() is None]
        assert other.client.objects.get("box", "b-1") == won


def test_status_and_callbacks_tell_who_leads(connect: Connect, either: str) -> None:
    seen: list[str] = []
    begun, started = datetime.now(UTC), time.monotonic()
    with (
        replicas(either, 2, **SLOW, holder="same") as (one, other),
        replicas_beside(either, **SLOW, on_new_leader=seen.append) as onlooker,
    ):
        eventually(lambda: seen, "the onlooker sees a leader")
        now = datetime.now(UTC)
        mine, theirs = one.elector.status(), onlooker.elector.status()
        assert mine.leading
        assert (mine.state, mine.leader, mine.fence) == ("leading", one.elector.holder, one.terms[0].fence)
        assert (theirs.leading, theirs.state, theirs.leader) == (False, "standby", one.elector.holder)
        assert (theirs.transitions, theirs.fence) == (0, None)
        assert begun < mine.since < theirs.since < now  # type: ignore[operator]
        for status in (mine, theirs):
            assert 0 <= status.renewed_ago < time.monotonic() - started  # type: ignore[operator]
        for replica, age in ((one, mine.renewed_ago), (onlooker, theirs.renewed_ago)):
            eventually(lambda of=replica, was=age: of.elector.status().renewed_ago > was, "its age rises")  # type: ignore[misc]
        assert connect(either).leases.get("work").holder == one.elector.holder
        assert one.elector.holder != other.elector.holder, "two instances of one identity are two holders"
        assert one.elector.holder.startswith("same:")
        one.elector.resign()
        eventually(lambda: len(seen) == 2, "the onlooker sees another one")
        after = onlooker.elector.status()
        assert seen == [one.elector.holder, after.leader]
        assert after.transitions == 1
        assert after.since > theirs.since  # type: ignore[operator]
    led_last = [each for each in (r.elector.status() for r in (one, other, onlooker)) if each.leader is None]
    assert led_last
    assert {(each.since, each.renewed_ago) for each in led_last} == {(None, None)}, (
        "what a standby saw is of no use now"
    )


def test_what_is_logged_at_which_level_and_with_which_fields(postgres_url: str) -> None:
    with logged(logging.DEBUG) as records:
        with replicas(postgres_url, 2, **STEADY) as (one, other):
            eventually(lambda: any("renewed" in record.getMessage() for record in records), "a renewal")
            eventually(lambda: any("standing by" in record.getMessage() for record in records), "an attempt")
            one.client.leases.force_release("work", actor="operator", reason="test")
            eventually(
                lambda: any("lost the lease" in record.getMessage() for record in records), "the loss is noticed"
            )
        text = [(record.levelname, record.getMessage()) for record in records]
    for level, word in (
        ("INFO", "leading"), ("INFO", "renewed"), ("INFO", "lost the lease"), ("INFO", "released"),
        ("DEBUG", "standing by"),
    ):  # fmt: skip
        assert {shown for shown, message in text if word in message} == {level}, word
    for record in records:
        assert record.elector == "work"
        assert record.holder in (one.elector.holder, other.elector.holder)
    assert {record.holder for record in records if "leading" in record.getMessage()} <= {
        one.elector.holder,
        other.elector.holder,
    }


def test_the_work_that_ends_by_itself_ends_the_run_and_its_error_is_told(connect: Connect, either: str) -> None:
    with holdfast.Client(either) as client:
        client.elector("work").run(lambda term: None)
        problem = LookupError("no such order")

        def fail(term: Any) -> None:
            raise problem

        with pytest.raises(LookupError) as raised:
            client.elector("work").run(fail)
        assert raised.value is problem
        assert client.leases.list() == []
        stopped = client.elector("work")
        stopped.stop()
        stopped.run(fail)


async def test_on_a_loop_the_work_is_cancelled_and_its_end_is_waited_for(either: str) -> None:
    events: list[str] = []

    async def work(term: Any) -> None:
        events.append("begin")
        try:
            await asyncio.Event().wait()
        finally:
            assert term.stopping.is_set()
            await asyncio.sleep(0.05)
            assert (await client.leases.get("work")).fence == term.fence  # type: ignore[union-attr]
            events.append("end")

    async with holdfast.AsyncClient(either) as client:
        elector = client.elector("work", **SLOW)
        running = asyncio.create_task(elector.run(work))
        await until(lambda: events, "it leads")
        elector.stop()
        await running
        assert events == ["begin", "end"]
        running = asyncio.create_task(client.elector("work", **SLOW).run(work))
        await until(lambda: len(events) == 3, "it leads again")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert events == ["begin", "end"] * 2
        assert await client.leases.list() == []
        with pytest.raises(TypeError, match="work must be an async def"):
            await client.elector("work").run(lambda term: None)  # type: ignore[arg-type, return-value]
