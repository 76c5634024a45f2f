"""Many processes run the same keys, in transactions and outside, while they are killed and stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import holdfast
from holdfast.testing import check
from holdfast.testing.history import Database, operations, read, write_database
from tests.children import eventually, query
from tests.operations.runner import TABLES, TTL

ROOT = Path(__file__).parent.parent.parent
PROCESSES, KEYS, SECONDS = (16, 200, 60.0) if os.environ.get("HOLDFAST_STORM") else (4, 20, 1.0)


class Crew:
    """Whoever is killed has a successor; whoever is done is done."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self._url, self._folder, self._stack = url, folder, stack
        self._started = 0
        self.kills = 0
        self.over = threading.Event()
        self.members = [self._start() for _ in range(PROCESSES)]

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        arguments = [self._url, str(self._folder), f"process-{self._started}", str(KEYS)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.operations.runner", *arguments], cwd=ROOT, stdin=subprocess.PIPE
        )
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return process

    def keep_up(self) -> None:
        while not self.over.wait(0.05):
            self.replace()

    def blow(self, seconds: float) -> None:
        """One after the other is stopped for longer than its lease lives; of the others, now and then one dies."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            stopped, until = random.choice(self.members), time.monotonic() + TTL + 1.0
            stopped.send_signal(signal.SIGSTOP)
            while time.monotonic() < until:
                time.sleep(random.uniform(0.2, 0.6))
                random.choice([each for each in self.members if each is not stopped]).kill()
            stopped.send_signal(signal.SIGCONT)

    def replace(self) -> None:
        for place, each in enumerate(self.members):
            if each.poll() == -9:
                self.kills += 1
                self.members[place] = self._start()


@pytest.mark.timeout(900)
def test_every_key_has_one_effect_and_one_result(either: str, tmp_path: Path) -> None:
    with holdfast.Client(either) as client:
        client.leases.list()
    for table in TABLES:
        query(either, table)
    with ExitStack() as stack:
        crew = Crew(either, tmp_path, stack)
        eventually(lambda: len(list(tmp_path.glob("*.jsonl"))) >= PROCESSES, "they are at work", 120)
        watching = threading.Thread(target=crew.keep_up)
        watching.start()
        try:
            crew.blow(SECONDS)
        finally:
            crew.over.set()
            watching.join()
        for each in crew.members:
            each.communicate(timeout=600)
        crew.replace()  # whoever was killed since the last look
        for each in crew.members:
            each.communicate(timeout=600)
            assert each.returncode == 0
    effects = [{"name": name, "value": value} for name, value in query(either, "select name, value from proof_effect")]
    write_database(tmp_path, Database(effects=effects))
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
