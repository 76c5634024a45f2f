"""Processes that contend for one name, as replicas of a service do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.testing.server import until

COUNT = 6
ROUNDS = 20
TTL = 1.0
ROOT = Path(__file__).parent.parent


class Contenders:
    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "tests.racer", url, "the name", str(TTL)]
        self.processes = [
            subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(COUNT)
        ]
        for process in self.processes:
            assert self.line(process) == "ready"

    @staticmethod
    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def go(self, what: str = "go") -> dict[subprocess.Popen[str], int]:
        """All at once; returns who holds it, with the fence."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{what}\n")
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.flush()
        answers = {process: json.loads(self.line(process)) for process in self.processes}
        return {process: fence for process, fence in answers.items() if fence is not None}

    def kill(self, process: subprocess.Popen[str]) -> None:
        self.processes.remove(process)
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@pytest.fixture
def contenders(url: str) -> Iterator[Contenders]:
    with holdfast.Client(url) as client:
        client.leases.list()
    made = Contenders(url)
    yield made
    for process in made.processes:
        end(process)


def test_of_processes_acquiring_at_once_one_wins_and_of_thieves_one_steals(contenders: Contenders, url: str) -> None:
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
    with holdfast.Client(url) as client:
        until(lambda: client.leases.get("the name") is None, what="the dead holder's lease expires", timeout=30)
    [(thief, higher)] = contenders.go().items()
    assert thief is not winner
    assert higher > fence
