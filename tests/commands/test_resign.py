"""A leader that is asked to resign stops its work first; only then does another one lead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast import commands as operator
from holdfast.lease.keeper import keeper_of
from tests.children import PATIENCE, Child, eventually
from tests.cli.command import ask, at, call

JANE: dict[str, Any] = {"actor": "jane", "reason": "a new machine"}
LEADER = """
import sys, time, holdfast
url, name, linger = sys.argv[1:]

def work(term):
    print("leads", flush=True)
    term.stopping.wait()
    time.sleep(float(linger))
    print("stopped", flush=True)

with holdfast.Client(url) as client:
    client.elector("reconciler", holder=name, ttl=600, renew_every=0.2, retry_every=600).run(work)
"""


@pytest.fixture
def client(either: str) -> Iterator[holdfast.Client]:
    with holdfast.Client(either) as client:
        client.leases.list()
        yield client


def leader(client: holdfast.Client) -> str | None:
    record = client.leases.get("reconciler")
    return None if record is None else record.holder.partition(":")[0]


def test_the_leading_process_stops_its_work_and_a_standby_takes_over(client: holdfast.Client, either: str) -> None:
    with Child(LEADER, either, "one", 0.5) as one:
        one.expect("leads")
        with Child(LEADER, either, "two", 0) as two:
            plan = operator.run(client, "leader.resign", {"name": "reconciler"}, dry_run=True, **JANE)
            assert plan.changes[0].startswith("one:")
            assert leader(client) == "one"
            output = ask(*at(either, "do", "leader.resign", "reconciler", "--actor", "jane", "--reason", "why"))
            assert "stops, and another replica leads" in output
            one.expect("stopped")
            two.expect("leads")
            eventually(lambda: leader(client) == "two", "it leads")
    [before] = [each for each in client.leases.history("reconciler") if each.holder.startswith("one:")]
    assert before.outcome == "released", "it released the lease itself"
    assert before.ended_at <= client.leases.get("reconciler").acquired_at  # type: ignore[union-attr]
    [entry] = [each for each in client.audit.list() if each.action == "leader.resign"]
    assert (entry.actor, entry.subject, entry.outcome) == ("jane", "reconciler", "done")


def test_a_leader_that_does_not_stop_keeps_its_lease_and_the_audit_says_that_it_is_open(
    client: holdfast.Client, either: str
) -> None:
    """Its lease stays: otherwise two would lead at once."""
    with Child(LEADER, either, "stubborn", 3600) as stubborn:
        stubborn.expect("leads")
        with pytest.raises(operator.CommandUnsettled, match="was asked to stop"):
            operator.run(client, "leader.resign", {"name": "reconciler", "wait": 0.3}, **JANE)
        assert leader(client) == "stubborn"
        [entry] = [each for each in client.audit.list() if each.action == "leader.resign"]
        assert (entry.outcome or "").startswith("unknown: ")


def test_a_lease_that_nobody_leads_with_is_not_asked_back(client: holdfast.Client, either: str) -> None:
    grant = client.lease("job").acquire()
    with pytest.raises(operator.CommandRefused, match="is not the lease of an elector"):
        operator.run(client, "leader.resign", {"name": "job"}, **JANE)
    refused = call(*at(either, "do", "leader.resign", "nobody", "--reason", "why"))
    assert (refused.returncode, "lease 'nobody' is not held" in refused.stderr) == (1, True)
    assert client.leases.recall("job", fence=grant.fence + 1, **JANE) is False
    assert client.leases.recall("job", fence=grant.fence, **JANE) is True, (
        "a holder that does not listen for it goes on"
    )
    assert grant.renew()


def test_asked_back_as_it_begins_to_lead_a_leader_stops(client: holdfast.Client) -> None:
    """The recall comes between the grant and the start of its work, and is not lost."""
    elector: Any = client.elector("reconciler", ttl=600, renew_every=0.05, retry_every=20)
    lead, keeper = elector._lead, keeper_of(elector._engine.database, brittle=elector._local)

    def lead_late(grants: Any, work: Any) -> None:
        assert client.leases.recall("reconciler", fence=grants[0].fence, **JANE)
        eventually(lambda: any(beat.generation for beat in keeper._beats), "its keeper has noticed the recall")
        lead(grants, work)

    elector._lead = lead_late
    stopping: list[bool] = []
    leading = threading.Thread(target=elector.run, args=(lambda term: stopping.append(term.stopping.wait(PATIENCE)),))
    leading.start()
    eventually(lambda: stopping == [True], "the work is asked to stop")
    elector.stop()
    leading.join()


def test_asked_back_between_two_terms_nobody_is_disturbed(client: holdfast.Client, either: str) -> None:
    """A recall applies to one fence only."""
    with Child(LEADER, either, "one", 0) as one:
        one.expect("leads")
        record = client.leases.get("reconciler")
        assert record is not None
        assert client.leases.recall("reconciler", fence=record.fence - 1, **JANE) is False
        assert client.leases.recall("reconciler", fence=record.fence, **JANE) is True
        assert client.leases.recall("reconciler", fence=record.fence, **JANE) in (True, False)
        one.expect("stopped")
