"""One scenario: contenders and faults for a while; then, without faults, a search for leftovers, and the check."""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import holdfast
from holdfast.testing.checker import Report, check
from holdfast.testing.faults import Nemesis, fork, kill, pause
from holdfast.testing.history import DatabaseRows, Recorder, now, write_database
from holdfast.testing.standstill import Standstill
from proof.chaos.contender import FORCED, SESSION, Job
from proof.chaos.contenders import Contenders
from proof.chaos.targets import STEP, TARGETS, Target, force

NAMES = ["a", "b", f"{SESSION}c", f"{FORCED}d"]
POLL = 1.5
"""Seconds between two polls of a waiter, at most."""
PATIENCE = 60.0
"""Timeout in seconds for events that must happen, long enough for a busy machine."""
_LEFT = {
    "rows": "select 'beat', cast(id as text), label from {0}beat union all select 'lease', name, holder from {0}lease",
    "locks": "select pid, classid, objid, mode from pg_locks where locktype = 'advisory' and pid <> pg_backend_pid()",
    "connections": "select pid, application_name, state, wait_event, backend_start::text, query from pg_stat_activity "
    "where application_name = 'contender' or application_name like 'holdfast:%'",
}


class Outcome(NamedTuple):
    lane: str
    """The name of the scenario."""
    folder: Path
    report: Report | None
    """None if it could not run to its end; ``error`` says why."""
    faults: Counter[str]
    failpoints: Counter[str]
    processes: int
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.report is not None and self.report.ok and not self.error


class Scenario:
    """``prepare`` is called with the target before contenders start, e.g. to seed a bug."""

    def __init__(
        self,
        name: str,
        folder: Path,
        seed: int,
        *,
        ttl: float = 1.0,
        size: int = 4,
        kinds: Sequence[str] = (),
        prepare: Callable[[Target], object] = lambda target: None,
    ) -> None:
        self.name, self.folder = name, folder
        self._seed, self._ttl, self._size, self._kinds, self._prepare = seed, ttl, size, kinds, prepare
        self._record = Recorder(folder, "nemesis")
        self.faults: Counter[str] = Counter()

    def run(self, over: Callable[[], bool]) -> Outcome:
        """Run until ``over()``, and check the history, which stays in the folder.

        Raises ValueError if the target has no faults of these kinds.
        """
        error = ""
        contenders: Contenders | None = None
        try:
            with TARGETS[self.name]() as target, Standstill() as standstill:
                self._prepare(target)
                nemesis = self._nemesis(target, lambda: [] if contenders is None else contenders.pids())
                job = Job("", str(self.folder), "", NAMES, self._ttl, self._seed, target.sane_clocks)
                with Contenders(target.urls, job, self._size) as contenders:
                    nemesis.run(over)
                    self._finish(target, contenders, standstill)
        except ValueError:
            raise
        except Exception:
            error = traceback.format_exc()
        finally:
            self._record.close()
        if contenders is not None and contenders.crashed:
            error += f"contenders crashed, see {self.folder / 'contenders.log'}: {'; '.join(contenders.crashed[:5])}\n"
        report = None if error and not (self.folder / "database.json").exists() else check(self.folder)
        started, failpoints = (
            (contenders.started, contenders.failpoints) if contenders is not None else (0, Counter[str]())
        )
        return Outcome(self.name, self.folder, report, self.faults, failpoints, started, error)

    def _nemesis(self, target: Target, pids: Callable[[], Sequence[int]]) -> Nemesis:
        everywhere = [kill(pids, seed=self._seed), pause(pids, seed=self._seed), fork(pids, seed=self._seed)] * 3
        faults = [*target.faults, *everywhere, force(target, NAMES[-1])]
        chosen = [fault for fault in faults if not self._kinds or fault.kind in self._kinds]
        if not chosen:
            kinds = ", ".join(sorted({fault.kind for fault in faults}))
            raise ValueError(f"lane {self.name!r} has no fault of these kinds; it has {kinds}")
        ttl = self._ttl
        return Nemesis(
            chosen, self._seed, record=self._record_fault, every=(0.3 * ttl, 2 * ttl), lasting=(0.1 * ttl, 2 * ttl)
        )

    def _finish(self, target: Target, contenders: Contenders, standstill: Standstill) -> None:
        """After the last fault: kill half of the contenders, acquire every lease, and record what is left over."""
        bound = self._ttl + POLL + 1 + (0 if target.sane_clocks else 2 * STEP)
        started = now()
        contenders.dismiss()
        with ThreadPoolExecutor(len(NAMES)) as pool:
            for name, after in zip(
                NAMES, pool.map(lambda name: self._reacquire(target, name, started), NAMES), strict=True
            ):
                paused = standstill.seconds(started, now() if after is None else started + after)
                self._record.info("reacquired", name, after=after, bound=bound, standstill=paused)
        alive = contenders.wait(PATIENCE)
        target.retire()
        for what, rows in (*self._left_over(target, PATIENCE).items(), ("processes", alive)):
            self._record.info("leftover", what=what, count=len(rows), found=[str(row) for row in rows[:10]])
        self._record.info("standstill", **standstill.figures())
        write_database(self.folder, _read_rows(target))

    def _reacquire(self, target: Target, name: str, started: float) -> float | None:
        """Seconds from the last fault until it could be acquired; None if it could not.

        Recorded like the operations of contenders: one that has just started may be refused because of this one.
        """
        with Recorder(self.folder, f"nemesis-{name}") as record:
            while now() < started + PATIENCE:
                try:
                    with holdfast.Client(target.direct()) as client:
                        with record.invoke("acquire", name) as call:
                            try:
                                grant = client.lease(name, ttl=self._ttl, timeout=PATIENCE).acquire()
                            except holdfast.NotAcquired as refusal:
                                call.fail(holder=refusal.holder)
                                return None
                            call.ok(grant.fence)
                        with record.invoke("release", name, grant.fence) as call:
                            call.ok() if grant.release() else call.fail()
                    return now() - started
                except holdfast.EngineError:
                    time.sleep(0.05)
        return None

    def _left_over(self, target: Target, patience: float) -> dict[str, Sequence[Any]]:
        """The rows, locks and connections that are left after a while. An acquire purges expired rows."""
        deadline = now() + patience
        is_server = not target.direct().startswith("sqlite:")
        wanted = {
            what: text.format("holdfast." if is_server else "holdfast_")
            for what, text in _LEFT.items()
            if is_server or what == "rows"
        }
        while True:
            leftovers: dict[str, Sequence[Any]] = {what: target.query(text) for what, text in wanted.items()}
            if not any(leftovers.values()) or now() > deadline:
                return leftovers
            time.sleep(0.2)
            if leftovers["rows"]:
                with holdfast.Client(target.direct()) as client:
                    client.lease("purge", ttl=self._ttl).acquire().release()

    def _record_fault(self, kind: str, phase: str) -> None:
        self.faults[kind] += phase == "begin"
        self._record.info("fault", fault=kind, phase=phase)


def _read_rows(target: Target) -> DatabaseRows:
    def rows(table: str, *columns: str) -> list[dict[str, Any]]:
        values = target.query(f"select {', '.join(columns)} from {table}")
        return [dict(zip(columns, row, strict=True)) for row in values]

    takeovers = rows("proof_takeover", "name", "fence", "older", "newest")
    return DatabaseRows(
        rows("proof_write", "name", "fence", "key"),
        takeovers,
        rows("proof_grant", "name", "fence", "outcome"),
        all_grants=True,
        sane_clocks=target.sane_clocks,
        set_back=target.set_back,
    )
