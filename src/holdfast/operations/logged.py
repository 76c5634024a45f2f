"""The log of operations as it was read: chains beside what the log says came of them, and whether the two agree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import groupby
from typing import Any, NamedTuple

from holdfast.errors import CursorExpired
from holdfast.keys import digest_of, digest_of_text, label_of
from holdfast.operations import wal
from holdfast.operations.archive import joined
from holdfast.operations.decide import describe
from holdfast.operations.replay import State, fold
from holdfast.operations.wal import Entry, Problem

Row = Mapping[str, Any]
_COMPARED = ("status", "attempt", "result_hash", "fingerprint", "effect_started")
_BESIDE = ("failures", "fence", "owner", "rollback", "keep")
_KEYED = ("pipeline", "task", "dataset", "operation", "checksum", "params_hash")
_SHOWN_AS = {"reset": "failure"}
"""What the log calls a state that only the entries tell apart."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One operation: its entries, and what the log says; ``status`` is None when the log does not know it."""

    operation: str
    label: str
    status: str | None
    attempt: int | None
    pointer: str | None
    alive: bool
    result: bytes | None
    result_hash: str | None
    fingerprint: str | None
    effect_started: bool
    error: str | None
    entries: Sequence[Entry]
    damage: str | None = None
    """Why its entries could not be read."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Pipeline, task, dataset and operation, as the log says."""
    row: Row = field(default_factory=dict)
    """All that the log says."""

    def state(self) -> State:
        """What its entries come to, with the result as far as it is kept."""
        state = fold(self.entries).get(self.operation) or State(self.operation)
        kept = self.result if state.status == "success" and state.result_hash == self.result_hash else None
        return replace(state, result=kept)


@dataclass(frozen=True, slots=True)
class Verification:
    """What ``client.operations.verify()`` found."""

    operations: int
    entries: int
    problems: tuple[Problem, ...] = field(default=())

    @property
    def broken(self) -> tuple[Problem, ...]:
        """Problems that no crash explains."""
        return tuple(each for each in self.problems if each.broken)

    @property
    def passed(self) -> bool:
        return not self.broken


class LogPage(NamedTuple):
    """Entries in the order of the log, and where the next page begins."""

    entries: list[Entry]
    cursor: str


class Place(NamedTuple):
    """A cursor, taken apart: of the last row that was read."""

    epoch: int | None = None
    after_horizon: str | None = None
    after_place: int | None = None

    @classmethod
    def parse(cls, cursor: object) -> Place:
        if cursor is None:
            return cls()
        found = re.fullmatch(r"(\d+)(?:/(\d+)/(\d+))?", cursor) if isinstance(cursor, str) else None
        if found is None:
            raise ValueError(f"after must be the cursor of a page that was read, not {cursor!r:.80}")
        epoch, horizon, place = found.groups()
        return cls(int(epoch), horizon, None if place is None else int(place))

    def __str__(self) -> str:
        rest = "" if self.after_place is None else f"/{self.after_horizon}/{self.after_place}"
        return f"{self.epoch}{rest}"


def page_of(place: Place, rows: Sequence[Row]) -> LogPage:
    """What was read after ``place``; a last row without a key says that there is no more, or that there is no such
    place."""
    epoch = rows[-1]["epoch"]
    if place.epoch not in (None, epoch):
        raise CursorExpired(f"{place} is from before a failover or a restore: read the log from the beginning")
    told = [row for row in rows if row["key"] is not None]
    entries = [entry for row in told for entry in wal.load(row["key"], row["entries"])]
    if not told:
        return LogPage(entries, str(place._replace(epoch=epoch)))
    last = told[-1]
    return LogPage(entries, str(Place(epoch, str(last["horizon"]), last["place"])))


def logged(rows: Iterable[Row], archived: Mapping[str, Sequence[Entry]] | None = None) -> Iterator[Logged]:
    """From rows in the order of their keys; ``archived``: entries that come before those that are still there."""
    for operation, group in groupby(rows, key=lambda row: str(row["key"])):
        found = list(group)
        here: list[Entry] = []
        damage = None
        try:
            for row in found:
                if row["entries"] is not None:
                    here += wal.load(operation, row["entries"])
        except ValueError as error:
            damage = str(error)
        entries = joined((archived or {}).get(operation, ()), here) if archived else here
        first = found[0]
        result = None if first["result"] is None else bytes.fromhex(first["result"])
        yield Logged(
            operation, first["label"] or operation, first["status"], first["attempt"], first["pointer"],
            bool(first["alive"]), result, first["result_hash"], first["fingerprint"], bool(first["effect_started"]),
            first["error"], entries, damage,
            {name: first[name] for name in _KEYED[:4]}, first,
        )  # fmt: skip


def examine(chain: Logged) -> list[Problem]:
    """Whatever is wrong with a chain, by itself and beside what the log says."""
    last = chain.entries[-1].number if chain.entries else 0
    if chain.damage is not None:
        return [Problem("tampered", chain.operation, last, chain.damage)]
    if chain.status is None:
        return [
            Problem("missing", chain.operation, last, "there are entries of an operation that the log does not know")
        ]
    found = wal.verify(chain.entries, pointer=chain.pointer, running=chain.alive)
    if any(each.broken for each in found):
        return found
    state = chain.state()
    said, told = _said(chain), _told(chain, state)
    wrong = [name for name in told if not _same(said[name], told[name])]
    if wrong:
        here, there = (", ".join(f"{name} {each[name]!r:.80}" for name in wrong) for each in (said, told))
        found.append(Problem("log", chain.operation, last, f"the log says {here}; its entries {there}"))
    elif not _is_of(chain, state):
        told_so = "the log says what it is called, or the parts of its key, otherwise than its key was made of"
        found.append(Problem("log", chain.operation, last, told_so))
    elif not _kept(chain, state):
        found.append(
            Problem("payload", chain.operation, last, "the result that is kept is not the one that was hashed")
        )
    return found


class Tally:
    """What was found so far, chain by chain: there may be more of them than fit into memory."""

    def __init__(self) -> None:
        self._operations = self._entries = 0
        self._problems: list[Problem] = []

    def add(self, chain: Logged) -> None:
        self._operations += 1
        self._entries += len(chain.entries)
        self._problems += examine(chain)

    def verification(self, more: Iterable[Problem] = ()) -> Verification:
        return Verification(self._operations, self._entries, (*self._problems, *more))


def _said(chain: Logged) -> dict[str, Any]:
    """What the log says of all that ``_told`` knows."""
    try:
        error = json.loads(chain.error) if chain.error else {}
        text = describe(error) if error else None
    except (ValueError, AttributeError):
        error, text = {}, chain.error
    shown = {"error": text, "remembered": bool(error.get("remembered")), "reset": bool(error.get("reset"))}
    beside = {name: chain.row[name] for name in _BESIDE}
    return {name: getattr(chain, name) for name in _COMPARED} | beside | shown


def _told(chain: Logged, state: State) -> dict[str, Any]:
    """What its entries say of it."""
    known = {name: getattr(state, name) for name in (*_COMPARED, *_BESIDE, "error", "remembered")}
    known |= {"status": _SHOWN_AS.get(state.status, state.status), "reset": state.status == "reset"}
    known["fence"] = chain.entries[-1].fence if chain.entries else 0
    if state.status == "success":
        del known["effect_started"]  # there is no doubt about it, however it was found out
    if state.status == "partial":
        del known["error"]  # why it could not be ended, or undone, is in the log alone
    return known


def _same(said: object, told: object) -> bool:
    """Times are kept as exactly as each database does."""
    return said == told or (isinstance(said, float) and isinstance(told, int | float) and abs(said - told) < 0.001)


def _is_of(chain: Logged, state: State) -> bool:
    """Whether the row is that of its key, which is a hash of what the row says."""
    label = chain.row["label"]
    pipeline, task, dataset, operation, checksum, params_hash = parts = [chain.row[name] for name in _KEYED]
    if not any(parts):
        return digest_of_text(label) == chain.operation
    made = digest_of(pipeline, task, dataset, operation, state.version, checksum, state.bucket, params_hash)
    return made == chain.operation and label == label_of(pipeline, task, dataset, operation)


def _kept(chain: Logged, state: State) -> bool:
    """Whether the result is there as it was hashed, if there is one; one that is not kept for good may be gone."""
    if chain.result is None:
        return state.status != "success" or state.keep is not None
    return sha256(chain.result).hexdigest() == chain.result_hash
