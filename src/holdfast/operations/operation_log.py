# Generated from operation_log_async.py by scripts/unasync.py. Do not edit.
"""The log of operations as people read and keep it: replayed, proven, put away, looked over. Never executes anything of
the user's, and never changes what an operation has come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from holdfast.database.engine import Engine
from holdfast.doctor import operations
from holdfast.doctor.findings import Examination
from holdfast.keys import OperationKey, as_key
from holdfast.names import check_limit, check_seconds
from holdfast.operations import archive, wal
from holdfast.operations.logged import Logged, LogPage, Place, Tally, Verification, examine, logged, page_of
from holdfast.operations.replay import State
from holdfast.operations.wal import Entry, Problem
from holdfast.runtime.concurrency import check_callable, maybe_await

if TYPE_CHECKING:
    from holdfast.governance.policy import Moment, Policy

PAGE = 200
"""Operations that are read at a time."""
LATEST = 1000
"""Operations: whose chains a look at the log's health proves. All of them is what ``verify`` is for."""
ENOUGH = 100_000
"""Rows that such a look counts one by one."""

States = list[State]
Entries = list[Entry]


@dataclass(frozen=True, slots=True)
class Archived:
    """What ``archive`` did: how many operations were put away, and why others were not, by key."""

    operations: int
    left: Mapping[str, str]


class OperationLog:
    """What can be asked of the log, and what keeps it within bounds."""

    def __init__(self, engine: Engine, rules: Policy | None = None) -> None:
        self._engine, self._rules = engine, rules

    def history(self, key: OperationKey | str) -> Entries:
        """Every entry that the log has of an operation, in order."""
        return [entry for chain in self._chains(_digest(key), None) for entry in chain.entries]

    def replay(self, key: OperationKey | str | None = None, *, since: datetime | None = None) -> States:
        """What the entries say of an operation, or of all that were touched ``since``: state and results, folded from
        the log, in the order of their keys. Nothing is executed."""
        found = []
        for chain in self._chains(_digest(key), _since(since)):
            state = chain.state()
            self._permit("replay", key=chain.operation, label=chain.label, attempt=state.attempt, **chain.about)
            found.append(state)
        return found

    def verify(
        self, key: OperationKey | str | None = None, *, since: datetime | None = None, archives: Iterable[str] = ()
    ) -> Verification:
        """Prove the chain of an operation, or of all that were touched ``since``: whatever was changed, taken out, put
        in or moved is found, and locks that were never released are told. One of which nothing is left cannot be.
        ``archives``: the lines that ``archive`` wrote, to prove what was put away with what is still there."""
        away, tally, only = archive.read(archives), Tally(), _digest(key)
        lost = {each: entries[-1].number for each, entries in away.items() if since is None and only in (None, each)}
        for chain in self._chains(only, _since(since), away):
            tally.add(chain)
            lost.pop(chain.operation, None)
        told = "it is in the archive, and the log does not know it"
        return tally.verification(Problem("missing", each, number, told) for each, number in lost.items())

    def read(self, after: str | None = None, *, most: int = 500) -> LogPage:
        """Entries of all operations, in an order that stays although transactions commit out of theirs; ``after`` the
        cursor of the page before, else from the beginning. What a transaction that is still under way may come before
        is not told yet. CursorExpired after a failover or a restore: read from the beginning."""
        place = Place.parse(after)
        rows = self._engine.call("wal_read", {**place._asdict(), "most": check_limit(most)})
        return page_of(place, rows)

    def archive(self, before: datetime, write: Callable[[Sequence[str]], object]) -> Archived:
        """Put away the chains of operations that ended before then, but for one entry each that says so and proves the
        others. ``write(lines)`` has them in safety when it returns; it is called before anything is taken out.

        What is not finished stays, and so does what has lineage that is not published yet or a chain that is broken.
        """
        check_callable(write, "write")
        limit, done = int(_moment(before, "before") * 1_000_000), 0
        left: dict[str, str] = {}
        for page in self._pages(None, None):
            ready = []
            for chain in logged(page):
                why = _not_yet(chain, limit)
                if why is None:
                    ready.append(chain)
                elif why:
                    left[chain.operation] = why
            if ready:
                maybe_await(write([archive.line(chain.label, chain.entries) for chain in ready]))
            for chain in ready:
                state = self._put_away(chain)
                if state == "archived":
                    done += 1
                else:
                    left[chain.operation] = (
                        "its lineage is not published" if state == "unpublished" else "it has gone on"
                    )
        return Archived(done, left)

    def expire(self) -> int:
        """Let go of the results whose time is over; how many. That they were, and their hashes, stays."""
        gone, last = 0, PAGE
        while last == PAGE:
            [row] = self._engine.call("operation_expire", {"most": PAGE})
            last = row["gone"]
            gone += last
        return gone

    def health(self, *, stale: float = 3600.0) -> Examination:
        """Look the log over: indexes, what was left behind for longer than ``stale`` seconds, growth, lineage that
        waits, and the chains of the thousand operations that were touched last. However long the log is, that takes no
        longer."""
        limit = check_seconds(stale, "stale", 0, 10 * 365 * 86400.0)
        [about] = self._engine.call("operation_health", {"stale": limit, "enough": ENOUGH})
        indexes = self._engine.call("operation_indexes", {})
        tally = Tally()
        for chain in logged(self._engine.call("wal_latest", {"most": LATEST})):
            tally.add(chain)
        judged = tally.verification()
        told = {
            "operations": judged.operations,
            "entries": judged.entries,
            "broken": [f"{each.operation[:12]}… entry {each.number}: {each.told}" for each in judged.broken],
            "unpaired": len(judged.problems) - len(judged.broken),
        }
        relays = self._engine.call("relay_list", {})
        health = [{**about, "stale": limit}]
        facts = {"operation_health": health, "operation_indexes": indexes, "relays": relays, "chains": [told]}
        database = self._engine.database
        engine = "postgresql" if database.dialect == "postgres" else "sqlite"
        return Examination(str(database), database.schema, engine, operations.examine(facts))

    def _permit(self, moment: Moment, **about: Any) -> None:
        """PolicyDenied unless the policy lets it be done to what is in the log."""
        if self._rules is not None:
            self._rules.permit(moment, **about)

    def _put_away(self, chain: Logged) -> str:
        last = chain.entries[-1]
        note = archive.note(chain.entries, last.at)
        parameters = {
            "key": chain.operation,
            "expected": last.pointer,
            "pointer": note.pointer,
            "number": note.number,
            "entries": wal.dump([note]),
        }
        [row] = self._engine.call("wal_archive", parameters)
        state: str = row["state"]
        return state

    def _chains(
        self, key: str | None, begun: float | None, away: Mapping[str, Sequence[Entry]] | None = None
    ) -> Iterator[Logged]:
        for page in self._pages(key, begun):
            for chain in logged(page, away):
                yield chain

    def _pages(self, key: str | None, begun: float | None) -> Iterator[list[dict[str, Any]]]:
        after = None
        while True:
            rows = self._engine.call("wal_chains", {"key": key, "since": begun, "after": after, "most": PAGE})
            if rows:
                yield rows
            if key is not None or len({row["key"] for row in rows}) < PAGE:
                return
            after = rows[-1]["key"]


def _not_yet(chain: Logged, limit: int) -> str | None:
    """Why a chain stays, empty when it needs no words; None when it may go."""
    problems = [each.told for each in examine(chain) if each.broken]
    if problems:
        return f"its chain is broken: {problems[0]}"
    away = len(chain.entries) == 1 and chain.entries[0].kind == "archived"
    return None if chain.status != "partial" and not away and chain.entries[-1].at < limit else ""


def _digest(key: OperationKey | str | None) -> str | None:
    return None if key is None else as_key(key).digest


def _since(value: object) -> float | None:
    return None if value is None else _moment(value, "since")


def _moment(value: object, what: str) -> float:
    """Seconds since 1970."""
    if not isinstance(value, datetime):
        raise TypeError(f"{what} must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise ValueError(f"{what} must have a time zone, such as datetime.now(UTC), not {value!r}")
    return value.timestamp()
