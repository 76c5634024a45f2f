"""Calls of an elector at awkward moments: closed while it works, run or stopped twice, a callback that hangs."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from contextlib import suppress
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast.database import call_dispatcher
from holdfast.lease.keeper import keeper_of
from holdfast.recipes import elector as elector_module
from holdfast.runtime.clock import now
from holdfast.runtime.identity import check_token, this_process
from tests.children import PATIENCE, Child, eventually, until
from tests.interrupts import Interrupt, generated
from tests.recipes.electors import QUICK, SLOW, STEADY, Replica, expire_unless_renewed, replicas, replicas_beside


def closing(client: holdfast.Client) -> threading.Thread:
    thread = threading.Thread(target=client.close, daemon=True)
    thread.start()
    return thread


def holder(replica: Replica) -> str | None:
    record = replica.client.leases.get("work")
    return None if record is None else record.holder


def test_a_client_that_is_closed_stops_the_work_before_it_releases_the_lease(either: str) -> None:
    with replicas(either, 2, **SLOW) as (one, other):
        one.hold.set()
        closes = closing(one.client)
        eventually(one.terms[0].stopping.is_set, "the work is told to stop")
        assert holder(other) == one.elector.holder, "until it has stopped, no other replica leads"
        assert not one.terms[0].lost, "what it still has to do, it may do"
        one.hold.clear()
        eventually(lambda: other.leads, "the other one leads at once")
        assert one.log == ["begin", "end"]
        closes.join(PATIENCE)
        assert not closes.is_alive()
        one.thread.join(PATIENCE)
        assert not one.thread.is_alive(), "run has returned"


def test_work_that_does_not_stop_keeps_the_session_that_its_lease_lives_in(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the session another replica would lead at once. The lease is released when the work has ended, although
    its client is closed."""
    monkeypatch.setattr(call_dispatcher, "IDLE", 0.01)
    with (
        replicas_beside(either, **SLOW | {"grace": 0.01, "failover": "session"}) as one,
        holdfast.Client(either) as late,
    ):
        eventually(lambda: one.leads, "it leads")
        one.hold.set()
        background = keeper_of(one.client._engine.database, brittle=True).background
        one.client.close()
        eventually(
            lambda: background._thread is None or background._asleep_until > now() + 30, "there is nothing else to keep"
        )
        assert late.lease("work").try_acquire() is None
        one.hold.clear()
        assert late.lease("work").acquire(timeout=PATIENCE).fence > one.terms[0].fence


async def test_a_lease_goes_with_the_work_that_nobody_waits_for_any_more(sqlite_url: str) -> None:
    """Interrupted twice, run does not wait any longer. Else the lease would stay for a day, the elector unusable."""
    began, ended = asyncio.Event(), asyncio.Event()
    terms: list[Any] = []

    async def stubborn(term: Any) -> None:
        terms.append(term)
        began.set()
        while not ended.is_set():
            with suppress(asyncio.CancelledError):
                await ended.wait()

    async with holdfast.AsyncClient(sqlite_url) as client:
        elector = client.elector("work", **SLOW)
        run = asyncio.create_task(elector.run(stubborn))
        await began.wait()
        run.cancel()
        await terms[0].stopping.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        with pytest.raises(RuntimeError, match="has not ended"):
            await elector.run(stubborn)
        ended.set()
        await client.lease("work").acquire(timeout=PATIENCE)
        assert elector.status().state == "ended"


def test_a_client_that_is_closed_leaves_the_lease_of_work_that_does_not_stop_to_expire(postgres_url: str) -> None:
    with replicas(postgres_url, 2, **STEADY) as (one, other):
        one.hold.set()
        one.client.close()
        assert holder(other) == one.elector.holder
        assert not other.leads
        expire_unless_renewed(postgres_url, lambda: other.leads, "the other one leads when the TTL is over")
        assert one.log == ["begin"]
        assert one.terms[0].lost


async def test_on_a_loop_a_client_that_is_closed_lets_the_work_end_first(either: str) -> None:
    log: list[str] = []

    async def work(term: Any) -> None:
        log.append("begin")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            log.append(f"still held by {(await onlooker.leases.get('work')).holder}")  # type: ignore[union-attr]

    async with holdfast.AsyncClient(either) as onlooker:
        client = holdfast.AsyncClient(either)
        elector = client.elector("work", **SLOW)
        running = asyncio.create_task(elector.run(work))
        await until(lambda: log, "it leads")
        await client.close()
        assert log == ["begin", f"still held by {elector.holder}"]
        await asyncio.wait_for(running, PATIENCE)
        assert await onlooker.leases.list() == []


async def test_work_that_closes_its_own_client_is_cancelled_and_its_lease_expires(postgres_url: str) -> None:
    client = holdfast.AsyncClient(postgres_url)

    async def work(term: Any) -> None:
        await client.close()

    elector = client.elector("work", **QUICK)
    await asyncio.wait_for(elector.run(work), PATIENCE)
    with holdfast.Client(postgres_url) as onlooker:
        await asyncio.to_thread(eventually, lambda: not onlooker.leases.list(), "nothing is left")


def test_wherever_it_is_interrupted_the_lease_goes(sqlite_url: str) -> None:
    with holdfast.Client(sqlite_url) as client:
        client.elector("work").run(lambda term: None)
        for at in count(5, 31):
            interrupt = Interrupt(at, *generated("recipes"))
            with suppress(KeyboardInterrupt), interrupt:
                client.elector(f"work-{at}").run(lambda term: None)
            if not interrupt.raised:
                break
            eventually(lambda: client.leases.list() == [], f"it is given back: {interrupt.where}")
    assert at > 300


def test_work_that_begins_as_an_interrupt_comes_keeps_the_lease_until_it_ends(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, go = threading.Thread.start, threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("holdfast-term"):
            raise KeyboardInterrupt

    with holdfast.Client(sqlite_url) as client:
        client.leases.list()
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.elector("work").run(lambda term: go.wait(PATIENCE))
        assert client.leases.get("work") is not None
        go.set()
        eventually(lambda: client.leases.get("work") is None, "it goes with the work")


def test_run_again_works_again_unless_it_was_stopped(either: str) -> None:
    with holdfast.Client(either) as client:
        elector, fences = client.elector("work", **SLOW), []

        def work(term: Any) -> None:
            fences.append(term.fence)
            if len(fences) == 1:
                raise LookupError("no such order")

        with pytest.raises(LookupError):
            elector.run(work)
        elector.run(work)
        assert len(fences) == 2
        assert fences[1] > fences[0]
        elector.stop()
        with pytest.raises(RuntimeError, match="was stopped for good"):
            elector.run(work)
        assert len(fences) == 2


def test_of_two_runs_at_once_the_second_is_refused(sqlite_url: str) -> None:
    with replicas(sqlite_url, 1, **SLOW) as [one], pytest.raises(RuntimeError, match="is running already"):
        one.elector.run(one.work)


def test_work_that_would_have_to_be_awaited_is_refused_where_nobody_awaits(sqlite_url: str) -> None:
    """It would be a coroutine that never runs, and look like work that has ended."""

    async def work(term: Any) -> None: ...

    with holdfast.Client(sqlite_url) as client:
        with pytest.raises(TypeError, match="use AsyncClient"):
            client.elector("work").run(work)
        assert client.leases.list() == []


def test_resigning_twice_is_resigning_once(either: str) -> None:
    """The second call comes while the work stops. If it undid the first, this replica would ask again at once."""
    with replicas(either, 2, **SLOW) as (one, other):
        one.hold.set()
        assert one.elector.resign() is True
        eventually(one.terms[0].stopping.is_set, "the work is told to stop")
        assert one.elector.resign() is False
        assert one.elector._run.resigned
        one.hold.clear()
        eventually(lambda: other.leads, "the other one leads")
        assert one.log == ["begin", "end"]


def test_a_callback_that_hangs_holds_up_neither_a_leader_nor_a_standby(
    either: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elector_module, "_END_TIMEOUT", 0.05)
    hangs, leaders = threading.Event(), []

    def hang(leader: str) -> None:
        leaders.append(leader)
        hangs.wait()

    try:
        with (
            replicas_beside(either, **SLOW, on_new_leader=hang) as one,
            replicas_beside(either, **SLOW, on_new_leader=hang) as other,
        ):
            eventually(lambda: one.leads or other.leads, "one of them leads")
            first, second = (one, other) if one.leads else (other, one)
            eventually(lambda: len(leaders) == 2, "both have been told")
            first.elector.resign()
            eventually(lambda: second.leads, "the other one leads")
            assert len(leaders) == 2, "the callbacks still hang"
    finally:
        hangs.set()


async def test_on_a_loop_a_callback_that_hangs_holds_up_nothing_and_ends_with_the_run(postgres_url: str) -> None:
    ended, called, leads = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hang(leader: str) -> None:
        called.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def work(term: Any) -> None:
        leads.set()
        await asyncio.Event().wait()

    async with holdfast.AsyncClient(postgres_url) as client:
        running = asyncio.create_task(client.elector("work", **SLOW, on_new_leader=hang).run(work))
        async with asyncio.timeout(PATIENCE):
            await called.wait()
            await leads.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await ended.wait()
        assert await client.leases.list() == []


SEVERAL = """
import asyncio, os, signal, sys, holdfast
async def main():
    told, leads = [], []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.append, "mine")
    async def work(term):
        leads.append(term.name)
        await asyncio.Event().wait()
    async with holdfast.AsyncClient(sys.argv[1]) as client:
        runs = [asyncio.create_task(client.elector(name).run(work, signals=True)) for name in "ab"]
        await client.elector("c").run(nothing, signals=True)  # begins last, and ends first
        while len(leads) < 2:
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.gather(*runs)
        print("both stopped", flush=True)
        told.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        while not told:
            await asyncio.sleep(0.005)
        print(*told, flush=True)
async def nothing(term):
    pass
asyncio.run(main())
"""


def test_a_signal_stops_all_that_run_on_a_loop_and_is_then_what_it_was(sqlite_url: str) -> None:
    """Several are usual, for example a reconciler and a relay. If a signal stopped only one, the rest would not end."""
    with Child(SEVERAL, sqlite_url) as child:
        child.expect("both stopped", "mine")


IN_THE_BACKGROUND = """
import sys, threading, time, holdfast
def work(term):
    print("leading", flush=True)
    leading.set()
    term.stopping.wait()
    print("told to stop", flush=True)
    time.sleep(float(sys.argv[2]))
    print("held" if onlooker.leases.get("work") else "free", flush=True)
client, onlooker, leading = holdfast.Client(sys.argv[1]), holdfast.Client(sys.argv[1]), threading.Event()
elector = client.elector("work", ttl=600, renew_every=100, retry_every=1, grace=float(sys.argv[3]))
threading.Thread(target=elector.run, args=(work,), daemon=True).start()
leading.wait()
"""


def test_a_process_that_ends_stops_the_work_before_the_lease_is_released(either: str) -> None:
    """The main thread has ended; the work is in a daemon thread, which the interpreter does not wait for."""
    with Child(IN_THE_BACKGROUND, either, 0.2, 60) as child, holdfast.Client(either) as onlooker:
        child.expect("leading", "told to stop", "held")
        assert child.wait() == 0
        assert [each.outcome for each in onlooker.leases.history("work")] == ["released"]


def test_a_process_that_ends_leaves_the_lease_of_work_that_does_not_stop_to_expire(postgres_url: str) -> None:
    with Child(IN_THE_BACKGROUND, postgres_url, 600, 0.2) as child, holdfast.Client(postgres_url) as onlooker:
        child.expect("leading", "told to stop")
        assert child.wait() == 0
        assert onlooker.leases.get("work") is not None


def test_the_timings_are_thirty_ten_and_five_unless_told_otherwise(sqlite_url: str) -> None:
    terms = holdfast.Client(sqlite_url).elector("work")._terms
    assert (terms.ttl, terms.renew_every, terms.retry_every) == (30.0, 10.0, 5.0)


@pytest.mark.parametrize("unnamed", ["", "(none)"])
def test_a_node_without_a_name_is_named_by_a_uuid(unnamed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=unnamed))
    host = this_process()["host"]
    assert check_token(host) == host == this_process()["host"], "a UUID, the same in every row"


def test_the_timings_follow_from_the_ttl(sqlite_url: str) -> None:
    client = holdfast.Client(sqlite_url)
    elector, guard = client.elector("work", ttl=6)._terms, client.guard("work", ttl=5)._terms
    assert (elector.ttl, elector.renew_every, elector.retry_every, elector.grace) == (6.0, 2.0, 1.0, 1.0)
    assert (guard.ttl, guard.renew_every) == (5.0, 5 / 3)
    for ttl in (0.05, 0.3, 3600.0):
        client.elector("work", ttl=ttl)
        client.guard("work", ttl=ttl)


def test_a_replica_is_who_its_environment_says(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client, named = holdfast.Client(sqlite_url), ("HOSTNAME", "HOLDFAST_REPLICA_ID")
    for name in named:
        monkeypatch.delenv(name, raising=False)
    assert client.elector("work").holder != client.elector("work").holder
    host = os.uname().nodename
    for recipe in (client.elector("work"), client.shards("work", 4)):
        assert re.fullmatch(rf"{re.escape(host)}:{os.getpid()}:[0-9a-f]{{6}}", recipe.holder)
    for name in named:
        monkeypatch.setenv(name, f"the {name}")
        for recipe in (client.elector("work"), client.shards("work", 4)):
            assert recipe.holder.rsplit(":", 2)[0] == f"the {name}"
