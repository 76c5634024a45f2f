"""The heartbeat: one daemon thread a database a process, on a session of its own, for both flavours; and a second one
for leases that one heartbeat without an answer may end, where there are such.

It renews one row for all leases of a TTL, hears of releases that somebody here waits for, and does what could not be
done in time elsewhere. It knows beats and tokens; what a lost lease means is for the grant to decide. A blocked event
loop or an exhausted pool cannot hold it up, and neither can another database: that one has a thread of its own.
"""

from __future__ import annotations

import atexit
import sys
import threading

from holdfast.database.url import Database
from holdfast.lease import keeper as thread
from holdfast.lease.keeper import THREAD, Keeper
from holdfast.lease.pulse import Holding, Pulse
from holdfast.lease.release_listener import OBJECTS
from holdfast.runtime import forks, telemetry
from holdfast.runtime.clock import now

__all__ = ["OBJECTS", "Holding", "Keeper", "Pulse", "keeper_of", "keepers_of"]

_keepers: dict[tuple[Database, bool], Keeper] = {}


def keeper_of(database: Database, *, brittle: bool = False) -> Keeper:
    """The one keeper of such leases of this database in this process.

    How long an answer may take depends on the lease that has the least time. Those that one heartbeat without an answer
    may end, by itself or with its session, must not be over because of another that is shorter."""
    return _keepers.get((database, brittle)) or _made(database, brittle)


def _made(database: Database, brittle: bool) -> Keeper:
    """In one step, and under no lock: a signal's handler may want it this very moment, too."""
    if "multiprocessing.process" in sys.modules:
        _end_with_process()
    keeper = _keepers.setdefault((database, brittle), Keeper(database))
    telemetry.register(keeper)
    return keeper


def keepers_of(database: Database) -> list[Keeper]:
    """Those that there are."""
    return [_keepers[database, brittle] for brittle in (False, True) if (database, brittle) in _keepers]


@forks.in_child
def _forget() -> None:
    """The parent's threads are not here; whatever the child acquires gets keepers of its own."""
    _keepers.clear()


@atexit.register
def _close_all() -> None:
    """Release what is still held, bounded: what cannot be said in time is left to expire."""
    keepers, until = list(_keepers.values()), now() + thread.EXIT_BUDGET + 0.5
    for keeper in keepers:
        keeper.close(timeout=0.0)  # all at once
    for keeper in keepers:
        keeper.close(timeout=max(0.0, until - now()))


def _end_with_process() -> None:
    """A child that multiprocessing forked ends without atexit, until Python 3.13."""
    from multiprocessing import parent_process
    from multiprocessing.util import Finalize

    if parent_process() is not None:
        Finalize(None, _close_alone, exitpriority=-10)  # after its children have ended, and the threads of its queues


def _close_alone() -> None:
    """Another thread may be at work under a lease: then that is left to expire."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if all(thread.name == THREAD for thread in others):
        _close_all()
