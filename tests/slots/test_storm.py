"""Many threads of many processes claim few slots while processes are killed and sessions ended."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

import holdfast
from holdfast.testing import Proxy, check
from holdfast.testing.faults import Fault, Nemesis, network, terminate
from tests.children import NONE, eventually, rows
from tests.guard.instances import stand_still
from tests.raw import trials
from tests.slots.claimer import CAPACITY

ROOT = Path(__file__).parent.parent.parent
LONG = trials(1) > 1
PROCESSES, THREADS, SECONDS = (8, 125, 10.0) if LONG else (3, 20, 1.5)


class Storm:
    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.url, self.folder, self._stack, self._number = url, folder, stack, 0
        self.processes: list[subprocess.Popen[str]] = []
        for _ in range(PROCESSES):
            self.begin()

    def begin(self) -> None:
        self._number += 1
        command = [sys.executable, "-m", "tests.slots.claimer", self.url, str(self.folder), f"p{self._number}"]
        process = subprocess.Popen(
            [*command, str(THREADS)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._stack.callback(self._end, process)
        assert process.stdout is not None
        assert process.stdout.readline() == "works\n"
        self.processes.append(process)

    def kill_one(self) -> int:
        victim = self.processes.pop(random.randrange(len(self.processes)))
        victim.kill()
        victim.wait()
        return victim.pid

    def stand_still(self) -> None:
        for process in self.processes:
            stand_still(process.pid)

    def go_on(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)

    def finish(self) -> None:
        for process in self.processes:
            process.communicate("over\n", timeout=60)
            assert process.returncode == 0

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class Faults:
    """What else befalls those who claim, until it is healed: on the way to the database, and in it."""

    def __init__(self, faults: list[Fault]) -> None:
        self._over = threading.Event()
        self._nemesis = Nemesis(faults, 7, every=(0.1, 0.5), lasting=(0.1, 0.6)) if faults else None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        if self._nemesis is not None:
            self._nemesis.run(self._over.is_set)

    def heal(self) -> None:
        self._over.set()
        self._thread.join()

    @property
    def counts(self) -> Counter[str]:
        return Counter() if self._nemesis is None else self._nemesis.counts


@contextmanager
def nemesis(url: str) -> Iterator[tuple[str, Faults]]:
    """The way to the database, and what lies in wait on it."""
    with ExitStack() as stack:
        faults: list[Fault] = []
        if not url.startswith("sqlite"):
            way = stack.enter_context(Proxy(url))
            faults, url = [*network(way), terminate(url)], way.url
        found = Faults(faults)
        stack.callback(found.heal)
        yield url, found


@pytest.mark.timeout(300)
def test_never_more_than_there_are_none_lost_no_slot_twice_and_the_gauge_is_true_after_every_kill(
    either: str, tmp_path: Path
) -> None:
    with ExitStack() as stack, holdfast.Client(either) as client:
        slots = client.slots("storm", CAPACITY)
        slots.in_use()
        way, faults = stack.enter_context(nemesis(either))
        storm = Storm(way, tmp_path, stack)
        ends, kills, most = time.monotonic() + SECONDS, 0, 0
        while time.monotonic() < ends:
            dead = storm.kill_one()
            kills += 1
            storm.stand_still()  # the truth holds still to be looked at
            owners = slots.owners()
            most = max(most, len(owners))
            sessions = [
                {"id": owner, "slot": slot, "terminal": owner.startswith(f"{dead}-")} for slot, owner in owners.items()
            ]
            before = dict(slots.invariant_violation_total)
            living = sum(not each["terminal"] for each in sessions)
            counted, still = slots.reconcile(sessions), slots.owners()
            if still == owners:  # nothing expired meanwhile: a process may have been stopped for long
                assert counted == living
                found = slots.invariant_violation_total["terminal_owner"] - before["terminal_owner"]
                assert found == len(owners) - living
            storm.go_on()
            storm.begin()
            for _ in range(20):
                most = max(most, slots.in_use())
        faults.heal()
        storm.finish()
        assert most <= CAPACITY
        eventually(lambda: slots.in_use() == 0, "what killed processes held expires")
        assert sorted(slots.claim().slot for _ in range(CAPACITY)) == [1, 2, 3, 4], "none is lost"
    report = check(tmp_path, sane_clocks=True)
    assert "C7" not in report.violated, report
    claims = sum(file.read_text().count('"believe"') for file in tmp_path.glob("p*.jsonl"))
    assert claims > 4 * PROCESSES
    others = f", {faults.counts.total()} faults {dict(faults.counts)}" if faults.counts else ""
    sys.stdout.write(f"{claims} claims, {kills} kills{others}, at most {most} in use\n")
    eventually(lambda: purged(either) == NONE, "nothing is left")


def purged(url: str) -> dict[str, int]:
    with holdfast.Client(url) as client, client.lease("broom"):
        pass
    return rows(url)
