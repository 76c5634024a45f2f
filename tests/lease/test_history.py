"""What is left when grants have ended: a bounded history, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import holdfast
from tests.children import NONE, Child, eventually, query, rows
from tests.pairs import EACH_ONCE

FAST: dict[str, Any] = {"ttl": 600.0, "renew_every": 0.05}
WHY: dict[str, Any] = {"actor": "operator", "reason": "test"}


@EACH_ONCE
def test_a_forced_release_of_what_at_least_keeps_is_recorded_too(connect: Callable[..., Any], either: str) -> None:
    """Nobody's lease any more, but still refused to others: taking it away is an operator's act like any other."""
    client = connect(either)
    client.lease("a", **FAST, holder="one", at_least=60).acquire().release()
    assert client.leases.force_release("a", **WHY)
    forced, released = client.leases.history("a")
    assert (forced.outcome, forced.actor, forced.reason, forced.holder) == ("forced", "operator", "test", "one")
    assert (released.outcome, released.actor, released.fence) == ("released", None, forced.fence)
    assert client.lease("a", **FAST).try_acquire() is not None


def test_what_crashed_processes_left_is_purged_by_others_and_history_is_bounded(either: str) -> None:
    program = """
    import os, signal, sys, holdfast
    client = holdfast.Client(sys.argv[1])
    for number in range(5):
        client.lease(f"lease-{number}", ttl=60).acquire()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    with Child(program, either) as child:
        child.wait()
    assert rows(either) == {"lease": 5, "beat": 1}
    dot = "_" if either.startswith("sqlite") else "."
    instant = "0.0" if either.startswith("sqlite") else "now()"
    query(
        either,
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < 10500)"
        f" insert into holdfast{dot}history (name, holder, fence, acquired_at, ended_at, outcome)"
        f" select 'old', 'old', i, {instant}, {instant}, 'released' from n",
    )
    query(either, f"update holdfast{dot}beat set expires_at = started")
    with holdfast.Client(either) as client:
        assert client.leases.list() == [], "they have expired"
        client.lease("other", ttl=5).acquire().release()
        eventually(lambda: rows(either) == NONE, "they are purged")
        [(kept,)] = query(either, f"select count(*) from holdfast{dot}history")
        assert kept == 10_000, "the purge keeps the newest, and is the last that wrote"
        assert sum(each.outcome == "expired" for each in client.leases.history(limit=10)) == 5
