"""The benchmarks run: nothing is said here about how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    "names",
    [
        ["sqlite", "refused", "heartbeat"],
        ["pair", "handover"],
        ["lock_pair", "lock_tasks", "lock_handover", "lock_held"],
        ["objects", "sweep"],
        ["operation", "replayed", "operation_batch"],
    ],
    ids=" ".join,
)
def test_quick_benchmarks_measure_every_variant_against_the_first(names: list[str]) -> None:
    done = bench("--quick", "--json", *names)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["machine"]["python"]
    found = report["results"]
    assert all(each["value"] > 0 and each["ratio"] > 0 for each in found)
    by_benchmark = {each["benchmark"]: each for each in reversed(found)}
    assert len(by_benchmark) >= len(names)
    assert all(first["ratio"] == 1.0 for first in by_benchmark.values())


def test_the_table_is_plain_text_without_a_terminal() -> None:
    done = bench("--quick", "sqlite")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "pair, SQLite" in done.stdout
    assert "insert + delete" in done.stdout


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    done = bench("speed")
    assert done.returncode == 2
    assert "no benchmark 'speed': there are pair, sqlite" in done.stderr
