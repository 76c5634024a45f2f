"""Slots: a counting semaphore made of leases, on both engines and in both flavours."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
import holdfast.telemetry
from holdfast.testing.lease_contract import refused_after_waiting, waiting
from tests.children import PATIENCE, Child, eventually, query, rows
from tests.lease.test_contract import never_polls
from tests.raw_session import Raw

Connect = Callable[..., Any]
HOLD = """
import sys, holdfast
with holdfast.Client(sys.argv[1]) as client:
    grant = client.slots("tuner", 4, ttl=float(sys.argv[3])).claim(owner=sys.argv[2])
    print(grant.slot, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def client(either: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(either) as opened:
        yield opened


@pytest.fixture
def slots(connect: Connect, either: str) -> Any:
    return connect(either).slots("tuner", capacity=4)


def test_any_free_slot_is_claimed_and_no_more_than_there_are(slots: Any) -> None:
    grants = [slots.claim(owner=f"session-{number}") for number in range(4)]
    assert sorted(grant.slot for grant in grants) == [1, 2, 3, 4]
    assert slots.owners() == {grant.slot: f"session-{number}" for number, grant in enumerate(grants)}
    assert len({grant.fence for grant in grants}) == 4
    with pytest.raises(holdfast.NotAcquired, match="all 4 slots of pool 'tuner' are taken"):
        slots.claim(owner="session-4")
    assert slots.in_use() == 4
    assert slots.release(grants[2]) is True
    assert slots.release(grants[2]) is False
    assert slots.in_use() == 3
    again = slots.claim(owner="session-5")
    assert again.slot == grants[2].slot
    assert again.fence > max(grant.fence for grant in grants)


def test_one_owner_may_have_several_and_each_goes_on_its_own(slots: Any) -> None:
    first, second = slots.claim(owner="session-1"), slots.claim(owner="session-1")
    assert first.slot != second.slot
    first.release()
    second.check()
    assert slots.owners() == {second.slot: "session-1"}


def test_a_handle_waits_skips_and_gives_up_as_everywhere(slots: Any) -> None:
    grants = [slots.claim(owner="others") for _ in range(3)]
    with slots.slot(owner="block") as grant:
        assert 1 <= grant.slot <= 4
        assert slots.slot().try_acquire() is None
        with slots.slot().or_skip() as skipped:
            assert skipped is None
        assert "waited 0.1 s" in str(refused_after_waiting(lambda: slots.claim(timeout=0.1)))
    with slots.slot().or_skip() as grant:
        assert grant is not None
        with waiting(lambda: slots.claim(owner="waiter", timeout=60)) as won:
            grants[1].release()
        assert won[0].slot == grants[1].slot
    assert slots.in_use() == 3


def test_a_release_in_another_process_wakes_a_waiter_that_does_not_poll(connect: Connect, postgres_url: str) -> None:
    slots = connect(postgres_url).slots("tuner", capacity=4, ttl=600)  # nor does it wake for an expiry
    for _ in range(3):
        slots.claim(owner="others")
    with Child(HOLD, postgres_url, "theirs", 600) as child:
        number = int(child.line())
        client = connect(f"{postgres_url}?application_name=elsewhere")
        never_polls(client)
        with waiting(lambda: client.slots("tuner", 4).claim(timeout=300)) as won:
            listening = "select count(*) from pg_locks where locktype = 'advisory' and mode = 'ShareLock' and granted"
            eventually(lambda: query(postgres_url, listening) == [(1,)], "the waiter listens")
            child.say("end")
        assert won[0].slot == number


def test_the_capacity_grows_and_shrinks_while_slots_are_held(connect: Connect, either: str) -> None:
    client = connect(either)
    grants = {grant.slot: grant for grant in [client.slots("tuner", 2).claim() for _ in range(2)]}
    with pytest.raises(holdfast.NotAcquired):
        client.slots("tuner", 2).claim()
    grants |= {grant.slot: grant for grant in [client.slots("tuner", 4).claim() for _ in range(2)]}
    small = client.slots("tuner", 2)
    assert (small.in_use(), sorted(grants)) == (4, [1, 2, 3, 4])
    for left, number in ((3, 1), (2, 2)):  # a number that is free is not yet room
        grants[number].release()
        assert small.in_use() == left
        assert small.slot().try_acquire() is None
    grants[3].release()
    assert small.claim().slot in (1, 2)
    assert small.slot().try_acquire() is None
    grants[4].release()
    assert small.claim().slot in (1, 2)
    assert small.in_use() == 2


def test_the_capacity_shrinks_under_load_and_is_never_exceeded_once_there_was_room(either: str) -> None:
    """Those that are held beyond it only become fewer: from the first claim of the small pool on there are never more
    than it has."""
    small, over, most = 3, threading.Event(), list[int]()
    with ExitStack() as stack:
        clients = [stack.enter_context(holdfast.Client(either)) for _ in range(4)]
        held = [clients[0].slots("tuner", 8, ttl=600).claim() for _ in range(8)]
        random.Random(7).shuffle(held)

        def claim(client: holdfast.Client) -> None:
            while not over.is_set():
                with client.slots("tuner", small, ttl=600).slot().or_skip() as grant:
                    if grant is not None:
                        most.append(client.slots("tuner", small).in_use())

        threads = [threading.Thread(target=claim, args=(client,)) for client in clients for _ in range(2)]
        for thread in threads:
            thread.start()
        for grant in held[:5]:
            assert grant.release()
        assert not most, "there are as many as there may be"
        for grant in held[5:]:
            assert grant.release()
            enough = len(most) + 15
            eventually(lambda wanted=enough: len(most) >= wanted, "it is claimed again and again")  # type: ignore[misc]
        over.set()
        for thread in threads:
            thread.join()
        assert max(most) <= small
        assert len([clients[0].slots("tuner", small).claim() for _ in range(small)]) == small, "none is lost"


def test_pools_do_not_disturb_each_other_whatever_they_are_called(connect: Connect, either: str) -> None:
    client = connect(either)
    names = ["a", "a:1", "a:", "a%", "_", "A", "é", "a:1:2"]
    for name in names:
        client.slots(name, 1).claim(owner=f"of {name}")
    for name in names:
        assert client.slots(name, 1).owners() == {1: f"of {name}"}
        assert client.slots(name, 1).slot().try_acquire() is None
    grant = client.slots("b:1", 1).claim()
    with pytest.raises(ValueError, match="not a slot of pool 'b'"):
        client.slots("b", 1).release(grant)
    grant.check()


def forge(raw: Raw, name: str) -> None:
    assert raw.acquire("forged", "forger")["fence"]
    raw.run(f"update holdfast.lease set name = '{name}' where name = 'forged'")


def test_a_name_that_only_looks_like_that_of_a_slot_takes_up_no_room(client: holdfast.Client, either: str) -> None:
    """Past every function: none gives such a name. One that is a slot's is a slot, and its owner does not claim it."""
    slots = client.slots("tuner", 2)
    slots.in_use()
    with closing(Raw(either)) as raw:
        for forged in ("0", "-1", "007", "1x", "9" * 20, "", " 1", "\u0663", "1:1x"):
            forge(raw, f"@slot:tuner:{forged}")
        assert (slots.owners(), client.slots("tuner:1", 2).owners()) == ({}, {})
        forge(raw, "@slot:tuner:1")
    mine = slots.claim(owner="s-1")
    assert slots.owners() == {1: "forger", 2: "s-1"}
    assert slots.slot().try_acquire() is None
    assert slots.reconcile([{"id": "s-1", "slot": mine.slot}]) == 1
    assert slots.invariant_violation_total["unclaimed_lease"] == 1


def test_a_killed_holders_slot_is_free_after_its_ttl_and_not_before(client: holdfast.Client, either: str) -> None:
    slots = client.slots("tuner", 1)
    with Child(HOLD, either, "theirs", 600) as child:
        assert child.line() == "1"
        child.kill()
        assert slots.slot().try_acquire() is None
        expire(either, "theirs")
        assert slots.slot(timeout=PATIENCE).acquire().slot == 1


def expire(url: str, owner: str) -> None:
    """Let the TTL of its slots be over."""
    dot = "_" if url.startswith("sqlite") else "."
    theirs = f"select beat from holdfast{dot}lease where holder = %s"
    query(url, f"update holdfast{dot}beat set expires_at = started where id in ({theirs})", owner)


def test_a_claim_whose_answer_is_lost_keeps_no_slot(client: holdfast.Client, either: str) -> None:
    """The client does not know which slot it was: the slot is found by its token."""
    lost = "import os; os.environ['HOLDFAST_FAILPOINTS'] = 'after:slot_claim=error'\n"
    lost += "import sys, holdfast\nclient = holdfast.Client(sys.argv[1])\n"
    lost += "try:\n    client.slots('tuner', 4).claim()\nexcept holdfast.EngineError:\n    print('in doubt')\n"
    lost += "sys.stdin.readline()"
    slots = client.slots("tuner", 4)
    slots.in_use()
    with Child(lost, either) as child:
        child.expect("in doubt")
        eventually(lambda: rows(either)["lease"] == 0, "it is given back while its process lives")


@pytest.mark.parametrize(("pool", "capacity"), [("", 1), ("x" * 181, 1), ("a\nb", 1), ("a", 0), ("a", 100_001)])
def test_a_bad_pool_or_capacity_is_refused(connect: Connect, tmp_path: Any, pool: str, capacity: int) -> None:
    client = connect(f"sqlite:///{tmp_path / 'app.db'}")
    with pytest.raises(ValueError, match=r"^(pool|capacity) must"):
        client.slots(pool, capacity)
    with pytest.raises(ValueError, match=r"^owner must have 1 to 200 characters"):
        client.slots("a", 1).claim(owner="")
    with pytest.raises(ValueError, match=r"^name must not begin with '@'"):
        client.lease("@slot:a:1")
    assert list(tmp_path.iterdir()) == []


def test_the_gauge_counts_what_sessions_and_leases_agree_on_and_each_forgery_by_its_kind(
    slots: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, three, four = (slots.claim(owner=f"session-{number}").slot for number in range(1, 5))
    honest: list[Any] = [
        {"id": "session-1", "slot": one, "terminal": False},
        SimpleNamespace(id="session-2", slot=two),
        {"id": "session-3", "slot": three},
        {"id": "session-4", "slot": four},
        {"id": "session-0", "slot": None, "terminal": True},
        {"id": "session-9", "slot": one, "terminal": True},
    ]
    with caplog.at_level(logging.WARNING, "holdfast.slots"):
        assert slots.reconcile(honest) == 4
        assert sum(slots.invariant_violation_total.values()) == len(caplog.records) == 0
        forged = {
            "duplicate_claim": [*honest, {"id": "session-8", "slot": one}],
            "wrong_owner": [{"id": "session-8", "slot": one}, *honest[1:]],
            "missing_lease": [*honest, {"id": "session-8", "slot": 77}],
            "terminal_owner": [{"id": "session-1", "slot": one, "terminal": True}, *honest[1:]],
            "unclaimed_lease": honest[1:],
        }
        for number, (kind, sessions) in enumerate(forged.items(), 1):
            assert slots.reconcile(sessions) == (4 if kind in ("duplicate_claim", "missing_lease") else 3)
            assert slots.invariant_violation_total[kind] == 1
            assert sum(slots.invariant_violation_total.values()) == number
            assert kind in caplog.records[-1].getMessage()
        assert slots.reconcile([*honest, honest[0]]) == 4, "a slot counts once, also when a session is listed twice"
        assert slots.invariant_violation_total["duplicate_claim"] == 2
    with pytest.raises(ValueError, match="a session needs id"):
        slots.reconcile([{"slot": 1}])
    for slot in ("1", 1.0, True):
        with pytest.raises(ValueError, match="slot must be a whole number, or None"):
            slots.reconcile([{"id": "session-1", "slot": slot}])


def test_claims_and_releases_while_the_sessions_are_read_are_no_violations(client: holdfast.Client) -> None:
    """The list is old by the time the leases are read; judged with both looks around it, churn is told from forgery."""
    slots = client.slots("tuner", 4)
    grants = {number: slots.claim(owner=f"s-{number}") for number in (1, 2)}

    def sessions() -> list[dict[str, Any]]:
        """While it is read, the first ends, a third begins, and the slots change hands."""
        claims = [{"id": f"s-{number}", "slot": grant.slot} for number, grant in grants.items()]
        for number in sorted(grants)[:1]:
            grants.pop(number).release()
            grants[number + 2] = slots.claim(owner=f"s-{number + 2}")
        return claims

    for _ in range(5):
        assert slots.reconcile(sessions) <= 2
    assert sum(slots.invariant_violation_total.values()) == 0
    slot = grants[max(grants)].slot
    forged = [{"id": f"s-{number}", "slot": grant.slot} for number, grant in grants.items()]
    assert slots.reconcile(lambda: [*forged, {"id": "forged", "slot": slot}]) == 2
    assert slots.invariant_violation_total["duplicate_claim"] == 1


def test_a_session_between_two_of_its_steps_is_no_violation(slots: Any) -> None:
    """It has its slot, and is just about to say so: what looks wrong is looked at once more before it is counted."""
    one, two = ({"id": name, "slot": slots.claim(owner=name).slot} for name in ("s-1", "s-2"))
    readings = iter([[one], [two]])
    assert slots.reconcile(lambda: next(readings)) == 1
    assert sum(slots.invariant_violation_total.values()) == 0
    assert slots.reconcile(lambda: [one]) == 1
    assert slots.invariant_violation_total["unclaimed_lease"] == 1


def test_under_churn_nothing_is_counted_that_is_not_wrong(client: holdfast.Client) -> None:
    """Sessions begin and end all the time, each with its slot: whenever they are read, they are true. What is read of
    the leases before and after it is not of the same moment. A forged session among them is a violation every time."""
    slots, over, step = client.slots("tuner", 4), threading.Event(), threading.Lock()
    sessions: dict[str, int] = {}

    def live(number: int) -> None:
        for turn in itertools.count():
            if over.is_set():
                return
            name = f"s-{number}-{turn}"
            with step:
                grant = slots.claim(owner=name)
                sessions[name] = grant.slot
            over.wait(0.002)
            with step:
                grant.release()
                del sessions[name]

    def read_sessions() -> list[dict[str, Any]]:
        with step:
            return [{"id": name, "slot": slot} for name, slot in sessions.items()]

    threads = [threading.Thread(target=live, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(25):
            assert slots.reconcile(read_sessions) <= 4
        honest = dict(slots.invariant_violation_total)
        for _ in range(5):
            slots.reconcile(lambda: [*read_sessions(), {"id": "forged", "slot": 99}])
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert sum(honest.values()) == 0, honest
    assert slots.invariant_violation_total["missing_lease"] == 5


def test_after_a_kill_the_gauge_is_right_at_once_and_in_use_with_the_expiry(
    client: holdfast.Client, either: str
) -> None:
    slots = client.slots("tuner", 4)
    with Child(HOLD, either, "one", 600) as one, Child(HOLD, either, "two", 600) as two:
        sessions = [{"id": name, "slot": int(child.line())} for name, child in (("one", one), ("two", two))]
        assert (slots.reconcile(sessions), slots.in_use()) == (2, 2)
        two.kill()
        sessions[1]["terminal"] = True
        assert (slots.reconcile(sessions), slots.in_use()) == (1, 2)
        expire(either, "two")
        assert (slots.reconcile(sessions), slots.in_use()) == (1, 1)
        os.kill(one.pid, signal.SIGTERM)


def test_a_slot_that_is_handed_over_lives_as_long_as_it_is_renewed_elsewhere(connect: Connect, either: str) -> None:
    """The client that claimed it neither renews it nor releases it when it closes: the holder of the token does."""
    claimer, other = connect(either), connect(either)
    claim = claimer.slots("tuner", 4, ttl=600, auto_renew=False).claim(owner="session-1")
    slot, token = claim.slot, claim.detach()
    claimer.close()
    slots = other.slots("tuner", 4)
    assert slots.owners() == {slot: "session-1"}
    [before] = other.leases.list()

    def is_later() -> bool:
        """By a clock that ticks in milliseconds."""
        slots.adopt(slot, token).renew()
        return bool(other.leases.list()[0].expires_at > before.expires_at)

    eventually(is_later, "the holder of the token renews it")
    assert slots.adopt(slot, token).release() is True
    with pytest.raises(holdfast.LeaseLost, match=rf"slot {slot} of pool 'tuner'"):
        slots.adopt(slot, token)
    with pytest.raises(ValueError, match="slot must be a whole number from 1"):
        slots.adopt(0, token)
    again = other.slots("tuner", 4, ttl=0.2, auto_renew=False).claim(owner="session-2")
    again.detach()
    eventually(lambda: slots.owners() == {}, "it is not renewed, so it expires")
    with pytest.raises(ValueError, match="is renewed by this process"):
        slots.claim(owner="session-3").detach()


def test_what_was_reconciled_is_no_gauge_once_somebody_else_goes_on(client: holdfast.Client) -> None:
    slots = client.slots("tuner", 4)
    grant = slots.claim(owner="session-1")
    before = holdfast.telemetry.readings()["slots_in_use"]
    assert slots.reconcile([{"id": "session-1", "slot": grant.slot}]) == 1
    assert holdfast.telemetry.readings()["slots_in_use"] == before + 1
    slots.forget()
    assert holdfast.telemetry.readings()["slots_in_use"] == before
