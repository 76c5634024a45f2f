"""One lane: contenders and faults for a while, then peace, a look at what is left, and the verdict."""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import holdfast
from holdfast.testing.checker import Report, check
from holdfast.testing.faults import Nemesis, kill, pause
from holdfast.testing.history import DatabaseRows, Recorder, now, write_database
from holdfast.testing.standstill import Standstill
from proof.chaos.contender import FORCED, SESSION, Errand
from proof.chaos.crew import Crew
from proof.chaos.places import LANES, STEP, Place, force

NAMES = ["a", "b", f"{SESSION}c", f"{FORCED}d"]
POLL = 1.5
"""Seconds between two looks of a waiter, at most."""
PATIENCE = 60.0
"""Seconds after which something that has not happened will not happen: a limit, however busy the machine is."""
_LEFT = {
    "rows": "select 'beat', cast(id as text), label from {0}beat union all select 'lease', name, holder from {0}lease",
    "locks": "select pid, classid, objid, mode from pg_locks where locktype = 'advisory' and pid <> pg_backend_pid()",
    "connections": "select pid, application_name, state, wait_event, backend_start::text, query from pg_stat_activity "
    "where application_name in ('holdfast', 'contender')",
}


class Outcome(NamedTuple):
    lane: str
    folder: Path
    report: Report | None
    """None when it could not be played to its end, for the reason in ``error``."""
    faults: Counter[str]
    failpoints: Counter[str]
    processes: int
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.report is not None and self.report.ok and not self.error


class Lane:
    """``prepare`` is done to the place before anybody comes, e.g. to break it and see that this is noticed."""

    def __init__(
        self,
        name: str,
        folder: Path,
        seed: int,
        *,
        ttl: float = 1.0,
        size: int = 4,
        kinds: Sequence[str] = (),
        prepare: Callable[[Place], object] = lambda place: None,
    ) -> None:
        self.name, self.folder = name, folder
        self._seed, self._ttl, self._size, self._kinds, self._prepare = seed, ttl, size, kinds, prepare
        self._record = Recorder(folder, "nemesis")
        self.faults: Counter[str] = Counter()

    def play(self, over: Callable[[], bool]) -> Outcome:
        """Until it is ``over``. The history stays in the folder. ValueError when the lane has no such faults."""
        error = ""
        crew: Crew | None = None
        try:
            with LANES[self.name]() as place, Standstill() as standstill:
                self._prepare(place)
                nemesis = self._nemesis(place, lambda: [] if crew is None else crew.pids())
                errand = Errand("", str(self.folder), "", NAMES, self._ttl, self._seed, place.sane_clocks)
                with Crew(place.urls, errand, self._size) as crew:
                    nemesis.run(over)
                    self._leave(place, crew, standstill)
        except ValueError:
            raise
        except Exception:
            error = traceback.format_exc()
        finally:
            self._record.close()
        if crew is not None and crew.fell:
            error += f"contenders fell over, see {self.folder / 'contenders.log'}: {'; '.join(crew.fell[:5])}\n"
        report = None if error and not (self.folder / "database.json").exists() else check(self.folder)
        started, failpoints = (crew.started, crew.failpoints) if crew is not None else (0, Counter[str]())
        return Outcome(self.name, self.folder, report, self.faults, failpoints, started, error)

    def _nemesis(self, place: Place, pids: Callable[[], Sequence[int]]) -> Nemesis:
        everywhere = [kill(pids, seed=self._seed), pause(pids, seed=self._seed)] * 3
        faults = [*place.faults, *everywhere, force(place, NAMES[-1])]
        chosen = [fault for fault in faults if not self._kinds or fault.kind in self._kinds]
        if not chosen:
            kinds = ", ".join(sorted({fault.kind for fault in faults}))
            raise ValueError(f"lane {self.name!r} has no fault of these kinds; it has {kinds}")
        ttl = self._ttl
        return Nemesis(chosen, self._seed, record=self._fault, every=(0.3 * ttl, 2 * ttl), lasting=(0.1 * ttl, 2 * ttl))

    def _leave(self, place: Place, crew: Crew, standstill: Standstill) -> None:
        """In peace again: everything can be had, though half of the holders were killed, and then nothing is left."""
        bound = self._ttl + POLL + 1 + (0 if place.sane_clocks else 2 * STEP)
        began = now()
        crew.dismiss()
        with ThreadPoolExecutor(len(NAMES)) as pool:
            for name, after in zip(NAMES, pool.map(lambda name: self._again(place, name, began), NAMES), strict=True):
                lost = standstill.seconds(began, now() if after is None else began + after)
                self._record.info("reacquired", name, after=after, bound=bound, standstill=lost)
        alive = crew.wait(PATIENCE)
        place.retire()
        for what, found in (*self._left_over(place, PATIENCE).items(), ("processes", alive)):
            self._record.info("leftover", what=what, count=len(found), found=[str(each) for each in found[:10]])
        self._record.info("standstill", **standstill.figures())
        write_database(self.folder, _database(place))

    def _again(self, place: Place, name: str, began: float) -> float | None:
        """Seconds from the last fault until it could be had again, and the server answered. Recorded as the others'
        are: one that has just come may be refused because of us before it hears that it is to go."""
        with Recorder(self.folder, f"nemesis-{name}") as record:
            while now() < began + PATIENCE:
                try:
                    with holdfast.Client(place.direct()) as client:
                        with record.invoke("acquire", name) as call:
                            try:
                                grant = client.lease(name, ttl=self._ttl, timeout=PATIENCE).acquire()
                            except holdfast.NotAcquired as refusal:
                                call.fail(holder=refusal.holder)
                                return None
                            call.ok(grant.fence)
                        with record.invoke("release", name, grant.fence) as call:
                            call.ok() if grant.release() else call.fail()
                    return now() - began
                except holdfast.EngineError:
                    time.sleep(0.05)
        return None

    def _left_over(self, place: Place, patience: float) -> dict[str, Sequence[Any]]:
        """What has not gone by itself after a while: rows whose time has come are purged by whoever comes by."""
        deadline = now() + patience
        server = not place.direct().startswith("sqlite:")
        wanted = {
            what: text.format("holdfast." if server else "holdfast_")
            for what, text in _LEFT.items()
            if server or what == "rows"
        }
        while True:
            found: dict[str, Sequence[Any]] = {what: place.query(text) for what, text in wanted.items()}
            if not any(found.values()) or now() > deadline:
                return found
            time.sleep(0.2)
            if found["rows"]:
                with holdfast.Client(place.direct()) as client:
                    client.lease("purge", ttl=self._ttl).acquire().release()

    def _fault(self, kind: str, phase: str) -> None:
        self.faults[kind] += phase == "begin"
        self._record.info("fault", fault=kind, phase=phase)


def _database(place: Place) -> DatabaseRows:
    def rows(table: str, *columns: str) -> list[dict[str, Any]]:
        found = place.query(f"select {', '.join(columns)} from {table}")
        return [dict(zip(columns, row, strict=True)) for row in found]

    takeovers = rows("proof_takeover", "name", "fence", "older", "newest")
    return DatabaseRows(
        rows("proof_write", "name", "fence", "key"),
        takeovers,
        rows("proof_grant", "name", "fence", "outcome"),
        sorted({row["fence"] >> 40 for row in takeovers}),
        all_grants=True,
        sane_clocks=place.sane_clocks,
    )
