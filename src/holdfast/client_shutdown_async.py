"""What becomes of what a client holds when it is closed: work is stopped first, then all is released, bounded in time.

What cannot be said in time the keeper goes on saying; what it cannot say either expires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.database.engine_async import AsyncEngine
from holdfast.errors import HoldfastError, SchemaMismatch
from holdfast.lease.keepers import keepers_of
from holdfast.runtime import forks
from holdfast.runtime.log import logger

if TYPE_CHECKING:
    from holdfast.lock.handle_async import AsyncLockSpace

log = logger("holdfast.client")

CLOSE_TIMEOUT = 5.0


async def end_work(engine: AsyncEngine) -> None:
    """Of electors and shards: told to stop, waited for, and left to expire where that was not enough."""
    working = list(engine.working) if engine.era == forks.era else []
    try:
        for each in working:
            each.stop()
        for each in working:
            await each.leave()
    finally:
        for each in working:
            each.let_expire()


async def end_rest(engine: AsyncEngine, locks: AsyncLockSpace | None) -> None:
    """Locks, leases and connections. In a fork nothing is ours to end but the engine itself."""
    try:
        if engine.era == forks.era and not engine.looks:
            if locks is not None:
                await locks.close()
            await _end_leases(engine)
    finally:
        await engine.close()


async def _end_leases(engine: AsyncEngine) -> None:
    """What was ours alone goes whole; what hangs on a beat that other clients of this process use, one by one."""
    retired = [keeper.retire(engine.owner) for keeper in keepers_of(engine.database)]
    beats = [beat for whole, _ in retired for beat in whole]
    last: list[tuple[str, dict[str, Any]]] = [("beat_end", {"beat": beat}) for beat in beats]
    single = engine.unkept | {holding.token: holding.name for _, shared in retired for holding in shared}
    last += [("lease_release", {"name": name, "token": token}) for token, name in single.items()]
    try:
        while last:
            [row] = await engine.call(*last[-1], timeout=CLOSE_TIMEOUT)
            if not row.get("ended"):  # of very many there may be more
                last.pop()
        if beats or single:
            await engine.call("purge", {}, timeout=CLOSE_TIMEOUT)
    except SchemaMismatch:
        last = []  # the tables are gone, and what it held with them
    except HoldfastError as error:
        log.warning(
            "what the client of %s held is released later, the database did not take it now: %s",
            engine.database,
            error,
            extra={"event": "client.released_late", "database": str(engine.database), "error": str(error)},
        )
    finally:
        for statement, parameters in last:
            engine.keeper.say_later(statement, parameters)
