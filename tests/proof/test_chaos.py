"""The short version of `make chaos`: every lane for a while, with the faults of a fixed seed, and the report of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.testing.chaos.places import LANES, playable
from holdfast.testing.checker import check
from tests.children import eventually

ROOT = Path(__file__).parent.parent.parent
SECONDS = 20


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.testing.chaos", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.parametrize("lane", LANES)
def test_no_promise_is_broken_under_fire(lane: str, tmp_path: Path) -> None:
    if lane not in playable():
        pytest.skip("libfaketime is not installed")
    folder = tmp_path / "kept"
    done = chaos("--minutes", str(SECONDS / 60), "--seed", "11", "--lane", lane, "--folder", str(folder), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    [played] = json.loads(done.stdout)["lanes"]
    assert played["ok"]
    assert sum(played["faults"].values()) >= 5
    assert played["figures"]["operations"]["write"]["ok"] > 10
    assert check(folder / lane).ok  # a kept history can be checked again
    page = (folder / "report.html").read_text()
    assert page.count('class="grant"') == played["figures"]["grants"]
    assert not re.search(r"src=|href=|url\(", page), "it needs something from elsewhere"


def test_a_folder_that_holds_a_history_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "sqlite").mkdir()
    done = chaos("--minutes", "0.01", "--lane", "sqlite", "--folder", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "earlier run" in done.stderr


def test_a_kind_of_fault_that_a_lane_does_not_have_is_named(tmp_path: Path) -> None:
    done = chaos("--minutes", "0.01", "--lane", "sqlite", "--faults", "flood", "--folder", str(tmp_path))
    assert done.returncode == 2
    assert "has no fault of these kinds; it has kill, pause, writer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_contender_that_falls_over_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a contender did not expect is a finding, not noise: a run of the dead must not be a success."""
    from holdfast.testing.chaos import lane as lanes

    monkeypatch.setattr(lanes, "NAMES", ["a", "bad\nname"])
    lane: Any = lanes.Lane("sqlite", tmp_path / "kept", seed=1)
    looks = iter(range(100))
    with pytest.raises(RuntimeError, match="fell over"):
        lane.play(lambda: next(looks) > 60)
    assert "control characters" in (tmp_path / "kept" / "contenders.log").read_text()


def test_ctrl_c_ends_it_and_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.testing.chaos", "--minutes", "5", "--lane", "sqlite", "--folder"]
    with subprocess.Popen([*command, str(tmp_path / "kept")], cwd=ROOT, start_new_session=True) as process:
        eventually(lambda: list((tmp_path / "kept").glob("sqlite/contender-*.jsonl")), "contenders are at work")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
