"""Whether what was published is what the log says: nothing missing, nothing unknown, nothing with other words, and of
each dataset nothing out of order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast.operations.events import Event, derive
from holdfast.operations.log import LogProblem, Verification, parse_entries

Content = Mapping[str, Any]


class Published(NamedTuple):
    """One that somebody has, in the order they have them, with what they say of it."""

    id: str
    key: str
    number: int
    content: Content


def read(lines: Iterable[str]) -> list[Published]:
    """What a file of JSON lines holds: ours, or OpenLineage's with our facet in them. ValueError when it is another."""
    found = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            told = json.loads(text)
            content = told if "id" in told else _from_openlineage(told)
            found.append(Published(content["id"], str(content["key"]), int(content["number"]), content))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number} is no event of a relay: {type(error).__name__}: {error}") from None
    return found


def _from_openlineage(told: Content) -> dict[str, Any]:
    """As much of an event as OpenLineage's has, by our names."""
    facets = told["run"]["facets"]
    ours, governance = facets["holdfast_idempotency"], facets["holdfast_governance"]
    contract, message = facets.get("holdfast_contract"), facets.get("holdfast_message")
    agreed = contract and {name: contract[name] for name in ("name", "version", "verdict") if name in contract}
    cost = facets.get("holdfast_energy")
    spent = cost and {
        **{name: cost[name] for name in ("estimate", "method", "parameters")},
        "energy_joules": cost["energyJoules"], "carbon_grams": cost["carbonGrams"],
        "cpu_seconds": cost["cpuSeconds"], "wall_seconds": cost["wallSeconds"],
    }  # fmt: skip
    return {
        "id": ours["eventId"], "at": told["eventTime"], "run": told["run"]["runId"], "key": ours["key"],
        "number": ours["number"], "attempt": ours["attempt"], "checksum": ours.get("checksum"),
        "params_hash": ours.get("paramsHash"), "result_hash": ours.get("resultHash"),
        "fence": facets["holdfast_lock"]["fence"], "held": facets["holdfast_lock"].get("heldSeconds"),
        "actor": governance.get("actor"), "justification": governance.get("justification"),
        "sovereignty_event": governance["sovereigntyEvent"], "contract": agreed,
        "inputs": [each["name"] for each in told["inputs"]], "outputs": [each["name"] for each in told["outputs"]],
        "topic": message and message["topic"], "payload": message and json.loads(message["payload"]),
        "error": facets.get("errorMessage", {}).get("message"), "energy": spent,
        "openlineage": told["eventType"], "job": told["job"]["name"],
    }  # fmt: skip


def _same(content: Content, event: Content) -> bool:
    """What OpenLineage's has no room for is not compared; that it says nothing where there is something is."""
    if "openlineage" not in content:
        return content == event
    states = {"MESSAGE": "OTHER", "UNDONE": "OTHER"}
    said = {"openlineage": states.get(event["type"], event["type"]), "job": Event.of(event).job, **event}
    return all((value or None) == (said.get(name) or None) for name, value in content.items())


class Expected:
    """What there is to be told, row by row of the log; and what is known of why somebody may not have it."""

    def __init__(self, cursor: str | None = None, parked: Mapping[str, str] | None = None) -> None:
        """``cursor``: how far the relay has come; ``parked``: the ids of what its sink refused, and why."""
        self._cursor = None if cursor is None else tuple(map(int, cursor.split("/")))
        self._parked = parked or {}
        self._known: dict[str, tuple[int, Event]] = {}
        self._waiting: set[str] = set()
        self._tampered: list[LogProblem] = []
        self._away: dict[str, int] = {}
        """Of operations whose entries were put away: the last of those."""

    def add(self, row: Mapping[str, Any]) -> None:
        waits = self._cursor is not None and (int(row["horizon"]), int(row["place"])) > self._cursor
        try:
            events = derive(row)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self._tampered.append(LogProblem("tampered", row["key"], row["number"], f"cannot be read: {said}"))
            return
        for event in events:
            self._known[event.id] = len(self._known), event
            if waits:
                self._waiting.add(event.id)
        for entry in parse_entries(row["key"], row["entries"]):
            if entry.kind == "archived":
                self._away[entry.operation] = entry.number

    def compare(self, published: Iterable[Published] | None) -> Verification:
        """None: what was published is not at hand, only what the relay says of it."""
        problems: list[LogProblem] = list(self._tampered)
        seen: set[str] = set()
        furthest: dict[str, int] = {}
        for each in published or ():
            if each.id not in self._known:
                if each.number > self._away.get(each.key, 0):
                    problems.append(LogProblem("unknown", each.key, each.number, f"the log has no event {each.id}"))
                continue
            place, event = self._known[each.id]
            if not _same(each.content, json.loads(json.dumps(event.as_dict()))):
                problems.append(_problem("differs", event, "says something else"))
            line = event.dataset or event.key
            if each.id not in seen and place < furthest.get(line, -1):
                problems.append(_problem("reordered", event, "came after a later one"))
            furthest[line] = max(place, furthest.get(line, -1))
            seen.add(each.id)
        problems += self._missing(seen, at_hand=published is not None)
        return Verification(len({event.key for _, event in self._known.values()}), len(self._known), tuple(problems))

    def _missing(self, seen: set[str], *, at_hand: bool) -> Iterable[LogProblem]:
        for id, (_, event) in self._known.items():
            if id in seen:
                continue
            if id in self._parked:
                yield _problem("parked", event, f"was refused: {self._parked[id]}")
            elif id in self._waiting:
                yield _problem("waiting", event, "is not told yet")
            elif at_hand:
                yield _problem("missing", event, "was not published")


def _problem(what: str, event: Event, told: str) -> LogProblem:
    return LogProblem(what, event.key, event.number, f"{event.type} {event.id} of {event.label!r} {told}")
