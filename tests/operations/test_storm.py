"""Many processes run the same keys, in transactions and outside, while they are killed and stopped."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import holdfast
from holdfast.testing import check
from holdfast.testing.history import DatabaseRows, operations, read, write_database
from proof.storms.operation_runner import TABLES, TTL
from tests.children import Child, eventually, query

PROGRAM = "import runpy; runpy.run_module('proof.storms.operation_runner', run_name='__main__', alter_sys=True)"
PROCESSES, KEYS, SECONDS = (16, 200, 60.0) if os.environ.get("HOLDFAST_STORM") else (4, 20, 1.0)


class Crew:
    """A process that is killed has a successor; one that has done its part ends when its input does."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self._url, self._folder, self._stack = url, folder, stack
        self._started = 0
        self.kills = 0
        self.members = [self._start() for _ in range(PROCESSES)]

    def _start(self) -> Child:
        self._started += 1
        return self._stack.enter_context(Child(PROGRAM, self._url, self._folder, f"process-{self._started}", KEYS))

    def blow(self, seconds: float) -> None:
        """One after the other is stopped for longer than its lease lives; of the others, now and then one dies."""
        ends = time.monotonic() + seconds
        while True:
            stopped, until = random.randrange(PROCESSES), time.monotonic() + TTL + 0.5
            self.members[stopped].signal(signal.SIGSTOP)
            while True:
                time.sleep(random.uniform(0.2, 0.6))
                self._kill(random.choice([place for place in range(PROCESSES) if place != stopped]))
                if time.monotonic() >= until:
                    break
            self.members[stopped].signal(signal.SIGCONT)
            if time.monotonic() >= ends:
                return

    def _kill(self, place: int) -> None:
        self.members[place].kill()
        self.kills += 1
        self.members[place] = self._start()

    def finish(self) -> None:
        for each in self.members:
            each.stdin.close()
        assert [each.process.wait(600) for each in self.members] == [0] * PROCESSES


@pytest.mark.timeout(900)
def test_every_key_has_one_effect_and_one_result(either: str, tmp_path: Path) -> None:
    with holdfast.Client(either) as client:
        client.leases.list()
    for table in TABLES:
        query(either, table)
    with ExitStack() as stack:
        crew = Crew(either, tmp_path, stack)
        eventually(lambda: len(list(tmp_path.glob("*.jsonl"))) >= PROCESSES, "they are at work")
        crew.blow(SECONDS)
        crew.finish()
    effects = [{"name": name, "value": value} for name, value in query(either, "select name, value from proof_effect")]
    write_database(tmp_path, DatabaseRows(effects=effects))
    report = check(tmp_path)
    [verdict] = [each for each in report.verdicts if each.check == "C5"]
    assert verdict.violations == []
    assert len(effects) == 2 * KEYS, "each has one"
    told = [each for each in operations(read(tmp_path)) if each.outcome == "ok"]
    assert len(told) >= 2 * KEYS * PROCESSES
    assert crew.kills > 0
    with holdfast.Client(either) as client:
        found = client.operations.verify()
        assert (found.broken, found.operations) == ((), 2 * KEYS), "the chains are sound as well"
    sys.stdout.write(f"{len(told)} answers of {2 * KEYS} keys, {crew.kills} kills\n")
