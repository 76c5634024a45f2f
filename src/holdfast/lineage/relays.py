# Generated from relays_async.py by scripts/unasync.py. Do not edit.
"""``client.relays``: how far each relay has come, what its sink refused, and the events of the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from holdfast.database.engine import Engine
from holdfast.database.sessions import Row
from holdfast.errors import NotAcquired
from holdfast.governance.audit import Audit
from holdfast.keys import OperationKey, as_key
from holdfast.lease.handle import Lease
from holdfast.lease.terms import LeaseTerms
from holdfast.lineage.records import ParkedRecord, RelayRecord
from holdfast.lineage.verification import ExpectedEvents, parse_published
from holdfast.names import RELAY, check_limit, check_name, check_said
from holdfast.operations.events import Event, derive
from holdfast.operations.log import Verification

PAGE = 500
"""Rows of the log to read at a time."""
MAX_PARKED = 10_000
"""Parked events that ``verify`` knows of."""
TTL = 30.0
"""Of the lease while a relay is removed: so long a process that dies meanwhile keeps the relay from running."""

Records = list[RelayRecord]
Parked = list[ParkedRecord]


class Relays:
    """All relays of the database. To run one: ``client.relay(name, sink).run()``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def list(self) -> Records:
        """Every relay that was ever run, with the number and the age of the entries it has not published."""
        return [RelayRecord._of(row) for row in self._engine.call("relay_list", {})]

    def parked(self, name: str, *, limit: int = 100) -> Parked:
        """The events that its sink refused, the oldest first."""
        parameters = {"name": check_name(name), "only_again": False, "limit": check_limit(limit)}
        return [ParkedRecord._of(row) for row in self._engine.call("relay_parked", parameters)]

    def retry(self, name: str, id: str | None = None) -> int:
        """Let the relay send its parked events again, all or one, before it goes on. Returns their number."""
        [row] = self._engine.call("relay_retry", {"name": check_name(name), "id": id})
        count: int = row["asked"]
        return count

    def remove(self, name: str, *, actor: str, reason: str) -> bool:
        """Delete a relay that is not run any more, and record it in the audit. False when there is none of that name.

        What it has not published no longer keeps the log from being archived. NotAcquired while a process runs the
        relay, which is recorded, too: stop that process first, because it would publish all again from the beginning.
        """
        terms = LeaseTerms.check(f"{RELAY}{check_name(name, limit=180)}", ttl=TTL, kind="relay")
        author = {"actor": check_said(actor, "actor"), "reason": check_said(reason, "reason", limit=1000)}
        try:
            with Lease(self._engine, terms, 0.0):
                [row] = self._engine.call("relay_remove", {"name": name, **author}, again=None)
        except NotAcquired as error:
            audit = Audit(self._engine)
            audit.end(audit.begin("relay.remove", name, actor=actor, reason=reason), f"refused: {error}")
            raise
        return bool(row["removed"])

    def events(self, key: OperationKey | str | None = None, *, dataset: str | None = None) -> Iterator[Event]:
        """All events of the log, from its oldest entry on, in the order in which a relay publishes them.

        ``key``: only those of one operation. ``dataset``: only those of runs that read or write it.
        """
        digest, runs = None if key is None else as_key(key).digest, None
        if dataset is not None:  # a first pass, because the outputs of a run are known only at its end
            events = (event for event in self.events(key) if _concerns(event, dataset))
            runs = {event.run for event in events}
        for row in self._rows():
            if digest in (None, row["key"]):
                for event in derive(row):
                    if runs is None or event.run in runs:
                        yield event

    def verify(self, published: Iterable[str] | None = None, *, relay: str | None = None) -> Verification:
        """Compare published events, as lines of JSON, with the log: what is missing, unknown, different, or out of
        order within its dataset.

        ``relay``: the relay that published them, so that events it has not published yet, or has parked, are reported
        as such. Without ``published`` nothing is compared: only waiting and parked events are reported, of this relay
        or of all. Archived entries are not compared. LookupError when there is no such relay, or none was ever run.
        """
        uses_relays = relay is not None or published is None
        expected: Sequence[ExpectedEvents] = self._expected(relay) if uses_relays else [ExpectedEvents()]
        stored = None if published is None else parse_published(published)
        for row in self._rows():
            for events in expected:
                events.add(row)
        first, *others = [events.compare(stored) for events in expected]  # each has counted the same rows
        return replace(first, problems=(*first.problems, *(problem for other in others for problem in other.problems)))

    def _expected(self, name: str | None) -> Sequence[ExpectedEvents]:
        """Read the cursors before the published events and the log: what is published meanwhile counts as waiting, and
        is never missing."""
        relays = [relay for relay in self.list() if name in (None, relay.name)]
        if not relays:
            raise LookupError("no relay was ever run" if name is None else f"there is no relay {name!r}")
        return [
            ExpectedEvents(
                relay.cursor,
                {record.id: record.problem for record in self.parked(relay.name, limit=MAX_PARKED)},
            )
            for relay in relays
        ]

    def _rows(self) -> Iterator[Row]:
        after = {"after_horizon": "0", "after_place": 0}
        while rows := self._engine.call("relay_read", {**after, "limit": PAGE}):
            for row in rows:
                yield row
            after = {"after_horizon": str(rows[-1]["horizon"]), "after_place": rows[-1]["place"]}


def _concerns(event: Event, dataset: str) -> bool:
    return dataset in (event.dataset, *event.inputs, *event.outputs)
