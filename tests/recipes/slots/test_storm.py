"""Many threads of many processes claim few slots while processes are killed and sessions ended."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.testing import Proxy, check
from holdfast.testing.faults import Fault, Nemesis, network, terminate
from holdfast.testing.history import read
from proof.storms.slot_claimer import CAPACITY
from tests.children import NONE, Child, eventually, rows
from tests.raw_session import trials
from tests.recipes.guard.instances import stand_still

LONG = trials(1) > 1
PROCESSES, THREADS, KILLS, SECONDS = (8, 125, 2, 10.0) if LONG else (2, 6, 2, 0.0)
"""``KILLS`` and ``SECONDS`` are the least: it goes on until enough slots were claimed, too."""
PROGRAM = "import sys; from proof.storms.slot_claimer import main; main(*sys.argv[1:4], int(sys.argv[4]))"


class Storm:
    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.url, self.folder, self._stack, self._number = url, folder, stack, 0
        self.processes: list[Child] = []
        for _ in range(PROCESSES):
            self.begin()

    def begin(self) -> None:
        self._number += 1
        child = self._stack.enter_context(Child(PROGRAM, self.url, self.folder, f"p{self._number}", THREADS))
        child.expect("works")
        self.processes.append(child)

    def kill_one(self) -> int:
        victim = self.processes.pop(random.randrange(len(self.processes)))
        victim.kill()
        return victim.pid

    def stand_still(self) -> None:
        for process in self.processes:
            stand_still(process.pid)

    def go_on(self) -> None:
        for process in self.processes:
            process.signal(signal.SIGCONT)

    def finish(self) -> None:
        for process in self.processes:
            process.say("over")
        for process in self.processes:
            assert process.wait() == 0

    def claims(self) -> int:
        """How many were believed in so far."""
        return sum(file.read_text().count('"believe"') for file in self.folder.glob("p*.jsonl"))


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
        running = Faults(faults)
        stack.callback(running.heal)
        yield url, running


@pytest.mark.timeout(300)
def test_never_more_than_there_are_none_lost_no_slot_twice_and_the_gauge_is_true_after_every_kill(
    either: str, tmp_path: Path
) -> None:
    spared = "" if either.startswith("sqlite") else "?application_name=onlooker"  # whose session is not ended
    with ExitStack() as stack, holdfast.Client(either + spared) as client:
        slots = client.slots("storm", CAPACITY)
        slots.in_use()
        way, faults = stack.enter_context(nemesis(either))
        storm = Storm(way, tmp_path, stack)
        ends, kills, most = time.monotonic() + SECONDS, 0, 0
        while kills < KILLS or time.monotonic() < ends or storm.claims() <= 4 * PROCESSES:
            dead = storm.kill_one()
            kills += 1
            storm.stand_still()  # the truth holds still to be looked at
            owners = slots.owners()
            most = max(most, len(owners))
            sessions = [
                {"id": owner, "slot": slot, "terminal": owner.startswith(f"{dead}-")} for slot, owner in owners.items()
            ]
            before = dict(slots.invariant_violation_total)
            living = sum(not session["terminal"] for session in sessions)
            counted, still = slots.reconcile(sessions), slots.owners()
            if still == owners:  # nothing expired meanwhile: a process may have been stopped for long
                assert counted == living
                violations = slots.invariant_violation_total["terminal_owner"] - before["terminal_owner"]
                assert violations == len(owners) - living
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
    believed = {event.name for event in read(tmp_path) if event.op == "believe"}
    assert believed <= {f"@slot:storm:{slot}" for slot in range(1, CAPACITY + 1)}
    claims = storm.claims()
    assert claims > 4 * PROCESSES
    others = f", {faults.counts.total()} faults {dict(faults.counts)}" if faults.counts else ""
    sys.stdout.write(f"{claims} claims, {kills} kills{others}, at most {most} in use\n")
    eventually(lambda: purged(either) == NONE, "nothing is left")


def purged(url: str) -> dict[str, int]:
    with holdfast.Client(url) as client, client.lease("broom"):
        pass
    return rows(url)
