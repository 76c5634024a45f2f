"""Seeded bugs, which prove that the checker works: each is a wrong implementation in a few lines, and a scenario in
which it always goes wrong. Modules are named by the checks that their bugs violate.

    for bug in BUGS.values():
        assert bug.check in run(bug, folder, servers).violated
        assert not run(bug, folder, servers, healthy=True).violated

A scenario runs twice: with the wrong implementation the checker must report that check, with the real one none.
`python -m proof.bugs` runs them all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.testing import pooler
from holdfast.testing.checker import Report, check
from holdfast.testing.faults.servers import Pair
from holdfast.testing.postgres import Postgres
from holdfast.testing.resource import Resource
from proof.bugs import (
    c1_c2_fences,
    c3_c4_c9_batches,
    c3_stale_writes,
    c5_effects,
    c5_owners,
    c6_forked_connection,
    c7_c9_locks,
    c7_recipes,
    c7_trust,
    c10_gauges,
)
from proof.bugs.implementation import Holdfast
from proof.bugs.testbed import Testbed


class Bug(NamedTuple):
    """A wrong implementation, and the check that it violates."""

    check: str
    wrong: Callable[[], Holdfast]
    scenario: Callable[[Testbed], None]
    real: Callable[[], Holdfast] = Holdfast
    needs_pair: bool = False
    needs_pooler: bool = False

    def missing(self) -> str | None:
        """What the scenario needs and this machine does not have; None if it can run."""
        missing = self.needs_pooler and pooler.find() is None
        return "PgBouncer is not installed: apt-get install pgbouncer" if missing else None


BUGS: dict[str, Bug] = {
    "no fence": Bug("C3", c3_stale_writes.NoFence, c3_stale_writes.overtaken),
    "FOR KEY SHARE": Bug("C3", c3_stale_writes.ForKeyShare, c3_stale_writes.overtaken),
    "protect in a savepoint": Bug("C3", c3_stale_writes.InASavepoint, c3_stale_writes.overtaken_after_savepoint),
    "advisory guard with forced steal": Bug("C3", c3_stale_writes.AdvisoryGuard, c3_stale_writes.overtaken_by_force),
    "plain deferred trigger under REPEATABLE READ": Bug(
        "C3", c3_stale_writes.PlainTrigger, c3_stale_writes.overtaken_behind_a_snapshot, c3_stale_writes.AtCommit
    ),
    "per-row token with DELETE on release": Bug(
        "C1", c1_c2_fences.PerRowToken, c1_c2_fences.released_and_acquired_again
    ),
    "fence drawn before the row is owned": Bug("C2", c1_c2_fences.DrawnTooEarly, c1_c2_fences.held_up_on_the_way),
    "counter token across failover": Bug(
        "C2", c1_c2_fences.CounterAlone, c1_c2_fences.lost_with_the_primary, needs_pair=True
    ),
    "renewal by sub-select": Bug("C7", c7_trust.SubSelectRenewal, c7_trust.renewed_while_being_replaced),
    "sync-wait warning ignored": Bug(
        "C7",
        c7_trust.WarningIgnored,
        c7_trust.acknowledged_by_the_primary_alone,
        c7_trust.ThroughTheClient,
        needs_pair=True,
    ),
    "trust counted from the reply": Bug(
        "C7", c7_trust.TrustFromTheReply, c7_trust.answered_late, c7_trust.ThroughTheClient
    ),
    "fork-shared connection": Bug(
        "C6", c6_forked_connection.ForkedConnection, c6_forked_connection.divided, c6_forked_connection.ForkedClient
    ),
    "lock not given back after a timeout": Bug(
        "C9", c7_c9_locks.Careless, c7_c9_locks.granted_too_late, c7_c9_locks.Locker
    ),
    "lock not given back after a cancel": Bug(
        "C9", c7_c9_locks.Careless, c7_c9_locks.granted_to_the_cancelled, c7_c9_locks.Locker
    ),
    "lock through a transaction pooler": Bug(
        "C7", c7_c9_locks.Careless, c7_c9_locks.locked_through_a_pooler, c7_c9_locks.Locker, needs_pooler=True
    ),
    "lock for a transaction": Bug("C7", c7_c9_locks.ForATransaction, c7_c9_locks.committed_inside, c7_c9_locks.Locker),
    "lock bound to the application's session": Bug(
        "C9", c7_c9_locks.BoundToASession, c7_c9_locks.committed_inside, c7_c9_locks.Locker
    ),
    "a neighbour's refusal is lost": Bug(
        "C4", c3_c4_c9_batches.RefusalLost, c3_c4_c9_batches.refused_among_others, c3_c4_c9_batches.Batches
    ),
    "sent twice, happened twice": Bug(
        "C4", c3_c4_c9_batches.SentTwice, c3_c4_c9_batches.lost_after_the_commit, c3_c4_c9_batches.Batches
    ),
    "a cancelled call's grant is kept": Bug(
        "C9", c3_c4_c9_batches.GrantKept, c3_c4_c9_batches.cancelled_among_others, c3_c4_c9_batches.Batches
    ),
    "repeated before its session has ended": Bug(
        "C4", c3_c4_c9_batches.NotEnded, c3_c4_c9_batches.executed_late, c3_c4_c9_batches.Batches
    ),
    "a cancelled call's write is overtaken": Bug(
        "C3", c3_c4_c9_batches.Overtaking, c3_c4_c9_batches.overtaken, c3_c4_c9_batches.Batches
    ),
    "slot claimed by reading, then writing": Bug(
        "C7", c7_recipes.ReadThenWrite, c7_recipes.claimed_in_between, c7_recipes.Recipes
    ),
    "wipe under a guard that was proven before": Bug(
        "C7", c7_recipes.ProvenBefore, c7_recipes.wiped_too_late, c7_recipes.Recipes
    ),
    "guard ended by a thread": Bug(
        "C7", c7_recipes.EndedByAThread, c7_recipes.resumed_after_its_time, c7_recipes.Recipes
    ),
    "unfenced finish": Bug("C5", c5_effects.UnfencedFinish, c5_effects.finished_late, c5_effects.Runner),
    "result before effect": Bug("C5", c5_effects.ResultFirst, c5_effects.killed_half_way, c5_effects.Runner),
    "claim outside the transaction": Bug("C5", c5_effects.ClaimOutside, c5_effects.both_at_once, c5_effects.Runner),
    "liveness asked after the log": Bug(
        "C5", c5_effects.LivenessAskedLater, c5_effects.ended_between_two_looks, c5_effects.Runner
    ),
    "owner dead when its key is free once": Bug("C5", c5_owners.free_once, c5_owners.lost_twice),
    "old note of an owner kept": Bug("C5", c5_owners.old_note_kept, c5_owners.lost_twice),
    "gauge counted along": Bug("C10", c10_gauges.CountedAlong, c10_gauges.lost_meanwhile, c10_gauges.Gauges),
}


class Servers(Resource):
    """The servers of all scenarios: a single one and a pair, started when first needed, and shared."""

    def __init__(self, *, major: int | None = None) -> None:
        self._major = major
        self._single: Postgres | None = None
        self._pair: Pair | None = None

    def single(self) -> Postgres:
        self._single = self._single or Postgres.create(major=self._major)
        return self._single

    def pair(self) -> Pair:
        if self._pair is None:
            self._pair = Pair.create(major=self._major)
        self._pair.rejoin()
        return self._pair

    def close(self) -> None:
        for server in (self._single, self._pair):
            if server is not None:
                server.close()


def run(bug: Bug, folder: Path | str, servers: Servers, *, healthy: bool = False) -> Report:
    """Run its scenario with the bug, or `healthy` without it, and check the history, which stays in `folder`."""
    implementation = (bug.real if healthy else bug.wrong)()
    with Testbed(Path(folder), servers.pair() if bug.needs_pair else servers.single(), implementation) as testbed:
        bug.scenario(testbed)
    return check(Path(folder))
