"""Compares published events with the log: what is missing, unknown, different, or out of order within its dataset.

Pure: the log and the published events are given by the caller.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast.operations.events import Event, derive
from holdfast.operations.log import LogProblem, Verification, parse_entries

Content = Mapping[str, Any]


class PublishedEvent(NamedTuple):
    """An event as a sink stored it."""

    id: str
    key: str
    number: int
    content: Content
    """Its fields by our names; those from OpenLineage have a field ``openlineage``."""


def parse_published(lines: Iterable[str]) -> list[PublishedEvent]:
    """The events of a file of JSON lines, our own or those of OpenLineage with our facets. ValueError for any other."""
    events = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            content = document if "id" in document else _from_openlineage(document)
            events.append(PublishedEvent(content["id"], str(content["key"]), int(content["number"]), content))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number} is no event of a relay: {type(error).__name__}: {error}") from None
    return events


def _from_openlineage(document: Content) -> dict[str, Any]:
    """The fields of an event, as far as an OpenLineage run event has them."""
    facets = document["run"]["facets"]
    operation, governance = facets["holdfast_idempotency"], facets["holdfast_governance"]
    contract_facet, message = facets.get("holdfast_contract"), facets.get("holdfast_message")
    contract = contract_facet and {
        name: contract_facet[name] for name in ("name", "version", "verdict") if name in contract_facet
    }
    energy_facet = facets.get("holdfast_energy")
    energy = energy_facet and {
        **{name: energy_facet[name] for name in ("estimate", "method", "parameters")},
        "energy_joules": energy_facet["energyJoules"], "carbon_grams": energy_facet["carbonGrams"],
        "cpu_seconds": energy_facet["cpuSeconds"], "wall_seconds": energy_facet["wallSeconds"],
    }  # fmt: skip
    return {
        "id": operation["eventId"], "at": document["eventTime"], "run": document["run"]["runId"],
        "key": operation["key"], "number": operation["number"], "attempt": operation["attempt"],
        "checksum": operation.get("checksum"), "params_hash": operation.get("paramsHash"),
        "result_hash": operation.get("resultHash"),
        "fence": facets["holdfast_lock"]["fence"], "held": facets["holdfast_lock"].get("heldSeconds"),
        "actor": governance.get("actor"), "justification": governance.get("justification"),
        "sovereignty_event": governance["sovereigntyEvent"], "contract": contract,
        "inputs": [dataset["name"] for dataset in document["inputs"]],
        "outputs": [dataset["name"] for dataset in document["outputs"]],
        "topic": message and message["topic"], "payload": message and json.loads(message["payload"]),
        "error": facets.get("errorMessage", {}).get("message"), "energy": energy,
        "openlineage": document["eventType"], "job": document["job"]["name"],
    }  # fmt: skip


def _is_same(content: Content, event: Content) -> bool:
    """Fields that OpenLineage has no place for are not compared. A field that is empty there must be empty here."""
    if "openlineage" not in content:
        return content == event
    states = {"MESSAGE": "OTHER", "UNDONE": "OTHER"}
    expected = {"openlineage": states.get(event["type"], event["type"]), "job": Event.of(event).job, **event}
    return all((value or None) == (expected.get(name) or None) for name, value in content.items())


class ExpectedEvents:
    """The events of the log, added row by row, and the reasons why some may not be published."""

    def __init__(self, cursor: str | None = None, parked: Mapping[str, str] | None = None) -> None:
        """``cursor``: how far the relay has come; ``parked``: ids of events that its sink refused, and why."""
        self._cursor = None if cursor is None else tuple(map(int, cursor.split("/")))
        self._parked = parked or {}
        self._events: dict[str, tuple[int, Event]] = {}
        """By id: the place in the order of the log, and the event."""
        self._waiting: set[str] = set()
        self._tampered: list[LogProblem] = []
        self._archived: dict[str, int] = {}
        """By key: the number of the last entry that was archived."""

    def add(self, row: Mapping[str, Any]) -> None:
        is_waiting = self._cursor is not None and (int(row["horizon"]), int(row["place"])) > self._cursor
        try:
            events = derive(row)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._tampered.append(LogProblem("tampered", row["key"], row["number"], f"cannot be read: {reason}"))
            return
        for event in events:
            self._events[event.id] = len(self._events), event
            if is_waiting:
                self._waiting.add(event.id)
        for entry in parse_entries(row["key"], row["entries"]):
            if entry.kind == "archived":
                self._archived[entry.operation] = entry.number

    def compare(self, published: Iterable[PublishedEvent] | None) -> Verification:
        """All differences. ``published=None``: only what the relay itself reports as waiting or parked."""
        problems: list[LogProblem] = list(self._tampered)
        seen: set[str] = set()
        furthest: dict[str, int] = {}
        for stored in published or ():
            if stored.id not in self._events:
                if stored.number > self._archived.get(stored.key, 0):
                    problems.append(
                        LogProblem("unknown", stored.key, stored.number, f"the log has no event {stored.id}")
                    )
                continue
            place, event = self._events[stored.id]
            if not _is_same(stored.content, json.loads(json.dumps(event.as_dict()))):
                problems.append(_problem("differs", event, "differs from the log"))
            sequence = event.dataset or event.key
            if stored.id not in seen and place < furthest.get(sequence, -1):
                problems.append(_problem("reordered", event, "was published after a later one"))
            furthest[sequence] = max(place, furthest.get(sequence, -1))
            seen.add(stored.id)
        problems += self._missing(seen, has_published=published is not None)
        return Verification(len({event.key for _, event in self._events.values()}), len(self._events), tuple(problems))

    def _missing(self, seen: set[str], *, has_published: bool) -> Iterable[LogProblem]:
        for id, (_, event) in self._events.items():
            if id in seen:
                continue
            if id in self._parked:
                yield _problem("parked", event, f"was refused: {self._parked[id]}")
            elif id in self._waiting:
                yield _problem("waiting", event, "is not published yet")
            elif has_published:
                yield _problem("missing", event, "was not published")


def _problem(what: str, event: Event, text: str) -> LogProblem:
    return LogProblem(what, event.key, event.number, f"{event.type} {event.id} of {event.label!r} {text}")
