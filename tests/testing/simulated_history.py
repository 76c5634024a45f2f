"""A simulated lease and workers that use it at random: histories that are correct by construction."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from holdfast.testing.history import DatabaseRows, Event, Kind, RecordedOperation


@dataclass
class Grant:
    name: str
    fence: int
    since: float
    believed: bool = True


@dataclass
class Call:
    """An operation under way: invoked, and perhaps in effect, but not answered."""

    op: str
    name: str
    fence: int | None
    number: str
    data: dict[str, Any]
    outcome: Kind | None = None


class World:
    """A step: a worker invokes an operation, the operation takes effect, it is answered, or trust in a grant ends."""

    def __init__(self, random: Random, *, names: int = 2, workers: int = 4, unknown: float = 0.05) -> None:
        self._random, self._unknown = random, unknown
        self._names = [f"lease-{number}" for number in range(names)]
        self._workers = [f"worker-{number}" for number in range(workers)]
        self._rows: dict[str, int | None] = dict.fromkeys(self._names)
        self._trusted: set[int] = set()
        self._grants: dict[str, Grant] = {}
        self._calls: dict[str, Call] = {}
        self._time, self._fence, self._number = 100.0, 0, 0
        self.events: list[Event] = []
        self.writes: list[dict[str, Any]] = []
        self.takeovers: list[dict[str, Any]] = []
        self._written: Counter[tuple[str, int | None]] = Counter()
        self._taken_over: set[int | None] = set()

    def run(self, steps: int) -> World:
        for _ in range(steps):
            self._time += self._random.choice([0.0, 0.001, 0.01])
            self._step(self._random.choice(self._workers))
        for worker in list(self._grants):
            self._stop_believing(worker)
        return self

    @property
    def database(self) -> DatabaseRows:
        return DatabaseRows(self.writes, self.takeovers, sane_clocks=True)

    def _step(self, worker: str) -> None:
        call = self._calls.get(worker)
        if call is None:
            self._invoke(worker)
        elif call.outcome is None:
            call.outcome = self._effect(call)
        else:
            self._answer(worker, self._calls.pop(worker))

    def _invoke(self, worker: str) -> None:
        self._number += 1
        grant, number = self._grants.get(worker), f"op-{self._number}"
        if grant is None:
            call = Call("acquire", self._random.choice(self._names), None, number, {})
        elif grant.believed and self._random.random() < 0.2:
            self._stop_believing(worker)
            return
        else:
            op = self._random.choice(["renew", "renew", "write", "write", "takeover", "release"])
            call = Call(op, grant.name, grant.fence, number, {"key": number} if op == "write" else {})
        if call.op == "release":
            self._stop_believing(worker)
        self._calls[worker] = call
        self._record(worker, "invoke", call, dict(call.data))

    def _effect(self, call: Call) -> Kind:
        row = self._rows[call.name]
        if call.op == "acquire":
            return self._acquire(call, row)
        if row != call.fence:
            return "fail"
        if call.op == "release":
            self._rows[call.name] = None
        elif call.op == "write":
            self.writes.append({"name": call.name, "fence": call.fence, **call.data})
            self._written[call.name, None] += 1
            self._written[call.name, call.fence] += 1
        elif call.op == "takeover" and call.fence not in self._taken_over:
            self._taken_over.add(call.fence)
            call.data["older"] = self._written[call.name, None] - self._written[call.name, call.fence]
            self.takeovers.append({"name": call.name, "fence": call.fence, **call.data})
        return "ok"

    def _acquire(self, call: Call, row: int | None) -> Kind:
        if row is not None and (row in self._trusted or self._random.random() < 0.5):
            return "fail"
        self._fence += 1
        self._rows[call.name] = call.fence = self._fence
        self._trusted.add(self._fence)
        return "ok"

    def _answer(self, worker: str, call: Call) -> None:
        assert call.outcome is not None
        if self._random.random() < self._unknown:
            if self._random.random() < 0.5:
                self._record(worker, "unknown", call, {}, answered=False)
            self._stop_believing(worker)
            if call.op == "acquire" and call.fence is not None:
                self._trusted.discard(call.fence)
            self._grants.pop(worker, None)
            return
        self._record(worker, call.outcome, call, call.data)
        if call.op == "acquire" and call.outcome == "ok":
            assert call.fence is not None
            self._grants[worker] = Grant(call.name, call.fence, self._time)
        elif call.op == "release" or call.outcome == "fail":
            self._stop_believing(worker)
            self._grants.pop(worker, None)

    def _stop_believing(self, worker: str) -> None:
        grant = self._grants.get(worker)
        if grant is not None and grant.believed:
            grant.believed = False
            self._trusted.discard(grant.fence)
            data = {"from": grant.since, "until": self._time}
            self.events.append(Event(self._time, worker, "info", "believe", grant.name, "", grant.fence, data))

    def _record(self, worker: str, kind: Kind, call: Call, data: dict[str, Any], answered: bool = True) -> None:
        fence = call.fence if answered or call.op != "acquire" else None
        self.events.append(Event(self._time, worker, kind, call.op, call.name, call.number, fence, data))


def operation(
    op: str, outcome: Any, fence: int | None, start: float, end: float = math.inf, **others: Any
) -> RecordedOperation:
    """A single operation."""
    name, worker = others.pop("name", "job"), others.pop("worker", "w")
    return RecordedOperation(op, name, worker, outcome, fence, start, end, f"{op}-{start}-{worker}", others)


def events(*operations: RecordedOperation) -> list[Event]:
    """The two events of each operation, in time order."""
    result = []
    for each in operations:
        fence = None if each.op == "acquire" else each.fence
        result.append(Event(each.invoked, each.worker, "invoke", each.op, each.name, each.id, fence, each.data))
        if each.completed < math.inf:
            result.append(
                Event(each.completed, each.worker, each.outcome, each.op, each.name, each.id, each.fence, each.data)
            )
    return sorted(result, key=lambda event: event.time)


def info(op: str, name: str = "job", worker: str = "w", fence: int | None = None, **data: Any) -> Event:
    return Event(50.0, worker, "info", op, name, "", fence, data)
