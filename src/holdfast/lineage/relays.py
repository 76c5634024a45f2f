# Generated from relays_async.py by scripts/unasync.py. Do not edit.
"""The relays of a database: how far each has come, what its sink refused, and all that there is to tell."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from holdfast.database.engine import Engine
from holdfast.database.sessions import Row
from holdfast.errors import NotAcquired
from holdfast.governance.audit import Audit
from holdfast.keys import OperationKey, as_key
from holdfast.lease.handle import Lease
from holdfast.lease.terms import LeaseTerms
from holdfast.lineage.published import Expected, read
from holdfast.lineage.relay_terms import LEASE, ParkedRecord, RelayRecord, parked_of
from holdfast.names import check_limit, check_name
from holdfast.operations.events import Event, derive
from holdfast.operations.logged import Verification

PAGE, MOST = 500, 10_000
TTL = 30.0
"""Seconds after which somebody who died while it removed a relay holds up nobody who would run it."""

Records = list[RelayRecord]
Parked = list[ParkedRecord]


class Relays:
    """``client.relays``: all relays of the database. One to be run is ``client.relay(name, sink)``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def list(self) -> Records:
        """All that were ever run, with what waits for each: entries of the log, and for how long."""
        return [RelayRecord.of(row) for row in self._engine.call("relay_list", {})]

    def parked(self, name: str, *, most: int = 100) -> Parked:
        """What its sink refused, the oldest first."""
        asked = {"name": check_name(name), "only_again": False, "most": check_limit(most)}
        rows = self._engine.call("relay_parked", asked)
        return [parked_of(row, Event.of(json.loads(row["event"]))) for row in rows]

    def retry(self, name: str, id: str | None = None) -> int:
        """Have the relay tell what is parked again, all or one event, before it goes on; how many."""
        [row] = self._engine.call("relay_retry", {"name": check_name(name), "id": id})
        asked: int = row["asked"]
        return asked

    def remove(self, name: str, *, actor: str, reason: str) -> bool:
        """Forget a relay that nobody runs any more, for the record: what it has not told keeps the log from being
        archived no longer. False when there is none of that name. NotAcquired while somebody runs it, who would begin
        anew and tell everything again: stop that first."""
        audit, terms = Audit(self._engine), LeaseTerms.check(f"{LEASE}{check_name(name, most=180)}", ttl=TTL)
        entry = audit.begin("relay.remove", name, actor=actor, reason=reason)
        try:
            with Lease(self._engine, terms, 0.0):
                [row] = self._engine.call("relay_remove", {"name": name}, again=None)
        except NotAcquired as error:
            audit.end(entry, f"refused: {error.holder} runs it")
            raise
        audit.end(entry, "removed" if row["removed"] else "there is none")
        return bool(row["removed"])

    def events(self, key: OperationKey | str | None = None, *, dataset: str | None = None) -> Iterator[Event]:
        """Everything that there is to tell, from the beginning of the log as it is kept, in the order of a relay; or of
        one operation, or of all runs that read or write a dataset."""
        digest, runs = None if key is None else as_key(key).digest, None
        if dataset is not None:  # what a run writes is known at its end
            touched = (event for event in self.events(key) if _touches(event, dataset))
            runs = {event.run for event in touched}
        for row in self._rows():
            if digest in (None, row["key"]):
                for event in derive(row):
                    if runs is None or event.run in runs:
                        yield event

    def verify(self, published: Iterable[str] | None = None, *, relay: str | None = None) -> Verification:
        """Compare what was published, as lines of JSON, with the log: what is missing, unknown, other than it was, or
        of its dataset out of order. ``relay``: whose doing it was, so that what it has not told yet, or has parked, is
        known for that. Without ``published`` that is all that is told, of this relay or of every one. What was archived
        is not judged."""
        whose = relay is not None or published is None
        expected: Sequence[Expected] = self._expected(relay) if whose else [Expected()]
        had = None if published is None else read(published)
        for row in self._rows():
            for each in expected:
                each.add(row)
        first, *others = [each.compare(had) for each in expected]
        return replace(first, problems=(*first.problems, *(each for other in others for each in other.problems)))

    def _expected(self, name: str | None) -> Sequence[Expected]:
        """Where they stand, before what was published and the log are read: what is told meanwhile may wait, and is not
        missing."""
        found = [each for each in self.list() if name in (None, each.name)]
        if not found:
            raise LookupError("no relay was ever run" if name is None else f"there is no relay {name!r}")
        return [
            Expected(each.cursor, {one.id: one.problem for one in self.parked(each.name, most=MOST)}) for each in found
        ]

    def _rows(self) -> Iterator[Row]:
        after = {"after_horizon": "0", "after_place": 0}
        while rows := self._engine.call("relay_read", {**after, "most": PAGE}):
            for row in rows:
                yield row
            after = {"after_horizon": str(rows[-1]["horizon"]), "after_place": rows[-1]["place"]}


def _touches(event: Event, dataset: str) -> bool:
    return dataset in (event.dataset, *event.inputs, *event.outputs)
