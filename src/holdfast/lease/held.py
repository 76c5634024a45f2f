# Generated from held_async.py by scripts/unasync.py. Do not edit.
"""The leases that a client holds, and their release when it closes.

What the database does not take back in time is retried in the background; if that fails too, it expires.
"""

from __future__ import annotations

from typing import Any

from holdfast.database.engine import Engine, Resource
from holdfast.errors import HoldfastError, SchemaMismatch
from holdfast.lease.keeper import PURGE_EVERY, keepers_of
from holdfast.runtime.log import WARNING, logger

log = logger("holdfast.lease")

CLOSE_TIMEOUT = 5.0


class HeldLeases:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.unrenewed: dict[str, str] = {}
        """Names by token of leases that no heartbeat renews (``auto_renew=False``). The keeper knows the others."""
        engine.register(Resource(release=self._release_all))

    def _release_all(self) -> None:
        """End the beats that are this client's alone, and release its leases on beats shared with other clients."""
        engine = self._engine
        removed = [keeper.remove_owner(engine.owner) for keeper in keepers_of(engine.database)]
        beats = [beat for own, _ in removed for beat in own]
        leases = self.unrenewed | {lease.token: lease.name for _, shared in removed for lease in shared}
        last: list[tuple[str, dict[str, Any]]] = [("beat_end", {"beat": beat}) for beat in beats]
        last += [("lease_release", {"name": name, "token": token}) for token, name in leases.items()]
        try:
            while last:
                [row] = engine.call(*last[-1], timeout=CLOSE_TIMEOUT)
                if not row.get("ended"):  # a beat with very many leases takes several calls
                    last.pop()
            if beats or leases:
                engine.call("purge", {}, timeout=CLOSE_TIMEOUT)
        except SchemaMismatch:
            last = []  # the tables are gone, and the leases with them
        except HoldfastError as error:
            log.event(
                "client.released_late", WARNING,
                "the leases of the client of %(database)s are released later: the database did not answer: %(error)s",
                database=str(engine.database), error=str(error),
            )  # fmt: skip
        finally:
            for statement, parameters in last:
                engine.background.retry(statement, parameters, patience=PURGE_EVERY, until=False)
