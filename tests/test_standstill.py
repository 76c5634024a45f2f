"""tests.standstill: a failure says how long the machine stood still, and a test about time can subtract it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.standstill import Standstill

FAILS = """
import ctypes

def test_it():
    ctypes.PyDLL(None).usleep(300_000)  # keeps the interpreter's lock: no thread of this process runs
    assert False
"""


def test_pauses_are_counted_from_the_moment_asked_for() -> None:
    machine = Standstill()
    assert machine.report(0.0) == "The machine never stood still for longer than 0.05 s."
    machine.note(due=10.0, now=10.04)  # ordinary scheduling
    machine.note(due=11.0, now=12.5)
    machine.note(due=13.0, now=13.25)
    assert machine.pauses(since=0.0) == [1.5, 0.25]
    assert machine.seconds(since=12.5) == 0.25
    assert machine.report(0.0) == "The machine stood still 2 times, for 1.75 s in all, 1.50 s at the longest."
    assert machine.report(12.5) == "The machine stood still once, for 0.25 s in all, 0.25 s at the longest."


def test_a_failure_says_how_long_the_machine_stood_still(tmp_path: Path) -> None:
    (tmp_path / "test_fails.py").write_text(FAILS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.standstill", "-p", "no:cacheprovider", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=240, check=False,
    )  # fmt: skip
    assert "1 failed" in done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith("The machine")]
    assert line.startswith("The machine stood still"), line
