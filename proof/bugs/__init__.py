"""Known mistakes, to know that the checker would notice: each is a wrong implementation in a few lines, and a scene
that brings it out every time.

    for bug in BUGS.values():
        assert bug.check in play(bug, folder, servers).violated
        assert not play(bug, folder, servers, healthy=True).violated

A scene is played twice: with the wrong implementation the checker must find that promise broken, and with the real one
in its place nothing. `python -m proof.bugs` plays them all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.testing import pooler
from holdfast.testing.checker import Report, check
from holdfast.testing.faults.servers import Pair
from holdfast.testing.postgres import Postgres
from holdfast.testing.resource import Resource
from proof.bugs import answers, fencing, forking, gauges, locks, recipes, running, tokens
from proof.bugs.implementation import Holdfast
from proof.bugs.stage import Stage


class Bug(NamedTuple):
    """A mistake, and the promise that it breaks."""

    check: str
    wrong: Callable[[], Holdfast]
    scene: Callable[[Stage], None]
    real: Callable[[], Holdfast] = Holdfast
    needs_pair: bool = False
    needs_pooler: bool = False

    def missing(self) -> str | None:
        """What this machine does not have, and the scene cannot do without."""
        missing = self.needs_pooler and pooler.find() is None
        return "PgBouncer is not installed: apt-get install pgbouncer" if missing else None


BUGS: dict[str, Bug] = {
    "no fence": Bug("C3", fencing.NoFence, fencing.overtaken),
    "FOR KEY SHARE": Bug("C3", fencing.ForKeyShare, fencing.overtaken),
    "protect in a savepoint": Bug("C3", fencing.InASavepoint, fencing.overtaken_after_savepoint),
    "advisory guard with forced steal": Bug("C3", fencing.AdvisoryGuard, fencing.overtaken_by_force),
    "plain deferred trigger under REPEATABLE READ": Bug(
        "C3", fencing.PlainTrigger, fencing.overtaken_behind_a_snapshot, fencing.AtCommit
    ),
    "per-row token with DELETE on release": Bug("C1", tokens.PerRowToken, tokens.released_and_acquired_again),
    "fence drawn before the row is owned": Bug("C2", tokens.DrawnTooEarly, tokens.held_up_on_the_way),
    "counter token across failover": Bug("C2", tokens.CounterAlone, tokens.lost_with_the_primary, needs_pair=True),
    "renewal by sub-select": Bug("C7", answers.SubSelectRenewal, answers.renewed_while_being_replaced),
    "sync-wait warning ignored": Bug(
        "C7",
        answers.WarningIgnored,
        answers.acknowledged_by_the_primary_alone,
        answers.ThroughTheClient,
        needs_pair=True,
    ),
    "trust counted from the reply": Bug(
        "C7", answers.TrustFromTheReply, answers.answered_late, answers.ThroughTheClient
    ),
    "fork-shared connection": Bug("C6", forking.ForkedConnection, forking.divided, forking.ForkedClient),
    "lock not given back after a timeout": Bug("C9", locks.Careless, locks.granted_too_late, locks.Locker),
    "lock not given back after a cancel": Bug("C9", locks.Careless, locks.granted_to_the_cancelled, locks.Locker),
    "lock through a transaction pooler": Bug(
        "C7", locks.Careless, locks.locked_through_a_pooler, locks.Locker, needs_pooler=True
    ),
    "lock for a transaction": Bug("C7", locks.ForATransaction, locks.committed_inside, locks.Locker),
    "lock bound to the application's session": Bug("C9", locks.BoundToASession, locks.committed_inside, locks.Locker),
    "slot claimed by reading, then writing": Bug(
        "C7", recipes.ReadThenWrite, recipes.claimed_in_between, recipes.Recipes
    ),
    "wipe under a guard that was proven before": Bug(
        "C7", recipes.ProvenBefore, recipes.wiped_too_late, recipes.Recipes
    ),
    "guard ended by a thread": Bug("C7", recipes.EndedByAThread, recipes.resumed_after_its_time, recipes.Recipes),
    "unfenced finish": Bug("C5", running.UnfencedFinish, running.finished_late, running.Runner),
    "result before effect": Bug("C5", running.ResultFirst, running.killed_half_way, running.Runner),
    "claim outside the transaction": Bug("C5", running.ClaimOutside, running.both_at_once, running.Runner),
    "gauge counted along": Bug("C10", gauges.CountedAlong, gauges.lost_meanwhile, gauges.Gauges),
}


class Servers(Resource):
    """The servers that scenes are played on: one alone and one pair, made when they are needed, and used again."""

    def __init__(self, *, major: int | None = None) -> None:
        self._major = major
        self._alone: Postgres | None = None
        self._pair: Pair | None = None

    def alone(self) -> Postgres:
        self._alone = self._alone or Postgres.create(major=self._major)
        return self._alone

    def pair(self) -> Pair:
        if self._pair is None:
            self._pair = Pair.create(major=self._major)
        self._pair.rejoin()
        return self._pair

    def close(self) -> None:
        for server in (self._alone, self._pair):
            if server is not None:
                server.close()


def play(bug: Bug, folder: Path | str, servers: Servers, *, healthy: bool = False) -> Report:
    """Play its scene, with the mistake or without, and let the checker judge the history that is left in `folder`."""
    implementation = (bug.real if healthy else bug.wrong)()
    with Stage(Path(folder), servers.pair() if bug.needs_pair else servers.alone(), implementation) as stage:
        bug.scene(stage)
    return check(Path(folder))
