"""Processes that contend for one name, as replicas of a service do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

import holdfast
from tests.children import Child
from tests.raw_session import Raw

COUNT = 4
ROUNDS = 10
TTL = 600.0


class Contenders:
    def __init__(self, processes: list[Child]) -> None:
        self.processes = processes
        for process in self.processes:
            process.expect("ready")

    def go(self, what: str = "go") -> dict[Child, int]:
        """All at once; returns who holds it, with the fence."""
        for process in self.processes:
            process.say(what)
        answers = {process: json.loads(process.line()) for process in self.processes}
        return {process: fence for process, fence in answers.items() if fence is not None}

    def kill(self, process: Child) -> None:
        self.processes.remove(process)
        process.kill()


@pytest.fixture
def contenders(either: str) -> Iterator[Contenders]:
    with holdfast.Client(either) as client:
        client.leases.list()
    program = "import sys; from tests.lease.racer import main; main(*sys.argv[1:])"
    with ExitStack() as stack:
        yield Contenders([stack.enter_context(Child(program, either, "the name", TTL)) for _ in range(COUNT)])


def test_of_processes_acquiring_at_once_one_wins_and_of_thieves_one_steals(contenders: Contenders, either: str) -> None:
    """Also: an active lease cannot be stolen, and the thief's fence is higher than that of the dead holder."""
    fence = 0
    for _ in range(ROUNDS):
        [(winner, higher)] = contenders.go().items()
        assert higher > fence, "released and acquired again at once, by whomever"
        assert contenders.go("release") == {}
        fence = higher
    [(winner, fence)] = contenders.go().items()
    assert contenders.go() == {winner: fence}, "an active lease cannot be stolen"
    contenders.kill(winner)
    assert contenders.go() == {}, "nor one whose holder is dead, before it expires"
    with closing(Raw(either)) as raw:
        raw.pass_time(TTL)
    [(thief, higher)] = contenders.go().items()
    assert thief is not winner
    assert higher > fence
