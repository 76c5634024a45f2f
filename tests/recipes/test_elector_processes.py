"""Electors in processes of their own: forked, killed, stopped, told to stop by a signal."""

from __future__ import annotations

import logging
import signal

import pytest

import holdfast
from tests.children import Child, eventually, pass_time
from tests.recipes.electors import QUICK, SLOW, STEADY, expire_unless_renewed, logged, replicas_beside

_FORKED = """
import os, sys, threading, time, holdfast
elector = holdfast.Client(sys.argv[1]).elector("a", ttl=600, renew_every=100, retry_every=0.1)
os.fork()
threading.Thread(target=elector.run, args=(lambda term: term.stopping.wait(60),), daemon=True).start()
while elector.status().leader is None:
    time.sleep(0.01)
os.write(1, b"leads\\n" if elector.status().leader == elector.holder else b"stands by\\n")  # in one piece
time.sleep(60)
"""


def test_two_processes_forked_from_one_with_an_elector_are_two_replicas(either: str) -> None:
    with Child(_FORKED, either) as both:
        assert sorted(both.line() for _ in range(2)) == ["leads", "stands by"]


_FORKED_LEADER = """
import os, sys, threading, holdfast
begun, seen = threading.Event(), threading.Event()
client, tell = holdfast.Client(sys.argv[1]), lambda _: seen.set()
elector = client.elector("a", ttl=600, renew_every=100, retry_every=0.1, on_new_leader=tell)
def work(term):
    begun.set()
    term.stopping.wait()
def run():
    running = threading.Thread(target=elector.run, args=(work,))
    running.start()
    return running
leads = run()
begun.wait()
seen.wait()
if os.fork() == 0:
    print(elector.status().leading, elector.status().leader, elector.resign(), flush=True)
    seen.clear()
    stands_by = run()
    seen.wait()
    print(elector.status().state, flush=True)
    elector.stop()
    stands_by.join()
    os._exit(0)
os.wait()
print(elector.status().leading, flush=True)
elector.stop()
leads.join()
"""


def test_a_fork_of_a_leader_does_not_lead_and_may_run_for_itself(sqlite_url: str) -> None:
    """As the workers of a server do whose master has the elector in a thread, which no fork has."""
    with Child(_FORKED_LEADER, sqlite_url) as both:
        both.expect("False None False", "standby", "True", "<end>")


LEADER = """
import sys, holdfast
def work(term):
    print("leading", term.fence, flush=True)
    term.stopping.wait()
    print("told to stop", flush=True)
client = holdfast.Client(sys.argv[1])
options = dict(ttl=float(sys.argv[2]), renew_every=float(sys.argv[2]) / 5, retry_every=0.1, failover=sys.argv[3])
client.elector("work", **options).run(work, signals=True)
print("over", flush=True)
"""


@pytest.mark.parametrize(("ttl", "failover"), [(1.0, "ttl"), (600.0, "session")])
def test_a_killed_leader_is_succeeded(postgres_url: str, ttl: float, failover: str) -> None:
    """After its TTL; or long before it, with its session."""
    with Child(LEADER, postgres_url, ttl, failover) as leader:
        assert leader.line().startswith("leading")
        with replicas_beside(postgres_url, **SLOW, failover=failover) as standby:
            eventually(lambda: standby.elector.status().leader, "the standby sees a leader")
            leader.kill()
            eventually(lambda: standby.leads, "the standby leads")


def test_on_one_file_a_killed_leader_is_succeeded_and_a_stopped_one_is_not(sqlite_url: str) -> None:
    """The kernel knows which process lives: no heartbeat is needed, so none can be late."""
    with Child(LEADER, sqlite_url, 0.5, "ttl") as leader:
        assert leader.line().startswith("leading")
        with logged(logging.DEBUG) as records, replicas_beside(sqlite_url, **QUICK) as standby:
            leader.signal(signal.SIGSTOP)
            eventually(lambda: standby.elector.status().leader, "the standby sees a leader")
            pass_time(0.6)  # more than the TTL
            before = len(records)
            eventually(lambda: len(records) > before + 2, "the standby looks again")
            assert {record.getMessage().partition(",")[0] for record in records} == {"elector 'work': standing by"}
            assert not standby.log
            leader.kill()
            eventually(lambda: standby.leads, "the standby leads")


def test_a_stopped_leader_is_succeeded_and_stops_when_it_goes_on(postgres_url: str) -> None:
    with Child(LEADER, postgres_url, 1.0, "ttl") as leader:
        fence = int(leader.line().split()[1])
        with replicas_beside(postgres_url, **QUICK) as standby:
            leader.signal(signal.SIGSTOP)
            eventually(lambda: standby.leads, "the standby leads")
            assert standby.terms[0].fence > fence
            leader.signal(signal.SIGCONT)
            leader.expect("told to stop")


BLOCKED = """
import asyncio, sys, holdfast

async def main(url):
    async with holdfast.AsyncClient(url) as client:
        elector = client.elector("work", ttl=2, renew_every=0.2, retry_every=0.2, watchdog=True)
        async def work(term):
            print("leading", term.fence, flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print("blocked", flush=True)
            sys.stdin.readline()  # in the thread of the loop
            print("lost" if term.lost else "held", flush=True)
            await term.stopping.wait()
        await elector.run(work)

asyncio.run(main(sys.argv[1]))
"""


def test_a_leader_whose_event_loop_is_blocked_is_succeeded_and_knows_it_afterwards(either: str) -> None:
    """Its heartbeat is a thread, which would renew the lease of a loop that does nothing any more."""
    with Child(BLOCKED, either) as leader:
        fence = int(leader.line().split()[1])
        with replicas_beside(either, **QUICK) as standby:
            [before] = standby.client.leases.list()
            eventually(
                lambda: standby.client.leases.list()[0].expires_at > before.expires_at, "it is renewed while it turns"
            )
            leader.say("block")
            leader.expect("blocked")
            eventually(lambda: standby.leads, "the standby leads")
            assert standby.terms[-1].fence > fence
            leader.say("go on")
            leader.expect("lost")


def test_without_an_event_loop_there_is_no_watchdog_for_it(either: str) -> None:
    with holdfast.Client(either) as client, pytest.raises(ValueError, match="watchdog=True needs an AsyncClient"):
        client.elector("work", watchdog=True)


@pytest.mark.parametrize(("engine", "number"), [("sqlite", signal.SIGTERM), ("postgres", signal.SIGINT)])
def test_a_signal_stops_the_work_and_releases_the_lease(
    request: pytest.FixtureRequest, engine: str, number: signal.Signals
) -> None:
    url = request.getfixturevalue(f"{engine}_url")
    with Child(LEADER, url, 600.0, "ttl") as leader:
        assert leader.line().startswith("leading")
        leader.signal(number)
        leader.expect("told to stop", "over")
        assert leader.wait() == 0
    with holdfast.Client(url) as client:
        assert client.leases.list() == []
        assert [each.outcome for each in client.leases.history()] == ["released"]


STUBBORN = """
import sys, threading, holdfast
def work(term):
    print("leading", flush=True)
    term.stopping.wait()
    print("told to stop", flush=True)
    threading.Event().wait()
client = holdfast.Client(sys.argv[1])
client.elector("work", ttl=600, renew_every=0.3, retry_every=0.2, grace=0.2, overrun="exit").run(work, signals=True)
"""


def test_with_overrun_exit_work_that_does_not_stop_ends_with_its_process(either: str) -> None:
    """What cannot be stopped is not released: the successor comes when the TTL is over, or the kernel tells."""
    with Child(STUBBORN, either) as leader:
        leader.expect("leading")
        leader.signal(signal.SIGTERM)
        leader.expect("told to stop")
        assert leader.wait() == 70
        with replicas_beside(either, **STEADY) as standby:
            if not either.startswith("sqlite"):
                eventually(lambda: standby.elector.status().leader, "the standby sees the leader that is gone")
                assert not standby.leads
                expire_unless_renewed(either, lambda: standby.leads, "the standby leads")
            eventually(lambda: standby.leads, "the standby leads")
    with holdfast.Client(either) as client:
        assert [each.outcome for each in client.leases.history()][-1] != "released"
