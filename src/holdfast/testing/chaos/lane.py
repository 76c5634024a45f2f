"""One lane: contenders and faults for a while, then peace, a look at what is left, and the verdict."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import holdfast
from holdfast.testing.chaos.contender import SESSION, Errand
from holdfast.testing.chaos.crew import Crew
from holdfast.testing.chaos.places import LANES, STEP, Place
from holdfast.testing.checker import Report, check
from holdfast.testing.faults import Nemesis, kill, pause
from holdfast.testing.history import Database, Recorder, now, write_database

NAMES = ["a", "b", "c", f"{SESSION}d"]
POLL = 1.5
"""Seconds between two looks of a waiter, at most."""
_LEFT = {
    "rows": "select 'beat', cast(id as text), label from {0}beat union all select 'lease', name, holder from {0}lease",
    "locks": "select pid, classid, objid, mode from pg_locks where locktype = 'advisory' and pid <> pg_backend_pid()",
    "connections": "select pid, application_name, state, wait_event, backend_start::text, query from pg_stat_activity "
    "where application_name in ('holdfast', 'contender')",
}


class Outcome(NamedTuple):
    lane: str
    folder: Path
    report: Report
    faults: Counter[str]
    processes: int


class Lane:
    def __init__(
        self, name: str, folder: Path, seed: int, *, ttl: float = 1.0, size: int = 4, kinds: Sequence[str] = ()
    ) -> None:
        self.name, self.folder = name, folder
        self._seed, self._ttl, self._size, self._kinds = seed, ttl, size, kinds
        self._record = Recorder(folder, "nemesis")
        self.faults: Counter[str] = Counter()

    def play(self, over: Callable[[], bool]) -> Outcome:
        """Until it is ``over``. The history stays in the folder."""
        with LANES[self.name]() as place:
            errand = Errand("", str(self.folder), "", NAMES, self._ttl, self._seed)
            with Crew(place.urls, errand, self._size, born=self._failpoint) as crew:
                self._disturb(place, crew, over)
                count = crew.count
            self._leave(place, crew)
        return Outcome(self.name, self.folder, check(self.folder), self.faults, count)

    def _disturb(self, place: Place, crew: Crew, over: Callable[[], bool]) -> None:
        faults = [*place.faults, *([kill(crew.pids, seed=self._seed), pause(crew.pids, seed=self._seed)] * 3)]
        chosen = [fault for fault in faults if not self._kinds or fault.kind in self._kinds]
        if not chosen:
            kinds = ", ".join(sorted({fault.kind for fault in faults}))
            raise ValueError(f"lane {self.name!r} has no fault of these kinds; it has {kinds}")
        ttl = self._ttl
        nemesis = Nemesis(
            chosen, self._seed, record=self._fault, every=(0.3 * ttl, 2 * ttl), lasting=(0.1 * ttl, 2 * ttl)
        )
        nemesis.run(over)
        self._quiet(place)
        crew.dismiss()
        if crew.fell_over:
            raise RuntimeError(f"{crew.fell_over} contenders fell over, see {self.folder / 'contenders.log'}")

    def _quiet(self, place: Place) -> None:
        """The faults are over when the database answers."""
        deadline = time.monotonic() + 60
        while True:
            try:
                place.query("select 1")
                return
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _leave(self, place: Place, crew: Crew) -> None:
        """In peace again: everything can be had, and then nothing is left over."""
        bound = self._ttl + POLL + 1 + (0 if place.sane_clocks else 2 * STEP)
        began = now()
        with holdfast.Client(place.direct()) as client:
            for name in NAMES:
                after: float | None = None
                try:
                    client.lease(name, ttl=self._ttl, timeout=bound * 3).acquire().release()
                    after = now() - began
                except holdfast.HoldfastError as error:
                    self._record.info("problem", name, error=str(error))
                self._record.info("reacquired", name, after=after, bound=bound)
        place.retire()
        for what, found in self._left_over(place, crew, patience=bound * 2).items():
            self._record.info("leftover", what=what, count=len(found), found=[str(each) for each in found[:10]])
        self._record.close()
        write_database(self.folder, _database(place))

    def _left_over(self, place: Place, crew: Crew, patience: float) -> dict[str, Sequence[Any]]:
        """What has not gone by itself after a while: rows whose time has come are purged by whoever comes by."""
        deadline = now() + patience
        server = not place.direct().startswith("sqlite:")
        wanted = {
            what: _LEFT[what].format("holdfast." if server else "holdfast_") for what in (_LEFT if server else ["rows"])
        }
        while True:
            found: dict[str, Sequence[Any]] = {what: place.query(text) for what, text in wanted.items()}
            found["processes"] = crew.pids()
            if not any(found.values()) or now() > deadline:
                return found
            time.sleep(0.2)
            if found["rows"]:
                with holdfast.Client(place.direct()) as client:
                    client.lease("purge", ttl=self._ttl).acquire().release()

    def _fault(self, kind: str, phase: str) -> None:
        self.faults[kind] += phase == "begin"
        self._record.info("fault", fault=kind, phase=phase)

    def _failpoint(self, failpoint: str) -> None:
        kind = f"failpoint {failpoint.partition('=')[0]}"
        self._fault(kind, "begin")
        self._record.info("fault", fault=kind, phase="heal")


def _database(place: Place) -> Database:
    schema = "holdfast_" if place.direct().startswith("sqlite:") else "holdfast."

    def rows(table: str, *columns: str) -> list[dict[str, Any]]:
        return [
            dict(zip(columns, row, strict=True)) for row in place.query(f"select {', '.join(columns)} from {table}")
        ]

    grants = rows(f"{schema}history", "name", "fence", "outcome")
    takeovers = rows("proof_takeover", "name", "fence", "older")
    timelines = sorted({row["fence"] >> 40 for row in takeovers})
    return Database(rows("proof_write", "name", "fence", "key"), takeovers, grants, timelines, place.sane_clocks)
