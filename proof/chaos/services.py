"""The lane ``services``: relays, shards, a reconciler, watches, objects and operations on a pair of servers."""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.testing.checker import Report, check
from holdfast.testing.faults import Fault, Nemesis, pause
from holdfast.testing.history import Recorder, now
from holdfast.testing.standstill import Standstill
from proof.chaos.scenario import Outcome
from proof.chaos.targets import postgres
from proof.workload.verdicts import judge
from proof.workload.workload import Workload

TTL = 3.0
"""Of the leases. Each worker has many threads: with the TTL of a contender, a busy machine would be the fault."""
PATIENCE = 600.0
"""Seconds for what must happen when all faults are healed, without the time in which the machine stood still."""


class Services:
    """Like ``Scenario``, with the workers of ``proof.workload`` in the place of contenders."""

    def __init__(self, folder: Path, seed: int, *, kinds: Sequence[str] = ()) -> None:
        self.name, self._folder, self._history = "services", folder, folder / "history"
        self._seed, self._kinds = seed, kinds
        self._record = Recorder(self._history, "nemesis")
        self.faults: Counter[str] = Counter()

    def run(self, over: Callable[[], bool]) -> Outcome:
        """Run until ``over()``, and check the history, which stays in the folder.

        Raises ValueError if there are no faults of these kinds.
        """
        error, report, started = "", None, 0
        try:
            with postgres(prepare=lambda url: url) as target, Standstill() as standstill:
                [url] = target.urls

                def wait_for(condition: Callable[[], bool], *, what: str) -> None:
                    began = now()
                    while not condition():
                        if now() - began - standstill.seconds(began) > PATIENCE:
                            raise TimeoutError(f"{what}: not within {PATIENCE:g} s")
                        time.sleep(0.1)

                with Workload(
                    f"{url}?target_session_attrs=read-write&connect_timeout=3", self._folder, self._record, standstill,
                    wait_for, seed=self._seed, ttl=TTL, sane_clocks=True, patience=PATIENCE,
                ) as workload:  # fmt: skip
                    workload.wait_settled("at the start")
                    self._nemesis([*target.faults, *self._process_faults(workload)]).run(over)
                    workload.wait_settled("at the end")
                    state, started = workload.finish(), workload.started
            report = Report(judge(self._history, state, TTL), check(self._history).figures)
        except ValueError:
            raise
        except Exception:
            error = traceback.format_exc()
        finally:
            self._record.close()
        return Outcome(self.name, self._history, report, self.faults, Counter(), started, error)

    def _process_faults(self, workload: Workload) -> list[Fault]:
        return [
            Fault("kill", workload, workload.kill_worker),
            pause(workload.pids, seed=self._seed),
            Fault("driver", "driver", workload.change_states),
        ] * 2

    def _nemesis(self, faults: Sequence[Fault]) -> Nemesis:
        chosen = [fault for fault in faults if not self._kinds or fault.kind in self._kinds]
        if not chosen:
            kinds = ", ".join(sorted({fault.kind for fault in faults}))
            raise ValueError(f"lane {self.name!r} has no fault of these kinds; it has {kinds}")
        return Nemesis(chosen, self._seed, record=self._record_fault, every=(0.3, 2 * TTL), lasting=(0.1, 2 * TTL))

    def _record_fault(self, kind: str, phase: str) -> None:
        self.faults[kind] += phase == "begin"
        self._record.info("fault", fault=kind, phase=phase)
